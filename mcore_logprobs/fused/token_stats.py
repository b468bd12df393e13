"""The fused path: hidden states and the output layer's weight to per-token statistics.

The logits exist one chunk at a time, forward and backward; backward recomputes them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_flag
from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.fused.compaction import Compaction
from mcore_logprobs.fused.head import Chunk, Head, LinearOptions, open_linear
from mcore_logprobs.fused.tiles import HiddenGradient, HiddenTiles, WeightGradient
from mcore_logprobs.kernels.products import add_product, product
from mcore_logprobs.kernels.stats import finish, merge
from mcore_logprobs.logits.inputs import LocalTarget
from mcore_logprobs.logits.token_stats import TokenStats, blank_ignored, gradient_coefficients

__all__ = ["HeadGradients", "linear_token_stats"]


class HeadGradients:
    """The three gradients of the output layer, as dLogits come chunk by chunk.

    Args:
        hidden: `[n_local, h]`; weight `[v, h]`; bias `[v]` or None.
        needs: which of the three are wanted; an unwanted one costs no product.
        main_grad: where dWeight is added, or None.
        wide: leave the gradients in float32 (float64 for float64).
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tiles: HiddenTiles,
        opts: LinearOptions,
        *,
        needs: tuple[bool, bool, bool],
        main_grad: Tensor | None = None,
        wide: bool = False,
    ) -> None:
        self.hidden = self.weight = self.bias = None
        self._wide = wide
        if needs[0]:
            self.hidden = HiddenGradient(
                hidden, opts.group, tiles, scatter=opts.sequence_parallel, wide=wide
            )
        if needs[1]:
            self.weight = WeightGradient(
                weight,
                main_grad=main_grad,
                tiles=len(tiles.local),
                valid=opts.spec.valid,
                wide=wide,
            )
        if needs[2] and bias is not None:
            self.bias = torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))
        self._bias_like = bias
        self._tile: Tensor | None = None

    def add(
        self, number: int, tile: Tensor, columns: slice, weight: Tensor, dlogits: Tensor
    ) -> None:
        """One chunk's products: dWeight and dHidden.

        Args:
            tile: `[rows, h]`, weight: `[columns, h]`, dlogits: `[rows, columns]`; operand dtype.
        """
        if self.weight is not None:
            self.weight.add(number == 0, columns, dlogits, tile)
        if self.hidden is not None:
            if self._tile is None:
                wide = torch.promote_types(tile.dtype, torch.float32)
                self._tile = torch.empty_like(tile, dtype=wide)
                product(dlogits, weight, self._tile)
            else:
                add_product(dlogits, weight, self._tile)

    def add_bias(self, columns: slice, dz: Tensor, factor: float) -> None:
        """Add `factor * sum over rows of dz`."""
        if self.bias is not None:
            self.bias[columns] += dz.sum(0, dtype=self.bias.dtype) * factor

    def end_tile(self, number: int, tile: Tensor) -> None:
        """All of tile `number`'s chunks were added: its dHidden can be reduced."""
        if self.hidden is None:
            return
        if self._tile is None:  # no true vocabulary on this rank
            self._tile = torch.zeros_like(
                tile, dtype=torch.promote_types(tile.dtype, torch.float32)
            )
        self.hidden.put(number, self._tile)
        self._tile = None

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dHidden, dWeight, dBias), None where unwanted or gone into main_grad."""
        bias = None
        if self.bias is not None and self._bias_like is not None:
            bias = self.bias if self._wide else self.bias.to(self._bias_like.dtype)
        return (
            None if self.hidden is None else self.hidden.finish(),
            None if self.weight is None else self.weight.finish(),
            bias,
        )


def add_chunk_gradient(
    gradients: HeadGradients,
    head: Head,
    number: int,
    tile: Tensor,
    chunk: Chunk,
    shift: Tensor,
    coef: Tensor,
) -> None:
    """dLogits of a chunk from its rows' coefficients, and from them the head's gradients.

    With z = (cap(scale y) + bias) / T, dBias is the sum of dz / T, and dy has cap's slope on top.
    A head with both a softcap and a bias takes the two steps apart.
    """
    spec, columns = chunk.spec, chunk.columns
    if gradients.bias is None or spec.softcap is None:
        dlogits = head.chunk_grad(chunk, shift, coef)
        gradients.add_bias(columns, dlogits, 1.0 / spec.logit_scale)
    else:
        slope = torch.tanh(chunk.logits.to(head.wide) * (spec.logit_scale / spec.softcap))
        capped = replace(
            chunk,
            logits=slope * spec.softcap,
            spec=replace(spec, logit_scale=1.0, softcap=None),
        )
        dz = head.chunk_grad(capped, shift, coef)
        gradients.add_bias(columns, dz, 1.0)
        slope.square_().neg_().add_(1.0).mul_(spec.logit_scale)
        dlogits = (dz * slope).to(dz.dtype)
    gradients.add(number, tile, columns, head.weight_block(columns), dlogits)


class _LinearTokenStats(torch.autograd.Function):
    """Flat: (logprobs, entropy or None, rank or None, lse), each `[n]`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        local: LocalTarget,
        opts: LinearOptions,
    ) -> Any:
        tiles = _tiles(hidden, opts)
        column = tiles.ordered(local.column)
        head = Head(weight, bias, opts)
        parts = [head.tile_stats(tile, column[rows]) for _, rows, tile in tiles]
        spec = opts.spec
        shard = (
            torch.cat(parts, 1) if parts else hidden.new_empty(len(spec.fields), 0, dtype=head.wide)
        )
        merged = merge(all_gather_stack(shard, opts.group), spec)
        done = finish(merged, spec, opts.label_smoothing)
        keep = tiles.ordered(local.keep)
        ctx.opts, ctx.weight = opts, weight  # the parameter itself: main_grad hangs on it
        ctx.save_for_backward(
            hidden, weight, bias, column, keep, done.top, done.log_sum, done.entropy, done.finite
        )
        ctx.set_materialize_grads(False)
        outputs = [None if x is None else tiles.restored(x) for x in blank_ignored(done, keep)]
        if outputs[2] is not None:
            ctx.mark_non_differentiable(outputs[2])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        on_logprobs, on_entropy, _, on_lse = grads
        if on_logprobs is None and on_entropy is None and on_lse is None:
            return (None,) * 5
        hidden, weight, bias, column, keep, top, log_sum, entropy, finite = ctx.saved_tensors
        opts: LinearOptions = ctx.opts
        tiles = _tiles(hidden, opts)
        coef = gradient_coefficients(
            *(None if g is None else tiles.ordered(g) for g in (on_logprobs, on_entropy, on_lse)),
            keep=keep,
            log_sum=log_sum,
            entropy=entropy,
            finite=finite,
            smoothing=opts.label_smoothing,
        )
        opts = replace(opts, spec=replace(opts.spec, entropy=on_entropy is not None, rank=False))
        gradients = HeadGradients(
            hidden,
            weight,
            bias,
            tiles,
            opts,
            needs=ctx.needs_input_grad[:3],
            main_grad=ctx.weight.main_grad if opts.gradient_accumulation_fusion else None,
        )
        head = Head(weight, bias, opts)
        for number, rows, tile in tiles:
            for chunk in head.chunks(tile, column[rows]):
                add_chunk_gradient(gradients, head, number, tile, chunk, top[rows], coef[:, rows])
            gradients.end_tile(number, tile)
        return (*gradients.finish(), None, None)


