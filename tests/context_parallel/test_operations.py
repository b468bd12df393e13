"""shard, gather, positions and shift on real ranks, against plain loops and Megatron itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

from mcore_logprobs.context_parallel import (
    context_parallel_gather,
    context_parallel_positions,
    context_parallel_shard,
    context_parallel_shift,
)
from tests.context_parallel import oracle
from tests.helpers.distributed import grid_groups

LENGTH = 48
PACKED = [0, 16, 16, 24, 48]  # with an empty sequence; all divisible by 2 * 4
LAYOUTS = ("zigzag", "contiguous")
CASES = list(itertools.product(LAYOUTS, (None, PACKED)))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8)


def test_against_plain_torch_in_float64() -> None:
    """The four operations on one process, line by line."""
    # Two packed sequences of 4 and 3 tokens in 2 rows: unlike each other and unlike the rows.
    x = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 4, 7], dtype=torch.int32)
    # One rank has the whole of every sequence.
    assert torch.equal(context_parallel_shard(x, cu_seqlens=cu_seqlens), x)
    assert torch.equal(context_parallel_gather(x, cu_seqlens=cu_seqlens), x)
    assert context_parallel_positions(7, cu_seqlens=cu_seqlens).tolist() == list(range(7))
    # Each token gets the next one's value, and the last of a sequence the fill.
    shifted = context_parallel_shift(x.detach(), cu_seqlens=cu_seqlens, fill=-1)
    expected = x.detach().roll(-1, 1)
    expected[:, [3, 6]] = -1.0
    assert torch.equal(shifted, expected)


def _cu(cu: list[int] | None) -> torch.Tensor | None:
    return None if cu is None else torch.tensor(cu, dtype=torch.int32)


def _shape(dims: int, seq_dim: int, length: int) -> list[int]:
    shape = [2, 3, 5][:dims]
    shape[seq_dim] = length
    return shape


def _whole(dims: int, seq_dim: int) -> torch.Tensor:
    """The same on every rank: each job starts from one seed."""
    return torch.randn(_shape(dims, seq_dim, LENGTH))


def _mine(layout: str, cu: list[int] | None) -> list[int]:
    size, rank = dist.get_world_size(), dist.get_rank()
    return oracle.local_indices(layout, size, rank, oracle.bounds(LENGTH, cu))


def _same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def _shard_and_gather(layout: str, cu: list[int] | None) -> None:
    options: dict[str, Any] = {"cp_group": grid_groups(cp=dist.get_world_size()).cp}
    options.update(layout=layout, cu_seqlens=_cu(cu))
    mine = _mine(layout, cu)
    positions = context_parallel_positions(LENGTH, **options)
    assert positions.tolist() == mine
    for dims in (1, 2, 3):
        for seq_dim in range(-dims, dims):
            whole = _whole(dims, seq_dim)
            kept = whole.clone()
            local = context_parallel_shard(whole, seq_dim=seq_dim, **options)
            _same(local, whole.index_select(seq_dim, torch.tensor(mine)))
            _same(context_parallel_gather(local, seq_dim=seq_dim, **options), whole)
            assert torch.equal(whole, kept)


def _other_dtypes() -> None:
    group = grid_groups(cp=dist.get_world_size()).cp
    for dtype in DTYPES:
        whole = torch.randint(0, 100, (2, LENGTH)).to(dtype)
        local = context_parallel_shard(whole, cp_group=group)
        _same(context_parallel_gather(local, cp_group=group), whole)
        fill = 1 if dtype is torch.bool else 7
        shifted = context_parallel_shift(local, cp_group=group, fill=fill)
        expected = oracle.shift(whole, [0, LENGTH], 1, fill)
        _same(shifted, context_parallel_shard(expected, cp_group=group))


def _shift(layout: str, cu: list[int] | None) -> None:
    options: dict[str, Any] = {"cp_group": grid_groups(cp=dist.get_world_size()).cp}
    options.update(layout=layout, cu_seqlens=_cu(cu))
    mine = torch.tensor(_mine(layout, cu))
    for dims in (1, 2, 3):
        for seq_dim in range(-dims, dims):
            whole = _whole(dims, seq_dim)
            local = whole.index_select(seq_dim, mine)
            kept = local.clone()
            expected = oracle.shift(whole, oracle.bounds(LENGTH, cu), seq_dim, -9)
            got = context_parallel_shift(local, seq_dim=seq_dim, fill=-9, **options)
            _same(got, expected.index_select(seq_dim, mine))
            assert torch.equal(local, kept)


def _gather_gradients(layout: str, cu: list[int] | None) -> None:
    """Each rank weighs the gathered values differently, so the two conventions differ."""
    size, rank = dist.get_world_size(), dist.get_rank()
    options: dict[str, Any] = {"cp_group": grid_groups(cp=size).cp}
    options.update(layout=layout, cu_seqlens=_cu(cu))
    mine = torch.tensor(_mine(layout, cu))
    for seq_dim in (0, 1, -1):
        whole = _whole(3, seq_dim).double()
        upstream = [torch.randn_like(whole) for _ in range(size)]
        expected = {"sum": sum(upstream), "slice": upstream[rank]}
        for grad in ("sum", "slice"):
            local = whole.index_select(seq_dim, mine).requires_grad_()
            gathered = context_parallel_gather(local, seq_dim=seq_dim, grad=grad, **options)
            kept = upstream[rank].clone()
            gathered.backward(upstream[rank])
            assert local.grad is not None
            torch.testing.assert_close(local.grad, expected[grad].index_select(seq_dim, mine))
            assert torch.equal(upstream[rank], kept)


def _shift_and_shard_gradients(layout: str, cu: list[int] | None) -> None:
    options: dict[str, Any] = {"cp_group": grid_groups(cp=dist.get_world_size()).cp}
    options.update(layout=layout, cu_seqlens=_cu(cu))
    mine = torch.tensor(_mine(layout, cu))
    for seq_dim in (0, 1, 2):
        whole = _whole(3, seq_dim).double().requires_grad_()
        upstream = torch.randn_like(whole)
        bounds = oracle.bounds(LENGTH, cu)
        # The oracle's shift, differentiated by autograd on the whole sequence.
        (expected,) = torch.autograd.grad(oracle.shift(whole, bounds, seq_dim, 0), whole, upstream)
        local = whole.detach().index_select(seq_dim, mine).requires_grad_()
        shifted = context_parallel_shift(local, seq_dim=seq_dim, **options)
        shifted.backward(upstream.index_select(seq_dim, mine))
        assert local.grad is not None
        torch.testing.assert_close(local.grad, expected.index_select(seq_dim, mine))
        part = context_parallel_shard(whole, seq_dim=seq_dim, **options)
        mine_up = upstream.index_select(seq_dim, mine)
        (got,) = torch.autograd.grad(part, whole, mine_up)
        torch.testing.assert_close(got.index_select(seq_dim, mine), mine_up)
        torch.testing.assert_close(got.sum(), mine_up.sum())


def _against_megatron() -> None:
    group = grid_groups(cp=dist.get_world_size()).cp
    batch = {
        "tokens": torch.randint(0, 1000, (3, LENGTH)),
        "loss_mask": torch.rand(3, LENGTH),
        "attention_mask": torch.rand(3, 1, LENGTH, LENGTH) > 0.5,
    }
    ours = {
        name: context_parallel_shard(
            x, cp_group=group, seq_dim=2 if name == "attention_mask" else 1
        )
        for name, x in batch.items()
    }
    theirs = get_batch_on_this_cp_rank(dict(batch), cp_group=group)
    for name in batch:
        assert torch.equal(ours[name], theirs[name])
        assert theirs[name].shape != batch[name].shape


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize(("layout", "cu"), CASES)
class TestEveryLayout:
    # PACKED's sequences do not split over 3 ranks.
    def _cu(self, cp, cu):
        return [0, 12, 12, 36, 48] if cp == 3 and cu is not None else cu

    def test_shard_and_gather(self, ranks, cp, layout, cu):
        ranks(cp).run(_shard_and_gather, layout, self._cu(cp, cu))

    def test_shift(self, ranks, cp, layout, cu):
        ranks(cp).run(_shift, layout, self._cu(cp, cu))

    def test_gather_gradients(self, ranks, cp, layout, cu):
        ranks(cp).run(_gather_gradients, layout, self._cu(cp, cu))

    def test_shift_and_shard_gradients(self, ranks, cp, layout, cu):
        ranks(cp).run(_shift_and_shard_gradients, layout, self._cu(cp, cu))


@pytest.mark.parametrize("cp", [2, 4])
def test_same_order_as_megatron(ranks, cp):
    ranks(cp).run(_against_megatron)


@pytest.mark.parametrize("cp", [1, 2])
def test_other_dtypes(ranks, cp):
    ranks(cp).run(_other_dtypes)


def _subgroup() -> list:
    """TP 2 x CP 2: the group's ranks are 0, 2 and 1, 3, not the world's."""
    groups = grid_groups(tp=2, cp=2)
    whole = torch.arange(16).reshape(1, 16)
    local = context_parallel_shard(whole, cp_group=groups.cp)
    _same(context_parallel_gather(local, cp_group=groups.cp), whole)
    return local.flatten().tolist()


def test_a_group_smaller_than_the_world(ranks):
    first = [0, 1, 2, 3, 12, 13, 14, 15]
    second = list(range(4, 12))
    assert ranks(4).run(_subgroup) == [first, first, second, second]


def _megatrons_group() -> list:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    try:
        whole = torch.arange(16).reshape(16, 1)
        local = context_parallel_shard(whole, seq_dim=0)
        _same(context_parallel_gather(local, seq_dim=0), whole)
        shifted = context_parallel_shift(local, seq_dim=0, fill=-1)
        assert context_parallel_positions(16).tolist() == local.flatten().tolist()
        return shifted.flatten().tolist()
    finally:
        parallel_state.destroy_model_parallel()


def test_no_group_means_megatrons(ranks):
    first = [1, 2, 3, 4, 13, 14, 15, -1]
    second = list(range(5, 13))
    # 4 ranks: data parallel 2 x context parallel 2.
    assert ranks(4).run(_megatrons_group) == [first, second, first, second]


def test_without_torch_distributed_it_is_one_process():
    x = torch.randn(2, 7)
    assert context_parallel_shard(x) is x
    assert context_parallel_gather(x) is x
    assert context_parallel_positions(7).tolist() == list(range(7))
    cu = torch.tensor([0, 3, 7])
    got = context_parallel_shift(x, cu_seqlens=cu, fill=0.5)
    assert torch.equal(got, oracle.shift(x, [0, 3, 7], 1, 0.5))


def test_an_empty_tensor_shifts_to_an_empty_one():
    assert context_parallel_shift(torch.randn(2, 0)).shape == (2, 0)
    assert context_parallel_shift(torch.randn(0, 4)).shape == (0, 4)
