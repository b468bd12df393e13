"""A LoRA around the output layer, as Megatron-Bridge and NeMo build it, or as PEFT's layers do.

Megatron-Bridge's `LoRALinear` holds `to_wrap`, the layer, and `adapter`, a `ParallelLinearAdapter`:

    to_wrap(x) + linear_out(alpha / dim * linear_in(x))

`linear_in` and `linear_out` are Megatron's ColumnParallelLinear. `linear_in` gathers its output, so
that each rank has `dim / TP` rows of A; `linear_out` has the rank's columns of the vocabulary.
Classes go by their names as well as by their parts: other adapters (DoRA) have the same attributes
and compute something else.

A layer in PEFT's form (mcore-bridge's, for ms-swift) is recognized by its attributes `base_layer`,
`lora_A`, `lora_B` and `scaling`, dictionaries by the adapter's name:

    base_layer(x) + sum of scaling[name] * lora_B[name](lora_A[name](x)) over the active adapters

`lora_A[name].weight` is the whole A on each rank, `lora_B[name].weight` the rank's columns. Under
sequence parallelism A multiplies the rank's own tokens, and its parameter has the mark
`sequence_parallel`, by which Megatron sums its gradient over TP. Whatever is not known for certain
takes the unfused path.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mcore_logprobs.collectives import Gradients, all_gather_dim0, once_differentiable
from mcore_logprobs.groups import group_rank, group_size, resolve_tp_group
from mcore_logprobs.megatron.ddp import accumulated, waits_for_parameters
from mcore_logprobs.megatron.fsdp import is_sharded

_PARTS = {"linear_in.weight", "linear_out.weight"}
# Classes that only multiply by their weight. By name, because Transformer Engine is not imported.
_LINEAR = {"Linear", "ColumnParallelLinear", "TELinear", "TEColumnParallelLinear"}


class HeadLoRA(NamedTuple):
    """What is added to a head's product.

    Attributes:
        a: `[r/TP, h]`, this rank's rows of A, or `[r, h]`.
        b: `[V/TP, r]`, this rank's rows of B.
        layout: of A over TP: "rows"; "whole" on every rank, with the whole gradient; or "summed",
            whole, where the ranks' gradients are summed after the backward.
        layers: whose weights A and B are; None where they are made of several layers' weights.
    """

    a: Tensor
    b: Tensor
    scale: float
    group: ProcessGroup | None
    layout: str = "rows"
    layers: tuple[nn.Module, nn.Module] | None = None

    def whole(self) -> tuple[Tensor, Tensor, float]:
        """(A, B, scale) as the fused operations take them.

        Collectives: with "rows" one all-gather of `[r/TP, h]` over TP, else none.
        """
        a, b = self.a, self.b
        if self.layers is not None:
            a, b = accumulated(self.layers[0], a), accumulated(self.layers[1], b)
        if group_size(self.group) > 1 and self.layout == "rows":
            a = _WholeA.apply(a, self.group)
        elif group_size(self.group) > 1 and self.layout == "summed":
            a = _SharedA.apply(a, group_size(self.group))
        return a, b, self.scale


class _WholeA(torch.autograd.Function):
    """`[r/TP, h]` -> `[r, h]`; the gradient of it, whole on every rank, -> this rank's rows."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.rows, ctx.rank, ctx.linear = a.shape[0], group_rank(group), True
        return all_gather_dim0(a, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: tuple[()], *grads: Tensor) -> Gradients:
        return grads[0].narrow(0, ctx.rank * ctx.rows, ctx.rows), None


