"""Single statistics of vocab-parallel logits, for those who want one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.logits.inputs import open_logits
from mcore_logprobs.logits.token_stats import vocab_parallel_token_stats

__all__ = ["vocab_parallel_entropy", "vocab_parallel_logprobs"]


def vocab_parallel_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
    inplace_backward: bool = False,
) -> Tensor:
    """log p[target] in nats, differentiable; minus Megatron's `vocab_parallel_cross_entropy`.

    Shape:
        vocab_parallel_logits `[..., V/TP]`, target `[...]` of global ids -> float32 `[...]`.

    Collectives: one all-gather of `[3, n]` float32 over TP forward, none backward.

    Keywords, memory and errors are `vocab_parallel_token_stats`'s.
    """
    return vocab_parallel_token_stats(
        vocab_parallel_logits,
        target,
        tp_group=tp_group,
        temperature=temperature,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        chunk_size=chunk_size,
        backend=backend,
        inplace_backward=inplace_backward,
    ).logprobs


def vocab_parallel_entropy(
    vocab_parallel_logits: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
    inplace_backward: bool = False,
) -> Tensor:
    """-sum p log p over the whole vocabulary, in nats, differentiable.

    Shape:
        vocab_parallel_logits `[..., V/TP]` -> float32 `[...]`.

    Collectives: one all-gather of `[4, n]` float32 over TP forward, none backward.

    Keywords, memory and errors are `vocab_parallel_token_stats`'s.
    """
    stats = vocab_parallel_token_stats(
        vocab_parallel_logits,
        _any_target(vocab_parallel_logits, tp_group),
        entropy=True,
        ignore_index=None,
        tp_group=tp_group,
        temperature=temperature,
        vocab_size=vocab_size,
        softcap=softcap,
        chunk_size=chunk_size,
        backend=backend,
        inplace_backward=inplace_backward,
    )
    assert stats.entropy is not None
    return stats.entropy


def _any_target(logits: Tensor, tp_group: Any) -> Tensor:
    """A target for those who ask for none: id 0 everywhere, of the local shape."""
    local = open_logits(logits, tp_group=tp_group).logits
    return torch.zeros(local.shape[:-1], dtype=torch.int64, device=local.device)
