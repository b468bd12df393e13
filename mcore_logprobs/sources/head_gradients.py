"""The output layer's gradients, as dLogits come chunk by chunk.

for each tile of rows:
    for each block of columns:          chunk = tile @ weight[block]^T, and from it dLogits
        dTile          += dLogits @ weight[block]
        after the last block: dHidden[tile] = dTile summed over TP, while work goes on
        dWeight[block] += dLogits^T @ tile
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed import Work

from mcore_logprobs.collectives import (
    all_reduce_sum_async,
    ordered_sum_dim0,
    reduce_scatter_dim0_async,
    wait_for,
)
from mcore_logprobs.kernels.chunk import (
    ChunkAt,
    Processing,
    acc_dtype,
    prefer_huge_pages,
    row_stride,
    softcap_slope,
)
from mcore_logprobs.kernels.products import (
    add_product,
    aligned,
    batch_invariant_matmul,
    product,
    rounded_product,
)
from mcore_logprobs.sources.head_operands import HeadOperands, HeadTile
from mcore_logprobs.sources.lora import LoRAGradient
from mcore_logprobs.sources.main_grad import MainGrad
from mcore_logprobs.sources.source import LogitIndices, Write, entry_gradients


class HeadGradient:
    """The gradients of a head's tensors.

    Args:
        needs: which of them are wanted; an unwanted one costs no GEMM.
        in_acc_dtype: leave the gradients in float32 (float64 for float64), dWeight out of main_grad
            too.
        sparse: dLogits come by `collect_entries` instead of chunk by chunk.
    """

    def __init__(
        self,
        head: HeadOperands,
        needs: Sequence[bool],
        *,
        in_acc_dtype: bool = False,
        sparse: bool = False,
    ) -> None:
        for_hidden, for_weight, for_bias, *for_lora = needs[:5]
        options, bias = head.options, head.processing.bias
        self._head, self._in_acc_dtype = head, in_acc_dtype
        self.hidden = HiddenGradient(head, in_acc_dtype=in_acc_dtype) if for_hidden else None
        self.weight = self._bias = self._lora = None
        if for_weight:
            self.weight = WeightGradient(
                head,
                main_grad=None if in_acc_dtype else options.main_grad,
                in_acc_dtype=in_acc_dtype,
                sparse=sparse,
            )
        if for_bias and bias is not None:
            self._bias = torch.zeros_like(bias, dtype=head.acc_dtype)
        if head.low_rank is not None and (for_hidden or any(for_lora)):
            self._lora = LoRAGradient(
                head.low_rank,
                head.shard.group,
                (for_hidden, *for_lora),
                in_acc_dtype=in_acc_dtype,
                sparse=sparse,
            )
        self._scale: Tensor | None = None  # dLogits are times this
        self._tile: Tensor | None = None
        self._ended = -1  # the latest tile whose reduction was started
        self._parts: list[Tensor | None] = []

    def scaled_by(self, scale: Tensor) -> None:
        """Divide each tile's dHidden by its scale at the tile's end; change sums over tiles to it.

        That takes a pass over dWeight for each tile after the first, and one in the end.
        """
        if self._scale is not None:
            self._multiply(scale / self._scale)
        self._scale = scale

    def _multiply(self, factor: Tensor) -> None:
        """What is summed over tiles, in place."""
        if self.weight is not None:
            self.weight.multiply(factor)
        if self._bias is not None:
            self._bias.mul_(factor)
        if self._lora is not None:
            self._lora.multiply(factor)

    def collect(self, tile: HeadTile, placed: ChunkAt, write: Write) -> None:
        """Take dLogits of a chunk, over the logits where they fit there; up to three GEMMs."""
        head, columns, chunk, bias = self._head, placed.columns, placed.chunk, self._bias
        hidden, raw, dtype = tile.hidden, chunk.logits, head.matmul_dtype
        # 1. dLogits `[rows, columns]` as they are multiplied, and dBias.
        if bias is not None and chunk.processing.softcap is not None:
            dlogits = self._through_softcap_and_bias(placed, write, bias)
        else:
            if chunk.lasting:  # no other chunk is in the buffer then
                dlogits = head.buffer(raw.shape[0], raw.shape[1], dtype)
            else:
                dlogits = raw if raw.dtype == dtype else _empty_like(raw, dtype)
            write(placed, dlogits)
            if bias is not None:
                of_bias = dlogits.sum(0, dtype=bias.dtype)
                bias[columns] += of_bias * (1.0 / chunk.processing.logit_scale)
        # 2. dTile += dLogits @ weight[block].
        if self._lora is not None:
            assert head.low_rank is not None
            self._lora.add_chunk(columns, dlogits, head.low_rank.inner(hidden))
        if self.hidden is not None and head.options.segments is not None:
            self._add_segment(columns, dlogits, hidden)
        elif self.hidden is not None:
            block, low_precision = head.weight_block(columns), head.options.low_precision
            if self._tile is None:
                self._tile = torch.empty_like(hidden, dtype=head.acc_dtype)
                product(dlogits, block, self._tile, low_precision=low_precision)
            else:
                add_product(dlogits, block, self._tile, low_precision=low_precision)
        # 3. After the last block dTile's sum over TP starts: the GEMM that follows hides it.
        if columns.stop == head.shard.valid_width:
            self.end_tile(tile)
        # 4. dWeight[block] += dLogits^T @ tile.
        if self.weight is not None:
            self.weight.add(tile.number == 0, columns, dlogits, hidden)

    def _through_softcap_and_bias(self, placed: ChunkAt, write: Write, bias: Tensor) -> Tensor:
        """dLogits of a chunk with both, in two steps; and dBias.

        With z = (cap(scale y) + bias) / T, dBias is the sum of dz / T, and dy has cap's slope on
        top.
        """
        head, chunk, processing = self._head, placed.chunk, placed.chunk.processing
        raw, dtype, scale = chunk.logits, head.matmul_dtype, processing.logit_scale
        assert processing.softcap is not None
        slope = softcap_slope(raw, scale, processing.softcap, head.acc_dtype).mul_(scale)
        capped = replace(chunk, processing=Processing.of(scale, processing.softcap)).processed()
        dz = _empty_like(raw, head.acc_dtype)  # rounded below, once slope and scale are on it
        rest = Processing.of(temperature=processing.temperature, bias=processing.bias)
        write(placed._replace(chunk=replace(chunk, logits=capped, processing=rest)), dz)
        bias[placed.columns] += dz.sum(0, dtype=bias.dtype)
        return (dz * slope.masked_fill_(dz == 0, 0.0)).to(dtype)

    def _add_segment(self, columns: slice, dlogits: Tensor, hidden: Tensor) -> None:
        """Add a chunk's part of dTile to its segment's sum."""
        head = self._head
        segments = head.options.segments
        assert segments is not None
        part = torch.empty_like(hidden, dtype=head.acc_dtype, memory_format=torch.contiguous_format)
        batch_invariant_matmul(dlogits, head.weight_block(columns), part)
        self._parts = self._parts or [None] * segments.local
        number = columns.start // segments.width
        before = self._parts[number]
        self._parts[number] = part if before is None else before.add_(part)

    def collect_entries(self, tile: HeadTile, entries: LogitIndices, upstream: Tensor) -> None:
        head = self._head
        for part in tile.parts(entries):
            few = LogitIndices(*(x[part] for x in entries))
            dz, dy = entry_gradients(
                upstream[part].to(head.acc_dtype),
                few,
                partial(tile.raw_entries, few),
                head.processing,
            )
            rows, columns = few.row - tile.rows.start, few.column.clamp(min=0)
            if self._bias is not None:
                self._bias.index_add_(0, columns, dz)
            factor = dy.unsqueeze(-1)
            # An entry of 0 adds nothing, whatever the operands hold.
            none = factor == 0
            if self.weight is not None:
                added = tile.hidden[rows].to(head.acc_dtype).mul_(factor)
                self.weight.add_rows(columns, added.masked_fill_(none, 0.0))
            if self.hidden is not None:
                if self._tile is None:
                    self._tile = torch.zeros_like(tile.hidden, dtype=head.acc_dtype)
                added = head.matmul_input(head.weight[columns]).to(head.acc_dtype).mul_(factor)
                self._tile.index_add_(0, rows, added.masked_fill_(none, 0.0))
            if self._lora is not None:
                assert head.low_rank is not None
                self._lora.add_entries(rows, columns, factor, head.low_rank.inner(tile.hidden))

    def end_tile(self, tile: HeadTile) -> None:
        """The tile's dHidden is complete: start its sum over TP, where `collect` has not yet."""
        number, hidden = tile.number, tile.hidden
        if self._ended == number:
            return
        self._ended = number
        if self._lora is not None:
            self._lora.end_tile(hidden, self._tile)
        if self.hidden is None:
            return
        segments = self._head.options.segments
        zeros = partial(torch.zeros_like, hidden, dtype=self._head.acc_dtype)
        if segments is not None:
            parts, self._parts = self._parts or [None] * segments.local, []
            if self._scale is not None:
                parts = [None if part is None else part.div_(self._scale) for part in parts]
            self.hidden.put_segments(number, [zeros() if part is None else part for part in parts])
            return
        if self._tile is None:  # no true vocabulary on this rank
            self._tile = zeros()
        elif self._scale is not None:
            self._tile.div_(self._scale)
        self.hidden.put(number, self._tile)
        self._tile = None

    def finish(self) -> tuple[Tensor | None, ...]:
        """The gradients in the order of HeadTensors; None where unwanted or added to main_grad.

        Where a LoRA's A is wanted, one all-reduce of `[r, h]` float32 over TP.
        """
        if self._scale is not None:
            self._multiply(self._scale.reciprocal())
        bias = self._bias
        if bias is not None and not self._in_acc_dtype:
            bias = bias.to(self._head.tensors.bias.dtype)  # type: ignore[union-attr]
        return (
            None if self.hidden is None else self.hidden.finish(),
            None if self.weight is None else self.weight.finish(),
            bias,
            *((None, None) if self._lora is None else self._lora.finish()),
        )