class _SharedA(torch.autograd.Function):
    """A as it is; the gradient of it, whole on every rank, -> this rank's equal share."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, ranks: int) -> Tensor:
        ctx.ranks, ctx.linear = ranks, True
        return a.view_as(a)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: tuple[()], *grads: Tensor) -> Gradients:
        return grads[0] / ctx.ranks, None


def is_adapter(layer: object) -> bool:
    """Whether this is a LoRA around a layer, in one of the two forms."""
    return _is_bridges(layer) or _is_pefts(layer)


def _is_bridges(layer: object) -> bool:
    parts = (getattr(layer, "to_wrap", None), getattr(layer, "adapter", None))
    named = type(layer).__name__.removeprefix("FSDP") == "LoRALinear"  # FSDP2 gives it a new class
    return named and all(isinstance(p, nn.Module) for p in parts)


def _is_pefts(layer: object) -> bool:
    parts = (getattr(layer, "lora_A", None), getattr(layer, "lora_B", None))
    return (
        isinstance(getattr(layer, "base_layer", None), nn.Module)
        and all(isinstance(p, nn.ModuleDict) for p in parts)
        and isinstance(getattr(layer, "scaling", None), dict)
    )


def base_layer(layer: Any) -> Any:
    """The layer that a LoRA is around; any other layer itself."""
    if _is_bridges(layer):
        return layer.to_wrap
    return layer.base_layer if _is_pefts(layer) else layer


def head_lora(layer: Any) -> HeadLoRA | None:
    """The LoRA of a layer for which `adapter_reason` is empty; None where it is switched off."""
    if _is_pefts(layer):
        return _pefts_lora(layer)
    if not _is_bridges(layer) or not getattr(layer, "_adapter_enabled", True):
        return None
    adapter = layer.adapter
    group = resolve_tp_group(getattr(layer.to_wrap, "tp_group", None))
    scale = float(adapter.alpha / adapter.dim)
    layers = adapter.linear_in, adapter.linear_out
    return HeadLoRA(layers[0].weight, layers[1].weight, scale, group, layers=layers)


def _pefts_lora(layer: Any) -> HeadLoRA | None:
    names = _active(layer)
    if not names:
        return None
    base = layer.base_layer
    group = resolve_tp_group(getattr(base, "tp_group", None))
    layout = "summed" if base.sequence_parallel else "whole"
    scales = [float(layer.scaling[name]) for name in names]
    pairs = [(layer.lora_A[name], layer.lora_B[name]) for name in names]
    if len(pairs) == 1:
        ((a, b),) = pairs
        return HeadLoRA(a.weight, b.weight, scales[0], group, layout, (a, b))
    parts_a = [accumulated(a, a.weight) for a, _ in pairs]
    parts_b = [accumulated(b, b.weight) for _, b in pairs]
    scale = scales[0]
    if any(other != scale for other in scales):  # each goes into its own B, rounded there
        parts_b = [part * own_scale for part, own_scale in zip(parts_b, scales, strict=True)]
        scale = 1.0
    return HeadLoRA(torch.cat(parts_a), torch.cat(parts_b, 1), scale, group, layout)


def _active(layer: Any) -> list[str]:
    """The adapters whose part is added, by name: those merged into the weight are in it."""
    if getattr(layer, "disable_adapters", False) or getattr(layer, "merged", False):
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def adapter_reason(layer: nn.Module, gathered_by_then: bool = False) -> str:
    """Why a LoRA's part cannot be fused, or "". Dropout is checked again in every call.

    Args:
        gathered_by_then: parameters that torch's FSDP2 shards count as what they are in a forward.
            A module inside with a group of its own has hooks, and is not called.
    """
    reason_of = _reason_against_pefts if _is_pefts(layer) else _reason_against_bridges
    reason = reason_of(layer, gathered_by_then)
    if reason and any(is_sharded(x) or hasattr(x, "placements") for x in layer.parameters()):
        return f"FSDP shards its adapter, whose modules a fused head does not call ({reason})"
    return reason


def _reason_against_bridges(layer: Any, gathered_by_then: bool) -> str:
    if not getattr(layer, "_adapter_enabled", True):
        return ""
    adapter = layer.adapter
    kind = f"its adapter, a {type(adapter).__name__},"
    parameter_names = {name for name, _ in adapter.named_parameters()}
    if type(adapter).__name__ != "ParallelLinearAdapter" or parameter_names != _PARTS:
        return f"{kind} is not a plain LoRA (parameters: {sorted(parameter_names)})"
    return (
        _reason_against_function(adapter, kind)
        or _reason_against_shapes(layer.to_wrap, adapter, kind, gathered_by_then)
        or _reason_against_inner_hooks(layer)
    )


def _reason_against_pefts(layer: Any, gathered_by_then: bool) -> str:
    kind, base = f"its adapter, a {type(layer).__name__},", layer.base_layer
    if getattr(layer, "disable_adapters", False) and getattr(layer, "merged", False):
        return f"{kind} takes its part out of the weight in the next forward"
    if any(getattr(layer, "use_dora", {}).values()) or getattr(layer, "lora_variant", None):
        return f"{kind} is a variant of LoRA"
    for name in _active(layer):
        dropout = layer.lora_dropout[name]
        if isinstance(dropout, nn.Dropout):
            if dropout.p > 0.0 and dropout.training:
                return f"{kind} drops out some of its input"
        elif not isinstance(dropout, nn.Identity):
            return f"{kind} has a {type(dropout).__name__} for dropout"
        if not isinstance(layer.scaling[name], (int, float)):
            return f"{kind} has no number for scaling"
        a, b = layer.lora_A[name], layer.lora_B[name]
        for part, linear in (("lora_A", a), ("lora_B", b)):
            if type(linear).__name__ not in _LINEAR or "forward" in vars(linear):
                return f"{kind} has a {part} that is a {type(linear).__name__}"
            if [parameter_name for parameter_name, _ in linear.named_parameters()] != ["weight"]:
                return f"{kind} has a {part} with more than a weight"
            if not _is_like(linear.weight, base_dtype(base), gathered_by_then):
                return f"{kind} has a {part} of another kind or dtype than the layer"
        rank = a.weight.shape[0]
        shapes = (tuple(a.weight.shape), tuple(b.weight.shape))
        if shapes != ((rank, base.input_size), (base.output_size_per_partition, rank)):
            return f"{kind} has parts of shapes {shapes[0]} and {shapes[1]}"
        if getattr(b, "gather_output", False):
            return f"{kind} gathers its output"
        if getattr(b, "parallel_mode", "column") != "column":  # Transformer Engine's
            return f"{kind} has a lora_B that takes no part in tensor parallelism"
        if base.sequence_parallel and not getattr(a.weight, "sequence_parallel", False):
            return f"{kind} has a lora_A without the mark sequence_parallel"
    others = [name for name, _ in layer.named_parameters() if not name.startswith(_PEFTS_PARTS)]
    if others:
        return f"{kind} is not a plain LoRA (parameters: {others})"
    return _reason_against_inner_hooks(layer)


_PEFTS_PARTS = ("base_layer.", "lora_A.", "lora_B.")


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


def _reason_against_shapes(base: Any, adapter: Any, kind: str, gathered_by_then: bool) -> str:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    ranks = group_size(resolve_tp_group(getattr(base, "tp_group", None)))
    for name in ("linear_in", "linear_out"):
        layer = getattr(adapter, name)
        if type(layer).forward is not ColumnParallelLinear.forward or "forward" in vars(layer):
            return f"{kind} has a {name} that is not Megatron's ColumnParallelLinear"
        if not _is_like(layer.weight, base_dtype(base), gathered_by_then):
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


def _is_like(weight: Tensor, dtype: torch.dtype, gathered_by_then: bool) -> bool:
    """Whether it is a plain parameter of this dtype, or will be one in a forward."""
    if type(weight) is not nn.Parameter:
        by_then = gathered_by_then and type(weight).__name__ == "DTensor"
        if not by_then or is_sharded(weight):  # by Megatron's, which gathers for modules it calls
            return False
    return weight.dtype == dtype


def base_dtype(base: Any) -> torch.dtype:
    """The dtype of the layer's products, also where its weight comes with the call."""
    return base.config.params_dtype if base.weight is None else base.weight.dtype


def _reason_against_inner_hooks(layer: Any) -> str:
    """The modules inside are not called, so that a hook on them is skipped.

    But for DDP's, which wait for parameters: those are run where the call is deferred.
    """
    for module in layer.modules():
        hooks = (
            *(x for x in module._forward_pre_hooks.values() if not waits_for_parameters(x)),
            *module._forward_hooks.values(),
            *module._backward_hooks.values(),
            *module._backward_pre_hooks.values(),
        )
        if hooks and module is not layer:
            return f"there are hooks on the {type(module).__name__} inside its adapter"
    return ""
