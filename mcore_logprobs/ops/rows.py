"""Which rows of the hidden states a call computes, in which order, and how many at a time.

Rows may be named by the caller (`rows=`) or found by a mask (`compact=True`): then the others cost
no GEMM. Under sequence parallelism every rank holds its own part of the hidden states, and a
tile is gathered from all ranks: rows are walked tile by tile, and within a tile rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.collectives import all_gather_dim0_async, wait_for
from mcore_logprobs.groups import group_rank, group_size
from mcore_logprobs.kernels.chunk import row_chunks

# Bytes of one float32 chunk of logits.
_CHUNK_BYTES = {"cpu": 32 << 20, "other": 256 << 20}
# Rows a tile: enough that a GEMM of [rows, h] and [h, columns] runs at full speed, and that
# reading and writing a block of the weight's gradient once a tile costs little against it.
_TILE_ROWS = {"cpu": 2048, "other": 8192}
_MAX_BLOCK = {"cpu": 4096, "other": 1 << 20}
# Blocks are as wide as each other, up to multiples of this: whole tiles of a GEMM.
_BLOCK_STEP = {"cpu": 64, "other": 128}
# Bytes of one float32 chunk that spans all of a rank's columns. Each reads and writes the whole
# float32 dWeight once, so that it must have enough rows to outweigh that: on a GPU as many as
# `whole_rows` is told, where they fit into the larger limit. The same on every rank, whatever
# memory is free there: ranks must cut alike.
_WHOLE_ROW_BYTES = {"cpu": 128 << 20, "other": 1 << 30}
_LARGEST_WHOLE = 5 << 29
_ROW_STEP = 256


@dataclass(frozen=True)
class Tiling:
    """Rows a tile and columns a block."""

    rows: int
    columns: int

    @classmethod
    def of(cls, rows: int, columns: int, chunk_size: int | None, device: torch.device) -> Tiling:
        """For `rows` rows and `columns` columns on a rank."""
        tile = max(1, min(rows, chunk_size or _TILE_ROWS[_kind(device)]))
        return cls(tile, _block_columns(tile, columns, chunk_size, device))

    @classmethod
    def of_whole_rows(
        cls,
        rows: int,
        columns: int,
        chunk_size: int | None,
        device: torch.device,
        *,
        width: int,
        least: int = 0,
    ) -> Tiling:
        """Tiles whose logits are held over all of a rank's columns.

        Args:
            width: numbers a row that are held.
            least: rows that a tile should have, for which the chunk may be larger on a GPU.
        """
        tile = max(1, min(chunk_size or _whole_row_tile(rows, width, device, least), rows))
        return cls(tile, _block_columns(tile, columns, chunk_size, device))


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "other"


def _block_columns(tile: int, columns: int, chunk_size: int | None, device: torch.device) -> int:
    kind = _kind(device)
    most = max(_CHUNK_BYTES[kind] // (4 * tile), 256)
    if chunk_size is None:
        most = min(most, _MAX_BLOCK[kind])
    return even_parts(columns, most, _BLOCK_STEP[kind])


def _whole_row_tile(rows: int, width: int, device: torch.device, least: int) -> int:
    row_bytes = 4 * max(1, width)
    if device.type == "cpu":
        return max(1, min(rows, _WHOLE_ROW_BYTES["cpu"] // row_bytes))
    most = max(_WHOLE_ROW_BYTES["other"] // row_bytes, min(least, _LARGEST_WHOLE // row_bytes))
    if most > _ROW_STEP:
        most -= most % _ROW_STEP
    return even_parts(rows, max(1, most), _ROW_STEP)


def even_parts(total: int, most: int, step: int) -> int:
    """The size of as few parts as hold `most` each, all about as large: a multiple of `step`.

    A GEMM of what is left over would run far below the speed of the others.
    """
    parts = max(1, -(-total // most))
    size = -(-total // (parts * step)) * step
    return max(1, min(size, most, total))


# ---- rows that are named or found --------------------------------------------------------------


def check_rows(rows: Any, count: int | None) -> Tensor:
    """int64 `[m]` in [0, count), on the host, or a ValueError; a CUDA tensor is copied there.

    Args:
        count: of the rows there are; None: not known yet, and the values are not looked at.
    """
    if not isinstance(rows, Tensor):
        raise ValueError(f"rows: expected a torch.Tensor or None, got {type(rows).__name__}")
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(
            f"rows: expected int64 of shape [m], got {rows.dtype} of shape {tuple(rows.shape)}"
        )
    rows = rows.detach().cpu()  # a host sync where it is not there already
    if count is None or rows.numel() == 0:
        return rows
    if int(rows.min()) < 0 or int(rows.max()) >= count:
        bad = rows[(rows < 0) | (rows >= count)]
        raise ValueError(f"rows: expected indices in [0, {count}), got {bad[:8].tolist()}")
    return rows


class RowSelection:
    """Rows that a call computes in place of all, and the way of per-token tensors there and back.

    Under sequence parallelism every rank must send as many rows as any other: each has as many as
    the fullest, the difference being padding that asks for nothing.

    Attributes:
        local: `[k]` int64, this rank's rows of the hidden states.
        exact: whether each of them stands there once, so that gradients can be copied.

    Args:
        rows: `[m]` int64 on the host, of the whole sequence.
        count: rows of the whole sequence.
        group: over which they are split, or None.
        tokens: whether per-token tensors are those of the whole sequence (the rows were found by a
            mask) and not of the m rows.
    """

    def __init__(
        self,
        rows: Tensor,
        count: int,
        group: ProcessGroup | None,
        device: torch.device,
        *,
        tokens: bool,
    ) -> None:
        ranks, m = group_size(group), rows.numel()
        own = max(1, count // ranks)
        counts = torch.bincount(rows // own, minlength=ranks)
        most = int(counts.max())
        # Entries by owner, in their order; where an owner has fewer than most, -1.
        order = (rows // own).argsort(stable=True)
        slots = torch.arange(most).repeat(ranks, 1)
        entry = torch.full((ranks, most), -1)
        entry[slots < counts.unsqueeze(1)] = order
        mine = entry[group_rank(group)]
        local = torch.where(mine >= 0, rows[mine.clamp(min=0)] % own, 0) if m else mine
        self.exact = bool((mine >= 0).all()) and local.unique().numel() == local.numel()
        place = torch.empty(m, dtype=torch.int64)
        place[order] = (entry >= 0).flatten().nonzero().squeeze(1)
        self._count = count
        self.local = _to_device(local, device)
        self._place = None if ranks == 1 else _to_device(place, device)
        self._padding = _to_device(entry.flatten() < 0, device) if (entry < 0).any() else None
        index = entry.flatten().clamp(min=0)
        if tokens:
            index = rows[index] if m else index
        self._index = _to_device(index, device) if tokens or ranks > 1 else None
        self._tokens = _to_device(rows, device) if tokens else None

    def select(self, per_token: Tensor, fill: float | None) -> Tensor:
        """Per-token `[tokens, ...]` -> `[ranks * k, ...]`.

        Args:
            fill: what padding gets; None: a mask gets False, other tensors a value of theirs.
        """
        if self._index is None:
            return per_token
        found = per_token.index_select(0, self._index)
        if fill is None and per_token.dtype == torch.bool:
            fill = False
        if self._padding is None or fill is None:
            return found
        return found.masked_fill(self._padding.view(-1, *(1,) * (found.dim() - 1)), fill)

    def unselect(self, per_row: Tensor, fill: float) -> Tensor:
        """The inverse of `select`; `fill` at tokens that are not computed."""
        if self._place is not None:
            per_row = per_row.index_select(0, self._place)
        if self._tokens is None:
            return per_row
        whole = per_row.new_full((self._count, *per_row.shape[1:]), fill)
        return whole.index_copy(0, self._tokens, per_row)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return x
    return x.pin_memory().to(device, non_blocking=True)  # pragma: no cover (CUDA)


# ---- hidden states as tiles --------------------------------------------------------------------


class HiddenRows:
    """Hidden states `[n_local, h]` as tiles of the whole `[n, h]`.

    Attributes:
        ranks: over which the rows are split.
        count: rows over all ranks, n.
        local: each tile's rows of this rank, or places in its selection.

    Args:
        hidden: this rank's.
        group: over which the rows are split, or None.
        tile_rows: rows a tile, over all ranks.
        selection: which of them are computed; None: all.
    """

    def __init__(
        self,
        hidden: Tensor,
        group: ProcessGroup | None,
        tile_rows: int,
        selection: RowSelection | None,
    ) -> None:
        self.hidden, self.group, self.selection = hidden, group, selection
        self.ranks = group_size(group)
        own = hidden.shape[0] if selection is None else selection.local.shape[0]
        self.count = own * self.ranks
        self.local = list(row_chunks(own, max(1, tile_rows // self.ranks)))

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows as they are walked, `[rows, h]`) of each tile; the next one is on its way."""
        parts = self.local
        pending = self._start(parts[0]) if parts else None
        for number, part in enumerate(parts):
            assert pending is not None
            tile, work = pending
            wait_for(work, self.group)
            pending = self._start(parts[number + 1]) if number + 1 < len(parts) else None
            yield slice(part.start * self.ranks, part.stop * self.ranks), tile

    def _start(self, part: slice) -> tuple[Tensor, Any | None]:
        if self.selection is None:
            rows = self.hidden[part]
        else:
            rows = self.hidden.index_select(0, self.selection.local[part])
        # A view of wider hidden states is strided, and collectives want contiguous memory.
        if self.group is not None:
            rows = rows.contiguous()
        return all_gather_dim0_async(rows, self.group)

    def by_tile(self, per_row: Tensor) -> Tensor:
        """`[n, ...]` rank by rank -> tile by tile, and in a tile rank by rank."""
        parts = self.local
        if self.ranks == 1 or len(parts) < 2:
            return per_row
        ranked = per_row.view(self.ranks, -1, *per_row.shape[1:])
        return torch.cat([ranked[:, part].flatten(0, 1) for part in parts])

    def by_rank(self, per_row: Tensor) -> Tensor:
        """The inverse of `by_tile`."""
        parts = self.local
        if self.ranks == 1 or len(parts) < 2:
            return per_row
        out = torch.empty_like(per_row)
        ranked = out.view(self.ranks, -1, *per_row.shape[1:])
        for part in parts:
            tile = per_row[part.start * self.ranks : part.stop * self.ranks]
            ranked[:, part] = tile.view(self.ranks, -1, *per_row.shape[1:])
        return out
