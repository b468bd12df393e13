"""Row statistics in one read of the logits, as a Triton kernel."""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.segments import Segments
from mcore_logprobs.kernels.stats import RowSpec, TargetIds
from mcore_logprobs.kernels.triton_common import (
    Plan,
    block_plan,
    candidate,
    ceil_div,
    clamped,
    device_of,
    exp,
    field_constants,
    finished,
    launch_plan,
    positional,
    row_transform,
    transform_constants,
    with_unit_stride,
)
from mcore_logprobs.kernels.triton_finish import located, merge_parts
from mcore_logprobs.kernels.triton_launch import Launcher

__all__ = [
    "STORED",
    "block_stats",
    "located_stats",
    "row_stats",
    "segment_stats",
    "split_stats",
    "stats_kernel",
]


@triton.jit
def _accumulate(
    top,  # [groups], the running maximum of z
    total,  # [groups], sum exp(z - top)
    weighted,  # [groups], sum (z - top) exp(z - top)
    squares,  # [groups], sum exp(2 (z - top))
    higher,  # [groups] int32
    zsum,  # [groups]
    finite,  # [groups] int32
    y,  # [groups, lanes], raw logits; -inf where masked
    bias_ptr,
    limit,
    start,
    valid,
    scale,
    softcap,
    temperature,
    MASKED: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    RANK: tl.constexpr,
    SMOOTHING: tl.constexpr,
):
    """Take in one tile. Every group keeps sums about its own maximum: one exp for each column."""
    y = y.to(tl.float32)
    columns = start + tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    mask = None
    if MASKED:
        mask = columns < valid
    z, _ = finished(
        y, bias_ptr, columns, mask, scale, softcap, temperature,
        HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, HAS_TEMPERATURE,
    )  # fmt: skip
    if MASKED:
        z = tl.where(mask, z, float("-inf"))
    if RANK:
        if HAS_BIAS:
            higher += tl.sum((z > limit).to(tl.int32), 1)
        else:
            higher += tl.sum((y > limit).to(tl.int32), 1)
    if SMOOTHING:
        is_finite = z != float("-inf")
        zsum += tl.sum(tl.where(is_finite, z, 0.0), 1)
        finite += tl.sum(is_finite.to(tl.int32), 1)

    new_top = tl.maximum(top, tl.max(z, 1))
    # Where all is -inf so far, about 0: exp(-inf - 0) is 0, exp(-inf - -inf) would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shifted = z - base[:, None]
    weight = exp(shifted)
    decay = exp(top - base)
    if ENTROPY:
        # Clamped only where multiplied, for a NaN must not pass as a probability of 0.
        moved = clamped(top - base)
        weighted = (weighted + moved * total) * decay
        weighted += tl.sum(weight * clamped(shifted), 1)
    if SQUARES:
        squares = squares * decay * decay + tl.sum(weight * weight, 1)
    total = total * decay + tl.sum(weight, 1)
    return new_top, total, weighted, squares, higher, zsum, finite


