"""Megatron-FSDP: its backward hooks on modules whose output is not a tensor."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

Output = TypeVar("Output")
Held = TypeVar("Held")


def attach_backward_hooks(
    output: Output, model: nn.Module, layer: nn.Module, weight: Tensor | None = None
) -> Output:
    """Let Megatron-FSDP see when the backward of what a patched head gives begins.

    Version 1 looks for it at the tensors that the model and the output layer return, and resets
    its reductions at the end of that backward; version 2 in the backward pre-hooks of the modules
    that it shards, and gathers their parameters again. Both see only tensors and tuples of
    tensors: no deferred logits, no TokenStats.

    Args:
        output: what the model is going to return.
        model: around the layer; the layer itself where it is not known.
        weight: what the layer is called with, where it is not a parameter of the model.

    Returns: `output`, with views instead of its tensors under version 1.

    Raises:
        RuntimeError: this FSDP's hooks cannot be found from here.
    """
    tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not tensors:
        return output
    first = next(model.parameters(), weight)  # both mark every parameter
    parts = output if isinstance(output, tuple) else (output,)
    seen = all(x is None or isinstance(x, Tensor) for x in parts)  # by hooks of modules around
    hooks = [(module, hook) for module in (layer, model) for hook in _output_hooks(module)]
    modules = _modules_around(model, weight) if not seen and hasattr(first, _GROUP) else []
    if None in modules or (hasattr(first, "__fsdp_param__") and not (hooks or seen)):
        raise RuntimeError(
            "Megatron-FSDP sees the backward of modules that return tensors, and its hooks around "
            "this model are out of reach: gradients would be wrong. Return a tensor: output='loss'"
        )
    for module, hook in hooks:
        views = dict(zip(map(id, tensors), hook(module, (), tuple(tensors)), strict=True))
        output = pytree.tree_map(lambda x, views=views: views.get(id(x), x), output)
        tensors = list(views.values())
    if modules:

        def begin(grad: Tensor) -> None:
            for module in modules:
                assert module is not None
                # One around a wrapper that returned a tensor has begun by itself.
                if getattr(getattr(module, "phase", None), "name", "") != "BACKWARD":
                    for hook in module._backward_pre_hooks.values():
                        hook(module, (grad,))

        register_multi_grad_hook(tensors, begin, mode="any")
    return output


def is_sharded(weight: Tensor, *around: nn.Module) -> bool:
    """Whether torch's or Megatron's FSDP shards a weight, as far as it and modules around it tell.

    The weight is then there only in the model's own forward and backward, whose begin FSDP sees at
    tensors that the model returns.
    """
    kinds = {kind.__name__ for module in around for kind in type(module).__mro__}
    marked = any(hasattr(weight, name) for name in ("__fsdp_param__", _GROUP))
    flat = hasattr(weight._base, "_is_flat_param")  # of torch's first version
    hooked = any(_output_hooks(module) for module in around)
    return "FSDPModule" in kinds or marked or flat or hooked


_GROUP = "_mfsdp_parameter_group"


def _output_hooks(module: nn.Module) -> list[Callable[..., Iterable[Tensor]]]:
    """Version 1's, which attach hooks to the tensors that `module` returns."""
    hooks = module._forward_hooks.values()
    return [
        hook
        for hook in hooks
        if getattr(hook, "__module__", "").endswith("megatron_fsdp.megatron_fsdp")
        and getattr(hook, "__name__", "") == "forward_hook"
    ]


def _modules_around(model: nn.Module, weight: Tensor | None) -> list[nn.Module | None]:
    """The modules by which version 2 gathers these parameters, without those inside `model`.

    None instead of one that cannot be found.
    """
    found: list[nn.Module | None] = []
    inside = set(model.modules()) - {model}
    for parameter in itertools.chain(model.parameters(), [weight]):
        group = _of(getattr(parameter, _GROUP, None))
        if group is not None:
            module = _of(getattr(group, "_owning_module", getattr(group, "owning_module", None)))
            if module not in inside and module not in found:
                found.append(module)
    return found


def _of(value: Held | weakref.ref[Held] | None) -> Held | None:
    return value() if isinstance(value, weakref.ref) else value
