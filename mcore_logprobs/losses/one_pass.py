"""Objectives whose loss of a token depends only on that token.

Called with (logprobs, entropy, old_logprobs, advantages), all `[...]`, where nothing else is said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_logprobs.checks import (
    check_above_minus_one,
    check_flag,
    check_not_negative,
    check_optional_above_one,
    check_optional_positive,
    check_positive,
    one_of,
)
from mcore_logprobs.losses.base import (
    CLIP,
    TERMS,
    Given,
    TokenLoss,
    check_bounds,
    each,
    kl_and_entropy,
)
from mcore_logprobs.losses.corrections import masked_importance_weights
from mcore_logprobs.losses.per_token import (
    KL,
    binary_kl,
    check_shape,
    clipped,
    exp_within,
    kl_k2,
    largest_exponent,
    log_ratio_of,
    masked_product,
    times,
)
from mcore_logprobs.spelling import suggesting

__all__ = [
    "CISPOLoss",
    "ClippedLoss",
    "DPPOLoss",
    "DistillationLoss",
    "GPGLoss",
    "IPOLoss",
    "IcePopLoss",
    "ImportanceLoss",
    "ReinforceLoss",
    "SAPOLoss",
    "SFTLoss",
    "SPOLoss",
    "clip_fraction",
]


@dataclass(frozen=True)
class ClippedLoss(TokenLoss):
    """PPO's and GRPO's clipped objective, negated, with optional dual clip, KL and entropy terms.

        r = exp(logprobs - old_logprobs)
        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  [+ kl_coef KL]  [- entropy_coef H]

    clip_high > clip_low is DAPO's clip-higher. With dual_clip = c > 1, a token of negative
    advantage loses at most -c A (Ye et al., 2020); with c > 1 + clip_high that is two-sided
    clipping, whose c is called delta (INTELLECT-2, 2505.07291: 4).

    Called with (logprobs, entropy, old_logprobs, advantages), then ref_logprobs if kl_coef > 0,
    then importance weights (see `truncated_importance_weights`) if weighted; all `[...]`.

    Attributes:
        kl: "k1", "k2" or "k3".
        weighted: multiply the clipped term (not KL and entropy) by importance weights, at least 0.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl: str = "k3"
    entropy_coef: float = 0.0
    weighted: bool = False
    _checks = (*CLIP, *TERMS, ("dual_clip", check_optional_above_one), ("weighted", check_flag))

    @property
    def tensors(self) -> tuple[str, ...]:
        reference = ("ref_logprobs",) if self.kl_coef > 0.0 else ()
        return (*self._tensors, *reference, *(("importance_weights",) if self.weighted else ()))

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        log_ratio, advantages = logprobs - given["old_logprobs"], given["advantages"]
        return clipped(log_ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)

    def penalty(self, logprobs: Tensor, entropy: Tensor | None, given: Given) -> Tensor | None:
        return kl_and_entropy(self, logprobs, entropy, given)


@suggesting
def clip_fraction(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Return 1.0 at tokens whose gradient the clip removes, else 0.0; average it over your tokens.

    Shape:
        `[...]` each -> float32 `[...]`, without gradient; NaN where the ratio is and the
        advantage is not 0.
    """
    for (name, check), value in zip(CLIP, (clip_low, clip_high), strict=True):
        check(name, value)
    check_shape("advantages", advantages, logprobs)
    ratio = log_ratio_of(logprobs, old_logprobs, "old_logprobs").exp()
    high = (advantages > 0.0) & (ratio > 1.0 + clip_high)
    low = (advantages < 0.0) & (ratio < 1.0 - clip_low)
    return torch.where(ratio.isnan() & (advantages != 0.0), ratio, (high | low).float()).float()


@dataclass(frozen=True)
class IcePopLoss(TokenLoss):
    """The clipped objective on tokens where trainer and rollout engine agree (Ling Team, 2025).

        k = exp(old_logprobs - rollout_logprobs),   M = k if low <= k <= high else 0
        -M min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),   r = exp(logprobs - old_logprobs)

    old_logprobs are the trainer's of the weights that rolled out. Other tokens are dropped, not
    clipped: they have no gradient at all, but the paper counts them in the average.

    Called with (logprobs, entropy, old_logprobs, rollout_logprobs, advantages), all `[...]`.
    """

    low: float = 0.5
    high: float = 5.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    _tensors = ("old_logprobs", "rollout_logprobs", "advantages")
    _checks = CLIP

    def __post_init__(self) -> None:
        check_bounds("low", self.low, "high", self.high)
        super().__post_init__()

    def weighted_advantages(self, given: Given) -> Tensor:
        weights = masked_importance_weights(
            given["old_logprobs"], given["rollout_logprobs"], low=self.low, high=self.high
        )
        return masked_product(given["advantages"], weights)

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        log_ratio = logprobs - given["old_logprobs"]
        return clipped(log_ratio, given["advantages"], self.clip_low, self.clip_high)


@dataclass(frozen=True)
class SAPOLoss(TokenLoss):
    """Soft adaptive policy optimization (Gao et al., 2025): a smooth gate instead of the clip.

        -f(r) A,   f(r) = 4/tau sigmoid(tau (r - 1)),   r = exp(logprobs - old_logprobs)

    tau is tau_pos where A > 0, else tau_neg. On policy the gradient is the policy gradient; away
    from it the weight 4 s (1 - s) r, s = sigmoid(tau (r - 1)), falls smoothly to 0.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    _checks = each(check_positive, "tau_pos", "tau_neg")

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        advantages, log_ratio = given["advantages"], logprobs - given["old_logprobs"]
        tau = torch.full_like(log_ratio, self.tau_neg).masked_fill(advantages > 0.0, self.tau_pos)
        # Where tau (r - 1) is 40 and more, the gate is 1 and flat, in float64 too.
        ratio = exp_within(log_ratio, lambda r: torch.minimum(r, 1.0 + 40.0 / tau))
        return -advantages * (4.0 / tau) * (tau * (ratio - 1.0)).sigmoid()


