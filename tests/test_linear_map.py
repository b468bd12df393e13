"""linear_map: any function of a tile's logits, its gradient, and what is refused."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    linear_map,
    vocab_parallel_entropy,
    vocab_parallel_logprobs,
    vocab_parallel_topk,
)
from mcore_logprobs.ops.linear_map import map_logits
from mcore_logprobs.sources.given import given_logits
from tests.helpers.heads import make_problem, shard_problem
from tests.helpers.shards import on_ranks, world_group, world_rank, world_size


class Found(NamedTuple):
    spread: Tensor  # [rows]
    pair: tuple[Tensor, None]  # [rows, 2], differentiable
    ids: Tensor  # [rows, 2] int64
    constant: Tensor  # [rows], cut off from the logits


def _several(z: Tensor, scale: Tensor) -> Found:
    values, ids = vocab_parallel_topk(z, 2)
    return Found(z.var(-1) * scale[:, 0], (values, None), ids, z.detach().amax(-1))


def test_against_plain_torch_in_float64():
    """Results of several shapes in a named tuple; a per-token tensor with a dimension of its own.

    10 rows in tiles of 4 leave a ragged tile; 9 columns, a width of 3.
    """
    hidden = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(5, 2, 1, dtype=torch.float64)
    out = linear_map(hidden, weight, _several, scale, softcap=2.0, chunk_size=4)
    assert isinstance(out, Found)

    z = 2.0 * torch.tanh(hidden @ weight.t() / 2.0)
    values, ids = z.topk(2, -1)
    spread = z.var(-1) * scale[..., 0]
    torch.testing.assert_close(out.spread, spread, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.pair[0], values, rtol=1e-12, atol=1e-12)
    assert out.pair[1] is None
    assert torch.equal(out.ids, ids)
    torch.testing.assert_close(out.constant, values[..., 0].detach(), rtol=1e-12, atol=1e-12)
    assert [x.requires_grad for x in (out.spread, out.pair[0], out.ids, out.constant)] == [
        True,
        True,
        False,
        False,
    ]
    upstream = [torch.randn_like(spread), torch.randn_like(values)]
    found = torch.autograd.grad([out.spread, out.pair[0]], [hidden, weight], upstream)
    expected = torch.autograd.grad([spread, values], [hidden, weight], upstream)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def _prompts_first(chunk_size: int) -> list[tuple[Tensor, Tensor]]:
    """(found, expected) of a function that has nothing to compute where no row is an answer."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, group = normal(12, 3), normal(10, 3), world_group()
    # A tile of a sequence in parallel has rows of each rank's part: those first have none either.
    answers = torch.tensor([0.0] * 5 + [0.5] + [0.0] * 4 + [2.0, 1.0], dtype=torch.float64)
    target, upstream = torch.randint(0, 10, (12,), generator=generator), normal(2, 12)
    own = [x.chunk(world_size())[world_rank()].clone().requires_grad_() for x in (hidden, weight)]

    def fn(z: Tensor, target: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        entropy = vocab_parallel_entropy(z, tp_group=group)
        if not answers.any():
            return z.new_zeros(z.shape[0]), entropy
        return vocab_parallel_logprobs(z, target, tp_group=group) * answers, entropy

    split = {"tp_group": group, "sequence_parallel": group is not None}
    found = linear_map(*own, fn, target, answers, chunk_size=chunk_size, **split)
    whole = [x.requires_grad_() for x in (hidden, weight)]
    logits = (hidden @ weight.t()).log_softmax(-1)
    logprobs = logits.gather(1, target.unsqueeze(1)).squeeze(1)
    expected = logprobs * answers, -(logits.exp() * logits).sum(-1)
    grads = torch.autograd.grad(found, own, list(upstream))
    wanted = torch.autograd.grad(expected, whole, list(upstream))
    shares = [x.chunk(world_size())[world_rank()] for x in wanted]
    return [*zip(found, expected, strict=True), *zip(grads, shares, strict=True)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("chunk_size", [1, 4, 5, 12])
def test_a_tile_whose_result_does_not_depend_on_the_logits(ranks, world, chunk_size):
    """As of prompts alone; the gradient of other tiles stays."""
    for pairs in on_ranks(ranks, world, _prompts_first, chunk_size):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected)


def test_a_weight_of_a_subclass():
    class Own(Tensor):
        pass

    hidden, weight = torch.randn(6, 3, requires_grad=True), torch.randn(9, 3)
    of_class = weight.as_subclass(Own).requires_grad_()
    out = linear_map(hidden, of_class, lambda z: z.logsumexp(-1), chunk_size=4)
    grads = torch.autograd.grad(out.sum(), [hidden, of_class])
    plain = (hidden @ weight.requires_grad_().t()).logsumexp(-1)
    expected = torch.autograd.grad(plain.sum(), [hidden, weight])
    for found, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(found.as_subclass(Tensor), want)


# ---- what is refused ----------------------------------------------------------------------------


class _Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.ones(()))

    def forward(self, z: Tensor) -> Tensor:
        return (z * self.temperature).logsumexp(-1)


