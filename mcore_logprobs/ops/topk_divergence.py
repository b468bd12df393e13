"""Divergence from a teacher known at a few ids of each row, with what to make of all other ids."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from mcore_logprobs.checks import (
    check_choice,
    check_flag,
    check_float_tensor,
    check_optional_integer,
    check_shape,
    check_target,
    check_values,
    unwrap_rows,
)
from mcore_logprobs.kernels.chunk import acc_dtype
from mcore_logprobs.kernels.stats import LOG_ZERO
from mcore_logprobs.ops.divergence import check_kind
from mcore_logprobs.ops.gather import gather, of_rows
from mcore_logprobs.ops.keywords import HeadKeywords, LogitsKeywords, shared_keywords
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.head import head_logits
from mcore_logprobs.sources.source import Source

TAILS = ("renormalize", "bin", "ignore")

# The least probability of all other ids together: below it, float32's rounding of the k ids' sum is
# all that is left.
_REST = 1e-6
_ROUNDING = 1e-2  # nats, of a log-probability


@dataclass(frozen=True)
class TopKDivergence:
    """Checked options of a divergence over k ids, as `vocab_parallel_topk_kl_div` explains them."""

    kind: str
    beta: float
    tail: str
    generalized: bool

    @classmethod
    def of(cls, kind: str, beta: float, tail: str | None, generalized: bool) -> TopKDivergence:
        check_kind(kind, beta)
        check_flag("generalized", generalized)
        if tail is not None:
            check_choice("tail", tail, TAILS)
        if generalized and tail not in ("ignore", None):
            raise ValueError(
                f"generalized=True: expected tail='ignore' or None, got {tail!r}, under which the "
                "probabilities of either side add up to 1"
            )
        default = "ignore" if generalized else "bin"
        return cls(kind, float(beta), tail or default, generalized)

    def value(self, student: Tensor, teacher: Tensor) -> Tensor:
        """`[..., k]` log-probabilities of both sides -> `[...]`; differentiable by the student.

        A log-probability of -inf counts as `LOG_ZERO`; a finite one stays, however small it is.
        """
        teacher = teacher.to(student.dtype)
        if self.tail == "renormalize":
            student, teacher = _renormalized(student), _renormalized(teacher)
        student, teacher = (torch.where(x.isneginf(), LOG_ZERO, x) for x in (student, teacher))
        if self.tail == "bin":
            student, teacher = _with_rest(student), _with_rest(teacher)
        return self._shares(student, teacher).sum(-1)

    def _shares(self, student: Tensor, teacher: Tensor) -> Tensor:
        if self.kind == "forward":
            return self._share(teacher, student)
        if self.kind == "reverse":
            return self._share(student, teacher)
        if self.kind == "total_variation":
            return 0.5 * (student.exp() - teacher.exp()).abs()
        mixture = torch.logaddexp(teacher + math.log(self.beta), student + math.log1p(-self.beta))
        if self.kind == "skewed_forward":
            return self._share(teacher, mixture)
        if self.kind == "skewed_reverse":
            return self._share(student, mixture)
        of_teacher, of_student = self._share(teacher, mixture), self._share(student, mixture)
        return self.beta * of_teacher + (1.0 - self.beta) * of_student

    def _share(self, log_a: Tensor, log_b: Tensor) -> Tensor:
        """a log(a / b), or what is generalized: a log(a / b) - a + b."""
        a, log_ratio = log_a.exp(), log_b - log_a
        # If a is 0, the ratio may be near float32's largest, and overflow in the backward.
        weighted = a * log_ratio.masked_fill(a == 0.0, 0.0)
        if not self.generalized:
            return -weighted
        far = log_ratio.abs() >= 1.0
        small = log_ratio.masked_fill(far, 0.0)  # near a = b the terms of the other form cancel
        return torch.where(far, log_b.exp() - a - weighted, a * (torch.expm1(small) - small))


def _renormalized(logprobs: Tensor) -> Tensor:
    """Over the last dimension; a row with only -inf is even."""
    empty = logprobs.isneginf().all(-1, keepdim=True)
    return torch.where(empty, 0.0, logprobs).log_softmax(-1)


def _with_rest(logprobs: Tensor) -> Tensor:
    """`[..., k]` -> `[..., k + 1]`: also the log of what probability is left, at least _REST."""
    left = -torch.expm1(logprobs.logsumexp(-1, keepdim=True))
    return torch.cat([logprobs, left.clamp(min=_REST).log()], -1)


def topk_kl_div(
    source: Source,
    teacher_logprobs: Tensor,
    ids: Tensor,
    divergence: TopKDivergence,
    ignore_index: int | None,
    teacher_lse: Tensor | None = None,
) -> Tensor:
    """`vocab_parallel_topk_kl_div` of any source."""
    name = "teacher_logprobs"
    teacher = unwrap_rows(teacher_logprobs, name)
    check_float_tensor(name, teacher, min_dim=1)
    if teacher.shape[-1] < 1:
        raise ValueError(f"{name}: expected [..., k] with k >= 1, got k = 0")
    shape = torch.Size((*source.batch_shape, teacher.shape[-1]))
    check_shape(name, teacher, shape, source.device)
    eps = torch.finfo(teacher.dtype).eps
    teacher = teacher.detach().to(acc_dtype(teacher.dtype))
    ids = check_target(ids, shape, source.device, name="ids")
    check_optional_integer("ignore_index", ignore_index)
    valid_mask = (
        torch.ones_like(ids, dtype=torch.bool) if ignore_index is None else ids != ignore_index
    )
    inside = (ids >= 0) & (ids < source.shard.vocab_size)  # `gather` refuses the others
    _check_once(ids, valid_mask & inside)
    if teacher_lse is None:
        _check_logprobs(teacher, valid_mask)
    else:
        lse = unwrap_rows(teacher_lse, "teacher_lse")
        check_float_tensor("teacher_lse", lse, min_dim=0)
        check_shape("teacher_lse", lse, source.batch_shape, source.device)
        eps = max(eps, torch.finfo(lse.dtype).eps)
        lse = lse.detach().to(teacher.dtype).unsqueeze(-1)
        _check_lse(teacher, lse, eps, valid_mask)
        teacher = teacher - lse
    student = gather(source, ids, log_softmax=True, ignore_index=ignore_index)

    def value(student: Tensor, teacher: Tensor) -> Tensor:
        return divergence.value(student, teacher).unsqueeze(-1)

    if ignore_index is None:
        return of_rows(value, student, teacher).squeeze(-1)
    # An ignored id has probability 0 on both sides.
    student, teacher = (torch.where(valid_mask, x, -torch.inf) for x in (student, teacher))
    return torch.where(valid_mask.any(-1), of_rows(value, student, teacher).squeeze(-1), 0.0)


def _check_logprobs(teacher: Tensor, valid_mask: Tensor) -> None:
    """No probability above 1 by more than rounding: logits are often taken for these."""
    above = (teacher > _ROUNDING) & valid_mask
    check_values(
        ~above,
        "teacher_logprobs: a log-probability above 0",
        lambda: ValueError(
            f"teacher_logprobs: expected log-probabilities, got {teacher[above][:4].tolist()}; of "
            "logits pass their log-sum-exp too, as teacher_lse"
        ),
    )


def _check_lse(logits: Tensor, lse: Tensor, eps: float, valid_mask: Tensor) -> None:
    """No logit above the log-sum-exp by more than rounding: that of others is often taken for it.

    Args:
        logits: `[..., k]`, lse: `[..., 1]`.
        eps: by which share of themselves they have been rounded.
    """
    above = (logits - lse > _ROUNDING + eps * logits.abs()) & valid_mask
    check_values(
        ~above,
        "teacher_lse: a logit above it",
        lambda: ValueError(
            "teacher_lse: expected the log-sum-exp of the very logits in teacher_logprobs, of "
            "the whole vocabulary and at one temperature, got "
            f"{lse.expand_as(above)[above][:4].tolist()} under {logits[above][:4].tolist()}"
        ),
    )


def _check_once(ids: Tensor, counts: Tensor) -> None:
    """No id that counts twice in a row: its probability would, too."""
    ascending = ids.masked_fill(~counts, -1).sort(-1).values
    once = (ascending[..., 1:] != ascending[..., :-1]) | (ascending[..., 1:] < 0)
    check_values(
        once,
        "ids: an id twice in one row",
        lambda: ValueError(
            "ids: expected each id at most once per row, ignore_index where there are fewer"
        ),
    )


@shared_keywords(LogitsKeywords, given_logits)
def vocab_parallel_topk_kl_div(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    ids: Tensor,
    *,
    kind: str = "forward",
    beta: float = 0.5,
    tail: str | None = None,
    generalized: bool = False,
    teacher_lse: Tensor | None = None,
    ignore_index: int | None = -100,
    **shared: Unpack[LogitsKeywords],
) -> Tensor:
    """Return the divergence from a teacher that is known at k ids of each row, in nats.

    The teacher's log-probabilities are those of its full distribution
    (`vocab_parallel_topk_distill` renormalizes them over the k ids). For kind "forward" use the
    teacher's largest ids. For "reverse" and "jsd" use the student's own, from `vocab_parallel_topk`
    of detached logits, and the teacher's log-probabilities there, from
    `vocab_parallel_gather(..., log_softmax=True)`. On either side a log-probability of -inf counts
    as -1e4 (with tail="renormalize" after normalizing). A finite one is taken as it is.

    Shape:
        student_logits: `[..., V/TP]`, or a DTensor sharded on its last dimension.
        teacher_logprobs: `[..., k]`, any float dtype, the same on every TP rank; no gradient. At
            the student's temperature: those at another are other numbers, which only logits with
            teacher_lse can give.
        ids: `[..., k]` integers, global ids, each at most once per row; the same on every TP rank.
            A row of only ignore_index gives 0 and no gradient.
        Returns float32 `[...]` (float64 for float64 logits), the same on every TP rank.

    Args:
        kind, beta: as in `vocab_parallel_kl_div`.
        tail: how the probability of the other V - k ids counts. "bin" (the default): as one more
            id, of at least 1e-6: a lower bound of the divergence over all ids, and exact if both
            sides agree on the rest up to a factor. In float32 that id's probability is known to
            about 1e-7, and its logarithm to 1e-7 over it. "ignore": not at all; the sum over the k
            ids may be negative, and has no minimum at p = q. "renormalize": both sides are
            normalized over the k ids, as SFT on cached top-k does.
        generalized: at each id use a log(a / b) - a + b instead of a log(a / b), which is never
            negative, and 0 only if both sides are equal. The tail is then "ignore".
        teacher_lse: None, or float `[...]`: the log-sum-exp of the teacher's logits over its whole
            vocabulary. teacher_logprobs are then its logits at the k ids, divided by the same
            temperature. For a teacher that is only known at the ids of a draft's vocabulary; with
            tail "bin" all its other ids count as one more id.
        ignore_index: as in `vocab_parallel_gather`.
        {shared}

    Collectives: those of `vocab_parallel_gather` with log_softmax.

    Raises:
        ValueError: before any collective; see `vocab_parallel_gather`. On CPU (on CUDA a
            device-side assert) a log-probability above 0, a logit above teacher_lse, or an id twice
            in one row.
    """
    source = given_logits(student_logits, name="student_logits", **shared)
    divergence = TopKDivergence.of(kind, beta, tail, generalized)
    return topk_kl_div(source, teacher_logprobs, ids, divergence, ignore_index, teacher_lse)


@shared_keywords(HeadKeywords, head_logits)
def linear_topk_kl_div(
    hidden: Tensor,
    weight: Tensor,
    teacher_logprobs: Tensor,
    ids: Tensor,
    *,
    kind: str = "forward",
    beta: float = 0.5,
    tail: str | None = None,
    generalized: bool = False,
    teacher_lse: Tensor | None = None,
    ignore_index: int | None = -100,
    **shared: Unpack[HeadKeywords],
) -> Tensor:
    """`vocab_parallel_topk_kl_div` from hidden states, without materializing the logits.

    Shape:
        hidden, weight: as in `linear_token_stats`; the student's.
        teacher_logprobs, ids: `[s, b, k]` or `[n, k]`, the whole sequence on every TP rank also
            under sequence parallelism; `[m, k]` with rows. For "reverse" and "jsd" the student's
            own ids come from `linear_topk` of detached operands, the teacher's log-probabilities
            there from `linear_gather(..., log_softmax=True)` of its own hidden states, of any size.
        Returns float32 `[s, b]` or `[n]` (float64 for float64 operands), the same on every TP rank.

    Args:
        kind, beta, tail, generalized, teacher_lse, ignore_index: as in
            `vocab_parallel_topk_kl_div`.
        {shared}

    Cost, collectives and memory: those of `linear_gather` with log_softmax.

    Raises:
        ValueError: before any collective; see `linear_gather`.
    """
    source = head_logits(hidden, weight, **shared)
    divergence = TopKDivergence.of(kind, beta, tail, generalized)
    return topk_kl_div(source, teacher_logprobs, ids, divergence, ignore_index, teacher_lse)