def _empty_like(chunk: Tensor, dtype: torch.dtype) -> Tensor:
    """`[rows, columns]` of memory for a chunk's dLogits: the chunk's own rows may be a tile's."""
    rows, columns = chunk.shape
    stride = row_stride(columns, dtype, chunk.device.type)
    return chunk.new_empty(rows, stride, dtype=dtype)[:, :columns]


class HiddenGradient:
    """Collects dHidden tile by tile: float32 within a tile, summed over TP while the next is made.

    The sum over TP is an all-reduce, or a reduce-scatter under sequence parallelism, in float32,
    rounded to the hidden states' dtype once (not at all if `in_acc_dtype`).
    """

    def __init__(self, head: HeadOperands, *, in_acc_dtype: bool) -> None:
        hidden, self._selection = head.tensors.hidden, head.options.selection
        self._group, self._scatter = head.shard.group, head.options.sequence_parallel
        self._parts = head.hidden.local
        self._dtype = acc_dtype(hidden.dtype) if in_acc_dtype else hidden.dtype
        self._pending: tuple[int, Tensor, Work | None] | None = None
        # One tile's rows, of the gradient's dtype, are the gradient.
        self._is_tile = self._selection is None and len(self._parts) == 1
        if self._selection is None:
            size = 0 if self._is_tile and self._dtype == head.acc_dtype else len(hidden)
            self._grad = torch.empty_like(hidden[:size], dtype=self._dtype)
        else:  # rows that are named twice are added up in float32
            exact = self._selection.exact
            dtype = self._dtype if exact else acc_dtype(hidden.dtype)
            self._grad = torch.zeros_like(hidden, dtype=dtype)

    def put(self, number: int, tile: Tensor) -> None:
        """Take over the finished `[rows, h]` gradient of tile `number`; start its reduction."""
        self._settle()
        if self._scatter:
            out, work = reduce_scatter_dim0_async(tile, self._group)
        else:
            out, work = tile, all_reduce_sum_async(tile, self._group)
        self._pending = (number, out, work)

    def put_segments(self, number: int, parts: list[Tensor]) -> None:
        """Take a tile's gradient by segment, `[rows, h]` each; all ranks' are added in vocabulary
        order, so that the sum has the same bits at every TP size.
        """
        total = ordered_sum_dim0(parts, self._group, scatter=self._scatter)
        self._pending = (number, total, None)
        self._settle()

    def finish(self) -> Tensor:
        """`[n_local, h]` in the hidden states' dtype, or float32."""
        self._settle()
        return self._grad.to(self._dtype)

    def _settle(self) -> None:
        """Wait for the latest tile's sum, and write it where its rows are."""
        if self._pending is None:
            return
        number, rows, work = self._pending
        wait_for(work, self._group)
        self._pending = None
        part = self._parts[number]
        if self._is_tile and rows.dtype == self._dtype:
            self._grad = rows
        elif self._selection is None:
            self._grad[part] = rows
        elif self._selection.exact:
            self._grad.index_copy_(0, self._selection.local[part], rows.to(self._grad.dtype))
        else:
            self._grad.index_add_(0, self._selection.local[part], rows)


