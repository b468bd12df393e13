"""Rows: any leading shape and strides as flat rows, without a copy of the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcore_logprobs import linear_kl_div, linear_token_stats
from mcore_logprobs.kernels import budgets
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.pair_source import beside
from tests.helpers.memory import TensorsMade
from tests.helpers.shards import on_ranks, world_group, world_rank, world_size


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


@given(strided(), st.sampled_from([None, 1]), st.integers(0, 3), st.integers(1, 4))
def test_every_row_comes_once_and_finds_its_way_back(x, chunk_size, start, length):
    source = given_logits(x, chunk_size=chunk_size)
    lead = x.shape[:-1]
    assert source.num_rows == lead.numel()
    number = torch.arange(lead.numel()).reshape(lead)
    flat = source.to_row_order(number)
    assert flat.shape == (source.num_rows,)
    assert torch.equal(source.to_token_order(flat), number)
    wide = torch.randn(*lead, 3)
    assert torch.equal(source.to_token_order(source.to_row_order(wide)), wide)

    by_number, at = x.reshape(-1, x.shape[-1]), 0
    for placed in source.chunks():
        rows, chunk = placed.rows, placed.chunk
        assert rows.start == at
        at = rows.stop
        assert torch.equal(chunk.logits, by_number[flat[rows]])
        is_view = chunk.logits.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert is_view != source.copies_rows
        assert is_view or chunk_size is None  # a copy would have one row
    assert at == source.num_rows
    rows = slice(min(start, source.num_rows), min(start + length, source.num_rows))
    for index in (None, flat):
        found = source.rectangle(rows, slice(1, 3), index)
        assert torch.equal(found.logits, by_number[flat[rows], 1:3])


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "without the last": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
    "sequence first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("of_student", LAYOUTS)
@pytest.mark.parametrize("of_teacher", LAYOUTS)
def test_two_sides_of_few_views_are_compared_without_a_copy(
    of_student: str, of_teacher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = [torch.randn(3, 40, 8), torch.randn(3, 40, 8)]
    monkeypatch.setattr("mcore_logprobs.sources.given._MANY_VIEWS", 1 << 30)
    laid_out = [LAYOUTS[how](x) for how, x in zip((of_student, of_teacher), sides, strict=True)]
    student, teacher = (given_logits(x) for x in laid_out)
    pair, at = beside(student, teacher), 0
    assert pair.student.num_rows == 120
    order = pair.to_row_order(torch.arange(120).view(3, 40))
    for tile in pair.tiles():
        for placed in tile.chunks():
            assert placed.rows.start == at
            at = placed.rows.stop
            for chunk, x, whole in zip((placed.chunk, placed.other), laid_out, sides, strict=True):
                assert chunk.logits.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
                assert torch.equal(chunk.logits, whole.flatten(0, 1)[order[placed.rows]])
    assert at == 120


@given(strided(), st.randoms())
def test_a_backward_walks_as_its_forward_did(x, random):
    """Whatever strides a saved-tensor hook gives the logits back with."""
    source = given_logits(x)
    order = list(range(x.dim()))
    random.shuffle(order)
    inverse = sorted(range(x.dim()), key=order.__getitem__)
    again = source.options.bind(x.permute(order).contiguous().permute(inverse))
    walked = [torch.cat([placed.chunk.logits for placed in s.chunks()]) for s in (source, again)]
    assert torch.equal(*walked)


@pytest.mark.parametrize(
    ("x", "blocks"),
    [
        (torch.zeros(5, 8), 1),
        (torch.zeros(5, 16)[:, 3:9], 1),
        (torch.zeros(4, 5, 8), 1),
        (torch.zeros(4, 5, 8).transpose(0, 1), 1),
        (torch.zeros(4, 301, 4096)[:, :-1], 4),  # one per sequence
        (torch.zeros(6, 4, 8)[:-1], 1),
        (torch.zeros(4, 10, 8)[:, ::2], 1),
        (torch.zeros(2, 3, 4, 8).permute(2, 0, 1, 3), 1),
    ],
)
def test_few_blocks_and_no_copy(x, blocks):
    source = given_logits(x)
    with TensorsMade() as made:
        assert len(list(source.chunks())) == blocks
    assert made.made == []


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_given_teacher_logits_of_some_rows_have_their_temperatures(kind: str) -> None:
    """In tiles of two rows by six blocks."""
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(700, 8, requires_grad=True)
    teacher, temperature = 2.0 * torch.randn(9, 700), torch.linspace(0.4, 2.5, 9)
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1], dtype=torch.bool)
    upstream, held = torch.linspace(-1.0, 2.0, 9), 4 * 700 * 2
    sizes = {"min_block": 64, "max_block": 128, "block_step": 64, "tile_rows": 2}
    with budgets.use(replace(budgets.CPU, held_bytes=held, max_held_bytes=held, **sizes)):
        found = linear_kl_div(
            hidden, weight, teacher, kind=kind, temperature=temperature, mask=mask, compact=True
        )
        got = torch.autograd.grad((found * upstream).sum(), (hidden, weight))
    over = temperature.double().unsqueeze(1)
    logp = (hidden.double() @ weight.double().t() / over).log_softmax(-1)
    logq = (teacher.double() / over).log_softmax(-1)
    a, b = (logq, logp) if kind == "forward" else (logp, logq)
    exact = torch.where(mask, (a.exp() * (a - b)).sum(-1), 0.0)
    want = torch.autograd.grad((exact * upstream).sum(), (hidden, weight))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def _some_rows(hidden: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    part = hidden.tensor_split(world_size())[world_rank()].clone().requires_grad_()
    shard = weight.tensor_split(world_size())[world_rank()].clone().requires_grad_()
    found = linear_token_stats(
        part, shard, rows * 2 % 6, rows=rows, sequence_parallel=True, tp_group=world_group()
    )
    loss = (found.logprobs * (rows + 1.0).double()).sum()
    return found.logprobs.detach(), *torch.autograd.grad(loss, (part, shard))


@pytest.mark.parametrize("world", [2, 3])
def test_padding_among_named_rows_is_no_row_that_was_left_out(ranks, world: int) -> None:
    """Of rank 0's rows one is named; its others are filled up, and not with row 0, which is NaN."""
    hidden = torch.randn(12, 3, dtype=torch.float64)
    weight = torch.randn(6, 3, dtype=torch.float64)
    rows = torch.tensor([9, 1, 11, 10, 9, 12 // world + 1])
    hidden[0] = torch.nan
    runs = on_ranks(ranks, world, _some_rows, hidden, weight, rows)
    h, w = (x.clone().requires_grad_() for x in (hidden, weight))
    logprobs = (h[rows] @ w.t()).log_softmax(-1).gather(1, (rows * 2 % 6).unsqueeze(1)).squeeze(1)
    on_hidden, on_weight = torch.autograd.grad((logprobs * (rows + 1.0).double()).sum(), (h, w))
    for run in runs:
        torch.testing.assert_close(run[0], logprobs.detach())
    torch.testing.assert_close(torch.cat([run[1] for run in runs]), on_hidden)
    torch.testing.assert_close(torch.cat([run[2] for run in runs]), on_weight)
