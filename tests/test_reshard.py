"""reshard_vocabulary: another TP, a part of the vocabulary; all_to_all of integers and no rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import (
    all_to_all_sp2vp,
    all_to_all_vp2sp,
    reshard_vocabulary,
)
from tests.helpers.shards import on_ranks, world_group, world_rank, world_size


def _alone() -> object:
    """A group of this rank alone; every rank makes all of them."""
    groups = [dist.new_group([rank]) for rank in range(world_size())]
    return groups[world_rank()]


def _pieces(whole: Tensor, ids: Tensor | None, to_one: bool) -> list[Tensor]:
    """Resharded [V, h] and [2, V] of the same numbers, put together by the test."""
    source, target = world_group(), world_group()
    mine = whole.tensor_split(world_size())[world_rank()]
    if to_one and world_size() > 1:
        target = _alone()
    groups = {"source_group": source, "tp_group": target}
    back = reshard_vocabulary(mine, ids, dim=0, **groups)
    columns = reshard_vocabulary(mine.t().contiguous(), ids, dim=-1, **groups)
    assert torch.equal(columns, back.t())
    # A bias is a vocabulary of one dimension.
    bias = reshard_vocabulary(mine[:, 0].contiguous(), ids, dim=0, **groups)
    assert torch.equal(bias, back[:, 0])
    if to_one:  # and from one rank's whole vocabulary to the shards of all
        again = reshard_vocabulary(back, dim=0, source_group=target, tp_group=source)
        expected = back.tensor_split(world_size())[world_rank()]
        assert torch.equal(again, expected)
    return back


@pytest.mark.parametrize("to_one", [False, True])
@pytest.mark.parametrize("some", [False, True], ids=["all", "some ids"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_number_arrives(ranks, world, some, to_one):
    whole = torch.randn(24, 2)
    whole[5] = torch.inf
    ids = torch.tensor([23, 0, 5, 5, 11, 8, 17, 2, 3, 19, 20, 1]) if some else None
    expected = whole if ids is None else whole[ids]
    found = on_ranks(ranks, world, _pieces, whole, ids, to_one)
    if to_one:
        assert all(torch.equal(piece, expected) for piece in found)
    else:
        assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize(
    ("ids", "dim", "message"),
    [
        (torch.tensor([24]), 0, "ids: expected ids in"),
        (torch.tensor([0.5]), 0, "ids: expected an integer"),
        (torch.tensor([], dtype=torch.int64), 0, "divisible by TP 1, got 0"),
        (None, 1, "dim: expected 0 or -1, got 1"),
    ],
)
def test_mistakes(ids, dim, message):
    with pytest.raises(ValueError, match=message):
        reshard_vocabulary(torch.randn(24, 2), ids, dim=dim)
    with pytest.raises(ValueError, match=r"dim: expected -1 for logits"):
        reshard_vocabulary(torch.randn(4, 3, 24), dim=0)


def _other_dims() -> str:
    try:
        group = world_group()
        reshard_vocabulary(torch.zeros(7, 7), dim=-world_rank(), source_group=group, tp_group=group)
    except ValueError as error:
        return str(error)
    return ""


def test_another_dim_on_a_rank_raises_on_every_rank(ranks):
    said = "dim: expected the same on every rank of the TP group, got 0 on rank 0, -1 on rank 1"
    assert ranks(2).run(_other_dims) == [said] * 2


def _integers(rows: int) -> None:
    n = world_size()
    whole = torch.arange(rows * n * 24).view(rows * n, 24)
    columns = whole.chunk(n, 1)[world_rank()].contiguous()
    found = all_to_all_vp2sp(columns, tp_group=world_group())
    assert torch.equal(found, whole[world_rank() * rows : (world_rank() + 1) * rows])
    assert torch.equal(all_to_all_sp2vp(found, tp_group=world_group()), columns)


@pytest.mark.parametrize("world", [1, 3])
def test_integers_go_there_and_back(ranks, world):
    for rows in (0, 1, 5):
        on_ranks(ranks, world, _integers, rows)
