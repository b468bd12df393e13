"""Each ready-made loss against the formula of its paper, token by token, in float64 Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    losses,
)

N = 64


def _inputs(count: int = N, spread: float = 0.5) -> dict[str, Tensor]:
    """Log-probabilities around each other, advantages of either sign and some 0, in float64."""
    new = -torch.rand(count, dtype=torch.float64) * 4
    return {
        "new": new,
        "old": new + torch.randn(count, dtype=torch.float64) * spread,
        "ref": new + torch.randn(count, dtype=torch.float64) * spread,
        "advantage": torch.randn(count, dtype=torch.float64).where(
            torch.rand(count) > 0.1, torch.zeros((), dtype=torch.float64)
        ),
        "entropy": torch.rand(count, dtype=torch.float64) * 3,
        "weight": torch.rand(count, dtype=torch.float64) * 2,
    }


def _value_and_grads(loss: Any, x: dict[str, Tensor], *names: str) -> tuple[Tensor, Tensor, Tensor]:
    new = x["new"].clone().requires_grad_()
    entropy = x["entropy"].clone().requires_grad_()
    tensors = [x[name].clone().requires_grad_() for name in names]
    value = loss(new, entropy, *tensors)
    assert value.shape == new.shape
    upstream = torch.linspace(-1, 2, N, dtype=torch.float64)
    grads = torch.autograd.grad(
        value, [new, entropy, *tensors], upstream, allow_unused=True, materialize_grads=True
    )
    for name, grad in zip(names, grads[2:], strict=True):
        assert not grad.any(), f"a gradient flows to {name}"
    return value.detach(), grads[0] / upstream, grads[1] / upstream


def _numeric(function: Any, at: float) -> float:
    step = 1e-6
    return (function(at + step) - function(at - step)) / (2 * step)


# ---- the clipped objective ----------------------------------------------------------------------


def _ppo(new: float, old: float, a: float, low: float, high: float, dual: float | None) -> float:
    ratio = math.exp(new - old)
    objective = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    if dual is not None and a < 0:
        objective = max(objective, dual * a)
    return -objective


@pytest.mark.parametrize("dual", [None, 1.5, 3.0])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (0.3, 5.0)])
def test_clipped(low, high, dual):
    x = _inputs(spread=1.0)
    loss = losses.ClippedLoss(clip_low=low, clip_high=high, dual_clip=dual)
    value, grad, on_entropy = _value_and_grads(loss, x, "old", "advantage")
    assert not on_entropy.any()
    rows = zip(*(x[name].tolist() for name in ("new", "old", "advantage")), strict=True)
    for i, (new, old, a) in enumerate(rows):
        assert value[i].item() == pytest.approx(_ppo(new, old, a, low, high, dual), abs=1e-12)
        slope = _numeric(lambda z, o=old, a=a: _ppo(z, o, a, low, high, dual), new)
        assert grad[i].item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_clipped_with_every_term(kl):
    x = _inputs()
    loss = losses.ClippedLoss(
        clip_low=0.1, clip_high=0.3, dual_clip=3.0, kl_coef=0.4, kl=kl, entropy_coef=0.7,
        weighted=True,
    )  # fmt: skip
    value, grad, on_entropy = _value_and_grads(loss, x, "old", "advantage", "ref", "weight")
    estimators = {
        "k1": lambda log_ratio: -log_ratio,
        "k2": lambda log_ratio: log_ratio**2 / 2,
        "k3": lambda log_ratio: math.exp(log_ratio) - 1 - log_ratio,
    }

    def expected(i: int, new: float) -> float:
        row = {name: tensor[i].item() for name, tensor in x.items()}
        clipped = row["weight"] * _ppo(new, row["old"], row["advantage"], 0.1, 0.3, 3.0)
        return clipped + 0.4 * estimators[kl](row["ref"] - new) - 0.7 * row["entropy"]

    for i, new in enumerate(x["new"].tolist()):
        assert value[i].item() == pytest.approx(expected(i, new), abs=1e-12)
        slope = _numeric(lambda z, i=i: expected(i, z), new)
        assert grad[i].item() == pytest.approx(slope, abs=1e-6)
    assert torch.allclose(on_entropy, torch.tensor(-0.7, dtype=torch.float64))


def test_on_policy_the_gradient_is_the_policy_gradient():
    x = _inputs()
    x["old"] = x["new"]
    for loss in (
        losses.ClippedLoss(),
        losses.ClippedLoss(dual_clip=3.0),
        losses.CISPOLoss(),
    ):
        _, grad, _ = _value_and_grads(loss, x, "old", "advantage")
        assert torch.allclose(grad, -x["advantage"])
    _, grad, _ = _value_and_grads(losses.ReinforceLoss(), x, "advantage")
    assert torch.allclose(grad, -x["advantage"])


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.4)])
def test_clip_fraction_is_where_the_gradient_is_gone(low, high):
    x = _inputs(spread=1.0)
    loss = losses.ClippedLoss(clip_low=low, clip_high=high)
    _, grad, _ = _value_and_grads(loss, x, "old", "advantage")
    found = losses.clip_fraction(x["new"], x["old"], x["advantage"], clip_low=low, clip_high=high)
    gone = (grad == 0) & (x["advantage"] != 0)
    assert gone.any()
    assert torch.equal(found.bool(), gone)
    if loss == losses.ClippedLoss():  # the defaults are the same
        assert torch.equal(losses.clip_fraction(x["new"], x["old"], x["advantage"]), found)


# ---- the others ---------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [None, 0.2])
def test_cispo(low):
    x = _inputs(spread=1.0)
    loss = losses.CISPOLoss(clip_high=0.3, clip_low=low)
    value, grad, _ = _value_and_grads(loss, x, "old", "advantage")
    for i in range(N):
        weight = min(math.exp(x["new"][i] - x["old"][i]), 1.3)
        if low is not None:
            weight = max(weight, 1 - low)
        expected = -weight * x["advantage"][i].item()
        assert grad[i].item() == pytest.approx(expected, abs=1e-12)
        assert value[i].item() == pytest.approx(expected * x["new"][i].item(), abs=1e-12)


def test_reinforce_and_sft():
    x = _inputs()
    value, grad, _ = _value_and_grads(losses.ReinforceLoss(), x, "advantage")
    assert torch.equal(value, -x["advantage"] * x["new"])
    assert torch.allclose(grad, -x["advantage"])
    value, grad, _ = _value_and_grads(losses.SFTLoss(), x)
    assert torch.equal(value, -x["new"])
    assert torch.allclose(grad, torch.tensor(-1.0, dtype=torch.float64))
    value, grad, _ = _value_and_grads(losses.SFTLoss(weighted=True), x, "weight")
    assert torch.equal(value, -x["weight"] * x["new"])
    assert torch.allclose(grad, -x["weight"])


def test_kl_estimators():
    x = _inputs()
    ratio = (x["ref"] - x["new"]).exp()
    assert torch.allclose(losses.kl_k1(x["new"], x["ref"]), -ratio.log())
    assert torch.allclose(losses.kl_k2(x["new"], x["ref"]), ratio.log() ** 2 / 2)
    assert torch.allclose(losses.kl_k3(x["new"], x["ref"]), ratio - 1 - ratio.log())
    assert (losses.kl_k3(x["new"], x["ref"]) >= 0).all()
    assert set(losses.KL) == {"k1", "k2", "k3"}


def test_kl_estimators_estimate_the_kl():
    """Averaged over the whole of p: the values of k1 and k3, and every expected gradient."""
    logits = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    log_p = torch.log_softmax(logits, -1)
    log_q = torch.log_softmax(torch.randn(5, 16, dtype=torch.float64), -1)
    reverse = (log_p.exp() * (log_p - log_q)).sum(-1)
    forward = (log_q.exp() * (log_q - log_p)).sum(-1)
    for estimator in (losses.kl_k1, losses.kl_k3):
        assert torch.allclose((log_p.exp() * estimator(log_p, log_q)).sum(-1), reverse)

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0]

    def expected(name: str) -> Tensor:
        return gradient(log_p.exp().detach() * losses.KL[name](log_p, log_q))

    assert torch.allclose(expected("k1"), torch.zeros((), dtype=torch.float64), atol=1e-15)
    assert torch.allclose(expected("k2"), gradient(reverse))
    assert torch.allclose(expected("k3"), gradient(forward))
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


def test_truncated_importance_weights():
    x = _inputs(spread=2.0)
    train = x["new"].clone().requires_grad_()
    found = losses.truncated_importance_weights(train, x["old"], cap=1.5)
    assert not found.requires_grad
    expected = torch.tensor(
        [min(math.exp(p - q), 1.5) for p, q in zip(x["new"], x["old"], strict=True)]
    ).double()
    assert (found == 1.5).any()
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("floor", [0.0, 0.6])
def test_truncated_importance_weights_with_a_floor(floor):
    x = _inputs(spread=2.0)
    found = losses.truncated_importance_weights(x["new"], x["old"], cap=1.5, floor=floor)
    for i in range(N):
        ratio = math.exp(x["new"][i] - x["old"][i])
        assert found[i].item() == pytest.approx(max(min(ratio, 1.5), floor), abs=1e-12)
    assert (found == floor).any() == (floor > 0)


def _masked(ratio: float, low: float, high: float) -> float:
    return ratio if low <= ratio <= high else 0.0


@pytest.mark.parametrize(("low", "high"), [(0.5, 5.0), (0.0, 1.5)])
def test_icepop(low, high):
    """M(k) min(r A, clip(r) A), as the paper has it, and the weights alone."""
    x = _inputs(spread=1.5)
    loss = losses.IcePopLoss(low=low, high=high, clip_low=0.2, clip_high=0.3)
    value, grad, _ = _value_and_grads(loss, x, "old", "ref", "advantage")
    weights = losses.masked_importance_weights(x["old"], x["ref"], low=low, high=high)
    assert (weights == 0).any()
    for i in range(N):
        new, old, rollout, a = (x[k][i].item() for k in ("new", "old", "ref", "advantage"))
        k = _masked(math.exp(old - rollout), low, high)
        assert weights[i].item() == pytest.approx(k, abs=1e-12)
        assert value[i].item() == pytest.approx(k * _ppo(new, old, a, 0.2, 0.3, None), abs=1e-11)
        slope = _numeric(lambda z, o=old, a=a, k=k: k * _ppo(z, o, a, 0.2, 0.3, None), new)
        assert grad[i].item() == pytest.approx(slope, abs=1e-6)
    same = losses.ClippedLoss(clip_low=0.2, clip_high=0.3, weighted=True)
    plain, plain_grad, _ = _value_and_grads(
        same, x | {"weight": weights}, "old", "advantage", "weight"
    )
    assert torch.equal(value, plain)
    assert torch.equal(grad, plain_grad)


@pytest.mark.parametrize(("tau_pos", "tau_neg"), [(1.0, 1.05), (0.5, 3.0)])
def test_sapo(tau_pos, tau_neg):
    x = _inputs(spread=1.5)
    loss = losses.SAPOLoss(tau_pos=tau_pos, tau_neg=tau_neg)
    value, grad, _ = _value_and_grads(loss, x, "old", "advantage")
    for i in range(N):
        new, old, a = (x[k][i].item() for k in ("new", "old", "advantage"))
        tau = tau_pos if a > 0 else tau_neg
        ratio = math.exp(new - old)
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert value[i].item() == pytest.approx(-gate * 4 / tau * a, abs=1e-12)
        # The paper's weight of the policy gradient.
        assert grad[i].item() == pytest.approx(-4 * gate * (1 - gate) * ratio * a, abs=1e-12)


# ---- losses of whole sequences ------------------------------------------------------------------


def _sequences() -> tuple[dict[str, Tensor], Tensor]:
    x = {name: tensor.view(4, 16) for name, tensor in _inputs(spread=0.05).items()}
    mask = torch.arange(16) < torch.tensor([16, 3, 9, 1]).unsqueeze(1)
    x["advantage"] = x["advantage"][:, :1].expand(4, 16)
    return x, mask


@pytest.mark.parametrize("seq_dim", [0, 1])
def test_sequence_sums_and_means(seq_dim):
    x, mask = _sequences()
    mask[3] = False
    values = x["new"].clone()
    values[~mask] = float("nan")
    sums = torch.stack([row[keep].sum() for row, keep in zip(x["new"], mask, strict=True)])
    counts = mask.sum(1).clamp(min=1)
    if seq_dim == 0:
        values, mask = values.t(), mask.t()
    found = losses.sequence_sum(values, mask, seq_dim=seq_dim)
    assert found.shape == ((4, 1) if seq_dim else (1, 4))
    assert torch.allclose(found.flatten(), sums)
    for keep in (mask, mask.long(), mask.float()):
        found = losses.sequence_mean(values, keep, seq_dim=seq_dim)
        assert torch.allclose(found.flatten(), sums / counts)


@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.02, 0.03), (0.3, 0.3)])
def test_gspo_has_the_sequence_s_value_and_gradient(low, high):
    """As its docstring says: two passes, summed over a sequence's tokens over their number."""
    x, mask = _sequences()
    new = x["new"].clone().requires_grad_()
    log_ratio = losses.sequence_mean(x["new"] - x["old"], mask)
    counts = mask.sum(1, keepdim=True)
    loss = losses.GSPOLoss(clip_low=low, clip_high=high)
    per_token = loss(new, None, x["new"], log_ratio.expand_as(new), x["advantage"] / counts)
    found = torch.where(mask, per_token, 0.0).sum(1)

    same = x["new"].clone().requires_grad_()
    ratio = (torch.where(mask, same - x["old"], 0.0).sum(1) / counts.squeeze(1)).exp()
    advantage = x["advantage"][:, 0]
    expected = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    assert torch.allclose(found, expected)
    upstream = torch.randn(4, dtype=torch.float64)
    (found_grad,) = torch.autograd.grad(found, new, upstream)
    (expected_grad,) = torch.autograd.grad(expected, same, upstream)
    assert torch.allclose(found_grad, expected_grad)
    assert found_grad.any()


