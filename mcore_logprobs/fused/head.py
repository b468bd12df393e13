"""The output layer as the fused operations see it: checked arguments, and logits chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import (
    check_chunk_size,
    check_flag,
    check_fraction,
    check_optional_positive,
    check_positive,
)
from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.groups import VocabShard, group_size, resolve_tp_group
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels.huge_pages import prefer_huge_pages
from mcore_logprobs.kernels.products import operand, operand_dtype, product
from mcore_logprobs.kernels.reference import row_chunks
from mcore_logprobs.kernels.stats import RowSpec, merge
from mcore_logprobs.logits.inputs import (
    LocalTarget,
    check_group_tensor,
    check_target,
    localize_target,
)

__all__ = ["Chunk", "Head", "LinearOptions", "open_linear"]


@dataclass(frozen=True)
class LinearOptions:
    """The options of a fused call, checked.

    Attributes:
        tile_rows, block_columns: the largest chunk; see `tile_shape`.
    """

    shard: VocabShard
    spec: RowSpec
    label_smoothing: float
    sequence_parallel: bool
    logits_dtype: torch.dtype
    backend: str
    tile_rows: int
    block_columns: int
    gradient_accumulation_fusion: bool

    @property
    def group(self) -> ProcessGroup | None:
        return self.shard.group


@dataclass(frozen=True)
class Chunk:
    """One tile-by-block rectangle of raw logits.

    Attributes:
        columns: the block's columns in the shard.
        logits: `[rows, columns]`, in a buffer that the next chunk overwrites unless it is held.
        target: `[rows]` int64, the target's column in the block or -1.
        spec, bias: of the block.
    """

    columns: slice
    logits: Tensor
    target: Tensor
    spec: RowSpec
    bias: Tensor | None


class Head:
    """Weight, bias and options; makes chunks of logits in a buffer of its own."""

    def __init__(self, weight: Tensor, bias: Tensor | None, opts: LinearOptions) -> None:
        self.weight, self.bias, self.opts = weight.detach(), bias, opts
        self._buffer: Tensor | None = None
        self._block: tuple[slice, Tensor] | None = None

    @cached_property
    def wide(self) -> torch.dtype:
        """float32, or float64 for a float64 weight."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @cached_property
    def logits_dtype(self) -> torch.dtype:
        """What the logits are rounded to: as asked for, and float64 for a float64 weight."""
        return torch.float64 if self.wide == torch.float64 else self.opts.logits_dtype

    def weight_block(self, columns: slice) -> Tensor:
        """`[columns, h]` of the weight in the operand dtype; the latest block is kept."""
        if self._block is None or self._block[0] != columns:
            self._block = None  # a cast block's memory can serve the next
            self._block = (columns, operand(self.weight[columns]))
        return self._block[1]

    def chunks(self, tile: Tensor, column: Tensor, *, hold: bool = False) -> Iterator[Chunk]:
        """The logits of one tile, block by block over the columns that are true vocabulary.

        Args:
            tile: `[rows, h]` in the operand dtype.
            column: `[rows]`, the target's column in the shard or -1.
            hold: give each block a place of its own, so that all of them last until the next call.
        """
        rows = tile.shape[0]
        if hold:
            self._reserve(rows * self.opts.spec.valid)
        for columns in row_chunks(self.opts.spec.valid, self.opts.block_columns):
            width = columns.stop - columns.start
            local = column - columns.start
            yield Chunk(
                columns=columns,
                logits=self.logits(tile, columns, start=rows * columns.start if hold else 0),
                target=torch.where((local >= 0) & (local < width), local, -1),
                spec=replace(self.opts.spec, valid=width),
                bias=None if self.bias is None else self.bias[columns],
            )

    def logits(self, tile: Tensor, columns: slice, *, start: int = 0) -> Tensor:
        """`tile @ weight[columns]^T` in logits_dtype, in the buffer from element `start`."""
        weight = self.weight_block(columns)
        if self.logits_dtype == tile.dtype != self.wide:  # tensor cores, low-precision result
            return tile @ weight.t()
        shape = (tile.shape[0], weight.shape[0])
        size = shape[0] * shape[1]
        out = self._reserve(start + size)[start : start + size].view(shape)
        product(tile, weight.t(), out)
        # An explicit low-precision logits_dtype rounds, as a head of that dtype would.
        return out.to(self.logits_dtype)

    def _reserve(self, size: int) -> Tensor:
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = None
            self._buffer = prefer_huge_pages(self.weight.new_empty(size, dtype=self.wide))
        return self._buffer

    def backend(self, logits: Tensor) -> backends.Backend:
        return backends.select(self.opts.backend, logits)

    def tile_stats(self, tile: Tensor, column: Tensor) -> Tensor:
        """Row statistics of one tile over this rank's columns, `[k, rows]`."""
        spec = self.opts.spec
        threshold = self.target_threshold(tile, column) if spec.rank else None
        # A few numbers a row and block: merged once, as a merge is a dozen small launches.
        parts = [self.no_columns(tile)]
        parts += [self.chunk_stats(chunk, threshold) for chunk in self.chunks(tile, column)]
        return merge(torch.stack(parts), spec)

    def no_columns(self, tile: Tensor) -> Tensor:
        """The row statistics of no columns at all, `[k, rows]`, to merge others into."""
        stats = tile.new_zeros(len(self.opts.spec.fields), tile.shape[0], dtype=self.wide)
        stats[0] = -torch.inf
        return stats

    def chunk_stats(self, chunk: Chunk, threshold: Tensor | None) -> Tensor:
        """`kernels.reference.row_stats` of a chunk."""
        return self.backend(chunk.logits).row_stats(
            chunk.logits,
            chunk.target,
            chunk.spec,
            bias=chunk.bias,
            threshold=threshold,
            chunk_size=backends.default_chunk_size(chunk.logits.shape[1], chunk.logits.device),
        )

    def chunk_grad(self, chunk: Chunk, shift: Tensor, coef: Tensor) -> Tensor:
        """dLogits of a chunk `[rows, columns]` in the operand dtype, over the logits if it fits."""
        logits = chunk.logits
        dtype = operand_dtype(self.weight.dtype, self.weight.device)
        out = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
        self.backend(logits).grad_logits(
            logits,
            chunk.target,
            shift,
            coef,
            chunk.spec,
            bias=chunk.bias,
            out=out,
            chunk_size=backends.default_chunk_size(logits.shape[1], logits.device),
        )
        return out

    def target_threshold(self, tile: Tensor, column: Tensor) -> Tensor:
        """Each row's target logit on every rank, `[rows]`: one dot product a row, one all-reduce.

        Raw, or z where there is a bias, as `kernels.reference.row_stats` wants it. Ties are
        ties to the rounding of a dot product.
        """
        here = column >= 0
        rows = operand(self.weight.index_select(0, column.clamp(min=0)))
        raw = (tile.to(self.wide) * rows.to(self.wide)).sum(-1)
        raw = raw.to(self.logits_dtype).to(self.wide)
        if self.bias is not None:
            raw = self.finish_target(raw, self.bias[column.clamp(min=0)].to(self.wide))
        return all_reduce_sum(torch.where(here, raw, 0.0), self.opts.group)

    def finish_target(self, raw: Tensor, bias: Tensor) -> Tensor:
        """z of one raw logit a row, `[rows]`, with that logit's own bias."""
        spec = self.opts.spec
        z = raw * spec.logit_scale
        if spec.softcap is not None:
            z = torch.tanh(raw * (spec.logit_scale / spec.softcap)) * spec.softcap
        return (z + bias) / spec.temperature


