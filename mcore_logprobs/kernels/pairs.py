"""Two distributions over the same columns: divergences in one pass, mergeable over blocks.

With processed student logits s and teacher logits t (`kernels.chunk`), p = softmax(s) and
q = softmax(t), a chunk of either yields six numbers per row, the *pair statistics*; the maxima are
kept of unscaled logits, as in `kernels.stats`:

    max_s, sum_s    m = max s, sum exp(s - m)         max_t, sum_t    likewise of t
    cross           forward        sum exp(t - m_t) ((t - m_t) - (s - m_s))
                    reverse        sum exp(s - m_s) ((s - m_s) - (t - m_t))
                    cross_entropy  -sum exp(t - m_t) (s - m_s)
    excess          forward        sum exp(t - m_t) E(y),   y = (s - m_s) - (t - m_t)
                    reverse        sum exp(s - m_s) E(-y)   with E(x) = exp(x) - 1 - x >= 0

from which, over whole rows,

    KL(q || p) = cross / sum_t + log sum_s - log sum_t        KL(p || q): the roles swapped
               = excess / sum_t + log(1 + d) - d,   d = (excess - cross) / sum_t
                                                      = sum_s / sum_t - 1
    H(q, p)    = cross / sum_t + log sum_s

Taking everything about the maxima keeps the difference of two equal distributions exactly 0. The
first form cancels where p and q are close, so the second is used there: all its terms are as small
as the square of y. y is then the difference of s - t and m_s - m_t, which are exact.

The other kinds need both log-sum-exps first and a second pass. With M = beta q + (1 - beta) p:

    jsd                beta KL(q || M) + (1 - beta) KL(p || M)
    skewed_forward     KL(q || M)
    skewed_reverse     KL(p || M)
    total_variation    sum |p - q| / 2

It sums each column's share of the divergence, and p times the share's derivative by p, from which
the gradient follows. The share of KL(q || M) is q log(q / M) + M - q, which is small where p and q
are close: as M and q both sum to 1, M - q adds nothing over whole rows. In jsd it cancels.

log 0 of a logit of -inf is `LOG_ZERO`, so that a column that one of the two lacks costs much, but
not infinitely much.

`pair_stats`, `pair_sums` and `pair_grad` are the torch backend's: eager, readable, the ground
truth. `kernels.inductor.pairs` compiles the formulas of `statistics_of`, `sums_of`, `log_probs` and
`distribution_gradient`, so that no branch of theirs may depend on a tensor's values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_logprobs.kernels.chunk import (
    Chunk,
    acc_dtype,
    row_chunks,
    times_multiplier,
)
from mcore_logprobs.kernels.stats import LOG_ZERO

ONE_PASS = ("forward", "reverse", "cross_entropy")
TWO_PASS = ("jsd", "skewed_forward", "skewed_reverse", "total_variation")
KINDS = (*ONE_PASS, *TWO_PASS)
PAIR_STATS = 6  # rows of the tensor of pair statistics


class Weights(NamedTuple):
    """Of the mixture.

    Attributes:
        teacher, student: add up to 1; of a compiled kernel 0-dim tensors.
        uneven: one is so small that 1 minus the other, rounded, is not it. A constant of a compiled
            kernel, which takes a third longer with it.
    """

    teacher: float | Tensor
    student: float | Tensor
    uneven: bool


# `Processing.multiplier` of the student and of the teacher, numbers or `[n]`.
Multipliers = tuple[float | Tensor, float | Tensor]

# |log p - log q| beyond which the rarer of the two is 0 to float64's precision.
_FAR = 60.0

# |x| below which exp(x) - 1 - x takes its series, of which the first term left out is x^7 / 5040.
_SMALL = {torch.float32: 0.125, torch.float64: 2e-3}


@dataclass(frozen=True)
class PairSpec:
    """What is wanted of the two.

    Attributes:
        kind: one of KINDS.
        beta: the teacher's weight in the mixture beta q + (1 - beta) p.
    """

    kind: str
    beta: float = 0.5

    @property
    def two_pass(self) -> bool:
        return self.kind in TWO_PASS

    @property
    def weights(self) -> Weights:
        return Weights(self.beta, 1.0 - self.beta, not 0.1 <= self.beta <= 0.9)


def pair_dtype(student: torch.dtype, teacher: torch.dtype) -> torch.dtype:
    """float32, or float64 where either side is."""
    return torch.promote_types(acc_dtype(student), acc_dtype(teacher))


def chunk_log_probs(chunk: Chunk, norm: Tensor) -> Tensor:
    """`[n, valid]`, new, in the dtype of the normalizer `[2, n]`."""
    return log_probs(chunk.unscaled(norm.dtype), chunk.processing.multiplier, *norm)


def log_probs(x: Tensor, multiplier: float | Tensor, row_max: Tensor, log_sum: Tensor) -> Tensor:
    """Log-probabilities, new, of unscaled logits `[n, ..., v]` and normalizers `[n, ...]`;
    multiplier a number or `[n]`.
    """
    row_max, log_sum = row_max.unsqueeze(-1), log_sum.unsqueeze(-1)
    shifted = x - row_max
    times_multiplier(shifted, multiplier, in_place=True)
    return _bounded(shifted.sub_(log_sum))


def _bounded(log_ratios: Tensor) -> Tensor:
    """-inf as LOG_ZERO, maybe in place; a finite number stays, however small it is, and NaN NaN."""
    if torch.compiler.is_compiling():  # a compiler looks for NaN one number at a time
        return torch.where(log_ratios == -torch.inf, LOG_ZERO, log_ratios)
    # One pass, where filling by a mask takes two slow ones.
    return log_ratios.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=LOG_ZERO)


def pair_stats(student: Chunk, teacher: Chunk, spec: PairSpec, *, chunk_size: int) -> Tensor:
    """The pair statistics, in parts that `merge_pairs` joins.

    cross is 0 for a kind of two passes, and excess for all but "forward" and "reverse".

    Args:
        student, teacher: of the same columns, with the same `valid`; dtypes may differ.
        chunk_size: rows at a time, of which two float32 copies of either side are made, and two
            bool ones; by `pair_sums` up to eight in all, by `pair_grad` six.

    Returns:
        `[parts, 6, n]`, at least one part.
    """
    rows = student.logits.shape[0]
    dtype = pair_dtype(student.logits.dtype, teacher.logits.dtype)
    out = student.logits.new_zeros((1, PAIR_STATS, rows), dtype=dtype)
    if student.valid == 0:
        out[:, 0] = out[:, 2] = -torch.inf
        return out
    for part in row_chunks(rows, chunk_size):
        s, t = student.rows(part), teacher.rows(part)
        of_student, of_teacher = s.processing.multiplier, t.processing.multiplier
        found = statistics_of(
            partial(s.unscaled, dtype),
            partial(t.unscaled, dtype),
            of_student,
            of_teacher,
            of_student == of_teacher,
            spec.kind,
        )
        for row, values in zip(out[0, :, part], found, strict=False):
            row.copy_(values)
    return out


def statistics_of(
    student: Callable[[], Tensor],
    teacher: Callable[[], Tensor],
    of_student: float | Tensor,
    of_teacher: float | Tensor,
    alike: bool | Tensor,
    kind: str,
) -> tuple[Tensor, ...]:
    """Pair statistics over the last dimension, `[n, ...]` each; those that the kind has.

    Args:
        student, teacher: make unscaled logits `[n, ..., v]`, which are not modified. A caller that
            had them would keep two copies too long.
        of_student, of_teacher: multipliers, a number or `[n]`.
        alike: where these are equal; a bool, or `[n, ...]`.
    """
    s, t = student(), teacher()
    max_s, max_t = s.amax(-1), t.amax(-1)
    if kind not in ("forward", "reverse"):
        s, t = _about(s, max_s, of_student), _about(t, max_t, of_teacher)
        exp_t = t.exp()
        about_t = (exp_t * s).sum(-1).neg_() if kind == "cross_entropy" else None
        sums = max_s, s.exp_().sum(-1), max_t, exp_t.sum(-1)
        return sums if about_t is None else (*sums, about_t)
    near = _near(max_s, max_t, of_student) & alike
    apart = s - t
    # NaN in rows that are not near, so that one comparison finds them and what is not finite;
    # `isfinite`, or `&` with a second mask, takes several times as long.
    apart.sub_(torch.where(near, max_s - max_t, torch.nan).unsqueeze(-1))
    times_multiplier(apart, of_student, in_place=True)
    s = _about(s, max_s, of_student)
    t = _about(t, max_t, of_teacher)
    apart = _where(apart.abs() < torch.inf, apart, s - t, out=apart)
    weight, other = t.exp_(), s.exp_()
    sum_s, sum_t = other.sum(-1), weight.sum(-1)
    if kind == "reverse":
        weight, other, apart = other, weight, apart.neg_()
    del s, t  # no copy may live on only because it has a name
    first = weight * apart
    cross = first.sum(-1).neg_()
    rest = other.sub_(weight).sub_(first)
    del weight, other
    excess = _series(apart).mul_(apart).mul_(first)
    del first
    rest = _where(apart.abs() < _SMALL[rest.dtype], excess, rest, out=rest)
    return max_s, sum_s, max_t, sum_t, cross, rest.sum(-1)


def _near(max_s: Tensor, max_t: Tensor, multiplier: float | Tensor) -> Tensor:
    """Where (s - t) - (max s - max t) is more exact than (s - max s) - (t - max t), for equal
    multipliers; bool `[n, ...]`.
    """
    return times_multiplier(max_s - max_t, multiplier).abs() <= 1.0


def _where(condition: Tensor, x: Tensor, other: Tensor, *, out: Tensor) -> Tensor:
    """`torch.where`, in out's memory unless torch.compile traces, which takes no `out=` that is not
    contiguous.
    """
    if torch.compiler.is_compiling():
        return torch.where(condition, x, other)
    return torch.where(condition, x, other, out=out)


def _series(x: Tensor) -> Tensor:
    """(exp(x) - 1 - x) / x^2 of a small x; new."""
    series = x * (1 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6):
        series.add_(coefficient).mul_(x)
    return series.add_(0.5)


def _expm1(x: Tensor, out: Tensor | None = None) -> Tensor:
    """exp(x) - 1 with all its digits."""
    if torch.compiler.is_compiling():  # compiled for a CPU, expm1 is exp(x) - 1
        return torch.where(x.abs() < _SMALL[x.dtype], x + _series(x) * x * x, x.exp() - 1.0)
    return torch.expm1(x, out=out)


def _exp_excess(x: Tensor) -> Tensor:
    """exp(x) - 1 - x with all its digits; new."""
    series = _series(x).mul_(x).mul_(x)
    return torch.where(x.abs() < _SMALL[x.dtype], series, _expm1(x).sub_(x))


def _log1p_excess(x: Tensor) -> Tensor:
    """log(1 + x) - x with all its digits, of |x| < 1; new."""
    # log(1 + x) = 2 atanh(half), and 2 half - x = -x half.
    half = x / (2.0 + x)
    square = half * half
    series = 1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9 + square / 11)))
    return torch.where(x.abs() < 0.0625, 2.0 * half * square * series - x * half, x.log1p() - x)


def _about(x: Tensor, row_max: Tensor, multiplier: float | Tensor) -> Tensor:
    """z - max z, new; 0 in a row with only -inf, whose weight the merge takes to 0."""
    row_max = row_max.unsqueeze(-1)
    empty = row_max.isneginf()
    shifted = x - torch.where(empty, 0.0, row_max)
    times_multiplier(shifted, multiplier, in_place=True)
    # A product with 0, since filling by a mask takes eight times as long.
    return _bounded(shifted).mul_((~empty).to(x.dtype))


def merge_pairs(stats: Tensor, spec: PairSpec, multipliers: Multipliers = (1.0, 1.0)) -> Tensor:
    """`[parts, 6, n]`, statistics of blocks or shards of the same rows -> `[6, n]` of their union.

    One part is returned as it is.
    """
    if stats.shape[0] == 1:
        return stats[0]
    max_s, sum_s, max_t, sum_t, cross, excess = stats.unbind(1)
    row_max_s, shift_s = _merge_max(max_s, multipliers[0])
    row_max_t, shift_t = _merge_max(max_t, multipliers[1])
    exp_s, exp_t = shift_s.exp(), shift_t.exp()
    new_s, new_t = sum_s * exp_s, sum_t * exp_t
    if spec.kind in ("forward", "reverse"):
        apart = (max_s - max_t).sub_(row_max_s - row_max_t)
        near = _near(row_max_s, row_max_t, multipliers[0]) & (multipliers[0] == multipliers[1])
        apart = times_multiplier(apart, multipliers[0], rows_last=True)
        apart = torch.where(near & apart.isfinite(), apart, shift_s - shift_t)
        if spec.kind == "forward":
            moved = _moved(cross, excess, sum_t, sum_s, apart, exp_t, new_s - new_t)
        else:
            moved = _moved(cross, excess, sum_s, sum_t, -apart, exp_s, new_t - new_s)
        cross, excess = moved
    elif spec.kind == "cross_entropy":
        cross = torch.where(exp_t == 0.0, 0.0, exp_t * (cross - shift_s * sum_t))
    sums = (new_s.sum(0), row_max_t, new_t.sum(0), cross.sum(0), excess.sum(0))
    return torch.stack([row_max_s, *sums])


def _moved(
    cross: Tensor,
    excess: Tensor,
    own: Tensor,
    other: Tensor,
    apart: Tensor,
    decay: Tensor,
    new_difference: Tensor,
) -> tuple[Tensor, Tensor]:
    """(cross, excess) about other maxima, by which y grows by `apart`.

    Args:
        own, other: the sums of the side that weights and of the other, about the old maxima.
        decay: what the weights shrink by.
        new_difference: other - own about the new maxima. excess is cross more, but where y is small
            that difference has lost the digits of both.
    """
    gone = decay == 0.0  # as of masked columns: what it multiplies may be inf, and 0 * inf is NaN
    near = excess + other * _exp_excess(apart) + apart * (excess - cross)
    near = torch.where(gone, 0.0, decay * near)
    cross = torch.where(gone, 0.0, decay * (cross - apart * own))
    return cross, torch.where(apart.abs() <= 0.5, near, cross + new_difference)


def _merge_max(parts: Tensor, multiplier: float | Tensor) -> tuple[Tensor, Tensor]:
    row_max = parts.amax(0)
    empty = row_max.isneginf()
    shift = parts - torch.where(empty, 0.0, row_max)
    shift = _bounded(times_multiplier(shift, multiplier, rows_last=True))
    return row_max, shift.masked_fill_(empty, 0.0)  # the next merge moves it


@dataclass(frozen=True)
class FinalPair:
    """Of whole rows; `[n]` where nothing else is said.

    Attributes:
        value: the divergence in nats; 0 for a kind of two passes.
        usable: bool, False in a row whose logits are all -inf on either side; value is 0 there.
        softmax: `[4, n]`: max_s, log sum_s, max_t, log sum_t; 0 in rows with only -inf. Kept apart,
            so that log p = (z - m) - log sum takes the difference of large numbers exactly.
    """

    value: Tensor
    usable: Tensor
    softmax: Tensor


def finalize_pair(stats: Tensor, spec: PairSpec) -> FinalPair:
    """Whole rows' pair statistics `[6, n]` to the divergence and both normalizers."""
    max_s, sum_s, max_t, sum_t, cross, excess = stats.unbind(0)
    log_s, log_t = sum_s.log(), sum_t.log()
    no_s, no_t = max_s.isneginf(), max_t.isneginf()
    usable = ~(no_s | no_t)
    if spec.kind == "forward":
        value = _divergence(cross, excess, sum_t, log_s - log_t)
    elif spec.kind == "reverse":
        value = _divergence(cross, excess, sum_s, log_t - log_s)
    elif spec.kind == "cross_entropy":
        value = cross / sum_t + log_s
    else:
        value = torch.zeros_like(cross)
    return FinalPair(
        value=torch.where(usable, value, 0.0),
        usable=usable,
        softmax=torch.where(
            torch.stack([no_s, no_s, no_t, no_t]), 0.0, torch.stack([max_s, log_s, max_t, log_t])
        ),
    )


