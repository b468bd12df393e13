"""The index arithmetic of layouts, on one process, against plain loops."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_logprobs.context_parallel.layouts import LAYOUTS, SequenceLayout
from tests.context_parallel import oracle


@st.composite
def cases(draw):
    """(layout, CP, packed bounds or None, total length); empty sequences included."""
    layout = draw(st.sampled_from(LAYOUTS))
    cp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    unit = {"zigzag": cp * 2 if cp > 1 else 1, "contiguous": cp, "contiguous_buffer": 1}[layout]
    widths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=7))
    cu = [0]
    for width in widths:
        cu.append(cu[-1] + width * unit)
    if layout == "contiguous_buffer":  # the sum alone must divide
        cu.append(-(-cu[-1] // cp) * cp)
    packed = draw(st.booleans())
    return layout, cp, (cu if packed else None), cu[-1]


def _layout(layout, cp, cu, length):
    packed = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    return SequenceLayout.of(layout, cp, length, packed)


@given(cases())
def test_positions_match_the_loop_and_partition_the_sequence(case):
    layout, cp, cu, length = case
    where = _layout(*case)
    everything = []
    for rank in range(cp):
        got = where.positions(rank)
        assert got.dtype is torch.int64
        assert got.tolist() == oracle.local_indices(layout, cp, rank, oracle.bounds(length, cu))
        everything += got.tolist()
    assert sorted(everything) == list(range(length))


@given(cases())
def test_gather_order_undoes_the_split(case):
    cp, length = case[1], case[3]
    where = _layout(*case)
    whole = torch.randn(length)
    slots = torch.cat([whole[where.positions(rank)] for rank in range(cp)])
    assert torch.equal(slots[where.gather_order()], whole)
    assert torch.equal(slots, whole[where.slot_positions()])
    assert not where.in_order or torch.equal(slots, whole)


@given(cases(), st.integers(-3, 3), st.data())
def test_next_sources_are_a_roll_of_each_sequence(case, fill, data):
    cp, cu, length = case[1:]
    if length == 0:
        return
    where = _layout(*case)
    whole = torch.arange(10, 10 + length)
    parts = [whole[where.positions(rank)] for rank in range(cp)]
    boundary = torch.cat([part[where.chunk_starts()] for part in parts])
    bounds = oracle.bounds(length, cu)
    lengths = None
    if data.draw(st.booleans()):
        lengths = [data.draw(st.integers(0, end - start)) for start, end in pairwise(bounds)]
    expected = oracle.shift(whole, bounds, 0, fill, lengths)
    for rank in range(cp):
        sources = torch.cat([parts[rank], boundary, torch.tensor([fill])])
        got = sources[where.next_sources(rank, None if lengths is None else torch.tensor(lengths))]
        assert torch.equal(got, expected[where.positions(rank)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("striped", 2, 8), "layout: expected one of .* got 'striped'"),
        (("zigzag", 2, 6), "sequence length: expected a multiple of 4 .* got 6"),
        (("contiguous", 4, 6), "sequence length: expected a multiple of 4 .* got 6"),
        (("zigzag", 2, 8, torch.tensor([0, 2, 8])), "padded to a multiple of 4, got .0, 2, 8"),
        (("contiguous", 2, 8, torch.tensor([0, 3, 8])), "padded to a multiple of 2"),
        (("contiguous_buffer", 4, 6), "sequence length: expected a multiple of 4 .* got 6"),
        (("contiguous_buffer", 2, 8, torch.tensor([0, 3, 6])), "end at the sequence length 8"),
        (("zigzag", 2, 8, torch.tensor([0, 4, 12])), "end at the sequence length 8"),
        (("zigzag", 2, 8, torch.tensor([4, 8])), "start at 0"),
        (("zigzag", 2, 8, torch.tensor([0, 8, 4, 8])), "never decrease"),
        (("zigzag", 2, 8, torch.tensor([0.0, 8.0])), "int32 or int64 tensor, got torch.float32"),
        (("zigzag", 2, 8, [0, 8]), "int32 or int64 tensor, got list"),
        (("zigzag", 2, 8, torch.tensor([[0, 8]])), r"expected shape .* got \[1, 2\]"),
        (("zigzag", 2, 8, torch.tensor([0])), "at least one sequence"),
    ],
)
def test_unusable_layouts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SequenceLayout.of(*arguments)


def test_cu_seqlens_on_another_device_are_refused():
    cu_seqlens = torch.zeros(2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="expected device cpu, got meta"):
        SequenceLayout.of("zigzag", 2, 8, cu_seqlens, device=torch.device("cpu"))


def test_one_rank_makes_no_demand_on_lengths():
    where = SequenceLayout.of("zigzag", 1, 7, torch.tensor([0, 3, 7]))
    assert where.positions(0).tolist() == list(range(7))


def test_bounds_that_begin_below_0_are_refused():
    with pytest.raises(ValueError, match="start at 0"):
        SequenceLayout.of("zigzag", 2, 8, torch.tensor([-4, 8]))


@pytest.mark.parametrize("cu", [[0, 8, 8], [0, 0, 8], [0, 4, 8, 8, 8]])
def test_empty_sequences_have_chunk_starts_in_range(cu):
    for layout in ("zigzag", "contiguous"):
        where = SequenceLayout.of(layout, 2, 8, torch.tensor(cu))
        assert where.chunk_starts().max() < where.local_length
