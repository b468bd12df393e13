"""The collectives that operations make, and what autograd functions around them share.

Only `patch_model` makes another one, of reports over pipeline stages under `fused="require"`.
Groups are explicit; None means one process, and nothing is sent. A plain all-reduce inside autograd
would give the ranks that do not own a target a wrong gradient, so none is used there.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from mcore_logprobs.groups import group_size

ObjectT = TypeVar("ObjectT")
Gradients = tuple[Tensor | None, ...]

_SENT_AS_THEY_ARE = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


_REASON = "mcore_logprobs/reason"


def group_store(group: ProcessGroup) -> dist.Store | None:
    """The group's key-value store, or None where torch does not tell or fakes the other ranks."""
    try:
        from torch.distributed.distributed_c10d import _get_process_group_store

        store = _get_process_group_store(group)
        return None if dist.get_backend(group) == "fake" else store
    except (ImportError, KeyError, ValueError):
        return None


def leave_reason(group: ProcessGroup, reason: str) -> bool:
    """Say why this rank raises and the others do not.

    They wait in a collective; once it fails they raise with this text (`wait_for`). What another
    has left stays: the first rank that raises is the one that the others fail after.

    Returns:
        whether it was left.
    """
    return _replace_reason(group, "", reason)


def take_back_reason(group: ProcessGroup, reason: str | None = None) -> None:
    """Remove the reason that this rank has left, as it has gone on; None: whatever is there."""
    if there := _reason_left(group) if reason is None else reason:
        _replace_reason(group, there, "")


def _replace_reason(group: ProcessGroup, old: str, new: str) -> bool:
    store = group_store(group)
    if store is None:
        return False
    try:
        return bool(store.compare_set(_REASON, old, new) == new.encode())
    except RuntimeError:  # the store was a lost rank's
        return False


def another_stopped(reason: str) -> ValueError:
    return ValueError(f"another rank stopped: {reason}")


def wait_for(work: dist.Work | None, group: ProcessGroup | None) -> None:
    """`work.wait()`, if there is any.

    Raises:
        ValueError: it failed, and the rank that stopped has left its reason.
    """
    if work is not None:
        with _told_why(group):
            work.wait()


@contextmanager
def _told_why(group: ProcessGroup | None) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = _reason_left(group)
        if reason:
            raise another_stopped(reason) from error
        raise


def _reason_left(group: ProcessGroup | None) -> str:
    store = group_store(group) if group is not None else None
    try:
        return store.get(_REASON).decode() if store and store.check([_REASON]) else ""
    except RuntimeError:  # the store was the lost rank's
        return ""


