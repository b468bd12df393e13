"""The gradient with respect to raw logits, one read and one write, as Triton kernels.

A row's single target is part of that. If there are several entries per row, a second, small kernel
writes them again, each summed in float32 and rounded once, from raw logits that were picked before.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.chunk import Chunk, gather_columns
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec
from mcore_logprobs.kernels.triton.common import (
    UNIT,
    clamped,
    exp,
    launch,
    over_temperature,
    raw_slope,
    rounded,
    row_temperature,
    span_plan,
    transform,
    unscaled,
    whole_units,
    with_unit_stride,
    write_zeros,
)
from mcore_logprobs.kernels.triton.operators import (
    SPEC,
    arguments,
    chunk_schema,
    chunks_of,
    operator,
    writes_out,
)

_TILE_BYTES = 8192  # of a tile at most: more of float32 takes registers that blocks need
_ENTRIES = 64  # entries a program
_OTHERS = 16  # entries that they are compared with at a time


@triton.jit
def _coefficient(coef_ptr, PLACE: tl.constexpr, stride, row):
    """A row's coefficient; 0 where there is none of this name."""
    coefficient = 0.0
    if PLACE >= 0:
        coefficient = tl.load(coef_ptr + PLACE * stride + row).to(tl.float32)
    return coefficient


