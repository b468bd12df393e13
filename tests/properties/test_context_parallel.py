"""Sharding a sequence over CP and back; a shift is a roll of the whole sequence."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcore_logprobs import (
    context_parallel_gather,
    context_parallel_shard,
    context_parallel_shift,
)
from tests.helpers.distributed import get_pool

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool)


@st.composite
def sequences(draw: st.DrawFn, ranks: int) -> dict[str, Any]:
    """A tensor with a sequence dimension somewhere, packed or not."""
    lengths = [2 * ranks * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))]
    dims = draw(st.integers(1, 3))
    seq_dim = draw(st.integers(-dims, dims - 1))
    shape = [draw(st.integers(1, 3)) for _ in range(dims)]
    shape[seq_dim] = sum(lengths)
    packed = draw(st.booleans())
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    return {
        "shape": shape,
        "dtype": draw(st.sampled_from(DTYPES)),
        "bounds": bounds if packed else torch.tensor([0, sum(lengths)]),
        "options": {
            "seq_dim": seq_dim,
            "layout": draw(st.sampled_from(["zigzag", "contiguous"])),
            "cu_seqlens": bounds.int() if packed else None,
        },
    }


def make(case: dict[str, Any]) -> Tensor:
    count = torch.Size(case["shape"]).numel()
    return (torch.arange(1, count + 1) % 120).view(case["shape"]).to(case["dtype"])


def round_trip(case: dict[str, Any]) -> list[Tensor]:
    """[back again, the shift, the shift by way of the whole sequence]."""
    x, options = make(case), case["options"] | {"cp_group": dist.group.WORLD}
    local = context_parallel_shard(x, **options)
    rolled, dim = x.clone(), options["seq_dim"]
    for start, end in itertools.pairwise(case["bounds"].tolist()):
        part = rolled.narrow(dim, start, end - start)
        part.copy_(x.narrow(dim, start, end - start).roll(-1, dim))
        part.select(dim, -1 if end > start else 0).fill_(1)
    shifted = context_parallel_shift(local, fill=1, **options)
    return [
        context_parallel_gather(local, **options),
        shifted,
        context_parallel_shard(rolled, **options),
    ]


@pytest.mark.parametrize("ranks", [2, 3])
@given(data=st.data())
def test_round_trip_and_shift(ranks, data):
    case = data.draw(sequences(ranks))
    for back, shifted, by_rolling in get_pool(ranks).run(round_trip, case):
        assert torch.equal(back, make(case))
        assert torch.equal(shifted, by_rolling)


def gradients(case: dict[str, Any], grad: str) -> Tensor:
    """Of the whole sequence's weighted sum, by way of this rank's part."""
    x, options = make(case).requires_grad_(), case["options"] | {"cp_group": dist.group.WORLD}
    local = context_parallel_shard(x, **options)
    whole = context_parallel_gather(local, grad=grad, **options)
    whole.backward(make(case))
    return x.grad


@given(sequences(2), st.sampled_from(["sum", "slice"]))
def test_gradients_come_back_to_their_places(case, grad):
    case["dtype"] = torch.float64
    total = sum(get_pool(2).run(gradients, case, grad))
    assert torch.equal(total, make(case) * (2 if grad == "sum" else 1))
