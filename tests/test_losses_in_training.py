"""Ready-made losses where training takes them: far from the rollout, in the head, and under CP."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    context_parallel_gather,
    context_parallel_shard,
    losses,
    vocab_parallel_token_stats,
)
from mcore_logprobs.context_parallel.layouts import SequenceLayout
from mcore_logprobs.fused.policy_loss import linear_policy_loss
from tests.logits.common import WORLDS, on_ranks, world_group, world_rank, world_size

# ---- far apart: a finite loss has a finite gradient ---------------------------------------------

FAR = [-torch.inf, -1e4, -200.0, -90.0, -80.0, -0.1, 0.0, 0.1, 80.0, 88.0, 89.0, 90.0, 200.0, 1e4]
ADVANTAGES = [-2.0, -1e-3, 0.0, 1e-3, 2.0]
TOKENWISE = {
    "clipped": (losses.ClippedLoss(), ("old", "advantage")),
    "dual clip": (losses.ClippedLoss(dual_clip=3.0), ("old", "advantage")),
    "weighted": (losses.ClippedLoss(weighted=True), ("old", "advantage", "weight")),
    "with k2": (losses.ClippedLoss(kl_coef=0.1, kl="k2"), ("old", "advantage", "old")),
    "with k3": (losses.ClippedLoss(kl_coef=0.1), ("old", "advantage", "old")),
    "cispo": (losses.CISPOLoss(), ("old", "advantage")),
    "cispo with a floor": (losses.CISPOLoss(clip_low=0.5), ("old", "advantage")),
    "gspo": (losses.GSPOLoss(), ("new", "log_ratio", "advantage")),
    "icepop": (losses.IcePopLoss(low=0.0), ("old", "old", "advantage")),
    "sapo": (losses.SAPOLoss(), ("old", "advantage")),
    "reinforce": (losses.ReinforceLoss(), ("advantage",)),
    "weighted sft": (losses.SFTLoss(weighted=True), ("weight",)),
}


def _far(dtype: torch.dtype) -> dict[str, Tensor]:
    """Every log ratio with every advantage; -inf also as both policies' log-probability."""
    log_ratio, advantage = torch.cartesian_prod(torch.tensor(FAR), torch.tensor(ADVANTAGES)).t()
    old = torch.full_like(log_ratio, -1.0)
    new = old + log_ratio
    both = torch.full((len(ADVANTAGES),), -torch.inf)
    found = {
        "new": torch.cat([new, both]),
        "old": torch.cat([old, both]),
        "log_ratio": torch.cat([log_ratio, both * 0]),
        "advantage": torch.cat([advantage, torch.tensor(ADVANTAGES)]),
        "weight": torch.cat([advantage, torch.tensor(ADVANTAGES)]).abs().clamp(max=1.0),
    }
    return {name: tensor.to(dtype) for name, tensor in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("loss", "names"), TOKENWISE.values(), ids=TOKENWISE)
def test_a_finite_loss_has_a_finite_gradient(loss, names, dtype):
    x = _far(dtype)
    new = x["new"].clone().requires_grad_()
    value = loss(new, None, *(x[name] for name in names))
    (grad,) = torch.autograd.grad(value, new, torch.linspace(-1, 2, len(new)).to(value.dtype))
    finite = value.isfinite()
    assert finite.sum() > 15
    assert grad[finite].isfinite().all(), (x["new"][finite], grad[finite])
    if getattr(loss, "kl_coef", 0.0) == 0.0:  # the KL term has its own say
        silent = x["weight"] == 0 if "advantage" not in names else x["advantage"] == 0
        assert not value[silent].any()
        assert not grad[silent].any()


@pytest.mark.parametrize("name", ["clipped", "dual clip", "gspo", "sapo", "cispo"])
def test_far_ratios_have_the_formula_s_value_and_slope(name):
    """Where exp overflows in float32: the limits of float64's formula."""
    loss = TOKENWISE[name][0]
    new = torch.tensor([0.0, 0.0, -300.0, -300.0], requires_grad=True)
    old = torch.tensor([-100.0, -300.0, 0.0, 0.0])
    advantage = torch.tensor([1.5, 2.0, 1.5, -2.0])
    tensors = (old, advantage)
    if name == "gspo":
        tensors = (new.detach(), new.detach() - old, advantage)
    value = loss(new, None, *tensors)
    (grad,) = torch.autograd.grad(value.sum(), new)
    high, low = 1.0 + getattr(loss, "clip_high", 0.0), 1.0 - (getattr(loss, "clip_low", 0.0) or 0.0)
    if name == "cispo":
        expected, slope = [0.0, 0.0, 0.0, 0.0], [-1.5 * high, -2.0 * high, 0.0, 0.0]
    elif name == "sapo":
        at_zero = [4 / tau / (1 + math.exp(tau)) for tau in (1.0, 1.05)]
        expected = [-1.5 * 4, -2.0 * 4, -1.5 * at_zero[0], 2.0 * at_zero[1]]
        slope = [0.0] * 4
    else:
        expected, slope = [-1.5 * high, -2.0 * high, 0.0, 2.0 * low], [0.0] * 4
    torch.testing.assert_close(value, torch.tensor(expected))
    torch.testing.assert_close(grad, torch.tensor(slope))


@pytest.mark.parametrize("name", ["clipped", "sapo", "reinforce"])
def test_nan_stays_visible(name):
    loss, names = TOKENWISE[name]
    new = torch.tensor([torch.nan, torch.nan, -1.0], requires_grad=True)
    given = {"old": torch.zeros(3), "advantage": torch.tensor([1.0, 0.0, 1.0])}
    value = loss(new, None, *(given[n] for n in names))
    (grad,) = torch.autograd.grad(value.sum(), new)
    assert value.isnan().tolist() == [True, False, False]
    if name != "reinforce":  # whose gradient is -A everywhere
        assert grad.isnan().tolist() == [True, False, False]
    assert grad[1] == 0


