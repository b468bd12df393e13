"""The gradient with respect to raw logits, one read and one write, as a Triton kernel."""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.stats import RowResults, RowSpec
from mcore_logprobs.kernels.triton_common import (
    INTERPRETED,
    Candidate,
    candidate,
    ceil_div,
    clamped,
    device_of,
    exp,
    finished,
    positional,
    power_of_2,
    row_transform,
    transform_constants,
    with_unit_stride,
)
from mcore_logprobs.kernels.triton_finish import norm_constants, smoothing_weights
from mcore_logprobs.kernels.triton_launch import Launcher

__all__ = ["grad_kernel", "grad_logits", "results_grad", "results_grad_kernel"]

# Columns of one program: enough to spread the cost of reading the row's coefficients first.
_SPAN = 16384
_NUM_WARPS = 4


@triton.jit
def _write_tile(
    row_ptr,
    out_row_ptr,
    bias_ptr,
    start,
    valid,
    width,
    column,
    shift,
    weight,
    moment,
    on_target,
    on_finite,
    squares,
    slope,
    scale,
    softcap,
    temperature,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    ENTROPY: tl.constexpr,
    SMOOTHING: tl.constexpr,
    SQUARES: tl.constexpr,
):
    columns = start + tl.arange(0, TILE)
    if MASKED:
        mask = columns < valid
        y = tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    else:
        mask = None
        y = tl.load(row_ptr + columns).to(tl.float32)
    z, capped = finished(
        y, bias_ptr, columns, mask, scale, softcap, temperature,
        HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, HAS_TEMPERATURE,
    )  # fmt: skip
    shifted = z - shift
    grad = exp(shifted)
    factor = weight
    if ENTROPY:
        factor = weight + moment * clamped(shifted)
    if SQUARES:
        factor += squares * grad
    grad = grad * factor
    if SMOOTHING:
        grad += tl.where(shifted > float("-inf"), on_finite, 0.0)
    grad += tl.where(columns == column, on_target, 0.0)
    if HAS_SOFTCAP:
        grad = grad * (1.0 - capped * capped)
    if HAS_SLOPE:
        grad = grad * slope
    grad = grad.to(out_row_ptr.dtype.element_ty)
    if MASKED:
        tl.store(out_row_ptr + columns, tl.where(mask, grad, 0.0), mask=columns < width)
    else:
        tl.store(out_row_ptr + columns, grad)


