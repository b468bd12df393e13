"""A tensor of logits `[..., V/TP]` as rows, without copying it; and whole rows' statistics.

`[b, s]` and `[s, b]`, transposed views and slices such as `logits[:, :-1]` all become a few 2-D
views with one row stride each; the per-row tensors (targets, log-probabilities) are flat.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.collectives import (
    all_gather_dim0,
    all_gather_stack,
    all_reduce_sum_async,
    wait_for,
)
from mcore_logprobs.kernels.reference import gather_target, row_chunks
from mcore_logprobs.kernels.segments import segment_stats
from mcore_logprobs.kernels.stats import FinishedStats, RowSpec, accumulator_dtype, finish, merge
from mcore_logprobs.logits.opening import CallOptions

__all__ = [
    "Rows",
    "finish_shards",
    "gather_parts",
    "joined",
    "shard_stats",
    "sum_over_ranks",
    "target_logits",
    "whole_rows",
]


class Rows:
    """The order in which the rows of one logits tensor are walked: as they lie in memory.

    Attributes:
        count: number of rows, n.
    """

    def __init__(self, logits: Tensor) -> None:
        self._lead = logits.shape[:-1]
        strides = logits.stride()[:-1]
        dims = range(len(self._lead))
        self._in_order = all(strides[dim] >= strides[dim + 1] for dim in dims[:-1])
        self._order = dims if self._in_order else sorted(dims, key=lambda dim: -strides[dim])
        self.count = self._lead.numel()

    def walk(self, per_row: Tensor) -> Tensor:
        """`[..., *rest]` -> `[n, *rest]` in walking order; a copy only where it must be."""
        if len(self._order) == 1:
            return per_row
        shape = (self.count, *per_row.shape[len(self._order) :])
        return self._permuted(per_row).reshape(shape)

    def _permuted(self, x: Tensor) -> Tensor:
        if self._in_order:
            return x
        return x.permute((*self._order, *range(len(self._order), x.dim())))

    def walk_optional(self, per_row: Tensor | None) -> Tensor | None:
        """As `walk`; None stays None."""
        return None if per_row is None else self.walk(per_row)

    def restore(self, flat: Tensor) -> Tensor:
        """The inverse of `walk`: `[n, *rest]` -> `[..., *rest]`, contiguous."""
        if len(self._order) == 1:
            return flat.contiguous()
        lead = (self._lead[dim] for dim in self._order)
        walked = flat.reshape((*lead, *flat.shape[1:]))
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        rest = range(len(self._order), walked.dim())
        return walked.permute((*inverse, *rest)).contiguous()

    def blocks(self, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """2-D views that cover the rows in walking order: (slice of the flat rows, a view of each).

        One block wherever the leading dimensions of every tensor collapse into one stride; else one
        for each index of the outer dimension.

        Args:
            tensors: `[..., *]` each, with the leading shape of the logits; any strides.
        """
        if len(self._order) == 1:
            yield slice(0, self.count), *tensors
            return
        start = 0
        for views in _collapse([self._permuted(tensor) for tensor in tensors]):
            stop = start + views[0].shape[0]
            yield slice(start, stop), *views
            start = stop

    def chunks(self, chunk_size: int, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """As `blocks`, at most `chunk_size` rows at a time."""
        for part, *views in self.blocks(*tensors):
            for chunk in row_chunks(part.stop - part.start, chunk_size):
                where = slice(part.start + chunk.start, part.start + chunk.stop)
                yield where, *(view[chunk] for view in views)


def _collapse(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    if tensors[0].dim() == 2:
        yield tensors
        return
    try:
        yield [t.view(t.shape[:-1].numel(), t.shape[-1]) for t in tensors]
        return
    except RuntimeError:  # the leading dimensions of one have no common stride
        pass
    for parts in zip(*(t.unbind(0) for t in tensors), strict=True):
        yield from _collapse(list(parts))


def whole_rows(
    logits: Tensor,
    column: Tensor,
    opts: CallOptions,
    *,
    label_smoothing: float = 0.0,
    entries: Tensor | None = None,
) -> tuple[FinishedStats, Tensor | None]:
    """Each row's statistics over the whole vocabulary, `[n]` each, in walking order.

    One all-gather of `[k, n]` over TP, of `[g/TP, k, n]` with segments; with the rank, one
    all-reduce of `[n]` before it, so that the ranks count against the target's logit in the same
    read.

    Args:
        logits: `[..., V/TP]`.
        column: `[n]`, the target's column in this shard or -1; in walking order.
        entries: `[n, j]` numbers a row to be summed over the ranks, sent along: j is small, and a
            second collective costs more than the bytes.

    Returns:
        The statistics, and the summed entries `[n, j]` or None.
    """
    stats = shard_stats(logits, column, opts)
    return finish_shards(
        stats, opts.spec, opts.group, label_smoothing=label_smoothing, entries=entries
    )


def shard_stats(
    logits: Tensor, column: Tensor, opts: CallOptions, *, threshold: Tensor | None = None
) -> Tensor:
    """The row statistics of this rank's columns, in walking order.

    With the rank one all-reduce of `[n]`, so that the ranks count against the target's logit in
    the same read.

    Args:
        logits, column: as in `whole_rows`.
        threshold: `[n]`, that logit where it is known already; then nothing is reduced.

    Returns:
        `[k, n]`; with segments `[g/TP, k, n]`.
    """
    rows, spec = Rows(logits), opts.spec
    blocks = list(rows.blocks(logits))
    if spec.rank and threshold is None:
        threshold = target_logits(blocks, column, opts.group)
    temperature = rows.walk_optional(opts.temperature)
    row_stats = partial(opts.backend.row_stats, chunk_size=opts.chunk_size)
    if opts.segments is not None:
        row_stats = partial(
            segment_stats, opts.backend, segments=opts.segments, chunk_size=opts.chunk_size
        )
    return joined(
        [
            row_stats(
                block,
                column[part],
                spec,
                threshold=None if threshold is None else threshold[part],
                temperature=None if temperature is None else temperature[part],
            )
            for part, block in blocks
        ]
    )


def joined(parts: list[Tensor]) -> Tensor:
    """Parts of rows, along the last dimension."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def finish_shards(
    stats: Tensor,
    spec: RowSpec,
    group: ProcessGroup | None,
    *,
    label_smoothing: float = 0.0,
    entries: Tensor | None = None,
) -> tuple[FinishedStats, Tensor | None]:
    """As `whole_rows`, from this rank's statistics: one all-gather, one merge.

    Args:
        stats: `[k, n]`, or `[g/TP, k, n]` of this rank's segments, merged in vocabulary order.
    """
    if entries is None:
        parts, ordered = gather_parts(stats, group), stats.dim() == 3
        return finish(merge(parts, spec, ordered=ordered), spec, label_smoothing), None
    assert stats.dim() == 2
    fields = len(spec.fields)
    shards = all_gather_stack(torch.cat([stats, entries.t()]), group)
    whole = merge(shards[:, :fields].contiguous(), spec)
    return finish(whole, spec, label_smoothing), shards[:, fields:].sum(0).t()


def gather_parts(stats: Tensor, group: ProcessGroup | None) -> Tensor:
    """`shard_stats` of this rank -> the parts of every row, `[TP or g, k, n]`; one all-gather."""
    return all_gather_dim0(stats if stats.dim() == 3 else stats.unsqueeze(0), group)


def target_logits(
    blocks: list[tuple[slice, Tensor]], column: Tensor, group: ProcessGroup | None
) -> Tensor:
    """Each row's raw target logit on every rank, `[n]` float32; one all-reduce over TP."""
    own = joined([gather_target(block, column[part], 0.0) for part, block in blocks])
    return sum_over_ranks(own.to(accumulator_dtype(own.dtype)), group)


def sum_over_ranks(own: Tensor, group: ProcessGroup | None) -> Tensor:
    """`own`, the library's own tensor and contiguous, summed in place; one all-reduce over TP."""
    wait_for(all_reduce_sum_async(own, group), group)
    return own
