"""What a method of `PatchHandle` returns: a `with` block that says when it was left out."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec

from mcore_logprobs.spelling import check_keywords

P = ParamSpec("P")


class Block(contextlib.AbstractContextManager[None]):
    """A context manager; one that is dropped before it was entered warns."""

    _entered = True  # so that one whose `__init__` is interrupted does not warn

    def __init__(self, name: str, context: contextlib.AbstractContextManager[None]) -> None:
        self._name, self._context, self._entered = name, context, False

    def __enter__(self) -> None:
        if self._entered:
            raise RuntimeError(
                f"{self._name}: expected a block that is entered once, got one that was entered "
                f"before; call {self._name}(...) again"
            )
        self._entered = True
        self._context.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._context.__exit__(kind, error, trace)

    def __del__(self) -> None:
        if not self._entered:
            warnings.warn(
                f"{self._name}(...) did nothing: expected a with statement around the model's call",
                RuntimeWarning,
                stacklevel=2,
            )


def block(function: Callable[P, Iterator[None]]) -> Callable[P, Block]:
    """`contextlib.contextmanager` whose context is a `Block`.

    Raises: TypeError from the call, with the nearest keyword for one that is misspelled.
    """
    manager = contextlib.contextmanager(function)
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Block:
        name = getattr(function, "__qualname__", "")
        if not takes_any:
            check_keywords(name, kwargs, parameters)
        return Block(name, manager(*args, **kwargs))

    return call
