"""Log-probabilities under what the sampler sampled from: temperature, min-p, top-k, top-p.

Which tokens the filters keep is found by the module `sampling_cut`; filters need whole rows at
once. Where each row was cut is a few numbers: the backward asks no filter and no other rank again.
What the sampler itself recorded is replayed (`replay`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from mcore_logprobs.checks import (
    check_choice,
    check_flag,
    check_min_p,
    check_target,
    check_top_k,
    check_top_p,
    global_to_local,
)
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels.chunk import ChunkAt, per_row
from mcore_logprobs.kernels.reference import distribution_gradient
from mcore_logprobs.kernels.stats import (
    IGNORED,
    RowResults,
    SoftmaxStats,
    StatsSpec,
    by_name,
    gradient_coefficients,
)
from mcore_logprobs.ops.driver import Backward, Forward, Operation, Results, Saved, Tensors, apply
from mcore_logprobs.ops.keywords import HeadKeywords, LogitsKeywords, shared_keywords
from mcore_logprobs.ops.record import MISSING, ReplayRequest
from mcore_logprobs.ops.replay import replay
from mcore_logprobs.ops.result import TokenStats
from mcore_logprobs.ops.row_statistics import RowStatistics, Statistics
from mcore_logprobs.ops.sampling_cut import Cut, CutGradient, SavedCut, add_at, find_cut
from mcore_logprobs.ops.sampling_search import FilterOptions, multiplier_column
from mcore_logprobs.ops.token_stats import token_stats
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.head import head_logits
from mcore_logprobs.sources.source import Source, Tile


@dataclass(frozen=True)
class Filters:
    """Checked filters; None is off."""

    top_k: int | None
    top_p: float | None
    min_p: float | None

    @property
    def off(self) -> bool:
        return self.top_k is None and self.top_p is None and self.min_p is None

    @property
    def need_sum(self) -> bool:
        """Whether the whole softmax's sum decides what is kept."""
        return self.top_k is None and self.min_p is None

    @classmethod
    def of(cls, top_k: int | None, top_p: float, min_p: float, shard: VocabShard) -> Filters:
        check_top_k("top_k", top_k)
        check_top_p("top_p", top_p)
        check_min_p("min_p", min_p)
        k_off = top_k is None or top_k <= 0 or top_k >= shard.vocab_size
        return cls(
            None if k_off else top_k,
            None if top_p == 1.0 else float(top_p),
            None if min_p == 0.0 else float(min_p),
        )

    def options(self, shard: VocabShard, temperature: float | Tensor) -> FilterOptions:
        """For rows of these temperatures."""
        multiplier = (
            temperature.double().reciprocal()
            if isinstance(temperature, Tensor)
            else 1.0 / temperature
        )
        return FilterOptions(shard, multiplier, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True)
class Filtered(Operation[Source]):
    """A RowResults of each row: filtered log-probabilities, the rest unfiltered or None; and the
    unfiltered log-probabilities, or None.

    Attributes:
        full_spec: which statistics of the whole distribution are wanted too; None: no lse either.
        full: whether its log-probabilities are.
    """

    filters: Filters
    full_spec: StatsSpec | None
    full: bool = False
    ignored_values = (*IGNORED, 0.0)
    rereads = "exact"

    def forward(self, source: Source, tensors: Tensors) -> Forward:
        return _FilteredForward(self, source, tensors)

    def backward(
        self, source: Source, upstream: Results, tensors: Tensors, saved: Saved
    ) -> Backward:
        *of_statistics, on_full = upstream
        return _FilteredGradient(self, source, RowResults(*of_statistics), on_full, tensors, saved)


