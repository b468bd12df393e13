"""Weights and masks, without gradient, that correct for a policy that sampled and is not p_train.

Each multiplies a token's advantage (`ClippedLoss(weighted=True)`) or its whole loss
(`WeightedLoss`). NaN, where it decides, stays visible. Those of whole sequences need every token:
under context parallelism gather the log-probabilities first (`context_parallel_gather`), and pass
the weights, expanded and sharded, as per-token tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcore_logprobs.checks import (
    check_choice,
    check_flag,
    check_not_negative,
    check_number,
    check_optional_positive,
    check_positive,
)
from mcore_logprobs.losses.base import (
    check_advantages,
    check_bounds,
    counted,
    sequence_mean,
    sequence_sum,
)
from mcore_logprobs.losses.per_token import KL, binary_kl, log_ratio_of, times
from mcore_logprobs.spelling import suggesting

__all__ = [
    "masked_importance_weights",
    "masked_sequence_weights",
    "off_policy_sequence_mask",
    "rejection_mask",
    "sequence_masked_importance_weights",
    "truncated_importance_weights",
    "truncated_sequence_weights",
]


@suggesting
def truncated_importance_weights(
    train_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float = 2.0, floor: float = 0.0
) -> Tensor:
    """p_train / p_rollout for each token, at least floor and at most cap, without gradient.

    Corrects for a rollout engine whose probabilities differ from the trainer's under the same
    weights (other kernels, other precision); cap bounds the variance (truncated importance
    sampling, Yao et al., 2025), and a floor above 0 keeps rare tokens from losing their gradient.
    Multiply a token's loss, or its advantage, by it.

    Shape:
        `[...]`, `[...]` -> `[...]`. train_logprobs are of the weights that rolled out.
    """
    check_bounds("floor", floor, "cap", cap)
    return (
        log_ratio_of(train_logprobs, rollout_logprobs, "rollout_logprobs")
        .exp()
        .clamp(min=floor, max=cap)
    )


@suggesting
def masked_importance_weights(
    train_logprobs: Tensor, rollout_logprobs: Tensor, *, low: float = 0.5, high: float = 5.0
) -> Tensor:
    """r = p_train / p_rollout for each token where low <= r <= high, else 0; without gradient.

    IcePop's M(r; low, high) (Ling Team, 2025, with its defaults); with low=0 masked importance
    sampling by token. As weights of `ClippedLoss(weighted=True)` this is `IcePopLoss`.

    Shape:
        as `truncated_importance_weights`.
    """
    check_bounds("low", low, "high", high)
    return _inside(
        log_ratio_of(train_logprobs, rollout_logprobs, "rollout_logprobs").exp(), low, high
    )


@suggesting
def masked_sequence_weights(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    low: float = 0.0,
    high: float = 2.0,
    ratio: str = "product",
    weighted: bool = True,
    seq_dim: int = 1,
) -> Tensor:
    """One weight per sequence: its ratio s where low <= s <= high, else 0; without gradient.

    Masked importance sampling by sequence (Seq-MIS; Liu, Li et al., When Speed Kills Stability,
    2025): rho(y) 1[rho(y) <= C]. A sequence that the trainer finds too unlike the rollout engine is
    dropped whole, so that no part of it biases the gradient.

    Shape:
        train_logprobs, rollout_logprobs, mask: as `sequence_sum`'s -> `[b, 1]` (`[1, b]`).

    Args:
        ratio: "product", s = prod r; or "mean", its geometric mean (prod r)^(1/tokens), which does
            not depend on the sequence's length.
        weighted: False gives 1 instead of s: only the mask.
    """
    check_bounds("low", low, "high", high)
    check_flag("weighted", weighted)
    s = _sequence_ratio(train_logprobs, rollout_logprobs, mask, ratio, seq_dim)
    # A product of many tokens may be 0 in this dtype, and within the bounds.
    return _inside(s, low, high, weighted=weighted)


@suggesting
def truncated_sequence_weights(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float = 2.0,
    ratio: str = "product",
    veto: float | None = None,
    seq_dim: int = 1,
) -> Tensor:
    """One weight per sequence: min(s, cap); 0 where a token of it has r < veto. Without gradient.

    Truncated importance sampling by sequence (Seq-TIS; Liu, Li et al., When Speed Kills Stability,
    2025) with their token veto: one token that the trainer all but excludes drops the sequence.

    Shape:
        as `masked_sequence_weights`.

    Args:
        cap: 2 in verl, 5 in SkyRL.
        ratio: as in `masked_sequence_weights`.
        veto: 1e-4 in slime; None: no veto.
    """
    check_positive("cap", cap)
    check_optional_positive("veto", veto)
    s = _sequence_ratio(train_logprobs, rollout_logprobs, mask, ratio, seq_dim).clamp(max=cap)
    if veto is None:
        return s
    low = log_ratio_of(train_logprobs, rollout_logprobs, "rollout_logprobs") < math.log(veto)
    vetoed = (low & counted(mask, low, seq_dim)).any(seq_dim, keepdim=True)
    return s.masked_fill(vetoed & ~s.isnan(), 0.0)


@suggesting
def sequence_masked_importance_weights(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    low: float = 0.999,
    high: float = 1.002,
    seq_dim: int = 1,
) -> Tensor:
    """r of each token where the geometric mean of its sequence's is within the bounds, else 0.

    seq-mask-TIS (NeMo-RL, OpenRLHF, with NeMo-RL's reference bounds): the sequence decides, the
    token is weighted. Without gradient; 0 at masked tokens.

    Shape:
        as `sequence_sum`'s `[b, s]` -> `[b, s]`.
    """
    check_bounds("low", low, "high", high)
    mean = _sequence_ratio(train_logprobs, rollout_logprobs, mask, "mean", seq_dim)
    kept = torch.where(counted(mask, mask, seq_dim), _inside(mean, low, high, weighted=False), 0.0)
    return times(kept, log_ratio_of(train_logprobs, rollout_logprobs, "rollout_logprobs").exp())


@suggesting
def off_policy_sequence_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    delta: float = 0.1,
    seq_dim: int = 1,
) -> Tensor:
    """0.0 at tokens of negative advantage in sequences that are far off policy, else 1.0; or NaN.

    Off-policy sequence masking (DeepSeek-V3.2, 2025):

        M = 0 where A < 0 and mean over the sequence of log(p_rollout / p) > delta, else 1

    p is the policy being trained: this takes a pass of its own before the one with gradient, as
    GSPO does. Under context parallelism gather first, as for `masked_sequence_weights`.

    A sequence whose mean is NaN has NaN there: whether it is far off is not known.

    Shape:
        logprobs, rollout_logprobs, mask: as `sequence_sum`'s `[b, s]`; advantages the same,
        `[b, 1]` (`[1, b]`) or a scalar -> `[b, s]`, without gradient.

    Args:
        delta: at least 0, in nats per token; a hyperparameter.
    """
    check_not_negative("delta", delta)
    check_advantages(advantages, logprobs, seq_dim)
    log_ratio = log_ratio_of(logprobs, rollout_logprobs, "rollout_logprobs")
    drift = sequence_mean(-log_ratio, mask, seq_dim=seq_dim)
    near = _inside(drift, -math.inf, delta, weighted=False)
    kept = torch.where(advantages.detach() < 0.0, near, 1.0)
    return kept.to(logprobs.dtype).expand_as(logprobs)


@suggesting
def rejection_mask(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    high: float,
    low: float = -math.inf,
    estimator: str = "k1",
    level: str = "token",
    seq_dim: int = 1,
) -> Tensor:
    """1.0 where a divergence of trainer and rollout engine is within [low, high], else 0.0; or NaN.

    Of a token, or of its sequence as a whole: then all of it goes or stays (verl's rollout_rs,
    AReaL's rejection_sampling). The estimators are of KL(p_rollout, p_train) from the rollout's
    tokens, in nats, x = log p_train / p_rollout:

        "k1"      -x                              may be negative: low counts
        "k2"      x^2 / 2
        "k3"      e^x - 1 - x
        "binary"  the larger of KL(p, q) and KL(q, p) of this token against all others (KPop; Guo et
                  al., 2026: high=0.1)

    Shape:
        as `sequence_sum`'s `[b, s]` -> `[b, s]`, without gradient.

    Args:
        level: "token"; or "sum", "mean" or "max" over the sequence.
        high, low: in nats. Of k1 these are logarithms of the bounds on p_rollout / p_train.
    """
    check_choice("estimator", estimator, (*KL, "binary"))
    check_choice("level", level, ("token", "sum", "mean", "max"))
    for name, bound in (("low", low), ("high", high)):
        check_number(name, bound)
    if not low <= high:
        raise ValueError(f"low, high: expected low <= high, got {low!r}, {high!r}")
    valid_mask = counted(
        mask, log_ratio_of(train_logprobs, rollout_logprobs, "rollout_logprobs"), seq_dim
    )
    p, q = rollout_logprobs.detach(), train_logprobs.detach()
    if estimator == "binary":
        distance = torch.maximum(binary_kl(p, q), binary_kl(q, p))
    else:
        distance = KL[estimator](p, q)
    if level == "max":
        if distance.numel():  # amax of an empty dimension raises
            distance = distance.masked_fill(~valid_mask, -math.inf).amax(seq_dim, keepdim=True)
    elif level != "token":
        reduce = sequence_sum if level == "sum" else sequence_mean
        distance = reduce(distance, mask, seq_dim=seq_dim)
    return torch.where(valid_mask, _inside(distance, low, high, weighted=False), 0.0)


def _sequence_ratio(
    train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, ratio: str, seq_dim: int
) -> Tensor:
    """Product, or geometric mean, of a sequence's ratios."""
    check_choice("ratio", ratio, ("product", "mean"))
    reduce = sequence_sum if ratio == "product" else sequence_mean
    return reduce(
        log_ratio_of(train_logprobs, rollout_logprobs, "rollout_logprobs"), mask, seq_dim=seq_dim
    ).exp()


def _inside(values: Tensor, low: float, high: float, *, weighted: bool = True) -> Tensor:
    """The values, or 1.0 if not weighted, where they are within the bounds; else 0.0. NaN stays."""
    kept = values if weighted else torch.where(values.isnan(), values, 1.0)
    return torch.where((values < low) | (values > high), 0.0, kept)
