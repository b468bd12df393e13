"""Each published objective against its paper's formula in float64, near the rollout and far off.

A row an objective. Those of one token: the formula in Python, its slope by central differences, or,
where the paper stops a gradient, the weight of -A log p. Those of a sequence or a batch: the whole
objective, differentiated by each token's log-probability.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs import losses
from mcore_logprobs.losses import aggregation
from tests.helpers.documents import ROOT

F64 = torch.float64

# ---- one token -----------------------------------------------------------------------------------

# log p, log r: ordinary, at the bounds, and far. With p near 1 and near 0.
ROWS = [
    (new, log_ratio, a)
    for new in (-3.0, -0.7, -0.01, -40.0, -110.0)
    for log_ratio in (-100.0, -20.0, -2.0, -0.3, -0.05, 0.0, 0.05, 0.3, 2.0, 20.0, 100.0)
    for a in (-1.5, 0.0, 0.8)
    if new - log_ratio <= 0.0
]


def _binary_kl(p: float, q: float) -> float:
    rest = 0.0 if p >= 1.0 else (1 - p) * (math.log1p(-p) - math.log1p(-q))
    return p * (math.log(p) - math.log(q)) + rest


def _dppo(r: float, p: float, q: float, a: float, kind: str) -> float:
    distance = abs(p - q) if kind == "tv" else _binary_kl(q, p)
    bound = {"tv": 0.2, "kl": 0.05}[kind]
    masked = distance > bound and (p - q) * a > 0
    return 0.0 if masked else min(r, 20.0)


def _clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def _k3(x: float) -> float:
    return math.expm1(-x) + x


def _ppo(low: float, high: float, dual: float = math.inf) -> Callable[[float, float, float], float]:
    """INTELLECT-2's min(min(r, delta) A, clip(r) A) is the same as the dual clip."""

    def loss(n: float, o: float, a: float) -> float:
        r = math.exp(n - o)
        objective = min(r * a, _clip(r, 1 - low, 1 + high) * a)
        return -max(objective, dual * a) if a < 0 else -objective

    return loss


def _sapo(n: float, o: float, a: float) -> float:
    tau = 0.5 if a > 0 else 3.0
    return -4 / tau * a / (1 + math.exp(-tau * (math.exp(n - o) - 1)))


