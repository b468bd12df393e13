"""Divergence from a teacher known at a few ids of each row, from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.fused.gather import linear_gather
from mcore_logprobs.fused.lora import LoRAInput
from mcore_logprobs.fused.tokens import whole_lead
from mcore_logprobs.groups import resolve_tp_group
from mcore_logprobs.logits.opening import check_group_tensor
from mcore_logprobs.logits.topk_divergence import (
    TopKDivergence,
    check_teacher,
    check_teacher_ids,
    finish_topk_divergence,
)

__all__ = ["linear_topk_kl_div"]


def linear_topk_kl_div(
    hidden: Tensor,
    weight: Tensor,
    teacher_logprobs: Tensor,
    ids: Tensor,
    *,
    kind: str = "forward",
    beta: float = 0.5,
    tail: str = "bin",
    bias: Tensor | None = None,
    lora: LoRAInput | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    compact: bool = False,
    gradient_accumulation_fusion: bool = False,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """`vocab_parallel_topk_kl_div` of a head's logits without ever holding them.

    Shape:
        hidden, weight, bias, lora: as in `linear_token_stats`; the student's.
        teacher_logprobs, ids: `[s, b, k]` or `[n, k]`, the whole sequence on every TP rank also
            under sequence parallelism. For "reverse" and "jsd" the student's own ids come from
            `linear_topk` of detached operands, the teacher's log-probabilities there from
            `linear_gather(..., log_softmax=True)` of its own hidden states, of any size.
        Returns float32 `[s, b]` or `[n]` (float64 for float64 operands), the same on every TP rank.

    Args:
        kind, beta, tail: as in `vocab_parallel_topk_kl_div`.
        the others: as in `linear_gather`, whose cost, collectives and memory with log_softmax these
            are too.

    Raises:
        ValueError: before any collective; see `linear_gather`.
    """
    divergence = TopKDivergence.of(kind, beta, tail)
    check_group_tensor(hidden, "hidden", min_dim=2)
    group = resolve_tp_group(tp_group)
    lead = whole_lead(hidden, group, sequence_parallel=sequence_parallel)
    teacher = check_teacher(teacher_logprobs, lead, hidden.device)
    check_teacher_ids(ids, teacher)
    student = linear_gather(
        hidden,
        weight,
        ids,
        log_softmax=True,
        bias=bias,
        lora=lora,
        logit_scale=logit_scale,
        softcap=softcap,
        sequence_parallel=sequence_parallel,
        logits_dtype=logits_dtype,
        compact=compact,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        tp_group=group,
        temperature=temperature,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        backend=backend,
    )
    return finish_topk_divergence(student, teacher, ids, ignore_index, divergence)
