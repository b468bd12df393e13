"""Collectives: what they give, what their backwards send, and that one process sends nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import collectives
from mcore_logprobs.bench.counting import Collective, CollectivesMade
from tests.helpers.shards import WORLDS


def _mine(*shape: int, strided: bool = False) -> Tensor:
    """A tensor whose values name their rank."""
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    x = x + 100 * dist.get_rank()
    return x.t().contiguous().t() if strided else x


def _values(strided: bool) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    x = _mine(2 * world, 3, strided=strided)
    kept = x.clone()
    everyone = [kept - 100 * rank + 100 * other for other in range(world)]
    total = sum(everyone[1:], everyone[0])

    assert torch.equal(collectives.all_gather_dim0(x, group), torch.cat(everyone))
    assert torch.equal(collectives.all_gather_stack(x, group), torch.stack(everyone))
    assert torch.equal(collectives.all_reduce_sum(x, group), total)
    assert torch.equal(collectives.reduce_scatter_dim0(x, group), total[2 * rank : 2 * rank + 2])
    blocks = [other[2 * rank : 2 * rank + 2] for other in everyone]
    assert torch.equal(collectives.all_to_all_dim0(x, group), torch.cat(blocks))
    assert torch.equal(x, kept), "an input was modified"

    one = torch.tensor([1.0 + rank])
    assert collectives.all_reduce_sum(one, group).item() == world * (world + 1) / 2
    collectives.wait_for(collectives.all_reduce_sum_async(one, group), group)
    assert one.item() == world * (world + 1) / 2

    own = x.clone(memory_format=torch.contiguous_format)
    work = collectives.all_reduce_sum_async(own, group)
    if world > 1:
        work.wait()
    else:
        assert work is None
    assert torch.equal(own, total)
    for start in (collectives.all_gather_dim0_async, collectives.reduce_scatter_dim0_async):
        scattered, work = start(kept.contiguous(), group)
        assert (work is not None) == (world > 1), "nothing goes on while the caller works"
        collectives.wait_for(work, group)
    assert torch.equal(scattered, total[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_values(ranks, world, strided):
    ranks(world).run(_values, strided)


def _gradients() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    x = _mine(2 * world, 3).requires_grad_()

    out = collectives.all_to_all_dim0(x, group)
    upstream = _mine(2 * world, 3) + 0.5
    kept = upstream.clone()
    (grad,) = torch.autograd.grad(out, x, upstream)
    # Block i of x went to rank i, where it is block `rank`: its gradient comes from there.
    rows = torch.arange(2 * rank, 2 * rank + 2)
    plain = (upstream - 100 * rank)[rows]
    assert torch.equal(grad, torch.cat([plain + 100 * other for other in range(world)]))

    assert torch.equal(upstream, kept), "the upstream gradient was modified"


@pytest.mark.parametrize("world", WORLDS)
def test_gradients(ranks, world):
    ranks(world).run(_gradients)


def _double_backward() -> None:
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    out = collectives.all_to_all_dim0(x, dist.group.WORLD)
    (grad,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, 6 * x)


def test_all_to_all_can_be_differentiated_twice(ranks):
    ranks(2).run(_double_backward)


def _traffic() -> list[Collective]:
    group = dist.group.WORLD
    x = _mine(4, 3).requires_grad_()
    with CollectivesMade() as made, torch.no_grad():
        collectives.all_gather_dim0(x, group)
        collectives.all_gather_stack(x, group)
        collectives.all_reduce_sum(x, group)
        collectives.reduce_scatter_dim0(x, group)
    with made:
        collectives.all_to_all_dim0(x, group).sum().backward()
    return made.made


def test_each_is_one_operation(ranks):
    names = ("all_gather", "all_gather", "all_reduce", "reduce_scatter", "all_to_all")
    expected = [Collective(name, 48) for name in (*names, "all_to_all")]
    assert ranks(2).run(_traffic) == [expected] * 2
    assert ranks(1).run(_traffic) == [[]]


def test_no_group_is_the_identity():
    x = torch.randn(4, 3, requires_grad=True)
    assert not dist.is_initialized()
    for collective in ("all_gather_dim0", "all_reduce_sum", "reduce_scatter_dim0"):
        assert getattr(collectives, collective)(x, None) is x
    assert torch.equal(collectives.all_gather_stack(x, None), x[None])
    assert collectives.all_reduce_sum_async(x.detach(), None) is None
    out = collectives.all_to_all_dim0(x, None)
    upstream = torch.randn(4, 3)
    assert torch.equal(torch.autograd.grad(out, x, upstream)[0], upstream)


def _odd() -> list[str]:
    messages = []
    for collective in (collectives.reduce_scatter_dim0, collectives.all_to_all_dim0):
        with CollectivesMade() as made, pytest.raises(ValueError) as caught:
            collective(torch.zeros(3, 2), dist.group.WORLD)
        assert made.made == []
        messages.append(str(caught.value))
    return messages


def test_what_does_not_divide_is_refused(ranks):
    for messages in ranks(2).run(_odd):
        for message in messages:
            assert "expected dim 0 divisible by 2, got 3" in message


def _nothing() -> list[tuple[int, ...]]:
    group, world = dist.group.WORLD, dist.get_world_size()
    x = torch.zeros(0, 3)
    return [
        tuple(collectives.all_gather_dim0(x, group).shape),
        tuple(collectives.all_gather_stack(torch.zeros(2, 0), group).shape),
        tuple(collectives.all_reduce_sum(x, group).shape),
        tuple(collectives.reduce_scatter_dim0(x, group).shape),
        (world,),
    ]


def test_nothing_to_send(ranks):
    assert ranks(2).run(_nothing) == [[(0, 3), (2, 2, 0), (0, 3), (0, 3), (2,)]] * 2


# ---- the recorder itself ------------------------------------------------------------------------


def _five() -> None:
    group = dist.group.WORLD
    x, y = torch.randn(4, 8), torch.empty(8, 8)
    dist.all_gather_into_tensor(y, x, group=group)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    dist.all_gather([torch.empty(4, 8) for _ in range(2)], x, group=group)
    dist.barrier(group=group)


def _profiled() -> tuple[list[str], int]:
    with CollectivesMade() as made:
        _five()
    with torch.profiler.profile() as profile:
        _five()
    events = [event for event in profile.key_averages() if event.key.startswith("c10d::")]
    return made.names, sum(event.count for event in events)


def test_the_recorder_sees_what_the_profiler_sees(ranks):
    for names, seen in ranks(2).run(_profiled):
        assert names == ["all_gather", "all_reduce", "all_reduce", "all_gather", "barrier"]
        assert seen == len(names)


def _ordered_parts(rank: int, rows: int, count: int) -> list[Tensor]:
    """Parts of a rank, of sizes at which another order of addition gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    scale = 10.0 ** torch.arange(count)
    return list(torch.randn(count, rows, 2, generator=generator) * scale[:, None, None])


def _ordered_sum(rows: int, count: int) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    everyone = [part for r in range(world) for part in _ordered_parts(r, rows, count)]
    total = everyone[0].clone()
    for part in everyone[1:]:
        total += part
    mine = _ordered_parts(rank, rows, count)
    assert torch.equal(collectives.ordered_sum_dim0(mine, group, scatter=False), total)
    mine = _ordered_parts(rank, rows, count)
    if rows % world:
        message = f"ordered sum: expected dim 0 divisible by {world}, got {rows}"
        with pytest.raises(ValueError, match=message):
            collectives.ordered_sum_dim0(mine, group, scatter=True)
    else:
        own = rows // world
        scattered = collectives.ordered_sum_dim0(mine, group, scatter=True)
        assert torch.equal(scattered, total[rank * own : (rank + 1) * own])


@pytest.mark.parametrize(("rows", "count"), [(6, 3), (7, 2), (1, 2), (0, 2), (6, 1)])
@pytest.mark.parametrize("world", WORLDS)
def test_an_ordered_sum_is_taken_in_the_order_of_ranks_and_parts(ranks, world, rows, count):
    ranks(world).run(_ordered_sum, rows, count)