# Value of (log p, log p_old, A); all of it has a gradient.
SMOOTH: dict[str, tuple[Any, Callable[[float, float, float], float]]] = {
    "clipped": (losses.ClippedLoss(), _ppo(0.2, 0.2)),
    "clipped, wide": (losses.ClippedLoss(0.3, 5.0, dual_clip=1.5), _ppo(0.3, 5.0, 1.5)),
    "two-sided": (losses.ClippedLoss(clip_high=0.28, dual_clip=4.0), _ppo(0.2, 0.28, 4.0)),
    "sapo": (losses.SAPOLoss(tau_pos=0.5, tau_neg=3.0), _sapo),
    "spo": (
        losses.SPOLoss(),
        lambda n, o, a: -(math.exp(n - o) * a - abs(a) / 0.4 * (math.exp(n - o) - 1) ** 2),
    ),
    "importance": (losses.ImportanceLoss(), lambda n, o, a: -math.exp(n - o) * a),
    "dro": (
        losses.DROLoss(tau=0.5, level="token"),
        lambda n, o, a: -a * n + 0.25 * (n - o) ** 2,
    ),
    "kimi": (losses.KimiLoss(level="token"), lambda n, o, a: -a * n + 0.05 * (n - o) ** 2),
    "k2 distillation": (
        losses.DistillationLoss(kl="k2", policy_gradient=False),
        lambda n, o, a: (n - o) ** 2 / 2,
    ),
    "k3 distillation": (
        losses.DistillationLoss(kl="k3", policy_gradient=False),
        lambda n, o, a: _k3(n - o),
    ),
    "clamped k3 distillation": (
        losses.DistillationLoss(kl="k3", policy_gradient=False, clamp=10.0),
        lambda n, o, a: min(_k3(n - o), 10.0),
    ),
}
# The factor of -log p, without gradient.
WEIGHTED: dict[str, tuple[Any, Callable[[float, float, float], float]]] = {
    "gpg": (losses.GPGLoss(), lambda n, o, a: a),
    "reinforce": (losses.ReinforceLoss(), lambda n, o, a: a),
    "sft": (losses.SFTLoss(), lambda n, o, a: 1.0),
    "weighted sft": (losses.SFTLoss(weighted=True), lambda n, o, a: 1.0 + abs(a)),
    "cispo": (
        losses.CISPOLoss(clip_high=0.3),
        lambda n, o, a: a * min(math.exp(n - o), 1.3),
    ),
    "cispo without a lower bound": (
        losses.CISPOLoss(clip_low=1.0, clip_high=0.3),
        lambda n, o, a: a * min(math.exp(n - o), 1.3),
    ),
    "cispo, an upper bound below 1": (
        losses.CISPOLoss(clip_low=0.4, clip_high=-0.1),
        lambda n, o, a: a * _clip(math.exp(n - o), 0.6, 0.9),
    ),
    "cispo with a floor": (
        losses.CISPOLoss(clip_low=0.2, clip_high=0.3),
        lambda n, o, a: a * _clip(math.exp(n - o), 0.8, 1.3),
    ),
    "dppo tv": (
        losses.DPPOLoss(),
        lambda n, o, a: a * _dppo(math.exp(n - o), math.exp(n), math.exp(o), a, "tv"),
    ),
    "dppo kl": (
        losses.DPPOLoss(divergence="kl", low=0.05, high=0.05),
        lambda n, o, a: a * _dppo(math.exp(n - o), math.exp(n), math.exp(o), a, "kl"),
    ),
    "topr by token": (
        losses.TOPRLoss(level="token"),
        lambda n, o, a: a * (1.0 if a > 0 else min(math.exp(n - o), 1.0)),
    ),
    "distillation": (losses.DistillationLoss(), lambda n, o, a: -(n - o)),
    "sdpo": (
        losses.DistillationLoss(cap=2.0),
        lambda n, o, a: -(n - o) * min(math.exp(n - o), 2.0),
    ),
}


def _given(loss: Any, rows: list[tuple[float, float, float]]) -> tuple[Tensor, list[Tensor]]:
    new, log_ratio, a = torch.tensor(rows, dtype=F64).t()
    named = {"old_logprobs": new - log_ratio, "teacher_logprobs": new - log_ratio, "advantages": a}
    named["weights"] = 1.0 + a.abs()
    return new.clone().requires_grad_(), [named[n].requires_grad_() for n in loss.tensors]


@pytest.mark.parametrize("name", [*SMOOTH, *WEIGHTED])
def test_the_formula_of_a_token(name):
    loss, formula = {**SMOOTH, **WEIGHTED}[name]
    new, tensors = _given(loss, ROWS)
    value = loss(new, None, *tensors)
    upstream = torch.linspace(-1, 2, len(ROWS), dtype=F64)
    grad, *others = torch.autograd.grad(
        value, [new, *tensors], upstream, allow_unused=True, materialize_grads=True
    )
    assert not any(x.any() for x in others), "a gradient flows to what is given"
    for i, (n, log_ratio, a) in enumerate(ROWS):
        if name in SMOOTH:
            expected, step = formula(n, n - log_ratio, a), 1e-6 * max(1.0, abs(n))
            up, down = (formula(n + d, n - log_ratio, a) for d in (step, -step))
            slope = (up - down) / (2 * step)
        else:
            slope = -formula(n, n - log_ratio, a)
            expected = slope * n
        assert value[i].item() == pytest.approx(expected, rel=1e-9, abs=1e-12), ROWS[i]
        assert grad[i].item() / upstream[i].item() == pytest.approx(slope, rel=1e-5, abs=1e-7), (
            ROWS[i]
        )


