"""What autograd asks of lazy logits beyond a forward and a backward: hooks, versions, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mcore_logprobs as ours
from mcore_logprobs.sources.lazy import LazyLogits
from tests.helpers.lazy import lazy_logits

S, B, H, V = 4, 2, 5, 12
TARGET = torch.arange(S * B).view(S, B)


def head() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(S, B, H, generator=generator, requires_grad=True),
        "weight": torch.randn(V, H, generator=generator, requires_grad=True),
    }


def entropy(logits: Tensor) -> Tensor:
    return ours.vocab_parallel_entropy(logits).sum()


def in_place(how: str, logits: Tensor) -> None:
    if how == "scaled":
        logits.div_(2.0)
    elif how == "a view":
        logits[1:].div_(2.0)
    elif how == "written":
        logits[0, 0] = 0.0
    else:
        logits.clamp_(max=0.5)


@pytest.mark.parametrize("how", ["scaled", "a view", "written", "clamped"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_notices_logits_that_were_changed_in_place(how: str, reentrant: bool) -> None:
    logits = lazy_logits(**head())
    values = checkpoint(
        lambda x: ours.vocab_parallel_logprobs(x, TARGET) * 1.0, logits, use_reentrant=reentrant
    )
    in_place(how, logits)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()


def test_versions_count_as_torch_counts_them() -> None:
    logits = lazy_logits(**head())
    other, part, copied = logits.transpose(0, 1), logits[1:], logits.clone()
    part.div_(2.0)
    logits.clamp_(max=0.5)
    assert [x._version for x in (logits, other, part, copied)] == [2, 2, 2, 0]


USES: dict[str, Callable[[Any], Any]] = {
    "computed": lambda x: entropy(x),
    "a view": lambda x: entropy(x[:, 1:]),
    "a quotient": lambda x: entropy(x / 0.7),
    "a mean": lambda x: x.mean(),
}


@pytest.mark.parametrize("use", USES)
def test_a_hook_that_would_be_passed_over_is_refused(use: str) -> None:
    logits = lazy_logits(**head())
    loss = USES[use](logits)
    for put in (lambda: logits.register_hook(lambda grad: 3.0 * grad), logits.retain_grad):
        with pytest.raises(RuntimeError, match="lazy logits have no gradient of their own once"):
            put()
    with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad: lazy logits have no gradient"):
        torch.autograd.grad(loss, logits, allow_unused=True)
    loss.backward()


@pytest.mark.parametrize("use", USES)
def test_a_hook_that_is_put_first_is_called(use: str) -> None:
    found = []
    for lazy in (False, True):
        tensors = head()
        logits = lazy_logits(**tensors) if lazy else tensors["hidden"] @ tensors["weight"].t()
        logits.register_hook(lambda grad: 3.0 * grad)
        logits.retain_grad()
        USES[use](logits).backward()
        found.append([logits.grad, *(x.grad for x in tensors.values())])
    for got, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_hooks_behind_readers_without_gradients_are_called() -> None:
    tensors = head()
    logits = lazy_logits(**tensors)
    assert isinstance(logits, LazyLogits)
    with torch.no_grad():
        entropy(logits)
        logits.argmax(-1)
    seen: list[Tensor] = []
    logits.register_hook(seen.append)
    entropy(logits).backward()
    assert len(seen) == 1


@pytest.mark.parametrize("thawed", ["hidden", "weight"])
def test_what_was_frozen_in_the_call_gets_no_gradient(thawed: str) -> None:
    for consume in (entropy, lambda x: x.sigmoid().sum()):
        tensors = head()
        tensors[thawed].requires_grad_(False)
        logits = lazy_logits(**tensors)
        tensors[thawed].requires_grad_(True)
        consume(logits).backward()
        assert [x.grad is None for x in tensors.values()] == [name == thawed for name in tensors]