class CutForward(Forward):
    """The forward over what filters keep: at a tile's end its rows are cut.

    Args:
        stats: of all columns, seen on the way; needed where their sums are.
    """

    reads = "rows"

    def __init__(self, source: Source, filters: Filters, stats: RowStatistics | None) -> None:
        assert stats is not None or not filters.need_sum
        self._source, self._filters, self._stats = source, filters, stats
        self._chunks: list[ChunkAt] = []  # the tile's
        self._cuts: list[Cut] = []  # the tiles'

    def begin_tile(self, tile: Tile, rows: slice) -> None:
        if self._stats is not None:
            self._stats.begin_tile(tile, rows)

    def see(self, placed: ChunkAt) -> None:
        self._chunks.append(placed)
        if self._stats is not None:
            self._stats.see(placed)

    def cut_tile(
        self, rows: slice, local_target: Tensor, valid_mask: Tensor
    ) -> tuple[list[ChunkAt], Cut, FilterOptions]:
        """The tile's chunks, its cut, and the filters of its rows."""
        local_sum, source = None, self._source
        chunks, self._chunks = self._chunks, []
        if self._stats is not None:
            local_sum = by_name(self._stats.spec.fields, self._stats.local[:, rows])["sum"]
        temperature = per_row(source.processing.temperature, rows)
        opts = self._filters.options(source.shard, temperature)
        cut = find_cut(source, chunks, local_sum, local_target, valid_mask, opts)
        self._cuts.append(cut)
        return chunks, cut, opts

    @property
    def cut(self) -> Cut:
        """All rows'."""
        return Cut.join(self._cuts, self._source.acc_dtype, self._source.device)


class _FilteredForward(CutForward):
    def __init__(self, operation: Filtered, source: Source, tensors: Tensors) -> None:
        self._operation = operation
        self._local_target, self._valid_mask = tensors
        spec, stats = operation.full_spec, None
        if spec is not None or operation.filters.need_sum:
            spec, target = spec or StatsSpec(), self._local_target
            stats = RowStatistics(source, spec, target, valid_mask=self._valid_mask)
        super().__init__(source, operation.filters, stats)

    def end_tile(self, tile: Tile, rows: slice) -> None:
        self.cut_tile(rows, self._local_target[rows], self._valid_mask[rows])

    def results(self) -> tuple[Results, Saved]:
        cut = self.cut
        results, softmax = RowResults(), None
        if self._operation.full_spec is not None:
            assert self._stats is not None
            results, softmax = self._stats.reduce()[0]
        full = results.logprobs if self._operation.full else None
        results = results._replace(logprobs=torch.where(self._valid_mask, cut.logprobs, 0.0))
        # A filtered target's own column gets nothing.
        own_target = torch.where(cut.kept, self._local_target, -1)
        return (*results, full), (own_target, *SavedCut.of(cut), *(softmax or ()))


class _FilteredGradient(Backward):
    def __init__(
        self,
        operation: Filtered,
        source: Source,
        upstream: RowResults,
        on_full: Tensor | None,
        tensors: Tensors,
        saved: Tensors,
    ) -> None:
        self._local_target, valid_mask = tensors
        own_target, *rest = saved
        cut, softmax = SavedCut(*rest[:4]), rest[4:]
        on_filtered = upstream.logprobs
        if on_filtered is None:
            on_filtered = torch.zeros_like(cut.row_max)
        self._source = source
        self._opts = operation.filters.options(source.shard, source.processing.temperature)
        self._filtered = CutGradient(on_filtered, valid_mask, own_target, cut, self._opts)
        on_statistics = upstream._replace(logprobs=on_full)
        self._coef: Tensor | None = None
        if any(grad is not None for grad in on_statistics):
            self._softmax = SoftmaxStats(*softmax)
            self._spec, self._coef, self._on_target = gradient_coefficients(
                on_statistics, self._softmax, valid_mask=valid_mask
            )

    def write(self, placed: ChunkAt, out: Tensor) -> None:
        coef, first, valid = self._coef, placed.columns.start, placed.chunk.valid
        out[:, valid:] = 0
        if valid == 0:
            return
        for rows, part, step_chunk in placed.steps(self._source.rows_at_a_time(out.shape[1])):
            untempered = step_chunk.untempered
            dz = self._filtered.of_logits(untempered.processed(), rows, first)
            if coef is not None:
                base = distribution_gradient(
                    step_chunk.unscaled() - self._softmax.row_max[rows].unsqueeze(-1),
                    step_chunk.processing.multiplier,
                    coef[:, rows].unsqueeze(-1),
                    self._spec,
                )
                base.masked_fill_((coef[:, rows] == 0).all(0).unsqueeze(-1), 0.0)
                add_at(base, self._local_target[rows] - first, self._on_target[rows])
                dz += base.mul_(multiplier_column(self._opts.multiplier, rows, dz.dtype))
            untempered.to_raw_gradient(dz)
            out[part, :valid] = dz