@dataclass(frozen=True)
class SPOLoss(TokenLoss):
    """Simple policy optimization (Xie et al., 2401.16025): a parabola instead of the clip.

        -(r A - |A| / (2 clip) (r - 1)^2)

    Its best r is 1 + clip where A > 0 and 1 - clip where A < 0; past it the gradient leads back,
    as long as r is below e^35 (float32): the square of a larger one may overflow.
    """

    clip: float = 0.2
    _checks = each(check_positive, "clip")

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        # Its square is to be finite too.
        most = math.exp(largest_exponent(logprobs.dtype) / 2.0)
        ratio = exp_within(logprobs - given["old_logprobs"], lambda r: r.clamp(max=most))
        square = given["advantages"].abs() / (2.0 * self.clip) * (ratio - 1.0).square()
        return square - ratio * given["advantages"]


@dataclass(frozen=True)
class ImportanceLoss(TokenLoss):
    """-r A: importance sampling, neither clipped nor truncated (Tinker's importance_sampling).

    r is bounded only by the dtype's range (e^70 in float32).
    """

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        return -given["advantages"] * exp_within(logprobs - given["old_logprobs"])


@dataclass(frozen=True)
class IPOLoss(ImportanceLoss):
    """Importance sampling in a symmetric trust region of probabilities (Prime-RL's ipo).

        -M r A + kl_coef (log r)^2,   M = 1 where |p - p_old| <= threshold, else 0

    old_logprobs are the rollout engine's. A masked token keeps its KL term. Not the preference
    loss of the same name (Azar et al., 2023).
    """

    threshold: float = 0.1
    kl_coef: float = 1e-3
    _checks = each(check_not_negative, "threshold", "kl_coef")

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        far = (logprobs.detach().exp() - given["old_logprobs"].exp()).abs() > self.threshold
        return super().policy(logprobs, given).masked_fill(far, 0.0)

    def penalty(self, logprobs: Tensor, entropy: Tensor | None, given: Given) -> Tensor | None:
        return squared_log_ratio(self.kl_coef, logprobs, given["old_logprobs"])


def squared_log_ratio(coef: float, logprobs: Tensor, old_logprobs: Tensor) -> Tensor | None:
    """coef (log r)^2; None where coef is 0."""
    return 2.0 * coef * kl_k2(logprobs, old_logprobs) if coef > 0.0 else None


@dataclass(frozen=True)
class ReinforceLoss(TokenLoss):
    """-A log p. Called with (logprobs, entropy, advantages), all `[...]`."""

    _tensors = ("advantages",)

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        return -times(given["advantages"], logprobs)


@dataclass(frozen=True)
class GPGLoss(ReinforceLoss):
    """-A log p: group policy gradient (Chu et al., 2504.02546), REINFORCE with its own advantages.

    A = alpha (R - mean R) / F over the answers to a prompt, alpha = prompts / prompts whose rewards
    differ, F = 1 (or their standard deviation). Called with (logprobs, entropy, advantages).
    """