def _divergence(cross: Tensor, excess: Tensor, own: Tensor, log_ratio: Tensor) -> Tensor:
    """KL from the statistics, the sum that the weights have, and log(other / own)."""
    growth = (excess - cross) / own  # other / own - 1, to all digits where it is small
    near = excess / own + _log1p_excess(growth)
    return torch.where(growth.abs() < 0.5, near, cross / own + log_ratio).clamp(min=0.0)


def _log_over_mixture(
    logp: Tensor, logq: Tensor, own: float | Tensor, other: float | Tensor, uneven: bool
) -> Tensor:
    """log p - log M, M = own p + other q.

    Exact where p and q are close: M / p = 1 + other (q / p - 1). Of uneven weights also where that
    is little more than a small `own`, of which the 1 would leave few digits.
    """
    gap = (logq - logp).clamp_(min=-_FAR, max=_FAR)
    small = gap.exp().mul_(other).add_(own) if uneven else None
    over = _expm1(gap, out=gap).mul_(other).log1p_()
    if small is not None:
        over = _where(small < 0.5, small.log(), over, out=over)
    return over.neg_()


def pair_sums(
    student: Chunk, teacher: Chunk, softmax: Tensor, spec: PairSpec, *, chunk_size: int
) -> Tensor:
    """A chunk's share of a divergence of two passes, and of sum p d; `[2, n]`.

    d is the derivative of a column's share by p, up to a constant. Both add up over chunks and
    shards.

    Args:
        softmax: `[4, n]`, of whole rows; see `FinalPair`.
        The others as in `pair_stats`.
    """
    out = torch.zeros_like(softmax[:2])
    if student.valid:
        for part in row_chunks(out.shape[1], chunk_size):
            logp = partial(chunk_log_probs, student.rows(part), softmax[:2, part])
            logq = partial(chunk_log_probs, teacher.rows(part), softmax[2:, part])
            out[:, part] = torch.stack(sums_of(logp, logq, spec.kind, spec.weights))
    return out


