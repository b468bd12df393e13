"""Filters and records of samplers where a row, block or entry has nothing, beside plain torch."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from mcore_logprobs import linear_sampling_logprobs, vocab_parallel_sampling_logprobs
from mcore_logprobs.kernels import budgets
from tests.helpers.shards import on_ranks, shard, world_group


def entropy_of(logprobs: Tensor) -> Tensor:
    return -(logprobs.exp() * logprobs).sum(-1)


def test_min_p_of_flat_rows_keeps_nothing_below_its_floor_in_the_gradient() -> None:
    """More ids than one look takes: the cut is found by a search."""
    above, below = -0.5 * torch.rand(2, 300), -1.0 - torch.rand(2, 100)
    rows = torch.cat([above, below], -1)[:, torch.randperm(400)]
    rows[:, 7] = 0.0
    target, upstream = torch.tensor([7, 7]), torch.tensor([1.0, -2.0])
    found, exact = rows.clone().requires_grad_(), rows.double().requires_grad_()
    got = vocab_parallel_sampling_logprobs(found, target, min_p=0.5)
    kept = exact.masked_fill(exact < exact.amax(-1, keepdim=True) + math.log(0.5), -math.inf)
    want = kept.log_softmax(-1).gather(-1, target.unsqueeze(1))[:, 0]
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    (grad,) = torch.autograd.grad(got, found, upstream)
    (expected,) = torch.autograd.grad(want, exact, upstream.double())
    torch.testing.assert_close(grad.double(), expected, rtol=0, atol=1e-6)


def test_the_entropy_of_a_row_without_a_record_learns() -> None:
    rows, upstream = torch.randn(3, 7), torch.tensor([1.0, -2.0, 0.5])
    record = torch.tensor([1, 4, 0, 3, 5]), torch.tensor([0, 2, 2, 5])
    found, exact = rows.clone().requires_grad_(), rows.double().requires_grad_()
    got = vocab_parallel_sampling_logprobs(
        found, torch.tensor([1, 2, 3]), kept_ids=record, missing="full", entropy=True
    ).kept_entropy
    kept = torch.zeros(3, 7, dtype=torch.bool)
    kept[0, [1, 4]] = kept[1] = kept[2, [0, 3, 5]] = True
    want = entropy_of(exact.masked_fill(~kept, -1e30).log_softmax(-1))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)
    (grad,) = torch.autograd.grad(got, found, upstream)
    (expected,) = torch.autograd.grad(want, exact, upstream.double())
    torch.testing.assert_close(grad.double(), expected, rtol=0, atol=1e-6)


def test_the_entropy_over_a_record_with_an_impossible_id_learns() -> None:
    found = torch.tensor([[0.0, -math.inf, 1.0, 2.0]], requires_grad=True)
    record = torch.tensor([0, 1, 2]), torch.tensor([0, 3])
    stats = vocab_parallel_sampling_logprobs(
        found, torch.tensor([0]), kept_ids=record, entropy=True
    )
    (grad,) = torch.autograd.grad(stats.kept_entropy.sum(), found)
    exact = torch.tensor([[0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(entropy_of(exact.log_softmax(-1)).sum(), exact)
    torch.testing.assert_close(grad.double()[:, [0, 2]], expected, rtol=0, atol=1e-6)
    assert (grad[:, [1, 3]] == 0).all()


def recorded(logits: Tensor, *record: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability, entropy, gradient of this rank's columns) over a record."""
    leaf, mine = shard(logits)
    found = vocab_parallel_sampling_logprobs(
        mine,
        torch.tensor([1]),
        kept_ids=record,
        entropy=True,
        temperature=0.7,
        tp_group=world_group(),
    )
    (2.0 * found.logprobs - found.kept_entropy).sum().backward()
    return found.logprobs.detach(), found.kept_entropy.detach(), leaf.grad


