"""Two sources of the same tokens side by side: a chunk of either, of the same rows and columns.

Either may be given logits or a head. Where the student is a head its tiles decide, and a teacher's
head is cut alike; where it is given, the teacher's tiles do. Gradients are the student's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels.chunk import Chunk, ChunkAt, row_chunks
from mcore_logprobs.sources.given import GivenLogits
from mcore_logprobs.sources.head import HeadLogits
from mcore_logprobs.sources.lazy import LazyLogits
from mcore_logprobs.sources.source import Gradient, Options

AnySource = GivenLogits | HeadLogits


@dataclass(frozen=True)
class PairOptions:
    """Both sides' options, and how many of the tensors are the student's.

    Attributes:
        backend: as the caller named it.
    """

    student: Options
    teacher: Options
    count: int
    backend: str
    segments: None = None

    def bind(self, *tensors: Tensor | None) -> PairSource:
        of_student, (index, *of_teacher) = tensors[: self.count], tensors[self.count :]
        student, teacher = self.student.bind(*of_student), self.teacher.bind(*of_teacher)
        return PairSource(self, student, teacher, index)


class PairSource:
    """A student and a teacher as a `Source`, whose chunks bring the teacher's as `ChunkAt.other`.

    Args:
        index: `[n]` int64, which token of a given teacher stands at each row; None: in order.
    """

    def __init__(
        self, options: PairOptions, student: AnySource, teacher: AnySource, index: Tensor | None
    ) -> None:
        self.options, self.student, self.teacher, self.index = options, student, teacher, index
        # Constants: no gradient is formed of them.
        others = (None if x is None else x.detach() for x in teacher.tensors)
        self.tensors = (*student.tensors, index, *others)
        self.shard = student.shard
        self.batch_shape, self.num_rows = student.batch_shape, student.num_rows
        self.device, self.acc_dtype = student.device, student.acc_dtype
        self.processing, self.linear = student.processing, False
        of_teacher = teacher.processing if index is None else teacher.processing.rows(index)
        self.multipliers = student.processing.multiplier, of_teacher.multiplier
        self.recomputed = student.recomputed
        self.may_keep = any(head.may_keep for head in self.heads)
        self.to_row_order, self.to_token_order = student.to_row_order, student.to_token_order
        self.order_may_change = student.order_may_change
        self.rows_at_a_time = partial(student.rows_at_a_time, copies=2)  # of either side

    @property
    def heads(self) -> tuple[HeadLogits, ...]:
        return tuple(x for x in (self.student, self.teacher) if isinstance(x, HeadLogits))

    def backend(self, placed: ChunkAt) -> backends.Backend:
        """What computes a chunk of both sides."""
        assert placed.other is not None
        return backends.select(self.options.backend, placed.chunk.logits, placed.other.logits)

    def tiles(self) -> Iterator[PairTile]:
        student, teacher = self.student, self.teacher
        if isinstance(student, HeadLogits) and isinstance(teacher, HeadLogits):
            # A teacher's tile is gathered on every rank, also on one without true vocabulary.
            for tile, other in zip(student.tiles(), teacher.tiles(), strict=True):
                yield PairTile(tile.rows, tile.chunks, other.block, tile.number, tile.hidden)
        elif isinstance(student, HeadLogits):
            assert isinstance(teacher, GivenLogits)
            for tile in student.tiles():
                of_teacher = partial(teacher.rectangle, tile.rows, index=self.index)
                yield PairTile(tile.rows, tile.chunks, of_teacher, tile.number, tile.hidden)
        elif isinstance(teacher, HeadLogits):
            for other in teacher.tiles():
                blocks = list(row_chunks(student.shard.width, teacher.options.tiling.columns))
                yield self._of_given(student, other.rows, blocks, other.block)
        else:
            step = max(1, student.num_rows)
            if not (student.is_one_view and teacher.is_one_view):
                step = self.rows_at_a_time(student.shard.width)  # some rows are copied
            for rows in row_chunks(student.num_rows, step):
                blocks = [slice(0, student.shard.width)]
                yield self._of_given(student, rows, blocks, partial(teacher.rectangle, rows))

    def _of_given(
        self,
        student: GivenLogits,
        rows: slice,
        blocks: list[slice],
        of_teacher: Callable[[slice], Chunk],
    ) -> PairTile:
        def chunks() -> Iterator[ChunkAt]:
            return (ChunkAt(rows, block, student.rectangle(rows, block)) for block in blocks)

        return PairTile(rows, chunks, of_teacher)

    def gradient(self, needs: Sequence[bool], *, sparse: bool = False) -> Gradient:
        """The student's."""
        if sparse:
            raise ValueError(
                "sparse: expected False, as a divergence's gradient is of whole chunks"
            )
        return self.student.gradient(needs[: len(self.student.tensors)])


@dataclass(frozen=True)
class PairTile:
    """Some rows of both.

    Attributes:
        own_chunks: gives the student's chunks.
        of_teacher: gives the teacher's chunk of these rows, by columns.
        number, hidden: what the gradient of a student's head asks of its tile.
    """

    rows: slice
    own_chunks: Callable[[], Iterator[ChunkAt]]
    of_teacher: Callable[[slice], Chunk]
    number: int = 0
    hidden: Tensor | None = None

    def chunks(self) -> Iterator[ChunkAt]:
        for placed in self.own_chunks():
            yield placed._replace(other=self.of_teacher(placed.columns))


def alongside(student: AnySource, teacher_logits: Tensor) -> Tensor:
    """A teacher's logits, lazy ones real where their rows cannot be walked with the student's."""
    if not isinstance(teacher_logits, LazyLogits):
        return teacher_logits
    return teacher_logits.beside(student if isinstance(student, HeadLogits) else None)


def beside(student: AnySource, teacher: AnySource, backend: str) -> PairSource:
    """The pair, both sides' rows in one order.

    Raises:
        ValueError: a backend asked for by name that cannot serve both sides.
    """
    index: Tensor | None = None
    options: Any = teacher.options
    if isinstance(student, GivenLogits):
        if isinstance(teacher, GivenLogits):
            # Both in the student's order.
            options = replace(options, order=student.options.order)
            teacher = options.bind(*teacher.tensors)
        else:
            student = student.in_token_order()
    elif isinstance(teacher, HeadLogits):
        of_student = student.options
        options = replace(options, tiling=of_student.tiling, selection=of_student.selection)
        teacher = options.bind(*teacher.tensors)
    else:
        teacher = teacher.in_token_order()
        if student.options.selection is not None or student.options.sequence_parallel:
            tokens = torch.arange(student.batch_shape.numel(), device=student.device)
            index = student.to_row_order(tokens.view(student.batch_shape))
    sides = (
        x.logits if isinstance(x, GivenLogits) else x.weight[:0, :1] for x in (student, teacher)
    )
    backends.select(backend, *sides)
    pair = PairOptions(student.options, teacher.options, len(student.tensors), backend)
    return PairSource(pair, student, teacher, index)
