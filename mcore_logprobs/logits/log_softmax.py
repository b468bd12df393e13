"""The whole log-softmax, vocabulary shard by vocabulary shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mcore_logprobs.collectives import all_gather_stack, all_reduce_sum
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels.reference import finished_logits
from mcore_logprobs.kernels.stats import FinishedStats, RowSpec, accumulator_dtype, finish, merge
from mcore_logprobs.logits.inputs import open_logits
from mcore_logprobs.logits.rows import Rows

__all__ = ["vocab_parallel_log_softmax"]


@dataclass(frozen=True)
class _Options:
    shard: VocabShard
    spec: RowSpec
    chunk_size: int
    backend: backends.Backend


def _whole_rows(
    rows: Rows,
    logits: Tensor,
    shard: VocabShard,
    spec: RowSpec,
    *,
    chunk_size: int,
    backend: backends.Backend,
) -> FinishedStats:
    """Each row's statistics over the whole vocabulary, `[n]`. One all-gather of `[3, n]`."""
    nobody = torch.full((rows.count,), -1, dtype=torch.int64, device=logits.device)
    stats = [
        backend.row_stats(block, nobody[part], spec, chunk_size=chunk_size)
        for part, block in rows.blocks(logits)
    ]
    return finish(merge(all_gather_stack(torch.cat(stats, dim=1), shard.group), spec), spec)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, opts: _Options) -> Tensor:
        rows = Rows(logits)
        done = _whole_rows(
            rows, logits, opts.shard, opts.spec, chunk_size=opts.chunk_size, backend=opts.backend
        )
        result = torch.empty_like(logits, dtype=accumulator_dtype(logits.dtype))
        valid = opts.spec.valid
        for part, block, out in rows.chunks(opts.chunk_size, logits, result):
            z = finished_logits(block[:, :valid], opts.spec)
            # Not z - lse: the difference of large numbers is taken exactly.
            torch.sub(z, done.top[part].unsqueeze(-1), out=out[:, :valid])
            out[:, :valid] -= done.log_sum[part].unsqueeze(-1)
            out[:, valid:] = -torch.inf
        ctx.opts = opts
        ctx.save_for_backward(logits, done.top, done.log_sum)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, top, log_sum = ctx.saved_tensors
        opts: _Options = ctx.opts
        rows = Rows(logits)
        valid = opts.spec.valid
        total = all_reduce_sum(rows.flat(grads[0][..., :valid].sum(-1)), opts.shard.group)
        total = total * log_sum.neg().exp()  # p = exp(z - top) / s
        grad = torch.empty_like(logits)
        for part, block, upstream, out in rows.chunks(opts.chunk_size, logits, grads[0], grad):
            p = finished_logits(block[:, :valid], opts.spec) - top[part].unsqueeze(-1)
            p.exp_().mul_(total[part].unsqueeze(-1))
            out[:, :valid] = torch.sub(upstream[:, :valid], p, out=p).mul_(opts.spec.multiplier)
            out[:, valid:] = 0
        return grad, None


def vocab_parallel_log_softmax(
    vocab_parallel_logits: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """log p of every column of this rank's shard, differentiable.

    Prefer `vocab_parallel_token_stats` or `vocab_parallel_gather` where a few columns do: this one
    makes a float32 tensor of the logits' size, because that is what is asked for.

    Shape:
        vocab_parallel_logits `[..., V/TP]` -> float32 `[..., V/TP]`, normalised over all V columns;
        -inf at columns at or past vocab_size.

    Collectives: forward one all-gather of `[3, n]` float32 over TP, backward one all-reduce of
    `[n]` (the upstream gradient's sum over the whole vocabulary).

    Keywords and errors are `vocab_parallel_token_stats`'s.
    """
    opened = open_logits(
        vocab_parallel_logits,
        tp_group=tp_group,
        vocab_size=vocab_size,
        backend=backend,
        chunk_size=chunk_size,
        temperature=temperature,
    )
    logits = opened.logits
    opts = _Options(
        shard=opened.shard,
        spec=RowSpec(valid=opened.shard.valid_width, temperature=temperature),
        chunk_size=chunk_size or backends.default_chunk_size(logits.shape[-1], logits.device),
        backend=backends.select(backend, logits),
    )
    return _LogSoftmax.apply(logits, opts)
