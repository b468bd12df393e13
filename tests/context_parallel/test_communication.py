"""What goes over the wire, what is refused before anything does, and what is allocated."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.context_parallel import (
    context_parallel_gather,
    context_parallel_positions,
    context_parallel_shard,
    context_parallel_shift,
)
from tests.helpers.distributed import grid_groups


def _counted(call: Any, *operands: torch.Tensor) -> list[list[tuple[str, int]]]:
    """The collectives of a call's forward and of its backward, with the bytes put in."""
    with CollectivesMade() as forward:
        out = call(*operands)
    upstream = torch.randn_like(out)
    with CollectivesMade() as backward:
        out.backward(upstream)
    return [[(made.name, made.nbytes) for made in side.made] for side in (forward, backward)]


def _gather_wire(grad: str) -> list:
    options = {"cp_group": grid_groups(cp=dist.get_world_size()).cp, "grad": grad}
    x = torch.randn(1, 1024, requires_grad=True)
    return _counted(lambda x: context_parallel_gather(x, **options), x)


def test_gather_is_one_all_gather_and_its_sum_backward_one_reduce_scatter(ranks):
    for grad, back in {"sum": [("reduce_scatter", 8192)], "slice": []}.items():
        assert ranks(2).run(_gather_wire, grad) == [[[("all_gather", 4096)], back]] * 2


