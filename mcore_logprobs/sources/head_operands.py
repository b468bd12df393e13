"""What an LM head multiplies: tiles of hidden states by blocks of its weight.

Operands are multiplied row by row, however they lie in memory: a matrix library rounds the product
of another layout differently, and saved-tensor hooks and checkpoints give a backward tensors of
other layouts. A probability near 1 would then be off by as much as its logits are.

Under sequence parallelism every rank holds its own part of the hidden states, and a tile is
gathered from all ranks: rows are walked tile by tile, and within a tile rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from mcore_logprobs.collectives import all_gather_dim0_async, wait_for
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels import budgets
from mcore_logprobs.kernels.backend import Backend
from mcore_logprobs.kernels.budgets import Tiling
from mcore_logprobs.kernels.chunk import (
    Chunk,
    ChunkAt,
    Processing,
    prefer_huge_pages,
    row_chunks,
    row_stride,
)
from mcore_logprobs.kernels.products import (
    aligned,
    batch_invariant_matmul,
    left_operand,
    product,
    rounded_to,
)
from mcore_logprobs.kernels.segments import Segments
from mcore_logprobs.sources.lora import LoRA, LowRank
from mcore_logprobs.sources.main_grad import MainGrad
from mcore_logprobs.sources.rows import RowSelection
from mcore_logprobs.sources.source import LogitIndices


class HiddenRows:
    """Hidden states `[n_local, h]` as tiles of the whole `[n, h]`.

    Attributes:
        group, ranks: over which the rows are split; None and 1: over none.
        selection: which of them are computed; None: all.
        num_rows: rows over all ranks, n.
        local: each tile's rows of this rank, or places in its selection.
        is_one_walk: whether rows tile by tile are in the order of rows rank by rank.

    Args:
        hidden: this rank's.
        options: the head's.
    """

    def __init__(self, hidden: Tensor, options: HeadOptions) -> None:
        self.hidden, self.selection = hidden, options.selection
        self.group, self.ranks = None, 1
        if options.sequence_parallel:
            self.group, self.ranks = options.shard.group, options.shard.tp_size
        rows = hidden if self.selection is None else self.selection.local
        self.num_rows = rows.shape[0] * self.ranks
        self.local = list(row_chunks(rows.shape[0], max(1, options.tiling.rows // self.ranks)))
        self.is_one_walk = self.ranks == 1 or len(self.local) < 2

    def start(self, number: int) -> tuple[Tensor, Work | None]:
        """(the hidden states of a tile, what is to be waited for before they are read)."""
        part = self.local[number]
        if self.selection is None:
            rows = self.hidden[part]
        else:
            rows = self.selection.hidden_rows(self.hidden, part)
        if self.group is None:
            return rows, None
        # A view of wider hidden states is strided, and collectives want contiguous memory.
        return all_gather_dim0_async(rows.contiguous(), self.group)

    def by_tile(self, per_row: Tensor) -> Tensor:
        """`[n, ...]` rank by rank -> tile by tile, and in a tile rank by rank."""
        ranked = per_row.unflatten(0, (self.ranks, -1))
        return torch.cat([ranked[:, part].flatten(0, 1) for part in self.local])

    def by_rank(self, per_row: Tensor) -> Tensor:
        """The inverse of `by_tile`."""
        out = torch.empty_like(per_row)
        ranked = out.unflatten(0, (self.ranks, -1))
        for part in self.local:
            tile = per_row[part.start * self.ranks : part.stop * self.ranks]
            ranked[:, part] = tile.unflatten(0, (self.ranks, -1))
        return out


class HeadTensors(NamedTuple):
    """The tensors of an LM head that may get a gradient, in the order of its gradients.

    Attributes:
        hidden: `[n_local, h]`; weight `[v, h]`, bias `[v]`; a LoRA's A `[r, h]` and B `[v, r]`.
        temperature: `[*batch_shape]` where each token has its own; without a gradient.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    temperature: Tensor | None = None


class SavedBytes:
    """How much a call may keep; its operations share it.

    Attributes:
        count: in all.
        left: not yet given to an operation.
    """

    def __init__(self, count: int) -> None:
        self.count = self.left = count


