"""The gradient of k given entries of each row, on top of that of its statistics, as Triton kernels.

`triton_grad` writes the whole row in one read and one write; then a second, small kernel writes the
k entries anew, each summed in float32 and rounded once, from raw logits that were picked before.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.stats import RowSpec
from mcore_logprobs.kernels.triton_common import (
    INTERPRETED,
    candidate,
    ceil_div,
    clamped,
    device_of,
    exp,
    finished,
    positional,
    row_transform,
    transform_constants,
    with_unit_stride,
)
from mcore_logprobs.kernels.triton_grad import coefficient_constants, grad_logits
from mcore_logprobs.kernels.triton_launch import Launcher

__all__ = ["entries_grad", "entries_kernel"]

_BLOCK = 64
_OTHERS = 16  # entries that a block is compared with at a time


@triton.jit(do_not_specialize=["k"])
def entries_kernel(
    own_ptr,  # [n, k], the raw logits at column
    column_ptr,  # [n, k] int64
    upstream_ptr,  # [n, k]
    shift_ptr,  # [n], or None: no statistics
    coef_ptr,  # [c, n]
    bias_ptr,  # [v]
    temperature_ptr,  # [n]
    out_ptr,  # [n, v]
    k,
    coef_stride,
    out_stride,
    slope,
    scale,
    softcap,
    temperature,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_ROW_TEMPERATURE: tl.constexpr,
    ENTROPY: tl.constexpr,
    WEIGHT: tl.constexpr,
    MOMENT: tl.constexpr,
):
    """`kernels.reference.entries_grad` at BLOCK of one row's entries.

    An entry that occurs several times is written as often, each time the same sum.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(column_ptr + row * k + at, mask=at < k, other=-1)
    mine = column >= 0
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, k, OTHERS):
        other = start + tl.arange(0, OTHERS)
        same = tl.load(column_ptr + row * k + other, mask=other < k, other=-1)
        given = tl.load(upstream_ptr + row * k + other, mask=other < k, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(column[:, None] == same[None, :], given[None, :], 0.0), 1)

    scale, softcap, temperature = row_transform(
        temperature_ptr, row, scale, softcap, temperature,
        HAS_ROW_TEMPERATURE, HAS_SOFTCAP, HAS_TEMPERATURE,
    )  # fmt: skip
    if HAS_ROW_TEMPERATURE:
        slope = slope / tl.load(temperature_ptr + row).to(tl.float32)
    y = tl.load(own_ptr + row * k + at, mask=mine, other=0.0).to(tl.float32)
    z, capped = finished(
        y, bias_ptr, column, mine, scale, softcap, temperature,
        HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, HAS_TEMPERATURE,
    )  # fmt: skip
    if shift_ptr is not None:
        shifted = z - tl.load(shift_ptr + row)
        factor = tl.load(coef_ptr + WEIGHT * coef_stride + row)
        asked = factor != 0.0
        if ENTROPY:
            moment = tl.load(coef_ptr + MOMENT * coef_stride + row)
            asked = asked | (moment != 0.0)
            factor = factor + moment * clamped(shifted)
        total += tl.where(asked, exp(shifted) * factor, 0.0)
    if HAS_SOFTCAP:
        total = tl.where(total != 0.0, total * (1.0 - capped * capped), 0.0)
    total = (total * slope).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + column, total, mask=mine)


_launch_entries = Launcher(entries_kernel)


@lru_cache(1024)
def _arguments(
    spec: RowSpec, has_bias: bool, own_temperature: bool, series: bool
) -> tuple[Any, ...]:
    """The kernel's arguments from `slope` on."""
    places = coefficient_constants(spec)
    return positional(
        entries_kernel,
        {
            "slope": float(spec.multiplier),
            **transform_constants(spec, has_bias, own_temperature, series),
            "BLOCK": _BLOCK,
            "OTHERS": _OTHERS,
            "ENTROPY": spec.entropy,
            "WEIGHT": places["WEIGHT"],
            "MOMENT": places["MOMENT"],
        },
    )


def entries_grad(
    logits: Tensor,
    column: Tensor,
    upstream: Tensor,
    shift: Tensor | None,
    coef: Tensor | None,
    spec: RowSpec,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    out: Tensor,
) -> None:
    """As `kernels.reference.entries_grad`, for logits and out whose last stride is 1."""
    rows, k = column.shape
    if logits.numel() == 0:
        return
    if INTERPRETED and out.dtype == torch.bfloat16:
        # The interpreter truncates to bfloat16 where a GPU rounds.
        rounded = torch.empty_like(out, dtype=torch.float32)
        entries_grad(
            logits, column, upstream, shift, coef, spec,
            bias=bias, temperature=temperature, out=rounded,
        )  # fmt: skip
        out.copy_(rounded)
        return
    assert not spec.smoothing
    assert not spec.sum_pi_squared
    own = logits.gather(-1, column.clamp(min=0))  # before the gradient, which may go over it
    if shift is None or coef is None:
        shift = coef = None
        out.zero_()
    else:
        shift, coef = with_unit_stride(shift), with_unit_stride(coef)
        nothing = column.new_full((rows,), -1)
        grad_logits(logits, nothing, shift, coef, spec, bias=bias, temperature=temperature, out=out)
    if k == 0:
        return
    with device_of(out):
        _launch_entries(
            (rows, ceil_div(k, _BLOCK), 1),
            (
                own, column.contiguous(), upstream.contiguous(), shift, coef,
                with_unit_stride(bias), with_unit_stride(temperature), out,
            ),
            (k, 0 if coef is None else coef.stride(0), out.stride(0)),
            _arguments(spec, bias is not None, temperature is not None, candidate().series),
        )  # fmt: skip
