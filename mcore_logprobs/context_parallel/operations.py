"""Shard, positions, gather and shift: a sequence over context-parallel ranks.

Nothing is kept from one call to the next: a group of another size, or another split of the ranks
(dynamic context parallelism), is a matter of passing another group.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_choice, check_integer, check_plain
from mcore_logprobs.collectives import (
    Gradients,
    GroupContext,
    all_gather_dim0,
    once_differentiable,
    reduce_scatter_dim0,
)
from mcore_logprobs.consistency import check_call, comparing
from mcore_logprobs.context_parallel.layouts import SequenceLayout, check_lengths
from mcore_logprobs.groups import group_rank, group_size, resolve_cp_group
from mcore_logprobs.spelling import suggesting

GRADS = ("sum", "slice")

# Tensors that torch cannot index, as the ones of their size that it can.
_INDEXED_AS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


@suggesting
def context_parallel_shard(
    x: Tensor,
    *,
    cp_group: ProcessGroup | None = None,
    seq_dim: int = 1,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return this rank's part of a sequence that every rank holds whole.

    No communication, no host sync. Differentiable: the gradient of x is non-zero only at the rank's
    own tokens, and is not summed over ranks. Shift labels to the next token before this, or by
    `context_parallel_shift` after.

    Shard other per-token tensors by the same call, so that they stay aligned: loss masks `[b, S]`,
    advantages, expert routes `[S, b, topk]` (seq_dim=0), the query rows of an attention mask
    `[b, 1, S, S]` (seq_dim=2).

    Args:
        x: `[..., S, ...]`, any dtype, S at `seq_dim`; the same on every CP rank.
        cp_group: context-parallel group; None as in `mcore_logprobs.groups`.
        seq_dim: dimension of the sequence, may be negative.
        layout: "zigzag" (rank r holds chunks r and 2*CP-1-r of 2*CP, as Megatron and Transformer
            Engine do), "contiguous" (chunk r of CP), or "contiguous_buffer" (chunk r of CP of the
            whole packed buffer, wherever sequences begin and end, as attention that gathers keys
            and values over CP wants it).
        cu_seqlens: `[sequences + 1]` int32 or int64 on x's device, cumulative *padded* lengths of
            packed (THD) sequences: each is split on its own ("contiguous_buffer": the buffer is,
            and sequences may have any length). All rows of x are packed alike.

    Returns:
        `[..., S/CP, ...]`, contiguous; x itself where CP is 1.

    Raises:
        ValueError: S or a packed sequence not divisible by 2*CP ("contiguous": CP;
            "contiguous_buffer": only S, by CP; nothing if CP is 1), unknown layout, no such
            dimension, unusable cu_seqlens. On CUDA the values of cu_seqlens are checked by a
            device-side assert.
    """
    group = resolve_cp_group(cp_group)
    dim = _normalized_dim(x, seq_dim)
    where = SequenceLayout.of(layout, group_size(group), x.shape[dim], cu_seqlens, device=x.device)
    if where.cp_size == 1:
        return x
    return _select(x, dim, where.positions(group_rank(group)))


