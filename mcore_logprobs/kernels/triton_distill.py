"""Statistics of divergences between two sides of logits, each read once a pass, as Triton kernels.

`kernels.distill` documents the functions and has the formulas. Statistics are one pass over both
sides, and "jsd" takes a second one for its sums. Nothing of the logits' size is made.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.distill import KINDS, PAIR_STATS, PairSpec, Side
from mcore_logprobs.kernels.triton_common import (
    LOG_ZERO,
    Plan,
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
    REVERSE,
    load_side,
    log_probs,
    over_mixture,
    pair_plan,
    side_row,
    sides_constants,
    sides_tensors,
)

__all__ = [
    "jsd_kernel",
    "jsd_sums",
    "merged_pair",
    "pair_stats",
    "pair_stats_kernel",
    "split_jsd_sums",
    "split_pair_stats",
]

STATS = tl.constexpr(PAIR_STATS)

_NUM_WARPS = 4


# ---- statistics --------------------------------------------------------------------------------


@triton.jit
def _base(top):
    """What to subtract from a side's logits, and the least that a difference counts as.

    Where all is -inf so far both are 0: such a side has no log-probability yet to be far from.
    """
    empty = top == float("-inf")
    return tl.where(empty, 0.0, top), tl.where(empty, 0.0, LOG_ZERO)


@triton.jit
def _moved(cross, sum_s, sum_t, shift_s, shift_t, decay_s, decay_t, KIND: tl.constexpr):
    """`cross` about other maxima: z - m grows by a side's shift, exp(z - m) by its decay."""
    if KIND == FORWARD:
        cross = (cross + (shift_t - shift_s) * sum_t) * decay_t
    elif KIND == REVERSE:
        cross = (cross + (shift_s - shift_t) * sum_s) * decay_s
    elif KIND == CROSS_ENTROPY:
        cross = (cross - shift_s * sum_t) * decay_t
    return cross


@triton.jit
def _merged(top_s, sum_s, top_t, sum_t, cross, KIND: tl.constexpr):
    """Statistics of several parts along dimension 0, of which a part may be empty, as one."""
    row_top_s = tl.max(top_s, 0)
    row_top_t = tl.max(top_t, 0)
    base_s, floor_s = _base(row_top_s)
    base_t, floor_t = _base(row_top_t)
    decay_s = exp(top_s - base_s)
    decay_t = exp(top_t - base_t)
    shift_s = tl.maximum(top_s - base_s, floor_s)
    shift_t = tl.maximum(top_t - base_t, floor_t)
    cross = tl.sum(_moved(cross, sum_s, sum_t, shift_s, shift_t, decay_s, decay_t, KIND), 0)
    sum_s = tl.sum(sum_s * decay_s, 0)
    sum_t = tl.sum(sum_t * decay_t, 0)
    # A maximum may overlook NaN; a sum never does.
    row_top_s = tl.where(sum_s == sum_s, row_top_s, sum_s)
    row_top_t = tl.where(sum_t == sum_t, row_top_t, sum_t)
    return row_top_s, sum_s, row_top_t, sum_t, cross


@triton.jit
def _store(out_ptr, rows, mask, top_s, sum_s, top_t, sum_t, cross):
    """The pair statistics in their order; `out_ptr` points at the row's first."""
    tl.store(out_ptr, top_s, mask=mask)
    tl.store(out_ptr + rows, sum_s, mask=mask)
    tl.store(out_ptr + 2 * rows, top_t, mask=mask)
    tl.store(out_ptr + 3 * rows, sum_t, mask=mask)
    tl.store(out_ptr + 4 * rows, cross, mask=mask)