@triton.jit
def _dz(
    shifted, weight, moment, on_finite, squares,
    MOMENT: tl.constexpr, FINITE: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """dz of `kernels.reference.grad` from its d, without single entries."""
    w = exp(shifted)
    factor = weight
    if MOMENT >= 0:
        factor = weight + moment * clamped(shifted)
    if SQUARES >= 0:
        factor += squares * w
    dz = w * factor
    if FINITE >= 0:
        dz += tl.where(shifted > float("-inf"), on_finite, 0.0)
    return dz


@triton.jit
def _write_tile(
    row_ptr, out_row_ptr, bias_ptr, start, valid, width, column, row_max,
    weight, moment, on_finite, squares, on_target, slope, scale, softcap, multiplier,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MOMENT: tl.constexpr,
    FINITE: tl.constexpr,
    SQUARES: tl.constexpr,
):  # fmt: skip
    columns = start + tl.arange(0, TILE)
    if MASKED:
        mask = columns < valid
        y = tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    else:
        mask = None
        y = tl.load(row_ptr + columns).to(tl.float32)
    x, capped = unscaled(y, bias_ptr, columns, mask, scale, softcap, HAS_SOFTCAP)
    shifted = (x - row_max) * multiplier
    grad = _dz(shifted, weight, moment, on_finite, squares, MOMENT, FINITE, SQUARES)
    grad += tl.where(columns == column, on_target, 0.0)
    if HAS_SOFTCAP:
        grad = grad * (1.0 - capped * capped)
    grad = (grad * slope).to(out_row_ptr.dtype.element_ty)
    if MASKED:
        tl.store(out_row_ptr + columns, tl.where(mask, grad, 0.0), mask=columns < width)
    else:
        tl.store(out_row_ptr + columns, grad)


@triton.jit(
    do_not_specialize=["valid", "width", "splits", "coef_stride"],
    do_not_specialize_on_alignment=[
        "column_ptr", "upstream_ptr", "row_max_ptr", "coef_ptr", "bias_ptr", "temperature_ptr",
    ],
)  # fmt: skip
def grad_kernel(
    logits_ptr,  # [n, v]
    out_ptr,  # [n, v]; may be logits_ptr
    column_ptr,  # [n] int64, one entry per row; None: no entries here
    upstream_ptr,  # [n]
    row_max_ptr,  # [n]
    coef_ptr,  # [k, n]
    bias_ptr,  # [v], or None
    temperature_ptr,  # [n], or None
    valid,
    width,
    row_stride,
    out_row_stride,
    coef_stride,
    splits,
    slope,
    scale,
    softcap,
    multiplier,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    TAIL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WEIGHT: tl.constexpr,
    MOMENT: tl.constexpr,
    FINITE: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """One row's columns `[split * TILES * TILE, ...)`; zeros if nothing is asked of the row.

    WEIGHT to SQUARES are the coefficients' rows in coef (`StatsSpec.coefficients`); -1: not there.
    """
    program = tl.program_id(0)
    row = program // splits
    start = program % splits * (TILES * TILE)
    stop = tl.minimum(start + TILES * TILE, width)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    out_row_ptr = out_ptr + row.to(tl.int64) * out_row_stride
    weight = _coefficient(coef_ptr, WEIGHT, coef_stride, row)
    moment = _coefficient(coef_ptr, MOMENT, coef_stride, row)
    on_finite = _coefficient(coef_ptr, FINITE, coef_stride, row)
    squares = _coefficient(coef_ptr, SQUARES, coef_stride, row)
    column = -1
    on_target = 0.0
    if column_ptr is not None:
        column = tl.load(column_ptr + row).to(tl.int32)
        on_target = tl.load(upstream_ptr + row).to(tl.float32)
    asked = (weight != 0.0) | (moment != 0.0) | (on_finite != 0.0) | (squares != 0.0)
    if asked | (on_target != 0.0):
        row_max = tl.load(row_max_ptr + row).to(tl.float32)
        multiplier = over_temperature(multiplier, row, temperature_ptr)
        slope = over_temperature(slope, row, temperature_ptr)
        end = whole_units(start, tl.minimum(stop, valid))
        whole = start + (end - start) // TILE * TILE
        for at in range(start, whole, TILE):
            _write_tile(
                row_ptr, out_row_ptr, bias_ptr, at, valid, width, column, row_max,
                weight, moment, on_finite, squares, on_target, slope, scale, softcap, multiplier,
                False, TILE, HAS_SOFTCAP, MOMENT, FINITE, SQUARES,
            )  # fmt: skip
        for at in range(whole, end, TAIL):
            _write_tile(
                row_ptr, out_row_ptr, bias_ptr, at, end, end, column, row_max,
                weight, moment, on_finite, squares, on_target, slope, scale, softcap, multiplier,
                True, TAIL, HAS_SOFTCAP, MOMENT, FINITE, SQUARES,
            )  # fmt: skip
        if end < stop:
            _write_tile(
                row_ptr, out_row_ptr, bias_ptr, end, valid, stop, column, row_max,
                weight, moment, on_finite, squares, on_target, slope, scale, softcap, multiplier,
                True, UNIT, HAS_SOFTCAP, MOMENT, FINITE, SQUARES,
            )  # fmt: skip
            write_zeros(out_row_ptr, end + UNIT, stop, TAIL)
    else:
        write_zeros(out_row_ptr, start, stop, TAIL)


@triton.jit(
    do_not_specialize=["j", "coef_stride", "out_stride", "splits"],
    do_not_specialize_on_alignment=[
        "own_ptr", "column_ptr", "upstream_ptr", "row_max_ptr", "coef_ptr", "bias_ptr",
        "temperature_ptr", "out_ptr",
    ],
)  # fmt: skip
def entries_kernel(
    own_ptr,  # [n, j], the raw logits at column
    column_ptr,  # [n, j] int64
    upstream_ptr,  # [n, j]
    row_max_ptr,  # [n], or None: no statistics
    coef_ptr,  # [k, n]
    bias_ptr,  # [v], or None
    temperature_ptr,  # [n], or None
    out_ptr,  # [n, v]
    j,
    coef_stride,
    out_stride,
    splits,
    slope,
    scale,
    softcap,
    multiplier,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WEIGHT: tl.constexpr,
    MOMENT: tl.constexpr,
    FINITE: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """`kernels.reference.grad` at BLOCK of one row's entries.

    An entry that occurs several times is written as often, each time the same sum.
    """
    program = tl.program_id(0)
    row = (program // splits).to(tl.int64)
    at = program % splits * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(column_ptr + row * j + at, mask=at < j, other=-1)
    mine = column >= 0
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, j, OTHERS):
        other = start + tl.arange(0, OTHERS)
        same = tl.load(column_ptr + row * j + other, mask=other < j, other=-1)
        given = tl.load(upstream_ptr + row * j + other, mask=other < j, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(column[:, None] == same[None, :], given[None, :], 0.0), 1)

    multiplier = over_temperature(multiplier, row, temperature_ptr)
    slope = over_temperature(slope, row, temperature_ptr)
    y = tl.load(own_ptr + row * j + at, mask=mine, other=0.0).to(tl.float32)
    x, capped = unscaled(y, bias_ptr, column, mine, scale, softcap, HAS_SOFTCAP)
    if row_max_ptr is not None:
        weight = _coefficient(coef_ptr, WEIGHT, coef_stride, row)
        moment = _coefficient(coef_ptr, MOMENT, coef_stride, row)
        on_finite = _coefficient(coef_ptr, FINITE, coef_stride, row)
        squares = _coefficient(coef_ptr, SQUARES, coef_stride, row)
        asked = (weight != 0.0) | (moment != 0.0) | (on_finite != 0.0) | (squares != 0.0)
        shifted = (x - tl.load(row_max_ptr + row)) * multiplier
        dz = _dz(shifted, weight, moment, on_finite, squares, MOMENT, FINITE, SQUARES)
        total += tl.where(asked, dz, 0.0)
    if HAS_SOFTCAP:
        total = tl.where(total != 0.0, total * (1.0 - capped * capped), 0.0)
    total = (total * slope).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + column, total, mask=mine)


# ---- launches ----------------------------------------------------------------------------------


def grad(chunk: Chunk, terms: GradientTerms, *, out: Tensor, chunk_size: int = 0) -> None:
    """As `kernels.reference.grad`; dtypes and strides as in `stats`, for out too."""
    _grad(*arguments(chunk, *terms, out))


def _run(*given: object) -> None:
    chunk, columns, upstream, row_max, coef, *wanted, out = chunks_of(1, given)
    if out.numel() == 0:
        return
    rows, width = out.shape
    j = columns.shape[1]
    columns, upstream = columns.contiguous(), upstream.contiguous()
    row_max, coef = with_unit_stride(row_max), with_unit_stride(coef)
    coef_stride = 0 if coef is None else coef.stride(0)
    bias, temperature = with_unit_stride(chunk.processing.bias), row_temperature(chunk)
    per_row = row_max, coef, bias, temperature
    numbers = (raw_slope(chunk), *transform(chunk))
    constants = {"HAS_SOFTCAP": chunk.processing.softcap is not None} | _places(StatsSpec(*wanted))
    # Before the gradient, which may go over it.
    own = gather_columns(chunk.logits, columns) if j > 1 or coef is None else None
    with rounded(out) as written:
        if coef is None:
            written.zero_()
        else:
            splits, shape = span_plan(width, _TILE_BYTES // chunk.logits.element_size())
            one = (columns, upstream) if j == 1 else (None, None)
            launch(
                grad_kernel, rows * splits,
                chunk.logits, written, *one, *per_row,
                chunk.valid, width, chunk.logits.stride(0), written.stride(0), coef_stride, splits,
                *numbers, **shape, **constants,
            )  # fmt: skip
        if own is not None and j:
            splits = triton.cdiv(j, _ENTRIES)
            launch(
                entries_kernel, rows * splits,
                own, columns, upstream, *per_row, written,
                j, coef_stride, written.stride(0), splits,
                *numbers, BLOCK=_ENTRIES, OTHERS=_OTHERS, **constants,
            )  # fmt: skip


_grad = operator(
    f"grad({chunk_schema()}, Tensor columns, Tensor upstream, Tensor? row_max, Tensor? coef, "
    f"{SPEC}, Tensor(a!) out) -> ()",
    _run,
    writes_out,
)


def _places(spec: StatsSpec) -> dict[str, int]:
    """The coefficients' rows: WEIGHT=0, ..."""
    names = spec.coefficients
    wanted = ("weight", "moment", "finite", "squares")
    return {name.upper(): names.index(name) if name in names else -1 for name in wanted}
