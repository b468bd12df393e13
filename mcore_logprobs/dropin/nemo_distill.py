"""NeMo-RL's softmaxes, top-k, gathers and top-k distillation. None as a TP group: no TP."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.context_parallel import context_parallel_gather
from mcore_logprobs.dropin import nemo_logprobs
from mcore_logprobs.dropin._common import (
    ONE_PROCESS,
    check_vocab_range,
    or_one_process,
    rows_a_chunk,
)
from mcore_logprobs.dropin.nemo_context import IGNORED, shard_padded
from mcore_logprobs.groups import ParallelGroups
from mcore_logprobs.logits import log_softmax as logits_log_softmax
from mcore_logprobs.logits import topk as logits_topk
from mcore_logprobs.logits.dtensor import unwrap_logits
from mcore_logprobs.logits.gather import vocab_parallel_gather, vocab_parallel_topk_distill

__all__ = [
    "_compute_distributed_log_softmax",
    "_compute_distributed_log_softmax_with_grad",
    "_compute_distributed_softmax",
    "distributed_vocab_topk",
    "gather_logits_at_global_indices",
    "get_distillation_topk_logprobs_from_logits",
    "vocab_parallel_argmax",
    "vocab_parallel_full_log_softmax",
    "vocab_parallel_gather_columns",
    "vocab_parallel_log_softmax",
]


def _compute_distributed_log_softmax_with_grad(
    vocab_parallel_logits: Tensor, group: ProcessGroup
) -> Tensor:
    """`[..., V/TP]` -> float32 log-probabilities of the same shape; differentiable."""
    return logits_log_softmax.vocab_parallel_log_softmax(vocab_parallel_logits, tp_group=group)


@torch.no_grad()
def _compute_distributed_log_softmax(vocab_parallel_logits: Tensor, group: ProcessGroup) -> Tensor:
    """`[..., V/TP]` -> float32 log-probabilities of the same shape; no gradient."""
    return logits_log_softmax.vocab_parallel_log_softmax(vocab_parallel_logits, tp_group=group)


@torch.no_grad()
def _compute_distributed_softmax(vocab_parallel_logits: Tensor, group: ProcessGroup) -> Tensor:
    """`[..., V/TP]` -> float32 probabilities of the same shape; no gradient."""
    return _compute_distributed_log_softmax(vocab_parallel_logits, group).exp_()


def vocab_parallel_log_softmax(
    logits: Tensor, temperature: float, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """log-softmax of logits / temperature, `[b, s, V/TP]` -> the same shape; differentiable."""
    logits, tp_group = unwrap_logits(logits, tp_group, "logits")
    return logits_log_softmax.vocab_parallel_log_softmax(
        logits, tp_group=or_one_process(tp_group), temperature=temperature
    )


def vocab_parallel_full_log_softmax(
    logits: Tensor, temperature: float, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """As `vocab_parallel_log_softmax`, whole on every rank: `[b, s, V]`.

    The gradient is taken as the same on every rank: each takes its own columns of it.
    """
    logits, tp_group = unwrap_logits(logits, tp_group, "logits")
    logprobs = vocab_parallel_log_softmax(logits, temperature, tp_group=tp_group)
    # Gathering contiguous parts is the same for columns as for positions.
    return context_parallel_gather(
        logprobs, cp_group=or_one_process(tp_group), seq_dim=-1, layout="contiguous", grad="slice"
    )


def vocab_parallel_gather_columns(
    logits: Tensor, column_indices: Tensor, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Raw logits at one set of ids `[k]` for all positions: float32 `[b, s, k]`."""
    logits, tp_group = unwrap_logits(logits, tp_group, "logits")
    ids = column_indices.to(logits.device).expand(*logits.shape[:-1], -1)
    return vocab_parallel_gather(logits, ids, tp_group=or_one_process(tp_group))


def vocab_parallel_argmax(logits: Tensor, *, tp_group: ProcessGroup | None = None) -> Tensor:
    """The global id of each position's largest logit, `[b, s]`."""
    logits, tp_group = unwrap_logits(logits, tp_group, "logits")
    return logits_topk.vocab_parallel_argmax(logits, tp_group=or_one_process(tp_group))


