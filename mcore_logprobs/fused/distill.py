"""Distillation from hidden states: the student's logits are never held, nor the teacher's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_flag
from mcore_logprobs.fused.compaction import Compaction
from mcore_logprobs.fused.head import LinearOptions, open_linear
from mcore_logprobs.fused.pair import LinearDivergence, PairOptions
from mcore_logprobs.groups import group_size, resolve_tp_group
from mcore_logprobs.logits.distill import check_backend, check_kind, check_mask
from mcore_logprobs.logits.dtensor import unwrap_logits
from mcore_logprobs.logits.inputs import check_group_tensor

__all__ = ["linear_kl_div"]


def linear_kl_div(
    hidden: Tensor,
    weight: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    kind: str = "forward",
    beta: float = 0.5,
    mask: Tensor | None = None,
    compact: bool = False,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    gradient_accumulation_fusion: bool = False,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """`vocab_parallel_kl_div` of a head's logits without ever holding them.

    The teacher is either its logits, or its hidden states and its head's weight: then its logits
    are never held either. Equal to the unfused operation on float32 logits up to rounding.

    Shape:
        hidden: `[s, b, h]` (`[s/TP, b, h]` under sequence parallelism) or `[n, h]` (`[n/TP, h]`).
        weight: `[V/TP, h]`, this rank's rows of the student's output layer, in hidden's dtype.
        teacher_logits: `[s, b, V/TP]` or `[n, V/TP]`, the whole sequence on every TP rank, of
            any float dtype; or a DTensor sharded on its last dimension.
        teacher_hidden, teacher_weight, teacher_bias: as hidden, weight and bias, of any hidden
            size; teacher_hidden is split over TP if hidden is.
        mask: bool `[s, b]` or `[n]`, the whole sequence; False rows give 0 and no gradient.
        Returns float32 `[s, b]` or `[n]` (float64 where either side is).

    Args:
        kind, beta, temperature, teacher_temperature, vocab_size: as in `vocab_parallel_kl_div`.
        teacher_logit_scale, teacher_softcap: of the teacher's own head; with teacher_logits too.
        compact: compute only rows that the mask keeps; the same results. One host sync.
        bias, logit_scale, softcap, sequence_parallel, logits_dtype, gradient_accumulation_fusion,
            tp_group, chunk_size: as in `linear_token_stats`.
        backend: "auto" or "torch"; there is no Triton kernel for two sides.

    The gradient goes to hidden, weight and bias of the student, accumulated in float32.

    Collectives: forward one all-gather of `[5, n]` float32 over TP, for "jsd" one all-reduce of
    `[2, n]` more; backward those of `linear_token_stats`. Sequence parallelism gathers each tile of
    both hidden states, forward (twice for "jsd") and backward.

    Memory: a chunk of either side's logits and where operands are bfloat16 its gradient; the
    gradients. Saved for backward: the inputs and a few numbers a row.

    Raises:
        ValueError: before any collective; neither or both kinds of teacher; else as in
            `vocab_parallel_kl_div` and `linear_token_stats`.
    """
    check_kind(kind, beta)
    check_backend(backend)
    check_flag("compact", compact)
    check_group_tensor(hidden, "hidden", min_dim=2)
    check_flag("sequence_parallel", sequence_parallel)
    if (teacher_logits is None) == (teacher_hidden is None and teacher_weight is None):
        raise ValueError(
            "teacher: expected either teacher_logits or teacher_hidden with teacher_weight"
        )
    if compact and mask is None:
        raise ValueError("compact=True: expected a mask that says which rows to keep, got None")
    if teacher_logits is not None:
        teacher_logits, tp_group = unwrap_logits(teacher_logits, tp_group, "teacher_logits")
    group = resolve_tp_group(tp_group)
    ranks = group_size(group) if sequence_parallel else 1
    lead = torch.Size((hidden.shape[0] * ranks, *hidden.shape[1:-1]))
    mask = check_mask(mask, lead, hidden.device)
    shared: dict[str, Any] = {
        "entropy": False,
        "target_rank": False,
        "sequence_parallel": sequence_parallel,
        "logits_dtype": logits_dtype,
        "tp_group": group,
        "vocab_size": vocab_size,
        "ignore_index": None,
        "label_smoothing": 0.0,
        "chunk_size": chunk_size,
        "backend": backend,
    }
    nobody = torch.zeros(lead, dtype=torch.int64, device=hidden.device)
    student, _ = open_linear(
        hidden,
        weight,
        nobody,
        bias=bias,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=temperature,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        **shared,
    )
    if teacher_temperature is None:
        teacher_temperature = temperature
    # With given logits, a stand-in head has the teacher's scale, softcap and temperature checked.
    given = teacher_logits is not None
    if given:
        _check_given(teacher_logits, torch.Size((*lead, weight.shape[0])), hidden.device)
        stand_in = weight.detach()
        teacher = open_linear(
            hidden,
            stand_in,
            nobody,
            bias=None,
            logit_scale=teacher_logit_scale,
            softcap=teacher_softcap,
            temperature=teacher_temperature,
            gradient_accumulation_fusion=False,
            **shared,
        )[0]
        if teacher_bias is not None:
            raise ValueError("teacher_bias: expected None with teacher_logits")
    else:
        teacher = _open_teacher(
            teacher_hidden,
            teacher_weight,
            nobody,
            weight,
            bias=teacher_bias,
            logit_scale=teacher_logit_scale,
            softcap=teacher_softcap,
            temperature=teacher_temperature,
            gradient_accumulation_fusion=False,
            **shared,
        )
    opts = PairOptions(student, None if given else teacher, teacher.spec, kind, float(beta))

    keep = nobody.reshape(-1) == 0 if mask is None else mask.reshape(-1)
    flat = hidden.reshape(-1, hidden.shape[-1])
    first = teacher_logits if given else teacher_hidden
    assert first is not None
    first = first.detach()
    if not given:
        first = first.reshape(-1, first.shape[-1])
    index = None
    compaction = Compaction(keep, student) if compact else None
    if compaction is not None:
        index = compaction.select(torch.arange(keep.shape[0], device=keep.device))
        flat, keep = compaction.select_hidden(flat), compaction.select(keep)
        if not given:
            first = compaction.select_hidden(first)
    value = LinearDivergence.apply(
        flat, weight, bias, first, teacher_weight, teacher_bias, keep, index, opts
    )
    if compaction is not None:
        value = compaction.spread((value, None, None, None))[0]
    return value.view(lead)


def _open_teacher(
    hidden: Any, weight: Any, nobody: Tensor, student_weight: Tensor, **options: Any
) -> LinearOptions:
    for name, tensor in (("teacher_hidden", hidden), ("teacher_weight", weight)):
        check_group_tensor(tensor, name, min_dim=2)
        if tensor.device != nobody.device:
            raise ValueError(f"{name}: expected device {nobody.device}, got {tensor.device}")
    if weight.shape[0] != student_weight.shape[0]:
        raise ValueError(
            f"teacher_weight: expected the student's V/TP = {student_weight.shape[0]} rows, got "
            f"shape {tuple(weight.shape)}"
        )
    ranks = group_size(options["tp_group"]) if options["sequence_parallel"] else 1
    lead = (hidden.shape[0] * ranks, *hidden.shape[1:-1])
    if lead != tuple(nobody.shape):
        raise ValueError(
            f"teacher_hidden: expected hidden's leading shape {tuple(nobody.shape)} over all TP "
            f"ranks, got {lead}"
        )
    return open_linear(hidden, weight, nobody, **options)[0]


def _check_given(logits: Any, shape: torch.Size, device: torch.device) -> None:
    check_group_tensor(logits, "teacher_logits", min_dim=2)
    if logits.shape != shape or logits.device != device:
        raise ValueError(
            f"teacher_logits: expected shape {tuple(shape)} on {device}, got "
            f"{tuple(logits.shape)} on {logits.device}"
        )
