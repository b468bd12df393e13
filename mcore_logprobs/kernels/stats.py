"""Row statistics: what one pass over a block of logits yields, and how blocks and shards merge.

From raw logits y (a block of one row's columns) come the finished logits

    z = (softcap * tanh(logit_scale * y / softcap) + bias) / temperature      (no softcap: no tanh)

with every column at or past `valid` left out, that is -inf: the mask comes last, so that no later
step revives a masked column. Statistics are taken of z:

    max     m = max z                   sum      s = sum exp(z - m)
    target  z[target], or 0             entropy  e = sum (z - m) exp(z - m)
    higher  how many columns but the target's have z > z[target]
    zsum    sum of the finite z         finite   how many z are finite

`entropy` is about the block's own maximum, unlike the textbook's sum z exp(z - m), so that logits
near 1e4 do not cancel. All but `max` add up over shards once they refer to the same maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LOG_ZERO", "FinishedStats", "RowSpec", "accumulator_dtype", "finish", "merge"]

# Stands in for log 0 wherever it is multiplied: exp(-1e4) is 0 in float32 and float64, and 0 * -1e4
# is 0, where 0 * -inf would be NaN.
LOG_ZERO = -1e4


@dataclass(frozen=True)
class RowSpec:
    """How raw logits become z, and which statistics of z are wanted.

    Attributes:
        valid: columns of the block that are true vocabulary; they come first. May be 0.
        logit_scale, softcap, temperature: as in the module's formula.
        entropy, rank, smoothing: whether `entropy`, `higher`, and `zsum` with `finite` are wanted.
    """

    valid: int
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    entropy: bool = False
    rank: bool = False
    smoothing: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """The statistics in the order of the rows of the `[k, n]` tensor that holds them."""
        return (
            "max",
            "sum",
            "target",
            *(("entropy",) if self.entropy else ()),
            *(("higher",) if self.rank else ()),
            *(("zsum", "finite") if self.smoothing else ()),
        )

    @property
    def multiplier(self) -> float:
        """z / y where there is neither softcap nor bias."""
        return self.logit_scale / self.temperature

    @property
    def is_plain(self) -> bool:
        """Whether z is y itself (a bias aside)."""
        return self.softcap is None and self.logit_scale == 1.0 and self.temperature == 1.0


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64 logits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(stats: Tensor, spec: RowSpec) -> Tensor:
    """Statistics of several blocks or shards of the same rows, as those of their union.

    Args:
        stats: `[parts, k, n]`, float32 or float64, rows as `spec.fields` says.

    Returns:
        `[k, n]`.
    """
    if stats.shape[0] == 1:
        return stats[0]
    top = stats[:, 0].amax(0)
    # A part of -inf alone has s = e = 0: its shift must be finite for 0 times it to be 0.
    shift = (stats[:, 0] - torch.where(top.isneginf(), 0.0, top)).clamp(min=LOG_ZERO)
    weight = shift.exp()
    merged = stats.sum(0)
    merged[0] = top
    merged[1] = (stats[:, 1] * weight).sum(0)
    if spec.entropy:
        merged[3] = ((stats[:, 3] + shift * stats[:, 1]) * weight).sum(0)
    return merged


@dataclass(frozen=True)
class FinishedStats:
    """What users see of a row, before ignored rows are blanked. All `[n]`, float32 or float64.

    Attributes:
        logprobs: log p[target]; with label smoothing, minus the smoothed cross entropy.
        entropy: -sum p log p in nats, or None.
        higher: columns with a larger logit than the target's, or None.
        lse: log-sum-exp of z; 0 where every z is -inf, so that exp(z - lse) is 0 there and not NaN.
        top, log_sum: the two terms of lse, the maximum and log s. Take (z - top) - log_sum for
            log p where z may be large: their sum has been rounded, by up to 5e-4 at z = 1e4.
        finite: finite z in the row, or None.
    """

    logprobs: Tensor
    entropy: Tensor | None
    higher: Tensor | None
    lse: Tensor
    top: Tensor
    log_sum: Tensor
    finite: Tensor | None


def finish(stats: Tensor, spec: RowSpec, label_smoothing: float = 0.0) -> FinishedStats:
    """Whole rows' statistics `[k, n]` to log-probabilities, entropy and the rest."""
    row = dict(zip(spec.fields, stats.unbind(0), strict=True))
    empty = row["max"].isneginf()
    top = torch.where(empty, 0.0, row["max"])
    log_sum = torch.where(empty, 0.0, row["sum"].log())
    lse = top + log_sum
    # (t - m) - log s, not t - (m + log s): the difference of two large numbers is taken exactly.
    logprobs = (row["target"] - top) - log_sum
    entropy = None
    if spec.entropy:
        entropy = torch.where(empty, 0.0, log_sum - row["entropy"] / row["sum"]).clamp(min=0.0)
    finite = row.get("finite")
    if label_smoothing > 0.0:
        assert finite is not None
        target_weight, other_weight = smoothing_weights(label_smoothing, finite)
        logprobs = target_weight * logprobs + other_weight * (row["zsum"] - finite * lse)
    return FinishedStats(logprobs, entropy, row.get("higher"), lse, top, log_sum, finite)


def smoothing_weights(label_smoothing: float, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the smoothed target distribution: (extra on the target, on every finite column).

    Megatron's convention (and NeMo's): a probability of 1 - a on the target and a / (K - 1) on each
    of the K - 1 others. With a' = a K / (K - 1) that is 1 - a' on the target and a' / K everywhere.
    K counts finite columns only: padding and -inf columns can have no mass.
    """
    other = label_smoothing / (finite - 1.0).clamp(min=1.0)
    return 1.0 - other * finite, other
