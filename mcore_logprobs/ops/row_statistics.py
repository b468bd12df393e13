"""Row statistics of a rank's columns, chunk by chunk, and their reduction over the ranks.

`kernels.stats` defines them and how they are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.collectives import all_gather_dim0, all_gather_stack, all_reduce_sum
from mcore_logprobs.kernels.chunk import per_row
from mcore_logprobs.kernels.segments import Segments, merge_segments
from mcore_logprobs.kernels.stats import (
    FinalStats,
    GradientTerms,
    StatsSpec,
    finalize,
    merge,
    no_columns,
)
from mcore_logprobs.ops.driver import Backward, Forward
from mcore_logprobs.sources.source import Placed, Source, Tile


class RowStatistics:
    """Statistics `[k, n]` of a rank's columns, with segments `[g/TP, k, n]`, as chunks are seen.

    Blocks of the same rows are merged once they are all there: a merge is a dozen small launches
    for a few numbers per row.
    """

    def __init__(self, source: Source, spec: StatsSpec) -> None:
        self.spec, self._source = spec, source
        self._segments: Segments | None = source.options.segments
        self._block = self._per_segment = None
        if self._segments is not None:
            self._block = self._segments.block(source.device.type)
            self._per_segment = -(-self._segments.width // self._block)
        self._rows: slice | None = None  # those of the latest chunk, and its multiplier
        self._multiplier: float | Tensor = 1.0
        self._seen = slice(0, 0)  # rows of the source, of all tiles
        self._parts: list[list[Tensor]] = []  # by segment, their blocks' statistics
        self._of_tile: list[Tensor] = []
        self._tiles: list[Tensor] = []

    def see(self, placed: Placed, column: Tensor, threshold: Tensor | None = None) -> None:
        """Add a chunk's.

        Args:
            column: of each of its rows, the target's column in the shard or -1.
            threshold: with `spec.rank` only: as in `kernels.reference.stats`.
        """
        if placed.rows != self._rows:
            self._merge_rows()
            self._rows, self._multiplier = placed.rows, placed.chunk.multiplier
            self._parts = [[] for _ in range(self._segments.local if self._segments else 1)]
        for segment, some in self._calls(placed):
            stats = self._source.backend(some.chunk).stats(
                some.chunk,
                some.local(column),
                self.spec,
                threshold=threshold,
                block=self._block,
                chunk_size=self._source.rows_at_a_time(some.chunk.logits.shape[1]),
            )
            for place, blocks in enumerate(stats.split(self._per_segment or len(stats)), segment):
                self._parts[place].append(blocks)

    def end_tile(self, rows: slice) -> Tensor:
        """The statistics of a tile, rows of the source; of no column where the rank has none."""
        self._merge_rows()
        found, self._of_tile = self._of_tile, []
        count = rows.stop - rows.start
        self._tiles.append(_joined(found) if found else self._of_no_column(count))
        self._seen = slice(self._seen.start if self._seen.stop else rows.start, rows.stop)
        return self._tiles[-1]

    def whole(self) -> Tensor:
        """Those of all tiles."""
        return _joined(self._tiles) if self._tiles else self._of_no_column(0)

    def finalize(
        self, *, valid_mask: Tensor | None = None, label_smoothing: float = 0.0
    ) -> FinalStats:
        """`kernels.stats.finalize` over all ranks: one all-gather over TP."""
        stats, ordered = self.whole(), self._segments is not None
        shards = all_gather_dim0(stats if ordered else stats.unsqueeze(0), self._group)
        multiplier = self.multiplier
        merged = merge(shards, self.spec, multiplier=multiplier, ordered=ordered)
        return finalize(
            merged,
            self.spec,
            multiplier=multiplier,
            valid_mask=valid_mask,
            label_smoothing=label_smoothing,
        )

    def finalize_with(self, numbers: Tensor) -> tuple[FinalStats, Tensor]:
        """`finalize`, and numbers `[n, j]` summed over the ranks in the same all-gather.

        j is small, and a second collective costs more than the bytes.
        """
        fields = len(self.spec.fields)
        shards = all_gather_stack(torch.cat([self.whole(), numbers.t()]), self._group)
        multiplier = self.multiplier
        merged = merge(shards[:, :fields].contiguous(), self.spec, multiplier=multiplier)
        done = finalize(merged, self.spec, multiplier=multiplier)
        return done, shards[:, fields:].sum(0).t()

    @property
    def multiplier(self) -> float | Tensor:
        """What differences of unscaled logits are multiplied by, in the rows of the tiles."""
        return per_row(self._source.multiplier, self._seen)

    @property
    def _group(self) -> ProcessGroup | None:
        return self._source.shard.group

    def _calls(self, placed: Placed) -> Iterable[tuple[int, Placed]]:
        """(its first segment, the columns) of each call of the backend that a chunk takes."""
        if self._segments is None or self._block is None:
            return ((0, placed),)
        return _by_segment(placed, self._segments, self._block)

    def _merge_rows(self) -> None:
        if self._rows is None:
            return
        if self._segments is not None:
            merged = merge_segments(self._parts, self.spec, self._multiplier)
        else:
            (parts,) = self._parts
            stats = torch.cat(parts) if len(parts) > 1 else parts[0]
            merged = merge(stats, self.spec, multiplier=self._multiplier)
        self._of_tile.append(merged)
        self._rows = None

    def _of_no_column(self, rows: int) -> Tensor:
        like = torch.empty(0, dtype=self._source.acc_dtype, device=self._source.device)
        none = no_columns(self.spec, rows, like=like)
        return none if self._segments is None else none.repeat(self._segments.local, 1, 1)


class TargetThresholds:
    """The logits of a tile's targets, against which ranks are counted; None where none is wanted.

    One all-reduce of `[rows]` per tile.
    """

    def __init__(self, source: Source, spec: StatsSpec | None, local_target: Tensor) -> None:
        self._wanted = spec is not None and spec.rank
        self._source, self._local_target = source, local_target
        self._start, self._of_tile = 0, local_target

    def begin_tile(self, tile: Tile, rows: slice) -> None:
        if self._wanted:
            own = tile.target_logits(self._local_target[rows])
            self._start = rows.start
            self._of_tile = all_reduce_sum(own, self._source.shard.group)

    def of(self, rows: slice) -> Tensor | None:
        """Those of some of the tile's rows."""
        if not self._wanted:
            return None
        return self._of_tile[..., rows.start - self._start : rows.stop - self._start]


