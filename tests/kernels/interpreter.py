"""Triton tests run where Triton can run: compiled on a GPU, else interpreted in a child process.

Triton decides when it is first imported whether kernels are compiled or interpreted, and other
tests import it for their own ends. So a test marked `@interpreted` is handed, where there is no
GPU, to a child process whose environment asks for the interpreter. Its failure comes back as it
is. Such a test can use parameters, but no fixtures.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from tests.helpers.poison import poisoned_memory


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """The test, run in the child process that interprets kernels (where there is no GPU)."""

    @functools.wraps(test)
    def run(**parameters: Any) -> None:
        if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
            test(**parameters)
        else:
            job = _interpreter().submit(_call, test.__module__, test.__name__, parameters)
            job.result(timeout=240)

    return run


@functools.cache  # ends with this process, as executors do
def _interpreter() -> ProcessPoolExecutor:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=interpret)


def interpret() -> None:
    """Have this process interpret kernels; before it first imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    replace_builtins_once()


@functools.cache
def replace_builtins_once() -> None:
    """At each call of a device function Triton looks through all of `triton.language` for what to
    replace by the interpreter's own, where nothing is left to replace: half of a test's time.
    """
    from triton.runtime import interpreter

    replace_all, a_builtin = interpreter._patch_builtin, {}

    def replace(package: Any, *args: Any) -> None:
        is_builtin = interpreter.tl.core.is_builtin
        if package not in a_builtin:
            members = inspect.getmembers(package)
            a_builtin[package] = next((name for name, x in members if is_builtin(x)), None)
        name = a_builtin[package]
        if name is None or is_builtin(getattr(package, name)):
            replace_all(package, *args)

    interpreter._patch_builtin = replace


def _call(module: str, name: str, parameters: dict[str, Any]) -> None:
    torch.manual_seed(0)
    with poisoned_memory():
        getattr(importlib.import_module(module), name)(**parameters)
