"""What trainers need on a CPU beyond `cpu_runtime`: Megatron's optimizers, its training loop.

    from mcore_logprobs.cpu_megatron.training import cpu_training

    with cpu_training():
        from megatron.training import pretrain
        pretrain(...)    # --distributed-backend gloo, --transformer-impl local, float32

`cpu_devices` is the part that does not need `megatron.training`: for frameworks that call
Megatron's schedules, DDP and (distributed) optimizer from a loop of their own. The model needs
layers that run on a CPU (`layers`, `bridged`); everything else is Megatron's: its argument parser,
data loaders, schedules, DDP, optimizer, gradient clipping, validation and checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import torch
import typing_extensions

from mcore_logprobs.cpu_megatron.runtime import _MISSING, _replace, cpu_runtime

_CPU_PROPERTIES = types.SimpleNamespace(
    name="cpu",
    major=0,
    minor=0,
    total_memory=0,
    gcnArchName="cpu",  # the last for torch.compile
)
_open: set[Callable[..., object]] = set()


@contextlib.contextmanager
def cpu_devices() -> Iterator[bool]:
    """`cpu_runtime`, and one device that Megatron's optimizers take; yields whether it is active.

    Inside, `torch.cuda.device_count()` is 1 and a tensor's `type()` is "torch.cuda...", for
    Megatron seeds its generators, makes groups and takes parameters only then. A no-op that yields
    False where a GPU is present, and reversible, both like `cpu_runtime`; contexts nest.
    """
    with cpu_runtime() as active, contextlib.ExitStack() as undo:
        if active:
            _once(undo, _devices)
        yield active


@contextlib.contextmanager
def cpu_training() -> Iterator[bool]:
    """`cpu_devices` for the whole training loop; yields whether shims are active.

    Import `megatron.training` inside it: from 0.18 that package takes `typing.override`, which
    Python 3.11 lacks. Data sets made by Megatron's C++ helpers are not supported: nothing compiles
    them.
    """
    with cpu_devices() as active, contextlib.ExitStack() as undo:
        if active:
            if getattr(typing, "override", _MISSING) is _MISSING:
                _replace(undo, typing, "override", typing_extensions.override)
            if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
                # Megatron's arguments demand it under TP, SP and CP, GPU or not.
                os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
                undo.callback(os.environ.pop, "CUDA_DEVICE_MAX_CONNECTIONS", None)
            _once(undo, _loop)
        yield active


def _once(
    undo: contextlib.ExitStack, table: Callable[[], list[tuple[object, str, object]]]
) -> None:
    """What an outer context has replaced stays as it is."""
    if table in _open:
        return
    _open.add(table)
    undo.callback(_open.discard, table)
    for owner, name, value in table():
        _replace(undo, owner, name, value)


def _devices() -> list[tuple[object, str, object]]:
    buffers = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    amounts = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    return [
        # What trainers log: nothing is on a device.
        *((torch.cuda, name, lambda device=None: 0) for name in amounts),
        (torch.cuda, "get_device_name", lambda device=None: "cpu"),
        (torch.cuda.nvtx, "range_push", lambda name: 0),
        (torch.cuda.nvtx, "range_pop", lambda: 0),
        # Free and whole: trainers divide by the second, and collect garbage where little is free.
        (torch.cuda, "mem_get_info", lambda device=None: (1 << 36, 1 << 36)),
        # Megatron makes its process groups only where it counts a device.
        (torch.cuda, "device_count", lambda: 1),
        # A build for CUDA may conclude from that count that a GPU is there.
        (torch.cuda, "is_available", lambda: False),
        # Frameworks name the backend of their groups.
        (torch.distributed, "init_process_group", _gloo(torch.distributed.init_process_group)),
        (torch.distributed, "new_group", _gloo(torch.distributed.new_group)),
        # Its arguments' validation asks for the device's generation: before Hopper.
        (torch.cuda, "get_device_properties", lambda device=None: _CPU_PROPERTIES),
        (torch.Tensor, "to", _to_cpu(torch.Tensor.to)),
        (torch.nn.Module, "to", _to_cpu(torch.nn.Module.to)),
        # Its copy in the host's memory would be the very tensor that it frees.
        (buffers._ParamAndGradBuffer, "offload_to_cpu", _stay),
        # The optimizer names the types it takes: "torch.cuda.FloatTensor" and its kin.
        (torch.Tensor, "type", _cuda_type(torch.Tensor.type)),
    ]


def _loop() -> list[tuple[object, str, object]]:
    training = importlib.import_module("megatron.training.training")
    datasets = importlib.import_module("megatron.core.datasets.utils")
    # pretrain calls it by this name, and has no parameter for what it passes on.
    initialize = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    return [
        (training, "initialize_megatron", initialize),
        (datasets, "compile_helpers", lambda: None),
    ]


def _stay(buffer: Any, move_params: bool = True, move_grads: bool = True) -> None:
    """A buffer is on the host already; gradients that are moved are zeros when they come back."""
    if move_grads and buffer.grad_data is not None:
        buffer.grad_data.zero_()


def _gloo(plain: Callable[..., object]) -> object:
    """`plain` with a backend "nccl", or one with it for the devices, read as gloo."""

    def backend(x: object) -> object:
        return "gloo" if isinstance(x, str) and "nccl" in x.split(":")[-1] else x

    @functools.wraps(plain)
    def wrapped(*args: object, **kwargs: Any) -> object:
        if "backend" in kwargs:
            kwargs["backend"] = backend(kwargs["backend"])
        return plain(*map(backend, args), **kwargs)

    return wrapped


def _to_cpu(plain: Callable[..., object]) -> object:
    """`to` with a device "cuda..." read as the CPU."""

    def device(x: object) -> object:
        named = isinstance(x, (str, torch.device)) and str(x).startswith("cuda")
        return "cpu" if named else x

    @functools.wraps(plain)
    def wrapped(self: object, *args: object, **kwargs: Any) -> object:
        kwargs = {name: device(x) for name, x in kwargs.items()}
        return plain(self, *map(device, args), **kwargs)

    return wrapped


def _cuda_type(plain: Callable[..., str]) -> Callable[..., object]:
    @functools.wraps(plain)
    def named(self: object, dtype: object = None, *args: object, **kwargs: object) -> object:
        if dtype is None:
            return plain(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return plain(self, dtype, *args, **kwargs)

    return named
