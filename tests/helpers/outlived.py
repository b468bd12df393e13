"""What a call leaves behind once its caller has dropped what it returned.

Python's cyclic collector is off meanwhile, as under Megatron's `--manual-gc`, so that what hangs in
a cycle of references stays. Two measures, since neither sees everything:

- storages made within the call that are still there, whoever holds them: Python, the autograd
  graph, an attribute of a module;
- cycles that hold a tensor, also one that was there before the call, such as a weight.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PATIENCE = 3.0  # seconds, on a busy machine

__all__ = ["NoCollector", "outlived", "shapes"]


class NoCollector:
    """Within it the collector is off; `held` says which cycles came about, at the end.

    with NoCollector() as cycles:
        ...
    cycles.held      # ["DeferredLogits -> [24, 2, 32]"]
    """

    def __init__(self) -> None:
        self.held: list[str] = []
        self._around = contextlib.ExitStack()

    def __enter__(self) -> NoCollector:
        gc.collect()
        self._around.enter_context(_switched_off())
        return self

    def __exit__(self, *exc: Any) -> None:
        gc.set_debug(gc.DEBUG_SAVEALL)  # what is found is kept, in gc.garbage
        try:
            gc.collect()
            found = [(owner, x) for owner in gc.garbage for x in gc.get_referents(owner)]
            self.held = sorted(
                {
                    f"{type(o).__name__} -> {list(x.shape)}"
                    for o, x in found
                    if issubclass(type(x), Tensor)  # a dead weakref.proxy has no class
                }
            )
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            self._around.close()


@contextlib.contextmanager
def _switched_off() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def outlived(
    call: Callable[[], Any], *, result_alone: bool = False, known: Collection[str] = ()
) -> list[str]:
    """The storages that `call()` made and that outlive it and its result: operator and shape.

    For use within `NoCollector`. Call it once before, as modules cache what they make first.

    Args:
        result_alone: while its result is held, nothing else may be there but for the places of rows
            that the call named or found, a few integers per token that its graph holds.
        known: shapes of what stays for good, as another call told (`shapes`): not waited for.
    """
    left: list[_Made] = []
    with _Storages() as storages:
        result = call()
        if result_alone:
            own = {StorageWeakRef(x.untyped_storage()) for x in _tensors(result)}
            left = storages.left(known, lambda x: x.storage not in own and not x.is_places())
        del result
    return sorted({f"{x.op} {list(x.shape)}" for x in (*left, *storages.left(known))})


def shapes(lines: Iterable[str]) -> set[str]:
    """Of what `outlived` and `NoCollector.held` say."""
    return {line[line.index("[") :] for line in lines}


class _Made(NamedTuple):
    """What an operator gave in memory of its own."""

    storage: StorageWeakRef
    op: Any
    shape: tuple[int, ...]
    dtype: torch.dtype

    def is_places(self) -> bool:
        several = [n for n in self.shape if n != 1]
        return self.dtype in (torch.int64, torch.bool) and len(several) < 2


class _Storages(TorchDispatchMode):
    """Records the storages that operators make; cheaper than `TensorsMade`, and no peak."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[_Made] = []

    def left(
        self, known: Collection[str], counts: Callable[[_Made], bool] = lambda made: True
    ) -> list[_Made]:
        """Those that are still there. gloo's threads drop theirs a moment after a collective."""
        deadline = time.monotonic() + PATIENCE
        while True:
            found = [made for made in self._made if not made.storage.expired() and counts(made)]
            if all(str(list(x.shape)) in known for x in found) or time.monotonic() > deadline:
                return found
            time.sleep(1e-3)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _makes_storage(func):
            for x in (out,) if isinstance(out, Tensor) else _tensors(out):
                if x.numel() == 0:  # holds nothing
                    continue
                ref = StorageWeakRef(x.untyped_storage())
                self._made.append(_Made(ref, func, tuple(x.shape), x.dtype))
        return out


@functools.cache
def _makes_storage(func: Any) -> bool:
    """Whether an operator returns more than views and what it was given."""
    # A view, and collectives into given tensors, whose schemas do not say so.
    if func is torch.ops.aten._unsafe_view.default or func.namespace == "c10d":
        return False
    return any(x.alias_info is None for x in func._schema.returns)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
