"""NeMo-RL's `nemo_rl.distributed.model_utils`: its names and signatures on our operations.

    from mcore_logprobs.dropin.nemo_rl import from_parallel_logits_to_logprobs

Differences that a user can see, all on purpose: results are float32 whatever the logits' dtype
(float64 for float64 ones), no input is modified, gradients have their input's dtype; context
parallelism and packing work on the fused path; a range or rank that is not this process's raises;
so does, on a CPU, a target outside the vocabulary that is not -100.

None as a group means what it means there: only this process if the group may be left out, every
rank where it is required (it goes to `torch.distributed`). Here are the autograd functions, called
as `NAME.apply(...)`, what concerns ranks, and distillation; from targets to log-probabilities of
whole sequences is `nemo_logprobs`, and from hidden states `nemo_fusion`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import mcore_logprobs as ours
from mcore_logprobs.checks import unwrap_logits, unwrap_rows
from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.context_parallel.layouts import SequenceLayout
from mcore_logprobs.dropin._common import (
    ONE_PROCESS,
    applied,
    check_vocab_range,
    grad_unless,
    or_every_rank,
    or_one_process,
    rows_a_chunk,
    shard_padded,
    token_logprobs,
)
from mcore_logprobs.dropin.nemo_fusion import (
    _gpt_forward_with_linear_ce_fusion,
    from_parallel_hidden_states_to_logprobs,
    hidden_logprobs,
    patch_gpt_model_forward_for_linear_ce_fusion,
    unpatch_gpt_model_forward_for_linear_ce_fusion,
)
from mcore_logprobs.dropin.nemo_logprobs import (
    dtensor_from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    get_logprobs_from_vocab_parallel_logits,
    get_next_token_logprobs_from_logits,
    is_dtensor,
    rank_in_group,
)

__all__ = [
    "AllGatherCPTensor",
    "ChunkedDistributedEntropy",
    "ChunkedDistributedGatherLogprob",
    "ChunkedDistributedHiddenStatesToLogprobs",
    "ChunkedDistributedLogprob",
    "ChunkedDistributedLogprobWithSampling",
    "DistributedCrossEntropy",
    "DistributedLogprob",
    "DistributedLogprobWithSampling",
    "_AllReduceSum",
    "_compute_distributed_log_softmax",
    "_compute_distributed_log_softmax_with_grad",
    "_compute_distributed_softmax",
    "_get_tokens_on_this_cp_rank",
    "_gpt_forward_with_linear_ce_fusion",
    "all_to_all_sq2vp",
    "all_to_all_vp2sq",
    "allgather_cp_sharded_tensor",
    "cp_load_balanced_to_contiguous",
    "cp_shift_next",
    "distributed_vocab_topk",
    "dtensor_from_parallel_logits_to_logprobs",
    "from_parallel_hidden_states_to_logprobs",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
    "gather_logits_at_global_indices",
    "get_distillation_topk_logprobs_from_logits",
    "get_logprobs_from_vocab_parallel_logits",
    "get_next_token_logprobs_from_logits",
    "group_all_reduce_sum",
    "group_all_reduce_sum_with_grad",
    "patch_gpt_model_forward_for_linear_ce_fusion",
    "unpatch_gpt_model_forward_for_linear_ce_fusion",
    "vocab_parallel_argmax",
    "vocab_parallel_full_log_softmax",
    "vocab_parallel_gather_columns",
    "vocab_parallel_log_softmax",
]


# ---- autograd functions --------------------------------------------------------------------------


@applied
def DistributedLogprob(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    group: ProcessGroup,
    inference_only: bool = False,
) -> Tensor:
    """`vocab_parallel_logprobs`: `[b, s, V/TP]`, `[b, s]` -> `[b, s]`; targets as they are."""
    check_vocab_range(vocab_start_index, vocab_end_index, vocab_parallel_logits.shape[-1], group)
    return token_logprobs(vocab_parallel_logits, target, group, inference_only=inference_only)


@applied
def ChunkedDistributedLogprob(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: ProcessGroup,
    inference_only: bool = False,
) -> Tensor:
    """`DistributedLogprob`, `chunk_size` positions of the sequence at a time."""
    width = vocab_parallel_logits.shape[-1]
    check_vocab_range(vocab_start_index, vocab_end_index, width, tp_group)
    return token_logprobs(
        vocab_parallel_logits,
        target,
        tp_group,
        chunk_size=chunk_size,
        inference_only=inference_only,
    )


@applied
def DistributedCrossEntropy(
    student_logits: Tensor,
    target_logits: Tensor,
    group: ProcessGroup,
    inference_only: bool = False,
) -> Tensor:
    """`vocab_parallel_soft_cross_entropy` at temperature 1: `[b, s, V/TP]` twice -> `[b, s]`."""
    with grad_unless(inference_only):
        return ours.vocab_parallel_soft_cross_entropy(
            student_logits, target_logits, tp_group=or_every_rank(group)
        )


@applied
def DistributedLogprobWithSampling(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: ProcessGroup,
    top_k: int | None,
    top_p: float | None,
    inference_only: bool = False,
) -> Tensor:
    """`vocab_parallel_sampling_logprobs`: a target that is filtered out gives -inf."""
    return token_logprobs(
        vocab_parallel_logits,
        target,
        tp_group,
        top_k=top_k,
        top_p=top_p,
        inference_only=inference_only,
    )


@applied
def ChunkedDistributedLogprobWithSampling(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: ProcessGroup,
    top_k: int | None,
    top_p: float | None,
    chunk_size: int,
    inference_only: bool = False,
) -> Tensor:
    """`DistributedLogprobWithSampling`, `chunk_size` positions of the sequence at a time."""
    return token_logprobs(
        vocab_parallel_logits,
        target,
        tp_group,
        top_k=top_k,
        top_p=top_p,
        chunk_size=chunk_size,
        inference_only=inference_only,
    )


@applied
def ChunkedDistributedGatherLogprob(
    vocab_parallel_logits: Tensor,
    global_indices: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: ProcessGroup,
    inference_only: bool = False,
) -> Tensor:
    """`vocab_parallel_gather(log_softmax=True)`: ids `[b, s, k]` -> `[b, s, k]`."""
    batch, *_, width = vocab_parallel_logits.shape
    check_vocab_range(vocab_start_index, vocab_end_index, width, tp_group)
    with grad_unless(inference_only):
        return ours.vocab_parallel_gather(
            vocab_parallel_logits,
            global_indices,
            log_softmax=True,
            tp_group=or_every_rank(tp_group),
            chunk_size=rows_a_chunk(chunk_size, batch),
        )


@applied
def ChunkedDistributedEntropy(
    vocab_parallel_logits: Tensor,
    chunk_size: int,
    tp_group: ProcessGroup,
    inference_only: bool = False,
) -> Tensor:
    """Minus `vocab_parallel_entropy`, that is, sum p log p: `[b, s, V/TP]` -> `[b, s]`."""
    rows = rows_a_chunk(chunk_size, vocab_parallel_logits.shape[0])
    with grad_unless(inference_only):
        return -ours.vocab_parallel_entropy(
            vocab_parallel_logits, tp_group=or_every_rank(tp_group), chunk_size=rows
        )


@applied
def ChunkedDistributedHiddenStatesToLogprobs(
    tensor_parallel_hidden_states: Tensor,
    target: Tensor,
    output_weight_layer: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: ProcessGroup,
    inference_only: bool = False,
) -> Tensor:
    """`linear_token_stats` under sequence parallelism: `[s/TP, b, h]`, `[b, s]` -> `[b, s]`.

    The hidden states are gathered over TP a tile at a time; their gradient is reduce-scattered.
    """
    weight = output_weight_layer
    check_vocab_range(vocab_start_index, vocab_end_index, weight.shape[0], tp_group)
    with grad_unless(inference_only):
        return hidden_logprobs(tensor_parallel_hidden_states, weight, target, tp_group, chunk_size)


# ---- context parallelism, reductions, layouts ----------------------------------------------------


@applied
def AllGatherCPTensor(tensor: Tensor, cp_group: ProcessGroup | None, seq_dim: int = 1) -> Tensor:
    """`context_parallel_gather` of zigzag shards; the backward sums over CP. None: every rank."""
    return ours.context_parallel_gather(tensor, cp_group=or_every_rank(cp_group), seq_dim=seq_dim)


allgather_cp_sharded_tensor = AllGatherCPTensor.apply


def _get_tokens_on_this_cp_rank(
    input_ids: Tensor, cp_rank: int, cp_size: int, seq_dim: int = 1
) -> Tensor:
    """The zigzag part of rank `cp_rank` of `cp_size`; lengths divide by 2 * cp_size."""
    if cp_size == 1:
        return input_ids
    length = input_ids.shape[seq_dim]
    layout = SequenceLayout.of("zigzag", cp_size, length, device=input_ids.device)
    return input_ids.index_select(seq_dim, layout.positions(cp_rank))


def cp_load_balanced_to_contiguous(
    x: Tensor, *, cp_group: ProcessGroup | None = None, seq_dim: int = 1
) -> Tensor:
    """This rank's zigzag part -> its contiguous part, of the same length; differentiable."""
    group = or_one_process(cp_group)
    x = ours.context_parallel_gather(unwrap_rows(x, "x"), cp_group=group, seq_dim=seq_dim)
    return ours.context_parallel_shard(x, cp_group=group, seq_dim=seq_dim, layout="contiguous")


