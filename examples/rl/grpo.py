"""The loss: clipped policy gradient with group-relative advantages and a KL term to a reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GrpoLoss:
    """A loss per token, of tensors of one shape. As a callable it is also what
    `linear_policy_loss` takes: it sees a chunk of tokens at a time and never needs the others."""

    clip_low: float
    clip_high: float
    kl_coef: float

    def __call__(
        self,
        logprobs: Tensor,
        entropy: Tensor | None,
        old_logprobs: Tensor,
        ref_logprobs: Tensor,
        advantages: Tensor,
    ) -> Tensor:
        ratio = torch.exp(logprobs - old_logprobs)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        return self.kl_coef * kl_k3(logprobs, ref_logprobs) - gain

    def clipped(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Where the clip holds the gradient back."""
        ratio = torch.exp(logprobs - old_logprobs)
        above = (ratio > 1 + self.clip_high) & (advantages > 0)
        below = (ratio < 1 - self.clip_low) & (advantages < 0)
        return above | below


def kl_k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy || other) at tokens drawn from the policy: exp(d) - d - 1
    with d = other - logprobs. Never negative, unbiased (http://joschu.net/blog/kl-approx.html)."""
    diff = other - logprobs
    return torch.exp(diff) - diff - 1
