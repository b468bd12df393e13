"""NeMo-RL's helpers for sequences over context-parallel ranks and for layout changes.

None as a CP group means there: no context parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.context_parallel import (
    context_parallel_gather,
    context_parallel_shard,
    context_parallel_shift,
)
from mcore_logprobs.context_parallel.layouts import SequenceLayout
from mcore_logprobs.dropin._common import ONE_PROCESS, Applied, or_one_process
from mcore_logprobs.dropin.nemo_functions import AllGatherCPTensor
from mcore_logprobs.logits.all_to_all import all_to_all_sp2vp, all_to_all_vp2sp
from mcore_logprobs.logits.dtensor import unwrap_rows

__all__ = [
    "IGNORED",
    "_AllReduceSum",
    "_get_tokens_on_this_cp_rank",
    "all_to_all_sq2vp",
    "all_to_all_vp2sq",
    "allgather_cp_sharded_tensor",
    "cp_load_balanced_to_contiguous",
    "cp_shift_next",
    "group_all_reduce_sum",
    "group_all_reduce_sum_with_grad",
    "next_tokens",
    "shard_padded",
]

IGNORED = -100  # a target that asks for nothing


def next_tokens(target: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """`[b, s]` whole sequences -> each position's next token; IGNORED after a sequence's last.

    The published functions roll, so that there the last target is the first token; its result is
    cut off either way.
    """
    return context_parallel_shift(
        target.long(), cp_group=ONE_PROCESS, seq_dim=1, cu_seqlens=cu_seqlens, fill=IGNORED
    )


def shard_padded(
    x: Tensor, local_length: int, cp_group: ProcessGroup | None, fill: float
) -> Tensor:
    """`[b, s, ...]` -> this CP rank's zigzag part `[b, local_length, ...]`, padded at the end.

    Raises:
        ValueError: s is more than the CP ranks hold together.
    """
    group = or_one_process(cp_group)
    whole = local_length * group.size()
    if x.shape[1] > whole:
        raise ValueError(
            f"sequence length: expected at most {whole} ({local_length} on each of {group.size()} "
            f"context-parallel ranks), got {x.shape[1]}"
        )
    missing = (x.shape[0], whole - x.shape[1], *x.shape[2:])
    if missing[1]:
        x = torch.cat([x, x.new_full(missing, fill)], dim=1)
    return context_parallel_shard(x, cp_group=group, seq_dim=1)


def _get_tokens_on_this_cp_rank(
    input_ids: Tensor, cp_rank: int, cp_size: int, seq_dim: int = 1
) -> Tensor:
    """The zigzag part of rank `cp_rank` of `cp_size`; lengths divide by 2 * cp_size."""
    if cp_size == 1:
        return input_ids
    length = input_ids.shape[seq_dim]
    layout = SequenceLayout.of("zigzag", cp_size, length, device=input_ids.device)
    return input_ids.index_select(seq_dim, layout.positions(cp_rank))


def allgather_cp_sharded_tensor(
    tensor: Tensor, cp_group: ProcessGroup | None, seq_dim: int = 1
) -> Tensor:
    """`AllGatherCPTensor.apply`."""
    return AllGatherCPTensor.apply(tensor, cp_group, seq_dim)


def cp_load_balanced_to_contiguous(
    x: Tensor, *, cp_group: ProcessGroup | None = None, seq_dim: int = 1
) -> Tensor:
    """This rank's zigzag part -> its contiguous part, of the same length; differentiable."""
    group = or_one_process(cp_group)
    whole = context_parallel_gather(unwrap_rows(x, "x"), cp_group=group, seq_dim=seq_dim)
    return context_parallel_shard(whole, cp_group=group, seq_dim=seq_dim, layout="contiguous")


def cp_shift_next(x: Tensor, cp_group: ProcessGroup | None = None, *, fill: float) -> Tensor:
    """`out[:, t] = x[:, t + 1]` over contiguous CP parts, `fill` at the very end."""
    return context_parallel_shift(
        x, cp_group=or_one_process(cp_group), seq_dim=1, layout="contiguous", fill=fill
    )


class _SumKeepingGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _AllReduceSum(Applied):
    """The sum over ranks; the backward is the identity: every rank goes on to the same loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        return x if or_one_process(group).size() == 1 else _SumKeepingGradient.apply(x, group)


def group_all_reduce_sum_with_grad(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """`_AllReduceSum.apply`."""
    return _AllReduceSum.apply(x, group)


@torch.no_grad()
def group_all_reduce_sum(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over ranks, without a gradient; None is this process alone."""
    return all_reduce_sum(x.detach(), or_one_process(group))


def all_to_all_vp2sq(vocab_parallel_logits: Tensor, tp_group: ProcessGroup) -> Tensor:
    """`all_to_all_vp2sp`: `[n, V/TP]` -> `[n/TP, V]`."""
    return all_to_all_vp2sp(vocab_parallel_logits, tp_group=tp_group)


def all_to_all_sq2vp(seq_parallel_logits: Tensor, tp_group: ProcessGroup) -> Tensor:
    """`all_to_all_sp2vp`: `[n/TP, V]` -> `[n, V/TP]`."""
    return all_to_all_sp2vp(seq_parallel_logits, tp_group=tp_group)
