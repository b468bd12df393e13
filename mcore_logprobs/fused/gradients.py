"""The output layer's gradients, as dLogits come chunk by chunk.

for each tile of rows:
    for each block of columns:          chunk = tile @ weight[block]^T, and from it dLogits
        dTile          += dLogits @ weight[block]
        after the last block: dHidden[tile] = dTile summed over TP, while work goes on
        dWeight[block] += dLogits^T @ tile
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from mcore_logprobs.collectives import (
    all_reduce_sum_async,
    ordered_sum_dim0,
    reduce_scatter_dim0_async,
    wait_for,
)
from mcore_logprobs.fused.head import Chunk, Head, HeadOptions, HeadTensors
from mcore_logprobs.fused.lora import LoRAGradient
from mcore_logprobs.fused.tokens import HiddenTiles, Tile
from mcore_logprobs.kernels.huge_pages import prefer_huge_pages
from mcore_logprobs.kernels.products import (
    add_product,
    aligned,
    fixed_product,
    product,
    rounded_product,
)
from mcore_logprobs.kernels.reference import finished_logits, softcap_slope
from mcore_logprobs.kernels.segments import Segments
from mcore_logprobs.kernels.stats import accumulator_dtype

__all__ = ["HeadGradients", "main_grad_stand_in"]


class HeadGradients:
    """The gradients of a head's tensors.

    Args:
        needs: which of them are wanted; an unwanted one costs no product.
        wide: leave the gradients in float32 (float64 for float64), dWeight out of main_grad too.
        sparse: dLogits come entry by entry (`add_entries`) instead of chunk by chunk.
    """

    def __init__(
        self,
        tensors: HeadTensors,
        tiles: HiddenTiles,
        opts: HeadOptions,
        *,
        needs: Sequence[bool],
        wide: bool = False,
        sparse: bool = False,
    ) -> None:
        self.hidden = self.weight = self.bias = self._lora = None
        for_hidden, for_weight, for_bias, *for_lora = needs
        weight, bias, lora = tensors.weight, tensors.bias, opts.lora(tensors)
        self._wide = wide
        if for_hidden:
            self.hidden = HiddenGradient(tensors.hidden, tiles, wide=wide)
        main_grad = opts.gradient_accumulation_fusion and not wide
        if for_weight:
            self.weight = WeightGradient(
                weight,
                main_grad=cast(Any, weight).main_grad if main_grad else None,
                tiles=len(tiles.local),
                valid=opts.spec.valid,
                wide=wide,
                sparse=sparse,
                fixed=opts.segments is not None,
                rounded=opts.rounded,
            )
        if for_bias and bias is not None:
            self.bias = torch.zeros_like(bias, dtype=accumulator_dtype(bias.dtype))
        if lora is not None and (for_hidden or any(for_lora)):
            lora_needs = (for_hidden, *for_lora)
            self._lora = LoRAGradient(lora, opts.group, lora_needs, wide=wide, sparse=sparse)
        self._bias_like = bias
        self._tile: Tensor | None = None
        self._reduced = -1  # the latest tile whose reduction was started
        self._segments = opts.segments
        self._parts: list[Tensor | None] = []

    def add_chunk(
        self, head: Head, tile: Tile, chunk: Chunk, dlogits_of: Callable[[Chunk], Tensor]
    ) -> None:
        """dLogits of a chunk, and from it the products.

        After dHidden's product of a tile's last chunk its sum over TP starts, so that it runs while
        that chunk's dWeight is multiplied: there is always a product to hide it behind.

        With z = (cap(scale y) + bias) / T, dBias is the sum of dz / T, and dy has cap's slope on
        top. A head with both a softcap and a bias takes the two steps apart.

        Args:
            dlogits_of: chunk -> `[rows, columns]`, the gradient with respect to its raw logits, in
                the operand dtype; may be written over them.
        """
        spec, columns = chunk.spec, chunk.columns
        if self.bias is None or spec.softcap is None:
            dlogits = dlogits_of(chunk)
            self._add_bias(columns, dlogits, 1.0 / spec.logit_scale)
        else:
            slope = softcap_slope(chunk.logits, spec, head.wide).mul_(spec.logit_scale)
            uncapped = replace(spec, logit_scale=1.0, softcap=None)
            capped = finished_logits(chunk.logits, replace(spec, temperature=1.0))
            dz = dlogits_of(replace(chunk, logits=capped, spec=uncapped))
            self._add_bias(columns, dz, 1.0)
            dlogits = (dz * slope.masked_fill_(dz == 0, 0.0)).to(dz.dtype)
        if self._lora is not None:
            assert head.low_rank is not None
            self._lora.add_chunk(columns, dlogits, head.low_rank.inner(tile.hidden))
        if self.hidden is not None and self._segments is not None:
            self._add_segment(self._segments, head, columns, dlogits, tile)
        elif self.hidden is not None:
            block = head.weight_block(columns)
            if self._tile is None:
                wide = accumulator_dtype(tile.hidden.dtype)
                self._tile = torch.empty_like(tile.hidden, dtype=wide)
                product(dlogits, block, self._tile, rounded=head.opts.rounded)
            else:
                add_product(dlogits, block, self._tile, rounded=head.opts.rounded)
        if columns.stop == head.opts.spec.valid:
            self._reduce(tile)
        if self.weight is not None:
            self.weight.add(tile.number == 0, columns, dlogits, tile.hidden)

    def add_entries(
        self, head: Head, tile: Tile, rows: Tensor, columns: Tensor, dz: Tensor, dy: Tensor
    ) -> None:
        """The products of single entries of dLogits, all others being 0.

        Args:
            rows, columns: `[e]` int64, an entry's row in the tile and its column; may repeat.
            dz, dy: `[e]`, the gradient with respect to capped and scaled logits, and to raw ones;
                an entry of 0 adds nothing, whatever the hidden states hold.
        """
        if self.bias is not None:
            self.bias.index_add_(0, columns, dz.to(self.bias.dtype))
        factor = dy.to(head.wide).unsqueeze(-1)
        counts = factor != 0
        if self.weight is not None:
            part = tile.hidden[rows].to(head.wide) * factor
            self.weight.add_rows(columns, part.masked_fill_(~counts, 0.0))
        if self.hidden is not None:
            if self._tile is None:
                self._tile = torch.zeros_like(tile.hidden, dtype=head.wide)
            part = head.weight[columns].to(head.wide) * factor
            self._tile.index_add_(0, rows, part.masked_fill_(~counts, 0.0))
        if self._lora is not None:
            assert head.low_rank is not None
            self._lora.add_entries(rows, columns, factor, head.low_rank.inner(tile.hidden))

    def _add_segment(
        self, segments: Segments, head: Head, columns: slice, dlogits: Tensor, tile: Tile
    ) -> None:
        """Add a chunk's part of dTile to its segment's sum."""
        wide = accumulator_dtype(tile.hidden.dtype)
        part = torch.empty_like(tile.hidden, dtype=wide, memory_format=torch.contiguous_format)
        fixed_product(dlogits, head.weight_block(columns), part)
        self._parts = self._parts or [None] * segments.local
        number = columns.start // segments.width
        before = self._parts[number]
        self._parts[number] = part if before is None else before.add_(part)

    def _add_bias(self, columns: slice, dz: Tensor, factor: float) -> None:
        """Add `factor * sum over rows of dz`."""
        if self.bias is not None:
            self.bias[columns] += dz.sum(0, dtype=self.bias.dtype) * factor

    def end_tile(self, tile: Tile) -> None:
        """All of the tile's chunks or entries were added."""
        if self._reduced != tile.number:  # entries, or no true vocabulary on this rank
            self._reduce(tile)

    def _reduce(self, tile: Tile) -> None:
        """The tile's dHidden is complete: start its sum over TP."""
        self._reduced = tile.number
        if self._lora is not None:
            self._lora.end_tile(tile.hidden, self._tile)
        if self.hidden is None:
            return
        if self._segments is not None:
            self.hidden.put_segments(tile.number, self.take_segments(tile))
            return
        if self._tile is None:  # no true vocabulary on this rank
            wide = accumulator_dtype(tile.hidden.dtype)
            self._tile = torch.zeros_like(tile.hidden, dtype=wide)
        self.hidden.put(tile.number, self._tile)
        self._tile = None

    def take_segments(self, tile: Tile) -> list[Tensor]:
        """The tile's dHidden by this rank's segments, `[rows, h]` each; not kept any longer."""
        assert self._segments is not None
        parts, self._parts = self._parts or [None] * self._segments.local, []
        wide = accumulator_dtype(tile.hidden.dtype)
        return [
            torch.zeros_like(tile.hidden, dtype=wide) if part is None else part for part in parts
        ]

    def finish(self) -> tuple[Tensor | None, ...]:
        """Of each of HeadTensors, None where unwanted or gone into main_grad.

        Where a LoRA's A is wanted, one all-reduce of `[r, h]` float32 over TP.
        """
        bias = None
        if self.bias is not None and self._bias_like is not None:
            bias = self.bias if self._wide else self.bias.to(self._bias_like.dtype)
        return (
            None if self.hidden is None else self.hidden.finish(),
            None if self.weight is None else self.weight.finish(),
            bias,
            *((None, None) if self._lora is None else self._lora.finish()),
        )


