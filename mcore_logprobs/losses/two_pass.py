"""Objectives that need a whole sequence's or batch's numbers before any token's gradient.

The first pass, without gradient, gives the log-probabilities; `second_pass` makes of them the
tensors that the loss is called with in the second, by name:

    objective = GSPOLoss()
    with torch.no_grad():
        first = linear_token_stats(hidden, weight, target)
    numbers = objective.second_pass(first.logprobs, old_logprobs, advantages, answer_mask)
    per_token = [numbers[name] for name in objective.tensors]
    loss, stats = linear_policy_loss(hidden, weight, target, objective, *per_token)

Each token's loss has the gradient that the objective of the whole has by that token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_logprobs.checks import (
    Check,
    check_flag,
    check_fraction,
    check_integer,
    check_not_negative,
    check_number,
    check_optional_above_one,
    check_optional_positive,
    check_positive,
    check_top_p,
    one_of,
)
from mcore_logprobs.kernels.scan import running_sum
from mcore_logprobs.losses.base import (
    CLIP,
    Checks,
    Given,
    TokenLoss,
    each,
    sequence_mean,
    sequence_sum,
)
from mcore_logprobs.losses.batch import choose_in_batch
from mcore_logprobs.losses.one_pass import (
    ClippedLoss,
    ImportanceLoss,
    clip_fraction,
    squared_log_ratio,
)
from mcore_logprobs.losses.per_token import clipped, exp_within, times

__all__ = [
    "ClipCovLoss",
    "DROLoss",
    "FIPOLoss",
    "GMPOLoss",
    "GSPOLoss",
    "KLCovLoss",
    "KimiLoss",
    "LUSPOLoss",
    "M2POLoss",
    "TOPRLoss",
    "VESPOLoss",
]


@dataclass(frozen=True)
class GSPOLoss(TokenLoss):
    """The clipped objective with one importance ratio per sequence (Zheng et al., 2025).

        s = exp(mean over the sequence of (logprobs - old_logprobs)),   -min(s A, clip(s) A)

    The first pass, without gradient, gives the logprobs and with `sequence_mean` log s of each
    token's sequence. The second is this loss: s with the gradient of the token's own
    log-probability. Its sum over a sequence's tokens, divided by their number, has GSPO's value and
    gradient: `aggregation(mode="sequence")`, or put the division into the advantages.

    Called with (logprobs, entropy, first_logprobs, sequence_log_ratio, advantages), all `[...]`.

    Attributes:
        dual_clip: of s, as `ClippedLoss`'s of r: a sequence of negative advantage loses at most
            -dual_clip A. Two-sided clipping (TRL's delta) for dual_clip > 1 + clip_high.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    dual_clip: float | None = None
    _tensors = ("first_logprobs", "sequence_log_ratio", "advantages")
    _passes = 2
    _checks = (*CLIP, ("dual_clip", check_optional_above_one))

    def numbers(self, given: Given) -> dict[str, Tensor]:
        log_s = sequence_mean(given["log_ratio"], given["mask"], seq_dim=given["seq_dim"])
        return {"first_logprobs": given["logprobs"], "sequence_log_ratio": log_s}

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        # Of a token at -inf in both passes the sequence's ratio is 0, and there is no step.
        never = (logprobs == -torch.inf) & (given["first_logprobs"] == -torch.inf)
        step = (logprobs - given["first_logprobs"]).masked_fill(never, 0.0)
        log_ratio = given["sequence_log_ratio"] + step
        bounds = (self.clip_low, self.clip_high, self.dual_clip)
        return clipped(log_ratio, given["advantages"], *bounds)


@dataclass(frozen=True)
class LUSPOLoss(GSPOLoss):
    """GSPO times the sequence's length (Liu et al., 2602.05261): -|y| min(s A, clip(s) A).

    `GSPOLoss` summed over a sequence's tokens, not divided by their number:
    `aggregation(mode="constant", length=1)`. The clips are the paper's. Called as `GSPOLoss`.
    """

    clip_low: float = 2e-3
    clip_high: float = 2.5e-3


@dataclass(frozen=True)
class GMPOLoss(TokenLoss):
    """The geometric mean of clipped token ratios (Zhao et al., 2507.20673), two passes.

        -s A,   s = exp(mean over the sequence of x),   x = log r, at most clip_high where A > 0
                                                           and at least -clip_low where A < 0

    A clipped token has no gradient, but counts in s. Divided by the sequence's tokens, as GSPO:
    `aggregation(mode="sequence")`. The clips are of log r: r within e^-0.4 and e^0.4.

    Called with (logprobs, entropy, old_logprobs, sequence_log_ratio, advantages), all `[...]`.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4
    _tensors = ("old_logprobs", "sequence_log_ratio", "advantages")
    _passes = 2
    _checks = each(check_not_negative, "clip_low", "clip_high")

    def _clip(self, x: Tensor, advantages: Tensor) -> Tensor:
        rises, falls = x.clamp(max=self.clip_high), x.clamp(min=-self.clip_low)
        return torch.where(advantages > 0.0, rises, falls)

    def numbers(self, given: Given) -> dict[str, Tensor]:
        x = self._clip(given["log_ratio"], given["advantages"])
        return {"sequence_log_ratio": sequence_mean(x, given["mask"], seq_dim=given["seq_dim"])}

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        x = self._clip(logprobs - given["old_logprobs"], given["advantages"])
        x = x.masked_fill(x.isinf(), 0.0)
        return -given["advantages"] * exp_within(given["sequence_log_ratio"] + (x - x.detach()))


_LEVEL: Checks = (("level", one_of(("sequence", "token"))),)


class _OfSequence(TokenLoss):
    """Objectives with w, the product of a sequence's ratios; or by level="token" of a token."""

    level: str = "sequence"

    @property
    def passes(self) -> int:
        return 2 if self.level == "sequence" else 1

    @property
    def tensors(self) -> tuple[str, ...]:
        return ("sequence_log_ratio", "advantages") if self.passes == 2 else self._tensors

    def numbers(self, given: Given) -> dict[str, Tensor]:
        log_w = sequence_sum(given["log_ratio"], given["mask"], seq_dim=given["seq_dim"])
        return {"sequence_log_ratio": log_w}


@dataclass(frozen=True)
class TOPRLoss(_OfSequence):
    """Tapered off-policy REINFORCE (Le Roux et al., 2503.14286), two passes.

        -A log p where A > 0,   -sg(min(w, 1)) A log p where A < 0

    w is the product of the sequence's ratios. The sum is over tokens, the mean over sequences:
    `aggregation(mode="constant", length=1)`.

    Called with (logprobs, entropy, sequence_log_ratio, advantages), all `[...]`.

    Attributes:
        level: "token" takes the token's own ratio for w, and one pass: called with (logprobs,
            entropy, old_logprobs, advantages), as in ROLL's topr. There the score of the sequence,
            not A, decides which tokens are tapered.
    """

    level: str = "sequence"
    _checks = _LEVEL

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        if self.level == "token":
            log_w = logprobs.detach() - given["old_logprobs"]
        else:
            log_w = given["sequence_log_ratio"]
        taper = log_w.clamp(max=0.0).exp().masked_fill(given["advantages"] > 0.0, 1.0)
        return -times(times(given["advantages"], taper), logprobs)


@dataclass(frozen=True)
class VESPOLoss(_OfSequence):
    """Variational sequence-level soft policy optimization (Shen et al., 2602.10693), two passes.

        -sg(phi(w)) A log p,   phi(w) = w^k exp(lambda (1 - w))

    w is the product of the sequence's ratios; k and lambda are those of A's sign (the paper's c1
    and c2). phi is 1 on policy and falls to 0 far from it; its largest value, at w = k / lambda, is
    1.2 by default. The paper's objective is a sequence's (`aggregation(mode="constant",
    length=1)`); TRL takes the mean over all tokens.

    Called with (logprobs, entropy, sequence_log_ratio, advantages), all `[...]`.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0
    _checks = each(check_positive, "k_pos", "lambda_pos", "k_neg", "lambda_neg")

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        # phi of e^20 is 0 in every dtype, and inf - inf is not met.
        log_w = given["sequence_log_ratio"].clamp(max=20.0)
        slope = 1.0 - log_w.exp()
        rises = (self.k_pos * log_w + self.lambda_pos * slope).exp()
        falls = (self.k_neg * log_w + self.lambda_neg * slope).exp()
        phi = torch.where(given["advantages"] > 0.0, rises, falls)
        return -times(times(given["advantages"], phi), logprobs)


@dataclass(frozen=True)
class DROLoss(_OfSequence):
    """Direct reward optimization (Richemond et al., 2405.19107), two passes.

        -A log p(y) + tau/2 (log p(y)/p_old(y))^2

    of a sequence y, A its reward less its value. The sum is over the sequence's tokens, the mean
    over sequences: `aggregation(mode="constant", length=1)`. The gradient is that of the formula;
    the value is that of -A log p + tau log w log p, w the product of the sequence's ratios.

    Called with (logprobs, entropy, sequence_log_ratio, advantages), all `[...]`. An advantage of 0
    does not mask the square.

    Attributes:
        level: "token" (verl's dro, ROLL's kimi15) has the formula of each token, and one pass:
            called with (logprobs, entropy, old_logprobs, advantages).
    """

    tau: float = 1.0
    level: str = "sequence"
    _checks = (*_LEVEL, ("tau", check_positive))

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        # Of an impossible token the square is inf, and outweighs -A log p of either sign.
        return -times(given["advantages"], logprobs.masked_fill(logprobs.isneginf(), 0.0))

    def penalty(self, logprobs: Tensor, entropy: Tensor | None, given: Given) -> Tensor | None:
        if self.level == "token":
            return squared_log_ratio(0.5 * self.tau, logprobs, given["old_logprobs"])
        return self.tau * times(given["sequence_log_ratio"], logprobs)


@dataclass(frozen=True)
class KimiLoss(DROLoss):
    """Kimi k1.5's policy mirror descent (2501.12599, eq. 3): `DROLoss`'s formula.

    A = R - mean R over the answers to a prompt; p_old is the policy at the iteration's start. tau
    is ROLL's.
    """

    tau: float = 0.1


@dataclass(frozen=True)
class FIPOLoss(ClippedLoss):
    """The clipped objective weighted by what follows a token (Ma et al., 2603.19835), two passes.

        f = exp(sum over k >= t of gamma^(k - t) log r_k), within [1, 1 + weight_clip]
        -f min(r A, clip(r) A), and no more than -dual_clip f A where A < 0

    gamma = 2^(-1 / half_life). Tokens with r > dual_clip are left out of the sum; where A < 0 and
    r > safety, f is within [0.8, 1]. f has no gradient. Mean over the batch's tokens.

    Called as `ClippedLoss(weighted=True)`, with f as the importance weights.

    Attributes:
        high_only: False: f within [1 - weight_clip, 1 + weight_clip].
        safety: None: no such bound.
    """

    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    weighted: bool = True
    half_life: float = 32.0
    weight_clip: float = 0.2
    high_only: bool = True
    safety: float | None = 4.0
    _passes = 2
    _checks = (
        *ClippedLoss._checks,
        ("weighted", Check("True", lambda v: v is True)),
        ("half_life", check_positive),
        ("weight_clip", check_fraction),
        ("high_only", check_flag),
        ("safety", check_optional_positive),
    )

    def numbers(self, given: Given) -> dict[str, Tensor]:
        log_ratio, seq_dim = given["log_ratio"], given["seq_dim"]
        ratio, valid_mask = log_ratio.exp(), given["mask"]
        if self.dual_clip is not None:
            valid_mask = valid_mask & ~(ratio > self.dual_clip)
        ahead = torch.where(valid_mask, log_ratio, 0.0).movedim(seq_dim, -1)
        ahead = _discounted_ahead(ahead, 2.0 ** (-1.0 / self.half_life)).movedim(-1, seq_dim)
        low = 1.0 if self.high_only else 1.0 - self.weight_clip
        weights = ahead.exp().clamp(low, 1.0 + self.weight_clip)
        if self.safety is not None:
            risky = (given["advantages"] < 0.0) & (ratio > self.safety)
            weights = torch.where(risky, weights.clamp(0.8, 1.0), weights)
        return {"importance_weights": weights}


def _discounted_ahead(values: Tensor, gamma: float) -> Tensor:
    """`[..., s]` -> sum over k >= t of gamma^(k - t) values_k, in float64.

    Each step doubles the tokens that a sum has, until it has all of them or the next factor is 0.
    """
    ahead, reach = values.double(), 1
    while reach < values.shape[-1] and gamma**reach > 0.0:
        further = F.pad(ahead[..., reach:], (0, reach))
        ahead = ahead + gamma**reach * further
        reach *= 2
    return ahead.to(values.dtype)


class _OfBatch(TokenLoss):
    """Objectives that choose tokens among all of a batch; the others have an advantage of 0."""

    _passes = 2
    _of_batch = True

    def choose(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
        """The tokens that the objective chooses of the batch's unmasked ones: `[n]` each -> bool
        `[n]`.
        """
        raise NotImplementedError

    def numbers(self, given: Given) -> dict[str, Tensor]:
        values = (given["logprobs"], given["old_logprobs"], given["advantages"])
        chosen = choose_in_batch(self.choose, given["mask"], given["group"], *values)
        return {"chosen": chosen, "advantages": times(chosen, given["advantages"])}


# Of (log r)^2, so that sums of them are finite.
_LARGEST_SQUARE = 1e200


@dataclass(frozen=True)
class M2POLoss(_OfBatch, ImportanceLoss):
    """Second-moment trust policy optimization (Zheng et al., 2510.01161), two passes.

        -M r A,   M = 0 at the tokens of largest (log r)^2, as few as bring the others' mean
                  (log r)^2 below `threshold`; else 1

    over all tokens of the batch; at least one stays. r is not clipped. Mean over all tokens, masked
    ones included.

    Called with (logprobs, entropy, old_logprobs, advantages), all `[...]`; M is in the advantages.
    """

    threshold: float = 0.04
    _checks = each(check_positive, "threshold")

    def choose(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
        ordered, order = (logprobs - old_logprobs).double().square().sort(stable=True)
        finite = ordered.isfinite()  # the others come last
        total = running_sum(ordered.masked_fill(~finite, 0.0).clamp(max=_LARGEST_SQUARE))
        means = total / torch.arange(1, len(order) + 1, device=order.device)
        # The means rise: those below are a beginning.
        kept = finite & (means < self.threshold)
        kept[0] = True
        return torch.empty_like(kept).index_put_((order,), kept)


def _covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Each token's part of the covariance of log-probability and advantage over the batch.

    A token at -inf has no part in the mean, and -inf: it is not chosen.
    """
    finite = logprobs.isfinite()
    mean = logprobs.masked_fill(~finite, 0.0).sum() / finite.sum()
    return torch.where(finite, (advantages - advantages.mean()) * (logprobs - mean), -torch.inf)


@dataclass(frozen=True)
class ClipCovLoss(_OfBatch, ClippedLoss):
    """The clipped objective without a few tokens of high covariance (Cui et al., 2505.22617).

        -M min(r A, clip(r) A),   M = 0 at `share` of all tokens, sampled at random from those that
                                  the clip leaves and with low < cov < high; else 1
        cov = (A - mean A) (log p - mean log p)

    Two passes. Means and share are over the batch's tokens; at least one token is sampled. Mean
    over all tokens, masked ones included. Called as `ClippedLoss`; M is in the advantages.

    Attributes:
        seed: of the draw: the same on every rank, another one each step.
    """

    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    seed: int = 0
    _checks = (
        *ClippedLoss._checks,
        *(("share", check_top_p), ("seed", check_integer)),
        *(("low", check_number), ("high", check_number)),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low <= self.high:
            raise ValueError(f"low: expected at most high {self.high!r}, got {self.low!r}")

    def choose(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        cut = clip_fraction(logprobs, old_logprobs, advantages, **clips) > 0.0
        covariance = _covariance(logprobs, advantages)
        may = (covariance > self.low) & (covariance < self.high) & ~cut
        # On the CPU: the same draw on every device.
        generator = torch.Generator("cpu").manual_seed(self.seed)
        draw = torch.rand(len(may), generator=generator, device="cpu")
        draw = draw.to(may.device).masked_fill(~may, 2.0)
        last = draw.sort().values[max(int(self.share * len(may)), 1) - 1]  # kthvalue may vary
        return ~(may & (draw <= last))


@dataclass(frozen=True)
class KLCovLoss(_OfBatch, ImportanceLoss):
    """Importance sampling with a KL term where covariance is highest (Cui et al., 2505.22617).

        -r A + M kl_coef |log r|,   M = 1 at the `share` of all tokens with the highest
        cov = (A - mean A) (log p - mean log p); else 0

    Two passes; means and share are over the batch's tokens, at least one token is taken. r is not
    clipped. Mean over all tokens.

    Called with (logprobs, entropy, old_logprobs, advantages, chosen), all `[...]`; chosen is M.
    """

    share: float = 2e-4
    kl_coef: float = 1.0
    _tensors = ("old_logprobs", "advantages", "chosen")
    _checks = (("share", check_top_p), ("kl_coef", check_not_negative))

    def choose(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
        covariance = _covariance(logprobs, advantages)
        highest = covariance.topk(max(int(self.share * len(covariance)), 1)).indices
        chosen = torch.zeros_like(covariance, dtype=torch.bool).index_fill_(0, highest, True)
        return chosen & ~covariance.isneginf()

    def numbers(self, given: Given) -> dict[str, Tensor]:
        return {"chosen": super().numbers(given)["chosen"]}

    def penalty(self, logprobs: Tensor, entropy: Tensor | None, given: Given) -> Tensor | None:
        if self.kl_coef == 0.0:
            return None
        distance = (logprobs - given["old_logprobs"]).masked_fill(given["chosen"] == 0.0, 0.0).abs()
        return self.kl_coef * given["chosen"] * distance