def all_gather_stack(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """`[...]` on each rank -> `[size, ...]` on every rank. One all-gather; not differentiable."""
    if group_size(group) == 1:
        return x.unsqueeze(0)
    return all_gather_dim0(x.unsqueeze(0), group)


def all_gather_dim0(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """`[n, ...]` on each rank -> `[size*n, ...]`, rank by rank. Not differentiable.

    Returns x itself on one process.
    """
    if group_size(group) == 1:
        return x
    with _told_why(group):
        return _all_gather_dim0(x.contiguous(), group, async_op=False)[0]


def all_gather_dim0_async(x: Tensor, group: ProcessGroup | None) -> tuple[Tensor, dist.Work | None]:
    """Start an `all_gather_dim0`: (output, work to wait for, or None if nothing is sent).

    x must be contiguous and stay as it is until the work is done.
    """
    if group_size(group) == 1:
        return x, None
    return _all_gather_dim0(x, group, async_op=True)


def all_gather_objects(x: ObjectT, group: ProcessGroup | None) -> list[ObjectT]:
    """What each rank gives, pickled, in rank order. For diagnostics.

    Two all-gathers and host syncs. NCCL sends by the process's current device: set it before
    (`torch.cuda.set_device`).
    """
    given = [x] * group_size(group)
    if group is not None and len(given) > 1:
        with _told_why(group):
            dist.all_gather_object(given, x, group=group)
    return given


# Where the next line needs the result the collective is a synchronous one: it is issued on the
# current stream, where a wait for an asynchronous one would take two events more.


def _all_gather_dim0(
    x: Tensor, group: ProcessGroup | None, *, async_op: bool
) -> tuple[Tensor, dist.Work | None]:
    out = x.new_empty((group_size(group) * x.shape[0], *x.shape[1:]))
    # Empty on one rank is empty on all: nothing to send.
    if not x.numel():
        return out, None
    sent, received = (_on_the_wire(t) for t in (x, out))
    return out, dist.all_gather_into_tensor(received, sent, group=group, async_op=async_op)


def _on_the_wire(x: Tensor) -> Tensor:
    """x, or its bytes where gloo or NCCL does not know its dtype: for copying, not for adding."""
    if x.dtype in _SENT_AS_THEY_ARE:
        return x
    # A contiguous tensor with a dimension of 1, or of one element, may have any stride there.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def all_reduce_sum(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over ranks, in a new tensor (x itself on one process). Not differentiable."""
    if group_size(group) == 1 or x.numel() == 0:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    with _told_why(group):
        dist.all_reduce(out, group=group)
    return out


def all_reduce_sum_async(x: Tensor, group: ProcessGroup | None) -> dist.Work | None:
    """Start summing x over ranks in place; `wait()` on what is returned, None on one process.

    x must be contiguous and the library's own.
    """
    if group_size(group) == 1 or x.numel() == 0:
        return None
    return dist.all_reduce(x, group=group, async_op=True)


def reduce_scatter_dim0(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """`[size*n, ...]` on each rank -> this rank's `[n, ...]` of the sum. Not differentiable.

    Returns x itself on one process.
    """
    if group_size(group) == 1:
        return x
    with _told_why(group):
        return _reduce_scatter_dim0(x.contiguous(), group, async_op=False)[0]


def reduce_scatter_dim0_async(
    x: Tensor, group: ProcessGroup | None
) -> tuple[Tensor, dist.Work | None]:
    """Start a `reduce_scatter_dim0`: (output, work to wait for, or None if nothing is sent).

    x must be contiguous and stay as it is until the work is done.
    """
    if group_size(group) == 1:
        return x, None
    return _reduce_scatter_dim0(x, group, async_op=True)


def _reduce_scatter_dim0(
    x: Tensor, group: ProcessGroup | None, *, async_op: bool
) -> tuple[Tensor, dist.Work | None]:
    size = group_size(group)
    if x.shape[0] % size:
        raise ValueError(f"reduce-scatter: expected dim 0 divisible by {size}, got {x.shape[0]}")
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    if not x.numel():
        return out, None
    return out, dist.reduce_scatter_tensor(out, x, group=group, async_op=async_op)


def ordered_sum_dim0(parts: list[Tensor], group: ProcessGroup | None, *, scatter: bool) -> Tensor:
    """The sum of every rank's parts `[n, ...]`, added one by one in rank order, then in list order.

    The same bits however the parts are spread over ranks, which a reduction does not promise. One
    all-to-all, as much as a reduce-scatter of each part; without `scatter` one all-gather of the
    sum. Not differentiable.

    Args:
        parts: as many on every rank; the library's own, the first is written over on one process.
        scatter: give this rank's `n / size` rows of the sum; n is divisible by size. Else all.
    """
    size = group_size(group)
    if size == 1:
        total = parts[0]
        for part in parts[1:]:
            total.add_(part)
        return total
    rows = parts[0].shape[0]
    own = -(-rows // size)
    if scatter and rows % size:
        raise ValueError(f"ordered sum: expected dim 0 divisible by {size}, got {rows}")
    # [to whom, part, rows, ...], then [from whom, part, rows, ...]
    sent = parts[0].new_zeros(size, len(parts), own, *parts[0].shape[1:])
    for place, part in enumerate(parts):
        for rank in range(size):
            piece = part[rank * own : (rank + 1) * own]
            sent[rank, place, : piece.shape[0]] = piece
    received = sent
    if sent.numel():
        received = torch.empty_like(sent)
        with _told_why(group):
            dist.all_to_all_single(received, sent, group=group)
    total, *others = received.flatten(0, 1).unbind(0)
    total = total.clone()
    for other in others:
        total.add_(other)
    return total if scatter else all_gather_dim0(total, group)[:rows]


# torch 2.13 renames these two; the names here serve every torch that this package does.
warnings.filterwarnings(
    "ignore",
    message=r".*(all_gather_into_tensor|reduce_scatter_tensor).*deprecated",
    category=FutureWarning,
)


# ---- autograd functions -------------------------------------------------------------------------


class GroupContext(FunctionCtx):
    """What a function over a group keeps for its backward; linear as in `once_differentiable`."""

    group: ProcessGroup
    linear: bool


def once_differentiable(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """For an autograd.Function's backward whose result depends on what the forward saved.

    torch's own reads only the upstream gradient: under create_graph=True it gives out gradients
    without a graph where that is a constant, so that a penalty on them would train nothing, in
    silence. Here such gradients raise a RuntimeError once they are differentiated.

    Args:
        backward: called as `backward(ctx, saved tensors, *grads)`. Those are unpacked once, as
            hooks may bring them from far away. With `ctx.linear` set the result depends only
            on grads, up to constants: torch's own rule holds.
    """

    @functools.wraps(backward)
    def once(ctx: FunctionCtx, *grads: Tensor | None) -> Gradients:
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        with torch.no_grad():
            gradients = backward(ctx, saved, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return gradients
        # autograd.grad reaches only these, where it is asked for some inputs.
        depends_on = grads if getattr(ctx, "linear", False) else (*grads, *saved)
        learning = [x for x in depends_on if isinstance(x, Tensor) and x.requires_grad]
        return tuple(_Last.apply(x, *learning) if isinstance(x, Tensor) else x for x in gradients)

    return once


class _Last(torch.autograd.Function):
    """A gradient, of what it depends on, that cannot be differentiated."""

    @staticmethod
    def forward(ctx: FunctionCtx, grad: Tensor, *on: Tensor) -> Tensor:
        return grad.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Tensor:
        raise RuntimeError(
            "mcore_logprobs' operations have no double backward (gradient of a gradient): expected "
            "create_graph=False, or gradients that no loss depends on"
        )


def saved_tensors_hooks() -> object:
    """The innermost of those that pack what autograd saves now, or None.

    Checkpoints and offloading do, each with hooks of its own. A torch that does not tell (2.7 and
    before) gives an object that equals no other.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return object() if top is None else top(False)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: GroupContext, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        with _told_why(group):
            dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: GroupContext, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None


def all_to_all_dim0(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Block i of x's dim 0 goes to rank i; the result is the blocks that came, in rank order.

    Differentiable: the backward is the same all-to-all.

    Raises:
        ValueError: dim 0 is not divisible by the group's size.
    """
    size = group_size(group)
    if x.shape[0] % size:
        raise ValueError(f"all-to-all: expected dim 0 divisible by {size}, got {x.shape[0]}")
    return x if size == 1 else _AllToAll.apply(x, group)
