"""A tensor of logits `[..., V/TP]` as rows, without copying it.

`[b, s]` and `[s, b]`, transposed views and slices such as `logits[:, :-1]` all become a few 2-D
views with one row stride each; the per-row tensors (targets, log-probabilities) are flat.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from mcore_logprobs.kernels.reference import row_chunks

__all__ = ["Rows"]


class Rows:
    """The order in which the rows of one logits tensor are walked: as they lie in memory.

    Attributes:
        count: number of rows, n.
    """

    def __init__(self, logits: Tensor) -> None:
        self._lead = logits.shape[:-1]
        strides = logits.stride()[:-1]
        self._order = sorted(range(len(self._lead)), key=lambda dim: -strides[dim])
        self.count = self._lead.numel()

    def flat(self, per_row: Tensor) -> Tensor:
        """`[..., *rest]` -> `[n, *rest]` in walking order; a copy only where it must be."""
        rest = range(len(self._order), per_row.dim())
        shape = (self.count, *per_row.shape[len(self._order) :])
        return per_row.permute((*self._order, *rest)).reshape(shape)

    def unflat(self, flat: Tensor) -> Tensor:
        """The inverse of `flat`: `[n, *rest]` -> `[..., *rest]`, contiguous."""
        lead = (self._lead[dim] for dim in self._order)
        walked = flat.reshape((*lead, *flat.shape[1:]))
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        rest = range(len(self._order), walked.dim())
        return walked.permute((*inverse, *rest)).contiguous()

    def blocks(self, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """2-D views that cover the rows in walking order: (slice of the flat rows, a view of each).

        One block wherever the leading dimensions of every tensor collapse into one stride; else one
        for each index of the outer dimension.

        Args:
            tensors: `[..., *]` each, with the leading shape of the logits; any strides.
        """
        start = 0
        for views in _collapse(
            [t.permute((*self._order, *range(len(self._order), t.dim()))) for t in tensors]
        ):
            stop = start + views[0].shape[0]
            yield slice(start, stop), *views
            start = stop

    def chunks(self, chunk_size: int, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """As `blocks`, at most `chunk_size` rows at a time."""
        for part, *views in self.blocks(*tensors):
            for chunk in row_chunks(part.stop - part.start, chunk_size):
                where = slice(part.start + chunk.start, part.start + chunk.stop)
                yield where, *(view[chunk] for view in views)


def _collapse(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    if tensors[0].dim() == 2:
        yield tensors
        return
    try:
        yield [t.view(t.shape[:-1].numel(), t.shape[-1]) for t in tensors]
        return
    except RuntimeError:  # the leading dimensions of one have no common stride
        pass
    for parts in zip(*(t.unbind(0) for t in tensors), strict=True):
        yield from _collapse(list(parts))