def _tiles(hidden: Tensor, opts: LinearOptions) -> HiddenTiles:
    return HiddenTiles(
        hidden.detach(),
        opts.group,
        sequence_parallel=opts.sequence_parallel,
        tile_rows=opts.tile_rows,
    )


def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    entropy: bool = False,
    target_rank: bool = False,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    compact: bool = False,
    gradient_accumulation_fusion: bool = False,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> TokenStats:
    """Log-probabilities, entropy and rank of a head's targets without ever holding its logits.

    The logits are `hidden @ weight^T`, times logit_scale, through the softcap, plus bias, over the
    temperature, and masked past vocab_size: in this order.

    Shape:
        hidden: `[s, b, h]` (`[s/TP, b, h]` under sequence parallelism) or `[n, h]` (`[n/TP, h]`);
            float16, bfloat16, float32 or float64. The same on every TP rank without sequence
            parallelism.
        weight: `[V/TP, h]`, this rank's rows of the output layer, in hidden's dtype.
        target: `[s, b]` or `[n]`, integers, global ids or ignore_index; the whole sequence on every
            TP rank also under sequence parallelism.
        bias: `[V/TP]` or None.
        Returns TokenStats of `[s, b]` or `[n]` tensors, the same on every TP rank.

    Args:
        entropy, target_rank, tp_group, temperature, vocab_size, ignore_index, label_smoothing,
            backend: as in `vocab_parallel_token_stats`. The rank's threshold is a dot product:
            columns within its rounding of the target count either way.
        logits_dtype: what the products are rounded to. float32 (the default) also for bfloat16
            operands: the rounding of the logits is the main source of mismatch between trainer and
            rollout engine. torch.bfloat16 gives what a bfloat16 head gives.
        compact: compute only rows whose target is not ignore_index; the same results, and prompt
            and padding tokens cost no product. One host sync.
        gradient_accumulation_fusion: add the weight's gradient to `weight.main_grad` in place, as
            Megatron's linear layers do (`grad_added_to_main_grad` and `zero_out_wgrad` honoured).
        chunk_size: rows a tile; None: 2048 on a CPU and 8192 on a GPU. The block of columns follows
            from the budget of a chunk of logits, 32 MiB on a CPU and 256 MiB on a GPU.

    Which way the work is cut: tiles of rows outside, blocks of columns inside. Up to one tile of
    rows each block of dWeight is one product, written once, and dHidden is added up in float32 over
    the blocks; each further tile reads and writes dWeight in float32 once more, which 2048 (8192)
    rows of products outweigh.

    Gradients: hidden's and weight's (and bias's), each in its own dtype, accumulated in float32;
    an input that does not require one skips its product. dHidden is summed over TP.

    Collectives: forward one all-gather of `[k, n]` float32 over TP, with the rank one all-reduce of
    `[rows]` a tile more; backward one all-reduce of dHidden a tile (in float32, while the next tile
    is computed), with sequence parallelism one reduce-scatter; sequence parallelism gathers each
    tile of hidden, forward and backward, one ahead of the products.

    Memory: a chunk of logits and, where operands are bfloat16, its gradient; the gradients; for a
    bfloat16 weight without main_grad and more than one tile, dWeight in float32. Saved for
    backward: the inputs and a few numbers a row.

    Raises:
        ValueError: before any collective; see `vocab_parallel_token_stats`.
    """
    check_flag("compact", compact)
    opts, local = open_linear(
        hidden,
        weight,
        target,
        entropy=entropy,
        target_rank=target_rank,
        bias=bias,
        logit_scale=logit_scale,
        softcap=softcap,
        sequence_parallel=sequence_parallel,
        logits_dtype=logits_dtype,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        tp_group=tp_group,
        temperature=temperature,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        chunk_size=chunk_size,
        backend=backend,
    )
    flat = hidden.reshape(-1, hidden.shape[-1])
    compaction = Compaction(local.keep, opts) if compact else None
    if compaction is not None:
        flat, local = compaction.select_hidden(flat), compaction.select_target(local)
    results = _LinearTokenStats.apply(flat, weight, bias, local, opts)
    if compaction is not None:
        results = compaction.spread(results)
    logprobs, stats_entropy, rank, lse = (
        None if x is None else x.view(target.shape) for x in results
    )
    return TokenStats(logprobs, stats_entropy, rank, lse)  # type: ignore[arg-type]