def filtered_stats(
    source: Source,
    target: Tensor,
    filters: Filters,
    full_statistics: Statistics | None,
    ignore_index: int | None,
    *,
    full: bool = False,
) -> TokenStats:
    """`token_stats` whose logprobs are those of the filtered distribution.

    Args:
        full_statistics: those of the whole distribution, without label smoothing; None leaves lse
            out too, and with it the pass over the logits that it costs.
        full: give its log-probabilities too; full_statistics is not None then.
    """
    if filters.off:
        stats = token_stats(source, target, full_statistics or Statistics.of(), ignore_index)
        return replace(stats, full_logprobs=stats.logprobs) if full else stats
    target = check_target(target, source.batch_shape, source.device)
    local_target, valid_mask = global_to_local(target, source.shard, ignore_index)
    source = source.compacted(valid_mask)
    source = source.in_whole_rows()
    operation = Filtered(filters, None if full_statistics is None else full_statistics.spec, full)
    *results, full_logprobs = apply(operation, source, local_target, valid_mask)
    return TokenStats(**RowResults(*results)._asdict(), full_logprobs=full_logprobs)


def sampling_logprobs(
    source: Source,
    target: Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    kept_ids: tuple[Tensor, Tensor] | None = None,
    missing: str = "error",
    full: bool = False,
    entropy: bool = False,
    ignore_index: int | None = -100,
) -> Tensor | TokenStats:
    """`vocab_parallel_sampling_logprobs` of any source."""
    filters = Filters.of(top_k, top_p, min_p, source.shard)
    check_flag("full", full)
    check_flag("entropy", entropy)
    check_choice("missing", missing, MISSING)
    if kept_ids is None:
        for name, value, off in (("missing", missing, "error"), ("entropy", entropy, False)):
            if value != off:
                raise ValueError(f"{name}: expected {off!r} without kept_ids, got {value!r}")
        unfiltered = Statistics.of() if full else None
        stats = filtered_stats(source, target, filters, unfiltered, ignore_index, full=full)
        return stats if full else stats.logprobs
    if not filters.off:
        raise ValueError(
            "kept_ids: expected top_k, top_p and min_p to be off, as the sampler's record replaces "
            f"them, got top_k={top_k}, top_p={top_p}, min_p={min_p}"
        )
    kept = ReplayRequest(kept_ids, missing, entropy, full)
    full_spec = StatsSpec(entropy=entropy) if full else None
    stats = replay(source, target, kept, full_spec=full_spec, ignore_index=ignore_index)
    return stats if full or entropy else stats.logprobs


@overload
def vocab_parallel_sampling_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    full: Literal[False] = ...,
    entropy: Literal[False] = ...,
    **rest: object,
) -> Tensor: ...


@overload
def vocab_parallel_sampling_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    full: bool = ...,
    entropy: bool = ...,
    **rest: object,
) -> TokenStats: ...


