"""Statistics of divergences between two sides of logits, each read once a pass, as Triton kernels.

`kernels.pairs` documents the functions and has the formulas. Statistics are one pass over both
sides, and some kinds take a second one for their sums. Nothing of the logits' size is made.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.pairs import KINDS, PAIR_STATS, PairSpec, merge_pairs
from mcore_logprobs.kernels.triton.common import (
    LOG_ZERO,
    Plan,
    exp,
    launch,
    own_columns,
    row_multiplier,
    whole_units,
    with_unit_stride,
)
from mcore_logprobs.kernels.triton.operators import arguments, chunk_schema, chunks_of, operator
from mcore_logprobs.kernels.triton.sides import (
    CROSS_ENTROPY,
    FORWARD,
    REVERSE,
    SIDE_POINTERS,
    exp_excess,
    instead_of_infinity,
    load_side,
    load_softmax,
    log_probs,
    multiplier_of,
    pair_plan,
    shares,
    side_rows,
    sides_arguments,
    sides_constants,
)

STATS = tl.constexpr(PAIR_STATS)


# ---- statistics --------------------------------------------------------------------------------


@triton.jit
def _base(group_max):
    """What to subtract from a side's logits, and what a difference of -inf counts as.

    Where all is -inf so far both are 0: such a side has no log-probability yet to be far from.
    """
    empty = group_max == float("-inf")
    return tl.where(empty, 0.0, group_max), tl.where(empty, 0.0, LOG_ZERO)


@triton.jit
def _log_ratios(s, t, base_s, base_t, multiplier_s, multiplier_t, rough):
    """z_s - z_t about both maxima: `rough`, or exactly where the maxima are close."""
    gap = base_s - base_t
    # Multipliers that differ count as maxima that do. Infinite or NaN is no raw difference.
    reach = tl.abs(gap * multiplier_s) + 1e30 * tl.abs(multiplier_s - multiplier_t)
    limit = tl.where(reach <= 1.0, float("inf"), 0.0)
    exact = (s - t - gap) * multiplier_s
    return tl.where(tl.abs(exact) < limit, exact, rough)


@triton.jit
def _moved(
    sum_s, sum_t, cross, excess, apart, shift_s, decay_s, decay_t, KIND: tl.constexpr
):  # fmt: skip
    """All but the maxima about other ones: z - m grows by a side's shift, exp(z - m) by its decay,
    and z_s - z_t by `apart`."""
    new_s = sum_s * decay_s
    new_t = sum_t * decay_t
    if KIND == FORWARD:
        cross, excess = _moved_cross(cross, excess, sum_t, sum_s, apart, decay_t, new_s - new_t)
    elif KIND == REVERSE:
        cross, excess = _moved_cross(cross, excess, sum_s, sum_t, -apart, decay_s, new_t - new_s)
    elif KIND == CROSS_ENTROPY:
        cross = tl.where(decay_t == 0.0, 0.0, (cross - shift_s * sum_t) * decay_t)
    return new_s, new_t, cross, excess


@triton.jit
def _moved_cross(cross, excess, own, other, apart, decay, new_difference):
    """`kernels.pairs._moved`."""
    grown = exp_excess(apart, other, other * (exp(apart) - 1.0 - apart))
    gone = decay == 0.0
    near = tl.where(gone, 0.0, (excess + grown + apart * (excess - cross)) * decay)
    cross = tl.where(gone, 0.0, (cross - apart * own) * decay)
    return cross, tl.where(tl.abs(apart) <= 0.5, near, cross + new_difference)


@triton.jit
def _merged(
    max_s, sum_s, max_t, sum_t, cross, excess, multiplier_s, multiplier_t, KIND: tl.constexpr
):  # fmt: skip
    """Statistics of several groups, of which one may be empty, as one."""
    row_max_s = tl.max(max_s, 0)
    row_max_t = tl.max(max_t, 0)
    base_s, floor_s = _base(row_max_s)
    base_t, floor_t = _base(row_max_t)
    shift_s = (max_s - base_s) * multiplier_s
    shift_t = (max_t - base_t) * multiplier_t
    decay_s = exp(shift_s)
    decay_t = exp(shift_t)
    shift_s = instead_of_infinity(shift_s, floor_s)
    shift_t = instead_of_infinity(shift_t, floor_t)
    apart = _log_ratios(max_s, max_t, base_s, base_t, multiplier_s, multiplier_t, shift_s - shift_t)
    sum_s, sum_t, cross, excess = _moved(
        sum_s, sum_t, cross, excess, apart, shift_s, decay_s, decay_t, KIND
    )
    cross = tl.sum(cross, 0)
    excess = tl.sum(excess, 0)
    sum_s = tl.sum(sum_s, 0)
    sum_t = tl.sum(sum_t, 0)
    # A maximum may overlook NaN; a sum never does.
    row_max_s = tl.where(sum_s == sum_s, row_max_s, sum_s)
    row_max_t = tl.where(sum_t == sum_t, row_max_t, sum_t)
    return row_max_s, sum_s, row_max_t, sum_t, cross, excess


@triton.jit
def _take_in(
    s, t, student, teacher, max_s, sum_s, max_t, sum_t, cross, excess, KIND: tl.constexpr
):  # fmt: skip
    """Statistics `[groups]` and one tile `[groups, lanes]` more: one exp a side and column."""
    multiplier_s = multiplier_of(student)
    multiplier_t = multiplier_of(teacher)
    new_s = tl.maximum(max_s, tl.max(s, 1))
    new_t = tl.maximum(max_t, tl.max(t, 1))
    base_s, floor_s = _base(new_s)
    base_t, floor_t = _base(new_t)
    shift_s = (max_s - base_s) * multiplier_s
    shift_t = (max_t - base_t) * multiplier_t
    decay_s = exp(shift_s)
    decay_t = exp(shift_t)
    shift_s = instead_of_infinity(shift_s, floor_s)
    shift_t = instead_of_infinity(shift_t, floor_t)
    apart = _log_ratios(max_s, max_t, base_s, base_t, multiplier_s, multiplier_t, shift_s - shift_t)
    sum_s, sum_t, cross, excess = _moved(
        sum_s, sum_t, cross, excess, apart, shift_s, decay_s, decay_t, KIND
    )

    z_s = (s - base_s[:, None]) * multiplier_s
    z_t = (t - base_t[:, None]) * multiplier_t
    weight_s = exp(z_s)
    weight_t = exp(z_t)
    z_s = instead_of_infinity(z_s, floor_s[:, None])
    z_t = instead_of_infinity(z_t, floor_t[:, None])
    if KIND == CROSS_ENTROPY:
        cross -= tl.sum(weight_t * z_s, 1)
    elif KIND == FORWARD or KIND == REVERSE:  # noqa: SIM109
        apart = _log_ratios(
            s, t, base_s[:, None], base_t[:, None], multiplier_s, multiplier_t, z_s - z_t
        )
        if KIND == FORWARD:
            own, other = weight_t, weight_s
        else:
            own, other, apart = weight_s, weight_t, -apart
        first = own * apart
        cross -= tl.sum(first, 1)
        excess += tl.sum(exp_excess(apart, own, other - own - first), 1)
    sum_s += tl.sum(weight_s, 1)
    sum_t += tl.sum(weight_t, 1)
    return new_s, sum_s, new_t, sum_t, cross, excess


@triton.jit(
    do_not_specialize=["rows", "valid", "splits"],
    do_not_specialize_on_alignment=[*SIDE_POINTERS, "out_ptr"],
)
def pair_stats_kernel(
    student_ptr, teacher_ptr,  # [n, v]
    student_bias_ptr, student_temperature_ptr,  # [v], [n], or None
    teacher_bias_ptr, teacher_temperature_ptr,
    student_scale, student_softcap, student_multiplier,
    teacher_scale, teacher_softcap, teacher_multiplier,
    student_stride, teacher_stride,
    out_ptr,  # [splits, 6, n] float32
    rows,
    valid,
    split_columns,
    splits,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Pair statistics of one row's columns `[split * split_columns, ...)`.

    Every group of columns keeps its sums about its own maxima until the end.
    """
    row, split, start, stop = own_columns(splits, split_columns, valid)
    student, teacher = side_rows(
        row, student_ptr, student_temperature_ptr, student_stride,
        student_scale, student_softcap, student_multiplier,
        teacher_ptr, teacher_temperature_ptr, teacher_stride,
        teacher_scale, teacher_softcap, teacher_multiplier,
    )  # fmt: skip

    TILE: tl.constexpr = LANES * GROUPS
    offsets = tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    max_s = tl.full([GROUPS], float("-inf"), tl.float32)
    sum_s = tl.zeros([GROUPS], tl.float32)
    max_t = tl.full([GROUPS], float("-inf"), tl.float32)
    sum_t = tl.zeros([GROUPS], tl.float32)
    cross = tl.zeros([GROUPS], tl.float32)
    excess = tl.zeros([GROUPS], tl.float32)
    end = whole_units(start, stop)
    whole = start + (end - start) // TILE * TILE
    for at in range(start, whole, TILE):
        s, _ = load_side(student, student_bias_ptr, at + offsets, valid, False, STUDENT_SOFTCAP)
        t, _ = load_side(teacher, teacher_bias_ptr, at + offsets, valid, False, TEACHER_SOFTCAP)
        max_s, sum_s, max_t, sum_t, cross, excess = _take_in(
            s, t, student, teacher, max_s, sum_s, max_t, sum_t, cross, excess, KIND
        )  # fmt: skip
    if whole < end:
        s, _ = load_side(student, student_bias_ptr, whole + offsets, end, True, STUDENT_SOFTCAP)
        t, _ = load_side(teacher, teacher_bias_ptr, whole + offsets, end, True, TEACHER_SOFTCAP)
        max_s, sum_s, max_t, sum_t, cross, excess = _take_in(
            s, t, student, teacher, max_s, sum_s, max_t, sum_t, cross, excess, KIND
        )  # fmt: skip
    if end < stop:  # under UNIT columns, one per group
        rest = end + tl.arange(0, GROUPS)[:, None]
        s, _ = load_side(student, student_bias_ptr, rest, stop, True, STUDENT_SOFTCAP)
        t, _ = load_side(teacher, teacher_bias_ptr, rest, stop, True, TEACHER_SOFTCAP)
        max_s, sum_s, max_t, sum_t, cross, excess = _take_in(
            s, t, student, teacher, max_s, sum_s, max_t, sum_t, cross, excess, KIND
        )  # fmt: skip

    row_max_s, row_sum_s, row_max_t, row_sum_t, row_cross, row_excess = _merged(
        max_s, sum_s, max_t, sum_t, cross, excess,
        multiplier_of(student), multiplier_of(teacher), KIND,
    )  # fmt: skip
    out = out_ptr + split.to(tl.int64) * STATS * rows + row
    tl.store(out, row_max_s)
    tl.store(out + rows, row_sum_s)
    tl.store(out + 2 * rows, row_max_t)
    tl.store(out + 3 * rows, row_sum_t)
    tl.store(out + 4 * rows, row_cross)
    tl.store(out + 5 * rows, row_excess)


