"""Ready-made per-token losses, for `linear_policy_loss` and for plain log-probabilities alike.

A loss is a frozen dataclass of its settings. Called with `(logprobs, entropy or None, *per-token
tensors)`, all of one shape, it gives a loss for each token; average it as you like (with
`linear_policy_loss`, by `denominator`). Only logprobs and entropy carry a gradient.

    loss, stats = linear_policy_loss(hidden, weight, target, ClippedLoss(clip_high=0.28),
                                     old_logprobs, advantages, denominator=answer_tokens)

Losses of whole sequences (GSPO, DPO) need every token's log-probability before any token's
gradient, so they take two passes: one without gradient for the sequence's numbers, one with.

A finite loss has a finite gradient, however far the policies are apart. A token whose advantage (or
weight) is exactly 0 is masked: its policy term and that term's gradient are 0, whatever its
log-probability is, -inf and NaN included; KL and entropy terms are not masked by it.

Where the rollout engine's probabilities differ from the trainer's, weights and masks correct for
it. They have no gradient and multiply a token's advantage (`weighted=True` does that):

    weight of a token, r = p_train / p_rollout
    min(r, cap), at least floor                     `truncated_importance_weights`  (TIS)
    r if low <= r <= high, else 0                   `masked_importance_weights`     (IcePop, MIS)
    s or 1 if low <= s <= high, else 0; s of the    `masked_sequence_weights`       (Seq-MIS)
      whole sequence
    0 if A < 0 and the sequence is far off, else 1  `off_policy_sequence_mask`      (OPSM)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_logprobs.checks import (
    check_choice,
    check_flag,
    check_fraction,
    check_integer,
    check_not_negative,
    check_optional_above_one,
    check_positive,
)

__all__ = [
    "KL",
    "CISPOLoss",
    "ClippedLoss",
    "GSPOLoss",
    "IcePopLoss",
    "ReinforceLoss",
    "SAPOLoss",
    "SFTLoss",
    "clip_fraction",
    "dpo_advantages",
    "dpo_loss",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "masked_importance_weights",
    "masked_sequence_weights",
    "off_policy_sequence_mask",
    "sequence_mean",
    "sequence_sum",
    "truncated_importance_weights",
]


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p/q per token, x ~ p: unbiased for KL(p, q), may be negative.

    As a loss it does nothing: on policy its expected gradient, that of E[log p], is 0. Use it as a
    number to log, or in the reward (subtracted from the advantage, with `ReinforceLoss`), where it
    does give KL(p, q)'s gradient.

    The three estimators are J. Schulman's (Approximating KL Divergence, 2020), from samples of p.

    Shape:
        `[...]`, `[...]` -> `[...]`.
    """
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p/q)^2 / 2: biased, low variance.

    As a loss its expected gradient on policy, E[log(p/q) grad log p], is exactly that of the
    reverse KL(p, q).

    Shape:
        `[...]`, `[...]` -> `[...]`.
    """
    return 0.5 * (logprobs - ref_logprobs).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log q/p: unbiased and never negative; the KL term of GRPO.

    As a loss its expected gradient on policy, E[(1 - q/p) grad log p], is that of the forward
    KL(q, p), not of the KL(p, q) that its value estimates. The two agree to first order near p = q.

    Shape:
        `[...]`, `[...]` -> `[...]`.
    """
    log_ratio = ref_logprobs - logprobs
    # expm1: near q = p the value is log_ratio^2 / 2, which exp(x) - 1 - x would lose in float32.
    return torch.expm1(log_ratio) - log_ratio


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


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
    _check_bounds("floor", floor, "cap", cap)
    return _log_ratio(train_logprobs, rollout_logprobs).exp().clamp(min=floor, max=cap)


