"""The output layer as the fused operations see it: opened once, then logits chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_choice, check_flag, check_logits_dtype
from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.consistency import check_call
from mcore_logprobs.fused.lora import LoRA, LoRAInput, LowRank, check_lora
from mcore_logprobs.groups import VocabShard, resolve_tp_group
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels.huge_pages import prefer_huge_pages
from mcore_logprobs.kernels.products import (
    aligned,
    fixed_product,
    operand,
    operand_dtype,
    product,
)
from mcore_logprobs.kernels.reference import finished_logits, row_chunks
from mcore_logprobs.kernels.segments import Segments
from mcore_logprobs.kernels.stats import RowSpec, accumulator_dtype, merge, no_columns
from mcore_logprobs.logits.opening import check_group_tensor, open_segments, row_spec

__all__ = ["Chunk", "Head", "HeadOptions", "HeadTensors", "open_head"]

# Columns a product under invariant_segments, at most and in whole blocks, whatever the tile: the
# shape decides the bits.
_FIXED_COLUMNS = {"cpu": 4096, "other": 8192}


class HeadTensors(NamedTuple):
    """What a head's gradients are of: the last arguments of an autograd function, in this order.

    Attributes:
        hidden: `[n_local, h]`; weight `[v, h]`, bias `[v]`; a LoRA's A `[r, h]` and B `[v, r]`.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, lora: LoRAInput | None
    ) -> HeadTensors:
        return cls(hidden, weight, bias, *(() if lora is None else lora[:2]))

    def save(self, ctx: Any, *others: Tensor | None) -> None:
        """For `saved`, in the backward."""
        ctx.weight = self.weight  # the parameter itself: main_grad hangs on it
        ctx.save_for_backward(*self, *others)

    @classmethod
    def saved(cls, ctx: Any) -> tuple[HeadTensors, tuple[Any, ...]]:
        """(tensors, others) as they were saved."""
        found = ctx.saved_tensors
        count = len(cls._fields)
        return cls(*found[:count])._replace(weight=ctx.weight), found[count:]


@dataclass(frozen=True)
class HeadOptions:
    """A head's options, checked; holds no tensor.

    Attributes:
        spec: how a product becomes a finished logit, and which statistics are wanted.
        segments: the segments that statistics are taken by, or None.
        lora_scale: what a LoRA's product is multiplied by, if there is one.
        rounded: products may be rounded to the weight's dtype: logits_dtype is that.
    """

    shard: VocabShard
    spec: RowSpec
    logits_dtype: torch.dtype
    backend: str
    gradient_accumulation_fusion: bool
    segments: Segments | None = None
    lora_scale: float = 1.0
    rounded: bool = False

    @property
    def group(self) -> ProcessGroup | None:
        return self.shard.group

    def lora(self, tensors: HeadTensors) -> LoRA | None:
        a, b = tensors.lora_a, tensors.lora_b
        return None if a is None or b is None else LoRA(a.detach(), b.detach(), self.lora_scale)