# Bytes of one float32 chunk of logits.
_CHUNK_BYTES = {"cpu": 32 << 20, "other": 256 << 20}
# Rows a tile: enough that a product of [rows, h] and [h, columns] runs at full speed, and that
# reading and writing a block of the weight's gradient once a tile costs little beside it.
_TILE_ROWS = {"cpu": 2048, "other": 8192}
_MAX_BLOCK = {"cpu": 4096, "other": 1 << 20}


def tile_shape(
    rows: int, columns: int, chunk_size: int | None, device: torch.device
) -> tuple[int, int]:
    """(rows a tile, columns a block) for `rows` rows and `columns` columns on a rank."""
    kind = "cpu" if device.type == "cpu" else "other"
    tile = max(1, min(rows, chunk_size or _TILE_ROWS[kind]))
    block = _CHUNK_BYTES[kind] // (4 * tile)
    if chunk_size is None:
        block = min(block, _MAX_BLOCK[kind])
    return tile, max(1, min(columns, max(block, 256)))


def open_linear(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    entropy: bool,
    target_rank: bool,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    sequence_parallel: bool,
    logits_dtype: torch.dtype,
    gradient_accumulation_fusion: bool,
    tp_group: ProcessGroup | None,
    temperature: float,
    vocab_size: int | None,
    ignore_index: int | None,
    label_smoothing: float,
    chunk_size: int | None,
    backend: str,
) -> tuple[LinearOptions, LocalTarget]:
    """Check the arguments of a fused call, before any collective.

    Returns:
        The options, and the local targets flat, `[n]`.

    Raises:
        ValueError: anything that is off, with what was expected and what came.
    """
    check_group_tensor(hidden, "hidden", min_dim=2)
    check_group_tensor(weight, "weight", min_dim=2)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight: expected shape [V/TP, {hidden.shape[-1]}] for hidden of shape "
            f"{tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.dtype, tensor.device) != (hidden.dtype, hidden.device):
            raise ValueError(
                f"{name}: expected hidden's dtype and device, {hidden.dtype} on {hidden.device}, "
                f"got {tensor.dtype} on {tensor.device}"
            )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected shape [{weight.shape[0]}], got {tuple(bias.shape)}")
    for name, flag in (
        ("entropy", entropy),
        ("target_rank", target_rank),
        ("sequence_parallel", sequence_parallel),
        ("gradient_accumulation_fusion", gradient_accumulation_fusion),
    ):
        check_flag(name, flag)
    check_positive("logit_scale", logit_scale)
    check_positive("temperature", temperature)
    check_optional_positive("softcap", softcap)
    check_fraction("label_smoothing", label_smoothing)
    check_chunk_size(chunk_size)
    if backend not in backends.BACKENDS:
        raise ValueError(f"backend: expected one of {backends.BACKENDS}, got {backend!r}")
    if logits_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"logits_dtype: expected torch.float32, bfloat16 or float16, got {logits_dtype!r}"
        )
    if gradient_accumulation_fusion and weight.requires_grad:
        _check_main_grad(weight)

    group = resolve_tp_group(tp_group)
    shard = VocabShard.of(weight.shape[0], group, vocab_size)
    ranks = group_size(group) if sequence_parallel else 1
    lead = torch.Size((hidden.shape[0] * ranks, *hidden.shape[1:-1]))
    flat = check_target(target, lead, hidden.device).reshape(-1)
    tile_rows, block_columns = tile_shape(
        math.prod(lead), weight.shape[0], chunk_size, hidden.device
    )
    opts = LinearOptions(
        shard=shard,
        spec=RowSpec(
            valid=shard.valid_width,
            logit_scale=logit_scale,
            softcap=softcap,
            temperature=temperature,
            entropy=entropy,
            rank=target_rank,
            smoothing=label_smoothing > 0.0,
        ),
        label_smoothing=label_smoothing,
        sequence_parallel=sequence_parallel,
        logits_dtype=logits_dtype,
        backend=backend,
        tile_rows=tile_rows,
        block_columns=block_columns,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
    )
    return opts, localize_target(flat, shard, ignore_index)


def _check_main_grad(weight: Any) -> None:
    main_grad = getattr(weight, "main_grad", None)
    if not isinstance(main_grad, Tensor) or main_grad.shape != weight.shape:
        got = None if main_grad is None else tuple(getattr(main_grad, "shape", ()))
        raise ValueError(
            "gradient_accumulation_fusion=True: expected weight.main_grad of shape "
            f"{tuple(weight.shape)}, got {got}"
        )