@dataclass(frozen=True)
class HeadOptions:
    """A head's options, checked; holds no tensor of the caller's.

    Attributes:
        batch_shape: of the tokens: hidden's leading shape over all ranks, or `[m]` of m rows.
        temperature: a number, where tokens do not have their own.
        logits_dtype: what a chunk of logits is rounded to; float64 for float64 operands.
        compute_dtype: what the operands are rounded to: their own, or autocast's.
        acc_dtype, matmul_dtype: what products are added in, and what operands are multiplied in: a
            CPU may multiply low precision in float32.
        low_precision: GEMMs may be made in compute_dtype throughout: logits_dtype is that.
        chunk_size: as the caller gave it.
        segments: the segments that statistics are taken by, or None.
        main_grad: where the weight's gradient goes, or None.
        saved: what a backward may be spared of, or None.
        disallowed: forbidden global ids, a constant; or None.
    """

    shard: VocabShard
    batch_shape: torch.Size
    logit_scale: float
    softcap: float | None
    temperature: float
    logits_dtype: torch.dtype
    compute_dtype: torch.dtype
    acc_dtype: torch.dtype
    matmul_dtype: torch.dtype
    low_precision: bool
    backend: Backend
    sequence_parallel: bool
    chunk_size: int | None
    tiling: Tiling
    selection: RowSelection | None
    compact: bool
    segments: Segments | None
    lora_scale: float
    main_grad: MainGrad | None
    saved: SavedBytes | None
    disallowed: Tensor | None = None


class Keeps(Protocol):
    """Chunks of logits that outlast the call: `sources.kept.KeptLogits`."""

    def chunk(self, tile: HeadTile, columns: slice, out: Tensor | None) -> Chunk | None: ...


