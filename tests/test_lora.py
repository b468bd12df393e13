"""A LoRA on the head: rows nobody asks for, what it sends, what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_logprobs
from mcore_logprobs import linear_gather, linear_token_stats
from mcore_logprobs.bench.counting import CollectivesMade
from tests.helpers.heads import Problem, make_problem
from tests.helpers.shards import world_group, world_rank, world_size


def test_every_operation_from_hidden_states_takes_one():
    names = [name for name in mcore_logprobs.__all__ if name.startswith("linear_")]
    assert len(names) >= 9
    for name in names:
        parameters = inspect.signature(getattr(mcore_logprobs, name)).parameters
        assert parameters["lora"].default is None, name


def test_an_entry_that_nobody_asks_for_adds_nothing():
    """Rows that hold NaN, and ids that no gradient comes to, in the gradients of A and B."""
    problem = make_problem((6,), lora=True)
    hidden, (a, b, scale) = problem.hidden, problem.lora
    ids = torch.tensor([[0, 3], [1, 1], [2, 3], [3, 9], [4, 5], [5, 0]])
    upstream = torch.randn(6, 2)
    upstream[2] = 0.0
    found = []
    for spoilt in (True, False):
        x = hidden.clone()
        if spoilt:
            x[2] = torch.nan
        leaves = [t.clone().requires_grad_() for t in (x, a, b)]
        z = linear_gather(leaves[0], problem.weight, ids, lora=(*leaves[1:], scale), softcap=5.0)
        found.append(torch.autograd.grad(z, leaves, upstream))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert other.any()


def test_a_spoilt_row_that_is_asked_for_shows_before_the_lora_has_learnt():
    """With B = 0, as a LoRA starts, too."""
    problem = make_problem((6,), lora=True)
    hidden, (a, b, scale) = problem.hidden.clone(), problem.lora
    hidden[2] = torch.nan
    leaves = [a.clone().requires_grad_(), torch.zeros_like(b).requires_grad_()]
    z = linear_gather(hidden, problem.weight, torch.zeros(6, 2).long(), lora=(*leaves, scale))
    for grad in torch.autograd.grad(z.sum(), leaves):
        assert grad.isnan().any()


def _sent(problem: Problem, learning_a: bool) -> list[tuple[str, int]]:
    """What a call with a LoRA on a frozen head and its backward send more than one without."""
    (a, b, scale), made = problem.lora, []
    weight, b = (x.chunk(world_size())[world_rank()].clone() for x in (problem.weight, b))
    for lora in (None, (a.clone().requires_grad_(learning_a), b.requires_grad_(), scale)):
        hidden = problem.hidden.clone().requires_grad_()
        with CollectivesMade() as calls:
            stats = linear_token_stats(
                hidden, weight, problem.target, lora=lora, tp_group=world_group()
            )
            stats.logprobs.sum().backward()
        made.append([(call.name, call.nbytes) for call in calls.made])
    without, with_lora = made
    assert with_lora[: len(without)] == without
    return with_lora[len(without) :]


def test_one_small_all_reduce_for_the_gradient_of_a(ranks):
    problem = make_problem(lora=True)
    for more in ranks(2).run(_sent, problem, True):
        assert more == [("all_reduce", 4 * problem.lora[0].numel())]
    for more in ranks(2).run(_sent, problem, False):
        assert more == []


# What is made of (A, B), and words of the message.
MISTAKES: list[tuple[Callable[[Tensor, Tensor], Any], tuple[str, ...]]] = [
    (lambda a, b: a, ("tuple", "got Tensor")),
    (lambda a, b: (a, b), ("tuple", "2 values")),
    (lambda a, b: (a.t(), b, 1.7), ("[r, 8]", "(8, 3)")),
    (lambda a, b: (a, torch.cat([b, b]), 1.7), ("[12, 3]", "(24, 3)")),
    (lambda a, b: (a[:2], b, 1.7), ("[12, 2]", "(12, 3)")),
    (lambda a, b: (a.bfloat16(), b, 1.7), ("A", "float32", "bfloat16")),
    (lambda a, b: (a, b.double(), 1.7), ("B", "float32", "float64")),
    (lambda a, b: (a, b, torch.tensor(2.0)), ("scale", "tensor(2.)")),
    (lambda a, b: (a, b, float("inf")), ("scale", "inf")),
    (lambda a, b: (a, b, True), ("scale", "True")),
    (lambda a, b: (a, None, 1.7), ("B", "NoneType")),
    (lambda a, b: (a[:0], b[:, :0], 1.7), ("[r, 8]", "(0, 8)")),
    (lambda a, b: (a[0], b, 1.7), ("[r, 8]", "(8,)")),
]


def _refused(problem: Problem) -> list[tuple[str, list[str]]]:
    (a, b, _), found = problem.lora, []
    weight, b = (x.chunk(world_size())[world_rank()] for x in (problem.weight, b))
    for make, _ in MISTAKES:
        with CollectivesMade() as made, pytest.raises(ValueError, match="lora: ") as error:
            linear_token_stats(
                problem.hidden, weight, problem.target, lora=make(a, b), tp_group=world_group()
            )
        found.append((str(error.value), made.names))
    return found


def test_mistakes_are_refused_before_anything_is_sent(ranks):
    for found in ranks(2).run(_refused, make_problem(lora=True)):
        for (message, sent), (_, parts) in zip(found, MISTAKES, strict=True):
            assert sent == []
            for part in parts:
                assert part in message, f"{part!r} is missing in: {message}"
