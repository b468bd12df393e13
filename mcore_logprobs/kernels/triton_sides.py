"""What kernels for two sides of logits share: how a row of either is read, and their mixture."""

# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.distill import KINDS, Side
from mcore_logprobs.kernels.stats import RowSpec
from mcore_logprobs.kernels.triton_common import (
    Plan,
    candidate,
    clamped,
    exp,
    finished,
    launch_plan,
    row_transform,
    transform_constants,
    with_unit_stride,
)

__all__ = [
    "CROSS_ENTROPY",
    "FORWARD",
    "JSD",
    "REVERSE",
    "ROW_TEMPERATURE",
    "SOFTCAP",
    "load_side",
    "log_probs",
    "over_mixture",
    "pair_plan",
    "side_row",
    "sides_constants",
    "sides_tensors",
]

# A side's transformation as one constant: the sum of these.
SCALE = tl.constexpr(1)
BIAS = tl.constexpr(2)
TEMPERATURE = tl.constexpr(4)
ROW_TEMPERATURE = tl.constexpr(8)
SOFTCAP = tl.constexpr(16)  # times which tanh, the highest

# Which divergence.
FORWARD = tl.constexpr(KINDS.index("forward"))
REVERSE = tl.constexpr(KINDS.index("reverse"))
JSD = tl.constexpr(KINDS.index("jsd"))
CROSS_ENTROPY = tl.constexpr(KINDS.index("cross_entropy"))

LN2_OF_BITS = tl.constexpr(0.6931471805599453 / 2**23)


# ---- in a kernel -------------------------------------------------------------------------------


@triton.jit
def side_row(
    logits_ptr, temperature_ptr, row, stride, scale, softcap, temperature,
    TRANSFORM: tl.constexpr,
):  # fmt: skip
    """What `load_side` needs of one row: its address, its own scale, softcap and temperature."""
    scale, softcap, temperature = row_transform(
        temperature_ptr, row, scale, softcap, temperature,
        (ROW_TEMPERATURE & TRANSFORM) != 0, TRANSFORM // SOFTCAP, (TEMPERATURE & TRANSFORM) != 0,
    )  # fmt: skip
    return logits_ptr + row.to(tl.int64) * stride, scale, softcap, temperature


@triton.jit
def load_side(row, bias_ptr, columns, valid, MASKED: tl.constexpr, TRANSFORM: tl.constexpr):
    """(finished logits in float32, -inf at and past `valid`; the second result of `finished`)."""
    row_ptr, scale, softcap, temperature = row
    if MASKED:
        mask = columns < valid
        y = tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    else:
        mask = None
        y = tl.load(row_ptr + columns).to(tl.float32)
    z, capped = finished(
        y, bias_ptr, columns, mask, scale, softcap, temperature,
        (SCALE & TRANSFORM) != 0, TRANSFORM // SOFTCAP, (BIAS & TRANSFORM) != 0,
        (TEMPERATURE & TRANSFORM) != 0,
    )  # fmt: skip
    if MASKED:
        z = tl.where(mask, z, float("-inf"))
    return z, capped


@triton.jit
def log_probs(z, top, log_sum):
    """Log-probabilities, at least LOG_ZERO; a row's NaN is in `top` and may be lost here."""
    return clamped((z - top) - log_sum)


@triton.jit
def _expm1(x):
    """exp(x) - 1 of x <= 0."""
    series = 1.0 + x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720)))))
    return tl.where(x > -0.25, x * series, exp(x) - 1.0)


@triton.jit
def _log1p(x):
    """log(1 + x) of x in (-1, 0]; libdevice's logarithm would branch for every column."""
    # 1 + x = 2^n m with m in [1/sqrt(2), sqrt(2)); n stands where a float has its exponent.
    bits = (1.0 + x).to(tl.int32, bitcast=True)
    power = (bits - 0x3F3504F3) & -0x800000
    m = (bits - power).to(tl.float32, bitcast=True)
    rest = tl.where(power == 0, x, m - 1.0)  # x itself keeps the digits that 1 + x rounds off
    half = rest / (2.0 + rest)  # log(1 + rest) = 2 atanh(half)
    square = half * half
    series = 1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7)))
    return power.to(tl.float32) * LN2_OF_BITS + 2.0 * half * series


@triton.jit
def over_mixture(logp, logq, beta):
    """(log p - log M, log q - log M) of M = beta q + (1 - beta) p; exact where p and q are close.

    The larger of p and q, of weight 1 - w in M, is M / (1 + w (smaller / larger - 1)).
    """
    gap = logq - logp
    far = tl.abs(gap)
    weight = tl.where(gap > 0.0, 1.0 - beta, beta)
    larger = -_log1p(weight * _expm1(-far))
    smaller = larger - far
    return tl.where(gap > 0.0, smaller, larger), tl.where(gap > 0.0, larger, smaller)


# ---- its arguments -----------------------------------------------------------------------------


def sides_constants(student: Side, teacher: Side) -> tuple[tuple[str, Any], ...]:
    """Both sides' transformations as the kernels' arguments: numbers by name, and the constant."""
    return _sides_constants(
        *(
            part
            for side in (student, teacher)
            for part in (side.spec, side.bias is not None, side.temperature is not None)
        ),
        candidate().series,
    )


@lru_cache(1024)
def _sides_constants(
    student: RowSpec,
    student_bias: bool,
    student_temperature: bool,
    teacher: RowSpec,
    teacher_bias: bool,
    teacher_temperature: bool,
    series: bool,
) -> tuple[tuple[str, Any], ...]:
    bits = {
        "HAS_SCALE": SCALE,
        "HAS_SOFTCAP": SOFTCAP,
        "HAS_BIAS": BIAS,
        "HAS_TEMPERATURE": TEMPERATURE,
        "HAS_ROW_TEMPERATURE": ROW_TEMPERATURE,
    }
    named: dict[str, Any] = {}
    for name, args in (
        ("student", transform_constants(student, student_bias, student_temperature, series)),
        ("teacher", transform_constants(teacher, teacher_bias, teacher_temperature, series)),
    ):
        named |= {f"{name}_{each}": args[each] for each in ("scale", "softcap", "temperature")}
        named[name.upper()] = sum(bit.value * args[flag] for flag, bit in bits.items())
    return tuple(named.items())


def sides_tensors(student: Side, teacher: Side) -> tuple[Tensor | None, ...]:
    """Both sides' tensors, the kernels' first arguments."""
    return (
        student.logits,
        teacher.logits,
        with_unit_stride(student.bias),
        with_unit_stride(teacher.bias),
        with_unit_stride(student.temperature),
        with_unit_stride(teacher.temperature),
    )


def pair_plan(student: Tensor, teacher: Tensor, valid: int) -> Plan:
    """Splits as one side has them, tiles of half the columns: two sides are in flight at a time."""
    narrower = min(student, teacher, key=Tensor.element_size)
    plan = launch_plan(student.shape[0], valid, narrower)
    return replace(plan, groups=max(32, plan.groups // 2))