def sums_of(
    student: Callable[[], Tensor], teacher: Callable[[], Tensor], kind: str, weights: Weights
) -> tuple[Tensor, Tensor]:
    """`pair_sums` over the last dimension, `[...]` each.

    Args:
        student, teacher: make log-probabilities `[..., v]`.
    """
    logp, logq = student(), teacher()
    p, share, derivative = _shares(logp, logq, kind, weights)
    del logp, logq  # `share` has what it needs of them
    return share().sum(-1), derivative.mul_(p).sum(-1)


def _shares(
    logp: Tensor, logq: Tensor, kind: str, weights: Weights
) -> tuple[Tensor, Callable[[], Tensor], Tensor]:
    """(p; what makes each column's share of the divergence; the share's derivative by p up to a
    constant).

    The constant is such that the derivative is 0 where p and q are equal. The gradient has no use
    for the shares, which cost more than all else; they are made before the derivative changes.
    """
    p, (beta, kept, uneven) = logp.exp(), weights
    if kind == "total_variation":
        derivative = (p - logq.exp()).sign_().mul_(0.5)
        return p, lambda: derivative * (p - logq.exp()), derivative
    if kind == "skewed_forward":
        over = _log_over_mixture(logq, logp, beta, kept, uneven)

        def teacher_share() -> Tensor:
            q = logq.exp()
            return _share(q, over, (p - q).mul_(kept))

        return p, teacher_share, _expm1(over).mul_(-kept)
    over = _log_over_mixture(logp, logq, kept, beta, uneven)
    if kind == "skewed_reverse":
        derivative = over - _expm1(over).mul_(kept)
        return p, lambda: _share(p, over, logq.exp().sub_(p).mul_(beta)), derivative
    derivative = over.mul_(kept)

    def share() -> Tensor:
        to_teacher = _log_over_mixture(logq, logp, beta, kept, uneven).mul_(logq.exp())
        return to_teacher.mul_(beta).addcmul_(p, derivative)

    return p, share, derivative


