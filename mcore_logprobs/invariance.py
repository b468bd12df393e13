"""Does `invariant_segments` hold here? Tried on this machine, with its matrix library and threads.

What torch leaves to a matrix or vector library can depend on a machine: how a product adds up, and
whether exp has the same bits at the end of an array. So `doctor` does not assume it. In one process
and without collectives, since kernels never communicate: every rank's shard is worked on in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mcore_logprobs.collectives import ordered_sum_dim0
from mcore_logprobs.fused.gradients import HeadGradients, HiddenGradient
from mcore_logprobs.fused.head import Head, HeadOptions, HeadTensors
from mcore_logprobs.fused.token_stats import linear_token_stats
from mcore_logprobs.fused.tokens import HiddenTiles, Tiling
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels.products import operand
from mcore_logprobs.kernels.segments import Segments, segment_stats
from mcore_logprobs.kernels.stats import RowSpec, merge
from mcore_logprobs.logits.result import TokenStats
from mcore_logprobs.logits.token_stats import vocab_parallel_token_stats

__all__ = ["Guarantee", "find_guarantees"]

# Few calls and few kinds of kernel: what a compiled backend has not seen yet takes a second each.
_SEGMENTS, _SIZES = 8, (2, 4)
_VOCAB = _SEGMENTS * 2048
# A block of all rows is under 32768 numbers, from which on torch wakes its threads for every step:
# on a busy machine that costs milliseconds each time.
_ROWS, _HIDDEN = 15, 40
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

    With what `auto` takes here. About a second, and the time to compile a few kernels where they
    are not in inductor's cache on disk.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        hidden = torch.randn(_ROWS, _HIDDEN, generator=generator).to(device, dtype)
        weight = torch.randn(_VOCAB, _HIDDEN, generator=generator).to(device, dtype) * 0.2
        logits = 3 * torch.randn(_ROWS, _VOCAB, generator=generator).to(device, dtype)
        target = torch.randint(_VOCAB, (_ROWS,), generator=generator).to(device)
        label = str(dtype).removeprefix("torch.")
        with _one_thread():  # no sum is divided among threads; a product may be
            checks = [(f"logits {label} {what}", ok) for what, ok in _logits_checks(logits, target)]
        checks += [
            (f"hidden {label} {what}", ok) for what, ok in _hidden_checks(hidden, weight, target)
        ]
        found += [Guarantee(name, holds) for name, holds in checks]
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _logits_checks(logits: Tensor, target: Tensor) -> Iterator[tuple[str, bool]]:
    backend = backends.select("auto", logits, segments=Segments.of(_SEGMENTS, _VOCAB, 1))
    spec = RowSpec(_VOCAB, entropy=True, sum_pi_squared=True)
    top = logits.amax(-1).float()
    coef = torch.linspace(-1, 1, len(spec.coefficients) * _ROWS, device=logits.device)
    coef = coef.view(len(spec.coefficients), _ROWS)

    def forward(tp: int) -> Tensor:
        parts = torch.cat(
            [
                segment_stats(
                    backend,
                    logits[:, part].contiguous(),
                    _own(target, part),
                    replace(spec, valid=part.stop - part.start),
                    Segments.of(_SEGMENTS, _VOCAB, tp),
                    chunk_size=_ROWS,
                )
                for part in _shards(tp)
            ]
        )
        return merge(parts, spec, ordered=True)

    def backward(tp: int) -> Tensor:
        parts = []
        for part in _shards(tp):
            shard, own = logits[:, part].contiguous(), _own(target, part)
            parts.append(torch.empty_like(shard))
            width = replace(spec, valid=part.stop - part.start)
            backend.grad_logits(shard, own, top, coef, width, out=parts[-1], chunk_size=_ROWS)
        return torch.cat(parts, -1)

    def stats(rows: slice, chunk_size: int | None) -> TokenStats:
        return vocab_parallel_token_stats(
            logits[rows].contiguous(),  # strided, another kernel would be compiled
            target[rows],
            entropy=True,
            sum_pi_squared=True,
            chunk_size=chunk_size,
            invariant_segments=_SEGMENTS,
        )

    yield "forward across TP", _same_at_any_tp(forward)
    yield "backward across TP", _same_at_any_tp(backward)
    yield from _across_calls(stats)


def _hidden_checks(hidden: Tensor, weight: Tensor, target: Tensor) -> Iterator[tuple[str, bool]]:
    spec = RowSpec(_VOCAB, entropy=True, sum_pi_squared=True)
    probability = torch.full((len(spec.coefficients), _ROWS), 1e-3, device=hidden.device)

    def heads(tp: int) -> Iterator[tuple[Head, Tensor]]:
        for part in _shards(tp):
            width = part.stop - part.start
            options = HeadOptions(
                VocabShard(None, width, width),
                replace(spec, valid=width),
                torch.float32,
                "auto",
                False,
                Segments.of(_SEGMENTS, _VOCAB, tp),
            )
            tensors = HeadTensors(hidden, weight[part].clone())
            yield Head(tensors, options, width), _own(target, part)

    def forward(tp: int) -> Tensor:
        return torch.cat([head.tile_stats(operand(hidden), own) for head, own in heads(tp)])

    def backward(tp: int) -> tuple[Tensor, Tensor]:
        weights: list[Tensor] = []
        parts: list[Tensor] = []
        tiles = HiddenTiles(hidden, Tiling(None, False, _ROWS, _VOCAB))
        (tile,) = tiles
        top = torch.zeros(_ROWS, device=hidden.device)
        for head, own in heads(tp):
            tensors, needs = HeadTensors(hidden, head.weight), (True, True, False, False, False)
            gradients = HeadGradients(tensors, tiles, head.opts, needs=needs)
            assert gradients.weight is not None
            gradients.hidden = collected = _Segments(hidden, tiles, wide=False)
            for chunk in head.chunks(tile.hidden, own):
                gradients.add_chunk(
                    head, tile, chunk, partial(head.chunk_grad, shift=top, coef=probability)
                )
            parts += collected.parts
            done = gradients.weight.finish()
            assert done is not None
            weights.append(done)
        return torch.cat(weights), ordered_sum_dim0(parts, None, scatter=False)

    def stats(rows: slice, chunk_size: int | None) -> TokenStats:
        return linear_token_stats(
            hidden[rows],
            weight,
            target[rows],
            entropy=True,
            sum_pi_squared=True,
            chunk_size=chunk_size,
            invariant_segments=_SEGMENTS,
        )

    yield "forward across TP", _same_at_any_tp(forward)
    at = {tp: backward(tp) for tp in (1, *_SIZES)}
    yield "dWeight across TP", all(torch.equal(at[tp][0], at[1][0]) for tp in _SIZES)
    yield "dHidden across TP", all(torch.equal(at[tp][1], at[1][1]) for tp in _SIZES)
    yield from _across_calls(stats)


class _Segments(HiddenGradient):
    """Keeps a rank's parts of dHidden, `[rows, h]` a segment, in place of sending them."""

    parts: list[Tensor]

    def put_segments(self, number: int, parts: list[Tensor]) -> None:
        self.parts = parts


def _shards(tp: int) -> Iterator[slice]:
    width = _VOCAB // tp
    return (slice(rank * width, (rank + 1) * width) for rank in range(tp))


def _own(target: Tensor, part: slice) -> Tensor:
    return torch.where((target >= part.start) & (target < part.stop), target - part.start, -1)


def _same_at_any_tp(function: Callable[[int], Tensor]) -> bool:
    alone = function(1)
    return all(torch.equal(function(tp), alone) for tp in _SIZES)


def _across_calls(
    function: Callable[[slice, int | None], TokenStats],
) -> Iterator[tuple[str, bool]]:
    whole = function(slice(None), None)
    yield "forward across chunks", all(_equal(function(slice(None), c), whole) for c in _CHUNKS)
    yield "forward across rows", all(_equal(function(rows, None), whole[rows]) for rows in _SOME)


def _equal(a: TokenStats, b: TokenStats) -> bool:
    names = ("logprobs", "entropy", "lse", "sum_pi_squared")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)
