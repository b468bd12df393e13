"""What calls launch on a Hopper GPU or an AMD one, and what the compiler makes of it; needs no GPU.

A kernel that reads two bytes a thread, or that spills registers to memory, is right and slow: no
other test would notice.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from benchmarks import ahead, amd, launches
from benchmarks.ahead import Built, Case, cases, launched_code
from benchmarks.launches import AMD_TARGETS, CALLS, count, dry_launches, one_of_ranks
from mcore_logprobs import (
    linear_policy_loss,
    linear_token_stats,
    vocab_parallel_kl_div,
    vocab_parallel_token_stats,
)
from mcore_logprobs.kernels import triton as triton_backend
from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.pairs import PairSpec
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec
from mcore_logprobs.kernels.triton.codes import decode_kernel, encode_kernel
from mcore_logprobs.kernels.triton.gradient import grad_kernel
from mcore_logprobs.kernels.triton.pair_gradient import pair_grad_kernel
from mcore_logprobs.kernels.triton.pair_statistics import pair_stats_kernel, pair_sums_kernel
from mcore_logprobs.kernels.triton.scaling import scale_kernel
from mcore_logprobs.kernels.triton.statistics import stats_kernel
from tests.kernels.common import EVERYTHING, make_chunk
from tests.ops import EVERY_STATISTIC, WITH_A_GRADIENT

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)


def _built_by_day(case: Case) -> bool:
    """The most of each: public operations below launch the least."""
    kind = case.name.rpartition(" ")[2]
    return case.what == "softcap" and (case.sides == 1 or kind in ("forward", "jsd"))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.name}, {case.what}, {case.dtypes}",
            marks=() if _built_by_day(case) else pytest.mark.night,
        )
        for case in cases(1 << 14)
    ],
)
def test_whole_tiles_are_read_and_written_sixteen_bytes_at_a_time(case: Case) -> None:
    built = case.built
    spilt = not AFTER_3_7 and case.name == "pair sums jsd" and case.what == "softcap"
    assert_fit(built, spills=2 if spilt else 0)
    assert built.registers <= (96 if case.sides == 1 else 112)
    assert built.wide("LD") >= case.sides
    assert not built.narrow("LD")
    assert not built.narrow("ST")
    if "gradient" in case.name:
        assert built.wide("ST") >= 1
        assert built.loads_in_flight >= 2
    elif case.sides == 1:
        assert built.covered == 1.0
        # Below what a read of two bytes an element leaves time for, but for a tanh.
        assert case.what == "softcap" or case.instructions(built) < 15.6


# What torch 2.13 brings on a GPU: it takes four registers more for statistics on an AMD GPU. Up to
# it two are spilt in JSD's second pass with a softcap (docs/kernels.md).
TRITON_3_7 = triton.__version__.startswith("3.7.")
AFTER_3_7 = tuple(int(x) for x in triton.__version__.split(".")[:2]) > (3, 7)


def assert_fit(built: Built, *, spills: int = 0) -> None:
    """No spills, four blocks a multiprocessor, and 16-byte accesses also where a row ends."""
    assert built.spills <= spills
    assert built.blocks >= 4
    # A row's own numbers; the last 16 columns, at most one a thread and group.
    loads, stores = built.narrow_anywhere
    assert loads <= 18
    assert stores <= len(EVERYTHING.fields)


# ---- public operations ----

WIDTHS = {16032: 16032, 16160: 16160, 19008: 18950, 37984: 37984}  # V/TP, true vocabulary


def _calls(width: int, valid: int) -> dict[str, Callable[[], object]]:
    """Public operations on shards of a GPU's dtypes, forward and backward."""
    logits = torch.zeros(2, 3, width, dtype=torch.bfloat16, requires_grad=True)
    teacher, target = torch.zeros(2, 3, width), torch.zeros(2, 3, dtype=torch.int64)
    hidden = torch.zeros(6, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(width, 8, dtype=torch.bfloat16, requires_grad=True)
    shared: Any = {"vocab_size": valid, "backend": "triton"}

    def differentiated(*results: Tensor | None, by: Tensor) -> None:
        torch.autograd.grad([x.sum() for x in results if x is not None], by)

    def statistics(**wanted: Any) -> None:
        found = vocab_parallel_token_stats(logits, target, **wanted, **shared)
        differentiated(*(getattr(found, name) for name in WITH_A_GRADIENT), by=logits)

    def divergence(kind: Any) -> None:
        differentiated(vocab_parallel_kl_div(logits, teacher, kind=kind, **shared), by=logits)

    def fused() -> None:
        found = linear_token_stats(hidden, weight, target.view(6), entropy=True, **shared)
        differentiated(found.logprobs, found.entropy, by=hidden)

    return {
        "logprobs": statistics,
        "everything": partial(statistics, **EVERY_STATISTIC, label_smoothing=0.1, temperature=0.7),
        "softcap": partial(statistics, entropy=True, softcap=30.0),
        "forward": partial(divergence, "forward"),
        "jsd": partial(divergence, "jsd"),
        "fused": fused,
    }


@pytest.mark.parametrize("name", _calls(16, 16))
def test_what_public_operations_launch(name: str) -> None:
    found = {}
    for width, valid in WIDTHS.items():
        found[width] = launched_code(_calls(width, valid)[name])
        for _, built in found[width]:
            assert_fit(built)
    kernels = {width: dict(launches) for width, launches in found.items()}
    assert all(built == kernels[19008] for built in kernels.values())  # one variant for all
    assert len(kernels[19008]) == (3 if name == "jsd" else 2)


def test_no_call_of_a_run_compiles_a_variant() -> None:
    # What changes from step to step: which rows there are, how many, and numbers.
    logits = torch.zeros(9, 40, 1040, dtype=torch.bfloat16)
    target, warm = torch.zeros(9, 40, dtype=torch.int64), torch.ones(9, 40)
    hidden, weight = torch.zeros(40, 16, requires_grad=True), torch.zeros(1040, 16)
    half = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    upstream = torch.ones(20)
    kernels = (
        *(stats_kernel, grad_kernel, pair_stats_kernel, pair_sums_kernel, pair_grad_kernel),
        *(encode_kernel, decode_kernel, scale_kernel),
    )

    def step(number: int) -> None:
        shared: Any = {"backend": "triton", "vocab_size": 1030}
        rows, cut = 1 + number % 8, slice(number, 40 - number % 7)
        some = logits[:rows, cut].detach().requires_grad_()
        softcap = 20.0 + number
        for temperature in (1.0 + number / 5, warm[:rows, cut]):
            how: Any = shared | {"temperature": temperature, "softcap": softcap}
            stats = vocab_parallel_token_stats(some, target[:rows, cut], entropy=True, **how)
            stats.logprobs.sum().backward()
        value = vocab_parallel_kl_div(
            some, logits[:rows, cut], kind="jsd", beta=0.1 + number / 40, **shared
        )
        value.sum().backward()
        fused = linear_token_stats(
            hidden[cut], weight, target[0, cut], logit_scale=1.0 / softcap, **shared
        )
        fused.logprobs.sum().backward()
        rounded = linear_token_stats(
            half[0][cut], half[1], target[0, cut], saved_bytes=1 << 20, **shared
        )
        rounded.logprobs.sum().backward()
        loss, _ = linear_policy_loss(
            hidden[cut], weight, target[0, cut], lambda logprobs, _: -logprobs, **shared
        )
        loss.backward(upstream[number])

    compiled: list[str] = []
    with dry_launches(), pytest.MonkeyPatch.context() as patch:
        for kernel in kernels:
            kernel.device_caches.clear()  # of what other tests launched
        patch.setattr(
            triton.knobs.runtime,
            "jit_post_compile_hook",
            lambda *_, key, **__: compiled.append(key),
        )
        step(0)
        first = list(compiled)
        assert len(first) >= len(kernels)
        for number in range(1, 20):
            step(number)
    assert compiled == first


def _rare() -> dict[str, Callable[[], object]]:
    """Calls that launch what no `Case` does, by the names of their kernels."""
    logits = torch.zeros(16, 4096, dtype=torch.bfloat16)
    out, row = torch.zeros_like(logits), torch.zeros(16)
    columns, norm = torch.zeros(16, 3, dtype=torch.int64), torch.zeros(4, 16)
    how = {"bias": True, "rows": True, "softcap": 3.0, "logit_scale": 0.5}
    chunk, exact = make_chunk(logits, 4000, **how), make_chunk(logits.float(), 4000, **how)
    coef = torch.zeros(len(EVERYTHING.coefficients), 16)
    entries = GradientTerms(columns, columns.float(), row, coef, EVERYTHING)
    alone = GradientTerms(columns, columns.float(), None, None, StatsSpec())
    both = (chunk, exact, norm, row, row)
    return {
        "stats_kernel": lambda: triton_backend.stats(
            chunk, columns[:, 0], EVERYTHING, threshold=torch.stack([row, row])
        ),
        "grad_kernel entries_kernel": lambda: triton_backend.grad(chunk, entries, out=out),
        "entries_kernel": lambda: triton_backend.grad(chunk, alone, out=out),
        "pair_grad_kernel": lambda: triton_backend.pair_grad(*both, PairSpec("jsd"), out=out),
    }


@pytest.mark.night  # eight seconds of building where Triton's cache is empty
def test_what_is_rare_is_built_without_spills() -> None:
    for names, call in _rare().items():
        built = launched_code(call)
        assert " ".join(name for name, _ in built) == names
        assert all(code.spills == 0 for _, code in built)


def test_a_capped_logit_has_a_rounding_of_its_own() -> None:
    """Fused with what is subtracted from it, the largest logit of a row would not be 0 from it."""
    for case in cases(1 << 14):
        softcap = case.what == "softcap" and case.dtypes == "bf16" and "gradient" not in case.name
        if not (softcap and _built_by_day(case)):
            continue
        with dry_launches() as launched:
            case.call()
        ((_, assembly),) = launched.assembly.items()
        lines = re.findall(r"((?:fma|mul)\S*\.f32) +\t?(.*);", assembly.replace("\t", " "))
        operands = [[x.strip() for x in rest.split(",")] for _, rest in lines]
        softcaps = {x[2] for x in operands if x[3:] == ["0f00000000"]}
        assert len(softcaps) == case.sides, case.name
        fused = [x for x in operands if softcaps & set(x[1:3]) and x[3:] != ["0f00000000"]]
        assert fused == [], case.name


def test_every_launch_asks_for_fused_multiply_adds() -> None:
    found = [
        (file.name, [keyword.arg for keyword in call.keywords])
        for file in Path(triton_backend.__file__).parent.glob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
        if ast.unparse(call.func.value) == "kernel"
    ]
    ((name, keywords),) = found  # the one that all others go through
    assert name == "common.py"
    assert "enable_fp_fusion" in keywords


# ---- counts, and the commands that print them ----


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
    assert ahead.main(["--kernel", "gradient jsd", "--width", "8192"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()[1:]
    assert "instr/elem" in head
    assert len(lines) == 2
    for line in lines:
        *_, instructions, registers, blocks, spills, _, _, in_flight, _, ld, st = line.split()
        assert 5.0 < float(instructions) < 128  # both sides, a mixture and a tanh
        assert 16 <= int(registers) <= 128
        assert (int(blocks) >= 4, int(spills), int(in_flight) >= 2) == (True, 0, True)
        assert int(ld) + int(st) <= 20  # narrow ones


def test_the_measure_of_loads_in_flight() -> None:
    loop = (
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "LDG.E.128 R8, desc[UR4][R2.64+0x800]",
        "FADD R12, R4, R13",
        "FADD R12, R11, R12",
        "@P0 BRA 0x100",
    )
    built = Built(loop, loop, 16)
    assert (built.loads_in_flight, built.covered) == (2, 3 / 5)
    assert (built.wide("LD"), built.narrow("LD"), built.wide("ST"), built.spills) == (2, 0, 0, 0)
    code = ("STL [R1], R2", "@!P1 LDL R2, [R1]", "LDG.E R3, [R2]")
    assert Built(code, code, 16).spills == 2
    assert Built(code, code, 16).narrow("LD") == 1


def _encoded() -> None:
    chunk = Chunk(torch.empty(4, 6400), 6400)
    triton_backend.encode(chunk, out=torch.empty(4, 6400, dtype=torch.int16))


def _decoded() -> None:
    codes = torch.empty(4, 6400, dtype=torch.int16)
    triton_backend.decode(codes, torch.empty(2, 4), out=torch.empty(4, 6400))


def _scaled(add: bool) -> None:
    out = torch.empty(6400, dtype=torch.float32 if add else torch.bfloat16)
    triton_backend.scale(torch.empty(6400), torch.empty(()), out=out, add=add)


@pytest.mark.night
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize(
    "call",
    [_encoded, _decoded, partial(_scaled, False), partial(_scaled, True)],
    ids=["encode", "decode", "scale", "add"],
)
def test_codes_and_scaling_are_wide_and_spill_nothing(
    call: Callable[[], None], target: str
) -> None:
    ((_, built),) = launched_code(call, target)
    assert built.spills == 0
    assert max(built.narrow_anywhere) <= 2  # a row's or the call's own numbers


# ---- AMD ----


@pytest.mark.parametrize(
    ("target", "case"),
    [
        pytest.param(
            target,
            case,
            id=f"{target}, {case.name}, {case.what}, {case.dtypes}",
            marks=()
            if target == "gfx942" and _built_by_day(case) and "fp32" not in case.dtypes
            else pytest.mark.night,
        )
        for target in AMD_TARGETS
        for case in cases(1 << 14)
        if case.what in ("softcap", "logprob")
    ],
)
def test_kernels_fit_an_amd_gpu(target: str, case: Case) -> None:
    ((_, built),) = amd.assembled(case.call, target)
    assert built.spills == 0
    assert built.registers <= 128
    # A warp of 64 takes 8 bytes a thread of the bf16 tiles of two sides.
    wide = 8 if case.sides == 2 and "gradient" in case.name else 16
    loads, stores = built.accesses("load"), built.accesses("store")
    assert loads[wide] >= case.sides
    assert sum(count for size, count in loads.items() if size < 8) <= 8  # a row's own numbers
    if "gradient" in case.name:
        assert stores[wide] >= 1
    assert sum(count for size, count in stores.items() if size < 8) <= 8


@pytest.mark.night
@pytest.mark.parametrize("target", AMD_TARGETS)
def test_what_is_rare_fits_an_amd_gpu(target: str) -> None:
    rare = {"encode_kernel": _encoded, "decode_kernel": _decoded, **_rare()}
    rare |= {"scale_kernel": partial(_scaled, True), "scale_kernel ": partial(_scaled, False)}
    for names, call in rare.items():
        launched = amd.assembled(call, target)
        assert " ".join(name for name, _ in launched) == names.strip()
        for name, built in launched:
            assert built.spills == 0
            assert built.registers <= (172 if TRITON_3_7 and name == "stats_kernel" else 168)


def test_the_command_prints_what_the_compiler_made_for_amd(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert amd.main(["--kernel", "gradient jsd", "--width", "8192"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()[1:]
    assert "regs" in head
    assert [line.split("bf16")[0].split() for line in lines] == [
        ["pair", "gradient", "jsd", "logprob"],
        ["pair", "gradient", "jsd", "softcap"],
    ]
    for line in lines:
        registers, spills, *_ = line.split("bf16")[1].split()
        assert (16 <= int(registers) <= 128, int(spills)) == (True, 0)


def test_the_measure_of_an_amd_kernel() -> None:
    text = """
        global_load_dwordx4 v[0:3], v4, s[0:1]
        buffer_load_ushort v5, v6, s[8:11], 0 offen
        global_store_short_d16_hi v0, v5, s[0:1]
        .private_segment_fixed_size: 8
      - .vgpr_count:     60
        .vgpr_spill_count: 2
    """
    built = amd.Assembly(text)
    assert (built.registers, built.spills) == (60, 10)
    assert (built.accesses("load"), built.accesses("store")) == ({16: 1, 2: 1}, {2: 1})
