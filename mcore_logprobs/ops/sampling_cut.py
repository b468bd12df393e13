"""Which tokens min-p, top-k and top-p keep, on a sharded vocabulary, without re-sharding it.

A row's tokens stand in order: by logit before the temperature, descending, then by id, ascending.
Each filter keeps a first part of that order, so that a row's kept set is a *cut*: the smallest
logit kept, and among the tokens equal to it the last one kept. Dividing by a temperature keeps the
order, but may make different logits equal. What min_p keeps is known as soon as the largest logit
is: what lies above the *floor*, max x + temperature * log(min_p). Top-k and top-p see what is
below it as -inf.

1. Each rank's few largest logits (its candidates) go round in one all-gather, with its part of the
   softmax's sum and of the target's logit. Every rank then knows each row's list of candidates,
   complete above the *edge*, the largest of the ranks' smallest candidates.
2. A cut above the edge is found from the list, on every rank alike.
3. The other rows (flat ones, and many ties at the edge) are searched for (`sampling_search`).

Masses are sums of exp(z - max z), never normalised, in float64 over the candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_logprobs.collectives import all_gather_stack, all_reduce_sum
from mcore_logprobs.kernels.chunk import ChunkAt, per_row, row_chunks
from mcore_logprobs.kernels.reference import gather_target
from mcore_logprobs.ops.sampling_search import (
    FilterOptions,
    FoundCut,
    HardRows,
    cumulative,
    descending,
    kept_on_rank,
    multiplier_column,
    search_cut,
)
from mcore_logprobs.sources.held import HeldLogits
from mcore_logprobs.sources.source import Source

_TOP_P_CANDIDATES = 128  # per rank, if only top-p is set
_MAX_CANDIDATES = 1024  # as many as a top_k itself may need


def _candidates(top_k: int | None) -> int:
    """How many of a rank's largest logits are gathered.

    All that are equal to the k-th should be among them, and one behind. 16-bit logits near 10 are
    1/16 (bfloat16) or 1/128 apart: a handful of tokens, in proportion to k, are equal to the k-th.
    float32 logits may be such numbers too: Megatron's Float16Module casts its outputs.
    """
    if top_k is None or top_k + 1 > _MAX_CANDIDATES:
        return _TOP_P_CANDIDATES
    return top_k + 1 + max(16, top_k // 4)


def kept_columns(x: Tensor, limit: Tensor, last: Tensor, first: int, opts: FilterOptions) -> Tensor:
    """bool `[c, v]`: what a cut keeps of logits before the temperature.

    Args:
        x: `[c, v]`, columns from `first` on.
        limit, last: `[c, 1]`, as in `Cut`.
    """
    kept = x > limit
    if opts.top_p is not None:
        columns = torch.arange(first, first + x.shape[1], device=x.device)
        kept |= (x == limit) & (columns <= last)
    return kept


class Cut(NamedTuple):
    """The kept set of each row, and the target's place in it. All `[n]`, float32 or float64.

    Attributes:
        logprobs: of the target under the kept set; -inf where it is not in it, NaN in a row with
            NaN or +inf.
        kept: bool, whether the target is in the kept set; of no meaning where logprobs is NaN.
        limit: logits above it are kept. It lies between the smallest logit kept and the largest
            that is not, so that logits which are computed again, and round otherwise, stay where
            they were; where these two are equal it is both.
        last: int64, of logits equal to the limit the last of this rank's columns that is kept; -1
            for none.
        row_max: the row's largest logit, NaN where any is; 0 where every logit is -inf.
        log_sum: log of the sum over the kept set of exp(z - max z); 0 where every logit is -inf.
    """

    logprobs: Tensor
    kept: Tensor
    limit: Tensor
    last: Tensor
    row_max: Tensor
    log_sum: Tensor

    @classmethod
    def join(cls, cuts: list[Cut], dtype: torch.dtype, device: torch.device) -> Cut:
        """Of all tiles' rows; there may be none."""
        dtypes = (dtype, torch.bool, dtype, torch.int64, dtype, dtype)
        none = cls(*(torch.empty(0, dtype=each, device=device) for each in dtypes))
        return cls(*(torch.cat(parts) for parts in zip(none, *cuts, strict=True)))


