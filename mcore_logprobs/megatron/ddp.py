"""Megatron's DDP: its hooks on modules, and its gradient buffers.

With `overlap_param_gather` a module waits for its parameters in a forward pre-hook. Modules that a
patched model does not call, and whose parameters it uses or passes by, have to wait all the same.

With `gradient_accumulation_fusion` a layer adds its weight's gradient to `weight.main_grad` itself,
and marks the weight; DDP then drops what autograd brings for it until the marks are taken off for
the next step. A gradient that comes another way, of a patched head, has to go into the buffer too:
one micro-batch of a step, or one consumer of lazy logits, may call the layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from mcore_logprobs.collectives import Gradients, once_differentiable
from mcore_logprobs.sources.main_grad import MainGrad

_DDP = "megatron.core.distributed.distributed_data_parallel"


def waits_for_parameters(hook: Callable[..., object]) -> bool:
    """Whether a forward pre-hook is DDP's, which reads only its module's parameters."""
    return getattr(hook, "__module__", "") == _DDP


def wait_for_parameters(module: nn.Module) -> None:
    """Wait for the parameters of a module that is not called, and of those inside it."""
    for inner in module.modules():
        for hook in list(inner._forward_pre_hooks.values()):
            if waits_for_parameters(hook):
                hook(inner, ())


def into_main_grad(layer: nn.Module, weight: Tensor) -> bool:
    """Whether the weight's gradient goes into `weight.main_grad`, as the layer's own would.

    Not without gradients, as a reference model has no buffers; not a copy that autocast has made,
    which has none (`accumulated` is for its parameter); nor where FSDP makes the buffer when the
    gradient arrives, which it takes from autograd as well.
    """
    fused = any(getattr(layer, name, False) for name in _FUSED)
    return bool(
        fused
        and torch.is_grad_enabled()
        and weight.requires_grad
        and isinstance(getattr(weight, "main_grad", None), Tensor)
        and not hasattr(weight, "__fsdp_param__")
    )


# Megatron's name for it, and Transformer Engine's.
_FUSED = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")


def accumulated(layer: nn.Module, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the weight such that its gradient goes into `main_grad`, if its layer's own would.

    Args:
        dtype: what it is cast to; None: its own.
    """
    dtype = dtype or weight.dtype
    if into_main_grad(layer, weight):
        return _Accumulated.apply(weight, dtype)
    return weight.to(dtype)


class _AccumulatedContext(FunctionCtx):
    main_grad: MainGrad
    linear: bool


class _Accumulated(torch.autograd.Function):
    """The cast is within, so that its gradient needs no copy in the weight's dtype."""

    @staticmethod
    def forward(ctx: _AccumulatedContext, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.main_grad, ctx.linear = MainGrad(weight), True
        return weight.view_as(weight) if weight.dtype == dtype else weight.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: _AccumulatedContext, saved: tuple[()], *grads: Tensor) -> Gradients:
        ctx.main_grad.buffer.add_(grads[0])
        return ctx.main_grad.dummy_wgrad(), None
