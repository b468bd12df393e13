"""A policy loss straight from hidden states: three GEMMs instead of four.

Where the loss of a token depends on that token's log-probability and entropy alone, its gradient
can be formed while the chunk of logits still exists. Nothing is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.kernels.chunk import per_row
from mcore_logprobs.kernels.stats import IGNORED, RowResults
from mcore_logprobs.ops.apply import (
    finalize_shards,
    local_row_stats,
    once_differentiable,
    without_autocast,
)
from mcore_logprobs.ops.arguments import check_per_token, check_target, global_to_local
from mcore_logprobs.ops.head import HeadLogits, HeadOptions, HeadTensors, head_logits
from mcore_logprobs.ops.keywords import HeadKeywords, shared_keywords
from mcore_logprobs.ops.loss_function import (
    LossFn,
    check_loss_fn,
    float64_denominator,
    sum_of_losses,
)
from mcore_logprobs.ops.result import TokenStats
from mcore_logprobs.ops.token_stats import Statistics, token_stats


@dataclass(frozen=True)
class _Loss:
    """The loss and what it takes.

    Attributes:
        denominator: a float64 scalar.
        grad_enabled: as the caller has it; an autograd function sees gradients disabled.
        backward: whether any input wants a gradient.
    """

    fn: LossFn
    denominator: Tensor
    grad_enabled: bool
    backward: bool

    def value_and_upstream(
        self, results: RowResults, per_token: tuple[Tensor, ...], valid_mask: Tensor
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
                per_token,
                valid_mask=valid_mask,
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


class _PolicyLoss(torch.autograd.Function):
    """(loss, *RowResults of `[*lead]` tensors); all but the loss for information."""

    @staticmethod
    def forward(
        ctx: Any,
        operation: Statistics,
        loss: _Loss,
        options: HeadOptions,
        count: int,
        *tensors: Any,
    ) -> Any:
        inputs = HeadTensors(*tensors[:count])
        *per_token, anchor = tensors[count:]
        with without_autocast(inputs.hidden):
            source = options.open(*inputs)
            local_target, valid_mask, *per_token = map(source.flatten_rows, per_token)
            needs = [flag and loss.backward for flag in ctx.needs_input_grad[4 : 4 + count]]
            gradient = source.gradient(needs, in_acc_dtype=True)
            total = torch.zeros((), dtype=torch.float64, device=source.device)
            spec, group = operation.spec, source.shard.group
            parts: list[Any] = []
            for tile in source.tiles():
                rows = tile.rows
                target, mask, threshold = local_target[rows], valid_mask[rows], None
                if spec.rank:
                    threshold = all_reduce_sum(tile.target_logits(target), group)
                own = slice(0, rows.stop - rows.start)
                chunks = [placed._replace(rows=own) for placed in tile.held_chunks()]
                results, softmax = finalize_shards(
                    local_row_stats(source, chunks, target, spec, threshold),
                    spec,
                    group,
                    per_row(source.multiplier, rows),
                    valid_mask=mask,
                    label_smoothing=operation.label_smoothing,
                )
                value, upstream = loss.value_and_upstream(
                    results, tuple(t[rows] for t in per_token), mask
                )
                total += value
                parts.append(results)
                if not any(needs):
                    continue
                write = operation.write_dlogits(source, upstream, (target, mask), softmax)
                for placed in chunks:
                    gradient.collect(tile, placed, write)
                gradient.end_tile(tile)
            ctx.gradients = gradient.finish()
            if not parts:  # no rows
                parts = [operation.forward(source, (local_target, valid_mask))[0]]
            results = parts[0].map(lambda *x: torch.cat(x), *parts[1:])
            results = results.map(source.unflatten, IGNORED)
        ctx.save_for_backward(anchor)
        ctx.main_grad, ctx.count = options.main_grad, len(tensors)
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in results if x is not None))
        return (total.to(source.acc_dtype), *results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
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
        for name, grad, dtype in zip(HeadTensors._fields, formed, ctx.dtypes, strict=False):
            if grad is not None and name == "weight" and ctx.main_grad is not None:
                grad.masked_fill_(upstream == 0.0, 0.0)  # as in `_times`
                ctx.main_grad.buffer.addcmul_(grad, upstream)
                grad = ctx.main_grad.stand_in()
            elif grad is not None:
                grad = _times(upstream, grad, dtype)
            found.append(grad)
        return (None, None, None, None, *found, *(None for _ in range(ctx.count - len(found))))


def _anchor(tensors: tuple[Tensor | None, ...]) -> Tensor:
    """No number, with a graph that reaches all tensors which require a gradient, and holds none.

    Gradients that are differentiated again must raise for them (`once_differentiable`).
    """
    learning = [x for x in tensors if x is not None and x.requires_grad]
    # float32: autocast joins no float16 tensors on a CPU.
    parts = [x[..., :0].flatten().float() for x in learning]
    return torch.cat(parts) if parts else torch.empty(0)


def _times(upstream: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """grad times upstream in a dtype; exactly 0 where upstream is 0, though grad may be NaN."""
    # In place where it can be: it is ours alone, and may be of the weight's size.
    out = grad if grad.dtype is dtype else torch.empty_like(grad, dtype=dtype)
    torch.mul(grad, upstream, out=out)
    return out.masked_fill_(upstream == 0.0, 0.0)


def policy_loss(
    source: Any,
    target: Tensor,
    wanted: Statistics,
    loss_fn: LossFn,
    *per_token_tensors: Tensor,
    denominator: float | Tensor,
    ignore_index: int | None,
) -> tuple[Tensor, TokenStats]:
    """`linear_policy_loss` of any source; of given logits from their statistics."""
    if not isinstance(source, HeadLogits):
        stats = token_stats(source, target, wanted, ignore_index)
        valid_mask = torch.ones_like(target, dtype=torch.bool)
        if ignore_index is not None:
            valid_mask = target != ignore_index
        value = loss_of_stats(
            stats, valid_mask, loss_fn, *per_token_tensors, denominator=denominator
        )
        return value, stats.detach()
    lead, device = source.lead, source.device
    target = check_target(target, lead, device)
    local_target, valid_mask = global_to_local(target, source.shard, ignore_index)
    per_token = [check_per_token(i, t, lead, device) for i, t in enumerate(per_token_tensors)]
    check_loss_fn(loss_fn, per_token)
    divisor = float64_denominator(denominator, device)
    source = source.compacted(valid_mask)
    source = source.in_whole_rows(adds_per_tile=True, any_tp=source.options.segments is not None)
    wants = any(x is not None and x.requires_grad for x in source.tensors)
    loss = _Loss(
        fn=loss_fn,
        denominator=divisor,
        grad_enabled=torch.is_grad_enabled(),
        backward=torch.is_grad_enabled() and wants,
    )
    value, *results = _PolicyLoss.apply(
        wanted,
        loss,
        source.options,
        len(source.tensors),
        *source.tensors,
        local_target,
        valid_mask,
        *per_token,
        _anchor(source.tensors),
    )
    return value, TokenStats(**RowResults(*results)._asdict())


def loss_of_stats(
    stats: TokenStats,
    valid_mask: Tensor,
    loss_fn: LossFn,
    *per_token_tensors: Tensor,
    denominator: float | Tensor = 1.0,
) -> Tensor:
    """A policy loss from statistics (those of a filtered distribution, say), scalar; gradients
    flow to the statistics.
    """
    lead, device = stats.shape, stats.device
    tensors = [check_per_token(i, t, lead, device) for i, t in enumerate(per_token_tensors)]
    check_loss_fn(loss_fn, tensors)
    total = sum_of_losses(
        loss_fn,
        stats.logprobs.reshape(-1),
        None if stats.entropy is None else stats.entropy.reshape(-1),
        tuple(t.reshape(-1, *t.shape[len(lead) :]) for t in tensors),
        valid_mask=valid_mask.reshape(-1),
        denominator=float64_denominator(denominator, device),
    )
    return total.to(stats.logprobs.dtype)


@shared_keywords(HeadKeywords, head_logits)
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
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    invariant_segments: int | None = None,
    **shared: Unpack[HeadKeywords],
) -> tuple[Tensor, TokenStats]:
    """The sum of a per-token loss over a denominator, its gradient formed in the forward.

    `loss_fn(logprobs, entropy or None, *chunks of per_token_tensors)` is called for some rows at a
    time, on flat tensors `[rows]`, and returns a loss for each. Any differentiable function will do
    as long as a token's loss depends on that token alone; rows come in no particular order. It must
    be deterministic and the same on every TP rank. It may change its arguments in place: they are
    copies. Ready-made ones are in `mcore_logprobs.losses`.

    Shape:
        hidden, weight, target: as in `linear_token_stats`.
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
        target_rank, sum_pi_squared, ignore_index, label_smoothing, invariant_segments: as in
            `linear_token_stats`. Rows whose target is ignore_index add nothing.
        {shared}

    chunk_size is rows at a time. A chunk spans all of a rank's columns; None: as many rows as fit
    128 MiB on a CPU, 1 GiB on a GPU, in float32; there 4096 if 2.5 GiB hold them, and chunks of
    about one size.

    Cost: three GEMMs, where `linear_token_stats` with a backward takes four. Each chunk
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
    source = head_logits(
        hidden, weight, invariant_segments=invariant_segments, may_round=True, **shared
    )
    return policy_loss(
        source,
        target,
        Statistics.of(entropy, target_rank, sum_pi_squared, label_smoothing),
        loss_fn,
        *per_token_tensors,
        denominator=denominator,
        ignore_index=ignore_index,
    )
