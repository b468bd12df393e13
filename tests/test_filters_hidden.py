"""Filters and kept ids from hidden states: the saved cut, everything at once, many steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    linear_sampling_logprobs,
    vocab_parallel_sampling_logprobs,
    vocab_parallel_token_stats,
)
from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.kernels import budgets
from tests.helpers.heads import linear_filtered_stats, make_problem, shard_problem
from tests.helpers.shards import on_ranks, world_group, world_rank, world_size
from tests.ops import EVERY_STATISTIC, WITH_A_GRADIENT


def _problem() -> tuple[tuple[Tensor, ...], dict[str, Any], Tensor]:
    """(hidden, weight, target), options and an upstream gradient, the same in every process.

    Of small integers, so that the products are exact and full of ties: flat rows, which the
    candidates do not decide, and targets that are filtered out.
    """
    generator = torch.Generator().manual_seed(3)
    whole = torch.randint(-1, 2, (600, 4), generator=generator).float()
    hidden = torch.randint(-1, 2, (24, 4), generator=generator).float()
    hidden[::5] *= 4  # peaked
    target = torch.randint(0, 571, (24,), generator=generator)
    options = {"temperature": torch.rand(24, generator=generator) + 0.5, "vocab_size": 571}
    upstream = torch.randn(24, generator=generator)
    return (hidden.requires_grad_(), whole, target), options, upstream


def _tied(sequence_parallel: bool, filters: dict[str, Any]) -> dict[str, Any]:
    (hidden, whole, target), options, upstream = _problem()
    weight = whole.tensor_split(world_size())[world_rank()]
    part = hidden.tensor_split(world_size())[world_rank()] if sequence_parallel else hidden
    parallel = {"sequence_parallel": sequence_parallel, "tp_group": world_group()}
    with CollectivesMade() as forward:
        found = linear_sampling_logprobs(
            part, weight, target, chunk_size=10, **parallel, **filters, **options
        )
    with CollectivesMade() as backward:
        (grad,) = torch.autograd.grad(found, hidden, upstream)
    sent = {"forward": forward.names, "backward": backward.names}
    return {"found": (found.detach(), grad)} | sent


@pytest.mark.parametrize("filters", [{"top_p": 0.7}, {"top_k": 100, "top_p": 0.7}], ids=str)
@pytest.mark.parametrize("layout", [(1, False), (2, False), (2, True)], ids=str)
def test_the_saved_cut_is_the_one_on_logits_that_are_held(ranks, layout, filters):
    world, sequence_parallel = layout
    runs = on_ranks(ranks, world, _tied, sequence_parallel, filters)
    (hidden, whole, target), options, upstream = _problem()
    expected = vocab_parallel_sampling_logprobs(hidden @ whole.t(), target, **filters, **options)
    (expected_grad,) = torch.autograd.grad(expected, hidden, upstream)
    for run in runs:
        values, grad = run["found"]
        assert 0 < values.isneginf().sum() < 20
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
        if sequence_parallel:
            grad = sum(other["found"][1] for other in runs)  # each has its own rows alone
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5)
        # Three tiles. The forward searches; the backward asks no other rank but for dHidden's sum.
        if world == 2:
            assert run["forward"].count("all_reduce") > 3 * 4
            sums = "reduce_scatter" if sequence_parallel else "all_reduce"
            gathers = ["all_gather"] * 3 if sequence_parallel else []
            assert sorted(run["backward"]) == sorted([*gathers, *[sums] * 3])


def test_filters_and_the_whole_distribution_from_one_pass():
    """With everything a head may have, in float64, against the operations on its logits."""
    lead, names = (7, 2), ("hidden", "weight", "bias", "a", "b")
    problem = make_problem(lead, dtype=torch.float64, bias=True, true_vocab=20)
    inputs = (problem.hidden, problem.weight, problem.bias, torch.randn(3, 8), torch.randn(24, 3))
    leaves = dict(zip(names, (x.double().requires_grad_() for x in inputs), strict=True))
    hidden, weight, bias, a, b = leaves.values()
    options = {"vocab_size": 20, "temperature": torch.rand(lead) + 0.5}
    filters = {"top_k": 9, "top_p": 0.7}
    head = {"bias": bias, "lora": (a, b, 0.4), "softcap": 5.0, "logit_scale": 0.8}
    z = 5.0 * torch.tanh((hidden @ weight.t() + 0.4 * hidden @ a.t() @ b.t()) * (0.8 / 5.0)) + bias
    exact = vocab_parallel_token_stats(z, problem.target, **options, **EVERY_STATISTIC)
    kept = vocab_parallel_sampling_logprobs(z, problem.target, **options, **filters)
    exact = dataclasses.replace(exact, logprobs=kept)
    for compact in (False, True):
        found = linear_filtered_stats(
            hidden,
            weight,
            problem.target,
            chunk_size=4,
            compact=compact,
            **head,
            **options,
            **EVERY_STATISTIC,
            **filters,
        )
        assert torch.equal(found.target_rank, exact.target_rank)
        for chosen in (("logprobs",), WITH_A_GRADIENT, ("lse",)):
            pairs = [(getattr(found, name), getattr(exact, name)) for name in chosen]
            mine, theirs = zip(*pairs, strict=True)
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
            upstream = [torch.randn(x.shape).double().masked_fill(x.isinf(), 0.0) for x in mine]
            for one, other in zip(
                torch.autograd.grad(mine, list(leaves.values()), upstream, retain_graph=True),
                torch.autograd.grad(theirs, list(leaves.values()), upstream, retain_graph=True),
                strict=True,
            ):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (None, 0.8)])
def test_rows_of_a_tile_in_several_steps(monkeypatch, top_k, top_p):
    """As on a machine whose budget holds a few rows of the vocabulary."""
    problem = make_problem((7, 1), bias=True)
    leaves = shard_problem(problem, False)
    upstream = torch.randn(7, 1)
    options = {"temperature": torch.rand(7, 1) + 0.5, "tp_group": world_group(), "entropy": True}
    found = []
    for several in (False, True):
        if several:
            small = dataclasses.replace(budgets.CPU, copy_bytes=2 * 4 * problem.weight.shape[0])
            monkeypatch.setattr(budgets, "CPU", small)
        stats = linear_filtered_stats(
            *leaves[:2], problem.target, bias=leaves[2], top_k=top_k, top_p=top_p, **options
        )
        value = torch.where(stats.logprobs.isinf(), 0.0, stats.logprobs) + stats.entropy
        found.append((value.detach(), *torch.autograd.grad(value, leaves, upstream)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_replay_of_entries_in_several_steps(monkeypatch):
    """As with more entries of a tile than are gathered at a time."""
    small = dataclasses.replace(budgets.CPU, gathered_bytes=8 * 8 * 3)
    monkeypatch.setattr(budgets, "CPU", small)
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    ids, offsets = torch.randperm(40)[:24], torch.arange(7) * 4
    target = ids.view(6, 4)[:, 2]
    found = linear_sampling_logprobs(hidden, weight, target, kept_ids=(ids, offsets), chunk_size=4)
    expected = (hidden @ weight.t()).gather(1, ids.view(6, 4)).log_softmax(-1)[:, 2]
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(6)
    for one, other in zip(
        torch.autograd.grad(found, [hidden, weight], upstream),
        torch.autograd.grad(expected, [hidden, weight], upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_a_nan_row_without_upstream_has_no_gradient_beside_filters():
    problem = make_problem((6,), ignored=0.0)
    problem.hidden[2] = torch.nan
    hidden, weight, _ = shard_problem(problem, False)
    stats = linear_filtered_stats(hidden, weight, problem.target, top_k=5, entropy=True)
    upstream = torch.randn(2, 6)
    upstream[:, 2] = 0.0
    upstream[0].masked_fill_(stats.logprobs.isneginf(), 0.0)
    roots = [stats.logprobs, stats.entropy]
    (grad,) = torch.autograd.grad(roots, hidden, list(upstream))
    assert stats.entropy.isnan().tolist() == [row == 2 for row in range(6)]
    assert not grad[2].any()
    assert grad.isfinite().all()
    assert grad[[0, 1, 3, 4, 5]].any(-1).all()
