"""Objectives and numbers of all of a batch's tokens, over its ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_logprobs import losses
from tests.helpers.shards import on_ranks, world_group, world_rank, world_size
from tests.helpers.token_batches import F64, token_batch


def _rows_of_rank(tensor: Tensor) -> Tensor:
    """Unequal parts: rank 0 has one row, the last the rest."""
    start, end = world_rank(), world_rank() + 1
    return tensor[start : end if end < world_size() else None]


def _chosen(x: dict[str, Tensor]) -> dict[str, Tensor]:
    part = {name: _rows_of_rank(tensor) for name, tensor in x.items()}
    arguments = [part[name] for name in ("new", "old", "a", "mask")]
    group = world_group()
    return {
        "entropy": losses.top_entropy_mask(part["entropy"], part["mask"], share=0.3, group=group),
        "m2po": losses.M2POLoss().second_pass(*arguments, group=group)["advantages"],
        "clip-cov": losses.ClipCovLoss(share=0.2, low=-1.0, seed=3).second_pass(
            *arguments, group=group
        )["advantages"],
        "kl-cov": losses.KLCovLoss(share=0.2).second_pass(*arguments, group=group)["chosen"],
    }


@pytest.mark.parametrize("world", [2, 3])
def test_choices_do_not_depend_on_the_ranks(ranks, world):
    x = token_batch()
    whole = _chosen(x)
    found = on_ranks(ranks, world, _chosen, x)
    for name, expected in whole.items():
        assert torch.equal(torch.cat([part[name] for part in found]), expected), name
        assert expected[x["mask"]].count_nonzero() not in (0, x["mask"].sum())


def test_the_top_of_the_entropy():
    """As a quantile, ties included; masked tokens take no part."""
    entropy = torch.tensor([[0.1, 0.9, 0.5, 0.5], [2.0, 9.0, 0.3, torch.nan]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0]])
    counted = entropy[mask.bool()]
    for share in (0.01, 0.2, 0.4, 0.5, 0.8, 1.0):
        found = losses.top_entropy_mask(entropy, mask, share=share)
        bound = torch.quantile(counted.double(), 1.0 - share)
        assert torch.equal(found, ((entropy >= bound - 1e-9) & mask.bool()).float()), share
    assert losses.top_entropy_mask(entropy, mask * 0).tolist() == [[0.0] * 4] * 2
    entropy[0, 0] = torch.nan
    assert losses.top_entropy_mask(entropy, mask)[mask.bool()].isnan().all()


@pytest.mark.parametrize("seq_dim", [0, 1])
@pytest.mark.parametrize("name", ["GSPOLoss", "LUSPOLoss", "GMPOLoss", "FIPOLoss"])
def test_sequences_of_no_token_at_all(name, seq_dim):
    loss = getattr(losses, name)()
    shape = (3, 0) if seq_dim == 1 else (0, 3)
    none = torch.zeros(shape, dtype=F64)
    given = none, none, none, none.bool()
    found = loss.second_pass(*given, seq_dim=seq_dim)
    assert all(tensor.shape == shape for tensor in found.values())
    tensors = (found.get(key, none) for key in loss.tensors)
    assert loss(none, None, *tensors).shape == shape


@pytest.mark.parametrize("name", ["GSPOLoss", "LUSPOLoss"])
def test_a_masked_token_that_was_nan_in_the_first_pass_asks_for_nothing(name):
    x, loss = token_batch(), getattr(losses, name)(clip_low=0.9, clip_high=9.0)
    first = torch.where(x["mask"], x["new"], torch.nan)
    numbers = loss.second_pass(first, x["old"], x["a"], x["mask"])
    clean = loss.second_pass(x["new"], x["old"], x["a"], x["mask"])
    gradients = []
    for given, second in ((numbers, first), (numbers, x["new"]), (clean, x["new"])):
        logprobs = second.clone().requires_grad_()
        value = loss(logprobs, None, *(given[key] for key in loss.tensors))
        (grad,) = torch.autograd.grad((value * x["mask"]).sum(), logprobs)
        gradients.append(grad)
    assert gradients[2].any()
    assert not gradients[0][~x["mask"]].any()
    assert torch.equal(gradients[0], gradients[2])
    assert torch.equal(gradients[1], gradients[2])


def test_a_batch_without_a_token_and_one_with_a_nan():
    x = token_batch()
    nothing = torch.zeros_like(x["mask"])
    for loss in (losses.M2POLoss(), losses.ClipCovLoss(), losses.KLCovLoss()):
        found = loss.second_pass(x["new"], x["old"], x["a"], nothing)
        assert not any(found[name].any() for name in found if name in ("chosen", "m2po"))
        spoilt = torch.where(torch.arange(48).view(6, 8) == 0, torch.nan, x["new"])
        found = loss.second_pass(spoilt, x["old"], x["a"], x["mask"])
        decided = found["chosen" if "chosen" in found else "advantages"]
        assert decided[x["mask"]].isnan().all()
        # An impossible token is one token.
        never = torch.where(spoilt.isnan(), -torch.inf, x["new"])
        found = loss.second_pass(never, x["old"], x["a"], x["mask"])
        assert all(tensor.isfinite().all() for tensor in found.values())


@pytest.mark.parametrize("loss", [losses.KLCovLoss(share=0.2), losses.ClipCovLoss(share=1.0)])
def test_impossible_tokens_leave_the_mean_alone(loss):
    """What the other tokens' covariance is does not depend on how many are impossible."""
    generator = torch.Generator().manual_seed(2)
    new = torch.randn(4, 10, generator=generator) - 3.0
    advantages = torch.where(torch.arange(10) < 5, 1.0, -1.0).expand(4, 10)
    out = torch.arange(10) % 5 == 0  # as many with either advantage
    mask = torch.ones(4, 10)
    never = new.masked_fill(out, -torch.inf)
    some = loss.second_pass(never, never, advantages, mask)
    ours = torch.where(out, torch.nan, new)
    covariance = (ours - ours.nanmean()) * advantages
    name = "chosen" if "chosen" in some else "advantages"
    picked = some[name].bool() if name == "chosen" else some[name] == 0.0
    if name == "chosen":
        assert picked.sum() == 8
        assert covariance[picked].min() > covariance[~picked & ~out].max()
    else:
        assert torch.equal(picked, (covariance > 1.0) & (covariance < 5.0))