class WeightGradient:
    """Collects dWeight block by block, accumulated in float32 whatever the weight's dtype.

    With one tile a block is multiplied once and written once, straight into the gradient where its
    dtype is the operands'. With several, the float32 sum lives in `main_grad` if it is given, else
    in the gradient itself if that is float32, else in a float32 tensor of the gradient's size.
    Under invariant_segments GEMMs read and write memory of their own, so that a block's
    place in the weight does not change its bits.

    Args:
        main_grad: None, or the buffer to which the gradient is added.
        in_acc_dtype: leave the gradient in float32.
        sparse: the gradient comes by `add_rows`; the float32 sum starts at 0.
    """

    def __init__(
        self, head: HeadOperands, *, main_grad: MainGrad | None, in_acc_dtype: bool, sparse: bool
    ) -> None:
        weight, tiles, options = head.weight, len(head.hidden.local), head.options
        self._main_grad = main_grad
        self._fixed = options.segments is not None
        self._low_precision = options.low_precision
        self._acc_dtype = head.acc_dtype
        self._dtype = self._acc_dtype if in_acc_dtype else weight.dtype
        buffer = None if main_grad is None else main_grad.buffer
        # What blocks are added to, the weight's shape. A low-precision main_grad is rounded once a
        # tile, as Megatron's is.
        if sparse and (buffer is None or buffer.dtype != self._acc_dtype):
            self._sum = weight.new_zeros(weight.shape, dtype=self._acc_dtype)
        elif buffer is None:
            dtype = self._dtype if tiles <= 1 else self._acc_dtype
            self._sum = prefer_huge_pages(weight.new_empty(weight.shape, dtype=dtype))
            written = head.shard.valid_width if tiles else 0
            if written < weight.shape[0]:
                self._sum[written:] = 0
        else:
            self._sum = buffer

    def add(self, first: bool, columns: slice, dlogits: Tensor, hidden: Tensor) -> None:
        """Add `dlogits^T @ hidden`, `[columns, h]`; `first` for the first tile of the block.

        Args:
            dlogits: `[rows, columns]`, hidden: `[rows, h]`; of one dtype.
        """
        is_new = first and self._main_grad is None  # there is nothing yet, nor a zero fill
        block = self._sum[columns]
        if self._fixed:
            dlogits, hidden = aligned(dlogits), aligned(hidden)
        elif block.dtype == self._acc_dtype:
            multiply = product if is_new else add_product
            multiply(dlogits.t(), hidden, block, low_precision=self._low_precision)
            return
        elif is_new and block.dtype == dlogits.dtype:
            rounded_product(dlogits.t(), hidden, block)
            return
        part = hidden.new_empty((dlogits.shape[1], hidden.shape[1]), dtype=self._acc_dtype)
        product(dlogits.t(), hidden, part, low_precision=self._low_precision)
        block.copy_(part) if is_new else block.add_(part)

    def multiply(self, factor: Tensor) -> None:
        """Multiply the float32 sum of what was added; a tile's blocks have all been."""
        assert self._main_grad is None
        self._sum.mul_(factor)

    def add_rows(self, columns: Tensor, rows: Tensor) -> None:
        """Add `rows[i]` to the gradient's row `columns[i]`; `[e]`, `[e, h]` float32 or float64."""
        self._sum.index_add_(0, columns, rows)

    def finish(self) -> Tensor | None:
        """The weight's gradient, or what stands for it when main_grad has it."""
        if self._main_grad is None:
            return self._sum.to(self._dtype)
        if self._sum is not self._main_grad.buffer:
            self._main_grad.buffer.add_(self._sum)
        return self._main_grad.dummy_wgrad()
