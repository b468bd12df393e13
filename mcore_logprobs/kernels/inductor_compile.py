"""torch.compile for the CPU kernels: when to compile, once, and what to do where that fails.

A kernel is a plain function of tensors and flags. Sizes stay symbolic, so that one compilation
(about a second; a few in the first one of a process) serves every number of rows and columns, and
inductor's cache on disk gives later processes most of it back.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

__all__ = ["NotCompiled", "assert_compiled", "call_compiled", "obstacle"]

logger = logging.getLogger("mcore_logprobs")


class NotCompiled(Exception):
    """This call cannot go through a compiled kernel; nothing has been written yet."""


def assert_compiled() -> None:
    """First line of every kernel: refuse to run eagerly, which would make float32 copies of all.

    torch.compile runs the plain function where it is switched off (TORCHDYNAMO_DISABLE, a stance,
    an enclosing `torch.compiler.disable`), without a word.
    """
    if not torch.compiler.is_dynamo_compiling():
        raise NotCompiled("torch.compile is switched off")


_lock = threading.RLock()
_kernels: dict[tuple[Any, ...], Callable[..., Any]] = {}
_warm: set[tuple[Any, ...]] = set()
_failure: str | None = None


def call_compiled(function: Callable[..., Any], *args: Tensor | bool) -> Any:
    """`function(*args)`, compiled at the first call with tensors and flags of this kind.

    Raises:
        NotCompiled: compilation failed, here or earlier (the first failure is logged), or a
            dispatch mode is active, within which torch compiles nothing.
    """
    global _failure
    if _failure is not None:
        raise NotCompiled(_failure)
    if _get_current_dispatch_mode() is not None:
        raise NotCompiled("a TorchDispatchMode is active")
    key = (function, *(_kind(arg) for arg in args))
    state = (key, torch.get_num_threads(), torch.is_inference_mode_enabled())
    kernel = _kernels.get(key)
    try:
        if kernel is not None and state in _warm:
            return kernel(*args)
        with _lock:  # torch's compiler configuration is not all thread-safe
            kernel = _kernels.setdefault(key, _compile(function))
            result = kernel(*args)
            _warm.add(state)
            return result
    except NotCompiled:
        raise
    except Exception as error:  # whatever a compiler, a full disk or a missing header brings about
        _failure = f"compilation failed: {type(error).__name__}: {_first_line(error)}"
        logger.warning("inductor backend: %s; the torch backend takes over", _failure)
        raise NotCompiled(_failure) from error


def _kind(arg: Tensor | bool) -> Any:
    return (arg.dtype, arg.is_contiguous()) if isinstance(arg, Tensor) else arg


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # torch counts recompilations by code object, up to a small limit: each kind gets its own.
    assert isinstance(function, FunctionType)
    own = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
    return torch.compile(own, dynamic=True, fullgraph=True)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def obstacle() -> str | None:
    """Why nothing can be compiled here, or None."""
    if _failure is not None:
        return _failure
    if compiler() is None:
        return "no C++ compiler found (CXX, g++, clang++)"
    if (
        os.environ.get("TORCHDYNAMO_DISABLE") == "1"
        or os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    ):
        return "torch.compile is switched off by the environment"
    return None


@cache
def compiler() -> str | None:
    """The C++ compiler that inductor will find, or None."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return None