def open_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    logit_scale: float,
    softcap: float | None,
    logits_dtype: torch.dtype,
    tp_group: ProcessGroup | None,
    temperature: float | Tensor,
    vocab_size: int | None,
    backend: str,
    gradient_accumulation_fusion: bool = False,
    invariant_segments: int | None = None,
    lora: LoRAInput | None = None,
    may_round: bool = False,
    prefix: str = "",
    **wanted: bool,
) -> HeadOptions:
    """Check a head against the hidden states that it is given, and resolve its group.

    Args:
        may_round: the operation heeds `HeadOptions.rounded`.
        wanted: the statistics, as flags of `RowSpec`.
        prefix: goes before the arguments' names in errors.

    Raises:
        ValueError: with the argument's name, what was expected and what was given.
    """
    hidden_name, weight_name = f"{prefix}hidden", f"{prefix}weight"
    check_group_tensor(hidden, hidden_name, min_dim=2)
    check_group_tensor(weight, weight_name, min_dim=2)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{weight_name}: expected shape [V/TP, {hidden.shape[-1]}] for {hidden_name} of shape "
            f"{tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    if bias is not None:
        check_group_tensor(bias, f"{prefix}bias", min_dim=1)
    for name, tensor in ((weight_name, weight), (f"{prefix}bias", bias)):
        if tensor is not None and (tensor.dtype, tensor.device) != (hidden.dtype, hidden.device):
            raise ValueError(
                f"{name}: expected {hidden_name}'s dtype and device, {hidden.dtype} on "
                f"{hidden.device}, got {tensor.dtype} on {tensor.device}"
            )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{prefix}bias: expected shape [{weight.shape[0]}], got {tuple(bias.shape)}"
        )
    if lora is not None:
        check_lora(lora, hidden, weight, prefix)
    check_flag("gradient_accumulation_fusion", gradient_accumulation_fusion)
    check_choice("backend", backend, backends.BACKENDS)
    check_logits_dtype("logits_dtype", logits_dtype)
    if gradient_accumulation_fusion and weight.requires_grad:
        _check_main_grad(weight)
    group = resolve_tp_group(tp_group)
    check_call(weight.shape[0], group, weight.device)
    shard = VocabShard.of(weight.shape[0], group, vocab_size)
    if isinstance(temperature, Tensor):  # one a row is the tokens' affair
        is_number = temperature.dim() == 0 and temperature.device.type == "cpu"
        temperature = float(temperature) if is_number else 1.0
    spec = row_spec(
        shard,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=temperature,
        prefix=prefix,
        **wanted,
    )
    segments = open_segments(shard, invariant_segments)
    if segments is not None:  # refused here, not at the first chunk
        backends.select(backend, weight.new_empty(0, 1), segments=segments)
    if segments is not None and lora is not None:
        raise ValueError(
            f"invariant_segments: expected None with a LoRA, got {invariant_segments!r}: its thin "
            "products make no such promise"
        )
    return HeadOptions(
        shard=shard,
        spec=spec,
        logits_dtype=logits_dtype,
        backend=backend,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        segments=segments,
        lora_scale=1.0 if lora is None else float(lora[2]),
        rounded=(may_round and logits_dtype == weight.dtype and lora is None and segments is None),
    )


def _check_main_grad(weight: Any) -> None:
    main_grad = getattr(weight, "main_grad", None)
    if not isinstance(main_grad, Tensor) or main_grad.shape != weight.shape:
        got = None if main_grad is None else tuple(getattr(main_grad, "shape", ()))
        raise ValueError(
            "gradient_accumulation_fusion=True: expected weight.main_grad of shape "
            f"{tuple(weight.shape)}, got {got}"
        )


@dataclass(frozen=True)
class Chunk:
    """One tile-by-block rectangle of raw logits.

    Attributes:
        columns: the block's columns in the shard.
        logits: `[rows, columns]`, in a buffer that the next chunk overwrites unless it is held.
        target: `[rows]` int64, the target's column in the block or -1.
        spec, bias: of the block.
        temperature: `[rows]`, each row's own in place of the spec's, or None.
    """

    columns: slice
    logits: Tensor
    target: Tensor
    spec: RowSpec
    bias: Tensor | None
    temperature: Tensor | None


