"""The cut of the filters in rows whose candidates do not show it (`sampling_cut`).

The search is over the values that a logit can have. Floating-point numbers, read as integers the
right way, keep their order. On these keys the search narrows an interval (lo, hi] eightfold a round
until it holds one value: at most 15 rounds for float32, fewer for 16-bit logits; on a GPU, where to
ask costs a host sync, as many as suffice in any case. A round is one pass over
the rows and one all-reduce of `[7, rows]`, whatever the vocabulary. The first rounds cut the
interval into equal parts by value, after which each rank's largest logits within it mostly hold the
cut, and are read once. Let A(t) be the mass (or number) of tokens above t. The cut is the
smallest t with

    A(t) < top_p * total      (top-p)            A(t) < k      (top-k, A counts)

and is a logit of the row, since A changes only there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_logprobs.collectives import all_gather_stack, all_reduce_sum
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels.largest import largest_columns
from mcore_logprobs.kernels.scan import running_sum
from mcore_logprobs.sources.held import HeldLogits, Look

_WAYS = 8
_BY_VALUE = 4  # rounds before the look at the logits within
_WITHIN = 128  # logits of each rank that are read
_LAST = 3  # rounds for the last few values


@dataclass(frozen=True)
class FilterOptions:
    """The settings of min-p, top-k and top-p, checked.

    Attributes:
        multiplier: one over the temperature: a number, or float64 `[n]`, one per row.
        top_k: 1 to vocab_size - 1, or None for off.
        top_p: in (0, 1), or None for off.
        min_p: in (0, 1], or None for off.
    """

    shard: VocabShard
    multiplier: float | Tensor
    top_k: int | None
    top_p: float | None
    min_p: float | None = None

    def floor(self, row_max: Tensor, multiplier: float | Tensor) -> Tensor:
        """The smallest logit before the temperature that min_p keeps, `[n]`; -inf where off.

        Args:
            multiplier: the multiplier of these rows.
        """
        if self.min_p is None:
            return torch.full_like(row_max, -torch.inf)
        return (row_max.double() + math.log(self.min_p) / multiplier).to(row_max.dtype)


def multiplier_column(
    multiplier: float | Tensor, part: slice, dtype: torch.dtype
) -> float | Tensor:
    """The multiplier of some rows, to multiply `[c, v]` by: the number, or `[c, 1]`."""
    if not isinstance(multiplier, Tensor):
        return multiplier
    return multiplier[part].unsqueeze(-1).to(dtype)


def descending(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their columns, `[c, k]`, the largest first."""
    columns = largest_columns(x, k)
    values, order = x.gather(-1, columns).sort(-1, descending=True)
    return values, columns.gather(-1, order)