@suggesting
def context_parallel_positions(
    seq_len: int,
    *,
    cp_group: ProcessGroup | None = None,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return the global index of each of this rank's tokens. No communication, no host sync.

    `x.index_select(seq_dim, positions)` is `context_parallel_shard(x)`. With packed sequences these
    are indices into the packed row, not positions within each sequence.

    Args:
        seq_len: S, the length of the whole (packed) sequence over all CP ranks.
        cp_group, layout, cu_seqlens: as in `context_parallel_shard`.

    Returns:
        `[S/CP]` int64 on the device of cu_seqlens, else on torch's default device.

    Raises:
        ValueError: as `context_parallel_shard`, and where seq_len is not a non-negative int.
    """
    group = resolve_cp_group(cp_group)
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 0:
        raise ValueError(f"seq_len: expected an int >= 0, got {seq_len!r}")
    where = SequenceLayout.of(layout, group_size(group), seq_len, cu_seqlens)
    return where.positions(group_rank(group))


@suggesting
def context_parallel_gather(
    x: Tensor,
    *,
    cp_group: ProcessGroup | None = None,
    seq_dim: int = 1,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
    grad: str = "sum",
) -> Tensor:
    """Return the whole sequence, in its natural order, on every rank.

    One all-gather forward. Backward: one reduce-scatter for grad="sum", nothing for "slice".

    `grad` says how the ranks' losses add up to the objective:

        "sum":   the objective is the *sum* of the ranks' losses, each of gathered values;
        "slice": every rank computes the *same* loss, and the objective is that loss, once.

    Under Megatron the number of the loss function's outputs decides. Megatron averages gradients
    over data x context ranks. It multiplies a loss with two outputs by CP, and not one with three
    (0.15 to 0.19, `forward_step_calc_loss` in pipeline_parallel/schedules.py). With
    calculate_per_token_loss it does not average two outputs: return three. If every CP rank
    computes the whole loss from gathered values:

        the loss function returns                   grad=     wrong choice: gradients are
        ------------------------------------------  --------  ---------------------------
        (loss, metrics)                             "slice"   CP times too large
        (loss, num_tokens, metrics)                 "sum"     CP times too small
        the same, with calculate_per_token_loss,    "sum"     CP times too small
          num_tokens of the whole sequence

    In a loop of your own "slice" where gradients are added up over CP, "sum" where they are
    averaged. A loss that each rank computes from only its own tokens needs no gather.

    Args:
        x: `[..., S/CP, ...]`, any dtype, the same shape on every rank.
        cp_group, seq_dim, layout, cu_seqlens: as in `context_parallel_shard`, of which this is the
            inverse.
        grad: "sum" or "slice", see above.

    Returns:
        `[..., S, ...]`, contiguous, in x's dtype; x itself where CP is 1.

    Raises:
        ValueError: as `context_parallel_shard`, and an unknown `grad`; before any communication. At
            the first call over a group on every rank, if one rank refuses its arguments, or if
            ranks differ in layout, grad or cu_seqlens, in x's shape or dtype, or for "sum" in
            whether x requires a gradient.
    """
    group = resolve_cp_group(cp_group)

    def same() -> dict[str, object]:
        return {"layout": layout, "grad": grad, **_same_on_every_rank(x, dim, where)}

    with comparing("context_parallel_gather", same, group):
        check_choice("grad", grad, GRADS)
        dim = _normalized_dim(x, seq_dim)
        where = _layout_of_local(x, dim, group, layout, cu_seqlens)
        check_call(None, group, x.device, {"x": x} if grad == "sum" else None)
    if where.cp_size == 1:
        return x
    return _Gather.apply(x, dim, where, group, grad)


class _GatherContext(GroupContext):
    dim: int
    grad: str
    needs_input_grad: tuple[bool, ...]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _GatherContext,
        x: Tensor,
        dim: int,
        where: SequenceLayout,
        group: ProcessGroup,
        grad: str,
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.grad = dim, group, grad
        ctx.linear = True
        if ctx.needs_input_grad[0]:
            sums = grad == "sum"
            ctx.save_for_backward(
                where.slot_positions() if sums else where.positions(group_rank(group))
            )
        slots = all_gather_dim0(x.movedim(dim, 0), group)  # [S, ...], rank by rank
        if where.in_order and dim == 0:
            return slots
        slots = slots.movedim(0, dim)
        if where.in_order:  # a view made here could not be changed in place
            return slots.clone(memory_format=torch.contiguous_format)
        # Permutes and, as its output is contiguous, puts the sequence back at its dimension.
        return _select(slots, dim, where.gather_order())

    @staticmethod
    @once_differentiable
    def backward(ctx: _GatherContext, saved: tuple[Tensor, ...], *grads: Tensor) -> Gradients:
        (index,) = saved
        if ctx.grad == "slice":
            return grads[0].index_select(ctx.dim, index), None, None, None, None
        slots = grads[0].movedim(ctx.dim, 0).index_select(0, index)
        mine = reduce_scatter_dim0(slots, ctx.group)
        return mine.movedim(0, ctx.dim), None, None, None, None


@suggesting
def context_parallel_shift(
    x: Tensor,
    *,
    cp_group: ProcessGroup | None = None,
    seq_dim: int = 1,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    fill: float = 0,
) -> Tensor:
    """Return, at each of this rank's tokens, x at the next token of the same sequence.

    It turns a rank's input ids into its labels: `context_parallel_shift(ids, fill=-100)`. The
    sequence is not gathered: one all-gather sends the first token of each rank's chunks, 2 per
    sequence ("contiguous": 1; "contiguous_buffer": 1 in all). Differentiable; the backward is one
    reduce-scatter of as many tokens.

    Padded sequences: cu_seqlens counts the padding, so the label of a sequence's last real token is
    the *padding id*. Mask it, or pass `lengths`, which makes it `fill`.

    Args:
        x: `[..., S/CP, ...]`, any dtype. Same shape on every rank.
        cp_group, seq_dim, layout, cu_seqlens: as in `context_parallel_shard`.
        lengths: true lengths without padding, `[sequences]` ints (one where nothing is packed): a
            list, which costs one copy to x's device, or an int32 or int64 tensor there. None: as
            cu_seqlens says.
        fill: the value after the last token of each sequence, and at all of its padding.

    Returns:
        x's shape and dtype.

    Raises:
        ValueError: as `context_parallel_shard`, a `fill` that x's dtype cannot hold, and lengths of
            another shape or above the padded ones; before any communication. At the first call on
            every rank, as for `context_parallel_gather`.
    """
    group = resolve_cp_group(cp_group)

    def same() -> dict[str, object]:
        ends = where.sequences.diff() if lengths is None else lengths
        own = {"layout": layout, "fill": filler, "lengths": ends}
        return {**own, **_same_on_every_rank(x, dim, where)}

    with comparing("context_parallel_shift", same, group):
        dim = _normalized_dim(x, seq_dim)
        where = _layout_of_local(x, dim, group, layout, cu_seqlens)
        filler = _filler(fill, x.dtype)
        lengths = check_lengths(lengths, where, x.device)
        check_call(None, group, x.device, {"x": x})
    if x.numel() == 0:
        return x.clone()
    first = x.movedim(dim, 0)  # [S/CP, ...]
    boundary = _select(first, 0, where.chunk_starts())
    if where.cp_size > 1:
        boundary = _GatherBoundary.apply(boundary, group)
    last = first.new_full((1, *first.shape[1:]), filler)
    sources = torch.cat([first, boundary, last]).movedim(0, dim)
    return _select(sources, dim, where.next_sources(group_rank(group), lengths))


class _GatherBoundary(torch.autograd.Function):
    """[n, ...] -> [CP*n, ...]; each rank uses some of it, so the gradients add up."""

    @staticmethod
    def forward(ctx: GroupContext, boundary: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.linear = group, True
        return all_gather_dim0(boundary, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: GroupContext, saved: tuple[()], *grads: Tensor) -> Gradients:
        return reduce_scatter_dim0(grads[0], ctx.group), None


def _filler(fill: object, dtype: torch.dtype) -> int | float | complex:
    """The fill as a Python number that the dtype can hold, or a ValueError."""
    number = fill.item() if isinstance(fill, Tensor) and fill.dim() == 0 else fill
    if not isinstance(number, numbers.Number):
        raise ValueError(f"fill: expected a number, got {type(fill).__name__}")
    kind: Any = complex if dtype.is_complex else float if dtype.is_floating_point else int
    try:
        filler = kind(number)
    except (TypeError, ValueError, OverflowError):  # of a complex number, NaN, inf
        filler = None
    if filler is None or (kind is int and filler != number) or not _holds(dtype, filler):
        raise ValueError(f"fill: expected a value of {dtype}, got {number!r}")
    return filler


def _holds(dtype: torch.dtype, number: int | float | complex) -> bool:
    """Whether the number is within the dtype's range; it may be rounded."""
    if isinstance(number, complex):
        return all(_holds(dtype.to_real(), part) for part in (number.real, number.imag))
    if dtype is torch.bool:
        return number in (0, 1)
    if isinstance(number, int):
        return torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max
    if math.isinf(number):  # some types of 8 bits have none
        return math.isinf(torch.tensor(number, device="cpu").to(dtype).double().item())
    return math.isnan(number) or abs(number) <= torch.finfo(dtype).max


def _normalized_dim(x: Tensor, seq_dim: int) -> int:
    """seq_dim counted from the front.

    Raises:
        ValueError: x is no tensor or a DTensor, or has no such dimension.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"x: expected a torch.Tensor, got {type(x).__name__}")
    check_plain("x", x)
    check_integer("seq_dim", seq_dim)
    if not -x.dim() <= seq_dim < x.dim():
        raise ValueError(
            f"seq_dim: expected {-x.dim()} to {x.dim() - 1} (shape {list(x.shape)}), got {seq_dim}"
        )
    return seq_dim % x.dim()


def _layout_of_local(
    x: Tensor, dim: int, group: ProcessGroup | None, layout: str, cu_seqlens: Tensor | None
) -> SequenceLayout:
    """The layout of the sequence that x is this rank's part of."""
    size = group_size(group)
    return SequenceLayout.of(layout, size, x.shape[dim] * size, cu_seqlens, device=x.device)


def _same_on_every_rank(x: Tensor, dim: int, where: SequenceLayout) -> dict[str, object]:
    """What ranks compare of a call; of x only what says how much is sent."""
    sent = {"x.shape": list(x.shape), "x.dtype": x.dtype, "seq_dim": dim}
    return {**sent, "cu_seqlens": where.sequences}


def _select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """`x.index_select`, for any dtype."""
    other = _INDEXED_AS.get(x.dtype)
    if other is None:
        return x.index_select(dim, index)
    return x.view(other).index_select(dim, index).view(x.dtype)
