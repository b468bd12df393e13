"""linear_token_stats against float64: statistics, gradients, what it sends and what it holds."""

from __future__ import annotations

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import linear_token_stats, vocab_parallel_token_stats
from mcore_logprobs.bench.counting import CollectivesMade
from tests.fused.common import (
    LAYOUTS,
    Case,
    Problem,
    make_problem,
    shard_problem,
)
from tests.logits.common import on_ranks, world_group

ALL = {"entropy": True, "target_rank": True}
OPTIONS = {
    "plain": {},
    "scale, temperature": {"logit_scale": 0.5, "temperature": 0.7},
    "softcap": {"softcap": 3.0},
    # At TP 2 and TP 3 the last rank's whole shard is masked.
    "masked": {"vocab_size": 11},
    "smoothing": {"label_smoothing": 0.2},
    "all": {
        "logit_scale": 0.7,
        "softcap": 5.0,
        "temperature": 1.4,
        "vocab_size": 17,
        "label_smoothing": 0.1,
    },
}


def test_against_plain_torch_in_float64():
    """The operation on one process, line by line."""
    # 5 x 2 rows in tiles of 4 leave a ragged tile; 9 columns, of which the last is padding; a
    # width of 3, unlike every other size, so that a transposed product cannot pass.
    hidden = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 8, (5, 2))
    target[3, 1] = -100
    upstream = list(torch.randn(3, 5, 2, dtype=torch.float64))  # a gradient a token and output
    stats = linear_token_stats(
        hidden,
        weight,
        target,
        entropy=True,
        logit_scale=0.5,
        softcap=2.0,
        temperature=0.7,
        vocab_size=8,
        chunk_size=4,
    )
    found = [stats.logprobs, stats.entropy, stats.lse]
    grads = torch.autograd.grad(found, [hidden, weight], upstream)

    z = 2.0 * torch.tanh(0.5 * (hidden @ weight[:8].t()) / 2.0) / 0.7
    logp = z.log_softmax(-1)
    keep, column = target != -100, target.clamp(min=0).unsqueeze(-1)
    logprobs = logp.gather(-1, column).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    expected = [torch.where(keep, x, 0.0) for x in (logprobs, entropy, z.logsumexp(-1))]
    expected_grads = torch.autograd.grad(expected, [hidden, weight], upstream)

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)


def _case(problem: Problem, options: dict) -> Case:
    """Every statistic is asked for."""
    return Case(problem, ALL | options)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_values_and_gradients(layout, dtype, options, bias):
    problem = make_problem(dtype=dtype, bias=bias, true_vocab=options.get("vocab_size"))
    _case(problem, options).run(layout).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_other_dtypes(layout, dtype):
    problem = make_problem(dtype=dtype, bias=True, true_vocab=17)
    _case(problem, OPTIONS["all"]).run(layout).check()


