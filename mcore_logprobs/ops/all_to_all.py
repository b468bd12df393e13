"""From every row's part of the vocabulary to part of the rows' whole vocabulary, and back."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_plain
from mcore_logprobs.collectives import all_to_all_dim0
from mcore_logprobs.consistency import check_call, comparing
from mcore_logprobs.groups import group_size, resolve_tp_group
from mcore_logprobs.spelling import suggesting


@suggesting
def all_to_all_vp2sp(x: Tensor, *, tp_group: ProcessGroup | None = None) -> Tensor:
    """Vocabulary-parallel rows to row-parallel ones: rank r gets rows `[r*n/TP, (r+1)*n/TP)`.

    Shape:
        x `[n, V/TP]` -> `[n/TP, V]`, columns by global id. Differentiable. On one rank the result
        shares x's memory.

    Collectives: one all-to-all over TP, forward and backward, of x's size.

    Raises:
        ValueError: x is not 2-D or a DTensor, or n is not divisible by TP; at a first call, on
            every rank, another shape or dtype on one of them, or an x that requires a gradient only
            on some.
    """
    group, size = _check(x, tp_group, sharded=True)
    rows, width = x.shape
    if rows % size:
        raise ValueError(f"x: expected [n, V/TP] with n divisible by TP {size}, got {_shape(x)}")
    # Block i of the rows goes to rank i; what comes back is [rank, row, column].
    blocks = all_to_all_dim0(x, group).view(size, rows // size, width)
    return blocks.transpose(0, 1).reshape(rows // size, size * width)


@suggesting
def all_to_all_sp2vp(x: Tensor, *, tp_group: ProcessGroup | None = None) -> Tensor:
    """The inverse of `all_to_all_vp2sp`: whole rows to every row's part of the vocabulary.

    Shape:
        x `[n/TP, V]` -> `[n, V/TP]`. Differentiable. On one rank the result shares x's memory.

    Collectives: one all-to-all over TP, forward and backward, of x's size.

    Raises:
        ValueError: x is not 2-D or a DTensor, or V is not divisible by TP; at a first call, on
            every rank, another shape or dtype on one of them, or an x that requires a gradient only
            on some.
    """
    group, size = _check(x, tp_group, sharded=False)
    rows, vocab = x.shape
    if vocab % size:
        raise ValueError(f"x: expected [n/TP, V] with V divisible by TP {size}, got {_shape(x)}")
    blocks = x.reshape(rows, size, vocab // size).transpose(0, 1)
    return all_to_all_dim0(blocks.reshape(size * rows, vocab // size), group)


def _check(
    x: Tensor, tp_group: ProcessGroup | None, *, sharded: bool
) -> tuple[ProcessGroup | None, int]:
    if not isinstance(x, Tensor) or x.dim() != 2:
        got = _shape(x) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x: expected a 2-D tensor, got {got}")
    check_plain("x", x)
    group = resolve_tp_group(tp_group)
    size = group_size(group)
    if group is not None:
        name = "all_to_all_vp2sp" if sharded else "all_to_all_sp2vp"
        width = x.shape[1] if sharded else x.shape[1] // size
        with comparing(name, lambda: {"logits": x, "dtype": x.dtype}):
            check_call(width, group, x.device, {"x": x})
    return group, size


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