class Head:
    """Weight, bias, LoRA and options; makes chunks of logits in a buffer of its own.

    Args:
        block_columns: columns a block at most.
    """

    def __init__(self, tensors: HeadTensors, opts: HeadOptions, block_columns: int) -> None:
        self.weight, self.bias, self.opts = tensors.weight.detach(), tensors.bias, opts
        self.wide = accumulator_dtype(self.weight.dtype)
        lora = opts.lora(tensors)
        self.low_rank = None if lora is None else LowRank(lora)
        self._block_columns = block_columns
        self._buffer: Tensor | None = None
        self._block: tuple[slice, Tensor] | None = None

    @cached_property
    def logits_dtype(self) -> torch.dtype:
        """What the logits are rounded to: as asked for, and float64 for a float64 weight."""
        return torch.float64 if self.wide == torch.float64 else self.opts.logits_dtype

    def weight_block(self, columns: slice) -> Tensor:
        """`[columns, h]` of the weight in the operand dtype; the latest block is kept."""
        if self._block is None or self._block[0] != columns:
            self._block = None  # a cast block's memory can serve the next
            block = operand(self.weight[columns], rounded=self.opts.rounded)
            self._block = (columns, block if self.opts.segments is None else aligned(block))
        return self._block[1]

    def chunks(
        self,
        tile: Tensor,
        column: Tensor | None,
        temperature: Tensor | None = None,
        *,
        hold: bool = False,
    ) -> Iterator[Chunk]:
        """The logits of one tile, block by block over the columns that are true vocabulary.

        Args:
            tile: `[rows, h]` in the operand dtype.
            column: `[rows]`, the target's column in the shard or -1; None: no row has one.
            temperature: `[rows]`, each row's own, or None.
            hold: give each block a place of its own, so that all of them last until the next call.
        """
        rows = tile.shape[0]
        if column is None:
            column = _no_target(tile)
        if hold:
            self._reserve(rows * self.opts.spec.valid)
        for columns in self._columns():
            width = columns.stop - columns.start
            local = column - columns.start
            yield Chunk(
                columns=columns,
                logits=self.logits(tile, columns, start=rows * columns.start if hold else 0),
                target=torch.where((local >= 0) & (local < width), local, -1),
                spec=replace(self.opts.spec, valid=width),
                bias=None if self.bias is None else self.bias[columns],
                temperature=temperature,
            )

    def _columns(self) -> Iterator[slice]:
        valid, segments = self.opts.spec.valid, self.opts.segments
        if segments is None:
            return row_chunks(valid, self._block_columns)
        device_type = self.weight.device.type
        block = segments.block(device_type)
        most = _FIXED_COLUMNS["cpu" if device_type == "cpu" else "other"]
        return segments.columns(valid, most // block * block)

    def logits(self, tile: Tensor, columns: slice, *, start: int = 0) -> Tensor:
        """`tile @ weight[columns]^T`, with the LoRA's part, in the buffer from element `start`.

        In logits_dtype.
        """
        weight = self.weight_block(columns)
        fixed = self.opts.segments is not None
        low = self.logits_dtype == tile.dtype != self.wide
        # Tensor cores, low-precision result.
        if low and self.low_rank is None and not fixed:
            return tile @ weight.t()  # pragma: no cover (CUDA, or a CPU with bfloat16 products)
        shape = (tile.shape[0], weight.shape[0])
        size = shape[0] * shape[1]
        out = self._reserve(start + size)[start : start + size].view(shape)
        (fixed_product if fixed else product)(tile, weight.t(), out)
        if self.low_rank is not None:
            self.low_rank.add_logits(tile, columns, out)
        # An explicit low-precision logits_dtype rounds, as a head of that dtype would.
        return out.to(self.logits_dtype)

    def tile_logits(self, tile: Tensor) -> Tensor:
        """A tile's raw logits over all of the rank's columns, `[rows, V/TP]`, new; -inf past valid.

        float32 (float64 for a float64 weight), rounded to logits_dtype first.
        """
        valid = self.opts.spec.valid
        shape = (tile.shape[0], self.weight.shape[0])
        out = prefer_huge_pages(self.weight.new_empty(shape, dtype=self.wide))
        for columns in row_chunks(valid, self._block_columns):
            if self.logits_dtype == self.wide:
                product(tile, self.weight_block(columns).t(), out[:, columns])
                if self.low_rank is not None:
                    self.low_rank.add_logits(tile, columns, out[:, columns])
            else:
                out[:, columns] = self.logits(tile, columns)
        out[:, valid:] = -torch.inf
        return out

    def tile_chunks(self, logits: Tensor) -> Iterator[Chunk]:
        """What `tile_logits` gave, or its gradient, block by block as `chunks` does; no target."""
        none = _no_target(logits)
        for columns in row_chunks(self.opts.spec.valid, self._block_columns):
            yield Chunk(
                columns=columns,
                logits=logits[:, columns],
                target=none,
                spec=replace(self.opts.spec, valid=columns.stop - columns.start),
                bias=None if self.bias is None else self.bias[columns],
                temperature=None,
            )

    def _reserve(self, size: int) -> Tensor:
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = None
            self._buffer = prefer_huge_pages(self.weight.new_empty(size, dtype=self.wide))
        return self._buffer

    def backend(self, logits: Tensor) -> backends.Backend:
        return backends.select(self.opts.backend, logits, segments=self.opts.segments)

    def tile_stats(self, tile: Tensor, column: Tensor, temperature: Tensor | None = None) -> Tensor:
        """Row statistics of one tile over this rank's columns, as `merged` gives them."""
        spec = self.opts.spec
        threshold = self.target_threshold(tile, column, temperature) if spec.rank else None
        chunks = self.chunks(tile, column, temperature)
        return self.merged(tile, [(c.columns, self.chunk_stats(c, threshold)) for c in chunks])

    def no_columns(self, tile: Tensor) -> Tensor:
        """The row statistics of no columns at all, as `merged` gives them."""
        return self.merged(tile, [])

    def chunk_stats(self, chunk: Chunk, threshold: Tensor | None) -> Tensor:
        """`kernels.reference.row_stats` of a chunk; with segments its `block_stats`."""
        segments, backend = self.opts.segments, self.backend(chunk.logits)
        row_stats = backend.row_stats
        if segments is not None:
            row_stats = partial(backend.block_stats, block=segments.block(chunk.logits.device.type))
        return row_stats(
            chunk.logits,
            chunk.target,
            chunk.spec,
            bias=chunk.bias,
            threshold=threshold,
            temperature=chunk.temperature,
            chunk_size=backends.default_chunk_size(chunk.logits.shape[1], chunk.logits.device),
        )

    def merged(self, tile: Tensor, parts: list[tuple[slice, Tensor]]) -> Tensor:
        """Chunks' columns and `chunk_stats` to `[k, rows]`; with segments to `[g/TP, k, rows]`.

        Once for all: a merge is a dozen small launches for a few numbers a row and chunk.
        """
        spec, segments = self.opts.spec, self.opts.segments
        none = no_columns(spec, tile.shape[0], like=self.weight)
        if segments is None:
            return merge(torch.stack([none, *(stats for _, stats in parts)]), spec)
        found = [[none.unsqueeze(0)] for _ in range(segments.local)]
        for columns, stats in parts:
            found[columns.start // segments.width].append(stats)
        return torch.stack([merge(torch.cat(own), spec, ordered=True) for own in found])

    def gradient_buffer(self, logits: Tensor) -> Tensor:
        """Where dLogits of a chunk go, in the operand dtype: over the logits if they fit there."""
        weight, rounded = self.weight, self.opts.rounded
        dtype = operand_dtype(weight.dtype, weight.device, rounded=rounded)
        return logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)

    def chunk_grad(self, chunk: Chunk, shift: Tensor, coef: Tensor) -> Tensor:
        """dLogits of a chunk `[rows, columns]`, as `kernels.reference.grad_logits`."""
        logits, out = chunk.logits, self.gradient_buffer(chunk.logits)
        self.backend(logits).grad_logits(
            logits,
            chunk.target,
            shift,
            coef,
            chunk.spec,
            bias=chunk.bias,
            temperature=chunk.temperature,
            out=out,
            chunk_size=backends.default_chunk_size(logits.shape[1], logits.device),
        )
        return out

    def entry_logits(self, tile: Tensor, column: Tensor, rows: Tensor | None = None) -> Tensor:
        """Raw logits of single entries, `[e]`, by dot products.

        Args:
            column: `[e]`; -1 gives any value.
            rows: `[e]`, each entry's row in the tile; None: one entry a row, in its place.
        """
        hidden = tile if rows is None else tile[rows]
        own = operand(self.weight.index_select(0, column.clamp(min=0)))
        raw = (hidden.to(self.wide) * own.to(self.wide)).sum(-1)
        if self.low_rank is not None:
            raw = raw + self.low_rank.entries(tile, column, rows)
        return raw.to(self.logits_dtype).to(self.wide)

    def target_threshold(self, tile: Tensor, column: Tensor, temperature: Tensor | None) -> Tensor:
        """Each row's target logit on every rank, `[rows]`: one dot product a row, one all-reduce.

        Raw, or z where there is a bias, as `kernels.reference.row_stats` wants it. Ties are ties
        to the rounding of a dot product.
        """
        here = column >= 0
        raw = self.entry_logits(tile, column)
        if self.bias is not None:
            own_bias = self.bias[column.clamp(min=0)].to(self.wide)
            raw = finished_logits(raw, self.opts.spec, own_bias, temperature)
        return all_reduce_sum(torch.where(here, raw, 0.0), self.opts.group)


def _no_target(rows: Tensor) -> Tensor:
    """-1 for each row of a tile or of its logits."""
    return torch.full(rows.shape[:1], -1, dtype=torch.int64, device=rows.device)
