"""Ready-made per-token losses, for `linear_policy_loss` and for plain log-probabilities alike.

A loss is a frozen dataclass of its settings. Called with `(logprobs, entropy or None, *per-token
tensors)`, all of one shape, it gives a loss for each token; average it as you like (with
`linear_policy_loss`, by `denominator`). Only logprobs and entropy carry a gradient.

    loss, stats = linear_policy_loss(hidden, weight, target, ClippedLoss(clip_high=0.28),
                                     old_logprobs, advantages, denominator=answer_tokens)

Losses of whole sequences (GSPO, DPO) need every token's log-probability before any token's
gradient, so they take two passes: one without gradient for the sequence's numbers, one with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_logprobs.checks import check_fraction, check_positive

__all__ = [
    "KL",
    "CISPOLoss",
    "ClippedLoss",
    "GSPOLoss",
    "ReinforceLoss",
    "SFTLoss",
    "clip_fraction",
    "dpo_advantages",
    "dpo_loss",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "sequence_mean",
    "sequence_sum",
    "truncated_importance_weights",
]


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p/q per token, x ~ p: unbiased for KL(p, q), may be negative.

    The three estimators are J. Schulman's (Approximating KL Divergence, 2020), from samples of p.

    Shape:
        `[...]`, `[...]` -> `[...]`.
    """
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p/q)^2 / 2: biased, low variance; its gradient is that of KL(p, q) in expectation.

    Shape:
        `[...]`, `[...]` -> `[...]`.
    """
    return 0.5 * (logprobs - ref_logprobs).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log q/p: unbiased and never negative; the KL term of GRPO.

    Shape:
        `[...]`, `[...]` -> `[...]`.
    """
    log_ratio = ref_logprobs - logprobs
    # expm1: near q = p the value is log_ratio^2 / 2, which exp(x) - 1 - x would lose in float32.
    return torch.expm1(log_ratio) - log_ratio


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def truncated_importance_weights(
    train_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float = 2.0
) -> Tensor:
    """min(p_train / p_rollout, cap) for each token, without gradient.

    Corrects for a rollout engine whose probabilities differ from the trainer's under the same
    weights (other kernels, other precision); cap bounds the variance. Multiply a token's loss, or
    its advantage, by it.

    Shape:
        `[...]`, `[...]` -> `[...]`. train_logprobs are of the weights that rolled out.
    """
    check_positive("cap", cap)
    return (train_logprobs.detach() - rollout_logprobs).exp().clamp(max=cap)


@dataclass(frozen=True)
class ClippedLoss:
    """PPO's and GRPO's clipped objective, negated, with optional dual clip, KL and entropy terms.

        r = exp(logprobs - old_logprobs)
        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  [+ kl_coef KL]  [- entropy_coef H]

    clip_high > clip_low is DAPO's clip-higher. With dual_clip = c > 1, a token of negative
    advantage loses at most -c A (Ye et al., 2020).

    Called with (logprobs, entropy, old_logprobs, advantages), then ref_logprobs if kl_coef > 0,
    then importance weights (see `truncated_importance_weights`) if weighted; all `[...]`.

    Attributes:
        kl: "k1", "k2" or "k3".
        weighted: multiply the clipped term (not KL and entropy) by importance weights.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl: str = "k3"
    entropy_coef: float = 0.0
    weighted: bool = False

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"dual_clip: expected None or a number > 1, got {self.dual_clip!r}")
        if self.kl not in KL:
            raise ValueError(f"kl: expected one of {tuple(KL)}, got {self.kl!r}")
        for name in ("kl_coef", "entropy_coef"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name}: expected a number >= 0, got {getattr(self, name)!r}")

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, *tensors: Tensor) -> Tensor:
        names = ["old_logprobs", "advantages"]
        names += ["ref_logprobs"] if self.kl_coef > 0.0 else []
        names += ["importance_weights"] if self.weighted else []
        given = _named(names, tensors)
        advantages = given["advantages"]
        loss = _clipped(
            (logprobs - given["old_logprobs"]).exp(), advantages, self.clip_low, self.clip_high
        )
        if self.dual_clip is not None:
            bounded = torch.minimum(loss, -self.dual_clip * advantages)
            loss = torch.where(advantages < 0.0, bounded, loss)
        if self.weighted:
            loss = loss * given["importance_weights"]
        if self.kl_coef > 0.0:
            loss = loss + self.kl_coef * KL[self.kl](logprobs, given["ref_logprobs"])
        if self.entropy_coef > 0.0:
            if entropy is None:
                raise ValueError("entropy_coef > 0: pass entropy=True, got no entropy")
            loss = loss - self.entropy_coef * entropy
        return loss


def clip_fraction(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """1.0 where the clip takes a token's gradient away, else 0.0; average it over your tokens.

    Shape:
        `[...]` each -> float32 `[...]`, without gradient.
    """
    ratio = (logprobs.detach() - old_logprobs).exp()
    high = (advantages > 0.0) & (ratio > 1.0 + clip_high)
    low = (advantages < 0.0) & (ratio < 1.0 - clip_low)
    return (high | low).float()


@dataclass(frozen=True)
class CISPOLoss:
    """Clipped importance weights on REINFORCE: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p.

    Every token keeps a gradient; only its weight is clipped (MiniMax-M1, 2025). clip_low=None
    leaves small ratios alone, as the paper does.

    Called with (logprobs, entropy, old_logprobs, advantages), all `[...]`.
    """

    clip_high: float = 0.2
    clip_low: float | None = None

    def __post_init__(self) -> None:
        _check_clip(0.0 if self.clip_low is None else self.clip_low, self.clip_high)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, *tensors: Tensor) -> Tensor:
        given = _named(["old_logprobs", "advantages"], tensors)
        ratio = (logprobs.detach() - given["old_logprobs"]).exp()
        floor = None if self.clip_low is None else 1.0 - self.clip_low
        return -ratio.clamp(min=floor, max=1.0 + self.clip_high) * given["advantages"] * logprobs


@dataclass(frozen=True)
class GSPOLoss:
    """The clipped objective with one importance ratio a sequence (Zheng et al., 2025), two passes.

        s = exp(mean over the sequence of (logprobs - old_logprobs)),   -min(s A, clip(s) A)

    The first pass, without gradient, gives the logprobs and with `sequence_mean` log s of each
    token's sequence. The second is this loss: s with the gradient of the token's own
    log-probability. Its sum over a sequence's tokens, divided by their number, has GSPO's value and
    gradient: put the division into the advantages.

    Called with (logprobs, entropy, first_logprobs, sequence_log_ratio, advantages), all `[...]`.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, *tensors: Tensor) -> Tensor:
        given = _named(["first_logprobs", "sequence_log_ratio", "advantages"], tensors)
        ratio = (given["sequence_log_ratio"] + logprobs - given["first_logprobs"]).exp()
        return _clipped(ratio, given["advantages"], self.clip_low, self.clip_high)


