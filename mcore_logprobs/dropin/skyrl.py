"""SkyRL's `skyrl.backends.skyrl_train.distributed.megatron.model_utils` and `.mtp.soft_ce`.

    from mcore_logprobs.dropin.skyrl import from_parallel_hidden_to_logprobs

Targets are unshifted and shifted here, within each packed sequence; log-probabilities, not losses.
Hidden states are `[b, s/CP, h]`, whole over TP; their gradient is a rank's share, to be summed over
TP, as the operator in front of them does (`fused_lm_head_output_processor`). The names that SkyRL
took from NeMo-RL are those of `mcore_logprobs.dropin.nemo_rl`.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import mcore_logprobs as ours
from mcore_logprobs.dropin._common import (
    applied,
    check_vocab_range,
    grad_unless,
    next_tokens,
    no_targets,
    or_every_rank,
    or_one_process,
    packed_places,
    packed_targets,
    rows_a_chunk,
    shard_padded,
    share_of_gradient,
    size_or_none,
    token_logprobs,
)
from mcore_logprobs.dropin.nemo_rl import (
    AllGatherCPTensor,
    ChunkedDistributedLogprob,
    DistributedLogprob,
    _compute_distributed_log_softmax,
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
    from_parallel_logits_to_logprobs,
)

__all__ = [
    "AllGatherCPTensor",
    "AllGatherPackedCPTensor",
    "ChunkedDistributedLogprob",
    "DistributedLogprob",
    "FusedLinearChunkedDistributedLogprob",
    "_compute_distributed_log_softmax",
    "_fused_vocab_parallel_entropy_from_hidden",
    "_get_tokens_on_this_cp_rank",
    "allgather_cp_sharded_packed_tensor",
    "allgather_cp_sharded_tensor",
    "draft_soft_ce",
    "from_parallel_hidden_to_entropy_packed_sequences",
    "from_parallel_hidden_to_logprobs",
    "from_parallel_hidden_to_logprobs_packed_sequences",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
    "vocab_parallel_entropy",
    "vocab_parallel_entropy_packed_sequences",
    "vocab_parallel_entropy_weighted_sum",
]


@applied
def AllGatherPackedCPTensor(
    tensor: Tensor, cu_seqlens_padded: Tensor, cp_group: ProcessGroup | None
) -> Tensor:
    """`[T/CP]` zigzag in each packed sequence -> `[T]`; the backward takes this rank's own part.

    cp_group None: every rank.
    """
    group = or_every_rank(cp_group)
    return ours.context_parallel_gather(
        tensor, cp_group=group, seq_dim=0, cu_seqlens=cu_seqlens_padded, grad="slice"
    )


allgather_cp_sharded_packed_tensor = AllGatherPackedCPTensor.apply


@applied
def FusedLinearChunkedDistributedLogprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None,
    tp_group: ProcessGroup,
    inference_only: bool = False,
) -> Tensor:
    """Hidden `[b, s, h]`, weight `[V/TP, h]`, targets as they are `[b, s]` -> float32 `[b, s]`."""
    check_vocab_range(vocab_start_index, vocab_end_index, weight.shape[0], tp_group)
    return _head(
        hidden, weight, target, tp_group, chunk_size, inference_only=inference_only
    ).logprobs


def _head(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    tp_group: ProcessGroup | None,
    chunk_size: int | None,
    *,
    inference_only: bool = False,
    temperature: float = 1.0,
    entropy: bool = False,
) -> ours.TokenStats:
    group = or_every_rank(tp_group)
    with grad_unless(inference_only):
        return ours.linear_token_stats(
            share_of_gradient(hidden.to(weight.dtype), group.size()),
            weight,
            target,
            tp_group=group,
            chunk_size=rows_a_chunk(size_or_none(chunk_size), hidden.shape[0]),
            temperature=temperature,
            entropy=entropy,
        )


# ---- packed sequences ----------------------------------------------------------------------------


def _places(
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    attention_mask: Tensor | None,
    sub_seq_lengths: list[list[int]] | None,
) -> tuple[Tensor, Tensor]:
    """(packed position, whether it has one) of each of `[b, unpacked_seqlen - 1]` outputs.

    A sequence's last token predicts nothing and has none. A host sync for sub_seq_lengths only.

    Raises:
        ValueError: sub_seq_lengths that are not as many as the packed sequences.
    """
    if sub_seq_lengths is not None:
        return _places_of_rows(cu_seqlens_padded, unpacked_seqlen, sub_seq_lengths)
    if attention_mask is None:
        return packed_places(cu_seqlens_padded, unpacked_seqlen - 1)
    mask = attention_mask.to(cu_seqlens_padded.device).long()
    ordinal = mask.cumsum(1)[:, :-1] - 1
    inside = mask[:, :-1].bool() & (ordinal < mask.sum(1, keepdim=True) - 1)
    return (cu_seqlens_padded.long()[:-1].unsqueeze(1) + ordinal).where(inside, 0), inside


def _places_of_rows(
    cu_seqlens_padded: Tensor, unpacked_seqlen: int, sub_seq_lengths: list[list[int]]
) -> tuple[Tensor, Tensor]:
    starts = cu_seqlens_padded.tolist()
    count = sum(map(len, sub_seq_lengths))
    if count != len(starts) - 1:
        raise ValueError(f"sub_seq_lengths: expected {len(starts) - 1} lengths, got {count}")
    source = torch.full((len(sub_seq_lengths), unpacked_seqlen - 1), -1)
    segment = 0
    for row, lengths in enumerate(sub_seq_lengths):
        first = starts[segment]
        for length in lengths:
            column = starts[segment] - first  # sequences of a row lie as far apart as packed
            room = max(0, min(length - 1, unpacked_seqlen - 1 - column))
            source[row, column : column + room] = torch.arange(room) + starts[segment]
            segment += 1
    source = source.to(cu_seqlens_padded.device)
    return source.clamp(min=0), source >= 0


def _unpacked(
    local: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    cp_group: ProcessGroup | None,
    attention_mask: Tensor | None,
    sub_seq_lengths: list[list[int]] | None,
) -> Tensor:
    """`[T/CP]` -> `[b, unpacked_seqlen - 1]`, 0 where there is no token."""
    cp = or_one_process(cp_group)
    packed = allgather_cp_sharded_packed_tensor(local, cu_seqlens_padded, cp)
    source, inside = _places(cu_seqlens_padded, unpacked_seqlen, attention_mask, sub_seq_lengths)
    return torch.where(inside, packed[source], 0.0)


def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: ProcessGroup,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    attention_mask: Tensor | None = None,
    sub_seq_lengths: list[list[int]] | None = None,
) -> Tensor:
    """`[1, T/CP, V/TP]` packed, unshifted target `[1, T]` -> float32 `[b, unpacked_seqlen - 1]`.

    attention_mask `[b, unpacked_seqlen]`: values go back to the places of its ones.
    sub_seq_lengths: several packed sequences per row, in SkyRL's places. Neither: each sequence
    from column 0 on. 0 elsewhere and at each last token. Under CP the backward takes this rank's
    own part, as SkyRL's.
    """
    check_vocab_range(vocab_start_index, vocab_end_index, vocab_parallel_logits.shape[-1], group)
    targets = packed_targets(target, cu_seqlens_padded, cp_group)
    local = token_logprobs(
        vocab_parallel_logits,
        targets,
        group,
        chunk_size=chunk_size,
        inference_only=inference_only,
    )
    places = (attention_mask, sub_seq_lengths)
    return _unpacked(local[0], cu_seqlens_padded, unpacked_seqlen, cp_group, *places)


def from_parallel_hidden_to_logprobs_packed_sequences(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: ProcessGroup,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    attention_mask: Tensor | None = None,
    sub_seq_lengths: list[list[int]] | None = None,
    temperature: float = 1.0,
    fused_backend: str = "torch",
) -> Tensor:
    """Log-probabilities of packed sequences from hidden states `[1, T/CP, h]`; otherwise like
    `from_parallel_logits_to_logprobs_packed_sequences`.

    temperature divides the logits. fused_backend: ignored; the best available backend
    computes.
    """
    check_vocab_range(vocab_start_index, vocab_end_index, lm_head_weight.shape[0], group)
    targets = packed_targets(target, cu_seqlens_padded, cp_group)
    local = _head(
        hidden,
        lm_head_weight,
        targets,
        group,
        chunk_size,
        inference_only=inference_only,
        temperature=temperature,
    ).logprobs
    places = (attention_mask, sub_seq_lengths)
    return _unpacked(local[0], cu_seqlens_padded, unpacked_seqlen, cp_group, *places)


def from_parallel_hidden_to_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    temperature: float = 1.0,
    fused_backend: str = "torch",
) -> Tensor:
    """Hidden `[b, s/CP, h]` zigzag, unshifted target `[b, s]` -> float32 `[b, s - 1]`.

    temperature divides the logits; fused_backend is ignored. Over CP the backward sums.
    """
    check_vocab_range(vocab_start_index, vocab_end_index, lm_head_weight.shape[0], tp_group)
    targets = shard_padded(next_tokens(target), hidden.shape[1], cp_group)
    local = _head(
        hidden,
        lm_head_weight,
        targets,
        tp_group,
        chunk_size,
        inference_only=inference_only,
        temperature=temperature,
    ).logprobs
    gathered = ours.context_parallel_gather(local, cp_group=or_one_process(cp_group))
    return gathered[:, : target.shape[1] - 1]


# ---- entropy -------------------------------------------------------------------------------------


def vocab_parallel_entropy(
    vocab_parallel_logits: Tensor, chunk_size: int | None = None, chunk_memory_mb: int = 512
) -> Tensor:
    """`[..., V/TP]` -> float32 entropy `[...]` in nats, on Megatron's TP group; differentiable.

    chunk_size: tokens at a time; None or 0: from this library's own memory budget, whatever
    chunk_memory_mb says.
    """
    return ours.vocab_parallel_entropy(vocab_parallel_logits, chunk_size=size_or_none(chunk_size))


def vocab_parallel_entropy_weighted_sum(
    vocab_parallel_logits: Tensor,
    weights: Tensor,
    chunk_size: int | None = None,
    chunk_memory_mb: int = 512,
) -> Tensor:
    """The scalar sum of entropy times weights `[...]`; chunks as in `vocab_parallel_entropy`.

    Tokens of weight 0 have no part in it, whatever their logits hold.
    """
    return _weighted_sum(vocab_parallel_entropy(vocab_parallel_logits, chunk_size), weights)


def _weighted_sum(entropy: Tensor, weights: Tensor) -> Tensor:
    # Attention may give NaN at padding, and NaN times 0 is NaN.
    return (entropy.where(weights != 0, 0.0) * weights).sum()


def _fused_vocab_parallel_entropy_from_hidden(
    hidden: Tensor,
    lm_head_weight: Tensor,
    tp_group: ProcessGroup,
    chunk_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Hidden `[b, s, h]` -> float32 entropy `[b, s]` in nats. Differentiable, as SkyRL's is not."""
    stats = _head(
        hidden,
        lm_head_weight,
        no_targets(hidden),
        tp_group,
        chunk_size,
        temperature=temperature,
        entropy=True,
    )
    assert stats.entropy is not None
    return stats.entropy


