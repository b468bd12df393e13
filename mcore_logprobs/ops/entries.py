"""Single logits of each row: where they are, and their gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec
from mcore_logprobs.ops.row_statistics import LogitGradient
from mcore_logprobs.sources.source import Entries, Placed, Source, Tile


def grid_entries(local_ids: Tensor, rows: slice) -> Entries:
    """The entries of some rows, from `[n, k]` columns: k per row."""
    own = local_ids[rows]
    row = torch.arange(rows.start, rows.stop, device=own.device)
    return Entries(row.repeat_interleave(own.shape[1]), own.reshape(-1))


def entries_of_chunk(placed: Placed, entries: Entries) -> tuple[Tensor, Tensor]:
    """(row, column) of entries as the chunk's own, `[e]` each; (0, -1) of those not in it."""
    inside = (entries.row >= placed.rows.start) & (entries.row < placed.rows.stop)
    column = torch.where(inside, placed.local(entries.column), -1)
    return torch.where(column >= 0, entries.row - placed.rows.start, 0), column


class EntryGradient(LogitGradient):
    """The gradient of processed logits `[n, k]` at local ids `[n, k]`; -1 is another rank's.

    Of recomputed logits by dot products, of given ones chunk by chunk.
    """

    def __init__(self, source: Source, local_ids: Tensor, upstream: Tensor) -> None:
        super().__init__(source, GradientTerms(local_ids, upstream, None, None, StatsSpec()))
        self.entries = source.recomputed
        self._local_ids, self._upstream = local_ids, upstream

    def at(self, tile: Tile) -> tuple[Entries, Tensor]:
        own = self._upstream[tile.rows].reshape(-1)
        return grid_entries(self._local_ids, tile.rows), own