@pytest.mark.parametrize("chunk_size", [1, 5, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_chunk_sizes(layout, dtype, chunk_size):
    problem = make_problem(dtype=dtype, true_vocab=20)
    _case(problem, {"chunk_size": chunk_size, "vocab_size": 20}).run(layout).check()


@pytest.mark.parametrize("name", ["logprobs", "entropy", "lse"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradient_of_one_output_alone(smoothing, name):
    problem = make_problem(names=(name,))
    _case(problem, {"label_smoothing": smoothing, "chunk_size": 4}).run((2, True)).check()


@pytest.mark.parametrize("lead", [(12,), (6, 1), (6, 2), (6, 3)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_leading_shapes(layout, lead):
    _case(make_problem(lead), {"chunk_size": 4}).run(layout).check()


@pytest.mark.parametrize("layout", [(1, False), (2, True)], ids=str)
def test_several_blocks_of_columns(layout):
    """Wide enough for the vocabulary to be cut as well as the rows, with a ragged last block."""
    problem = make_problem((6, 2), width=4, vocab=18_002, bias=True, true_vocab=17_000)
    options = {"vocab_size": 17_000, "softcap": 4.0, "label_smoothing": 0.1}
    _case(problem, options).run(layout).check(ulps=16.0)
    _case(problem, options | {"chunk_size": 4}).run(layout).check(ulps=16.0)


@pytest.mark.parametrize("lead", [(0,), (0, 2)], ids=str)
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_zero_rows(layout, compact, lead):
    _zero(layout, make_problem(lead), compact)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nothing_but_ignored_rows(layout, compact):
    _zero(layout, make_problem(ignored=2.0), compact)


def _zero(layout: tuple[int, bool], problem: Problem, compact: bool) -> None:
    for stats, grads in _case(problem, {"compact": compact}).run(layout).runs:
        assert stats.logprobs.shape == problem.target.shape
        for value in (stats.logprobs, stats.entropy, stats.lse, *grads.values()):
            assert not value.any()
        assert (stats.target_rank == -1).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_large_logits(layout):
    problem = make_problem()
    problem.hidden *= 12
    _case(problem, {}).run(layout).check()


def _tied(problem: Problem) -> tuple[Tensor, Tensor]:
    """The weight is used twice, as a tied embedding is; both gradients must reach it."""
    hidden, weight, _ = shard_problem(problem, False)
    out = linear_token_stats(hidden, weight, problem.target, tp_group=world_group())
    other = (weight * 2.0).sum()
    (out.logprobs.sum() + other).backward()
    (alone,) = torch.autograd.grad(
        linear_token_stats(hidden, weight, problem.target, tp_group=world_group()).logprobs.sum(),
        weight,
    )
    assert weight.grad is not None
    return weight.grad, alone + 2.0


def test_a_weight_used_twice(ranks):
    for found, expected in on_ranks(ranks, 2, _tied, make_problem()):
        torch.testing.assert_close(found, expected)


# ---- against the operation on logits ------------------------------------------------------------


def test_a_bf16_head_s_rounding_is_avoided_and_can_be_asked_for():
    problem = make_problem((256,), width=64, vocab=512, dtype=torch.bfloat16, names=("logprobs",))
    exact = Case(problem).truth().stats.logprobs
    wide = linear_token_stats(problem.hidden, problem.weight, problem.target).logprobs
    narrow = linear_token_stats(
        problem.hidden, problem.weight, problem.target, logits_dtype=torch.bfloat16
    ).logprobs
    head = vocab_parallel_token_stats(problem.hidden @ problem.weight.t(), problem.target).logprobs
    assert (wide - exact).abs().max() < 2e-5
    assert (head - exact).abs().max() > 1e-2
    # The same rounding as the head's, up to the products' own last bits, which rounding may flip.
    assert (narrow - head).abs().mean() < 0.1 * (head - exact).abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradient_is_no_worse_in_256_chunks(dtype):
    problem = make_problem((256,), width=16, vocab=64, dtype=dtype, names=("logprobs",))
    exact = Case(problem).truth().grads["weight"]

    def error(chunk_size: int | None) -> float:
        grad = Case(problem, {"chunk_size": chunk_size}).on_rank()[1]["weight"]
        return ((grad.double() - exact).norm() / exact.norm()).item()

    one, many = error(None), error(1)
    # float32 sums differ in their last bits; bf16 is rounded once in either case.
    assert many <= (2.0 * one if dtype == torch.float32 else 1.001 * one)
    assert one < (1e-6 if dtype == torch.float32 else 3e-3)


# ---- mistakes -----------------------------------------------------------------------------------


def _refused(operands: dict, options: dict) -> tuple[str, list[str]]:
    problem = make_problem((6, 2))
    hidden, weight, _ = shard_problem(problem, options.get("sequence_parallel", False))
    inputs = {"hidden": hidden, "weight": weight, "target": problem.target} | operands
    options = {"tp_group": dist.group.WORLD} | options
    with CollectivesMade() as made:
        try:
            linear_token_stats(inputs["hidden"], inputs["weight"], inputs["target"], **options)
        except ValueError as error:
            return str(error), made.names
    return "", made.names


MISTAKES = [
    ({"hidden": torch.zeros(6, 2, 9)}, {}, ("weight", "[V/TP, 9]", "(12, 8)")),
    ({"hidden": torch.zeros(8)}, {}, ("hidden", "2 dimension", "(8,)")),
    ({"hidden": torch.zeros(6, 2, 8).long()}, {}, ("hidden", "int64")),
    ({"hidden": torch.zeros(6, 2, 8).bfloat16()}, {}, ("weight", "bfloat16", "float32")),
    ({"weight": torch.zeros(12, 8, 1)}, {}, ("weight", "(12, 8, 1)")),
    ({"weight": torch.zeros(0, 8)}, {}, ("vocabulary", "0")),
    ({"target": torch.zeros(6, 2)}, {}, ("target", "integer", "float32")),
    ({"target": torch.zeros(2, 6).long()}, {}, ("target", "(6, 2)", "(2, 6)")),
    ({"target": None}, {}, ("target", "torch.Tensor", "NoneType")),
    ({"target": torch.full((6, 2), 24)}, {}, ("target", "[0, 24)", "24")),
    ({"target": torch.full((6, 2), 20)}, {"vocab_size": 20}, ("target", "[0, 20)", "20")),
    ({"target": torch.zeros(3, 2).long()}, {"sequence_parallel": True}, ("target", "(6, 2)")),
    ({}, {"bias": torch.zeros(24)}, ("bias", "[12]", "(24,)")),
    ({}, {"bias": torch.zeros(12).double()}, ("bias", "float32", "float64")),
    ({}, {"bias": 0.5}, ("bias", "torch.Tensor", "float")),
    ({}, {"logit_scale": 0.0}, ("logit_scale", "> 0", "0.0")),
    ({}, {"softcap": -1.0}, ("softcap", "> 0", "-1.0")),
    ({}, {"temperature": float("nan")}, ("temperature", "nan")),
    ({}, {"label_smoothing": 1.0}, ("label_smoothing", "[0, 1)", "1.0")),
    ({}, {"chunk_size": 0}, ("chunk_size", ">= 1", "0")),
    ({}, {"vocab_size": 25}, ("vocab_size", "1 to 24", "25")),
    ({}, {"backend": "numpy"}, ("backend", "'numpy'")),
    ({}, {"logits_dtype": torch.int8}, ("logits_dtype", "int8")),
    ({}, {"sequence_parallel": 1}, ("sequence_parallel", "1")),
    ({}, {"compact": None}, ("compact", "None")),
    ({}, {"entropy": "yes"}, ("entropy", "'yes'")),
    ({}, {"gradient_accumulation_fusion": True}, ("main_grad", "(12, 8)", "None")),
    ({}, {"tp_group": None}, ("tp_group", "2 ranks")),
]


@pytest.mark.parametrize(("operands", "options", "parts"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_refused_before_anything_is_sent(ranks, operands, options, parts):
    for message, sent in ranks(2).run(_refused, operands, options):
        assert message
        assert sent == []
        for part in parts:
            assert part in message, f"{part!r} is missing in: {message}"
