"""Row statistics in one read of the logits, as a Triton kernel."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.stats import RowSpec
from mcore_logprobs.kernels.triton_common import (
    LOG2E,
    LOG_ZERO,
    Plan,
    block_plan,
    device_of,
    field_constants,
    finished,
    launch_plan,
    row_transform,
    transform_args,
    with_unit_stride,
)

__all__ = ["STORED", "block_stats", "merge_splits", "row_stats", "stats_kernel"]


@triton.jit
def _accumulate(
    top,  # [groups], the running maximum of z
    total,  # [groups], sum exp(z - top)
    weighted,  # [groups], sum (z - top) exp(z - top)
    squares,  # [groups], sum exp(2 (z - top))
    higher,  # [groups] int32
    zsum,  # [groups]
    finite,  # [groups] int32
    row_ptr,
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
    columns = start + tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    if MASKED:
        mask = columns < valid
        y = tl.load(row_ptr + columns, mask=mask, other=float("-inf")).to(tl.float32)
    else:
        mask = None
        y = tl.load(row_ptr + columns).to(tl.float32)
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
    weight = tl.exp2(shifted * LOG2E)
    decay = tl.exp2((top - base) * LOG2E)
    if ENTROPY:
        # Clamped only where multiplied, for a NaN must not pass as a probability of 0.
        moved = tl.maximum(top - base, LOG_ZERO)
        weighted = (weighted + moved * total) * decay
        weighted += tl.sum(weight * tl.maximum(shifted, LOG_ZERO), 1)
    if SQUARES:
        squares = squares * decay * decay + tl.sum(weight * weight, 1)
    total = total * decay + tl.sum(weight, 1)
    return new_top, total, weighted, squares, higher, zsum, finite


@triton.jit(do_not_specialize=["rows", "valid", "splits"])
def stats_kernel(
    logits_ptr,  # [n, v]
    target_ptr,  # [n] int64
    threshold_ptr,  # [n] float32
    bias_ptr,  # [v]
    temperature_ptr,  # [n]
    out_ptr,  # [splits, fields, n] float32
    rows,
    valid,
    row_stride,
    split_columns,
    splits,
    scale,
    softcap,
    temperature,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
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
    """Statistics of one row's columns `[split * split_columns, ...)`.

    MAX to FINITE are the statistics' places in out (`RowSpec.position`), -1 for one not wanted.
    """
    TILE: tl.constexpr = LANES * GROUPS
    program = tl.program_id(0)
    row = program // splits
    split = program % splits
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    start = split * split_columns
    stop = tl.minimum(start + split_columns, valid)

    scale, softcap, temperature = row_transform(
        temperature_ptr, row, scale, softcap, temperature,
        HAS_ROW_TEMPERATURE, HAS_SOFTCAP, HAS_TEMPERATURE,
    )  # fmt: skip
    limit = 0.0
    if HIGHER >= 0:
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
    whole = start + tl.maximum(stop - start, 0) // TILE * TILE
    for at in range(start, whole, TILE):
        top, total, weighted, squares, higher, zsum, finite = _accumulate(
            top, total, weighted, squares, higher, zsum, finite, row_ptr, bias_ptr, limit, at,
            valid, scale, softcap, temperature, False, LANES, GROUPS,
            HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, HAS_TEMPERATURE, ENTROPY >= 0,
            SQUARES >= 0, HIGHER >= 0, ZSUM >= 0,
        )  # fmt: skip
    if whole < stop:
        top, total, weighted, squares, higher, zsum, finite = _accumulate(
            top, total, weighted, squares, higher, zsum, finite, row_ptr, bias_ptr, limit, whole,
            valid, scale, softcap, temperature, True, LANES, GROUPS,
            HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, HAS_TEMPERATURE, ENTROPY >= 0,
            SQUARES >= 0, HIGHER >= 0, ZSUM >= 0,
        )  # fmt: skip

    row_top = tl.max(top, 0)
    base = tl.where(row_top == float("-inf"), 0.0, row_top)
    decay = tl.exp2((top - base) * LOG2E)
    row_total = tl.sum(total * decay, 0)
    # A maximum may overlook NaN; the sum never does.
    row_top = tl.where(row_total == row_total, row_top, row_total)

    # The target's own column: read by the first split, whoever walks over it.
    column = tl.load(target_ptr + row)
    own = (column >= 0) & (split == 0)
    own_y = tl.load(row_ptr + column, mask=own, other=0.0).to(tl.float32)
    own_z, _ = finished(
        own_y, bias_ptr, column, own, scale, softcap, temperature,
        HAS_SCALE, HAS_SOFTCAP, HAS_BIAS, HAS_TEMPERATURE,
    )  # fmt: skip

    out = out_ptr + split.to(tl.int64) * FIELDS * rows + row
    tl.store(out + MAX * rows, row_top)
    tl.store(out + SUM * rows, row_total)
    tl.store(out + TARGET * rows, tl.where(own, own_z, 0.0))
    if ENTROPY >= 0:
        moved = tl.maximum(top - base, LOG_ZERO)
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


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_kernel(
    parts_ptr,  # [splits, fields, n]
    out_ptr,  # [fields, n]
    rows,
    splits,
    SPLITS: tl.constexpr,  # splits, or the next power of two
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    MAX: tl.constexpr,
    SUM: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.arange(0, SPLITS)
    mask = (split < splits)[:, None] & (row < rows)[None, :]
    part = parts_ptr + (split.to(tl.int64) * FIELDS * rows)[:, None] + row[None, :]
    top = tl.load(part + MAX * rows, mask=mask, other=float("-inf"))
    total = tl.load(part + SUM * rows, mask=mask, other=0.0)
    row_top = tl.max(top, 0)
    base = tl.where(row_top == float("-inf"), 0.0, row_top)
    decay = tl.exp2((top - base[None, :]) * LOG2E)
    row_total = tl.sum(total * decay, 0)
    row_top = tl.where(row_total == row_total, row_top, row_total)
    for field in tl.static_range(FIELDS):
        if field == MAX:
            merged = row_top
        elif field == SUM:
            merged = row_total
        else:
            value = tl.load(part + field * rows, mask=mask, other=0.0)
            if field == ENTROPY:
                moved = tl.maximum(top - base[None, :], LOG_ZERO)
                value = (value + moved * total) * decay
            elif field == SQUARES:
                value = value * decay * decay
            merged = tl.sum(value, 0)
        tl.store(out_ptr + field * rows + row, merged, mask=row < rows)


# What the kernel stores; its constants have these names in capitals.
STORED = ("max", "sum", "target", "entropy", "squares", "higher", "zsum", "finite")


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
    plan = plan or launch_plan(logits.shape[0], spec.valid, logits)
    parts = _split_stats(logits, target, spec, plan, bias, threshold, temperature)
    if plan.splits == 1 or logits.shape[0] == 0:
        return parts[0]
    out = torch.empty_like(parts[0])
    with device_of(logits):
        merge_splits(parts, out, spec)
    return out


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
    """As `kernels.reference.block_stats`, for logits whose last stride is 1.

    One program a row and block, and logits that are aligned alike in every call: Triton compiles
    another kernel, which may add in another order, where they are not.
    """
    return _split_stats(
        _aligned_rows(logits), target, spec, block_plan(spec.valid, block, logits),
        bias, threshold, temperature,
    )  # fmt: skip


def _aligned_rows(logits: Tensor) -> Tensor:
    """The logits, or a copy whose rows start at multiples of 16 bytes, with gaps between them."""
    size, unit = logits.element_size(), 16 // logits.element_size()
    if logits.data_ptr() % 16 == 0 and logits.stride(0) * size % 16 == 0:
        return logits
    rows, width = logits.shape
    copy = logits.new_empty(rows, -(-width // unit) * unit)[:, :width]
    return copy.copy_(logits)


def _split_stats(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    plan: Plan,
    bias: Tensor | None,
    threshold: Tensor | None,
    temperature: Tensor | None,
) -> Tensor:
    """The statistics of each of a plan's splits, `[splits, k, n]`."""
    rows, fields = logits.shape[0], len(spec.fields)
    parts = torch.empty(plan.splits, fields, rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return parts
    assert (threshold is not None) or not spec.rank
    with device_of(logits):
        stats_kernel[(rows * plan.splits,)](
            logits,
            with_unit_stride(target),
            None if threshold is None else with_unit_stride(threshold),
            None if bias is None else with_unit_stride(bias),
            None if temperature is None else with_unit_stride(temperature),
            parts,
            rows,
            spec.valid,
            logits.stride(0),
            plan.columns,
            plan.splits,
            **transform_args(spec, bias, temperature),
            LANES=plan.lanes,
            GROUPS=plan.groups,
            **field_constants(spec, *STORED),
            num_warps=plan.num_warps,
        )
    return parts


def merge_splits(parts: Tensor, out: Tensor, spec: RowSpec) -> None:
    """`kernels.stats.merge` of `[splits, k, n]` into `out` `[k, n]`, in one launch."""
    splits, _, rows = parts.shape
    merge_kernel[(triton.cdiv(rows, 8),)](
        parts,
        out,
        rows,
        splits,
        SPLITS=triton.next_power_of_2(splits),
        ROWS=8,
        **field_constants(spec, "max", "sum", "entropy", "squares"),
        num_warps=4,
    )
