"""The largest logit of each row among this rank's columns: no communication."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_logprobs.ops.driver import Forward, show
from mcore_logprobs.sources.source import ChunkAt, Source


class _LocalLargest(Forward):
    def __init__(self, source: Source) -> None:
        self._step = source.rows_at_a_time
        self.values = torch.full(
            (source.num_rows,), -torch.inf, dtype=source.acc_dtype, device=source.device
        )
        self.columns = torch.zeros(source.num_rows, dtype=torch.int64, device=source.device)

    def see(self, placed: ChunkAt) -> None:
        chunk = placed.chunk
        if chunk.valid == 0:
            return
        for rows, _, some in placed.steps(self._step(chunk.valid)):
            value, column = some.processed().max(-1)
            best = self.values[rows]
            # The first of those that tie; NaN is the largest of all.
            more = (value > best) | (value.isnan() & ~best.isnan())
            self.values[rows] = torch.where(more, value, best)
            self.columns[rows] = torch.where(
                more, column + placed.columns.start, self.columns[rows]
            )


@torch.no_grad()
def local_largest(source: Source) -> tuple[Tensor, Tensor]:
    """(largest processed logit, its column in this rank's shard) of each token, `[*lead]` each."""
    largest = _LocalLargest(source)
    show(largest, source)
    return source.to_token_order(largest.values), source.to_token_order(largest.columns)
