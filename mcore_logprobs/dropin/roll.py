"""ROLL's `mcore_adapter.parallel_functions` and `roll.third_party.megatron.tensor_parallel`.

    from mcore_logprobs.dropin.roll import vocab_parallel_logprobs, vocab_parallel_target_rank

On Megatron's own groups. Targets are used as they are (not shifted); log-probabilities are positive
(not a loss); a target of -100 gives 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import mcore_logprobs as ours
from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.dropin._common import share_of_gradient

__all__ = [
    "VocabUtility",
    "context_parallel_gather",
    "encoder_sequence_parallel_gather",
    "encoder_small_batch_size_gather",
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


def vocab_parallel_logprobs(
    vocab_parallel_logits: Tensor, target: Tensor, use_fused_kernel: bool = True
) -> Tensor:
    """`[b, s, V/TP]`, global ids `[b, s]` -> float32 `[b, s]`; differentiable.

    use_fused_kernel: of no effect; the best backend that is available computes at any TP.
    """
    return ours.vocab_parallel_logprobs(vocab_parallel_logits, target)


def vocab_parallel_target_rank(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """`[b, s, V/TP]`, global ids `[b, s]` -> int64 `[b, s]`, 0 for the largest logit."""
    return ours.vocab_parallel_target_rank(vocab_parallel_logits, target)


def vocab_parallel_entropy(
    vocab_parallel_logits: Tensor, used_fp32: bool = True, use_fused_kernel: bool = True
) -> Tensor:
    """`[b, s, V/TP]` -> float32 `[b, s]`, in nats (>= 0); differentiable.

    used_fp32, use_fused_kernel: of no effect; statistics are float32 without a copy of the logits.
    """
    return ours.vocab_parallel_entropy(vocab_parallel_logits)


def context_parallel_gather(context_parallel_input: Tensor, parallel_dim: int = -1) -> Tensor:
    """The whole sequence from Megatron's CP ranks' zigzag parts along `parallel_dim`.

    The backward takes each rank's own part of the gradient: for a loss that every rank computes.
    """
    return ours.context_parallel_gather(context_parallel_input, seq_dim=parallel_dim, grad="slice")


class _GatherItems(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plans: list[list[int]], sizes: list[int], group: Any
    ) -> Tensor:
        ctx.mine, ctx.sizes = plans[group.rank()], sizes
        rows = [sum(sizes[item] for item in plan) for plan in plans]
        padded = x.new_zeros(max(rows), *x.shape[1:])
        padded[: x.shape[0]] = x
        items: dict[int, Tensor] = {}
        for plan, count, part in zip(plans, rows, all_gather_stack(padded, group), strict=True):
            pieces = part[:count].split([sizes[item] for item in plan])
            items.update(zip(plan, pieces, strict=True))
        return torch.cat([items[item] for item in range(len(sizes))])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        items = grads[0].split(ctx.sizes)
        return torch.cat([grads[0][:0], *(items[item] for item in ctx.mine)]), None, None, None


def encoder_sequence_parallel_gather(
    input_: Tensor, split_plan: Sequence[Sequence[Any]], input_size_list: Sequence[int]
) -> Tensor:
    """Every item of an encoder's batch, in its original order, from the TP x CP ranks' shares.

    Shape: input_ `[rows of this rank's items, ...]`; `[sum(input_size_list), ...]` returned.

    split_plan: for each rank its items in order, as pairs (anything, original index).
    input_size_list: the rows of each item. The backward takes this rank's items' rows of the
    gradient: for a loss that every rank computes. Collectives: one all-gather, backward none.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_and_context_parallel_group()
    if group.size() == 1:
        return input_
    plans = [[pair[1] for pair in plan] for plan in split_plan]
    return _GatherItems.apply(input_, plans, list(input_size_list), group)


def encoder_small_batch_size_gather(input_: Tensor) -> Tensor:
    """The input itself, which every TP rank has computed whole; the backward divides by TP."""
    from megatron.core import parallel_state

    return share_of_gradient(input_, parallel_state.get_tensor_model_parallel_world_size())
