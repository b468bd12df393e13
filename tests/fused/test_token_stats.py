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
    Problem,
    check_gradients,
    check_stats,
    make_problem,
    run_linear,
    shard_problem,
    truth,
    whole_gradients,
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


def _check(
    ranks, layout: tuple[int, bool], problem: Problem, options: dict, ulps: float = 8.0
) -> None:
    world, sequence_parallel = layout
    runs = on_ranks(ranks, world, run_linear, problem, ALL | options, sequence_parallel)
    exact = truth(problem, options)
    plain = truth(
        problem,
        options,
        torch.float64 if problem.hidden.dtype == torch.float64 else torch.float32,
    )
    for stats, _ in runs:
        assert torch.equal(stats.logprobs, runs[0][0].logprobs), "ranks differ"
        check_stats(stats, exact, plain, problem, ulps)
    grads = whole_gradients([grad for _, grad in runs], sequence_parallel)
    check_gradients(grads, exact, plain, ulps)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_values_and_gradients(ranks, layout, dtype, options, bias):
    problem = make_problem(dtype=dtype, bias=bias, true_vocab=options.get("vocab_size"))
    _check(ranks, layout, problem, options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_other_dtypes(ranks, layout, dtype):
    problem = make_problem(dtype=dtype, bias=True, true_vocab=17)
    _check(ranks, layout, problem, OPTIONS["all"])


@pytest.mark.parametrize("chunk_size", [1, 5, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_chunk_sizes(ranks, layout, dtype, chunk_size):
    problem = make_problem(dtype=dtype, true_vocab=20)
    _check(ranks, layout, problem, {"chunk_size": chunk_size, "vocab_size": 20})


@pytest.mark.parametrize("name", ["logprobs", "entropy", "lse"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradient_of_one_output_alone(ranks, smoothing, name):
    problem = make_problem(names=(name,))
    _check(ranks, (2, True), problem, {"label_smoothing": smoothing, "chunk_size": 4})


@pytest.mark.parametrize("lead", [(12,), (6, 1), (6, 2), (6, 3)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_leading_shapes(ranks, layout, lead):
    _check(ranks, layout, make_problem(lead), {"chunk_size": 4})


@pytest.mark.parametrize("layout", [(1, False), (2, True)], ids=str)
def test_several_blocks_of_columns(ranks, layout):
    """Wide enough for the vocabulary to be cut as well as the rows, with a ragged last block."""
    problem = make_problem((6, 2), width=4, vocab=18_002, bias=True, true_vocab=17_000)
    options = {"vocab_size": 17_000, "softcap": 4.0, "label_smoothing": 0.1}
    _check(ranks, layout, problem, options, ulps=16.0)
    _check(ranks, layout, problem, options | {"chunk_size": 4}, ulps=16.0)


@pytest.mark.parametrize("lead", [(0,), (0, 2)], ids=str)
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_zero_rows(ranks, layout, compact, lead):
    _zero(ranks, layout, make_problem(lead), compact)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nothing_but_ignored_rows(ranks, layout, compact):
    _zero(ranks, layout, make_problem(ignored=2.0), compact)


def _zero(ranks, layout: tuple[int, bool], problem: Problem, compact: bool) -> None:
    world, sequence_parallel = layout
    for stats, grads in on_ranks(
        ranks, world, run_linear, problem, ALL | {"compact": compact}, sequence_parallel
    ):
        assert stats.logprobs.shape == problem.target.shape
        for value in (stats.logprobs, stats.entropy, stats.lse, *grads.values()):
            assert not value.any()
        assert (stats.target_rank == -1).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_large_logits(ranks, layout):
    problem = make_problem()
    problem.hidden *= 12
    _check(ranks, layout, problem, {})


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
    exact = truth(problem, {}).stats.logprobs
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
    exact = truth(problem, {}).grads["weight"]

    def error(chunk_size: int | None) -> float:
        grad = run_linear(problem, {"chunk_size": chunk_size}, False)[1]["weight"]
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
    ({"target": torch.full((6, 2), 24)}, {}, ("target", "[0, 24)", "24")),
    ({"target": torch.full((6, 2), 20)}, {"vocab_size": 20}, ("target", "[0, 20)", "20")),
    ({"target": torch.zeros(3, 2).long()}, {"sequence_parallel": True}, ("target", "(6, 2)")),
    ({}, {"bias": torch.zeros(24)}, ("bias", "[12]", "(24,)")),
    ({}, {"bias": torch.zeros(12).double()}, ("bias", "float32", "float64")),
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