def test_a_trust_region_of_probabilities_keeps_its_kl_term():
    """Prime-RL's ipo and default losses: the mask takes the ratio's term alone."""
    new = torch.tensor([-0.1, -0.1, -2.0, -2.0], dtype=F64, requires_grad=True)
    old = torch.tensor([-1.5, -0.15, -0.2, -2.1], dtype=F64)
    a = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=F64)
    drift = (new.detach() - old) ** 2
    found = losses.IPOLoss()(new, None, old, a)
    ratio = (new.detach() - old).exp()
    expected = -torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=F64) * ratio + 1e-3 * drift
    torch.testing.assert_close(found, expected)
    (grad,) = torch.autograd.grad(found.sum(), new)
    slope = -torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=F64) * ratio
    torch.testing.assert_close(grad, slope + 2e-3 * (new.detach() - old))
    # DPPO's mask is one-sided: the third token falls, and its advantage is positive.
    loss = losses.RegularizedLoss(losses.DPPOLoss(), kl_coef=2e-3, kl="k2")
    found = loss(new, None, old, a, old)
    (grad,) = torch.autograd.grad(found.sum(), new)
    slope = -torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=F64) * ratio
    torch.testing.assert_close(grad, slope + 2e-3 * (new.detach() - old))


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.4)])
def test_clip_fraction_is_where_the_gradient_is_gone(low, high):
    loss = losses.ClippedLoss(clip_low=low, clip_high=high)
    new, (old, a) = _given(loss, [row for row in ROWS if abs(row[1]) <= 2.0])
    (grad,) = torch.autograd.grad(loss(new, None, old, a).sum(), new)
    found = losses.clip_fraction(new, old, a, clip_low=low, clip_high=high)
    gone = (grad == 0) & (a != 0)
    assert gone.any()
    assert torch.equal(found.bool(), gone)
    if loss == losses.ClippedLoss():  # the defaults are the same
        assert torch.equal(losses.clip_fraction(new, old, a), found)


@pytest.mark.parametrize(("low", "high"), [(0.5, 5.0), (0.0, 1.5)])
def test_icepop(low, high):
    """M(k) min(r A, clip(r) A), as the paper has it, is the clipped loss with these weights."""
    clipped = losses.ClippedLoss(clip_low=0.2, clip_high=0.3, weighted=True)
    loss = losses.IcePopLoss(low=low, high=high, clip_low=0.2, clip_high=0.3)
    new, (old, a) = _given(losses.ClippedLoss(), ROWS)
    rollout = old + torch.linspace(-1.0, 2.5, len(ROWS), dtype=F64)
    weights = losses.masked_importance_weights(old, rollout, low=low, high=high)
    ratio = (old - rollout).exp()
    torch.testing.assert_close(weights, torch.where((ratio < low) | (ratio > high), 0.0, ratio))
    assert 0 < weights.count_nonzero() < len(ROWS)
    value, expected = loss(new, None, old, rollout, a), clipped(new, None, old, a, weights)
    assert torch.equal(value, expected)
    grads = (torch.autograd.grad(x.sum(), new, retain_graph=True)[0] for x in (value, expected))
    assert torch.equal(*grads)


@pytest.mark.parametrize("floor", [0.0, 0.6])
def test_truncated_importance_weights_with_a_floor(floor):
    train = torch.linspace(-5.0, 1.0, 50, dtype=F64, requires_grad=True)
    rollout = torch.full((50,), -2.0, dtype=F64)
    found = losses.truncated_importance_weights(train, rollout, cap=1.5, floor=floor)
    assert not found.requires_grad
    expected = [max(min(math.exp(p + 2.0), 1.5), floor) for p in train.tolist()]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64))
    assert (found == 1.5).any()
    assert (found == floor).any() == (floor > 0)


# ---- a sequence, a batch -------------------------------------------------------------------------


