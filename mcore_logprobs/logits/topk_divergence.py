"""Divergence from a teacher known at a few ids of each row, with what to make of all other ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_choice
from mcore_logprobs.kernels.stats import LOG_ZERO, accumulator_dtype
from mcore_logprobs.logits.distill import check_kind
from mcore_logprobs.logits.dtensor import unwrap_rows
from mcore_logprobs.logits.gather import vocab_parallel_gather
from mcore_logprobs.logits.opening import check_group_tensor, check_same_rows, check_target

__all__ = [
    "TAILS",
    "TopKDivergence",
    "check_teacher",
    "check_teacher_ids",
    "finish_topk_divergence",
    "vocab_parallel_topk_kl_div",
]

TAILS = ("renormalize", "bin", "ignore")

# The least probability of all other ids together: below it, float32's rounding of the k ids' sum is
# all that is left.
_REST = 1e-6


@dataclass(frozen=True)
class TopKDivergence:
    """Checked options of a divergence over k ids, as `vocab_parallel_topk_kl_div` explains them."""

    kind: str
    beta: float
    tail: str

    @classmethod
    def of(cls, kind: str, beta: float, tail: str) -> TopKDivergence:
        check_kind(kind, beta)
        check_choice("tail", tail, TAILS)
        return cls(kind, float(beta), tail)

    def value(self, student: Tensor, teacher: Tensor) -> Tensor:
        """`[..., k]` log-probabilities of both sides -> `[...]`; differentiable by the student.

        A probability of 0 counts as exp(-1e4).
        """
        teacher = teacher.detach().to(student.dtype).clamp(min=LOG_ZERO)
        student = student.clamp(min=LOG_ZERO)
        if self.tail == "renormalize":
            student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
        elif self.tail == "bin":
            student, teacher = _with_rest(student), _with_rest(teacher)
        p, q = student.exp(), teacher.exp()
        if self.kind == "forward":
            return (q * (teacher - student)).sum(-1)
        if self.kind == "reverse":
            return (p * (student - teacher)).sum(-1)
        weights = student.new_tensor([self.beta, 1.0 - self.beta]).log()
        mixture = torch.logaddexp(teacher + weights[0], student + weights[1])
        from_teacher = (q * (teacher - mixture)).sum(-1)
        return self.beta * from_teacher + (1.0 - self.beta) * (p * (student - mixture)).sum(-1)


def _with_rest(logprobs: Tensor) -> Tensor:
    """`[..., k]` -> `[..., k + 1]`: also the log of what probability is left, at least _REST."""
    left = -torch.expm1(logprobs.logsumexp(-1, keepdim=True))
    return torch.cat([logprobs, left.clamp(min=_REST).log()], -1)


def check_teacher(teacher: Tensor, lead: torch.Size, device: torch.device) -> Tensor:
    """Log-probabilities `[*lead, k]` with k >= 1, or a ValueError; float32 or float64, detached."""
    name = "teacher_logprobs"
    teacher = unwrap_rows(teacher, name)
    check_group_tensor(teacher, name, min_dim=1)
    if teacher.shape[-1] < 1:
        raise ValueError(f"{name}: expected [..., k] with k >= 1, got k = 0")
    check_same_rows(name, teacher, torch.Size((*lead, teacher.shape[-1])), device)
    return teacher.detach().to(accumulator_dtype(teacher.dtype))


def check_teacher_ids(ids: Tensor, teacher: Tensor) -> None:
    """Integers of the teacher's shape and device, or a ValueError."""
    check_target(ids, teacher.shape, teacher.device, name="ids")


def vocab_parallel_topk_kl_div(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    ids: Tensor,
    *,
    kind: str = "forward",
    beta: float = 0.5,
    tail: str = "bin",
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Divergence of the student from a teacher that is known at k ids of each row, in nats.

    `vocab_parallel_topk_distill` renormalises the teacher over the k ids; here its
    log-probabilities are those of its whole distribution. The ids are the teacher's largest (kind
    "forward"), or the student's own (`vocab_parallel_topk` of detached logits, for "reverse" and
    "jsd"), at which the teacher's come from `vocab_parallel_gather(..., log_softmax=True)`.

    Shape:
        student_logits: `[..., V/TP]`, or a DTensor sharded on its last dimension.
        teacher_logprobs: `[..., k]`, any float dtype, the same on every TP rank; no gradient.
        ids: `[..., k]` integers, global ids, each at most once a row; likewise. A row of
            ignore_index alone gives 0 and no gradient.
        Returns float32 `[...]` (float64 for float64 logits), the same on every TP rank.

    Args:
        kind, beta: as in `vocab_parallel_kl_div`.
        tail: what becomes of the probability that either side gives to the other V - k ids.
            "bin": it counts as one more id, of at least 1e-6. A lower bound of the whole
            divergence, exact where the two agree on the rest up to a factor. "ignore": left out;
            the sum over the k ids alone, which may be negative and has no minimum at p = q.
            "renormalize": both sides are normalised over the k ids, as SFT on cached top-k does.
        the others: as in `vocab_parallel_gather`.

    Collectives: those of `vocab_parallel_gather` with log_softmax.

    Raises:
        ValueError: before any collective; see `vocab_parallel_gather`.
    """
    divergence = TopKDivergence.of(kind, beta, tail)
    check_group_tensor(student_logits, "student_logits", min_dim=1)
    lead = student_logits.shape[:-1]
    teacher = check_teacher(teacher_logprobs, lead, student_logits.device)
    check_teacher_ids(ids, teacher)
    student = vocab_parallel_gather(
        student_logits,
        ids,
        log_softmax=True,
        tp_group=tp_group,
        temperature=temperature,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        backend=backend,
    )
    return finish_topk_divergence(student, teacher, ids, ignore_index, divergence)


def finish_topk_divergence(
    student: Tensor,
    teacher: Tensor,
    ids: Tensor,
    ignore_index: int | None,
    divergence: TopKDivergence,
) -> Tensor:
    """The divergence of `[..., k]` log-probabilities; 0 in rows that are ignored."""
    if ignore_index is None:
        return divergence.value(student, teacher)
    keep = unwrap_rows(ids, "ids") != ignore_index
    # An ignored id has probability 0 on both sides.
    student, teacher = (torch.where(keep, x, LOG_ZERO) for x in (student, teacher))
    return torch.where(keep.any(-1), divergence.value(student, teacher), 0.0)