@dataclass(frozen=True)
class CISPOLoss(TokenLoss):
    """Clipped importance weights on REINFORCE: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p.

    Every token keeps a gradient; only its weight is clipped (MiniMax-M1, 2025). clip_low=None, or
    1 and more, does not clip small ratios, as in the paper. clip_high may be negative: the upper
    bound is 1 + clip_high, for example 0.9 with -0.1. It is at least the lower bound.
    """

    clip_high: float = 0.2
    clip_low: float | None = None
    _checks = (("clip_low", check_not_negative.optional), ("clip_high", check_above_minus_one))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_low is not None and -self.clip_low > self.clip_high:
            raise ValueError(
                f"clip_high: expected at least -clip_low {-self.clip_low!r}, got {self.clip_high!r}"
            )

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        ratio = (logprobs.detach() - given["old_logprobs"]).exp()
        floor = None if self.clip_low is None else 1.0 - self.clip_low
        weight = ratio.clamp(min=floor, max=1.0 + self.clip_high)
        return -times(times(given["advantages"], weight), logprobs)


@dataclass(frozen=True)
class DPPOLoss(TokenLoss):
    """Divergence proximal policy optimization (Qi et al., 2602.04879), binary approximation.

        -M sg(min(r, cap)) A log p
        M = 0 where A > 0, p > p_old and D > high; where A < 0, p < p_old and D > low; else 1

    D is |p - p_old| ("tv"), or KL(p_old, p) of this token against all others ("kl"). old_logprobs
    are the rollout engine's: the paper anchors the trust region to the policy that sampled.

    Attributes:
        low, high: 0.2 suits "tv"; for "kl" the authors take 0.05.
        cap: of the importance weight, which is truncated, not clipped.
    """

    divergence: str = "tv"
    low: float = 0.2
    high: float = 0.2
    cap: float = 20.0
    _checks = (
        ("divergence", one_of(("tv", "kl"))),
        ("cap", check_positive),
        *each(check_not_negative, "low", "high"),
    )

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        log_p, log_q, advantages = logprobs.detach(), given["old_logprobs"], given["advantages"]
        change = log_p.exp() - log_q.exp()
        distance = change.abs() if self.divergence == "tv" else binary_kl(log_q, log_p)
        above = (advantages > 0.0) & (change > 0.0) & (distance > self.high)
        below = (advantages < 0.0) & (change < 0.0) & (distance > self.low)
        weight = (log_p - log_q).exp().clamp(max=self.cap)
        return -times(times(advantages.masked_fill(above | below, 0.0), weight), logprobs)


@dataclass(frozen=True)
class SFTLoss(TokenLoss):
    """-log p, or -weight log p if weighted. Called with (logprobs, entropy[, weights]), `[...]`."""

    weighted: bool = False
    _checks = each(check_flag, "weighted")

    @property
    def tensors(self) -> tuple[str, ...]:
        return ("weights",) if self.weighted else ()

    def of_token(self, logprobs: Tensor, entropy: Tensor | None, given: Given) -> Tensor:
        return -times(given["weights"], logprobs) if self.weighted else -logprobs


@dataclass(frozen=True)
class DistillationLoss(TokenLoss):
    """On-policy distillation from the teacher's log-probability of the sampled token.

        policy gradient:  sg(min(r, cap) D) log p          else:  D

    D estimates KL(p, teacher) from the token: k1, k2 or k3. On the student's own samples k1's
    policy gradient is that of the reverse KL (Thinking Machines, 2025), as is k2's own gradient. It
    is SDPO's loss too (Huebotter et al., 2601.20802), whose teacher is the student with feedback in
    its prompt: cap=2.

    Called with (logprobs, entropy, teacher_logprobs), or with (..., old_logprobs,
    teacher_logprobs) if cap is given; all `[...]`.

    Attributes:
        kl: the estimator.
        policy_gradient: D is a cost without gradient; else its own gradient is taken, which for k1
            is 0 in expectation.
        cap: of the ratio to the policy that sampled; None: on policy, no ratio.
        clamp: D is kept within plus and minus this; None: as it is.
    """

    kl: str = "k1"
    policy_gradient: bool = True
    cap: float | None = None
    clamp: float | None = None
    _checks = (
        ("kl", one_of(KL)),
        ("policy_gradient", check_flag),
        *each(check_optional_positive, "cap", "clamp"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cap is not None and not self.policy_gradient:
            raise ValueError("cap: expected None without policy_gradient, which takes no ratio")

    @property
    def tensors(self) -> tuple[str, ...]:
        return ("teacher_logprobs",) if self.cap is None else ("old_logprobs", "teacher_logprobs")

    def of_token(self, logprobs: Tensor, entropy: Tensor | None, given: Given) -> Tensor:
        cost = KL[self.kl](logprobs, given["teacher_logprobs"])
        if self.clamp is not None:
            cost = cost.clamp(-self.clamp, self.clamp)
        if not self.policy_gradient:
            return cost
        weight = cost.detach()
        if self.cap is not None:
            ratio = (logprobs.detach() - given["old_logprobs"]).exp()
            weight = times(ratio.clamp(max=self.cap), weight)
        return times(weight, logprobs)