@shared_keywords(LogitsKeywords, given_logits)  # type: ignore[misc]
def vocab_parallel_sampling_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    kept_ids: tuple[Tensor, Tensor] | None = None,
    missing: str = "error",
    full: bool = False,
    entropy: bool = False,
    ignore_index: int | None = -100,
    **shared: Unpack[LogitsKeywords],
) -> Tensor | TokenStats:
    """Return each target's log-probability under the filtered distribution it was sampled from.

    1. z = logits / temperature.
    2. min-p: a token stays if its probability is at least min_p times the largest one.
    3. top-k: the k largest stay, and all that are equal to the k-th.
    4. top-p, over what is left, renormalized: in descending order (ties by ascending id), a token
       stays while the probability of those before it is below top_p. The first always stays.
    5. logprob = z[target] - logsumexp of the z that stayed.

    A target that was filtered out gives -inf, and the gradient that plain torch gives for it:
    -grad_output p over the kept columns, 0 elsewhere. Mask its loss and not its value, so that its
    grad_output is 0: a grad_output of exactly 0 gives a gradient of exactly 0. A row with NaN or
    +inf in a column that counts gives NaN, in value and gradient; under a softcap +inf is the cap.
    Logits are compared before the temperature, in their own dtype if no scale, softcap or bias
    changes them.

    Shape:
        vocab_parallel_logits: `[..., V/TP]`, or a DTensor `[..., V]` sharded on its last dimension.
        target: `[...]`, integers, global ids or ignore_index; the same on every TP rank.
        Returns float32 `[...]` (float64 for float64 logits), the same on every TP rank; 0 where the
        target is ignore_index. Differentiable; the kept set counts as a constant. With full or
        entropy a TokenStats, whose `logprobs` these are.

    Args:
        top_k: None, 0, -1 or vocab_size and more: off.
        top_p: in (0, 1]; 1.0: off.
        min_p: in [0, 1]; 0.0: off.
        kept_ids: replay: (flat ids, offsets), the sampler's own record of the ids it kept, instead
            of the filters. Row i of the flattened target kept the global ids
            `flat_ids[offsets[i]:offsets[i+1]]`, each once; offsets is `[n + 1]`. A target that is
            not among them gives -inf. Logits outside the record are ignored, also NaN. Not with
            top_k, top_p or min_p.
        missing: what a token without a record means (two equal offsets). "error": a ValueError that
            names the row. "full": nothing was masked there, so its results are those of the full
            distribution; this costs what `full` does. "ignore": 0, and no gradient.
        full: return a TokenStats that also has the log-probabilities of the full distribution
            (`full_logprobs`) and its `lse`. With filters they cost one more all-gather, of
            `[3, n]`; in replay none.
        entropy: with kept_ids: return a TokenStats that also has the entropy over the kept ids
            (`kept_entropy`), differentiable; with full also that of the full distribution
            (`entropy`).
        ignore_index: as in `vocab_parallel_token_stats`.
        {shared}

    With filters the backend computes the statistics of whole rows, and torch does the rest.

    Collectives, forward, over TP; backward none:

    - Filters: one all-gather of `[2 + c, n]`; top-p adds one all-reduce of `[n]`. With a top_k
      below 1024 c is top_k + 1 + max(16, top_k // 4), else 128. The c largest logits of each rank
      may not contain the cutoff: nearly flat rows, more ties at the k-th place, top_k above 1023.
      Such rows are searched together: per filter 4 to 15 all-reduces of `[7, rows]` (float64: up to
      26) and at most two all-gathers, of `[128, rows]` and `[2, rows]`; in the end an all-gather of
      `[rows]`. On a GPU a search always takes 13 all-reduces for bfloat16, 14 for float16, 18 for
      float32 and 29 for float64 logits, because asking whether it is done would be a host sync.
    - min_p by itself needs no search: rows that keep more than the candidates share one all-reduce
      of `[1, rows]` and one all-gather.
    - Replay: one all-gather of `[3, n]`, with entropy of `[4, n]`; full and missing="full" add the
      rows of `vocab_parallel_token_stats` to it.
    - Filters off: as `vocab_parallel_logprobs`.

    Host syncs: one per call, which asks whether any row needs the search. A search makes another if
    the logits' rows have no common stride, as those of `logits[:, :-1]`. None in replay.

    Memory: backward keeps the logits and six numbers per row. The gradient, in the logits' dtype,
    is the only `[..., V/TP]` tensor made. Filters gather c candidates of each row from every rank:
    4 bytes each, and 12 more of this rank's own.

    Rounding: probabilities are summed in float32 or better. If the sum before a token is within
    about 1e-6 of top_p, that token may be kept or not. TP ranks always agree.

    What engines do:

    - vLLM with `logprobs_mode="processed_logprobs"` returns the same: temperature in float32,
      min-p, top-k that keeps ties, top-p renormalized. Of equal logits at the top-p cutoff it keeps
      any. Its default, raw_logprobs, has neither filters nor temperature.
    - SGLang returns log-probabilities after the temperature and before the filters, or before the
      temperature if SGLANG_RETURN_ORIGINAL_LOGPROB is set: leave the filters off for those. Its
      pytorch sampler keeps exactly k tokens, applies top-p to the probabilities before top-k, and
      min-p last. With two filters it may keep more tokens than this function. Its flashinfer
      sampler keeps ties, and with min-p applies top-p after top-k.
    - transformers applies min-p last: by itself or with top-k the same tokens stay, with top-p at
      least as many.

    Other kernels may differ at the cutoff, because they sum and break ties in another order. If
    that matters, record the ids that the engine kept (SGLang's sampling masks have them), and
    replay them.

    Raises:
        ValueError: filters or kept_ids that make no sense; else as in
            `vocab_parallel_token_stats`.
    """
    return sampling_logprobs(
        given_logits(vocab_parallel_logits, **shared),
        target,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        kept_ids=kept_ids,
        missing=missing,
        full=full,
        entropy=entropy,
        ignore_index=ignore_index,
    )


