"""What linear_policy_loss costs: products, collectives, memory; main_grad."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mcore_logprobs import linear_policy_loss
from mcore_logprobs.bench.counting import CollectivesMade
from tests.helpers.heads import Problem, make_problem, plain_loss, shard_problem
from tests.helpers.memory import TensorsMade
from tests.helpers.shards import on_ranks, world_group, world_size


def _products(problem: Problem, frozen: str | None, compact: bool) -> tuple[float, float]:
    hidden, weight, _ = shard_problem(problem, False)
    if frozen is not None:
        {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    one = 2 * problem.target.numel() * weight.numel()
    with FlopCounterMode(display=False) as forward:
        loss, _ = linear_policy_loss(
            hidden, weight, problem.target, plain_loss, chunk_size=5, compact=compact
        )
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")
    return forward.get_total_flops() / one, backward.get_total_flops() / one


@pytest.mark.parametrize(
    ("frozen", "products"), [(None, 3.0), ("weight", 2.0), ("hidden", 2.0)], ids=str
)
def test_three_products_and_one_less_for_a_frozen_input(frozen, products):
    assert _products(make_problem((12,)), frozen, False) == (products, 0.0)


def test_compaction_is_paid_by_kept_rows_only():
    problem = make_problem((40,), ignored=0.7)
    share = (problem.target != -100).float().mean().item()
    forward, backward = _products(problem, None, True)
    assert forward == pytest.approx(3 * share)
    assert backward == 0.0


def test_without_gradients_there_is_one_product_and_nothing_kept():
    problem = make_problem((12,))
    hidden, weight, _ = shard_problem(problem, False)
    with torch.no_grad(), TensorsMade() as made, FlopCounterMode(display=False) as flops:
        loss, stats = linear_policy_loss(hidden, weight, problem.target, plain_loss)
    assert flops.get_total_flops() == 2 * 12 * weight.numel()
    assert not loss.requires_grad
    torch.testing.assert_close(loss, -stats.logprobs.sum())
    del loss, stats
    assert made.live == 0


def _traffic(problem: Problem, chunk_size: int, sequence_parallel: bool) -> tuple:
    hidden, weight, _ = shard_problem(problem, sequence_parallel)
    with CollectivesMade() as forward:
        loss, _ = linear_policy_loss(
            hidden,
            weight,
            problem.target,
            plain_loss,
            tp_group=world_group(),
            sequence_parallel=sequence_parallel,
            chunk_size=chunk_size,
        )
    with CollectivesMade() as backward:
        loss.backward()
    return forward.made, backward.made


@pytest.mark.parametrize("chunk_size", [4, 12])
def test_one_gather_of_statistics_a_chunk(ranks, chunk_size):
    problem = make_problem((12,))
    chunks = 12 // chunk_size
    for forward, backward in ranks(2).run(_traffic, problem, chunk_size, False):
        names = [made.name for made in forward]
        assert names.count("all_gather") == chunks
        assert names.count("all_reduce") == chunks  # dHidden, chunk by chunk
        assert sum(m.nbytes for m in forward if m.name == "all_gather") == 12 * 3 * 4
        assert sum(m.nbytes for m in forward if m.name == "all_reduce") == 12 * 8 * 4
        assert backward == []
    for forward, backward in ranks(2).run(_traffic, problem, chunk_size, True):
        names = [made.name for made in forward]
        assert names.count("all_gather") == 2 * chunks  # of hidden, and of statistics
        assert names.count("reduce_scatter") == chunks
        assert sum(m.nbytes for m in forward if m.name == "reduce_scatter") == 12 * 8 * 4
        assert backward == []


def test_one_rank_says_nothing():
    forward, backward = _traffic(make_problem((12,)), 5, False)
    assert forward == backward == []


def _allocations(dtype: torch.dtype, chunk_size: int) -> tuple:
    rows, vocab, width = 512, 8192, 32
    hidden = torch.randn(rows, width).to(dtype).requires_grad_()
    weight = torch.randn(vocab // world_size(), width).to(dtype).requires_grad_()
    target = torch.arange(rows)
    with TensorsMade() as forward:
        loss, _ = linear_policy_loss(
            hidden, weight, target, plain_loss, tp_group=world_group(), chunk_size=chunk_size
        )
    kept = forward.live
    with TensorsMade() as backward:
        loss.backward()
    wide = 4 * (hidden.numel() + weight.numel())
    return forward.made, forward.peak, kept, backward.made, backward.peak, wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_nothing_larger_than_two_chunks_is_made(ranks, world, dtype):
    rows, vocab, width, chunk_size = 512, 8192, 32, 32
    chunk = chunk_size * (vocab // world) * 4
    shapes = {(vocab // world, width), (rows, width)}
    for made, peak, kept, backward, peak_backward, wide in on_ranks(
        ranks, world, _allocations, dtype, chunk_size
    ):
        for one in (*made, *backward):
            assert one.nbytes <= 2 * chunk or one.shape in shapes, one
        per_row = rows * 8 * 40
        assert peak <= 4 * chunk + wide + per_row
        assert kept <= wide + per_row
        assert peak_backward <= wide + per_row


# ---- main_grad, autograd ------------------------------------------------------------------------


def test_forward_alone_leaves_main_grad_alone():
    problem = make_problem((12,))
    weight = torch.nn.Parameter(problem.weight)
    weight.main_grad = torch.zeros_like(weight)
    weight.grad_added_to_main_grad = False
    linear_policy_loss(
        problem.hidden.requires_grad_(),
        weight,
        problem.target,
        plain_loss,
        gradient_accumulation_fusion=True,
    )
    assert not weight.main_grad.any()
    assert weight.grad_added_to_main_grad is False


def test_a_second_backward_is_refused_and_not_silently_wrong():
    problem = make_problem((12,))
    hidden, weight, _ = shard_problem(problem, False)
    loss, _ = linear_policy_loss(hidden, weight, problem.target, plain_loss)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        loss.backward()
