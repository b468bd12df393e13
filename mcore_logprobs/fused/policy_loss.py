"""A policy loss straight from hidden states: three matrix products instead of four.

Where the loss of a token depends on that token's log-probability and entropy alone, its gradient
can be formed while the chunk of logits still exists. Nothing is recomputed.
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
from mcore_logprobs.fused.gradients import HeadGradients, main_grad_stand_in
from mcore_logprobs.fused.head import Chunk, Head, HeadOptions, HeadTensors, open_head
from mcore_logprobs.fused.lora import LoRAInput
from mcore_logprobs.fused.loss_function import LossFn, open_denominator, sum_of_losses
from mcore_logprobs.fused.tokens import (
    HiddenTiles,
    Tiling,
    check_per_token,
    open_tokens,
    whole_row_tiling,
)
from mcore_logprobs.kernels.stats import (
    FinishedStats,
    RowResults,
    gradient_coefficients,
    gradient_spec,
)
from mcore_logprobs.logits.opening import LocalTarget
from mcore_logprobs.logits.rows import finish_shards
from mcore_logprobs.logits.token_stats import TokenStats

__all__ = ["linear_policy_loss"]

# Rows a tile on a GPU, if 2.5 GiB hold them: their three products take 20 times as long as reading
# and writing dWeight in float32.
_TILE_ROWS = 4096


@dataclass(frozen=True)
class _Loss:
    """The loss and what it takes.

    Attributes:
        tensors: per-token tensors, `[n, ...]`, in tile order.
        denominator: a float64 scalar.
        grad_enabled: as the caller has it; an autograd function sees gradients disabled.
        backward: whether any input wants a gradient.
    """

    fn: LossFn
    tensors: tuple[Tensor, ...]
    denominator: Tensor
    grad_enabled: bool
    backward: bool

    def value_and_upstream(
        self, rows: slice, results: RowResults, keep: Tensor
    ) -> tuple[Tensor, RowResults]:
        """(sum of the rows' losses over the denominator, its gradients by logprobs and entropy)."""
        with torch.set_grad_enabled(self.grad_enabled):
            leaves = RowResults(logprobs=results.logprobs, entropy=results.entropy).map(
                lambda x: x.detach().requires_grad_(self.backward)
            )
            total = sum_of_losses(
                self.fn,
                leaves.logprobs,
                leaves.entropy,
                tuple(t[rows] for t in self.tensors),
                keep=keep,
                denominator=self.denominator,
            )
        upstream = RowResults()
        if self.backward:
            wanted = [x for x in leaves if x is not None]
            found = torch.autograd.grad(total, wanted, allow_unused=True)
            if all(grad is None for grad in found):
                raise ValueError(
                    "loss_fn: the backward of the loss gives no gradient to the log-probabilities "
                    "or the entropy: an autograd function of its own returns None for them"
                )
            given = iter(found)
            upstream = leaves.map(lambda x: next(given))
        return total.detach(), upstream


@dataclass(frozen=True)
class _Options:
    head: HeadOptions
    tiling: Tiling
    label_smoothing: float
    temperature: Tensor | None


class _LinearPolicyLoss(torch.autograd.Function):
    """(loss, *RowResults of `[n]` tensors); all but the loss for information."""

    @staticmethod
    def forward(ctx: Any, local: LocalTarget, loss: _Loss, opts: _Options, *inputs: Any) -> Any:
        tensors = HeadTensors(*inputs)
        hidden = tensors.hidden
        tiles = HiddenTiles(hidden, opts.tiling, rounded=opts.head.rounded)
        column, keep = tiles.walk(local.column), tiles.walk(local.keep)
        loss = replace(loss, tensors=tuple(tiles.walk(t) for t in loss.tensors))
        head = Head(tensors, opts.head, opts.tiling.block_columns)
        needs = [flag and loss.backward for flag in ctx.needs_input_grad[3:]]
        gradients = HeadGradients(tensors, tiles, opts.head, needs=needs, wide=True)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        # Of no rows to begin with, so that a call without any has results too.
        parts = [_finish(head, head.no_columns(hidden[:0]), opts).blanked(keep[:0])]
        temperature = tiles.walk_optional(opts.temperature)
        for tile in tiles:
            own = tile.of(temperature)
            chunks, done = _whole_rows(head, tile.hidden, column[tile.rows], own, opts)
            results = done.blanked(keep[tile.rows])
            value, upstream = loss.value_and_upstream(tile.rows, results, keep[tile.rows])
            total += value
            parts.append(results)
            if not any(needs):
                continue
            spec = gradient_spec(opts.head.spec, upstream)
            coef = gradient_coefficients(
                upstream,
                done.norms,
                spec,
                keep=keep[tile.rows],
                label_smoothing=opts.label_smoothing,
            )
            for chunk in (replace(c, spec=replace(spec, valid=c.spec.valid)) for c in chunks):
                dlogits_of = partial(head.chunk_grad, shift=done.norms.top, coef=coef)
                gradients.add_chunk(head, tile, chunk, dlogits_of)
            gradients.end_tile(tile)
        ctx.tensors = tensors  # the weight itself: main_grad hangs on it
        ctx.fused = opts.head.gradient_accumulation_fusion
        ctx.gradients = gradients.finish()
        ctx.set_materialize_grads(False)
        results = parts[0].map(lambda *x: tiles.restore(torch.cat(x)), *parts[1:])
        ctx.mark_non_differentiable(*(x for x in results if x is not None))
        return (total.to(head.wide), *results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = grads[0]
        if upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_policy_loss: the gradients formed in the forward went to the first "
                "backward; a second one needs a second forward"
            )
        formed, ctx.gradients = ctx.gradients, None
        found: list[Tensor | None] = []
        for grad, like in zip(formed, ctx.tensors, strict=True):
            if grad is not None:
                if like is ctx.tensors.weight and ctx.fused:
                    like.main_grad.add_(_times(upstream, grad, grad.dtype))
                    grad = main_grad_stand_in(like)
                else:
                    grad = _times(upstream, grad, like.dtype)
            found.append(grad)
        return (None, None, None, *found)


def _times(upstream: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Their product in a dtype, and 0 where upstream is: 0 times what a spoilt row left is NaN."""
    # In place where it can be: it is ours alone, and may be of the weight's size.
    out = grad if grad.dtype is dtype else torch.empty_like(grad, dtype=dtype)
    torch.mul(grad, upstream, out=out)
    return out.masked_fill_(upstream == 0.0, 0.0)


def _whole_rows(
    head: Head, tile: Tensor, column: Tensor, temperature: Tensor | None, opts: _Options
) -> tuple[list[Chunk], FinishedStats]:
    """A tile's logits on this rank, all blocks held, and its rows' statistics over all ranks.

    One all-gather of `[k, rows]`; with the rank, one all-reduce of `[rows]` before it.
    """
    threshold = head.target_threshold(tile, column, temperature) if opts.head.spec.rank else None
    chunks: list[Chunk] = []
    parts = []
    for chunk in head.chunks(tile, column, temperature, hold=True):
        chunks.append(chunk)
        parts.append((chunk.columns, head.chunk_stats(chunk, threshold)))
    return chunks, _finish(head, head.merged(tile, parts), opts)


def _finish(head: Head, stats: Tensor, opts: _Options) -> FinishedStats:
    done, _ = finish_shards(
        stats, opts.head.spec, opts.head.group, label_smoothing=opts.label_smoothing
    )
    return done


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    loss_fn: LossFn,
    *per_token_tensors: Tensor,
    denominator: float | Tensor = 1.0,
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
) -> tuple[Tensor, TokenStats]:
    """The sum of a per-token loss over a denominator, its gradient formed in the forward.

    `loss_fn(logprobs, entropy or None, *chunks of per_token_tensors)` is called for some rows at a
    time, on flat tensors `[rows]`, and returns a loss for each. Any differentiable function will do
    as long as a token's loss depends on that token alone; rows come in no particular order. It must
    be deterministic and the same on every TP rank. It may change its arguments in place: they are
    copies. Ready-made ones are in `mcore_logprobs.losses`.

    Shape:
        hidden, weight, bias, lora, target: as in `linear_token_stats`.
        per_token_tensors: `[s, b, ...]` or `[n, ...]`, target's shape in front; no gradient flows
            to them. The whole sequence on every TP rank, also under sequence parallelism.
        Returns (loss, stats): a float32 scalar, the same on every TP rank, and a TokenStats of
            `[s, b]` or `[n]` tensors without gradient, for logging.

    Args:
        denominator: what the sum is divided by (in float64), known beforehand: a number, or a
            tensor of one element of any dtype (on the device, no sync), such as the number of
            answer tokens in the batch. A call in which no token counts gives a loss of 0 and
            gradients of 0.
        entropy: give loss_fn the entropy, differentiable, and the stats too; else None.
        chunk_size: rows at a time. A chunk spans all of a rank's columns; None: as many rows as fit
            128 MiB on a CPU, 1 GiB on a GPU, in float32; there 4096 if 2.5 GiB hold them, and
            chunks of about one size.
        the others: as in `linear_token_stats`. Rows whose target is ignore_index add nothing.

    Cost: three matrix products, where `linear_token_stats` with a backward takes four. Each chunk
    reads and writes dWeight in float32 once.

    Collectives: one all-gather of `[k, rows]` over TP a chunk (with the rank one all-reduce of
    `[rows]` more); none on one rank. Where hidden needs a gradient one all-reduce of dHidden a
    chunk, or a reduce-scatter under sequence parallelism, while the next chunk is computed. Where a
    LoRA's A needs one, one all-reduce of `[r, h]`.

    Memory: two chunks, and the gradients of hidden, weight and LoRA in float32, from the forward to
    the backward. `backward` may run once.

    Raises:
        ValueError: before any collective for arguments, see `linear_token_stats`; per-token tensors
            of another shape or that require a gradient; a denominator that is 0, negative, NaN or
            inf (a CUDA tensor's value is not looked at). After the first chunk: a loss_fn that
            returns another shape, a loss that is cut off from the log-probabilities and the
            entropy although an input requires a gradient, a loss that depends on another tensor
            that requires one (a parameter in the function's closure).
    """
    if not callable(loss_fn):
        raise ValueError(f"loss_fn: expected a callable, got {type(loss_fn).__name__}")
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
    tiling = whole_row_tiling(
        tokens,
        head.shard,
        chunk_size,
        least=_TILE_ROWS,
        any_tp=invariant_segments is not None,
    )
    checked = [
        check_per_token(place, t, tokens.lead, hidden.device)
        for place, t in enumerate(per_token_tensors)
    ]
    tensors = HeadTensors.of(tokens.hidden, weight, bias, lora)
    loss = _Loss(
        fn=loss_fn,
        tensors=tuple(tokens.per_row(t) for t in checked),
        denominator=open_denominator(denominator, hidden.device),
        grad_enabled=torch.is_grad_enabled(),
        backward=torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in tensors),
    )
    opts = _Options(head, tiling, label_smoothing, tokens.temperature)
    value, *results = _LinearPolicyLoss.apply(tokens.target, loss, opts, *tensors)
    return value, tokens.stats(RowResults(*results))
