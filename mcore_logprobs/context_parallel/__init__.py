"""Sequences sharded over context-parallel ranks: shard, gather, positions, shift."""

from mcore_logprobs.context_parallel.operations import (
    context_parallel_gather,
    context_parallel_positions,
    context_parallel_shard,
    context_parallel_shift,
)

__all__ = [
    "context_parallel_gather",
    "context_parallel_positions",
    "context_parallel_shard",
    "context_parallel_shift",
]
