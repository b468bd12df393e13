"""Does `invariant_segments` hold here? Tried on this machine, with its matrix library and threads.

What torch leaves to a matrix or vector library can depend on a machine: how a product adds up, and
whether exp has the same bits at the end of an array. So `doctor` does not assume it. In one process
and without collectives, since kernels never communicate: every rank's shard is worked on in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.collectives import ordered_sum_dim0
from mcore_logprobs.kernels.segments import Segments
from mcore_logprobs.kernels.stats import (
    GradientTerms,
    RowResults,
    SoftmaxStats,
    StatsSpec,
    merge,
)
from mcore_logprobs.ops.driver import form_gradient, show
from mcore_logprobs.ops.result import TokenStats
from mcore_logprobs.ops.row_statistics import LogitGradient, RowStatistics, Statistics
from mcore_logprobs.ops.token_stats import (
    linear_token_stats,
    vocab_parallel_token_stats,
)
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.head import HeadLogits, head_logits
from mcore_logprobs.sources.head_gradients import HiddenGradient
from mcore_logprobs.sources.source import Source

# Few calls and few kinds of kernel: what a compiled backend has not seen yet takes a second each.
_SEGMENTS, _SIZES = 8, (2, 4)
_VOCAB = _SEGMENTS * 2048
_FLAGS = {"entropy": True, "sum_pi_squared": True}
_SPEC = StatsSpec(**_FLAGS)
_ASKED: dict[str, Any] = {**_FLAGS, "invariant_segments": _SEGMENTS}
# A block of all rows is under 32768 numbers, from which on torch wakes its threads for every step:
# on a busy machine that costs milliseconds each time.
_ROWS, _HIDDEN = 15, 40
# A GPU's matrix library may divide a GEMM along its inner dimension where the output is small for
# the chip: a head of a real model's size, h and V, shows whether it does.
_REAL_HEAD = (4096, 131072)
_CHUNKS = (2, 8)
_SOME = (slice(0, 1), slice(0, 5), slice(3, None), slice(None, None, 2))


@dataclass(frozen=True)
class Guarantee:
    """Whether results keep their bits across something.

    Attributes:
        name: from what, in which dtype; forward or backward; across what.
        holds: whether they did, in everything that was tried.
    """

    name: str
    holds: bool


def find_guarantees(device: str = "cpu") -> list[Guarantee]:
    """Bits across TP 1, 2 and 4, chunks, and other rows; from logits and from hidden states.

    With what `auto` takes here. On a CPU about a second, and the time to compile a few kernels
    where they are not in inductor's cache on disk; on a GPU also with a head of 4096 x 131072,
    whose weight alone is 2 GiB in float32.
    """
    generator = torch.Generator().manual_seed(0)
    guarantees = []
    for dtype in (torch.float32, torch.bfloat16):
        logits = 3 * torch.randn(_ROWS, _VOCAB, generator=generator).to(device, dtype)
        target = torch.randint(_VOCAB, (_ROWS,), generator=generator).to(device)
        label = str(dtype).removeprefix("torch.")
        with _one_thread():  # no sum is divided among threads; a product may be
            checks = [(f"logits {label} {what}", ok) for what, ok in _logits_checks(logits, target)]
        for h, vocab in (_HIDDEN, _VOCAB), *([_REAL_HEAD] if device == "cuda" else []):
            hidden = torch.randn(_ROWS, h, generator=generator).to(device, dtype)
            weight = torch.randn(vocab, h, generator=generator).to(device, dtype) * (1.3 / h**0.5)
            size = f"{h} x {vocab} " if h > _HIDDEN else ""
            checks += [
                (f"hidden {size}{label} {what}", ok)
                for what, ok in _hidden_checks(hidden, weight, target)
            ]
        guarantees += [Guarantee(name, holds) for name, holds in checks]
    return guarantees


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _logits_checks(logits: Tensor, target: Tensor) -> Iterator[tuple[str, bool]]:
    spec = _SPEC
    top = logits.amax(-1).float()
    coef = torch.linspace(-1, 1, len(spec.coefficients) * _ROWS, device=logits.device)
    coef = coef.view(len(spec.coefficients), _ROWS)
    on_target = torch.linspace(-1, 1, _ROWS, device=logits.device)

    def sources(tp: int) -> Iterator[tuple[Source, Tensor]]:
        for part in _shards(_VOCAB, tp):
            source = given_logits(logits[:, part].contiguous(), invariant_segments=1)
            segments = Segments.of(_SEGMENTS, _VOCAB, tp)
            options = replace(source.options, segments=segments)
            yield options.bind(*source.tensors), _own(target, part)

    def forward(tp: int) -> Tensor:
        parts = [_local_stats(source, column, spec) for source, column in sources(tp)]
        return merge(torch.cat(parts), spec, ordered=True)

    def backward(tp: int) -> Tensor:
        parts: list[Tensor] = []
        for source, column in sources(tp):
            entries = column.unsqueeze(-1), on_target.unsqueeze(-1)
            backward = LogitGradient(source, GradientTerms(*entries, top, coef, spec))
            (of_logits,) = form_gradient(backward, source, source.gradient((True,)))
            assert of_logits is not None
            parts.append(of_logits)
        return torch.cat(parts, -1)

    def stats(rows: slice, chunk_size: int | None) -> TokenStats:
        values = logits[rows].contiguous()  # strided, another kernel would be compiled
        return vocab_parallel_token_stats(values, target[rows], chunk_size=chunk_size, **_ASKED)

    yield "forward across TP", _same_at_any_tp(forward)
    yield "backward across TP", _same_at_any_tp(backward)
    yield from _across_calls(stats)


def _hidden_checks(hidden: Tensor, weight: Tensor, target: Tensor) -> Iterator[tuple[str, bool]]:
    operation = Statistics(_SPEC)
    probability = torch.full((_ROWS,), 1e-3, device=hidden.device)
    mask = torch.ones_like(target, dtype=torch.bool)

    def heads(tp: int) -> Iterator[tuple[HeadLogits, Tensor]]:
        for part in _shards(len(weight), tp):
            shard = weight[part].clone()
            source = head_logits(hidden, shard, chunk_size=_ROWS, invariant_segments=1)
            segments = Segments.of(_SEGMENTS, len(weight), tp)
            options = replace(source.options, segments=segments)
            yield options.bind(*source.tensors), _own(target, part)

    def forward(tp: int) -> Tensor:
        return torch.cat(
            [_local_stats(source, column, operation.spec) for source, column in heads(tp)]
        )

    def backward(tp: int) -> tuple[Tensor, Tensor]:
        weights: list[Tensor] = []
        parts: list[Tensor] = []
        # Such as a row of logits near 0 has; of every statistic that SoftmaxStats has.
        softmax = SoftmaxStats(*[probability] * len(SoftmaxStats._fields))
        zeros = torch.zeros_like(probability)
        softmax = softmax._replace(row_max=zeros, log_sum=zeros)
        upstream = RowResults(probability, **dict.fromkeys(_FLAGS, probability))
        for source, column in heads(tp):
            gradient = source.gradient((True, True, False, False, False))
            gradient.hidden = collected = _Segments(source, in_acc_dtype=False)
            backward = operation.backward(source, upstream, (column, mask), softmax)
            _, of_weight, *_ = form_gradient(backward, source, gradient)
            parts += collected.parts
            assert of_weight is not None
            weights.append(of_weight)
        return torch.cat(weights), ordered_sum_dim0(parts, None, scatter=False)

    def stats(rows: slice, chunk_size: int | None) -> TokenStats:
        inputs = hidden[rows], weight, target[rows]
        return linear_token_stats(*inputs, chunk_size=chunk_size, **_ASKED)

    yield "forward across TP", _same_at_any_tp(forward)
    alone = backward(1)
    same = [list(map(torch.equal, backward(tp), alone)) for tp in _SIZES]
    for name, equal in zip(("dWeight", "dHidden"), zip(*same, strict=True), strict=True):
        yield f"{name} across TP", all(equal)
    yield from _across_calls(stats)


def _local_stats(source: Source, column: Tensor, spec: StatsSpec) -> Tensor:
    """A rank's statistics, `[g/TP, k, n]`."""
    run = RowStatistics(source, spec, column)
    show(run, source)
    return run.local


class _Segments(HiddenGradient):
    """Keeps a rank's parts of dHidden, `[rows, h]` per segment, instead of sending them."""

    parts: list[Tensor]

    def put_segments(self, number: int, parts: list[Tensor]) -> None:
        self.parts = parts


def _shards(vocab: int, tp: int) -> Iterator[slice]:
    width = vocab // tp
    return (slice(rank * width, (rank + 1) * width) for rank in range(tp))


def _own(target: Tensor, part: slice) -> Tensor:
    return torch.where((target >= part.start) & (target < part.stop), target - part.start, -1)


def _same_at_any_tp(function: Callable[[int], Tensor]) -> bool:
    alone = function(1)
    return all(torch.equal(function(tp), alone) for tp in _SIZES)


def _across_calls(
    function: Callable[[slice, int | None], TokenStats],
) -> Iterator[tuple[str, bool]]:
    at_once = function(slice(None), None)
    yield "forward across chunks", all(_equal(function(slice(None), c), at_once) for c in _CHUNKS)
    yield "forward across rows", all(_equal(function(rows, None), at_once[rows]) for rows in _SOME)


def _equal(a: TokenStats, b: TokenStats) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in RowResults._fields]
    return all(torch.equal(x, y) for x, y in pairs if x is not None)