def _mean_entropy(
    entropy: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    num_actions: int,
    attention_mask: Tensor,
    loss_mask: Tensor | None,
    cp_group: ProcessGroup | None,
    sub_seq_lengths: list[list[int]] | None,
) -> tuple[Tensor, Tensor]:
    """Local entropies `[T/CP]` -> (mean over all actions, this CP rank's term of it)."""
    cp = or_one_process(cp_group)
    mask = attention_mask.to(entropy.device)
    source, inside = _places(cu_seqlens_padded, unpacked_seqlen, mask, sub_seq_lengths)
    actions = entropy.new_zeros(source.shape)
    actions[:, -num_actions:] = 1.0 if loss_mask is None else loss_mask.to(actions)
    packed = entropy.new_zeros(entropy.shape[0] * cp.size())
    packed = packed.index_add(0, source.reshape(-1), (actions * inside).reshape(-1))
    weights = ours.context_parallel_shard(
        packed, cp_group=cp, seq_dim=0, cu_seqlens=cu_seqlens_padded
    )
    term = _weighted_sum(entropy, weights) / packed.sum().clamp(min=1.0)
    everyone = ours.context_parallel_gather(
        term.detach().reshape(1), cp_group=cp, seq_dim=0, layout="contiguous"
    )
    return everyone.sum(), term


