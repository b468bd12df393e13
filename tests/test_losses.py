"""KL terms and preferences by their formulas; settings out of range; what stays visible."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs import losses

F64 = torch.float64
NAN = float("nan")

# ---- KL terms around any objective ---------------------------------------------------------------


def test_kl_estimators_estimate_the_kl():
    """Averaged over the whole of p: the values of k1 and k3, and every expected gradient."""
    logits = torch.randn(5, 16, dtype=F64, requires_grad=True)
    log_p = torch.log_softmax(logits, -1)
    log_q = torch.log_softmax(torch.randn(5, 16, dtype=F64), -1)
    reverse = (log_p.exp() * (log_p - log_q)).sum(-1)
    forward = (log_q.exp() * (log_q - log_p)).sum(-1)
    for estimator in (losses.kl_k1, losses.kl_k3):
        assert torch.allclose((log_p.exp() * estimator(log_p, log_q)).sum(-1), reverse)

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0]

    def expected(name: str) -> Tensor:
        return gradient(log_p.exp().detach() * losses.KL[name](log_p, log_q))

    assert torch.allclose(expected("k1"), torch.zeros((), dtype=F64), atol=1e-15)
    assert torch.allclose(expected("k2"), gradient(reverse))
    assert torch.allclose(expected("k3"), gradient(forward))
    assert losses.KL.keys() == {"k1", "k2", "k3"}
    assert not torch.allclose(gradient(forward), gradient(reverse), atol=1e-3)
    # k1 in the reward.
    reward = -losses.kl_k1(log_p, log_q).detach()
    in_reward = gradient(log_p.exp().detach() * losses.ReinforceLoss()(log_p, None, reward))
    assert torch.allclose(in_reward, gradient(reverse))


def test_k3_keeps_its_digits_near_equality():
    p = torch.full((3,), -1.0)
    q = p + torch.tensor([1e-3, 1e-4, 0.0])
    exact = (q.double() - p.double()) ** 2 / 2
    torch.testing.assert_close(losses.kl_k3(p, q).double(), exact, rtol=1e-2, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 3e-13)])
def test_k3_and_its_gradient_keep_their_digits_at_every_distance(dtype, bound):
    x = torch.logspace(-9, 1, 500, dtype=dtype)
    x = torch.cat([-x.flip(0), x])
    p = (-x).requires_grad_()
    terms = [[v**n / math.factorial(n) for n in range(2, 60)] for v in x.tolist()]
    exact = torch.tensor(list(map(math.fsum, terms)), dtype=torch.float64)
    value = losses.kl_k3(p, torch.zeros_like(x))
    (grad,) = torch.autograd.grad(value.sum(), p)
    assert (value / exact - 1).abs().max() < bound
    assert (grad / -torch.expm1(x.double()) - 1).abs().max() < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_never_leads_away_from_the_reference(dtype):
    """Where q/p is past the dtype's range there is no gradient, not that of -log q/p alone."""
    p = torch.tensor([-1e4, -800.0, -200.0, -60.0, -2.0], dtype=dtype, requires_grad=True)
    values = losses.kl_k3(p, torch.full_like(p, -1.0))
    (grad,) = torch.autograd.grad(values.sum(), p)
    assert values.isfinite().all()
    assert (values > 0).all()
    assert (grad <= 0).all()
    assert (grad[3:] < 0).all()


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_an_unbiased_kl_has_the_gradient_of_kl(kl):
    """Over all of a vocabulary, sampled from p_old: E[r KL estimate] and its gradient (k1, k3)."""
    logits = torch.randn(5, 16, dtype=F64, requires_grad=True)
    log_p = logits.log_softmax(-1)
    log_q, log_old = torch.randn(2, 5, 16, dtype=F64).log_softmax(-1)
    found = (log_old.exp() * losses.kl_unbiased(log_p, log_q, log_old, kl=kl)).sum()
    if kl == "k2":
        expected = (log_p.exp() * (log_p - log_q) ** 2 / 2).sum()
    else:
        expected = (log_p.exp() * (log_p - log_q)).sum()
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_an_unbiased_k3_of_impossible_tokens():
    """q / p_old where p is 0, also where q is; inf where only q is."""
    log_p, log_q = torch.tensor([-torch.inf, -torch.inf, -1.0]), torch.tensor([-0.5, 0.0, 0.0])
    log_q[1:] = -torch.inf
    found = losses.kl_unbiased(log_p, log_q, torch.full((3,), -2.0))
    torch.testing.assert_close(found, torch.tensor([math.exp(1.5), 0.0, torch.inf]))


