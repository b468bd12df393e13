"""Two distributions over the same columns: divergences in one pass, mergeable over blocks.

With student logits s and teacher logits t (finished, as in the module `stats`), p = softmax(s) and
q = softmax(t), a block yields five numbers a row, the *pair statistics*:

    max_s, sum_s    m = max s, sum exp(s - m)         max_t, sum_t    likewise of t
    cross           forward        sum exp(t - m_t) ((t - m_t) - (s - m_s))
                    reverse        sum exp(s - m_s) ((s - m_s) - (t - m_t))
                    cross_entropy  -sum exp(t - m_t) (s - m_s)

from which, over whole rows,

    KL(q || p) = cross / sum_t + log sum_s - log sum_t        KL(p || q): the roles swapped
    H(q, p)    = cross / sum_t + log sum_s

Taking everything about the maxima keeps the difference of two equal distributions exactly 0. The
generalised Jensen-Shannon divergence needs both log-sum-exps first and a second pass. log 0 is
`LOG_ZERO`, so that a column that one of the two lacks costs much, but not infinitely much.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mcore_logprobs.kernels.reference import finished_logits, row_chunks, to_raw_gradient
from mcore_logprobs.kernels.stats import LOG_ZERO, RowSpec, accumulator_dtype

__all__ = [
    "KINDS",
    "PAIR_STATS",
    "FinishedPair",
    "PairSpec",
    "Side",
    "finish_pair",
    "jsd_sums",
    "merge_pairs",
    "pair_dtype",
    "pair_grad",
    "pair_stats",
]

KINDS = ("forward", "reverse", "jsd", "cross_entropy")
PAIR_STATS = 5  # rows of the tensor of pair statistics

# |log p - log q| beyond which the rarer of the two is 0 to float64's precision.
_FAR = 60.0


@dataclass(frozen=True)
class PairSpec:
    """What is wanted of the two.

    Attributes:
        kind: one of KINDS.
        beta: the teacher's weight in the mixture beta q + (1 - beta) p; "jsd" only.
    """

    kind: str
    beta: float = 0.5


@dataclass(frozen=True)
class Side:
    """Raw logits of one side, and how they become finished ones.

    Attributes:
        logits: `[n, v]`, any float dtype and row stride; not modified.
        spec: its transformation and true vocabulary, the same for both sides; no statistics.
        bias: `[v]` or None.
        temperature: `[n]`, each row's own in place of the spec's, or None.
    """

    logits: Tensor
    spec: RowSpec
    bias: Tensor | None = None
    temperature: Tensor | None = None

    def part(self, rows: slice) -> Side:
        """Some of its rows."""
        own = None if self.temperature is None else self.temperature[rows]
        return replace(self, logits=self.logits[rows], temperature=own)

    def finished(self, dtype: torch.dtype) -> Tensor:
        """Finished logits `[n, valid]` in float32 or float64; logits itself if nothing is to do."""
        valid = self.spec.valid
        bias = None if self.bias is None else self.bias[:valid]
        own = None if self.temperature is None else self.temperature.unsqueeze(-1)
        return finished_logits(self.logits[:, :valid], self.spec, bias, own).to(dtype)

    def log_probs(self, norm: Tensor) -> Tensor:
        """`[n, valid]`, new, in the dtype of the normaliser `[2, n]`."""
        top, log_sum = norm.unsqueeze(-1)
        return (self.finished(norm.dtype) - top).sub_(log_sum).clamp_(min=LOG_ZERO)


def pair_dtype(student: torch.dtype, teacher: torch.dtype) -> torch.dtype:
    """float32, or float64 where either side is."""
    return torch.promote_types(accumulator_dtype(student), accumulator_dtype(teacher))


def pair_stats(student: Side, teacher: Side, spec: PairSpec, *, chunk_size: int) -> Tensor:
    """The pair statistics of a block, `[5, n]`; cross is 0 for "jsd".

    Args:
        chunk_size: rows at a time, of which two float32 copies of either side are made.
    """
    rows = student.logits.shape[0]
    dtype = pair_dtype(student.logits.dtype, teacher.logits.dtype)
    out = student.logits.new_zeros((PAIR_STATS, rows), dtype=dtype)
    if student.spec.valid == 0:
        out[0] = out[2] = -torch.inf
        return out
    for part in row_chunks(rows, chunk_size):
        _chunk_stats(student.part(part), teacher.part(part), spec, out[:, part])
    return out


def _chunk_stats(student: Side, teacher: Side, spec: PairSpec, out: Tensor) -> None:
    s, t = student.finished(out.dtype), teacher.finished(out.dtype)
    out[0], out[2] = s.amax(-1), t.amax(-1)
    s, t = _about(s, out[0]), _about(t, out[2])
    exp_s, exp_t = s.exp(), t.exp()
    out[1], out[3] = exp_s.sum(-1), exp_t.sum(-1)
    if spec.kind == "forward":
        out[4] = exp_t.mul_(t.sub_(s)).sum(-1)
    elif spec.kind == "reverse":
        out[4] = exp_s.mul_(s.sub_(t)).sum(-1)
    elif spec.kind == "cross_entropy":
        out[4] = exp_t.mul_(s).sum(-1).neg_()


def _about(z: Tensor, top: Tensor) -> Tensor:
    """z - top, new; 0 in a row of -inf alone, whose weight the merge takes to 0."""
    top = top.unsqueeze(-1)
    empty = top.isneginf()
    shifted = z - torch.where(empty, 0.0, top)
    return shifted.clamp_(min=LOG_ZERO).masked_fill_(empty, 0.0)


def merge_pairs(stats: Tensor, spec: PairSpec) -> Tensor:
    """`[parts, 5, n]`, statistics of blocks or shards of the same rows -> `[5, n]` of their union.

    One part is returned as it is.
    """
    if stats.shape[0] == 1:
        return stats[0]
    max_s, sum_s, max_t, sum_t, cross = stats.unbind(1)
    top_s, shift_s = _merge_max(max_s)
    top_t, shift_t = _merge_max(max_t)
    exp_s, exp_t = shift_s.exp(), shift_t.exp()
    if spec.kind == "forward":
        cross = exp_t * (cross + (shift_t - shift_s) * sum_t)
    elif spec.kind == "reverse":
        cross = exp_s * (cross + (shift_s - shift_t) * sum_s)
    elif spec.kind == "cross_entropy":
        cross = exp_t * (cross - shift_s * sum_t)
    return torch.stack([top_s, (sum_s * exp_s).sum(0), top_t, (sum_t * exp_t).sum(0), cross.sum(0)])


def _merge_max(parts: Tensor) -> tuple[Tensor, Tensor]:
    top = parts.amax(0)
    return top, (parts - torch.where(top.isneginf(), 0.0, top)).clamp(min=LOG_ZERO)


@dataclass(frozen=True)
class FinishedPair:
    """Of whole rows; `[n]` where nothing else is said.

    Attributes:
        value: the divergence in nats ("jsd": 0, it takes a second pass).
        usable: bool, False in a row whose logits are all -inf on either side; value is 0 there.
        norm_s, norm_t: `[2, n]`, either side's m and log sum; 0 in rows of -inf alone. Kept apart,
            so that log p = (z - m) - log sum takes the difference of large numbers exactly.
    """

    value: Tensor
    usable: Tensor
    norm_s: Tensor
    norm_t: Tensor


def finish_pair(stats: Tensor, spec: PairSpec) -> FinishedPair:
    """Whole rows' pair statistics `[5, n]` to the divergence and both normalisers."""
    max_s, sum_s, max_t, sum_t, cross = stats.unbind(0)
    log_s, log_t = sum_s.log(), sum_t.log()
    no_s, no_t = max_s.isneginf(), max_t.isneginf()
    if spec.kind == "forward":
        value = (cross / sum_t + (log_s - log_t)).clamp(min=0.0)
    elif spec.kind == "reverse":
        value = (cross / sum_s + (log_t - log_s)).clamp(min=0.0)
    elif spec.kind == "cross_entropy":
        value = cross / sum_t + log_s
    else:
        value = torch.zeros_like(cross)
    return FinishedPair(
        value=torch.where(no_s | no_t, 0.0, value),
        usable=~(no_s | no_t),
        norm_s=torch.where(no_s, 0.0, torch.stack([max_s, log_s])),
        norm_t=torch.where(no_t, 0.0, torch.stack([max_t, log_t])),
    )


