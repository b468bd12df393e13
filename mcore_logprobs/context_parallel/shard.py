"""A rank's part of a sequence, and where its tokens are in the whole."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.context_parallel._arguments import normalized_dim
from mcore_logprobs.context_parallel.layouts import SequenceLayout
from mcore_logprobs.groups import group_rank, group_size, resolve_cp_group


def context_parallel_shard(
    x: Tensor,
    *,
    cp_group: ProcessGroup | None = None,
    seq_dim: int = 1,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """This rank's part of a sequence that every rank holds whole. No communication, no sync.

    Differentiable: a rank's gradient of x is non-zero at its own tokens only, and is not summed
    over ranks. Shift labels to the next token before this, or by `context_parallel_shift` after.

    Args:
        x: `[..., S, ...]`, any dtype, S at `seq_dim`; the same on every CP rank.
        cp_group: context-parallel group; None as in `mcore_logprobs.groups`.
        seq_dim: dimension of the sequence, may be negative.
        layout: "zigzag" (rank r holds chunks r and 2*CP-1-r of 2*CP, as Megatron and Transformer
            Engine do) or "contiguous" (chunk r of CP).
        cu_seqlens: `[sequences + 1]` int32 or int64 on x's device, cumulative *padded* lengths of
            packed (THD) sequences: each is split on its own. All rows of x are packed alike.

    Returns:
        `[..., S/CP, ...]`, contiguous; x itself where CP is 1.

    Raises:
        ValueError: S or a packed sequence not divisible by 2*CP (contiguous: CP; no demand where
            CP is 1), unknown layout, no such dimension, unusable cu_seqlens. On CUDA the values of
            cu_seqlens are checked by a device-side assert.
    """
    group = resolve_cp_group(cp_group)
    dim = normalized_dim(x, seq_dim)
    where = SequenceLayout.of(layout, group_size(group), x.shape[dim], cu_seqlens, device=x.device)
    if where.cp_size == 1:
        return x
    return x.index_select(dim, where.positions(group_rank(group)))


def context_parallel_positions(
    seq_len: int,
    *,
    cp_group: ProcessGroup | None = None,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The global index of each of this rank's tokens. No communication, no sync.

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
    if isinstance(seq_len, bool) or not isinstance(seq_len, int):
        raise ValueError(f"seq_len: expected an int, got {seq_len!r}")
    where = SequenceLayout.of(layout, group_size(group), seq_len, cu_seqlens)
    return where.positions(group_rank(group))
