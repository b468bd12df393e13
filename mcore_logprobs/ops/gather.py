"""A few given ids of each row: their logits or log-probabilities, and distillation on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from typing_extensions import Unpack

from mcore_logprobs.checks import (
    check_choice,
    check_flag,
    check_float_tensor,
    check_ids,
    check_mask,
    check_shape,
    check_target,
    check_temperature,
    global_to_local,
    unwrap_rows,
)
from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.kernels.chunk import ChunkAt, acc_dtype, times_multiplier
from mcore_logprobs.kernels.stats import RowResults, SoftmaxStats, StatsSpec
from mcore_logprobs.ops.driver import Backward, Forward, Operation, Results, Saved, Tensors, apply
from mcore_logprobs.ops.keywords import HeadKeywords, LogitsKeywords, shared_keywords
from mcore_logprobs.ops.row_statistics import (
    EntryGradient,
    RowStatistics,
    gradient_with_entries,
    grid_entries,
)
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.head import head_logits
from mcore_logprobs.sources.source import Source, Tile, token_temperature

NORMALIZATIONS = ("vocab", "topk")


@dataclass(frozen=True)
class EntryLogits(Operation[Source]):
    """Processed logits `[n, k]` at local ids `[n, k]`, 0 where no rank owns one."""

    linear = True

    def forward(self, source: Source, tensors: Tensors) -> Forward:
        return _EntryForward(source, tensors[0])

    def backward(
        self, source: Source, upstream: Results, tensors: Tensors, saved: Saved
    ) -> Backward:
        (local_ids,), (on_values,) = tensors, upstream
        assert on_values is not None
        return EntryGradient(source, local_ids, on_values)


class _EntryForward(Forward):
    reads = "nothing"

    def __init__(self, source: Source, local_ids: Tensor) -> None:
        self._source, self._local_ids = source, local_ids
        self._values = torch.zeros(local_ids.shape, dtype=source.acc_dtype, device=source.device)

    def begin_tile(self, tile: Tile, rows: slice) -> None:
        logits = tile.unscaled_logits(grid_entries(self._local_ids, tile.rows))
        self._values[rows] = logits.view(self._values[rows].shape)

    def results(self) -> tuple[Results, Saved]:
        values = all_reduce_sum(self._values, self._source.shard.group)
        return (times_multiplier(values, self._source.processing.multiplier),), ()


@dataclass(frozen=True)
class EntryLogprobs(Operation[Source]):
    """(log-probabilities, or logits, `[n, k]`; entropy `[n]` or None), of local ids and valid mask.

    Attributes:
        log_softmax: normalized over the whole vocabulary.
    """

    log_softmax: bool
    entropy: bool
    rereads = "exact"

    def forward(self, source: Source, tensors: Tensors) -> Forward:
        return _LogprobForward(self, source, tensors)

    def backward(
        self, source: Source, upstream: Results, tensors: Tensors, saved: Saved
    ) -> Backward:
        local_ids, valid_mask = tensors
        on_values, on_entropy = upstream
        softmax = SoftmaxStats(*saved)
        if on_values is None:
            on_values = torch.zeros_like(local_ids, dtype=softmax.row_max.dtype)
        entries = [(local_ids, torch.where(valid_mask, on_values, 0.0))]
        every = torch.ones_like(softmax.row_max, dtype=torch.bool)
        on = RowResults(entropy=on_entropy)
        return gradient_with_entries(
            source, on, softmax, every, entries, normalized=self.log_softmax
        )


class _LogprobForward(RowStatistics):
    def __init__(self, operation: EntryLogprobs, source: Source, tensors: Tensors) -> None:
        super().__init__(source, StatsSpec(entropy=operation.entropy))
        self._operation, (self._local_ids, self._counted) = operation, tensors
        shape, device = self._local_ids.shape, source.device
        self._values = torch.zeros(shape, dtype=source.acc_dtype, device=device)

    def see(self, placed: ChunkAt) -> None:
        rows = placed.rows
        self._values[rows] += placed.chunk.unscaled_at(
            placed.local(self._local_ids[rows], self._source.shard.width)
        )
        super().see(placed)

    def results(self) -> tuple[Results, Saved]:
        done, shards = self.reduce(self._values.t())
        scale = done.softmax.logprobs_of if self._operation.log_softmax else times_multiplier
        values = scale(shards.sum(0).t(), self.multiplier)
        values = torch.where(self._counted, values, 0.0)
        entropy = done.results.entropy  # which is saved too: the caller may change its own
        return (values, None if entropy is None else entropy.clone()), done.softmax


def gather(
    source: Source, ids: Tensor, *, log_softmax: bool = False, ignore_index: int | None = -100
) -> Tensor:
    """`vocab_parallel_gather` of any source."""
    check_flag("log_softmax", log_softmax)
    ids = check_ids(ids, source.batch_shape, source.device)
    local_ids, valid_mask = global_to_local(ids, source.shard, ignore_index, name="ids")
    source = source.compacted(valid_mask.any(-1))
    return _entries(source, local_ids, valid_mask, log_softmax=log_softmax)[0]


def _entries(
    source: Source,
    local_ids: Tensor,
    valid_mask: Tensor,
    *,
    log_softmax: bool,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    if log_softmax or entropy:
        operation = EntryLogprobs(log_softmax, entropy)
        return apply(operation, source, local_ids, valid_mask)  # type: ignore[return-value]
    return apply(EntryLogits(), source, local_ids)[0], None


def topk_distill(
    source: Source,
    teacher_topk_logits: Tensor,
    teacher_topk_ids: Tensor,
    normalize: str,
    entropy: bool,
    mask: Tensor | None,
    teacher_temperature: float | Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`vocab_parallel_topk_distill` of any source."""
    check_choice("normalize", normalize, NORMALIZATIONS)
    check_flag("entropy", entropy)
    lead, device = source.batch_shape, source.device
    if teacher_temperature is None:
        teacher_temperature = token_temperature(source)
    temperature = check_temperature(teacher_temperature, lead, device, name="teacher_temperature")
    teacher = unwrap_rows(teacher_topk_logits, "teacher_topk_logits")
    check_float_tensor("teacher_topk_logits", teacher, min_dim=1)
    k = teacher.shape[-1]
    if k < 1:
        raise ValueError(f"teacher_topk_logits: expected [..., k] with k >= 1, got k = {k}")
    shape = torch.Size((*lead, k))
    check_shape("teacher_topk_logits", teacher, shape, device)
    ids = check_target(teacher_topk_ids, shape, device, name="teacher_topk_ids")
    local_ids, _ = global_to_local(ids, source.shard, None, name="teacher_topk_ids")
    mask = check_mask(mask, lead, device)
    source = source.compacted(mask)
    valid_mask = torch.ones(lead, dtype=torch.bool, device=device) if mask is None else mask
    valid_mask = valid_mask.unsqueeze(-1).expand(shape)
    student, of_student = _entries(
        source,
        local_ids,
        valid_mask,
        log_softmax=normalize == "vocab",
        entropy=entropy,
    )
    if mask is not None:  # a masked row may hold NaN
        student = torch.where(mask.unsqueeze(-1), student, 0.0)
        of_student = None if of_student is None else torch.where(mask, of_student, 0.0)
    if normalize == "topk":
        student = of_rows(lambda x: x.log_softmax(-1), student)
        if mask is not None:
            student = torch.where(mask.unsqueeze(-1), student, 0.0)
    teacher = teacher.detach().to(acc_dtype(teacher.dtype))
    if isinstance(temperature, Tensor):
        temperature = temperature.unsqueeze(-1)
    teacher = teacher / temperature
    return student, torch.log_softmax(teacher, dim=-1), of_student