class _Varying(TorchDispatchMode):
    """Refuses what raises on a GPU under torch.use_deterministic_algorithms(True)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not (name.startswith("aten.cumsum") and args[0].is_floating_point()), name
        assert not any(word in name for word in ("kthvalue", "median", "histc", "aten.put_")), name
        return func(*args, **(kwargs or {}))


TWO_PASSES = [x for x in vars(losses).values() if getattr(x, "_passes", 1) == 2]


@pytest.mark.parametrize("loss", TWO_PASSES, ids=lambda loss: loss.__name__)
def test_a_first_pass_is_deterministic(loss):
    x = token_batch(rows=6, length=300)
    for spoilt in (x["new"], torch.where(x["new"] < -2.0, -torch.inf, x["new"])):
        with _Varying():
            found = loss().second_pass(spoilt, x["old"], x["a"], x["mask"])
        assert found
    with pytest.raises(AssertionError, match=r"aten\.cumsum"), _Varying():
        x["new"].cumsum(0)


def test_advantages_say_which_dimension_they_are_of():
    """Of a square batch nothing else tells one of each sequence from one of each place."""
    x = {name: value[:, :6] for name, value in token_batch().items()}
    each = x["a"][:, 0]
    arguments = x["new"], x["old"], x["a"][:, :1], x["mask"]
    objective = losses.GSPOLoss()
    found = objective.second_pass(*arguments)["advantages"]
    assert torch.equal(
        found, objective.second_pass(x["new"], x["old"], x["a"], x["mask"])["advantages"]
    )
    with pytest.raises(ValueError, match=r"shape \(6, 6\), or \[b, 1\] for one"):
        objective.second_pass(x["new"], x["old"], each, x["mask"])
    with pytest.raises(ValueError, match=r"or \[b, 1\] for one .*, got shape \(1, 6\)"):
        objective.second_pass(x["new"], x["old"], each.unsqueeze(0), x["mask"])
    turned = [value.t() for value in (x["new"], x["old"], x["mask"])]
    with pytest.raises(ValueError, match=r"advantages: .*\[1, b\] for one value per sequence"):
        objective.second_pass(*turned[:2], each, turned[2], seq_dim=0)
    scalar = objective.second_pass(x["new"], x["old"], each[:1], x["mask"])["advantages"]
    assert (scalar == each[0])[x["mask"]].all()
    with pytest.raises(ValueError, match=r"advantages: .*got shape \(6,\)"):
        losses.off_policy_sequence_mask(x["new"], x["old"], each, x["mask"])


def test_an_impossible_token_costs_m2po_no_other():
    """-inf under both policies: log r is NaN, of one token in the middle of many."""
    old = -torch.rand(2, 300, dtype=F64)
    new, mask = old + 0.01, torch.ones(2, 300, dtype=torch.bool)
    new[0, 3] = old[0, 3] = -torch.inf
    new[1, 7] = 0.0
    old[1, 7] = -torch.inf  # and an infinite square
    for threshold in (0.04, 1e250):
        loss = losses.M2POLoss(threshold=threshold)
        kept = loss.second_pass(new, old, torch.ones_like(old), mask)["advantages"] != 0
        assert kept.sum() == 598
        assert not kept[0, 3]
        assert not kept[1, 7]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_reaches_the_tokens_before_it_in_fipo(value):
    x = token_batch(rows=2, length=300)
    new = torch.where(torch.arange(300) == 200, x["old"] + value, x["new"])
    mask = torch.ones(2, 300, dtype=torch.bool)
    loss = losses.FIPOLoss(dual_clip=None, safety=None, high_only=False)
    found = loss.second_pass(new, x["old"], x["a"], mask)["importance_weights"]
    clean = loss.second_pass(x["new"], x["old"], x["a"], mask)["importance_weights"]
    assert torch.equal(found[:, 201:], clean[:, 201:])
    before = found[:, :201]
    expected = {torch.inf: 1.2, -torch.inf: 0.8}.get(value)
    assert before.isnan().all() if expected is None else (before == expected).all()


def test_a_choice_has_one_host_sync(monkeypatch):
    """And none to find the counted tokens."""
    x = token_batch()
    monkeypatch.setattr(Tensor, "nonzero", None)
    lists = []
    original = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: lists.append(x) or original(x))
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if str(func).startswith("aten.index"):
                seen.extend(i.dtype for i in args[1] if i is not None)
            assert "_local_scalar_dense" not in str(func), "waits for one number"
            return func(*args, **(kwargs or {}))

    with Seen():
        found = losses.top_entropy_mask(x["entropy"], x["mask"])
    assert found.sum() > 0
    assert len(lists) == 1
    assert set(seen) == {torch.int64}


def _of_all_ranks(x: dict[str, Tensor]) -> tuple[float, ...]:
    part = {name: _rows_of_rank(tensor) for name, tensor in x.items()}
    control = losses.AdaptiveEntropy(target=0.5, step=0.1, value=0.15, high=0.3)
    found = control.after(part["entropy"], part["mask"], group=world_group())
    reference = losses.kto_reference(part["new"], part["old"] - 3.0, group=world_group())
    return found.value, found.entropy, reference.item()


def test_numbers_of_all_ranks(ranks):
    x = token_batch()
    for found in on_ranks(ranks, 3, _of_all_ranks, x):
        assert found == pytest.approx(_of_all_ranks(x))


def test_adaptive_entropy():
    control = losses.AdaptiveEntropy(target=0.5, step=0.1, high=0.2)
    mask, seen = torch.tensor([1, 1, 0]), []
    assert control.coef == 0.0
    for mean in (0.3, 0.5, 0.4, 0.6, 0.6, 0.6, 0.2):
        control = control.after(torch.tensor([mean - 0.1, mean + 0.1, 9.0], dtype=F64), mask)
        assert control.entropy == pytest.approx(mean)
        seen.append((round(control.value, 6), round(control.coef, 6)))
    up, down = [(0.1, 0.1), (0.2, 0.2), (0.2, 0.2)], [(0.1, 0.0), (0.0, 0.0), (0.0, 0.0)]
    assert seen == [*up, *down, (0.1, 0.1)]
    assert control.after(torch.ones(3), mask * 0) is control
    with pytest.raises(ValueError, match="entropy: expected finite numbers, got a mean of nan"):
        control.after(torch.tensor([torch.nan, 1.0, 1.0]), mask)


@pytest.mark.parametrize(
    "objective",
    [
        losses.IPOLoss(),
        losses.DPPOLoss(),
        losses.DPPOLoss(divergence="kl"),
        losses.SPOLoss(),
        losses.ClippedLoss(),
    ],
)
def test_tensors_of_less_precision(objective):
    """Their numbers count, not their dtype's arithmetic."""
    x = token_batch(rows=8, length=300)
    low = [x["old"].bfloat16(), x["a"].bfloat16()]
    expected = objective(x["new"], None, *(tensor.float() for tensor in low))
    assert torch.equal(objective(x["new"], None, *low), expected)


