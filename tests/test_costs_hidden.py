"""What operations from hidden states cost: products, collectives, memory; the order of it all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import megatron.core
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import mcore_logprobs as ml
from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.kernels import budgets
from mcore_logprobs.sources.head import head_logits
from mcore_logprobs.sources.head_gradients import WeightGradient
from mcore_logprobs.sources.head_operands import HeadTile
from tests.helpers.flops import Flops
from tests.helpers.heads import Problem, make_problem, plain_loss, shard_problem
from tests.helpers.memory import Made, TensorsMade
from tests.helpers.shards import on_ranks, world_group, world_size
from tests.megatron.common import VOCAB, make_batch, megatron, tiny_config

ALL = {"entropy": True, "target_rank": True, "softcap": 20.0, "temperature": 0.5}


def statistics(h: Tensor, w: Tensor, t: Tensor, **options: Any) -> Tensor:
    stats = ml.linear_token_stats(h, w, t, **options)
    return stats.logprobs if stats.entropy is None else stats.logprobs + stats.entropy


def policy_loss(h: Tensor, w: Tensor, t: Tensor, **options: Any) -> Tensor:
    return ml.linear_policy_loss(h, w, t, plain_loss, **options)[0]


def mapped(h: Tensor, w: Tensor, t: Tensor, **options: Any) -> Tensor:
    group = options.get("tp_group")

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return ml.vocab_parallel_token_stats(z, t, tp_group=group, chunk_size=4).logprobs

    return ml.linear_map(h, w, fn, t, **options)


# ---- products -----------------------------------------------------------------------------------


def test_entries_of_a_lora_need_its_small_products_alone() -> None:
    """U twice, dA, dHidden; however many the ids."""
    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(24, 8)
    a, b = torch.randn(3, 8, requires_grad=True), torch.randn(24, 3, requires_grad=True)
    ids = torch.zeros(12, 5, dtype=torch.int64)
    with Flops() as flops:
        ml.linear_gather(hidden, weight, ids, lora=(a, b, 0.5)).sum().backward()
    assert flops.total == 4 * 2 * 12 * a.numel()


@pytest.mark.parametrize("call", [statistics, policy_loss])
def test_without_gradients_there_is_one_product_and_nothing_kept(call) -> None:
    problem = make_problem((12,))
    hidden, weight, _ = shard_problem(problem, False)
    with torch.no_grad(), TensorsMade() as made, Flops() as flops:
        out = call(hidden, weight, problem.target)
    assert flops.total == 2 * 12 * weight.numel()
    assert not out.requires_grad
    del out
    assert made.live == 0
    assert not call(hidden.detach(), weight.detach(), problem.target).requires_grad


def _head_flops(layout: dict[str, Any]) -> list[int]:
    with megatron(**layout) as parallel_state:
        tp = layout.get("tp", 1)
        model = mm.build_gpt_model(tiny_config(tp, sequence_parallel=tp > 1), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        flops = []
        count = batch["labels"].numel()
        for rows in (torch.arange(count), torch.arange(0, count, 4)):
            model.zero_grad(set_to_none=True)
            target = batch["labels"].reshape(-1)[rows]
            with (
                ml.patch_model(model) as handle,
                handle.targets(target, rows=rows),
                Flops() as counted,
            ):
                model(**batch["inputs"]).logprobs.sum().backward()
            flops.append(counted.total)
        product = 2 * model.config.hidden_size * VOCAB // tp
        return [flops[0] - flops[1], 4 * product * (count - count // 4)]


@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=str)
def test_rows_of_a_model(ranks, layout) -> None:
    for saved, expected in ranks(layout.get("tp", 1)).run(_head_flops, layout):
        assert saved == expected


# ---- collectives --------------------------------------------------------------------------------


def _traffic(problem: Problem, options: dict, sequence_parallel: bool, policy: bool) -> tuple:
    hidden, weight, _ = shard_problem(problem, sequence_parallel)
    call = policy_loss if policy else statistics
    parallel = {"tp_group": world_group(), "sequence_parallel": sequence_parallel}
    with CollectivesMade() as forward:
        out = call(hidden, weight, problem.target, **parallel, **options)
    with CollectivesMade() as backward:
        out.sum().backward()
    with CollectivesMade() as frozen:
        out = call(hidden.detach(), weight, problem.target, **parallel, **options)
        out.sum().backward()
    total: dict[str, int] = {}
    for made in (*forward.made, *backward.made):
        total[made.name] = total.get(made.name, 0) + made.nbytes
    return forward.names, backward.names, total, frozen.names


@pytest.mark.parametrize("chunk_size", [None, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_one_all_gather_forward_and_one_reduction_backward(ranks, world, dtype, chunk_size):
    problem = make_problem((12, 2), dtype=dtype)
    chunks = 2 if chunk_size else 1
    for options, numbers in (({}, 3), ({"entropy": True}, 4)):
        told = options | {"chunk_size": chunk_size}
        statistics_bytes, dhidden_bytes = 24 * numbers * 4, 24 * 8 * 4
        for forward, backward, nbytes, frozen in ranks(world).run(
            _traffic, problem, told, False, False
        ):
            assert forward == frozen == ["all_gather"]
            assert backward == ["all_reduce"] * chunks
            assert nbytes == {"all_gather": statistics_bytes, "all_reduce": dhidden_bytes}
        # Sequence parallelism gathers hidden besides, once forward and once to recompute.
        gathered = 2 * problem.hidden.nbytes // world
        for forward, backward, nbytes, frozen in ranks(world).run(
            _traffic, problem, told, True, False
        ):
            assert forward == ["all_gather"] * (chunks + 1)
            assert sorted(backward) == ["all_gather"] * chunks + ["reduce_scatter"] * chunks
            assert set(frozen) == {"all_gather"}
            expected = {"all_gather": statistics_bytes + gathered, "reduce_scatter": dhidden_bytes}
            assert nbytes == expected


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_named_rows_are_one_tile_wherever_they_stand(ranks, world, policy):
    """Under sequence parallelism, where ranks without many of them have padding."""
    problem = make_problem((12, 2))
    for named in ([0, 1, 2, 3, 4], [3, 0, 1, 9, 23], [1, 1, 1, 2, 22, 2], list(range(24))):
        options = {"rows": torch.tensor(named)}
        some = replace(problem, target=problem.target.flatten()[named])
        for forward, backward, _, _ in ranks(world).run(_traffic, some, options, True, policy):
            gathers = ["all_gather"] * 2  # of hidden states and of statistics
            assert sorted(forward) == gathers + ["reduce_scatter"] * policy
            assert sorted(backward) == ([] if policy else ["all_gather", "reduce_scatter"])


def test_rows_that_count_fill_their_tiles():
    problem = make_problem((12, 2))
    target = torch.where(torch.arange(24) < 10, 3, -100).view(12, 2)
    tiles = []

    def fn(logprobs: Tensor, entropy: None) -> Tensor:
        tiles.append(len(logprobs))
        return -logprobs

    ten = 10 * 4 * problem.weight.shape[0]
    with budgets.use(replace(budgets.CPU, held_bytes=ten, max_held_bytes=ten)):
        ml.linear_policy_loss(problem.hidden, problem.weight, target, fn, compact=True)
    assert tiles == [10]


@pytest.mark.parametrize("chunk_size", [4, 12])
def test_a_policy_loss_sends_all_of_it_forward(ranks, chunk_size):
    problem, chunks = make_problem((12,)), 12 // chunk_size
    told = {"chunk_size": chunk_size}
    for forward, backward, nbytes, _ in ranks(2).run(_traffic, problem, told, False, True):
        assert sorted(forward) == ["all_gather"] * chunks + ["all_reduce"] * chunks
        assert nbytes == {"all_gather": 12 * 3 * 4, "all_reduce": 12 * 8 * 4}
        assert backward == []
    for forward, backward, nbytes, _ in ranks(2).run(_traffic, problem, told, True, True):
        # Of hidden, and of statistics.
        assert sorted(forward) == ["all_gather"] * 2 * chunks + ["reduce_scatter"] * chunks
        assert nbytes["reduce_scatter"] == 12 * 8 * 4
        assert backward == []
    forward, backward, *_ = _traffic(problem, told, False, True)
    assert forward == backward == []


# ---- memory -------------------------------------------------------------------------------------

ROWS, WIDE, CHUNK = 512, 8192, 32


class Room(NamedTuple):
    """How much a call may take at once, in chunks of float32 logits; what it keeps, in numbers."""

    call: Callable[..., Tensor]
    forward: int
    backward: int


MEMORY: dict[str, Room] = {
    "statistics": Room(statistics, 4, 4),
    "all statistics": Room(lambda *a, **k: statistics(*a, **ALL, **k), 4, 4),
    "policy loss": Room(policy_loss, 4, 0),
    "map": Room(mapped, 2, 4),
    # Raw logits beside the finished ones, and a passing copy.
    "map with softcap": Room(lambda *a, **k: mapped(*a, softcap=20.0, **k), 4, 6),
}


def _allocations(
    name: str, dtype: torch.dtype, sequence_parallel: bool
) -> tuple[list[Made], int, int, int, int]:
    width = 32
    local = ROWS // world_size() if sequence_parallel else ROWS
    hidden = torch.randn(local, width).to(dtype).requires_grad_()
    weight = torch.randn(WIDE // world_size(), width).to(dtype).requires_grad_()
    options = {"tp_group": world_group(), "sequence_parallel": sequence_parallel}
    with TensorsMade() as forward:
        out = MEMORY[name].call(hidden, weight, torch.arange(ROWS), chunk_size=CHUNK, **options)
    kept = forward.live
    total = out[out.isfinite()].sum()
    with TensorsMade() as backward:
        total.backward()
    wide = 4 * (ROWS * width + weight.numel())  # both gradients in float32
    return [*forward.made, *backward.made], forward.peak, kept, backward.peak, wide


LAYOUTS = [(1, torch.float32), (1, torch.bfloat16), (2, torch.bfloat16)]


@pytest.mark.parametrize(
    ("name", "world", "dtype"),
    [(name, *how) for name in MEMORY for how in LAYOUTS],
    ids=str,
)
def test_memory_is_a_few_chunks(ranks, name, world, dtype):
    room, chunk = MEMORY[name], CHUNK * (WIDE // world) * 4
    per_row = ROWS * 8 * 40
    for made, peak, kept, peak_backward, wide in on_ranks(
        ranks, world, _allocations, name, dtype, world > 1
    ):
        gradient_shapes = {(WIDE // world, 32), (ROWS, 32), (ROWS // world, 32)}
        for one in made:  # an int64 key of a chunk is twice its size; all logits would be 16
            assert one.nbytes <= 2 * chunk or one.shape in gradient_shapes, one
        held = wide if name == "policy loss" else 0
        assert peak <= room.forward * chunk + wide + per_row
        assert kept <= held + per_row
        assert peak_backward <= room.backward * chunk + 2 * wide - held + per_row


def test_the_default_budget_holds():
    budget, rows, vocab = 32 << 20, 1024, 32768  # 128 MiB of float32 logits
    hidden, weight = torch.randn(rows, 32), torch.randn(vocab, 32)
    with TensorsMade() as forward:
        out = statistics(hidden.requires_grad_(), weight.requires_grad_(), torch.arange(rows))
    assert forward.live <= rows * 8 * 40
    assert forward.peak <= 2 * budget
    with TensorsMade() as backward:
        out.sum().backward()
    assert backward.peak <= 2 * budget + 4 * (hidden.numel() + weight.numel())


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
    # 8 rows by 256 columns per chunk, of a shard of 320: two blocks of 256 and 64.
    small = replace(budgets.CPU, chunk_bytes=4 * 8 * 256)
    with budgets.use(small), _Order() as order:
        if policy:
            loss, _ = ml.linear_policy_loss(hidden, weight, problem.target, plain_loss, **parallel)
        else:
            loss = ml.linear_token_stats(hidden, weight, problem.target, **parallel).logprobs.sum()
            order.issued.clear()
        loss.backward()
    return order.issued


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_sum_of_dhidden_is_issued_before_a_product(ranks, sequence_parallel, policy):
    problem = make_problem((16,), width=12, vocab=640)
    logits, d_hidden = [(8, 256), (8, 64)], (8, 12)
    d_weight = [(256, 12), (64, 12)]
    if policy:
        tile = [*logits, d_hidden, d_weight[0], d_hidden, "sum", d_weight[1]]
    else:
        tile = [logits[0], d_hidden, d_weight[0], logits[1], d_hidden, "sum", d_weight[1]]
    for issued in ranks(2).run(_order, problem, sequence_parallel, policy):
        assert issued == tile * 2


def test_blocks_are_even_and_as_few_as_the_budget_allows():
    assert budgets.even_parts(152064 // 8, 8192, 128) == 6400  # and not 8192, 8192, 2624
    for total in (*range(0, 2000, 61), 19008, 152064):
        for most in (1, 100, 256, 300, 4096):
            for step in (64, 128):
                size = budgets.even_parts(total, most, step)
                parts = [min(size, total - at) for at in range(0, total, size)]
                # The whole step where two of it fit, or else what is left of it by halving.
                used = {1: 1, 100: 32}.get(most, step)
                whole = most - most % used
                assert len(parts) == (1 if 0 < total <= most else -(-total // whole))
                assert size <= max(1, most)
                assert len(parts) < 2 or size % used == 0
                assert not parts or parts[0] - parts[-1] < used * len(parts)


@pytest.mark.parametrize(
    ("rows", "width", "adds_per_tile", "tile"),
    [
        (8192, 152064, True, 4096),
        (32768, 152064, True, 4096),
        (32768, 152064, False, 1536),  # what 1 GiB holds
        (32768, 19008, True, 11008),  # three even ones
        (8192, 19008, True, 8192),
        (4100, 262144, True, 2304),  # 2.5 GiB hold 2560: two even ones
        (100, 262144, True, 100),
        (0, 262144, True, 1),
        (8, 1 << 29, True, 1),
    ],
)
def test_rows_of_a_chunk_that_spans_all_columns_on_a_gpu(rows, width, adds_per_tile, tile):
    cut = {"held_width": width, "adds_per_tile": adds_per_tile}
    found = budgets.Tiling.of(rows, width, None, torch.device("cuda"), **cut)
    assert found.rows == tile


def test_a_tile_of_hidden_states_is_no_larger_than_one_of_logits_may_be():
    hidden, weight = torch.zeros(1, 1).expand(40000, 1 << 13), torch.zeros(64, 1 << 13)
    source = head_logits(hidden, weight).in_whole_rows()
    assert source.options.tiling.rows == 4000  # of 32 KiB each, where 128 MiB hold 4096


def test_on_a_cpu_such_chunks_keep_to_the_cache():
    cut = {"held_width": 65536, "adds_per_tile": True}
    tiling = budgets.Tiling.of(1024, 65536, None, torch.device("cpu"), **cut)
    assert tiling.rows == 512


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


def test_tiles_of_results_are_gone_before_results_are_put_in_place() -> None:
    hidden, weight = torch.zeros(4096, 8), torch.zeros(32, 8)
    mask = torch.arange(4096) % 2 == 0
    with TensorsMade() as made:
        ml.linear_map(
            hidden, weight, lambda z: z.repeat(1, 4), mask=mask, compact=True, chunk_size=512
        )
    # Of 2048 rows the masked result; of 4096 what it is put into, and the copy that has it.
    assert made.peak < 1.1 * (2048 + 2 * 4096) * 128 * 4


@pytest.mark.parametrize(
    "call",
    [
        lambda h, w: ml.linear_topk(h, w, 3, chunk_size=4)[0],
        lambda h, w: ml.linear_map(h, w, lambda z: z.logsumexp(-1), chunk_size=4),
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


@pytest.mark.parametrize("softcap", [None, 9.0])
def test_tiles_that_a_map_holds(softcap: float | None) -> None:
    """Forward one; backward its gradient's and, with a softcap, the raw logits'."""
    rows, vocab = 64, 4096
    hidden, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(vocab, 8)
    tile = rows * vocab * 4
    with TensorsMade() as forward:
        out = ml.linear_map(
            hidden, weight, lambda z: z[:, :3], softcap=softcap, bias=torch.zeros(vocab)
        )
    assert tile <= forward.peak < 1.2 * tile
    with TensorsMade() as backward:
        out.sum().backward()
    # What `z[:, :3]` has for a gradient is another of the tile's size, and `write`'s.
    assert backward.peak < (3.2 if softcap is None else 4.4) * tile


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operands_of_single_logits_are_as_many_as_is_written(dtype: torch.dtype) -> None:
    """8 MiB, forward and backward."""
    hidden, weight = torch.randn(64, 256, dtype=dtype), torch.randn(512, 256, dtype=dtype)
    ids = torch.randint(0, 512, (64, 400))  # 52 MiB of operands
    budget, numbers = budgets.of("cpu").gathered_bytes, ids.numel() * 8
    assert budget == 8 << 20
    with TensorsMade() as forward:
        out = ml.linear_gather(hidden.requires_grad_(), weight.requires_grad_(), ids)
    assert budget / 2 < forward.peak < 1.1 * budget + 4 * numbers
    with TensorsMade() as backward:
        out.sum().backward()
    assert backward.peak < 1.1 * budget + 4 * (hidden.numel() + weight.numel()) * 2 + 6 * numbers
