"""What the compiler makes of the kernels for a Hopper GPU; needs no GPU, only Triton's assembler.

A kernel that reads two bytes a thread, or that spills registers to memory, is right and slow: no
other test would notice.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_logprobs.bench.ahead import build
from mcore_logprobs.kernels import (
    triton_distill,
    triton_distill_grad,
    triton_entries,
    triton_finish,
    triton_grad,
    triton_sides,
    triton_stats,
)
from mcore_logprobs.kernels.distill import KINDS, Side
from mcore_logprobs.kernels.stats import RowSpec
from mcore_logprobs.kernels.triton_common import field_constants, transform_constants
from mcore_logprobs.kernels.triton_launch import Launcher

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

POINTERS = {
    "own_ptr": "*bf16",
    **dict.fromkeys(("bias_ptr", "student_bias_ptr", "teacher_bias_ptr"), "*bf16"),
}
CAP = {"logit_scale": 0.5, "softcap": 3.0, "temperature": 0.7}
BIAS = torch.empty(1)
PLAIN, CAPPED = (
    {
        name: on
        for name, on in transform_constants(spec, False, False, True).items()
        if name.startswith("HAS_")
    }
    for spec in (RowSpec(1), RowSpec(1, **CAP))
)


def _build(
    kernel: Any, logits: str, out: str, constants: dict[str, Any], bias: bool = False, **others: str
) -> str:
    """The PTX of a kernel for aligned rows that are not split; fails if it spills registers."""
    absent = [name for name in kernel.arg_names if name.endswith("temperature_ptr")]
    if not bias:
        absent += [name for name in kernel.arg_names if name.endswith("bias_ptr")]
    constants = {"splits": 1, **dict.fromkeys(absent), **constants}
    pointers = {"logits_ptr": "*" + logits, "out_ptr": "*" + out, **POINTERS, **others}
    built = build(kernel, constants, pointers)
    assert built.spills == 0
    assert built.registers <= 128  # 16 warps of a multiprocessor at the least
    return built.ptx


def _wide(ptx: str, direction: str) -> int:
    """How many 16-byte loads ("ld") or stores ("st") of global memory there are."""
    return len(re.findall(rf"{direction}\.global\.v4\.b32", ptx))


@pytest.mark.parametrize("logits", ["bf16", "fp32"])
@pytest.mark.parametrize("transform", [PLAIN, CAPPED], ids=["plain", "softcap"])
def test_statistics_read_sixteen_bytes_at_a_time(logits, transform):
    lanes = 8 if logits == "bf16" else 4
    constants = {
        "LANES": lanes, "GROUPS": 512, "threshold_ptr": None, "STAGES": 1,
        "PREFETCH": False,
        **field_constants(RowSpec(1, entropy=True), *triton_stats.STORED),
    }  # fmt: skip
    ptx = _build(triton_stats.stats_kernel, logits, "fp32", {**transform, **constants})
    # One tile of whole columns; the masked last tile may read as it likes.
    assert _wide(ptx, "ld") == 512 // 128
    # Threads meet only after the loop: no barrier between one wide load and the next.
    loop = ptx[: ptx.rindex("ld.global.v4.b32")]
    assert "bar.sync" not in loop
    assert "shfl" not in loop


def test_every_launch_is_a_launcher_s_which_asks_for_fused_multiply_adds():
    launches = [
        (file.name, call.lineno, [keyword.arg for keyword in call.keywords])
        for file in Path(triton_stats.__file__).parent.glob("triton_*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
        if any(keyword.arg == "num_warps" for keyword in call.keywords)
    ]
    assert [name for name, *_ in launches] == ["triton_launch.py"], launches
    assert Launcher(triton_stats.stats_kernel)._options == {"enable_fp_fusion": True}


def test_targets_are_localized():
    for absent in (("logits_ptr", "own_ptr"), ("keep_ptr",)):
        constants = {"BLOCK": 1024, **dict.fromkeys(absent)}
        types = {"keep_ptr": "*i1", "own_ptr": "*fp32"}
        _build(triton_finish.localize_kernel, "bf16", "fp32", constants, **types)


@pytest.mark.parametrize(("logits", "out"), [("bf16", "bf16"), ("fp32", "fp32"), ("fp32", "bf16")])
def test_the_gradient_reads_and_writes_sixteen_bytes_at_a_time(logits, out):
    constants = {"TILE": 4096, "TILES": 4, "ENTROPY": True, "SMOOTHING": False, "HAS_SLOPE": True}
    constants |= triton_grad.coefficient_constants(RowSpec(1, entropy=True))
    ptx = _build(triton_grad.grad_kernel, logits, out, {**PLAIN, **constants})
    bytes_of = {"bf16": 2, "fp32": 4}
    assert _wide(ptx, "ld") == 4096 * bytes_of[logits] // 16 // 128
    # Twice: the tile, and the zeros of a row without coefficients.
    assert _wide(ptx, "st") >= 2 * 4096 * bytes_of[out] // 16 // 128


BYTES = {"bf16": 2, "fp32": 4}
TILES = triton_distill_grad._GRAD_TILE
PAIRS = [
    *(("forward", *pair) for pair in (("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32"))),
    *((kind, "bf16", "bf16") for kind in ("reverse", "jsd", "cross_entropy")),
]


def _sides(
    student: str, teacher: str, bias: Any = None, **spec: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """The constants of both sides' transformation, and their pointers' types."""
    side = Side(torch.empty(1, 1), RowSpec(1, **spec), bias)
    both = dict(triton_sides.sides_constants(side, side))
    constants = {name: both[name] for name in ("STUDENT", "TEACHER")}
    return constants, {"student_ptr": "*" + student, "teacher_ptr": "*" + teacher}


@pytest.mark.parametrize(("kind", "student", "teacher"), PAIRS)
def test_two_sides_are_read_sixteen_bytes_at_a_time(kind, student, teacher):
    sides, pointers = _sides(student, teacher, temperature=0.7)
    lanes = 16 // min(BYTES[student], BYTES[teacher])
    shape = {"LANES": lanes, "GROUPS": 256}
    kernels = [(triton_distill.pair_stats_kernel, {"KIND": KINDS.index(kind)})]
    if kind == "jsd":
        kernels.append((triton_distill.jsd_kernel, {}))
    for kernel, constants in kernels:
        ptx = _build(kernel, "", "fp32", {**sides, **shape, **constants}, **pointers)
        assert _wide(ptx, "ld") == 256 * lanes * (BYTES[student] + BYTES[teacher]) // 16 // 128
        loop = ptx[: ptx.rindex("ld.global.v4.b32")]
        assert "bar.sync" not in loop
        assert "shfl" not in loop


@pytest.mark.parametrize(("kind", "student", "teacher"), PAIRS)
def test_their_gradient_reads_and_writes_sixteen_bytes_at_a_time(kind, student, teacher):
    sides, pointers = _sides(student, teacher, temperature=0.7)
    constants = {"TILE": TILES[kind], "TILES": 8, "KIND": KINDS.index(kind), **sides}
    ptx = _build(triton_distill_grad.pair_grad_kernel, "", student, constants, **pointers)
    assert _wide(ptx, "ld") == TILES[kind] * (BYTES[student] + BYTES[teacher]) // 16 // 128
    assert _wide(ptx, "st") >= 2 * TILES[kind] * BYTES[student] // 16 // 128


@pytest.mark.parametrize("kind", ["forward", "jsd"])
def test_two_sides_with_softcap_and_bias_spill_nothing(kind):
    sides, pointers = _sides("fp32", "bf16", BIAS, **CAP)
    constants = {"TILE": TILES[kind], "TILES": 8, "KIND": KINDS.index(kind), **sides}
    kernel = triton_distill_grad.pair_grad_kernel
    _build(kernel, "", "bf16", constants, bias=True, **pointers)


def test_entries_and_biases_are_built():
    # A bias is loaded with a mask in the last tile and without one in the others.
    for spec, kernel, constants in (
        (
            RowSpec(1, **CAP),
            triton_entries.entries_kernel,
            {"BLOCK": 64, "OTHERS": 16, "ENTROPY": True, "WEIGHT": 0, "MOMENT": 1},
        ),
        (
            RowSpec(1),
            triton_stats.stats_kernel,
            {
                "LANES": 8, "GROUPS": 512, "STAGES": 1, "PREFETCH": False, "threshold_ptr": None,
                **field_constants(RowSpec(1, entropy=True), *triton_stats.STORED),
            },
        ),
    ):  # fmt: skip
        transform = transform_constants(spec, True, False, True)
        transform = {name: on for name, on in transform.items() if name.startswith("HAS_")}
        _build(kernel, "bf16", "fp32", {**transform, **constants}, bias=True)
