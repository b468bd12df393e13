"""Statistics of the same lazy logits for several consumers, of one pass over the head.

    entropy = vocab_parallel_entropy(logits)            a pass: lse and entropy of each row
    logprobs = vocab_parallel_logprobs(logits, labels)  joins it: one dot product per token

The consumer that joins computes only its targets' logits, and its gradient is written by the
backward of the pass. Each consumer by itself would multiply by the head forward and backward, and
form a gradient of the weight's size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.kernels.chunk import times_multiplier
from mcore_logprobs.kernels.stats import IGNORED, RowResults, SoftmaxStats, StatsSpec
from mcore_logprobs.ops.driver import Backward, Forward, Operation, Results, Saved, Tensors, apply
from mcore_logprobs.ops.row_statistics import RowStatistics, gradient_with_entries
from mcore_logprobs.sources.latest_pass import LatestPass
from mcore_logprobs.sources.source import LogitIndices, Source, Tile

SLOTS = 4  # consumers that may join a pass


@dataclass
class Joined:
    """Who joined a pass since its forward.

    Attributes:
        targets: local targets `[*batch_shape]` of the consumer in each slot.
        spent: the backward was run, so that no further consumer can join.
    """

    targets: list[Tensor] = field(default_factory=list)
    spent: bool = False


@dataclass(frozen=True)
class JointStatistics(Operation[Source]):
    """A RowResults of each row of local targets `[n]`; its row_max and log_sum; and `[n, SLOTS]`
    zeros, whose gradients are those of the joined targets' logits.
    """

    spec: StatsSpec
    joined: Joined
    ignored_values = (*IGNORED, 0.0, 0.0, 0.0)
    differentiable = (*(name != "target_rank" for name in RowResults._fields), False, False, True)
    rereads = "rounded"

    def forward(self, source: Source, tensors: Tensors) -> Forward:
        return _JointForward(source, self.spec, tensors[0])

    def backward(
        self, source: Source, upstream: Results, tensors: Tensors, saved: Saved
    ) -> Backward:
        *statistics, _, _, on_slots = upstream
        self.joined.spent = True
        every = torch.ones_like(tensors[0], dtype=torch.bool)
        entries = []
        if on_slots is not None:
            joined = [
                source.to_row_order(x.reshape(source.batch_shape)) for x in self.joined.targets
            ]
            columns = torch.stack(joined, -1)
            entries.append((columns, on_slots[:, : columns.shape[1]]))
        return gradient_with_entries(
            source,
            RowResults(*statistics),
            SoftmaxStats(*saved),
            every,
            entries,
            normalized=False,
            target=tensors[0],
        )


class _JointForward(RowStatistics):
    def results(self) -> tuple[Results, Saved]:
        (statistics, softmax), _ = self.reduce()
        slots = softmax.log_sum.new_zeros(softmax.log_sum.shape[0], SLOTS)
        return (*statistics, softmax.row_max, softmax.log_sum, slots), softmax


@dataclass(frozen=True)
class TargetLogprobs(Operation[Source]):
    """log p[target] `[n]` of local targets, row_max and log_sum; without a gradient."""

    def forward(self, source: Source, tensors: Tensors) -> Forward:
        return _TargetForward(source, *tensors)


class _TargetForward(Forward):
    reads = "nothing"

    def __init__(
        self, source: Source, local_target: Tensor, row_max: Tensor, log_sum: Tensor
    ) -> None:
        self._source, self._local_target = source, local_target
        self._row_max, self._log_sum = row_max, log_sum
        self._logits = torch.zeros_like(log_sum)

    def begin_tile(self, tile: Tile, rows: slice) -> None:
        row = torch.arange(rows.start, rows.stop, device=self._logits.device)
        self._logits[rows] = tile.unscaled_logits(LogitIndices(row, self._local_target[rows]))

    def results(self) -> tuple[Results, Saved]:
        logits = all_reduce_sum(self._logits, self._source.shard.group)
        # (z - m) - log s: `kernels.stats.finalize` says why.
        distance = times_multiplier(
            logits - self._row_max, self._source.processing.multiplier, rows_last=True
        )
        return (distance - self._log_sum,), ()


@dataclass(frozen=True)
class _Pass:
    """What a pass gave, flat `[n]` in the order of the tokens, `[n, SLOTS]` the slots."""

    spec: StatsSpec
    joined: Joined
    results: RowResults
    row_max: Tensor
    log_sum: Tensor
    slots: Tensor

    @classmethod
    def over(cls, source: Source, spec: StatsSpec, local_target: Tensor) -> _Pass:
        joined = Joined()
        outputs = apply(JointStatistics(spec, joined), source, local_target)
        *statistics, row_max, log_sum, slots = outputs
        flat = RowResults(*statistics).map(torch.flatten)
        slots = slots.view(-1, SLOTS)
        return cls(spec, joined, flat, row_max.flatten(), log_sum.flatten(), slots)

    def covers(self, spec: StatsSpec, targets: bool) -> bool:
        """Whether a consumer who wants these can join, with targets or without."""
        if self.joined.spent or (targets and len(self.joined.targets) == SLOTS):
            return False
        flags = [flag.name for flag in fields(spec)]
        return not spec.rank and all(getattr(self.spec, x) or not getattr(spec, x) for x in flags)

    def join(self, source: Source, local_target: Tensor) -> RowResults:
        """Statistics of the same rows with other targets. Collectives: an all-reduce of `[n]`."""
        shape = local_target.shape
        with torch.no_grad():
            (logprobs,) = apply(
                TargetLogprobs(),
                source,
                local_target,
                self.row_max.view(shape),
                self.log_sum.view(shape),
            )
        slot = len(self.joined.targets)
        self.joined.targets.append(local_target)
        joined = _Join.apply(logprobs.flatten(), self.results.lse, self.slots, slot)
        return self.results._replace(logprobs=joined)


class _Join(torch.autograd.Function):
    """log p[target], whose gradient goes to the pass: to its lse, and to a slot of it."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, lse: Tensor, slots: Tensor, slot: int) -> Tensor:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        return logprobs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        columns = torch.arange(SLOTS, device=grad.device)
        on_slots = torch.where(columns == ctx.slot, grad.unsqueeze(-1), 0.0)
        return None, -grad, on_slots, None


def joint_statistics(
    latest: LatestPass, spec: StatsSpec, source: Source, local_target: Tensor | None
) -> RowResults:
    """Statistics `[*batch_shape]` of all rows, of the latest pass over the same logits.

    A new pass is made where that one does not cover what is asked for.

    Args:
        local_target: `[*batch_shape]`; None: no log-probabilities are wanted.

    Collectives: of a consumer that joins an all-reduce of `[n]` for its targets.
    """
    shape = source.batch_shape
    known = latest.get()
    if known is None or not known.covers(spec, local_target is not None):
        targets = local_target
        if targets is None:
            targets = torch.full(shape, -1, dtype=torch.int64, device=source.device)
        known = _Pass.over(source, replace(spec, entropy=True), targets)
        latest.put(known)
        results = known.results
    else:
        results = known.results if local_target is None else known.join(source, local_target)
    # Copies: a caller may write into what it gets, and the next one joins the pass.
    return results.asked_by(spec).map(lambda x: x.view(shape).clone())