def masked_importance_weights(
    train_logprobs: Tensor, rollout_logprobs: Tensor, *, low: float = 0.5, high: float = 5.0
) -> Tensor:
    """r = p_train / p_rollout for each token where low <= r <= high, else 0; without gradient.

    IcePop's M(r; low, high) (Ling Team, 2025, with its defaults); with low=0 masked importance
    sampling by token. As weights of `ClippedLoss(weighted=True)` this is `IcePopLoss`.

    Shape:
        as `truncated_importance_weights`.
    """
    _check_bounds("low", low, "high", high)
    return _inside(_log_ratio(train_logprobs, rollout_logprobs).exp(), low, high)


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
    """One weight a sequence: its ratio s where low <= s <= high, else 0; without gradient.

    Masked importance sampling by sequence (Seq-MIS; Liu, Li et al., When Speed Kills Stability,
    2025): rho(y) 1[rho(y) <= C]. A sequence that the trainer finds too unlike the rollout engine is
    dropped whole, so that no part of it biases the gradient.

    Needs every token of the sequence: under context parallelism gather the log-probabilities first
    (`context_parallel_gather`), and pass the weights, expanded, as per-token tensors.

    Shape:
        train_logprobs, rollout_logprobs, mask: as `sequence_sum`'s -> `[b, 1]` (`[1, b]`).

    Args:
        ratio: "product", s = prod r; or "mean", its geometric mean (prod r)^(1/tokens), which does
            not depend on the sequence's length.
        weighted: False gives 1 instead of s: only the mask.
    """
    _check_bounds("low", low, "high", high)
    check_choice("ratio", ratio, ("product", "mean"))
    check_flag("weighted", weighted)
    reduce = sequence_sum if ratio == "product" else sequence_mean
    log_ratio = reduce(_log_ratio(train_logprobs, rollout_logprobs), mask, seq_dim=seq_dim)
    s = log_ratio.exp()
    # A product of many tokens may be 0 in this dtype, and within the bounds.
    return _inside(s, low, high, s if weighted else torch.where(s.isnan(), s, 1.0))


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
        logprobs, rollout_logprobs, mask: as `sequence_sum`'s `[b, s]`; advantages broadcasts to
        them -> `[b, s]`, without gradient.

    Args:
        delta: at least 0, in nats a token; a hyperparameter.
    """
    check_not_negative("delta", delta)
    drift = sequence_mean(_log_ratio(rollout_logprobs, logprobs), mask, seq_dim=seq_dim)
    far = torch.where(drift > delta, 0.0, torch.where(drift.isnan(), drift, 1.0))
    kept = torch.where(advantages.detach() < 0.0, far, 1.0)
    return kept.to(logprobs.dtype).expand_as(logprobs)


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
        weighted: multiply the clipped term (not KL and entropy) by importance weights, at least 0.
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
        check_optional_above_one("dual_clip", self.dual_clip)
        check_choice("kl", self.kl, tuple(KL))
        check_not_negative("kl_coef", self.kl_coef)
        check_not_negative("entropy_coef", self.entropy_coef)
        check_flag("weighted", self.weighted)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, *tensors: Tensor) -> Tensor:
        names = ["old_logprobs", "advantages"]
        names += ["ref_logprobs"] if self.kl_coef > 0.0 else []
        names += ["importance_weights"] if self.weighted else []
        given = _named(names, tensors, logprobs)
        advantages = given["advantages"]
        if self.weighted:
            advantages = _times(advantages, given["importance_weights"])
        log_ratio = logprobs - given["old_logprobs"]
        loss = _clipped(log_ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)
        if self.kl_coef > 0.0:
            loss = loss + self.kl_coef * KL[self.kl](logprobs, given["ref_logprobs"])
        if self.entropy_coef > 0.0:
            if entropy is None:
                raise ValueError("entropy_coef > 0: pass entropy=True, got no entropy")
            _check_shape("entropy", entropy, logprobs)
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
        `[...]` each -> float32 `[...]`, without gradient; NaN where the ratio is.
    """
    _check_clip(clip_low, clip_high)
    _check_shape("advantages", advantages, logprobs)
    ratio = _log_ratio(logprobs, old_logprobs).exp()
    high = (advantages > 0.0) & (ratio > 1.0 + clip_high)
    low = (advantages < 0.0) & (ratio < 1.0 - clip_low)
    return torch.where(ratio.isnan() & (advantages != 0.0), ratio, (high | low).float()).float()


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
        given = _named(["old_logprobs", "advantages"], tensors, logprobs)
        ratio = (logprobs.detach() - given["old_logprobs"]).exp()
        floor = None if self.clip_low is None else 1.0 - self.clip_low
        weight = ratio.clamp(min=floor, max=1.0 + self.clip_high)
        return -_times(_times(given["advantages"], weight), logprobs)


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
        given = _named(["first_logprobs", "sequence_log_ratio", "advantages"], tensors, logprobs)
        log_ratio = given["sequence_log_ratio"] + (logprobs - given["first_logprobs"])
        return _clipped(log_ratio, given["advantages"], self.clip_low, self.clip_high)