@pytest.mark.parametrize("seq_dim", [0, 1])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("ratio", ["product", "mean"])
def test_masked_sequence_weights(ratio, weighted, seq_dim):
    x, mask = _sequences()
    mask[3] = False
    rollout = x["new"] - torch.tensor([[0.02], [-0.4], [0.3], [9.0]], dtype=torch.float64)
    rollout = torch.where(mask, rollout, torch.nan)  # what is masked may be anything
    low, high = 0.5, 1.5
    arguments = [x["new"], rollout, mask]
    if seq_dim == 0:
        arguments = [tensor.t() for tensor in arguments]
    found = losses.masked_sequence_weights(
        *arguments, low=low, high=high, ratio=ratio, weighted=weighted, seq_dim=seq_dim
    )
    assert found.shape == ((4, 1) if seq_dim else (1, 4))
    kept = 0
    for i in range(4):
        tokens = [t for t in range(16) if mask[i, t]]
        log_ratio = sum((x["new"][i, t] - rollout[i, t]).item() for t in tokens)
        if ratio == "mean":
            log_ratio /= max(len(tokens), 1)
        s = math.exp(log_ratio)
        expected = (s if weighted else 1.0) if low <= s <= high else 0.0
        kept += expected > 0
        assert found.flatten()[i].item() == pytest.approx(expected, abs=1e-12)
    assert kept == (2 if ratio == "product" else 4)


