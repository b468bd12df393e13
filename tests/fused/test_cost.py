"""What linear_token_stats costs: products, collectives, memory; frozen inputs and compaction."""

from __future__ import annotations

from typing import Any
from unittest import mock

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mcore_logprobs import linear_policy_loss, linear_token_stats
from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.ops import rows as rows_module
from mcore_logprobs.ops.head import head_logits
from mcore_logprobs.ops.head_gradients import WeightGradient
from tests.fused.common import (
    LAYOUTS,
    Case,
    Problem,
    make_problem,
    plain_loss,
    shard_problem,
)
from tests.helpers import oracles
from tests.helpers.memory import TensorsMade
from tests.logits.common import on_ranks, world_group, world_size

ALL = {"entropy": True, "target_rank": True}


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
    exact, plain = Case(problem).truth(), Case(problem).truth(torch.float32)
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
def test_compaction_changes_nothing(layout, dtype):
    problem = make_problem((12, 3), dtype=dtype, ignored=0.6, true_vocab=20)
    options = ALL | {"vocab_size": 20, "temperature": 0.8, "label_smoothing": 0.1}
    plain = Case(problem, options).run(layout)
    compact = Case(problem, options | {"compact": True}).run(layout)
    for (stats, grads), (expected, expected_grads) in zip(compact.runs, plain.runs, strict=True):
        # The same arithmetic; a product of fewer rows may add up in another order.
        for name in ("logprobs", "entropy", "target_rank", "lse"):
            torch.testing.assert_close(
                getattr(stats, name), getattr(expected, name), rtol=1e-6, atol=1e-6
            )
        for name, grad in grads.items():
            rtol = 8e-3 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(grad, expected_grads[name], rtol=rtol, atol=2e-6)
    assert not compact.gradients()["hidden"][problem.target == -100].any()


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


# ---- order and sizes of products ----------------------------------------------------------------


class _Order(TorchDispatchMode):
    """Products by the shape of what they write, and sums over ranks, as they are issued."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[str | tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::mm", "aten::addmm"):
            self.issued.append(tuple(out.shape))
        elif name in ("c10d::allreduce_", "c10d::_reduce_scatter_base_"):
            self.issued.append("sum")
        return out


def _order(problem: Problem, sequence_parallel: bool, policy: bool) -> list:
    hidden, weight, _ = shard_problem(problem, sequence_parallel)
    parallel = {"tp_group": world_group(), "sequence_parallel": sequence_parallel, "chunk_size": 8}
    # 8 rows by 256 columns a chunk, of a shard of 320: two blocks of 192 and 128.
    small = mock.patch.dict(rows_module._CHUNK_BYTES, cpu=4 * 8 * 256)
    with small, _Order() as order:
        if policy:
            loss, _ = linear_policy_loss(hidden, weight, problem.target, plain_loss, **parallel)
        else:
            loss = linear_token_stats(hidden, weight, problem.target, **parallel).logprobs.sum()
            order.issued.clear()
        loss.backward()
    return order.issued


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_sum_of_dhidden_is_issued_before_a_product(ranks, sequence_parallel, policy):
    problem = make_problem((16,), width=12, vocab=640)
    logits, d_hidden = [(8, 192), (8, 128)], (8, 12)
    d_weight = [(192, 12), (128, 12)]
    if policy:
        tile = [*logits, d_hidden, d_weight[0], d_hidden, "sum", d_weight[1]]
    else:
        tile = [logits[0], d_hidden, d_weight[0], logits[1], d_hidden, "sum", d_weight[1]]
    for issued in ranks(2).run(_order, problem, sequence_parallel, policy):
        assert issued == tile * 2


def test_blocks_are_even_and_as_few_as_the_budget_allows():
    assert rows_module.even_parts(152064 // 8, 8192, 128) == 6400  # and not 8192, 8192, 2624
    for total in (*range(0, 2000, 61), 19008, 152064):
        for most in (1, 100, 256, 300, 4096):
            for step in (64, 128):
                size = rows_module.even_parts(total, most, step)
                parts = [min(size, total - at) for at in range(0, total, size)]
                assert len(parts) == -(-total // most)
                assert size <= most
                assert not parts or parts[0] - parts[-1] < step * len(parts)


@pytest.mark.parametrize(
    ("rows", "width", "least", "tile"),
    [
        (8192, 152064, 4096, 4096),
        (32768, 152064, 4096, 4096),
        (32768, 152064, 0, 1536),  # what 1 GiB holds
        (32768, 19008, 4096, 11008),  # three even ones
        (8192, 19008, 4096, 8192),
        (4100, 262144, 4096, 2304),  # 2.5 GiB hold 2560: two even ones
        (100, 262144, 4096, 100),
        (0, 262144, 4096, 1),
        (8, 1 << 29, 4096, 1),
    ],
)
def test_rows_of_a_chunk_that_spans_all_columns_on_a_gpu(rows, width, least, tile):
    assert rows_module._whole_row_tile(rows, width, torch.device("cuda"), least) == tile


def test_a_tile_of_hidden_states_is_no_larger_than_one_of_logits_may_be():
    hidden, weight = torch.zeros(1, 1).expand(40000, 1 << 13), torch.zeros(64, 1 << 13)
    source = head_logits(hidden, weight).in_whole_rows()
    assert source.options.tiling.rows == 4096  # of 32 KiB each


def test_on_a_cpu_such_chunks_keep_to_the_cache():
    assert rows_module._whole_row_tile(1024, 65536, torch.device("cpu"), 4096) == 512


@pytest.mark.parametrize("rows", [1, 512, 4096])
def test_one_tiles_dweight_is_multiplied_into_its_own_dtype(rows):
    weight = torch.zeros(96, 40, dtype=torch.bfloat16)
    dlogits, hidden = (torch.randn(rows, n).bfloat16() for n in (96, 40))
    head = head_logits(hidden, weight, chunk_size=rows)
    gradient = WeightGradient(head, main_grad=None, in_acc_dtype=False, sparse=False)
    with TensorsMade() as made:
        for columns in (slice(0, 64), slice(64, 96)):
            gradient.add(True, columns, dlogits[:, columns], hidden)
        found = gradient.finish()
    assert made.made == []
    assert found.dtype == torch.bfloat16
    exact = dlogits.double().t() @ hidden.double()
    # Half a unit in the last place, and what adding in float32 loses.
    error = (found.double() - exact).abs()
    assert (error <= exact.abs() * 2.0**-8 + rows**0.5 * 2.0**-20).all()