@triton.jit
def _take_in(s, t, top_s, sum_s, top_t, sum_t, cross, KIND: tl.constexpr):
    """Statistics `[groups]` and one tile `[groups, lanes]` more: one exp a side and column."""
    new_s = tl.maximum(top_s, tl.max(s, 1))
    new_t = tl.maximum(top_t, tl.max(t, 1))
    base_s, floor_s = _base(new_s)
    base_t, floor_t = _base(new_t)
    decay_s = exp(top_s - base_s)
    decay_t = exp(top_t - base_t)
    shift_s = tl.maximum(top_s - base_s, floor_s)
    shift_t = tl.maximum(top_t - base_t, floor_t)
    cross = _moved(cross, sum_s, sum_t, shift_s, shift_t, decay_s, decay_t, KIND)

    s = s - base_s[:, None]
    t = t - base_t[:, None]
    weight_s = exp(s)
    weight_t = exp(t)
    # Clamped only where multiplied, for a NaN must not pass as a probability of 0.
    s = tl.maximum(s, floor_s[:, None])
    t = tl.maximum(t, floor_t[:, None])
    if KIND == FORWARD:
        cross += tl.sum(weight_t * (t - s), 1)
    elif KIND == REVERSE:
        cross += tl.sum(weight_s * (s - t), 1)
    elif KIND == CROSS_ENTROPY:
        cross -= tl.sum(weight_t * s, 1)
    sum_s = sum_s * decay_s + tl.sum(weight_s, 1)
    sum_t = sum_t * decay_t + tl.sum(weight_t, 1)
    return new_s, sum_s, new_t, sum_t, cross


@triton.jit(do_not_specialize=["rows", "valid", "splits"])
def pair_stats_kernel(
    student_ptr,  # [n, v]
    teacher_ptr,  # [n, v]
    student_bias_ptr,  # [v]
    teacher_bias_ptr,
    student_temperature_ptr,  # [n]
    teacher_temperature_ptr,
    out_ptr,  # [splits, 5, n] float32
    rows,
    valid,
    student_stride,
    teacher_stride,
    split_columns,
    splits,
    student_scale,
    student_softcap,
    student_temperature,
    teacher_scale,
    teacher_softcap,
    teacher_temperature,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    STUDENT: tl.constexpr,
    TEACHER: tl.constexpr,
    KIND: tl.constexpr,
):
    """Pair statistics of one row's columns `[split * split_columns, ...)`.

    Every group of columns keeps its sums about its own maxima until the end. STUDENT and TEACHER
    are the sides' transformations (`sides_constants`).
    """
    TILE: tl.constexpr = LANES * GROUPS
    program = tl.program_id(0)
    row = program // splits
    split = program % splits
    start = split * split_columns
    stop = tl.minimum(start + split_columns, valid)
    student = side_row(
        student_ptr, student_temperature_ptr, row, student_stride,
        student_scale, student_softcap, student_temperature, STUDENT,
    )  # fmt: skip
    teacher = side_row(
        teacher_ptr, teacher_temperature_ptr, row, teacher_stride,
        teacher_scale, teacher_softcap, teacher_temperature, TEACHER,
    )  # fmt: skip

    offsets = tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    top_s = tl.full([GROUPS], float("-inf"), tl.float32)
    sum_s = tl.zeros([GROUPS], tl.float32)
    top_t = tl.full([GROUPS], float("-inf"), tl.float32)
    sum_t = tl.zeros([GROUPS], tl.float32)
    cross = tl.zeros([GROUPS], tl.float32)
    whole = start + tl.maximum(stop - start, 0) // TILE * TILE
    for at in range(start, whole, TILE):
        s, _ = load_side(student, student_bias_ptr, at + offsets, valid, False, STUDENT)
        t, _ = load_side(teacher, teacher_bias_ptr, at + offsets, valid, False, TEACHER)
        top_s, sum_s, top_t, sum_t, cross = _take_in(s, t, top_s, sum_s, top_t, sum_t, cross, KIND)
    if whole < stop:
        s, _ = load_side(student, student_bias_ptr, whole + offsets, valid, True, STUDENT)
        t, _ = load_side(teacher, teacher_bias_ptr, whole + offsets, valid, True, TEACHER)
        top_s, sum_s, top_t, sum_t, cross = _take_in(s, t, top_s, sum_s, top_t, sum_t, cross, KIND)

    row_top_s, row_sum_s, row_top_t, row_sum_t, row_cross = _merged(
        top_s, sum_s, top_t, sum_t, cross, KIND
    )
    out = out_ptr + split.to(tl.int64) * STATS * rows + row
    _store(out, rows, None, row_top_s, row_sum_s, row_top_t, row_sum_t, row_cross)


