"""From two sides' statistics to what users get, each step in one launch, as Triton kernels.

    finish_pairs   pair statistics of parts to divergences and normalisers
    finish_jsd     likewise the sums of the Jensen-Shannon divergence

`kernels.distill` does the same in plain torch, a launch for each operation.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.distill import KINDS, PairSpec
from mcore_logprobs.kernels.triton_common import (
    ceil_div,
    device_of,
    power_of_2,
    with_unit_stride,
)
from mcore_logprobs.kernels.triton_distill import merged_pair
from mcore_logprobs.kernels.triton_launch import Launcher
from mcore_logprobs.kernels.triton_sides import CROSS_ENTROPY, FORWARD, JSD, REVERSE

__all__ = ["finish_jsd", "finish_pairs", "jsd_finish_kernel", "pair_finish_kernel"]

# Rows of the norms: either side's m and log sum, whether the row is kept, the divergence.
_NORMS = 6
_ROWS = 8
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["rows", "parts"])
def pair_finish_kernel(
    parts_ptr,  # [parts, 5, n]
    mask_ptr,  # [n] bool; None: all rows are wanted
    value_ptr,  # [n]
    norms_ptr,  # [6, n]
    rows,
    parts,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
):
    """`kernels.distill`: merge_pairs, then finish_pair, then rows without a value blanked."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    top_s, sum_s, top_t, sum_t, cross = merged_pair(parts_ptr, row, rows, parts, PARTS, KIND)
    log_s = tl.log(sum_s)
    log_t = tl.log(sum_t)
    value = tl.zeros([ROWS], tl.float32)
    if KIND == FORWARD:
        value = tl.div_rn(cross, sum_t) + (log_s - log_t)
    elif KIND == REVERSE:
        value = tl.div_rn(cross, sum_s) + (log_t - log_s)
    elif KIND == CROSS_ENTROPY:
        value = tl.div_rn(cross, sum_t) + log_s
    if KIND != CROSS_ENTROPY:
        value = tl.where(value < 0.0, 0.0, value)  # tl.maximum would overlook NaN
    no_s = top_s == float("-inf")
    no_t = top_t == float("-inf")
    kept = (no_s | no_t) == 0
    if mask_ptr is not None:
        kept = kept & (tl.load(mask_ptr + row, mask=inside, other=0) != 0)
    value = tl.where(kept, value, 0.0)
    norms = norms_ptr + row
    tl.store(norms, tl.where(no_s, 0.0, top_s), mask=inside)
    tl.store(norms + rows, tl.where(no_s, 0.0, log_s), mask=inside)
    tl.store(norms + 2 * rows, tl.where(no_t, 0.0, top_t), mask=inside)
    tl.store(norms + 3 * rows, tl.where(no_t, 0.0, log_t), mask=inside)
    tl.store(norms + 4 * rows, kept.to(tl.float32), mask=inside)
    if KIND != JSD:
        tl.store(norms + 5 * rows, value, mask=inside)
    tl.store(value_ptr + row, value, mask=inside)


@triton.jit(do_not_specialize=["rows", "parts"])
def jsd_finish_kernel(
    parts_ptr,  # [parts, 2, n]
    norms_ptr,  # [6, n]
    value_ptr,  # [n]
    inner_ptr,  # [n]
    rows,
    parts,
    beta,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The parts' sums added up, the divergence of them, and KL(p || M) for the gradient."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    number = tl.arange(0, PARTS)
    mask = (number < parts)[:, None] & inside[None, :]
    part = parts_ptr + (number.to(tl.int64) * 2 * rows)[:, None] + row[None, :]
    from_teacher = tl.sum(tl.load(part, mask=mask, other=0.0), 0)
    inner = tl.sum(tl.load(part + rows, mask=mask, other=0.0), 0)
    value = beta * from_teacher + (1.0 - beta) * inner
    value = tl.where(value < 0.0, 0.0, value)
    kept = tl.load(norms_ptr + 4 * rows + row, mask=inside, other=0.0) != 0.0
    tl.store(inner_ptr + row, inner, mask=inside)
    tl.store(value_ptr + row, tl.where(kept, value, 0.0), mask=inside)


_launch_finish = Launcher(pair_finish_kernel)
_launch_jsd_finish = Launcher(jsd_finish_kernel)


def finish_pairs(parts: Tensor, mask: Tensor | None, spec: PairSpec) -> tuple[Tensor, Tensor]:
    """Pair statistics of parts `[parts, 5, n]` to the divergence `[n]` and norms `[6, n]`.

    Returns:
        The divergence, 0 where the mask or a side without a finite logit says so ("jsd": 0). Norms:
        `norm_s`, `norm_t` of `kernels.distill.FinishedPair`; 1 where the row is kept, else 0; the
        divergence again ("jsd": nothing).
    """
    count, _, rows = parts.shape
    value = parts.new_empty(rows)
    norms = parts.new_empty(_NORMS, rows)
    if rows:
        with device_of(parts):
            _launch_finish(
                (ceil_div(rows, _ROWS), 1, 1),
                (parts.contiguous(), with_unit_stride(mask), value, norms),
                (rows, count),
                (power_of_2(count), _ROWS, KINDS.index(spec.kind)),
            )
    return value, norms


def finish_jsd(parts: Tensor, norms: Tensor, spec: PairSpec) -> tuple[Tensor, Tensor]:
    """Sums of parts `[parts, 2, n]`, as `kernels.distill.jsd_sums`: the divergence, KL(p || M)."""
    count, _, rows = parts.shape
    value, inner = parts.new_empty(rows), parts.new_empty(rows)
    if rows:
        with device_of(parts):
            _launch_jsd_finish(
                (ceil_div(rows, _ROWS), 1, 1),
                (parts.contiguous(), norms, value, inner),
                (rows, count),
                (float(spec.beta), power_of_2(count), _ROWS),
            )
    return value, inner
