"""Sample a token for each row of a sharded vocabulary, from noise that any rank can compute.

By the Gumbel-max trick: with independent standard Gumbel noise G the column of the largest z + G
is distributed as softmax(z). The noise of a column depends only on (seed, row, global id),
by a counter-based generator, so that each rank makes the noise of its own columns, and the ranks
compare one score per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from mcore_logprobs.checks import check_mask, check_seed, not_traced
from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.kernels.chunk import ChunkAt, per_row, times_multiplier
from mcore_logprobs.kernels.stats import StatsSpec
from mcore_logprobs.ops.driver import Forward, Operation, Results, Saved, Tensors, apply
from mcore_logprobs.ops.keywords import HeadKeywords, LogitsKeywords, shared_keywords
from mcore_logprobs.ops.row_statistics import RowStatistics
from mcore_logprobs.ops.sampling import CutForward, Filters
from mcore_logprobs.ops.sampling_cut import Cut, kept_columns
from mcore_logprobs.ops.sampling_search import FilterOptions
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.head import head_logits
from mcore_logprobs.sources.source import Source, Tile

# SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014), as the
# signed integers of torch, which wrap.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_COPIES = 8  # of a float32 chunk: float64 scores, int64 bits, and one of either on the way


def _mixed(bits: Tensor) -> Tensor:
    """SplitMix64's output function, int64 in place."""
    for distance, factor in _MIX:
        bits.bitwise_xor_(_shifted(bits, distance)).mul_(factor)
    return bits.bitwise_xor_(_shifted(bits, 31))


def _shifted(bits: Tensor, distance: int) -> Tensor:
    """Shifted right, without its sign."""
    return (bits >> distance).bitwise_and_((1 << (64 - distance)) - 1)


# torch's inductor (2.13) multiplies what an arange gives in C++'s signed numbers, whose overflow is
# undefined: a loop without an end.
@not_traced
def streams(seed: Tensor, row: Tensor) -> Tensor:
    """The generator's state of each row, int64; seed broadcasts to row."""
    return _mixed(_mixed(seed + _GAMMA) + (row + 1) * _GAMMA)


@not_traced
def gumbel_noise(stream: Tensor, first: int, width: int) -> Tensor:
    """Standard Gumbel noise of `width` ids from `first` on, `[c, width]` float64; stream `[c]`."""
    counter = torch.arange(first + 1, first + width + 1, device=stream.device)
    bits = _mixed(stream.unsqueeze(-1) + counter * _GAMMA)
    # 52 bits and a half: exact in float64, and neither 0 nor 1.
    uniform = _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


@dataclass(frozen=True)
class Sample(Operation[Source]):
    """(ids, logprobs), each `[n]`; 0 in rows that the valid mask leaves out.

    Tensors: the valid mask `[n]`; each row's stream, int64; whether it takes its largest logit.
    """

    filters: Filters
    noisy: bool = True  # False: every row takes its largest logit
    differentiable = (False, False)

    def forward(self, source: Source, tensors: Tensors) -> Forward:
        if self.filters.off:
            return _SampleForward(source, tensors, self.noisy)
        return _FilteredForward(self.filters, source, tensors)


class _SampleForward(Forward):
    def __init__(self, source: Source, tensors: Tensors, noisy: bool) -> None:
        self._multiplier = source.processing.multiplier
        self._stats, self._best = RowStatistics(source, StatsSpec()), _Best(source, tensors, noisy)

    def see(self, placed: ChunkAt) -> None:
        self._stats.see(placed)
        self._best.see(placed)

    def results(self) -> tuple[Results, Saved]:
        row_max, log_sum, *_ = self._stats.reduce()[0].softmax
        return self._best.of_all_ranks(row_max, log_sum, self._multiplier), ()


class _FilteredForward(CutForward):
    def __init__(self, filters: Filters, source: Source, tensors: Tensors) -> None:
        stats = RowStatistics(source, StatsSpec()) if filters.need_sum else None
        super().__init__(source, filters, stats)
        self._best, self._valid_mask = _Best(source, tensors), tensors[0]

    def end_tile(self, tile: Tile, rows: slice) -> None:
        valid_mask = self._valid_mask[rows]
        no_target = torch.full_like(valid_mask, -1, dtype=torch.int64)
        chunks, cut, opts = self.cut_tile(rows, no_target, valid_mask)
        for placed in chunks:
            self._best.see(placed, _TileCut(rows.start, cut, opts))

    def results(self) -> tuple[Results, Saved]:
        cut, source = self.cut, self._source
        opts = self._filters.options(source.shard, source.processing.temperature)
        return self._best.of_all_ranks(cut.row_max, cut.log_sum, opts.multiplier), ()


