"""Row statistics: what one pass over a block of logits yields, and how blocks and shards merge.

This module is the one place that knows which statistics there are, in which order they lie in a
`[k, n]` tensor, how they merge, what they finish to, what ignored rows get, and which coefficients
the gradient takes. Everything else refers to them by name.

From raw logits y (a block of one row's columns) come the finished logits

    z = (softcap * tanh(logit_scale * y / softcap) + bias) / temperature      (no softcap: no tanh)

with every column at or past `valid` left out, that is -inf: the mask comes last, so that no later
step revives a masked column. Statistics are taken of z:

    max     m = max z                   sum      s = sum exp(z - m)
    target  z[target], or 0             entropy  e = sum (z - m) exp(z - m)
    squares sum exp(2 (z - m))
    higher  how many columns but the target's have z > z[target]
    zsum    sum of the finite z         finite   how many z are finite

`entropy` is about the block's own maximum, unlike the textbook's sum z exp(z - m), so that logits
near 1e4 do not cancel. All but `max` add up over shards once they refer to the same maximum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "DROPPED",
    "ELSEWHERE",
    "IGNORED",
    "LOG_ZERO",
    "UNKNOWN",
    "FinishedStats",
    "RowNorms",
    "RowResults",
    "RowSpec",
    "TargetIds",
    "accumulator_dtype",
    "finish",
    "gradient_coefficients",
    "gradient_spec",
    "merge",
    "no_columns",
]

# Stands in for log 0 wherever it is multiplied: exp(-1e4) is 0 in float32 and float64, and 0 * -1e4
# is 0, where 0 * -inf would be NaN.
LOG_ZERO = -1e4

# A statistic's name, and the flag of RowSpec that asks for it (None: always taken).
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
# Likewise the gradient's coefficients; `kernels.reference.grad_logits` has the formula.
_COEFFICIENTS: tuple[tuple[str, str | None], ...] = (
    ("weight", None),
    ("moment", None),
    ("target", None),
    ("finite", None),
    ("squares", "sum_pi_squared"),
)
# Likewise what kernels that finish rows leave for the gradient; `RowNorms` without the logarithm.
_NORMS: tuple[tuple[str, str | None], ...] = (
    ("top", None),
    ("sum", None),
    ("entropy", "entropy"),
    ("finite", "smoothing"),
    ("sum_pi_squared", "sum_pi_squared"),
)


def _by_flags(
    table: tuple[tuple[str, str | None], ...],
) -> dict[tuple[bool, ...], tuple[str, ...]]:
    """The names that each choice of flags leaves, once: small calls ask for them several times."""
    names = ("entropy", "rank", "smoothing", "sum_pi_squared")
    return {
        flags: tuple(n for n, flag in table if flag is None or flags[names.index(flag)])
        for flags in itertools.product((False, True), repeat=len(names))
    }


_FIELDS_OF, _NORMS_OF = _by_flags(_FIELDS), _by_flags(_NORMS)


@dataclass(frozen=True)
class RowSpec:
    """How raw logits become z, and which statistics of z are wanted.

    Attributes:
        valid: columns of the block that are true vocabulary; they come first. May be 0.
        logit_scale, softcap, temperature: as in the module's formula.
        entropy, rank, smoothing, sum_pi_squared: whether `entropy`, `higher`, `zsum` with `finite`,
            and `squares` are wanted.
    """

    valid: int
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    entropy: bool = False
    rank: bool = False
    smoothing: bool = False
    sum_pi_squared: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """The statistics in the order of the rows of the `[k, n]` tensor that holds them."""
        return _FIELDS_OF[self.entropy, self.rank, self.smoothing, self.sum_pi_squared]

    @property
    def coefficients(self) -> tuple[str, ...]:
        """The gradient's coefficients in the order of the rows of theirs."""
        return tuple(name for name, flag in _COEFFICIENTS if flag is None or getattr(self, flag))

    @property
    def norms(self) -> tuple[str, ...]:
        """What the gradient needs of whole rows, in the order of the rows of its tensor."""
        return _NORMS_OF[self.entropy, self.rank, self.smoothing, self.sum_pi_squared]

    def named(self, stats: Tensor, dim: int = 0) -> dict[str, Tensor]:
        """Views of a tensor of statistics along its dimension of fields, by name."""
        return dict(zip(self.fields, stats.unbind(dim), strict=True))

    def position(self, field: str) -> int:
        """Where a statistic lies in the tensor, or -1 if it is not wanted; for kernels."""
        return self.fields.index(field) if field in self.fields else -1

    @property
    def multiplier(self) -> float:
        """z / y where there is neither softcap nor bias."""
        return self.logit_scale / self.temperature

    @property
    def is_plain(self) -> bool:
        """Whether z is y itself (a bias aside)."""
        return self.softcap is None and self.logit_scale == 1.0 and self.temperature == 1.0


