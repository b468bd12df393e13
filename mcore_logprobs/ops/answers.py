"""Statistics, log-probabilities of a few ids and the top k of each row, of one pass.

Candidates travel in the statistics' all-gather, and all gradients are written at once: what
`Statistics`, `EntryLogprobs` and `TopK` do one by one costs three passes and three gradients of the
weight's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_logprobs.checks import check_ids, global_to_local
from mcore_logprobs.kernels.chunk import ChunkAt, times_multiplier
from mcore_logprobs.kernels.stats import IGNORED, RowResults, SoftmaxStats, StatsSpec
from mcore_logprobs.ops.driver import Backward, Forward, Operation, Results, Saved, Tensors, apply
from mcore_logprobs.ops.result import TokenStats
from mcore_logprobs.ops.row_statistics import RowStatistics, Statistics, gradient_with_entries
from mcore_logprobs.ops.topk import TopK, check_k
from mcore_logprobs.sources.source import Source

NO_ID = -100  # among ids that are asked about: none is there, whatever ignore_index is


class Also(NamedTuple):
    """What is asked for in addition to statistics: ids, a top k, or both.

    Attributes:
        ids: `[k]`, the same of every row, or `[*lead, k]`, global; or None.
        topk: how many of the largest; or None.
        log_softmax: normalized over the whole vocabulary; False: the logits over the temperature.
        name: of the ids, in errors.
    """

    ids: Tensor | None = None
    topk: int | None = None
    log_softmax: bool = True
    name: str = "ids"


class Found(NamedTuple):
    """What `Answers` gives of each row, or the upstream gradients of it."""

    statistics: RowResults
    candidates: Tensor | None
    values: Tensor | None
    top_ids: Tensor | None

    @classmethod
    def of(cls, flat: Results) -> Found:
        return cls(RowResults(*flat[:-3]), *flat[-3:])


@dataclass(frozen=True)
class Answers(Operation[Source]):
    """The fields of a `Found`, flat.

    Tensors: local targets `[n]`; the valid mask `[n]`; local ids `[n, j]`, and whether each of them
    counts, where candidates are asked for.

    Attributes:
        topk: 0 for none.
    """

    spec: StatsSpec
    label_smoothing: float
    topk: int
    log_softmax: bool
    ignored_values = (*IGNORED, 0.0, 0.0, 0.0)
    rereads = "exact"

    def forward(self, source: Source, tensors: Tensors) -> Forward:
        return _AnswersForward(self, source, tensors)

    def backward(
        self, source: Source, upstream: Results, tensors: Tensors, saved: Saved
    ) -> Backward:
        local_target, valid_mask, *asked = tensors
        *of_softmax, top_columns = saved
        softmax, on = SoftmaxStats(*of_softmax), Found.of(upstream)
        entries = []
        if on.candidates is not None:
            entries.append((asked[0], torch.where(asked[1], on.candidates, 0.0)))
        if on.values is not None:
            values = torch.where(valid_mask.unsqueeze(-1), on.values, 0.0)
            entries.append((top_columns, values))
        return gradient_with_entries(
            source,
            on.statistics,
            softmax,
            valid_mask,
            entries,
            normalized=self.log_softmax,
            target=local_target,
            label_smoothing=self.label_smoothing,
        )


class _AnswersForward(RowStatistics):
    def __init__(self, operation: Answers, source: Source, tensors: Tensors) -> None:
        local_target, valid_mask, *asked = tensors
        super().__init__(
            source,
            operation.spec,
            local_target,
            valid_mask=valid_mask,
            label_smoothing=operation.label_smoothing,
        )
        self._operation, self._counted = operation, valid_mask.unsqueeze(-1)
        self._local_ids = asked[0] if asked else local_target.new_zeros(source.num_rows, 0)
        shape = self._local_ids.shape
        self._x = torch.zeros(shape, dtype=source.acc_dtype, device=source.device)
        self._ids_mask = asked[1] if asked else None
        self._largest = TopK(operation.topk).forward(source, ()) if operation.topk else None
        self.reads = "blocks" if self._largest is None else "rows"

    def see(self, placed: ChunkAt) -> None:
        rows = placed.rows
        self._x[rows] += placed.chunk.unscaled_at(
            placed.local(self._local_ids[rows], self._source.shard.width)
        )
        if self._largest is not None:
            self._largest.see(placed)
        super().see(placed)

    def results(self) -> tuple[Results, Saved]:
        (statistics, softmax), shards = self.reduce(self._x.t())
        candidates = values = ids = top_columns = None
        if self._ids_mask is not None:
            of_ids = self._value_of(shards.sum(0).t(), softmax)
            candidates = torch.where(self._ids_mask, of_ids, 0.0)
        if self._largest is not None:
            x, ids, top_columns = self._largest.largest()
            values = torch.where(self._counted, self._value_of(x, softmax), 0.0)
            ids = torch.where(self._counted, ids, 0)
        return (*statistics, candidates, values, ids), (*softmax, top_columns)

    def _value_of(self, x: Tensor, softmax: SoftmaxStats) -> Tensor:
        """What is asked for of unscaled logits `[n, j]`."""
        scale = softmax.logprobs_of if self._operation.log_softmax else times_multiplier
        return scale(x, self.multiplier)


def answers(
    source: Source,
    local_target: Tensor,
    valid_mask: Tensor,
    statistics: Statistics,
    also: Also,
    ignore_index: int | None,
) -> TokenStats:
    """`token_stats` of checked targets, and what is asked for besides.

    Collectives: one all-gather of `[k + j, n]`, and one of the top k's pairs.

    Raises:
        ValueError: ids of another shape or out of range, a k out of range, invariant segments.
    """
    if source.options.segments is not None:
        raise ValueError(
            "invariant_segments: expected None with candidate ids or a top k, which are not "
            "batch-invariant"
        )
    per_token = [local_target, valid_mask]
    if also.ids is not None:
        ids = also.ids
        if isinstance(ids, Tensor) and ids.dim() == 1 and len(source.batch_shape) > 0:
            ids = ids.expand(*source.batch_shape, ids.shape[0])
        ids = check_ids(ids, source.batch_shape, source.device, name=also.name)
        # A padding token's id says which targets are left out; as a candidate it is like any other.
        is_true_id = ignore_index is not None and 0 <= ignore_index < source.shard.vocab_size
        no_id = NO_ID if is_true_id else ignore_index
        local_ids, counted = global_to_local(ids, source.shard, no_id, name=also.name)
        counted = counted & valid_mask.unsqueeze(-1)
        per_token += [torch.where(counted, local_ids, -1), counted]
    if also.topk is not None:
        check_k(also.topk, source.shard, "topk")
    source = source.compacted(valid_mask)
    if also.topk is not None:
        source = source.in_whole_rows()
    operation = Answers(
        spec=statistics.spec,
        label_smoothing=statistics.label_smoothing,
        topk=also.topk or 0,
        log_softmax=also.log_softmax,
    )
    results, top = Found.of(apply(operation, source, *per_token)), None
    if results.values is not None and results.top_ids is not None:
        top = results.values, results.top_ids
    return TokenStats(
        **results.statistics._asdict(),
        candidates=results.candidates,
        topk=top,
    )