class HeadOperands:
    """The operands of a head as they are multiplied, and the memory that products go into."""

    def __init__(self, options: HeadOptions, tensors: HeadTensors) -> None:
        self.options, self.tensors, self.shard = options, tensors, options.shard
        self.weight = tensors.weight.detach()
        self.device, self.acc_dtype = self.weight.device, options.acc_dtype
        self.backend, self.matmul_dtype = options.backend, options.matmul_dtype
        self.hidden = HiddenRows(tensors.hidden.detach(), options)
        # No method: what holds it would hold the head, in a cycle that outlives the call.
        self.matmul_input = partial(_matmul_input, options.compute_dtype, self.matmul_dtype)
        self.low_rank: LowRank | None = None
        if tensors.lora_a is not None and tensors.lora_b is not None:
            a, b = (x.detach().contiguous() for x in (tensors.lora_a, tensors.lora_b))
            lora = LoRA(a, b, options.lora_scale)
            self.low_rank = LowRank(lora, self.acc_dtype, self.matmul_input)
        self.kept: Keeps | None = None  # chunks that outlast the call
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._block: tuple[slice, Tensor] | None = None
        self.batch_shape, self.num_rows = options.batch_shape, self.hidden.num_rows
        self.may_keep = options.saved is not None
        temperature: float | Tensor = options.temperature
        if tensors.temperature is not None:
            temperature = self.to_row_order(tensors.temperature)
        scale, softcap, valid_width = options.logit_scale, options.softcap, self.shard.valid_width
        self.processing = Processing.of(scale, softcap, temperature, tensors.bias, valid_width)
        # The columns of true vocabulary, block by block.
        segments, most = options.segments, options.tiling.columns
        if segments is None:
            self.blocks = list(row_chunks(valid_width, most))
        else:
            block = segments.block(self.device.type)
            most = budgets.of(self.device.type).fixed_columns // block * block
            self.blocks = list(segments.columns(valid_width, max(block, most)))

    # ---- rows: their order, and tile by tile ----

    def to_row_order(self, per_token: Tensor, fill: float | None = None) -> Tensor:
        shape, flat = self.batch_shape, per_token
        if len(shape) != 1:
            flat = per_token.reshape(shape.numel(), *per_token.shape[len(shape) :])
        if self.options.selection is not None:
            flat = self.options.selection.select(flat, fill)
        return flat if self.hidden.is_one_walk else self.hidden.by_tile(flat)

    def to_token_order(self, per_row: Tensor, fill: float = 0) -> Tensor:
        if not self.hidden.is_one_walk:
            per_row = self.hidden.by_rank(per_row)
        if self.options.selection is not None:
            per_row = self.options.selection.unselect(per_row, fill)
        if len(self.batch_shape) == 1:
            return per_row
        return per_row.reshape((*self.batch_shape, *per_row.shape[1:]))

    def tiles(self) -> Iterator[HeadTile]:
        """Tile by tile; the next one's hidden states are on their way while one is worked on."""
        hidden, count = self.hidden, len(self.hidden.local)
        coming = hidden.start(0) if count else None
        for number, part in enumerate(hidden.local):
            assert coming is not None
            tile, work = coming
            wait_for(work, hidden.group)
            coming = hidden.start(number + 1) if number + 1 < count else None
            rows = slice(part.start * hidden.ranks, part.stop * hidden.ranks)
            yield HeadTile(self, number, rows, self.matmul_input(tile).contiguous())

    def tile_ends(self) -> list[int]:
        return [part.stop * self.hidden.ranks for part in self.hidden.local]

    # ---- products and their memory ----

    def rows_at_a_time(self, width: int, copies: int = 1) -> int:
        return budgets.of(self.device.type).copied_rows(copies * width)

    def weight_block(self, columns: slice) -> Tensor:
        """`[columns, h]` of the weight as it is multiplied; the latest block is kept."""
        if self._block is None or self._block[0] != columns:
            self._block = None  # a cast block's memory can serve the next
            block = self.matmul_input(self.weight[columns]).contiguous()
            self._block = (columns, block if self.options.segments is None else aligned(block))
        return self._block[1]

    def release(self) -> None:
        """Let go of what only one walk over the head needs."""
        self.kept = self._block = None
        self._buffers.clear()
        if self.low_rank is not None:
            self.low_rank.release()

    def product(self, tile: Tensor, columns: slice, out: Tensor) -> Tensor:
        """Raw logits of a block of columns, rounded to logits_dtype, in `out` `[rows, columns]`.

        Args:
            out: of logits_dtype or of the accumulation dtype; no buffer of `buffer`'s of the
                accumulation dtype where logits_dtype is another.
        """
        weight, options = self.weight_block(columns), self.options
        assert out.shape == (tile.shape[0], weight.shape[0]), "a block is as large as its place"
        fixed = options.segments is not None
        if out.dtype == tile.dtype != self.acc_dtype and self.low_rank is None and not fixed:
            left = left_operand(tile)  # tensor cores, low-precision result
            return torch.mm(left, weight.t(), out=out)  # pragma: no cover (CUDA, or bfloat16 GEMMs)
        wide = out
        if out.dtype != self.acc_dtype:
            wide = self.buffer(*out.shape, self.acc_dtype)
        (batch_invariant_matmul if fixed else product)(tile, weight.t(), wide)
        if self.low_rank is not None:
            self.low_rank.add_logits(tile, columns, wide)
        # An explicit low-precision logits_dtype rounds, as a head of that dtype would.
        rounds = options.logits_dtype != wide.dtype
        if rounds and (wide is out or torch.compiler.is_compiling()):
            wide = rounded_to(wide, options.logits_dtype)
        return out if wide is out else out.copy_(wide)

    def buffer(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """`[rows, columns]` of memory that every call for this dtype overwrites."""
        if torch.compiler.is_compiling():  # which takes no `out=` that is not contiguous
            return self.weight.new_empty(rows, columns, dtype=dtype)
        stride = row_stride(columns, dtype, self.device.type)
        memory = self._buffers.get(dtype)
        if memory is None or memory.numel() < rows * stride:
            self._buffers.pop(dtype, None)  # its memory can serve the next
            memory = prefer_huge_pages(self.weight.new_empty(rows * stride, dtype=dtype))
            self._buffers[dtype] = memory
        return memory.as_strided((rows, columns), (stride, 1))


def _matmul_input(compute_dtype: torch.dtype, matmul_dtype: torch.dtype, x: Tensor) -> Tensor:
    """x as it is multiplied; x itself where it is that already."""
    return x.to(compute_dtype).to(matmul_dtype)


@dataclass
class HeadTile:
    """Some rows of a head.

    Attributes:
        number: which tile.
        rows: as they are walked.
        hidden: `[rows, h]`, as it is multiplied.
    """

    head: HeadOperands
    number: int
    rows: slice
    hidden: Tensor

    def block(self, columns: slice, tile_logits: Tensor | None = None) -> Chunk:
        """The chunk of a block of columns.

        Args:
            tile_logits: `[rows, V/TP]`, into whose columns it goes; None: into a buffer that the
                next such block overwrites, or into memory that outlasts the call.
        """
        head, options = self.head, self.head.options
        out = None if tile_logits is None else tile_logits[:, columns]
        if head.kept is not None and (kept := head.kept.chunk(self, columns, out)) is not None:
            return kept
        shape = self.hidden.shape[0], columns.stop - columns.start
        if out is None:
            logits = head.product(self.hidden, columns, head.buffer(*shape, options.logits_dtype))
        elif torch.compiler.is_compiling():  # columns of a tile are not contiguous
            logits = out.copy_(head.product(self.hidden, columns, head.buffer(*shape, out.dtype)))
        else:
            logits = head.product(self.hidden, columns, out)
        return head.processing.chunk(logits, self.rows, columns)

    def chunks(self, tile_logits: Tensor | None = None) -> Iterator[ChunkAt]:
        """Block by block; `tile_logits` as in `block`."""
        for columns in self.head.blocks:
            yield ChunkAt(self.rows, columns, self.block(columns, tile_logits))

    def held_chunks(self) -> list[ChunkAt]:
        """All chunks at once, which share a buffer that the next tile's overwrite."""
        head = self.head
        shape = self.hidden.shape[0], head.shard.valid_width
        return list(self.chunks(head.buffer(*shape, head.options.logits_dtype)))

    def whole_rows(self) -> Iterator[ChunkAt]:
        """All columns of true vocabulary as one chunk, in new memory; the same bits as chunks'."""
        head, columns = self.head, slice(0, self.head.shard.valid_width)
        stride = row_stride(columns.stop, head.acc_dtype, head.device.type)
        logits = self._new_logits(stride)[:, : columns.stop]
        yield ChunkAt(self.rows, columns, head.processing.chunk(logits, self.rows, columns))

    def raw_logits(self) -> Tensor:
        """Raw logits `[rows, V/TP]` in the accumulation dtype, rounded to logits_dtype; new.

        -inf past the true vocabulary.
        """
        out = self._new_logits(self.head.shard.width)
        out[:, self.head.shard.valid_width :] = -torch.inf
        return out

    def blocks_of(self, raw_logits: Tensor) -> Iterator[ChunkAt]:
        """The chunks of a tile's raw logits `[rows, V/TP]`, block by block."""
        processing = self.head.processing
        for columns in self.head.blocks:
            chunk = processing.chunk(raw_logits[:, columns], self.rows, columns)
            yield ChunkAt(self.rows, columns, chunk)

    def _new_logits(self, width: int) -> Tensor:
        """`[rows, width]` in the accumulation dtype, whose true columns are filled."""
        head = self.head
        out = head.weight.new_empty(self.hidden.shape[0], width, dtype=head.acc_dtype)
        for _ in self.chunks(prefer_huge_pages(out)):
            pass
        return out

    def target_logits(self, local_target: Tensor) -> Tensor:
        """By one dot product a row."""
        row = torch.arange(self.rows.start, self.rows.stop, device=local_target.device)
        entries = LogitIndices(row, local_target)
        logits, bias = self.raw_entries(entries), self.head.processing.bias
        if bias is not None:
            logits = torch.stack([logits, bias[local_target.clamp(min=0)].to(logits.dtype)])
        return torch.where(local_target >= 0, logits, 0.0)

    def unscaled_logits(self, entries: LogitIndices) -> Tensor:
        return self.head.processing.unscaled_entries(self.raw_entries(entries), entries.column)

    def raw_entries(self, entries: LogitIndices) -> Tensor:
        """By dot products, `[e]` in the accumulation dtype; any value where the column is -1."""
        rows, column = entries.row - self.rows.start, entries.column.clamp(min=0)
        head = self.head
        out = head.weight.new_empty(rows.shape, dtype=head.acc_dtype)
        for part in self.parts(entries):
            weight = head.matmul_input(head.weight.index_select(0, column[part]))
            products = weight.to(head.acc_dtype).mul_(self.hidden.index_select(0, rows[part]))
            raw = products.sum(-1)
            del weight, products  # the next part's take their memory
            if head.low_rank is not None:
                raw += head.low_rank.entries(self.hidden, column[part], rows[part])
            out[part] = rounded_to(raw, head.options.logits_dtype)
        return out

    def parts(self, entries: LogitIndices) -> Iterator[slice]:
        """Entries a few at a time, so that their operands stay as small as a chunk."""
        budget = budgets.of(self.head.device.type).gathered_bytes
        return row_chunks(entries.row.shape[0], max(1, budget // (8 * self.hidden.shape[1])))
