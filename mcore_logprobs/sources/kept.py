"""Chunks of a head's logits that are kept from the forward to the backward: `saved_bytes`.

A chunk that is kept costs 3 GEMMs, any other 4. Before the forward only the sizes decide which
ones are: those that fit, in the order of the walk. A chunk is kept in one of two forms:

    exact     as it was multiplied, where logits are no wider than the operands (a float32 head, or
              a bfloat16 logits_dtype): the backward reads the numbers that the forward read
    rounded   float32 logits of bfloat16 and float16 operands in 16 bits each (`kernels.codes`), and
              two float32 numbers per row; probabilities are off by 2^-11 at most

Rounded logits serve the gradient of statistics, which rounds them no less. A gradient that is a
difference of close distributions, or asks which logits reach a limit, reads exact ones or none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mcore_logprobs.kernels.chunk import Chunk, prefer_huge_pages, row_stride
from mcore_logprobs.sources.head_operands import HeadOperands, HeadTile

logger = logging.getLogger("mcore_logprobs")

# What a backward does with the logits of its forward: multiplies none again; bears them rounded;
# needs them as they were.
Rereads = Literal["nothing", "rounded", "exact"]


@dataclass(frozen=True)
class KeptPlan:
    """Which chunks of one head are kept.

    Attributes:
        rounded: in which form.
        places: (number of the tile, first column of the block), in the order of the walk.
        saved_bytes: the setting, for an error to name.
    """

    rounded: bool
    places: tuple[tuple[int, int], ...]
    saved_bytes: int


def plan_kept(heads: Sequence[HeadOperands], rereads: Rereads) -> tuple[KeptPlan, ...]:
    """What an operation on these heads keeps, a plan for each; none where nothing is kept.

    Args:
        heads: at least one was given saved_bytes.
    """
    saved = next(x.options.saved for x in heads if x.options.saved is not None)
    if rereads == "nothing":
        return ()
    refusals = [_refusal(x, rereads) for x in heads]
    if all(refusals):
        _log_once(
            saved.count,
            str(refusals[0]),
            f"saved_bytes={saved.count}: no logits are kept for this backward: {refusals[0]}; "
            f"logits of logits_dtype={heads[0].options.compute_dtype} are kept",
        )
        return ()
    places: list[list[tuple[int, int]]] = [[] for _ in heads]
    least, before = 0, saved.left
    for rows, number, columns in _walk(heads[0]):
        for head, kept, refusal in zip(heads, places, refusals, strict=True):
            size = math.inf if refusal else _chunk_bytes(head, rows, columns)
            if size <= saved.left:
                saved.left -= int(size)
                kept.append((number, columns.start))
            elif not refusal:
                least = min(least, int(size)) or int(size)
    if least and saved.left == saved.count:
        _log_once(
            saved.count,
            "smaller than a chunk",
            f"saved_bytes={saved.count}: smaller than the smallest chunk of logits, {least} bytes; "
            "nothing is kept for the backward",
        )
    if saved.left == before:
        return ()
    return tuple(
        KeptPlan(not _is_exact(head), tuple(kept), saved.count)
        for head, kept in zip(heads, places, strict=True)
    )


def whole_bytes(head: HeadOperands) -> int:
    """What keeping all chunks of a head takes."""
    return sum(_chunk_bytes(head, rows, columns) for rows, _, columns in _walk(head))


def _walk(head: HeadOperands) -> Iterator[tuple[int, int, slice]]:
    """(rows, number of the tile, columns) of each chunk."""
    for number, part in enumerate(head.hidden.local):
        for columns in head.blocks:
            yield (part.stop - part.start) * head.hidden.ranks, number, columns


def _is_exact(head: HeadOperands) -> bool:
    return head.options.logits_dtype.itemsize <= head.options.compute_dtype.itemsize


def _refusal(head: HeadOperands, rereads: Rereads) -> str | None:
    """Why a head's chunks are not kept for such a gradient, or None."""
    options = head.options
    if _is_exact(head):
        return None
    rounded = f"{options.logits_dtype} logits of {options.compute_dtype} operands would be rounded"
    if rereads == "exact":
        return f"{rounded}, and the gradient requires exact ones"
    # A softcap or a bias moves logits by more than a code's range and step are made for; with
    # segments a rank's other chunks would leave their mark on bits.
    if options.softcap is not None or head.processing.bias is not None:
        return f"{rounded}, which a softcap or a bias (logit_bias, disallowed_ids) does not allow"
    if options.segments is not None:
        return f"{rounded}, which invariant_segments does not allow"
    return None


def _chunk_bytes(head: HeadOperands, rows: int, columns: slice) -> int:
    exact = _is_exact(head)
    dtype = head.options.logits_dtype if exact else torch.int16
    stride = row_stride(columns.stop - columns.start, dtype, head.device.type)
    return rows * (stride * dtype.itemsize + (0 if exact else 2 * 4))


