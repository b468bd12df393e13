"""What a call launches on a GPU, counted without one; and the table of code compiled ahead."""

from __future__ import annotations

import os

import pytest

from mcore_logprobs.bench import ahead, main
from mcore_logprobs.bench.launches import CALLS, _ranks, count
from tests.helpers import poison

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)


@pytest.fixture(autouse=True)
def plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory as it is elsewhere: to fill it with NaN is a launch too."""
    for owner, name in poison._FACTORIES:
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("tp", [1, 2])
def test_small_calls_take_few_launches(name: str, tp: int) -> None:
    with _ranks(tp) as group:
        # So few rows that each is split over several programs, whose parts are merged.
        forward, backward = count(CALLS[name], rows=4, width=4 * 4096, group=group)
    pair = "pair_" if "kl_div" in name else ""
    expected = [f"{pair}stats_kernel", f"{pair}finish_kernel"]
    if tp > 1 or "segments" in name:
        expected.append(f"{pair}merge_kernel")
    jsd = "jsd" in name
    if jsd:
        expected += ["jsd_kernel", "jsd_finish_kernel"]
    ranked = tp > 1 and ("rank" in name or "everything" in name)
    if ranked:
        expected.append("localize_kernel")
    assert dict(forward.triton) == dict.fromkeys(expected, 1)
    # The parts of the mixture's sums are added before they are reduced.
    assert dict(forward.torch) == ({"aten::sum": 1} if jsd and tp > 1 else {})
    assert forward.collectives.total() == (tp > 1) * (1 + ranked + jsd)
    if name == "target_rank":
        assert backward is None
        return
    assert backward is not None
    assert (dict(backward.triton), backward.torch) == ({f"{pair or 'results_'}grad_kernel": 1}, {})
    assert not backward.collectives


def test_the_command_prints_counts_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launches", "--rows", "4", "--width", "4096", "--tp", "1", "--calls", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in CALLS:
        assert sum(line.startswith(name + " ") for line in lines) == 1, name


def test_the_command_prints_what_the_compiler_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ahead", "--kernel", "results"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()[1:]
    assert "instr/elem" in head
    for line in lines:
        *_, instructions, registers, spills, _, _, in_flight, _ = line.split()
        # Below the budget of a read and a write of two bytes; softcap has it used up.
        assert 5.0 < float(instructions) < 31.2
        assert 16 <= int(registers) <= 128
        assert int(spills) == 0
        assert int(in_flight) >= 2


def test_the_measure_of_loads_in_flight() -> None:
    loop = (
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "LDG.E.128 R8, desc[UR4][R2.64+0x800]",
        "FADD R12, R4, R13",
        "FADD R12, R11, R12",
        "@P0 BRA 0x100",
    )
    built = ahead.Built("", loop, loop, 16)
    assert (built.loads_in_flight, built.covered) == (2, 3 / 5)
    assert (built.wide("LDG"), built.wide("STG"), built.spills) == (2, 0, 0)
    spilled = ahead.Built("", ("STL [R1], R2", "@!P1 LDL R2, [R1]", "LDG.E R3, [R2]"), loop, 16)
    assert spilled.spills == 2
