"""The rows of a fused call: opened once, cut into tiles, and their results put back in place.

A *tile* is some rows of the hidden states; a *block* is some columns of the vocabulary. Only one
tile-by-block rectangle of logits, the chunk, exists at a time. Under sequence parallelism a tile is
gathered from all ranks when it is needed (the next one while this one is worked on), so that
the whole sequence is never held either; its gradient is reduce-scattered the same way.

Rows are walked tile by tile, and within a tile rank by rank. That order differs from the sequence's
only under sequence parallelism with several tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_chunk_size, check_flag
from mcore_logprobs.collectives import all_gather_dim0_async, wait_for
from mcore_logprobs.groups import VocabShard, group_rank, group_size
from mcore_logprobs.kernels.products import operand
from mcore_logprobs.kernels.reference import row_chunks
from mcore_logprobs.kernels.stats import IGNORED, RowResults
from mcore_logprobs.logits.distill import check_mask
from mcore_logprobs.logits.opening import (
    LocalTarget,
    check_target,
    localize_target,
    open_temperature,
)
from mcore_logprobs.logits.token_stats import TokenStats

__all__ = [
    "NO_TARGET",
    "HiddenTiles",
    "Tile",
    "Tiling",
    "Tokens",
    "check_per_token",
    "open_tokens",
    "whole_lead",
    "whole_row_tiling",
]


class _NoTarget(Enum):
    NO_TARGET = "an operation without one; None is a user's mistake"


NO_TARGET: Final = _NoTarget.NO_TARGET

# Bytes of one float32 chunk of logits.
_CHUNK_BYTES = {"cpu": 32 << 20, "other": 256 << 20}
# Rows a tile: enough that a product of [rows, h] and [h, columns] runs at full speed, and that
# reading and writing a block of the weight's gradient once a tile costs little beside it.
_TILE_ROWS = {"cpu": 2048, "other": 8192}
_MAX_BLOCK = {"cpu": 4096, "other": 1 << 20}
# Blocks are as wide as each other, up to multiples of this: whole tiles of a product.
_BLOCK_STEP = {"cpu": 64, "other": 128}
# Bytes of one float32 chunk that spans all of a rank's columns. Each reads and writes the whole
# float32 dWeight once, so that it must have enough rows to outweigh that: on a GPU as many as
# `whole_row_tile` is told, where they fit into the larger limit. The same on every rank, whatever
# memory is free there: ranks must cut alike.
_WHOLE_ROW_BYTES = {"cpu": 128 << 20, "other": 1 << 30}
_LARGEST_WHOLE = 5 << 29
_ROW_STEP = 256


def tile_shape(
    rows: int, columns: int, chunk_size: int | None, device: torch.device
) -> tuple[int, int]:
    """(rows a tile, columns a block) for `rows` rows and `columns` columns on a rank."""
    kind = "cpu" if device.type == "cpu" else "other"
    tile = max(1, min(rows, chunk_size or _TILE_ROWS[kind]))
    return tile, _block_columns(tile, columns, chunk_size, kind)


def _block_columns(tile: int, columns: int, chunk_size: int | None, kind: str) -> int:
    """Columns a block for tiles of so many rows."""
    most = max(_CHUNK_BYTES[kind] // (4 * tile), 256)
    if chunk_size is None:
        most = min(most, _MAX_BLOCK[kind])
    return even_parts(columns, most, _BLOCK_STEP[kind])


def even_parts(total: int, most: int, step: int) -> int:
    """The size of as few parts as hold `most` each, all about as large: a multiple of `step`.

    A product of what is left over would run far below the speed of the others.
    """
    parts = max(1, -(-total // most))
    size = -(-total // (parts * step)) * step
    return max(1, min(size, most, total))


def whole_row_tile(rows: int, width: int, device: torch.device, *, least: int = 0) -> int:
    """Rows a tile for `rows` rows where a chunk spans all `width` columns of a rank.

    Args:
        least: rows that a tile should have, for which the chunk may be larger on a GPU.
    """
    row_bytes = 4 * max(1, width)
    if device.type == "cpu":
        return max(1, min(rows, _WHOLE_ROW_BYTES["cpu"] // row_bytes))
    most = max(_WHOLE_ROW_BYTES["other"] // row_bytes, min(least, _LARGEST_WHOLE // row_bytes))
    if most > _ROW_STEP:
        most -= most % _ROW_STEP
    return even_parts(rows, max(1, most), _ROW_STEP)


@dataclass(frozen=True)
class Tiling:
    """How rows are cut into tiles and columns into blocks; see `tile_shape`.

    Attributes:
        sequence_parallel: whether the hidden states are split over `group`, row by row.
    """

    group: ProcessGroup | None
    sequence_parallel: bool
    tile_rows: int
    block_columns: int


@dataclass(frozen=True)
class Tokens:
    """A checked call's rows, those without a target left out if it is compact.

    Attributes:
        lead: the target's shape.
        hidden: `[n_local, h]`, differentiable.
        target: `[n]` each.
        temperature: `[n]`, each row's own in place of the head's, or None.
    """

    lead: torch.Size
    hidden: Tensor
    target: LocalTarget
    tiling: Tiling
    compaction: Compaction | None
    temperature: Tensor | None

    def per_row(self, tensor: Tensor) -> Tensor:
        """`[*lead, ...]` of the whole sequence -> `[n, ...]`."""
        flat = tensor.reshape(-1, *tensor.shape[len(self.lead) :])
        return flat if self.compaction is None else self.compaction.walk(flat)

    def restore(self, per_row: Tensor, fill: float) -> Tensor:
        """`[n, ...]` -> `[*lead, ...]`, rows left out being `fill`; differentiable."""
        if self.compaction is not None:
            per_row = self.compaction.restore(per_row, fill)
        return per_row.view(*self.lead, *per_row.shape[1:])

    def stats(self, results: RowResults) -> TokenStats:
        """The results of `[n]` as users get them."""
        return TokenStats(**results.map(self.restore, IGNORED)._asdict())


def open_tokens(
    hidden: Tensor,
    target: Tensor | _NoTarget,
    shard: VocabShard,
    *,
    sequence_parallel: bool,
    chunk_size: int | None,
    ignore_index: int | None = None,
    mask: Tensor | None = None,
    compact: bool = False,
    temperature: float | Tensor = 1.0,
) -> Tokens:
    """Check the hidden states' rows and their targets, before any collective.

    Args:
        hidden: as `open_head` has found it right.
        target: global ids or ignore_index; NO_TARGET where an operation has none.
        mask: bool `[*lead]`, in place of a target: which rows count. None: all.
        temperature: a number, which is the head's affair, or a tensor.

    Raises:
        ValueError: with the argument's name, what was expected and what was given.
    """
    check_flag("compact", compact)
    check_chunk_size(chunk_size)
    lead = whole_lead(hidden, shard.group, sequence_parallel=sequence_parallel)
    rows, device = math.prod(lead), hidden.device
    if target is not NO_TARGET:
        flat = check_target(target, lead, device).reshape(-1)
        local = localize_target(flat, shard, ignore_index)
    else:
        mask = check_mask(mask, lead, device)
        if compact and mask is None:
            raise ValueError("compact=True: expected a mask that says which rows to keep, got None")
        if mask is None:
            mask = torch.ones(rows, dtype=torch.bool, device=device)
        column = torch.full((rows,), -1, dtype=torch.int64, device=device)
        local = LocalTarget(column, mask.reshape(-1))
    _, own = open_temperature(temperature, lead, device)
    own = None if own is None else own.reshape(-1)
    tile_rows, block_columns = tile_shape(rows, shard.width, chunk_size, device)
    tiling = Tiling(shard.group, sequence_parallel, tile_rows, block_columns)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if not compact:
        return Tokens(lead, hidden, local, tiling, None, own)
    compaction = Compaction(local.keep, shard.group if sequence_parallel else None)
    local = LocalTarget(compaction.walk(local.column), compaction.walk(local.keep))
    own = None if own is None else compaction.walk(own)
    return Tokens(lead, compaction.select_hidden(hidden), local, tiling, compaction, own)


def whole_lead(
    hidden: Tensor, group: ProcessGroup | None, *, sequence_parallel: bool
) -> torch.Size:
    """The leading shape of the whole sequence, of which hidden is this rank's part or all."""
    check_flag("sequence_parallel", sequence_parallel)
    ranks = group_size(group) if sequence_parallel else 1
    return torch.Size((hidden.shape[0] * ranks, *hidden.shape[1:-1]))


