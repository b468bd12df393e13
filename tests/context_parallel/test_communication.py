"""What goes over the wire, what is refused before anything does, and what is allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_logprobs.context_parallel import (
    context_parallel_gather,
    context_parallel_positions,
    context_parallel_shard,
    context_parallel_shift,
)
from tests.helpers.distributed import grid_groups

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "isend",
    "irecv",
    "recv",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "send",
)


class _Wire:
    """Within it, every collective's name and the bytes that this rank puts in."""

    def __enter__(self) -> list[tuple[str, int]]:
        self.seen: list[tuple[str, int]] = []
        self.saved = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, real in self.saved.items():
            setattr(dist, name, self._watch(name, real))
        return self.seen

    def _watch(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            self.seen.append((name, tensors[-1].nbytes if tensors else 0))
            return real(*args, **kwargs)

        return call

    def __exit__(self, *_: object) -> None:
        for name, real in self.saved.items():
            setattr(dist, name, real)


def _gather_wire(grad: str) -> tuple:
    group = grid_groups(cp=dist.get_world_size()).cp
    x = torch.randn(1, 1024, requires_grad=True)
    with _Wire() as forward:
        y = context_parallel_gather(x, cp_group=group, grad=grad)
    upstream = torch.randn_like(y)
    with _Wire() as backward:
        y.backward(upstream)
    return forward, backward


def test_gather_is_one_all_gather_and_its_sum_backward_one_reduce_scatter(ranks):
    for forward, backward in ranks(2).run(_gather_wire, "sum"):
        assert forward == [("all_gather_into_tensor", 4096)]
        assert backward == [("reduce_scatter_tensor", 8192)]
    for forward, backward in ranks(2).run(_gather_wire, "slice"):
        assert forward == [("all_gather_into_tensor", 4096)]
        assert backward == []


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


def _shift_wire(layout: str, cu: list[int] | None, length: int) -> tuple:
    size = dist.get_world_size()
    group = grid_groups(cp=size).cp
    x = torch.randn(1, length // size, 8, requires_grad=True)
    packed = None if cu is None else torch.tensor(cu)
    with _Wire() as forward:
        y = context_parallel_shift(x, cp_group=group, layout=layout, cu_seqlens=packed)
    upstream = torch.randn_like(y)
    with _Wire() as backward:
        y.backward(upstream)
    return forward, backward


@pytest.mark.parametrize(
    ("layout", "tokens"), [("zigzag", 2), ("contiguous", 1), ("contiguous_buffer", 1)]
)
@pytest.mark.parametrize("cu", [None, [0, 256, 512, 4096]])
def test_shift_sends_boundary_tokens_only(ranks, layout, tokens, cu):
    sequences = 1 if cu is None or layout == "contiguous_buffer" else 3
    sent = tokens * sequences * 8 * 4
    for forward, backward in ranks(2).run(_shift_wire, layout, cu, 4096):
        assert forward == [("all_gather_into_tensor", sent)]
        assert backward == [("reduce_scatter_tensor", 2 * sent)]


def _silent() -> list:
    group = grid_groups(cp=dist.get_world_size()).cp
    with _Wire() as seen:
        x = context_parallel_shard(torch.randn(2, 16), cp_group=group)
        context_parallel_positions(16, cp_group=group)
        x.sum()
    return seen


def test_shard_and_positions_say_nothing(ranks):
    assert ranks(2).run(_silent) == [[], []]


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


def _refuse(name: str, shape: tuple[int, ...], dtype: torch.dtype, options: dict) -> None:
    group = grid_groups(cp=dist.get_world_size()).cp
    options = {"cp_group": group, **options}
    with _Wire() as seen:
        try:
            OPERATIONS[name](torch.ones(shape, dtype=dtype), **options)
        finally:
            assert seen == []


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "options", "message"),
    [
        ("shard", (1, 6), torch.float32, {}, "expected a multiple of 4 .* got 6"),
        ("gather", (1, 3), torch.float32, {}, "expected a multiple of 4 .* got 6"),
        ("shift", (1, 3), torch.float32, {}, "expected a multiple of 4 .* got 6"),
        ("shard", (1, 7), torch.float32, {"layout": "contiguous"}, "a multiple of 2 .* got 7"),
        ("shard", (1, 8), torch.float32, {"layout": "ring"}, "layout: .* got 'ring'"),
        ("gather", (1, 8), torch.float32, {"layout": None}, "layout: .* got None"),
        ("gather", (1, 8), torch.float32, {"grad": "mean"}, "grad: .* got 'mean'"),
        ("shard", (8,), torch.float32, {}, "seq_dim: expected -1 to 0 .* got 1"),
        ("shift", (1, 8), torch.float32, {"seq_dim": -3}, "seq_dim: expected -2 to 1 .* got -3"),
        (
            "shard",
            (1, 8),
            torch.float32,
            {"cu_seqlens": torch.tensor([0, 6, 8])},
            "padded to a multiple of 4",
        ),
        (
            "gather",
            (1, 8),
            torch.float32,
            {"cu_seqlens": torch.tensor([0, 8])},
            "end at the sequence length 16",
        ),
        ("shift", (1, 8), torch.int64, {"fill": 0.5}, "fill: expected a value of torch.int64"),
        ("shift", (1, 8), torch.uint8, {"fill": -1}, "fill: expected a value of torch.uint8"),
        ("shift", (1, 8), torch.int64, {"fill": float("nan")}, "fill: expected"),
        ("shift", (1, 8), torch.float32, {"fill": None}, "fill: expected a number, got NoneType"),
        ("shift", (1, 8), torch.float16, {"fill": 1e6}, "fill: expected a value of torch.float16"),
        ("shift", (1, 8), torch.float32, {"fill": 1e300}, "fill: expected a value of"),
        ("shift", (1, 8), torch.float32, {"fill": 1j}, "fill: expected a value of"),
        ("shift", (1, 8), torch.int64, {"fill": 1j}, "fill: expected a value of"),
        ("shift", (1, 8), torch.int64, {"fill": float("inf")}, "fill: expected a value of"),
        ("shift", (1, 8), torch.complex64, {"fill": 1e300j}, "fill: expected a value of"),
        ("shift", (1, 8), torch.float8_e4m3fn, {"fill": float("inf")}, "fill: expected a value"),
        ("shift", (1, 8), torch.float8_e4m3fn, {"fill": 500}, "fill: expected a value of"),
        ("shift", (1, 8), torch.bool, {"fill": 2}, "fill: expected a value of torch.bool"),
        ("gather", (1, 8), torch.float32, {"seq_dim": 1.0}, "seq_dim: expected an int, got 1.0"),
        (
            "shift",
            (1, 8),
            torch.int64,
            {"lengths": [3, 5]},
            r"one a sequence, shape \[1\], got \[2\]",
        ),
        ("shift", (1, 8), torch.int64, {"lengths": [17]}, r"padded lengths \[16\], got \[17\]"),
        ("shift", (1, 8), torch.int64, {"lengths": [-1]}, r"padded lengths \[16\], got \[-1\]"),
        ("shift", (1, 8), torch.int64, {"lengths": [2.5]}, "lengths: expected a tensor or a list"),
        ("shift", (1, 8), torch.int64, {"lengths": 3}, "lengths: expected a tensor or a list"),
        (
            "shift",
            (1, 8),
            torch.int64,
            {"lengths": torch.tensor([2.0])},
            "lengths: expected an int32 or int64 tensor, got torch.float32",
        ),
        (
            "gather",
            (1, 7),
            torch.int64,
            {"layout": "contiguous_buffer", "cu_seqlens": torch.tensor([0, 3, 13])},
            "end at the sequence length 14",
        ),
        ("shard", (1, 8), torch.float32, {"cp_group": None}, "cp_group=None"),
    ],
)
def test_mistakes_are_refused_on_every_rank_before_any_collective(
    ranks, name, shape, dtype, options, message
):
    for error in ranks(2).run_expecting_errors(_refuse, name, shape, dtype, options):
        assert isinstance(error, ValueError)
        with pytest.raises(ValueError, match=message):
            raise error


def test_what_is_no_tensor_is_refused():
    for operation in (context_parallel_shard, context_parallel_gather, context_parallel_shift):
        with pytest.raises(ValueError, match=r"x: expected a torch\.Tensor, got list"):
            operation([1, 2])


@pytest.mark.parametrize("seq_len", [True, 8.0, "8", -4])
def test_positions_refuse_what_is_no_length(seq_len):
    with pytest.raises(ValueError, match=r"seq_len|sequence length"):
        context_parallel_positions(seq_len)