def find_cut(
    source: Source,
    chunks: list[ChunkAt],
    local_sum: Tensor | None,
    local_target: Tensor,
    valid_mask: Tensor,
    opts: FilterOptions,
) -> Cut:
    """Both filters for every row of a tile's chunks, which have all columns of theirs.

    Collectives: one all-gather of `[2 + candidates, n]`; with top-p an all-reduce of `[n]`; more
    only for rows that need a search. One host sync, which asks whether any row does; a search makes
    another one if the tile has several chunks.

    Args:
        local_sum: `[n]`, this rank's sum of exp(z - max z) about its own maximum; with top-k or
            min-p it is not read, and may be None.
        local_target: `[n]` int64, the target as this rank's column, or -1.
        valid_mask: `[n]` bool, False for rows that do not count.
    """
    shard, logits = opts.shard, HeldLogits(chunks, source.rows_at_a_time, source.acc_dtype)
    candidates = min(_candidates(opts.top_k), shard.width)
    survey = _Survey(logits, local_sum, local_target, candidates, opts)
    cut, hard = survey.cut(source.rows_at_a_time)
    hard = hard & valid_mask & survey.row_max.isfinite()
    index = hard.nonzero().squeeze(-1)  # a host sync
    if index.numel():
        subset = HardRows(logits, index, survey.row_max[index], opts)
        solved = search_cut(subset, survey.total[index])
        for known, exact in zip(cut, solved, strict=True):
            known[index] = exact

    is_local = local_target >= 0
    if opts.top_p is None:
        # Where fewer than k logits are above -inf the value is -inf, which is in no set.
        kept = (survey.target >= cut.value) & (survey.target > -torch.inf)
    else:
        above = (survey.own_target > cut.value) | (
            (survey.own_target == cut.value) & (local_target <= cut.last)
        )
        kept = all_reduce_sum((is_local & above).to(survey.target.dtype), shard.group) > 0
    empty = cut.mass == 0  # every logit is -inf
    log_sum = torch.where(empty, 0.0, cut.mass.log())
    logprobs = (survey.target.double() - survey.row_max) * opts.multiplier - log_sum
    logprobs = torch.where(kept & ~empty, logprobs, -torch.inf)
    return Cut(
        logprobs=logprobs.masked_fill(~survey.row_max.isfinite(), torch.nan).to(logits.dtype),
        kept=kept,
        limit=torch.where(cut.next == cut.value, cut.value, _between(cut)),
        last=torch.where(cut.next == cut.value, cut.last, -1),
        row_max=survey.row_max,
        log_sum=log_sum.to(logits.dtype),
    )


def _between(cut: FoundCut) -> Tensor:
    """Numbers below the value and not below the next one."""
    middle = cut.next + (cut.value - cut.next) / 2
    return torch.where((middle < cut.value) & (middle > cut.next), middle, cut.next)


