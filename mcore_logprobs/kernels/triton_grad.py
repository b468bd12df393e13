"""The gradient with respect to raw logits, one read and one write, as a Triton kernel."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.stats import RowSpec
from mcore_logprobs.kernels.triton_common import (
    INTERPRETED,
    LOG2E,
    LOG_ZERO,
    device_of,
    finished,
    row_transform,
    transform_args,
    with_unit_stride,
)

__all__ = ["grad_kernel", "grad_logits"]

_TILE = 4096
# Tiles of one program: enough to spread the cost of reading the row's coefficients first.
_TILES = 4
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
    grad = tl.exp2(shifted * LOG2E)
    factor = weight
    if ENTROPY:
        factor = weight + moment * tl.maximum(shifted, LOG_ZERO)
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


@triton.jit(do_not_specialize=["valid", "splits", "width"])
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
    """One row's columns `[split * TILES * TILE, ...)`.

    WEIGHT to SQUARES are the coefficients' rows in coef (`RowSpec.coefficients`); -1: not there.
    """
    program = tl.program_id(0)
    row = program // splits
    start = (program % splits) * (TILES * TILE)
    stop = tl.minimum(start + TILES * TILE, width)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    out_row_ptr = out_ptr + row.to(tl.int64) * out_row_stride
    weight = tl.load(coef_ptr + WEIGHT * coef_stride + row).to(tl.float32)
    moment = tl.load(coef_ptr + MOMENT * coef_stride + row).to(tl.float32)
    on_target = tl.load(coef_ptr + TARGET * coef_stride + row).to(tl.float32)
    on_finite = tl.load(coef_ptr + FINITE * coef_stride + row).to(tl.float32)
    squares = 0.0
    if SQUARES >= 0:
        squares = tl.load(coef_ptr + SQUARES * coef_stride + row).to(tl.float32)
    shift = tl.load(shift_ptr + row).to(tl.float32)
    column = tl.load(target_ptr + row).to(tl.int32)
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
                SQUARES >= 0,
            )  # fmt: skip
        for at in range(whole, stop, TILE):
            _write_tile(
                row_ptr, out_row_ptr, bias_ptr, at, valid, width, column, shift,
                weight, moment, on_target, on_finite, squares, slope, scale, softcap, temperature,
                True, TILE,
                HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, HAS_TEMPERATURE, HAS_SLOPE, ENTROPY, SMOOTHING,
                SQUARES >= 0,
            )  # fmt: skip
    else:
        zeros = tl.zeros([TILE], out_ptr.dtype.element_ty)
        for at in range(start, stop, TILE):
            columns = at + tl.arange(0, TILE)
            tl.store(out_row_ptr + columns, zeros, mask=columns < width)


def coefficient_constants(spec: RowSpec) -> dict[str, int]:
    """The coefficients' rows as the kernel's constants: WEIGHT=0, ..."""
    places = {name.upper(): place for place, name in enumerate(spec.coefficients)}
    return {"SQUARES": -1} | places


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
    tile: int = _TILE,
    tiles: int = _TILES,
    num_warps: int = _NUM_WARPS,
) -> None:
    """As `kernels.reference.grad_logits`, for logits and out whose last stride is 1."""
    rows, width = logits.shape
    if logits.numel() == 0:
        return
    if INTERPRETED and out.dtype == torch.bfloat16:
        # The interpreter truncates to bfloat16 where a GPU rounds.
        rounded = torch.empty(rows, width, dtype=torch.float32, device=out.device)
        grad_logits(
            logits, target, shift, coef, spec, bias=bias, temperature=temperature, out=rounded
        )
        out.copy_(rounded)
        return
    tile = min(tile, max(128, triton.next_power_of_2(width)))
    splits = triton.cdiv(width, tile * tiles)
    coef = with_unit_stride(coef)
    with device_of(logits):
        grad_kernel[(rows * splits,)](
            logits,
            out,
            with_unit_stride(target),
            with_unit_stride(shift),
            coef,
            None if bias is None else with_unit_stride(bias),
            None if temperature is None else with_unit_stride(temperature),
            spec.valid,
            width,
            logits.stride(0),
            out.stride(0),
            coef.stride(0),
            splits,
            spec.multiplier,
            **transform_args(spec, bias, temperature),
            TILE=tile,
            TILES=tiles,
            HAS_SLOPE=spec.multiplier != 1.0 or temperature is not None,
            ENTROPY=spec.entropy,
            SMOOTHING=spec.smoothing,
            **coefficient_constants(spec),
            num_warps=num_warps,
        )
