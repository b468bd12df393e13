"""Losses where a token is impossible or spoilt: what is inf, what NaN, and what has no gradient."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_logprobs import losses


def test_a_sequence_that_was_impossible_has_no_part_in_vespo():
    """Under the old policy: log w is inf, and inf - inf is not met."""
    new = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    log_w, advantages = torch.full((1, 2), torch.inf), torch.full((1, 2), 1.5)
    value = losses.VESPOLoss()(new, None, log_w, advantages)
    value.sum().backward()
    assert (value == 0).all()
    assert (new.grad == 0).all()


def test_the_reference_of_kto_gets_no_gradient():
    chosen, reference = (torch.tensor([-3.0, -2.0], requires_grad=True) for _ in range(2))
    loss = losses.kto_loss(chosen, reference, torch.tensor([True, False]), 0.1)
    loss.sum().backward()
    assert chosen.grad.all()
    assert reference.grad is None or not reference.grad.any()
    assert losses.kto_reference(torch.zeros(0), torch.zeros(0)).item() == 0.0


def test_what_a_nan_ratio_clips() -> None:
    new, old = torch.tensor([-torch.inf, -torch.inf, -1.0]), torch.tensor([-torch.inf] * 2 + [-2.0])
    found = losses.clip_fraction(new, old, torch.tensor([0.0, 1.0, 1.0]))
    assert found[0] == 0.0
    assert found[1].isnan()
    assert found[2] == 1.0


def test_a_nan_ratio_has_a_nan_gradient() -> None:
    new = torch.tensor([torch.nan, -1.0], requires_grad=True)
    loss = losses.ClippedLoss()(new, None, torch.full((2,), -1.0), torch.ones(2))
    (grad,) = torch.autograd.grad(loss.sum(), new)
    assert loss[0].isnan()
    assert grad[0].isnan()
    assert grad[1] == -1.0


def test_a_nan_token_of_weight_0_has_no_gradient() -> None:
    new = torch.tensor([torch.nan, -1.0], requires_grad=True)
    loss = losses.WeightedLoss(losses.ImportanceLoss())
    value = loss(new, None, torch.full((2,), -1.0), torch.ones(2), torch.tensor([0.0, 2.0]))
    (grad,) = torch.autograd.grad(value.sum(), new)
    assert value.tolist() == grad.tolist() == [0.0, -2.0]


def test_divergence_from_what_is_impossible_is_inf_without_a_gradient() -> None:
    new = torch.tensor([-1.0], requires_grad=True)
    value = losses.kl_k3(new, torch.tensor([-torch.inf]))
    (grad,) = torch.autograd.grad(value.sum(), new)
    assert (value.item(), grad.item()) == (math.inf, 0.0)
    for kl in (losses.kl_k2, losses.kl_k3):
        assert kl(torch.tensor([-torch.inf]), torch.tensor([-1.0])).item() == math.inf


def test_bounds_that_meet() -> None:
    cispo = losses.CISPOLoss(clip_low=0.1, clip_high=-0.1)
    one = torch.tensor([-1.0])
    assert cispo(one, None, one - 2.0, torch.tensor([2.0])).item() == pytest.approx(1.8)
    dppo = losses.DPPOLoss(low=0.0, high=0.0)
    for advantage in (1.0, -1.0):  # on policy: no token is outside
        assert dppo(one, None, one, torch.tensor([advantage])).item() == advantage