@triton.jit
def merged_pair(parts_ptr, row, rows, parts, PARTS: tl.constexpr, KIND: tl.constexpr):
    """Pair statistics of whole rows `[rows]` from `[parts, 5, n]`."""
    number = tl.arange(0, PARTS)
    mask = (number < parts)[:, None] & (row < rows)[None, :]
    part = parts_ptr + (number.to(tl.int64) * STATS * rows)[:, None] + row[None, :]
    top_s = tl.load(part, mask=mask, other=float("-inf"))
    sum_s = tl.load(part + rows, mask=mask, other=0.0)
    top_t = tl.load(part + 2 * rows, mask=mask, other=float("-inf"))
    sum_t = tl.load(part + 3 * rows, mask=mask, other=0.0)
    cross = tl.load(part + 4 * rows, mask=mask, other=0.0)
    return _merged(top_s, sum_s, top_t, sum_t, cross, KIND)


@triton.jit(do_not_specialize=["rows", "splits"])
def pair_merge_kernel(
    parts_ptr,  # [splits, 5, n]
    out_ptr,  # [5, n]
    rows,
    splits,
    SPLITS: tl.constexpr,  # splits, or the next power of two
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
):
    """`kernels.distill.merge_pairs` in one launch."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    top_s, sum_s, top_t, sum_t, cross = merged_pair(parts_ptr, row, rows, splits, SPLITS, KIND)
    _store(out_ptr + row, rows, row < rows, top_s, sum_s, top_t, sum_t, cross)


# ---- sums of the Jensen-Shannon divergence -----------------------------------------------------


@triton.jit
def _mixture_sums(to_p, to_q, s, t, top_s, log_s, top_t, log_t, beta):
    """Both sums `[groups]` and one tile more."""
    logp = log_probs(s, top_s, log_s)
    logq = log_probs(t, top_t, log_t)
    p_over, q_over = over_mixture(logp, logq, beta)
    to_p += tl.sum(exp(logp) * p_over, 1)
    to_q += tl.sum(exp(logq) * q_over, 1)
    return to_p, to_q


@triton.jit(do_not_specialize=["rows", "valid", "splits"])
def jsd_kernel(
    student_ptr,  # [n, v]
    teacher_ptr,  # [n, v]
    student_bias_ptr,  # [v]
    teacher_bias_ptr,
    student_temperature_ptr,  # [n]
    teacher_temperature_ptr,
    student_norm_ptr,  # [2, n]
    teacher_norm_ptr,  # [2, n]
    out_ptr,  # [splits, 2, n] float32
    rows,
    valid,
    student_stride,
    teacher_stride,
    student_norm_stride,
    teacher_norm_stride,
    split_columns,
    splits,
    student_scale,
    student_softcap,
    student_temperature,
    teacher_scale,
    teacher_softcap,
    teacher_temperature,
    beta,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    STUDENT: tl.constexpr,
    TEACHER: tl.constexpr,
):
    """`kernels.distill.jsd_sums` of one row's columns `[split * split_columns, ...)`."""
    TILE: tl.constexpr = LANES * GROUPS
    program = tl.program_id(0)
    row = program // splits
    split = program % splits
    start = split * split_columns
    stop = tl.minimum(start + split_columns, valid)
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

    offsets = tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    to_p = tl.zeros([GROUPS], tl.float32)
    to_q = tl.zeros([GROUPS], tl.float32)
    whole = start + tl.maximum(stop - start, 0) // TILE * TILE
    for at in range(start, whole, TILE):
        s, _ = load_side(student, student_bias_ptr, at + offsets, valid, False, STUDENT)
        t, _ = load_side(teacher, teacher_bias_ptr, at + offsets, valid, False, TEACHER)
        to_p, to_q = _mixture_sums(to_p, to_q, s, t, top_s, log_s, top_t, log_t, beta)
    if whole < stop:
        s, _ = load_side(student, student_bias_ptr, whole + offsets, valid, True, STUDENT)
        t, _ = load_side(teacher, teacher_bias_ptr, whole + offsets, valid, True, TEACHER)
        to_p, to_q = _mixture_sums(to_p, to_q, s, t, top_s, log_s, top_t, log_t, beta)

    nan = (top_s + log_s + top_t + log_t) * 0.0  # of a row that holds one, else 0
    out = out_ptr + split.to(tl.int64) * 2 * rows + row
    tl.store(out, tl.sum(to_q, 0) + nan)
    tl.store(out + rows, tl.sum(to_p, 0) + nan)


