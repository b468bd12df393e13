"""The LM head as a source of logits: hidden states times its weight, a chunk at a time.

    for each tile of rows, for each block of columns:
        forward    chunk = tile @ weight[block]^T          -> what the operation takes of it
        backward   chunk again -> dLogits, in its place    -> dWeight[block], dHidden[tile]

One chunk of logits exists at a time, forward and backward, or the chunks of one tile where an
operation holds them. Under sequence parallelism a tile is gathered from all ranks when it is needed
(the next one while this one is worked on), so that the whole sequence is never held either; its
gradient is reduce-scattered the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.arguments import check_float_tensor, check_temperature
from mcore_logprobs.autograd import autocast_enabled
from mcore_logprobs.checks import (
    check_bytes,
    check_flag,
    check_logits_dtype,
    check_optional_count,
    check_optional_positive,
    check_positive,
)
from mcore_logprobs.consistency import check_call
from mcore_logprobs.groups import VocabShard, group_size, resolve_tp_group
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels import budgets
from mcore_logprobs.kernels.chunk import (
    Chunk,
    acc_dtype,
    aligned_width,
    logit_multiplier,
    per_row,
    row_chunks,
    unscaled_logits,
)
from mcore_logprobs.kernels.huge_pages import prefer_huge_pages
from mcore_logprobs.kernels.products import (
    aligned,
    batch_invariant_matmul,
    matmul_dtype,
    product,
)
from mcore_logprobs.kernels.segments import Segments
from mcore_logprobs.sources.head_gradients import HeadGradient
from mcore_logprobs.sources.kept import KeptLogits, SavedBytes
from mcore_logprobs.sources.lora import LoRA, LoRAInput, LowRank, check_lora
from mcore_logprobs.sources.main_grad import MainGrad
from mcore_logprobs.sources.rows import HiddenRows, RowSelection, Tiling, check_rows
from mcore_logprobs.sources.source import Entries, Placed, check_segments
from mcore_logprobs.sources.vocab_bias import Ids, LogitBias, vocab_bias


class HeadTensors(NamedTuple):
    """The tensors of an LM head that may get a gradient, in the order of its gradients.

    Attributes:
        hidden: `[n_local, h]`; weight `[v, h]`, bias `[v]`; a LoRA's A `[r, h]` and B `[v, r]`.
        temperature: `[*lead]` where each token has its own; without a gradient.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    temperature: Tensor | None = None


@dataclass(frozen=True)
class HeadOptions:
    """A head's options, checked; holds no tensor of the caller's.

    Attributes:
        lead: the shape of the tokens: hidden's leading shape over all ranks, or `[m]` of m rows.
        temperature: a number, where tokens do not have their own.
        logits_dtype: what a chunk of logits is rounded to; float64 for float64 operands.
        compute_dtype: what the operands are rounded to: their own, or autocast's.
        rounded: GEMMs may be made in compute_dtype throughout: logits_dtype is that.
        chunk_size: as the caller gave it.
        segments: the segments that statistics are taken by, or None.
        main_grad: where the weight's gradient goes, or None.
        saved: what a backward may be spared of, or None.
        disallowed: forbidden global ids, a constant; or None.
    """

    shard: VocabShard
    lead: torch.Size
    logit_scale: float
    softcap: float | None
    temperature: float
    logits_dtype: torch.dtype
    compute_dtype: torch.dtype
    rounded: bool
    backend: str
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

    def bind(self, *tensors: Any) -> HeadLogits:
        return HeadLogits(self, HeadTensors(*tensors))


