"""Two sources of the same tokens side by side: a chunk of either, of the same rows and columns.

Given logits are read at any rows and columns, so that the tiles of the other side decide. Two
sources whose logits are computed tile by tile have the same tiles: a teacher's head is cut as the
student's, and other sources must be cut alike. Only the student has gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels.backend import Backend
from mcore_logprobs.kernels.chunk import Chunk, ChunkAt
from mcore_logprobs.sources.given import GivenLogits
from mcore_logprobs.sources.head import HeadLogits
from mcore_logprobs.sources.head_operands import HeadOptions
from mcore_logprobs.sources.lazy import LazyLogits
from mcore_logprobs.sources.source import Gradient, Options, RecomputedTile, Source

AnySource = GivenLogits | HeadLogits


@dataclass(frozen=True)
class PairOptions:
    """Both sides' options, and how many of the tensors are the student's."""

    student: Options
    teacher: Options
    count: int
    segments: None = None

    def bind(self, *tensors: Tensor | None) -> PairSource:
        of_student, (index, *of_teacher) = tensors[: self.count], tensors[self.count :]
        student, teacher = self.student.bind(*of_student), self.teacher.bind(*of_teacher)
        return PairSource(self, student, teacher, index)


class PairSource:
    """A student and a teacher as the driver walks them; chunks bring the teacher's as `other`.

    Args:
        index: `[n]` int64, which token of a given teacher stands at each row; None: in order.
    """

    def __init__(
        self, options: PairOptions, student: Any, teacher: Any, index: Tensor | None
    ) -> None:
        self.options, self.student, self.teacher, self.index = options, student, teacher, index
        # Constants: no gradient is formed of them.
        others = (None if x is None else x.detach() for x in teacher.tensors)
        self.tensors = (*student.tensors, index, *others)
        self.shard = student.shard
        self.num_rows, self.linear = student.num_rows, False
        self.device, self.acc_dtype = student.device, student.acc_dtype
        of_teacher = teacher.processing if index is None else teacher.processing.rows(index)
        self.multipliers = student.processing.multiplier, of_teacher.multiplier
        self.heads: tuple[HeadLogits, ...] = (*student.heads, *teacher.heads)
        self.may_keep = any(head.may_keep for head in self.heads)
        self.to_row_order, self.to_token_order = student.to_row_order, student.to_token_order
        self.order_may_change = student.order_may_change
        self.rows_at_a_time = partial(student.rows_at_a_time, copies=2)  # of either side
        # A side may be refused what serves the other. invariant_segments change one side's kernels,
        # not those of two.
        alike = student.backend.pair_stats is teacher.backend.pair_stats
        self.backend: Backend = student.backend if alike else reference

    def tiles(self) -> Iterator[PairTile]:
        student, teacher, width = self.student, self.teacher, self.shard.width
        if student.recomputed and teacher.recomputed:
            # A teacher's tile is gathered on every rank, also on one without true vocabulary.
            for tile, other in zip(student.tiles(), teacher.tiles(), strict=True):
                yield PairTile(tile.rows, tile.chunks, other.block, tile)
        elif student.recomputed:
            for tile in student.tiles():
                of_teacher = partial(teacher.rectangle, tile.rows, index=self.index)
                yield PairTile(tile.rows, tile.chunks, of_teacher, tile)
        elif teacher.recomputed:
            blocks = [slice(0, width)]
            if isinstance(teacher, HeadLogits):  # whose blocks are of true vocabulary
                blocks = list(teacher.blocks)
                if (valid_width := self.shard.valid_width) < width:
                    blocks.append(slice(valid_width, width))
            for other in teacher.tiles():
                of_teacher = partial(self._block, other)
                yield self._of_given(student, other.rows, blocks, of_teacher)
        else:
            for rows in student.parts(teacher, self.rows_at_a_time(width)):
                of_teacher = partial(teacher.rectangle, rows)
                yield self._of_given(student, rows, [slice(0, width)], of_teacher)

    def _block(self, tile: RecomputedTile, columns: slice) -> Chunk:
        """A block of a teacher's tile; no product is made for one with only padding."""
        if columns.start < self.shard.valid_width:
            return tile.block(columns)
        never_read = self.student.rectangle(tile.rows, columns).logits
        return Chunk(never_read, valid=0)

    def _of_given(
        self,
        student: GivenLogits,
        rows: slice,
        blocks: list[slice],
        of_teacher: Callable[[slice], Chunk],
    ) -> PairTile:
        """A tile of given logits, whose gradient is written at all columns, padding too."""

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
    """Some rows of both; what else its gradient asks of a student's own tile, that answers.

    Attributes:
        own_chunks: gives the student's chunks.
        of_teacher: gives the teacher's chunk of these rows, by columns.
        own: the student's tile, where it is computed tile by tile.
    """

    rows: slice
    own_chunks: Callable[[], Iterator[ChunkAt]]
    of_teacher: Callable[[slice], Chunk]
    own: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def chunks(self) -> Iterator[ChunkAt]:
        for placed in self.own_chunks():
            yield placed._replace(other=self.of_teacher(placed.columns))


