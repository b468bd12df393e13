"""Drawn tokens: their distribution, that sharding does not change them, and rows that have none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    vocab_parallel_sample,
    vocab_parallel_sampling_logprobs,
)

DRAWS = 200_000
LOGITS = torch.tensor([2.0, -1.0, 0.5, 0.5, -4.0, 1.5, -torch.inf, 0.0])


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """The statistic, in its standard deviations from its mean; impossible columns are empty."""
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = probabilities[possible].double() * counts.sum()
    assert expected.min() > 20
    value = float(((counts[possible] - expected).square() / expected).sum())
    degrees = int(possible.sum()) - 1
    return (value - degrees) / math.sqrt(2.0 * degrees)


@pytest.mark.own_sizes
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8, "temperature": 1.4}],
    ids=str,
)
def test_many_draws_have_the_distribution(options):
    ids, logprobs = vocab_parallel_sample(LOGITS.expand(DRAWS, -1), seed=11, **options)
    every = torch.arange(len(LOGITS))
    exact = vocab_parallel_sampling_logprobs(
        LOGITS.double().expand(len(LOGITS), -1), every, **options
    )
    assert abs(chi_square(ids.bincount(minlength=len(LOGITS)), exact.exp())) < 4.0
    torch.testing.assert_close(logprobs, exact[ids].float())


@pytest.mark.own_sizes
def test_rows_and_seeds_are_independent():
    """Each pair of two neighbours, or of one row's under two seeds, has p times p."""
    p = (LOGITS / 3.0).softmax(-1)
    joint = torch.outer(p, p).flatten()
    ids, _ = vocab_parallel_sample(LOGITS.expand(DRAWS, -1), seed=3, temperature=3.0)
    other, _ = vocab_parallel_sample(LOGITS.expand(DRAWS, -1), seed=4, temperature=3.0)
    for first, second in ((ids[:-1:2], ids[1::2]), (ids, other)):
        counts = (first * len(p) + second).bincount(minlength=len(joint))
        assert abs(chi_square(counts, joint)) < 4.0


def test_a_temperature_of_zero_takes_the_largest_logit():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]]).repeat(50, 1)
    ids, logprobs = vocab_parallel_sample(logits, seed=0, temperature=0)
    assert ids.tolist() == [1, 0] * 50
    assert not logprobs.any()
    temperature = torch.tensor([0.0, 2.0]).repeat(50)
    mixed, logprobs = vocab_parallel_sample(logits, seed=0, temperature=temperature)
    plain, exact = vocab_parallel_sample(logits, seed=0, temperature=2.0)
    assert set(mixed[::2].tolist()) == {1}
    assert torch.equal(mixed[1::2], plain[1::2])
    assert not logprobs[::2].any()
    assert torch.equal(logprobs[1::2], exact[1::2])


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
def test_rows_without_a_distribution(options):
    logits = torch.zeros(4, 6)
    logits[0, 3] = torch.nan
    logits[1, 2] = logits[1, 5] = torch.inf
    logits[2] = -torch.inf
    ids, logprobs = vocab_parallel_sample(logits, seed=0, **options)
    assert ids[:3].tolist() == [3, 2, 0]
    assert logprobs[:2].isnan().all()
    assert logprobs[2] == -torch.inf
    assert logprobs[3].isfinite()
    mask = torch.tensor([False, False, False, True])
    ids, logprobs = vocab_parallel_sample(logits, seed=0, mask=mask, **options)
    assert not ids[:3].any()
    assert not logprobs[:3].any()


def test_no_gradient():
    logits = torch.randn(3, 5, requires_grad=True)
    assert not vocab_parallel_sample(logits, seed=0)[1].requires_grad


@pytest.mark.parametrize("temperature", [0.0, torch.zeros(2)], ids=["number", "rows"])
def test_a_greedy_token_of_a_spoilt_row(temperature: float | Tensor) -> None:
    rows = torch.tensor([[0.0, math.nan, 1.0], [-math.inf] * 3])
    ids, logprobs = vocab_parallel_sample(rows, seed=1, temperature=temperature)
    assert ids.tolist() == [1, 0]
    assert logprobs[0].isnan()
    assert logprobs[1] == -math.inf
