"""A policy loss straight from hidden states: three GEMMs instead of four.

If the loss of a token depends only on that token's log-probability and entropy, its gradient
can be formed while the chunk of logits still exists. Nothing is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from mcore_logprobs.checks import check_per_token, check_target, global_to_local
from mcore_logprobs.kernels.chunk import per_row
from mcore_logprobs.kernels.products import range_scale
from mcore_logprobs.kernels.stats import RowResults
from mcore_logprobs.ops.driver import Tensors, apply_eagerly
from mcore_logprobs.ops.keywords import HeadKeywords, shared_keywords
from mcore_logprobs.ops.result import TokenStats
from mcore_logprobs.ops.row_statistics import Statistics
from mcore_logprobs.ops.token_stats import token_stats
from mcore_logprobs.ops.user_function import (
    LossFn,
    check_loss_fn,
    float64_denominator,
    graph_of_its_own,
    sum_of_losses,
    taken_by_name,
)
from mcore_logprobs.sources.head import head_logits
from mcore_logprobs.sources.source import Source


@dataclass(frozen=True)
class _Loss:
    """A loss per token as an objective of its statistics.

    Attributes:
        denominator: a float64 scalar.
        grad_enabled: as the caller has it; an autograd function sees gradients disabled.
        backward: whether any input wants a gradient.
        slope: dz / dy, a number or `[n]`, where gradients are scaled for float16; else None.
    """

    fn: LossFn
    denominator: Tensor
    grad_enabled: bool
    backward: bool
    slope: float | Tensor | None

    def value_and_upstream(
        self, results: RowResults, tensors: Tensors, per_token: Tensors, rows: slice
    ) -> tuple[Tensor, RowResults, Tensor | None]:
        """(sum of the rows' losses over the denominator, its gradients by logprobs and entropy,
        their scale).
        """
        _, valid_mask = tensors
        with torch.set_grad_enabled(self.grad_enabled), graph_of_its_own():
            leaves = RowResults(logprobs=results.logprobs, entropy=results.entropy).map(
                lambda x: x.detach().requires_grad_(self.backward)
            )
            assert leaves.logprobs is not None
            total = sum_of_losses(
                self.fn,
                leaves.logprobs,
                leaves.entropy,
                per_token,
                valid_mask=valid_mask,
                denominator=self.denominator,
            )
        upstream, scale = RowResults(), None
        if self.backward:
            by_name = {name: x for name, x in leaves._asdict().items() if x is not None}
            gradients = torch.autograd.grad(total, list(by_name.values()), allow_unused=True)
            if all(grad is None for grad in gradients):
                raise ValueError(
                    "loss_fn: the backward of the loss gives no gradient to the log-probabilities "
                    "or the entropy: an autograd function of its own returns None for them"
                )
            upstream = RowResults(**dict(zip(by_name, gradients, strict=True)))
            if self.slope is not None:
                # The gradient of a logit by a row's log-probability is at most this, and by its
                # entropy some times this.
                slope = per_row(self.slope, rows)
                scale = range_scale(torch.cat([x.abs() * slope for x in upstream if x is not None]))
                upstream = upstream.map(lambda grad: grad * scale)
        return total.detach(), upstream, scale


def policy_loss(
    source: Source,
    target: Tensor,
    wanted: Statistics,
    loss_fn: LossFn,
    *per_token_tensors: Tensor,
    denominator: float | Tensor,
    ignore_index: int | None,
) -> tuple[Tensor, TokenStats]:
    """`linear_policy_loss` of any source; of given logits from their statistics."""
    if not source.recomputed:
        stats = token_stats(source, target, wanted, ignore_index)
        valid_mask = torch.ones_like(target, dtype=torch.bool)
        if ignore_index is not None:
            valid_mask = target != ignore_index
        value = loss_of_stats(
            stats, valid_mask, loss_fn, *per_token_tensors, denominator=denominator
        )
        return value, stats.detach()
    lead, device = source.batch_shape, source.device
    target = check_target(target, lead, device)
    local_target, valid_mask = global_to_local(target, source.shard, ignore_index)
    per_token = [check_per_token(i, t, lead, device) for i, t in enumerate(per_token_tensors)]
    check_loss_fn(loss_fn, per_token)
    divisor = float64_denominator(denominator, device)
    source = source.compacted(valid_mask)
    source = source.in_whole_rows(adds_per_tile=True)
    wants = any(x is not None and x.requires_grad for x in source.tensors)
    slope = None
    if any(x is not None and x.dtype == torch.float16 for x in source.tensors):
        # The gradient of a logit may be outside what float16 has: over a large denominator, with
        # small weights, or a large ratio. The trainer's loss scale comes in the backward, too late.
        slope = source.processing.slope
    loss = _Loss(
        fn=loss_fn,
        denominator=divisor,
        grad_enabled=torch.is_grad_enabled(),
        backward=torch.is_grad_enabled() and wants,
        slope=slope,
    )
    value, *results = apply_eagerly(wanted, source, loss, local_target, valid_mask, own=per_token)
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
    extra = {"full_logprobs": stats.full_logprobs, "kept_entropy": stats.kept_entropy}
    named = taken_by_name(loss_fn, extra)
    check_loss_fn(loss_fn, tensors, tuple(named))
    total = sum_of_losses(
        loss_fn,
        stats.logprobs.reshape(-1),
        None if stats.entropy is None else stats.entropy.reshape(-1),
        tuple(t.reshape(-1, *t.shape[len(lead) :]) for t in tensors),
        valid_mask=valid_mask.reshape(-1),
        denominator=float64_denominator(denominator, device),
        named={name: x.reshape(-1) for name, x in named.items()},
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
    """Return the sum of a per-token loss over a denominator; its gradient is formed in the forward.

    `loss_fn(logprobs, entropy or None, *chunks of per_token_tensors)` is called for some rows at a
    time, on flat tensors `[rows]`, and returns a loss for each. Any differentiable function will do
    as long as a token's loss depends only on that token; rows come in no particular order. It must
    be deterministic and the same on every TP rank. It may change its arguments in place: they are
    copies. Ready-made ones are in `mcore_logprobs.losses`.

    Shape:
        hidden, weight, target: as in `linear_token_stats`.
        per_token_tensors: `[s, b, ...]` or `[n, ...]`, target's shape in front; no gradient flows
            to them. The whole sequence on every TP rank, also under sequence parallelism.
        Returns (loss, stats): a float32 scalar (float64 for float64 operands), the same on every TP
            rank, and a TokenStats of `[s, b]` or `[n]` tensors without gradient, for logging.

    Args:
        denominator: what the sum is divided by (in float64), known beforehand: a number, or a
            tensor of one element of any dtype (on the device, no sync), such as the number of
            answer tokens in the batch. A call in which no token counts gives a loss of 0 and
            gradients of 0.
        entropy: give loss_fn the entropy, differentiable, and the stats too; else None.
        target_rank, sum_pi_squared, ignore_index, label_smoothing, invariant_segments: as in
            `linear_token_stats`. Rows whose target is ignore_index add nothing.
        {shared}

    chunk_size is rows per tile. The logits of one tile exist at a time, over all of a rank's
    columns, in float32. None: as many rows as fit 128 MiB on a CPU or 1 GiB on a GPU; on a GPU 4096
    rows if 2.5 GiB hold them. Tiles have about the same number of rows.

    Cost: three GEMMs, where `linear_token_stats` with a backward takes four. Each tile
    reads and writes dWeight in float32 once; with float16 operands twice. Their gradients are
    formed before a trainer's loss scale is known, so that each tile has a scale of its own, a power
    of two, which is taken out in float32.

    Collectives, all in the forward: one all-gather of `[k, rows]` over TP per tile; target_rank
    adds one all-reduce of `[rows]`, with a bias of `[2, rows]`. If hidden requires a gradient, one
    all-reduce of dHidden per tile, while the next tile is computed. Sequence parallelism makes it a
    reduce-scatter, and gathers each tile of hidden once. If a LoRA's A requires a gradient, one
    all-reduce of `[r, h]`. On one rank none.

    Memory: a tile of logits, the gradient of one chunk in the operands' dtype, and the gradients of
    hidden, weight and LoRA in float32, from the forward to the backward. `backward` may run once.

    Raises:
        ValueError: before any collective for arguments, see `linear_token_stats`; per-token tensors
            of another shape or that require a gradient; a denominator that is 0, negative, NaN or
            inf (a CUDA tensor's value is not checked). After the first tile: a loss_fn that
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
        Statistics.of(
            entropy=entropy,
            target_rank=target_rank,
            sum_pi_squared=sum_pi_squared,
            label_smoothing=label_smoothing,
        ),
        loss_fn,
        *per_token_tensors,
        denominator=denominator,
        ignore_index=ignore_index,
    )
