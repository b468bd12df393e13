"""The pieces of the fused path: hidden states in tiles, logits in blocks, gradients as they come.

A *tile* is some rows of the hidden states; a *block* is some columns of the vocabulary. Only one
tile-by-block rectangle of logits, the chunk, exists at a time. Under sequence parallelism a tile is
gathered from all ranks when it is needed (the next one while this one is worked on), so that
the whole sequence is never held either; its gradient is reduce-scattered the same way.

Rows are walked in *tile order*: tile by tile, and within a tile rank by rank. It differs from the
sequence's order only under sequence parallelism with several tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.collectives import (
    all_gather_dim0_async,
    all_reduce_sum_async,
    reduce_scatter_dim0_async,
)
from mcore_logprobs.groups import group_size
from mcore_logprobs.kernels.huge_pages import prefer_huge_pages
from mcore_logprobs.kernels.products import add_product, operand, product
from mcore_logprobs.kernels.reference import row_chunks

__all__ = ["HiddenGradient", "HiddenTiles", "WeightGradient", "main_grad_stand_in"]


class HiddenTiles:
    """Hidden states `[n_local, h]` as tiles of the whole `[n, h]`.

    Attributes:
        count: n, rows over all ranks: n_local, times TP under sequence parallelism.
    """

    def __init__(
        self, hidden: Tensor, group: ProcessGroup | None, *, sequence_parallel: bool, tile_rows: int
    ) -> None:
        self._hidden = hidden
        self._group = group if sequence_parallel else None
        self._ranks = group_size(self._group)
        self.local = list(row_chunks(hidden.shape[0], max(1, tile_rows // self._ranks)))
        self.count = hidden.shape[0] * self._ranks

    def __iter__(self) -> Iterator[tuple[int, slice, Tensor]]:
        """(tile's number, its rows in tile order, `[rows, h]` in the operand dtype)."""
        pending = self._start(0)
        for number, local in enumerate(self.local):
            tile, work = pending
            if work is not None:
                work.wait()
            pending = self._start(number + 1)
            rows = slice(local.start * self._ranks, local.stop * self._ranks)
            yield number, rows, operand(tile)

    def _start(self, number: int) -> tuple[Tensor, Any | None]:
        if number >= len(self.local):
            return self._hidden, None
        return all_gather_dim0_async(self._hidden[self.local[number]], self._group)

    def ordered(self, per_row: Tensor) -> Tensor:
        """`[n, ...]` in the sequence's order -> tile order."""
        if self._ranks == 1 or len(self.local) < 2:
            return per_row
        ranked = per_row.view(self._ranks, -1, *per_row.shape[1:])
        return torch.cat([ranked[:, part].flatten(0, 1) for part in self.local])

    def restored(self, per_row: Tensor) -> Tensor:
        """`[n, ...]` in tile order -> the sequence's order."""
        if self._ranks == 1 or len(self.local) < 2:
            return per_row
        out = torch.empty_like(per_row)
        ranked = out.view(self._ranks, -1, *per_row.shape[1:])
        for part in self.local:
            tile = per_row[part.start * self._ranks : part.stop * self._ranks]
            ranked[:, part] = tile.view(self._ranks, -1, *per_row.shape[1:])
        return out


class HiddenGradient:
    """Collects dHidden tile by tile: float32 within a tile, summed over TP while the next is made.

    The sum over TP is an all-reduce, or a reduce-scatter under sequence parallelism, in float32,
    rounded to the hidden states' dtype once (not at all if `wide`).
    """

    def __init__(
        self,
        hidden: Tensor,
        group: ProcessGroup | None,
        tiles: HiddenTiles,
        *,
        scatter: bool,
        wide: bool = False,
    ) -> None:
        dtype = torch.promote_types(hidden.dtype, torch.float32) if wide else hidden.dtype
        self.grad = torch.empty_like(hidden, dtype=dtype)
        self._group, self._tiles, self._scatter = group, tiles, scatter
        self._pending: tuple[int, Tensor, Any | None] | None = None

    def put(self, number: int, tile: Tensor) -> None:
        """Take over the finished `[rows, h]` gradient of tile `number`; start its reduction."""
        self._settle()
        if self._scatter:
            out, work = reduce_scatter_dim0_async(tile, self._group)
        else:
            out, work = tile, all_reduce_sum_async(tile, self._group)
        self._pending = (number, out, work)

    def finish(self) -> Tensor:
        """`[n_local, h]` in the hidden states' dtype, or float32."""
        self._settle()
        return self.grad

    def _settle(self) -> None:
        if self._pending is None:
            return
        number, out, work = self._pending
        if work is not None:
            work.wait()
        self.grad[self._tiles.local[number]] = out
        self._pending = None


class WeightGradient:
    """Collects dWeight block by block, accumulated in float32 whatever the weight's dtype.

    With one tile a block is multiplied once and written once. With several, the float32 sum lives
    in `main_grad` if it is given, else in the gradient itself if that is float32, else in a float32
    tensor of the gradient's size.

    Args:
        weight: `[v, h]`.
        main_grad: None, or Megatron's `weight.main_grad`, to which the gradient is added.
        wide: leave the gradient in float32.
        tiles: how many tiles will contribute to each block.
        valid: columns past it are masked: their gradient is 0.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        main_grad: Tensor | None,
        tiles: int,
        valid: int,
        wide: bool = False,
    ) -> None:
        self._weight, self._main_grad = weight, main_grad
        self._wide = torch.promote_types(weight.dtype, torch.float32)
        self._dtype = self._wide if wide else weight.dtype
        self._fresh = main_grad is None
        self._sum: Tensor | None = None
        if main_grad is None:
            dtype = self._dtype if tiles <= 1 else self._wide
            self._sum = prefer_huge_pages(torch.empty_like(weight, dtype=dtype))
            self._sum[valid if tiles else 0 :] = 0
        elif main_grad.dtype == self._wide:
            self._sum = main_grad

    def add(self, first: bool, columns: slice, dlogits: Tensor, hidden: Tensor) -> None:
        """Add `dlogits^T @ hidden`, `[columns, h]`; `first` for the first tile of the block.

        Args:
            dlogits: `[rows, columns]`, hidden: `[rows, h]`; of one operand dtype.
        """
        block = None if self._sum is None else self._sum[columns]
        if block is not None and block.dtype == self._wide:
            # product writes where there is nothing yet, so that no zero fill is needed.
            (product if first and self._fresh else add_product)(dlogits.t(), hidden, block)
            return
        shape = (dlogits.shape[1], hidden.shape[1])
        part = product(dlogits.t(), hidden, hidden.new_empty(shape, dtype=self._wide))
        if block is not None:  # one tile, low-precision weight: rounded once
            block.copy_(part)
        else:  # a low-precision main_grad: rounded once a tile, as Megatron's own does
            assert self._main_grad is not None
            self._main_grad[columns].add_(part)

    def finish(self) -> Tensor | None:
        """The weight's gradient, or what stands for it when main_grad has it."""
        if self._main_grad is None:
            assert self._sum is not None
            return self._sum.to(self._dtype)
        return main_grad_stand_in(self._weight)


def main_grad_stand_in(weight: Tensor) -> Tensor | None:
    """What autograd gets for a weight whose gradient went into `main_grad`.

    Megatron's convention: a parameter with the attribute `grad_added_to_main_grad` has it set, and
    gets a tensor of the right shape whose values nobody reads (zeros if `zero_out_wgrad`), so that
    the data-parallel hooks fire; any other gets None.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)
