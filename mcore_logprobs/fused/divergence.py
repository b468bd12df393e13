"""Distillation from hidden states: the student's logits are never held, nor the teacher's.

Two heads side by side: a chunk of either side's logits exists at a time, on the same tiles and
blocks; backward recomputes both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.autograd import once_differentiable
from mcore_logprobs.collectives import all_gather_stack, all_reduce_sum
from mcore_logprobs.fused.gradients import HeadGradients
from mcore_logprobs.fused.head import Chunk, Head, HeadOptions, HeadTensors, open_head
from mcore_logprobs.fused.lora import LoRAInput
from mcore_logprobs.fused.tokens import (
    NO_TARGET,
    HiddenTiles,
    Tile,
    Tiling,
    open_tokens,
    whole_lead,
)
from mcore_logprobs.groups import resolve_tp_group
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels.distill import (
    PAIR_STATS,
    PairSpec,
    Side,
    finish_pair,
    merge_pairs,
    pair_dtype,
)
from mcore_logprobs.kernels.stats import RowSpec
from mcore_logprobs.logits.distill import check_kind
from mcore_logprobs.logits.dtensor import unwrap_logits
from mcore_logprobs.logits.opening import (
    check_group_tensor,
    check_same_rows,
    open_temperature,
    row_spec,
)

__all__ = ["linear_kl_div"]


@dataclass(frozen=True)
class _Options:
    """`teacher` is None where the teacher's logits are given."""

    student: HeadOptions
    teacher: HeadOptions | None
    teacher_spec: RowSpec
    tiling: Tiling
    pair: PairSpec
    temperatures: tuple[Tensor | None, Tensor | None]


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

    def __init__(self, tensors: HeadTensors, opts: HeadOptions, tiling: Tiling) -> None:
        self._head = Head(tensors, opts, tiling.block_columns)
        self._tiles = HiddenTiles(tensors.hidden, tiling)
        self.dtype = self._head.wide

    def tiles(self) -> Iterator[Tensor]:
        for tile in self._tiles:
            yield tile.hidden

    def chunk(self, tile: Tensor | None, rows: slice, columns: slice) -> Tensor:
        assert tile is not None
        return self._head.logits(tile, columns)

    def bias(self, columns: slice) -> Tensor | None:
        return None if self._head.bias is None else self._head.bias[columns]


@dataclass(frozen=True)
class _Pair:
    """A chunk of the student's logits and the teacher's beside it."""

    student: Side
    teacher: Side
    kernels: backends.PairBackend

    @classmethod
    def of(
        cls,
        chunk: Chunk,
        tile: Tile,
        teacher: _GivenTeacher | _HeadTeacher,
        beside: Tensor | None,
        teacher_temperature: Tensor | None,
        opts: _Options,
    ) -> _Pair:
        """Both chunks; `beside` is what the teacher's `tiles` gave for this tile."""
        columns = chunk.columns
        other = teacher.chunk(beside, tile.rows, columns)
        return cls(
            Side(chunk.logits, chunk.spec, chunk.bias, chunk.temperature),
            Side(
                other,
                replace(opts.teacher_spec, valid=columns.stop - columns.start),
                teacher.bias(columns),
                tile.of(teacher_temperature),
            ),
            backends.select_pair(opts.student.backend, chunk.logits, other),
        )

    @property
    def chunk_size(self) -> int:
        """Rows at a time of which two float32 copies stay small beside the chunk."""
        logits = self.teacher.logits
        return backends.default_chunk_size(2 * logits.shape[1], logits.device)


