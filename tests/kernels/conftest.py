"""Triton tests run where Triton can run: compiled on a GPU, else interpreted in a child process.

Triton decides when it is first imported whether kernels are compiled or interpreted, and other
tests import it for their own ends. So the tests of a module that says `RUN_IN_INTERPRETER = True`
are handed, where there is no GPU, to a child process whose environment asks for the interpreter.
Their failures come back as they are. They can use parameters, but no fixtures.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from tests.helpers.poison import poisoned_memory


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not getattr(pyfuncitem.module, "RUN_IN_INTERPRETER", False) or torch.cuda.is_available():
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    name = pyfuncitem.originalname
    _interpreter().submit(_call, pyfuncitem.module.__name__, name, arguments).result(timeout=240)
    return True


@functools.cache
def _interpreter() -> ProcessPoolExecutor:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=_start)


def pytest_sessionfinish() -> None:
    if _interpreter.cache_info().currsize:
        _interpreter().shutdown()


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    with poisoned_memory():
        getattr(importlib.import_module(module), name)(**arguments)