class TargetIds(NamedTuple):
    """How a kernel reads targets that are global ids.

    It makes a column `[n]` of them: this rank's column of the target; else one of the negative
    numbers ELSEWHERE (another rank's), DROPPED (ignore_index) and UNKNOWN (no id at all).

    Attributes:
        start: the id of this rank's first column.
        vocab_size: ids are below it.
        ignore_index: what a row has that asks for nothing, or None.
    """

    start: int
    vocab_size: int
    ignore_index: int | None


ELSEWHERE, DROPPED, UNKNOWN = -1, -2, -3


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What tensors of this dtype are summed in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def no_columns(spec: RowSpec, rows: int, *, like: Tensor) -> Tensor:
    """`[k, rows]` statistics of no columns at all, to merge others into; like's accumulator."""
    stats = like.new_zeros(len(spec.fields), rows, dtype=accumulator_dtype(like.dtype))
    spec.named(stats)["max"].fill_(-torch.inf)
    return stats


def merge(stats: Tensor, spec: RowSpec, *, ordered: bool = False) -> Tensor:
    """Statistics of several blocks or shards of the same rows, as those of their union.

    Args:
        stats: `[parts, k, n]`, float32 or float64, rows as `spec.fields` says.
        ordered: add the parts one after the other, so that a row's bits depend on nothing else.

    Returns:
        `[k, n]`.
    """
    if stats.shape[0] == 1:
        return stats[0]
    total = _ordered_sum if ordered else _sum
    part = spec.named(stats, dim=1)
    top = part["max"].amax(0)
    # A part of -inf alone has s = e = 0: its shift must be finite for 0 times it to be 0.
    shift = (part["max"] - torch.where(top.isneginf(), 0.0, top)).clamp(min=LOG_ZERO)
    weight = shift.exp()
    merged = total(stats)
    whole = spec.named(merged)
    whole["max"].copy_(top)
    whole["sum"].copy_(total(part["sum"] * weight))
    if spec.entropy:
        whole["entropy"].copy_(total((part["entropy"] + shift * part["sum"]) * weight))
    if spec.sum_pi_squared:
        whole["squares"].copy_(total(part["squares"] * weight.square()))
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

    logprobs: Any = None
    entropy: Any = None
    target_rank: Any = None
    lse: Any = None
    sum_pi_squared: Any = None

    def map(self, function: Callable[..., Any], *others: RowResults) -> RowResults:
        """`function` of every field that is there, with the same field of the others."""
        if not others:
            return RowResults(*[None if x is None else function(x) for x in self])
        return RowResults(
            *(None if x[0] is None else function(*x) for x in zip(self, *others, strict=True))
        )


# What a row whose target is ignored gets.
IGNORED = RowResults(logprobs=0.0, entropy=0.0, target_rank=-1, lse=0.0, sum_pi_squared=0.0)