def test_an_unbiased_k3_is_right_near_and_far():
    log_p = torch.tensor([-1.0, -1.0, -1.0, -150.0, -1.0, -torch.inf], dtype=torch.float32)
    log_q = torch.tensor([-1.001, -1.0001, -101.0, -50.0, -1.9, -2.0], dtype=torch.float32)
    log_old = torch.tensor([-1.1, -1.0, -1.0, -50.0, -2.1, -1.0], dtype=torch.float32)
    log_p.requires_grad_()
    found = losses.kl_unbiased(log_p, log_q, log_old)
    p, q, old = (x.detach().double() for x in (log_p, log_q, log_old))
    x = torch.where(p.isinf(), 0.0, q - p)
    ratio = (p - old).exp()
    near = (x.abs() < 1) & ~p.isinf()
    expected = torch.where(near, ratio * (x.expm1() - x), (q - old).exp() - ratio - ratio * x)
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=1e-12)
    (grad,) = torch.autograd.grad(found.sum(), log_p)
    torch.testing.assert_close(grad.double(), -ratio * x, rtol=2e-3, atol=1e-12)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_terms_and_weights_around_any_objective(kl):
    new = (-torch.rand(8, dtype=F64)).requires_grad_()
    entropy = torch.rand(8, dtype=F64, requires_grad=True)
    old, ref = new.detach() - 0.3, new.detach() + 0.2
    a = torch.tensor([1.0, -1.0, 0.0, 2.0] * 2, dtype=F64)
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0] * 2, dtype=F64)
    log_ratio = ref - new
    estimate = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.expm1() - log_ratio}[kl]
    terms = 0.1 * estimate - 0.2 * entropy
    inner = losses.CISPOLoss()
    loss = losses.RegularizedLoss(inner, kl_coef=0.1, kl=kl, entropy_coef=0.2)
    assert loss.tensors == ("old_logprobs", "advantages", "ref_logprobs")
    found = loss(new, entropy, old, a, ref)
    torch.testing.assert_close(found, inner(new, None, old, a) + terms)
    # ClippedLoss's own terms are these; its weight is of the policy's alone.
    own = losses.ClippedLoss(kl_coef=0.1, kl=kl, entropy_coef=0.2, weighted=True)
    clipped = losses.ClippedLoss()(new, None, old, a)
    torch.testing.assert_close(own(new, entropy, old, a, ref, weights), weights * clipped + terms)
    unbiased = losses.RegularizedLoss(losses.ReinforceLoss(), kl_coef=0.1, kl_ratio=True)
    assert unbiased.tensors == ("advantages", "ref_logprobs", "old_logprobs")
    expected = losses.ReinforceLoss()(new, None, a) + 0.1 * losses.kl_unbiased(new, ref, old)
    torch.testing.assert_close(unbiased(new, None, a, ref, old), expected)
    # A weight of 0 masks all of it, a NaN too.
    spoilt = torch.where(weights == 0, torch.nan, new)
    weighted = losses.WeightedLoss(loss)(spoilt, entropy, old, a, ref, weights)
    torch.testing.assert_close(weighted, torch.where(weights == 0, 0.0, weights * found))
    grads = torch.autograd.grad(weighted.sum(), [new, entropy])
    assert all(grad.isfinite().all() and not grad[weights == 0].any() for grad in grads)


@pytest.mark.parametrize("kl", [losses.kl_k2, losses.kl_k3])
def test_a_kl_of_minus_infinity_has_no_gradient_that_is_nan(kl):
    """An upstream of 0 gives 0, and the other tokens keep theirs."""
    new = torch.tensor([-torch.inf, -1.0, -2.0, -torch.inf], requires_grad=True)
    ref = torch.tensor([-1.0, -1.5, -torch.inf, -torch.inf])
    value = kl(new, ref)
    assert value[:1].isinf().all()
    assert value[2].isinf()
    assert value[3].isnan()  # of two impossible tokens nothing is known
    (grad,) = torch.autograd.grad(value, new, torch.tensor([0.0, 1.0, 0.0, 0.0]))
    assert grad[0] == 0.0
    assert grad[2] == 0.0
    assert grad[1] != 0.0