@torch.no_grad()
def distributed_vocab_topk(
    vocab_parallel_logits: Tensor,
    k: int,
    tp_group: ProcessGroup,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(values, global ids) `[b, s, min(k, V)]`, largest first; no gradient."""
    batch, *_, width = vocab_parallel_logits.shape
    check_vocab_range(vocab_start_index, vocab_end_index, width, tp_group)
    group = or_one_process(tp_group)
    return logits_topk.vocab_parallel_topk(
        vocab_parallel_logits,
        min(k, width * group.size()),
        tp_group=group,
        chunk_size=rows_a_chunk(chunk_size, batch),
    )


def gather_logits_at_global_indices(
    vocab_parallel_logits: Tensor,
    global_indices: Tensor,
    tp_group: ProcessGroup | None = None,
    cp_group: ProcessGroup | None = None,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None = None,
) -> Tensor:
    """`[b, s/CP, V/TP]` zigzag, ids `[b, s, k]` -> raw logits `[b, s, k]`; differentiable.

    The backward sums over CP.
    """
    batch, local_length, width = vocab_parallel_logits.shape
    tp, cp = or_one_process(tp_group), or_one_process(cp_group)
    check_vocab_range(vocab_start_index, vocab_end_index, width, tp)
    values = vocab_parallel_gather(
        vocab_parallel_logits,
        shard_padded(global_indices.long(), local_length, cp, IGNORED),
        tp_group=tp,
        chunk_size=rows_a_chunk(chunk_size, batch),
    )
    return context_parallel_gather(values, cp_group=cp)[:, : global_indices.shape[1]]


def get_distillation_topk_logprobs_from_logits(
    student_logits: Tensor,
    teacher_topk_logits: Tensor,
    teacher_topk_indices: Tensor,
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    context_parallel_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`vocab_parallel_topk_distill` over TP and CP, each result cut to s - 1 positions.

    Student logits `[b, s/CP, V/TP]` (or a DTensor, or the whole vocabulary), the teacher's `[b, s,
    k]`. zero_outside_topk: the student is normalised over the vocabulary, else over the k ids.

    Returns:
        The student's and the teacher's log-probabilities `[b, s - 1, k]`, and H_all `[b, s - 1]`,
        which is sum p log p of the student (minus its entropy), or None.

    Raises:
        ValueError: as in `get_next_token_logprobs_from_logits`.
    """
    tp, cp = vocab_parallel_group, context_parallel_group
    if tp is not None:
        if vocab_parallel_rank is None:
            raise ValueError("vocab_parallel_rank: expected this rank in the group, got None")
        width = student_logits.shape[-1]
        start = vocab_parallel_rank * width
        check_vocab_range(start, start + width, width, tp)
    elif nemo_logprobs.is_dtensor(student_logits):
        cp = ParallelGroups.from_device_mesh(student_logits.device_mesh).cp  # type: ignore[attr-defined]
        student_logits, tp = unwrap_logits(student_logits, None, "student_logits")
    cp = or_one_process(cp)
    local_length, length = student_logits.shape[1], teacher_topk_indices.shape[1]
    ids = teacher_topk_indices.to(student_logits.device).long()
    teacher_logits = teacher_topk_logits.to(student_logits.device)
    student, _, entropy = vocab_parallel_topk_distill(
        student_logits,
        shard_padded(teacher_logits, local_length, cp, 0),
        shard_padded(ids, local_length, cp, 0),
        normalize="vocab" if zero_outside_topk else "topk",
        entropy=calculate_entropy,
        tp_group=or_one_process(tp),
    )
    teacher = vocab_parallel_log_softmax(teacher_logits, 1.0, tp_group=ONE_PROCESS)
    kept = slice(0, length - 1)
    h_all = None
    if entropy is not None:
        h_all = -context_parallel_gather(entropy, cp_group=cp)[:, kept]
    student = context_parallel_gather(student, cp_group=cp)
    return student[:, kept], teacher[:, kept], h_all
