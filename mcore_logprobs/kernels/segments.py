"""Statistics whose bits do not depend on tensor parallelism, chunks or other rows.

The padded vocabulary is cut into equal segments, each of which lies on one rank whatever the
tensor-parallel size, and a segment into blocks of one fixed width:

    block      `Backend.stats(block=)`: a row's bits depend on that row's numbers alone
    segment    its blocks, merged
    row        the segments of all ranks, merged the same way after one all-gather

A merge is a chain of additions in vocabulary order (`kernels.stats.merge(ordered=True)`), since the
order in which `torch.sum` adds depends on how many there are and how they lie in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_logprobs.kernels.backend import Backend
from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.stats import StatsSpec, merge, no_columns

__all__ = ["BLOCK", "Segments", "segment_stats"]

# Columns a block at most: 8 KiB of float32, well within a first-level cache.
BLOCK = 2048
_MIN_BLOCK = 512


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

    def block(self, device_type: str) -> int:
        """Columns a block; the last one of a segment is filled up with -inf if it is not whole.

        A narrow segment is one block. On a CPU the largest divisor of the width between 512 and
        2048, so that all are whole, or 2048 where there is none. Elsewhere 2048, for kernels there
        read whole powers of two.
        """
        if self.width <= BLOCK or device_type != "cpu":
            return min(self.width, BLOCK)
        sizes = range(BLOCK, _MIN_BLOCK - 1, -1)
        return next((size for size in sizes if self.width % size == 0), BLOCK)

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
    chunk: Chunk,
    target: Tensor,
    spec: StatsSpec,
    segments: Segments,
    *,
    threshold: Tensor | None = None,
    chunk_size: int,
) -> Tensor:
    """The row statistics of each of this rank's segments, `[local, k, n]`.

    Arguments as in `kernels.reference.stats`; the chunk's columns are all of this rank's.
    """
    rows, block = chunk.logits.shape[0], segments.block(chunk.logits.device.type)
    count = -(-segments.width // block)
    # [local, blocks, k, n]; blocks that are masked add nothing.
    stats = no_columns(spec, rows, like=chunk.logits).repeat(segments.local, count, 1, 1)
    if segments.width % block == 0:  # one call: no block reaches into the next segment
        parts = [slice(0, segments.local * segments.width)]
        places = [stats.flatten(0, 1)]
    else:
        parts = list(segments.columns(chunk.valid))
        places = list(stats)
    for columns, place in zip(parts, places, strict=True):
        some = chunk.columns(columns)
        own = target - columns.start
        blocks = backend.stats(
            some,
            torch.where((own >= 0) & (own < some.valid), own, -1),
            spec,
            threshold=threshold,
            block=block,
            chunk_size=chunk_size * len(parts),  # as many numbers, of narrower rows
        )
        place[: blocks.shape[0]] = blocks
    # All segments at once, as rows of their own.
    every = stats.permute(1, 2, 0, 3).reshape(count, len(spec.fields), -1)
    merged = merge(every, spec, ordered=True)
    return merged.view(len(spec.fields), segments.local, rows).transpose(0, 1)
