"""Row statistics in one read of the logits, as a Triton kernel."""

# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.stats import StatsSpec, merge
from mcore_logprobs.kernels.triton.common import (
    UNIT,
    Plan,
    before_bias,
    block_plan,
    clamped,
    exp,
    launch,
    launch_plan,
    over_temperature,
    own_columns,
    row_multiplier,
    row_temperature,
    transform,
    unscaled,
    whole_units,
    with_unit_stride,
)
from mcore_logprobs.kernels.triton.operators import (
    SPEC,
    arguments,
    chunk_schema,
    chunks_of,
    operator,
)


@triton.jit
def _is_higher(y, x, limit, limit_x, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Whether x is above the target's; where raw logits y are equal, so are x without a bias."""
    if HAS_BIAS:
        above = x > limit_x
    elif HAS_SOFTCAP:
        above = (y > limit) & (x > limit_x)
    else:
        above = y > limit
    return above


@triton.jit
def _accumulate(
    group_max,  # [groups], the running maximum of x
    total,  # [groups], sum exp(d), d = multiplier * (x - group_max)
    weighted,  # [groups], sum d exp(d)
    squares,  # [groups], sum exp(2 d)
    higher,  # [groups] int32
    zsum,  # [groups], sum (x - pivot) of the finite x
    finite,  # [groups] int32
    y,  # [groups, lanes], raw logits; -inf where masked
    bias_ptr,
    limit,
    limit_x,
    pivot,
    start,
    stop,
    scale,
    softcap,
    multiplier,
    MASKED: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
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
        mask = columns < stop
    x, _ = unscaled(y, bias_ptr, columns, mask, scale, softcap, HAS_SOFTCAP)
    if MASKED:
        x = tl.where(mask, x, float("-inf"))
    if RANK:
        above = _is_higher(y, x, limit, limit_x, bias_ptr is not None, HAS_SOFTCAP)
        higher += tl.sum(above.to(tl.int32), 1)
    if SMOOTHING:
        is_finite = x != float("-inf")
        zsum += tl.sum(tl.where(is_finite, x - pivot, 0.0), 1)
        finite += tl.sum(is_finite.to(tl.int32), 1)

    new_max = tl.maximum(group_max, tl.max(x, 1))
    # Where all is -inf so far, about 0: exp(-inf - 0) is 0, exp(-inf - -inf) would be NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    shifted = (x - base[:, None]) * multiplier
    weight = exp(shifted)
    decay = exp((group_max - base) * multiplier)
    if ENTROPY:
        # Clamped only where multiplied, for a NaN must not pass as a probability of 0.
        moved = clamped((group_max - base) * multiplier)
        weighted = (weighted + moved * total) * decay
        weighted += tl.sum(weight * clamped(shifted), 1)
    if SQUARES:
        squares = squares * decay * decay + tl.sum(weight * weight, 1)
    total = total * decay + tl.sum(weight, 1)
    return new_max, total, weighted, squares, higher, zsum, finite


@triton.jit(
    do_not_specialize=["rows", "valid", "splits"],
    do_not_specialize_on_alignment=[
        "target_ptr", "threshold_ptr", "bias_ptr", "temperature_ptr", "out_ptr"
    ],
)  # fmt: skip
def stats_kernel(
    logits_ptr,  # [n, v], rows any stride apart
    target_ptr,  # [n] int64
    threshold_ptr,  # [n] float32, the target's raw logit; with a bias [2, n]; None: no rank
    bias_ptr,  # [v], or None
    temperature_ptr,  # [n], or None
    out_ptr,  # [splits, fields, n] float32
    rows,
    row_stride,
    valid,
    split_columns,
    splits,
    scale,
    softcap,
    multiplier,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
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

    MAX to FINITE are the statistics' places in out (`StatsSpec.fields`), -1 for one not wanted.
    """
    TILE: tl.constexpr = LANES * GROUPS
    row, split, start, stop = own_columns(splits, split_columns, valid)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    multiplier = over_temperature(multiplier, row, temperature_ptr)
    limit = 0.0
    limit_x = 0.0
    if HIGHER >= 0:
        limit = tl.load(threshold_ptr + row).to(logits_ptr.dtype.element_ty).to(tl.float32)
        limit_x, _ = before_bias(limit, scale, softcap, bias_ptr is not None, HAS_SOFTCAP)
        if bias_ptr is not None:
            limit_x += tl.load(threshold_ptr + rows + row).to(tl.float32)

    # What logits are summed about: any number near theirs.
    pivot = 0.0
    if ZSUM >= 0:
        some = start < stop
        first = tl.load(row_ptr + start, mask=some, other=0.0).to(tl.float32)
        first, _ = unscaled(first, bias_ptr, start, some, scale, softcap, HAS_SOFTCAP)
        pivot = tl.where(tl.abs(first) < float("inf"), first, 0.0)

    group_max = tl.full([GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    weighted = tl.zeros([GROUPS], tl.float32)
    squares = tl.zeros([GROUPS], tl.float32)
    higher = tl.zeros([GROUPS], tl.int32)
    zsum = tl.zeros([GROUPS], tl.float32)
    finite = tl.zeros([GROUPS], tl.int32)
    offsets = tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    end = whole_units(start, stop)
    whole = start + (end - start) // TILE * TILE
    # Copied ahead through shared memory: plain loads would be waited for half of the time.
    for at in tl.range(start, whole, TILE, num_stages=3):
        y = tl.load(row_ptr + at + offsets)
        group_max, total, weighted, squares, higher, zsum, finite = _accumulate(
            group_max, total, weighted, squares, higher, zsum, finite, y, bias_ptr, limit, limit_x,
            pivot,
            at, end, scale, softcap, multiplier, False, LANES, GROUPS,
            HAS_SOFTCAP, ENTROPY >= 0, SQUARES >= 0, HIGHER >= 0, ZSUM >= 0,
        )  # fmt: skip
    if whole < end:
        rest = whole + offsets
        y = tl.load(row_ptr + rest, mask=rest < end, other=float("-inf"))
        group_max, total, weighted, squares, higher, zsum, finite = _accumulate(
            group_max, total, weighted, squares, higher, zsum, finite, y, bias_ptr, limit, limit_x,
            pivot,
            whole, end, scale, softcap, multiplier, True, LANES, GROUPS,
            HAS_SOFTCAP, ENTROPY >= 0, SQUARES >= 0, HIGHER >= 0, ZSUM >= 0,
        )  # fmt: skip
    if end < stop:  # under UNIT columns, one per group
        rest = end + tl.arange(0, GROUPS)[:, None]
        y = tl.load(row_ptr + rest, mask=rest < stop, other=float("-inf"))
        group_max, total, weighted, squares, higher, zsum, finite = _accumulate(
            group_max, total, weighted, squares, higher, zsum, finite, y, bias_ptr, limit, limit_x,
            pivot,
            end, stop, scale, softcap, multiplier, True, 1, GROUPS,
            HAS_SOFTCAP, ENTROPY >= 0, SQUARES >= 0, HIGHER >= 0, ZSUM >= 0,
        )  # fmt: skip

    row_max = tl.max(group_max, 0)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    decay = exp((group_max - base) * multiplier)
    row_total = tl.sum(total * decay, 0)
    # A maximum may overlook NaN; the sum never does.
    row_max = tl.where(row_total == row_total, row_max, row_total)

    # The target's own column: read by the first split, whoever walks over it.
    column = tl.load(target_ptr + row)
    own = (column >= 0) & (split == 0)
    own_y = tl.load(row_ptr + column, mask=own, other=0.0).to(tl.float32)
    own_x, _ = unscaled(own_y, bias_ptr, column, own, scale, softcap, HAS_SOFTCAP)

    out = out_ptr + split.to(tl.int64) * FIELDS * rows + row
    tl.store(out + MAX * rows, row_max)
    tl.store(out + SUM * rows, row_total)
    tl.store(out + TARGET * rows, tl.where(own, own_x, 0.0))
    if ENTROPY >= 0:
        moved = clamped((group_max - base) * multiplier)
        tl.store(out + ENTROPY * rows, tl.sum((weighted + moved * total) * decay, 0))
    if SQUARES >= 0:
        tl.store(out + SQUARES * rows, tl.sum(squares * decay * decay, 0))
    if HIGHER >= 0:
        # Not counted by name, as its value may differ from the limit by an ulp.
        above = _is_higher(own_y, own_x, limit, limit_x, bias_ptr is not None, HAS_SOFTCAP)
        counted = (own & above).to(tl.int32)
        tl.store(out + HIGHER * rows, (tl.sum(higher, 0) - counted).to(tl.float32))
    if ZSUM >= 0:
        count = tl.sum(finite, 0).to(tl.float32)
        tl.store(out + ZSUM * rows, (tl.sum(zsum, 0) + count * (pivot - base)) * multiplier)
        tl.store(out + FINITE * rows, count)


# What the kernel stores; its constants have these names in capitals.
_STORED = ("max", "sum", "target", "entropy", "squares", "higher", "zsum", "finite")


def field_constants(spec: StatsSpec) -> dict[str, int]:
    """The places of the statistics in their tensor: MAX=0, ENTROPY=-1, ..."""
    fields = spec.fields
    places = {name.upper(): fields.index(name) if name in fields else -1 for name in _STORED}
    return {"FIELDS": len(fields), **places}


def stats(
    chunk: Chunk,
    target: Tensor,
    spec: StatsSpec,
    *,
    threshold: Tensor | None = None,
    block: int | None = None,
    chunk_size: int = 0,
) -> Tensor:
    """As `kernels.reference.stats`; float16, bfloat16 or float32 with a last stride of 1."""
    return _stats(*arguments(chunk, target, threshold, block, spec))


def _run(*given: object) -> Tensor:
    chunk, target, threshold, block, *wanted = chunks_of(1, given)
    spec, logits = StatsSpec(*wanted), chunk.logits
    if block is not None:
        plan = block_plan(chunk.valid, block, logits)
        return launch_stats(_aligned(chunk), target, spec, threshold, plan)
    plan = launch_plan(logits.shape[0], chunk.valid, logits)
    # Merged here, so that how many parts there are does not depend on the rows and the chip.
    parts = launch_stats(chunk, target, spec, threshold, plan)
    return merge(parts, spec, multiplier=row_multiplier(chunk)).unsqueeze(0)


def _fake(*given: object) -> Tensor:
    chunk, _, _, block, *wanted = chunks_of(1, given)
    parts = 1 if block is None else max(1, -(-chunk.valid // block))
    shape = (parts, len(StatsSpec(*wanted).fields), chunk.logits.shape[0])
    return chunk.logits.new_empty(shape, dtype=torch.float32)


_stats = operator(
    f"stats({chunk_schema()}, Tensor target, Tensor? threshold, int? block, {SPEC}) -> Tensor",
    _run,
    _fake,
)


def launch_stats(
    chunk: Chunk, target: Tensor, spec: StatsSpec, threshold: Tensor | None, plan: Plan
) -> Tensor:
    """The statistics of each split of the plan, `[splits, k, n]`."""
    logits, rows = chunk.logits, chunk.logits.shape[0]
    out = logits.new_empty((plan.splits, len(spec.fields), rows), dtype=torch.float32)
    assert threshold is not None or not spec.rank
    limits = threshold.contiguous() if threshold is not None and spec.rank else None
    assert limits is None or limits.numel() == rows * (1 if chunk.processing.bias is None else 2)
    if rows:
        launch(
            stats_kernel, rows * plan.splits,
            logits, with_unit_stride(target), limits,
            with_unit_stride(chunk.processing.bias), row_temperature(chunk), out,
            rows, logits.stride(0) if rows > 1 else 0,  # of one row it may be any number
            chunk.valid, plan.columns, plan.splits, *transform(chunk),
            LANES=plan.lanes, GROUPS=plan.groups, HAS_SOFTCAP=chunk.processing.softcap is not None,
            **field_constants(spec),
        )  # fmt: skip
    return out


def _aligned(chunk: Chunk) -> Chunk:
    """The chunk, or a copy of its valid columns, whose rows all start at multiples of UNIT.

    Where they do not, Triton compiles another kernel, which may add in another order.
    """
    logits, rows = chunk.logits, chunk.logits.shape[0]
    if logits.data_ptr() % UNIT.value == 0 and (rows <= 1 or logits.stride(0) % UNIT.value == 0):
        return chunk
    copy = logits.new_empty(rows, triton.cdiv(chunk.valid, UNIT.value) * UNIT.value)
    copy[:, : chunk.valid] = logits[:, : chunk.valid]
    return replace(chunk, logits=copy)
