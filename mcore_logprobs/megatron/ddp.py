"""Megatron's DDP: its hooks on modules whose parameters are gathered while the forward runs.

With `overlap_param_gather` a module waits for its parameters in a forward pre-hook. Modules that a
patched model does not call, and whose parameters it uses or passes by, have to wait all the same.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

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
