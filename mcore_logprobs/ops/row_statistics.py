"""Row statistics as an operation: of a rank's columns, chunk by chunk, reduced over the ranks.

`kernels.stats` defines them, how they are merged and what their gradient is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_logprobs.checks import check_flag, check_fraction
from mcore_logprobs.collectives import all_gather_dim0, all_gather_stack, all_reduce_sum
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels.chunk import ChunkAt, per_row
from mcore_logprobs.kernels.segments import Segments, merge_segments
from mcore_logprobs.kernels.stats import (
    IGNORED,
    FinalStats,
    GradientTerms,
    RowResults,
    SoftmaxStats,
    StatsSpec,
    finalize,
    gradient_coefficients,
    merge,
    no_columns,
)
from mcore_logprobs.ops.driver import Backward, Forward, Operation, Results, Saved, Tensors
from mcore_logprobs.sources.source import LogitIndices, Source, Tile


class RowStatistics(Forward):
    """The forward of statistics; those that take more of a chunk build on it.

    Blocks of the same rows are merged once they are all there: a merge is a dozen small launches
    for a few numbers per row. Ranks are counted against the logits of a tile's targets: one
    all-reduce of `[rows]` per tile.

    Attributes:
        local: this rank's statistics, `[k, n]`, of the rows that were seen; with segments
            `[g/TP, k, n]`.
        multiplier: what differences of unscaled logits are multiplied by, a number or `[n]`.

    Args:
        column: `[n]`, the target's column in the shard or -1; None: no row has a target.
        valid_mask, label_smoothing: as in `kernels.stats.finalize`.
    """

    def __init__(
        self,
        source: Source,
        spec: StatsSpec,
        column: Tensor | None = None,
        *,
        valid_mask: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        if column is None:
            column = torch.full((source.num_rows,), -1, dtype=torch.int64, device=source.device)
        self.spec, self._source, self._column = spec, source, column
        self._valid_mask, self._label_smoothing = valid_mask, label_smoothing
        self.multiplier = source.processing.multiplier
        self._segments: Segments | None = source.options.segments
        self._block = self._per_segment = None
        shape: tuple[int, ...] = (len(spec.fields), column.shape[0])
        if self._segments is not None:
            shape = (self._segments.local, *shape)
            self._block = self._segments.block(source.device.type)
            self._per_segment = -(-self._segments.width // self._block)
        self.local = torch.empty(shape, dtype=source.acc_dtype, device=source.device)
        if source.shard.valid_width == 0:  # a head shows no chunk then
            self.local.copy_(no_columns(spec, column.shape[0], like=self.local))
        self._first = 0  # row of the tile, and the logits of its targets
        self._thresholds: Tensor | None = None
        self._blocks: list[list[Tensor]] = []  # statistics of the latest rows' blocks, by segment

    def begin_tile(self, tile: Tile, rows: slice) -> None:
        if self._column.shape[0] != self._source.num_rows:  # only those of one tile
            self.multiplier = per_row(self._source.processing.multiplier, tile.rows)
        if self.spec.rank:
            logits = tile.target_logits(self._column[rows])
            self._first = rows.start
            self._thresholds = all_reduce_sum(logits, self._source.shard.group)

    def see(self, placed: ChunkAt) -> None:
        rows, source, threshold = placed.rows, self._source, self._thresholds
        # One with only padding, behind the last, would overwrite the rows' statistics.
        assert placed.columns.start < max(1, source.shard.valid_width), "a block of padding alone"
        if placed.columns.start == 0:  # the first block of these rows
            self._blocks = [[] for _ in range(self._segments.local if self._segments else 1)]
        if threshold is not None:
            threshold = threshold[..., rows.start - self._first : rows.stop - self._first]
        calls = ((0, placed),) if self._block is None else self._by_segment(placed, self._block)
        for segment, part in calls:
            chunk = part.chunk
            stats = source.backend.stats(
                chunk,
                part.local(self._column[rows], source.shard.width),
                self.spec,
                threshold=threshold,
                block=self._block,
                chunk_size=source.rows_at_a_time(chunk.logits.shape[1]),
            )
            by_segment = (stats,) if self._per_segment is None else stats.split(self._per_segment)
            for place, blocks in enumerate(by_segment, segment):
                self._blocks[place].append(blocks)
        if placed.columns.stop >= source.shard.valid_width:  # the last one
            by_segment, self._blocks = self._blocks, []
            multiplier = placed.chunk.processing.multiplier
            if self._segments is not None:
                merged = merge_segments(by_segment, self.spec, multiplier)
            else:
                (blocks,) = by_segment
                stats = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
                merged = merge(stats, self.spec, multiplier=multiplier)
            if merged.shape == self.local.shape:  # all rows at once: no copy
                self.local = merged
            else:
                self.local[..., rows] = merged

    def results(self) -> tuple[Results, Saved]:
        return self.reduce()[0]

    def reduce(self, *others: Tensor) -> tuple[FinalStats, Tensor]:
        """`kernels.stats.finalize` over all ranks: one all-gather over TP.

        Args:
            others: `[j, n]` each, few numbers that travel along: a second collective costs more
                than the bytes. Not with segments.

        Returns:
            (whole rows; the others of every rank, `[ranks, j, n]`).
        """
        stats, multiplier, group = self.local, self.multiplier, self._source.shard.group
        fields, ordered = stats.shape[-2], self._segments is not None
        assert not (ordered and others), "segments' statistics travel alone"
        if ordered:
            shards = all_gather_dim0(stats, group)
        else:
            shards = all_gather_stack(torch.cat([stats, *others]) if others else stats, group)
        statistics = shards[:, :fields].contiguous()
        final = finalize(
            merge(statistics, self.spec, multiplier=multiplier, ordered=ordered),
            self.spec,
            multiplier=multiplier,
            valid_mask=self._valid_mask,
            label_smoothing=self._label_smoothing,
        )
        return final, shards[:, fields:]

    def _by_segment(self, placed: ChunkAt, block: int) -> Iterator[tuple[int, ChunkAt]]:
        """(its first segment, the columns) of each call of the backend that a chunk takes."""
        assert self._segments is not None
        first = placed.columns.start
        for number, columns in self._segments.calls(placed.columns, block):
            part = slice(columns.start - first, columns.stop - first)
            yield number, placed._replace(columns=columns, chunk=placed.chunk.columns(part))


@dataclass(eq=False)
class LogitGradient(Backward):
    """The gradient of statistics and of single logits, as `terms` say of all rows."""

    source: Source
    terms: GradientTerms

    def write(self, placed: ChunkAt, out: Tensor) -> None:
        source, terms, chunk = self.source, self.terms.rows(placed.rows), placed.chunk
        size = source.rows_at_a_time(chunk.logits.shape[1])
        columns = placed.local(terms.columns, source.shard.width)
        source.backend.grad(chunk, terms._replace(columns=columns), out=out, chunk_size=size)


@dataclass(frozen=True)
class Statistics(Operation[Source]):
    """A RowResults of each row, of local targets and a valid mask `[n]`."""

    spec: StatsSpec
    label_smoothing: float = 0.0
    ignored_values = IGNORED
    rereads = "rounded"

    @classmethod
    def of(
        cls,
        *,
        entropy: bool = False,
        target_rank: bool = False,
        sum_pi_squared: bool = False,
        label_smoothing: float = 0.0,
    ) -> Statistics:
        """What a caller's flags ask for, checked."""
        check_flag("entropy", entropy)
        check_flag("target_rank", target_rank)
        check_flag("sum_pi_squared", sum_pi_squared)
        check_fraction("label_smoothing", label_smoothing)
        spec = StatsSpec(entropy, target_rank, label_smoothing > 0.0, sum_pi_squared)
        return cls(spec, label_smoothing)

    def forward(self, source: Source, tensors: Tensors) -> Forward:
        local_target, valid_mask = tensors
        return RowStatistics(
            source,
            self.spec,
            local_target,
            valid_mask=valid_mask,
            label_smoothing=self.label_smoothing,
        )

    def backward(
        self, source: Source, upstream: Results, tensors: Tensors, saved: Saved
    ) -> Backward:
        local_target, valid_mask = tensors
        softmax = SoftmaxStats(*saved)
        spec, coef, on_target = gradient_coefficients(
            RowResults(*upstream),
            softmax,
            valid_mask=valid_mask,
            label_smoothing=self.label_smoothing,
        )
        entries = local_target.unsqueeze(-1), on_target.unsqueeze(-1)
        return LogitGradient(source, GradientTerms(*entries, softmax.row_max, coef, spec))


