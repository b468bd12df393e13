"""shard, gather, positions and shift on real ranks, against plain loops and Megatron itself."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
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
UNEVEN = [0, 7, 7, 18, 19, 48]  # for the layout that cuts the buffer, not the sequences
LAYOUTS = ("zigzag", "contiguous", "contiguous_buffer")
CASES = list(itertools.product(LAYOUTS, (None, PACKED)))
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
)


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
    assert got.shape == expected.shape
    # To the last bit; torch compares not all dtypes.
    assert got.flatten().tolist() == expected.flatten().tolist()


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


def _other_dtypes(dtype: torch.dtype) -> None:
    numbers = torch.randint(0, 100, (2, LENGTH))
    fill = 1 if dtype is torch.bool else 8
    following = oracle.shift(numbers, [0, LENGTH], 1, fill)
    for layout, seq_dim in itertools.product(LAYOUTS, (0, 1)):
        group = grid_groups(cp=dist.get_world_size()).cp
        options: dict[str, Any] = {"cp_group": group, "layout": layout, "seq_dim": seq_dim}
        mine = _mine(layout, None)
        both = [numbers, numbers[:, mine], following[:, mine]]
        turned = both if seq_dim else [x.t().contiguous() for x in both]
        whole, part, shifted = (x.to(dtype) for x in turned)
        local = context_parallel_shard(whole, **options)
        _same(local, part)
        _same(context_parallel_gather(local, **options), whole)
        _same(context_parallel_shift(local, fill=fill, **options), shifted)


def _beside_the_tokens(layout: str, cu: list[int]) -> None:
    """Masks, routes and the query rows of an attention mask stay with their tokens."""
    options: dict[str, Any] = {"cp_group": grid_groups(cp=dist.get_world_size()).cp}
    options.update(layout=layout, cu_seqlens=_cu(cu))
    ids = torch.arange(LENGTH)
    local = context_parallel_shard(ids[None], **options)[0]
    mask = context_parallel_shard(ids[None] % 3 == 0, **options)
    assert torch.equal(mask[0], local % 3 == 0)
    routes = torch.stack([ids % 7, ids % 5], -1).to(torch.int16)[:, None]  # [s, b, topk]
    mine = context_parallel_shard(routes, seq_dim=0, **options)
    assert mine.dtype == torch.int16
    assert torch.equal(mine[:, 0].long(), torch.stack([local % 7, local % 5], -1))
    _same(context_parallel_gather(mine, seq_dim=0, **options), routes)
    causal = (ids[:, None] >= ids)[None, None]
    rows = context_parallel_shard(causal, seq_dim=2, **options)
    assert torch.equal(rows[0, 0], local[:, None] >= ids)


def _shift_with_lengths(layout: str, cu: list[int] | None) -> None:
    """The token after a sequence's last real one: its padding, or fill where lengths are given."""
    options: dict[str, Any] = {"cp_group": grid_groups(cp=dist.get_world_size()).cp}
    options.update(layout=layout, cu_seqlens=_cu(cu))
    bounds = oracle.bounds(LENGTH, cu)
    padding = 77
    whole = torch.arange(LENGTH)
    lengths = [
        max(0, end - start - 2 - i) for i, (start, end) in enumerate(itertools.pairwise(bounds))
    ]
    for start, end, length in zip(bounds, bounds[1:], lengths, strict=False):
        whole[start + length : end] = padding
    mine = torch.tensor(_mine(layout, cu))
    local = whole[mine][None]
    plain = context_parallel_shift(local, fill=-100, **options)
    _same(plain, oracle.shift(whole, bounds, 0, -100)[mine][None])
    expected = oracle.shift(whole, bounds, 0, -100, lengths)[mine][None]
    assert padding not in expected
    for given in (lengths, torch.tensor(lengths), torch.tensor(lengths, dtype=torch.int32)):
        got = context_parallel_shift(local, lengths=given, fill=-100, **options)
        _same(got, expected)
    # Gradients: what is filled takes none.
    leaf = torch.randn(1, LENGTH)[:, mine].double().requires_grad_()
    upstream = torch.randn(1, LENGTH, dtype=torch.float64)
    shifted = context_parallel_shift(leaf, lengths=lengths, **options)
    (grad,) = torch.autograd.grad(shifted, leaf, upstream[:, mine])
    source = torch.zeros(1, LENGTH, dtype=torch.float64, requires_grad=True)
    (of_whole,) = torch.autograd.grad(oracle.shift(source, bounds, 1, 0, lengths), source, upstream)
    torch.testing.assert_close(grad, of_whole[:, mine])


