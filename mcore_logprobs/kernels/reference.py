"""The torch backend: eager, readable, on any device; the ground truth for the others.

A chunk of rows at a time, at most two float32 copies of it and a bool one alive. `kernels.pairs`
has the functions for two sides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_logprobs.checks import is_traced
from mcore_logprobs.kernels.chunk import (
    Chunk,
    acc_dtype,
    gather_columns,
    row_chunks,
    times_multiplier,
    unscaled_logits,
)
from mcore_logprobs.kernels.codes import decode, encode
from mcore_logprobs.kernels.pairs import pair_grad, pair_stats, pair_sums
from mcore_logprobs.kernels.stats import LOG_ZERO, GradientTerms, StatsSpec, by_name, no_columns

__all__ = [
    "decode",
    "distribution_gradient",
    "encode",
    "gather_target",
    "grad",
    "pair_grad",
    "pair_stats",
    "pair_sums",
    "scale",
    "stats",
]


def gather_target(values: Tensor, target: Tensor, fill: float) -> Tensor:
    """`values[i, target[i]]`, or `fill` where target[i] is negative (another shard's, or ignored).

    Args:
        values: `[n, v]`; v may be 0 if every target is negative.
        target: `[n]` int64, columns of this block.
    """
    picked = gather_columns(values, target.unsqueeze(-1)).squeeze(-1)
    return torch.where(target >= 0, picked, fill)


def stats(
    chunk: Chunk,
    target: Tensor,
    spec: StatsSpec,
    *,
    threshold: Tensor | None = None,
    block: int | None = None,
    chunk_size: int,
) -> Tensor:
    """The row statistics of a chunk, in parts that `kernels.stats.merge` joins.

    Args:
        target: `[n]` int64, a column of this chunk, or -1 where the target is not in it.
        spec: which statistics are wanted.
        threshold: with `spec.rank`: the target's raw logit `[n]`, or with a bias `[2, n]`, that
            and its bias. `higher` counts columns whose x is larger than the target's, which is made
            here as the columns' own are: a softcap may make equals of different raw logits, and
            equal raw logits must not differ by how a tanh is rounded.
        block: columns per block. Part i is then of columns `[i * block, (i + 1) * block)`, and a
            row's bits depend only on its own numbers and `block`: every reduction runs over
            `block` neighboring numbers in fresh memory, the last block filled up with -inf, so
            that neither the other rows nor the logits' strides move a number to another place of
            the sum. None: as many parts as suit the backend.
        chunk_size: rows at a time, at least 1.

    Returns:
        `[parts, k, n]`, at least one part, float32 (float64 for float64 logits), rows as
        `spec.fields` says; what is not summed by blocks (`target`, `higher`) may stand in the
        first.
    """
    rows, valid, names = chunk.logits.shape[0], chunk.valid, spec.fields
    size = max(1, valid) if block is None else block
    blocks = max(1, -(-valid // size))
    dtype, device = acc_dtype(chunk.logits.dtype), chunk.logits.device
    out = torch.zeros(blocks, len(names), rows, dtype=dtype, device=device)
    if valid == 0:
        out[0] = no_columns(spec, rows, like=out)
        return out
    buffer = None
    if block is not None:
        # Not more rows than the caller's memory budget has room for once blocks are filled up.
        chunk_size = max(1, chunk_size * max(1, chunk.logits.shape[1]) // (blocks * block))
        shape = (min(rows, chunk_size), blocks * block)
        buffer = torch.full(shape, -torch.inf, dtype=dtype, device=device)
    for part in row_chunks(rows, chunk_size):
        step_chunk, step_target = chunk.rows(part), target[part]
        raw, x = step_chunk.logits, step_chunk.unscaled()
        step_stats = by_name(names, out[:, :, part], dim=1)
        step_stats["target"][0] = gather_target(x, step_target, 0.0)
        if spec.rank:
            assert threshold is not None
            higher = _count_higher(step_chunk, x, step_target, threshold[..., part])
            step_stats["higher"][0] = higher
        is_copy = raw.dtype != dtype or not step_chunk.is_raw
        memory = x if is_copy else None  # a copy may be overwritten, the caller's logits not
        if buffer is not None:
            memory = buffer[: len(x)]
            if is_copy or valid < memory.shape[1] or raw.stride(1) != 1:
                memory[:, :valid] = x
                x = memory
        by_block = x.unflatten(1, (blocks, size))
        if memory is not None:
            memory = by_block if memory is x else memory.unflatten(1, (blocks, size))
        _reduce_blocks(by_block, memory, spec, step_chunk.processing.multiplier, step_stats)
        if buffer is not None:
            buffer[:, valid:] = -torch.inf  # the reduction leaves other numbers there
    return out


def _reduce_blocks(
    x: Tensor,
    memory: Tensor | None,
    spec: StatsSpec,
    multiplier: float | Tensor,
    part: dict[str, Tensor],
) -> None:
    """Statistics over the last dimension of x `[c, blocks, block]`.

    Args:
        part: where they go, `[blocks, c]` each, by name.

    The sums run over `memory`, of x's shape, which may be x itself; None: over fresh memory.
    """
    block_max = x.amax(-1)
    part["max"].copy_(block_max.t())
    base = torch.where(block_max.isneginf(), 0.0, block_max).unsqueeze(-1)
    if spec.smoothing:
        masked = x.isneginf()
        part["finite"].copy_(x.shape[-1] - masked.sum(-1).t())
        # In fresh memory, so that how x lies does not decide how it is added.
        finite = (x - base).contiguous().masked_fill_(masked, 0.0)
        part["zsum"].copy_(times_multiplier(finite.sum(-1), multiplier).t())
        del finite, masked
    # torch.compile takes no `out=` that is not contiguous, as a copy of the logits may be.
    shifted = x.sub_(base) if memory is x else torch.sub(x, base, out=memory)
    times_multiplier(shifted, multiplier, in_place=True)
    weight = shifted.clamp_(min=LOG_ZERO).exp() if spec.entropy else shifted.exp_()
    part["sum"].copy_(weight.sum(-1).t())
    if spec.entropy:
        part["entropy"].copy_(shifted.mul_(weight).sum(-1).t())
    if spec.sum_pi_squared:
        part["squares"].copy_(weight.square_().sum(-1).t())


def _count_higher(chunk: Chunk, x: Tensor, target: Tensor, threshold: Tensor) -> Tensor:
    """How many unscaled logits x `[n, valid]` are above the target's; `stats` has the arguments."""
    raw = chunk.logits[:, : chunk.valid]
    own, *bias = threshold.view(-1, threshold.shape[-1]).unsqueeze(-1)
    limit = own.to(raw.dtype)  # it came from a logit of this dtype: exact
    # Without a bias x rises with y: raw logits decide, where no softcap makes them equal.
    higher = raw > limit if chunk.processing.bias is None else x.new_ones(x.shape, dtype=torch.bool)
    if not chunk.is_raw:
        higher &= x > unscaled_logits(
            limit,
            logit_scale=chunk.processing.logit_scale,
            softcap=chunk.processing.softcap,
            bias=bias[0] if bias else None,
        )
    # The target's own column is left out by name: on another path its value may differ from the
    # threshold by an ulp.
    return higher.sum(-1) - gather_target(higher, target, 0.0).long()


def grad(chunk: Chunk, terms: GradientTerms, *, out: Tensor, chunk_size: int) -> None:
    """Write the gradient with respect to raw logits, of statistics and of single entries of z.

    With d = multiplier * (x - row_max), w = exp(d), and per row the coefficients by name:

        dz[v] = w[v] * (weight + moment * d[v] + squares * w[v])
                + finite * [x[v] finite] + sum_j upstream[j] * [v == columns[j]]
        dy[v] = dz[v] * dz/dy,   0 at masked columns

    summed in float32 and rounded once: near p = 1 the target's entry is the difference of two
    nearly equal numbers. A row whose upstream and coefficients are all 0 gets exactly 0, whatever
    its logits hold (NaN included: attention gives NaN at padding tokens).

    Args:
        out: `[n, v]`, any dtype and row stride; may be the logits. Every entry is written.
        chunk_size: as in `stats`.
    """
    valid = chunk.valid
    if valid < out.shape[1]:
        out[:, valid:] = 0
    if valid == 0:
        return
    for part in row_chunks(out.shape[0], chunk_size):
        step_chunk = chunk.rows(part)
        columns, upstream, row_max, coef, spec = terms.rows(part)
        if row_max is None or coef is None:
            dz = step_chunk.logits.new_zeros((len(columns), valid), dtype=acc_dtype(out.dtype))
        else:
            dz = distribution_gradient(
                step_chunk.unscaled() - row_max.unsqueeze(-1),  # a copy: a name would keep it
                step_chunk.processing.multiplier,
                coef.unsqueeze(-1),
                spec,
            )
            asked = upstream.any(-1) | coef.any(0)
            dz.masked_fill_(~asked.unsqueeze(-1), 0.0)
        row = torch.arange(columns.shape[0], device=out.device).unsqueeze(-1)
        upstream = torch.where(columns >= 0, upstream, 0.0).to(dz.dtype)
        dz.index_put_((row, columns.clamp(min=0)), upstream, accumulate=True)
        step_chunk.to_raw_gradient(dz)
        out[part, :valid] = dz


def distribution_gradient(
    difference: Tensor, multiplier: float | Tensor, coef: Tensor, spec: StatsSpec
) -> Tensor:
    """dz of `grad` without what single entries get on top; new, float32 or float64.

    Args:
        difference: x - row_max, of columns `[n, v]` or of single entries `[e]`; written over.
        multiplier: a number, or one for each row or entry.
        coef: `[k, n, 1]` or `[k, e]`.
    """
    row = by_name(spec.coefficients, coef)
    shifted = times_multiplier(difference, multiplier, in_place=True)
    masked = shifted.isneginf() if spec.smoothing else None
    shifted.clamp_(min=LOG_ZERO)
    dz = shifted.exp()
    factor = row["weight"]
    if spec.entropy:
        factor = shifted.mul_(row["moment"]).add_(factor)
    if spec.sum_pi_squared:
        factor = shifted.copy_(factor).addcmul_(row["squares"], dz)
    dz.mul_(factor)
    if masked is not None:
        dz.add_(shifted.copy_(row["finite"]).masked_fill_(masked, 0.0))
    return dz


def scale(grad: Tensor, upstream: Tensor, *, out: Tensor, add: bool = False) -> None:
    """Write `grad * upstream` into out, or add it; exactly nothing where upstream is 0.

    Args:
        grad: any shape, float32 or float64; its memory may be overwritten.
        upstream: one number, on grad's device. Its value is read only on a CPU: on a GPU that
            would be a host sync.
        out: of grad's shape, any dtype; may be grad.
    """
    if grad.device.type != "cpu" or is_traced(upstream):
        grad.masked_fill_(upstream == 0.0, 0.0)  # grad may be NaN
    elif upstream.item() == 0.0:
        if not add:
            out.zero_()
        return
    if add:
        out.addcmul_(grad, upstream)
    else:
        torch.mul(grad, upstream, out=out)
