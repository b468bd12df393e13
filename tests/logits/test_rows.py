"""Rows: any leading shape and strides as flat rows, without a copy of the logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcore_logprobs.logits.rows import Rows, joined
from tests.helpers.memory import TensorsMade


@st.composite
def strided(draw) -> Tensor:
    """`[..., v]` of up to three leading dimensions: permuted, sliced, stepped, any of it."""
    lead = draw(st.lists(st.integers(0, 5), min_size=0, max_size=3))
    x = torch.arange(1.0, 1 + 7 * (torch.Size(lead).numel() or 1)).reshape(-1)
    x = x[: 7 * torch.Size(lead).numel()].reshape(*lead, 7)
    order = draw(st.permutations(range(len(lead))))
    x = x.permute(*order, len(lead)) if lead else x
    for dim in range(len(lead)):
        start = draw(st.integers(0, 2))
        step = draw(st.integers(1, 2))
        x = x[(slice(None),) * dim + (slice(start, None, step),)]
    first = draw(st.integers(0, 2))
    return x[..., first:6]


@given(strided(), st.integers(1, 9))
def test_every_row_comes_once_and_finds_its_way_back(x, chunk_size):
    rows = Rows(x)
    lead = x.shape[:-1]
    assert rows.count == lead.numel()
    number = torch.arange(lead.numel()).reshape(lead)
    flat = rows.walk(number)
    assert flat.shape == (rows.count,)
    assert torch.equal(rows.restore(flat), number)
    wide = torch.randn(*lead, 3)
    assert torch.equal(rows.restore(rows.walk(wide)), wide)

    by_number = x.reshape(-1, x.shape[-1])
    for walk in (rows.blocks(x), rows.chunks(chunk_size, x)):
        at = 0
        for part, view in walk:
            assert part.start == at
            at = part.stop
            assert torch.equal(view, by_number[flat[part]])
            assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert at == rows.count
    assert all(len(view) <= chunk_size for _, view in rows.chunks(chunk_size, x))


@given(strided())
def test_two_tensors_of_different_strides_are_walked_together(x):
    rows = Rows(x)
    other = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for _, source, out in rows.blocks(x, other):
        assert source.shape == out.shape
        out.copy_(source)
    assert torch.equal(other, x)


@pytest.mark.parametrize(
    ("x", "blocks"),
    [
        (torch.zeros(5, 8), 1),
        (torch.zeros(5, 16)[:, 3:9], 1),
        (torch.zeros(4, 5, 8), 1),
        (torch.zeros(4, 5, 8).transpose(0, 1), 1),
        (torch.zeros(4, 6, 8)[:, :-1], 4),  # one a sequence
        (torch.zeros(6, 4, 8)[:-1], 1),
        (torch.zeros(4, 10, 8)[:, ::2], 1),
        (torch.zeros(2, 3, 4, 8).permute(2, 0, 1, 3), 1),
    ],
)
def test_few_blocks_and_no_copy(x, blocks):
    rows = Rows(x)
    with TensorsMade() as made:
        assert len(list(rows.blocks(x))) == blocks
    assert made.made == []


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_are_joined_along_the_rows(count):
    parts = list(torch.randn(2, 3 * count).split(3, dim=-1))
    assert torch.equal(joined(parts), torch.cat(parts, dim=-1))
    assert (joined(parts) is parts[0]) == (count == 1)