def _changing_groups() -> None:
    """Groups of 1, 2 and 4 ranks in turn, and two different ones of the same size."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [grid_groups(tp=world // size, cp=size).cp for size in (1, 2, 4)]
    neighbours = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    whole = torch.arange(LENGTH).reshape(1, LENGTH)
    try:
        for layout in LAYOUTS:
            for _ in range(2):
                for group in (*groups, neighbours, *reversed(groups)):
                    options: dict[str, Any] = {"cp_group": group, "layout": layout}
                    size, of = group.size(), group.rank()
                    mine = oracle.local_indices(layout, size, of, [0, LENGTH])
                    local = context_parallel_shard(whole, **options)
                    assert local.tolist() == [mine]
                    assert context_parallel_positions(LENGTH, **options).tolist() == mine
                    assert torch.equal(context_parallel_gather(local, **options), whole)
                    following = oracle.shift(whole, [0, LENGTH], 1, -1)[:, mine]
                    assert torch.equal(context_parallel_shift(local, fill=-1, **options), following)
    finally:
        dist.destroy_process_group(neighbours)


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


CHECKS = {
    check.__name__.strip("_"): check
    for check in (
        _shard_and_gather,
        _shift,
        _shift_with_lengths,
        _gather_gradients,
        _shift_and_shard_gradients,
    )
}


def _checked(case: tuple) -> None:
    name, layout, cu = case
    CHECKS[name](layout, cu)


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_every_layout(ranks, cp, check):
    cases = []
    for layout, cu in CASES:
        if cu is not None and layout == "contiguous_buffer":
            cu = UNEVEN
        elif cu is not None and cp == 3:  # PACKED's sequences do not split over 3 ranks
            cu = [0, 12, 12, 36, 48]
        cases.append((check, layout, cu))
    for case, found in zip(cases, ranks(cp).run_many(_checked, cases), strict=True):
        assert isinstance(found, list), (case, found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_lies_beside_the_tokens(ranks, layout):
    cu = UNEVEN if layout == "contiguous_buffer" else PACKED
    ranks(2).run(_beside_the_tokens, layout, cu)


def test_groups_that_change_from_call_to_call(ranks):
    ranks(4).run(_changing_groups)


@pytest.mark.parametrize("cp", [2, 4])
def test_same_order_as_megatron(ranks, cp):
    ranks(cp).run(_against_megatron)


@pytest.mark.parametrize("cp", [1, 2])
def test_every_dtype(ranks, cp):
    for dtype, found in zip(DTYPES, ranks(cp).run_many(_other_dtypes, DTYPES), strict=True):
        assert isinstance(found, list), (dtype, found)


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


@pytest.mark.parametrize(
    ("dtype", "fill", "expected"),
    [
        (torch.float16, -math.inf, -math.inf),
        (torch.float32, Fraction(1, 4), 0.25),
        (torch.float32, torch.tensor(3, requires_grad=False), 3.0),
        (torch.float32, torch.tensor(3.0, requires_grad=True), 3.0),
        (torch.complex64, 1 + 2j, 1 + 2j),
        (torch.int64, 2**62, 2**62),
        (torch.int16, 7.0, 7),
        (torch.bool, True, True),
    ],
)
def test_any_number_that_the_dtype_holds_is_a_fill(dtype, fill, expected):
    got = context_parallel_shift(torch.zeros(1, 3, dtype=dtype), fill=fill)
    assert got[0, -1].item() == expected
    assert not got.requires_grad
    assert context_parallel_shift(torch.ones(1, 3, dtype=dtype))[0, -1].item() == 0
