"""A policy loss straight from hidden states: three matrix products instead of four.

Where the loss of a token depends on that token's log-probability and entropy alone, its gradient
can be formed while the chunk of logits still exists. Nothing is recomputed.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_flag
from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.fused.compaction import Compaction
from mcore_logprobs.fused.head import Chunk, Head, LinearOptions, open_linear
from mcore_logprobs.fused.tiles import HiddenTiles, main_grad_stand_in
from mcore_logprobs.fused.token_stats import HeadGradients, add_chunk_gradient
from mcore_logprobs.kernels.stats import FinishedStats, finish, merge
from mcore_logprobs.logits.inputs import LocalTarget
from mcore_logprobs.logits.token_stats import TokenStats, blank_ignored, gradient_coefficients

__all__ = ["linear_policy_loss"]

LossFn = Callable[..., Tensor]

# Bytes of one float32 chunk, which here spans all of a rank's columns. Each chunk reads and writes
# the whole float32 dWeight once, so that it must have enough rows to outweigh that.
_CHUNK_BYTES = {"cpu": 128 << 20, "other": 1 << 30}


@dataclass(frozen=True)
class _Loss:
    """The loss and what it takes.

    Attributes:
        tensors: per-token tensors, `[n, ...]`, in tile order.
        scale: 1 / denominator.
        backward: whether gradients are wanted at all.
    """

    fn: LossFn
    tensors: tuple[Tensor, ...]
    scale: float | Tensor
    backward: bool

    def value_and_upstream(
        self, rows: slice, logprobs: Tensor, entropy: Tensor | None, keep: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(sum of the rows' losses over the denominator, its gradients by logprobs and entropy)."""
        inputs = [logprobs] if entropy is None else [logprobs, entropy]
        with torch.set_grad_enabled(self.backward):
            leaves = [x.detach().requires_grad_(self.backward) for x in inputs]
            loss = self.fn(
                leaves[0], leaves[1] if len(leaves) > 1 else None, *(t[rows] for t in self.tensors)
            )
            if not isinstance(loss, Tensor) or loss.shape != logprobs.shape:
                got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(
                    f"loss_fn: expected a loss per row of shape {tuple(logprobs.shape)}, got {got}"
                )
            total = (torch.where(keep, loss, 0.0) * self.scale).sum()
        grads: list[Tensor | None] = [None, None]
        if self.backward and total.requires_grad:
            found = torch.autograd.grad(total, leaves, allow_unused=True)
            grads[: len(found)] = found
        return total.detach(), grads[0], grads[1]


