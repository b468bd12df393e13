"""From shards' statistics to what users get, each step in one launch, as Triton kernels.

    localize     global targets to this shard's columns (statistics do without: `located`)
    merge        the parts of rows (programs, shards, segments) to whole rows
    finish       the same, on to log-probabilities, entropy and the rest

`logits.opening` and `kernels.stats` do the same in plain torch, a launch for each operation.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.stats import (
    DROPPED,
    ELSEWHERE,
    IGNORED,
    UNKNOWN,
    RowSpec,
    TargetIds,
)
from mcore_logprobs.kernels.triton_common import (
    ceil_div,
    clamped,
    device_of,
    exp,
    field_constants,
    positional,
    power_of_2,
    with_unit_stride,
)
from mcore_logprobs.kernels.triton_launch import Launcher

__all__ = [
    "FIELDS",
    "finish_kernel",
    "finish_rows",
    "localize",
    "localize_kernel",
    "located",
    "merge_kernel",
    "merge_parts",
    "norm_constants",
    "own_logits",
]

# What these kernels read of the statistics; their constants have these names in capitals.
FIELDS = ("max", "sum", "target", "entropy", "squares", "higher", "zsum", "finite")
# As literals in the kernel: Triton compares a kernel's global constants at every launch.
assert IGNORED == (0.0, 0.0, -1, 0.0, 0.0)

# The negative numbers of `located`, as literals in the kernels for the same reason.
assert (ELSEWHERE, DROPPED, UNKNOWN) == (-1, -2, -3)
# Without debug an assert is compiled to nothing.
_ASSERTING = {"debug": True, "sanitize_overflow": False}


# ---- targets -----------------------------------------------------------------------------------


@triton.jit
def located(target, first_id, width, vocab_size, ignore_index):
    """The columns of global ids, as `kernels.stats.TargetIds` says; ignore_index may be None."""
    target = target.to(tl.int64)
    column = target - first_id
    column = tl.where((column >= 0) & (column < width), column, -1)
    column = tl.where((target >= 0) & (target < vocab_size), column, -3)
    if ignore_index is not None:
        column = tl.where(target == ignore_index, -2, column)
    return column


@triton.jit(do_not_specialize=["count", "first_id", "width", "vocab_size", "ignore_index"])
def localize_kernel(
    target_ptr,  # [n], any integers
    column_ptr,  # [n] int64
    keep_ptr,  # [n] bool; None: not wanted
    logits_ptr,  # [n, width]; None: none
    own_ptr,  # [n] float32, the raw logits at the columns
    count,
    row_stride,
    first_id,
    width,
    vocab_size,
    ignore_index,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    # Past the end lies an id: device_assert has a mask from Triton 3.5 on only.
    target = tl.load(target_ptr + at, mask=mask, other=0)
    column = located(target, first_id, width, vocab_size, ignore_index)
    tl.device_assert(column != -3, "an id is outside [0, vocab_size)")
    tl.store(column_ptr + at, column, mask=mask)
    if keep_ptr is not None:
        tl.store(keep_ptr + at, column != -2, mask=mask)
    if logits_ptr is not None:
        here = mask & (column >= 0)
        own = tl.load(logits_ptr + at * row_stride + column, mask=here, other=0.0)
        tl.store(own_ptr + at, own.to(tl.float32), mask=mask)


_launch_localize = Launcher(localize_kernel, **_ASSERTING)


def localize(
    target: Tensor, *, start: int, width: int, vocab_size: int, ignore_index: int | None
) -> tuple[Tensor, Tensor]:
    """As `logits.opening.localize_target`: (column, keep), contiguous and of the target's shape.

    An id outside the vocabulary fails a device-side assert; the interpreter checks nothing.
    """
    keep = torch.empty(target.shape, dtype=torch.bool, device=target.device)
    ids = TargetIds(start, vocab_size, ignore_index)
    return _localize(target, ids, width, keep, None, None), keep


def own_logits(logits: Tensor, target: Tensor, ids: TargetIds) -> tuple[Tensor, Tensor]:
    """Global ids to columns, `[n]`; and the raw logits there in float32, 0 where not here."""
    own = torch.empty(target.shape, dtype=torch.float32, device=target.device)
    return _localize(target, ids, logits.shape[1], None, logits, own), own


def _localize(
    target: Tensor,
    ids: TargetIds,
    width: int,
    keep: Tensor | None,
    logits: Tensor | None,
    own: Tensor | None,
) -> Tensor:
    target, count = target.contiguous(), target.numel()
    column = torch.empty(target.shape, dtype=torch.int64, device=target.device)
    if count:
        with device_of(target):
            _launch_localize(
                (ceil_div(count, 1024), 1, 1),
                (target, column, keep, logits, own),
                (count, 0 if logits is None else logits.stride(0), ids.start, width, *ids[1:]),
                (1024,),
            )
    return column


# ---- parts to whole rows -----------------------------------------------------------------------


@triton.jit
def _share(part, mask, field_stride, MAX: tl.constexpr, SUM: tl.constexpr):
    """How parts `[parts, rows]` of statistics add up to their rows, as in `kernels.stats.merge`.

    Returns (the rows' maximum and sum; of each part the sum, the distance of its maximum to the
    row's, and exp of that).
    """
    top = tl.load(part + MAX * field_stride, mask=mask, other=float("-inf"))
    total = tl.load(part + SUM * field_stride, mask=mask, other=0.0)
    row_top = tl.max(top, 0)
    # A part of -inf alone has sums of 0: its distance must be finite for 0 times it to be 0.
    shift = top - tl.where(row_top == float("-inf"), 0.0, row_top)[None, :]
    decay = exp(shift)
    row_total = tl.sum(total * decay, 0)
    # A maximum may overlook NaN; the sum never does.
    row_top = tl.where(row_total == row_total, row_top, row_total)
    return row_top, row_total, total, clamped(shift), decay


@triton.jit
def _read(FIELD: tl.constexpr, part, mask, field_stride):
    """One statistic of all parts, `[parts, rows]`."""
    return tl.load(part + FIELD * field_stride, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["rows", "parts"])
def merge_kernel(
    parts_ptr,  # [groups, parts, fields, n]
    out_ptr,  # [groups, fields, n]
    rows,
    parts,
    PARTS: tl.constexpr,  # parts, or the next power of two
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    MAX: tl.constexpr,
    SUM: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1).to(tl.int64)
    number = tl.arange(0, PARTS)
    mask = (number < parts)[:, None] & (row < rows)[None, :]
    offsets = ((group * parts + number) * FIELDS * rows)[:, None] + row[None, :]
    part = parts_ptr + offsets
    out = out_ptr + group * FIELDS * rows + row
    row_top, row_total, total, shift, decay = _share(part, mask, rows, MAX, SUM)
    for field in tl.static_range(FIELDS):
        if field == MAX:
            merged = row_top
        elif field == SUM:
            merged = row_total
        else:
            value = _read(field, part, mask, rows)
            if field == ENTROPY:
                value = (value + shift * total) * decay
            elif field == SQUARES:
                value = value * decay * decay
            merged = tl.sum(value, 0)
        tl.store(out + field * rows, merged, mask=row < rows)


_launch_merge = Launcher(merge_kernel)


def merge_parts(parts: Tensor, spec: RowSpec) -> Tensor:
    """`kernels.stats.merge` of contiguous `[groups, parts, k, n]` to `[groups, k, n]`.

    A row's bits depend on its own parts and their number alone: every row is added in one tree.
    """
    groups, count, fields, rows = parts.shape
    out = torch.empty(groups, fields, rows, dtype=torch.float32, device=parts.device)
    if rows:
        with device_of(parts):
            _launch_merge(
                (ceil_div(rows, 8), groups, 1),
                (parts, out),
                (rows, count),
                _merge_constants(spec, count),
            )
    return out


@lru_cache(1024)
def _merge_constants(spec: RowSpec, count: int) -> tuple[Any, ...]:
    fields = field_constants(spec, "max", "sum", "entropy", "squares")
    return positional(merge_kernel, {"PARTS": power_of_2(count), "ROWS": 8, **fields})


# ---- whole rows to results ---------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "parts", "part_stride", "field_stride"])
def finish_kernel(
    parts_ptr,  # [parts, fields, n]
    column_ptr,  # [n] int64, as `located` gives; None: all rows are kept
    logprobs_ptr,  # [n], as the next four; None: not wanted
    entropy_ptr,
    rank_ptr,  # int64
    lse_ptr,
    sum_pi_squared_ptr,
    norms_ptr,  # [norms, n]
    rows,
    parts,
    part_stride,
    field_stride,
    label_smoothing,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    MAX: tl.constexpr,
    SUM: tl.constexpr,
    TARGET: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    HIGHER: tl.constexpr,
    ZSUM: tl.constexpr,
    FINITE: tl.constexpr,
    NORM_TOP: tl.constexpr,
    NORM_SUM: tl.constexpr,
    NORM_ENTROPY: tl.constexpr,
    NORM_FINITE: tl.constexpr,
    NORM_SUM_PI_SQUARED: tl.constexpr,
):
    """`kernels.stats`: merge, then finish, then ignored rows blanked.

    MAX to FINITE are the statistics' places (-1: not there), NORM_TOP and so on the norms'.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    number = tl.arange(0, PARTS)
    mask = (number < parts)[:, None] & inside[None, :]
    part = parts_ptr + (number.to(tl.int64) * part_stride)[:, None] + row[None, :]
    keep = inside
    if column_ptr is not None:
        column = tl.load(column_ptr + row, mask=inside, other=-1)
        tl.device_assert(column != -3, "an id is outside [0, vocab_size)")
        keep = column != -2
    norms = norms_ptr + row

    row_top, row_sum, total, shift, decay = _share(part, mask, field_stride, MAX, SUM)
    # A row that is -inf everywhere has p = 0 everywhere, and an lse of 0.
    empty = row_top == float("-inf")
    top = tl.where(empty, 0.0, row_top)
    row_sum = tl.where(empty, 1.0, row_sum)
    log_sum = tl.log(row_sum)
    lse = top + log_sum
    tl.store(norms + NORM_TOP * rows, top, mask=inside)
    tl.store(norms + NORM_SUM * rows, row_sum, mask=inside)
    tl.store(lse_ptr + row, tl.where(keep, lse, 0.0), mask=inside)

    target = tl.sum(_read(TARGET, part, mask, field_stride), 0)
    # (t - m) - log s, not t - (m + log s): the difference of two large numbers is taken exactly.
    logprobs = (target - top) - log_sum
    if FINITE >= 0:
        finite = tl.sum(_read(FINITE, part, mask, field_stride), 0)
        zsum = tl.sum(_read(ZSUM, part, mask, field_stride), 0)
        on_target, on_finite = smoothing_weights(label_smoothing, finite)
        logprobs = on_target * logprobs + on_finite * (zsum - finite * lse)
        tl.store(norms + NORM_FINITE * rows, finite, mask=inside)
    tl.store(logprobs_ptr + row, tl.where(keep, logprobs, 0.0), mask=inside)

    if ENTROPY >= 0:
        moved = (_read(ENTROPY, part, mask, field_stride) + shift * total) * decay
        entropy = log_sum - tl.div_rn(tl.sum(moved, 0), row_sum)
        entropy = tl.where(entropy < 0.0, 0.0, entropy)  # tl.maximum would overlook NaN
        tl.store(norms + NORM_ENTROPY * rows, entropy, mask=inside)
        tl.store(entropy_ptr + row, tl.where(keep, entropy, 0.0), mask=inside)
    if SQUARES >= 0:
        squares = tl.sum(_read(SQUARES, part, mask, field_stride) * decay * decay, 0)
        squares = tl.div_rn(squares, row_sum * row_sum)
        tl.store(norms + NORM_SUM_PI_SQUARED * rows, squares, mask=inside)
        tl.store(sum_pi_squared_ptr + row, tl.where(keep, squares, 0.0), mask=inside)
    if HIGHER >= 0:
        higher = tl.sum(_read(HIGHER, part, mask, field_stride), 0).to(tl.int64)
        known = keep & (target == target)
        tl.store(rank_ptr + row, tl.where(known, higher, -1), mask=inside)


@triton.jit
def smoothing_weights(label_smoothing, finite):
    """As `kernels.stats.smoothing_weights`: (extra on the target, on every finite column)."""
    other = tl.div_rn(label_smoothing, tl.maximum(finite - 1.0, 1.0))
    return 1.0 - other * finite, other


@lru_cache(1024)
def _finish_constants(spec: RowSpec, count: int, label_smoothing: float) -> tuple[Any, ...]:
    """The kernel's arguments from `label_smoothing` on."""
    places = field_constants(spec, *FIELDS) | norm_constants(spec)
    own = {"label_smoothing": float(label_smoothing), "PARTS": power_of_2(count), "ROWS": 8}
    return positional(finish_kernel, own | places)


@lru_cache(1024)
def norm_constants(spec: RowSpec) -> dict[str, int]:
    """The rows of a `[norms, n]` tensor as kernels' constants: NORM_TOP=0, ..., -1: not there."""
    return {
        "NORM_" + name.upper(): spec.norms.index(name) if name in spec.norms else -1
        for name in ("top", "sum", "entropy", "finite", "sum_pi_squared")
    }


_launch_finish = Launcher(finish_kernel, **_ASSERTING)


def finish_rows(
    parts: Tensor, column: Tensor | None, spec: RowSpec, label_smoothing: float
) -> list[Tensor]:
    """Statistics of parts `[parts, k, n]` to results and norms.

    Args:
        column: `[n]`, as `TargetIds` says, or None: all rows are kept. An UNKNOWN one fails a
            device-side assert; the interpreter checks nothing.

    Returns:
        The results `[n]` that the spec asks for in the order of `RowResults`, rows that are not
        kept blanked; last `[norms, n]` float32 for the gradient, as `spec.norms` says.
    """
    count, _, rows = parts.shape
    parts, device = with_unit_stride(parts), parts.device

    def wanted(yes: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(rows, dtype=dtype, device=device) if yes else None

    logprobs, lse = wanted(True), wanted(True)
    entropy, squares = wanted(spec.entropy), wanted(spec.sum_pi_squared)
    rank = wanted(spec.rank, torch.int64)
    norms = torch.empty(len(spec.norms), rows, dtype=torch.float32, device=device)
    if rows:
        with device_of(parts):
            _launch_finish(
                (ceil_div(rows, 8), 1, 1),
                (parts, with_unit_stride(column), logprobs, entropy, rank, lse, squares, norms),
                (rows, count, parts.stride(0), parts.stride(1)),
                _finish_constants(spec, count, label_smoothing),
            )
    return [x for x in (logprobs, entropy, rank, lse, squares, norms) if x is not None]
