"""Filters as engines have them: vLLM's order, and transformers' own processors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mcore_logprobs as ml
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.ops import sampling_cut, sampling_search
from mcore_logprobs.sources.given import given_logits

ROWS, VOCAB = 20, 151
FILTERS = [
    {"min_p": 0.05},
    {"min_p": 0.3, "top_k": 7},
    {"min_p": 0.02, "top_p": 0.7},
    {"min_p": 0.01, "top_k": 20, "top_p": 0.9},
    {"min_p": 1.0},
]


def logits() -> Tensor:
    """From nearly flat rows to peaked ones; the second half are multiples of 1/8, which tie."""
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(ROWS, VOCAB, generator=generator) * torch.logspace(-2, 0.8, ROWS).unsqueeze(-1)
    return torch.cat([z[::2], (z[1::2] * 8).round() / 8])


def kept_by_us(z: Tensor, temperature: float, **filters: float) -> Tensor:
    """bool `[n, V]`: the ids whose log-probability is finite."""
    n, v = z.shape
    every = torch.arange(v).repeat_interleave(n)
    found = ml.vocab_parallel_sampling_logprobs(
        z.repeat(v, 1), every, temperature=temperature, **filters
    )
    return found.view(v, n).t().isfinite()


def vllm(z: Tensor, temperature: float, min_p: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """vLLM's sampler in float64: temperature, min-p, then both filters on one ascending sort."""
    z = z.double() / temperature
    p = z.softmax(-1)
    z = z.masked_fill(p < min_p * p.amax(-1, keepdim=True) * (1 - 1e-12), -torch.inf)
    ascending, order = z.sort(dim=-1, descending=False, stable=True)
    if top_k:
        kth = ascending[:, -top_k].unsqueeze(-1)
        ascending = ascending.masked_fill(ascending < kth, -torch.inf)
    if top_p < 1.0:
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[:, -1] = False
        ascending = ascending.masked_fill(dropped, -torch.inf)
    return torch.empty_like(z).scatter(-1, order, ascending).isfinite()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kept_tokens_are_those_of_vllm(filters: dict, temperature: float) -> None:
    z = logits()
    ours, theirs = kept_by_us(z, temperature, **filters), vllm(z, temperature, **filters)
    # Of equal logits at the top-p cut vLLM keeps the last, we the first: as many of each value.
    assert torch.equal(ours.sum(-1), theirs.sum(-1))
    for kept in (ours, theirs):
        smallest = z.masked_fill(~kept, math.inf).amin(-1)
        assert (smallest >= z.masked_fill(kept, -math.inf).amax(-1)).all()
    assert 0 < theirs.sum() < theirs.numel()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_kept_tokens_are_those_of_transformers(filters: dict) -> None:
    """In our order the same tokens; in transformers' own, min-p last, never fewer."""
    process = pytest.importorskip("transformers.generation.logits_process")
    z = logits()[: ROWS // 2]  # without ties, of which transformers' sort keeps any
    steps = {
        "temperature": process.TemperatureLogitsWarper(0.7),
        "min_p": process.MinPLogitsWarper(filters["min_p"]),
    }
    if "top_k" in filters:
        steps["top_k"] = process.TopKLogitsWarper(filters["top_k"])
    if "top_p" in filters:
        steps["top_p"] = process.TopPLogitsWarper(filters["top_p"])

    def kept(names: tuple[str, ...]) -> Tensor:
        found = z.double()
        for name in names:
            found = steps[name](None, found) if name in steps else found
        return found.isfinite()

    ours = kept_by_us(z, 0.7, **filters)
    assert torch.equal(ours, kept(("temperature", "min_p", "top_k", "top_p")))
    own = kept(("temperature", "top_k", "top_p", "min_p"))
    assert (own | ~ours).all()
    if "top_p" not in filters:
        assert torch.equal(ours, own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("filters", [{"top_k": 50}, {"top_k": 50, "top_p": 0.9}], ids=str)
def test_rows_that_tie_at_the_kth_place_are_not_searched(
    filters: dict, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most rows of bfloat16 logits do, cast to float32 or not; a search reads them many times."""
    monkeypatch.setattr(sampling_cut, "search_cut", None)
    generator = torch.Generator().manual_seed(5)
    z = (torch.randn(64, 8192, generator=generator) * 3 + 8).bfloat16().to(dtype)
    ordered = z.sort(-1, descending=True)
    assert (ordered.values[:, 49] == ordered.values[:, 50]).float().mean() > 0.5
    target = ordered.indices[:, 0]
    got = ml.vocab_parallel_sampling_logprobs(z, target, **filters)
    kept = vllm(z.float(), 1.0, min_p=0.0, **filters)
    expected = z.double().masked_fill(~kept, -torch.inf).log_softmax(-1)
    assert torch.allclose(got.double(), expected.gather(-1, target.unsqueeze(-1)).squeeze(-1))


@pytest.mark.parametrize("more", [{}, {"top_k": 1500}, {"top_p": 0.99}], ids=str)
def test_more_tokens_above_the_floor_than_candidates(more: dict[str, float]) -> None:
    """What lies below it is kept by no other filter, and gets no gradient."""
    z = torch.randn(2, 3000) * 0.1
    z[:, torch.randperm(3000)[:200]] += 5.0
    z.requires_grad_()
    below = z < z.amax(-1, keepdim=True) + math.log(0.2)
    target = z.argmax(-1)
    got = ml.vocab_parallel_sampling_logprobs(z, target, min_p=0.2, **more)
    (grad,) = torch.autograd.grad(got.sum(), z)
    assert not grad[below].any()
    if "top_p" not in more:
        expected = z.double().masked_fill(below, -torch.inf).log_softmax(-1)
        expected = expected.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_tie_that_is_computed_again_below_the_cut_keeps_its_gradient() -> None:
    """The last of equal logits that top-p keeps, an ulp lower in the backward."""
    z = torch.tensor([[3.0, 2.0, 2.0, -5.0]])
    column, keep = torch.tensor([1]), torch.tensor([True])
    options = sampling_search.FilterOptions(VocabShard.of(4, None, None), 1.0, None, 0.7)
    source = given_logits(z)
    local_sum = (z - 3.0).exp().sum(-1)
    cut = sampling_cut.find_cut(source, list(source.chunks()), local_sum, column, keep, options)
    assert (cut.limit.item(), cut.last.item()) == (2.0, 1)
    saved = sampling_cut.SavedCut.of(cut)
    gradient = sampling_cut.CutGradient(torch.tensor([0.7]), keep, column, saved, options)
    again = torch.nextafter(z, torch.tensor(-torch.inf))
    found = gradient.of_logits(again, slice(0, 1))[0, 1]
    p = torch.softmax(z[0, :2].double(), 0)[1]
    torch.testing.assert_close(found.double(), 0.7 * (1.0 - p), rtol=1e-6, atol=0.0)
