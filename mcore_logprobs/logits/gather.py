"""Logits or log-probabilities at a few given ids of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_flag
from mcore_logprobs.collectives import all_gather_stack, all_reduce_sum
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels.reference import finished_logits
from mcore_logprobs.kernels.stats import LOG_ZERO, RowSpec, accumulator_dtype, merge
from mcore_logprobs.logits.dtensor import unwrap_rows
from mcore_logprobs.logits.inputs import check_target, localize_target, open_logits
from mcore_logprobs.logits.rows import Rows

__all__ = ["scatter_gradient", "vocab_parallel_gather"]


@dataclass(frozen=True)
class _Options:
    shard: VocabShard
    spec: RowSpec
    log_softmax: bool
    chunk_size: int
    backend: backends.Backend


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, column: Tensor, keep: Tensor, opts: _Options) -> Tensor:
        rows, shard = Rows(logits), opts.shard
        column, keep = rows.flat(column), rows.flat(keep)
        values = torch.cat(
            [
                finished_logits(_own_entries(block, column[part]), opts.spec)
                for part, block in rows.blocks(logits)
            ]
        )
        top = log_sum = None
        if opts.log_softmax:
            values, top, log_sum = _normalise(rows, logits, values, opts)
        else:
            values = all_reduce_sum(values, shard.group)
        ctx.opts = opts
        ctx.save_for_backward(logits, column, keep, top, log_sum)
        return rows.unflat(torch.where(keep, values, 0.0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, column, keep, top, log_sum = ctx.saved_tensors
        opts: _Options = ctx.opts
        rows = Rows(logits)
        upstream = torch.where(keep, rows.flat(grads[0]), 0.0)
        total = upstream.sum(-1, keepdim=True)
        grad = torch.empty_like(logits)
        for part, block, out in rows.chunks(opts.chunk_size, logits, grad):
            base = None
            if top is not None:
                # (z - m) - log s, not z - lse: the difference of large numbers is taken exactly.
                base = (finished_logits(block, opts.spec) - top[part]).sub_(log_sum[part])
                base.clamp_(min=LOG_ZERO).exp_().mul_(-total[part])
                # A row that asks for nothing gets exactly 0, whatever its logits hold.
                base.masked_fill_(~keep[part].any(-1, keepdim=True), 0.0)
            scatter_gradient(upstream[part], column[part], opts.spec, out, base)
        return grad, None, None, None


def _own_entries(block: Tensor, column: Tensor) -> Tensor:
    """`block[i, column[i, j]]`, 0 where the column is -1. `[c, v]`, `[c, k]` -> `[c, k]`."""
    return torch.where(column >= 0, block.gather(-1, column.clamp(min=0)), 0.0)


def _normalise(
    rows: Rows, logits: Tensor, values: Tensor, opts: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's entries `[n, k]` -> log-probabilities, the rows' m and log s, each `[n, 1]`.

    One all-gather of `[3 + k, n]`: the statistics cannot be summed and the entries could, but k is
    small, and a second collective costs more than the bytes.
    """
    nobody = torch.full((rows.count,), -1, dtype=torch.int64, device=logits.device)
    stats = torch.cat(
        [
            opts.backend.row_stats(block, nobody[part], opts.spec, chunk_size=opts.chunk_size)
            for part, block in rows.blocks(logits)
        ],
        dim=1,
    )
    everyone = all_gather_stack(torch.cat([stats, values.t()]), opts.shard.group)
    fields = len(opts.spec.fields)
    merged = merge(everyone[:, :fields].contiguous(), opts.spec)
    top, log_sum = merged[0].unsqueeze(-1), merged[1].log().unsqueeze(-1)
    logprobs = (everyone[:, fields:].sum(0).t() - top) - log_sum
    empty = top.isneginf()  # exp(z - m - log s) is to be 0 there, not NaN
    return logprobs, torch.where(empty, 0.0, top), torch.where(empty, 0.0, log_sum)


def scatter_gradient(
    upstream: Tensor, column: Tensor, spec: RowSpec, out: Tensor, base: Tensor | None = None
) -> None:
    """Write `base` plus each entry's gradient at its column, summed in float32 and rounded once.

    Args:
        upstream: `[c, k]`, with respect to z.
        column: `[c, k]` int64, this rank's columns, repeated ones allowed, -1 for another rank's.
        out: `[c, v]`, any dtype and row stride; every entry is written, masked columns with 0.
        base: `[c, v]` float32 or float64, the gradient's other part; overwritten. None: zero.
    """
    if base is None:
        base = torch.zeros(out.shape, dtype=accumulator_dtype(out.dtype), device=out.device)
    row = torch.arange(column.shape[0], device=out.device).unsqueeze(-1).expand_as(column)
    mine = torch.where(column >= 0, upstream.to(base.dtype), 0.0)
    base.index_put_((row, column.clamp(min=0)), mine, accumulate=True)
    out.copy_(base.mul_(spec.multiplier) if spec.multiplier != 1.0 else base)
    out[:, spec.valid :] = 0


def vocab_parallel_gather(
    vocab_parallel_logits: Tensor,
    ids: Tensor,
    *,
    log_softmax: bool = False,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Logits (over the temperature), or log-probabilities, at k given ids of each row.

    Shape:
        vocab_parallel_logits: `[..., V/TP]`, or a DTensor `[..., V]` sharded on its last dimension.
        ids: `[..., k]`, integers, global ids or ignore_index; the same on every TP rank. An id may
            be repeated: gradients add up.
        Returns float32 `[..., k]` (float64 for float64 logits), the same on every TP rank; 0,
        without a gradient, where the id is ignore_index. Differentiable.

    Args:
        log_softmax: normalised over the whole vocabulary, instead of the logits themselves.

    Collectives: forward one over TP: an all-reduce of `[n, k]`; with log_softmax an all-gather of
    `[3 + k, n]`. Backward none: with g upstream, dz = scatter_add(g) - p * sum_k g.

    Memory: backward keeps the logits and a few numbers a row and id; the gradient, in the logits'
    dtype, is the only `[..., V/TP]` tensor made.

    Raises:
        ValueError: ids that are not `[..., k]` integers; on CPU ids outside [0, vocab_size); as
            in `vocab_parallel_token_stats` otherwise.
    """
    opened = open_logits(
        vocab_parallel_logits,
        tp_group=tp_group,
        vocab_size=vocab_size,
        backend=backend,
        chunk_size=chunk_size,
        temperature=temperature,
    )
    logits, shard = opened.logits, opened.shard
    check_flag("log_softmax", log_softmax)
    ids = unwrap_rows(ids, "ids")
    k = ids.shape[-1] if isinstance(ids, Tensor) and ids.dim() else 1
    ids = check_target(ids, torch.Size((*logits.shape[:-1], k)), logits.device, name="ids")
    local = localize_target(ids, shard, ignore_index, name="ids")
    opts = _Options(
        shard=shard,
        spec=RowSpec(valid=shard.valid_width, temperature=temperature),
        log_softmax=log_softmax,
        chunk_size=chunk_size or backends.default_chunk_size(shard.width, logits.device),
        backend=backends.select(backend, logits),
    )
    return _Gather.apply(logits, local.column, local.keep, opts)
