"""A LoRA around the output layer, recognized as Megatron-Bridge and NeMo build it.

A `LoRALinear` holds `to_wrap`, the layer, and `adapter`, a `ParallelLinearAdapter`:

    to_wrap(x) + linear_out(alpha / dim * linear_in(x))

`linear_in` and `linear_out` are Megatron's ColumnParallelLinear. `linear_in` gathers its output, so
that each rank has `dim / TP` rows of A; `linear_out` has the rank's columns of the vocabulary.
Classes go by their names as well as by their parts: other adapters (DoRA) have the same attributes
and compute something else. Whatever is not known for certain takes the unfused path.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mcore_logprobs.collectives import all_gather_dim0
from mcore_logprobs.groups import group_rank, group_size, resolve_tp_group

_PARTS = {"linear_in.weight", "linear_out.weight"}


class HeadLoRA(NamedTuple):
    """Attributes: this rank's rows of A `[r/TP, h]` and of B `[V/TP, r]`; scale; the TP group."""

    a: Tensor
    b: Tensor
    scale: float
    group: Any

    def whole(self) -> tuple[Tensor, Tensor, float]:
        """(A, B, scale) as the fused operations take them. One all-gather of `[r/TP, h]`."""
        a = self.a if group_size(self.group) == 1 else _WholeA.apply(self.a, self.group)
        return a, self.b, self.scale


class _WholeA(torch.autograd.Function):
    """`[r/TP, h]` -> `[r, h]`; the gradient of it, whole on every rank, -> this rank's rows."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, group: Any) -> Tensor:
        ctx.rows, ctx.rank = a.shape[0], group_rank(group)
        return all_gather_dim0(a, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(0, ctx.rank * ctx.rows, ctx.rows), None


def is_adapter(layer: Any) -> bool:
    """Whether this is a LoRA around a layer, by its class's name and its two parts."""
    parts = (getattr(layer, "to_wrap", None), getattr(layer, "adapter", None))
    return type(layer).__name__ == "LoRALinear" and all(isinstance(p, nn.Module) for p in parts)


def base_layer(layer: Any) -> Any:
    """The layer that a LoRA is around; any other layer itself."""
    return layer.to_wrap if is_adapter(layer) else layer


def head_lora(layer: Any) -> HeadLoRA | None:
    """The LoRA of a layer for which `adapter_reason` is empty; None where it is switched off."""
    if not is_adapter(layer) or not getattr(layer, "_adapter_enabled", True):
        return None
    adapter = layer.adapter
    group = resolve_tp_group(getattr(layer.to_wrap, "tp_group", None))
    scale = float(adapter.alpha / adapter.dim)
    return HeadLoRA(adapter.linear_in.weight, adapter.linear_out.weight, scale, group)


def adapter_reason(layer: Any) -> str:
    """Why a LoRA's part cannot be fused, or "". Dropout is looked at again in every call."""
    if not getattr(layer, "_adapter_enabled", True):
        return ""
    adapter = layer.adapter
    kind = f"its adapter, a {type(adapter).__name__},"
    found = {name for name, _ in adapter.named_parameters()}
    if type(adapter).__name__ != "ParallelLinearAdapter" or found != _PARTS:
        return f"{kind} is not a plain LoRA (parameters: {sorted(found)})"
    return (
        _reason_against_function(adapter, kind)
        or _reason_against_shapes(layer.to_wrap, adapter, kind)
        or _reason_against_inner_hooks(layer)
    )


def _reason_against_function(adapter: Any, kind: str) -> str:
    if not isinstance(getattr(adapter, "activation", None), (nn.Identity, type(None))):
        return f"{kind} has an activation"
    dropout = getattr(adapter, "dropout", None)
    if isinstance(dropout, nn.Dropout):
        if dropout.p > 0.0 and dropout.training:
            return f"{kind} drops out some of its input or output"
    elif not isinstance(dropout, (nn.Identity, type(None))):
        return f"{kind} has a {type(dropout).__name__} for dropout"
    if getattr(adapter, "is_expert", False) or getattr(adapter, "input_is_parallel", False):
        return f"{kind} is made for another kind of layer"
    if getattr(adapter, "_external_tp_reduce_scale", 1.0) != 1.0:
        return f"{kind} scales its output once more"
    for name in ("alpha", "dim"):
        if not isinstance(getattr(adapter, name, None), (int, float)):
            return f"{kind} has no number {name}"
    return ""


def _reason_against_shapes(base: Any, adapter: Any, kind: str) -> str:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    ranks = group_size(resolve_tp_group(getattr(base, "tp_group", None)))
    for name in ("linear_in", "linear_out"):
        layer = getattr(adapter, name)
        if type(layer).forward is not ColumnParallelLinear.forward or "forward" in vars(layer):
            return f"{kind} has a {name} that is not Megatron's ColumnParallelLinear"
        if type(layer.weight) is not nn.Parameter or layer.weight.dtype != base_dtype(base):
            return f"{kind} has a {name} of another kind or dtype than the layer"
    expected = {
        "linear_in": (adapter.dim // ranks, base.input_size),
        "linear_out": (base.output_size_per_partition, adapter.dim),
    }
    for name, shape in expected.items():
        got = tuple(getattr(adapter, name).weight.shape)
        if got != shape:
            return f"{kind} has a {name} of shape {got}, not {shape}"
    if ranks > 1:
        if adapter.linear_out.gather_output or not adapter.linear_in.gather_output:
            return f"{kind} is split over TP in another way"
        if base.sequence_parallel is getattr(adapter, "disable_sequence_parallel_comm", False):
            return f"{kind} and the layer differ in sequence parallelism"
    return ""


def base_dtype(base: Any) -> torch.dtype:
    """The dtype of the layer's products, also where its weight comes with the call."""
    return base.config.params_dtype if base.weight is None else base.weight.dtype


def _reason_against_inner_hooks(layer: Any) -> str:
    """The modules inside are not called, so that a hook on them (a parameter gather) is skipped."""
    for module in layer.modules():
        hooks = (
            *module._forward_pre_hooks.values(),
            *module._forward_hooks.values(),
            *module._backward_hooks.values(),
            *module._backward_pre_hooks.values(),
        )
        if hooks and module is not layer:
            return f"there are hooks on the {type(module).__name__} inside its adapter"
    return ""