class _LinearPolicyLoss(torch.autograd.Function):
    """(loss, logprobs, entropy or None, rank or None, lse); all but the loss for information."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        local: LocalTarget,
        loss: _Loss,
        opts: LinearOptions,
    ) -> Any:
        tiles = HiddenTiles(
            hidden.detach(),
            opts.group,
            sequence_parallel=opts.sequence_parallel,
            tile_rows=opts.tile_rows,
        )
        column, keep = tiles.ordered(local.column), tiles.ordered(local.keep)
        loss = replace(loss, tensors=tuple(tiles.ordered(t) for t in loss.tensors))
        head = Head(weight, bias, opts)
        needs = ctx.needs_input_grad[:3] if loss.backward else (False, False, False)
        gradients = HeadGradients(hidden, weight, bias, tiles, opts, needs=needs, wide=True)
        total = torch.zeros((), dtype=head.wide, device=hidden.device)
        parts: list[tuple[Tensor | None, ...]] = []
        for number, rows, tile in tiles:
            chunks, done = _whole_rows(head, tile, column[rows])
            outputs = blank_ignored(done, keep[rows])
            value, on_logprobs, on_entropy = loss.value_and_upstream(
                rows, outputs[0], outputs[1], keep[rows]
            )
            total += value
            parts.append(outputs)
            if not any(needs):
                continue
            coef = gradient_coefficients(
                on_logprobs,
                on_entropy,
                None,
                keep=keep[rows],
                log_sum=done.log_sum,
                entropy=done.entropy,
                finite=done.finite,
                smoothing=opts.label_smoothing,
            )
            for chunk in chunks:
                add_chunk_gradient(gradients, head, number, tile, chunk, done.top, coef)
            gradients.end_tile(number, tile)
        ctx.inputs = (hidden, weight, bias)  # the parameter itself: main_grad hangs on it
        ctx.fused = needs[1] and opts.gradient_accumulation_fusion
        ctx.gradients = gradients.finish()
        ctx.set_materialize_grads(False)
        if not parts:  # no rows at all: outputs of no rows
            nothing = finish(head.no_columns(hidden[:0]), opts.spec, opts.label_smoothing)
            parts.append(blank_ignored(nothing, keep))
        results = _join(parts, tiles)
        ctx.mark_non_differentiable(*(x for x in results if x is not None))
        return (total, *results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = grads[0]
        if upstream is None:
            return (None,) * 6
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_policy_loss: the gradients formed in the forward went to the first "
                "backward; a second one needs a second forward"
            )
        formed: list[Tensor | None] = list(ctx.gradients)
        ctx.gradients = None
        for place, like in enumerate(ctx.inputs):
            grad = formed[place]
            if grad is None:
                continue
            grad.mul_(upstream)  # in place: it is ours alone, and may be of the weight's size
            if place == 1 and ctx.fused:
                like.main_grad.add_(grad)
                formed[place] = main_grad_stand_in(like)
            else:
                formed[place] = grad.to(like.dtype)
        return (*formed, None, None, None)


def _whole_rows(head: Head, tile: Tensor, column: Tensor) -> tuple[list[Chunk], FinishedStats]:
    """A tile's logits on this rank, all blocks held, and its rows' statistics over all ranks.

    One all-gather of `[k, rows]`; with the rank, one all-reduce of `[rows]` before it.
    """
    opts = head.opts
    threshold = head.target_threshold(tile, column) if opts.spec.rank else None
    chunks: list[Chunk] = []
    stats = head.no_columns(tile)
    for chunk in head.chunks(tile, column, hold=True):
        chunks.append(chunk)
        stats = merge(torch.stack([stats, head.chunk_stats(chunk, threshold)]), opts.spec)
    whole = merge(all_gather_stack(stats, opts.group), opts.spec)
    return chunks, finish(whole, opts.spec, opts.label_smoothing)


def _join(parts: list[tuple[Tensor | None, ...]], tiles: HiddenTiles) -> tuple[Tensor | None, ...]:
    """The tiles' outputs, field by field, in the sequence's order."""
    columns = list(zip(*parts, strict=True))
    return tuple(
        None if column[0] is None else tiles.restored(torch.cat(column)) for column in columns
    )


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    loss_fn: LossFn,
    *per_token_tensors: Tensor,
    denominator: float | Tensor = 1.0,
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
) -> tuple[Tensor, TokenStats]:
    """The sum of a per-token loss over a denominator, its gradient formed in the forward.

    `loss_fn(logprobs, entropy or None, *chunks of per_token_tensors)` is called for some rows at a
    time, on flat tensors `[rows]`, and returns a loss for each. Any differentiable function will do
    as long as a token's loss depends on that token alone; rows come in no particular order. It must
    be deterministic and the same on every TP rank. Ready-made ones are in `mcore_logprobs.losses`.

    Shape:
        hidden, weight, bias, target: as in `linear_token_stats`.
        per_token_tensors: `[s, b, ...]` or `[n, ...]`, target's shape in front; no gradient flows
            to them. The whole sequence on every TP rank, also under sequence parallelism.
        Returns (loss, stats): a float32 scalar, the same on every TP rank, and a TokenStats of
            `[s, b]` or `[n]` tensors without gradient, for logging.

    Args:
        denominator: what the sum is divided by, known beforehand: a number, or a tensor of one
            element (on the device, no sync), such as the number of answer tokens in the batch.
        entropy: give loss_fn the entropy, differentiable, and the stats too; else None.
        chunk_size: rows at a time. A chunk spans all of a rank's columns; None: as many rows as fit
            128 MiB on a CPU, 1 GiB on a GPU, in float32.
        the others: as in `linear_token_stats`. Rows whose target is ignore_index add nothing.

    Cost: three matrix products, where `linear_token_stats` with a backward takes four. Each chunk
    reads and writes dWeight in float32 once.

    Collectives: one all-gather of `[k, rows]` over TP a chunk (with the rank one all-reduce of
    `[rows]` more); none on one rank. Where hidden needs a gradient one all-reduce of dHidden a
    chunk, or a reduce-scatter under sequence parallelism, while the next chunk is computed.

    Memory: two chunks, and the gradients of hidden and weight in float32, from the forward to the
    backward. `backward` may run once.

    Raises:
        ValueError: before any collective for arguments, see `linear_token_stats`; per-token tensors
            of another shape or that require a gradient; a loss_fn that returns another shape.
    """
    check_flag("compact", compact)
    if not callable(loss_fn):
        raise ValueError(f"loss_fn: expected a callable, got {type(loss_fn).__name__}")
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
    budget = _CHUNK_BYTES["cpu" if hidden.device.type == "cpu" else "other"]
    rows = chunk_size or max(1, budget // (4 * weight.shape[0]))
    opts = replace(opts, tile_rows=max(1, min(rows, local.keep.shape[0])))
    loss = _Loss(
        fn=loss_fn,
        tensors=tuple(_per_token(i, t, target) for i, t in enumerate(per_token_tensors)),
        scale=_scale(denominator, hidden.device),
        backward=torch.is_grad_enabled(),
    )
    flat = hidden.reshape(-1, hidden.shape[-1])
    compaction = Compaction(local.keep, opts) if compact else None
    if compaction is not None:
        flat, local = compaction.select_hidden(flat), compaction.select_target(local)
        loss = replace(loss, tensors=tuple(compaction.select(t) for t in loss.tensors))
    value, *results = _LinearPolicyLoss.apply(flat, weight, bias, local, loss, opts)
    if compaction is not None:
        results = compaction.spread(tuple(results))
    stats = (None if x is None else x.view(target.shape) for x in results)
    return value, TokenStats(*stats)  # type: ignore[arg-type]


def _per_token(place: int, tensor: Tensor, target: Tensor) -> Tensor:
    name = f"per_token_tensors[{place}]"
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.shape[: target.dim()] != target.shape:
        raise ValueError(
            f"{name}: expected a shape that starts with target's {tuple(target.shape)}, got "
            f"{tuple(tensor.shape)}"
        )
    if tensor.device != target.device:
        raise ValueError(f"{name}: expected device {target.device}, got {tensor.device}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: requires a gradient, but none flows to it; detach it")
    return tensor.detach().reshape(-1, *tensor.shape[target.dim() :])


def _scale(denominator: float | Tensor, device: torch.device) -> float | Tensor:
    if isinstance(denominator, Tensor):
        if denominator.numel() != 1 or denominator.requires_grad:
            raise ValueError(
                "denominator: expected a number or a tensor of one element without gradient, got "
                f"shape {tuple(denominator.shape)}"
            )
        return 1.0 / denominator.detach().reshape(()).to(device)
    if isinstance(denominator, bool) or not isinstance(denominator, numbers.Real):
        raise ValueError(f"denominator: expected a number, got {denominator!r}")
    if denominator == 0:
        raise ValueError("denominator: expected a number other than 0, got 0")
    return 1.0 / denominator
