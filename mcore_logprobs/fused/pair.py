"""Two heads side by side: a divergence of hidden states from a teacher, chunk by chunk.

A chunk of either side's logits exists at a time, on the tiles and blocks of `linear_tiles`;
backward recomputes both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_logprobs.collectives import all_gather_stack, all_reduce_sum
from mcore_logprobs.fused.head import Chunk, Head, LinearOptions
from mcore_logprobs.fused.tiles import HiddenTiles
from mcore_logprobs.fused.token_stats import HeadGradients, add_chunk_gradient
from mcore_logprobs.kernels.backend import default_chunk_size
from mcore_logprobs.kernels.distill import (
    PAIR_STATS,
    PairSpec,
    finish_pair,
    jsd_sums,
    merge_pairs,
    pair_dtype,
    pair_grad,
    pair_stats,
)
from mcore_logprobs.kernels.products import operand_dtype
from mcore_logprobs.kernels.reference import row_chunks
from mcore_logprobs.kernels.stats import RowSpec

__all__ = ["LinearDivergence", "PairOptions"]


@dataclass(frozen=True)
class PairOptions:
    """`teacher` is None where the teacher's logits are given."""

    student: LinearOptions
    teacher: LinearOptions | None
    teacher_spec: RowSpec
    kind: str
    beta: float


class _GivenTeacher:
    """The teacher's logits `[..., v]`, a rectangle at a time.

    Args:
        order: `[n]`, which flat row stands at each place of the walk; None: its own.
    """

    def __init__(self, logits: Tensor, order: Tensor | None) -> None:
        # Where the leading dimensions have no common stride they are indexed instead.
        with contextlib.suppress(RuntimeError):
            logits = logits.view(-1, logits.shape[-1])
        self._logits, self._order = logits, order
        self.dtype = logits.dtype

    def tiles(self) -> Iterator[Tensor | None]:
        while True:
            yield None

    def chunk(self, tile: Tensor | None, rows: slice, columns: slice) -> Tensor:
        block = self._logits[..., columns]
        lead = block.shape[:-1]
        if self._order is None and len(lead) == 1:
            return block[rows]
        if self._order is not None:
            flat = self._order[rows]
        else:
            flat = torch.arange(rows.start, rows.stop, device=block.device)
        return block[torch.unravel_index(flat, lead)]

    def bias(self, columns: slice) -> None:
        return None


class _HeadTeacher:
    """The teacher's logits from its own hidden states and head."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, opts: LinearOptions
    ) -> None:
        self._head = Head(weight, bias, opts)
        self._tiles = _tiles(hidden, opts)
        self.dtype = self._head.wide

    def tiles(self) -> Iterator[Tensor]:
        for _, _, tile in self._tiles:
            yield tile

    def chunk(self, tile: Tensor | None, rows: slice, columns: slice) -> Tensor:
        assert tile is not None
        return self._head.logits(tile, columns)

    def bias(self, columns: slice) -> Tensor | None:
        return None if self._head.bias is None else self._head.bias[columns]


class _StudentHead(Head):
    """A head whose dLogits are those of the divergence from the teacher's logits beside them."""

    def __init__(self, weight: Tensor, bias: Tensor | None, opts: PairOptions) -> None:
        super().__init__(weight, bias, opts.student)
        self._pair = opts
        self._beside: tuple[Tensor, Tensor | None] | None = None

    def pair_spec(self, chunk: Chunk) -> PairSpec:
        width = chunk.columns.stop - chunk.columns.start
        teacher = replace(self._pair.teacher_spec, valid=width)
        return PairSpec(chunk.spec, teacher, self._pair.kind, self._pair.beta)

    def pairs(
        self, tile: Tensor, rows: slice, teacher: _GivenTeacher | _HeadTeacher, other: Any
    ) -> Iterator[tuple[Chunk, Tensor, Tensor | None]]:
        """(the student's chunk, the teacher's logits and bias beside it), block by block."""
        nobody = torch.full((tile.shape[0],), -1, dtype=torch.int64, device=tile.device)
        for chunk in self.chunks(tile, nobody):
            logits = teacher.chunk(other, rows, chunk.columns)
            self._beside = logits, teacher.bias(chunk.columns)
            yield chunk, *self._beside

    def chunk_grad(self, chunk: Chunk, lse: Tensor, coef: Tensor) -> Tensor:
        """As the base class's, of the divergence.

        Args:
            lse: `[2, rows]`, the student's normaliser.
            coef: `[4, rows]`: the teacher's normaliser, then the inner divergence and upstream.
        """
        assert self._beside is not None
        logits, (teacher, teacher_bias) = chunk.logits, self._beside
        dtype = operand_dtype(self.weight.dtype, self.weight.device)
        out = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
        for part in _row_parts(logits):
            pair_grad(
                logits[part],
                teacher[part],
                lse[:, part],
                coef[:2, part],
                coef[2, part],
                coef[3, part],
                self.pair_spec(chunk),
                out=out[part],
                student_bias=chunk.bias,
                teacher_bias=teacher_bias,
            )
        return out


def _row_parts(logits: Tensor) -> Iterator[slice]:
    """Rows at a time, so that two float32 copies of them stay small beside the chunk."""
    rows, columns = logits.shape
    return row_chunks(rows, default_chunk_size(2 * columns, logits.device))


