"""Operations from hidden states: tied logits over blocks, NaN rows, steps of a tile, precision."""

from __future__ import annotations

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    linear_gather,
    linear_token_stats,
    linear_topk,
    vocab_parallel_token_stats,
    vocab_parallel_topk,
)
from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.ops.head import HeadLogits
from tests.helpers import oracles
from tests.helpers.heads import Problem, make_problem, shard_problem
from tests.helpers.shards import on_ranks, world_group, world_rank, world_size


def _ties(world_vocab: int) -> tuple:
    """Products of small integers, exact on every path and full of ties."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randint(-1, 2, (8, 4), generator=generator).float()
    whole = torch.randint(-1, 2, (world_vocab, 4), generator=generator).float()
    group = world_group()
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    weight = whole.tensor_split(world)[rank]
    found = linear_topk(hidden, weight, 300, tp_group=group)
    expected = vocab_parallel_topk(hidden @ weight.t(), 300, tp_group=group)
    return found, expected


@pytest.mark.parametrize("world", [1, 2])
def test_ties_stand_by_id_over_blocks_and_ranks(ranks, world):
    for found, expected in on_ranks(ranks, world, _ties, 9_000):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("bias", [False, True])
def test_topk_of_a_tile_in_several_steps(monkeypatch, bias):
    monkeypatch.setattr(HeadLogits, "rows_at_a_time", lambda *_: 2)
    problem = make_problem((7, 1), bias=bias)
    hidden, weight, own = shard_problem(problem, False)
    leaves = [x for x in (hidden, weight, own) if x is not None]
    temperature = torch.rand(7, 1) + 0.5
    values, ids = linear_topk(
        hidden, weight, 5, bias=own, temperature=temperature, tp_group=world_group()
    )
    z = (hidden @ weight.t() if own is None else hidden @ weight.t() + own) / temperature[..., None]
    expected, order = z.topk(5, dim=-1)
    assert torch.equal(ids, order)
    torch.testing.assert_close(values, expected)
    upstream = torch.randn(values.shape)
    for grad, plain in zip(
        torch.autograd.grad(values, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(grad, plain)


def _tied(problem: Problem) -> tuple[Tensor, Tensor]:
    """The weight is used twice, as a tied embedding is; both gradients must reach it."""
    hidden, weight, _ = shard_problem(problem, False)
    out = linear_token_stats(hidden, weight, problem.target, tp_group=world_group())
    other = (weight * 2.0).sum()
    (out.logprobs.sum() + other).backward()
    (alone,) = torch.autograd.grad(
        linear_token_stats(hidden, weight, problem.target, tp_group=world_group()).logprobs.sum(),
        weight,
    )
    assert weight.grad is not None
    return weight.grad, alone + 2.0


def test_a_weight_used_twice(ranks):
    for found, expected in on_ranks(ranks, 2, _tied, make_problem()):
        torch.testing.assert_close(found, expected)


def test_a_bf16_head_s_rounding_is_avoided_and_can_be_asked_for():
    problem = make_problem((256,), width=64, vocab=512, dtype=torch.bfloat16, names=("logprobs",))
    raw = problem.hidden.double() @ problem.weight.double().t()
    exact = oracles.token_stats(raw, problem.target).logprobs
    wide = linear_token_stats(problem.hidden, problem.weight, problem.target).logprobs
    narrow = linear_token_stats(
        problem.hidden, problem.weight, problem.target, logits_dtype=torch.bfloat16
    ).logprobs
    head = vocab_parallel_token_stats(problem.hidden @ problem.weight.t(), problem.target).logprobs
    assert (wide - exact).abs().max() < 2e-5
    assert (head - exact).abs().max() > 1e-2
    # The same rounding as the head's, up to the products' own last bits, which rounding may flip.
    assert (narrow - head).abs().mean() < 0.1 * (head - exact).abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradient_is_no_worse_in_256_chunks(dtype):
    problem = make_problem((256,), width=16, vocab=64, dtype=dtype, names=("logprobs",))
    upstream = problem.upstream["logprobs"]
    leaf = problem.weight.double().requires_grad_()
    stats = oracles.token_stats(problem.hidden.double() @ leaf.t(), problem.target)
    (exact,) = torch.autograd.grad(stats.logprobs, leaf, upstream.double())

    def error(chunk_size: int | None) -> float:
        hidden, weight, _ = shard_problem(problem, False)
        out = linear_token_stats(hidden, weight, problem.target, chunk_size=chunk_size)
        (grad,) = torch.autograd.grad(out.logprobs, weight, upstream)
        return ((grad.double() - exact).norm() / exact.norm()).item()

    one, many = error(None), error(1)
    # float32 sums differ in their last bits; bf16 is rounded once in either case.
    assert many <= (2.0 * one if dtype == torch.float32 else 1.001 * one)
    assert one < (1e-6 if dtype == torch.float32 else 3e-3)


# ---- a LoRA --------------------------------------------------------------------------------------


def test_an_entry_that_nobody_asks_for_adds_nothing():
    """Rows that hold NaN, and ids that no gradient comes to, in the gradients of A and B."""
    problem = make_problem((6,), lora=True)
    hidden, (a, b, scale) = problem.hidden, problem.lora
    ids = torch.tensor([[0, 3], [1, 1], [2, 3], [3, 9], [4, 5], [5, 0]])
    upstream = torch.randn(6, 2)
    upstream[2] = 0.0
    found = []
    for spoilt in (True, False):
        x = hidden.clone()
        if spoilt:
            x[2] = torch.nan
        leaves = [t.clone().requires_grad_() for t in (x, a, b)]
        z = linear_gather(leaves[0], problem.weight, ids, lora=(*leaves[1:], scale), softcap=5.0)
        found.append(torch.autograd.grad(z, leaves, upstream))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert other.any()


def test_a_spoilt_row_that_is_asked_for_shows_before_the_lora_has_learnt():
    """With B = 0, as a LoRA starts, too."""
    problem = make_problem((6,), lora=True)
    hidden, (a, b, scale) = problem.hidden.clone(), problem.lora
    hidden[2] = torch.nan
    leaves = [a.clone().requires_grad_(), torch.zeros_like(b).requires_grad_()]
    z = linear_gather(hidden, problem.weight, torch.zeros(6, 2).long(), lora=(*leaves, scale))
    for grad in torch.autograd.grad(z.sum(), leaves):
        assert grad.isnan().any()


def _sent(problem: Problem, learning_a: bool) -> list[tuple[str, int]]:
    """What a call with a LoRA on a frozen head and its backward send more than one without."""
    (a, b, scale), made = problem.lora, []
    weight, b = (x.chunk(world_size())[world_rank()].clone() for x in (problem.weight, b))
    for lora in (None, (a.clone().requires_grad_(learning_a), b.requires_grad_(), scale)):
        hidden = problem.hidden.clone().requires_grad_()
        with CollectivesMade() as calls:
            stats = linear_token_stats(
                hidden, weight, problem.target, lora=lora, tp_group=world_group()
            )
            stats.logprobs.sum().backward()
        made.append([(call.name, call.nbytes) for call in calls.made])
    without, with_lora = made
    assert with_lora[: len(without)] == without
    return with_lora[len(without) :]


def test_one_small_all_reduce_for_the_gradient_of_a(ranks):
    problem = make_problem(lora=True)
    for more in ranks(2).run(_sent, problem, True):
        assert more == [("all_reduce", 4 * problem.lora[0].numel())]
    for more in ranks(2).run(_sent, problem, False):
        assert more == []
