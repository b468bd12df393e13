"""The count of columns above a threshold in one read of the logits, as a Triton kernel."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.triton_common import (
    FUSE,
    device_of,
    launch_plan,
    with_unit_stride,
)

__all__ = ["count_higher", "rank_kernel"]


@triton.jit(do_not_specialize=["rows", "valid", "splits"])
def rank_kernel(
    logits_ptr,  # [n, v]
    target_ptr,  # [n] int64
    threshold_ptr,  # [n] float32
    out_ptr,  # [splits, n] int64
    rows,
    valid,
    row_stride,
    split_columns,
    splits,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """How many of one row's columns `[split * split_columns, ...)` are above its threshold."""
    TILE: tl.constexpr = LANES * GROUPS
    program = tl.program_id(0)
    row = program // splits
    split = program % splits
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    start = split * split_columns
    stop = tl.minimum(start + split_columns, valid)
    # Rounded to the logits' dtype and back: the threshold is one of them.
    limit = tl.load(threshold_ptr + row).to(logits_ptr.dtype.element_ty).to(tl.float32)

    count = tl.zeros([GROUPS], tl.int32)
    offsets = tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = start + tl.maximum(stop - start, 0) // TILE * TILE
    for at in range(start, whole, TILE):
        y = tl.load(row_ptr + at + offsets).to(tl.float32)
        count += tl.sum((y > limit).to(tl.int32), 1)
    if whole < stop:
        columns = whole + offsets
        y = tl.load(row_ptr + columns, mask=columns < valid, other=float("-inf")).to(tl.float32)
        count += tl.sum((y > limit).to(tl.int32), 1)

    column = tl.load(target_ptr + row)
    own = (column >= 0) & (split == 0)
    own_y = tl.load(row_ptr + column, mask=own, other=float("-inf")).to(tl.float32)
    result = tl.sum(count, 0) - (own_y > limit).to(tl.int32)
    tl.store(out_ptr + split.to(tl.int64) * rows + row, result.to(tl.int64))


def count_higher(logits: Tensor, target: Tensor, threshold: Tensor, *, valid: int) -> Tensor:
    """As `kernels.reference.count_higher`, for logits whose last stride is 1."""
    rows = logits.shape[0]
    plan = launch_plan(rows, valid, logits)
    out = torch.empty(plan.splits, rows, dtype=torch.int64, device=logits.device)
    if rows:
        with device_of(logits):
            rank_kernel[(rows * plan.splits,)](
                logits,
                with_unit_stride(target),
                with_unit_stride(threshold),
                out,
                rows,
                valid,
                logits.stride(0),
                plan.columns,
                plan.splits,
                LANES=plan.lanes,
                GROUPS=plan.groups,
                num_warps=plan.num_warps,
                enable_fp_fusion=FUSE,
            )
    return out[0] if plan.splits == 1 else out.sum(0)
