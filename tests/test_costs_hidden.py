"""What linear_token_stats costs: products, collectives, memory; frozen inputs and compaction."""

from __future__ import annotations

from typing import Any
from unittest import mock

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mcore_logprobs import (
    linear_gather,
    linear_kl_div,
    linear_map,
    linear_policy_loss,
    linear_sampling_logprobs,
    linear_token_stats,
    linear_topk,
)
from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.ops import rows as rows_module
from mcore_logprobs.ops.head import HeadTile, head_logits
from mcore_logprobs.ops.head_gradients import WeightGradient
from tests.helpers.heads import (
    Problem,
    make_problem,
    plain_loss,
    shard_problem,
)
from tests.helpers.memory import TensorsMade
from tests.helpers.shards import on_ranks, world_group, world_size

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


def _sent_without_dhidden(problem: Problem, sequence_parallel: bool) -> set[str]:
    hidden, weight, _ = shard_problem(problem, sequence_parallel)
    parallel = {"tp_group": world_group(), "sequence_parallel": sequence_parallel}
    out = linear_token_stats(hidden.detach(), weight, problem.target, chunk_size=4, **parallel)
    with CollectivesMade() as backward:
        out.logprobs.sum().backward()
    return set(backward.names)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_frozen_hidden_states_leave_nothing_to_sum(ranks, sequence_parallel):
    expected = {"all_gather"} if sequence_parallel else set()
    for names in ranks(2).run(_sent_without_dhidden, make_problem(), sequence_parallel):
        assert names == expected


def test_no_grad_saves_nothing():
    _saves_nothing(make_problem())


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


# ---- the other operations -----------------------------------------------------------------------


def test_a_gather_of_logits_needs_no_product():
    problem = make_problem((12,))
    hidden, weight, _ = shard_problem(problem, False)
    with FlopCounterMode(display=False) as counter:
        linear_gather(hidden, weight, torch.zeros(12, 3, dtype=torch.int64)).sum().backward()
    assert counter.get_total_flops() == 0
    a, b = torch.randn(3, 8, requires_grad=True), torch.randn(24, 3, requires_grad=True)
    ids = torch.zeros(12, 5, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:  # U twice, dA, dHidden; however many the ids
        linear_gather(hidden, weight, ids, lora=(a, b, 0.5)).sum().backward()
    assert counter.get_total_flops() == 4 * 2 * 12 * a.numel()
    with FlopCounterMode(display=False) as counter:
        out = linear_gather(hidden, weight, torch.zeros(12, 3, dtype=torch.int64), log_softmax=True)
        out.sum().backward()
    assert counter.get_total_flops() == 4 * 2 * 12 * weight.numel()


ROWS, VOCAB, CHUNK = 256, 8192, 16
CALLS = {
    "gather": lambda h, w: linear_gather(h, w, torch.zeros(ROWS, 4).long(), chunk_size=CHUNK),
    "log-softmax": lambda h, w: linear_gather(
        h, w, torch.zeros(ROWS, 4).long(), log_softmax=True, chunk_size=CHUNK
    ),
    "topk": lambda h, w: linear_topk(h, w, 8, chunk_size=CHUNK)[0],
    "divergence": lambda h, w: linear_kl_div(
        h, w, teacher_hidden=h.detach() + 1.0, teacher_weight=w.detach(), chunk_size=CHUNK
    ),
    "sampling": lambda h, w: linear_sampling_logprobs(
        h, w, torch.zeros(ROWS).long(), top_p=0.9, chunk_size=CHUNK
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_memory_is_a_few_chunks(name):
    hidden = torch.randn(ROWS, 32, requires_grad=True)
    weight = torch.randn(VOCAB, 32, requires_grad=True)
    chunk = CHUNK * VOCAB * 4
    with TensorsMade() as forward:
        out = CALLS[name](hidden, weight)
    kept = forward.live
    with TensorsMade() as backward:
        out[out.isfinite()].sum().backward()
    # An int64 key of a chunk is twice its size; all logits would be 16.
    for one in (*forward.made, *backward.made):
        assert one.nbytes <= 2 * chunk or one.shape == weight.shape, one
    assert kept <= ROWS * 8 * 160
    assert forward.peak <= (8 if name == "divergence" else 6) * chunk  # which has two sides
    assert backward.peak <= 3 * chunk + 2 * weight.nbytes


@pytest.mark.parametrize(
    "call",
    [
        lambda h, w: linear_topk(h, w, 3, chunk_size=4)[0],
        lambda h, w: linear_map(h, w, lambda z: z.logsumexp(-1), chunk_size=4),
    ],
    ids=["topk", "map"],
)
def test_a_tile_of_logits_is_gone_before_the_next_is_made(call, monkeypatch):
    made: list[StorageWeakRef] = []
    raw_logits, whole_rows = HeadTile.raw_logits, HeadTile.whole_rows

    def noted(logits: Tensor) -> None:
        assert all(ref.expired() for ref in made)
        made.append(StorageWeakRef(logits.untyped_storage()))

    def noted_raw_logits(self):
        assert all(ref.expired() for ref in made)
        logits = raw_logits(self)
        noted(logits)
        return logits

    def noted_whole_rows(self):
        for placed in whole_rows(self):
            noted(placed.chunk.logits)
            yield placed
            del placed

    monkeypatch.setattr(HeadTile, "raw_logits", noted_raw_logits)
    monkeypatch.setattr(HeadTile, "whole_rows", noted_whole_rows)
    hidden = torch.randn(12, 8, requires_grad=True)
    call(hidden, torch.randn(40, 8)).sum().backward()
    assert len(made) >= 3
    assert all(ref.expired() for ref in made)


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_filters_take_four_products(chunk_size):
    problem = make_problem((12,))
    hidden, weight, _ = shard_problem(problem, False)
    with FlopCounterMode(display=False) as forward:
        out = linear_sampling_logprobs(
            hidden, weight, problem.target, top_p=0.5, chunk_size=chunk_size
        )
    with FlopCounterMode(display=False) as backward:
        out.backward(torch.randn(12))
    one = 2 * 12 * weight.numel()
    assert (forward.get_total_flops(), backward.get_total_flops()) == (one, 3 * one)