# ---- preferences ---------------------------------------------------------------------------------


# ---- settings and tensors that are refused -------------------------------------------------------

REFUSED: list[tuple[str, int, str, tuple]] = [
    ("ClippedLoss", 0, "clip_low", (-0.1, 1.0)),
    ("ClippedLoss", 0, "clip_high", (-0.1, NAN, "a")),
    ("ClippedLoss", 0, "dual_clip", (1.0, "a")),
    ("ClippedLoss", 0, "kl", ("k4", ["k3"])),
    ("ClippedLoss", 0, "kl_coef", ("a", math.inf, -1.0)),
    ("ClippedLoss", 0, "weighted", ("no",)),
    ("ClippedLoss", 0, "entropy_coef", (NAN,)),
    ("SFTLoss", 0, "weighted", (1,)),
    ("CISPOLoss", 0, "clip_high", (-1, math.inf)),
    ("CISPOLoss", 0, "clip_low", (-0.1,)),
    ("GSPOLoss", 0, "clip_low", (-1,)),
    ("GSPOLoss", 0, "dual_clip", (1.0,)),
    ("IcePopLoss", 0, "low", (6.0,)),
    ("IcePopLoss", 0, "high", (NAN,)),
    ("IcePopLoss", 0, "clip_low", (1.0,)),
    ("SAPOLoss", 0, "tau_pos", (0.0,)),
    ("SAPOLoss", 0, "tau_neg", (-1.0,)),
    ("SPOLoss", 0, "clip", (0.0,)),
    ("IPOLoss", 0, "threshold", (-1.0,)),
    ("DPPOLoss", 0, "divergence", ("js",)),
    ("DPPOLoss", 0, "cap", (None,)),
    ("DistillationLoss", 0, "cap", (0.0,)),
    ("DistillationLoss", 0, "kl", ("k4",)),
    ("GMPOLoss", 0, "clip_low", (-0.1,)),
    ("TOPRLoss", 0, "level", ("batch",)),
    ("VESPOLoss", 0, "k_neg", (0.0,)),
    ("DROLoss", 0, "tau", (0.0,)),
    ("KimiLoss", 0, "level", (None,)),
    ("FIPOLoss", 0, "weighted", (False,)),
    ("FIPOLoss", 0, "half_life", (0.0,)),
    ("FIPOLoss", 0, "clip_low", (1.0,)),
    ("M2POLoss", 0, "threshold", (0.0,)),
    ("ClipCovLoss", 0, "share", (0.0,)),
    ("ClipCovLoss", 0, "low", (6.0,)),
    ("ClipCovLoss", 0, "clip_high", (-1.0,)),
    ("ClipCovLoss", 0, "seed", (0.5,)),
    ("KLCovLoss", 0, "kl_coef", (-1.0,)),
    ("AdaptiveEntropy", 0, "value", (2.0,)),
    ("AdaptiveEntropy", 0, "step", (0.0,)),
    ("AdaptiveEntropy", 0, "entropy", ("a", NAN)),
    ("ClipCovLoss", 0, "low", ("a", NAN)),
    ("ClipCovLoss", 0, "high", ("b", None)),
    ("kl_unbiased", 3, "kl", ("k4",)),
    ("truncated_importance_weights", 2, "floor", (None, 9.5)),
    ("truncated_importance_weights", 2, "cap", (0.0,)),
    ("masked_importance_weights", 2, "low", (-1.0,)),
    ("masked_sequence_weights", 3, "ratio", ("median",)),
    ("masked_sequence_weights", 3, "weighted", ("no",)),
    ("sequence_masked_importance_weights", 3, "low", (3.0,)),
    ("truncated_sequence_weights", 3, "veto", (0.0,)),
    ("off_policy_sequence_mask", 4, "delta", (-0.1,)),
    ("top_entropy_mask", 2, "share", (0,)),
    ("aggregation", 1, "mode", ("mean",)),
    ("aggregation", 1, "length", (3,)),
    ("aggregation", 1, "micro_batches", (0,)),
    ("aggregation", 1, "count_empty", (1, True)),
    ("aggregation", 1, "dtype", (torch.int64, "float32", torch.float16, torch.float8_e4m3fn)),
    ("cpo_loss", 2, "nll_coef", (-1.0,)),
    ("simpo_loss", 2, "gamma", (-1.0,)),
    ("simpo_loss", 2, "label_smoothing", (1.0,)),
    ("dpo_loss", 4, "loss_type", ("bco", None)),
    ("orpo_loss", 2, "beta", (0.0,)),
    ("dpo_loss", 4, "beta", (0.0,)),
]


