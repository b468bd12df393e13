"""Numbers of single tokens: ratios that stay finite, estimators of KL, and their checks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mcore_logprobs.checks import check_choice
from mcore_logprobs.spelling import suggesting

__all__ = ["KL", "kl_k1", "kl_k2", "kl_k3", "kl_unbiased"]


def largest_exponent(dtype: torch.dtype) -> float:
    """The bound on exponents, so that exp stays finite times an advantage: 70 in float32."""
    return 0.8 * math.log(torch.finfo(dtype).max)


def exp_within(
    log_ratio: Tensor, bound: Callable[[Tensor], Tensor] = lambda ratio: ratio
) -> Tensor:
    """exp(log_ratio) where `bound` leaves it as it is; elsewhere `bound` of it, and no gradient.

    No gradient is not 0 times exp's, which is inf where exp overflows. No result is past exp of
    `largest_exponent`.
    """
    ratio = log_ratio.detach().exp()
    bounded = bound(ratio).clamp(max=math.exp(largest_exponent(log_ratio.dtype)))
    clipped = (ratio != bounded) & ~ratio.isnan()
    return torch.where(clipped, bounded, log_ratio.masked_fill(clipped, 0.0).exp())


def clipped(
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

    def bound(ratio: Tensor) -> Tensor:
        falls = ratio.clamp(1.0 - clip_low, dual_clip)
        return torch.where(advantages > 0.0, ratio.clamp(max=1.0 + clip_high), falls)

    return -advantages * exp_within(log_ratio, bound)


def times(weight: Tensor, value: Tensor) -> Tensor:
    """weight * value, and 0 with a gradient of 0 for value where weight is 0, whatever value is."""
    return weight * value.masked_fill(weight == 0.0, 0.0)


def masked_product(a: Tensor, b: Tensor) -> Tensor:
    """a * b, and 0 if either is 0, whatever the other is; without gradient."""
    return times(a.masked_fill(b == 0.0, 0.0), b)


def log_ratio_of(logprobs: Tensor, other: Tensor, name: str) -> Tensor:
    """log p / q of log-probabilities of one shape, without gradient; `name` is q's."""
    check_shape(name, other, logprobs)
    return logprobs.detach() - other.detach()


@suggesting
def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p/q per token, x ~ p: unbiased for KL(p, q), may be negative.

    As a loss it does nothing: on policy its expected gradient, that of E[log p], is 0. Use it as a
    number to log, or in the reward (subtracted from the advantage, with `ReinforceLoss`), where it
    does give KL(p, q)'s gradient.

    The three estimators are J. Schulman's (Approximating KL Divergence, 2020), from samples of p.

    Shape:
        `[...]`, `[...]` -> `[...]`.
    """
    check_shape("ref_logprobs", ref_logprobs, logprobs)
    return logprobs - ref_logprobs


@suggesting
def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p/q)^2 / 2: biased, low variance.

    As a loss its expected gradient on policy, E[log(p/q) grad log p], is exactly that of the
    reverse KL(p, q). Where one of the two is -inf it is inf, where both are, it is NaN, without a
    gradient.

    Shape:
        `[...]`, `[...]` -> `[...]`.
    """
    check_shape("ref_logprobs", ref_logprobs, logprobs)
    infinite = logprobs.isinf() | ref_logprobs.isinf()
    log_ratio = (logprobs - ref_logprobs).masked_fill(infinite, 0.0)
    return _or_infinite(0.5 * log_ratio.square(), infinite, logprobs, ref_logprobs)


