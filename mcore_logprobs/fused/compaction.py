"""Leaving out the rows whose target is ignored, so that they cost no product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.fused.head import LinearOptions
from mcore_logprobs.groups import group_rank, group_size
from mcore_logprobs.logits.inputs import LocalTarget

__all__ = ["Compaction"]


class Compaction:
    """The rows that are kept, and the way back.

    Under sequence parallelism each rank holds its own rows and must send as many as any other:
    every rank keeps as many as the fullest, the difference being rows that are ignored anyway.
    Targets are the same on all ranks, and so is every rank's idea of the sizes. One host sync.

    Args:
        keep: `[n]` bool, the whole sequence.
    """

    def __init__(self, keep: Tensor, opts: LinearOptions) -> None:
        group = opts.group if opts.sequence_parallel else None
        ranked = keep.view(group_size(group), -1)
        most = int(ranked.sum(1).max()) if keep.numel() else 0  # the host sync
        # Kept rows first, in their order.
        order = ranked.logical_not().to(torch.int8).argsort(dim=1, stable=True)[:, :most]
        self._own = order[group_rank(group)]
        offsets = torch.arange(ranked.shape[0], device=keep.device) * ranked.shape[1]
        self._rows = (order + offsets.unsqueeze(1)).reshape(-1)
        self._count = keep.shape[0]

    def select_hidden(self, hidden: Tensor) -> Tensor:
        """`[n_local, h]` -> this rank's kept rows; differentiable."""
        return hidden.index_select(0, self._own)

    def select(self, per_row: Tensor) -> Tensor:
        """`[n, ...]` of the whole sequence -> its kept rows."""
        return per_row.index_select(0, self._rows)

    def select_target(self, local: LocalTarget) -> LocalTarget:
        return LocalTarget(self.select(local.column), self.select(local.keep))

    def spread(self, results: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """(logprobs, entropy, rank, lse) of kept rows -> of all `[n]`; differentiable."""
        fills = (0, 0, -1, 0)
        return tuple(
            None if x is None else x.new_full((self._count,), fill).index_copy(0, self._rows, x)
            for x, fill in zip(results, fills, strict=True)
        )