def _batch(far: bool = False) -> dict[str, Tensor]:
    """Sequences of 7, 3, 5, 1, 0 and 7 tokens, advantages of either sign, one 0."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.tensor([[0.05], [0.5], [1.5], [3.0], [1.0], [0.3]], dtype=F64)
    if far:
        spread = spread * 100.0
    old = -torch.rand(6, 7, generator=generator, dtype=F64) * 3 - 0.01
    drift = torch.randn(6, 7, generator=generator, dtype=F64) * spread
    new = torch.minimum(old + drift, torch.tensor(-1e-3, dtype=F64))
    if far:  # up as well as down
        old[:2], new[:2] = new[:2], old[:2].clone()
    mask = torch.arange(7) < torch.tensor([7, 3, 5, 1, 0, 7]).unsqueeze(1)
    a = torch.tensor([[1.0], [-0.7], [0.5], [-1.5], [1.0], [0.0]], dtype=F64)
    old, new = (torch.where(mask, x, torch.nan) for x in (old, new))  # padding may be anything
    return {"new": new, "old": old, "a": a.expand(6, 7), "mask": mask}


Objective = Callable[[list[list[float]], list[list[float]], list[list[float]], list[float]], float]


def _rows(x: Tensor, mask: Tensor) -> list[list[float]]:
    return [row[keep].tolist() for row, keep in zip(x, mask, strict=True) if keep.any()]


def _mean_of(sequence: Callable[..., float]) -> Objective:
    """The mean over sequences of `sequence(log p, at the first pass, log p_old, A)`."""

    def objective(new: Any, first: Any, old: Any, a: Any) -> float:
        parts = [sequence(*each) for each in zip(new, first, old, a, strict=True)]
        return sum(parts) / len(parts)

    return objective


def _log_ratios(new: list[float], old: list[float]) -> list[float]:
    return [n - o for n, o in zip(new, old, strict=True)]


def _gspo(low: float, high: float, by_length: bool) -> Callable[..., float]:
    def sequence(new, first, old, a):
        s = math.exp(sum(_log_ratios(new, old)) / len(new))
        return -min(s * a, _clip(s, 1 - low, 1 + high) * a) * (len(new) if by_length else 1)

    return sequence


def _gmpo(new, first, old, a):
    clip = (lambda x: min(x, 0.4)) if a > 0 else (lambda x: max(x, -0.4))
    return -a * math.exp(sum(map(clip, _log_ratios(new, old))) / len(new)) if a else 0.0


def _topr(new, first, old, a):
    weight = 1.0 if a > 0 else math.exp(min(sum(_log_ratios(first, old)), 0.0))
    return -weight * a * sum(new)


def _vespo(new, first, old, a):
    k, slope = (2.0, 3.0) if a > 0 else (3.0, 2.0)
    log_w = sum(_log_ratios(first, old))
    phi = 0.0 if log_w > 300 else math.exp(k * log_w + slope * (1 - math.exp(log_w)))
    return -phi * a * sum(new)


def _dro(tau: float) -> Callable[..., float]:
    return lambda new, first, old, a: -a * sum(new) + tau / 2 * sum(_log_ratios(new, old)) ** 2


def _token_mean(new: Any, first: Any, old: Any, a: Any, token: Callable[..., float]) -> float:
    flat = [
        token(*each, adv)
        for *rows, adv in zip(new, first, old, a, strict=True)
        for each in zip(*rows, strict=True)
    ]
    return sum(flat) / len(flat)


def _fipo(new, first, old, a):
    """f of the first pass, then the clipped objective."""
    gamma, found, tokens = 2 ** (-1 / 32), 0.0, 0
    for n, f, o, adv in zip(new, first, old, a, strict=True):
        log_r = _log_ratios(f, o)
        for t in range(len(n)):
            ahead = sum(
                gamma ** (k - t) * log_r[k] for k in range(t, len(n)) if math.exp(log_r[k]) <= 10
            )
            weight = _clip(math.exp(min(ahead, 50)), 1.0, 1.2)
            if adv < 0 and math.exp(log_r[t]) > 4:
                weight = _clip(weight, 0.8, 1.0)
            r = math.exp(n[t] - o[t])
            best = min(r * adv, _clip(r, 0.8, 1.28) * adv)
            found -= weight * (max(best, 10 * adv) if adv < 0 else best)
            tokens += 1
    return found / tokens


def _m2po(new, first, old, a):
    flat = sorted(x * x for f, o in zip(first, old, strict=True) for x in _log_ratios(f, o))
    kept = max(n for n in range(1, len(flat) + 1) if n == 1 or sum(flat[:n]) / n < 0.04)

    def token(n, f, o, adv):
        return -math.exp(n - o) * adv if (f - o) ** 2 <= flat[kept - 1] else 0.0

    return _token_mean(new, first, old, a, token)


def _kl_cov(new, first, old, a):
    flat = [(f, adv) for row, adv in zip(first, a, strict=True) for f in row]
    means = [sum(x) / len(flat) for x in zip(*flat, strict=True)]
    covariances = [(adv - means[1]) * (f - means[0]) for f, adv in flat]
    last = sorted(covariances)[-int(0.2 * len(flat))]

    def token(n, f, o, adv):
        chosen = (adv - means[1]) * (f - means[0]) >= last
        return -math.exp(n - o) * adv + (0.7 * abs(n - o) if chosen else 0.0)

    return _token_mean(new, first, old, a, token)


PER_TOKEN = {"mode": "token"}
PER_SEQUENCE = {"mode": "sequence"}
SUMS = {"mode": "constant", "length": 1}
# The objective, its formula, how its tokens are summed, whether the sum is its value.
WHOLE: dict[str, tuple[Any, Objective, dict[str, Any], bool]] = {
    "gspo": (losses.GSPOLoss(), _mean_of(_gspo(3e-4, 4e-4, False)), PER_SEQUENCE, True),
    "gspo, two-sided": (
        losses.GSPOLoss(0.1, 0.2, dual_clip=1.3),
        _mean_of(
            lambda n, f, o, a: (
                min(_gspo(0.1, 0.2, False)(n, f, o, a), max(-1.3 * a, 0.0))
                if a < 0
                else _gspo(0.1, 0.2, False)(n, f, o, a)
            )
        ),
        PER_SEQUENCE,
        True,
    ),
    "gspo, wide": (losses.GSPOLoss(0.4, 0.9), _mean_of(_gspo(0.4, 0.9, False)), PER_SEQUENCE, True),
    "luspo": (losses.LUSPOLoss(), _mean_of(_gspo(2e-3, 2.5e-3, True)), SUMS, True),
    "gmpo": (losses.GMPOLoss(), _mean_of(_gmpo), PER_SEQUENCE, True),
    "topr": (losses.TOPRLoss(), _mean_of(_topr), SUMS, True),
    "vespo": (losses.VESPOLoss(), _mean_of(_vespo), SUMS, True),
    "dro": (losses.DROLoss(tau=0.5), _mean_of(_dro(0.5)), SUMS, False),
    "kimi": (losses.KimiLoss(), _mean_of(_dro(0.1)), SUMS, False),
    "fipo": (losses.FIPOLoss(), _fipo, PER_TOKEN, True),
    "m2po": (losses.M2POLoss(), _m2po, PER_TOKEN, True),
    "kl-cov": (losses.KLCovLoss(share=0.2, kl_coef=0.7), _kl_cov, PER_TOKEN, True),
}


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
@pytest.mark.parametrize("seq_dim", [1, 0])
@pytest.mark.parametrize("name", WHOLE)
def test_the_formula_of_a_sequence_or_a_batch(name, seq_dim, far):
    loss, objective, how, has_value = WHOLE[name]
    x = _batch(far)
    whole = {key: t.t() if seq_dim == 0 else t for key, t in x.items()}
    assert loss.passes == 2
    numbers = loss.second_pass(
        whole["new"], whole["old"], whole["a"], whole["mask"], seq_dim=seq_dim
    )
    assert not any(number.requires_grad for number in numbers.values())
    new = whole["new"].clone().requires_grad_()
    per_token = loss(new, None, *(numbers[key] for key in loss.tensors))
    found = aggregation(whole["mask"], seq_dim=seq_dim, dtype=F64, **how)
    weights = 1.0 if found.weights is None else found.weights
    total = torch.where(whole["mask"], per_token * weights, 0.0).sum() / found.denominator
    (grad,) = torch.autograd.grad(total, new)
    grad = grad.t() if seq_dim == 0 else grad

    first, old = _rows(x["new"], x["mask"]), _rows(x["old"], x["mask"])
    a = [row[0].item() for row, keep in zip(x["a"], x["mask"], strict=True) if keep.any()]
    if has_value:
        assert total.item() == pytest.approx(objective(first, first, old, a), rel=1e-9, abs=1e-12)
    slopes = iter(_slopes(objective, first, old, a))
    largest = grad.abs().nan_to_num().max().item()
    for row, keep in zip(grad, x["mask"], strict=True):
        for value in row[keep].tolist():
            slope, noise = next(slopes)
            assert value == pytest.approx(slope, rel=2e-5, abs=noise + 1e-9 * largest), name
    assert not grad[~x["mask"]].nan_to_num().any()


def _slopes(objective: Objective, first: Any, old: Any, a: Any) -> Any:
    """(central difference by each token, the rounding in it)."""
    for i, row in enumerate(first):
        for t in range(len(row)):
            step, values = 1e-5, []
            for d in (step, -step):
                moved = [list(r) for r in first]
                moved[i][t] += d
                values.append(objective(moved, first, old, a))
            yield (values[0] - values[1]) / (2 * step), 1e-15 * abs(values[0]) / step


@pytest.mark.parametrize("share", [2e-4, 0.2, 1.0])
def test_clip_cov_draws_among_tokens_of_high_covariance(share):
    x = _batch()
    loss = losses.ClipCovLoss(share=share, low=-0.5, high=0.4, seed=5)
    numbers = loss.second_pass(x["new"], x["old"], x["a"], x["mask"])
    assert loss.tensors == ("old_logprobs", "advantages")
    keep = x["mask"]
    new, a = x["new"][keep], x["a"][keep]
    covariance = (a - a.mean()) * (new - new.mean())
    ratio = (new - x["old"][keep]).exp()
    cut = ((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8))
    may = (covariance > -0.5) & (covariance < 0.4) & ~cut
    masked = numbers["advantages"][keep] == 0
    assert masked[a == 0].all()
    dropped = masked & (a != 0)
    assert not (dropped & ~may).any()
    count = min(max(int(share * len(a)), 1), int(may.sum()))
    assert dropped.sum() == count - (masked & may & (a == 0)).sum() or share < 1.0
    assert dropped.sum() <= count
    assert torch.equal(numbers["advantages"][keep][~masked], a[~masked])
    again = loss.second_pass(x["new"], x["old"], x["a"], x["mask"])
    assert torch.equal(again["advantages"], numbers["advantages"])
    if share == 0.2:
        other = losses.ClipCovLoss(share=share, low=-0.5, high=0.4, seed=6)
        found = other.second_pass(x["new"], x["old"], x["a"], x["mask"])["advantages"]
        assert not torch.equal(found, numbers["advantages"])


def test_fipo_looks_far_ahead():
    """Over many tokens, both kinds of bound, without the others."""
    from mcore_logprobs.losses.two_pass import _discounted_ahead

    values = torch.randn(2, 300, dtype=F64)
    expected = torch.zeros(2, 301, dtype=F64)
    for t in reversed(range(300)):
        expected[:, t] = values[:, t] + 0.97 * expected[:, t + 1]
    torch.testing.assert_close(_discounted_ahead(values, 0.97), expected[:, :300])
    with torch.autocast("cpu", torch.bfloat16):
        found = _discounted_ahead(values.float(), 0.97)
    torch.testing.assert_close(found, expected[:, :300].float())
    values[0, 100] = torch.nan
    found = _discounted_ahead(values, 0.97)
    assert found[0, :101].isnan().all()
    torch.testing.assert_close(found[0, 101:], expected[0, 101:300])
    x = _batch()
    both = losses.FIPOLoss(high_only=False, safety=None, dual_clip=None)
    weights = both.second_pass(x["new"], x["old"], x["a"], x["mask"])["importance_weights"]
    assert weights[x["mask"]].min() == 0.8
    assert weights[x["mask"]].max() == 1.2


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("at", [2, 140])
def test_what_is_ahead_of_a_token_does_not_reach_those_behind_it(value, at):
    """A filtered token's log-probability is -inf: no 0 * inf within a block of 128, nor past it."""
    loss = losses.FIPOLoss(high_only=False, safety=None, dual_clip=None, weight_clip=0.9)
    old = torch.randn(1, 300, dtype=F64)
    new = old + 0.01 * torch.randn(1, 300, dtype=F64)
    ones, mask = torch.ones(1, 300, dtype=F64), old < torch.inf
    clean = loss.second_pass(new, old, ones, mask)["importance_weights"]
    new[0, at] = value
    found = loss.second_pass(new, old, ones, mask)["importance_weights"]
    torch.testing.assert_close(found[:, at + 1 :], clean[:, at + 1 :])
    expected = torch.full((1, at + 1), value, dtype=F64).exp().clamp(0.1, 1.9)
    torch.testing.assert_close(found[:, : at + 1], expected, equal_nan=True)


