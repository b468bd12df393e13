"""Speculative decoding: how often a draft's token is accepted, and losses of just that.

A draft p proposes, the model q accepts a token with probability min(1, q / p). Of all tokens the
share sum min(p, q) is accepted, which is 1 - total variation: `kind="total_variation"` of
`linear_kl_div` or `linear_topk_kl_div`, whose student is the draft, and of
`PatchHandle.divergence`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_logprobs.checks import check_not_negative

__all__ = ["acceptance_rate", "lk_alpha_loss", "lk_lambda_loss"]

_LEAST = 1e-6  # an acceptance rate under which float32 has no digits left of 1 - total variation


def acceptance_rate(total_variation: Tensor) -> Tensor:
    """sum min(p, q) of each token, which is 1 - total_variation; differentiable.

    Shape: any, `total_variation` of a divergence -> the same.
    """
    return 1.0 - total_variation


def lk_alpha_loss(total_variation: Tensor) -> Tensor:
    """-log of the acceptance rate, token by token; differentiable.

    Samarin et al. 2026, LK Losses, arXiv:2602.23881. Its gradient is that of the total variation
    over the acceptance rate, so that it does not vanish where a draft begins. A rate counts as
    at least 1e-6.

    Shape: any -> the same.
    """
    return -acceptance_rate(total_variation).clamp(min=_LEAST).log()


def lk_lambda_loss(forward_kl: Tensor, total_variation: Tensor, *, eta: float = 3.0) -> Tensor:
    """w KL(q || p) + (1 - w) TV with w = exp(-eta sg(acceptance rate)); differentiable.

    The hybrid of the same paper: a KL while few tokens are accepted, the total variation later.
    `forward_kl` is a divergence of kind "forward".

    Shape: both of one shape -> the same.

    Raises:
        ValueError: shapes that differ, an eta that is not a finite number of at least 0.
    """
    check_not_negative("eta", eta)
    if forward_kl.shape != total_variation.shape:
        raise ValueError(
            f"total_variation: expected forward_kl's shape {tuple(forward_kl.shape)}, got "
            f"{tuple(total_variation.shape)}"
        )
    weight = torch.exp(-eta * acceptance_rate(total_variation.detach()))
    return weight * forward_kl + (1.0 - weight) * total_variation