# ---- in linear_policy_loss ----------------------------------------------------------------------

FUSED = {
    "clipped": (losses.ClippedLoss(dual_clip=3.0), 2),
    "all": (losses.ClippedLoss(kl_coef=0.1, entropy_coef=0.2, weighted=True), 4),
    "cispo": (losses.CISPOLoss(clip_low=0.2), 2),
    "gspo": (losses.GSPOLoss(clip_low=0.2, clip_high=0.3), 3),
    "icepop": (losses.IcePopLoss(low=0.2), 3),
    "sapo": (losses.SAPOLoss(), 2),
    "reinforce": (losses.ReinforceLoss(), 1),
    "sft": (losses.SFTLoss(), 0),
    "weighted sft": (losses.SFTLoss(weighted=True), 1),
}


@pytest.mark.parametrize(("loss", "count"), FUSED.values(), ids=FUSED)
def test_in_linear_policy_loss_as_on_log_probabilities(loss, count):
    hidden = torch.randn(12, 8, requires_grad=True)
    weight = torch.randn(24, 8, requires_grad=True)
    target = torch.randint(0, 24, (12,))
    tensors = tuple(torch.randn(12) - 2.0 for _ in range(count))
    fused, _ = linear_policy_loss(
        hidden, weight, target, loss, *tensors, entropy=True, denominator=5, chunk_size=5
    )
    stats = vocab_parallel_token_stats(hidden @ weight.t(), target, entropy=True)
    plain = loss(stats.logprobs, stats.entropy, *tensors).sum() / 5
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    upstream = (hidden, weight)
    for one, other in zip(
        torch.autograd.grad(fused, upstream), torch.autograd.grad(plain, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def _far_from_the_rollout(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(12, 8).to(dtype), torch.randn(24, 8).to(dtype)
    width = 24 // world_size()
    mine = weight[world_rank() * width :][:width].clone().requires_grad_()
    hidden.requires_grad_()
    old = -torch.tensor([1.0, 200.0, 1e4] * 4)
    advantages = torch.tensor([1.0, 0.5, 2.0, 0.0] * 3)
    loss, _ = linear_policy_loss(
        hidden,
        mine,
        torch.arange(12),
        losses.ClippedLoss(dual_clip=3.0),
        old,
        advantages,
        tp_group=world_group(),
        chunk_size=5,
    )
    return (loss.detach(), *torch.autograd.grad(loss, (hidden, mine)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_far_ratios_train_in_linear_policy_loss(ranks, world, dtype):
    """Clipped tokens and masked ones have no gradient; those near the rollout have theirs."""
    results = on_ranks(ranks, world, _far_from_the_rollout, dtype)
    for loss, on_hidden, _ in results:
        assert loss.isfinite()
        assert on_hidden.isfinite().all()
        # Of rows 0, 3, 6, 9 (old = -1) row 3 is masked by its advantage.
        moved = on_hidden.float().abs().amax(-1) > 0
        assert moved.any()
        assert not moved[[1, 2, 3, 4, 5, 7, 8, 10, 11]].any()
        assert torch.equal(on_hidden, results[0][1])
    on_weight = torch.cat([result[2] for result in results])
    assert on_weight.isfinite().all()


def _sequence_weights_over_cp(layout: str) -> tuple[Tensor, Tensor]:
    """As the docstring says: gather, take the sequence's number, shard it again."""
    options = {"cp_group": world_group(), "layout": layout}
    train, rollout, mask, advantages = _sequence_batch()
    part = [context_parallel_shard(x, **options) for x in (train, rollout, mask)]
    whole = [context_parallel_gather(x, **options) for x in part]
    weights = losses.masked_sequence_weights(*whole, low=0.5, high=1.5)
    off_policy = losses.off_policy_sequence_mask(
        whole[0], whole[1], advantages, whole[2], delta=0.01
    )
    return (
        context_parallel_shard(weights.expand_as(train), **options),
        context_parallel_shard(off_policy, **options),
    )


def _sequence_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    train = -torch.rand(6, 16, generator=generator)
    rollout = train + 0.2 * torch.randn(6, 16, generator=generator)
    mask = torch.rand(6, 16, generator=generator) < 0.8
    return train, rollout, mask, torch.tensor([[1.0], [-1.0]] * 3)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_sequence_weights_under_context_parallelism(ranks, cp, layout):
    train, rollout, mask, advantages = _sequence_batch()
    weights = losses.masked_sequence_weights(train, rollout, mask, low=0.5, high=1.5)
    off_policy = losses.off_policy_sequence_mask(train, rollout, advantages, mask, delta=0.01)
    assert 0 < (weights > 0).sum() < 6
    assert 0 < off_policy.sum() < off_policy.numel()
    for rank, (one, other) in enumerate(on_ranks(ranks, cp, _sequence_weights_over_cp, layout)):
        mine = SequenceLayout.of(layout, cp, 16).positions(rank)
        assert torch.equal(one, weights.expand_as(train)[:, mine])
        assert torch.equal(other, off_policy[:, mine])


@pytest.mark.parametrize(("loss", "count"), FUSED.values(), ids=FUSED)
def test_a_wrong_number_of_tensors_is_named(loss, count):
    tensors = [torch.zeros(3)] * (count + 1)
    with pytest.raises(ValueError, match=f"expected the per-token tensors .*got {count + 1}"):
        loss(torch.zeros(3), torch.zeros(3), *tensors)