class _LinearDivergence(torch.autograd.Function):
    """Flat: `[n]`. The teacher is its logits or its head's tensors; neither gets a gradient.

    index is which row of the teacher's logits stands where, None for its own place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        teacher: Tensor | HeadTensors,
        keep: Tensor,
        index: Tensor | None,
        opts: _Options,
        *inputs: Any,
    ) -> Tensor:
        tensors = HeadTensors(*inputs)
        tiles, spec = HiddenTiles(tensors.hidden, opts.tiling), opts.pair
        head = Head(tensors, opts.student, opts.tiling.block_columns)
        other = _teacher(teacher, tiles, index, opts)
        dtype = pair_dtype(head.wide, other.dtype)
        stats = keep.new_zeros(PAIR_STATS, tiles.count, dtype=dtype)
        stats[0] = stats[2] = -torch.inf  # what a rank without true vocabulary says
        for tile, pair in _pairs(head, tiles, other, opts):
            found = pair.kernels.pair_stats(
                pair.student, pair.teacher, spec, chunk_size=pair.chunk_size
            )
            stats[:, tile.rows] = merge_pairs(torch.stack([stats[:, tile.rows], found]), spec)
        done = finish_pair(merge_pairs(all_gather_stack(stats, opts.student.group), spec), spec)
        value, inner = done.value, done.value
        if spec.kind == "jsd":
            # KL of either side from the mixture: a second walk, one all-reduce.
            sums = stats.new_zeros(2, tiles.count)
            for tile, pair in _pairs(head, tiles, other, opts):
                sums[:, tile.rows] += pair.kernels.jsd_sums(
                    pair.student,
                    pair.teacher,
                    done.norm_s[:, tile.rows],
                    done.norm_t[:, tile.rows],
                    spec,
                    chunk_size=pair.chunk_size,
                )
            from_teacher, inner = all_reduce_sum(sums, opts.student.group)
            value = (spec.beta * from_teacher + (1.0 - spec.beta) * inner).clamp(min=0.0)
        keep = tiles.walk(keep) & done.usable
        ctx.opts = opts
        others = (teacher,) if isinstance(teacher, Tensor) else teacher
        tensors.save(ctx, keep, index, done.norm_s, done.norm_t, inner, *others)
        return tiles.restore(torch.where(keep, value, 0.0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, (keep, index, norm_s, norm_t, inner, *others) = HeadTensors.saved(ctx)
        opts: _Options = ctx.opts
        tiles = HiddenTiles(tensors.hidden, opts.tiling)
        upstream = torch.where(keep, tiles.walk(grads[0]), 0.0)
        gradients = HeadGradients(tensors, tiles, opts.student, needs=ctx.needs_input_grad[4:])
        head = Head(tensors, opts.student, opts.tiling.block_columns)
        teacher = others[0] if opts.teacher is None else HeadTensors(*others)
        other = _teacher(teacher, tiles, index, opts)
        student_t, teacher_t = (tiles.walk_optional(t) for t in opts.temperatures)

        def dlogits_of(chunk: Chunk, *, tile: Tile, beside: Tensor | None) -> Tensor:
            rows = tile.rows
            pair = _Pair.of(chunk, tile, other, beside, teacher_t, opts)
            out = head.gradient_buffer(chunk.logits)
            pair.kernels.pair_grad(
                pair.student,
                pair.teacher,
                norm_s[:, rows],
                norm_t[:, rows],
                inner[rows],
                upstream[rows],
                opts.pair,
                out=out,
                chunk_size=pair.chunk_size,
            )
            return out

        for tile, beside in zip(tiles, other.tiles(), strict=False):
            for chunk in head.chunks(tile.hidden, None, tile.of(student_t)):
                of_tile = partial(dlogits_of, tile=tile, beside=beside)
                gradients.add_chunk(head, tile, chunk, of_tile)
            gradients.end_tile(tile)
        return (None, None, None, None, *gradients.finish())


def _pairs(
    head: Head, tiles: HiddenTiles, teacher: _GivenTeacher | _HeadTeacher, opts: _Options
) -> Iterator[tuple[Tile, _Pair]]:
    student_t, teacher_t = (tiles.walk_optional(t) for t in opts.temperatures)
    for tile, beside in zip(tiles, teacher.tiles(), strict=False):
        for chunk in head.chunks(tile.hidden, None, tile.of(student_t)):
            yield tile, _Pair.of(chunk, tile, teacher, beside, teacher_t, opts)


def _teacher(
    teacher: Tensor | HeadTensors, tiles: HiddenTiles, index: Tensor | None, opts: _Options
) -> _GivenTeacher | _HeadTeacher:
    if opts.teacher is not None:
        assert isinstance(teacher, HeadTensors)
        return _HeadTeacher(teacher, opts.teacher, opts.tiling)
    assert isinstance(teacher, Tensor)
    if index is None and opts.tiling.sequence_parallel:
        index = torch.arange(tiles.count, device=teacher.device)
    return _GivenTeacher(teacher, None if index is None else tiles.walk(index))


def linear_kl_div(
    hidden: Tensor,
    weight: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    teacher_lora: LoRAInput | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    kind: str = "forward",
    beta: float = 0.5,
    mask: Tensor | None = None,
    compact: bool = False,
    bias: Tensor | None = None,
    lora: LoRAInput | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    gradient_accumulation_fusion: bool = False,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    teacher_temperature: float | Tensor | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """`vocab_parallel_kl_div` of a head's logits without ever holding them.

    The teacher is either its logits, or its hidden states and its head's weight: then its logits
    are never held either. Equal to the unfused operation on float32 logits up to rounding.

    Shape:
        hidden: `[s, b, h]` (`[s/TP, b, h]` under sequence parallelism) or `[n, h]` (`[n/TP, h]`).
        weight: `[V/TP, h]`, this rank's rows of the student's output layer, in hidden's dtype.
        teacher_logits: `[s, b, V/TP]` or `[n, V/TP]`, the whole sequence on every TP rank, of
            any float dtype; or a DTensor sharded on its last dimension.
        teacher_hidden, teacher_weight, teacher_bias, teacher_lora: as hidden, weight, bias and
            lora, of any hidden size; teacher_hidden is split over TP if hidden is.
        mask: bool `[s, b]` or `[n]`, the whole sequence; False rows give 0 and no gradient.
        Returns float32 `[s, b]` or `[n]` (float64 where either side is).

    Args:
        kind, beta, temperature, teacher_temperature, vocab_size: as in `vocab_parallel_kl_div`.
        teacher_logit_scale, teacher_softcap: of the teacher's own head; with teacher_logits too.
        compact: compute only rows that the mask keeps; the same results. One host sync.
        bias, lora, logit_scale, softcap, sequence_parallel, logits_dtype,
            gradient_accumulation_fusion, tp_group, chunk_size: as in `linear_token_stats`.
        backend: "auto", "torch" or "triton".

    The gradient goes to hidden, weight, bias and lora of the student, accumulated in float32; the
    teacher is a constant. A teacher that is the student's base model without its LoRA has the same
    head: `teacher_weight=weight`, and no teacher_lora.

    Collectives: forward one all-gather of `[5, n]` float32 over TP, for "jsd" one all-reduce of
    `[2, n]` more; backward those of `linear_token_stats`. Sequence parallelism gathers each tile of
    both hidden states, forward (twice for "jsd") and backward.

    Memory: a chunk of either side's logits and where operands are bfloat16 its gradient; the
    gradients. Saved for backward: the inputs and a few numbers a row.

    Raises:
        ValueError: before any collective; neither or both kinds of teacher; else as in
            `vocab_parallel_kl_div` and `linear_token_stats`.
    """
    check_kind(kind, beta)
    given = teacher_logits is not None
    if given == (teacher_hidden is not None or teacher_weight is not None):
        raise ValueError(
            "teacher: expected either teacher_logits or teacher_hidden with teacher_weight"
        )
    if given and teacher_bias is not None:
        raise ValueError("teacher_bias: expected None with teacher_logits")
    if given and teacher_lora is not None:
        raise ValueError("teacher_lora: expected None with teacher_logits")
    if teacher_logits is not None:
        teacher_logits, tp_group = unwrap_logits(teacher_logits, tp_group, "teacher_logits")
    group = resolve_tp_group(tp_group)
    shared: dict[str, Any] = {
        "logits_dtype": logits_dtype,
        "tp_group": group,
        "vocab_size": vocab_size,
        "backend": backend,
    }
    student = open_head(
        hidden,
        weight,
        bias,
        lora=lora,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=temperature,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        **shared,
    )
    lead = whole_lead(hidden, group, sequence_parallel=sequence_parallel)
    if teacher_temperature is None:
        teacher_temperature = temperature
    teacher_number, teacher_own = open_temperature(
        teacher_temperature, lead, hidden.device, name="teacher_temperature"
    )
    teacher_finish: dict[str, Any] = {
        "logit_scale": teacher_logit_scale,
        "softcap": teacher_softcap,
        "temperature": teacher_number,
        "prefix": "teacher_",
    }
    teacher: HeadOptions | None = None
    other: Tensor | HeadTensors
    if teacher_logits is not None:
        check_group_tensor(teacher_logits, "teacher_logits", min_dim=2)
        shape = torch.Size((*lead, weight.shape[0]))
        check_same_rows("teacher_logits", teacher_logits, shape, hidden.device)
        teacher_spec = row_spec(student.shard, **teacher_finish)
        other = first = teacher_logits.detach()
    else:
        teacher = open_head(
            teacher_hidden,  # type: ignore[arg-type]
            teacher_weight,  # type: ignore[arg-type]
            teacher_bias,
            lora=teacher_lora,
            **teacher_finish,
            **shared,
        )
        assert teacher_hidden is not None
        assert teacher_weight is not None
        _check_teacher(teacher_hidden, teacher_weight, hidden, weight)
        teacher_spec = teacher.spec
        first = teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1])
        other = HeadTensors.of(first, teacher_weight, teacher_bias, teacher_lora)
    tokens = open_tokens(
        hidden,
        NO_TARGET,
        student.shard,
        sequence_parallel=sequence_parallel,
        chunk_size=chunk_size,
        mask=mask,
        compact=compact,
        temperature=temperature,
    )
    if teacher_own is not None:
        teacher_own = tokens.per_row(teacher_own)
    index = None
    if tokens.compaction is not None:
        index = tokens.per_row(torch.arange(lead.numel(), device=hidden.device).view(lead))
        if isinstance(other, HeadTensors):
            other = other._replace(hidden=tokens.compaction.select_hidden(first))
    # A backend asked for by name that cannot serve both sides is refused before any collective.
    # Given logits are seen as they are, unless their rows are copied.
    whole = given and index is None and not sequence_parallel
    backends.select_pair(backend, weight.new_empty(0, 1), first if whole else first.new_empty(0, 1))
    own = (tokens.temperature, teacher_own)
    pair = PairSpec(kind, float(beta))
    opts = _Options(student, teacher, teacher_spec, tokens.tiling, pair, own)
    tensors = HeadTensors.of(tokens.hidden, weight, bias, lora)
    value = _LinearDivergence.apply(other, tokens.target.keep, index, opts, *tensors)
    return tokens.restore(value, 0.0)


def _check_teacher(
    teacher_hidden: Tensor, teacher_weight: Tensor, hidden: Tensor, weight: Tensor
) -> None:
    if teacher_hidden.device != hidden.device:
        raise ValueError(
            f"teacher_hidden: expected device {hidden.device}, got {teacher_hidden.device}"
        )
    if teacher_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"teacher_weight: expected the student's V/TP = {weight.shape[0]} rows, got shape "
            f"{tuple(teacher_weight.shape)}"
        )
    if teacher_hidden.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"teacher_hidden: expected hidden's leading shape {tuple(hidden.shape[:-1])}, got "
            f"{tuple(teacher_hidden.shape[:-1])}"
        )