def gradient_with_entries(
    source: Source,
    on: RowResults,
    softmax: SoftmaxStats,
    valid_mask: Tensor,
    entries: Sequence[tuple[Tensor, Tensor]],
    *,
    normalized: bool,
    target: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> LogitGradient:
    """The gradient of statistics and of single logits.

    Args:
        on: upstream gradients of the statistics, `[n]` each.
        entries: (local ids, upstream gradients), `[n, j]` each.
        normalized: the entries are log-probabilities; False: logits over the temperature.
        target: local targets `[n]`; None: no statistic is of a target.
    """
    nan: float | Tensor = 0.0
    if entries:
        every = torch.cat([upstream for _, upstream in entries], -1)
        # Entries that cancel leave coefficients of 0, but a row that holds a NaN is NaN throughout.
        nan = torch.where((every != 0).any(-1), 0.0 * softmax.log_sum, 0.0)
        if normalized:
            on_lse = nan - every.sum(-1)
            on = on._replace(lse=on_lse if on.lse is None else on.lse + on_lse)
    spec, coef, on_target = gradient_coefficients(
        on, softmax, valid_mask=valid_mask, label_smoothing=label_smoothing
    )
    if target is not None:
        entries = [(target.unsqueeze(-1), on_target.unsqueeze(-1)), *entries]
    columns, upstream = (torch.cat(parts, -1) for parts in zip(*entries, strict=True))
    terms = GradientTerms(columns, upstream, softmax.row_max, coef + nan, spec)
    return LogitGradient(source, terms)


class EntryGradient(LogitGradient):
    """The gradient of processed logits `[n, k]` at local ids `[n, k]`; -1 is another rank's.

    Of recomputed logits by dot products, of given ones chunk by chunk.
    """

    def __init__(self, source: Source, local_ids: Tensor, upstream: Tensor) -> None:
        super().__init__(source, GradientTerms(local_ids, upstream, None, None, StatsSpec()))
        self.takes = "entries" if source.recomputed else "blocks"

    def at(self, tile: Tile) -> tuple[LogitIndices, Tensor]:
        upstream = self.terms.upstream[tile.rows].reshape(-1)
        return grid_entries(self.terms.columns, tile.rows), upstream


def grid_entries(local_ids: Tensor, rows: slice) -> LogitIndices:
    """The entries of some rows, from `[n, k]` columns: k per row."""
    columns = local_ids[rows]
    row = torch.arange(rows.start, rows.stop, device=columns.device)
    return LogitIndices(row.repeat_interleave(columns.shape[1]), columns.reshape(-1))


def entries_of_chunk(
    placed: ChunkAt, entries: LogitIndices, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """(row, column) of entries as the chunk's own, `[e]` each; (0, -1) of those not in it."""
    inside = (entries.row >= placed.rows.start) & (entries.row < placed.rows.stop)
    column = torch.where(inside, placed.local(entries.column, shard.width), -1)
    return torch.where(column >= 0, entries.row - placed.rows.start, 0), column