class _NanRows(torch.autograd.Function):
    """NaN `[..., j]` for rows `[..., k]`.

    The gradient of a row is NaN if one is asked of it, else 0.
    """

    @staticmethod
    def forward(ctx: _NanContext, rows: Tensor, width: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.shape = rows.shape
        return rows.new_full((*rows.shape[:-1], width), torch.nan)

    @staticmethod
    def backward(ctx: _NanContext, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        (grad,) = grads
        if grad is None:
            return None, None
        asked = (grad != 0).any(-1, keepdim=True)
        return torch.where(asked, torch.nan, 0.0).to(grad.dtype).expand(ctx.shape), None


class _NanContext(FunctionCtx):
    shape: torch.Size


def of_rows(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """`function(*rows)` of rows `[..., k]`: `[..., j]`, differentiable by the first.

    A row whose result holds a NaN is NaN, and so is its gradient where one is asked of it, but
    exactly 0 where its upstream is 0. By autograd's rules it is 0 behind a clamp, whatever
    upstream is, and elsewhere NaN even where that is 0. So the function gets zeros instead of such
    rows, and `_NanRows` replaces what it returns for them.
    """
    with torch.no_grad():
        nan = function(*rows).isnan().any(-1, keepdim=True)  # [..., 1]
    results = function(*(x.masked_fill(nan, 0.0) for x in rows))
    return torch.where(nan, _NanRows.apply(rows[0], results.shape[-1]), results)


@shared_keywords(LogitsKeywords, given_logits)
def vocab_parallel_gather(
    vocab_parallel_logits: Tensor,
    ids: Tensor,
    *,
    log_softmax: bool = False,
    ignore_index: int | None = -100,
    **shared: Unpack[LogitsKeywords],
) -> Tensor:
    """Return the logits (divided by the temperature) or log-probabilities of k ids of each row.

    Shape:
        vocab_parallel_logits: `[..., V/TP]`, or a DTensor `[..., V]` sharded on its last dimension.
        ids: `[..., k]`, integers, global ids or ignore_index; the same on every TP rank. An id may
            be repeated: gradients add up.
        Returns float32 `[..., k]` (float64 for float64 logits), the same on every TP rank; 0,
        without a gradient, where the id is ignore_index. Differentiable.

    Args:
        log_softmax: return log-probabilities over the whole vocabulary instead of logits.
        ignore_index: an id with this value gives 0. None: no such id.
        {shared}

    Collectives: forward one over TP: an all-reduce of `[n, k]`, or with log_softmax an all-gather
    of `[3 + k, n]`. Backward none.

    Gradients: dz = scatter_add(grad_output), with log_softmax minus p * sum_k grad_output.

    Memory: backward keeps the logits and a few numbers per row and id; the gradient, in the logits'
    dtype, is the only `[..., V/TP]` tensor made.

    Raises:
        ValueError: ids that are not `[..., k]` integers; on CPU ids outside [0, vocab_size); as
            in `vocab_parallel_token_stats` otherwise.
    """
    source = given_logits(vocab_parallel_logits, **shared)
    return gather(source, ids, log_softmax=log_softmax, ignore_index=ignore_index)


@shared_keywords(HeadKeywords, head_logits)
def linear_gather(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    log_softmax: bool = False,
    ignore_index: int | None = -100,
    **shared: Unpack[HeadKeywords],
) -> Tensor:
    """`vocab_parallel_gather` from hidden states, without materializing the logits.

    Shape:
        hidden, weight: as in `linear_token_stats`.
        ids: `[s, b, k]` or `[n, k]`, integers, global ids or ignore_index; the whole sequence on
            every TP rank also under sequence parallelism; `[m, k]` with rows. An id may be
            repeated.
        Returns float32 `[s, b, k]` or `[n, k]` (float64 for float64 operands), the same on every TP
        rank; 0, without a gradient, where the id is ignore_index. Differentiable.

    Args:
        log_softmax: return log-probabilities over the whole vocabulary instead of logits.
        ignore_index: an id with this value gives 0; compact=True leaves out rows of only such ids.
        {shared}

    Cost: with log_softmax that of `linear_token_stats`. Without it no GEMM: a dot product per id in
    the forward, and two in the backward. On a CPU that costs more than log_softmax=True from about
    V/64 ids per row on. On CUDA these add to dWeight and dHidden by atomics, so gradients differ in
    their last bits from run to run, unless `torch.use_deterministic_algorithms` is on.

    Collectives: forward an all-reduce of `[n k]` over TP; with log_softmax an all-gather of
    `[3 + k, n]`. Backward, and under sequence parallelism, those of `linear_token_stats`.

    Memory: with log_softmax that of `linear_token_stats`. Without it 8 MiB of gathered operands (64
    MiB on a GPU), their dot products, and dWeight in float32. Saved for backward: the inputs and a
    few numbers per row and id.

    Raises:
        ValueError: before any collective; see `vocab_parallel_gather` and `linear_token_stats`.
    """
    source = head_logits(hidden, weight, **shared)
    return gather(source, ids, log_softmax=log_softmax, ignore_index=ignore_index)


@shared_keywords(LogitsKeywords, given_logits)
def vocab_parallel_topk_distill(
    student_logits: Tensor,
    teacher_topk_logits: Tensor,
    teacher_topk_ids: Tensor,
    *,
    normalize: str = "vocab",
    entropy: bool = False,
    mask: Tensor | None = None,
    teacher_temperature: float | Tensor | None = None,
    **shared: Unpack[LogitsKeywords],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Student's and teacher's log-probabilities at the teacher's k largest logits.

    Shape:
        student_logits: `[..., V/TP]`, or a DTensor sharded on its last dimension. Not modified.
        teacher_topk_logits: `[..., k]`, any float dtype, the same on every TP rank.
        teacher_topk_ids: `[..., k]` integers, global ids, likewise. Ids may repeat.
        mask: bool `[...]`; the student's results of False rows are 0, without a gradient.
        Returns (student log-probabilities `[..., k]`, the teacher's `[..., k]`, the student's
        entropy `[...]` or None), float32 (float64 for float64 logits, the student's and the
        teacher's each), the same on every TP rank. NaN, normalized over k ids that are all -inf.

    Args:
        normalize: what the student's log-probabilities are normalized over: "vocab", all V columns;
            "topk", only the k ids. The teacher's are normalized over the k ids either way, for
            nothing else is known of it.
        entropy: also -sum p log p of the student over all V columns, in nats.
        teacher_temperature: the teacher's logits are divided by it. None: the student's.
        {shared}

    Only the student gets a gradient, from both results in one pass. A student logit of -inf
    at one of the ids gives -inf there.

    Collectives: forward one over TP: an all-gather of `[3 + k, n]` float32 (`[4 + k, n]` with
    entropy), or an all-reduce of `[n, k]` for "topk" without entropy; backward none.

    Memory: backward keeps the logits and k + 2 numbers per row; the gradient, in the logits' dtype,
    is the only `[..., V/TP]` tensor made.

    Raises:
        ValueError: before any collective, for shapes, dtypes, option ranges, an unresolvable group,
            and on CPU ids outside [0, vocab_size) (on CUDA a device-side assert).
    """
    source = given_logits(student_logits, name="student_logits", **shared)
    if teacher_temperature is None:  # not the source's, which has what lazy logits were divided by
        teacher_temperature = shared.get("temperature", 1.0)
    teacher = teacher_topk_logits, teacher_topk_ids
    return topk_distill(source, *teacher, normalize, entropy, mask, teacher_temperature)


@shared_keywords(HeadKeywords, head_logits)
def linear_topk_distill(
    hidden: Tensor,
    weight: Tensor,
    teacher_topk_logits: Tensor,
    teacher_topk_ids: Tensor,
    *,
    normalize: str = "vocab",
    entropy: bool = False,
    mask: Tensor | None = None,
    teacher_temperature: float | Tensor | None = None,
    **shared: Unpack[HeadKeywords],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`vocab_parallel_topk_distill` from hidden states, without materializing the logits.

    Shape:
        hidden, weight: as in `linear_token_stats`; the student's.
        teacher_topk_logits, teacher_topk_ids: `[s, b, k]` or `[n, k]`, any float dtype and integer
            global ids; the whole sequence on every TP rank also under sequence parallelism;
            `[m, k]` with rows.
        mask: bool `[s, b]` or `[n]` (`[m]`); the student's results of False rows are 0, without a
            gradient.
        Returns (student log-probabilities `[..., k]`, the teacher's `[..., k]`, the student's
        entropy `[...]` or None), float32 (the student's float64 for float64 operands, the teacher's
        for float64 logits), the same on every TP rank.

    Args:
        normalize, entropy, teacher_temperature: as in `vocab_parallel_topk_distill`.
        {shared}

    Cost: the GEMMs of `linear_token_stats`; "topk" without entropy: dot products, see
    `linear_gather`, whose collectives and memory these are too.

    Raises:
        ValueError: before any collective; see `vocab_parallel_topk_distill` and
            `linear_token_stats`.
    """
    source = head_logits(hidden, weight, **shared)
    teacher = teacher_topk_logits, teacher_topk_ids
    return topk_distill(source, *teacher, normalize, entropy, mask, teacher_temperature)