def _tokens(source: Source) -> Tensor:
    """The token of each row, `[n]` int64."""
    tokens = torch.arange(source.batch_shape.numel(), device=source.device)
    return source.to_row_order(tokens.view(source.batch_shape))


def _check_alike(student: Source, teacher: Source) -> None:
    """That both walk the same tokens in one order; a host sync."""
    if not torch.equal(_tokens(student), _tokens(teacher)):
        raise ValueError("teacher: expected rows in the order of the student's, got another order")


def alongside(student: AnySource, teacher_logits: Tensor) -> Tensor:
    """A teacher's logits, lazy ones real where their rows cannot be walked with the student's."""
    if not isinstance(teacher_logits, LazyLogits):
        return teacher_logits
    return teacher_logits.beside(student if isinstance(student, HeadLogits) else None)


def beside(student: Source, teacher: Source) -> PairSource:
    """The pair, both sides' rows in one order.

    Raises:
        ValueError: sources whose rows are not walked alike.
    """
    index: Tensor | None = None
    for name, side in (("student", student), ("teacher", teacher)):
        if not (side.recomputed or isinstance(side, GivenLogits)):
            raise ValueError(
                f"{name}: expected given logits or a source that is computed tile by tile, got "
                f"{type(side).__name__}"
            )
    if isinstance(student, GivenLogits) and isinstance(teacher, GivenLogits):
        teacher = teacher.in_order(student.options.order)
    elif not student.recomputed:
        student = student.in_token_order()
        if not isinstance(teacher, HeadLogits):
            _check_alike(student, teacher)
    elif not teacher.recomputed:
        teacher, of_student = teacher.in_token_order(), student.options
        if not isinstance(of_student, HeadOptions) or (
            of_student.selection is not None or of_student.sequence_parallel
        ):
            index = _tokens(student)
    elif isinstance(student, HeadLogits) and isinstance(teacher, HeadLogits):
        tiling, selection = student.options.tiling, student.options.selection
        other = teacher.options.tiling
        # Number by number: torch.compile compares no dataclasses of symbolic sizes.
        alike = other.rows == tiling.rows and other.columns == tiling.columns
        if not alike or teacher.options.selection is not selection:
            as_students = replace(teacher.options, tiling=tiling, selection=selection)
            teacher = as_students.bind(*teacher.tensors)
    else:
        if (ends := teacher.tile_ends()) != student.tile_ends():
            raise ValueError(
                f"teacher: expected tiles that end at rows {student.tile_ends()}, as the "
                f"student's, got {ends}"
            )
        _check_alike(student, teacher)
    pair = PairOptions(student.options, teacher.options, len(student.tensors))
    return PairSource(pair, student, teacher, index)