class HiddenGradient:
    """Collects dHidden tile by tile: float32 within a tile, summed over TP while the next is made.

    The sum over TP is an all-reduce, or a reduce-scatter under sequence parallelism, in float32,
    rounded to the hidden states' dtype once (not at all if `wide`).
    """

    def __init__(
        self,
        hidden: Tensor,
        tiles: HiddenTiles,
        *,
        wide: bool,
    ) -> None:
        dtype = accumulator_dtype(hidden.dtype) if wide else hidden.dtype
        self.grad = torch.empty_like(hidden, dtype=dtype)
        self._tiles, self._tiling = tiles, tiles.tiling
        self._pending: tuple[int, Tensor, Any | None] | None = None

    def put(self, number: int, tile: Tensor) -> None:
        """Take over the finished `[rows, h]` gradient of tile `number`; start its reduction."""
        self._settle()
        group = self._tiling.group
        if self._tiling.sequence_parallel:
            out, work = reduce_scatter_dim0_async(tile, group)
        else:
            out, work = tile, all_reduce_sum_async(tile, group)
        self._pending = (number, out, work)

    def put_segments(self, number: int, parts: list[Tensor]) -> None:
        """As `put`, of this rank's segments' `[rows, h]`: added in vocabulary order."""
        tiling = self._tiling
        out = ordered_sum_dim0(parts, tiling.group, scatter=tiling.sequence_parallel)
        self.grad[self._tiles.local[number]] = out

    def finish(self) -> Tensor:
        """`[n_local, h]` in the hidden states' dtype, or float32."""
        self._settle()
        return self.grad

    def _settle(self) -> None:
        if self._pending is None:
            return
        number, out, work = self._pending
        wait_for(work, self._tiling.group)
        self.grad[self._tiles.local[number]] = out
        self._pending = None