def test_rejection_by_log_probabilities_of_less_precision():
    x = token_batch(rows=8, length=300)
    old, mask = x["old"].bfloat16(), torch.ones_like(x["new"])
    found, expected = (
        losses.rejection_mask(x["new"], given, mask, estimator="binary", high=0.01)
        for given in (old, old.float())
    )
    assert torch.equal(found, expected)
    assert 0 < expected.sum() < expected.numel()


@pytest.mark.parametrize("policy_gradient", [True, False])
def test_a_cost_is_clamped_on_both_sides(policy_gradient: bool) -> None:
    logprobs, teacher = torch.tensor([-4.0, -1.0, -0.3]), torch.tensor([-1.0, -4.0, -0.2])
    loss = losses.DistillationLoss(clamp=0.5, policy_gradient=policy_gradient)
    cost = (logprobs - teacher).clamp(-0.5, 0.5)
    expected = cost * logprobs if policy_gradient else cost
    torch.testing.assert_close(loss(logprobs, None, teacher), expected)


def test_a_risky_token_keeps_most_of_its_weight() -> None:
    """FIPO's floor of 0.8 where the bounds of its weights are wider."""
    loss = losses.FIPOLoss(high_only=False, weight_clip=0.5, half_life=1e6)
    log_ratio, old = torch.tensor([[2.0, -3.0, -1.0]]), torch.full((1, 3), -4.0)
    mask = torch.ones(1, 3, dtype=torch.bool)
    found = loss.second_pass(old + log_ratio, old, torch.tensor([[-1.0]]), mask)
    ahead = torch.tensor([[-2.0, -4.0, -1.0]]).exp().clamp(0.5, 1.5)
    expected = torch.where(log_ratio.exp() > 4.0, ahead.clamp(0.8, 1.0), ahead)
    torch.testing.assert_close(found["importance_weights"], expected, rtol=1e-4, atol=1e-4)
