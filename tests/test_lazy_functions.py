"""Lazy logits that a caller's own functions read, scale, write to or hand on, and the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mcore_logprobs as ours
from mcore_logprobs.sources.lazy import LazyLogits
from tests.helpers.lazy import lazy_logits
from tests.test_lazy import MASK, B, S, V, gradients, head, of_rows


def test_a_function_that_sees_tensors_only_gets_the_gradient() -> None:
    """`autograd.Function.apply` does not pass through `__torch_function__`."""

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
            p = logits.float().softmax(-1)
            ctx.save_for_backward(p, target)
            return -p.gather(-1, target[..., None])[..., 0].log()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            p, target = ctx.saved_tensors
            one_hot = torch.nn.functional.one_hot(target, V)
            return grads[0][..., None] * (p - one_hot), None

    tensors, target = head(), torch.arange(S * B).view(B, S)
    found = []
    for logits in (
        lazy_logits(**tensors),
        tensors["hidden"] @ tensors["weight"].t() + tensors["bias"],
    ):
        loss = Loss.apply(logits.transpose(0, 1).contiguous() / 0.7, target)
        found.append(gradients((loss * torch.linspace(-1, 1, S)).sum(), tensors))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class HalfAsItIs(torch.autograd.Function):
    """The logits, with half of their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 0.5


class HalfOfACopy(HalfAsItIs):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.clone()


class HalfInPlace(HalfAsItIs):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.mark_dirty(logits)
        return logits


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        real = logits * torch.ones(V)
        ctx.save_for_backward(real)
        return real.square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0] * ctx.saved_tensors[0]


def test_a_scale_in_place_leaves_the_gradient_of_earlier_uses() -> None:
    tensors, target = head(), torch.arange(S * B).view(S, B) % V
    found = []
    for logits in (
        lazy_logits(**tensors),
        tensors["hidden"] @ tensors["weight"].t() + tensors["bias"],
    ):
        squares = Squares.apply(logits)
        logits.div_(0.7)
        loss = 0.1 * squares + ours.vocab_parallel_logprobs(logits, target).sum()
        found.append(gradients(loss, tensors))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def _read_without_gradients(x: Tensor) -> Tensor:
    read = x.logsumexp(-1).sum()
    with torch.no_grad():
        x[1:].softmax(-1)
        x.softmax(-1)
    return read + x.softmax(-1)[..., 3].sum() + x[1:].softmax(-1)[..., 4].sum()


def _scale_what_was_read(x: Tensor) -> Tensor:
    read = x.sum()
    x.div_(0.5)
    return read + x.softmax(-1)[..., 3].sum() + of_rows(x)


def _fill_some_rows(x: Tensor) -> Tensor:
    part = x[MASK]
    part.masked_fill_(part > 1.0, -2.0)
    return part.softmax(-1)[..., 3].sum() + of_rows(part) + x.exp().mean()


def _scale_what_was_written(x: Tensor) -> Tensor:
    x[2] = 0.0
    with torch.no_grad():
        x.div_(0.5)
    x.detach()[0].mul_(0.3)
    return x.softmax(-1)[..., 3].sum() + of_rows(x)


@pytest.mark.parametrize(
    "function",
    [_read_without_gradients, _scale_what_was_read, _fill_some_rows, _scale_what_was_written],
)
def test_who_read_before_changes_nothing(function: Any) -> None:
    """Real logits that are there already, for another reader, have the values and the gradient."""
    tensors = head()
    real = tensors["hidden"] @ tensors["weight"].t() + tensors["bias"]
    values = [function(x) for x in (lazy_logits(**tensors), real)]
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5)
    for a, b in zip(*(gradients(value, tensors) for value in values), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_scale_behind_a_detach_is_refused() -> None:
    logits = lazy_logits(**head())
    logits.detach().div_(0.7)
    for read in (of_rows, lambda x: x.softmax(-1)):
        with pytest.raises(RuntimeError, match="behind a detach"):
            read(logits)
        with torch.no_grad():
            read(logits)
    other = lazy_logits(**head())
    other.detach().clone().div_(0.7)
    of_rows(other)


def test_a_scale_in_place_without_gradients_is_refused() -> None:
    """Its values would be scaled, and its gradient not: nobody means that."""
    logits = lazy_logits(**head())
    with torch.no_grad():
        logits.div_(0.7)
    with pytest.raises(RuntimeError, match="changed in place under no_grad"):
        of_rows(logits)
    with torch.no_grad():  # made without gradients: recorded
        assert isinstance(lazy_logits(**head()).div_(0.7), LazyLogits)
        detached = lazy_logits(**head()).detach().div_(0.7)
    of_rows(detached)
    assert isinstance(detached, LazyLogits)


@pytest.mark.parametrize("function", [HalfAsItIs, HalfOfACopy, HalfInPlace])
@pytest.mark.parametrize(
    "after",
    [lambda x: x, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)[:] / 0.7],
    ids=["itself", "recorded"],
)
def test_a_function_that_gives_the_logits_on_keeps_its_backward(function: Any, after: Any) -> None:
    tensors, target = head(), torch.arange(S * B).view(S, B) % V
    found = []
    for logits in (
        lazy_logits(**tensors),
        tensors["hidden"] @ tensors["weight"].t() + tensors["bias"],
    ):
        passed = after(function.apply(logits))
        logprobs = ours.vocab_parallel_logprobs(passed, target)
        loss = (logprobs * torch.linspace(-1, 1, B)).sum() + passed[0].exp().mean()
        found.append(gradients(loss, tensors))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_function_that_gives_the_logits_on_is_told_or_refused() -> None:
    target = torch.zeros(S, B, dtype=torch.int64)
    passed = HalfAsItIs.apply(lazy_logits(**head(), require=True))
    with pytest.raises(
        ValueError, match=r"test_lazy_functions\.py:\d+ needs real logits \(HalfAsItIs"
    ):
        ours.vocab_parallel_logprobs(passed, target)
    with torch.no_grad():  # there is no backward that could be lost
        ours.vocab_parallel_logprobs(passed, target)


def test_logits_of_a_reentrant_checkpoint() -> None:
    tensors, target = head(), torch.arange(S * B).view(S, B) % V
    found = []
    for give in (lazy_logits, lambda hidden, weight, bias: hidden @ weight.t() + bias):
        logits = checkpoint(
            lambda hidden, give=give: give(hidden * 1.0, tensors["weight"], bias=tensors["bias"]),
            tensors["hidden"],
            use_reentrant=True,
        )
        for tensor in tensors.values():
            tensor.grad = None
        ours.vocab_parallel_logprobs(logits, target).sum().backward()
        found.append([tensor.grad for tensor in tensors.values()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
