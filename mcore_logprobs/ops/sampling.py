"""Log-probabilities under what the sampler sampled from: temperature, then top-k, then top-p.

Which tokens the filters keep is found by the module `sampling_cut`; filters need whole rows at
once. Where each row was cut is a few numbers: the backward asks no filter and no other rank again.
What the sampler itself recorded is replayed (`replay`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from mcore_logprobs.arguments import check_target, global_to_local
from mcore_logprobs.checks import check_top_k, check_top_p
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels.chunk import per_row
from mcore_logprobs.kernels.reference import distribution_gradient
from mcore_logprobs.kernels.stats import (
    IGNORED,
    RowResults,
    SoftmaxStats,
    StatsSpec,
    gradient_coefficients,
)
from mcore_logprobs.ops.driver import Backward, Forward, Operation, Tensors, apply
from mcore_logprobs.ops.keywords import HeadKeywords, LogitsKeywords, shared_keywords
from mcore_logprobs.ops.replay import replay
from mcore_logprobs.ops.result import TokenStats
from mcore_logprobs.ops.row_statistics import RowStatistics, TargetThresholds
from mcore_logprobs.ops.sampling_cut import Cut, find_cut, kept_columns
from mcore_logprobs.ops.sampling_search import FilterOptions, multiplier_column
from mcore_logprobs.ops.token_stats import Statistics, token_stats
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.head import head_logits
from mcore_logprobs.sources.source import Placed, Source, Tile


@dataclass(frozen=True)
class Filters:
    """Checked filters; None is off."""

    top_k: int | None
    top_p: float | None

    @property
    def off(self) -> bool:
        return self.top_k is None and self.top_p is None

    @classmethod
    def of(cls, top_k: int | None, top_p: float, shard: VocabShard) -> Filters:
        check_top_k("top_k", top_k)
        check_top_p("top_p", top_p)
        k_off = top_k is None or top_k <= 0 or top_k >= shard.vocab_size
        return cls(None if k_off else top_k, None if top_p == 1.0 else float(top_p))

    def options(self, shard: VocabShard, temperature: float | Tensor) -> FilterOptions:
        """For rows of these temperatures."""
        multiplier = (
            temperature.double().reciprocal()
            if isinstance(temperature, Tensor)
            else 1.0 / temperature
        )
        return FilterOptions(shard, multiplier, self.top_k, self.top_p)


@dataclass(frozen=True)
class Filtered(Operation):
    """A RowResults of each row: filtered log-probabilities, the rest unfiltered or None.

    Attributes:
        whole: which statistics of the whole distribution are wanted too; None: no lse either.
    """

    filters: Filters
    whole: StatsSpec | None
    ignored_values = IGNORED
    rereads = "exact"

    def forward(self, source: Source, tensors: Tensors) -> Forward:
        return _FilteredForward(self, source, tensors)

    def backward(
        self, source: Source, upstream: Tensors, tensors: Tensors, saved: Tensors
    ) -> Backward:
        return _FilteredGradient(self, source, RowResults(*upstream), tensors, saved)


class _FilteredForward(Forward):
    reads = "rows"

    def __init__(self, operation: Filtered, source: Source, tensors: Tensors) -> None:
        self._operation, self._source = operation, source
        self._local_target, self._valid_mask = tensors
        self._thresholds = TargetThresholds(source, operation.whole, self._local_target)
        self._stats = None
        if operation.whole is not None or operation.filters.top_k is None:
            self._stats = RowStatistics(source, operation.whole or StatsSpec())
        self._chunks: list[Placed] = []
        self._cuts: list[Cut] = []

    def begin_tile(self, tile: Tile, rows: slice) -> None:
        self._thresholds.begin_tile(tile, rows)

    def see(self, placed: Placed) -> None:
        self._chunks.append(placed)
        if self._stats is not None:
            rows = placed.rows
            self._stats.see(placed, self._local_target[rows], self._thresholds.of(rows))

    def end_tile(self, tile: Tile, rows: slice) -> None:
        local_sum, source = None, self._source
        if self._stats is not None:
            of_tile = self._stats.end_tile(tile.rows)
            local_sum = self._stats.spec.named(of_tile)["sum"]
        opts = self._operation.filters.options(source.shard, per_row(source.temperature, rows))
        own, valid_mask = self._local_target[rows], self._valid_mask[rows]
        self._cuts.append(find_cut(source, self._chunks, local_sum, own, valid_mask, opts))
        self._chunks = []

    def results(self) -> tuple[Tensors, Tensors]:
        cut = Cut.join(self._cuts, self._source.acc_dtype, self._source.device)
        results: RowResults = RowResults()
        softmax: Tensors = ()
        if self._operation.whole is not None:
            assert self._stats is not None
            results, softmax = self._stats.finalize(valid_mask=self._valid_mask)
        results = results._replace(logprobs=torch.where(self._valid_mask, cut.logprobs, 0.0))
        # A filtered target's own column gets nothing.
        own_target = torch.where(cut.kept, self._local_target, -1)
        return results, (own_target, *SavedCut.of(cut), *softmax)


class _FilteredGradient(Backward):
    def __init__(
        self,
        operation: Filtered,
        source: Source,
        upstream: RowResults,
        tensors: Tensors,
        saved: Tensors,
    ) -> None:
        _, valid_mask = tensors
        own_target, *rest = saved
        cut, softmax = SavedCut(*rest[:4]), rest[4:]
        on_filtered = upstream.logprobs
        if on_filtered is None:
            on_filtered = torch.zeros_like(cut.row_max)
        self._source = source
        self._opts = operation.filters.options(source.shard, source.temperature)
        self._filtered = CutGradient(on_filtered, valid_mask, own_target, cut, self._opts)
        whole = upstream._replace(logprobs=None)
        self._coef: Tensor | None = None
        if any(grad is not None for grad in whole):
            self._softmax = SoftmaxStats(*softmax)
            self._spec, self._coef, _ = gradient_coefficients(
                whole, self._softmax, valid_mask=valid_mask
            )

    def write(self, placed: Placed, out: Tensor) -> None:
        coef, first, valid = self._coef, placed.columns.start, placed.chunk.valid
        out[:, valid:] = 0
        if valid == 0:
            return
        for rows, part, some in placed.steps(self._source.rows_at_a_time(out.shape[1])):
            untempered = replace(some, temperature=1.0)
            dz = self._filtered.of_logits(untempered.processed(), rows, first)
            if coef is not None:
                row_max = self._softmax.row_max[rows]
                base = distribution_gradient(some, row_max, coef[:, rows], self._spec)
                base.masked_fill_((coef[:, rows] == 0).all(0).unsqueeze(-1), 0.0)
                dz += base.mul_(multiplier_column(self._opts.multiplier, rows, dz.dtype))
            untempered.to_raw_gradient(dz)
            out[part, :valid] = dz


class SavedCut(NamedTuple):
    """The fields of a `Cut` that the backward reads, `[n]` each."""

    limit: Tensor
    last: Tensor
    row_max: Tensor
    log_sum: Tensor

    @classmethod
    def of(cls, cut: Cut) -> SavedCut:
        return cls(cut.limit, cut.last, cut.row_max, cut.log_sum)


class CutGradient:
    """The gradient of filtered log-probabilities, from the rows' saved cuts: no search, no rank.

    Args:
        upstream, valid_mask, column: `[n]`, in the order of the rows; the target as this rank's
            column, -1 where it is another rank's or filtered out.
    """

    def __init__(
        self,
        upstream: Tensor,
        valid_mask: Tensor,
        column: Tensor,
        cut: SavedCut,
        opts: FilterOptions,
    ) -> None:
        self._opts, self._column, self._last = opts, column, cut.last
        upstream = torch.where(valid_mask, upstream, 0.0).to(cut.limit.dtype)
        # A row that asks for nothing keeps nothing: NaN compares with no logit.
        limit = torch.where(upstream == 0, torch.nan, cut.limit)
        filtered = _outside_kept(cut.row_max, upstream)
        self._rows = (upstream, limit, cut.row_max, cut.log_sum, filtered)

    def of_logits(self, logits: Tensor, part: slice, first: int = 0) -> Tensor:
        """The gradient of logits `[c, v]` of some rows, in a new float32 or float64 tensor.

        Args:
            logits: as `find_cut` saw them; columns from `first` on.
            part: their rows.
        """
        opts = self._opts
        g, limit, highest, total, rest = (t[part].unsqueeze(-1) for t in self._rows)
        x = logits.to(limit.dtype)
        kept = kept_columns(x, limit, self._last[part].unsqueeze(-1), first, opts)
        multiplier = multiplier_column(opts.multiplier, part, x.dtype)
        # (z - m) - log s, not z - lse: the difference of large numbers is taken exactly.
        dz = torch.sub(x, highest).mul_(multiplier).sub_(total).exp_().mul_(-g)
        own = self._column[part] - first
        inside = (own >= 0) & (own < x.shape[1])
        row, at = torch.arange(own.shape[0], device=own.device), torch.where(inside, own, 0)
        dz.index_put_((row, at), dz[row, at] + torch.where(inside, g.squeeze(-1), 0.0))
        # The target is known to be kept, even where a product made again rounds it below the cut.
        kept.index_put_((row, at), kept[row, at] | (inside & ~limit.squeeze(-1).isnan()))
        return torch.where(kept, dz, rest, out=dz).mul_(multiplier)


def _outside_kept(row_max: Tensor, upstream: Tensor) -> Tensor:
    """The gradient of each row's columns outside the kept set, `[n]`: NaN in a row with NaN or
    +inf whose grad_output is not 0, else 0.
    """
    return torch.where(row_max.isfinite() | (upstream == 0), 0.0, torch.nan).to(upstream.dtype)


def filtered_stats(
    source: Any,
    target: Tensor,
    filters: Filters,
    whole: Statistics | None,
    ignore_index: int | None,
) -> TokenStats:
    """`token_stats` whose logprobs are those of the filtered distribution.

    Args:
        whole: statistics of the whole distribution, without label smoothing; None leaves lse out
            too, and with it the pass over the logits that it costs.
    """
    if filters.off:
        return token_stats(source, target, whole or Statistics.of(), ignore_index)
    target = check_target(target, source.lead, source.device)
    local_target, valid_mask = global_to_local(target, source.shard, ignore_index)
    source = source.compacted(valid_mask)
    source = source.in_whole_rows()
    operation = Filtered(filters, None if whole is None else whole.spec)
    results = apply(operation, source, local_target, valid_mask)
    return TokenStats(**RowResults(*results)._asdict())


def sampling_logprobs(
    source: Any,
    target: Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    kept_ids: tuple[Tensor, Tensor] | None = None,
    ignore_index: int | None = -100,
) -> Tensor:
    """`vocab_parallel_sampling_logprobs` of any source."""
    filters = Filters.of(top_k, top_p, source.shard)
    if kept_ids is None:
        return filtered_stats(source, target, filters, None, ignore_index).logprobs
    if not filters.off:
        raise ValueError(
            "kept_ids: expected top_k and top_p to be off, as the sampler's record replaces "
            f"them, got top_k={top_k}, top_p={top_p}"
        )
    return replay(source, target, kept_ids, ignore_index=ignore_index)


@shared_keywords(LogitsKeywords, given_logits)
def vocab_parallel_sampling_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    kept_ids: tuple[Tensor, Tensor] | None = None,
    ignore_index: int | None = -100,
    **shared: Unpack[LogitsKeywords],
) -> Tensor:
    """Log-probability of each target under the filtered distribution that it was sampled from.

    1. z = logits / temperature.
    2. top-k: the k largest stay, and with them all that equal the k-th.
    3. top-p, over what is left and renormalised: in descending order, equal ones by ascending id, a
       token stays while the probability of those before it is under top_p. The first always stays.
    4. logprob = z[target] - logsumexp of the z that stayed.

    A target that was filtered out gives -inf, and the gradient that plain torch gives for it:
    -grad_output p over the kept columns, 0 elsewhere; mask its loss, not its value, so that
    grad_output is 0. A row with NaN or +inf (its masked columns aside) gives NaN, in value and
    gradient. A grad_output of exactly 0 gives a gradient of exactly 0, in such rows too; one of NaN
    or inf passes through to the kept columns. Larger and equal are decided on logits before the
    temperature, in their own dtype where nothing else is done to them.

    Shape:
        vocab_parallel_logits: `[..., V/TP]`, or a DTensor `[..., V]` sharded on its last dimension.
        target: `[...]`, integers, global ids or ignore_index; the same on every TP rank.
        Returns float32 `[...]` (float64 for float64 logits), the same on every TP rank; 0 where the
        target is ignore_index. Differentiable; the kept set counts as a constant.

    Args:
        top_k: None, 0, -1 or vocab_size and more: off.
        top_p: in (0, 1]; 1.0: off.
        kept_ids: replay: (flat ids, offsets), the sampler's own record of what it kept, in place of
            the filters. Row i of the flattened target kept the global ids
            `flat_ids[offsets[i]:offsets[i+1]]`, each once; offsets is `[n + 1]`. A target that is
            not among them gives -inf. Logits outside the record play no part, whatever they are.
            Cannot be combined with top_k or top_p.
        ignore_index: as in `vocab_parallel_token_stats`.
        {shared}

    With filters on the backend takes the statistics of whole rows; the rest is torch's everywhere.

    Collectives, forward, over TP: one all-gather of `[2 + c, n]` with c = top_k + 1 or 128; with
    top-p one all-reduce of `[n]`. Rows whose cut-off these c largest logits of each rank do not
    show (nearly flat ones, masses of ties, top_k past 1023) share 4 to 15 all-reduces of
    `[7, rows]` (float64: to 26) and two all-gathers a filter, of `[128, rows]` and `[2, rows]`. On
    a GPU, where asking whether the search is done would be a host sync, always 13 of bfloat16, 14
    of float16 and 18 of float32 logits (float64: 29).
    Backward none.
    Replay: one all-gather of `[3, n]`. Filters off: as `vocab_parallel_logprobs`.

    Host syncs: one a call, whether rows need the search. None in replay.

    Memory: backward keeps the logits and six numbers a row; the gradient, in the logits' dtype, is
    the only `[..., V/TP]` tensor made.

    Rounding: probabilities are summed in float32 or better, so that where the sum before a token
    is within about 1e-6 of top_p, that token may fall on either side. TP ranks always agree.

    How samplers do it. vLLM with `logprobs_mode="processed_logprobs"` returns the same: temperature
    in float32, top-k that keeps ties, top-p renormalised; of equal logits at the top-p cut-off it
    keeps any, by an unstable sort. Its default, raw_logprobs, has no filter and no temperature.
    SGLang returns log-probabilities after the temperature and before top-k and top-p (before the
    temperature too where SGLANG_RETURN_ORIGINAL_LOGPROB is set): for those leave both off here.
    What it samples from keeps exactly k tokens, any of those that tie, and takes top-p of the
    probabilities before top-k ("joint" order), so that with both set it may keep more tokens than
    this function. Kernels with other sums or another order of equals differ at the edge: where that
    matters, record the kept ids (SGLang's sampling masks hold them) and replay them.

    Raises:
        ValueError: top_k, top_p or kept_ids that make no sense; else as in
            `vocab_parallel_token_stats`.
    """
    return sampling_logprobs(
        given_logits(vocab_parallel_logits, **shared),
        target,
        top_k=top_k,
        top_p=top_p,
        kept_ids=kept_ids,
        ignore_index=ignore_index,
    )


@shared_keywords(HeadKeywords, head_logits)
def linear_sampling_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    kept_ids: tuple[Tensor, Tensor] | None = None,
    ignore_index: int | None = -100,
    **shared: Unpack[HeadKeywords],
) -> Tensor:
    """`vocab_parallel_sampling_logprobs` from hidden states, without materialising the logits.

    Shape:
        hidden, weight, target: as in `linear_token_stats`.
        Returns float32 `[s, b]` or `[n]` (float64 for float64 operands), the same on every TP rank;
        0 where the target is ignore_index, -inf where it was filtered out. Differentiable; the kept
        set counts as a constant. A filtered target has the gradient that plain torch gives.

    Args:
        top_k, top_p, kept_ids, ignore_index: as in `vocab_parallel_sampling_logprobs`; with rows
            the record is that of the m rows.
        {shared}

    With filters on, chunk_size is rows a tile, which spans all of a rank's columns, as in
    `linear_map`.

    Cost: filters: four GEMMs with a backward, and the filters' own work once. kept_ids: a
    dot product an id, and no GEMM. Filters off: that of `linear_token_stats`.

    Collectives: filters: those of `vocab_parallel_sampling_logprobs` a tile; kept_ids: one
    all-gather of `[3, n]`. Backward, and under sequence parallelism, those of `linear_token_stats`.

    Host syncs: filters: one a tile, as there. kept_ids: none with one tile and without compaction,
    else one each.

    Memory: filters: a tile and a chunk of logits and what the filters make of a tile; backward a
    chunk; saved for it the inputs and six numbers a row. kept_ids: a few numbers
    an id, and 32 MiB of gathered operands.

    Raises:
        ValueError: before any collective; see `vocab_parallel_sampling_logprobs` and
            `linear_token_stats`.
    """
    return sampling_logprobs(
        head_logits(hidden, weight, **shared),
        target,
        top_k=top_k,
        top_p=top_p,
        kept_ids=kept_ids,
        ignore_index=ignore_index,
    )
