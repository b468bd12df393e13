"""`kernels.reference.scale` in one pass, as a Triton kernel."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels.triton.common import launch, rounded
from mcore_logprobs.kernels.triton.operators import operator, writes_out

_TILE = 4096


# A count that is a multiple of 16 lets 16 bytes be read at a time.
@triton.jit(do_not_specialize_on_alignment=["upstream_ptr"])
def scale_kernel(
    grad_ptr,  # [count]
    out_ptr,  # [count]; may be grad_ptr
    upstream_ptr,  # one number
    count,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    upstream = tl.load(upstream_ptr).to(tl.float32)
    if upstream != 0.0:
        value = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * upstream
        if ADD:
            value += tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, value, mask=inside)
    elif not ADD:
        tl.store(out_ptr + at, tl.zeros([TILE], tl.float32), mask=inside)


def scale(grad: Tensor, upstream: Tensor, *, out: Tensor, add: bool = False) -> None:
    """As `kernels.reference.scale`."""
    if grad.is_contiguous() and out.is_contiguous():
        _scale(grad, upstream, add, out)
    else:
        reference.scale(grad, upstream, out=out, add=add)


def _run(grad: Tensor, upstream: Tensor, add: bool, out: Tensor) -> None:
    count = grad.numel()
    if count == 0:
        return
    with rounded(out) as written:
        if add and written is not out:  # the interpreter's copy
            written.copy_(out)
        launch(
            scale_kernel, triton.cdiv(count, _TILE),
            grad, written, upstream, count, ADD=add, TILE=_TILE,
        )  # fmt: skip


_scale = operator(
    "scale(Tensor grad, Tensor upstream, bool add, Tensor(a!) out) -> ()", _run, writes_out
)
