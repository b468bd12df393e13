"""linear_token_stats against float64: statistics, gradients, what it sends and what it holds."""

from __future__ import annotations

from typing import Any

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mcore_logprobs import linear_token_stats, vocab_parallel_token_stats
from mcore_logprobs.testing import oracles
from mcore_logprobs.testing.counting import CollectivesMade
from mcore_logprobs.testing.memory import TensorsMade
from tests.ops.common import on_ranks, world_group, world_size
from tests.ops.linear_common import (
    LAYOUTS,
    Problem,
    check_gradients,
    check_stats,
    make_problem,
    shard_problem,
    truth,
    whole_gradients,
)

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


def _run(problem: Problem, options: dict[str, Any], sequence_parallel: bool) -> tuple:
    """(TokenStats, gradients by name) of this rank; inputs must come out untouched."""
    hidden, weight, bias = shard_problem(problem, sequence_parallel)
    leaves = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    kept = {name: (x.detach().clone(), x._version) for name, x in leaves.items()}
    out = linear_token_stats(
        hidden,
        weight,
        problem.target,
        bias=bias,
        tp_group=world_group(),
        sequence_parallel=sequence_parallel,
        **options,
    )
    outputs = [getattr(out, name) for name in problem.upstream]
    incoming = [value.clone() for value in problem.upstream.values()]
    grads = torch.autograd.grad(outputs, list(leaves.values()), incoming)
    assert all(map(torch.equal, incoming, problem.upstream.values()))
    for name, leaf in leaves.items():
        assert torch.equal(leaf.detach(), kept[name][0])
        assert leaf._version == kept[name][1]
    return out, dict(zip(leaves, grads, strict=True))


def _check(
    ranks, layout: tuple[int, bool], problem: Problem, options: dict, ulps: float = 8.0
) -> None:
    world, sequence_parallel = layout
    runs = on_ranks(ranks, world, _run, problem, ALL | options, sequence_parallel)
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
        ranks, world, _run, problem, ALL | {"compact": compact}, sequence_parallel
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
        grad = _run(problem, {"chunk_size": chunk_size}, False)[1]["weight"]
        return ((grad.double() - exact).norm() / exact.norm()).item()

    one, many = error(None), error(1)
    # float32 sums differ in their last bits; bf16 is rounded once in either case.
    assert many <= (2.0 * one if dtype == torch.float32 else 1.001 * one)
    assert one < (1e-6 if dtype == torch.float32 else 3e-3)


# ---- frozen inputs, compaction ------------------------------------------------------------------