class HardRows:
    """Some rows of the logits, read a few at a time in float32 (or float64) copies.

    Args:
        index: `[r]` int64, ascending.
        row_max: `[r]` largest logit, finite.
    """

    def __init__(
        self, logits: HeldLogits, index: Tensor, row_max: Tensor, opts: FilterOptions
    ) -> None:
        self.row_max, self.shard, self.opts = row_max, opts.shard, opts
        self.dtype, self.raw_dtype = logits.dtype, logits.raw_dtype
        self.multiplier = opts.multiplier
        if isinstance(self.multiplier, Tensor):
            self.multiplier = self.multiplier[index]
        self.floor = opts.floor(row_max, self.multiplier)
        self._logits, self._rows = logits, logits.rows_by_chunk(index)

    def _look(self, look: Look, *, below_floor: bool = False) -> Tensor:
        """What `look` gives of the rows, joined along them.

        Args:
            below_floor: show it logits below the floor too; they are -inf otherwise.
        """

        def of_part(part: slice, x: Tensor) -> Tensor:
            if self.opts.min_p is not None and not below_floor:
                x.masked_fill_(x < self.floor[part].unsqueeze(-1), -torch.inf)
            return look(part, x)

        return self._logits.look_at(self._rows, of_part)

    def total(self) -> Tensor:
        """The mass of what min_p keeps, `[r]` float64. One all-reduce."""
        lowest = torch.full_like(self.row_max, -torch.inf).unsqueeze(0)
        return self.above(lowest, count=False)[0]

    def above(self, pivots: Tensor, *, count: bool) -> Tensor:
        """Mass, or number, of tokens above each pivot: `[w, r]` -> `[w, r]` float64.

        One all-reduce.
        """

        def look(part: slice, x: Tensor) -> Tensor:
            weight = None if count else self._weight(x, part)
            buffer = torch.empty_like(x)
            totals = pivots.new_empty(pivots[:, part].shape, dtype=torch.float64)
            for pivot, total in zip(pivots[:, part], totals, strict=True):
                torch.gt(x, pivot.unsqueeze(-1), out=buffer)
                if weight is not None:
                    buffer.mul_(weight)
                total.copy_(buffer.sum(-1))
            return totals

        return all_reduce_sum(self._look(look), self.shard.group)

    def around(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """(mass above `value`, `[r]` float64; tokens equal to it on each rank, `[ranks, r]` int64).

        One all-gather.
        """

        def look(part: slice, x: Tensor) -> Tensor:
            limit = value[part].unsqueeze(-1)
            ties = (x == limit).sum(-1).double()
            mass = self._weight(x, part).mul_(x > limit).sum(-1).double()
            return torch.stack([mass, ties])

        everyone = all_gather_stack(self._look(look), self.shard.group)
        return everyone[:, 0].sum(0), everyone[:, 1].long()

    def largest_up_to(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logits of each row that are at most `value`, descending, `[r, m]`; and
        `[r]` the edge above which none is missing. One all-gather.
        """
        c = min(_WITHIN, self.shard.width)

        def look(part: slice, x: Tensor) -> Tensor:
            x.masked_fill_(x > value[part].unsqueeze(-1), -torch.inf)
            largest, _ = descending(x, min(c, x.shape[-1]))
            missing = c - largest.shape[-1]
            return torch.nn.functional.pad(largest, (0, missing), value=-torch.inf).t()

        everyone = all_gather_stack(self._look(look), self.shard.group)  # [ranks, c, r]
        listed = everyone.permute(2, 0, 1).flatten(1).sort(-1, descending=True).values
        return listed, everyone[:, -1].amax(0)

    def largest_below(self, value: Tensor) -> Tensor:
        """The largest logit under `value`, `[r]`. One all-gather."""

        def look(part: slice, x: Tensor) -> Tensor:
            x.masked_fill_(x >= value[part].unsqueeze(-1), -torch.inf)
            return x.amax(-1) if x.shape[-1] else torch.full_like(value[part], -torch.inf)

        largest = self._look(look, below_floor=True)
        return all_gather_stack(largest, self.shard.group).amax(0)

    def nth_tie(self, value: Tensor, nth: Tensor) -> Tensor:
        """This rank's column of the `nth` token (from 1) equal to `value`; -1 where nth is 0."""

        def look(part: slice, x: Tensor) -> Tensor:
            seen = (x == value[part].unsqueeze(-1)).cumsum(-1, dtype=torch.int32)
            return (seen < nth[part].unsqueeze(-1)).sum(-1)

        return torch.where(nth > 0, self._look(look), -1)

    def weight_of(self, raw: Tensor) -> Tensor:
        """exp(z - max z), `[r]` float64."""
        return ((raw.double() - self.row_max) * self.multiplier).exp()

    def _weight(self, x: Tensor, part: slice) -> Tensor:
        multiplier = multiplier_column(self.multiplier, part, x.dtype)
        return (x - self.row_max[part].unsqueeze(-1)).mul_(multiplier).exp_()


class FoundCut(NamedTuple):
    """Where rows are cut, `[n]` each.

    Attributes:
        value: the smallest logit kept.
        next: at least the largest logit that is not kept; the value itself where only some of those
            equal to it are.
        mass: float64, of the kept set.
        last: int64, the last of this rank's columns equal to the value that is kept; -1 for none.
    """

    value: Tensor
    next: Tensor
    mass: Tensor
    last: Tensor


def search_cut(rows: HardRows, total: Tensor) -> FoundCut:
    """Search for the cuts of all rows.

    Args:
        total: `[r]` float64, the whole softmax's mass; not read with top-k or min-p.

    min_p's own cut is not searched for: it lies at the floor. The other filters see the logits
    below it as -inf.
    """
    opts = rows.opts

    def with_ties(value: Tensor, mass: Tensor) -> FoundCut:
        every = torch.full(mass.shape, rows.shard.width, device=mass.device)
        return FoundCut(value, rows.largest_below(value), mass, every)

    if opts.min_p is not None and opts.top_k is None:
        total = rows.total()
        if opts.top_p is None:
            return with_ties(rows.floor, total)
    keys = _Keys(rows.raw_dtype, rows.dtype)
    high = keys.of(rows.row_max)
    low = keys.of(torch.full_like(rows.row_max, -torch.inf)) - 1
    if opts.top_k is not None:
        limit = torch.full_like(total, float(opts.top_k))
        kth = _Search(rows, keys, limit, count=True).value(low, high)
        kth = torch.maximum(kth, rows.floor)
        mass, ties = rows.around(kth)
        total = mass + ties.sum(0).double() * rows.weight_of(kth)
        if opts.top_p is None:
            return with_ties(kth, total)
        low = keys.of(kth) - 1
    else:
        # V tokens below this logit have less mass than top_p leaves out: the cut is not there.
        assert opts.top_p is not None
        least = 0.99 * (1.0 - opts.top_p) * total / rows.shard.padded_size
        lowest = (rows.row_max + least.log() / rows.multiplier).to(rows.dtype)
        low = torch.maximum(low, keys.of(lowest) - 1)
    limit = opts.top_p * total
    value = _Search(rows, keys, limit, count=False).value(low, high)
    mass, ties = rows.around(value)
    weight = rows.weight_of(value)
    # Of the equal ones the first j stay, as long as mass + j * weight < limit for the next.
    kept = ((limit - mass) / weight).ceil().nan_to_num(nan=1.0).clamp(min=1.0)
    kept = torch.minimum(kept, ties.sum(0).double()).long()
    mine = kept_on_rank(kept, ties, rows.shard.rank)
    following = torch.where(kept < ties.sum(0), value, rows.largest_below(value))
    mass = mass + kept.double() * weight
    return FoundCut(value, following, mass, rows.nth_tie(value, mine))


def kept_on_rank(kept: Tensor, ties: Tensor, rank: int) -> Tensor:
    """How many of a rank's ties are among the first `kept` of all. `[n]`, `[ranks, n]` -> `[n]`."""
    return torch.minimum((kept - ties[:rank].sum(0)).clamp(min=0), ties[rank])


class _Interval(NamedTuple):
    """Where the cut of each row lies: in (low, high], `[r]` each.

    Attributes:
        low, high: int64 keys; A(low) is at least the limit, A(high) under it.
        above_high: A(high), float64.
    """

    low: Tensor
    high: Tensor
    above_high: Tensor

    @property
    def is_one_value(self) -> bool:
        """Only on a CPU: elsewhere that is a host sync per round, and the rounds suffice."""
        return self.low.is_cpu and bool((self.high - self.low == 1).all())


@dataclass(frozen=True)
class _Search:
    """For the smallest value of each row whose A is under the limit `[r]`."""

    rows: HardRows
    keys: _Keys
    limit: Tensor
    count: bool

    def value(self, low: Tensor, high: Tensor) -> Tensor:
        """`[r]`, of the keys between which it lies."""
        steps = [self.cut_by_value] * _BY_VALUE
        steps += [self.look_within]
        steps += [self.cut_by_key] * (-(-self.keys.bits // 3) + _LAST)
        interval = _Interval(low, high, torch.zeros_like(self.limit))
        for step in steps:
            if interval.is_one_value:
                break
            interval = step(interval)
        return self.keys.value(interval.high)

    def cut_by_key(self, interval: _Interval) -> _Interval:
        """The eighth of the interval that has the cut; as many keys in each."""
        return self._cut_at(interval, self._pivots(interval))

    def cut_by_value(self, interval: _Interval) -> _Interval:
        """Likewise, with eighths of the same width."""
        keys, pivots = self.keys, self._pivots(interval)
        bottom, span = keys.value(interval.low), keys.value(interval.high)
        span = span - bottom
        by_value = keys.of(bottom + span * (self._ways / _WAYS).to(span.dtype))
        return self._cut_at(interval, torch.where(span.isfinite(), by_value, pivots))

    @property
    def _ways(self) -> Tensor:
        return torch.arange(1, _WAYS, device=self.limit.device).unsqueeze(-1)

    def _pivots(self, interval: _Interval) -> Tensor:
        """Keys `[7, r]` at equal distances."""
        low, high, _ = interval
        # high - low may overflow; the pivots cannot, and int64 wraps.
        return low + self._ways * ((high >> 3) - (low >> 3)).clamp(min=1)

    def _cut_at(self, interval: _Interval, pivots: Tensor) -> _Interval:
        low, high, above_high = interval
        # Between the bounds, and in order even where two of them are the same.
        pivots = torch.minimum(pivots, high - 1).clamp(min=low + 1)
        totals = self.rows.above(self.keys.value(pivots), count=self.count)
        # A falls, so that the pivots under the limit are the last ones.
        first = (totals >= self.limit).sum(0, keepdim=True)
        bounds = torch.cat([low.unsqueeze(0), pivots, high.unsqueeze(0)])
        totals = torch.cat([totals, above_high.unsqueeze(0)])
        low = bounds.gather(0, first).squeeze(0)
        high = torch.maximum(bounds.gather(0, first + 1).squeeze(0), low + 1)
        return _Interval(low, high, totals.gather(0, first).squeeze(0))

    def look_within(self, interval: _Interval) -> _Interval:
        """One value where each rank's largest logits up to `high` show the cut; else as it is."""
        listed, edge = self.rows.largest_up_to(self.keys.value(interval.high))
        weight = torch.ones_like(listed, dtype=torch.float64)
        if not self.count:
            weight = self.rows.weight_of(listed.t()).t()
        before = interval.above_high.unsqueeze(-1) + cumulative(weight) - weight
        kept = (before < self.limit.unsqueeze(-1)).sum(-1, keepdim=True).clamp(min=1)
        cut = listed.gather(-1, kept - 1).squeeze(-1)
        shown = (cut > edge) & cut.isfinite()
        high = torch.where(shown, self.keys.of(cut), interval.high)
        low = torch.where(shown, high - 1, interval.low)
        return _Interval(low, high, interval.above_high)


def cumulative(weight: Tensor) -> Tensor:
    """`cumsum` of float64 `[n, c]` along c, the same bits on every rank."""
    if weight.device.type == "cuda":  # pragma: no cover (CUDA)
        if torch.are_deterministic_algorithms_enabled():
            return running_sum(weight)
        if len(weight) == 1:  # one is summed in blocks whose order is not fixed
            return weight.expand(2, -1).cumsum(-1)[:1]
    return weight.cumsum(-1)


class _Keys:
    """Integers in the order of the values of a floating-point type.

    16-bit logits have 16-bit keys (float16: 19), so that the search is as short as it can be: the
    low bits of their float32 forms are all 0.
    """

    def __init__(self, raw: torch.dtype, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._integer = torch.int64 if dtype == torch.float64 else torch.int32
        self._shift = {torch.bfloat16: 16, torch.float16: 13}.get(raw, 0)
        self.bits = torch.iinfo(self._integer).bits - self._shift
        self._mask = torch.iinfo(self._integer).max

    def _flip(self, bits: Tensor) -> Tensor:
        """Bits that order as the numbers do: negative ones' grow with their magnitude, so all but
        the sign are inverted. Its own inverse.
        """
        return bits ^ torch.where(bits < 0, self._mask, 0).to(self._integer)

    def of(self, value: Tensor) -> Tensor:
        return (self._flip((value + 0.0).view(self._integer)) >> self._shift).long()

    def value(self, key: Tensor) -> Tensor:
        bits = key << self._shift
        # The low bits of a negative number's flipped bits are ones.
        bits = torch.where(key < 0, bits | ((1 << self._shift) - 1), bits)
        return self._flip(bits.to(self._integer)).view(self._dtype)
