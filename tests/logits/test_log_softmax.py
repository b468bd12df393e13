"""vocab_parallel_log_softmax: the shards of torch's log_softmax, and of its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_logprobs import vocab_parallel_log_softmax
from mcore_logprobs.bench.counting import CollectivesMade
from tests.helpers import oracles
from tests.helpers.memory import TensorsMade
from tests.logits.common import (
    DTYPES,
    LAYOUTS,
    VOCAB,
    WORLDS,
    accumulator,
    gradient_of_view,
    on_ranks,
    shard,
    world_group,
    world_rank,
    world_size,
)


def test_against_plain_torch_in_float64():
    """The operation on one process, line by line."""
    # 6 rows in chunks of 4 leave a ragged chunk; 7 columns, of which the last is padding.
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 3, 7, dtype=torch.float64)
    out = vocab_parallel_log_softmax(logits, temperature=0.7, vocab_size=6, chunk_size=4)
    (grad,) = torch.autograd.grad(out[..., :6], logits, upstream[..., :6])

    expected = (logits[..., :6] / 0.7).log_softmax(-1)
    (expected_grad,) = torch.autograd.grad(expected, logits, upstream[..., :6])

    torch.testing.assert_close(out[..., :6], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)
    assert out[..., 6].isneginf().all()


def _log_softmax(whole: Tensor, upstream: Tensor, layout: str, options: dict) -> tuple:
    leaf, logits = shard(whole, layout)
    kept, version = leaf.detach().clone(), leaf._version
    width = whole.shape[-1] // world_size()
    incoming = upstream[..., world_rank() * width : (world_rank() + 1) * width]
    with CollectivesMade() as forward:
        out = vocab_parallel_log_softmax(logits, tp_group=world_group(), **options)
    with CollectivesMade() as backward:
        (grad,) = torch.autograd.grad(out, leaf, incoming)
    if world_size() > 1 and whole.numel():
        assert forward.names == ["all_gather"]
        assert len(backward.names) == 1
        assert backward.nbytes <= 4 * 2 * whole.shape[:-1].numel()
    assert grad.dtype == leaf.dtype
    assert leaf._version == version
    assert torch.equal(leaf.detach().nan_to_num(99.0), kept.nan_to_num(99.0))
    return out, gradient_of_view(grad, layout)


def _check(
    ranks, world: int, whole: Tensor, options: dict, layout: str = "plain", ulps: float = 4.0
) -> None:
    vocab_size = options.get("vocab_size", VOCAB)
    upstream = torch.randn(whole.shape, dtype=accumulator(whole.dtype))
    results = on_ranks(ranks, world, _log_softmax, whole, upstream, layout, options)
    exact_options = {k: v for k, v in options.items() if k != "chunk_size"}
    # Nobody should send a gradient into a masked column; if somebody does, it goes nowhere.
    inside = torch.arange(whole.shape[-1]) < vocab_size

    def reference(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = whole.double() if dtype == torch.float64 else whole.clone()
        leaf.requires_grad_()
        out = oracles.log_softmax(leaf, dtype=dtype, **exact_options)
        incoming = torch.where(inside, upstream.to(dtype), 0.0)
        return out, torch.autograd.grad(out, leaf, incoming)[0]

    exact, exact_grad = reference(torch.float64)
    plain, plain_grad = reference(accumulator(whole.dtype))
    out = torch.cat([result[0] for result in results], -1)
    grad = torch.cat([result[1] for result in results], -1)
    assert out.dtype == accumulator(whole.dtype)
    oracles.assert_no_worse(out, plain, exact, name="log_softmax", ulps=ulps)
    oracles.assert_no_worse(grad, plain_grad, exact_grad, name="gradient", ulps=ulps)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"vocab_size": 11, "chunk_size": 4}, {"chunk_size": 1}],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_values_and_gradients(ranks, world, dtype, options):
    _check(ranks, world, (torch.randn(3, 5, VOCAB) * 3).to(dtype), options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_layouts(ranks, world, layout):
    _check(ranks, world, torch.randn(4, 5, VOCAB), {"chunk_size": 3, "vocab_size": 20}, layout)


@pytest.mark.parametrize("lead", [(), (1,), (0,), (3, 0), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_leading_shapes(ranks, world, lead):
    _check(ranks, world, torch.randn(*lead, VOCAB), {})


@pytest.mark.parametrize("offset", [-120.0, 80.0, 1e4])
@pytest.mark.parametrize("world", WORLDS)
def test_logits_far_from_zero(ranks, world, offset):
    _check(ranks, world, torch.randn(6, VOCAB) * 2 + offset, {})


@pytest.mark.parametrize("world", WORLDS)
def test_minus_infinity_columns(ranks, world):
    whole = torch.randn(20, VOCAB)
    whole[torch.rand(20, VOCAB) < 0.5] = -torch.inf
    whole[0] = torch.where(torch.arange(VOCAB) == 3, 1.0, -torch.inf)
    whole[:, 3] = 0.5
    _check(ranks, world, whole, {})


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e4])
@pytest.mark.parametrize("world", WORLDS)
def test_masked_columns_may_hold_anything(ranks, world, junk):
    whole = torch.randn(5, VOCAB)
    whole[:, 11:] = junk
    upstream = torch.randn(5, VOCAB)
    results = on_ranks(ranks, world, _log_softmax, whole, upstream, "plain", {"vocab_size": 11})
    out = torch.cat([result[0] for result in results], -1)
    grad = torch.cat([result[1] for result in results], -1)
    torch.testing.assert_close(out[:, :11], torch.log_softmax(whole[:, :11], -1))
    assert out[:, 11:].isneginf().all()
    assert not grad[:, 11:].any()
    assert grad.isfinite().all()


def test_memory_is_the_result_and_a_few_chunks():
    logits = torch.randn(256, 1024).bfloat16().requires_grad_()
    chunk = 4 * 1024 * 4
    with TensorsMade() as forward:
        out = vocab_parallel_log_softmax(logits, chunk_size=4)
    assert [made.nbytes for made in forward.larger_than(2 * chunk)] == [256 * 1024 * 4]
    assert forward.peak <= 256 * 1024 * 4 + 4 * chunk + 256 * 64
    upstream = torch.ones_like(out)
    with TensorsMade() as backward:
        out.backward(upstream)
    large = backward.larger_than(2 * chunk)
    assert [made.nbytes for made in large if made.dtype == torch.bfloat16] == [256 * 1024 * 2]
    assert backward.peak <= 256 * 1024 * 2 + 4 * chunk + 256 * 64


def test_gradcheck():
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: vocab_parallel_log_softmax(x, temperature=0.8), logits)
