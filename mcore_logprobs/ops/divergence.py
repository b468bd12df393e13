"""Divergences from a teacher's whole distribution, token by token.

Two sources side by side: a chunk of either side's logits at a time, of the same rows and columns.
The teacher is given logits or hidden states with a head of its own, whatever the student is.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from mcore_logprobs.checks import check_mask, check_shape, unwrap_logits
from mcore_logprobs.collectives import all_gather_dim0, all_gather_stack, all_reduce_sum
from mcore_logprobs.kernels.chunk import ChunkAt, per_row
from mcore_logprobs.kernels.pairs import (
    PAIR_STATS,
    TWO_PASS,
    FinalPair,
    PairSpec,
    finalize_pair,
    merge_pairs,
    pair_dtype,
)
from mcore_logprobs.ops.driver import Backward, Forward, Operation, Results, Saved, Tensors, apply
from mcore_logprobs.ops.keywords import HeadKeywords, LogitsKeywords, shared_keywords
from mcore_logprobs.sources.given import GivenLogits, given_logits
from mcore_logprobs.sources.head import HeadLogits, head_logits
from mcore_logprobs.sources.lazy import uncut
from mcore_logprobs.sources.lora import LoRAInput
from mcore_logprobs.sources.pair_source import AnySource, PairSource, alongside, beside
from mcore_logprobs.sources.source import Source, Tile, token_temperature

KL_KINDS = ("forward", "reverse", *TWO_PASS)


@dataclass(frozen=True)
class Divergence(Operation[PairSource]):
    """Divergences `[n]` of a `PairSource`; 0 in rows that the valid mask `[n]` leaves out."""

    spec: PairSpec
    rereads = "exact"

    def forward(self, source: PairSource, tensors: Tensors) -> Forward:
        return DivergenceForward(self.spec, source, tensors[0])

    def backward(
        self, source: PairSource, upstream: Results, tensors: Tensors, saved: Saved
    ) -> Backward:
        (on_values,) = upstream
        assert on_values is not None
        return _DivergenceGradient(self.spec, source, on_values, *saved)


class DivergenceForward(Forward):
    """The forward of a divergence, and a base class for those that are no kind of `PairSpec`.

    The blocks of a tile are merged once they are all there: a merge is forty small launches.

    Attributes:
        done: the normalizers of whole rows, set by `finalize`; None before.
    """

    def __init__(self, spec: PairSpec, source: PairSource, valid_mask: Tensor) -> None:
        self._spec, self._source, self._valid_mask = spec, source, valid_mask
        self.passes = 2 if spec.two_pass else 1
        dtype = pair_dtype(source.acc_dtype, source.teacher.acc_dtype)
        shape = (PAIR_STATS, source.num_rows)
        self._stats = torch.zeros(shape, dtype=dtype, device=source.device)
        if source.shard.valid_width == 0:  # a head shows no chunk then
            self._stats[0] = self._stats[2] = -torch.inf
        self._blocks: list[Tensor] = []  # pair statistics of the tile, so far
        self.done: FinalPair | None = None
        self._sums = self._stats.new_zeros(2, source.num_rows)

    def see(self, placed: ChunkAt) -> None:
        spec, rows, (student, teacher) = self._spec, placed.rows, (placed.chunk, placed.other)
        assert teacher is not None
        size = self._source.rows_at_a_time(teacher.logits.shape[1])
        kernels = self._source.backend
        if self.done is None:
            self._blocks.append(kernels.pair_stats(student, teacher, spec, chunk_size=size))
        else:
            softmax = self.done.softmax[:, rows]
            sums = kernels.pair_sums(student, teacher, softmax, spec, chunk_size=size)
            self._sums[:, rows] += sums

    def end_tile(self, tile: Tile, rows: slice) -> None:
        blocks, self._blocks = self._blocks, []
        if blocks:  # a rank without true vocabulary may have none; a second pass makes none
            stats = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
            of_student, of_teacher = (per_row(x, rows) for x in self._source.multipliers)
            self._stats[:, rows] = merge_pairs(stats, self._spec, (of_student, of_teacher))

    def finalize(self) -> None:
        shards = all_gather_stack(self._stats, self._source.shard.group)
        merged = merge_pairs(shards, self._spec, self._source.multipliers)
        self.done = finalize_pair(merged, self._spec)

    def results(self) -> tuple[Results, Saved]:
        if self.done is None:
            self.finalize()
        done = self.done
        assert done is not None
        value, inner = done.value, done.value
        if self._spec.two_pass:
            value, inner = all_reduce_sum(self._sums, self._source.shard.group)
            value = value.clamp(min=0.0)
        usable = done.usable & self._valid_mask
        return (torch.where(usable, value, 0.0),), (usable, done.softmax.t(), inner)


class _DivergenceGradient(Backward):
    def __init__(
        self,
        spec: PairSpec,
        source: PairSource,
        upstream: Tensor,
        usable: Tensor,
        softmax: Tensor,
        inner: Tensor,
    ) -> None:
        self._spec, self._source, self._softmax, self._inner = spec, source, softmax, inner
        self._upstream = torch.where(usable, upstream, 0.0)

    def write(self, placed: ChunkAt, out: Tensor) -> None:
        rows, teacher = placed.rows, placed.other
        assert teacher is not None
        self._source.backend.pair_grad(
            placed.chunk,
            teacher,
            self._softmax[rows].t(),
            self._inner[rows],
            self._upstream[rows],
            self._spec,
            out=out,
            chunk_size=self._source.rows_at_a_time(teacher.logits.shape[1]),
        )


def kl_div(
    student: Source,
    teacher: Source,
    *,
    kind: str = "forward",
    beta: float = 0.5,
    mask: Tensor | None = None,
) -> Tensor:
    """`vocab_parallel_kl_div` of two sources of the same tokens.

    Args:
        kind, beta: checked by the caller, before it opened the sources; or "cross_entropy".
    """
    mask = check_mask(mask, student.batch_shape, student.device)
    student = student.compacted(mask)
    if mask is None:
        mask = torch.ones(student.batch_shape, dtype=torch.bool, device=student.device)
    return apply(Divergence(PairSpec(kind, float(beta))), beside(student, teacher), mask)[0]


# How near beta may be to 0 and 1. Nearer, one side's weight is lost in float32's rounding of the
# other's probabilities, and the limits are kinds of their own.
_LEAST_SHARE = 1e-5


def check_kind(kind: str, beta: float) -> None:
    """One of KL_KINDS and a beta between 0 and 1, not too near either, or a ValueError."""
    if kind not in KL_KINDS:
        raise ValueError(f"kind: expected one of {KL_KINDS}, got {kind!r}")
    is_number = isinstance(beta, numbers.Real) and not isinstance(beta, bool)
    if not (is_number and _LEAST_SHARE <= beta <= 1.0 - _LEAST_SHARE):
        raise ValueError(
            f"beta: expected a number in (0, 1), {_LEAST_SHARE:g} from either end at least, got "
            f"{beta!r} (towards 0 the divergence tends to kind='forward', towards 1 to 'reverse', "
            "both scaled)"
        )


@shared_keywords(LogitsKeywords, given_logits)
def vocab_parallel_kl_div(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    kind: str = "forward",
    beta: float = 0.5,
    mask: Tensor | None = None,
    teacher_temperature: float | Tensor | None = None,
    teacher_softcap: float | None = None,
    **shared: Unpack[LogitsKeywords],
) -> Tensor:
    """Return the divergence of the student's distribution p from the teacher's q, in nats.

        "forward"          KL(q || p) = sum q (log q - log p)      covers the teacher's modes
        "reverse"          KL(p || q) = sum p (log p - log q)      seeks one of them
        "jsd"              beta KL(q || M) + (1 - beta) KL(p || M), M = beta q + (1 - beta) p
                           (generalized Jensen-Shannon, Agarwal et al. 2024, arXiv:2306.13649)
        "skewed_forward"   KL(q || M)      (Ko et al. 2024, arXiv:2402.03898, whose skew is beta
        "skewed_reverse"   KL(p || M)       of the first and 1 - beta of the second)
        "total_variation"  sum |p - q| / 2

    Shape:
        student_logits, teacher_logits: `[..., V/TP]`, any float dtypes, each this rank's columns,
            or DTensors sharded on the last dimension. Any strides of the leading dimensions. Not
            modified. Returns float32 `[...]` (float64 where either is), the same on every TP rank.

    Args:
        kind, beta: see above; beta from 1e-5 to 1 - 1e-5.
        mask: bool `[...]`; False rows give 0 and a gradient of exactly 0, also if they have NaN.
        teacher_temperature, teacher_softcap: of the teacher's logits; None: the same temperature,
            and no softcap. No factor of temperature**2 is applied.
        {shared}

    Only the student gets a gradient. A logit that is -inf on one side only counts as 1e4 nats below
    the largest of its block of columns, so that divergences and gradients stay finite. Such values
    differ with how columns are cut into blocks and shards, by as much as their maxima do.

    Collectives: forward one all-gather of `[6, n]` float32 over TP; for all kinds but "forward" and
    "reverse" one all-reduce of `[2, n]` more, since they need both normalizers first. Backward
    none.

    Memory: backward keeps both logits and a few float32 numbers per row; the student's gradient, in
    its logits' dtype, is the only `[..., V/TP]` tensor made.

    Raises:
        ValueError: before any collective, for shapes, dtypes, devices, option ranges, an
            unresolvable group, or DTensors on different groups.
    """
    check_kind(kind, beta)
    student, teacher = given_pair(
        student_logits, teacher_logits, teacher_temperature, teacher_softcap, shared
    )
    return kl_div(student, teacher, kind=kind, beta=beta, mask=mask)


@shared_keywords(LogitsKeywords, given_logits)
def vocab_parallel_soft_cross_entropy(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    mask: Tensor | None = None,
    teacher_temperature: float | Tensor | None = None,
    teacher_softcap: float | None = None,
    **shared: Unpack[LogitsKeywords],
) -> Tensor:
    """Return H(q, p) = -sum q log p of the teacher's q under the student's p, in nats.

    KL(q || p) plus the teacher's entropy: the same gradient, `p - q`, and only for the student.

    Shape:
        student_logits, teacher_logits `[..., V/TP]` -> float32 `[...]`, float64 of float64 logits.

    Collectives: forward one all-gather of `[6, n]` float32 over TP, backward none.

    Keywords, memory and errors are those of `vocab_parallel_kl_div`.
    """
    student, teacher = given_pair(
        student_logits, teacher_logits, teacher_temperature, teacher_softcap, shared
    )
    return kl_div(student, teacher, kind="cross_entropy", mask=mask)


def given_pair(
    student_logits: Tensor,
    teacher_logits: Tensor,
    teacher_temperature: float | Tensor | None,
    teacher_softcap: float | None,
    shared: LogitsKeywords,
) -> tuple[AnySource, AnySource]:
    """The sources of a student's and a teacher's logits, checked.

    Args:
        teacher_temperature: None: the student's.
        shared: the keywords that the caller was given, of which some are of both sides.
    """
    student = given_logits(uncut(student_logits), name="student_logits", **shared)
    if teacher_temperature is None:  # not the source's, which has what lazy logits were divided by
        teacher_temperature = shared.get("temperature", 1.0)
    teacher = given_teacher(
        student,
        teacher_logits,
        temperature=teacher_temperature,
        softcap=teacher_softcap,
        **options_of_both(shared),
    )
    return student, teacher


def options_of_both(shared: Any) -> dict[str, Any]:
    """The shared keywords that a teacher's source takes too."""
    names = "vocab_size", "backend", "logit_bias", "disallowed_ids"
    return {name: shared.get(name) for name in names if name in shared}