@overload
def linear_sampling_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    full: Literal[False] = ...,
    entropy: Literal[False] = ...,
    **rest: object,
) -> Tensor: ...


@overload
def linear_sampling_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    full: bool = ...,
    entropy: bool = ...,
    **rest: object,
) -> TokenStats: ...


@shared_keywords(HeadKeywords, head_logits)  # type: ignore[misc]
def linear_sampling_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    kept_ids: tuple[Tensor, Tensor] | None = None,
    missing: str = "error",
    full: bool = False,
    entropy: bool = False,
    ignore_index: int | None = -100,
    **shared: Unpack[HeadKeywords],
) -> Tensor | TokenStats:
    """`vocab_parallel_sampling_logprobs` from hidden states, without materializing the logits.

    Shape:
        hidden, weight, target: as in `linear_token_stats`.
        Returns float32 `[s, b]` or `[n]` (float64 for float64 operands), the same on every TP rank;
        0 where the target is ignore_index, -inf where it was filtered out. Differentiable; the kept
        set counts as a constant. A filtered target has the gradient that plain torch gives. With
        full or entropy a TokenStats, whose `logprobs` these are.

    Args:
        top_k, top_p, min_p, kept_ids, missing, full, entropy, ignore_index: as in
            `vocab_parallel_sampling_logprobs`; with rows the record is that of the m rows.
        {shared}

    With filters on, chunk_size is rows per tile, which spans all of a rank's columns, as in
    `linear_map`.

    Cost: filters: four GEMMs with a backward, and the filters' own work once. kept_ids: a dot
    product per id and no GEMM; with full or missing="full" the GEMMs of `linear_token_stats` and no
    dot product. Filters off: that of `linear_token_stats`.

    Collectives: filters: those of `vocab_parallel_sampling_logprobs` per tile; kept_ids: one
    all-gather. Backward, and under sequence parallelism, those of `linear_token_stats`.

    Host syncs: filters: one per tile. kept_ids: one if there are several tiles, and one for
    compact=True.

    Memory: filters: a tile and a chunk of logits, and the filters' own copies of a tile; backward a
    chunk. Saved for backward: the inputs and six numbers per row. kept_ids: a few numbers per id,
    and 8 MiB of gathered operands (64 MiB on a GPU).

    Raises:
        ValueError: before any collective; see `vocab_parallel_sampling_logprobs` and
            `linear_token_stats`.
    """
    return sampling_logprobs(
        head_logits(hidden, weight, **shared),
        target,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        kept_ids=kept_ids,
        missing=missing,
        full=full,
        entropy=entropy,
        ignore_index=ignore_index,
    )