def _log_over_mixture(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    """log p - log(beta q + (1 - beta) p), exact where p and q are close."""
    gap = (logq - logp).clamp_(min=-_FAR, max=_FAR)
    return gap.expm1_().mul_(beta).log1p_().neg_()


def jsd_sums(
    student: Side,
    teacher: Side,
    norm_s: Tensor,
    norm_t: Tensor,
    spec: PairSpec,
    *,
    chunk_size: int,
) -> Tensor:
    """A block's share of KL(q || M) and KL(p || M), M = beta q + (1 - beta) p; `[2, n]`.

    Both add up over blocks and shards.

    Args:
        norm_s, norm_t: `[2, n]`, of whole rows; see `FinishedPair`.
        The others as in `pair_stats`.
    """
    out = torch.zeros_like(norm_s)
    if student.spec.valid:
        for part in row_chunks(out.shape[1], chunk_size):
            logp = student.part(part).log_probs(norm_s[:, part])
            logq = teacher.part(part).log_probs(norm_t[:, part])
            to_p = _log_over_mixture(logp, logq, spec.beta).mul_(logp.exp())
            to_q = _log_over_mixture(logq, logp, 1.0 - spec.beta).mul_(logq.exp())
            out[:, part] = torch.stack([to_q.sum(-1), to_p.sum(-1)])
    return out


def pair_grad(
    student: Side,
    teacher: Side,
    norm_s: Tensor,
    norm_t: Tensor,
    inner: Tensor,
    upstream: Tensor,
    spec: PairSpec,
    *,
    kept: Tensor | None = None,
    out: Tensor,
    chunk_size: int,
) -> None:
    """Write the gradient with respect to the student's raw logits.

        forward, cross_entropy   ds = g (p - q)
        reverse                  ds = g p (log p - log q - KL(p || q))
        jsd                      ds = g (1 - beta) p (log p - log M - KL(p || M))

    A row whose g is 0 gets exactly 0, whatever its logits hold.

    Args:
        inner: `[n]`, the divergence at the end of the formula; unused by the first.
        upstream: `[n]`, g.
        kept: `[n]`, 0 or False in rows whose g counts as 0; None: there are none.
        out: `[n, v]`, any dtype; may be the student's logits. Every entry is written.
        The others as in `jsd_sums`.
    """
    valid = student.spec.valid
    out[:, valid:] = 0
    if valid == 0:
        return
    if kept is not None:
        upstream = torch.where(kept != 0, upstream, 0.0)
    for part in row_chunks(out.shape[0], chunk_size):
        own, other = student.part(part), teacher.part(part)
        grad = _distribution_gradient(
            own.log_probs(norm_s[:, part]), other.log_probs(norm_t[:, part]), inner[part], spec
        )
        g = upstream[part].to(grad.dtype).unsqueeze(-1)
        to_raw_gradient(grad.mul_(g), own.logits[:, :valid], own.spec, own.temperature)
        out[part, :valid] = grad.masked_fill_(g == 0, 0.0)


def _distribution_gradient(logp: Tensor, logq: Tensor, inner: Tensor, spec: PairSpec) -> Tensor:
    """ds for g = 1; overwrites both."""
    if spec.kind in ("forward", "cross_entropy"):
        return logp.exp_().sub_(logq.exp_())
    p = logp.exp()
    if spec.kind == "reverse":
        grad = logp.sub_(logq)
    else:
        grad = _log_over_mixture(logp, logq, spec.beta)
        p.mul_(1.0 - spec.beta)
    return grad.sub_(inner.unsqueeze(-1)).mul_(p)
