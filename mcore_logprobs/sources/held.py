"""Logits of whole rows that are held and read a few rows at a time, by filters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mcore_logprobs.kernels.chunk import Chunk, ChunkAt, row_chunks
from mcore_logprobs.kernels.largest import copied_numbers

# Takes (some of the rows, their logits `[c, valid]`) and gives a tensor `[..., c]`.
Look = Callable[[slice, Tensor], Tensor]


class HeldLogits:
    """Logits before the temperature of a tile's rows, `[n, valid]`.

    Attributes:
        dtype: of copies, float32 or float64.
        raw_dtype: the logits' own where nothing processes them; then they are read in place.

    Args:
        chunks: of whole rows, at least one; the first row is the first of the n.
        rows_at_a_time: columns -> rows of which float32 copies of so many columns are made.
    """

    def __init__(
        self, chunks: list[ChunkAt], rows_at_a_time: Callable[[int], int], dtype: torch.dtype
    ) -> None:
        first = chunks[0].rows.start if chunks else 0
        self._chunks = [
            (
                slice(placed.rows.start - first, placed.rows.stop - first),
                placed.chunk.untempered,
            )
            for placed in chunks
        ]
        self._rows_at_a_time = rows_at_a_time
        self.dtype = self.raw_dtype = dtype
        if chunks and all(chunk.is_unprocessed for _, chunk in self._chunks):
            self.raw_dtype = chunks[0].chunk.logits.dtype

    def show(self, see: Callable[[slice, Tensor], None], k: int) -> None:
        """Show all rows, in `raw_dtype` where they are read in place: `see(rows, [c, valid])`.

        Args:
            k: as many rows at a time as their k largest logits are found of.
        """
        for rows, chunk in self._chunks:
            copied = copied_numbers(chunk.valid, k, chunk.logits.device)
            copied += (not chunk.is_unprocessed) * chunk.valid
            for part in row_chunks(rows.stop - rows.start, self._rows_at_a_time(copied)):
                of_all = slice(rows.start + part.start, rows.start + part.stop)
                see(of_all, _logits(chunk.rows(part)))

    def rows_by_chunk(self, index: Tensor) -> list[tuple[Chunk, Tensor]]:
        """The chunks, and which of their rows are among rows `[r]`: for `look_at`.

        A host sync where there are several chunks.

        Args:
            index: `[r]` int64, ascending, not empty.
        """
        if len(self._chunks) == 1:
            return [(self._chunks[0][1], index)]
        ends = torch.tensor([rows.stop for rows, _ in self._chunks], device="cpu")
        bounds = torch.searchsorted(index.cpu(), ends).tolist()  # the sync
        return [
            (chunk, index[first:last] - rows.start)
            for (rows, chunk), first, last in zip(self._chunks, [0, *bounds], bounds, strict=False)
        ]

    def look_at(self, rows: list[tuple[Chunk, Tensor]], look: Look) -> Tensor:
        """What `look` gives of r rows, joined: `[..., r]`.

        Args:
            rows: what `rows_by_chunk` gave.
            look: it may write over the logits it is given, new ones in `dtype`; its slice is of
                the r rows.
        """
        looks, start = [], 0
        for chunk, of_chunk in rows:
            for part in row_chunks(of_chunk.shape[0], self._rows_at_a_time(chunk.valid)):
                copy = _logits(replace(chunk, logits=chunk.logits[of_chunk[part]])).to(self.dtype)
                looks.append(look(slice(start + part.start, start + part.stop), copy))
                del copy
            start += of_chunk.shape[0]
        return torch.cat(looks, -1)


def _logits(chunk: Chunk) -> Tensor:
    """`[n, valid]` of a chunk without a temperature; its own memory where they are plain."""
    return chunk.logits[:, : chunk.valid] if chunk.is_unprocessed else chunk.processed()