def vocab_parallel_entropy_packed_sequences(
    vocab_parallel_logits: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    num_actions: int,
    attention_mask: Tensor,
    loss_mask: Tensor | None,
    cp_group: ProcessGroup | None,
    sub_seq_lengths: list[list[int]] | None = None,
    chunk_size: int | None = None,
    chunk_memory_mb: int = 512,
) -> tuple[Tensor, Tensor]:
    """Mean entropy of the actions of packed logits `[1, T/CP, V/TP]`: two scalars.

    (mean over every CP rank's actions, without gradient; this rank's term of it, with gradient: the
    terms of the ranks add up to the mean). Actions are the last num_actions of `unpacked_seqlen -
    1`, weighted by loss_mask `[b, num_actions]`.
    """
    entropy = vocab_parallel_entropy(vocab_parallel_logits, chunk_size)[0]
    layout = (cu_seqlens_padded, unpacked_seqlen, num_actions, attention_mask, loss_mask)
    return _mean_entropy(entropy, *layout, cp_group, sub_seq_lengths)


def from_parallel_hidden_to_entropy_packed_sequences(
    hidden: Tensor,
    lm_head_weight: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    num_actions: int,
    attention_mask: Tensor,
    loss_mask: Tensor | None,
    cp_group: ProcessGroup | None,
    tp_group: ProcessGroup,
    sub_seq_lengths: list[list[int]] | None = None,
    chunk_size: int | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Entropy of packed sequences from hidden states `[1, T/CP, h]`; otherwise like
    `vocab_parallel_entropy_packed_sequences`.
    """
    entropy = _fused_vocab_parallel_entropy_from_hidden(
        hidden, lm_head_weight, tp_group, chunk_size, temperature
    )[0]
    layout = (cu_seqlens_padded, unpacked_seqlen, num_actions, attention_mask, loss_mask)
    return _mean_entropy(entropy, *layout, cp_group, sub_seq_lengths)


# ---- multi-token prediction ----------------------------------------------------------------------


def draft_soft_ce(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    global_normalization_factor: Tensor | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Mean over the mask `[b, s]` of the draft head's soft cross entropy: a scalar.

    Logits `[b, s, V/TP]`, from which SkyRL cuts the vocabulary's padding off, so that the last
    ranks may have fewer columns; vocab_parallel_group None: the whole vocabulary. The denominator
    is the mask's sum, or global_normalization_factor, and at least 1. Rows whose mask is 0 have no
    part in it, whatever their logits hold.

    Collectives: one all-gather over TP; at a group's first call one all-reduce and a host sync.

    Raises:
        ValueError: teacher_logits that require a gradient; on a rank that has more columns than the
            widest had at the group's first call (the others wait for it then).
    """
    if teacher_logits.requires_grad:
        raise ValueError("teacher_logits: expected detached logits, got ones that need a gradient")
    group = or_one_process(vocab_parallel_group)
    missing = _widest_shard(student_logits, group) - student_logits.shape[-1]
    if missing:
        student_logits, teacher_logits = (
            torch.nn.functional.pad(x, (0, missing), value=-torch.inf)
            for x in (student_logits, teacher_logits)
        )
    per_token = ours.vocab_parallel_soft_cross_entropy(
        student_logits,
        teacher_logits,
        mask=mask != 0,
        tp_group=group,
        chunk_size=rows_a_chunk(chunk_size, student_logits.shape[0]),
    )
    tokens = mask.sum() if global_normalization_factor is None else global_normalization_factor
    return (per_token * mask).sum() / tokens.clamp(min=1.0)


_widest: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def _widest_shard(logits: Tensor, group: ProcessGroup) -> int:
    """The most columns that a rank of the group has; found out at the first call, then kept.

    Wide enough for later logits too: only shards cut from narrower ones than these are narrower.
    """
    width = logits.shape[-1]
    if group.size() == 1:
        return width
    if group not in _widest:
        widest = torch.tensor([width], device=logits.device)
        torch.distributed.all_reduce(widest, op=torch.distributed.ReduceOp.MAX, group=group)
        _widest[group] = int(widest)
    if width > _widest[group]:
        raise ValueError(f"logits: expected at most {_widest[group]} columns, got {width}")
    return _widest[group]