@pytest.mark.parametrize("seq_dim", [0, 1])
def test_off_policy_sequence_mask(seq_dim):
    x, mask = _sequences()
    logprobs = x["new"].clone().requires_grad_()
    drift = torch.tensor([[0.3], [0.3], [0.05], [-2.0]], dtype=torch.float64)
    rollout = torch.where(mask, x["new"] + drift + 0.01 * torch.randn(4, 16), torch.nan)
    advantages = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0]], dtype=torch.float64)
    arguments = [logprobs, rollout, advantages, mask]
    if seq_dim == 0:
        arguments = [tensor.t() for tensor in arguments]
    found = losses.off_policy_sequence_mask(*arguments, delta=0.1, seq_dim=seq_dim)
    assert not found.requires_grad
    found = found if seq_dim else found.t()
    for i in range(4):
        tokens = [t for t in range(16) if mask[i, t]]
        mean = sum((rollout[i, t] - x["new"][i, t]).item() for t in tokens) / len(tokens)
        expected = 0.0 if advantages[i].item() < 0 and mean > 0.1 else 1.0
        assert (found[i] == expected).all()
    assert found[:, 0].tolist() == [0.0, 1.0, 1.0, 1.0]
    # As weights of the clipped loss the masked sequence has neither a value nor a gradient.
    loss = losses.ClippedLoss(weighted=True)
    value = loss(logprobs, None, x["old"], advantages.expand(4, 16), found)
    (grad,) = torch.autograd.grad(value.sum(), logprobs)
    assert not value[0].any()
    assert not grad[0].any()
    assert grad[1:].any(1).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_dpo(beta, smoothing):
    pairs = [(torch.randn(8, dtype=torch.float64) * 5).requires_grad_() for _ in range(4)]
    found = losses.dpo_loss(*pairs, beta=beta, label_smoothing=smoothing)
    for i in range(8):
        chosen, rejected, ref_chosen, ref_rejected = (tensor[i].item() for tensor in pairs)
        margin = beta * (chosen - ref_chosen - rejected + ref_rejected)
        expected = (1 - smoothing) * math.log1p(math.exp(-margin))
        expected += smoothing * math.log1p(math.exp(margin))
        assert found[i].item() == pytest.approx(expected, rel=1e-9)
    # As advantages of REINFORCE the same gradient reaches the log-probabilities.
    on_chosen, on_rejected = torch.autograd.grad(found.sum(), pairs[:2])
    advantages = losses.dpo_advantages(*pairs, beta=beta, label_smoothing=smoothing)
    assert not advantages[0].requires_grad
    assert torch.allclose(-advantages[0], on_chosen)
    assert torch.allclose(-advantages[1], on_rejected)


def test_dpo_of_a_hopeless_margin_is_finite():
    far = torch.tensor([-1e4, 1e4], requires_grad=True)
    zero = torch.zeros(2)
    loss = losses.dpo_loss(far, zero, zero, zero, beta=1.0)
    assert torch.equal(loss.detach(), torch.tensor([1e4, 0.0]))
    (grad,) = torch.autograd.grad(loss.sum(), far)
    assert torch.allclose(grad, torch.tensor([-1.0, 0.0]))


def test_dpo_against_an_impossible_answer():
    """The rejected one at -inf: nothing is left to learn, and 0 times inf is not asked for."""
    chosen = torch.tensor([-3.0], requires_grad=True)
    rejected = torch.tensor([-torch.inf], requires_grad=True)
    loss = losses.dpo_loss(chosen, rejected, torch.tensor([-3.0]), torch.tensor([-4.0]))
    assert loss.item() == 0.0
    assert [g.item() for g in torch.autograd.grad(loss.sum(), [chosen, rejected])] == [0.0, 0.0]