@dataclass(frozen=True)
class IcePopLoss:
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

    def __post_init__(self) -> None:
        _check_bounds("low", self.low, "high", self.high)
        _check_clip(self.clip_low, self.clip_high)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, *tensors: Tensor) -> Tensor:
        given = _named(["old_logprobs", "rollout_logprobs", "advantages"], tensors, logprobs)
        old = given["old_logprobs"]
        weights = masked_importance_weights(
            old, given["rollout_logprobs"], low=self.low, high=self.high
        )
        advantages = _times(given["advantages"], weights)
        return _clipped(logprobs - old, advantages, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class SAPOLoss:
    """Soft adaptive policy optimisation (Gao et al., 2025): a smooth gate in place of the clip.

        -f(r) A,   f(r) = 4/tau sigmoid(tau (r - 1)),   r = exp(logprobs - old_logprobs)

    tau is tau_pos where A > 0, else tau_neg. On policy the gradient is the policy gradient; away
    from it the weight 4 s (1 - s) r, s = sigmoid(tau (r - 1)), falls smoothly to 0.

    Called with (logprobs, entropy, old_logprobs, advantages), all `[...]`.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        check_positive("tau_pos", self.tau_pos)
        check_positive("tau_neg", self.tau_neg)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, *tensors: Tensor) -> Tensor:
        given = _named(["old_logprobs", "advantages"], tensors, logprobs)
        advantages = given["advantages"]
        log_ratio = (logprobs - given["old_logprobs"]).masked_fill(advantages == 0.0, 0.0)
        tau = torch.full_like(log_ratio, self.tau_neg).masked_fill(advantages > 0.0, self.tau_pos)
        # Where tau (r - 1) is 40 and more, the gate is 1 and flat, in float64 too.
        ratio = _exp_within(log_ratio, torch.minimum(log_ratio.detach().exp(), 1.0 + 40.0 / tau))
        return -advantages * (4.0 / tau) * (tau * (ratio - 1.0)).sigmoid()


@dataclass(frozen=True)
class ReinforceLoss:
    """-A log p. Called with (logprobs, entropy, advantages), all `[...]`."""

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, *tensors: Tensor) -> Tensor:
        return -_times(_named(["advantages"], tensors, logprobs)["advantages"], logprobs)


@dataclass(frozen=True)
class SFTLoss:
    """-log p, or -weight log p if weighted. Called with (logprobs, entropy[, weights]), `[...]`."""

    weighted: bool = False

    def __post_init__(self) -> None:
        check_flag("weighted", self.weighted)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, *tensors: Tensor) -> Tensor:
        given = _named(["weights"] if self.weighted else [], tensors, logprobs)
        return -_times(given["weights"], logprobs) if self.weighted else -logprobs


def sequence_sum(values: Tensor, mask: Tensor, *, seq_dim: int = 1) -> Tensor:
    """Each sequence's sum over its unmasked tokens, kept in shape to broadcast back.

    Under context parallelism gather the values first (`context_parallel_gather`).

    Shape:
        values, mask (bool or 0/1): `[b, s]` (or `[s, b]` with seq_dim=0) -> `[b, 1]` (`[1, b]`).

    Raises:
        ValueError: a mask of another shape or (on a CPU; elsewhere a device-side assert) that holds
            anything but 0 and 1; a seq_dim that is no dimension.
    """
    return torch.where(_counted(mask, values, seq_dim), values, 0.0).sum(seq_dim, keepdim=True)


def sequence_mean(values: Tensor, mask: Tensor, *, seq_dim: int = 1) -> Tensor:
    """As `sequence_sum`, divided by the number of unmasked tokens (by 1 where there is none).

    Shape:
        values, mask: `[b, s]` (or `[s, b]` with seq_dim=0) -> `[b, 1]` (`[1, b]`).
    """
    counted = _counted(mask, values, seq_dim)
    tokens = counted.sum(seq_dim, keepdim=True).clamp(min=1)
    return torch.where(counted, values, 0.0).sum(seq_dim, keepdim=True) / tokens


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
    loss = -(1.0 - label_smoothing) * F.logsigmoid(margin)
    if label_smoothing > 0.0:
        loss = loss - label_smoothing * F.logsigmoid(-margin)
    return loss


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


def _clipped(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """-min(r A, clip(r) A), r = exp(log_ratio), and no more than -dual_clip A where A < 0.

    That is -r A with r at most 1 + clip_high where A > 0, and from 1 - clip_low to dual_clip where
    A < 0.
    """
    log_ratio = log_ratio.masked_fill(advantages == 0.0, 0.0)
    ratio = log_ratio.detach().exp()
    falls = ratio.clamp(1.0 - clip_low, dual_clip)
    bounded = torch.where(advantages > 0.0, ratio.clamp(max=1.0 + clip_high), falls)
    return -advantages * _exp_within(log_ratio, bounded)


def _exp_within(log_ratio: Tensor, bounded: Tensor) -> Tensor:
    """exp(log_ratio) where `bounded` is just that; elsewhere `bounded`, and no gradient.

    No gradient is not 0 times exp's, which is inf where exp overflows.
    """
    ratio = log_ratio.detach().exp()
    clipped = (ratio != bounded) & ~ratio.isnan()
    return torch.where(clipped, bounded, log_ratio.masked_fill(clipped, 0.0).exp())


def _times(weight: Tensor, value: Tensor) -> Tensor:
    """weight * value, and 0 with a gradient of 0 for value where weight is 0, whatever value is."""
    return weight * value.masked_fill(weight == 0.0, 0.0)


def _inside(ratio: Tensor, low: float, high: float, kept: Tensor | None = None) -> Tensor:
    """`kept`, by default the ratio itself, where it is within the bounds or NaN, else 0."""
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio if kept is None else kept)


def _log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """log p / q of log-probabilities of one shape, without gradient."""
    _check_shape("logprobs", other, logprobs)
    return logprobs.detach() - other.detach()


def _counted(mask: Tensor, values: Tensor, seq_dim: int) -> Tensor:
    """The mask as bool, of the values' shape."""
    _check_shape("mask", mask, values)
    check_integer("seq_dim", seq_dim)
    if not -values.dim() <= seq_dim < values.dim():
        raise ValueError(f"seq_dim: out of range for shape {tuple(values.shape)}, got {seq_dim}")
    if mask.dtype is torch.bool:
        return mask
    fits = ((mask == 0) | (mask == 1)).all()
    if mask.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(fits, "mask: expected 0 and 1 alone")
    elif not fits:
        raise ValueError("mask: expected 0 (not counted) and 1 (counted) alone, got other numbers")
    return mask != 0


def _check_bounds(low_name: str, low: float, high_name: str, high: float) -> None:
    check_positive(high_name, high)
    check_not_negative(low_name, low)
    if low > high:
        raise ValueError(
            f"{low_name}: expected a number >= 0 and at most {high_name} {high!r}, got {low!r}"
        )


def _check_clip(clip_low: float, clip_high: float) -> None:
    check_fraction("clip_low", clip_low)
    check_not_negative("clip_high", clip_high)


def _check_shape(name: str, tensor: Any, like: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.shape != like.shape:
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name}: expected the shape {tuple(like.shape)} of the others, got {got}")


def _named(names: list[str], tensors: tuple[Tensor, ...], logprobs: Tensor) -> dict[str, Tensor]:
    if len(names) != len(tensors):
        raise ValueError(f"loss: expected the per-token tensors {names}, got {len(tensors)}")
    for name, tensor in zip(names, tensors, strict=True):
        _check_shape(name, tensor, logprobs)
    return {name: tensor.detach() for name, tensor in zip(names, tensors, strict=True)}