class HeadLogits:
    """Hidden states and an LM head as a `Source`.

    Operands are multiplied row by row, however they lie in memory: a matrix library rounds the
    product of another layout differently, and saved-tensor hooks and checkpoints give a backward
    tensors of other layouts. A probability near 1 would then be off by as much as its logits are.
    """

    recomputed, linear = True, False

    def __init__(self, options: HeadOptions, tensors: HeadTensors) -> None:
        self.options, self.tensors = options, tensors
        self.shard, self.lead = options.shard, options.lead
        self.weight, self.bias = tensors.weight.detach(), tensors.bias
        self.device, self.acc_dtype = self.weight.device, acc_dtype(options.compute_dtype)
        group = self.shard.group if options.sequence_parallel else None
        self.hidden = HiddenRows(
            tensors.hidden.detach(), group, options.tiling.rows, options.selection
        )
        self.count = self.hidden.count
        # What operands are multiplied in: a CPU may multiply low precision in float32.
        self.matmul_dtype = matmul_dtype(
            options.compute_dtype, self.device, rounded=options.rounded
        )
        # No method: what holds it would hold the head, in a cycle that outlives the call.
        self.matmul_input = partial(_matmul_input, options.compute_dtype, self.matmul_dtype)
        self.lora = self.low_rank = None
        if tensors.lora_a is not None and tensors.lora_b is not None:
            a, b = (x.detach().contiguous() for x in (tensors.lora_a, tensors.lora_b))
            self.lora = LoRA(a, b, options.lora_scale)
            self.low_rank = LowRank(self.lora, self.acc_dtype, self.matmul_input)
        self.temperature: float | Tensor = options.temperature
        if tensors.temperature is not None:
            self.temperature = self.flatten_rows(tensors.temperature)
        self.multiplier = logit_multiplier(
            self.temperature,
            options.logit_scale,
            is_raw=options.softcap is None and tensors.bias is None,
        )
        self.kept: KeptLogits | None = None  # chunks that outlast the call
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._block: tuple[slice, Tensor] | None = None

    @property
    def heads(self) -> tuple[HeadLogits, ...]:
        """Those whose chunks may be kept (`sources.kept`)."""
        return (self,)

    # ---- the order of rows ----

    def flatten_rows(self, per_token: Tensor, fill: float | None = None) -> Tensor:
        flat = per_token.reshape(self.lead.numel(), *per_token.shape[len(self.lead) :])
        if self.options.selection is not None:
            flat = self.options.selection.select(flat, fill)
        return self.hidden.by_tile(flat)

    def unflatten(self, per_row: Tensor, fill: float = 0) -> Tensor:
        per_row = self.hidden.by_rank(per_row)
        if self.options.selection is not None:
            per_row = self.options.selection.unselect(per_row, fill)
        return per_row.reshape((*self.lead, *per_row.shape[1:]))

    def pack(self, per_row: Tensor) -> Tensor:
        return per_row

    def unpack(self, saved: Tensor) -> Tensor:
        return saved

    def compacted(self, valid_mask: Tensor) -> HeadLogits:
        options = self.options
        if not options.compact:
            return self
        rows = valid_mask.reshape(-1).cpu().nonzero().squeeze(1)  # the host sync
        count = self.lead.numel()
        selection = RowSelection(rows, count, self.hidden.group, self.device, tokens=True)
        return replace(options, selection=selection).bind(*self.tensors)

    # ---- as a source ----

    def in_token_order(self) -> HeadLogits:
        return self

    def in_whole_rows(self, *, adds_per_tile: bool = False, any_tp: bool = False) -> HeadLogits:
        """This head in tiles small enough to hold a tile's logits over all of the rank's columns.

        Args:
            adds_per_tile: as in `Tiling.of_whole_rows`.
            any_tp: the same rows per tile whatever the tensor-parallel size is.
        """
        options, shard = self.options, self.shard
        # dHidden of a tile is float32 too.
        width = max(shard.padded_size if any_tp else shard.width, self.weight.shape[1])
        tiling = Tiling.of_whole_rows(
            self.lead.numel(),
            shard.width,
            options.chunk_size,
            self.device,
            width=width,
            adds_per_tile=adds_per_tile,
        )
        return replace(options, tiling=tiling).bind(*self.tensors)

    def tiles(self) -> Iterator[HeadTile]:
        for number, (rows, tile) in enumerate(self.hidden):
            yield HeadTile(self, number, rows, self.matmul_input(tile).contiguous())

    def tile_ends(self) -> list[int]:
        return [part.stop * self.hidden.ranks for part in self.hidden.local]

    def gradient(
        self, needs: Sequence[bool], *, sparse: bool = False, in_acc_dtype: bool = False
    ) -> HeadGradient:
        return HeadGradient(self, needs, in_acc_dtype=in_acc_dtype, sparse=sparse)

    def backend(self, chunk: Chunk) -> backends.Backend:
        invariant = self.options.segments is not None
        return backends.select(self.options.backend, chunk.logits, invariant=invariant)

    def rows_at_a_time(self, width: int, copies: int = 1) -> int:
        return backends.default_chunk_size(copies * width, self.device)

    # ---- operands and GEMMs ----

    def weight_block(self, columns: slice) -> Tensor:
        """`[columns, h]` of the weight as it is multiplied; the latest block is kept."""
        if self._block is None or self._block[0] != columns:
            self._block = None  # a cast block's memory can serve the next
            block = self.matmul_input(self.weight[columns]).contiguous()
            self._block = (columns, block if self.options.segments is None else aligned(block))
        return self._block[1]

    def blocks(self) -> Iterator[slice]:
        """The columns of true vocabulary, block by block."""
        valid, segments = self.shard.valid_width, self.options.segments
        if segments is None:
            return row_chunks(valid, self.options.tiling.columns)
        most = budgets.of(self.device.type).fixed_columns
        block = segments.block(self.device.type)
        return segments.columns(valid, max(block, most // block * block))

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
            # Tensor cores, low-precision result.
            return torch.mm(tile, weight.t(), out=out)  # pragma: no cover (CUDA, or bfloat16 GEMMs)
        wide = out
        if out.dtype != self.acc_dtype:
            wide = self.buffer(*out.shape, self.acc_dtype)
        (batch_invariant_matmul if fixed else product)(tile, weight.t(), wide)
        if self.low_rank is not None:
            self.low_rank.add_logits(tile, columns, wide)
        # An explicit low-precision logits_dtype rounds, as a head of that dtype would.
        if wide is not out:
            return out.copy_(wide)
        return out if options.logits_dtype == out.dtype else out.copy_(out.to(options.logits_dtype))

    def buffer(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """`[rows, columns]` of memory that every call for this dtype overwrites."""
        stride = aligned_width(columns)
        found = self._buffers.get(dtype)
        if found is None or found.numel() < rows * stride:
            self._buffers.pop(dtype, None)  # its memory can serve the next
            found = prefer_huge_pages(self.weight.new_empty(rows * stride, dtype=dtype))
            self._buffers[dtype] = found
        return found[: rows * stride].view(rows, stride)[:, :columns]

    def chunk(self, logits: Tensor, rows: slice, columns: slice) -> Chunk:
        """Raw logits of some rows and columns, and how they are processed."""
        return Chunk(
            logits=logits,
            valid=max(0, min(columns.stop, self.shard.valid_width) - columns.start),
            logit_scale=self.options.logit_scale,
            softcap=self.options.softcap,
            temperature=per_row(self.temperature, rows),
            bias=None if self.bias is None else self.bias[columns],
        )


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

    head: HeadLogits
    number: int
    rows: slice
    hidden: Tensor

    def block(self, columns: slice, tile_logits: Tensor | None = None) -> Chunk:
        """The chunk of a block of columns.

        Args:
            tile_logits: `[rows, V/TP]`, into whose columns it goes; None: into a buffer that the
                next such block overwrites, or into memory that outlasts the call.
        """
        head = self.head
        out = None if tile_logits is None else tile_logits[:, columns]
        kept = None if head.kept is None else head.kept.logits(self, columns, out)
        if kept is not None:
            logits, lasting = kept
            return replace(head.chunk(logits, self.rows, columns), lasting=lasting)
        if out is None:
            shape = self.hidden.shape[0], columns.stop - columns.start
            out = head.buffer(*shape, head.options.logits_dtype)
        return head.chunk(head.product(self.hidden, columns, out), self.rows, columns)

    def chunks(self, tile_logits: Tensor | None = None) -> Iterator[Placed]:
        """Block by block; `tile_logits` as in `block`."""
        for columns in self.head.blocks():
            yield Placed(self.rows, columns, self.block(columns, tile_logits))

    def held_chunks(self) -> list[Placed]:
        """All chunks at once, which share a buffer that the next tile's overwrite."""
        head = self.head
        shape = self.hidden.shape[0], head.shard.valid_width
        return list(self.chunks(head.buffer(*shape, head.options.logits_dtype)))

    def whole_rows(self) -> Iterator[Placed]:
        """All columns of true vocabulary as one chunk, in new memory; the same bits as chunks'."""
        columns = slice(0, self.head.shard.valid_width)
        logits = self._new_logits(columns.stop)
        yield Placed(self.rows, columns, self.head.chunk(logits, self.rows, columns))

    def raw_logits(self) -> Tensor:
        """Raw logits `[rows, V/TP]` in the accumulation dtype, rounded to logits_dtype; new.

        -inf past the true vocabulary.
        """
        out = self._new_logits(self.head.shard.width)
        out[:, self.head.shard.valid_width :] = -torch.inf
        return out

    def blocks_of(self, raw_logits: Tensor) -> Iterator[Placed]:
        """The chunks of a tile's raw logits `[rows, V/TP]`, block by block."""
        for columns in self.head.blocks():
            chunk = self.head.chunk(raw_logits[:, columns], self.rows, columns)
            yield Placed(self.rows, columns, chunk)

    def _new_logits(self, width: int) -> Tensor:
        """`[rows, width]` in the accumulation dtype, whose true columns are filled."""
        head = self.head
        out = head.weight.new_empty(self.hidden.shape[0], width, dtype=head.acc_dtype)
        for _ in self.chunks(prefer_huge_pages(out)):
            pass
        return out

    def target_logits(self, local_target: Tensor) -> Tensor:
        """By one dot product per row."""
        row = torch.arange(self.rows.start, self.rows.stop, device=local_target.device)
        entries = Entries(row, local_target)
        found, bias = self.raw_entries(entries), self.head.bias
        if bias is not None:
            found = torch.stack([found, bias[local_target.clamp(min=0)].to(found.dtype)])
        return torch.where(local_target >= 0, found, 0.0)

    def unscaled_logits(self, entries: Entries) -> Tensor:
        head, bias = self.head, self.head.bias
        x = unscaled_logits(
            self.raw_entries(entries),
            logit_scale=head.options.logit_scale,
            softcap=head.options.softcap,
            bias=None if bias is None else bias[entries.column.clamp(min=0)].to(head.acc_dtype),
        )
        return torch.where(entries.column >= 0, x, 0.0)

    def raw_entries(self, entries: Entries) -> Tensor:
        """By dot products, `[e]` in the accumulation dtype; any value where the column is -1."""
        rows, column = entries.row - self.rows.start, entries.column.clamp(min=0)
        head = self.head
        out = head.weight.new_empty(rows.shape, dtype=head.acc_dtype)
        for part in self.parts(entries):
            own = head.matmul_input(head.weight.index_select(0, column[part]))
            tile = self.hidden.index_select(0, rows[part])
            raw = (tile.to(head.acc_dtype) * own.to(head.acc_dtype)).sum(-1)
            if head.low_rank is not None:
                raw += head.low_rank.entries(self.hidden, column[part], rows[part])
            out[part] = raw.to(head.options.logits_dtype)
        return out

    def parts(self, entries: Entries) -> Iterator[slice]:
        """Entries a few at a time, so that their operands stay as small as a chunk."""
        budget = budgets.of(self.head.device.type).gathered_bytes
        return row_chunks(entries.row.shape[0], max(1, budget // (8 * self.hidden.shape[1])))


def head_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    lora: LoRAInput | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    rows: Tensor | None = None,
    compact: bool = False,
    gradient_accumulation_fusion: bool = False,
    saved_bytes: int = 0,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
    invariant_segments: int | None = None,
    logit_bias: LogitBias | None = None,
    disallowed_ids: Ids | None = None,
    may_round: bool = False,
    prefix: str = "",
) -> HeadLogits:
    """Check an output layer and the hidden states that it is given, and resolve the group.

    Under autocast hidden states may be of another dtype than the weight: both are rounded to the
    narrower one, as a linear layer rounds them.

    Args:
        may_round: whether the operation may make all of its GEMMs in a low-precision
            logits_dtype.
        prefix: goes before the arguments' names in errors.

    Raises:
        ValueError: with the argument's name, what was expected and what was given.
    """
    compute_dtype = _check_layer(hidden, weight, bias, lora, prefix)
    check_flag("sequence_parallel", sequence_parallel)
    check_flag("compact", compact)
    check_flag("gradient_accumulation_fusion", gradient_accumulation_fusion)
    check_bytes("saved_bytes", saved_bytes)
    check_logits_dtype("logits_dtype", logits_dtype)
    check_optional_count("chunk_size", chunk_size)
    check_positive(f"{prefix}logit_scale", logit_scale)
    check_optional_positive(f"{prefix}softcap", softcap)
    main_grad = MainGrad.of(weight) if gradient_accumulation_fusion else None
    group = resolve_tp_group(tp_group)
    device = hidden.device
    check_call(weight.shape[0], group, device)
    shard = VocabShard.of(weight.shape[0], group, vocab_size)
    segments = check_segments(shard, invariant_segments)
    if segments is not None and lora is not None:
        raise ValueError(
            f"invariant_segments: expected None with a LoRA, got {invariant_segments!r}: its "
            "low-rank GEMMs are not batch-invariant"
        )
    ranks = group_size(group) if sequence_parallel else 1
    lead = torch.Size((hidden.shape[0] * ranks, *hidden.shape[1:-1]))
    selection = None
    if rows is not None:
        if compact:
            raise ValueError("compact: expected False with rows, which name the rows already")
        rows = check_rows(rows, math.prod(lead))
        selection = RowSelection(
            rows, math.prod(lead), group if ranks > 1 else None, device, tokens=False
        )
        lead = rows.shape
    temperature = check_temperature(temperature, lead, device, name=f"{prefix}temperature")
    accumulated = acc_dtype(compute_dtype)
    a, b = (None, None) if lora is None else lora[:2]
    own = temperature if isinstance(temperature, Tensor) else None
    added = vocab_bias(logit_bias, disallowed_ids, shard, device, accumulated)
    if added is not None:
        bias = added.values if bias is None else bias.to(accumulated) + added.values
    tensors = hidden.reshape(-1, hidden.shape[-1]), weight, bias, a, b, own
    options = HeadOptions(
        shard=shard,
        lead=lead,
        logit_scale=float(logit_scale),
        softcap=softcap,
        temperature=1.0 if isinstance(temperature, Tensor) else float(temperature),
        logits_dtype=torch.float64 if accumulated == torch.float64 else logits_dtype,
        compute_dtype=compute_dtype,
        rounded=may_round and logits_dtype == compute_dtype and lora is None and segments is None,
        backend=backend,
        sequence_parallel=sequence_parallel,
        chunk_size=chunk_size,
        tiling=Tiling.of(math.prod(lead), shard.width, chunk_size, device),
        selection=selection,
        compact=compact,
        segments=segments,
        lora_scale=1.0 if lora is None else float(lora[2]),
        main_grad=main_grad,
        saved=SavedBytes(saved_bytes) if saved_bytes else None,
        disallowed=None if added is None else added.disallowed,
    )
    # A backend that is unavailable is refused here, before any collective.
    backends.select(backend, weight.new_empty(0, 1), invariant=segments is not None)
    return options.bind(*tensors)


def _check_layer(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, lora: LoRAInput | None, prefix: str
) -> torch.dtype:
    """The dtype that operands are rounded to."""
    hidden_name, weight_name = f"{prefix}hidden", f"{prefix}weight"
    check_float_tensor(hidden_name, hidden, min_dim=2)
    check_float_tensor(weight_name, weight, min_dim=2)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{weight_name}: expected shape [V/TP, {hidden.shape[-1]}] for {hidden_name} of shape "
            f"{tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    if bias is not None:
        check_float_tensor(f"{prefix}bias", bias, min_dim=1)
    device_type, dtype = hidden.device.type, hidden.dtype
    autocast = dtype != torch.float64 and autocast_enabled(device_type)
    if autocast and weight.dtype != dtype:
        dtype = min(dtype, weight.dtype, key=lambda each: each.itemsize)
    for name, tensor in ((weight_name, weight), (f"{prefix}bias", bias)):
        if tensor is None:
            continue
        fits = tensor.dtype == hidden.dtype or (autocast and tensor.dtype != torch.float64)
        if not fits or tensor.device != hidden.device:
            raise ValueError(
                f"{name}: expected {hidden_name}'s dtype and device, {hidden.dtype} on "
                f"{hidden.device}, got {tensor.dtype} on {tensor.device}"
            )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{prefix}bias: expected shape [{weight.shape[0]}], got {tuple(bias.shape)}"
        )
    if lora is not None:
        check_lora(lora, hidden, weight, prefix, autocast=autocast)
    return dtype