def keep(heads: Sequence[HeadOperands], plans: Sequence[KeptPlan]) -> list[KeptLogits]:
    """Have heads keep what the plans say, as their tiles are walked."""
    kept = [KeptLogits(plan) for plan in plans]
    for head, logits in zip(heads, kept, strict=True):
        head.kept = logits
    return kept


def restore(
    heads: Sequence[HeadOperands], plans: Sequence[KeptPlan], tensors: Sequence[Tensor]
) -> None:
    """Have heads read what `keep` kept.

    Args:
        tensors: those of its results, one after the other.
    """
    for head, plan in zip(heads, plans, strict=True):
        count = len(plan.places) * (2 if plan.rounded else 1)
        of_head, tensors = tensors[:count], tensors[count:]
        head.kept = KeptLogits(plan, of_head)


class KeptLogits:
    """The kept chunks of one head, while they are made and when they are read again.

    Attributes:
        tensors: what is saved for the backward; 1-D, so that it does not matter how saved-tensor
            hooks lay tensors in memory. None: a chunk that was not multiplied.

    Args:
        tensors: what the forward saved; None: this is the forward.
    """

    def __init__(self, plan: KeptPlan, tensors: Sequence[Tensor] | None = None) -> None:
        self._rounded, self._saved_bytes = plan.rounded, plan.saved_bytes
        self._width = 2 if plan.rounded else 1
        self._places = {place: number for number, place in enumerate(plan.places)}
        self._is_backward = tensors is not None
        self.tensors: list[Tensor | None] = [None] * (len(plan.places) * self._width)
        if tensors is not None:
            self.tensors[:] = tensors

    def chunk(self, tile: HeadTile, columns: slice, out: Tensor | None) -> Chunk | None:
        """The chunk of these columns; None: not one of those that are kept.

        Multiplied and kept at the first call, and read at later ones. Rounded logits are for the
        backward: a second pass of the forward multiplies again.

        Args:
            out: where they go; None: kept memory, or a buffer that the next such chunk overwrites.
        """
        number = self._places.get((tile.number, columns.start))
        if number is None:
            return None
        shape = tile.hidden.shape[0], columns.stop - columns.start
        if self._rounded:
            return self._through_codes(tile, columns, out, number, shape)
        head, memory = tile.head, self.tensors[number]
        is_new = memory is None
        if memory is None:
            memory = self.tensors[number] = self._new(head, shape, head.options.logits_dtype)
        kept = _as_chunk(memory, shape)
        if out is None:
            if is_new:
                head.product(tile.hidden, columns, kept)
            return replace(head.processing.chunk(kept, tile.rows, columns), lasting=True)
        if is_new:
            kept.copy_(head.product(tile.hidden, columns, out))
        else:
            out.copy_(kept)
        return head.processing.chunk(out, tile.rows, columns)

    def _through_codes(
        self,
        tile: HeadTile,
        columns: slice,
        out: Tensor | None,
        number: int,
        shape: tuple[int, int],
    ) -> Chunk:
        head, at = tile.head, 2 * number
        logits = head.buffer(*shape, head.options.logits_dtype) if out is None else out
        size = head.rows_at_a_time(shape[1])
        chunk = head.processing.chunk(logits, tile.rows, columns)
        if self._is_backward:
            codes, scale = self.tensors[at : at + 2]
            assert codes is not None
            assert scale is not None
            scale = scale.view(2, -1)
            head.backend.decode(_as_chunk(codes, shape), scale, out=logits, chunk_size=size)
            return chunk
        head.product(tile.hidden, columns, logits)
        if self.tensors[at] is None:
            codes = self._new(head, shape, torch.int16)
            scale = head.backend.encode(chunk, out=_as_chunk(codes, shape), chunk_size=size)
            self.tensors[at], self.tensors[at + 1] = codes, scale.flatten()
        return chunk

    def _new(self, head: HeadOperands, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Memory of a chunk, 1-D."""
        rows, columns = shape
        count = rows * row_stride(columns, dtype, head.device.type)
        try:
            memory = head.weight.new_empty(count, dtype=dtype)
        except RuntimeError as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(
                    f"These are chunks of logits that saved_bytes={self._saved_bytes} keeps for "
                    "the backward: a smaller saved_bytes keeps fewer"
                )
            raise
        return prefer_huge_pages(memory)


def _as_chunk(memory: Tensor, shape: tuple[int, int]) -> Tensor:
    """`[rows, columns]` of the memory of a chunk."""
    rows, columns = shape
    stride = row_stride(columns, memory.dtype, memory.device.type)
    return memory.view(rows, stride)[:, :columns]


_logged: set[tuple[int, str]] = set()


def _log_once(saved_bytes: int, why: str, line: str) -> None:
    """Once for each setting and reason; the line may name sizes of this call."""
    if torch.compiler.is_compiling() or (saved_bytes, why) in _logged:
        return
    _logged.add((saved_bytes, why))
    logger.warning(line)
