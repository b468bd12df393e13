"""Run Megatron's own `megatron.training.pretrain` on CPU under gloo: what `cpu_runtime` lacks.

    from mcore_logprobs.cpu_megatron.training import cpu_training

    with cpu_training():
        from megatron.training import pretrain
        pretrain(...)    # --distributed-backend gloo, --transformer-impl local, float32

The model needs layers that run on a CPU (`layers`); everything else is Megatron's: its argument
parser, data loaders, schedules, DDP, optimizer, gradient clipping, validation and checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import types
import typing
from collections.abc import Iterator
from typing import Any

import torch
import typing_extensions

from mcore_logprobs.cpu_megatron.runtime import _MISSING, _replace, cpu_runtime

_CPU_PROPERTIES = types.SimpleNamespace(name="cpu", major=0, minor=0, total_memory=0)
_open = False


@contextlib.contextmanager
def cpu_training() -> Iterator[bool]:
    """`cpu_runtime` for the whole training loop; yields whether shims are active.

    Import `megatron.training` inside it: from 0.18 that package takes `typing.override`, which
    Python 3.11 lacks. A no-op that yields False where a GPU is present, and reversible, both like
    `cpu_runtime`; contexts nest. Data sets made by Megatron's C++ helpers are not supported:
    nothing compiles them.
    """
    global _open
    with cpu_runtime() as active, contextlib.ExitStack() as undo:
        if active and not _open:
            _open = True
            undo.callback(_close)
            if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
                # Megatron's arguments demand it under TP, SP and CP, GPU or not.
                os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
                undo.callback(os.environ.pop, "CUDA_DEVICE_MAX_CONNECTIONS", None)
            if getattr(typing, "override", _MISSING) is _MISSING:
                _replace(undo, typing, "override", typing_extensions.override)
            for owner, name, value in _replacements():
                _replace(undo, owner, name, value)
        yield active


def _close() -> None:
    global _open
    _open = False


def _replacements() -> list[tuple[Any, str, Any]]:
    training = importlib.import_module("megatron.training.training")
    datasets = importlib.import_module("megatron.core.datasets.utils")
    # pretrain calls it by this name, and has no parameter for what it passes on.
    initialize = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    return [
        (training, "initialize_megatron", initialize),
        (datasets, "compile_helpers", lambda: None),
        # Megatron makes its process groups only where it counts a device.
        (torch.cuda, "device_count", lambda: 1),
        # Its arguments' validation asks for the device's generation: before Hopper.
        (torch.cuda, "get_device_properties", lambda device=None: _CPU_PROPERTIES),
        # The optimizer names the types it takes: "torch.cuda.FloatTensor" and its kin.
        (torch.Tensor, "type", _cuda_type(torch.Tensor.type)),
    ]


def _cuda_type(plain: Any) -> Any:
    @functools.wraps(plain)
    def named(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return plain(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return plain(self, dtype, *args, **kwargs)

    return named