# ---- launches ----------------------------------------------------------------------------------

_launch_stats = Launcher(pair_stats_kernel)
_launch_merge = Launcher(pair_merge_kernel)
_launch_jsd = Launcher(jsd_kernel)


@lru_cache(1024)
def _stats_constants(sides: tuple[tuple[str, Any], ...], plan: Plan, kind: str) -> tuple[Any, ...]:
    named = {**dict(sides), "LANES": plan.lanes, "GROUPS": plan.groups, "KIND": KINDS.index(kind)}
    return positional(pair_stats_kernel, named)


@lru_cache(1024)
def _jsd_constants(sides: tuple[tuple[str, Any], ...], plan: Plan, beta: float) -> tuple[Any, ...]:
    named = {**dict(sides), "beta": float(beta), "LANES": plan.lanes, "GROUPS": plan.groups}
    return positional(jsd_kernel, named)


def pair_stats(student: Side, teacher: Side, spec: PairSpec, *, plan: Plan | None = None) -> Tensor:
    """As `kernels.distill.pair_stats`, for logits whose last stride is 1."""
    parts = split_pair_stats(student, teacher, spec, plan=plan)
    splits, _, rows = parts.shape
    if splits == 1 or rows == 0:
        return parts[0]
    out = torch.empty_like(parts[0])
    with device_of(parts):
        _launch_merge(
            (ceil_div(rows, 8), 1, 1),
            (parts, out),
            (rows, splits),
            (power_of_2(splits), 8, KINDS.index(spec.kind)),
        )
    return out


def split_pair_stats(
    student: Side, teacher: Side, spec: PairSpec, *, plan: Plan | None = None
) -> Tensor:
    """As `pair_stats`, of the parts of each row that the plan splits it into, `[splits, 5, n]`."""
    rows, valid = student.logits.shape[0], student.spec.valid
    plan = plan or pair_plan(student.logits, teacher.logits, valid)
    parts = student.logits.new_empty((plan.splits, PAIR_STATS, rows), dtype=torch.float32)
    if rows == 0:
        return parts
    with device_of(parts):
        _launch_stats(
            (rows * plan.splits, 1, 1),
            (*sides_tensors(student, teacher), parts),
            (
                rows, valid, student.logits.stride(0), teacher.logits.stride(0), plan.columns,
                plan.splits,
            ),
            _stats_constants(sides_constants(student, teacher), plan, spec.kind),
            num_warps=plan.num_warps,
        )  # fmt: skip
    return parts


def jsd_sums(
    student: Side,
    teacher: Side,
    norm_s: Tensor,
    norm_t: Tensor,
    spec: PairSpec,
    *,
    plan: Plan | None = None,
) -> Tensor:
    """As `kernels.distill.jsd_sums`, for logits whose last stride is 1."""
    parts = split_jsd_sums(student, teacher, norm_s, norm_t, spec, plan=plan)
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)


def split_jsd_sums(
    student: Side,
    teacher: Side,
    norm_s: Tensor,
    norm_t: Tensor,
    spec: PairSpec,
    *,
    plan: Plan | None = None,
) -> Tensor:
    """As `jsd_sums`, of the parts of each row, `[splits, 2, n]`."""
    rows, valid = student.logits.shape[0], student.spec.valid
    plan = plan or pair_plan(student.logits, teacher.logits, valid)
    parts = student.logits.new_empty((plan.splits, 2, rows), dtype=torch.float32)
    norm_s, norm_t = with_unit_stride(norm_s), with_unit_stride(norm_t)
    if rows:
        with device_of(parts):
            _launch_jsd(
                (rows * plan.splits, 1, 1),
                (*sides_tensors(student, teacher), norm_s, norm_t, parts),
                (
                    rows, valid, student.logits.stride(0), teacher.logits.stride(0),
                    norm_s.stride(0), norm_t.stride(0), plan.columns, plan.splits,
                ),
                _jsd_constants(sides_constants(student, teacher), plan, spec.beta),
                num_warps=plan.num_warps,
            )  # fmt: skip
    return parts