@pytest.mark.parametrize("shape", [(2,), (3, 1), (2, 3, 1)])
def test_advantages_that_do_not_broadcast_are_refused_by_name(shape):
    x = torch.full((2, 3), -1.0)
    for call in (losses.GSPOLoss().second_pass, losses.off_policy_sequence_mask):
        with pytest.raises(ValueError, match=r"advantages: expected a number or a tensor that bro"):
            call(x, x, torch.ones(shape), torch.ones(2, 3))


def test_second_passes_of_wrapped_objectives():
    x = _batch()
    loss = losses.WeightedLoss(losses.RegularizedLoss(losses.GSPOLoss(), entropy_coef=0.1))
    assert loss.passes == 2
    found = loss.second_pass(x["new"], x["old"], x["a"], x["mask"])
    inner = losses.GSPOLoss().second_pass(x["new"], x["old"], x["a"], x["mask"])
    assert found.keys() == inner.keys()
    with_reference = losses.ClipCovLoss(kl_coef=0.1, weighted=True)
    found = with_reference.second_pass(x["new"], x["old"], x["a"], x["mask"])
    assert set(found) == {"old_logprobs", "advantages"}  # the others are the caller's
    with pytest.raises(ValueError, match=r"expected an objective of two passes, got ClippedLoss\("):
        losses.ClippedLoss().second_pass(x["new"], x["old"], x["a"], x["mask"])


def test_objectives_by_name():
    assert {name: cls.__name__ for name, cls in losses.OBJECTIVES.items()} == {
        name: name for name in losses.OBJECTIVES
    }
    assert len(losses.OBJECTIVES) == 23
    assert all(isinstance(cls(), losses.TokenLoss) for cls in losses.OBJECTIVES.values())


def test_every_objective_has_a_formula_and_stands_on_the_page() -> None:
    tables = (SMOOTH, WEIGHTED, WHOLE)
    tried = {type(row[0]).__name__ for table in tables for row in table.values()}
    # Of these, tests of their own above: a mask is no factor, and a quantile no formula of a token.
    tried |= {"IPOLoss", "IcePopLoss", "ClipCovLoss"}
    page = (ROOT / "docs" / "objectives.md").read_text()
    assert losses.OBJECTIVES.keys() <= tried
    assert [name for name in losses.OBJECTIVES if not re.search(rf"\b{name}\b", page)] == []
