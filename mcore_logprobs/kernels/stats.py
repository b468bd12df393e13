"""Row statistics: what one pass over a chunk of logits yields, and how blocks and shards merge.

This module is the one place that knows which statistics there are, in which order they lie in a
`[k, n]` tensor, how they merge, what they finalize to, what ignored rows get, and which
coefficients the gradient takes. Everything else refers to them by name.

Of some columns of one row are taken, with unscaled logits x and d = multiplier * (x - max x), which
is z - max z of the processed logits (`kernels.chunk`),

    max     max x                       sum      s = sum exp(d)
    target  x[target], or 0             entropy  e = sum d exp(d)
    squares sum exp(2 d)
    higher  how many columns but the target's have x > x[target]
    zsum    sum of the finite d         finite   how many x are finite

`entropy` and `zsum` are about the block's own maximum, unlike the textbook's sum z exp(z - m), so
that logits near 1e4 do not cancel. All but `max` add up over shards once they refer to the same
maximum. How far that is away takes the multiplier, a number or one for each row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_logprobs.kernels.chunk import acc_dtype, times_multiplier

# Stands in for log 0 wherever it is multiplied: exp(-1e4) is 0 in float32 and float64, and 0 * -1e4
# is 0, where 0 * -inf would be NaN.
LOG_ZERO = -1e4

# A statistic's name, and the flag of StatsSpec that asks for it (None: always taken).
_FIELDS: tuple[tuple[str, str | None], ...] = (
    ("max", None),
    ("sum", None),
    ("target", None),
    ("entropy", "entropy"),
    ("squares", "sum_pi_squared"),
    ("higher", "rank"),
    ("zsum", "smoothing"),
    ("finite", "smoothing"),
)
# Likewise the gradient's coefficients; `kernels.reference.grad` has the formula.
_COEFFICIENTS: tuple[tuple[str, str | None], ...] = (
    ("weight", None),
    ("moment", "entropy"),
    ("finite", "smoothing"),
    ("squares", "sum_pi_squared"),
)


@dataclass(frozen=True)
class StatsSpec:
    """Which statistics are wanted: `entropy`; `higher`; `zsum` with `finite`; `squares`."""

    entropy: bool = False
    rank: bool = False
    smoothing: bool = False
    sum_pi_squared: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """The statistics in the order of the rows of the `[k, n]` tensor that holds them."""
        return _NAMES[self.entropy, self.rank, self.smoothing, self.sum_pi_squared][0]

    @property
    def coefficients(self) -> tuple[str, ...]:
        """The gradient's coefficients in the order of the rows of theirs."""
        return _NAMES[self.entropy, self.rank, self.smoothing, self.sum_pi_squared][1]


