"""What logits are like, row by row, among this rank's columns: no communication, no gradient."""

from __future__ import annotations

import torch

from mcore_logprobs.kernels.chunk import ChunkAt
from mcore_logprobs.ops.driver import Forward, show, without_autocast
from mcore_logprobs.sources.lazy_head import RowSummary
from mcore_logprobs.sources.source import Source


class _RowSummary(Forward):
    """Attributes:
    values, columns: `[2, n]`, of the largest logit and of minus the smallest.
    sums: `[2, n]`, of logits and of their squares.
    """

    def __init__(self, source: Source) -> None:
        self._step = source.rows_at_a_time
        shape, device = (2, source.num_rows), source.device
        self.values = torch.full(shape, -torch.inf, dtype=source.acc_dtype, device=device)
        self.columns = torch.zeros(shape, dtype=torch.int64, device=device)
        self.sums = torch.zeros(shape, dtype=source.acc_dtype, device=device)

    def see(self, placed: ChunkAt) -> None:
        chunk = placed.chunk
        if chunk.valid == 0:
            return
        for rows, _, step_chunk in placed.steps(self._step(chunk.valid)):
            z = step_chunk.processed()
            (largest, above), (smallest, below) = z.max(-1), z.min(-1)
            value, column = torch.stack([largest, -smallest]), torch.stack([above, below])
            best = self.values[:, rows]
            # The first of those that tie; NaN is the largest of all, and the smallest.
            more = (value > best) | (value.isnan() & ~best.isnan())
            self.values[:, rows] = torch.where(more, value, best)
            self.columns[:, rows] = torch.where(
                more, column + placed.columns.start, self.columns[:, rows]
            )
            squares = torch.linalg.vector_norm(z, dim=-1).square_()  # no product, hence no TF32
            self.sums[:, rows] += torch.stack([z.sum(-1), squares])


@torch.no_grad()
def row_summary(source: Source) -> RowSummary:
    """Of each token's processed logits, `[*lead]` each."""
    run = _RowSummary(source)
    with without_autocast(source.device):
        show(run, source)
    (largest, negated), (above, below), (total, squares) = run.values, run.columns, run.sums
    rows = RowSummary(
        largest=largest,
        largest_column=above,
        smallest=-negated,
        smallest_column=below,
        mean=total / max(1, source.shard.valid_width),
        norm=squares.sqrt(),
    )
    return RowSummary(*map(source.to_token_order, rows))
