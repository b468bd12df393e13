"""shard, gather, positions and shift on real ranks, against plain loops and Megatron itself."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
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
from mcore_logprobs.megatron.versions import takes
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


def _setting(layout: str, cu: list[int] | None) -> tuple[dict[str, Any], torch.Tensor, list[int]]:
    """(keywords, this rank's places in the whole, the sequences' bounds)"""
    size, rank = dist.get_world_size(), dist.get_rank()
    bounds = oracle.bounds(LENGTH, cu)
    mine = torch.tensor(oracle.local_indices(layout, size, rank, bounds))
    packed = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    group = grid_groups(cp=size).cp
    return {"cp_group": group, "layout": layout, "cu_seqlens": packed}, mine, bounds


def _wholes() -> Iterator[tuple[int, torch.Tensor]]:
    """(seq_dim, the same tensor on every rank: each job starts from one seed)"""
    for dims in (1, 2, 3):
        for seq_dim in range(-dims, dims):
            shape = [2, 3, 5][:dims]
            shape[seq_dim] = LENGTH
            yield seq_dim, torch.randn(shape, dtype=torch.float64)


def _same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.is_contiguous()
    assert got.shape == expected.shape
    # To the last bit; torch compares not all dtypes.
    assert got.flatten().tolist() == expected.flatten().tolist()


def _shard_and_gather(layout: str, cu: list[int] | None) -> None:
    """Each rank weighs the gathered values differently, so that the two conventions differ."""
    options, mine, _ = _setting(layout, cu)
    size, rank = dist.get_world_size(), dist.get_rank()
    assert context_parallel_positions(LENGTH, **options).tolist() == mine.tolist()
    for seq_dim, whole in _wholes():
        kept = whole.clone()
        leaf = whole.requires_grad_()
        local = context_parallel_shard(leaf, seq_dim=seq_dim, **options)
        _same(local.detach(), kept.index_select(seq_dim, mine))
        upstream = [torch.randn_like(whole) for _ in range(size)]
        part = upstream[rank].index_select(seq_dim, mine)
        (got,) = torch.autograd.grad(local, leaf, part)
        assert torch.equal(got.index_select(seq_dim, mine), part)
        assert torch.equal(got.count_nonzero(), part.count_nonzero())
        assert torch.equal(whole, kept)
        for grad, expected in {"sum": sum(upstream), "slice": upstream[rank]}.items():
            leaf = local.detach().requires_grad_()
            gathered = context_parallel_gather(leaf, seq_dim=seq_dim, grad=grad, **options)
            _same(gathered.detach(), kept)
            before = upstream[rank].clone()
            if gathered is not leaf:  # on one rank it is
                gathered.mul_(1.0)
            gathered.backward(upstream[rank])
            torch.testing.assert_close(leaf.grad, expected.index_select(seq_dim, mine))
            assert torch.equal(upstream[rank], before)


def _shift(layout: str, cu: list[int] | None) -> None:
    """A sequence's last token gets the fill; with lengths its last real one, and all after it."""
    options, mine, bounds = _setting(layout, cu)
    real = [max(0, end - start - 2 - i) for i, (start, end) in enumerate(pairwise(bounds))]
    given = itertools.cycle((real, torch.tensor(real), torch.tensor(real, dtype=torch.int32)))
    cases = ((*whole, lengths) for whole in _wholes() for lengths in (None, next(given)))
    for seq_dim, whole, lengths in cases:
        kept_lengths = None if lengths is None else real
        expected = oracle.shift(whole, bounds, seq_dim, -9, kept_lengths)
        local = whole.index_select(seq_dim, mine).requires_grad_()
        kept = local.detach().clone()
        got = context_parallel_shift(local, seq_dim=seq_dim, fill=-9, lengths=lengths, **options)
        _same(got.detach(), expected.index_select(seq_dim, mine))
        assert torch.equal(local, kept)
        # The oracle's shift, differentiated by autograd on the whole sequence.
        upstream = torch.randn_like(whole)
        source = whole.clone().requires_grad_()
        shifted = oracle.shift(source, bounds, seq_dim, 0, kept_lengths)
        (of_whole,) = torch.autograd.grad(shifted, source, upstream)
        got.backward(upstream.index_select(seq_dim, mine))
        torch.testing.assert_close(local.grad, of_whole.index_select(seq_dim, mine))


