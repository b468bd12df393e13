"""Log-probabilities over the ids that a sampler recorded, instead of its filters.

A softmax over only each row's kept ids, in plain torch on their logits: a dot product per id from
hidden states, no GEMM. Where statistics of the whole distribution are wanted too, both are of one
pass: the kept logits are read from the chunks, and travel in the same all-gather.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_logprobs.checks import check_target, global_to_local
from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.kernels.chunk import ChunkAt, per_row, times_multiplier
from mcore_logprobs.kernels.reference import distribution_gradient
from mcore_logprobs.kernels.stats import (
    IGNORED,
    LOG_ZERO,
    GradientTerms,
    RowResults,
    SoftmaxStats,
    StatsSpec,
    by_name,
    finalize,
    gradient_coefficients,
    merge,
)
from mcore_logprobs.ops.driver import Backward, Forward, Operation, Results, Saved, Tensors, apply
from mcore_logprobs.ops.record import (
    Record,
    ReplayRequest,
    check_kept_ids,
    check_possible,
    check_recorded,
    has_record,
)
from mcore_logprobs.ops.result import TokenStats
from mcore_logprobs.ops.row_statistics import LogitGradient, RowStatistics, entries_of_chunk
from mcore_logprobs.sources.kept import Rereads
from mcore_logprobs.sources.source import LogitIndices, Source, Tile


class ReplayResults(NamedTuple):
    """What a `Replay` gives of each row, or the upstream gradients of it.

    Attributes:
        logprobs, entropy: of the distribution over the kept ids; entropy may be None.
        full: of the whole distribution, each None where it was not asked for.
    """

    logprobs: Tensor | None
    entropy: Tensor | None
    full: RowResults

    @classmethod
    def of(cls, flat: Results) -> ReplayResults:
        return cls(flat[0], flat[1], RowResults(*flat[2:]))

    @property
    def flat(self) -> Results:
        return (self.logprobs, self.entropy, *self.full)


@dataclass(frozen=True)
class Replay(Operation[Source]):
    """The fields of a `ReplayResults`, flat.

    Tensors: the valid mask, local targets and whether there is a record, `[n]` each; of each entry
    `[e]` its row as the source's `in_token_order` walks them, ascending, its local id and whether
    it is the target.

    Attributes:
        bounds: where each tile's entries begin, and the end.
        entropy: whether that of the kept ids is wanted.
        full: which statistics of the whole distribution are wanted too, at its GEMMs; or None.
        missing: what a row without a record means: "full" takes the whole distribution's results.
    """

    bounds: tuple[int, ...]
    entropy: bool
    full: StatsSpec | None
    missing: str
    ignored_values = (0.0, 0.0, *IGNORED)

    @property
    def rereads(self) -> Rereads:  # type: ignore[override]
        return "nothing" if self.full is None else "exact"

    def forward(self, source: Source, tensors: Tensors) -> Forward:
        if self.full is None:
            return _ReplayForward(self, source, tensors)
        return _FullReplayForward(self, source, tensors)

    def backward(
        self, source: Source, upstream: Results, tensors: Tensors, saved: Saved
    ) -> Backward:
        kept, full = saved[: len(_SavedRecord._fields)], saved[len(_SavedRecord._fields) :]
        on, record = ReplayResults.of(upstream), _SavedRecord(*kept)
        entries = _RecordedGradient(
            source, (on.logprobs, on.entropy), self.counted(tensors), tensors, record, self.parts
        )
        if self.full is None:
            return entries
        valid_mask, local_target, recorded, *_ = tensors
        on_full = on.full
        if self.missing == "full":
            on_full = on_full._replace(
                logprobs=_plus_without(recorded, on_full.logprobs, on.logprobs),
                entropy=_plus_without(recorded, on_full.entropy, on.entropy),
            )
        softmax = SoftmaxStats(*full)
        spec, coef, on_target = gradient_coefficients(on_full, softmax, valid_mask=valid_mask)
        target = local_target.unsqueeze(-1), on_target.unsqueeze(-1)
        terms = GradientTerms(*target, softmax.row_max, coef, spec)
        return _FullReplayGradient(source, entries, terms)

    @property
    def parts(self) -> list[slice]:
        """Each tile's entries."""
        return [slice(*pair) for pair in zip(self.bounds[:-1], self.bounds[1:], strict=True)]

    def counted(self, tensors: Tensors) -> Tensor:
        """bool `[n]`: the rows whose results are of their record."""
        valid_mask, _, recorded, *_ = tensors
        return valid_mask if self.missing == "error" else valid_mask & recorded


