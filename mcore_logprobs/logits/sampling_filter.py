"""Which tokens top-k and top-p keep, on a sharded vocabulary, without re-sharding it.

A row's tokens stand in order: by raw logit, descending, then by id, ascending. Both filters keep a
first part of that order, so that a row's kept set is a *cut*: the smallest logit kept, and among
the tokens equal to it the last one kept. Raw logits decide what is larger and what is equal: they
are exact on every rank, and dividing by a temperature keeps their order.

1. Each rank's few largest logits (its candidates) go round in one all-gather, with its part of the
   softmax's sum and of the target's logit. Every rank then knows each row's list of candidates,
   complete above the *edge*, the largest of the ranks' smallest candidates.
2. A cut above the edge is found from the list, on every rank alike.
3. The other rows (flat ones, and many ties at the edge) are searched for by `sampling_search`.

Masses are sums of exp(z - max z), never normalised, in float64 over the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_logprobs.collectives import all_gather_stack, all_reduce_sum
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels.reference import gather_target
from mcore_logprobs.kernels.stats import accumulator_dtype
from mcore_logprobs.logits.rows import Rows
from mcore_logprobs.logits.sampling_search import HardRows, kept_on_rank, search_cut

__all__ = ["Cut", "FilterOptions", "find_cut"]

# Candidates a rank for top-p alone, and the largest top_k served by candidates.
_TOP_P_CANDIDATES = 128
_MAX_CANDIDATES = 1024


@dataclass(frozen=True)
class FilterOptions:
    """What to keep.

    Attributes:
        multiplier: z / raw logit, above 0.
        top_k: 1 to vocab_size - 1, or None for off.
        top_p: in (0, 1), or None for off.
    """

    shard: VocabShard
    multiplier: float
    top_k: int | None
    top_p: float | None
    chunk_size: int


@dataclass(frozen=True)
class Cut:
    """The kept set of each row, and the target's place in it. All `[n]`, float32 or float64.

    Attributes:
        logprobs: of the target under the kept set; -inf where it is not in it.
        value: the smallest raw logit kept.
        last: int64, the last of this rank's columns with that logit that is kept; -1 for none.
        top: the row's largest raw logit; 0 where every logit is -inf.
        log_sum: log of the sum over the kept set of exp(z - max z).
    """

    logprobs: Tensor
    value: Tensor
    last: Tensor
    top: Tensor
    log_sum: Tensor


def find_cut(logits: Tensor, column: Tensor, keep: Tensor, opts: FilterOptions) -> Cut:
    """Both filters for every row.

    Collectives: one all-gather of `[2 + candidates, n]`; with top-p an all-reduce of `[n]`; more
    only for rows that need a search. One host sync: whether any row does.

    Args:
        logits: `[..., V/TP]`.
        column: `[n]` int64, the target as this rank's column, or -1.
        keep: `[n]` bool, False for rows that do not count.
    """
    rows, shard = Rows(logits), opts.shard
    wanted = _TOP_P_CANDIDATES if opts.top_k is None else opts.top_k + 1
    if wanted > _MAX_CANDIDATES:
        wanted = _TOP_P_CANDIDATES
    survey = _Survey(rows, logits, column, min(wanted, shard.width), opts)
    found = survey.cut()
    hard = found.hard & keep & survey.top.isfinite()
    index = hard.nonzero().squeeze(-1)  # a host sync
    if index.numel():
        subset = HardRows(rows, logits, index, survey.top[index], shard, opts)
        solved = search_cut(subset, survey.total[index])
        found.value[index], found.mass[index], found.last[index] = solved

    own = column >= 0
    if opts.top_p is None:
        kept = survey.target >= found.value
    else:
        above = (survey.own_target > found.value) | (
            (survey.own_target == found.value) & (column <= found.last)
        )
        kept = all_reduce_sum((own & above).to(survey.target.dtype), shard.group) > 0
    log_sum = found.mass.log()
    logprobs = (survey.target.double() - survey.top) * opts.multiplier - log_sum
    dtype = accumulator_dtype(logits.dtype)
    return Cut(
        logprobs=torch.where(kept & (found.mass > 0), logprobs, -torch.inf).to(dtype),
        value=found.value,
        last=found.last,
        top=survey.top,
        log_sum=log_sum.to(dtype),
    )


@dataclass(frozen=True)
class _Found:
    value: Tensor  # [n]
    mass: Tensor  # [n] float64, of the kept set
    last: Tensor  # [n] int64
    hard: Tensor  # [n] bool: the list does not tell


class _Survey:
    """Step 1: what every rank knows of each row after the one all-gather.

    Attributes:
        top: `[n]` largest raw logit, 0 where all are -inf.
        total: `[n]` float64, the whole softmax's mass; NaN with top-k, which has no use for it.
        target, own_target: `[n]` the target's raw logit; own_target is 0 on ranks that lack it.
        listed: `[n, ranks*c]` the candidates, descending.
        edge: `[n]`, above which the list is complete; -inf where it is complete altogether.
    """

    def __init__(
        self, rows: Rows, logits: Tensor, column: Tensor, c: int, opts: FilterOptions
    ) -> None:
        self._opts, shard = opts, opts.shard
        dtype = accumulator_dtype(logits.dtype)
        packed = torch.zeros(2 + c, rows.count, dtype=dtype, device=logits.device)
        packed[2:] = -torch.inf
        self._columns = torch.zeros(rows.count, c, dtype=torch.int64, device=logits.device)
        found = min(c, shard.valid_width)
        for part, block in rows.chunks(opts.chunk_size, logits) if found else ():
            x = block[:, : shard.valid_width]
            best = x.topk(found, dim=-1)
            packed[0, part] = gather_target(x, column[part], 0.0).to(dtype)
            packed[2 : 2 + found, part] = best.values.t().to(dtype)
            self._columns[part, :found] = best.indices
            if opts.top_k is None:
                packed[1, part] = _mass(x, best.values[:, :1], opts.multiplier)
        everyone = all_gather_stack(packed, shard.group)  # [ranks, 2 + c, n]
        self.own_target, self.target = packed[0], everyone[:, 0].sum(0)
        self._candidates = everyone[:, 2:]
        self.listed = self._candidates.permute(2, 0, 1).flatten(1).sort(-1, descending=True).values
        top = self.listed[:, 0]
        self.top = torch.where(top.isneginf(), 0.0, top)
        self.total = (everyone[:, 1].double() * self._weight(everyone[:, 2])).sum(0)
        if opts.top_k is not None:
            self.total.fill_(torch.nan)
        # A rank whose whole vocabulary is on the list sets no edge.
        partial = [shard.vocab_size - rank * shard.width > c for rank in range(shard.tp_size)]
        smallest = everyone[:, -1].clone()
        for rank in [rank for rank, is_partial in enumerate(partial) if not is_partial]:
            smallest[rank] = -torch.inf
        self.edge = smallest.amax(0)

    def _weight(self, raw: Tensor) -> Tensor:
        """exp(z - max z), float64; raw `[..., n]`."""
        return ((raw.double() - self.top) * self._opts.multiplier).exp()

    def cut(self) -> _Found:
        """Step 2: the cut as the list tells it; `hard` where it does not."""
        opts, listed = self._opts, self.listed
        n, length = listed.shape
        weight = self._weight(listed.t()).t()
        before = weight.cumsum(-1) - weight
        kept = torch.ones_like(listed, dtype=torch.bool)
        hard = torch.zeros(n, dtype=torch.bool, device=listed.device)
        total = self.total
        if opts.top_k is not None:
            if opts.top_k > length:
                hard = ~hard
            else:
                kth = listed[:, opts.top_k - 1]
                hard = (kth <= self.edge) & ~self.edge.isneginf()
                kept = listed >= kth.unsqueeze(-1)
            total = (weight * kept).sum(-1)
        if opts.top_p is not None:
            kept = kept & (before < (opts.top_p * total).unsqueeze(-1))
        count = kept.sum(-1, keepdim=True).clamp(min=1)
        value = listed.gather(-1, count - 1).squeeze(-1)
        hard = hard | ((value <= self.edge) & ~self.edge.isneginf())
        mass = (before + weight).gather(-1, count - 1).squeeze(-1)
        whole = torch.full_like(count.squeeze(-1), opts.shard.width)
        last = whole
        if opts.top_p is not None:
            last = torch.where(value.isneginf(), whole, self._last_tie(value, count.squeeze(-1)))
        return _Found(value=value, mass=mass, last=last, hard=hard)

    def _last_tie(self, value: Tensor, count: Tensor) -> Tensor:
        """This rank's last kept column among those equal to `value`, of `count` kept in all."""
        ties = (self._candidates == value).sum(1)  # [ranks, n]
        kept = count - (self.listed > value.unsqueeze(-1)).sum(-1)
        mine = kept_on_rank(kept, ties, self._opts.shard.rank)
        own = self._candidates[self._opts.shard.rank].t()
        columns = torch.where(own == value.unsqueeze(-1), self._columns, self._opts.shard.width)
        last = columns.sort(-1).values.gather(-1, (mine - 1).clamp(min=0).unsqueeze(-1))
        return torch.where(mine > 0, last.squeeze(-1), -1)


def _mass(x: Tensor, top: Tensor, multiplier: float) -> Tensor:
    """sum exp(z - max z) of raw logits `[c, v]` with maximum `[c, 1]`; 0 for a row of -inf."""
    dtype = accumulator_dtype(x.dtype)
    top = top.to(dtype)
    shifted = x.to(dtype) - torch.where(top.isneginf(), 0.0, top)
    return shifted.mul_(multiplier).exp_().sum(-1)
