"""vocab_parallel_token_stats against float64, with a different upstream gradient for each token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_logprobs import vocab_parallel_token_stats
from tests.helpers import oracles
from tests.helpers.distributed import grid_groups
from tests.logits.common import (
    DTYPES,
    FIELDS,
    LAYOUTS,
    VOCAB,
    WORLDS,
    check_against_oracle,
    make_target,
    make_upstream,
    on_ranks,
    run_token_stats,
    shard,
    world_group,
)

ALL = {"entropy": True, "target_rank": True}
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3},
    # 11 of 24: at TP 2 and at TP 3 the last rank's whole shard is masked.
    "masked": {"vocab_size": 11},
    "one_masked": {"vocab_size": VOCAB - 1},
    "one_left": {"vocab_size": 1},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 2.0},
    "all": {"temperature": 1.3, "vocab_size": 17, "label_smoothing": 0.2, "softcap": 5.0},
}


def _check(
    ranks,
    world: int,
    whole: Tensor,
    target: Tensor,
    options: dict,
    *,
    upstream: tuple[str, ...] = FIELDS,
    layout: str = "plain",
    ulps: float = 4.0,
) -> None:
    options = ALL | options
    incoming = make_upstream(tuple(target.shape), whole.dtype, upstream)
    runs = on_ranks(ranks, world, run_token_stats, whole, target, incoming, layout, options)
    check_against_oracle(runs, whole, target, incoming, options, ulps)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_values_and_gradients(ranks, world, dtype, options):
    whole = (torch.randn(3, 7, VOCAB) * 3).to(dtype)
    target = make_target((3, 7), options.get("vocab_size", VOCAB))
    _check(ranks, world, whole, target, options)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("world", WORLDS)
def test_gradient_of_one_output_alone(ranks, world, smoothing, name):
    whole = torch.randn(9, VOCAB) * 3
    options = {"label_smoothing": smoothing}
    _check(ranks, world, whole, make_target((9,), VOCAB), options, upstream=(name,))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_layouts(ranks, world, dtype, layout):
    whole = torch.randn(4, 5, VOCAB).to(dtype)
    options = {"vocab_size": 22, "chunk_size": 3}
    _check(ranks, world, whole, make_target((4, 5), 22), options, layout=layout)


@pytest.mark.parametrize("lead", [(), (1,), (7,), (1, 1), (5, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_leading_shapes(ranks, world, lead):
    whole = torch.randn(*lead, VOCAB) * 2
    _check(ranks, world, whole, make_target(lead, VOCAB, ignored=0.0), {})


@pytest.mark.parametrize("lead", [(0,), (0, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_zero_rows(ranks, world, lead):
    whole = torch.randn(*lead, VOCAB)
    _check(ranks, world, whole, make_target(lead, VOCAB), {"label_smoothing": 0.1})


@pytest.mark.parametrize("width", [1, 5, 127])
@pytest.mark.parametrize("world", WORLDS)
def test_odd_widths(ranks, world, width):
    vocab = width * world
    whole = torch.randn(6, vocab, dtype=torch.bfloat16) * 2
    _check(ranks, world, whole, make_target((6,), vocab), {})


@pytest.mark.parametrize("chunk_size", [1, 4, 21, 1000])
@pytest.mark.parametrize("world", WORLDS)
def test_chunk_sizes_change_nothing(ranks, world, chunk_size):
    whole = torch.randn(3, 7, VOCAB).bfloat16()
    target = make_target((3, 7), VOCAB)
    upstream = make_upstream((3, 7), whole.dtype)
    args = (run_token_stats, whole, target, upstream, "plain")
    default = on_ranks(ranks, world, *args, ALL)
    chunked = on_ranks(ranks, world, *args, ALL | {"chunk_size": chunk_size})
    for one, other in zip(default, chunked, strict=True):
        for name in (*FIELDS, "target_rank", "grad"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-6, atol=0)


# ---- hard numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "options"),
    [
        (-120.0, {"label_smoothing": 0.1}),
        (80.0, {"label_smoothing": 0.1}),
        (80.0, {}),
        (1e4, {}),
        (-1e4, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_logits_far_from_zero(ranks, world, dtype, offset, options):
    whole = (torch.randn(9, VOCAB) * 2 + offset).to(dtype)
    _check(ranks, world, whole, make_target((9,), VOCAB), options)


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_logits_of_every_size_in_one_row(ranks, world, options):
    sizes = torch.tensor([-120.0, 80.0, 1e4, -1e4, 0.0, 1e-3])
    whole = sizes[torch.randint(0, 6, (12, VOCAB))] + torch.randn(12, VOCAB)
    _check(ranks, world, whole, make_target((12,), VOCAB), options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_minus_infinity_columns(ranks, world, dtype):
    whole = torch.randn(40, VOCAB) * 2
    whole[torch.rand(40, VOCAB) < 0.5] = -torch.inf
    whole[:4] = -torch.inf
    whole[:4, 5] = 1.5  # all -inf but one
    whole[4, : VOCAB // 2] = -torch.inf  # a whole shard at TP 2
    whole[:, 5] = whole[:, 5].clamp(min=-1.0)
    target = torch.where(torch.arange(40) % 3 == 0, 5, make_target((40,), VOCAB))
    whole = whole.to(dtype)
    # With a target at -inf the log-probability is -inf, and nothing but that may be.
    _check(ranks, world, whole, target, {"temperature": 0.9})


@pytest.mark.parametrize("world", WORLDS)
def test_minus_infinity_columns_have_no_share_in_label_smoothing(ranks, world):
    whole = torch.randn(20, VOCAB)
    whole[torch.rand(20, VOCAB) < 0.5] = -torch.inf
    whole[:, 3] = 0.25
    whole[0] = torch.where(torch.arange(VOCAB) == 3, 1.0, -torch.inf)
    target = torch.full((20,), 3)
    _check(ranks, world, whole, target, {"label_smoothing": 0.2, "vocab_size": 20})


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("world", WORLDS)
def test_ignored_rows_may_hold_anything(ranks, world, smoothing, junk):
    whole = torch.randn(4, 6, VOCAB)
    target = make_target((4, 6), VOCAB)
    assert (target == -100).any()
    whole[target == -100] = junk
    _check(ranks, world, whole, target, {"label_smoothing": smoothing})


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_masked_columns_may_hold_anything(ranks, world, dtype, junk):
    whole = torch.randn(8, VOCAB).to(dtype)
    whole[:, 11:] = junk
    options = {"vocab_size": 11, "softcap": 3.0, "label_smoothing": 0.1}
    clean = whole.nan_to_num(0.0, 0.0, 0.0)
    target = make_target((8,), 11)
    upstream = make_upstream((8,), dtype)
    runs = on_ranks(ranks, world, run_token_stats, whole, target, upstream, "plain", ALL | options)
    check_against_oracle(runs, clean, target, upstream, ALL | options)


@pytest.mark.parametrize("world", WORLDS)
def test_ignored_values_are_exact(ranks, world):
    whole = torch.randn(5, VOCAB)
    target = torch.tensor([-100, 3, -100, 7, -100])
    for run in on_ranks(ranks, world, run_token_stats, whole, target, {}, "plain", ALL):
        ignored = target == -100
        assert (run.logprobs[ignored] == 0).all()
        assert (run.entropy[ignored] == 0).all()
        assert (run.target_rank[ignored] == -1).all()
        assert (run.logprobs[~ignored] < 0).all()


@pytest.mark.parametrize("world", WORLDS)
def test_another_ignore_index_and_none(ranks, world):
    whole = torch.randn(6, VOCAB)
    _check(ranks, world, whole, torch.tensor([0, 3, 0, 23, 5, 0]), {"ignore_index": 0})
    _check(ranks, world, whole, torch.tensor([0, 3, 0, 23, 5, 0]), {"ignore_index": None})
    _check(ranks, world, whole, torch.tensor([-1, 3, -1, 23, 5, 0]), {"ignore_index": -1})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_integer_targets_of_other_widths(ranks, world, dtype):
    target = torch.tensor([0, 5, 12, 23]).to(dtype)
    _check(ranks, world, torch.randn(4, VOCAB), target, {})


# ---- autograd's manners -------------------------------------------------------------------------


def _twice(whole: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _, logits = shard(whole)
    out = vocab_parallel_token_stats(logits, target, tp_group=world_group(), entropy=True)
    loss = (out.logprobs * out.logprobs.detach()).sum() + out.entropy.sum()
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits, retain_graph=True)
    loss.backward()
    assert logits.grad is not None
    return first, second, logits.grad


@pytest.mark.parametrize("world", WORLDS)
def test_the_graph_can_be_walked_again(ranks, world):
    whole, target = torch.randn(6, VOCAB), make_target((6,), VOCAB)
    for first, second, third in on_ranks(ranks, world, _twice, whole, target):
        assert first.any()
        assert torch.equal(first, second)
        assert torch.equal(first, third)


def _without_graph(whole: Tensor, target: Tensor) -> None:
    _, logits = shard(whole)
    options = {"tp_group": world_group(), "entropy": True, "target_rank": True}
    with torch.no_grad():
        out = vocab_parallel_token_stats(logits, target, **options)
    detached = vocab_parallel_token_stats(logits.detach(), target, **options)
    for stats in (out, detached):
        for name in (*FIELDS, "target_rank"):
            assert not getattr(stats, name).requires_grad
    attached = vocab_parallel_token_stats(logits, target, **options)
    assert attached.logprobs.requires_grad
    assert attached.entropy.requires_grad
    assert not attached.target_rank.requires_grad
    assert torch.equal(attached.loss, -attached.logprobs)
    assert torch.equal(out.logprobs, attached.logprobs)


@pytest.mark.parametrize("world", WORLDS)
def test_no_grad_makes_no_graph(ranks, world):
    on_ranks(ranks, world, _without_graph, torch.randn(6, VOCAB), make_target((6,), VOCAB))


def test_gradcheck():
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, -100, 6, 2])

    def outputs(logits: Tensor) -> tuple[Tensor, ...]:
        out = vocab_parallel_token_stats(
            logits, target, entropy=True, temperature=0.8, softcap=4.0, label_smoothing=0.1
        )
        assert out.entropy is not None
        return out.logprobs, out.entropy, out.lse

    torch.autograd.gradcheck(outputs, logits)


def _on_subgroup(whole: Tensor, target: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    groups = grid_groups(tp=2, cp=2)
    width = VOCAB // 2
    column = groups.tp.rank() * width
    row = groups.cp.rank()  # each pair of ranks has a batch of its own
    logits = whole[row, :, column : column + width].clone().requires_grad_()
    out = vocab_parallel_token_stats(logits, target[row], tp_group=groups.tp)
    return out.logprobs, torch.autograd.grad(out.logprobs, logits, upstream[row])[0]


def test_a_group_that_is_not_the_world(ranks):
    whole, target = torch.randn(2, 5, VOCAB), make_target((2, 5), VOCAB)
    upstream = torch.randn(2, 5)
    results = ranks(4).run(_on_subgroup, whole, target, upstream)
    leaf = whole.double().requires_grad_()
    exact = oracles.token_stats(leaf, target)
    (grad,) = torch.autograd.grad(exact.logprobs, leaf, upstream.double())
    for rank, (logprobs, mine) in enumerate(results):
        row, part = divmod(rank, 2)
        torch.testing.assert_close(logprobs.double(), exact.logprobs[row], rtol=1e-6, atol=1e-6)
        expected = grad[row, :, part * VOCAB // 2 : (part + 1) * VOCAB // 2]
        torch.testing.assert_close(mine.double(), expected, rtol=1e-6, atol=1e-6)


def test_float64_logits_give_float64_statistics():
    out = vocab_parallel_token_stats(
        torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 1, 2]), entropy=True
    )
    assert {out.logprobs.dtype, out.entropy.dtype, out.lse.dtype} == {torch.float64}