def _rows_of_walk(source: Source, row: Tensor) -> Tensor:
    """Rows in the order of the tokens as this source walks them.

    A checkpoint's second forward may be given logits of other strides than the first, and so of
    another order; what it saves must not depend on that.
    """
    if source.recomputed or len(source.batch_shape) < 2:
        return row
    tokens = torch.arange(source.num_rows, device=source.device)
    walk = source.to_row_order(tokens.view(source.batch_shape))
    return torch.empty_like(walk).index_copy_(0, walk, tokens)[row]


def _plus_without(recorded: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a, and b in the rows without a record; None stands for 0."""
    if b is None:
        return a
    b = torch.where(recorded, 0.0, b)
    return b if a is None else a + b


class _SavedRecord(NamedTuple):
    """What the gradient needs of the kept distributions, `[n]` each.

    Attributes:
        finite: whether any kept logit is more than -inf.
    """

    row_max: Tensor
    log_sum: Tensor
    entropy: Tensor | None
    finite: Tensor


class _RecordedLogits:
    """The kept logits of a rank, entry by entry, and the distribution over them."""

    def __init__(self, operation: Replay, source: Source, tensors: Tensors) -> None:
        self._operation, self._source, self._tensors = operation, source, tensors
        *_, row, self.local_ids, self._hit = tensors
        self.row = _rows_of_walk(source, row)
        self.x = torch.zeros(self.row.shape, dtype=source.acc_dtype, device=source.device)
        self.spec = StatsSpec(entropy=operation.entropy)

    def entries(self, part: slice) -> LogitIndices:
        return LogitIndices(self.row[part], self.local_ids[part])

    def statistics(self) -> Tensor:
        """Row statistics `[k, n]` of this rank's kept logits."""
        x, row, hit, multiplier = self.x, self.row, self._hit, self._source.processing.multiplier
        is_local = self.local_ids >= 0
        stats = x.new_zeros(len(self.spec.fields), self._source.num_rows)
        local = by_name(self.spec.fields, stats)
        local["max"].fill_(-torch.inf)
        local["max"].scatter_reduce_(0, row, torch.where(is_local, x, -torch.inf), "amax")
        shift = torch.where(local["max"].isneginf(), 0.0, local["max"])
        below = times_multiplier(x - shift[row], per_row(multiplier, row))
        below = torch.where(is_local, below, LOG_ZERO)  # another rank's may be inf
        weight = below.exp()
        local["sum"].copy_(self._sums(weight))
        local["target"].index_add_(0, row, torch.where(is_local & hit, x, 0.0))
        if self.spec.entropy:
            local["entropy"].copy_(self._sums(below.clamp(min=LOG_ZERO) * weight))
        return stats

    def _sums(self, values: Tensor) -> Tensor:
        """`[n]`, of each row's entries: added one by one, which in float32 loses digits."""
        sums = values.new_zeros(self._source.num_rows, dtype=torch.float64)
        return sums.index_add_(0, self.row, values.double())

    def finalize(self, merged: Tensor) -> tuple[Tensor, Tensor | None, _SavedRecord]:
        """(log-probabilities, entropy or None, what the gradient needs) of all ranks' statistics.

        0 in rows that do not count.
        """
        results, softmax = finalize(
            merged, self.spec, multiplier=self._source.processing.multiplier
        )
        assert results.logprobs is not None
        hits = merged.new_zeros(merged.shape[1]).index_add_(0, self.row, self._hit.to(merged.dtype))
        # -inf where the target is not among the kept ids, or all of them are -inf.
        finite = ~by_name(self.spec.fields, merged)["max"].isneginf()
        logprobs = torch.where((hits > 0) & finite, results.logprobs, -torch.inf)
        logprobs = torch.where(softmax.row_max.isfinite(), logprobs, torch.nan)
        counted = self._operation.counted(self._tensors)
        logprobs = torch.where(counted, logprobs, 0.0)
        entropy = results.entropy
        saved = _SavedRecord(softmax.row_max, softmax.log_sum, entropy, finite)
        if entropy is not None:
            entropy = torch.where(counted, entropy, 0.0)
        return logprobs, entropy, saved


class _ReplayForward(Forward):
    """Of only the kept logits, by dot products."""

    reads = "nothing"

    def __init__(self, operation: Replay, source: Source, tensors: Tensors) -> None:
        self._kept = _RecordedLogits(operation, source, tensors)
        self._source, self._parts = source, iter(operation.parts)

    def begin_tile(self, tile: Tile, rows: slice) -> None:
        part = next(self._parts)
        self._kept.x[part] = tile.unscaled_logits(self._kept.entries(part))

    def results(self) -> tuple[Results, Saved]:
        kept, multiplier = self._kept, self._source.processing.multiplier
        shards = all_gather_stack(kept.statistics(), self._source.shard.group)
        merged = merge(shards, kept.spec, multiplier=multiplier)
        logprobs, entropy, saved = kept.finalize(merged)
        return ReplayResults(logprobs, entropy, RowResults()).flat, saved


class _FullReplayForward(RowStatistics):
    """Of the kept logits, which each chunk holds, and of the whole distribution; one all-gather."""

    def __init__(self, operation: Replay, source: Source, tensors: Tensors) -> None:
        assert operation.full is not None
        valid_mask, local_target, self._recorded, *_ = tensors
        super().__init__(source, operation.full, local_target, valid_mask=valid_mask)
        self._kept, self._operation = _RecordedLogits(operation, source, tensors), operation
        self._parts_of_tiles, self._part = iter(operation.parts), slice(0, 0)

    def begin_tile(self, tile: Tile, rows: slice) -> None:
        super().begin_tile(tile, rows)
        self._part = next(self._parts_of_tiles)

    def see(self, placed: ChunkAt) -> None:
        row, column = entries_of_chunk(placed, self._kept.entries(self._part), self._source.shard)
        self._kept.x[self._part] += placed.chunk.unscaled_entries(row, column)
        super().see(placed)

    def results(self) -> tuple[Results, Saved]:
        kept = self._kept
        (full, softmax), shards = self.reduce(kept.statistics())
        merged = merge(
            shards.contiguous(), kept.spec, multiplier=self._source.processing.multiplier
        )
        logprobs, entropy, saved = kept.finalize(merged)
        if self._operation.missing == "full":
            assert full.logprobs is not None
            logprobs = torch.where(self._recorded, logprobs, full.logprobs)
            if entropy is not None:
                assert full.entropy is not None
                entropy = torch.where(self._recorded, entropy, full.entropy)
        return ReplayResults(logprobs, entropy, full).flat, (*saved, *softmax)


class _RecordedGradient(Backward):
    """The gradient of the kept logits, entry by entry.

    dz = g (1[target] - p) - h p (log p + H)      with g, h upstream of logprob and entropy H
    """

    takes = "entries"

    def __init__(
        self,
        source: Source,
        upstream: tuple[Tensor | None, Tensor | None],
        counted: Tensor,
        tensors: Tensors,
        saved: _SavedRecord,
        parts: list[slice],
    ) -> None:
        self._multiplier, self._saved = source.processing.multiplier, saved
        self.parts, self._next = parts, iter(parts)
        *_, row, self._local_ids, self.hit = tensors
        self.row = _rows_of_walk(source, row)
        asked = counted & saved.finite
        self._upstream = [
            None if x is None else torch.where(asked, x, 0.0).to(saved.row_max.dtype)
            for x in upstream
        ]

    def entries_of(self, part: slice) -> LogitIndices:
        return LogitIndices(self.row[part], self._local_ids[part])

    def at(self, tile: Tile) -> tuple[LogitIndices, Tensor]:
        part = next(self._next)
        entries = self.entries_of(part)
        return entries, self.of_logits(part, tile.unscaled_logits(entries))

    def of_logits(self, part: slice, x: Tensor) -> Tensor:
        """The gradient of processed logits whose unscaled ones are x, `[e]` each."""
        row, hit, saved = self.row[part], self.hit[part], self._saved
        below = times_multiplier(x - saved.row_max[row], per_row(self._multiplier, row))
        log_p = below - saved.log_sum[row]
        p = log_p.exp()
        g, h = (None if x is None else x[row] for x in self._upstream)
        dz = torch.zeros_like(p)
        # A target that was not kept gets nothing, the kept ids what plain torch gives.
        if g is not None:
            dz += torch.where(g != 0, g * (hit.to(g.dtype) - p), 0.0)
        if h is not None:
            assert saved.entropy is not None
            entropy = saved.entropy[row]
            dz -= torch.where(h != 0, h * p * (log_p.clamp(min=LOG_ZERO) + entropy), 0.0)
        return dz


class _FullReplayGradient(LogitGradient):
    """The gradient of the whole distribution's statistics, and of the kept logits on top.

    What lies at the kept logits is written again, as the sum of both, so that it is rounded once.
    """

    def __init__(self, source: Source, kept: _RecordedGradient, terms: GradientTerms) -> None:
        super().__init__(source, terms)
        self._kept, self._tile_ends = kept, source.tile_ends()

    def write(self, placed: ChunkAt, out: Tensor) -> None:
        part = self._kept.parts[bisect.bisect_right(self._tile_ends, placed.rows.start)]
        chunk = placed.chunk
        row, column = entries_of_chunk(placed, self._kept.entries_of(part), self.source.shard)
        x = chunk.unscaled_entries(row, column)
        dz = self._kept.of_logits(part, x) + self._full_at(part, x)
        dy = chunk.raw_gradient_at(row, column, torch.where(column >= 0, dz, 0.0)).to(out.dtype)
        super().write(placed, out)  # may be over the logits
        if out.numel():
            _put(out, row, column, dy)

    def _full_at(self, part: slice, x: Tensor) -> Tensor:
        """The whole distribution's part, as `kernels.reference.grad` writes it, `[e]`."""
        row, hit = self._kept.row[part], self._kept.hit[part]
        _, upstream, row_max, coef, spec = self.terms
        assert row_max is not None
        assert coef is not None
        of_row, on_target = coef[:, row], upstream[row, 0]
        multiplier = per_row(self.source.processing.multiplier, row)
        dz = distribution_gradient(x - row_max[row], multiplier, of_row, spec)
        asked = (of_row != 0).any(0) | (on_target != 0)
        return torch.where(asked, dz, 0.0) + torch.where(hit, on_target, 0.0)


def _put(out: Tensor, row: Tensor, column: Tensor, values: Tensor) -> None:
    """`out[row, column] = values` at entries `[e]` whose column is not -1; no sync.

    The others, of row 0, write what stands at (0, 0) in the end.
    """
    inside = column >= 0
    first = inside & (row == 0) & (column == 0)
    there = torch.where(first.any(), torch.where(first, values, 0).sum().to(out.dtype), out[0, 0])
    out.index_put_((row, column.clamp(min=0)), torch.where(inside, values, there))


def replay(
    source: Source,
    target: Tensor,
    kept: ReplayRequest,
    *,
    full_spec: StatsSpec | None = None,
    places: Tensor | None = None,
    ignore_index: int | None = -100,
) -> TokenStats:
    """Log-probabilities over each row's kept ids, of any source, as a TokenStats.

    Args:
        full_spec: which statistics of the whole distribution are wanted too; None: none, and lse
            is None too, unless `kept.full` asks for it.
        places: `[*lead]` int64, which row of the record is each token's; None: in their order.

    Collectives: one all-gather of `[3, n]`, with entropy `[4, n]`; the whole distribution's
    statistics are rows of the same. A host sync where rows are left out, and one where there are
    several tiles.

    Raises:
        ValueError: before it, for a record that makes no sense; see `check_kept_ids`.
    """
    target = check_target(target, source.batch_shape, source.device)
    local_target, valid_mask = global_to_local(target, source.shard, ignore_index)
    if places is None:
        places = torch.arange(target.numel(), device=source.device).view(source.batch_shape)
    ids, offsets = check_kept_ids(kept.ids, target.numel(), source.shard, source.device)
    recorded = has_record(offsets, places)
    check_possible(ids, offsets, source.options.disallowed)
    if kept.missing == "error":
        check_recorded(recorded, valid_mask, places)
    local_ids, _ = global_to_local(ids, source.shard, None, name="kept_ids[0]")
    given_out = StatsSpec() if full_spec is None and kept.full else full_spec
    computed = given_out
    if kept.missing == "full":  # rows without a record take the whole distribution's results
        computed = given_out or StatsSpec()
        computed = replace(computed, entropy=computed.entropy or kept.entropy)
    as_it_lies = source.compacted(valid_mask)
    source = as_it_lies.in_token_order()
    record = Record.of(source, ids.numel(), offsets, places)
    hit = ids[record.place] == source.to_row_order(target)[record.row]
    operation = Replay(record.bounds, kept.entropy, computed, kept.missing)
    per_token = (valid_mask, local_target, recorded)
    entries = (record.row, local_ids[record.place], hit)
    if computed is not None:
        source = as_it_lies  # statistics are taken so
    results = ReplayResults.of(apply(operation, source, *per_token, constants=entries))
    full = RowResults() if given_out is None else results.full
    if given_out is not None and not given_out.entropy:
        full = full._replace(entropy=None)
    return TokenStats(
        **full._replace(logprobs=results.logprobs)._asdict(),
        full_logprobs=results.full.logprobs if kept.full else None,
        kept_entropy=results.entropy,
    )