def test_a_rank_all_of_whose_kept_ids_are_masked_with_numbers(ranks) -> None:
    """At this temperature the least number is -inf: 0 - it is inf, and inf * 0 NaN."""
    logits = torch.randn(1, 8)
    logits[0, 5:7] = torch.finfo(torch.float32).min
    record = torch.tensor([0, 1, 5]), torch.tensor([0, 3])
    exact = logits.double().requires_grad_()
    logp = (exact[0, :2] / 0.7).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum()
    (2.0 * logp[1] - entropy).backward()
    for world in (1, 2):
        results = on_ranks(ranks, world, recorded, logits, *record)
        (logprob, kept_entropy, _), grad = results[0], torch.cat([x for *_, x in results], -1)
        torch.testing.assert_close(logprob.double(), logp[1:].detach())
        torch.testing.assert_close(kept_entropy.double(), entropy[None].detach())
        torch.testing.assert_close(grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_kept_ids_of_several_blocks_beside_the_whole_distribution() -> None:
    hidden, weight, target = torch.randn(2, 3), torch.randn(12, 3), torch.tensor([0, 9])
    record = torch.tensor([0, 5, 9, 9, 11]), torch.tensor([0, 3, 5])
    found = [x.clone().requires_grad_() for x in (hidden, weight)]
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    small = dataclasses.replace(budgets.CPU, chunk_bytes=1, min_block=4, max_block=4, block_step=1)
    with budgets.use(small):
        got = linear_sampling_logprobs(*found, target, kept_ids=record, full=True)
        total = got.logprobs.sum() + 2 * got.full_logprobs.sum()
        grads = torch.autograd.grad(total, found)
    kept = torch.zeros(2, 12, dtype=torch.bool)
    kept[0, [0, 5, 9]] = kept[1, [9, 11]] = True
    z = exact[0] @ exact[1].t()
    within, whole = (
        x.log_softmax(-1).gather(-1, target.unsqueeze(1)).sum()
        for x in (z.masked_fill(~kept, -1e30), z)
    )
    for grad, want in zip(grads, torch.autograd.grad(within + 2 * whole, exact), strict=True):
        torch.testing.assert_close(grad.double(), want, rtol=0, atol=1e-5)


def test_a_capped_record_of_a_nan_row_that_asks_for_nothing() -> None:
    logits = torch.randn(3, 8)
    logits[1, 2] = torch.nan
    logits.requires_grad_()
    record = torch.tensor([1, 2, 3] * 3), torch.tensor([0, 3, 6, 9])
    stats = vocab_parallel_sampling_logprobs(
        logits, torch.tensor([1, 1, 2]), kept_ids=record, full=True, softcap=5.0
    )
    (grad,) = torch.autograd.grad(stats.logprobs, logits, torch.tensor([1.0, 0.0, 3.0]))
    assert stats.logprobs[1].isnan()
    assert grad.isfinite().all()
    assert not grad[1].any()


def test_a_record_of_many_ids_keeps_its_digits() -> None:
    """Sums of a row's entries, which in float32 drift with their number: 3e-4 here."""
    width = 65536
    rows = torch.full((2, width), -0.4)
    rows[:, 0] = 0.0
    record = torch.arange(width).repeat(2), torch.tensor([0, width, 2 * width])
    target, upstream = torch.tensor([1, 0]), torch.tensor([1.0, -0.5])
    found, exact = rows.clone().requires_grad_(), rows.double().requires_grad_()
    got = vocab_parallel_sampling_logprobs(found, target, kept_ids=record, full=True, entropy=True)
    logp = exact.log_softmax(-1)
    want = logp.gather(-1, target.unsqueeze(1))[:, 0]
    torch.testing.assert_close(got.logprobs.double(), want, rtol=0, atol=2e-6)
    torch.testing.assert_close(got.kept_entropy.double(), entropy_of(logp), rtol=0, atol=2e-6)
    (grad,) = torch.autograd.grad(got.logprobs, found, upstream)
    (expected,) = torch.autograd.grad(want, exact, upstream.double())
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=0)
