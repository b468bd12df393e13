"""Fresh memory filled with NaN, so that a read before a write shows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_FACTORIES: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def _poison(x: torch.Tensor) -> None:
    if type(x).__name__ == "FakeTensor":  # without memory; its module is slow to import
        return
    with torch.no_grad():
        if x.is_floating_point() or x.is_complex():
            x.fill_(float("nan"))
        elif x.dtype is torch.bool:
            x.fill_(True)
        else:
            x.fill_(torch.iinfo(x.dtype).max)


@functools.cache  # one wrapper for good: Dynamo keeps a table of the functions it met first
def _poisoned(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = factory(*args, **kwargs)
        if not torch.compiler.is_compiling():  # the compiler cannot trace a filled empty tensor
            _poison(x)
        return x

    return make


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within it `torch.empty` and its siblings, called from Python, give NaN (integers: the
    largest value) instead of whatever the allocator had. Compiled code is left as it is."""
    saved = [(owner, name, getattr(owner, name)) for owner, name in _FACTORIES]
    for owner, name, factory in saved:
        setattr(owner, name, _poisoned(factory))
    try:
        yield
    finally:
        for owner, name, factory in saved:
            setattr(owner, name, factory)
