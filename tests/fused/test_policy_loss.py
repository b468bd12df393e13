"""linear_policy_loss: the same value and gradients as the loss taken of linear_token_stats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    Case,
    Problem,
    Truth,
    make_problem,
    plain_loss,
    shard_problem,
)
from tests.helpers import oracles
from tests.logits.common import on_ranks, world_group


def test_against_plain_torch_in_float64():
    """The operation on one process, line by line."""
    # 10 rows in tiles of 4 leave a ragged tile; 9 columns, of which the last is padding; a width
    # of 3, unlike every other size, so that a transposed product cannot pass.
    hidden = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 8, (10,))
    target[3] = -100
    old, advantages = torch.randn(2, 10, dtype=torch.float64).unbind(0)

    def loss_fn(logprobs, entropy, old, advantages):
        return -(logprobs - old).exp() * advantages - 0.1 * entropy

    loss, stats = linear_policy_loss(
        hidden,
        weight,
        target,
        loss_fn,
        old,
        advantages,
        denominator=9.0,
        entropy=True,
        temperature=0.7,
        vocab_size=8,
        chunk_size=4,
    )
    grads = torch.autograd.grad(loss, [hidden, weight])

    logp = (hidden @ weight[:8].t() / 0.7).log_softmax(-1)
    logprobs = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    per_token = loss_fn(logprobs, -(logp.exp() * logp).sum(-1), old, advantages)
    expected = per_token[target != -100].sum() / 9.0
    expected_grads = torch.autograd.grad(expected, [hidden, weight])

    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)
    kept = torch.where(target != -100, logprobs, 0.0)
    torch.testing.assert_close(stats.logprobs, kept, rtol=1e-12, atol=1e-12)


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


LOSSES: dict[str, tuple[bool, Callable[..., Tensor], int]] = {
    "plain": (False, plain_loss, 0),
    "ratio": (False, ratio_loss, 2),
    "entropy": (True, entropy_loss, 2),
    "wide": (False, wide_loss, 1),
    "only entropy": (True, only_entropy, 0),
}


def _tensors(name: str, lead: tuple[int, ...]) -> tuple[Tensor, ...]:
    if name == "wide":
        return (torch.randn(*lead, 5),)
    return tuple(torch.randn(lead) - (2.5 if i == 0 else 0.0) for i in range(LOSSES[name][2]))


@dataclass
class PolicyCase(Case):
    """A call of `linear_policy_loss`.

    Attributes:
        name: of the loss, in LOSSES.
        tensors: its per-token tensors; drawn for the problem's shape where not given.
        upstream: the gradient of the loss.
    """

    name: str = "plain"
    tensors: tuple[Tensor, ...] | None = None
    upstream: float = -0.37

    def __post_init__(self) -> None:
        if self.tensors is None:
            self.tensors = _tensors(self.name, tuple(self.problem.target.shape))

    def call(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, **parallel: Any) -> Any:
        """(loss, stats)"""
        entropy, fn, _ = LOSSES[self.name]
        kept = [x.clone() for x in self.tensors]
        loss, stats = linear_policy_loss(
            hidden,
            weight,
            self.problem.target,
            fn,
            *self.tensors,
            bias=bias,
            entropy=entropy,
            **parallel,
            **self.options,
        )
        assert loss.shape == ()
        assert all(map(torch.equal, self.tensors, kept)), "a per-token tensor was modified"
        for value in (stats.logprobs, stats.entropy, stats.lse):
            assert value is None or not value.requires_grad
        return loss, stats

    def roots(self, result: Any) -> dict[str, tuple[Tensor, Tensor]]:
        return {"loss": (result[0], torch.tensor(self.upstream))}

    def true_total(self, stats: oracles.ExactStats, dtype: torch.dtype) -> Tensor:
        return self.true_loss(stats, dtype) * self.upstream

    def true_loss(self, stats: oracles.ExactStats, dtype: torch.dtype) -> Tensor:
        entropy, fn, _ = LOSSES[self.name]
        tensors = tuple(t.to(dtype) for t in self.tensors)
        per_token = fn(stats.logprobs, stats.entropy if entropy else None, *tensors)
        # Ignored rows add nothing, whatever the loss makes of a log-probability of 0.
        per_token = torch.where(self.problem.target != -100, per_token, 0.0)
        return per_token.sum() / self.options.get("denominator", 1.0)

    def check_result(self, result: Any, exact: Truth, plain: Truth, ulps: float) -> None:
        loss, stats = result
        assert loss.dtype == torch.float32
        assert torch.equal(loss, self.runs[0][0][0]), "ranks differ"
        oracles.assert_no_worse(
            loss,
            self.true_loss(plain.stats, torch.float32),
            self.true_loss(exact.stats, torch.float64),
            name="loss",
            ulps=self.problem.target.numel(),  # a sum of n roundings
        )
        assert (stats.entropy is not None) == LOSSES[self.name][0]
        self.check_stats(stats, exact, plain, ulps)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_loss(layout, dtype, name):
    case = PolicyCase(make_problem(dtype=dtype), {"denominator": 7.5}, name)
    case.run(layout).check()


@pytest.mark.parametrize("chunk_size", [1, 5, 1000])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_chunks_and_compaction(layout, compact, chunk_size):
    options = {"chunk_size": chunk_size, "compact": compact}
    PolicyCase(make_problem((12,), ignored=0.5), options, "entropy").run(layout).check()


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
def test_head_options(layout, bias, options):
    problem = make_problem(bias=bias, true_vocab=options.get("vocab_size"))
    PolicyCase(problem, options | {"chunk_size": 5}, "entropy").run(layout).check()


@pytest.mark.parametrize("layout", [(1, False), (2, True)], ids=str)
def test_several_blocks_of_columns(layout):
    problem = make_problem((6, 2), width=4, vocab=18_002, true_vocab=17_000)
    options = {"vocab_size": 17_000, "chunk_size": 4}
    PolicyCase(problem, options, "entropy").run(layout).check(ulps=16.0)


def test_denominator_may_be_a_tensor():
    problem = make_problem((12,))
    for denominator in (torch.tensor(3.0), torch.tensor([3]), 3):
        case = PolicyCase(problem, {"denominator": denominator}, upstream=1.0)
        (loss, _), grads = case.on_rank()
        (whole, _), whole_grads = PolicyCase(problem, upstream=1.0).on_rank()
        torch.testing.assert_close(loss, whole / 3)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, whole_grads[name] / 3)


@pytest.mark.parametrize("lead", [(0,), (0, 2), (6, 2)], ids=str)
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nothing_to_learn_from(layout, compact, lead):
    """No rows, or none whose target counts: a loss of 0 and gradients of 0."""
    problem = make_problem(lead, ignored=2.0)
    options = {"compact": compact, "target_rank": True}
    case = PolicyCase(problem, options, "entropy", upstream=1.0)
    for (loss, stats), grads in case.run(layout).runs:
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
        (plain_loss, (), {"denominator": 0}, ("denominator", "> 0", "got 0")),
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