def cp_shift_next(x: Tensor, cp_group: ProcessGroup | None = None, *, fill: float) -> Tensor:
    """`out[:, t] = x[:, t + 1]` over contiguous CP parts, `fill` at the very end."""
    return ours.context_parallel_shift(
        x, cp_group=or_one_process(cp_group), seq_dim=1, layout="contiguous", fill=fill
    )


class _SumKeepingGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


@applied
def _AllReduceSum(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over ranks; the backward is the identity: every rank goes on to the same loss."""
    return x if or_one_process(group).size() == 1 else _SumKeepingGradient.apply(x, group)


group_all_reduce_sum_with_grad = _AllReduceSum.apply


@torch.no_grad()
def group_all_reduce_sum(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over ranks, without a gradient; None: only this process."""
    return all_reduce_sum(x.detach(), or_one_process(group))


def all_to_all_vp2sq(vocab_parallel_logits: Tensor, tp_group: ProcessGroup) -> Tensor:
    """`all_to_all_vp2sp`: `[n, V/TP]` -> `[n/TP, V]`."""
    return ours.all_to_all_vp2sp(vocab_parallel_logits, tp_group=or_every_rank(tp_group))


def all_to_all_sq2vp(seq_parallel_logits: Tensor, tp_group: ProcessGroup) -> Tensor:
    """`all_to_all_sp2vp`: `[n/TP, V]` -> `[n, V/TP]`."""
    return ours.all_to_all_sp2vp(seq_parallel_logits, tp_group=or_every_rank(tp_group))


# ---- softmaxes, top-k, gathers, distillation -----------------------------------------------------


def _compute_distributed_log_softmax_with_grad(
    vocab_parallel_logits: Tensor, group: ProcessGroup
) -> Tensor:
    """`[..., V/TP]` -> float32 log-probabilities of the same shape; differentiable."""
    return ours.vocab_parallel_log_softmax(vocab_parallel_logits, tp_group=or_every_rank(group))


@torch.no_grad()
def _compute_distributed_log_softmax(vocab_parallel_logits: Tensor, group: ProcessGroup) -> Tensor:
    """`[..., V/TP]` -> float32 log-probabilities of the same shape; no gradient."""
    return ours.vocab_parallel_log_softmax(vocab_parallel_logits, tp_group=or_every_rank(group))


@torch.no_grad()
def _compute_distributed_softmax(vocab_parallel_logits: Tensor, group: ProcessGroup) -> Tensor:
    """`[..., V/TP]` -> float32 probabilities of the same shape; no gradient."""
    return _compute_distributed_log_softmax(vocab_parallel_logits, group).exp_()


def vocab_parallel_log_softmax(
    logits: Tensor, temperature: float, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """log-softmax of logits / temperature, `[b, s, V/TP]` -> the same shape; differentiable."""
    logits, tp_group = unwrap_logits(logits, tp_group, "logits")
    return ours.vocab_parallel_log_softmax(
        logits, tp_group=or_one_process(tp_group), temperature=temperature
    )


def vocab_parallel_full_log_softmax(
    logits: Tensor, temperature: float, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """The log-softmax of the whole vocabulary on every rank, `[b, s, V]`.

    The gradient is taken as the same on every rank: each takes its own columns of it.
    """
    logits, tp_group = unwrap_logits(logits, tp_group, "logits")
    logprobs = vocab_parallel_log_softmax(logits, temperature, tp_group=tp_group)
    # Gathering contiguous parts is the same for columns as for positions.
    return ours.context_parallel_gather(
        logprobs, cp_group=or_one_process(tp_group), seq_dim=-1, layout="contiguous", grad="slice"
    )


def vocab_parallel_gather_columns(
    logits: Tensor, column_indices: Tensor, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Raw logits at one set of ids `[k]` for all positions: float32 `[b, s, k]`."""
    logits, tp_group = unwrap_logits(logits, tp_group, "logits")
    ids = column_indices.to(logits.device).expand(*logits.shape[:-1], -1)
    return ours.vocab_parallel_gather(logits, ids, tp_group=or_one_process(tp_group))


def vocab_parallel_argmax(logits: Tensor, *, tp_group: ProcessGroup | None = None) -> Tensor:
    """The global id of each position's largest logit, `[b, s]`."""
    logits, tp_group = unwrap_logits(logits, tp_group, "logits")
    return ours.vocab_parallel_argmax(logits, tp_group=or_one_process(tp_group))


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
    group = or_every_rank(tp_group)
    rows = rows_a_chunk(chunk_size, batch)
    k = min(k, width * group.size())
    return ours.vocab_parallel_topk(vocab_parallel_logits, k, tp_group=group, chunk_size=rows)


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
    values = ours.vocab_parallel_gather(
        vocab_parallel_logits,
        shard_padded(global_indices.long(), local_length, cp),
        tp_group=tp,
        chunk_size=rows_a_chunk(chunk_size, batch),
    )
    return ours.context_parallel_gather(values, cp_group=cp)[:, : global_indices.shape[1]]


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
    k]`. zero_outside_topk: the student is normalized over the vocabulary, else over the k ids.

    Returns:
        The student's and the teacher's log-probabilities `[b, s - 1, k]`, and H_all `[b, s - 1]`,
        which is sum p log p of the student (minus its entropy), or None.

    Raises:
        ValueError: as in `get_next_token_logprobs_from_logits`.
    """
    tp, cp = vocab_parallel_group, context_parallel_group
    if tp is not None:
        width = student_logits.shape[-1]
        start = rank_in_group(vocab_parallel_rank) * width
        check_vocab_range(start, start + width, width, tp)
    elif is_dtensor(student_logits):
        cp = ours.ParallelGroups.from_device_mesh(student_logits.device_mesh).cp  # type: ignore[attr-defined]
        student_logits, tp = unwrap_logits(student_logits, None, "student_logits")
    cp = or_one_process(cp)
    local_length, length = student_logits.shape[1], teacher_topk_indices.shape[1]
    ids = teacher_topk_indices.to(student_logits.device).long()
    teacher_logits = teacher_topk_logits.to(student_logits.device)
    student, _, entropy = ours.vocab_parallel_topk_distill(
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
        h_all = -ours.context_parallel_gather(entropy, cp_group=cp)[:, kept]
    student = ours.context_parallel_gather(student, cp_group=cp)
    return student[:, kept], teacher[:, kept], h_all
