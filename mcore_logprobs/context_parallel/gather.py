"""The whole sequence from the ranks' parts, with both conventions for its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_choice
from mcore_logprobs.collectives import all_gather_dim0, reduce_scatter_dim0
from mcore_logprobs.context_parallel._arguments import layout_of_local, normalized_dim
from mcore_logprobs.context_parallel.layouts import SequenceLayout
from mcore_logprobs.groups import group_rank, resolve_cp_group

GRADS = ("sum", "slice")


def context_parallel_gather(
    x: Tensor,
    *,
    cp_group: ProcessGroup | None = None,
    seq_dim: int = 1,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
    grad: str = "sum",
) -> Tensor:
    """The whole sequence, in its natural order, on every rank.

    One all-gather forward. Backward: one reduce-scatter for grad="sum", nothing for "slice".

    Which gradient goes with which loss. `grad` says how the ranks' losses add up:
        "sum":   the objective is the *sum* of the ranks' losses, each of gathered values;
        "slice": every rank computes the *same* loss, and the objective is that loss, once.

    Under Megatron the loss function's return value decides. Megatron averages gradients over
    data x context ranks, and multiplies a loss of two outputs by CP but not one of three (0.15 to
    0.19, `forward_step_calc_loss` in pipeline_parallel/schedules.py). Where every CP rank computes
    the whole loss from gathered values:

        the loss function returns                   grad=     wrong choice: gradients are
        ------------------------------------------  --------  ---------------------------
        (loss, metrics)                             "slice"   CP times too large
        (loss, num_tokens, metrics)                 "sum"     CP times too small
        the same, with calculate_per_token_loss,    "sum"     CP times too small
          num_tokens of the whole sequence

    A loss that a rank computes from its own tokens alone needs no gather.

    Args:
        x: `[..., S/CP, ...]`, any dtype, the same shape on every rank.
        cp_group, seq_dim, layout, cu_seqlens: as in `context_parallel_shard`, of which this is the
            inverse.
        grad: "sum" or "slice", see above.

    Returns:
        `[..., S, ...]`, contiguous, in x's dtype; x itself where CP is 1.

    Raises:
        ValueError: as `context_parallel_shard`, and an unknown `grad`; before any communication.
    """
    check_choice("grad", grad, GRADS)
    group = resolve_cp_group(cp_group)
    dim = normalized_dim(x, seq_dim)
    where = layout_of_local(x, dim, group, layout, cu_seqlens)
    if where.cp_size == 1:
        return x
    return _Gather.apply(x, dim, where, group, grad)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, where: SequenceLayout, group: ProcessGroup, grad: str
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.grad = dim, group, grad
        if ctx.needs_input_grad[0]:
            whole = grad == "sum"
            ctx.save_for_backward(
                where.slot_positions() if whole else where.positions(group_rank(group))
            )
        slots = all_gather_dim0(x.movedim(dim, 0), group)  # [S, ...], rank by rank
        # Permutes and, as its output is contiguous, puts the sequence back at its dimension.
        return slots.movedim(0, dim).index_select(dim, where.gather_order())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (index,) = ctx.saved_tensors
        if ctx.grad == "slice":
            return grads[0].index_select(ctx.dim, index), None, None, None, None
        slots = grads[0].movedim(ctx.dim, 0).index_select(0, index)
        mine = reduce_scatter_dim0(slots, ctx.group)
        return mine.movedim(0, ctx.dim), None, None, None, None
