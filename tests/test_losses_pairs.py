"""Losses of pairs and of labeled answers against their papers' formulas in Python's floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_logprobs import losses

F64 = torch.float64


def test_dpo_against_an_impossible_answer():
    """The rejected one at -inf: nothing is left to learn, and 0 times inf is not asked for."""
    chosen = torch.tensor([-3.0], requires_grad=True)
    rejected = torch.tensor([-torch.inf], requires_grad=True)
    loss = losses.dpo_loss(chosen, rejected, torch.tensor([-3.0]), torch.tensor([-4.0]))
    assert loss.item() == 0.0
    assert [g.item() for g in torch.autograd.grad(loss.sum(), [chosen, rejected])] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("loss", "settings", "of_impossible_chosen", "of_impossible_rejected"),
    [
        (
            losses.dpo_loss,
            {"loss_type": "exo", "label_smoothing": 0.1},
            -math.log(0.1),
            -math.log(0.9),
        ),
        (losses.dpo_loss, {"loss_type": "robust"}, math.inf, 0.0),
        (losses.cpo_loss, {"nll_coef": 0.0}, math.inf, 0.0),
    ],
    ids=["exo", "robust", "cpo"],
)
def test_a_term_of_factor_zero_is_nothing(
    loss, settings, of_impossible_chosen, of_impossible_rejected
):
    """Of an answer at -inf the term is -inf: 0 times it would be NaN."""
    more = [torch.zeros(2)] * 2 if loss is losses.dpo_loss else []
    chosen = torch.tensor([-torch.inf, -5.0], requires_grad=True)
    rejected = torch.tensor([-5.0, -torch.inf], requires_grad=True)
    found = loss(chosen, rejected, *more, **settings)
    expected = torch.tensor([of_impossible_chosen, of_impossible_rejected])
    torch.testing.assert_close(found, expected)
    for grad in torch.autograd.grad(found.sum(), (chosen, rejected)):
        assert grad.isfinite().all()
        assert grad[1] == 0.0


def _log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def _log_odds(x: float) -> float:
    return x - math.log(-math.expm1(x))


def _sigmoid(x: float) -> float:
    return math.exp(_log_sigmoid(x))


def _exo(m: float, a: float = 0.1) -> float:
    toward = _sigmoid(m) * (_log_sigmoid(m) - math.log(1 - a))
    return toward + _sigmoid(-m) * (_log_sigmoid(-m) - math.log(a))


def _discopop(m: float) -> float:
    gate = _log_sigmoid(m / 0.05)
    return -(1 - math.exp(gate)) * _log_sigmoid(m) + math.exp(gate - m)


# Of the margin, and of its two parts, all with beta = 2.
PAIRS: dict[str, tuple[float, Callable[[float, float, float], float]]] = {
    "sigmoid": (0.1, lambda m, c, r: -0.9 * _log_sigmoid(m) - 0.1 * _log_sigmoid(-m)),
    "robust": (0.2, lambda m, c, r: (-0.8 * _log_sigmoid(m) + 0.2 * _log_sigmoid(-m)) / 0.6),
    "exo": (0.1, lambda m, c, r: _exo(m)),
    "hinge": (0.0, lambda m, c, r: max(0.0, 1 - m)),
    "ipo": (0.0, lambda m, c, r: (m / 2 - 1 / 4) ** 2),
    "nca": (0.0, lambda m, c, r: -_log_sigmoid(c) - (_log_sigmoid(-c) + _log_sigmoid(-r)) / 2),
    "sppo": (0.0, lambda m, c, r: (c / 2 - 1 / 4) ** 2 + (r / 2 + 1 / 4) ** 2),
    "apo_zero": (0.0, lambda m, c, r: _sigmoid(-c) + _sigmoid(r)),
    "apo_down": (0.0, lambda m, c, r: _sigmoid(c) + _sigmoid(-m)),
    "discopop": (0.0, lambda m, c, r: _discopop(m)),
}
REFS = {"ref_chosen": torch.tensor(-0.5).double(), "ref_rejected": torch.tensor(-1.5).double()}


def _pair(name: str) -> tuple[Any, dict[str, Any], Callable[[float, float], float]]:
    smoothing, formula = PAIRS[name]
    settings = {**REFS, "beta": 2.0, "label_smoothing": smoothing, "loss_type": name}

    def of(c: float, r: float) -> float:
        c, r = 2.0 * (c + 0.5), 2.0 * (r + 1.5)
        return formula(c - r, c, r)

    return losses.dpo_loss, settings, of


def test_discopop_of_a_pair_that_cannot_be():
    """-inf, as of a filtered token: the loss is inf there, without NaN in its gradient."""
    chosen = torch.tensor([-torch.inf, -1e4, -1.0], requires_grad=True)
    zero = torch.zeros(3)
    loss = losses.dpo_loss(chosen, zero - 1.0, zero, zero, loss_type="discopop", beta=1.0)
    assert loss[0] == torch.inf
    assert loss[1:].isfinite().all()
    (grad,) = torch.autograd.grad(loss.sum(), chosen)
    torch.testing.assert_close(grad[:2], torch.tensor([-1.0, -1.0]))


PREFERENCES = {
    **{f"dpo {name}": _pair(name) for name in PAIRS},
    "cpo": (losses.cpo_loss, {"beta": 0.3}, lambda c, r: -_log_sigmoid(0.3 * (c - r)) - c),
    "simpo": (losses.simpo_loss, {}, lambda c, r: -_log_sigmoid(2.0 * (c - r) - 1.0)),
    "simpo, smoothed": (
        losses.simpo_loss,
        {"label_smoothing": 0.1},
        lambda c, r: (
            -0.9 * _log_sigmoid(2.0 * (c - r) - 1.0) - 0.1 * _log_sigmoid(1.0 - 2.0 * (c - r))
        ),
    ),
    "orpo": (
        losses.orpo_loss,
        {"beta": 0.2},
        lambda c, r: -c - 0.2 * _log_sigmoid(_log_odds(c) - _log_odds(r)),
    ),
}


@pytest.mark.parametrize(("loss", "settings", "formula"), PREFERENCES.values(), ids=PREFERENCES)
def test_preferences_without_a_reference(loss, settings, formula):
    values = [-1e-3, -0.3, -1.0, -4.0, -100.0, -101.0]
    pairs = torch.cartesian_prod(*[torch.tensor(values, dtype=F64)] * 2)
    chosen, rejected = (x.clone().requires_grad_() for x in pairs.t())
    found = loss(chosen, rejected, **settings)
    grads = torch.autograd.grad(found.sum(), [chosen, rejected])
    advantages = losses.preference_advantages(loss, chosen, rejected, **settings)
    for i, (c, r) in enumerate(pairs.tolist()):
        assert found[i].item() == pytest.approx(formula(c, r), rel=1e-9)
        for side, (dc, dr) in enumerate(((1e-7, 0.0), (0.0, 1e-7))):
            up, down = formula(c + dc, r + dr), formula(c - dc, r - dr)
            assert grads[side][i].item() == pytest.approx((up - down) / 2e-7, rel=1e-3, abs=1e-5)
            assert advantages[side][i] == -grads[side][i]
            assert not advantages[side].requires_grad


def test_orpo_of_a_certain_answer_is_finite():
    chosen = torch.zeros(2, requires_grad=True)
    rejected = torch.tensor([0.0, -200.0], requires_grad=True)
    value = losses.orpo_loss(chosen, rejected)
    assert value.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(value.sum(), [chosen, rejected]))


def test_kto():
    new, ref = torch.randn(2, 9, dtype=F64) * 4
    desirable = torch.arange(9) % 3 > 0
    z = losses.kto_reference(new, ref - 3.0)
    assert z.item() == pytest.approx(max((new - ref + 3.0).mean().item(), 0.0))
    assert losses.kto_reference(new - 50.0, ref) == 0.0
    new.requires_grad_()
    settings = {"beta": 0.2, "desirable_weight": 1.33, "undesirable_weight": 0.7}
    found = losses.kto_loss(new, ref, desirable, z, **settings)
    (grad,) = torch.autograd.grad(found.sum(), new)
    for i in range(9):
        gain = 0.2 * (new[i] - ref[i] - z).item()
        sign, weight = (1, 1.33) if desirable[i] else (-1, 0.7)
        share = 1 / (1 + math.exp(-sign * gain))
        assert found[i].item() == pytest.approx(weight * (1 - share))
        assert grad[i].item() == pytest.approx(-sign * weight * 0.2 * share * (1 - share))
    (advantages,) = losses.preference_advantages(
        losses.kto_loss, new, ref_logprobs=ref, desirable=desirable, reference=z, **settings
    )
    torch.testing.assert_close(advantages, -grad)
    assert z.requires_grad_().grad is None
    losses.kto_loss(new, ref, desirable, z, **settings).sum().backward()
    assert z.grad is None
    far = torch.tensor([-1e4, 1e4], requires_grad=True)
    value = losses.kto_loss(far, torch.zeros(2), torch.ones(2, dtype=torch.bool), 0.0)
    assert value.tolist() == [1.0, 0.0]
    assert torch.autograd.grad(value.sum(), far)[0].tolist() == [0.0, 0.0]


@torch.inference_mode()
def test_preference_advantages_in_inference_mode():
    chosen, rejected = torch.randn(2, 3)
    ours = losses.dpo_advantages(chosen, rejected, rejected, chosen)
    assert all(x.isfinite().all() for x in ours)
    inputs = {"ref_logprobs": rejected, "desirable": chosen > 0.0}
    reference = losses.kto_reference(chosen, rejected)
    (found,) = losses.preference_advantages(losses.kto_loss, chosen, **inputs, reference=reference)
    with torch.inference_mode(False):
        (expected,) = losses.preference_advantages(
            losses.kto_loss,
            chosen.clone(),
            **{name: x.clone() for name, x in inputs.items()},
            reference=reference.clone(),
        )
    assert torch.equal(found, expected)


def test_pairs_far_apart_stay_finite():
    chosen = torch.tensor([-1e3, 1e3], requires_grad=True)
    for name in PAIRS:
        loss, settings, _ = _pair(name)
        settings = {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in settings.items()}
        value = loss(chosen, -chosen.detach(), **settings)
        assert value.isfinite().all(), name
        assert torch.autograd.grad(value.sum(), chosen)[0].isfinite().all(), name


@pytest.mark.parametrize(("name", "smoothing"), [("hinge", 0.1), ("robust", 0.5), ("exo", 0.0)])
def test_label_smoothing_that_a_pair_does_not_take(name, smoothing):
    with pytest.raises(ValueError, match=f"label_smoothing: expected .*loss_type='{name}'"):
        losses.dpo_loss(*[torch.zeros(1)] * 4, loss_type=name, label_smoothing=smoothing)


_PAIR = (torch.zeros(4), torch.zeros(4))
_COLUMN = torch.zeros(4, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.dpo_loss(*_PAIR, _COLUMN, _PAIR[0]), "ref_chosen: expected the shape"),
        (lambda: losses.dpo_loss(*_PAIR, _PAIR[0], _COLUMN), "ref_rejected: expected the shape"),
        (lambda: losses.dpo_advantages(*_PAIR, _COLUMN, _COLUMN), "ref_chosen: expected the shape"),
        (lambda: losses.dpo_advantages(*_PAIR, 0.0, 0.0), "ref_chosen: expected a torch.Tensor"),
        (lambda: losses.kto_loss(*_PAIR, _PAIR[0] > 0, _COLUMN), "reference: expected a scalar"),
        (lambda: losses.kto_loss(*_PAIR, _PAIR[0], 0.0), "desirable: expected a bool tensor"),
        (lambda: losses.kl_k1(_PAIR[0], _COLUMN), "ref_logprobs: expected the shape"),
        (lambda: losses.kl_k2(_PAIR[0], _COLUMN), "ref_logprobs: expected the shape"),
        (lambda: losses.kl_k3(_PAIR[0], _COLUMN), "ref_logprobs: expected the shape"),
        (lambda: losses.kl_unbiased(*_PAIR, _COLUMN), "old_logprobs: expected the shape"),
    ],
)
def test_nothing_is_broadcast(call, message):
    with pytest.raises(ValueError, match=message):
        call()