class RowNorms(NamedTuple):
    """What the gradient needs of whole rows, `[n]` each.

    Attributes:
        top, log_sum: the two terms of lse, the maximum and log s. Take (z - top) - log_sum for
            log p where z may be large: their sum has been rounded, by up to 5e-4 at z = 1e4.
        entropy, finite, sum_pi_squared: the entropy, the number of finite z, and sum p^2; None
            where not taken.
    """

    top: Tensor
    log_sum: Tensor
    entropy: Tensor | None
    finite: Tensor | None
    sum_pi_squared: Tensor | None

    def part(self, rows: slice) -> RowNorms:
        """Of some of the rows."""
        return RowNorms(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class FinishedStats(NamedTuple):
    """Whole rows: the results before ignored rows are blanked, and what the gradient needs."""

    results: RowResults
    norms: RowNorms

    def blanked(self, keep: Tensor) -> RowResults:
        """The results, with what the contract gives to rows that are not kept (`[n]` bool)."""
        return self.results.map(lambda x, fill: torch.where(keep, x, fill), IGNORED)


def finish(stats: Tensor, spec: RowSpec, label_smoothing: float = 0.0) -> FinishedStats:
    """Whole rows' statistics `[k, n]` to log-probabilities, entropy and the rest."""
    row = spec.named(stats)
    empty = row["max"].isneginf()
    top = torch.where(empty, 0.0, row["max"])
    log_sum = torch.where(empty, 0.0, row["sum"].log())
    lse = top + log_sum
    # (t - m) - log s, not t - (m + log s): the difference of two large numbers is taken exactly.
    logprobs = (row["target"] - top) - log_sum
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
        logprobs = target_weight * logprobs + other_weight * (row["zsum"] - finite * lse)
    return FinishedStats(
        RowResults(logprobs, entropy, rank, lse, sum_pi_squared),
        RowNorms(top, log_sum, entropy, finite, sum_pi_squared),
    )


def smoothing_weights(label_smoothing: float, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the smoothed target distribution: (extra on the target, on every finite column).

    Megatron's convention (and NeMo's): a probability of 1 - a on the target and a / (K - 1) on each
    of the K - 1 others. With a' = a K / (K - 1) that is 1 - a' on the target and a' / K everywhere.
    K counts finite columns only: padding and -inf columns can have no mass.
    """
    other = label_smoothing / (finite - 1.0).clamp(min=1.0)
    return 1.0 - other * finite, other


def gradient_spec(spec: RowSpec, upstream: RowResults) -> RowSpec:
    """The spec of a gradient: without the statistics that no upstream gradient asks for."""
    return replace(
        spec,
        entropy=upstream.entropy is not None,
        sum_pi_squared=upstream.sum_pi_squared is not None,
        rank=False,
    )


def gradient_coefficients(
    upstream: RowResults, norms: RowNorms, spec: RowSpec, *, keep: Tensor, label_smoothing: float
) -> Tensor:
    """Upstream gradients to the coefficients of `kernels.reference.grad_logits`.

    With g, h, l, u upstream of logprob, entropy, lse and P2 = sum_pi_squared, and q the target
    distribution,

        dz = g (q - p) - h p (log p + H) + l p + 2 u p (p - P2)

    The kernels take w = exp(z - m) and z - m about the row's maximum m, where p = w / s and
    log p = (z - m) - log s.

    Args:
        upstream: `[n]` each, or None for zero.
        keep: `[n]` bool; other rows get coefficients 0, and with them exactly no gradient, as do
            rows whose upstream gradients are all 0, whatever their norms are.

    Returns:
        `[k, n]` in the norms' dtype, rows as `spec.coefficients` says.
    """
    coef = norms.log_sum.new_zeros(len(spec.coefficients), norms.log_sum.shape[0])
    row = dict(zip(spec.coefficients, coef.unbind(0), strict=True))
    asked: Tensor | None = None
    if upstream.lse is not None:
        row["weight"] += upstream.lse
    if upstream.logprobs is not None:
        row["weight"] -= upstream.logprobs
        row["target"] += upstream.logprobs
    if upstream.entropy is not None:
        assert norms.entropy is not None
        row["weight"] -= upstream.entropy * norms.entropy
        row["moment"] -= upstream.entropy
    if upstream.sum_pi_squared is not None:
        assert norms.sum_pi_squared is not None
        row["weight"] -= 2.0 * upstream.sum_pi_squared * norms.sum_pi_squared
        row["squares"] += 2.0 * upstream.sum_pi_squared
    if label_smoothing > 0.0 and upstream.logprobs is not None:
        assert norms.finite is not None
        target_weight, other_weight = smoothing_weights(label_smoothing, norms.finite)
        row["target"] *= target_weight
        row["finite"] += upstream.logprobs * other_weight
    row["weight"] -= row["moment"] * norms.log_sum
    over_sum = norms.log_sum.neg().exp()
    row["weight"] *= over_sum
    row["moment"] *= over_sum
    if spec.sum_pi_squared:
        row["squares"] *= over_sum.square()
    for gradient in upstream:
        if gradient is not None:
            asked = gradient != 0 if asked is None else asked | (gradient != 0)
    return coef.masked_fill_(~keep if asked is None else ~(keep & asked), 0.0)