class LocalStatistics(Forward):
    """The forward of an operation that takes row statistics of each chunk.

    Args:
        column: `[n]`, the target's column in the shard or -1.
    """

    def __init__(self, source: Source, spec: StatsSpec, column: Tensor) -> None:
        self.stats = RowStatistics(source, spec)
        self._column = column
        self._thresholds = TargetThresholds(source, spec, column)

    def begin_tile(self, tile: Tile, rows: slice) -> None:
        self._thresholds.begin_tile(tile, rows)

    def see(self, placed: Placed) -> None:
        rows = placed.rows
        self.stats.see(placed, self._column[rows], self._thresholds.of(rows))

    def end_tile(self, tile: Tile, rows: slice) -> None:
        self.stats.end_tile(tile.rows)


class LogitGradient(Backward):
    """The gradient of statistics and of single logits, as `terms` say of all rows."""

    def __init__(self, source: Source, terms: GradientTerms) -> None:
        self._source, self._terms = source, terms

    def write(self, placed: Placed, out: Tensor) -> None:
        own, chunk = self._terms.rows(placed.rows), placed.chunk
        self._source.backend(chunk).grad(
            chunk,
            own._replace(columns=placed.local(own.columns)),
            out=out,
            chunk_size=self._source.rows_at_a_time(chunk.logits.shape[1]),
        )


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _by_segment(placed: Placed, segments: Segments, block: int) -> Iterator[tuple[int, Placed]]:
    for number, some in segments.calls(placed.columns, block):
        part = slice(some.start - placed.columns.start, some.stop - placed.columns.start)
        yield number, placed._replace(columns=some, chunk=placed.chunk.columns(part))


def no_targets(rows: int, device: torch.device) -> Tensor:
    """-1 for each of some rows: none has a target."""
    return torch.full((rows,), -1, dtype=torch.int64, device=device)
