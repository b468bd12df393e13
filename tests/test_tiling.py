"""How a call is cut: tiles, blocks, and the memory that a tile's chunks lie in."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import mcore_logprobs as ml
from mcore_logprobs.kernels import budgets
from mcore_logprobs.kernels.budgets import CPU, GPU, Budgets, Tiling, even_parts
from mcore_logprobs.kernels.chunk import row_chunks
from mcore_logprobs.sources import head_operands as head_module
from mcore_logprobs.sources.head import head_logits
from tests.engine.cases import BUDGETS

# Padded vocabularies of released models, and the sizes over which they are split.
VOCABULARIES = (32000, 32064, 49152, 50304, 64000, 100352, 102400, 128256, 129280, 131072)
VOCABULARIES += (151936, 152064, 163840, 200064, 201088, 256000, 262144)
WIDTHS = sorted({v // tp for v in VOCABULARIES for tp in (1, 2, 4, 8, 16, 32) if v % tp == 0})
ROWS = (1, 7, 255, 2047, 2048, 2049, 2200, 4362, 8192, 8193, 10012, 20638, 24583, 32768, 65536)


def covered(total: int, size: int) -> list[slice]:
    """The parts of a cut, which cover the whole once, in order."""
    parts = list(row_chunks(total, size))
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])][: len(parts)]
    assert sum(part.stop - part.start for part in parts) == total
    return parts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tilings_of_real_models(device: str) -> None:
    where, sizes = torch.device(device), budgets.of(device)
    for width in WIDTHS:
        for rows in ROWS:
            for chunk_size in (None, 1, 100, 1024, 5000):
                for held in (False, True):
                    cut = (rows, width, chunk_size, where)
                    tiling = Tiling.of(*cut)
                    if held:
                        tiling = Tiling.of(*cut, held_width=width, adds_per_tile=True)
                    assert 1 <= tiling.rows <= min(rows, chunk_size or rows)
                    assert 1 <= tiling.columns <= width
                    one_block = tiling.columns == width
                    most = max(sizes.chunk_bytes, 4 * tiling.rows * sizes.min_block)
                    step = min(sizes.block_step, 128)
                    if most >= 4 * tiling.rows * 2 * sizes.block_step:
                        step = sizes.block_step
                    assert one_block or tiling.columns % step == 0
                    assert 4 * tiling.rows * tiling.columns <= most
                    if held and chunk_size is None:
                        limit = max(sizes.max_held_bytes, 4 * width)
                        assert 4 * tiling.rows * width <= limit
                        assert tiling.rows in (rows, 1) or tiling.rows % sizes.row_step == 0


@given(st.integers(0, 10**4), st.integers(1, 10**4), st.integers(1, 300))
@settings(deadline=None, max_examples=200)
def test_even_parts(total: int, most: int, step: int) -> None:
    size = even_parts(total, most, step)
    parts = covered(total, size)
    assert 1 <= size <= max(1, most)
    if total > most:  # no half of the step is taken where two of the whole fit
        halves = [step >> k for k in range(step.bit_length())]
        taken = [half for larger, half in pairwise(halves) if 2 * larger > most]
        assert any(size % half == 0 for half in (step, *taken))
    lengths = [part.stop - part.start for part in parts]
    assert not lengths or max(lengths) == lengths[0]


def elements(x: Tensor) -> Tensor:
    """The places in its storage of a tensor's elements."""
    places = torch.arange(x.untyped_storage().nbytes() // x.element_size())
    return places.as_strided(x.shape, x.stride(), x.storage_offset()).flatten()


# One column at a time takes seconds, and is tried in one dtype by day.
SLOW = ("one column", torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*case, marks=pytest.mark.night if case == SLOW else ())
        for case in product(("shipped", *BUDGETS), (torch.float32, torch.bfloat16))
    ],
)
def test_chunks_that_live_at_one_time_have_memory_of_their_own(
    name: str, dtype: torch.dtype
) -> None:
    found = CPU if name == "shipped" else BUDGETS[name]
    for rows in (1, 3, 12):
        for width in range(1, 40):
            hidden, weight = torch.randn(rows, 4), torch.randn(width, 4)
            exact = (hidden.double() @ weight.double().t()).to(dtype)
            with budgets.use(found):
                head = head_logits(hidden, weight, logits_dtype=dtype, vocab_size=max(1, width - 2))
                head = head.in_whole_rows(adds_per_tile=True)
                valid = head.shard.valid_width
                seen = torch.zeros(rows, valid, dtype=torch.int64)
                for tile in head.tiles():
                    chunks = tile.held_chunks()
                    places = torch.cat([elements(p.chunk.logits) for p in chunks])
                    assert places.unique().numel() == places.numel()
                    assert places.numel() == (tile.rows.stop - tile.rows.start) * valid
                    assert len({p.chunk.logits.untyped_storage().data_ptr() for p in chunks}) == 1
                    for placed in chunks:  # after all of them were written
                        seen[placed.rows, placed.columns] += 1
                        want = exact[placed.rows, placed.columns]
                        near = {"rtol": 0.01, "atol": 1e-4 if dtype.itemsize == 4 else 0.1}
                        torch.testing.assert_close(placed.chunk.logits, want, **near)
                assert (seen == 1).all()