class WeightGradient:
    """Collects dWeight block by block, accumulated in float32 whatever the weight's dtype.

    With one tile a block is multiplied once and written once, straight into the gradient where its
    dtype is the operands'. With several, the float32 sum lives in `main_grad` if it is given, else
    in the gradient itself if that is float32, else in a float32 tensor of the gradient's size.

    Args:
        weight: `[v, h]`.
        main_grad: None, or Megatron's `weight.main_grad`, to which the gradient is added.
        wide: leave the gradient in float32.
        tiles: how many tiles will contribute to each block.
        valid: columns past it are masked: their gradient is 0.
        sparse: the gradient comes by `add_rows`; the float32 sum starts at 0.
        fixed: multiply from and into memory of its own, so that a block's place in the weight
            does not change its bits.
        rounded: as in `kernels.products.product`.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        main_grad: Tensor | None,
        tiles: int,
        valid: int,
        wide: bool = False,
        sparse: bool = False,
        fixed: bool = False,
        rounded: bool = False,
    ) -> None:
        self._weight, self._main_grad = weight, main_grad
        self._fixed, self._rounded = fixed, rounded
        self._wide = accumulator_dtype(weight.dtype)
        self._dtype = self._wide if wide else weight.dtype
        self._fresh = main_grad is None
        self._sum: Tensor | None = None
        if sparse and (main_grad is None or main_grad.dtype != self._wide):
            self._sum = torch.zeros_like(weight, dtype=self._wide)
        elif main_grad is None:
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
        if self._fixed:
            dlogits, hidden = aligned(dlogits), aligned(hidden)
        elif block is not None and block.dtype == self._wide:
            # product writes where there is nothing yet, so that no zero fill is needed.
            multiply = product if first and self._fresh else add_product
            multiply(dlogits.t(), hidden, block, rounded=self._rounded)
            return
        elif block is not None and first and self._fresh and block.dtype == dlogits.dtype:
            rounded_product(dlogits.t(), hidden, block)
            return
        shape = (dlogits.shape[1], hidden.shape[1])
        part = hidden.new_empty(shape, dtype=self._wide)
        product(dlogits.t(), hidden, part, rounded=self._rounded)
        if block is not None:  # fixed; or one tile, float32 operands of a low-precision weight
            block.copy_(part) if first and self._fresh else block.add_(part)
        else:  # a low-precision main_grad: rounded once a tile, as Megatron's own does
            assert self._main_grad is not None
            self._main_grad[columns].add_(part)

    def add_rows(self, columns: Tensor, rows: Tensor) -> None:
        """Add `rows[i]` to the gradient's row `columns[i]`; `[e]`, `[e, h]` float32 or float64."""
        assert self._sum is not None
        self._sum.index_add_(0, columns, rows)

    def finish(self) -> Tensor | None:
        """The weight's gradient, or what stands for it when main_grad has it."""
        if self._main_grad is None:
            assert self._sum is not None
            return self._sum.to(self._dtype)
        if self._sum is not None and self._sum is not self._main_grad:
            self._main_grad.add_(self._sum)
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