@pytest.mark.parametrize(("name", "tensors", "setting", "values"), REFUSED)
def test_settings_out_of_range(name, tensors, setting, values):
    for value in values:
        message = f"{setting}: .*got {re.escape(repr(value))}"
        with pytest.raises(ValueError, match=message):
            getattr(losses, name)(*[torch.zeros(1, 1)] * tensors, **{setting: value})


SETTINGS = [
    (name, field.name)
    for name, objective in losses.OBJECTIVES.items()
    for field in dataclasses.fields(objective)
]


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_every_setting_of_an_objective_is_checked(name, setting):
    for bad in ([0.5], NAN):
        with pytest.raises(ValueError, match=f"{setting}: .*got {re.escape(repr(bad))}"):
            losses.OBJECTIVES[name](**{setting: bad})


ZERO, HIGH = torch.zeros(1, 1), {"high": 1.0}
A, B = torch.zeros(3, 3), torch.zeros(3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: losses.DistillationLoss(cap=2.0, policy_gradient=False),
            r"cap: expected None without policy_gradient",
        ),
        (lambda: losses.RegularizedLoss(3), r"loss: expected an objective .*got int"),
        (lambda: losses.RegularizedLoss(losses.GSPOLoss(), kl="k"), r"kl: .*got 'k'"),
        (
            lambda: losses.WeightedLoss(losses.SFTLoss(weighted=True)),
            r"loss: expected an objective without weights, got SFTLoss",
        ),
        (
            lambda: losses.truncated_importance_weights(ZERO, ZERO, cap=1.0, floor=1.5),
            r"floor: .*at most cap 1.0, got 1.5",
        ),
        (lambda: losses.dpo_loss(1.0, *[B] * 3), r"expected a torch.Tensor beside .*, got float"),
        (
            lambda: losses.aggregation(torch.zeros(2, 2), mode="prompt"),
            r"answers: expected a number with mode='prompt', got None",
        ),
        (
            lambda: losses.aggregation(torch.zeros(3, 2), mode="prompt", answers=2),
            r"answers: expected a divisor of the 3 sequences, got 2",
        ),
        (
            lambda: losses.aggregation(torch.ones(2, 1, 4, 4), mode="sequence"),
            r"mask: expected \[b, s\], got shape \(2, 1, 4, 4\)",
        ),
        (
            lambda: losses.aggregation(torch.full((2, 2), 0.5)),
            r"mask: expected only 0 .* and 1 .*, got other",
        ),
        (lambda: losses.rejection_mask(*[ZERO] * 3, low=2.0, **HIGH), r"low, high: .*got 2.0, 1.0"),
        (
            lambda: losses.rejection_mask(*[ZERO] * 3, estimator="k4", **HIGH),
            r"estimator: .*got 'k4'",
        ),
        (
            lambda: losses.kto_loss(*[torch.zeros(1)] * 3, 0.0, desirable_weight=-1.0),
            r"desirable_weight: .*got -1.0",
        ),
        (
            lambda: losses.dpo_loss(*[torch.zeros(1)] * 4, beta=0.1, label_smoothing=1.0),
            r"label_smoothing: .*got 1.0",
        ),
        # ---- tensors that do not fit
        (
            lambda: losses.ClippedLoss(entropy_coef=0.1)(A, None, A, A),
            "entropy=True",
        ),
        (lambda: losses.ClippedLoss()(A, None, A, B), r"advantages: .*\(3, 3\).*got \(3,\)"),
        (lambda: losses.ClippedLoss()(A, None, None, A), r"old_logprobs: .*got NoneType"),
        (lambda: losses.ReinforceLoss()(A, None, B), r"advantages: .*got \(3,\)"),
        (lambda: losses.ClippedLoss(entropy_coef=1.0)(A, B, A, A), r"entropy: .*got \(3,\)"),
        (lambda: losses.truncated_importance_weights(A, B), r"rollout_logprobs: .*got \(3,\)"),
        (lambda: losses.clip_fraction(A, A, B), r"advantages: .*got \(3,\)"),
        (lambda: losses.GSPOLoss().second_pass(A, B, A, A), r"^old_logprobs: .*got \(3,\)"),
        (
            lambda: losses.off_policy_sequence_mask(A, B, A, A, delta=1.0),
            r"^rollout_logprobs: .*\(3, 3\) of the others, got \(3,\)",
        ),
        (lambda: losses.GSPOLoss().second_pass(A, A, A, B), r"mask: .*got \(3,\)"),
        (lambda: losses.M2POLoss().second_pass(A, A, A, B), r"mask: .*got \(3,\)"),
        (lambda: losses.rejection_mask(A, A, B, high=1.0), r"mask: .*got \(3,\)"),
        (lambda: losses.top_entropy_mask(A, B), r"mask: .*got \(3,\)"),
        (lambda: losses.cpo_loss(A, B), r"rejected: .*got \(3,\)"),
        (lambda: losses.kto_loss(A, A, B, 0.0), r"desirable: .*got \(3,\)"),
        (lambda: losses.kto_reference(A, B), r"ref_logprobs: .*got \(3,\)"),
        (lambda: losses.clip_fraction(A, A, A, clip_high=-1.0), r"clip_high: .*got -1.0"),
        (lambda: losses.sequence_mean(A, torch.ones(3, 1)), r"mask: .*got \(3, 1\)"),
        (lambda: losses.sequence_sum(A, A == 0, seq_dim=2), r"seq_dim: out of range.*got 2"),
        (lambda: losses.sequence_sum(A, A == 0, seq_dim="1"), r"seq_dim: .*got '1'"),
        (lambda: losses.sequence_sum(A, A + 0.5), r"mask: expected only 0 .* and 1 .*, got other"),
        (
            lambda: losses.sequence_sum(A, A - torch.inf),
            r"mask: expected only 0 .* and 1 .*, got other",
        ),
        (
            lambda: losses.sequence_mean(A, A * torch.nan),
            r"mask: expected only 0 .* and 1 .*, got other",
        ),
    ],
)
def test_settings_and_tensors_that_do_not_go_together(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_sequence_too_long_for_its_product_is_kept_by_the_mask():
    far, near, mask = torch.full((1, 4000), -1.03), torch.full((1, 4000), -1.0), torch.ones(1, 4000)
    weights = losses.masked_sequence_weights
    assert weights(far, near, mask, weighted=False).item() == 1.0
    assert weights(far, near, mask, weighted=False, low=1e-30).item() == 0.0
    assert weights(near, far, mask, weighted=False).item() == 0.0
    assert weights(far, near, mask).item() == 0.0  # exp(-120)
    far[0, 7] = torch.nan
    for weighted in (False, True):
        assert weights(far, near, mask, weighted=weighted).isnan().all()


def test_a_nan_stays_visible_where_it_decides():
    logprobs = torch.full((2, 4), -3.0)
    rollout = torch.full((2, 4), -1.0)
    rollout[0, 0] = torch.nan
    mask = torch.ones(2, 4)
    advantages = torch.tensor([-1.0, 1.0, 0.0, -1.0]).expand(2, 4)
    found = losses.off_policy_sequence_mask(logprobs, rollout, advantages, mask)
    assert found[0].isnan().tolist() == [True, False, False, True]
    assert found[1].tolist() == [0.0, 1.0, 1.0, 0.0]
    mask[0, 0] = 0.0  # not counted, not looked at
    found = losses.off_policy_sequence_mask(logprobs, rollout, advantages, mask)
    assert found[0].tolist() == [0.0, 1.0, 1.0, 0.0]
    share = losses.clip_fraction(rollout, logprobs, advantages)
    assert share[0].isnan().tolist() == [True, False, False, False]


def test_weights_carry_no_gradient_of_either_side():
    one, other = (torch.zeros(2, 3, requires_grad=True) for _ in range(2))
    mask = torch.ones(2, 3)
    for weights in (
        losses.truncated_importance_weights(one, other),
        losses.masked_importance_weights(one, other),
        losses.masked_sequence_weights(one, other, mask),
        losses.off_policy_sequence_mask(one, other, one, mask),
        losses.clip_fraction(one, other, mask),
    ):
        assert not weights.requires_grad


_BOUNDS = {"low": 0.5, "high": 5.0}
_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
_DPO = {"beta": 0.1, "label_smoothing": 0.0, "loss_type": "sigmoid"}
_CLIPPED = {
    **_CLIP, "dual_clip": None, "kl_coef": 0.0, "kl": "k3", "entropy_coef": 0.0, "weighted": False,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "ClippedLoss": _CLIPPED,
    "CISPOLoss": {"clip_high": 0.2, "clip_low": None},
    "GSPOLoss": {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None},
    "IcePopLoss": {**_BOUNDS, **_CLIP},
    "SAPOLoss": {"tau_pos": 1.0, "tau_neg": 1.05},
    "SFTLoss": {"weighted": False},
    "SPOLoss": {"clip": 0.2},
    "ImportanceLoss": {},
    "IPOLoss": {"threshold": 0.1, "kl_coef": 1e-3},
    "ReinforceLoss": {},
    "GPGLoss": {},
    "DPPOLoss": {"divergence": "tv", "low": 0.2, "high": 0.2, "cap": 20.0},
    "DistillationLoss": {"kl": "k1", "policy_gradient": True, "cap": None, "clamp": None},
    "LUSPOLoss": {"clip_low": 2e-3, "clip_high": 2.5e-3, "dual_clip": None},
    "GMPOLoss": {"clip_low": 0.4, "clip_high": 0.4},
    "TOPRLoss": {"level": "sequence"},
    "VESPOLoss": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    "DROLoss": {"tau": 1.0, "level": "sequence"},
    "KimiLoss": {"tau": 0.1, "level": "sequence"},
    "FIPOLoss": {
        **_CLIPPED, "clip_high": 0.28, "dual_clip": 10.0, "weighted": True, "half_life": 32.0,
        "weight_clip": 0.2, "high_only": True, "safety": 4.0,
    },
    "M2POLoss": {"threshold": 0.04},
    "ClipCovLoss": {**_CLIPPED, "share": 2e-4, "low": 1.0, "high": 5.0, "seed": 0},
    "KLCovLoss": {"share": 2e-4, "kl_coef": 1.0},
    "RegularizedLoss": {"kl_coef": 0.0, "kl": "k3", "kl_ratio": False, "entropy_coef": 0.0},
    "kl_unbiased": {"kl": "k3"},
    "truncated_sequence_weights": {"cap": 2.0, "ratio": "product", "veto": None, "seq_dim": 1},
    "sequence_masked_importance_weights": {"low": 0.999, "high": 1.002, "seq_dim": 1},
    "rejection_mask": {
        "low": -math.inf, "estimator": "k1", "level": "token", "seq_dim": 1,
    },
    "top_entropy_mask": {"share": 0.2, "group": None},
    "AdaptiveEntropy": {
        "target": 0.2, "step": 0.005, "low": 0.0, "high": 1.0, "value": 0.0, "entropy": None,
    },
    "aggregation": {
        "mode": "token", "length": None, "answers": None, "averaged_ranks": 1, "micro_batches": 1,
        "seq_dim": 1, "group": None, "dtype": torch.float32, "count_empty": False,
    },
    "cpo_loss": {"beta": 0.1, "nll_coef": 1.0},
    "simpo_loss": {"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.0},
    "orpo_loss": {"beta": 0.1},
    "kto_loss": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "truncated_importance_weights": {"cap": 2.0, "floor": 0.0},
    "masked_importance_weights": _BOUNDS,
    "masked_sequence_weights": {
        "low": 0.0, "high": 2.0, "ratio": "product", "weighted": True, "seq_dim": 1,
    },
    "off_policy_sequence_mask": {"delta": 0.1, "seq_dim": 1},
    "clip_fraction": _CLIP,
    "sequence_sum": {"seq_dim": 1},
    "sequence_mean": {"seq_dim": 1},
    "dpo_loss": _DPO,
    "dpo_advantages": _DPO,
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_settings_by_default(name):
    """Those of the papers, or of what they are compared with; a change is one of the API."""
    parameters = inspect.signature(getattr(losses, name)).parameters.values()
    found = {p.name: p.default for p in parameters if p.default is not p.empty}
    assert found == DEFAULTS[name]


def test_every_objective_s_settings_are_here():
    assert losses.OBJECTIVES.keys() <= DEFAULTS.keys()


def test_a_bound_itself_is_within():
    double, half = (torch.tensor([math.log(x)], dtype=torch.float64) for x in (2.0, 0.5))
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    assert (double.exp().item(), half.exp().item()) == (2.0, 0.5)
    weights = losses.masked_importance_weights
    assert weights(double, zero, high=2.0).item() == 2.0
    assert weights(half, zero, low=0.5).item() == 0.5
    assert losses.clip_fraction(double, zero, one, clip_high=1.0).item() == 0.0
    assert losses.clip_fraction(half, zero, -one, clip_low=0.5).item() == 0.0
    low, true = half.view(1, 1), torch.ones(1, 1, dtype=torch.bool)
    vetoed = losses.truncated_sequence_weights(low, zero.view(1, 1), true, veto=0.5)
    assert vetoed.item() == 0.5
    far = torch.tensor([[0.5]])
    mask = losses.off_policy_sequence_mask(far - 0.5, far, -torch.ones(1, 1), far > 0, delta=0.5)
    assert mask.item() == 1.0
    mask = losses.off_policy_sequence_mask(far, far, -torch.ones(1, 1), far > 0, delta=0.0)
    assert mask.item() == 1.0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize(
    "loss",
    [
        losses.ClippedLoss(),
        losses.SAPOLoss(),
        losses.ImportanceLoss(),
        losses.IPOLoss(),
        losses.SPOLoss(),
        losses.ReinforceLoss(),
    ],
    ids=lambda x: type(x).__name__,
)
def test_advantages_may_be_integers(loss, dtype):
    """Rewards of 0 and 1, say; minus a uint8 of 1 is 255."""
    new = (-torch.rand(6)).requires_grad_()
    advantages = torch.tensor([0, 1, 1, 0, 1, 1])
    tensors = [new.detach() - 0.1] * (len(loss.tensors) - 1)
    place = loss.tensors.index("advantages")
    found = loss(new, None, *tensors[:place], advantages.to(dtype), *tensors[place:])
    expected = loss(new, None, *tensors[:place], advantages.float(), *tensors[place:])
    assert torch.equal(found, expected)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_wider_per_token_tensor_keeps_its_digits(dtype):
    wider = {torch.bfloat16: torch.float32, torch.float32: F64}[dtype]
    logprobs = (-3.0 * torch.rand(3, 5)).to(dtype).requires_grad_()
    old = (logprobs.detach().double() + 0.1 * torch.randn(3, 5, dtype=F64)).to(wider)
    advantages, upstream = torch.randn(3, 5, dtype=wider), torch.randn(3, 5, dtype=F64)
    loss = losses.ClippedLoss(clip_low=0.9, clip_high=9.0)(logprobs, None, old, advantages)
    new = logprobs.detach().double().requires_grad_()
    exact = -advantages.double() * (new - old.double()).exp()
    digits = {torch.bfloat16: 1e-5, torch.float32: 1e-12}[dtype]
    torch.testing.assert_close(loss.double(), exact, rtol=digits, atol=digits)
    (got,) = torch.autograd.grad(loss, logprobs, upstream.to(loss.dtype))
    (want,) = torch.autograd.grad(exact, new, upstream)
    torch.testing.assert_close(got, want.to(dtype))
