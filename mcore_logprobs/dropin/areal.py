"""AReaL's `areal.utils.functional.vocab_parallel`, its packed context parallelism and unpadding.

    from mcore_logprobs.dropin.areal import gather_logprobs, gather_logprobs_entropy

Labels are used as they are (AReaL rolls them itself); log-probabilities, not losses; a label of
-100 gives 0 for both. tp_group None: the logits are the whole vocabulary, as in AReaL.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import mcore_logprobs as ours
from mcore_logprobs.dropin._common import or_one_process, rows_a_chunk

__all__ = [
    "gather_logprobs",
    "gather_logprobs_entropy",
    "reassemble_cp_packed_logprobs",
    "split_packed_seqs_for_context_parallel",
    "unpad_logits",
]


def _rows(chunk_size: int, labels: Tensor) -> int | None:
    """Their chunk is of the first dimension, ours of rows."""
    return rows_a_chunk(chunk_size, math.prod(labels.shape[1:]))


def gather_logprobs(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    tp_group: ProcessGroup | None = None,
    chunk_size: int = 1024,
) -> Tensor:
    """`[..., V/TP]`, global ids `[...]` -> float32 log-probabilities `[...]`; differentiable."""
    return ours.vocab_parallel_logprobs(
        logits,
        labels,
        temperature=temperature,
        tp_group=or_one_process(tp_group),
        chunk_size=_rows(chunk_size, labels),
    )


def gather_logprobs_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    tp_group: ProcessGroup | None = None,
    chunk_size: int = 1024,
    reuse_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropy in nats), float32 `[...]` each, both differentiable; one pass.

    reuse_logits: the backward may write the gradient over the logits (`inplace_backward`), which
    must not be used after it; the entropy then has no gradient, as in AReaL. It is taken where the
    logits are contiguous float32 results that fill their storage; other logits are not modified.
    """
    reused = reuse_logits and _may_be_reused(logits)
    stats = ours.vocab_parallel_token_stats(
        logits,
        labels,
        entropy=True,
        temperature=temperature,
        tp_group=or_one_process(tp_group),
        chunk_size=_rows(chunk_size, labels),
        inplace_backward=reused,
    )
    assert stats.entropy is not None
    return stats.logprobs, stats.entropy.detach() if reused else stats.entropy


def unpad_logits(
    logits: Tensor,
    padding_length: int,
    cu_seqlens: Tensor | None = None,
    old_cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The rows `[T, ...]` of packed sequences `[P, ...]`, without the padding of each.

    AReaL copies sequence by sequence. Here the rows are split and joined, so that lazy logits stay
    lazy. Differentiable. Host syncs: one for each of the two tensors; AReaL makes three a sequence.

    Args:
        padding_length: rows at the end that belong to no sequence.
        cu_seqlens, old_cu_seqlens: `[b + 1]` with and without padding; None: none is padded.

    Raises:
        ValueError: old_cu_seqlens without cu_seqlens, or a sequence that grows without padding.
    """
    if padding_length > 0:
        logits = logits[:-padding_length]
    if old_cu_seqlens is None:
        return logits
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: expected a tensor [b + 1] with old_cu_seqlens, got None")
    lengths = old_cu_seqlens.diff().tolist()
    starts = cu_seqlens.tolist()[: len(lengths)]
    ends = [*starts[1:], logits.shape[0]]
    sizes: list[int] = []  # of each sequence, and of the padding behind it
    for start, length, end in zip(starts, lengths, ends, strict=True):
        if start + length > end:
            raise ValueError(
                f"old_cu_seqlens: expected at most {end - start} rows from row {start}, got "
                f"{length}"
            )
        sizes += [length, end - start - length]
    return torch.cat(logits.split(sizes)[::2])


def _may_be_reused(logits: Tensor) -> bool:
    """Whether AReaL would reuse these logits, on any device: no leaf, no view of a part."""
    owner = logits if logits._base is None else logits._base
    return (
        logits.dtype is torch.float32
        and logits.is_contiguous()
        and owner.is_contiguous()
        and owner.numel() == logits.numel()
        and not owner.is_leaf
    )


def split_packed_seqs_for_context_parallel(tensor: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`[T]` packed -> this CP rank's `[T/CP]`, zigzag in each sequence; on Megatron's CP group.

    cu_seqlens are padded: each length divides by 2 * CP.
    """
    return ours.context_parallel_shard(tensor, seq_dim=0, cu_seqlens=cu_seqlens)


def reassemble_cp_packed_logprobs(local_tensor: Tensor, padded_cu_seqlens: Tensor) -> Tensor:
    """`[T/CP]` -> `[T]` in the original order; the backward sums over the CP ranks."""
    return ours.context_parallel_gather(
        local_tensor, seq_dim=0, cu_seqlens=padded_cu_seqlens, grad="sum"
    )
