"""inplace_backward=True: the same gradient, no large tensor at all, and refused where it hurts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_logprobs import vocab_parallel_logprobs, vocab_parallel_token_stats
from tests.helpers.memory import TensorsMade
from tests.helpers.shards import VOCAB, make_target, on_ranks, shard, world_group


def _both(whole: Tensor, target: Tensor, upstream: Tensor, options: dict) -> tuple:
    def grad(inplace: bool) -> tuple[Tensor, Tensor]:
        leaf, _ = shard(whole)
        logits = leaf * 1.5
        out = vocab_parallel_token_stats(
            logits,
            target,
            entropy=True,
            tp_group=world_group(),
            chunk_size=2,
            inplace_backward=inplace,
            **options,
        )
        loss = (out.logprobs * upstream).sum() + (out.entropy * upstream.flip(0)).sum()
        (found,) = torch.autograd.grad(loss, leaf)
        return out.logprobs, found

    return *grad(False), *grad(True)


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "softcap": 5.0, "vocab_size": 13}], ids=str
)
@pytest.mark.parametrize(("world", "dtype"), [(1, torch.bfloat16), (2, torch.float32)], ids=str)
def test_same_gradient(ranks, world, dtype, options):
    whole = torch.randn(3, 5, VOCAB).to(dtype)
    target = make_target((3, 5), options.get("vocab_size", VOCAB))
    upstream = torch.randn(3, 5)
    results = on_ranks(ranks, world, _both, whole, target, upstream, options)
    assert any(grad.any() for *_, grad in results)
    for plain, plain_grad, inplace, grad in results:
        assert torch.equal(plain, inplace)
        assert torch.equal(plain_grad, grad)


def test_no_tensor_of_the_logits_size_is_made():
    hidden = torch.randn(128, 8, requires_grad=True)
    logits = hidden @ torch.randn(8, 4096)
    target = make_target((128,), 4096)
    logprobs = vocab_parallel_logprobs(logits, target, chunk_size=2, inplace_backward=True)
    upstream = torch.randn(128)
    chunk = 2 * 4096 * 4
    with TensorsMade() as made:
        # The gradient with respect to the logits is what the matrix product's backward gets.
        torch.autograd.grad(logprobs, hidden, upstream)
    assert made.larger_than(2 * chunk) == []
    assert made.peak <= 5 * chunk


def _logits() -> Tensor:
    return torch.randn(4, VOCAB, requires_grad=True) * 2


def _retained() -> Tensor:
    logits = _logits()
    logits.retain_grad()
    return logits


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, VOCAB, requires_grad=True),
        _retained,
        lambda: (torch.randn(1, VOCAB, requires_grad=True) * 2).expand(4, VOCAB),
        lambda: (torch.randn(1, VOCAB, requires_grad=True) * 2).expand(2, VOCAB),
        lambda: torch.tanh(_logits()),
        lambda: torch.exp(_logits()),
        lambda: torch.softmax(_logits(), -1),
        lambda: torch.sigmoid(_logits()),
    ],
    ids=["leaf", "retained", "expanded", "expanded to 2", "tanh", "exp", "softmax", "sigmoid"],
)
def test_refused_where_the_logits_are_needed(make):
    logits = make()
    kept = logits.detach().clone()
    with pytest.raises(ValueError, match="inplace_backward"):
        vocab_parallel_logprobs(
            logits, make_target(logits.shape[:-1], VOCAB), inplace_backward=True
        )
    assert torch.equal(logits.detach(), kept)


def test_a_leaf_is_fine_where_no_gradient_is_asked_for():
    logits = torch.randn(4, VOCAB, requires_grad=True)
    target = make_target((4,), VOCAB)
    expected = vocab_parallel_logprobs(logits, target)
    with torch.no_grad():
        found = vocab_parallel_logprobs(logits, target, inplace_backward=True)
    assert torch.equal(found, expected)
    found = vocab_parallel_logprobs(logits.detach(), target, inplace_backward=True)
    assert torch.equal(found, expected)


def test_one_row_may_have_any_stride():
    whole = torch.randn(1, VOCAB, requires_grad=True)
    target = torch.tensor([3])
    upstream = torch.tensor([0.7])
    logits = (whole * 2).as_strided((1, VOCAB), (0, 1))
    values = vocab_parallel_logprobs(logits, target, inplace_backward=True)
    (grad,) = torch.autograd.grad(values, whole, upstream)
    expected = (whole * 2).log_softmax(-1)[:, 3]
    torch.testing.assert_close(grad, torch.autograd.grad(expected, whole, upstream)[0])
