"""ROLL's `mcore_adapter.parallel_functions` on Megatron's own groups.

from mcore_logprobs.dropin.roll import vocab_parallel_logprobs, vocab_parallel_target_rank
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mcore_logprobs import context_parallel
from mcore_logprobs.logits import token_stats

__all__ = [
    "VocabUtility",
    "context_parallel_gather",
    "vocab_parallel_entropy",
    "vocab_parallel_logprobs",
    "vocab_parallel_target_rank",
]


class VocabUtility:
    """Which global ids a rank owns, `[start, end)`, where the vocabulary is split evenly."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> Sequence[int]:
        """(start, end) of `rank`, from the columns on each rank."""
        start = rank * per_partition_vocab_size
        return start, start + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> Sequence[int]:
        """(start, end) of `rank`, from all columns.

        Raises:
            ValueError: they do not divide by world_size.
        """
        if global_vocab_size % world_size:
            raise ValueError(
                f"global_vocab_size: expected a multiple of {world_size}, got {global_vocab_size}"
            )
        return VocabUtility.vocab_range_from_per_partition_vocab_size(
            global_vocab_size // world_size, rank, world_size
        )


def vocab_parallel_logprobs(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """`[b, s, V/TP]`, global ids `[b, s]` -> float32 `[b, s]`; differentiable."""
    return token_stats.vocab_parallel_logprobs(vocab_parallel_logits, target)


def vocab_parallel_target_rank(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """`[b, s, V/TP]`, global ids `[b, s]` -> int64 `[b, s]`, 0 for the largest logit."""
    return token_stats.vocab_parallel_target_rank(vocab_parallel_logits, target)


def vocab_parallel_entropy(vocab_parallel_logits: Tensor) -> Tensor:
    """`[b, s, V/TP]` -> float32 `[b, s]`, in nats; differentiable."""
    return token_stats.vocab_parallel_entropy(vocab_parallel_logits)


def context_parallel_gather(x: Tensor, parallel_dim: int = -1) -> Tensor:
    """The whole sequence from Megatron's CP ranks' zigzag parts along `parallel_dim`.

    The backward takes each rank's own part of the gradient: for a loss that every rank computes.
    """
    return context_parallel.context_parallel_gather(x, seq_dim=parallel_dim, grad="slice")