def given_teacher(
    student: AnySource,
    teacher_logits: Tensor,
    *,
    temperature: float | Tensor | None,
    **options: Any,
) -> AnySource:
    """A teacher's logits, checked against the student's source, whose temperature None is."""
    teacher_logits = alongside(student, uncut(teacher_logits))
    teacher = given_logits(
        teacher_logits,
        temperature=token_temperature(student) if temperature is None else temperature,
        tp_group=student.shard.group,
        name="teacher_logits",
        prefix="teacher_",
        **options,
    )
    shape = torch.Size((*student.batch_shape, student.shard.width))
    local = unwrap_logits(teacher_logits, None, "teacher_logits")[0]
    check_shape("teacher_logits", local, shape, student.device)
    return teacher


@shared_keywords(HeadKeywords, head_logits)
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
    teacher_temperature: float | Tensor | None = None,
    kind: str = "forward",
    beta: float = 0.5,
    mask: Tensor | None = None,
    **shared: Unpack[HeadKeywords],
) -> Tensor:
    """`vocab_parallel_kl_div` from hidden states, without materializing the logits.

    The teacher is given by its logits, or by its hidden states and its head's weight. In the second
    case its logits are never held either.

    Shape:
        hidden: `[s, b, h]` (`[s/TP, b, h]` under sequence parallelism) or `[n, h]` (`[n/TP, h]`).
        weight: `[V/TP, h]`, this rank's rows of the student's output layer, in hidden's dtype.
        teacher_logits: `[s, b, V/TP]` or `[n, V/TP]`, the whole sequence on every TP rank, of
            any float dtype; or a DTensor sharded on its last dimension. `[m, V/TP]` with rows.
        teacher_hidden, teacher_weight, teacher_bias, teacher_lora: as hidden, weight, bias and
            lora, of any hidden size; teacher_hidden is split over TP if hidden is. With rows it is
            that of the whole sequence too.
        mask: bool `[s, b]` or `[n]`, the whole sequence (`[m]` with rows); False rows give 0 and no
            gradient.
        Returns float32 `[s, b]` or `[n]` (float64 where either side is).

    Args:
        kind, beta: as in `vocab_parallel_kl_div`.
        teacher_logit_scale, teacher_softcap: of the teacher's own head; with teacher_logits too.
        teacher_temperature: None: the student's.
        {shared}

    The gradient goes to hidden, weight, bias and lora of the student, accumulated in float32; the
    teacher is a constant. A teacher that is the student's base model without its LoRA has the same
    head: `teacher_weight=weight`, and no teacher_lora.

    Collectives: forward one all-gather of `[6, n]` float32 over TP, for all kinds but "forward" and
    "reverse" one all-reduce of `[2, n]` more; backward those of `linear_token_stats`. Sequence
    parallelism gathers each tile of both hidden states, forward (twice for those kinds) and
    backward.

    Memory: a chunk of either side's logits and where operands are bfloat16 its gradient; the
    gradients. Saved for backward: the inputs and a few numbers per row.

    Raises:
        ValueError: before any collective; neither or both kinds of teacher; else as in
            `vocab_parallel_kl_div` and `linear_token_stats`.
    """
    check_kind(kind, beta)
    if teacher_logits is not None:
        teacher_logits, shared["tp_group"] = unwrap_logits(
            teacher_logits, shared.get("tp_group"), "teacher_logits"
        )
    student = head_logits(hidden, weight, **shared)
    teacher = any_teacher(
        student,
        logits=teacher_logits,
        hidden=teacher_hidden,
        weight=teacher_weight,
        bias=teacher_bias,
        lora=teacher_lora,
        rows=shared.get("rows"),
        logit_scale=teacher_logit_scale,
        softcap=teacher_softcap,
        temperature=teacher_temperature,
        **options_of_both(shared),
    )
    return kl_div(student, teacher, kind=kind, beta=beta, mask=mask)


