"""Statistics whose bits do not depend on tensor parallelism, chunks or other rows.

The padded vocabulary is cut into equal segments, each of which lies on one rank whatever the
tensor-parallel size, and a segment into blocks of one fixed width:

    block      `Backend.block_stats`: a row's bits depend on that row's numbers alone
    segment    its blocks, merged
    row        the segments of all ranks, merged the same way after one all-gather

In torch a merge is a chain of additions in vocabulary order (`kernels.stats.merge(ordered=True)`),
since the order in which `torch.sum` adds depends on how many there are and how they lie in memory.
A backend with `OneLaunch` computes all segments at once and adds in one fixed tree: how it splits a
row follows from the segments' width alone, never from how many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_logprobs.kernels.stats import RowSpec, merge, no_columns

if TYPE_CHECKING:
    from mcore_logprobs.kernels.backend import Backend

__all__ = ["BLOCK", "Segments", "segment_stats"]

# Columns a block at most: 8 KiB of float32, well within a first-level cache.
BLOCK = 2048
_MIN_BLOCK = 512
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

    def block(self, device_type: str) -> int:
        """Columns a block; the last one of a segment is filled up with -inf if it is not whole.

        On a CPU the largest divisor of the width between 512 and 2048, so that all are whole, or
        2048 where there is none; a narrow segment is one block. Elsewhere 2048, or a narrow
        segment rounded up to whole vectors: kernels there want powers of two.
        """
        return _block(self.width, device_type == "cpu")

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


@cache
def _block(width: int, divides: bool) -> int:
    if not divides:
        return min(BLOCK, -(-width // _VECTOR) * _VECTOR)
    if width <= BLOCK:
        return width
    return next((size for size in range(BLOCK, _MIN_BLOCK - 1, -1) if width % size == 0), BLOCK)


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
    from mcore_logprobs.kernels.backend import one_launch  # which imports this module

    native = one_launch(backend)
    if native is not None:
        return native.segment_stats(
            logits, target, spec, segments,
            bias=bias, threshold=threshold, temperature=temperature,
        )  # fmt: skip
    rows, block = logits.shape[0], segments.block(logits.device.type)
    count = -(-segments.width // block)
    # [local, blocks, k, n]; blocks that are masked add nothing.
    stats = no_columns(spec, rows, like=logits).repeat(segments.local, count, 1, 1)
    if segments.width % block == 0:  # one call: no block reaches into the next segment
        parts = [slice(0, spec.valid)]
        places = [stats.flatten(0, 1)]
    else:
        parts = list(segments.columns(spec.valid))
        places = list(stats)
    for columns, place in zip(parts, places, strict=True):
        width = columns.stop - columns.start
        own = target - columns.start
        blocks = backend.block_stats(
            logits[:, columns],
            torch.where((own >= 0) & (own < width), own, -1),
            replace(spec, valid=width),
            block=block,
            bias=None if bias is None else bias[columns],
            threshold=threshold,
            temperature=temperature,
            chunk_size=chunk_size * len(parts),  # as many numbers, of narrower rows
        )
        place[: blocks.shape[0]] = blocks
    # All segments at once, as rows of their own.
    every = stats.permute(1, 2, 0, 3).reshape(count, len(spec.fields), -1)
    merged = merge(every, spec, ordered=True)
    return merged.view(len(spec.fields), segments.local, rows).transpose(0, 1)