@dataclass(frozen=True)
class _TileCut:
    """What the filters keep of the rows from `start` on."""

    start: int
    cut: Cut
    opts: FilterOptions

    def tempered(self, x: Tensor, rows: slice, first: int) -> Tensor:
        """Logits over the temperature, -inf where a filter drops them; x before it."""
        of_cut = slice(rows.start - self.start, rows.stop - self.start)
        score = _tempered(x, per_row(self.opts.multiplier, of_cut))
        limit, last = self.cut.limit[of_cut].unsqueeze(-1), self.cut.last[of_cut].unsqueeze(-1)
        return score.masked_fill_(~kept_columns(x, limit, last, first, self.opts), -torch.inf)


def _tempered(x: Tensor, multiplier: float | Tensor) -> Tensor:
    """Logits over the temperature in float64, as large ones would be rounded by more than the noise
    can bear.
    """
    wide = x.to(torch.float64, copy=True)
    return times_multiplier(wide, multiplier, in_place=True)


class _Best:
    """The largest score of each row on this rank, its global id and its logit.

    Args:
        tensors: `Sample`'s.
    """

    def __init__(self, source: Source, tensors: Tensors, noisy: bool = True) -> None:
        self._source, self._noisy = source, noisy
        self._valid_mask, self._stream, self._greedy = tensors
        # Score, id and logit, float64: ids are exact in it. All -inf: the first id of all.
        self._found = self._stream.new_zeros(3, source.num_rows, dtype=torch.float64)
        self._found[0] = self._found[2] = -torch.inf

    def see(self, placed: ChunkAt, kept: _TileCut | None = None) -> None:
        chunk, shard = placed.chunk, self._source.shard
        if chunk.valid == 0:
            return
        first = shard.start + placed.columns.start
        step = self._source.rows_at_a_time(chunk.valid, _COPIES)
        for rows, _, step_chunk in placed.steps(step):
            noise = None
            if self._noisy:
                noise = gumbel_noise(self._stream[rows], first, chunk.valid)
                noise.masked_fill_(self._greedy[rows].unsqueeze(-1), 0.0)
            if kept is None:
                x = step_chunk.unscaled()
                score = _tempered(x, step_chunk.processing.multiplier)
            else:
                x = step_chunk.untempered.processed().to(self._source.acc_dtype)
                score = kept.tempered(x, rows, placed.columns.start)
            if noise is not None:
                score += noise
            # A row with NaN or +inf has no distribution: the first of them, whose logprob is NaN.
            score.masked_fill_(~(x < torch.inf), torch.inf)
            largest, column = score.max(-1)
            logit = x.gather(-1, column.unsqueeze(-1)).squeeze(-1)
            new = torch.stack([largest, (first + column).double(), logit.double()])
            before = self._found[:, rows]
            before.copy_(torch.where(largest > before[0], new, before))

    def of_all_ranks(
        self, row_max: Tensor, log_sum: Tensor, multiplier: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """(global id of each row's largest score, its log-probability). One all-gather."""
        everyone = all_gather_stack(self._found, self._source.shard.group)  # [ranks, 3, n]
        winner = everyone[:, 0].argmax(0, keepdim=True)
        ids, x = everyone[:, 1].gather(0, winner)[0].long(), everyone[:, 2].gather(0, winner)[0]
        logprobs = (x - row_max) * multiplier - log_sum
        certain = self._greedy & logprobs.isfinite()
        logprobs = torch.where(certain, 0.0, logprobs).to(self._source.acc_dtype)
        valid_mask = self._valid_mask
        return torch.where(valid_mask, ids, 0), torch.where(valid_mask, logprobs, 0.0)


def sample(
    source: Source,
    *,
    seed: int | Tensor,
    greedy: Tensor | bool = False,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    mask: Tensor | None = None,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`vocab_parallel_sample` of any source.

    Args:
        greedy: where the temperature is 0, a bool tensor that broadcasts to the tokens' shape;
            True: everywhere, so that neither noise nor filters can change an id.
        places: `[*lead]` int64, each token's row, on which its noise depends; None: its flat index.
    """
    lead, device = source.batch_shape, source.device
    mask = check_mask(mask, lead, device)
    filters = Filters.of(top_k, top_p, min_p, source.shard)
    if greedy is True:
        filters = Filters.of(None, 1.0, 0.0, source.shard)
    if places is None:
        places = torch.arange(lead.numel(), device=device).view(lead)
    stream = streams(check_seed(seed, lead, device), places)
    taken = torch.zeros(lead, dtype=torch.bool, device=device) | greedy
    source = source.compacted(mask)
    if mask is None:
        mask = torch.ones(lead, dtype=torch.bool, device=device)
    if not filters.off:
        source = source.in_whole_rows()
    with torch.no_grad():
        operation = Sample(filters, noisy=greedy is not True)
        ids, logprobs = apply(operation, source, mask, stream, taken)
    return ids, logprobs


def without_zeros(
    temperature: float | Tensor, device: torch.device
) -> tuple[float | Tensor, Tensor | bool]:
    """A temperature whose zeros are ones, and where they were; True everywhere, False nowhere."""
    if isinstance(temperature, Tensor):
        zero = temperature == 0
        return torch.where(zero, torch.ones_like(temperature), temperature), zero.to(device)
    if not isinstance(temperature, bool) and temperature == 0:
        return 1.0, True
    return temperature, False


@shared_keywords(LogitsKeywords, given_logits)
def vocab_parallel_sample(
    vocab_parallel_logits: Tensor,
    *,
    seed: int | Tensor,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    mask: Tensor | None = None,
    **shared: Unpack[LogitsKeywords],
) -> tuple[Tensor, Tensor]:
    """Sample a token for each row; return it with its log-probability under that distribution.

    From softmax(z) with temperature, min_p, top_k and top_p as in
    `vocab_parallel_sampling_logprobs`, by the Gumbel-max trick. The noise depends only on (seed,
    row, global id), where row is the flat index in the results: the same logits give the same
    ids at every tensor-parallel size and every chunk_size.

    Shape:
        vocab_parallel_logits `[..., V/TP]`, or a DTensor sharded on its last dimension -> (ids
        int64 `[...]`, global; logprobs float32 `[...]`, float64 for float64 logits), the same on
        every TP rank. Neither has a gradient; `vocab_parallel_sampling_logprobs` of the ids has.

    Args:
        seed: an int of 64 bits, or a tensor of them that broadcasts to `[...]`, such as one seed
            per request. Pass the same on the ranks of one tensor-parallel group, and another one
            wherever the rows are other tokens: on data- and context-parallel ranks, and in every
            call of a decoding loop.
        top_k, top_p, min_p: as in `vocab_parallel_sampling_logprobs`.
        mask: bool `[...]`; False rows give id 0 and logprob 0, whatever their logits hold.
        {shared}

    temperature may be 0 here, also per token: then the id is that of the largest logit, the
    smallest id where several tie, and its logprob 0. As a number, 0 costs neither noise nor
    filters.

    A row with NaN or +inf gives the first such id and a logprob of NaN. A row that is -inf
    everywhere gives id 0 and -inf. Noise and scores are float64. Every backend uses torch here.

    Collectives: over TP one all-gather of `[3, n]` float32 and one of `[3, n]` float64. With
    filters, those of `vocab_parallel_sampling_logprobs` replace the first, with its host syncs.

    Memory: a chunk of logits in float64, twice.

    Raises:
        ValueError: before any collective; see `vocab_parallel_sampling_logprobs`.
    """
    temperature, greedy = _split(shared, vocab_parallel_logits)
    source = given_logits(vocab_parallel_logits, **shared | {"temperature": temperature})
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    return sample(source, seed=seed, greedy=greedy, mask=mask, **filters)  # type: ignore[arg-type]


@shared_keywords(HeadKeywords, head_logits)
def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    seed: int | Tensor,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    mask: Tensor | None = None,
    **shared: Unpack[HeadKeywords],
) -> tuple[Tensor, Tensor]:
    """`vocab_parallel_sample` from hidden states, without materializing the logits.

    With rows, entry i of the results has the noise of place i, not of rows[i].

    Shape:
        hidden, weight: as in `linear_token_stats`.
        Returns (ids int64 `[s, b]` or `[n]`, global; logprobs float32, float64 for float64
        operands), the same on every TP rank; `[m]` with rows. Neither has a gradient.

    Args:
        seed, top_k, top_p, min_p: as in `vocab_parallel_sample`.
        mask: bool `[s, b]` or `[n]`, the whole sequence (`[m]` with rows); False rows give id 0 and
            logprob 0.
        {shared}

    temperature may be 0 here. GEMMs may round differently at another tensor-parallel size. That
    changes an id only if two scores are as close as the rounding.

    Cost: one GEMM, and the noise of every logit.

    Collectives: those of `vocab_parallel_sample`, with filters per tile; under sequence parallelism
    each tile of hidden is gathered.

    Memory: a chunk of logits, and in float64 some rows of it; with filters a tile.

    Raises:
        ValueError: before any collective; compact without a mask; see `vocab_parallel_sample` and
            `linear_token_stats`.
    """
    temperature, greedy = _split(shared, hidden)
    source = head_logits(hidden, weight, **shared | {"temperature": temperature})
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    return sample(source, seed=seed, greedy=greedy, mask=mask, **filters)  # type: ignore[arg-type]


def _split(shared: Any, like: object) -> tuple[float | Tensor, Tensor | bool]:
    device = like.device if isinstance(like, Tensor) else torch.device("cpu")
    return without_zeros(shared.get("temperature", 1.0), device)
