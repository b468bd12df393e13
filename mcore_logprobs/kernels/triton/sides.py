"""What kernels for two sides of logits share: how a row of either is read, and their mixture."""

# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.pairs import KINDS
from mcore_logprobs.kernels.triton.common import (
    LOG_ZERO,
    Plan,
    exp,
    launch_plan,
    over_temperature,
    row_temperature,
    transform,
    unscaled,
    with_unit_stride,
)

# Which divergence.
FORWARD = tl.constexpr(KINDS.index("forward"))
REVERSE = tl.constexpr(KINDS.index("reverse"))
CROSS_ENTROPY = tl.constexpr(KINDS.index("cross_entropy"))
JSD = tl.constexpr(KINDS.index("jsd"))
SKEWED_FORWARD = tl.constexpr(KINDS.index("skewed_forward"))
TOTAL_VARIATION = tl.constexpr(KINDS.index("total_variation"))

SMALL = tl.constexpr(0.125)  # |x| below which `exp_excess` takes its series
LN2_OF_BITS = tl.constexpr(0.6931471805599453 / 2**23)


# ---- in a kernel -------------------------------------------------------------------------------


@triton.jit
def _side_row(logits_ptr, temperature_ptr, row, stride, scale, softcap, multiplier):
    """What `load_side` needs of one row: its address, scale, softcap and own multiplier."""
    multiplier = over_temperature(multiplier, row, temperature_ptr)
    return logits_ptr + row.to(tl.int64) * stride, scale, softcap, multiplier


@triton.jit
def side_rows(
    row, student_ptr, student_temperature_ptr, student_stride,
    student_scale, student_softcap, student_multiplier,
    teacher_ptr, teacher_temperature_ptr, teacher_stride,
    teacher_scale, teacher_softcap, teacher_multiplier,
):  # fmt: skip
    """`_side_row` of the student and of the teacher."""
    student = _side_row(
        student_ptr, student_temperature_ptr, row, student_stride,
        student_scale, student_softcap, student_multiplier,
    )  # fmt: skip
    teacher = _side_row(
        teacher_ptr, teacher_temperature_ptr, row, teacher_stride,
        teacher_scale, teacher_softcap, teacher_multiplier,
    )  # fmt: skip
    return student, teacher


@triton.jit
def load_softmax(softmax_ptr, stride, row):
    """(m_s, log sum_s, m_t, log sum_t) of one row."""
    row_ptr = softmax_ptr + row
    max_s = tl.load(row_ptr)
    log_s = tl.load(row_ptr + stride)
    max_t = tl.load(row_ptr + 2 * stride)
    log_t = tl.load(row_ptr + 3 * stride)
    return max_s, log_s, max_t, log_t


@triton.jit
def load_side(side, bias_ptr, columns, valid, MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """(unscaled logits in float32, -inf at and past `valid`; the second of `unscaled`)."""
    row_ptr, scale, softcap, _ = side
    if MASKED:
        mask = columns < valid
        y = tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    else:
        mask = None
        y = tl.load(row_ptr + columns).to(tl.float32)
    x, capped = unscaled(y, bias_ptr, columns, mask, scale, softcap, HAS_SOFTCAP)
    if MASKED:
        x = tl.where(mask, x, float("-inf"))
    return x, capped


@triton.jit
def instead_of_infinity(x, floor):
    """x, and `floor` where it is -inf: for what is multiplied by a probability that may be 0."""
    return tl.where(x == float("-inf"), floor, x)


@triton.jit
def multiplier_of(side):
    """`Processing.multiplier` of a side's row."""
    _, _, _, multiplier = side
    return multiplier


@triton.jit
def log_probs(x, side, row_max, log_sum):
    """Log-probabilities, LOG_ZERO for -inf; a row's NaN is in `row_max`."""
    return instead_of_infinity((x - row_max) * multiplier_of(side) - log_sum, LOG_ZERO)


@triton.jit
def exp_excess(x, weight, otherwise):
    """weight * (exp(x) - 1 - x) by its series where x is small, else `otherwise`."""
    series = 0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))
    return tl.where(tl.abs(x) < SMALL, weight * x * x * series, otherwise)