def test_a_buffer_is_as_large_as_what_is_laid_into_it() -> None:
    head = head_logits(torch.randn(5, 4), torch.randn(40, 4))
    (tile,) = head.tiles()
    with pytest.raises(AssertionError, match="as large as its place"):
        head.product(tile.hidden, slice(0, 24), torch.empty(5, 23))
    first = head.buffer(3, 7, torch.float32)
    assert first.stride() == (16, 1)  # rows start at multiples of 16 numbers
    assert head.buffer(2, 9, torch.float32).data_ptr() == first.data_ptr()
    assert head.buffer(2, 9, torch.bfloat16).data_ptr() != first.data_ptr()
    assert head.buffer(400, 9, torch.float32).shape == (400, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [256, 512, 4095, 4096, 32768, 128256])
def test_rows_of_a_buffer_share_no_place_of_a_cache(columns: int, dtype: torch.dtype) -> None:
    head = head_logits(torch.randn(5, 4), torch.randn(40, 4))
    logits = head.buffer(16, columns, dtype)
    first_bytes = logits.stride(0) * dtype.itemsize * torch.arange(16)
    assert logits.stride(0) % 16 == 0
    # The ways of a first-level cache, of 64 lines of 64 bytes each.
    assert (first_bytes // 64 % 64).unique(return_counts=True)[1].max() <= 4
    assert logits.stride(0) - columns < 16 + 64 // dtype.itemsize


@pytest.mark.parametrize("name", [field.name for field in fields(Budgets)])
@pytest.mark.parametrize("bad", [0, -1, 1.0, True, None])
def test_budgets_that_cannot_cut_are_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=f"Budgets.{name}: expected an int of at least 1, got"):
        replace(GPU, **{name: bad})


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("min_block", "max_block"),
        ("held_bytes", "max_held_bytes"),
        ("min_segment_block", "segment_block"),
    ],
)
def test_budgets_that_contradict_each_other_are_refused_by_name(low: str, high: str) -> None:
    with pytest.raises(ValueError, match=f"Budgets.{low}: expected at most {high}=2, got 3"):
        replace(GPU, **{low: 3, high: 2})


def test_budgets_are_in_force_within_their_block() -> None:
    with budgets.use(BUDGETS["narrow"]):
        assert budgets.of("cpu") == budgets.of("cuda") == BUDGETS["narrow"]
        with budgets.use(GPU):
            assert budgets.of("cpu") == GPU
        assert budgets.of("cpu") == BUDGETS["narrow"]
    assert (budgets.of("cpu"), budgets.of("cuda")) == (CPU, GPU)


# ---- operands -----------------------------------------------------------------------------------


def by_column(x: Tensor) -> Tensor:
    return x.t().contiguous().t() if x.dim() == 2 else x.clone()


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("given", [torch.clone, by_column])
@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_logits_are_multiplied_in_one_layout(
    monkeypatch: pytest.MonkeyPatch, use_reentrant: bool | None, given: Any, lora: bool
) -> None:
    """Of operands that lie otherwise a CPU rounds the product otherwise.

    A backward forms its logits again, from tensors that hooks have given another layout; under a
    non-reentrant checkpoint it takes the statistics of a forward that was given these, too. Here
    the product tells layouts apart by much more than a rounding.
    """
    product, layouts = head_module.product, []

    def told_apart(a: Tensor, b: Tensor, out: Tensor, **options: Any) -> Tensor:
        layouts.append((a.stride(), b.stride()))
        return product(a, b, out, **options)

    monkeypatch.setattr(head_module, "product", told_apart)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        given(torch.randn(n, 8, generator=generator)).requires_grad_() for n in (12, 24)
    )
    a, b = (
        given(torch.randn(shape, generator=generator)).requires_grad_()
        for shape in ((3, 8), (24, 3))
    )
    target = torch.arange(12)

    def call(x: Tensor) -> Tensor:
        adapter = (a, b, 0.5) if lora else None
        return ml.linear_token_stats(x, weight, target, lora=adapter, chunk_size=5).logprobs

    with saved_tensors_hooks(by_column, lambda x: x):
        if use_reentrant is None:
            found = call(hidden)
        else:
            found = checkpoint(call, hidden, use_reentrant=use_reentrant)
    found.sum().backward()
    assert len(layouts) >= 6
    assert set(layouts) == {((8, 1), (1, 8))}