def _names_of(spec: StatsSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(its fields, its coefficients)."""
    statistics, coefficients = (
        tuple(name for name, flag in names if flag is None or getattr(spec, flag))
        for names in (_FIELDS, _COEFFICIENTS)
    )
    return statistics, coefficients


# By the flags of a StatsSpec, all of them: its names are asked for a dozen times per chunk.
_NAMES = {
    flags: _names_of(StatsSpec(*flags))
    for flags in itertools.product((False, True), repeat=len(fields(StatsSpec)))
}


def by_name(names: Sequence[str], values: Tensor, dim: int = 0) -> dict[str, Tensor]:
    """Views of a tensor along its dimension of statistics or coefficients, by name."""
    return dict(zip(names, values.unbind(dim), strict=True))


def no_columns(spec: StatsSpec, rows: int, *, like: Tensor) -> Tensor:
    """`[k, rows]` statistics of no columns at all, to merge others into; like's accumulator."""
    stats = like.new_zeros(len(spec.fields), rows, dtype=acc_dtype(like.dtype))
    by_name(spec.fields, stats)["max"].fill_(-torch.inf)
    return stats


def merge(
    stats: Tensor, spec: StatsSpec, *, multiplier: float | Tensor = 1.0, ordered: bool = False
) -> Tensor:
    """Statistics of several blocks or shards of the same rows, as those of their union.

    Args:
        stats: `[parts, k, n]`, float32 or float64, rows as `spec.fields` says.
        multiplier: `Processing.multiplier`, a number or `[n]`.
        ordered: add the parts one after the other, so that a row's bits depend on nothing else.

    Returns:
        `[k, n]`.
    """
    if stats.shape[0] == 1:
        return stats[0]
    total = _ordered_sum if ordered else _sum
    part = by_name(spec.fields, stats, dim=1)
    row_max = part["max"].amax(0)
    # A part with only -inf has s = e = 0: its shift must be finite for 0 times it to be 0.
    shift = part["max"] - torch.where(row_max.isneginf(), 0.0, row_max)
    shift = times_multiplier(shift, multiplier, rows_last=True).clamp(min=LOG_ZERO)
    weight = shift.exp()
    merged = total(stats)
    union = by_name(spec.fields, merged)
    union["max"].copy_(row_max)
    union["sum"].copy_(total(part["sum"] * weight))
    if spec.entropy:
        union["entropy"].copy_(total((part["entropy"] + shift * part["sum"]) * weight))
    if spec.sum_pi_squared:
        union["squares"].copy_(total(part["squares"] * weight.square()))
    if spec.smoothing:
        moved = torch.where(part["finite"] > 0, part["max"] - row_max, 0.0)
        moved = times_multiplier(moved, multiplier, rows_last=True)
        union["zsum"].copy_(total(part["zsum"] + moved * part["finite"]))
    return merged


def _sum(parts: Tensor) -> Tensor:
    return parts.sum(0)


def _ordered_sum(parts: Tensor) -> Tensor:
    """The sum over dim 0, first to last, which `torch.sum` does not promise."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class RowResults(NamedTuple):
    """What users get of each row, or their upstream gradients of it; the same names in TokenStats.

    Attributes:
        logprobs: log p[target]; with label smoothing, minus the smoothed cross entropy.
        entropy: -sum p log p in nats, or None.
        target_rank: int64, columns with a larger logit than the target's, or None; -1 for a NaN.
        lse: log-sum-exp of z; 0 where every z is -inf, so that exp(z - lse) is 0 there, not NaN.
        sum_pi_squared: sum p^2, or None; 0 where every z is -inf.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    target_rank: Tensor | None = None
    lse: Tensor | None = None
    sum_pi_squared: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> RowResults:
        """`function` of every field that is there."""
        return RowResults(*[None if x is None else function(x) for x in self])

    def asked_by(self, spec: StatsSpec) -> RowResults:
        """None instead of what a spec does not ask for."""
        flags = {name: {"target_rank": "rank"}.get(name, name) for name in self._fields}
        left_out = [name for name, flag in flags.items() if not getattr(spec, flag, True)]
        return self._replace(**dict.fromkeys(left_out))

    def masked(self, valid_mask: Tensor) -> RowResults:
        """`IGNORED` in the rows that do not count."""
        pairs = zip(self, IGNORED, strict=True)
        return RowResults(
            *[None if x is None else torch.where(valid_mask, x, fill) for x, fill in pairs]
        )


class IgnoredValues(NamedTuple):
    """What a row whose target is ignored gets: the fields of `RowResults`."""

    logprobs: float = 0.0
    entropy: float = 0.0
    target_rank: int = -1
    lse: float = 0.0
    sum_pi_squared: float = 0.0


IGNORED = IgnoredValues()


class SoftmaxStats(NamedTuple):
    """What the gradient needs of whole rows, `[n]` each.

    Attributes:
        row_max, log_sum: the maximum of the unscaled logits x, and log s. Take
            multiplier * (x - row_max) - log_sum for log p, not z - lse: those have been rounded, by
            up to 5e-4 at z = 1e4.
        entropy, finite, sum_pi_squared: the entropy, the number of finite z, and sum p^2; None
            where not taken.
    """

    row_max: Tensor
    log_sum: Tensor
    entropy: Tensor | None
    finite: Tensor | None
    sum_pi_squared: Tensor | None

    def logprobs_of(self, x: Tensor, multiplier: float | Tensor) -> Tensor:
        """log p of unscaled logits `[n, j]`."""
        below = times_multiplier(x - self.row_max.unsqueeze(-1), multiplier)
        return below - self.log_sum.unsqueeze(-1)


class GradientTerms(NamedTuple):
    """What a gradient of processed logits is made of, rows `[n]`; `kernels.reference.grad` has the
    formula.

    Attributes:
        columns: `[n, j]` int64, columns of the chunk, repeated ones allowed, -1 for another's.
        upstream: `[n, j]`, with respect to z there; those of other chunks' columns count where it
            is asked whether all are 0. For log-probabilities j is 1: the target, and what
            `gradient_coefficients` says of it.
        row_max: `[n]`, each whole row's largest unscaled logit (its lse would do too, but has been
            rounded at the scale of z, and w carries that error); None with coef.
        coef: `[k, n]`, rows as `StatsSpec.coefficients` says; None: only the entries.
        spec: which coefficients there are.
    """

    columns: Tensor
    upstream: Tensor
    row_max: Tensor | None
    coef: Tensor | None
    spec: StatsSpec

    def rows(self, part: slice) -> GradientTerms:
        """Those of some rows; themselves if they are all."""
        if part.start == 0 and part.stop == self.columns.shape[0]:
            return self
        return GradientTerms(
            self.columns[part],
            self.upstream[part],
            None if self.row_max is None else self.row_max[part],
            None if self.coef is None else self.coef[:, part],
            self.spec,
        )


class FinalStats(NamedTuple):
    """Whole rows: the results, and what the gradient needs."""

    results: RowResults
    softmax: SoftmaxStats


def finalize(
    stats: Tensor,
    spec: StatsSpec,
    *,
    multiplier: float | Tensor = 1.0,
    valid_mask: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> FinalStats:
    """Whole rows' statistics `[k, n]` to log-probabilities, entropy and the rest.

    Args:
        multiplier: as in `merge`.
        valid_mask: `[n]` bool, False for rows that get `IGNORED`; None: there are none.
    """
    row = by_name(spec.fields, stats)
    empty = row["max"].isneginf()
    row_max = torch.where(empty, 0.0, row["max"])
    log_sum = torch.where(empty, 0.0, row["sum"].log())
    lse = times_multiplier(row_max, multiplier) + log_sum
    # (t - m) - log s, not t - (m + log s): the difference of two large numbers is taken exactly.
    logprobs = times_multiplier(row["target"] - row_max, multiplier) - log_sum
    entropy = rank = sum_pi_squared = None
    if spec.entropy:
        entropy = torch.where(empty, 0.0, log_sum - row["entropy"] / row["sum"]).clamp(min=0.0)
    if spec.rank:
        rank = torch.where(row["target"].isnan(), -1, row["higher"].long())
    if spec.sum_pi_squared:
        sum_pi_squared = torch.where(empty, 0.0, row["squares"] / row["sum"].square())
    finite = row.get("finite")
    if label_smoothing > 0.0:
        assert finite is not None
        target_weight, other_weight = smoothing_weights(label_smoothing, finite)
        logprobs = target_weight * logprobs + other_weight * (row["zsum"] - finite * log_sum)
    results = RowResults(logprobs, entropy, rank, lse, sum_pi_squared)
    if valid_mask is not None:
        results = results.masked(valid_mask)
    return FinalStats(results, SoftmaxStats(row_max, log_sum, entropy, finite, sum_pi_squared))


def smoothing_weights(label_smoothing: float, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the smoothed target distribution: (extra on the target, on every finite column).

    Megatron's convention (and NeMo's): a probability of 1 - a on the target and a / (K - 1) on each
    of the K - 1 others. With a' = a K / (K - 1) that is 1 - a' on the target and a' / K everywhere.
    K counts finite columns only: padding and -inf columns can have no mass.
    """
    other = label_smoothing / (finite - 1.0).clamp(min=1.0)
    return 1.0 - other * finite, other


def gradient_coefficients(
    upstream: RowResults,
    softmax: SoftmaxStats,
    *,
    valid_mask: Tensor,
    label_smoothing: float = 0.0,
) -> tuple[StatsSpec, Tensor, Tensor]:
    """Upstream gradients to the coefficients of `kernels.reference.grad`.

    With g, h, l, u upstream of logprob, entropy, lse and P2 = sum_pi_squared, and q the target
    distribution,

        dz = g (q - p) - h p (log p + H) + l p + 2 u p (p - P2)

    The kernels take d = z - m about the row's maximum m and w = exp(d), where p = w / s and
    log p = d - log s.

    Args:
        upstream: `[n]` each, or None for zero.
        valid_mask: `[n]` bool; other rows get 0 throughout, and with it exactly no gradient, as do
            rows whose upstream gradients are all 0, whatever their statistics are.

    Returns:
        (which coefficients there are: those that an upstream gradient asks for; `[k, n]` in the
        statistics' dtype, rows as `StatsSpec.coefficients` says; `[n]`, what the target's own entry
        gets on top).
    """
    spec = StatsSpec(
        entropy=upstream.entropy is not None,
        smoothing=label_smoothing > 0.0 and upstream.logprobs is not None,
        sum_pi_squared=upstream.sum_pi_squared is not None,
    )
    coef = softmax.log_sum.new_zeros(len(spec.coefficients), softmax.log_sum.shape[0])
    row = by_name(spec.coefficients, coef)
    on_target = upstream.logprobs
    if upstream.lse is not None:
        row["weight"] += upstream.lse
    if upstream.logprobs is not None:
        row["weight"] -= upstream.logprobs
    if upstream.entropy is not None:
        assert softmax.entropy is not None
        # Of log p = d - log s the kernels take d.
        row["weight"] += upstream.entropy * (softmax.log_sum - softmax.entropy)
        row["moment"] -= upstream.entropy
    if upstream.sum_pi_squared is not None:
        assert softmax.sum_pi_squared is not None
        row["weight"] -= 2.0 * upstream.sum_pi_squared * softmax.sum_pi_squared
        row["squares"] += 2.0 * upstream.sum_pi_squared
    if spec.smoothing:
        assert softmax.finite is not None
        assert upstream.logprobs is not None
        target_weight, other_weight = smoothing_weights(label_smoothing, softmax.finite)
        on_target = upstream.logprobs * target_weight
        row["finite"] += upstream.logprobs * other_weight
    over_sum = softmax.log_sum.neg().exp()
    row["weight"] *= over_sum
    if spec.entropy:
        row["moment"] *= over_sum
    if spec.sum_pi_squared:
        row["squares"] *= over_sum.square()
    asked = torch.zeros_like(valid_mask)
    for gradient in upstream:
        if gradient is not None:
            asked.logical_or_(gradient)
    ignored = ~(valid_mask & asked)
    if on_target is None:
        on_target = torch.zeros_like(softmax.log_sum)
    return spec, coef.masked_fill_(ignored, 0.0), on_target.masked_fill(ignored, 0.0)
