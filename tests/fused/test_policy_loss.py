"""linear_policy_loss: the same value and gradients as the loss taken of linear_token_stats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import linear_policy_loss, linear_token_stats
from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.losses import ClippedLoss
from tests.fused.common import (
    LAYOUTS,
    Problem,
    make_problem,
    plain_loss,
    shard_problem,
    whole_gradients,
)
from tests.helpers import oracles
from tests.logits.common import on_ranks, world_group

# ---- losses of every shape: (name, needs entropy, function) -------------------------------------


def ratio_loss(logprobs: Tensor, entropy: Tensor | None, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)


def entropy_loss(
    logprobs: Tensor, entropy: Tensor | None, old: Tensor, advantage: Tensor
) -> Tensor:
    assert entropy is not None
    return (logprobs - old).square() * advantage - 0.3 * entropy * logprobs.tanh()


def wide_loss(logprobs: Tensor, entropy: Tensor | None, features: Tensor) -> Tensor:
    """Per-token tensors may have dimensions of their own."""
    return (features * logprobs.unsqueeze(-1)).sigmoid().sum(-1)


def only_entropy(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    assert entropy is not None
    return -entropy


def constant_loss(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    return torch.ones_like(logprobs)


LOSSES: dict[str, tuple[bool, Callable[..., Tensor], int]] = {
    "plain": (False, plain_loss, 0),
    "ratio": (False, ratio_loss, 2),
    "entropy": (True, entropy_loss, 2),
    "wide": (False, wide_loss, 1),
    "only entropy": (True, only_entropy, 0),
    "constant": (True, constant_loss, 0),
}


def _tensors(name: str, lead: tuple[int, ...]) -> tuple[Tensor, ...]:
    if name == "wide":
        return (torch.randn(*lead, 5),)
    return tuple(torch.randn(lead) - (2.5 if i == 0 else 0.0) for i in range(LOSSES[name][2]))


def _fused(
    problem: Problem,
    name: str,
    tensors: tuple[Tensor, ...],
    options: dict[str, Any],
    sequence_parallel: bool,
    upstream: float,
) -> tuple:
    """(loss, stats, gradients) of this rank; inputs must come out untouched."""
    entropy, fn, _ = LOSSES[name]
    hidden, weight, bias = shard_problem(problem, sequence_parallel)
    leaves = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    kept = [x.detach().clone() for x in (*leaves.values(), *tensors)]
    loss, stats = linear_policy_loss(
        hidden,
        weight,
        problem.target,
        fn,
        *tensors,
        bias=bias,
        entropy=entropy,
        tp_group=world_group(),
        sequence_parallel=sequence_parallel,
        **options,
    )
    assert loss.shape == ()
    for value in (stats.logprobs, stats.entropy, stats.lse):
        assert value is None or not value.requires_grad
    grads = torch.autograd.grad(loss * upstream, list(leaves.values()))
    after = [x.detach() for x in (*leaves.values(), *tensors)]
    assert all(map(torch.equal, after, kept))
    return loss, stats, dict(zip(leaves, grads, strict=True))


def _truth(
    problem: Problem,
    name: str,
    tensors: tuple[Tensor, ...],
    options: dict[str, Any],
    upstream: float,
    dtype: torch.dtype,
) -> tuple[Tensor, oracles.ExactStats, dict[str, Tensor]]:
    options = {k: v for k, v in options.items() if k not in ("chunk_size", "compact")}
    denominator = options.pop("denominator", 1.0)
    exact = dtype == torch.float64
    leaves = {"hidden": problem.hidden, "weight": problem.weight}
    leaves |= {} if problem.bias is None else {"bias": problem.bias}
    leaves = {k: (x.double() if exact else x.clone()).requires_grad_() for k, x in leaves.items()}
    raw = leaves["hidden"].to(dtype) @ leaves["weight"].to(dtype).t()
    stats = oracles.token_stats(
        raw, problem.target, bias=leaves.get("bias"), dtype=dtype, **options
    )
    entropy, fn, _ = LOSSES[name]
    tensors = tuple(t.to(dtype) for t in tensors)
    per_token = fn(stats.logprobs, stats.entropy if entropy else None, *tensors)
    # Ignored rows add nothing, whatever the loss makes of a log-probability of 0.
    per_token = torch.where(problem.target != -100, per_token, 0.0)
    loss = per_token.sum() / denominator
    if not loss.requires_grad:
        return loss, stats, {k: torch.zeros_like(x) for k, x in leaves.items()}
    grads = torch.autograd.grad(
        loss * upstream, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return loss, stats, dict(zip(leaves, grads, strict=True))


def _check(
    ranks,
    layout: tuple[int, bool],
    problem: Problem,
    name: str,
    options: dict[str, Any],
    *,
    upstream: float = -0.37,
    ulps: float = 8.0,
) -> None:
    world, sequence_parallel = layout
    tensors = _tensors(name, tuple(problem.target.shape))
    runs = on_ranks(
        ranks, world, _fused, problem, name, tensors, options, sequence_parallel, upstream
    )
    args = (problem, name, tensors, options, upstream)
    loss, stats, grads = _truth(*args, torch.float64)
    plain_loss_, plain, plain_grads = _truth(*args, torch.float32)
    for found, found_stats, _ in runs:
        assert found.dtype == torch.float32
        assert torch.equal(found, runs[0][0]), "ranks differ"
        # A sum of n roundings.
        scale = problem.target.numel()
        oracles.assert_no_worse(found, plain_loss_, loss, name="loss", ulps=scale)
        for field in ("logprobs", "lse"):
            oracles.assert_no_worse(
                getattr(found_stats, field),
                getattr(plain, field),
                getattr(stats, field),
                name=field,
                ulps=ulps,
            )
        assert (found_stats.entropy is not None) == LOSSES[name][0]
        if found_stats.entropy is not None:
            oracles.assert_no_worse(
                found_stats.entropy, plain.entropy, stats.entropy, name="entropy", ulps=ulps
            )
    whole = whole_gradients([grad for *_, grad in runs], sequence_parallel)
    assert set(whole) == set(grads)
    for key, grad in whole.items():
        assert grad.dtype == problem.hidden.dtype
        oracles.assert_no_worse(grad, plain_grads[key], grads[key], name=f"d{key}", ulps=ulps)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_loss(ranks, layout, dtype, name):
    _check(ranks, layout, make_problem(dtype=dtype), name, {"denominator": 7.5})


@pytest.mark.parametrize("chunk_size", [1, 5, 1000])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_chunks_and_compaction(ranks, layout, compact, chunk_size):
    options = {"chunk_size": chunk_size, "compact": compact}
    _check(ranks, layout, make_problem((12,), ignored=0.5), "entropy", options)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"vocab_size": 11},
        {"logit_scale": 0.5, "temperature": 0.7, "softcap": 4.0, "vocab_size": 17},
        {"label_smoothing": 0.2, "vocab_size": 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_head_options(ranks, layout, bias, options):
    problem = make_problem(bias=bias, true_vocab=options.get("vocab_size"))
    _check(ranks, layout, problem, "entropy", options | {"chunk_size": 5})


@pytest.mark.parametrize("layout", [(1, False), (2, True)], ids=str)
def test_several_blocks_of_columns(ranks, layout):
    problem = make_problem((6, 2), width=4, vocab=18_002, true_vocab=17_000)
    options = {"vocab_size": 17_000, "chunk_size": 4}
    _check(ranks, layout, problem, "entropy", options, ulps=16.0)


def test_denominator_may_be_a_tensor():
    problem = make_problem((12,))
    for denominator in (torch.tensor(3.0), torch.tensor([3]), 3):
        loss, _, grads = _fused(problem, "plain", (), {"denominator": denominator}, False, 1.0)
        whole, _, whole_grads = _fused(problem, "plain", (), {}, False, 1.0)
        torch.testing.assert_close(loss, whole / 3)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, whole_grads[name] / 3)


@pytest.mark.parametrize("lead", [(0,), (0, 2), (6, 2)], ids=str)
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nothing_to_learn_from(ranks, layout, compact, lead):
    """No rows, or none whose target counts: a loss of 0 and gradients of 0."""
    world, sequence_parallel = layout
    problem = make_problem(lead, ignored=2.0)
    tensors = _tensors("entropy", lead)
    for loss, stats, grads in on_ranks(
        ranks,
        world,
        _fused,
        problem,
        "entropy",
        tensors,
        {"compact": compact, "target_rank": True},
        sequence_parallel,
        1.0,
    ):
        assert loss.item() == 0.0
        assert stats.logprobs.shape == problem.target.shape
        assert (stats.target_rank == -1).all()
        for grad in grads.values():
            assert not grad.any()


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


@pytest.mark.parametrize("world", [1, 2])
def test_equals_the_unfused_loss(ranks, world):
    problem = make_problem((6, 2), true_vocab=20)
    loss_fn = ClippedLoss(
        clip_low=0.1, clip_high=0.3, dual_clip=3.0, kl_coef=0.2, entropy_coef=0.1, weighted=True
    )
    tensors = tuple(torch.randn(6, 2) - (0.0 if i == 1 else 2.5) for i in range(3))
    tensors = (*tensors, torch.rand(6, 2))
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


@pytest.mark.parametrize(
    ("loss_fn", "tensors", "options", "parts"),
    [
        ("mean", (), {}, ("loss_fn", "callable", "str")),
        (ratio_loss, (torch.zeros(2, 6),), {}, ("per_token_tensors[0]", "(6, 2)", "(2, 6)")),
        (ratio_loss, (torch.zeros(6, 2), 1.0), {}, ("per_token_tensors[1]", "Tensor", "float")),
        (
            ratio_loss,
            (torch.zeros(6, 2, requires_grad=True),),
            {},
            ("per_token_tensors[0]", "gradient"),
        ),
        (plain_loss, (), {"denominator": 0}, ("denominator", "0")),
        (plain_loss, (), {"denominator": "all"}, ("denominator", "'all'")),
        (plain_loss, (), {"denominator": torch.ones(2)}, ("denominator", "(2,)")),
        (plain_loss, (), {"temperature": 0.0}, ("temperature", "> 0", "0.0")),
        (plain_loss, (), {"chunk_size": 0}, ("chunk_size", ">= 1", "0")),
        (plain_loss, (), {"compact": 1}, ("compact", "1")),
        (plain_loss, (), {"gradient_accumulation_fusion": True}, ("main_grad", "None")),
        (plain_loss, (), {"tp_group": None}, ("tp_group", "2 ranks")),
    ],
    ids=range(12),
)
def test_mistakes_are_refused_before_anything_is_sent(ranks, loss_fn, tensors, options, parts):
    for message, sent in ranks(2).run(_refused, loss_fn, tensors, options):
        assert message
        assert sent == []
        for part in parts:
            assert part in message, f"{part!r} is missing in: {message}"


@pytest.mark.parametrize("loss_fn", [sum_loss, float_loss])
def test_a_loss_of_another_shape_is_refused_on_every_rank(ranks, loss_fn):
    for message, _ in ranks(2).run(_refused, loss_fn, (), {}):
        assert "loss_fn" in message
        assert "(12,)" in message
