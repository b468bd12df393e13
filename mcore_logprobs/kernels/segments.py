"""Statistics whose bits do not depend on tensor parallelism, chunks or other rows.

The padded vocabulary is cut into equal segments, each of which lies on one rank whatever the
tensor-parallel size, and a segment into blocks of one fixed width:

    block      `Backend.block_stats`: a row's bits depend on that row's numbers alone
    segment    its blocks, merged one after the other, in vocabulary order
    row        the segments of all ranks, merged the same way after one all-gather

A sum over parts is a chain of additions in order (`kernels.stats.merge(ordered=True)`), since the
order in which `torch.sum` adds depends on how many there are and how they lie in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_logprobs.kernels.stats import RowSpec, merge, no_columns

if TYPE_CHECKING:
    from mcore_logprobs.kernels.backend import Backend

__all__ = ["BLOCK", "Segments", "segment_stats"]

# Columns a block at most. Narrow segments have one block, rounded up to whole vectors.
BLOCK = 2048
_VECTOR = 64


@dataclass(frozen=True)
class Segments:
    """One rank's segments of the vocabulary.

    Attributes:
        local: segments on each rank, g/TP.
        width: columns a segment, V/g.
    """

    local: int
    width: int

    @classmethod
    def of(cls, segments: int, padded_size: int, tp_size: int) -> Segments:
        """`segments` in all, for a padded vocabulary split over `tp_size` ranks.

        Raises:
            ValueError: segments that do not divide the vocabulary, or ranks that do not divide the
                segments.
        """
        if padded_size % segments:
            raise ValueError(
                f"invariant_segments: expected a divisor of the padded vocabulary {padded_size}, "
                f"got {segments}"
            )
        if segments % tp_size:
            raise ValueError(
                f"invariant_segments: expected a multiple of the tensor-parallel size {tp_size}, "
                f"got {segments}"
            )
        return cls(segments // tp_size, padded_size // segments)

    @property
    def block(self) -> int:
        """Columns a block; the last one of a segment is filled up with -inf."""
        return min(BLOCK, -(-self.width // _VECTOR) * _VECTOR)

    def columns(self, valid: int, most: int | None = None) -> Iterator[slice]:
        """This rank's true columns, `most` at a time, counted from each segment's start.

        Without `most`, each segment's at once, also where it has none.
        """
        for start in range(0, self.local * self.width, self.width):
            stop = max(start, min(start + self.width, valid))
            if most is None:
                yield slice(start, stop)
                continue
            for at in range(start, stop, most):
                yield slice(at, min(at + most, stop))


def segment_stats(
    backend: Backend,
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    segments: Segments,
    *,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
    chunk_size: int,
) -> Tensor:
    """The row statistics of each of this rank's segments, `[local, k, n]`.

    Arguments as in `kernels.reference.row_stats`; `logits` are all of this rank's columns.
    """
    rows = logits.shape[0]
    # All segments merge at once, as rows of their own; blocks that are masked add nothing.
    stats = no_columns(spec, segments.local * rows, like=logits)
    stats = stats.repeat(-(-segments.width // segments.block), 1, 1)
    for number, columns in enumerate(segments.columns(spec.valid)):
        width = columns.stop - columns.start
        own = target - columns.start
        blocks = backend.block_stats(
            logits[:, columns],
            torch.where((own >= 0) & (own < width), own, -1),
            replace(spec, valid=width),
            block=segments.block,
            bias=None if bias is None else bias[columns],
            threshold=threshold,
            temperature=temperature,
            chunk_size=chunk_size * segments.local,  # as many numbers, of narrower rows
        )
        stats[: blocks.shape[0], :, number * rows : (number + 1) * rows] = blocks
    merged = merge(stats, spec, ordered=True)
    return merged.view(len(spec.fields), segments.local, rows).transpose(0, 1)