@suggesting
def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log q/p: unbiased and never negative; the KL term of GRPO.

    As a loss its expected gradient on policy, E[(1 - q/p) grad log p], is that of the forward
    KL(q, p), not of the KL(p, q) that its value estimates. The two agree to first order near p = q.
    Where one of the two is -inf it is inf, where both are, NaN, and past q/p = e^70 (float32) it
    stays what it is there: without a gradient in all three.

    Shape:
        `[...]`, `[...]` -> `[...]`.
    """
    check_shape("ref_logprobs", ref_logprobs, logprobs)
    infinite = logprobs.isinf() | ref_logprobs.isinf()
    log_ratio = (ref_logprobs - logprobs).masked_fill(infinite, 0.0)
    # Both terms: only log_ratio's has the gradient +1, which leads away from q.
    value = _exp_excess(log_ratio.clamp(max=largest_exponent(log_ratio.dtype)))
    return _or_infinite(value, infinite, logprobs, ref_logprobs)


def _exp_excess(x: Tensor) -> Tensor:
    """exp(x) - 1 - x, near 0 with the digits that x^2 / 2 has, and x of the gradient; what
    `kernels.pairs` has in place, which autograd cannot follow.
    """
    near = x.abs() < (3e-3 if x.dtype == torch.float64 else 0.15)
    small = x.masked_fill(~near, 0.0)
    series = 0.5 + small * (1 / 6 + small * (1 / 24 + small * (1 / 120 + small / 720)))
    return torch.where(near, small * small * series, torch.expm1(x) - x)


def _or_infinite(value: Tensor, infinite: Tensor, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return torch.where(infinite, (logprobs - ref_logprobs).detach().abs(), value)


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


@suggesting
def kl_unbiased(
    logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, *, kl: str = "k3"
) -> Tensor:
    """r KL, r = p / p_old: the estimator under tokens sampled from p_old (DeepSeek-V3.2, 2025).

    The gradient goes through r too: its expectation over p_old is the gradient of KL(p, q) itself,
    for k1 and k3 alike, which neither has without r. Finite at a log-probability of -inf for k3:
    there it is q / p_old.

    Shape:
        `[...]` each -> `[...]`. old_logprobs are of the policy that sampled.
    """
    check_choice("kl", kl, tuple(KL))
    check_shape("ref_logprobs", ref_logprobs, logprobs)
    check_shape("old_logprobs", old_logprobs, logprobs)
    ratio = exp_within(logprobs - old_logprobs)
    if kl != "k3":
        return times(ratio, KL[kl](logprobs, ref_logprobs))
    log_ratio = ref_logprobs - logprobs
    near = log_ratio.abs() < 1.0
    # r (q/p - 1 - log q/p) loses its digits near p = q in one form and overflows far in the other.
    small = log_ratio.masked_fill(~near, 0.0)
    log_ratio = log_ratio.masked_fill((ratio == 0.0) | log_ratio.isinf(), 0.0)
    far = exp_within(ref_logprobs - old_logprobs) - ratio - ratio * log_ratio
    value = torch.where(near, ratio * _exp_excess(small), far)
    return value.masked_fill(ref_logprobs.isinf() & ~logprobs.isinf(), torch.inf)


def binary_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """KL between two Bernoulli variables: this token against all others. Without gradient.

        p log p/q + (1 - p) log (1 - p)/(1 - q)

    inf where q is 0 and p is not; no epsilon. A log-probability of 0 stands for all that rounds to
    it: the others then have the middle of that, a quarter of the dtype's eps (3e-8 in float32).
    """
    dtype = torch.promote_types(logprobs.dtype, other.dtype)
    log_p, log_q = (x.detach().to(dtype).clamp(max=0.0) for x in (logprobs, other))
    least = torch.finfo(dtype).eps / 4
    p = log_p.exp()
    rest_p, rest_q = (-x.expm1().masked_fill(x == 0.0, -least) for x in (log_p, log_q))
    token = (p * (log_p - log_q)).masked_fill(p == 0.0, 0.0)
    return token + rest_p * (rest_p.log() - rest_q.log())


def check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")


def check_shape(name: str, tensor: object, like: object) -> None:
    if not isinstance(like, Tensor):
        raise ValueError(f"expected a torch.Tensor beside {name}, got {type(like).__name__}")
    if not isinstance(tensor, Tensor) or tensor.shape != like.shape:
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name}: expected the shape {tuple(like.shape)} of the others, got {got}")
