"""The gradient of divergences between two sides of logits, as a Triton kernel.

`kernels.distill` has the formulas. One pass reads both sides and writes the student's gradient in
its dtype: nothing else of the logits' size is made.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.distill import KINDS, PairSpec, Side
from mcore_logprobs.kernels.triton_common import (
    INTERPRETED,
    ceil_div,
    device_of,
    exp,
    positional,
    power_of_2,
    with_unit_stride,
)
from mcore_logprobs.kernels.triton_launch import Launcher
from mcore_logprobs.kernels.triton_sides import (
    CROSS_ENTROPY,
    FORWARD,
    JSD,
    REVERSE,
    ROW_TEMPERATURE,
    SOFTCAP,
    load_side,
    log_probs,
    over_mixture,
    side_row,
    sides_constants,
    sides_tensors,
)

__all__ = ["pair_grad", "pair_grad_kernel"]

# Columns a tile of the gradient, fewer where a column takes more registers; columns a program.
_GRAD_TILE = {"forward": 2048, "reverse": 2048, "cross_entropy": 2048, "jsd": 1024}
_GRAD_COLUMNS = 16384
_NUM_WARPS = 4


@triton.jit
def _write_tile(
    student, teacher, student_bias_ptr, teacher_bias_ptr, norms, inner, factor, beta,
    out_row_ptr, start, valid, width,
    MASKED: tl.constexpr, TILE: tl.constexpr, STUDENT: tl.constexpr, TEACHER: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """`kernels.distill.pair_grad` of one tile; `factor` is all of it that the row shares."""
    columns = start + tl.arange(0, TILE)
    s, capped = load_side(student, student_bias_ptr, columns, valid, MASKED, STUDENT)
    t, _ = load_side(teacher, teacher_bias_ptr, columns, valid, MASKED, TEACHER)
    top_s, log_s, top_t, log_t = norms
    if KIND == FORWARD or KIND == CROSS_ENTROPY:  # noqa: SIM109
        p = exp((s - top_s) - log_s)
        q = exp((t - top_t) - log_t)
        grad = p - q
    else:
        logp = log_probs(s, top_s, log_s)
        logq = log_probs(t, top_t, log_t)
        if KIND == REVERSE:
            over = logp - logq
        else:
            over, _ = over_mixture(logp, logq, beta)
        grad = exp(logp) * (over - inner)  # inner is NaN where either side is
    grad = grad * factor
    if STUDENT // SOFTCAP:
        grad = grad * (1.0 - capped * capped)
    if MASKED:
        grad = tl.where(columns < valid, grad, 0.0).to(out_row_ptr.dtype.element_ty)
        tl.store(out_row_ptr + columns, grad, mask=columns < width)
    else:
        tl.store(out_row_ptr + columns, grad.to(out_row_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["valid", "width", "splits", "upstream_stride"])
def pair_grad_kernel(
    student_ptr,  # [n, v]
    teacher_ptr,  # [n, v]
    student_bias_ptr,  # [v]
    teacher_bias_ptr,
    student_temperature_ptr,  # [n]
    teacher_temperature_ptr,
    student_norm_ptr,  # [2, n]
    teacher_norm_ptr,  # [2, n]
    inner_ptr,  # [n]
    upstream_ptr,  # [n], any stride
    kept_ptr,  # [n], 0 in rows that get no gradient; None: none
    out_ptr,  # [n, v]; may be student_ptr
    valid,
    width,
    student_stride,
    teacher_stride,
    student_norm_stride,
    teacher_norm_stride,
    upstream_stride,
    out_stride,
    splits,
    slope,
    student_scale,
    student_softcap,
    student_temperature,
    teacher_scale,
    teacher_softcap,
    teacher_temperature,
    beta,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    STUDENT: tl.constexpr,
    TEACHER: tl.constexpr,
    KIND: tl.constexpr,
):
    """The gradient of one row's columns `[split * TILES * TILE, ...)`."""
    program = tl.program_id(0)
    row = program // splits
    start = (program % splits) * (TILES * TILE)
    stop = tl.minimum(start + TILES * TILE, width)
    out_row_ptr = out_ptr + row.to(tl.int64) * out_stride
    upstream = tl.load(upstream_ptr + row.to(tl.int64) * upstream_stride)
    if kept_ptr is not None:
        upstream = tl.where(tl.load(kept_ptr + row) != 0.0, upstream, 0.0)
    if upstream != 0.0:
        student = side_row(
            student_ptr, student_temperature_ptr, row, student_stride,
            student_scale, student_softcap, student_temperature, STUDENT,
        )  # fmt: skip
        teacher = side_row(
            teacher_ptr, teacher_temperature_ptr, row, teacher_stride,
            teacher_scale, teacher_softcap, teacher_temperature, TEACHER,
        )  # fmt: skip
        top_s = tl.load(student_norm_ptr + row)
        log_s = tl.load(student_norm_ptr + student_norm_stride + row)
        top_t = tl.load(teacher_norm_ptr + row)
        log_t = tl.load(teacher_norm_ptr + teacher_norm_stride + row)
        inner = tl.load(inner_ptr + row)
        factor = upstream * slope
        if (ROW_TEMPERATURE & STUDENT) != 0:
            factor = factor / tl.load(student_temperature_ptr + row).to(tl.float32)
        if KIND == JSD:
            factor = factor * (1.0 - beta)

        norms = (top_s, log_s, top_t, log_t)
        whole = start + tl.maximum(tl.minimum(stop, valid) - start, 0) // TILE * TILE
        for at in range(start, whole, TILE):
            _write_tile(
                student, teacher, student_bias_ptr, teacher_bias_ptr, norms, inner, factor, beta,
                out_row_ptr, at, valid, width,
                False, TILE, STUDENT, TEACHER, KIND,
            )  # fmt: skip
        for at in range(whole, stop, TILE):
            _write_tile(
                student, teacher, student_bias_ptr, teacher_bias_ptr, norms, inner, factor, beta,
                out_row_ptr, at, valid, width,
                True, TILE, STUDENT, TEACHER, KIND,
            )  # fmt: skip
    else:
        # Nothing is asked of the row: exactly 0, whatever its logits hold.
        zeros = tl.zeros([TILE], out_ptr.dtype.element_ty)
        for at in range(start, stop, TILE):
            columns = at + tl.arange(0, TILE)
            tl.store(out_row_ptr + columns, zeros, mask=columns < width)


