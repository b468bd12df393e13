"""What every autograd function of this package does: no double backward in silence, no autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Any, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """For an autograd.Function's backward whose result depends on what the forward saved.

    torch's own looks at the upstream gradient alone: under create_graph=True it gives out gradients
    without a graph where that is a constant, so that a penalty on them would train nothing, in
    silence. Here such gradients raise a RuntimeError once they are differentiated.

    Args:
        backward: called as `backward(ctx, saved tensors, *grads)`. Those are unpacked once, as
            hooks may bring them from far away. With `ctx.linear` set the result depends on grads
            alone, up to constants: torch's own rule holds.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            found = backward(ctx, saved, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return found
        # Those alone are reached by a backward for some inputs only, as autograd.grad's.
        held = grads if getattr(ctx, "linear", False) else (*grads, *saved)
        on = [x for x in held if isinstance(x, Tensor) and x.requires_grad]
        return tuple(_Last.apply(x, *on) if isinstance(x, Tensor) else x for x in found)

    return once


class _Last(torch.autograd.Function):
    """A gradient, of what it depends on, that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *on: Tensor) -> Tensor:
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RuntimeError(
            "mcore_logprobs' operations have no double backward (gradient of a gradient): expected "
            "create_graph=False, or gradients that no loss depends on"
        )


def without_autocast(like: Tensor | None) -> AbstractContextManager[Any]:
    """Products within it have the dtypes that they are told, in a backward as in its forward."""
    assert like is not None
    device_type = like.device.type
    if not autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for this type of device, which may know none."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
