"""Ready-made losses where training takes them: far from the rollout, in the head, compiled."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    linear_token_stats,
    losses,
)
from mcore_logprobs.ops.policy_loss import linear_policy_loss
from tests.helpers.shards import on_ranks, world_group, world_rank, world_size

# ---- far apart: a finite loss has a finite gradient ---------------------------------------------

FAR = [-torch.inf, -1e4, -200.0, -90.0, -80.0, -0.1, 0.0, 0.1, 80.0, 88.0, 89.0, 90.0, 200.0, 1e4]
ADVANTAGES = [-2.0, -1e-3, 0.0, 1e-3, 2.0]
TOKENWISE = {
    "dual clip": losses.ClippedLoss(dual_clip=3.0),
    "weighted": losses.ClippedLoss(weighted=True),
    "with k2": losses.ClippedLoss(kl_coef=0.1, kl="k2"),
    "with k3": losses.ClippedLoss(kl_coef=0.1),
    "unbiased k3": losses.RegularizedLoss(losses.ClippedLoss(), kl_coef=0.1, kl_ratio=True),
    "cispo with a floor": losses.CISPOLoss(clip_low=0.5),
    "icepop without a floor": losses.IcePopLoss(low=0.0),
    "dppo kl": losses.DPPOLoss(divergence="kl"),
    "topr by token": losses.TOPRLoss(level="token"),
    "dro by token": losses.DROLoss(level="token"),
    "k3 distillation": losses.DistillationLoss(kl="k3", policy_gradient=False),
    "sdpo": losses.DistillationLoss(cap=2.0),
    "weighted sft": losses.SFTLoss(weighted=True),
    **{name: objective() for name, objective in losses.OBJECTIVES.items()},
}
# Which of `_far`'s tensors stands for a per-token tensor that does not have its name.
STANDS_FOR = {
    **dict.fromkeys(
        ("old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs"), "old"
    ),
    **dict.fromkeys(("weights", "importance_weights", "chosen"), "weight"),
    "first_logprobs": "new",
    "sequence_log_ratio": "log_ratio",
    "advantages": "advantage",
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
@pytest.mark.parametrize("loss", TOKENWISE.values(), ids=TOKENWISE)
def test_a_finite_policy_has_a_finite_loss_and_gradient(loss, dtype):
    x = _far(dtype)
    new = x["new"].clone().requires_grad_()
    value = loss(new, None, *(x[STANDS_FOR[name]] for name in loss.tensors))
    (grad,) = torch.autograd.grad(value, new, torch.linspace(-1, 2, len(new)).to(value.dtype))
    possible = x["new"].isfinite() & x["old"].isfinite()
    assert value[possible].isfinite().all()
    assert grad[possible | value.isfinite()].isfinite().all()
    # An impossible token may cost inf, but spoils nothing.
    assert not grad[x["old"].isfinite()].isnan().any()
    assert not value[x["old"].isfinite()].isnan().any()
    if has_policy(loss) or "weights" in loss.tensors:
        silent = x["weight"] == 0 if "advantages" not in loss.tensors else x["advantage"] == 0
        assert not value[silent].any()
        assert not grad[silent].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("name", "share", "slope"),
    [
        ("ImportanceLoss", 1.0, lambda r: 2.0 * r),
        ("ClippedLoss", 1.0, lambda r: 2.0 * r),
        ("SPOLoss", 0.5, lambda r: 2.0 * r * ((r - 1.0) / 0.2 + 1.0)),
    ],
)
def test_a_ratio_has_a_gradient_up_to_its_bound(name, share, slope, dtype):
    """e^70 in float32, and its root where the ratio is squared; A = -2."""
    bound = share * 0.8 * math.log(torch.finfo(dtype).max)
    assert dtype != torch.float32 or int(bound) == (70 if share == 1.0 else 35)
    log_ratio = torch.tensor([1.0, bound - 0.1, bound + 0.1], dtype=dtype, requires_grad=True)
    loss = losses.OBJECTIVES[name]()(
        log_ratio, None, torch.zeros(3, dtype=dtype), torch.full((3,), -2.0, dtype=dtype)
    )
    (found,) = torch.autograd.grad(loss.sum(), log_ratio)
    expected = slope(log_ratio.detach().double().exp())
    expected[2] = 0.0
    torch.testing.assert_close(found.double(), expected, rtol=200 * torch.finfo(dtype).eps, atol=0)


def has_policy(loss: losses.TokenLoss) -> bool:
    """Whether all of it is a policy term."""
    terms = any(getattr(loss, name, 0) for name in ("kl_coef", "tau", "loss"))
    return "advantages" in loss.tensors and not terms


@pytest.mark.parametrize("name", ["ClippedLoss", "dual clip", "GSPOLoss", "SAPOLoss", "CISPOLoss"])
def test_far_ratios_have_the_formula_s_value_and_slope(name):
    """Where exp overflows in float32: the limits of float64's formula."""
    loss = TOKENWISE[name]
    new = torch.tensor([0.0, 0.0, -300.0, -300.0], requires_grad=True)
    old = torch.tensor([-100.0, -300.0, 0.0, 0.0])
    advantage = torch.tensor([1.5, 2.0, 1.5, -2.0])
    tensors = (old, advantage)
    if name == "GSPOLoss":
        tensors = (new.detach(), new.detach() - old, advantage)
    value = loss(new, None, *tensors)
    (grad,) = torch.autograd.grad(value.sum(), new)
    high, low = 1.0 + getattr(loss, "clip_high", 0.0), 1.0 - (getattr(loss, "clip_low", 0.0) or 0.0)
    if name == "CISPOLoss":
        expected, slope = [0.0, 0.0, 0.0, 0.0], [-1.5 * high, -2.0 * high, 0.0, 0.0]
    elif name == "SAPOLoss":
        at_zero = [4 / tau / (1 + math.exp(tau)) for tau in (1.0, 1.05)]
        expected = [-1.5 * 4, -2.0 * 4, -1.5 * at_zero[0], 2.0 * at_zero[1]]
        slope = [0.0] * 4
    else:
        expected, slope = [-1.5 * high, -2.0 * high, 0.0, 2.0 * low], [0.0] * 4
    torch.testing.assert_close(value, torch.tensor(expected))
    torch.testing.assert_close(grad, torch.tensor(slope))


