"""Speculative decoding: how often a draft's token is accepted, and losses that increase it.

A draft p proposes tokens, and the model q accepts one with probability min(1, q / p). The share of
accepted tokens is sum min(p, q) = 1 - total variation. The total variation is
`kind="total_variation"` of `linear_kl_div`, `linear_topk_kl_div` or `PatchHandle.divergence`, with
the draft as the student.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_logprobs.checks import check_not_negative
from mcore_logprobs.spelling import suggesting

__all__ = ["acceptance_rate", "lk_alpha_loss", "lk_lambda_loss"]

_LEAST = 1e-6  # an acceptance rate under which float32 has no digits left of 1 - total variation


@suggesting
def acceptance_rate(total_variation: Tensor) -> Tensor:
    """Return each token's acceptance rate, sum min(p, q) = 1 - total_variation; differentiable.

    Shape: any, `total_variation` of a divergence -> the same.
    """
    return 1.0 - total_variation


@suggesting
def lk_alpha_loss(total_variation: Tensor) -> Tensor:
    """Return -log of each token's acceptance rate; differentiable.

    Samarin et al. 2026, LK Losses, arXiv:2602.23881. Its gradient is that of the total variation,
    divided by the acceptance rate. So it does not vanish for a draft whose tokens are rarely
    accepted. The rate is taken as at least 1e-6; below that there is no gradient.

    Shape: any -> the same.
    """
    return -acceptance_rate(total_variation).clamp(min=_LEAST).log()


@suggesting
def lk_lambda_loss(forward_kl: Tensor, total_variation: Tensor, *, eta: float = 3.0) -> Tensor:
    """Return w KL(q || p) + (1 - w) TV, w = exp(-eta sg(acceptance rate)); differentiable.

    The hybrid loss of the same paper: mostly the KL while few tokens are accepted, and mostly the
    total variation later. `forward_kl` is a divergence of kind "forward".

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
