"""The rows that a call computes, if these are not all rows. The others cost no GEMM.

The caller names them (`rows=`), or a mask finds them (`compact=True`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_plain
from mcore_logprobs.groups import group_rank, group_size


def check_rows(rows: object, count: int | None) -> Tensor:
    """int64 `[m]` in [0, count), on the host, or a ValueError; a CUDA tensor is copied there.

    Args:
        count: of the rows there are; None: not known yet, and the values are not checked.
    """
    if not isinstance(rows, Tensor):
        raise ValueError(f"rows: expected a torch.Tensor or None, got {type(rows).__name__}")
    check_plain("rows", rows)
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
    """Rows that a call computes instead of all, and the way of per-token tensors there and back.

    Under sequence parallelism every rank must send as many rows as any other: each has k slots, as
    many as the fullest needs, and a slot without a row is padding that asks for nothing. Slots are
    rank by rank, `[ranks * k]`.

    Attributes:
        rows: `[m]`, as named, on the host.
        num_slots: ranks * k, the rows that are walked.
        local: `[k]` int64, this rank's rows of the hidden states, slot by slot; 0 for padding.
        exact: whether each of them is named once, so that gradients can be copied.

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
        # Each rank has k slots: for its rows, in their order, and behind them for padding.
        k, first = int(owned.max()), owned.cumsum(0) - owned
        self.num_slots = ranks * k
        order = owner.argsort(stable=True)  # the m rows, rank by rank
        place = torch.arange(len(rows), device="cpu") - first[owner[order]]
        slot_of_row = torch.empty_like(rows)
        slot_of_row[order] = owner[order] * k + place
        row_of_slot = torch.full((self.num_slots,), -1, device="cpu")
        row_of_slot[slot_of_row] = torch.arange(len(rows), device="cpu")
        mine = row_of_slot.view(ranks, k)[group_rank(group)]
        local = torch.where(mine >= 0, rows[mine.clamp(min=0)] % rows_per_rank, 0)
        self.exact = bool((mine >= 0).all()) and local.unique().numel() == local.numel()
        self.local = _to_device(local, device)
        own_padding = (mine < 0).unsqueeze(1)
        self._own_padding = _to_device(own_padding, device) if own_padding.any() else None
        padding, row_of_slot = row_of_slot < 0, row_of_slot.clamp(min=0)
        self._padding = _to_device(padding, device) if padding.any() else None
        # Indices, None where they would be 0, 1, 2, ...: [ranks * k] into per-token tensors, [m]
        # into slots, and [m] into per-token tensors.
        token_of_slot = rows[row_of_slot] if tokens else row_of_slot
        self._token_of_slot = _to_device(token_of_slot, device) if tokens or ranks > 1 else None
        self._slot_of_row = None if ranks == 1 else _to_device(slot_of_row, device)
        self._token_of_row = _to_device(rows, device) if tokens else None

    def same_as(self, other: RowSelection | None) -> bool:
        """Whether the other names the same rows of as many."""
        return (
            other is not None and self._count == other._count and torch.equal(self.rows, other.rows)
        )

    def hidden_rows(self, hidden: Tensor, part: slice) -> Tensor:
        """Hidden states `[n_local, h]` of some of this rank's slots, new; 0 for padding."""
        rows = hidden.index_select(0, self.local[part])
        if self._own_padding is None:
            return rows
        # Row 0 may be one that was left out, and have NaN: 0 times that would be NaN in dWeight.
        return rows.masked_fill_(self._own_padding[part], 0.0)

    def select(self, per_token: Tensor, fill: float | None) -> Tensor:
        """Per-token `[tokens, ...]` -> `[ranks * k, ...]`.

        Args:
            fill: what padding gets; None: a mask gets False, other tensors a value of theirs.
        """
        if self._token_of_slot is None:
            return per_token
        selected = per_token.index_select(0, self._token_of_slot)
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