@pytest.mark.parametrize("name", losses.OBJECTIVES)
def test_nan_stays_visible(name):
    loss = TOKENWISE[name]
    new = torch.tensor([torch.nan, torch.nan, -1.0], requires_grad=True)
    given = {"advantages": torch.tensor([1.0, 0.0, 1.0])}
    zeros, ones = torch.zeros(3), torch.ones(3)
    tensors = [given.get(n, zeros if n.endswith("logprobs") else ones) for n in loss.tensors]
    value = loss(new, None, *tensors)
    masks = has_policy(loss)
    assert value.isnan().tolist() == [True, not masks, False]
    (grad,) = torch.autograd.grad(value.sum(), new)
    assert masks <= (grad[1] == 0)


# ---- in linear_policy_loss ----------------------------------------------------------------------

FUSED = {
    **{name: objective() for name, objective in losses.OBJECTIVES.items()},
    "all": losses.ClippedLoss(dual_clip=3.0, kl_coef=0.1, entropy_coef=0.2, weighted=True),
    "wide gspo": losses.GSPOLoss(clip_low=0.2, clip_high=0.3),
    "around": losses.WeightedLoss(
        losses.RegularizedLoss(losses.SAPOLoss(), kl_coef=0.1, kl_ratio=True, entropy_coef=0.2)
    ),
    "weighted sft": losses.SFTLoss(weighted=True),
}


def _fused_and_plain(names: list[str]) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """The loss and its gradients, formed in the head and from a head's logits."""
    generator = torch.Generator().manual_seed(7)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (12, 24))
    target = torch.randint(0, 24, (12,), generator=generator)
    width = 24 // world_size()
    weight = weight[world_rank() * width :][:width]
    leaves = [hidden.requires_grad_(), weight.clone().requires_grad_()]
    found = {}
    for name in names:
        generator.manual_seed(7)  # a loss more changes nothing of what the others are given
        loss = FUSED[name]
        options = {"entropy": True, "tp_group": world_group()}
        stats = linear_token_stats(*leaves, target, **options)
        tensors = []
        for of in loss.tensors:  # ratios within the bounds that cut gradients off
            tensor = torch.randn(12, generator=generator)
            if of.endswith("logprobs"):
                tensor = stats.logprobs.detach() + 0.02 * tensor
            tensors.append(0.02 * tensor if of == "sequence_log_ratio" else tensor)
        fused, _ = linear_policy_loss(
            *leaves, target, loss, *tensors, denominator=5, chunk_size=5, **options
        )
        plain = loss(stats.logprobs, stats.entropy, *tensors).sum() / 5
        (of_token,) = torch.autograd.grad(plain, stats.logprobs, retain_graph=True)
        assert (of_token != 0).sum() >= 6, name
        grads = [torch.autograd.grad(x, leaves) for x in (fused, plain)]
        found[name] = [(fused.detach(), plain.detach()), *zip(*grads, strict=True)]
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_in_linear_policy_loss_as_on_log_probabilities(ranks, world):
    for found in on_ranks(ranks, world, _fused_and_plain, list(FUSED)):
        for name, pairs in found.items():
            for fused, plain in pairs:
                torch.testing.assert_close(
                    fused, plain, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
                )


@pytest.mark.parametrize("loss", FUSED.values(), ids=FUSED)
def test_a_wrong_number_of_tensors_is_named(loss):
    count = len(loss.tensors) + 1
    with pytest.raises(ValueError, match=f"expected the per-token tensors .*got {count}"):
        loss(torch.zeros(3), torch.zeros(3), *[torch.zeros(3)] * count)


@pytest.mark.parametrize("loss", FUSED.values(), ids=FUSED)
def test_compiles_in_one_graph(loss):
    tensors = torch.randn(len(loss.tensors) + 2, 12) - 2.0
    entropy, per_token = tensors[0], tensors[2:]
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    results = []
    for call in (loss, compiled):
        logprobs = tensors[1].clone().requires_grad_()
        value = call(logprobs, entropy, *per_token)
        results.append((value.detach(), *torch.autograd.grad(value.sum(), logprobs)))
    torch.testing.assert_close(*results)
