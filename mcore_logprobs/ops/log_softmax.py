"""The whole log-softmax, vocabulary shard by vocabulary shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.kernels.chunk import row_chunks, times_multiplier
from mcore_logprobs.kernels.stats import StatsSpec
from mcore_logprobs.ops.apply import (
    Operation,
    Tensors,
    apply,
    finalize_shards,
    local_row_stats,
    no_targets,
)
from mcore_logprobs.ops.keywords import LogitsKeywords, shared_keywords
from mcore_logprobs.ops.source import GivenLogits, Placed, given_logits


@dataclass(frozen=True)
class LogSoftmax(Operation):
    """`[n, V/TP]`."""

    def forward(self, source: GivenLogits, tensors: Tensors) -> tuple[Tensors, Tensors]:
        none = no_targets(source, source.count)
        stats = local_row_stats(source, source.chunks(), none, StatsSpec())
        done = finalize_shards(stats, StatsSpec(), source.shard.group, source.multiplier)
        row_max, log_sum, *_ = done.softmax
        shape = (source.count, source.shard.width)
        result = torch.empty(shape, dtype=source.acc_dtype, device=source.device)
        for rows, _, chunk in source.chunks():
            for part in row_chunks(len(chunk.logits), source.rows_at_a_time(shape[1])):
                where = slice(rows.start + part.start, rows.start + part.stop)
                out = result[where]
                # Not z - lse: the difference of large numbers is taken exactly.
                some, valid = chunk.rows(part), out[:, : chunk.valid]
                torch.sub(some.unscaled(), row_max[where].unsqueeze(-1), out=valid)
                times_multiplier(valid, some.multiplier, out=valid)
                valid -= log_sum[where].unsqueeze(-1)
                out[:, chunk.valid :] = -torch.inf
        return (result,), (row_max, log_sum)

    def write_dlogits(
        self, source: GivenLogits, upstream: Tensors, tensors: Tensors, saved: Tensors
    ) -> Any:
        row_max, log_sum = saved
        (wanted,) = upstream
        valid, step = source.shard.valid_width, source.rows_at_a_time(source.shard.width)
        total, asked = torch.empty_like(log_sum), torch.empty_like(log_sum, dtype=torch.bool)
        for part in row_chunks(source.count, step):
            some = wanted[part, :valid]
            total[part], asked[part] = some.sum(-1), (some != 0).any(-1)
        total = all_reduce_sum(total, source.shard.group)
        asked |= total != 0
        total = total * log_sum.neg().exp()  # p = exp(z - row_max) / s

        def write(placed: Placed, out: Tensor) -> None:
            rows, _, chunk = placed
            out[:, chunk.valid :] = 0
            for part in row_chunks(len(out), step):
                where = slice(rows.start + part.start, rows.start + part.stop)
                some = chunk.rows(part)
                p = some.unscaled() - row_max[where].unsqueeze(-1)
                times_multiplier(p, some.multiplier, out=p)
                p.exp_().mul_(total[where].unsqueeze(-1))
                dz = torch.sub(wanted[where, :valid], p, out=p)
                some.to_raw_gradient(dz)
                # A row that asks for nothing gets exactly 0, whatever its logits hold.
                out[part, :valid] = dz.masked_fill_(~asked[where].unsqueeze(-1), 0.0)

        return write


@shared_keywords(LogitsKeywords, given_logits)
def vocab_parallel_log_softmax(
    vocab_parallel_logits: Tensor, **shared: Unpack[LogitsKeywords]
) -> Tensor:
    """log p of every column of this rank's shard, differentiable.

    Prefer `vocab_parallel_token_stats` or `vocab_parallel_gather` where a few columns do: this one
    makes a float32 tensor of the logits' size, because that is what is asked for.

    Shape:
        vocab_parallel_logits `[..., V/TP]` -> float32 `[..., V/TP]`, normalized over all V columns;
        -inf at columns at or past vocab_size.

    Collectives: forward one all-gather of `[3, n]` float32 over TP, backward one all-reduce of
    `[n]` (grad_output's sum over the whole vocabulary).

    Keywords and errors are `vocab_parallel_token_stats`'s.
    """
    return apply(LogSoftmax(), given_logits(vocab_parallel_logits, **shared))[0]
