"""What a call launches on a GPU, counted without one; and the table of code compiled ahead."""

from __future__ import annotations

import os

import pytest

from benchmarks import ahead, launches
from benchmarks.launches import CALLS, count, one_of_ranks
from mcore_logprobs.kernels.pairs import KINDS

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_logits_are_read_once_each_way(name: str, tp: int) -> None:
    with one_of_ranks(tp) as group:
        forward, backward = count(CALLS[name], rows=4, width=4 * 4096, group=group)
    pair = "pair_" if "kl_div" in name else ""
    jsd, ranked = "jsd" in name, "rank" in name or "everything" in name
    expected = {f"{pair}stats_kernel": 1}
    assert dict(forward.triton) == expected | ({"pair_sums_kernel": 1} if jsd else {})
    assert forward.collectives.total() == (tp > 1) * (1 + ranked + jsd)
    if name == "target_rank":
        assert backward is None
        return
    assert backward is not None
    assert dict(backward.triton) == {f"{pair}grad_kernel": 1}
    assert not backward.collectives


def test_the_command_prints_counts_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert launches.main(["--rows", "4", "--width", "4096", "--tp", "1", "--calls", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in CALLS:
        assert sum(line.startswith(name + " ") for line in lines) == 1, name


def test_the_command_prints_what_the_compiler_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert ahead.main(["--kernel", "gradient", "--width", "8192"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()[1:]
    assert "instr/elem" in head
    assert len(lines) == 9 + 2 * len(KINDS)
    for line in lines:
        *_, instructions, registers, blocks, spills, _, _, in_flight, _, ld, st = line.split()
        assert 5.0 < float(instructions) < 128  # most: both sides, a mixture and a tanh
        assert 16 <= int(registers) <= 128
        assert int(blocks) >= 4
        assert int(spills) == 0
        assert int(in_flight) >= 2
        assert int(ld) + int(st) <= 20  # narrow ones


def test_the_measure_of_loads_in_flight() -> None:
    loop = (
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "LDG.E.128 R8, desc[UR4][R2.64+0x800]",
        "FADD R12, R4, R13",
        "FADD R12, R11, R12",
        "@P0 BRA 0x100",
    )
    built = ahead.Built(loop, loop, 16)
    assert (built.loads_in_flight, built.covered) == (2, 3 / 5)
    assert (built.wide("LD"), built.narrow("LD"), built.wide("ST"), built.spills) == (2, 0, 0, 0)
    code = ("STL [R1], R2", "@!P1 LDL R2, [R1]", "LDG.E R3, [R2]")
    assert ahead.Built(code, code, 16).spills == 2
    assert ahead.Built(code, code, 16).narrow("LD") == 1