def whole_row_tiling(
    tokens: Tokens,
    shard: VocabShard,
    chunk_size: int | None,
    *,
    least: int = 0,
    any_tp: bool = False,
) -> Tiling:
    """The tiling of operations whose chunk spans all of a rank's columns.

    Args:
        least: as in `whole_row_tile`.
        any_tp: the same rows a tile whatever the tensor-parallel size is.
    """
    device, count = tokens.hidden.device, tokens.lead.numel()
    width = shard.padded_size if any_tp else shard.width
    width = max(width, tokens.hidden.shape[-1])  # dHidden of a tile is float32 too
    rows = chunk_size or whole_row_tile(count, width, device, least=least)
    tile = max(1, min(rows, count))
    kind = "cpu" if device.type == "cpu" else "other"
    block = _block_columns(tile, shard.width, chunk_size, kind)
    return replace(tokens.tiling, tile_rows=tile, block_columns=block)


def check_per_token(place: int, tensor: Tensor, lead: torch.Size, device: torch.device) -> Tensor:
    """A tensor `[*lead, ...]` without gradient, detached, or a ValueError that says its place."""
    name = f"per_token_tensors[{place}]"
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.shape[: len(lead)] != lead:
        raise ValueError(
            f"{name}: expected a shape that starts with target's {tuple(lead)}, got "
            f"{tuple(tensor.shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: requires a gradient, but none flows to it; detach it")
    return tensor.detach()


