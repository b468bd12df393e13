"""Lazy logits whose padding is cut off: `logits[..., :vocab_size]`, as frameworks write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_logprobs as ours
from mcore_logprobs.sources.lazy import LazyLogits
from tests.helpers.lazy import Seen, lazy_logits
from tests.helpers.shards import on_ranks, world_group
from tests.ops import EVERY_STATISTIC, PER_TOKEN

S, B, H, V, TRUE = 5, 2, 7, 18, 13
N = S * B
_MASK = torch.tensor([True, False, True, True, False])
_TEMPERATURES = torch.linspace(0.5, 2.0, N).view(S, B, 1)

CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "ellipsis": lambda x: x[..., :TRUE],
    "slices": lambda x: x[:, :, :TRUE],
    "from 0": lambda x: x[..., 0:TRUE:1],
    "a negative end": lambda x: x[..., : TRUE - V],
    "with rows": lambda x: x[1:, :1, :TRUE],
    "with an int": lambda x: x[3, :, :TRUE],
    "with a mask": lambda x: x[_MASK, :, :TRUE],
    "of a flat view": lambda x: x.view(-1, V)[:, :TRUE],
    "after transpose": lambda x: x.transpose(0, 1)[..., :TRUE],
    "then transpose": lambda x: x[..., :TRUE].transpose(0, 1),
    "then view": lambda x: x[..., :TRUE].view(N, TRUE),
    "then contiguous": lambda x: x[..., :TRUE].transpose(0, 1).contiguous().view(N, -1),
    "then rows": lambda x: x[..., :TRUE][2:, 0],
    "then cut again": lambda x: x[..., : TRUE + 3][..., :TRUE],
    "then divided": lambda x: x[..., :TRUE].float() / 0.7,
    "divided before": lambda x: (x / _TEMPERATURES)[..., :TRUE],
    "divided in place before": lambda x: (x * 1.0).div_(0.7)[..., :TRUE],
    "then cloned and divided in place": lambda x: x[..., :TRUE].clone().div_(0.7),
    "cat": lambda x: torch.cat([x[1:3, :, :TRUE], x[:1, :, :TRUE]]),
    "stack": lambda x: torch.stack([x[1, :, :TRUE], x[0, :, :TRUE] / 0.5]),
    "split": lambda x: x[..., :TRUE].split(2)[1],
}


def head(grad: bool = True) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = {"hidden": (S, B, H), "weight": (V, H), "bias": (V,)}
    found = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    found["bias"][TRUE:] += 6.0  # the padding would win, were it counted
    return {name: x.requires_grad_(grad) for name, x in found.items()}


def real_logits(tensors: dict[str, Tensor]) -> Tensor:
    return tensors["hidden"] @ tensors["weight"].t() + tensors["bias"]


def labels(x: Tensor) -> Tensor:
    return torch.arange(x.shape[:-1].numel()).view(x.shape[:-1]) * 5 % TRUE


def statistics(x: Tensor) -> Tensor:
    found = ours.vocab_parallel_token_stats(x, labels(x), **EVERY_STATISTIC)
    return torch.stack([getattr(found, name).float() for name in PER_TOKEN], -1)


def chosen(x: Tensor) -> Tensor:
    ids = torch.stack([labels(x), (labels(x) + 1) % TRUE], -1)
    return torch.cat([ours.vocab_parallel_gather(x, ids, log_softmax=on) for on in (True, False)])


def largest(x: Tensor) -> Tensor:
    values, ids = ours.vocab_parallel_topk(x, TRUE)
    return torch.cat([values, ids.float()], -1)


def sampled(x: Tensor) -> Tensor:
    ids, logprobs = ours.vocab_parallel_sample(x, seed=3, top_p=0.9)
    return torch.stack([ids.float(), logprobs], -1)


def biased(x: Tensor) -> Tensor:
    return ours.vocab_parallel_logprobs(
        x, labels(x), logit_bias={2: 0.5}, disallowed_ids=[TRUE - 2]
    )


CONSUMERS: dict[str, Callable[[Tensor], Tensor]] = {
    "statistics": statistics,
    "chosen ids": chosen,
    "top k": largest,
    "filtered": lambda x: ours.vocab_parallel_sampling_logprobs(x, labels(x), top_k=7, top_p=0.95),
    "log-softmax": ours.vocab_parallel_log_softmax,
    "a smaller vocabulary": lambda x: ours.vocab_parallel_entropy(x, vocab_size=TRUE - 4),
    "a temperature, chunks": lambda x: ours.vocab_parallel_logprobs(
        x, labels(x), temperature=0.7, chunk_size=2
    ),
}
WITHOUT_GRADIENTS = {"sampled": sampled, "biased": biased}


def compare(cut: Callable[[Tensor], Tensor], use: Callable[[Tensor], Tensor]) -> None:
    tensors, found = head(), []
    for logits in (lazy_logits(**tensors, require=True), real_logits(tensors)):
        result = use(cut(logits))
        weights = torch.linspace(-1.0, 2.0, result.numel()).view(result.shape)
        loss = (result.where(result.isfinite(), 0.0) * weights).sum()
        found.append((result, *torch.autograd.grad(loss, list(tensors.values()))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_is_recorded(name: str) -> None:
    cut, tensors = CUTS[name], head()
    expected = cut(real_logits(tensors))
    with Seen() as seen:
        got = cut(lazy_logits(**tensors))
    assert isinstance(got, LazyLogits)
    assert seen.products == 0
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert got.is_contiguous() == expected.is_contiguous()
    assert got.stride() == expected.stride()
    with torch.no_grad():
        torch.testing.assert_close(got + 0.0, expected.detach(), rtol=1e-5, atol=1e-5)
    compare(cut, statistics)


@pytest.mark.parametrize("name", CONSUMERS)
@pytest.mark.parametrize("cut", ["ellipsis", "with a mask", "cat"])
def test_a_consumer_gives_what_the_cut_logits_give(name: str, cut: str) -> None:
    compare(CUTS[cut], CONSUMERS[name])


@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_samples_and_biases(name: str) -> None:
    tensors = head(grad=False)
    cut, use = CUTS["ellipsis"], WITHOUT_GRADIENTS[name]
    lazy = use(cut(lazy_logits(**tensors, require=True)))
    torch.testing.assert_close(lazy, use(cut(real_logits(tensors))), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: ours.vocab_parallel_logprobs(x, torch.full((S, B), TRUE)),
        lambda x: ours.vocab_parallel_logprobs(x, labels(x), vocab_size=TRUE + 1),
        lambda x: ours.vocab_parallel_topk(x, TRUE + 1),
        lambda x: ours.vocab_parallel_gather(x, torch.full((S, B, 1), V - 1)),
        lambda x: ours.vocab_parallel_logprobs(x, labels(x), disallowed_ids=[TRUE]),
    ],
    ids=["a label", "vocab_size", "k", "an id", "a forbidden id"],
)
def test_what_was_cut_off_is_refused(wrong: Callable[[Tensor], Tensor]) -> None:
    """By the same error as of the real cut logits."""
    messages = []
    for logits in (lazy_logits(**head()), real_logits(head())):
        with pytest.raises(ValueError, match="expected") as raised:
            wrong(logits[..., :TRUE])
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


REAL: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda x: x[..., :TRUE].argmax(-1).float(),
    "mean": lambda x: x[..., :TRUE].mean(-1),
    "mean of all": lambda x: x[..., :TRUE].mean(),
    "softmax": lambda x: x[..., :TRUE].softmax(-1),
    "a divergence": lambda x: ours.vocab_parallel_kl_div(
        x[..., :TRUE], torch.linspace(-1, 1, N * TRUE).view(S, B, TRUE)
    ),
    "a teacher": lambda x: ours.vocab_parallel_kl_div(
        torch.linspace(-1, 1, N * TRUE).view(S, B, TRUE), x[..., :TRUE]
    ),
    "a bias per column": lambda x: ours.vocab_parallel_logprobs(
        x[..., :TRUE], labels(x), logit_bias=torch.linspace(-1, 1, TRUE)
    ),
    "segments": lambda x: ours.vocab_parallel_logprobs(
        x[..., :TRUE], labels(x), invariant_segments=1
    ),
    "divided in place": lambda x: x[..., :TRUE].div_(0.5),
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("grad", [True, False])
def test_what_needs_the_columns_themselves_gets_real_logits(name: str, grad: bool) -> None:
    tensors = head(grad)
    expected = REAL[name](real_logits(tensors) * 1.0)
    with torch.set_grad_enabled(grad):
        got = REAL[name](lazy_logits(**tensors))
    torch.testing.assert_close(got + 0.0, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="fused='require'"):
        REAL[name](lazy_logits(**tensors, require=True))


def test_a_write_into_cut_logits_is_seen_by_the_whole() -> None:
    found = []
    for logits in (lazy_logits(**head(grad=False)), real_logits(head(grad=False))):
        part = logits[..., :TRUE]
        part.div_(0.5)
        logits[0, 0, 0] = 3.0
        found.append(torch.cat([logits + 0.0, part + 0.0], -1))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_whole_and_cut_logits_side_by_side() -> None:
    """Neither takes the other's pass."""
    tensors, found = head(), []
    for logits in (lazy_logits(**tensors, require=True), real_logits(tensors)):
        loss = statistics(logits).sum() + 2.0 * statistics(logits[..., :TRUE]).sum()
        loss = loss - ours.vocab_parallel_entropy(logits).sum()
        found.append((loss, *torch.autograd.grad(loss, list(tensors.values()))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def cut_shards() -> tuple[bool, float]:
    """(whether a cut shard stays lazy, how far it is from the real one)."""
    tensors = head(grad=False)
    got = lazy_logits(**tensors, tp_group=world_group())[..., :TRUE]
    real = real_logits(tensors)[..., :TRUE]
    return isinstance(got, LazyLogits), float((got - real).abs().max())


def test_a_shard_that_is_cut_is_real(ranks: Any) -> None:
    """Which ids a rank's columns are would no longer follow from their number."""
    for lazy, error in on_ranks(ranks, 2, cut_shards):
        assert not lazy
        assert error < 1e-5
