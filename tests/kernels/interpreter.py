"""Triton tests run where Triton can run: compiled on a GPU, else interpreted in a child process.

Triton decides when it is first imported whether kernels are compiled or interpreted, and other
tests import it for their own ends. So a test marked `@interpreted` is handed, where there is no
GPU, to a child process whose environment asks for the interpreter. Its failure comes back as it
is. Such a test can use parameters, but no fixtures.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from tests.helpers.distributed import seed
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
    replace by the interpreter's own, where its kernel's launch has done so: half of a test's time.
    """
    from triton.runtime import interpreter

    replace, both = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    seen_by: dict[str, list[Any]] = {}  # which of them a module's functions have as a global

    def replace_once(fn: Any) -> Any:
        if fn.__module__ not in seen_by:
            known = fn.__globals__.values()
            seen_by[fn.__module__] = [x for x in both if any(x is value for value in known)]
        if any(both[1].is_builtin(x.load) for x in seen_by[fn.__module__]):
            return replace(fn)
        return None

    interpreter._patch_lang = replace_once


def _call(module: str, name: str, parameters: dict[str, Any]) -> None:
    seed()
    with poisoned_memory():
        getattr(importlib.import_module(module), name)(**parameters)
