"""Statistics whose bits do not depend on tensor parallelism, chunks or other rows.

The padded vocabulary is cut into equal segments, each of which lies on one rank whatever the
tensor-parallel size, and a segment into blocks of one fixed width:

    block      `Backend.stats(block=)`: a row's bits depend only on that row's numbers
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

from mcore_logprobs.kernels import budgets
from mcore_logprobs.kernels.stats import StatsSpec, merge, no_columns


@dataclass(frozen=True)
class Segments:
    """One rank's segments of the vocabulary.

    Attributes:
        local: segments on each rank, g/TP.
        width: columns per segment, V/g.
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
        """Columns per block; the last one of a segment is filled up with -inf if it is not whole.

        A narrow segment is one block. Otherwise the largest divisor of the width between
        `Budgets.min_segment_block` and `segment_block`, so that all are whole, or `segment_block`
        where there is none.
        """
        sizes = budgets.of(device_type)
        most = min(self.width, sizes.segment_block)
        divisors = range(most, sizes.min_segment_block - 1, -1)
        return next((size for size in divisors if self.width % size == 0), most)

    def columns(self, valid: int, most: int) -> Iterator[slice]:
        """This rank's true columns, `most` at a time, counted from each segment's start."""
        for start in range(0, self.local * self.width, self.width):
            stop = min(start + self.width, valid)
            for at in range(start, stop, most):
                yield slice(at, min(at + most, stop))

    def calls(self, columns: slice, block: int) -> Iterator[tuple[int, slice]]:
        """(first segment, columns) of each call that takes block statistics of some columns.

        One call where no block reaches into the next segment: the logits are then read by one
        kernel. Else one per segment.
        """
        first, offset = divmod(columns.start, self.width)
        if self.width % block == 0 and offset == 0:
            yield first, columns
            return
        for number in range(first, -(-columns.stop // self.width)):
            start = max(columns.start, number * self.width)
            yield number, slice(start, min(columns.stop, (number + 1) * self.width))


def merge_segments(
    parts: list[list[Tensor]], spec: StatsSpec, multiplier: float | Tensor
) -> Tensor:
    """Each segment's blocks, merged: all segments at once, as rows of their own.

    Args:
        multiplier: `Processing.multiplier`, a number or `[n]`.
        parts: by segment, its blocks' statistics in the order of their columns, `[blocks, k, n]`
            each. One without true vocabulary has none.

    Returns:
        `[local, k, n]`.
    """
    counts = [sum(x.shape[0] for x in blocks) for blocks in parts]
    like = next(x for blocks in parts for x in blocks)
    none = no_columns(spec, like.shape[-1], like=like)  # of columns that are masked: adds nothing
    full = [
        torch.cat([*blocks, none.expand(max(counts) - count, -1, -1)])
        for blocks, count in zip(parts, counts, strict=True)
    ]
    every = torch.stack(full, -2)  # [blocks, k, local, n]
    if isinstance(multiplier, Tensor):
        multiplier = multiplier.repeat(len(parts))
    merged = merge(every.flatten(-2), spec, multiplier=multiplier, ordered=True)
    return merged.unflatten(-1, every.shape[-2:]).transpose(0, 1).contiguous()