@triton.jit
def _write_columns(
    logits_ptr,
    out_ptr,
    bias_ptr,
    temperature_ptr,
    row,
    start,
    valid,
    width,
    row_stride,
    out_row_stride,
    column,
    shift,
    weight,
    moment,
    on_target,
    on_finite,
    squares,
    slope,
    scale,
    softcap,
    temperature,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_ROW_TEMPERATURE: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    ENTROPY: tl.constexpr,
    SMOOTHING: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """One row's columns `[start, start + TILES * TILE)`; zeros if its coefficients are all 0."""
    stop = tl.minimum(start + TILES * TILE, width)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    out_row_ptr = out_ptr + row.to(tl.int64) * out_row_stride
    scale, softcap, temperature = row_transform(
        temperature_ptr, row, scale, softcap, temperature,
        HAS_ROW_TEMPERATURE, HAS_SOFTCAP, HAS_TEMPERATURE,
    )  # fmt: skip
    if HAS_ROW_TEMPERATURE:
        slope = slope / tl.load(temperature_ptr + row).to(tl.float32)

    plain = (weight != 0.0) | (moment != 0.0) | (on_target != 0.0) | (on_finite != 0.0)
    if plain | (squares != 0.0):
        whole = start + tl.maximum(tl.minimum(stop, valid) - start, 0) // TILE * TILE
        for at in range(start, whole, TILE):
            _write_tile(
                row_ptr, out_row_ptr, bias_ptr, at, valid, width, column, shift,
                weight, moment, on_target, on_finite, squares, slope, scale, softcap, temperature,
                False, TILE,
                HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, HAS_TEMPERATURE, HAS_SLOPE, ENTROPY, SMOOTHING,
                SQUARES,
            )  # fmt: skip
        for at in range(whole, stop, TILE):
            _write_tile(
                row_ptr, out_row_ptr, bias_ptr, at, valid, width, column, shift,
                weight, moment, on_target, on_finite, squares, slope, scale, softcap, temperature,
                True, TILE,
                HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, HAS_TEMPERATURE, HAS_SLOPE, ENTROPY, SMOOTHING,
                SQUARES,
            )  # fmt: skip
    else:
        zeros = tl.zeros([TILE], out_ptr.dtype.element_ty)
        for at in range(start, stop, TILE):
            columns = at + tl.arange(0, TILE)
            tl.store(out_row_ptr + columns, zeros, mask=columns < width)


@triton.jit(do_not_specialize=["valid", "splits", "width", "coef_stride"])
def grad_kernel(
    logits_ptr,  # [n, v]
    out_ptr,  # [n, v]; may be logits_ptr
    target_ptr,  # [n] int64
    shift_ptr,  # [n]
    coef_ptr,  # [k, n]
    bias_ptr,  # [v]
    temperature_ptr,  # [n]
    valid,
    width,
    row_stride,
    out_row_stride,
    coef_stride,
    splits,
    slope,
    scale,
    softcap,
    temperature,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_ROW_TEMPERATURE: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    ENTROPY: tl.constexpr,
    SMOOTHING: tl.constexpr,
    WEIGHT: tl.constexpr,
    MOMENT: tl.constexpr,
    TARGET: tl.constexpr,
    FINITE: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """One row's columns `[split * TILES * TILE, ...)` from its coefficients.

    WEIGHT to SQUARES are the coefficients' rows in coef (`RowSpec.coefficients`); -1: not there.
    """
    program = tl.program_id(0)
    row = program // splits
    weight = tl.load(coef_ptr + WEIGHT * coef_stride + row).to(tl.float32)
    moment = tl.load(coef_ptr + MOMENT * coef_stride + row).to(tl.float32)
    on_target = tl.load(coef_ptr + TARGET * coef_stride + row).to(tl.float32)
    on_finite = tl.load(coef_ptr + FINITE * coef_stride + row).to(tl.float32)
    squares = 0.0
    if SQUARES >= 0:
        squares = tl.load(coef_ptr + SQUARES * coef_stride + row).to(tl.float32)
    shift = tl.load(shift_ptr + row).to(tl.float32)
    column = tl.load(target_ptr + row).to(tl.int32)
    _write_columns(
        logits_ptr, out_ptr, bias_ptr, temperature_ptr, row, program % splits * (TILES * TILE),
        valid, width, row_stride, out_row_stride, column, shift,
        weight, moment, on_target, on_finite, squares, slope, scale, softcap, temperature,
        TILE, TILES, HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, HAS_TEMPERATURE, HAS_ROW_TEMPERATURE,
        HAS_SLOPE, ENTROPY, SMOOTHING, SQUARES >= 0,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "valid", "splits", "width", "norm_stride",
        "logprobs_stride", "entropy_stride", "lse_stride", "sum_pi_squared_stride",
    ]
)  # fmt: skip
def results_grad_kernel(
    logits_ptr,  # [n, v]
    out_ptr,  # [n, v]; may be logits_ptr
    column_ptr,  # [n] int64, as `TargetIds` says; None: no row has a target
    norms_ptr,  # [norms, n]
    logprobs_ptr,  # [n], upstream gradients, as the next three; None: 0
    entropy_ptr,
    lse_ptr,
    sum_pi_squared_ptr,
    temperature_ptr,  # [n]
    logprobs_stride,
    entropy_stride,
    lse_stride,
    sum_pi_squared_stride,
    norm_stride,
    row_stride,
    out_row_stride,
    valid,
    width,
    splits,
    label_smoothing,
    slope,
    scale,
    softcap,
    temperature,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_ROW_TEMPERATURE: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    NORM_TOP: tl.constexpr,
    NORM_SUM: tl.constexpr,
    NORM_ENTROPY: tl.constexpr,
    NORM_FINITE: tl.constexpr,
    NORM_SUM_PI_SQUARED: tl.constexpr,
):
    """As `grad_kernel`, each program finding its row's coefficients itself.

    They are those of `kernels.stats.gradient_coefficients`.
    """
    ENTROPY: tl.constexpr = entropy_ptr is not None
    SMOOTHING: tl.constexpr = NORM_FINITE >= 0 and logprobs_ptr is not None
    SQUARES: tl.constexpr = sum_pi_squared_ptr is not None
    program = tl.program_id(0)
    row = program // splits
    norms = norms_ptr + row
    shift = tl.load(norms + NORM_TOP * norm_stride)
    row_sum = tl.load(norms + NORM_SUM * norm_stride)
    over_sum = tl.div_rn(1.0, row_sum)
    asked = 0.0
    weight = 0.0
    moment = 0.0
    on_target = 0.0
    on_finite = 0.0
    squares = 0.0
    if lse_ptr is not None:
        upstream = tl.load(lse_ptr + row.to(tl.int64) * lse_stride)
        asked += tl.abs(upstream)
        weight += upstream
    if logprobs_ptr is not None:
        upstream = tl.load(logprobs_ptr + row.to(tl.int64) * logprobs_stride)
        asked += tl.abs(upstream)
        weight -= upstream
        on_target = upstream
        if SMOOTHING:
            finite = tl.load(norms + NORM_FINITE * norm_stride)
            target_weight, other_weight = smoothing_weights(label_smoothing, finite)
            on_target = upstream * target_weight
            on_finite = upstream * other_weight
    if ENTROPY:
        upstream = tl.load(entropy_ptr + row.to(tl.int64) * entropy_stride)
        asked += tl.abs(upstream)
        # About the row's maximum: log p is (z - m) - log s.
        entropy = tl.load(norms + NORM_ENTROPY * norm_stride)
        weight += upstream * (tl.log(row_sum) - entropy)
        moment = -upstream * over_sum
    if SQUARES:
        upstream = 2.0 * tl.load(sum_pi_squared_ptr + row.to(tl.int64) * sum_pi_squared_stride)
        asked += tl.abs(upstream)
        weight -= upstream * tl.load(norms + NORM_SUM_PI_SQUARED * norm_stride)
        squares = upstream * over_sum * over_sum
    # Exactly no gradient where none is asked for, whatever the row holds.
    asked = asked != 0.0
    column = -1
    if column_ptr is not None:
        column = tl.load(column_ptr + row).to(tl.int32)
        asked = asked & (column != -2)
    weight = tl.where(asked, weight * over_sum, 0.0)
    moment = tl.where(asked, moment, 0.0)
    on_target = tl.where(asked, on_target, 0.0)
    on_finite = tl.where(asked, on_finite, 0.0)
    squares = tl.where(asked, squares, 0.0)
    _write_columns(
        logits_ptr, out_ptr, None, temperature_ptr, row, program % splits * (TILES * TILE),
        valid, width, row_stride, out_row_stride, column, shift,
        weight, moment, on_target, on_finite, squares, slope, scale, softcap, temperature,
        TILE, TILES, HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, HAS_TEMPERATURE, HAS_ROW_TEMPERATURE,
        HAS_SLOPE, ENTROPY, SMOOTHING, SQUARES,
    )  # fmt: skip


def tile_constants(width: int, tile: int | None = None, tiles: int | None = None) -> dict[str, int]:
    """How many columns one program writes, as the kernels' constants TILE and TILES."""
    tile = tile or candidate().grad_tile
    tiles = tiles or max(1, _SPAN // tile)
    return {"TILE": min(tile, max(128, power_of_2(width))), "TILES": tiles}


def coefficient_constants(spec: RowSpec) -> dict[str, int]:
    """The coefficients' rows as the kernel's constants: WEIGHT=0, ..."""
    places = {name.upper(): place for place, name in enumerate(spec.coefficients)}
    return {"SQUARES": -1} | places


_launch_grad = Launcher(grad_kernel)
_launch_results_grad = Launcher(results_grad_kernel)


@lru_cache(1024)
def _grad_arguments(
    spec: RowSpec,
    width: int,
    has_bias: bool,
    own_temperature: bool,
    how: Candidate,
    tile: int | None,
    tiles: int | None,
) -> tuple[int, tuple[Any, ...]]:
    """Programs a row, and the arguments of `grad_kernel` from `slope` on."""
    shape = tile_constants(width, tile or how.grad_tile, tiles)
    named = {
        "slope": float(spec.multiplier),
        **transform_constants(spec, has_bias, own_temperature, how.series),
        **shape,
        "HAS_SLOPE": spec.multiplier != 1.0 or own_temperature,
        "ENTROPY": spec.entropy,
        "SMOOTHING": spec.smoothing,
        **coefficient_constants(spec),
    }
    return ceil_div(width, shape["TILE"] * shape["TILES"]), positional(grad_kernel, named)


def grad_logits(
    logits: Tensor,
    target: Tensor,
    shift: Tensor,
    coef: Tensor,
    spec: RowSpec,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    out: Tensor,
    tile: int | None = None,
    tiles: int | None = None,
    num_warps: int = _NUM_WARPS,
) -> None:
    """As `kernels.reference.grad_logits`, for logits and out whose last stride is 1."""
    rows, width = logits.shape
    if logits.numel() == 0:
        return
    splits, arguments = _grad_arguments(
        spec, width, bias is not None, temperature is not None, candidate(), tile, tiles
    )
    coef = with_unit_stride(coef)
    with device_of(logits), _rounded(out) as written:
        _launch_grad(
            (rows * splits, 1, 1),
            (
                logits, written, with_unit_stride(target), with_unit_stride(shift), coef,
                with_unit_stride(bias), with_unit_stride(temperature),
            ),
            (
                spec.valid, width, logits.stride(0), written.stride(0), coef.stride(0), splits,
            ),
            arguments,
            num_warps=num_warps,
        )  # fmt: skip


def results_grad(
    logits: Tensor,
    column: Tensor | None,
    upstream: RowResults,
    norms: Tensor,
    spec: RowSpec,
    *,
    label_smoothing: float,
    temperature: Tensor | None = None,
    out: Tensor,
) -> None:
    """Upstream gradients of the results to that of raw logits, in one launch.

    As `kernels.stats.gradient_coefficients` and then `kernels.reference.grad_logits`.

    Args:
        column: `[n]`, as `TargetIds` says; None: no row has a target.
        upstream: `[n]` float32 each, any stride; None for zero.
        norms: `[norms, n]` float32, from `triton_finish.finish_rows` with the same spec.
        The others as in those two.
    """
    rows, width = logits.shape
    if logits.numel() == 0:
        return
    splits, arguments = _results_arguments(
        spec, width, label_smoothing, temperature is not None, candidate()
    )
    given = (upstream.logprobs, upstream.entropy, upstream.lse, upstream.sum_pi_squared)
    with device_of(logits), _rounded(out) as written:
        _launch_results_grad(
            (rows * splits, 1, 1),
            (
                logits, written, with_unit_stride(column), norms, *given,
                with_unit_stride(temperature),
            ),
            (
                *[0 if x is None else x.stride(0) for x in given],
                norms.stride(0), logits.stride(0), written.stride(0),
            ),
            arguments,
        )  # fmt: skip


@lru_cache(1024)
def _results_arguments(
    spec: RowSpec, width: int, label_smoothing: float, own_temperature: bool, how: Candidate
) -> tuple[int, tuple[Any, ...]]:
    """Programs a row, and the arguments of `results_grad_kernel` from `valid` on."""
    shape = tile_constants(width)
    splits = ceil_div(width, shape["TILE"] * shape["TILES"])
    named = {
        "valid": spec.valid,
        "width": width,
        "splits": splits,
        "label_smoothing": float(label_smoothing),
        "slope": float(spec.multiplier),
        **shape,
        **transform_constants(spec, False, own_temperature, how.series),
        "HAS_SLOPE": spec.multiplier != 1.0 or own_temperature,
        **norm_constants(spec),
    }
    return splits, positional(results_grad_kernel, named)


@contextmanager
def _rounded_after(out: Tensor) -> Iterator[Tensor]:
    wide = torch.empty_like(out, dtype=torch.float32)
    yield wide
    out.copy_(wide)


def _rounded(out: Tensor) -> AbstractContextManager[Tensor]:
    """Where a kernel writes: out itself, but the interpreter truncates to bfloat16."""
    if INTERPRETED and out.dtype == torch.bfloat16:
        return _rounded_after(out)
    return nullcontext(out)