def _other_dtypes(dtype: torch.dtype) -> None:
    numbers = torch.randint(0, 100, (2, LENGTH))
    fill = 1 if dtype is torch.bool else 8
    following = oracle.shift(numbers, [0, LENGTH], 1, fill)
    for layout, seq_dim in itertools.product(LAYOUTS, (0, 1)):
        group = grid_groups(cp=dist.get_world_size()).cp
        options: dict[str, Any] = {"cp_group": group, "layout": layout, "seq_dim": seq_dim}
        mine = oracle.local_indices(layout, group.size(), group.rank(), [0, LENGTH])
        both = [numbers, numbers[:, mine], following[:, mine]]
        turned = both if seq_dim else [x.t().contiguous() for x in both]
        whole, part, shifted = (x.to(dtype) for x in turned)
        local = context_parallel_shard(whole, **options)
        _same(local, part)
        _same(context_parallel_gather(local, **options), whole)
        _same(context_parallel_shift(local, fill=fill, **options), shifted)


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
    newer = {"is_hybrid_cp": False} if takes(get_batch_on_this_cp_rank, "is_hybrid_cp") else {}
    theirs = get_batch_on_this_cp_rank(dict(batch), cp_group=group, **newer)
    for name in batch:
        assert torch.equal(ours[name], theirs[name])
        assert theirs[name].shape != batch[name].shape


CHECKS = {"shard_and_gather": _shard_and_gather, "shift": _shift}


def _checked(case: tuple) -> None:
    name, layout, cu = case
    CHECKS[name](layout, cu)


@pytest.mark.parametrize("cp", [1, 2, pytest.param(3, marks=pytest.mark.night), 4])
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


def _second_derivatives() -> None:
    for call in (
        functools.partial(context_parallel_gather, grad="sum"),
        functools.partial(context_parallel_gather, grad="slice"),
        context_parallel_shift,
    ):
        x = torch.randn(2, 12, requires_grad=True)
        values = call(x, cp_group=dist.group.WORLD)
        (grad,) = torch.autograd.grad(values.pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no double backward"):
            torch.autograd.grad(values.sum() + grad.square().sum(), x)


def test_a_penalty_on_gradients_is_refused_not_dropped(ranks):
    """torch's own once_differentiable leaves it out where autograd.grad names its inputs."""
    ranks(2).run(_second_derivatives)


def test_groups_that_change_from_call_to_call(ranks):
    ranks(4).run(_changing_groups)


@pytest.mark.parametrize("cp", [2, 4])
def test_same_order_as_megatron(ranks, cp):
    ranks(cp).run(_against_megatron)


@pytest.mark.parametrize("cp", [1, 2])
def test_every_dtype(ranks, cp):
    for dtype, found in zip(DTYPES, ranks(cp).run_many(_other_dtypes, DTYPES), strict=True):
        assert isinstance(found, list), (dtype, found)


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


def _one_row_in_place() -> None:
    """A row of its own is contiguous both ways: the gathered tensor is no view even then."""
    x = torch.arange(4.0).view(1, 4).requires_grad_()
    group = dist.group.WORLD
    gathered = context_parallel_gather(x, cp_group=group, layout="contiguous", grad="slice")
    gathered.mul_(2.0)
    gathered.sum().backward()
    assert x.grad.tolist() == [[2.0] * 4]


def test_one_gathered_row_may_be_changed_in_place(ranks):
    ranks(2).run(_one_row_in_place)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([2.5]), "int32 or int64 tensor, got torch.float32"),
        ([True], "a tensor or a list of ints"),
    ],
)
def test_lengths_that_are_no_integers_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        context_parallel_shift(torch.zeros(1, 4), lengths=lengths)