def tile_constants(kind: str, width: int) -> dict[str, int]:
    """How many columns one program writes, as the kernel's constants TILE and TILES."""
    tile = _GRAD_TILE[kind]
    return {
        "TILE": min(tile, max(128, power_of_2(width))),
        "TILES": _GRAD_COLUMNS // tile,
    }


_launch_grad = Launcher(pair_grad_kernel)


@lru_cache(1024)
def _grad_arguments(
    sides: tuple[tuple[str, Any], ...], slope: float, spec: PairSpec, width: int
) -> tuple[int, tuple[Any, ...]]:
    """Programs a row, and the kernel's arguments from `slope` on."""
    shape = tile_constants(spec.kind, width)
    own = {"slope": float(slope), "beta": float(spec.beta), "KIND": KINDS.index(spec.kind)}
    arguments = positional(pair_grad_kernel, {**dict(sides), **own, **shape})
    return ceil_div(width, shape["TILE"] * shape["TILES"]), arguments


def pair_grad(
    student: Side,
    teacher: Side,
    norm_s: Tensor,
    norm_t: Tensor,
    inner: Tensor,
    upstream: Tensor,
    spec: PairSpec,
    *,
    kept: Tensor | None = None,
    out: Tensor,
) -> None:
    """As `kernels.distill.pair_grad`, for logits and out whose last stride is 1.

    Args:
        upstream: any stride.
        kept: float32.
    """
    rows, width = out.shape
    if out.numel() == 0:
        return
    if INTERPRETED and out.dtype == torch.bfloat16:
        # The interpreter truncates to bfloat16 where a GPU rounds.
        rounded = torch.empty(rows, width, dtype=torch.float32, device=out.device)
        pair_grad(
            student, teacher, norm_s, norm_t, inner, upstream, spec, kept=kept, out=rounded
        )  # fmt: skip
        out.copy_(rounded)
        return
    splits, arguments = _grad_arguments(
        sides_constants(student, teacher), student.spec.multiplier, spec, width
    )
    norm_s, norm_t = with_unit_stride(norm_s), with_unit_stride(norm_t)
    with device_of(out):
        _launch_grad(
            (rows * splits, 1, 1),
            (
                *sides_tensors(student, teacher), norm_s, norm_t, with_unit_stride(inner), upstream,
                with_unit_stride(kept), out,
            ),
            (
                student.spec.valid, width, student.logits.stride(0), teacher.logits.stride(0),
                norm_s.stride(0), norm_t.stride(0), upstream.stride(0), out.stride(0), splits,
            ),
            arguments,
        )  # fmt: skip
