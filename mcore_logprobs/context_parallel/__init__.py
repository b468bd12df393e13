"""Sequences sharded over context-parallel ranks: shard, gather, positions, shift."""

from mcore_logprobs.context_parallel.gather import context_parallel_gather
from mcore_logprobs.context_parallel.shard import (
    context_parallel_positions,
    context_parallel_shard,
)
from mcore_logprobs.context_parallel.shift import context_parallel_shift

__all__ = [
    "context_parallel_gather",
    "context_parallel_positions",
    "context_parallel_shard",
    "context_parallel_shift",
]
