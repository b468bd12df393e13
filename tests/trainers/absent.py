"""Stand-ins for packages that a framework imports and the path under test never uses.

Attributes are classes made on demand, so that a module can decorate by them, inherit from them and
name them in annotations while it is imported. What is called later does nothing useful.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Meta(name, (), {})

    def __getitem__(cls, item: object) -> Any:
        return cls  # a generic in an annotation

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]):
            return args[0]  # a decorator
        return lambda thing=None, *more, **options: thing  # one with options


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Meta(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = set(packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == p or name.startswith(f"{p}.") for p in self.packages):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


class _Shape:
    def __class_getitem__(cls, shape: object) -> type:
        return cls


class _Shapes(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # who looks for a module's file finds none
            raise AttributeError(name)
        return _Shape


def stand_in_for_jaxtyping() -> None:
    """Its shapes in annotations mean nothing then."""
    sys.modules["jaxtyping"] = _Shapes("jaxtyping")


def stand_in(*packages: str) -> Callable[[], None]:
    """Lets those packages that are not installed be imported, in this process and from now on.

    A package may be a part of one that is installed: "megatron.bridge". What is returned, called,
    makes them absent again for who asks next.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    finder = _Finder(missing)
    sys.meta_path.append(finder)

    def absent_again() -> None:
        sys.meta_path.remove(finder)
        for name in [n for n, module in sys.modules.items() if isinstance(module, _Module)]:
            if finder.find_spec(name):
                del sys.modules[name]

    return absent_again