def _times(z: Tensor, factor: Tensor) -> Tensor:
    return z.logsumexp(-1) * factor


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen head"])
def test_learnt_tensors_are_refused_by_name(frozen):
    hidden, weight, _ = shard_problem(make_problem((6,)), False)
    if frozen:
        hidden, weight = hidden.detach(), weight.detach()
    learnt = torch.ones((), requires_grad=True)
    fns = {
        "'learnt'": lambda z: z.logsumexp(-1) * learnt.exp(),
        "'factor'": functools.partial(_times, factor=learnt),
        "'_Scaled.temperature'": _Scaled(),
        "'learnt' (shape ())": lambda z: learnt.expand(z.shape[0]),
    }
    for name, fn in fns.items():
        with pytest.raises(ValueError, match="requires a gradient") as error:
            linear_map(hidden, weight, fn)
        assert name in str(error.value)
        with torch.no_grad():
            linear_map(hidden, weight, fn)
    with pytest.raises(ValueError, match=r"per_token_tensors\[0\]: requires a gradient"):
        linear_map(hidden, weight, _times, torch.ones(6, requires_grad=True))


@pytest.mark.own_sizes
@pytest.mark.parametrize(
    ("fn", "tensors", "options", "message"),
    [
        ("sum", (), {}, "fn: expected a callable, got str"),
        (lambda z: z.sum(), (), {}, r"fn: expected .*\[6, ...\], got \(\) as result 0"),
        (lambda z: (z.sum(-1), 1.0), (), {}, "got float as result 1"),
        (lambda z: z.sum(0), (), {}, r"got \(24,\)"),
        (_times, (torch.ones(5),), {}, r"per_token_tensors\[0\].*\(6,\).*\(5,\)"),
    ],
    ids=range(5),
)
def test_mistakes(fn, tensors, options, message):
    hidden, weight, _ = shard_problem(make_problem((6,)), False)
    with pytest.raises(ValueError, match=message):
        linear_map(hidden, weight, fn, *tensors, **options)


def test_a_learnt_tensor_that_a_later_tile_uses_is_refused():
    hidden, weight, _ = shard_problem(make_problem((6,)), False)
    learnt, counts = torch.ones((), requires_grad=True), torch.tensor([0.0] * 5 + [1.0])

    def fn(z: Tensor, counts: Tensor) -> Tensor:
        return (z * learnt).logsumexp(-1) if counts.any() else z.logsumexp(-1)

    with pytest.raises(ValueError, match=r"'learnt'.* requires a gradient"):
        linear_map(hidden, weight, fn, counts, chunk_size=2)


def test_a_function_that_writes_to_the_caller_s_tensors_is_refused():
    hidden, weight, _ = shard_problem(make_problem((6,)), False)
    factor = torch.rand(6)
    logits = hidden @ weight.t()
    for call in (
        lambda fn: linear_map(hidden, weight, fn, factor, chunk_size=4),
        lambda fn: map_logits(given_logits(logits), fn, factor),
    ):
        with pytest.raises(ValueError, match=r"fn: wrote to per_token_tensors\[0\]"):
            call(lambda z, factor: z.logsumexp(-1) * factor.mul_(2.0))
        out = call(lambda z, factor: z.logsumexp(-1) * factor.clone().mul_(2.0))
        torch.testing.assert_close(out, logits.logsumexp(-1) * factor * 2.0)


def test_a_changing_structure_is_refused():
    hidden, weight, _ = shard_problem(make_problem((6,)), False)
    calls = []

    def fn(z: Tensor) -> Any:
        calls.append(z)
        return z.sum(-1) if len(calls) < 2 else (z.sum(-1), z.sum(-1))

    with pytest.raises(ValueError, match="structure and dtypes that its first call gave"):
        linear_map(hidden, weight, fn, chunk_size=3)


def test_a_map_that_has_nothing_to_do_in_its_last_tile_learns() -> None:
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0])

    def fn(z: Tensor, mask: Tensor) -> Tensor:
        return z.sum(-1) * mask if mask.any() else z.new_zeros(len(mask))

    result = linear_map(hidden, weight, fn, mask, chunk_size=2)
    (grad,) = torch.autograd.grad(result.sum(), hidden)
    torch.testing.assert_close(grad, mask.unsqueeze(1) * weight.sum(0))
