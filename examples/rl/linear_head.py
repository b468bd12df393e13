"""The policy loss formed inside the head: `linear_policy_loss` in place of TokenStats.

The patched model hands its loss a handle on the hidden states and the weight instead of logits.
Here that handle goes to `linear_policy_loss`, which forms the gradient while a chunk of logits
exists: three matrix products instead of four, and no [tokens, V/TP] tensor, forward or backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from mcore_logprobs import LogprobConfig, TokenStats, linear_policy_loss


@dataclass
class PolicyLoss:
    """What the model returns: the sum of the micro-batch's losses, and [b, s] statistics."""

    loss: Tensor
    stats: TokenStats


@contextmanager
def policy_loss_head(
    gpt_model: Any,
    config: LogprobConfig,
    loss_fn: Callable[..., Tensor],
    per_token_tensors: Callable[[], tuple[Tensor, ...]],
) -> Iterator[None]:
    """While open, the patched `gpt_model(..., labels=labels)` returns a PolicyLoss.

    per_token_tensors: gives the [b, s] tensors of the micro-batch in hand.
    """
    if not getattr(gpt_model, "post_process", True):  # a stage without a head
        yield
        return
    patched = gpt_model.compute_language_model_loss

    def loss_in_the_head(labels: Tensor, deferred: Any) -> PolicyLoss:
        loss, stats = linear_policy_loss(
            deferred.hidden,  # [s, b, h], or [s/TP, b, h] under sequence parallelism
            deferred.weight,  # [V/TP, h]
            labels.T.contiguous(),
            loss_fn,
            *(t.T.contiguous() for t in per_token_tensors()),
            sequence_parallel=deferred.sequence_parallel,
            compact=True,  # prompts and padding cost no product
            temperature=config.temperature,
            vocab_size=config.vocab_size,
            logits_dtype=config.logits_dtype,
            chunk_size=config.chunk_size,
            backend=config.backend,
        )
        found = {f.name: getattr(stats, f.name) for f in fields(stats)}
        return PolicyLoss(
            loss, TokenStats(**{k: None if v is None else v.T for k, v in found.items()})
        )

    gpt_model.compute_language_model_loss = loss_in_the_head
    try:
        yield
    finally:
        gpt_model.compute_language_model_loss = patched