def _products(problem: Problem, options: dict, frozen: str | None) -> tuple[float, float]:
    """(forward, backward) in units of one product of the whole shapes."""
    hidden, weight, _ = shard_problem(problem, False)
    if frozen is not None:
        {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    one = 2 * problem.target.numel() * weight.numel()
    with FlopCounterMode(display=False) as forward:
        out = linear_token_stats(hidden, weight, problem.target, **options)
    with FlopCounterMode(display=False) as backward:
        out.logprobs.sum().backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")
    return forward.get_total_flops() / one, backward.get_total_flops() / one


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize(
    ("frozen", "backward"), [(None, 3.0), ("weight", 2.0), ("hidden", 2.0)], ids=str
)
def test_a_frozen_input_skips_its_product(frozen, backward, chunk_size):
    problem = make_problem((12,))
    options = {"chunk_size": chunk_size}
    assert _products(problem, options, frozen) == (1.0, backward)


def _frozen(problem: Problem, frozen: str, sequence_parallel: bool) -> Tensor | None:
    hidden, weight, _ = shard_problem(problem, sequence_parallel)
    leaves = {"hidden": hidden, "weight": weight}
    leaves.pop(frozen).requires_grad_(False)
    out = linear_token_stats(
        hidden,
        weight,
        problem.target,
        tp_group=world_group(),
        sequence_parallel=sequence_parallel,
        chunk_size=4,
    )
    with CollectivesMade() as backward:
        (out.logprobs * problem.upstream["logprobs"]).sum().backward()
    if frozen == "hidden":  # nothing to sum over ranks
        gathers = ["all_gather"] * (len(backward.names) if sequence_parallel else 0)
        assert backward.names == gathers
    (leaf,) = leaves.values()
    return leaf.grad


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_other_gradient_stays_right(ranks, sequence_parallel, frozen):
    problem = make_problem(names=("logprobs",))
    found = on_ranks(ranks, 2, _frozen, problem, frozen, sequence_parallel)
    exact, plain = truth(problem, {}), truth(problem, {}, torch.float32)
    name = "weight" if frozen == "hidden" else "hidden"
    grad = torch.cat(found) if name == "weight" or sequence_parallel else found[0]
    oracles.assert_no_worse(grad, plain.grads[name], exact.grads[name], ulps=8.0)


def _saves_nothing(problem: Problem) -> None:
    hidden, weight, _ = shard_problem(problem, False)
    with torch.no_grad(), TensorsMade() as made:
        out = linear_token_stats(
            hidden, weight, problem.target, entropy=True, tp_group=world_group()
        )
    assert not out.logprobs.requires_grad
    del out
    assert made.live == 0
    plain = linear_token_stats(hidden.detach(), weight.detach(), problem.target)
    assert not plain.logprobs.requires_grad


def test_no_grad_saves_nothing():
    _saves_nothing(make_problem())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_compaction_changes_nothing(ranks, layout, dtype):
    world, sequence_parallel = layout
    problem = make_problem((12, 3), dtype=dtype, ignored=0.6, true_vocab=20)
    options = ALL | {"vocab_size": 20, "temperature": 0.8, "label_smoothing": 0.1}
    plain = on_ranks(ranks, world, _run, problem, options, sequence_parallel)
    options = options | {"compact": True}
    compact = on_ranks(ranks, world, _run, problem, options, sequence_parallel)
    for (stats, grads), (expected, expected_grads) in zip(compact, plain, strict=True):
        # The same arithmetic; a product of fewer rows may add up in another order.
        for name in ("logprobs", "entropy", "target_rank", "lse"):
            torch.testing.assert_close(
                getattr(stats, name), getattr(expected, name), rtol=1e-6, atol=1e-6
            )
        for name, grad in grads.items():
            rtol = 8e-3 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(grad, expected_grads[name], rtol=rtol, atol=2e-6)
    hidden = whole_gradients([grads for _, grads in compact], sequence_parallel)["hidden"]
    assert not hidden[problem.target == -100].any()


def test_compaction_is_paid_by_kept_rows_only():
    problem = make_problem((40,), ignored=0.7)
    share = (problem.target != -100).float().mean().item()
    assert 0.1 < share < 0.6
    forward, backward = _products(problem, {"compact": True}, None)
    assert forward == pytest.approx(share)
    assert backward == pytest.approx(3 * share)


# ---- traffic and memory -------------------------------------------------------------------------


def _traffic(problem: Problem, options: dict, sequence_parallel: bool) -> tuple:
    hidden, weight, _ = shard_problem(problem, sequence_parallel)
    with CollectivesMade() as forward:
        out = linear_token_stats(
            hidden,
            weight,
            problem.target,
            tp_group=world_group(),
            sequence_parallel=sequence_parallel,
            **options,
        )
    with CollectivesMade() as backward:
        (out.logprobs * problem.upstream["logprobs"]).sum().backward()
    return forward.made, backward.made


@pytest.mark.parametrize(("options", "k"), [({}, 3), ({"entropy": True}, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_one_all_gather_forward_and_one_reduction_backward(ranks, world, dtype, options, k):
    problem = make_problem((12, 2), dtype=dtype)
    for forward, backward in ranks(world).run(_traffic, problem, options, False):
        assert [made.name for made in forward] == ["all_gather"]
        assert forward[0].nbytes == 24 * k * 4
        assert [made.name for made in backward] == ["all_reduce"]
        assert backward[0].nbytes == 24 * 8 * 4
    for forward, backward in ranks(world).run(_traffic, problem, options, True):
        # Sequence parallelism gathers hidden besides, once forward and once to recompute.
        assert [made.name for made in forward] == ["all_gather", "all_gather"]
        assert forward[0].nbytes == problem.hidden.nbytes // world
        assert forward[1].nbytes == 24 * k * 4
        assert [made.name for made in backward] == ["all_gather", "reduce_scatter"]
        assert backward[1].nbytes == 24 * 8 * 4


def test_chunks_need_no_more_statistics_and_send_dhidden_once(ranks):
    problem = make_problem((12, 2))
    for forward, backward in ranks(2).run(_traffic, problem, {"chunk_size": 5}, False):
        assert [made.name for made in forward] == ["all_gather"]
        assert {made.name for made in backward} == {"all_reduce"}
        assert sum(made.nbytes for made in backward) == 24 * 8 * 4


def _allocations(
    rows: int, vocab: int, dtype: torch.dtype, options: dict, sequence_parallel: bool
) -> tuple:
    width = 32
    local = rows // world_size() if sequence_parallel else rows
    hidden = torch.randn(local, width).to(dtype).requires_grad_()
    weight = torch.randn(vocab // world_size(), width).to(dtype).requires_grad_()
    target = torch.arange(rows) % vocab
    with TensorsMade() as forward:
        out = linear_token_stats(
            hidden,
            weight,
            target,
            tp_group=world_group(),
            sequence_parallel=sequence_parallel,
            **options,
        )
    kept = forward.live
    total = out.logprobs.sum() + (0.0 if out.entropy is None else out.entropy.sum())
    with TensorsMade() as backward:
        total.backward()
    grads = hidden.nbytes + weight.nbytes
    wide = 4 * (rows * width + weight.numel())  # both gradients in float32
    return forward.made, forward.peak, kept, backward.made, backward.peak, grads, wide


@pytest.mark.parametrize(
    "options", [{}, ALL | {"softcap": 20.0, "temperature": 0.5}], ids=["plain", "all"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [(1, False), (2, True)], ids=str)
def test_nothing_larger_than_two_chunks_is_made(ranks, layout, dtype, options):
    world, sequence_parallel = layout
    rows, vocab, chunk_size = 512, 8192, 32
    chunk = chunk_size * (vocab // world) * 4
    args = (rows, vocab, dtype, options | {"chunk_size": chunk_size}, sequence_parallel)
    per_row = rows * 8 * 40
    for made, peak, kept, made_backward, peak_backward, _, wide in on_ranks(
        ranks, world, _allocations, *args
    ):
        gradient_shapes = {(vocab // world, 32), (rows, 32), (rows // world, 32)}
        for one in (*made, *made_backward):
            assert one.nbytes <= 2 * chunk or one.shape in gradient_shapes, one
        assert peak <= 4 * chunk + wide + per_row
        assert kept <= per_row
        assert peak_backward <= 4 * chunk + 2 * wide + per_row


def test_the_default_budget_holds():
    budget = 32 << 20
    rows, vocab = 1024, 32768  # 128 MiB of float32 logits
    _, peak, kept, _, peak_backward, _, wide = _allocations(
        rows, vocab, torch.float32, {"entropy": True}, False
    )
    assert kept <= rows * 8 * 40
    assert peak <= 2 * budget
    assert peak_backward <= 2 * budget + wide


# ---- main_grad ----------------------------------------------------------------------------------


def _main_grad(
    problems: list[Problem], main_dtype: torch.dtype, zero_out: bool, options: dict
) -> tuple[Tensor, Tensor]:
    """(main_grad, the sum of plain gradients) over the microbatches."""
    _, weight, _ = shard_problem(problems[0], False)
    weight = torch.nn.Parameter(weight.detach())
    weight.main_grad = torch.zeros_like(weight, dtype=main_dtype)
    weight.grad_added_to_main_grad = False
    if zero_out:
        weight.zero_out_wgrad = True
    expected = torch.zeros_like(weight, dtype=torch.float64)
    for problem in problems:
        hidden, plain, _ = shard_problem(problem, False)
        common = {"tp_group": world_group(), **options}
        upstream = problem.upstream["logprobs"]
        out = linear_token_stats(
            hidden, weight, problem.target, gradient_accumulation_fusion=True, **common
        )
        (out.logprobs * upstream).sum().backward()
        assert weight.grad_added_to_main_grad is True
        # The hooks of data parallelism fire on a gradient of the right shape, which nobody adds.
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape
        if zero_out:
            assert not weight.grad.any()
        weight.grad, weight.grad_added_to_main_grad = None, False
        unfused, same = hidden.detach().float().requires_grad_(), plain.detach().float()
        same.requires_grad_()
        out = linear_token_stats(unfused, same, problem.target, **common)
        (out.logprobs * upstream).sum().backward()
        expected += same.grad
        torch.testing.assert_close(hidden.grad.float(), unfused.grad, rtol=8e-3, atol=8e-3)
    assert weight.main_grad.dtype == main_dtype
    return weight.main_grad, expected


@pytest.mark.parametrize("chunk_size", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_main_grad_accumulates_in_float32(ranks, world, dtype, chunk_size):
    problems = [make_problem((12,), dtype=dtype, names=("logprobs",)) for _ in range(4)]
    options = {"chunk_size": chunk_size, "vocab_size": 20}
    for problem in problems:
        problem.weight = problems[0].weight
        problem.target.clamp_(max=19)
    for zero_out in (False, True):
        for found, expected in on_ranks(
            ranks, world, _main_grad, problems, torch.float32, zero_out, options
        ):
            scale = expected.abs().max()
            assert (found.double() - expected).abs().max() <= 2e-6 * scale


def _against_megatron(problems: list[Problem]) -> tuple[Tensor, Tensor]:
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size())
    try:
        vocab, width = problems[0].weight.shape
        config = ModelParallelConfig(
            tensor_model_parallel_size=world_size(), use_cpu_initialization=True
        )
        layer = ColumnParallelLinear(
            width, vocab, config=config, init_method=torch.nn.init.normal_, bias=False
        )
        _, shard, _ = shard_problem(problems[0], False)
        with torch.no_grad():
            layer.weight.copy_(shard)
        theirs = torch.zeros_like(layer.weight, dtype=torch.float32)
        ours = torch.nn.Parameter(shard.detach())
        ours.main_grad = torch.zeros_like(ours, dtype=torch.float32)
        for problem in problems:
            upstream = problem.upstream["logprobs"]
            hidden = problem.hidden.clone().requires_grad_()
            logits, _ = layer(hidden)
            loss = vocab_parallel_cross_entropy(logits.clone(), problem.target)
            (loss * upstream).sum().backward()
            theirs += layer.weight.grad  # what Megatron's data parallelism does after each
            layer.weight.grad = None
            same = problem.hidden.clone().requires_grad_()
            out = linear_token_stats(
                same, ours, problem.target, gradient_accumulation_fusion=True, chunk_size=5
            )
            (out.loss * upstream).sum().backward()
            torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(same.grad, hidden.grad, rtol=1e-5, atol=1e-5)
        return ours.main_grad, theirs
    finally:
        parallel_state.destroy_model_parallel()


def test_main_grad_is_what_megatrons_own_layer_accumulates(ranks):
    problems = [make_problem((6, 2), ignored=0.0, names=("logprobs",)) for _ in range(4)]
    for ours, theirs in ranks(2).run(_against_megatron, problems):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


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
