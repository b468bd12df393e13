"""all_to_all_vp2sp and its inverse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_logprobs import all_to_all_sp2vp, all_to_all_vp2sp
from tests.logits.common import VOCAB, WORLDS, on_ranks, shard, world_group, world_rank, world_size


def test_against_plain_torch_in_float64():
    """On one process a rank has all rows and all columns: both operations are the identity."""
    # 3 rows of 5 columns: were rows and columns mixed up, the shape would tell.
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(3, 5, dtype=torch.float64)
    for operation in (all_to_all_vp2sp, all_to_all_sp2vp):
        out = operation(x)
        assert torch.equal(out, x)
        assert torch.equal(torch.autograd.grad(out, x, upstream)[0], upstream)


def _there_and_back(whole: Tensor, upstream: Tensor) -> None:
    group, rank, size = world_group(), world_rank(), world_size()
    n = whole.shape[0] // size
    mine = slice(rank * n, (rank + 1) * n)
    leaf, logits = shard(whole)
    rows = all_to_all_vp2sp(logits, tp_group=group)
    assert torch.equal(rows, whole[mine])
    (grad,) = torch.autograd.grad(rows, leaf, upstream[mine])
    assert torch.equal(grad, shard(upstream)[1])

    leaf = whole[mine].clone().requires_grad_()
    back = all_to_all_sp2vp(leaf, tp_group=group)
    assert torch.equal(back, logits)
    (grad,) = torch.autograd.grad(back, leaf, shard(upstream)[1].detach())
    assert torch.equal(grad, upstream[mine])

    # Rows whose memory is not contiguous.
    wide = torch.cat([logits.detach(), logits.detach()], -1)[:, : logits.shape[-1]]
    assert torch.equal(all_to_all_vp2sp(wide, tp_group=group), whole[mine])
    assert torch.equal(all_to_all_sp2vp(whole[mine].t().contiguous().t(), tp_group=group), logits)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_there_and_back(ranks, world, dtype, rows):
    if dtype == torch.int64:
        whole = torch.arange(rows * world * VOCAB).view(rows * world, VOCAB)
        on_ranks(ranks, world, _integers, whole)
        return
    whole, upstream = torch.randn(2, rows * world, VOCAB).to(dtype).unbind(0)
    on_ranks(ranks, world, _there_and_back, whole, upstream)


def _integers(whole: Tensor) -> None:
    n, width = whole.shape[0] // world_size(), whole.shape[1] // world_size()
    columns = whole[:, world_rank() * width : (world_rank() + 1) * width]
    rows = all_to_all_vp2sp(columns, tp_group=world_group())
    assert torch.equal(rows, whole[world_rank() * n : (world_rank() + 1) * n])
    assert torch.equal(all_to_all_sp2vp(rows, tp_group=world_group()), columns)


def _bad(op: str, x: object) -> None:
    {"vp2sp": all_to_all_vp2sp, "sp2vp": all_to_all_sp2vp}[op](x, tp_group=world_group())


@pytest.mark.parametrize(
    ("op", "x", "message"),
    [
        ("vp2sp", torch.zeros(5, 4), "n divisible by TP 2"),
        ("sp2vp", torch.zeros(4, 5), "V divisible by TP 2"),
        ("vp2sp", torch.zeros(2, 4, 4), "2-D"),
        ("sp2vp", torch.zeros(4), "2-D"),
        ("vp2sp", [[1.0]], "2-D"),
    ],
)
def test_bad_input_raises_on_every_rank(ranks, op, x, message):
    for error in ranks(2).run_expecting_errors(_bad, op, x):
        assert isinstance(error, ValueError)
        assert message in str(error)