@dataclass(frozen=True)
class ReinforceLoss:
    """-A log p. Called with (logprobs, entropy, advantages), all `[...]`."""

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, *tensors: Tensor) -> Tensor:
        return -_named(["advantages"], tensors)["advantages"] * logprobs


@dataclass(frozen=True)
class SFTLoss:
    """-log p, or -weight log p if weighted. Called with (logprobs, entropy[, weights]), `[...]`."""

    weighted: bool = False

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, *tensors: Tensor) -> Tensor:
        given = _named(["weights"] if self.weighted else [], tensors)
        return -given["weights"] * logprobs if self.weighted else -logprobs


def sequence_sum(values: Tensor, mask: Tensor, *, seq_dim: int = 1) -> Tensor:
    """Each sequence's sum over its unmasked tokens, kept in shape to broadcast back.

    Under context parallelism gather the values first (`context_parallel_gather`).

    Shape:
        values, mask (bool or 0/1): `[b, s]` (or `[s, b]` with seq_dim=0) -> `[b, 1]` (`[1, b]`).
    """
    return torch.where(mask.bool(), values, 0.0).sum(seq_dim, keepdim=True)


def sequence_mean(values: Tensor, mask: Tensor, *, seq_dim: int = 1) -> Tensor:
    """As `sequence_sum`, divided by the number of unmasked tokens (by 1 where there is none).

    Shape:
        values, mask: `[b, s]` (or `[s, b]` with seq_dim=0) -> `[b, 1]` (`[1, b]`).
    """
    tokens = mask.bool().sum(seq_dim, keepdim=True).clamp(min=1)
    return sequence_sum(values, mask, seq_dim=seq_dim) / tokens


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Direct preference optimisation (Rafailov et al., 2023) for each pair.

        -(1 - a) log sigmoid(margin) - a log sigmoid(-margin)
        margin = beta ((chosen - ref_chosen) - (rejected - ref_rejected))

    Shape:
        sequences' log-probabilities (see `sequence_sum`), `[...]` each -> `[...]`. Differentiable.
    """
    margin = _dpo_margin(chosen, rejected, ref_chosen, ref_rejected, beta, label_smoothing)
    smoothed = label_smoothing * F.logsigmoid(-margin)
    return -(1.0 - label_smoothing) * F.logsigmoid(margin) - smoothed


def dpo_advantages(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """What turns `ReinforceLoss` into `dpo_loss`, for the second of two passes.

    The gradient of `dpo_loss` by a token's log-probability is the same for all tokens of a
    sequence. With these numbers as every token's advantage, `ReinforceLoss` in `linear_policy_loss`
    has exactly that gradient (its value is not the loss: take that from the first pass).

    Shape:
        as `dpo_loss` -> (for the chosen, for the rejected), `[...]` each, without gradient.
    """
    margin = _dpo_margin(chosen, rejected, ref_chosen, ref_rejected, beta, label_smoothing).detach()
    pull = beta * (
        (1.0 - label_smoothing) * (-margin).sigmoid() - label_smoothing * margin.sigmoid()
    )
    return pull, -pull


def _dpo_margin(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    check_positive("beta", beta)
    check_fraction("label_smoothing", label_smoothing)
    return beta * ((chosen - ref_chosen) - (rejected - ref_rejected))


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, bounded * advantages)


def _check_clip(clip_low: float, clip_high: float) -> None:
    check_fraction("clip_low", clip_low)
    if not clip_high >= 0.0:
        raise ValueError(f"clip_high: expected a number >= 0, got {clip_high!r}")


def _named(names: list[str], tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    if len(names) != len(tensors):
        raise ValueError(f"loss: expected the per-token tensors {names}, got {len(tensors)}")
    return {name: tensor.detach() for name, tensor in zip(names, tensors, strict=True)}