class _Survey:
    """Step 1: what every rank knows of each row after the one all-gather.

    Attributes:
        row_max: `[n]` largest logit, NaN where any is (top-k takes it for the largest); 0 where all
            are -inf.
        total: `[n]` float64, the whole softmax's mass; NaN with top-k and min-p, which have no use
            for it.
        floor: `[n]`, the smallest logit that min_p keeps.
        target, own_target: `[n]` the target's logit; own_target is 0 on ranks that lack it.
        edge: `[n]`, above which the list is complete; -inf where it is complete altogether.
    """

    def __init__(
        self,
        logits: HeldLogits,
        local_sum: Tensor | None,
        local_target: Tensor,
        c: int,
        opts: FilterOptions,
    ) -> None:
        self._opts, shard = opts, opts.shard
        dtype, device, n = logits.dtype, local_target.device, local_target.shape[0]
        packed = torch.zeros(2 + c, n, dtype=dtype, device=device)
        packed[2:] = -torch.inf
        self._columns = torch.zeros(n, c, dtype=torch.int64, device=device)
        listed = min(c, shard.valid_width)
        if local_sum is not None:
            packed[1] = local_sum

        def see(part: slice, x: Tensor) -> None:
            packed[0, part] = gather_target(x, local_target[part], 0.0).to(dtype)
            largest, self._columns[part, :listed] = descending(x, listed)
            packed[2 : 2 + listed, part] = largest.t().to(dtype)

        if listed:
            logits.show(see, listed)
        everyone = all_gather_stack(packed, shard.group)  # [ranks, 2 + c, n]
        self.own_target, self.target = packed[0], everyone[:, 0].sum(0)
        self._candidates = everyone[:, 2:]
        row_max = everyone[:, 2].amax(0)
        self.row_max = torch.where(row_max.isneginf(), 0.0, row_max)
        self.total = (everyone[:, 1].double() * self._weight(everyone[:, 2])).sum(0)
        if opts.top_k is not None or opts.min_p is not None:
            self.total.fill_(torch.nan)
        self.floor = opts.floor(self.row_max, opts.multiplier)
        # A rank whose whole vocabulary is on the list sets no edge.
        partial = [shard.vocab_size - rank * shard.width > c for rank in range(shard.tp_size)]
        smallest = everyone[:, -1].clone()
        for rank in [rank for rank, is_partial in enumerate(partial) if not is_partial]:
            smallest[rank] = -torch.inf
        self.edge = smallest.amax(0)

    def _weight(self, raw: Tensor, part: slice = slice(None)) -> Tensor:
        """exp(z - max z), float64; raw `[..., n]`, of some rows."""
        multiplier = per_row(self._opts.multiplier, part)
        return ((raw.double() - self.row_max[part]) * multiplier).exp()

    def cut(self, rows_at_a_time: Callable[[int], int]) -> tuple[FoundCut, Tensor]:
        """Step 2: the cuts as the lists tell them, and bool `[n]`, where they do not.

        Args:
            rows_at_a_time: columns -> rows of which float32 copies of so many columns are made.
        """
        ranks, c, n = self._candidates.shape
        # Of each candidate a value and its place as they are sorted, and three float64 numbers.
        parts = list(row_chunks(n, rows_at_a_time(9 * ranks * c))) or [slice(0, 0)]
        found, hard = zip(*map(self._cut_of, parts), strict=True)
        return FoundCut(*map(torch.cat, zip(*found, strict=True))), torch.cat(hard)

    def _cut_of(self, part: slice) -> tuple[FoundCut, Tensor]:
        opts, edge, floor, total = self._opts, self.edge[part], self.floor[part], self.total[part]
        listed = self._candidates[..., part].permute(2, 0, 1).flatten(1)
        listed = listed.sort(-1, descending=True).values
        kept = torch.ones_like(listed, dtype=torch.bool)
        weight = self._weight(listed.t(), part).t()
        if opts.min_p is not None:
            kept = listed >= floor.unsqueeze(-1)
            weight = weight * kept
        before = cumulative(weight) - weight
        needed = listed[:, -1]  # the smallest logit that the list must be complete down to
        if opts.top_k is not None:
            needed = listed[:, min(opts.top_k, listed.shape[1]) - 1]
            kept = kept & (listed >= needed.unsqueeze(-1))
            total = (weight * kept).sum(-1)
        elif opts.min_p is not None:
            total = weight.sum(-1)
        if opts.top_p is not None:
            kept = kept & (before < (opts.top_p * total).unsqueeze(-1))
        count = kept.sum(-1).clamp(min=1)
        place = (count - 1).unsqueeze(-1)
        value = listed.gather(-1, place).squeeze(-1)
        mass = (before + weight).gather(-1, place).squeeze(-1)
        behind = torch.nn.functional.pad(listed, (0, 1), value=-torch.inf).gather(-1, place + 1)
        following = torch.maximum(behind.squeeze(-1), edge)  # no other is above the edge
        last = torch.full_like(count, opts.shard.width)  # no limit
        if opts.top_p is not None:
            tie = self._last_tie(part, listed, value, count)
            last = torch.where(value.isneginf(), last, tie)
        if opts.top_k is None and opts.min_p is None:
            needed = value
        # Where min_p keeps only what is above the edge, the list has all of it.
        hard = (needed <= edge) & ~(edge.isneginf() | (floor > edge))
        return FoundCut(value, following, mass, last), hard

    def _last_tie(self, part: slice, listed: Tensor, value: Tensor, count: Tensor) -> Tensor:
        """This rank's last kept column among those equal to `value`, of `count` kept in all."""
        everyone = self._candidates[..., part]
        ties = (everyone == value).sum(1)  # [ranks, n]
        kept = count - (listed > value.unsqueeze(-1)).sum(-1)
        mine = kept_on_rank(kept, ties, self._opts.shard.rank)
        candidates = everyone[self._opts.shard.rank].t()
        is_tie = candidates == value.unsqueeze(-1)
        columns = torch.where(is_tie, self._columns[part], self._opts.shard.width)
        last = columns.sort(-1).values.gather(-1, (mine - 1).clamp(min=0).unsqueeze(-1))
        return torch.where(mine > 0, last.squeeze(-1), -1)


# ---- the gradient ------------------------------------------------------------------------------


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
        row, at, inside = add_at(dz, self._column[part] - first, g.squeeze(-1))
        # The target is known to be kept, even where a product made again rounds it below the cut.
        kept.index_put_((row, at), kept[row, at] | (inside & ~limit.squeeze(-1).isnan()))
        return torch.where(kept, dz, rest, out=dz).mul_(multiplier)


def add_at(x: Tensor, column: Tensor, added: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a number `[c]` to a column of each row of x `[c, v]`, where the column is in it.

    Returns: (row, column, whether it is in it), `[c]` each; column 0 where it is not.
    """
    inside = (column >= 0) & (column < x.shape[1])
    row, at = torch.arange(column.shape[0], device=x.device), torch.where(inside, column, 0)
    x.index_put_((row, at), x[row, at] + torch.where(inside, added, 0.0))
    return row, at, inside


def _outside_kept(row_max: Tensor, upstream: Tensor) -> Tensor:
    """The gradient of each row's columns outside the kept set, `[n]`: NaN in a row with NaN or
    +inf whose grad_output is not 0, else 0.
    """
    return torch.where(row_max.isfinite() | (upstream == 0), 0.0, torch.nan).to(upstream.dtype)
