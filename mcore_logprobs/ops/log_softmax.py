"""The whole log-softmax, vocabulary shard by vocabulary shard."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.kernels.chunk import ChunkAt, times_multiplier
from mcore_logprobs.kernels.stats import SoftmaxStats, StatsSpec
from mcore_logprobs.ops.driver import Backward, Forward, Operation, Results, Saved, Tensors, apply
from mcore_logprobs.ops.keywords import LogitsKeywords, shared_keywords
from mcore_logprobs.ops.row_statistics import RowStatistics
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.lazy import LazyLogits
from mcore_logprobs.sources.source import Source


@dataclass(frozen=True)
class LogSoftmax(Operation[Source]):
    """`[n, V/TP]`."""

    def forward(self, source: Source, tensors: Tensors) -> Forward:
        return _LogSoftmaxForward(source)

    def backward(
        self, source: Source, upstream: Results, tensors: Tensors, saved: Saved
    ) -> Backward:
        (on_columns,) = upstream
        assert on_columns is not None
        return _LogSoftmaxGradient(source, on_columns, *saved)


class _LogSoftmaxForward(RowStatistics):
    passes = 2  # the normalizers, and what they normalize

    def __init__(self, source: Source) -> None:
        super().__init__(source, StatsSpec())
        self._softmax: SoftmaxStats | None = None
        self._result = torch.empty(0)

    def see(self, placed: ChunkAt) -> None:
        if self._softmax is None:
            super().see(placed)
            return
        width = placed.chunk.logits.shape[1]
        for rows, _, step_chunk in placed.steps(self._source.rows_at_a_time(width)):
            out = self._result[rows, placed.columns]
            # Not z - lse: the difference of large numbers is taken exactly.
            row_max, log_sum = (x[rows].unsqueeze(-1) for x in self._softmax[:2])
            valid = out[:, : step_chunk.valid]
            if torch.compiler.is_compiling():  # which takes no `out=` that is not contiguous
                valid.copy_(step_chunk.unscaled() - row_max)
            else:
                torch.sub(step_chunk.unscaled(), row_max, out=valid)
            times_multiplier(valid, step_chunk.processing.multiplier, in_place=True)
            valid -= log_sum

    def finalize(self) -> None:
        self._softmax = self.reduce()[0].softmax
        source = self._source
        dtype, device = source.acc_dtype, source.device
        # Of the shape that it is given out in, so that the driver has no need to copy it.
        rows, width = source.num_rows, source.shard.width
        shape = source.batch_shape if source.batch_shape.numel() == rows else (rows,)
        result = torch.empty((*shape, width), dtype=dtype, device=device)
        self._result = result.view(rows, width)
        self._result[:, source.shard.valid_width :] = -torch.inf  # of which a head shows no block

    def results(self) -> tuple[Results, Saved]:
        assert self._softmax is not None
        row_max, log_sum, *_ = self._softmax
        return (self._result,), (row_max, log_sum)


class _LogSoftmaxGradient(Backward):
    def __init__(self, source: Source, wanted: Tensor, row_max: Tensor, log_sum: Tensor) -> None:
        self._wanted, self._row_max = wanted[:, : source.shard.valid_width], row_max
        self._step = source.rows_at_a_time(source.shard.width)
        total, asked = torch.empty_like(log_sum), torch.empty_like(log_sum, dtype=torch.bool)
        for of_rows, one_total, one_asked in zip(
            *(x.split(self._step) for x in (self._wanted, total, asked)), strict=True
        ):
            torch.sum(of_rows, -1, out=one_total)
            torch.any(of_rows != 0, -1, out=one_asked)
        total = all_reduce_sum(total, source.shard.group)
        self._asked = asked | (total != 0)
        self._minus_total = -total * log_sum.neg().exp()  # p = exp(z - row_max) / s

    def write(self, placed: ChunkAt, out: Tensor) -> None:
        columns = slice(placed.columns.start, placed.columns.start + placed.chunk.valid)
        out[:, placed.chunk.valid :] = 0
        for rows, part, step_chunk in placed.steps(self._step):
            dz = step_chunk.unscaled() - self._row_max[rows].unsqueeze(-1)
            times_multiplier(dz, step_chunk.processing.multiplier, in_place=True)
            dz.exp_().mul_(self._minus_total[rows].unsqueeze(-1)).add_(self._wanted[rows, columns])
            step_chunk.to_raw_gradient(dz)
            # A row that asks for nothing gets exactly 0, whatever its logits hold.
            asked = self._asked[rows].unsqueeze(-1)
            out[part, : step_chunk.valid] = dz.masked_fill_(~asked, 0.0)


@shared_keywords(LogitsKeywords, given_logits)
def vocab_parallel_log_softmax(
    vocab_parallel_logits: Tensor, **shared: Unpack[LogitsKeywords]
) -> Tensor:
    """Return log p of every column of this rank's shard, differentiable.

    Its result is a float32 tensor of the logits' size. If you need only a few columns, use
    `vocab_parallel_token_stats` or `vocab_parallel_gather`.

    Shape:
        vocab_parallel_logits `[..., V/TP]` -> float32 `[..., V/TP]` (float64 of float64 logits),
        normalized over all V columns; -inf at columns at or past vocab_size. A gradient that comes
        to those is left out, while one that comes to a disallowed column counts.

    Collectives: forward one all-gather of `[3, n]` float32 over TP, backward one all-reduce of
    `[n]` (grad_output's sum over the whole vocabulary).

    Keywords and errors are those of `vocab_parallel_token_stats`.
    """
    logprobs = apply(LogSoftmax(), given_logits(vocab_parallel_logits, **shared))[0]
    if isinstance(vocab_parallel_logits, LazyLogits):  # which may have been cut
        return logprobs[..., : vocab_parallel_logits.shape[-1]]
    return logprobs
