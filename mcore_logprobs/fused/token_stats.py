"""The fused path: hidden states and the output layer's weight to per-token statistics.

The logits exist one chunk at a time, forward and backward; backward recomputes them:

    for each tile of rows, for each block of columns:
        forward    chunk = tile @ weight[block]^T          -> statistics, merged over the blocks
        backward   chunk again -> dLogits, in its place    -> dWeight[block], dHidden[tile]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.autograd import once_differentiable
from mcore_logprobs.checks import check_flag, check_fraction
from mcore_logprobs.fused.gradients import HeadGradients
from mcore_logprobs.fused.head import Head, HeadOptions, HeadTensors, open_head
from mcore_logprobs.fused.lora import LoRAInput
from mcore_logprobs.fused.tokens import HiddenTiles, Tiling, open_tokens
from mcore_logprobs.kernels.stats import (
    RowNorms,
    RowResults,
    gradient_coefficients,
    gradient_spec,
)
from mcore_logprobs.logits.opening import LocalTarget
from mcore_logprobs.logits.rows import finish_shards
from mcore_logprobs.logits.token_stats import TokenStats

__all__ = ["linear_token_stats"]


@dataclass(frozen=True)
class _Options:
    head: HeadOptions
    tiling: Tiling
    label_smoothing: float
    temperature: Tensor | None


class _LinearTokenStats(torch.autograd.Function):
    """A RowResults of `[n]` tensors."""

    @staticmethod
    def forward(ctx: Any, local: LocalTarget, opts: _Options, *inputs: Any) -> tuple[Any, ...]:
        tensors = HeadTensors(*inputs)
        tiles = HiddenTiles(tensors.hidden, opts.tiling, rounded=opts.head.rounded)
        column, keep = tiles.walk(local.column), tiles.walk(local.keep)
        head = Head(tensors, opts.head, opts.tiling.block_columns)
        temperature = tiles.walk_optional(opts.temperature)
        parts = [
            head.tile_stats(tile.hidden, column[tile.rows], tile.of(temperature)) for tile in tiles
        ]
        stats = torch.cat(parts, -1) if parts else head.no_columns(tensors.hidden[:0])
        done, _ = finish_shards(
            stats, opts.head.spec, opts.head.group, label_smoothing=opts.label_smoothing
        )
        ctx.opts = opts
        tensors.save(ctx, column, keep, *done.norms)
        ctx.set_materialize_grads(False)
        results = done.blanked(keep).map(tiles.restore)
        if results.target_rank is not None:
            ctx.mark_non_differentiable(results.target_rank)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        tensors, (column, keep, *saved) = HeadTensors.saved(ctx)
        norms, opts = RowNorms(*saved), ctx.opts
        tiles = HiddenTiles(tensors.hidden, opts.tiling, rounded=opts.head.rounded)
        upstream = RowResults(*grads).map(tiles.walk)
        spec = gradient_spec(opts.head.spec, upstream)
        coef = gradient_coefficients(
            upstream, norms, spec, keep=keep, label_smoothing=opts.label_smoothing
        )
        gradients = HeadGradients(tensors, tiles, opts.head, needs=ctx.needs_input_grad[2:])
        head = Head(tensors, replace(opts.head, spec=spec), opts.tiling.block_columns)
        temperature = tiles.walk_optional(opts.temperature)
        for tile in tiles:
            top, row_coef = norms.top[tile.rows], coef[:, tile.rows]
            for chunk in head.chunks(tile.hidden, column[tile.rows], tile.of(temperature)):
                dlogits_of = partial(head.chunk_grad, shift=top, coef=row_coef)
                gradients.add_chunk(head, tile, chunk, dlogits_of)
            gradients.end_tile(tile)
        return (None, None, *gradients.finish())


def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    entropy: bool = False,
    target_rank: bool = False,
    sum_pi_squared: bool = False,
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
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    chunk_size: int | None = None,
    backend: str = "auto",
    invariant_segments: int | None = None,
) -> TokenStats:
    """Log-probabilities, entropy and rank of a head's targets without ever holding its logits.

    The logits are `hidden @ weight^T`, plus a LoRA's part, times logit_scale, through the softcap,
    plus bias, over the temperature, and masked past vocab_size: in this order.

    Shape:
        hidden: `[s, b, h]` (`[s/TP, b, h]` under sequence parallelism) or `[n, h]` (`[n/TP, h]`);
            float16, bfloat16, float32 or float64. The same on every TP rank without sequence
            parallelism.
        weight: `[V/TP, h]`, this rank's rows of the output layer, in hidden's dtype.
        target: `[s, b]` or `[n]`, integers, global ids or ignore_index; the whole sequence on every
            TP rank also under sequence parallelism.
        bias: `[V/TP]` or None.
        lora: None, or (A `[r, h]`, B `[V/TP, r]`, scale) in hidden's dtype: the raw logits get
            `scale * (hidden @ A^T) @ B^T` added before logit_scale. A is whole and the same on
            every TP rank, B is this rank's rows, as the weight's are.
        Returns TokenStats of `[s, b]` or `[n]` tensors, the same on every TP rank.

    Args:
        entropy, target_rank, sum_pi_squared, tp_group, temperature, vocab_size, ignore_index,
            label_smoothing, backend: as in `vocab_parallel_token_stats`. The rank's threshold is a
            dot product: columns within its rounding of the target count either way.
        logits_dtype: what the products are rounded to. float32 (the default) also for bfloat16
            operands: the rounding of the logits is the main source of mismatch between trainer and
            rollout engine. torch.bfloat16 gives what a bfloat16 head gives; on a CPU with
            instructions for them all products of a bfloat16 head are then bfloat16 ones, and each
            chunk's part of a gradient is rounded once before it is added in float32.
        compact: compute only rows whose target is not ignore_index; the same results, and prompt
            and padding tokens cost no product. One host sync.
        gradient_accumulation_fusion: add the weight's gradient to `weight.main_grad` in place, as
            Megatron's linear layers do (`grad_added_to_main_grad` and `zero_out_wgrad` honoured).
        chunk_size: rows a tile; None: 2048 on a CPU and 8192 on a GPU. The block of columns follows
            from the budget of a chunk of logits, 32 MiB on a CPU and 256 MiB on a GPU.
        invariant_segments: g: values are the same bits for every TP size that divides g, every
            chunk_size and whatever other rows are in the call, as in `vocab_parallel_token_stats`;
            products are made in tiles of one fixed shape. The gradients of weight, bias and hidden
            are the same bits at every such TP size for the same rows in the same order and the same
            chunk_size (under sequence parallelism with one tile). dHidden then is not reduced as it
            comes: each rank sends g/TP times what a reduce-scatter does, keeps g/TP float32 copies
            of a tile of it, and waits.

    Which way the work is cut: tiles of rows outside, blocks of columns inside. Up to one tile of
    rows each block of dWeight is one product, written once, and dHidden is added up in float32 over
    the blocks; each further tile reads and writes dWeight in float32 once more, which 2048 (8192)
    rows of products outweigh.

    Gradients: hidden's and weight's (and bias's), each in its own dtype, accumulated in float32;
    an input that does not require one skips its product (a frozen weight under a LoRA: no dWeight).
    dHidden is summed over TP, and so is the gradient of a LoRA's A: every rank gets the whole of
    it. That of B is of this rank's rows.

    Collectives: forward one all-gather of `[k, n]` float32 over TP, with the rank one all-reduce of
    `[rows]` a tile more; backward one all-reduce of dHidden a tile (in float32, while the next tile
    is computed), with sequence parallelism one reduce-scatter; sequence parallelism gathers each
    tile of hidden, forward and backward, one ahead of the products. Where a LoRA's A requires a
    gradient, one all-reduce of `[r, h]` float32 at the end of the backward.

    Memory: a chunk of logits and, where operands are bfloat16, its gradient; the gradients; for a
    bfloat16 weight without main_grad and more than one tile, dWeight in float32. Saved for
    backward: the inputs and a few numbers a row.

    Raises:
        ValueError: before any collective; see `vocab_parallel_token_stats`.
    """
    check_fraction("label_smoothing", label_smoothing)
    check_flag("entropy", entropy)
    check_flag("target_rank", target_rank)
    check_flag("sum_pi_squared", sum_pi_squared)
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
        entropy=entropy,
        rank=target_rank,
        smoothing=label_smoothing > 0.0,
        sum_pi_squared=sum_pi_squared,
        invariant_segments=invariant_segments,
        may_round=True,
    )
    tokens = open_tokens(
        hidden,
        target,
        head.shard,
        sequence_parallel=sequence_parallel,
        chunk_size=chunk_size,
        ignore_index=ignore_index,
        compact=compact,
        temperature=temperature,
    )
    opts = _Options(head, tokens.tiling, label_smoothing, tokens.temperature)
    tensors = HeadTensors.of(tokens.hidden, weight, bias, lora)
    results = _LinearTokenStats.apply(tokens.target, opts, *tensors)
    return tokens.stats(RowResults(*results))
