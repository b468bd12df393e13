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
    "real ones": lambda x: x.softmax(-1).square().sum(),
    "a view's real ones": lambda x: x[:, 1:].topk(2).values.sum(),
    "both": lambda x: entropy(x) + x.sigmoid().sum(),
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
    with pytest.warns(UserWarning, match=r"The \.grad attribute of a Tensor that is not a leaf"):
        assert logits.grad is None  # as torch says it of real ones


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


def written_under_no_grad(logits: Tensor) -> None:
    with torch.no_grad():
        logits.div_(2.0)


BEHIND_A_HOOK: dict[str, Callable[[Tensor], Any]] = {
    "scaled": lambda x: x.div_(2.0),
    "written": lambda x: x.__setitem__((0, 0), 0.0),
    "a view": lambda x: x[1:].add_(1.0),
    "columns": lambda x: x[..., 3:].fill_(-1.0),
    "no_grad": written_under_no_grad,
    "data": lambda x: x.data.div_(2.0),
}


@pytest.mark.parametrize("write", BEHIND_A_HOOK)
@pytest.mark.parametrize("before", [lambda x: x, lambda x: x / 0.7, lambda x: x.flip(0)])
def test_a_write_behind_a_hook_is_refused(write: str, before: Callable[[Tensor], Tensor]) -> None:
    """torch takes a view that was written to off the node that its hook is on."""
    logits = before(lazy_logits(**head()))
    logits.register_hook(lambda grad: 3.0 * grad)
    with pytest.raises(RuntimeError, match="expected hooks after the last write"):  # noqa: PT012
        BEHIND_A_HOOK[write](logits)
        entropy(logits)


def test_a_hook_that_was_removed_forbids_no_write() -> None:
    logits = lazy_logits(**head())
    kept, removed = logits.register_hook(lambda grad: grad), logits[1:]
    removed.register_hook(lambda grad: grad).remove()
    kept.remove()
    logits.div_(2.0)
    entropy(logits).backward()


def test_a_hook_on_a_leaf_outlives_a_write() -> None:
    with torch.no_grad():
        logits = lazy_logits(**head())
    logits.requires_grad_()
    seen: list[Tensor] = []
    logits.register_hook(seen.append)
    with torch.no_grad():
        logits.div_(2.0)
    entropy(logits).backward()
    assert len(seen) == 1


def test_a_gradient_that_is_kept_outlives_a_write() -> None:
    found = []
    for lazy in (False, True):
        tensors = head()
        logits = lazy_logits(**tensors) if lazy else tensors["hidden"] @ tensors["weight"].t()
        logits.retain_grad()
        logits.div_(2.0)
        entropy(logits).backward()
        found.append(logits.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


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


# ---- writes that handles do not see, and functions that are given what was written to ------------

COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[..., V - 3 :],
    "one column": lambda x: x[..., 2],
    "narrow": lambda x: x.narrow(-1, 1, 4),
    "some rows": lambda x: x[1:, ..., 2:3],
}


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_write_into_a_view_of_columns_is_seen(columns: str, mode: Any) -> None:
    tensors, found = head(), []
    with mode():
        for logits in (lazy_logits(**tensors), tensors["hidden"] @ tensors["weight"].t()):
            before = logits.transpose(0, 1)
            logits.softmax(-1)
            COLUMNS[columns](logits).fill_(-2.0)
            values = [entropy(logits), entropy(before[1:]), logits.argmax(-1).float()]
            if values[0].requires_grad:
                values += torch.autograd.grad(values[0] + values[1], list(tensors.values()))
            found.append(values)
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_write_that_other_views_cannot_see_is_refused() -> None:
    """Into real logits of some rows; and into those that a checkpoint computes again."""
    logits = lazy_logits(**head())
    logits[1:][..., 3:].fill_(-2.0)
    for use in (entropy, lambda x: entropy(x[1:]), lambda x: x / 0.7):
        with pytest.raises(
            RuntimeError, match="got a write into real logits of some of their rows"
        ):
            use(logits)

    def fill(x: Tensor) -> Tensor:
        x[..., 3:].fill_(-2.0)
        return entropy(x)

    with pytest.raises(RuntimeError, match="got a write into real logits of some of their rows"):
        checkpoint(fill, lazy_logits(**head()), use_reentrant=False)


def test_real_logits_that_are_gone_are_not_watched() -> None:
    logits = lazy_logits(**head())
    assert isinstance(logits, LazyLogits)
    for _ in range(20):
        logits[1:].softmax(-1)
        logits[1:]
    assert len(logits.view_of_head.rows._given_out) < 3


class Squares(torch.autograd.Function):
    """A trainer's own, which keeps what it needs of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        values = logits.double().float()
        ctx.save_for_backward(values)
        return values.square().sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2.0 * ctx.saved_tensors[0] * grads[0].unsqueeze(-1)


class GivenOn(torch.autograd.Function):
    """A trainer's own, which doubles the gradient alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2.0 * grads[0]


WRITES: dict[str, Callable[[Tensor], object]] = {
    "masked": lambda x: x.masked_fill_(torch.arange(S).view(S, 1, 1) == 1, -2.0),
    "twice": lambda x: (x[2].clamp_(max=0.1), x.mul_(-0.5)),
    "item": lambda x: x.__setitem__((..., 3), -1.0),
    "into columns": lambda x: (x[..., 3:].fill_(-2.0), x.shape, x[0]),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("function", ["values", "gradient", "checkpoint"])
def test_a_function_of_logits_that_were_written_to(write: str, function: str) -> None:
    functions: dict[str, Callable[[Any], Tensor]] = {
        "values": lambda x: Squares.apply(x).sum(),
        "gradient": lambda x: entropy(GivenOn.apply(x)),
        "checkpoint": lambda x: checkpoint(entropy, x, use_reentrant=True),
    }
    found = []
    for lazy in (True, False):
        tensors = head()
        logits = lazy_logits(**tensors) if lazy else tensors["hidden"] @ tensors["weight"].t()
        WRITES[write](logits)
        loss = functions[function](logits)
        (loss + entropy(logits)).backward()
        found.append([loss, *(x.grad for x in tensors.values())])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_function_that_may_not_have_seen_a_write_is_refused() -> None:
    logits = lazy_logits(**head())
    logits[..., 3:].fill_(-2.0)
    with pytest.raises(RuntimeError, match="an autograd function that was given"):
        Squares.apply(logits).sum().backward()


def test_a_function_of_a_scale_without_gradient_is_refused() -> None:
    """Whose gradient would have the scale, where torch's has not."""
    logits = lazy_logits(**head())
    logits.detach().div_(2.0)
    with pytest.raises(RuntimeError, match="behind a detach"):
        Squares.apply(logits).sum().backward()


def test_a_function_within_a_reentrant_checkpoint() -> None:
    found = []
    for lazy in (True, False):
        tensors = head()
        logits = lazy_logits(**tensors) if lazy else tensors["hidden"] @ tensors["weight"].t()
        checkpoint(Squares.apply, logits, use_reentrant=True).sum().backward()
        found.append([x.grad for x in tensors.values()])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_within_a_reentrant_checkpoint() -> None:
    """Setting `requires_grad` to what it is makes nothing real."""
    logits = lazy_logits(**{name: x.detach() for name, x in head().items()}, require=True)
    scale = torch.ones((), requires_grad=True)
    checkpoint(lambda x, s: entropy(x) * s, logits, scale, use_reentrant=True).backward()
    logits.requires_grad = False
    assert scale.grad is not None