@triton.jit
def _expm1(x):
    """exp(x) - 1."""
    series = 1.0 + x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720)))))
    return tl.where(tl.abs(x) < 0.25, x * series, exp(x) - 1.0)


@triton.jit
def _log1p(x, total):
    """log(1 + x) of x in (-1, 0], and of 1 + x as the caller has it, with all its digits.

    libdevice's logarithm would branch for every column.
    """
    # 1 + x = 2^n m with m in [1/sqrt(2), sqrt(2)); n stands where a float has its exponent.
    bits = total.to(tl.int32, bitcast=True)
    power = (bits - 0x3F3504F3) & -0x800000
    m = (bits - power).to(tl.float32, bitcast=True)
    rest = tl.where(power == 0, x, m - 1.0)  # x itself keeps the digits that 1 + x rounds off
    half = rest / (2.0 + rest)  # log(1 + rest) = 2 atanh(half)
    square = half * half
    series = 1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7)))
    return power.to(tl.float32) * LN2_OF_BITS + 2.0 * half * series


@triton.jit
def over_mixture(logp, logq, mixture):
    """(log p - log M, log q - log M) of the mixture M; exact where p and q are close, and where
    the larger of them has a small weight.

    The larger, of weight 1 - w in M, is M / (1 + w (smaller / larger - 1)).
    """
    beta, kept = mixture
    gap = logq - logp
    far = tl.abs(gap)
    weight = tl.where(gap > 0.0, kept, beta)
    rest = tl.where(gap > 0.0, beta, kept)
    larger = -_log1p(weight * _expm1(-far), weight * exp(-far) + rest)
    smaller = larger - far
    return tl.where(gap > 0.0, smaller, larger), tl.where(gap > 0.0, larger, smaller)


@triton.jit
def shares(logp, logq, mixture, KIND: tl.constexpr):
    """(p, a column's share of a divergence of two passes, its derivative by p up to a constant).

    mixture: the weights of q and p in M, both exact: 1 minus the larger, rounded, is not the other.
    """
    beta, kept = mixture
    p, q = exp(logp), exp(logq)
    if KIND == TOTAL_VARIATION:
        gap = p - q
        share = tl.abs(gap) * 0.5
        derivative = tl.where(gap > 0.0, 0.5, tl.where(gap < 0.0, -0.5, 0.0))
    else:
        p_over, q_over = over_mixture(logp, logq, mixture)
        if KIND == JSD:
            derivative = kept * p_over
            share = beta * q * q_over + p * derivative
        elif KIND == SKEWED_FORWARD:
            share = exp_excess(-q_over, q, q * q_over + kept * (p - q))
            derivative = -kept * _expm1(q_over)
        else:
            share = exp_excess(-p_over, p, p * p_over + beta * (q - p))
            derivative = p_over - kept * _expm1(p_over)
    return p, share, derivative


# ---- its arguments -----------------------------------------------------------------------------

# The kernels' parameters whose alignment compiles no variant.
SIDE_POINTERS = [
    f"{side}_{name}_ptr" for side in ("student", "teacher") for name in ("bias", "temperature")
]


def sides_arguments(student: Chunk, teacher: Chunk) -> tuple[Any, ...]:
    """Both sides' tensors and numbers, the kernels' first arguments."""
    tensors: list[Tensor | None] = [student.logits, teacher.logits]
    numbers: list[float] = []
    for side in (student, teacher):
        tensors += [with_unit_stride(side.processing.bias), row_temperature(side)]
        numbers += transform(side)
    return (*tensors, *numbers, student.logits.stride(0), teacher.logits.stride(0))


def sides_constants(student: Chunk, teacher: Chunk) -> dict[str, bool]:
    """Both sides' transformations as the kernels' constants."""
    return {
        "STUDENT_SOFTCAP": student.processing.softcap is not None,
        "TEACHER_SOFTCAP": teacher.processing.softcap is not None,
    }


def pair_plan(student: Tensor, teacher: Tensor, valid: int) -> Plan:
    """Splits as one side has them, tiles of half the columns: two sides are in flight at a time."""
    narrower = min(student, teacher, key=Tensor.element_size)
    plan = launch_plan(student.shape[0], valid, narrower)
    return replace(plan, groups=max(32, plan.groups // 2))