# ---- sums of a second pass ---------------------------------------------------------------------


@triton.jit
def _take_in_shares(
    value, inner, s, t, student, teacher, max_s, log_s, max_t, log_t, mixture, KIND: tl.constexpr
):  # fmt: skip
    """Both sums `[groups]` and one tile more."""
    logp = log_probs(s, student, max_s, log_s)
    logq = log_probs(t, teacher, max_t, log_t)
    p, share, derivative = shares(logp, logq, mixture, KIND)
    return value + tl.sum(share, 1), inner + tl.sum(p * derivative, 1)


@triton.jit(
    do_not_specialize=["rows", "valid", "splits", "softmax_stride"],
    do_not_specialize_on_alignment=[*SIDE_POINTERS, "softmax_ptr", "out_ptr"],
)
def pair_sums_kernel(
    student_ptr, teacher_ptr,  # [n, v]
    student_bias_ptr, student_temperature_ptr,  # [v], [n], or None
    teacher_bias_ptr, teacher_temperature_ptr,
    student_scale, student_softcap, student_multiplier,
    teacher_scale, teacher_softcap, teacher_multiplier,
    student_stride, teacher_stride,
    softmax_ptr,  # [4, n]
    out_ptr,  # [splits, 2, n] float32
    rows,
    valid,
    softmax_stride,
    split_columns,
    splits,
    beta,
    kept,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """`kernels.pairs.pair_sums` of one row's columns `[split * split_columns, ...)`."""
    row, split, start, stop = own_columns(splits, split_columns, valid)
    student, teacher = side_rows(
        row, student_ptr, student_temperature_ptr, student_stride,
        student_scale, student_softcap, student_multiplier,
        teacher_ptr, teacher_temperature_ptr, teacher_stride,
        teacher_scale, teacher_softcap, teacher_multiplier,
    )  # fmt: skip
    max_s, log_s, max_t, log_t = load_softmax(softmax_ptr, softmax_stride, row)
    mixture = beta, kept

    TILE: tl.constexpr = LANES * GROUPS
    offsets = tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    value = tl.zeros([GROUPS], tl.float32)
    inner = tl.zeros([GROUPS], tl.float32)
    end = whole_units(start, stop)
    whole = start + (end - start) // TILE * TILE
    for at in range(start, whole, TILE):
        s, _ = load_side(student, student_bias_ptr, at + offsets, valid, False, STUDENT_SOFTCAP)
        t, _ = load_side(teacher, teacher_bias_ptr, at + offsets, valid, False, TEACHER_SOFTCAP)
        value, inner = _take_in_shares(
            value, inner, s, t, student, teacher, max_s, log_s, max_t, log_t, mixture, KIND
        )  # fmt: skip
    if whole < end:
        s, _ = load_side(student, student_bias_ptr, whole + offsets, end, True, STUDENT_SOFTCAP)
        t, _ = load_side(teacher, teacher_bias_ptr, whole + offsets, end, True, TEACHER_SOFTCAP)
        value, inner = _take_in_shares(
            value, inner, s, t, student, teacher, max_s, log_s, max_t, log_t, mixture, KIND
        )  # fmt: skip
    if end < stop:  # under UNIT columns, one per group
        rest = end + tl.arange(0, GROUPS)[:, None]
        s, _ = load_side(student, student_bias_ptr, rest, stop, True, STUDENT_SOFTCAP)
        t, _ = load_side(teacher, teacher_bias_ptr, rest, stop, True, TEACHER_SOFTCAP)
        value, inner = _take_in_shares(
            value, inner, s, t, student, teacher, max_s, log_s, max_t, log_t, mixture, KIND
        )  # fmt: skip

    # Of a row that holds one, else 0; a sum of maxima might overflow.
    nan = max_s * 0.0 + log_s * 0.0 + max_t * 0.0 + log_t * 0.0
    out = out_ptr + split.to(tl.int64) * 2 * rows + row
    tl.store(out, tl.sum(value, 0) + nan)
    tl.store(out + rows, tl.sum(inner, 0) + nan)


# ---- launches ----------------------------------------------------------------------------------


def pair_stats(student: Chunk, teacher: Chunk, spec: PairSpec, *, chunk_size: int = 0) -> Tensor:
    """As `kernels.pairs.pair_stats`; dtypes and strides of either side as in `stats`."""
    return _pair_stats(*arguments(student, teacher, spec.kind, float(spec.beta)))


def _run_stats(*given: object) -> Tensor:
    student, teacher, *wanted = chunks_of(2, given)
    spec = PairSpec(*wanted)
    plan = pair_plan(student.logits, teacher.logits, student.valid)
    parts = launch_pair_stats(student, teacher, spec, plan)
    multipliers = row_multiplier(student), row_multiplier(teacher)
    return merge_pairs(parts, spec, multipliers).unsqueeze(0)


_SIDES = f"{chunk_schema('student_')}, {chunk_schema('teacher_')}"
_pair_stats = operator(
    f"pair_stats({_SIDES}, str kind, float beta) -> Tensor",
    _run_stats,
    lambda student, *_: student.new_empty((1, PAIR_STATS, len(student)), dtype=torch.float32),
)


def launch_pair_stats(student: Chunk, teacher: Chunk, spec: PairSpec, plan: Plan) -> Tensor:
    """The pair statistics of each split of the plan, `[splits, 6, n]`."""
    rows = student.logits.shape[0]
    out = student.logits.new_empty((plan.splits, PAIR_STATS, rows), dtype=torch.float32)
    if rows:
        launch(
            pair_stats_kernel, rows * plan.splits,
            *sides_arguments(student, teacher), out,
            rows, student.valid, plan.columns, plan.splits,
            LANES=plan.lanes, GROUPS=plan.groups, KIND=KINDS.index(spec.kind),
            **sides_constants(student, teacher),
        )  # fmt: skip
    return out


def pair_sums(
    student: Chunk, teacher: Chunk, softmax: Tensor, spec: PairSpec, *, chunk_size: int = 0
) -> Tensor:
    """As `kernels.pairs.pair_sums`; dtypes and strides as in `pair_stats`."""
    return _pair_sums(*arguments(student, teacher, softmax, spec.kind, float(spec.beta)))


def _run_sums(*given: object) -> Tensor:
    student, teacher, softmax, *wanted = chunks_of(2, given)
    plan = pair_plan(student.logits, teacher.logits, student.valid)
    return launch_pair_sums(student, teacher, softmax, PairSpec(*wanted), plan).sum(0)


_pair_sums = operator(
    f"pair_sums({_SIDES}, Tensor softmax, str kind, float beta) -> Tensor",
    _run_sums,
    lambda student, *_: student.new_empty((2, len(student)), dtype=torch.float32),
)


def launch_pair_sums(
    student: Chunk, teacher: Chunk, softmax: Tensor, spec: PairSpec, plan: Plan
) -> Tensor:
    """The sums of each split of the plan, `[splits, 2, n]`."""
    rows = student.logits.shape[0]
    out = student.logits.new_empty((plan.splits, 2, rows), dtype=torch.float32)
    softmax = with_unit_stride(softmax)
    if rows:
        launch(
            pair_sums_kernel, rows * plan.splits,
            *sides_arguments(student, teacher), softmax, out,
            rows, student.valid, softmax.stride(0), plan.columns, plan.splits,
            spec.beta, 1.0 - spec.beta,
            LANES=plan.lanes, GROUPS=plan.groups, KIND=KINDS.index(spec.kind),
            **sides_constants(student, teacher),
        )  # fmt: skip
    return out
