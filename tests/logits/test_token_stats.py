"""vocab_parallel_token_stats against float64, with a different upstream gradient for each token."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
    Case,
    make_target,
    make_upstream,
    on_ranks,
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


def test_against_plain_torch_in_float64():
    """The operation on one process, line by line."""
    # 7 columns are no multiple of a vector, and the last one is padding. 6 rows in chunks of 4
    # leave a ragged chunk; one row is ignored, and two have the same target.
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0, 5, -100], [3, 3, 1]])
    upstream = list(torch.randn(3, 2, 3, dtype=torch.float64))  # a gradient a token and output
    stats = vocab_parallel_token_stats(
        logits,
        target,
        entropy=True,
        target_rank=True,
        temperature=0.7,
        vocab_size=6,
        chunk_size=4,
    )
    found = [stats.logprobs, stats.entropy, stats.lse]
    (grad,) = torch.autograd.grad(found, logits, upstream)

    z = logits[..., :6] / 0.7
    logp = z.log_softmax(-1)
    keep, column = target != -100, target.clamp(min=0).unsqueeze(-1)
    logprobs = logp.gather(-1, column).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    expected = [torch.where(keep, x, 0.0) for x in (logprobs, entropy, z.logsumexp(-1))]
    rank = (z > z.gather(-1, column)).sum(-1)
    (expected_grad,) = torch.autograd.grad(expected, logits, upstream)

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)
    assert torch.equal(stats.target_rank, torch.where(keep, rank, -1))


@dataclass
class StatsCase(Case):
    """A call that asks for every statistic; `fields` are those that get a gradient."""

    target: Tensor
    fields: tuple[str, ...] = field(default=FIELDS, kw_only=True)

    def __post_init__(self) -> None:
        self.options = ALL | self.options
        lead, dtype = tuple(self.target.shape), self.whole.dtype
        self.upstream = self.upstream or make_upstream(lead, dtype, self.fields)

    def call(self, logits: Tensor) -> dict[str, Tensor]:
        target = self.target.clone()
        version = target._version
        out = vocab_parallel_token_stats(logits, target, tp_group=world_group(), **self.options)
        assert version == target._version, "the target's version counter moved"
        return {name: getattr(out, name) for name in (*FIELDS, "target_rank")}

    def truth(self, whole: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        options = {k: v for k, v in self.options.items() if k not in (*ALL, "chunk_size")}
        stats = oracles.token_stats(whole, self.target, dtype=dtype, **options)
        return {name: getattr(stats, name) for name in (*FIELDS, "target_rank")}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_values_and_gradients(world, dtype, options):
    whole = (torch.randn(3, 7, VOCAB) * 3).to(dtype)
    target = make_target((3, 7), options.get("vocab_size", VOCAB))
    StatsCase(whole, target, options=options).run(world).check()


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("world", WORLDS)
def test_gradient_of_one_output_alone(world, smoothing, name):
    whole = torch.randn(9, VOCAB) * 3
    options = {"label_smoothing": smoothing}
    StatsCase(whole, make_target((9,), VOCAB), options=options, fields=(name,)).run(world).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_layouts(world, dtype, layout):
    whole = torch.randn(4, 5, VOCAB).to(dtype)
    options = {"vocab_size": 22, "chunk_size": 3}
    StatsCase(whole, make_target((4, 5), 22), options=options, layout=layout).run(world).check()


@pytest.mark.parametrize("lead", [(), (1,), (7,), (1, 1), (5, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_leading_shapes(world, lead):
    whole = torch.randn(*lead, VOCAB) * 2
    StatsCase(whole, make_target(lead, VOCAB, ignored=0.0)).run(world).check()


@pytest.mark.parametrize("lead", [(0,), (0, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_zero_rows(world, lead):
    whole = torch.randn(*lead, VOCAB)
    StatsCase(whole, make_target(lead, VOCAB), options={"label_smoothing": 0.1}).run(world).check()


@pytest.mark.parametrize("width", [1, 5, 127])
@pytest.mark.parametrize("world", WORLDS)
def test_odd_widths(world, width):
    vocab = width * world
    whole = torch.randn(6, vocab, dtype=torch.bfloat16) * 2
    StatsCase(whole, make_target((6,), vocab)).run(world).check()


@pytest.mark.parametrize("chunk_size", [1, 4, 21, 1000])
@pytest.mark.parametrize("world", WORLDS)
def test_chunk_sizes_change_nothing(world, chunk_size):
    whole = torch.randn(3, 7, VOCAB).bfloat16()
    case = StatsCase(whole, make_target((3, 7), VOCAB))
    chunked = replace(case, options={"chunk_size": chunk_size}).run(world).runs
    for one, other in zip(case.run(world).runs, chunked, strict=True):
        for name in (*FIELDS, "target_rank"):
            torch.testing.assert_close(one.outputs[name], other.outputs[name], rtol=1e-6, atol=0)
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=0)


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
def test_logits_far_from_zero(world, dtype, offset, options):
    whole = (torch.randn(9, VOCAB) * 2 + offset).to(dtype)
    StatsCase(whole, make_target((9,), VOCAB), options=options).run(world).check()


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_logits_of_every_size_in_one_row(world, options):
    sizes = torch.tensor([-120.0, 80.0, 1e4, -1e4, 0.0, 1e-3])
    whole = sizes[torch.randint(0, 6, (12, VOCAB))] + torch.randn(12, VOCAB)
    StatsCase(whole, make_target((12,), VOCAB), options=options).run(world).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_minus_infinity_columns(world, dtype):
    whole = torch.randn(40, VOCAB) * 2
    whole[torch.rand(40, VOCAB) < 0.5] = -torch.inf
    whole[:4] = -torch.inf
    whole[:4, 5] = 1.5  # all -inf but one
    whole[4, : VOCAB // 2] = -torch.inf  # a whole shard at TP 2
    whole[:, 5] = whole[:, 5].clamp(min=-1.0)
    target = torch.where(torch.arange(40) % 3 == 0, 5, make_target((40,), VOCAB))
    whole = whole.to(dtype)
    # With a target at -inf the log-probability is -inf, and nothing but that may be.
    StatsCase(whole, target, options={"temperature": 0.9}).run(world).check()


@pytest.mark.parametrize("world", WORLDS)
def test_minus_infinity_columns_have_no_share_in_label_smoothing(world):
    whole = torch.randn(20, VOCAB)
    whole[torch.rand(20, VOCAB) < 0.5] = -torch.inf
    whole[:, 3] = 0.25
    whole[0] = torch.where(torch.arange(VOCAB) == 3, 1.0, -torch.inf)
    target = torch.full((20,), 3)
    StatsCase(whole, target, options={"label_smoothing": 0.2, "vocab_size": 20}).run(world).check()


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("world", WORLDS)
def test_ignored_rows_may_hold_anything(world, smoothing, junk):
    whole = torch.randn(4, 6, VOCAB)
    target = make_target((4, 6), VOCAB)
    assert (target == -100).any()
    whole[target == -100] = junk
    StatsCase(whole, target, options={"label_smoothing": smoothing}).run(world).check()


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_masked_columns_may_hold_anything(world, dtype, junk):
    whole = torch.randn(8, VOCAB).to(dtype)
    whole[:, 11:] = junk
    options = {"vocab_size": 11, "softcap": 3.0, "label_smoothing": 0.1}
    clean = whole.nan_to_num(0.0, 0.0, 0.0)
    case = StatsCase(whole, make_target((8,), 11), options=options).run(world)
    case.whole = clean
    case.check()


@pytest.mark.parametrize("world", WORLDS)
def test_ignored_values_are_exact(world):
    whole = torch.randn(5, VOCAB)
    target = torch.tensor([-100, 3, -100, 7, -100])
    ignored = target == -100
    for run in StatsCase(whole, target, fields=()).run(world).runs:
        assert (run.outputs["logprobs"][ignored] == 0).all()
        assert (run.outputs["entropy"][ignored] == 0).all()
        assert (run.outputs["target_rank"][ignored] == -1).all()
        assert (run.outputs["logprobs"][~ignored] < 0).all()


@pytest.mark.parametrize("world", WORLDS)
def test_another_ignore_index_and_none(world):
    whole = torch.randn(6, VOCAB)
    for ignore_index, ids in (
        (0, [0, 3, 0, 23, 5, 0]),
        (None, [0, 3, 0, 23, 5, 0]),
        (-1, [-1, 3, -1, 23, 5, 0]),
    ):
        options = {"ignore_index": ignore_index}
        StatsCase(whole, torch.tensor(ids), options=options).run(world).check()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_integer_targets_of_other_widths(world, dtype):
    target = torch.tensor([0, 5, 12, 23]).to(dtype)
    StatsCase(torch.randn(4, VOCAB), target).run(world).check()


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


def test_statistics_are_none_unless_asked_for():
    stats = vocab_parallel_token_stats(torch.randn(3, 7), torch.arange(3))
    assert stats.entropy is stats.target_rank is stats.sum_pi_squared is None