def _shift_wire(case: tuple[str, list[int] | None]) -> list:
    layout, cu = case
    packed = None if cu is None else torch.tensor(cu)
    size = dist.get_world_size()
    options = {"cp_group": grid_groups(cp=size).cp, "layout": layout, "cu_seqlens": packed}
    x = torch.randn(1, 4096 // size, 8, requires_grad=True)
    return _counted(lambda x: context_parallel_shift(x, **options), x)


def test_shift_sends_boundary_tokens_only(ranks):
    layouts = {"zigzag": 2, "contiguous": 1, "contiguous_buffer": 1}
    cases = [(layout, cu) for layout in layouts for cu in (None, [0, 256, 512, 4096])]
    for (layout, cu), found in zip(cases, ranks(2).run_many(_shift_wire, cases), strict=True):
        sequences = 1 if cu is None or layout == "contiguous_buffer" else 3
        sent = layouts[layout] * sequences * 8 * 4
        assert found == [[[("all_gather", sent)], [("reduce_scatter", 2 * sent)]]] * 2


def _silent() -> list[str]:
    group = grid_groups(cp=dist.get_world_size()).cp
    with CollectivesMade() as made:
        x = context_parallel_shard(torch.randn(2, 16, requires_grad=True), cp_group=group)
        context_parallel_positions(16, cp_group=group)
        x.sum().backward()
    return made.names


def test_shard_and_positions_say_nothing(ranks):
    assert ranks(2).run(_silent) == [[], []]


class _Copies(TorchDispatchMode):
    """Within it, each operation that copies a tensor of three dimensions, and what it makes."""

    names = ("index_select", "index", "clone", "copy_", "cat", "_to_copy", "stack", "gather")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        if name in self.names and out.dim() == 3:
            self.seen.append((name, out.numel()))
        return out


def _gather_copies(
    shape: tuple[int, ...], seq_dim: int, layout: str = "zigzag"
) -> list[tuple[str, int]]:
    group = grid_groups(cp=dist.get_world_size()).cp
    x = torch.randn(shape)
    with _Copies() as copies:
        context_parallel_gather(x, cp_group=group, seq_dim=seq_dim, layout=layout)
    return copies.seen


def test_gather_is_one_permutation(ranks):
    part = 64 * 4 * 8
    for seen in ranks(2).run(_gather_copies, (64, 4, 8), 0):
        assert seen == [("index_select", 2 * part)]
    # A sequence that is not in front costs a copy of this rank's part besides, not of the whole.
    for seen in ranks(2).run(_gather_copies, (4, 64, 8), 1):
        assert seen == [("clone", part), ("index_select", 2 * part)]
    # Slots that come in order are not permuted at all.
    for seen in ranks(2).run(_gather_copies, (64, 4, 8), 0, "contiguous_buffer"):
        assert seen == []


class _NoReadingBack(TorchDispatchMode):
    """Raises where a tensor's value would be read by the host."""

    reads = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(self.reads):
            raise AssertionError(f"host synchronisation by {func}")
        return func(*args, **(kwargs or {}))


def _reads(packed: bool) -> None:
    group = grid_groups(cp=dist.get_world_size()).cp
    whole = torch.randn(2, 16)
    # On "meta" the values of cu_seqlens are not there to be read; the index arithmetic must do
    # without them. On the CPU, where reading is free, they are checked.
    cu = torch.zeros(3, dtype=torch.int32, device="meta") if packed else None
    with _NoReadingBack():
        if packed:
            whole = whole.to("meta")
            context_parallel_positions(16, cp_group=group, cu_seqlens=cu)
            local = context_parallel_shard(whole, cp_group=group, cu_seqlens=cu)
            assert local.shape == (2, 8)
        else:
            local = context_parallel_shard(whole, cp_group=group)
            context_parallel_gather(local, cp_group=group)
            context_parallel_shift(local, cp_group=group)


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_is_read_back_to_the_host(ranks, packed):
    ranks(2).run(_reads, packed)


OPERATIONS = {
    "shard": context_parallel_shard,
    "gather": context_parallel_gather,
    "shift": context_parallel_shift,
}


def _refuse(case: tuple[str, tuple[int, ...], torch.dtype, dict]) -> None:
    name, shape, dtype, options = case
    group = grid_groups(cp=dist.get_world_size()).cp
    with CollectivesMade() as made:
        try:
            OPERATIONS[name](torch.ones(shape, dtype=dtype), **{"cp_group": group, **options})
        finally:
            assert made.names == []


ROW = (1, 8)
FLOAT, INT = torch.float32, torch.int64
# What lengths and cu_seqlens may be stands in test_layouts.py.
MISTAKES: list[tuple[str, tuple[int, ...], torch.dtype, dict, str]] = [
    ("shard", (1, 6), FLOAT, {}, "expected a multiple of 4 .* got 6"),
    ("gather", (1, 3), FLOAT, {}, "expected a multiple of 4 .* got 6"),
    ("shift", (1, 3), FLOAT, {}, "expected a multiple of 4 .* got 6"),
    ("shard", ROW, FLOAT, {"layout": "ring"}, "layout: .* got 'ring'"),
    ("gather", ROW, FLOAT, {"layout": None}, "layout: .* got None"),
    ("gather", ROW, FLOAT, {"grad": "mean"}, "grad: .* got 'mean'"),
    ("gather", ROW, FLOAT, {"seq_dim": 1.0}, "seq_dim: expected an int, got 1.0"),
    ("shard", (8,), FLOAT, {}, "seq_dim: expected -1 to 0 .* got 1"),
    ("shift", ROW, FLOAT, {"seq_dim": -3}, "seq_dim: expected -2 to 1 .* got -3"),
    ("shard", ROW, FLOAT, {"cu_seqlens": torch.tensor([0, 6, 8])}, "padded to a multiple of 4"),
    ("gather", ROW, FLOAT, {"cu_seqlens": torch.tensor([0, 8])}, "end at the sequence length 16"),
    ("shard", ROW, FLOAT, {"cp_group": None}, "cp_group=None"),
    *(
        ("shift", ROW, dtype, {"fill": fill}, f"fill: expected a value of {dtype}")
        for dtype, fill in (
            (INT, 0.5),
            (INT, float("nan")),
            (INT, float("inf")),
            (INT, 1j),
            (torch.uint8, -1),
            (torch.bool, 2),
            (FLOAT, 1e300),
            (FLOAT, 1j),
            (torch.float16, 1e6),
            (torch.float8_e4m3fn, float("inf")),
            (torch.float8_e4m3fn, 500),
            (torch.complex64, 1e300j),
        )
    ),
    ("shift", ROW, FLOAT, {"fill": None}, "fill: expected a number, got NoneType"),
    ("shift", ROW, INT, {"lengths": [3, 5]}, r"one per sequence, shape \[1\], got \[2\]"),
    ("shift", ROW, INT, {"lengths": [17]}, r"padded lengths \[16\], got \[17\]"),
    ("shift", ROW, INT, {"lengths": [-1]}, r"padded lengths \[16\], got \[-1\]"),
    ("shift", ROW, INT, {"lengths": [2.5]}, "lengths: expected a tensor or a list"),
    ("shift", ROW, INT, {"lengths": 3}, "lengths: expected a tensor or a list"),
    ("shift", ROW, INT, {"lengths": torch.tensor([2.0])}, "int32 or int64 tensor, got torch.float"),
]


def test_mistakes_are_refused_on_every_rank_before_any_collective(ranks):
    for *case, message in MISTAKES:
        for error in ranks(2).run_expecting_errors(_refuse, tuple(case)):
            assert isinstance(error, ValueError), (case, error)
            assert re.search(message, str(error)), (case, error)


def test_what_is_no_tensor_is_refused():
    for operation in (context_parallel_shard, context_parallel_gather, context_parallel_shift):
        with pytest.raises(ValueError, match=r"x: expected a torch\.Tensor, got list"):
            operation([1, 2])


@pytest.mark.parametrize("seq_len", [True, 8.0, "8", -4])
def test_positions_refuse_what_is_no_length(seq_len):
    with pytest.raises(ValueError, match="seq_len: expected an int >= 0, got"):
        context_parallel_positions(seq_len)
