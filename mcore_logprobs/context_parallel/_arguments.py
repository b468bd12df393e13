"""What the operations here have in common: checked arguments."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.context_parallel.layouts import SequenceLayout
from mcore_logprobs.groups import group_size


def normalized_dim(x: Tensor, seq_dim: int) -> int:
    """seq_dim counted from the front.

    Raises:
        ValueError: x has no such dimension.
    """
    if not -x.dim() <= seq_dim < x.dim():
        raise ValueError(
            f"seq_dim: expected {-x.dim()} to {x.dim() - 1} (shape {list(x.shape)}), got {seq_dim}"
        )
    return seq_dim % x.dim()


def layout_of_local(
    x: Tensor, dim: int, group: ProcessGroup | None, layout: str, cu_seqlens: Tensor | None
) -> SequenceLayout:
    """The layout of the sequence that x is this rank's part of."""
    size = group_size(group)
    return SequenceLayout.of(layout, size, x.shape[dim] * size, cu_seqlens, device=x.device)