def _share(weight: Tensor, over: Tensor, to_mixture: Tensor) -> Tensor:
    """weight * over + to_mixture without cancellation where over is small; in to_mixture's memory.

    Args:
        to_mixture: weight * (exp(-over) - 1), which is what the mixture has more.
    """
    series = _series(-over).mul_(over).mul_(over).mul_(weight)
    exact = to_mixture.addcmul_(weight, over)
    return _where(over.abs() < _SMALL[over.dtype], series, exact, out=exact)


def pair_grad(
    student: Chunk,
    teacher: Chunk,
    softmax: Tensor,
    inner: Tensor,
    upstream: Tensor,
    spec: PairSpec,
    *,
    out: Tensor,
    chunk_size: int,
) -> None:
    """Write the gradient with respect to the student's raw logits.

        forward, cross_entropy   ds = g (p - q)
        reverse                  ds = g p (log p - log q - KL(p || q))
        others                   ds = g p (d - sum p d), d as in `pair_sums`

    A row whose g is 0 gets exactly 0, whatever its logits hold.

    Args:
        inner: `[n]`, the divergence or sum at the end of the formula; unused by the first.
        upstream: `[n]`, g.
        out: `[n, v]`, any dtype; may be the student's logits. Every entry is written.
        The others as in `pair_sums`.
    """
    valid = student.valid
    if valid < out.shape[1]:
        out[:, valid:] = 0
    if valid == 0:
        return
    for part in row_chunks(out.shape[0], chunk_size):
        student_step = student.rows(part)
        logp = chunk_log_probs(student_step, softmax[:2, part])
        logq = chunk_log_probs(teacher.rows(part), softmax[2:, part])
        ds = distribution_gradient(logp, logq, inner[part], spec.kind, spec.weights)
        g = upstream[part].to(ds.dtype).unsqueeze(-1)
        student_step.to_raw_gradient(ds.mul_(g))
        out[part, :valid] = ds.masked_fill_(g == 0, 0.0)


def distribution_gradient(
    logp: Tensor, logq: Tensor, inner: Tensor, kind: str, weights: Weights
) -> Tensor:
    """ds `[n, v]` for g = 1; overwrites log-probabilities."""
    if kind in ("forward", "cross_entropy"):
        return logp.exp_().sub_(logq.exp_())
    if kind == "reverse":
        p = logp.exp()
        derivative = logp.sub_(logq)
    else:
        p, _, derivative = _shares(logp, logq, kind, weights)
    return derivative.sub_(inner.unsqueeze(-1)).mul_(p)
