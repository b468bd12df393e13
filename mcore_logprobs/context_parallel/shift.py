"""The next token's value, across chunk and rank boundaries but never across sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mcore_logprobs.collectives import all_gather_dim0, reduce_scatter_dim0
from mcore_logprobs.context_parallel._arguments import layout_of_local, normalized_dim
from mcore_logprobs.groups import group_rank, resolve_cp_group


def context_parallel_shift(
    x: Tensor,
    *,
    cp_group: ProcessGroup | None = None,
    seq_dim: int = 1,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
    fill: float = 0,
) -> Tensor:
    """At each of this rank's tokens, x at the next token of the same sequence.

    Turns a rank's input ids into its labels: `context_parallel_shift(ids, fill=-100)`. Does not
    gather the sequence: one all-gather of the first token of each rank's chunks, 2 a sequence
    (contiguous: 1). Differentiable; the backward is one reduce-scatter of as many tokens.

    Args:
        x: `[..., S/CP, ...]`, any dtype. Same shape on every rank.
        cp_group, seq_dim, layout, cu_seqlens: as in `context_parallel_shard`.
        fill: the value after the last token of each sequence.

    Returns:
        x's shape and dtype.

    Raises:
        ValueError: as `context_parallel_shard`, and a `fill` that x's dtype cannot hold; before any
            communication.
    """
    group = resolve_cp_group(cp_group)
    dim = normalized_dim(x, seq_dim)
    where = layout_of_local(x, dim, group, layout, cu_seqlens)
    _check_fill(fill, x.dtype)
    if x.numel() == 0:
        return x.clone()
    first = x.movedim(dim, 0)  # [S/CP, ...]
    boundary = first.index_select(0, where.chunk_starts())
    if where.cp_size > 1:
        boundary = _GatherBoundary.apply(boundary, group)
    filler = first.new_full((1, *first.shape[1:]), fill)
    sources = torch.cat([first, boundary, filler]).movedim(0, dim)
    return sources.index_select(dim, where.next_sources(group_rank(group)))


def _check_fill(fill: float, dtype: torch.dtype) -> None:
    if dtype.is_floating_point or dtype.is_complex:
        return
    if dtype is torch.bool:
        low, high = 0, 1
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if fill != fill or not low <= fill <= high or int(fill) != fill:
        raise ValueError(f"fill: expected a value of {dtype}, got {fill!r}")


class _GatherBoundary(torch.autograd.Function):
    """[n, ...] -> [CP*n, ...]; each rank uses some of it, so the gradients add up."""

    @staticmethod
    def forward(ctx: Any, boundary: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_dim0(boundary, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_dim0(grads[0], ctx.group), None
