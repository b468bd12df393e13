"""linear_policy_loss: the same value and gradients as the loss taken of linear_token_stats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import linear_policy_loss, linear_token_stats
from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.losses import ClippedLoss
from tests.helpers.heads import (
    Problem,
    make_problem,
    plain_loss,
    shard_problem,
)
from tests.helpers.shards import on_ranks, world_group

# ---- losses of every shape: (name, needs entropy, function) -------------------------------------


def ratio_loss(logprobs: Tensor, entropy: Tensor | None, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)


def _nan_in_ignored(logprobs: Tensor, entropy: Tensor | None, old: Tensor) -> Tensor:
    return (logprobs - old).square()


def test_a_loss_that_is_nan_on_ignored_rows_hurts_nobody():
    problem = make_problem((24,))
    ignored = problem.target == -100
    assert ignored.any()
    hidden, weight, _ = shard_problem(problem, False)
    old = torch.where(ignored, float("nan"), 0.5)
    for compact in (False, True):
        loss, _ = linear_policy_loss(
            hidden, weight, problem.target, _nan_in_ignored, old, compact=compact
        )
        assert loss.isfinite()
        for grad in torch.autograd.grad(loss, [hidden, weight]):
            assert grad.isfinite().all()
            assert grad.any()


def _unfused(problem: Problem, loss_fn: Any, tensors: tuple[Tensor, ...]) -> tuple:
    """The same loss both ways on this rank."""
    found = []
    for fused in (True, False):
        hidden, weight, _ = shard_problem(problem, False)
        common = {"tp_group": world_group(), "entropy": True, "vocab_size": 20, "chunk_size": 5}
        if fused:
            loss, _ = linear_policy_loss(
                hidden, weight, problem.target, loss_fn, *tensors, denominator=9.0, **common
            )
        else:
            stats = linear_token_stats(hidden, weight, problem.target, **common)
            per_token = loss_fn(stats.logprobs, stats.entropy, *tensors)
            loss = torch.where(problem.target != -100, per_token, 0.0).sum() / 9.0
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    return tuple(found)


def wide_loss(logprobs: Tensor, entropy: Tensor | None, features: Tensor) -> Tensor:
    """Per-token tensors may have dimensions of their own."""
    return (features * logprobs.unsqueeze(-1)).sigmoid().sum(-1)


def only_entropy(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    assert entropy is not None
    return -entropy


@pytest.mark.parametrize("world", [1, 2])
def test_equals_the_unfused_loss(ranks, world):
    problem = make_problem((6, 2), true_vocab=20)
    clipped = ClippedLoss(
        clip_low=0.1, clip_high=0.3, dual_clip=3.0, kl_coef=0.2, entropy_coef=0.1, weighted=True
    )
    old, advantages, reference, weight = (torch.randn(6, 2) for _ in range(4))
    for loss_fn, tensors in (
        (clipped, (old - 2.5, advantages, reference - 2.5, weight.abs())),
        (ratio_loss, (old - 2.5, advantages)),
        (wide_loss, (torch.randn(6, 2, 5),)),
        (only_entropy, ()),
    ):
        for fused, unfused in on_ranks(ranks, world, _unfused, problem, loss_fn, tensors):
            for one, other in zip(fused, unfused, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# ---- mistakes -----------------------------------------------------------------------------------


def sum_loss(logprobs: Tensor, entropy: Tensor | None, *_: Tensor) -> Tensor:
    return -logprobs.sum()


def float_loss(logprobs: Tensor, entropy: Tensor | None, *_: Tensor) -> float:
    return 1.0


def _refused(loss_fn: Any, tensors: tuple, options: dict) -> tuple[str, list[str]]:
    problem = make_problem((6, 2))
    hidden, weight, _ = shard_problem(problem, False)
    options = {"tp_group": dist.group.WORLD} | options
    with CollectivesMade() as made:
        try:
            linear_policy_loss(hidden, weight, problem.target, loss_fn, *tensors, **options)
        except ValueError as error:
            return str(error), made.names
    return "", made.names


MISTAKES: list[tuple[Any, tuple, dict, tuple[str, ...]]] = [
    ("mean", (), {}, ("loss_fn", "callable", "str")),
    (ratio_loss, (torch.zeros(2, 6),), {}, ("per_token_tensors[0]", "(6, 2)", "(2, 6)")),
    (ratio_loss, (torch.zeros(6, 2), 1.0), {}, ("per_token_tensors[1]", "Tensor", "float")),
    (
        ratio_loss,
        (torch.zeros(6, 2, requires_grad=True),),
        {},
        ("per_token_tensors[0]", "gradient"),
    ),
    (plain_loss, (), {"denominator": 0}, ("denominator", "> 0", "got 0")),
    (plain_loss, (), {"denominator": "all"}, ("denominator", "'all'")),
    (plain_loss, (), {"denominator": torch.ones(2)}, ("denominator", "(2,)")),
    (plain_loss, (), {"temperature": 0.0}, ("temperature", "> 0", "0.0")),
    (plain_loss, (), {"chunk_size": 0}, ("chunk_size", ">= 1", "0")),
    (plain_loss, (), {"compact": 1}, ("compact", "1")),
    (plain_loss, (), {"gradient_accumulation_fusion": True}, ("main_grad", "None")),
    (plain_loss, (), {"tp_group": None}, ("tp_group", "2 ranks")),
]


def test_mistakes_are_refused_before_anything_is_sent(ranks):
    cases = [(fn, tensors, options) for fn, tensors, options, _ in MISTAKES]
    for found in ranks(2).run(_all_refused, cases):
        for (message, sent), (*_, parts) in zip(found, MISTAKES, strict=True):
            assert message
            assert sent == []
            for part in parts:
                assert part in message, f"{part!r} is missing in: {message}"


def _all_refused(cases: list[tuple]) -> list[tuple[str, list[str]]]:
    return [_refused(*case) for case in cases]


@pytest.mark.parametrize("loss_fn", [sum_loss, float_loss])
def test_a_loss_of_another_shape_is_refused_on_every_rank(ranks, loss_fn):
    for message, _ in ranks(2).run(_refused, loss_fn, (), {}):
        assert "loss_fn" in message
        assert "(12,)" in message