def _tiles(hidden: Tensor, opts: LinearOptions) -> HiddenTiles:
    return HiddenTiles(
        hidden.detach(),
        opts.group,
        sequence_parallel=opts.sequence_parallel,
        tile_rows=opts.tile_rows,
    )


class LinearDivergence(torch.autograd.Function):
    """Flat: `[n]`. The teacher is (logits, None, None) or (hidden, weight, bias or None).

    order is which row of the teacher's logits stands where, None for its own place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: Tensor,
        teacher_weight: Tensor | None,
        teacher_bias: Tensor | None,
        keep: Tensor,
        index: Tensor | None,
        opts: PairOptions,
    ) -> Tensor:
        tiles = _tiles(hidden, opts.student)
        head = _StudentHead(weight, bias, opts)
        other = _teacher(teacher, teacher_weight, teacher_bias, tiles, index, opts)
        dtype = pair_dtype(head.wide, other.dtype)
        whole = PairSpec(opts.student.spec, opts.teacher_spec, opts.kind, opts.beta)
        stats = hidden.new_zeros(PAIR_STATS, tiles.count, dtype=dtype)
        stats[0] = stats[2] = -torch.inf  # what a rank without true vocabulary says
        for (_, rows, tile), beside in zip(tiles, other.tiles(), strict=False):
            for chunk, logits, logits_bias in head.pairs(tile, rows, other, beside):
                found = stats.new_empty(PAIR_STATS, tile.shape[0])
                spec = head.pair_spec(chunk)
                for part in _row_parts(chunk.logits):
                    pair_stats(
                        chunk.logits[part],
                        logits[part],
                        spec,
                        out=found[:, part],
                        student_bias=chunk.bias,
                        teacher_bias=logits_bias,
                    )
                stats[:, rows] = merge_pairs(torch.stack([stats[:, rows], found]), whole)
        done = finish_pair(merge_pairs(all_gather_stack(stats, opts.student.group), whole), whole)
        value, inner = done.value, done.value
        if opts.kind == "jsd":
            from_teacher, inner = _jsd(tiles, head, other, done.norm_s, done.norm_t, opts)
            value = (opts.beta * from_teacher + (1.0 - opts.beta) * inner).clamp(min=0.0)
        keep = tiles.ordered(keep) & done.usable
        ctx.opts, ctx.weight = opts, weight  # the parameter itself: main_grad hangs on it
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            teacher,
            teacher_weight,
            teacher_bias,
            keep,
            index,
            done.norm_s,
            torch.cat([done.norm_t, inner.unsqueeze(0)]),
        )
        return tiles.restored(torch.where(keep, value, 0.0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, first, other_weight, other_bias, *rest = ctx.saved_tensors
        keep, index, norm_s, coef = rest
        opts: PairOptions = ctx.opts
        tiles = _tiles(hidden, opts.student)
        upstream = torch.where(keep, tiles.ordered(grads[0]), 0.0)
        coef = torch.cat([coef, upstream.to(coef.dtype).unsqueeze(0)])
        fused = opts.student.gradient_accumulation_fusion
        gradients = HeadGradients(
            hidden,
            weight,
            bias,
            tiles,
            opts.student,
            needs=ctx.needs_input_grad[:3],
            main_grad=ctx.weight.main_grad if fused else None,
        )
        head = _StudentHead(weight, bias, opts)
        other = _teacher(first, other_weight, other_bias, tiles, index, opts)
        for (number, rows, tile), beside in zip(tiles, other.tiles(), strict=False):
            for chunk, _, _ in head.pairs(tile, rows, other, beside):
                add_chunk_gradient(
                    gradients, head, number, tile, chunk, norm_s[:, rows], coef[:, rows]
                )
            gradients.end_tile(number, tile)
        return (*gradients.finish(), *(None,) * 6)


def _teacher(
    first: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    tiles: HiddenTiles,
    index: Tensor | None,
    opts: PairOptions,
) -> _GivenTeacher | _HeadTeacher:
    if opts.teacher is not None:
        assert weight is not None
        return _HeadTeacher(first, weight, bias, opts.teacher)
    if index is None and opts.student.sequence_parallel:
        index = torch.arange(tiles.count, device=first.device)
    return _GivenTeacher(first, None if index is None else tiles.ordered(index))


def _jsd(
    tiles: HiddenTiles,
    head: _StudentHead,
    teacher: _GivenTeacher | _HeadTeacher,
    norm_s: Tensor,
    norm_t: Tensor,
    opts: PairOptions,
) -> Tensor:
    """KL of either side from the mixture, `[2, n]`: a second walk and one all-reduce."""
    sums = norm_s.new_zeros(2, tiles.count)
    for (_, rows, tile), beside in zip(tiles, teacher.tiles(), strict=False):
        for chunk, logits, bias in head.pairs(tile, rows, teacher, beside):
            found = sums.new_empty(2, tile.shape[0])
            for part in _row_parts(chunk.logits):
                jsd_sums(
                    chunk.logits[part],
                    logits[part],
                    norm_s[:, rows][:, part],
                    norm_t[:, rows][:, part],
                    head.pair_spec(chunk),
                    out=found[:, part],
                    student_bias=chunk.bias,
                    teacher_bias=bias,
                )
            sums[:, rows] += found
    return all_reduce_sum(sums, opts.student.group)
