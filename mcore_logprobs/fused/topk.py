"""The largest logits of each row, from hidden states: whole rows of a rank, a tile at a time.

A top-k of a whole row costs little more than one pass over it; of each block of columns, most of
what the block's product does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.autograd import once_differentiable
from mcore_logprobs.fused.entries import entry_gradients, grid_entries
from mcore_logprobs.fused.head import Head, HeadOptions, HeadTensors, open_head
from mcore_logprobs.fused.lora import LoRAInput
from mcore_logprobs.fused.tokens import (
    NO_TARGET,
    HiddenTiles,
    Tiling,
    open_tokens,
    whole_row_tiling,
)
from mcore_logprobs.kernels.backend import default_chunk_size
from mcore_logprobs.kernels.reference import finished_logits, row_chunks
from mcore_logprobs.logits.topk import check_k, gather_pairs, stable_topk

__all__ = ["linear_topk"]


@dataclass(frozen=True)
class _Options:
    head: HeadOptions
    tiling: Tiling
    k: int
    temperature: Tensor | None


class _LinearTopK(torch.autograd.Function):
    """(values, ids), each `[n, k]`."""

    @staticmethod
    def forward(ctx: Any, opts: _Options, *inputs: Any) -> tuple[Tensor, Tensor]:
        tensors, shard = HeadTensors(*inputs), opts.head.shard
        tiles = HiddenTiles(tensors.hidden, opts.tiling)
        temperature = tiles.walk_optional(opts.temperature)
        temperature = None if temperature is None else temperature.unsqueeze(-1)
        head = Head(tensors, opts.head, opts.tiling.block_columns)
        spec, width = opts.head.spec, min(opts.k, shard.width)
        valid, found = spec.valid, min(width, spec.valid)
        bias = None if head.bias is None else head.bias[:valid]
        # A rank with less true vocabulary than that pads with -inf. Such ranks come last, so that
        # in the stable sort below the padding comes after every true column.
        shape = (tiles.count, width)
        values = tensors.hidden.new_full(shape, -torch.inf, dtype=head.wide)
        columns = tensors.hidden.new_zeros(shape, dtype=torch.int64)
        for tile in tiles:
            raw, own = head.tile_logits(tile.hidden)[:, :valid], tile.of(temperature)
            for part in row_chunks(len(raw), default_chunk_size(2 * valid, raw.device)):
                z = finished_logits(raw[part], spec, bias, None if own is None else own[part])
                rows = slice(tile.rows.start + part.start, tile.rows.start + part.stop)
                # By column, hence by global id after the gather: the sort by value is stable.
                columns[rows, :found] = stable_topk(z, found).sort(-1).values
                values[rows, :found] = z.gather(-1, columns[rows, :found])
            del raw, z  # z may be a view of it
        values, ids = gather_pairs(values, columns + shard.start, shard.group)
        order = values.sort(dim=-1, descending=True, stable=True).indices[:, : opts.k]
        values, ids = values.gather(-1, order), ids.gather(-1, order)
        own = (ids >= shard.start) & (ids < shard.end)
        ctx.opts = opts
        tensors.save(ctx, torch.where(own, ids - shard.start, -1))
        ids = tiles.restore(ids)
        ctx.mark_non_differentiable(ids)
        return tiles.restore(values), ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, (column,) = HeadTensors.saved(ctx)
        opts: _Options = ctx.opts
        tiles = HiddenTiles(tensors.hidden, opts.tiling)
        gradients = entry_gradients(
            tensors,
            grid_entries(column, tiles),
            tiles.walk(grads[0]).reshape(-1),
            tiles.walk_optional(opts.temperature),
            opts.head,
            tiles,
            needs=ctx.needs_input_grad[1:],
        )
        return (None, *gradients)


def linear_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    lora: LoRAInput | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    compact: bool = False,
    gradient_accumulation_fusion: bool = False,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`vocab_parallel_topk` of a head's logits without ever holding them.

    The order is by value, descending, then by id, ascending. Finished logits are compared: two that
    the temperature rounds to one value count as equal.

    Shape:
        hidden, weight, bias, lora: as in `linear_token_stats`.
        mask: bool `[s, b]` or `[n]`, the whole sequence; False rows give value 0 and id 0, and no
            gradient.
        Returns values float32 `[s, b, k]` or `[n, k]` (float64 for float64 operands) and ids int64,
        global; the same on every TP rank. Values are differentiable.

    Args:
        k: 1 to vocab_size; columns at or past vocab_size are never chosen.
        compact: compute only rows that the mask keeps; the same results. One host sync.
        chunk_size: rows a tile, which spans all of a rank's columns, as in `linear_map`.
        the others: as in `linear_token_stats`.

    Cost: one matrix product, and a top-k of each tile; backward a dot product an entry, see
    `linear_gather`.

    Collectives: forward one all-gather over TP of min(k, V/TP) pairs (value, id) a row; backward,
    and under sequence parallelism, those of `linear_token_stats`.

    Memory: a tile of logits and some rows' copies; k pairs a row are all that is kept of it. Saved
    for backward: the inputs and the ids.

    Raises:
        ValueError: before any collective; k out of range, compact without a mask; else as in
            `linear_token_stats`.
    """
    head = open_head(
        hidden,
        weight,
        bias,
        logit_scale=logit_scale,
        softcap=softcap,
        logits_dtype=logits_dtype,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        tp_group=tp_group,
        lora=lora,
        temperature=temperature,
        vocab_size=vocab_size,
        backend=backend,
    )
    check_k(k, head.shard)
    tokens = open_tokens(
        hidden,
        NO_TARGET,
        head.shard,
        sequence_parallel=sequence_parallel,
        chunk_size=chunk_size,
        mask=mask,
        compact=compact,
        temperature=temperature,
    )
    tiling = whole_row_tiling(tokens, head.shard, chunk_size)
    opts = _Options(head, tiling, k, tokens.temperature)
    tensors = HeadTensors.of(tokens.hidden, weight, bias, lora)
    values, ids = _LinearTopK.apply(opts, *tensors)
    if mask is not None:
        keep = tokens.target.keep.unsqueeze(-1)
        values, ids = torch.where(keep, values, 0.0), torch.where(keep, ids, 0)
    return tokens.restore(values, 0.0), tokens.restore(ids, 0)
