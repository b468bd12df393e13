"""Which rows of the hidden states a call computes, in which order, and how many at a time.

Rows may be named by the caller (`rows=`) or found by a mask (`compact=True`): then the others cost
no GEMM. Under sequence parallelism every rank holds its own part of the hidden states, and a
tile is gathered from all ranks: rows are walked tile by tile, and within a tile rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from mcore_logprobs.collectives import all_gather_dim0_async, wait_for
from mcore_logprobs.groups import group_rank, group_size
from mcore_logprobs.kernels import budgets
from mcore_logprobs.kernels.chunk import row_chunks


@dataclass(frozen=True)
class Tiling:
    """Rows per tile and columns per block."""

    rows: int
    columns: int

    @classmethod
    def of(cls, rows: int, columns: int, chunk_size: int | None, device: torch.device) -> Tiling:
        """For `rows` rows and `columns` columns on a rank."""
        tile = max(1, min(rows, chunk_size or budgets.of(device.type).tile_rows))
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
        adds_per_tile: bool = False,
    ) -> Tiling:
        """Tiles whose logits are held over all of a rank's columns.

        Args:
            width: numbers held per row.
            adds_per_tile: dWeight is read and written once per tile, so that a tile should have
                `Budgets.held_rows`.
        """
        sizes, row_bytes = budgets.of(device.type), 4 * max(1, width)
        most = sizes.held_bytes // row_bytes
        if adds_per_tile:
            most = max(most, min(sizes.held_rows, sizes.max_held_bytes // row_bytes))
        tile = max(1, min(rows, chunk_size or even_parts(rows, max(1, most), sizes.row_step)))
        return cls(tile, _block_columns(tile, columns, chunk_size, device))


def _block_columns(tile: int, columns: int, chunk_size: int | None, device: torch.device) -> int:
    sizes = budgets.of(device.type)
    most = max(sizes.chunk_bytes // (4 * tile), sizes.min_block)
    if chunk_size is None:
        most = min(most, sizes.max_block)
    return even_parts(columns, most, sizes.block_step)


def even_parts(total: int, most: int, step: int) -> int:
    """Return the size of parts of at most `most` that are as even as whole steps allow.

    A GEMM of a small last part would run far below the speed of the others. One part is `total`.
    Otherwise the size is a multiple of `step` (of `most` if that is less), and the last part is
    what is left: still a small one if `total` is just above a multiple of the size.
    """
    if total <= most:
        return max(1, total)
    step = min(step, most)
    parts = -(-total // (most - most % step))
    return -(-total // (parts * step)) * step


# ---- rows that are named or found --------------------------------------------------------------


def check_rows(rows: object, count: int | None) -> Tensor:
    """int64 `[m]` in [0, count), on the host, or a ValueError; a CUDA tensor is copied there.

    Args:
        count: of the rows there are; None: not known yet, and the values are not checked.
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

    Under sequence parallelism every rank must send as many rows as any other: each has k slots, as
    many as the fullest needs, and a slot without a row is padding that asks for nothing. Slots are
    rank by rank, `[ranks * k]`.

    Attributes:
        rows: `[m]`, as named, on the host.
        local: `[k]` int64, this rank's rows of the hidden states, slot by slot.
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
        self._count, self.rows = count, rows
        ranks = group_size(group)
        rows_per_rank = max(1, count // ranks)
        owner = rows // rows_per_rank  # [m], the rank that holds each
        owned = torch.bincount(owner, minlength=ranks)  # [ranks]
        # Which of the m rows is in a slot, [ranks, k]; in their order, -1 for padding.
        order = owner.argsort(stable=True)
        slots = torch.arange(int(owned.max())).repeat(ranks, 1)
        row_of_slot = torch.full(slots.shape, -1)
        row_of_slot[slots < owned.unsqueeze(1)] = order
        mine = row_of_slot[group_rank(group)]
        local = torch.where(mine >= 0, rows[mine.clamp(min=0)] % rows_per_rank, 0)
        self.exact = bool((mine >= 0).all()) and local.unique().numel() == local.numel()
        self.local = _to_device(local, device)
        row_of_slot = row_of_slot.flatten()
        padding, row_of_slot = row_of_slot < 0, row_of_slot.clamp(min=0)
        slot_of_row = torch.empty_like(rows).index_copy_(0, order, (~padding).nonzero().squeeze(1))
        token_of_slot = rows[row_of_slot] if tokens else row_of_slot
        # [ranks * k], [ranks * k], [m], [m]; None: nothing is padded, or all is in order.
        self._padding = _to_device(padding, device) if padding.any() else None
        self._per_slot = _to_device(token_of_slot, device) if tokens or ranks > 1 else None
        self._slot_of_row = None if ranks == 1 else _to_device(slot_of_row, device)
        self._token_of_row = _to_device(rows, device) if tokens else None

    def same_as(self, other: RowSelection | None) -> bool:
        """Whether the other names the same rows of as many."""
        return (
            other is not None and self._count == other._count and torch.equal(self.rows, other.rows)
        )

    def select(self, per_token: Tensor, fill: float | None) -> Tensor:
        """Per-token `[tokens, ...]` -> `[ranks * k, ...]`.

        Args:
            fill: what padding gets; None: a mask gets False, other tensors a value of theirs.
        """
        if self._per_slot is None:
            return per_token
        selected = per_token.index_select(0, self._per_slot)
        if fill is None and per_token.dtype == torch.bool:
            fill = False
        if self._padding is None or fill is None:
            return selected
        padding = self._padding.view(-1, *(1,) * (selected.dim() - 1))
        return selected.masked_fill(padding, fill)

    def unselect(self, per_row: Tensor, fill: float) -> Tensor:
        """The inverse of `select`; `fill` at tokens that are not computed."""
        if self._slot_of_row is not None:
            per_row = per_row.index_select(0, self._slot_of_row)
        if self._token_of_row is None:
            return per_row
        per_token = per_row.new_full((self._count, *per_row.shape[1:]), fill)
        return per_token.index_copy(0, self._token_of_row, per_row)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return x
    return x.pin_memory().to(device, non_blocking=True)  # pragma: no cover (CUDA)


# ---- hidden states as tiles --------------------------------------------------------------------


class HiddenRows:
    """Hidden states `[n_local, h]` as tiles of the whole `[n, h]`.

    Attributes:
        ranks: over which the rows are split.
        num_rows: rows over all ranks, n.
        local: each tile's rows of this rank, or places in its selection.
        is_one_walk: whether rows tile by tile are in the order of rows rank by rank.

    Args:
        hidden: this rank's.
        group: over which the rows are split, or None.
        tile_rows: rows per tile, over all ranks.
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
        local_rows = hidden.shape[0] if selection is None else selection.local.shape[0]
        self.num_rows = local_rows * self.ranks
        self.local = list(row_chunks(local_rows, max(1, tile_rows // self.ranks)))
        self.is_one_walk = self.ranks == 1 or len(self.local) < 2

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

    def _start(self, part: slice) -> tuple[Tensor, Work | None]:
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
        ranked = per_row.view(self.ranks, -1, *per_row.shape[1:])
        return torch.cat([ranked[:, part].flatten(0, 1) for part in self.local])

    def by_rank(self, per_row: Tensor) -> Tensor:
        """The inverse of `by_tile`."""
        out = torch.empty_like(per_row)
        ranked = out.view(self.ranks, -1, *per_row.shape[1:])
        for part in self.local:
            tile = per_row[part.start * self.ranks : part.stop * self.ranks]
            ranked[:, part] = tile.view(self.ranks, -1, *per_row.shape[1:])
        return out