@triton.jit(
    do_not_specialize=[
        "rows", "valid", "splits", "segments", "segment_columns",
        "first_id", "vocab_size", "ignore_index",
    ]
)  # fmt: skip
def stats_kernel(
    logits_ptr,  # [n, segments, columns], rows and segments any strides apart
    target_ptr,  # [n] int64, or None: no row has one
    column_ptr,  # [n] int64, written where targets are global ids; None: they are columns
    threshold_ptr,  # [n] float32, or None: the target's own logit
    bias_ptr,  # [segments, columns], as far apart as the logits' segments
    temperature_ptr,  # [n]
    out_ptr,  # [segments, splits, fields, n] float32
    rows,
    row_stride,
    first_id,
    vocab_size,
    ignore_index,
    valid,
    split_columns,
    splits,
    segments,
    segment_columns,
    segment_stride,
    scale,
    softcap,
    temperature,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_ROW_TEMPERATURE: tl.constexpr,
    FIELDS: tl.constexpr,
    MAX: tl.constexpr,
    SUM: tl.constexpr,
    TARGET: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    HIGHER: tl.constexpr,
    ZSUM: tl.constexpr,
    FINITE: tl.constexpr,
):
    """Statistics of one row's columns `[split * split_columns, ...)` in one of its segments.

    MAX to FINITE are the statistics' places in out (`RowSpec.position`), -1 for one not wanted.
    """
    TILE: tl.constexpr = LANES * GROUPS
    program = tl.program_id(0)
    part = program % (segments * splits)
    row = program // (segments * splits)
    segment = part // splits
    split = part % splits
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride + segment * segment_stride
    if HAS_BIAS:
        bias_ptr += segment * segment_stride
    # From here on columns are counted from the segment's first.
    first = segment * segment_columns
    valid = tl.minimum(tl.maximum(valid - first, 0), segment_columns)
    column = tl.full([], -1, tl.int64)
    if target_ptr is not None:
        column = tl.load(target_ptr + row)
    if column_ptr is not None:
        column = located(column, first_id, segments * segment_columns, vocab_size, ignore_index)
        tl.store(column_ptr + row, column, mask=part == 0)
    column -= first
    own = (column >= 0) & (column < segment_columns)
    start = split * split_columns
    stop = tl.minimum(start + split_columns, valid)

    scale, softcap, temperature = row_transform(
        temperature_ptr, row, scale, softcap, temperature,
        HAS_ROW_TEMPERATURE, HAS_SOFTCAP, HAS_TEMPERATURE,
    )  # fmt: skip
    limit = 0.0
    if HIGHER >= 0:
        if threshold_ptr is None:
            limit = tl.load(row_ptr + column, mask=own, other=0.0).to(tl.float32)
        else:
            limit = tl.load(threshold_ptr + row).to(tl.float32)
            if not HAS_BIAS:
                limit = limit.to(logits_ptr.dtype.element_ty).to(tl.float32)

    top = tl.full([GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    weighted = tl.zeros([GROUPS], tl.float32)
    squares = tl.zeros([GROUPS], tl.float32)
    higher = tl.zeros([GROUPS], tl.int32)
    zsum = tl.zeros([GROUPS], tl.float32)
    finite = tl.zeros([GROUPS], tl.int32)
    offsets = tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = start + tl.maximum(stop - start, 0) // TILE * TILE
    if PREFETCH:
        # All or nothing of a tile: one predicate, not one a column.
        same = tl.zeros([GROUPS, LANES], tl.int32)
        ahead = tl.load(row_ptr + start + offsets, mask=same + start < whole, other=0.0)
    for at in tl.range(start, whole, TILE, num_stages=STAGES):
        if PREFETCH:
            y = ahead
            more = same + (at + TILE) < whole
            ahead = tl.load(row_ptr + at + TILE + offsets, mask=more, other=0.0)
        else:
            y = tl.load(row_ptr + at + offsets)
        top, total, weighted, squares, higher, zsum, finite = _accumulate(
            top, total, weighted, squares, higher, zsum, finite, y, bias_ptr, limit, at,
            valid, scale, softcap, temperature, False, LANES, GROUPS,
            HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, HAS_TEMPERATURE, ENTROPY >= 0,
            SQUARES >= 0, HIGHER >= 0, ZSUM >= 0,
        )  # fmt: skip
    if whole < stop:
        rest = whole + offsets
        y = tl.load(row_ptr + rest, mask=rest < valid, other=float("-inf"))
        top, total, weighted, squares, higher, zsum, finite = _accumulate(
            top, total, weighted, squares, higher, zsum, finite, y, bias_ptr, limit, whole,
            valid, scale, softcap, temperature, True, LANES, GROUPS,
            HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, HAS_TEMPERATURE, ENTROPY >= 0,
            SQUARES >= 0, HIGHER >= 0, ZSUM >= 0,
        )  # fmt: skip

    row_top = tl.max(top, 0)
    base = tl.where(row_top == float("-inf"), 0.0, row_top)
    decay = exp(top - base)
    row_total = tl.sum(total * decay, 0)
    # A maximum may overlook NaN; the sum never does.
    row_top = tl.where(row_total == row_total, row_top, row_total)

    # The target's own column: read by the first split, whoever walks over it.
    own = own & (split == 0)
    own_y = tl.load(row_ptr + column, mask=own, other=0.0).to(tl.float32)
    own_z, _ = finished(
        own_y, bias_ptr, column, own, scale, softcap, temperature,
        HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, HAS_TEMPERATURE,
    )  # fmt: skip

    out = out_ptr + part.to(tl.int64) * FIELDS * rows + row
    tl.store(out + MAX * rows, row_top)
    tl.store(out + SUM * rows, row_total)
    tl.store(out + TARGET * rows, tl.where(own, own_z, 0.0))
    if ENTROPY >= 0:
        moved = clamped(top - base)
        tl.store(out + ENTROPY * rows, tl.sum((weighted + moved * total) * decay, 0))
    if SQUARES >= 0:
        tl.store(out + SQUARES * rows, tl.sum(squares * decay * decay, 0))
    if HIGHER >= 0:
        # Not counted by name, as its value may differ from the limit by an ulp.
        own_value = own_z if HAS_BIAS else own_y
        counted = (own & (own_value > limit)).to(tl.int32)
        tl.store(out + HIGHER * rows, (tl.sum(higher, 0) - counted).to(tl.float32))
    if ZSUM >= 0:
        tl.store(out + ZSUM * rows, tl.sum(zsum, 0))
        tl.store(out + FINITE * rows, tl.sum(finite, 0).to(tl.float32))


_launch_stats = Launcher(stats_kernel)

# What the kernel stores; its constants have these names in capitals.
STORED = ("max", "sum", "target", "entropy", "squares", "higher", "zsum", "finite")


@lru_cache(1024)
def _arguments(
    spec: RowSpec,
    plan: Plan,
    local: int,
    segment_columns: int,
    segment_stride: int,
    has_bias: bool,
    own_temperature: bool,
    series: bool,
) -> tuple[Any, ...]:
    """The kernel's arguments from `valid` on."""
    return positional(
        stats_kernel,
        {
            "valid": spec.valid,
            "split_columns": plan.columns,
            "splits": plan.splits,
            "segments": local,
            "segment_columns": segment_columns,
            "segment_stride": segment_stride,
            "LANES": plan.lanes,
            "GROUPS": plan.groups,
            "STAGES": plan.stages,
            "PREFETCH": plan.prefetch,
            **transform_constants(spec, has_bias, own_temperature, series),
            **field_constants(spec, *STORED),
        },
    )


def row_stats(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    *,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """As `kernels.reference.row_stats`, for logits whose last stride is 1."""
    parts, _ = split_stats(
        logits, target, spec, bias=bias, threshold=threshold, temperature=temperature, plan=plan
    )
    return _joined(parts, spec)


def _joined(parts: Tensor, spec: RowSpec) -> Tensor:
    return parts[0] if parts.shape[0] == 1 else merge_parts(parts.unsqueeze(0), spec)[0]


def split_stats(
    logits: Tensor,
    target: Tensor | None,
    spec: RowSpec,
    *,
    ids: TargetIds | None = None,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `row_stats`, of the parts of each row that the plan splits it into, `[splits, k, n]`.

    Without a threshold `higher` counts against the target's own logit, which must be here.

    Args:
        target: may be None, where no row has one.
        ids: the targets are global ids; None: columns.

    Returns:
        The statistics, and with ids the targets' columns `[n]`.
    """
    plan = plan or launch_plan(logits.shape[0], spec.valid, logits)
    return _launch(logits, target, ids, spec, None, 0, plan, bias, threshold, temperature)


def located_stats(
    logits: Tensor,
    target: Tensor | None,
    ids: TargetIds,
    spec: RowSpec,
    segments: Segments | None = None,
    *,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `row_stats`, or `segment_stats`, for targets that are global ids; and their columns."""
    if segments is not None:
        return _segment_stats(logits, target, ids, spec, segments, None, None, temperature)
    parts, column = split_stats(logits, target, spec, ids=ids, temperature=temperature)
    return _joined(parts, spec), column


def block_stats(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    *,
    block: int,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
) -> Tensor:
    """As `kernels.reference.block_stats`, for logits whose last stride is 1."""
    columns = max(1, spec.valid)
    logits, _ = _aligned(logits[:, :columns], 1)
    plan = block_plan(columns, block, logits.element_size())
    return _launch(logits, target, None, spec, None, 0, plan, bias, threshold, temperature)[0]


def segment_stats(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    segments: Segments,
    *,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
) -> Tensor:
    """As `kernels.segments.segment_stats`, `[local, k, n]`: two launches, whatever the segments.

    A row's bits depend on its own numbers alone: how it is split follows from the segments' width,
    and memory is aligned alike in every call, for Triton compiles another kernel, which may add in
    another order, where it is not.
    """
    return _segment_stats(logits, target, None, spec, segments, bias, threshold, temperature)[0]


def _segment_stats(
    logits: Tensor,
    target: Tensor | None,
    ids: TargetIds | None,
    spec: RowSpec,
    segments: Segments,
    bias: Tensor | None,
    threshold: Tensor | None,
    temperature: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    assert threshold is not None or not spec.rank, (
        "a segment alone does not know the target's logit"
    )
    aligned, stride = _aligned(logits, segments.local)
    if bias is not None:
        bias = _aligned(bias.unsqueeze(0), segments.local)[0][0]
    plan = block_plan(segments.width, segments.block("cuda"), logits.element_size())
    parts, column = _launch(
        aligned, target, ids, spec, segments, stride, plan, bias, threshold, temperature
    )
    return merge_parts(parts.unflatten(0, (segments.local, plan.splits)), spec), column


# Numbers that strides and pointers are divisible by where Triton reads 16 bytes at a time.
_UNIT = 16


def _aligned(logits: Tensor, segments: int) -> tuple[Tensor, int]:
    """The logits, or a copy, whose segments all start at multiples of `_UNIT`; how far apart.

    Args:
        logits: `[n, segments * columns]`.
    """
    rows, width = logits.shape
    columns = width // segments
    starts = logits.data_ptr() % _UNIT == 0 and (rows == 1 or logits.stride(0) % _UNIT == 0)
    if starts and segments == 1:
        return logits, 0
    if starts and columns % _UNIT == 0:
        return logits, columns
    stride = ceil_div(columns, _UNIT) * _UNIT
    copy = logits.new_empty(rows, segments, stride)
    copy[:, :, :columns] = logits.unflatten(1, (segments, columns))
    return copy.flatten(1), stride


def _launch(
    logits: Tensor,
    target: Tensor | None,
    ids: TargetIds | None,
    spec: RowSpec,
    segments: Segments | None,
    segment_stride: int,
    plan: Plan,
    bias: Tensor | None,
    threshold: Tensor | None,
    temperature: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The statistics of each split of each segment, `[local * splits, k, n]`; targets' columns."""
    rows, width = logits.shape
    local, columns = (1, width) if segments is None else (segments.local, segments.width)
    count, device = local * plan.splits, logits.device
    parts = torch.empty(count, len(spec.fields), rows, dtype=torch.float32, device=device)
    column = None
    if ids is not None and target is not None:
        column = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return parts, column
    with device_of(logits):
        _launch_stats(
            (rows * count, 1, 1),
            (
                logits, with_unit_stride(target), column, with_unit_stride(threshold),
                with_unit_stride(bias), with_unit_stride(temperature), parts,
            ),
            # Of one row the stride may be any number.
            (rows, logits.stride(0) if rows > 1 else 0, *(ids or (0, 0, None))),
            _arguments(
                spec, plan, local, columns, segment_stride,
                bias is not None, temperature is not None, candidate().series,
            ),
            num_warps=plan.num_warps,
        )  # fmt: skip
    return parts, column