class Compaction:
    """Leaves out the rows whose target is ignored, so that they cost no product; and the way back.

    Under sequence parallelism each rank holds its own rows and must send as many as any other:
    every rank keeps as many as the fullest, the difference being rows that are ignored anyway.
    Targets are the same on all ranks, and so is every rank's idea of the sizes. One host sync.

    Args:
        keep: `[n]` bool, the whole sequence.
        group: over which the rows are split, or None.
    """

    def __init__(self, keep: Tensor, group: ProcessGroup | None) -> None:
        ranked = keep.view(group_size(group), -1)
        most = int(ranked.sum(1).max())  # the host sync
        # Kept rows first, in their order.
        order = ranked.logical_not().to(torch.int8).argsort(dim=1, stable=True)[:, :most]
        self._own = order[group_rank(group)]
        offsets = torch.arange(ranked.shape[0], device=keep.device) * ranked.shape[1]
        self._rows = (order + offsets.unsqueeze(1)).reshape(-1)
        self._count = keep.shape[0]

    def select_hidden(self, hidden: Tensor) -> Tensor:
        """`[n_local, h]` -> this rank's kept rows; differentiable."""
        return hidden.index_select(0, self._own)

    def walk(self, per_row: Tensor) -> Tensor:
        """`[n, ...]` of the whole sequence -> its kept rows."""
        return per_row.index_select(0, self._rows)

    def restore(self, per_row: Tensor, fill: float) -> Tensor:
        """Kept rows' `[m, ...]` -> `[n, ...]`, the others being `fill`; differentiable."""
        whole = per_row.new_full((self._count, *per_row.shape[1:]), fill)
        return whole.index_copy(0, self._rows, per_row)


class Tile(NamedTuple):
    """Attributes: its number; its rows as they are walked; `[rows, h]` in the operand dtype."""

    number: int
    rows: slice
    hidden: Tensor

    def of(self, per_row: Tensor | None) -> Tensor | None:
        """This tile's rows of `[n, ...]`, or None."""
        return None if per_row is None else per_row[self.rows]


class HiddenTiles:
    """Hidden states `[n_local, h]` as tiles of the whole `[n, h]`.

    Attributes:
        ranks: over how many ranks the rows are split: TP under sequence parallelism, else 1.
        count: n, rows over all ranks.
        local: each tile's rows of this rank.
        tiling: how they are cut.

    Args:
        rounded: as in `kernels.products.operand_dtype`.
    """

    def __init__(self, hidden: Tensor, tiling: Tiling, *, rounded: bool = False) -> None:
        self.tiling, self._hidden, self._rounded = tiling, hidden.detach(), rounded
        self._group = tiling.group if tiling.sequence_parallel else None
        self.ranks = group_size(self._group)
        self.local = list(row_chunks(hidden.shape[0], max(1, tiling.tile_rows // self.ranks)))
        self.count = hidden.shape[0] * self.ranks

    def __iter__(self) -> Iterator[Tile]:
        pending = self._start(0)
        for number, local in enumerate(self.local):
            tile, work = pending
            wait_for(work, self._group)
            pending = self._start(number + 1)
            rows = slice(local.start * self.ranks, local.stop * self.ranks)
            yield Tile(number, rows, operand(tile, rounded=self._rounded))

    def _start(self, number: int) -> tuple[Tensor, Any | None]:
        if number >= len(self.local):
            return self._hidden, None
        rows = self._hidden[self.local[number]]
        # A view of wider hidden states is strided, and collectives want contiguous memory.
        if self._group is not None:
            rows = rows.contiguous()
        return all_gather_dim0_async(rows, self._group)

    def walk(self, per_row: Tensor) -> Tensor:
        """`[n, ...]` in the sequence's order -> as the tiles are walked."""
        if self.ranks == 1 or len(self.local) < 2:
            return per_row
        ranked = per_row.view(self.ranks, -1, *per_row.shape[1:])
        return torch.cat([ranked[:, part].flatten(0, 1) for part in self.local])

    def walk_optional(self, per_row: Tensor | None) -> Tensor | None:
        """As `walk`; None stays None."""
        return None if per_row is None else self.walk(per_row)

    def restore(self, per_row: Tensor) -> Tensor:
        """`[n, ...]` as the tiles are walked -> the sequence's order."""
        if self.ranks == 1 or len(self.local) < 2:
            return per_row
        out = torch.empty_like(per_row)
        ranked = out.view(self.ranks, -1, *per_row.shape[1:])
        for part in self.local:
            tile = per_row[part.start * self.ranks : part.stop * self.ranks]
            ranked[:, part] = tile.view(self.ranks, -1, *per_row.shape[1:])
        return out
