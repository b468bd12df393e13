"""NeMo-RL's autograd functions: `NAME.apply(...)` with their arguments in their order."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.context_parallel import context_parallel_gather
from mcore_logprobs.dropin._common import (
    Applied,
    check_vocab_range,
    grad_unless,
    or_one_process,
    rows_a_chunk,
    token_logprobs,
)
from mcore_logprobs.fused.token_stats import linear_token_stats
from mcore_logprobs.groups import group_size, resolve_tp_group
from mcore_logprobs.logits.distill import vocab_parallel_soft_cross_entropy
from mcore_logprobs.logits.gather import vocab_parallel_gather
from mcore_logprobs.logits.token_stats import vocab_parallel_entropy

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
]


class DistributedLogprob(Applied):
    """`vocab_parallel_logprobs`: `[b, s, V/TP]`, `[b, s]` -> `[b, s]`; targets as they are."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        group: ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        width = vocab_parallel_logits.shape[-1]
        check_vocab_range(vocab_start_index, vocab_end_index, width, group)
        return token_logprobs(
            vocab_parallel_logits, target, group, chunk_size=None, inference_only=inference_only
        )


class ChunkedDistributedLogprob(Applied):
    """`DistributedLogprob`, `chunk_size` positions of the sequence at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        width = vocab_parallel_logits.shape[-1]
        check_vocab_range(vocab_start_index, vocab_end_index, width, tp_group)
        return token_logprobs(
            vocab_parallel_logits,
            target,
            tp_group,
            chunk_size=chunk_size,
            inference_only=inference_only,
        )


class DistributedCrossEntropy(Applied):
    """`vocab_parallel_soft_cross_entropy` at temperature 1: `[b, s, V/TP]` twice -> `[b, s]`."""

    @staticmethod
    def forward(
        ctx: Any,
        student_logits: Tensor,
        target_logits: Tensor,
        group: ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        with grad_unless(inference_only):
            return vocab_parallel_soft_cross_entropy(student_logits, target_logits, tp_group=group)


class DistributedLogprobWithSampling(Applied):
    """`vocab_parallel_sampling_logprobs`: a target that is filtered out gives -inf."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: ProcessGroup,
        top_k: int | None,
        top_p: float,
        inference_only: bool = False,
    ) -> Tensor:
        return token_logprobs(
            vocab_parallel_logits,
            target,
            tp_group,
            chunk_size=None,
            inference_only=inference_only,
            top_k=top_k,
            top_p=top_p,
        )


class ChunkedDistributedLogprobWithSampling(Applied):
    """`DistributedLogprobWithSampling`, `chunk_size` positions of the sequence at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: ProcessGroup,
        top_k: int | None,
        top_p: float,
        chunk_size: int,
        inference_only: bool = False,
    ) -> Tensor:
        return token_logprobs(
            vocab_parallel_logits,
            target,
            tp_group,
            chunk_size=chunk_size,
            inference_only=inference_only,
            top_k=top_k,
            top_p=top_p,
        )


class ChunkedDistributedGatherLogprob(Applied):
    """`vocab_parallel_gather(log_softmax=True)`: ids `[b, s, k]` -> `[b, s, k]`."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        global_indices: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        batch, *_, width = vocab_parallel_logits.shape
        check_vocab_range(vocab_start_index, vocab_end_index, width, tp_group)
        with grad_unless(inference_only):
            return vocab_parallel_gather(
                vocab_parallel_logits,
                global_indices,
                log_softmax=True,
                tp_group=tp_group,
                chunk_size=rows_a_chunk(chunk_size, batch),
            )


class ChunkedDistributedEntropy(Applied):
    """Minus `vocab_parallel_entropy`, that is, sum p log p: `[b, s, V/TP]` -> `[b, s]`."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        chunk_size: int,
        tp_group: ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        with grad_unless(inference_only):
            return -vocab_parallel_entropy(
                vocab_parallel_logits,
                tp_group=tp_group,
                chunk_size=rows_a_chunk(chunk_size, vocab_parallel_logits.shape[0]),
            )


class ChunkedDistributedHiddenStatesToLogprobs(Applied):
    """`linear_token_stats` under sequence parallelism: `[s/TP, b, h]`, `[b, s]` -> `[b, s]`.

    The hidden states are gathered over TP a tile at a time; their gradient is reduce-scattered.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor_parallel_hidden_states: Tensor,
        target: Tensor,
        output_weight_layer: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        check_vocab_range(
            vocab_start_index, vocab_end_index, output_weight_layer.shape[0], tp_group
        )
        with grad_unless(inference_only):
            stats = linear_token_stats(
                tensor_parallel_hidden_states,
                output_weight_layer,
                target.transpose(0, 1).contiguous(),
                sequence_parallel=group_size(resolve_tp_group(tp_group)) > 1,
                tp_group=tp_group,
                chunk_size=rows_a_chunk(chunk_size, target.shape[0]),
            )
        return stats.logprobs.transpose(0, 1).contiguous()


class AllGatherCPTensor(Applied):
    """`context_parallel_gather` of zigzag shards; the backward sums over CP."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, cp_group: ProcessGroup | None, seq_dim: int = 1
    ) -> Tensor:
        return context_parallel_gather(
            tensor, cp_group=or_one_process(cp_group), seq_dim=seq_dim, grad="sum"
        )