def any_teacher(
    student: AnySource,
    *,
    logits: Tensor | None,
    hidden: Tensor | None,
    weight: Tensor | None,
    temperature: float | Tensor | None,
    bias: Tensor | None = None,
    lora: LoRAInput | None = None,
    rows: Tensor | None = None,
    sequence_parallel: bool | None = None,
    **options: Any,
) -> GivenLogits | HeadLogits:
    """A teacher's source, of its logits or of its hidden states and head.

    Raises:
        ValueError: neither or both; what does not fit the student.
    """
    has_logits = logits is not None
    if has_logits == (hidden is not None or weight is not None):
        raise ValueError(
            "teacher: expected either teacher_logits or teacher_hidden with teacher_weight"
        )
    if logits is not None:
        if bias is not None:
            raise ValueError("teacher_bias: expected None with teacher_logits")
        if lora is not None:
            raise ValueError("teacher_lora: expected None with teacher_logits")
        return given_teacher(student, logits, temperature=temperature, **options)
    if sequence_parallel is None:
        sequence_parallel = student.options.sequence_parallel
    logits_dtype = student.options.logits_dtype
    open_head: Any = partial(
        head_logits,
        weight=weight,  # type: ignore[arg-type]
        bias=bias,
        lora=lora,
        rows=rows,
        temperature=token_temperature(student) if temperature is None else temperature,
        logits_dtype=torch.float32 if logits_dtype == torch.float64 else logits_dtype,
        tp_group=student.shard.group,
        prefix="teacher_",
        **options,
    )
    teacher = open_head(hidden, sequence_parallel=sequence_parallel)
    if teacher.device != student.device:
        raise ValueError(f"teacher_hidden: expected device {student.device}, got {teacher.device}")
    if teacher.shard.width != student.shard.width:
        raise ValueError(
            f"teacher_weight: expected the student's V/TP = {student.shard.width} rows, got shape "
            f"{tuple(teacher.weight.shape)}"
        )
    if teacher.batch_shape != student.batch_shape:
        raise ValueError(
            f"teacher_hidden: expected hidden's leading shape {tuple(student.batch_shape)}, got "
            f"{tuple(teacher.batch_shape)}"
        )
    if sequence_parallel and not student.recomputed:
        # Rows in the order of the tokens, as the student's are.
        assert hidden is not None
        return open_head(all_gather_dim0(hidden.detach(), teacher.shard.group))
    return teacher
