"""Which tensors a piece of code makes, and how many bytes of them live at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Made", "TensorsMade"]


@dataclass(frozen=True)
class Made:
    """One new storage: the operator that made it, its bytes, and the first tensor's looks."""

    op: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorsMade(TorchDispatchMode):
    """Within it, every storage that an operator makes is recorded once; views make none.

    Works in the backward pass too, on the CPU, where autograd runs in the caller's thread. What an
    operator needs inside itself is not seen.

        with TensorsMade() as made:
            ...
        made.larger_than(1 << 20), made.peak
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Made] = []
        self.peak = 0
        self._live: dict[StorageWeakRef, int] = {}
        self._at_most = 0  # bytes of `_live`, in which some may be gone

    def larger_than(self, nbytes: int) -> list[Made]:
        """The storages of more than `nbytes`, in the order of their making."""
        return [made for made in self.made if made.nbytes > nbytes]

    @property
    def live(self) -> int:
        """Bytes of those storages that were made within and are still there."""
        for ref in [ref for ref in self._live if ref.expired()]:
            del self._live[ref]
        self._at_most = sum(self._live.values())
        return self._at_most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not _may_make(func):
            return out
        given: set[StorageWeakRef] | None = None
        for tensor in _tensors(out):
            ref = _storage(tensor)
            if ref in self._live:
                continue
            if given is None:
                given = {_storage(x) for x in _tensors((args, kwargs))}
            if ref in given:
                continue
            nbytes = tensor.untyped_storage().nbytes()
            self._live[ref] = nbytes
            self.made.append(Made(str(func), nbytes, tuple(tensor.shape), tensor.dtype))
            self._at_most += nbytes
            if self._at_most > self.peak:
                self.peak = max(self.peak, self.live)
        return out


@cache
def _may_make(func: Any) -> bool:
    """Whether the operator has results that its schema does not say to lie in an argument."""
    return any(result.alias_info is None for result in func._schema.returns)


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _tensors(tree: Any) -> list[torch.Tensor]:
    # Of what an operator takes or gives; pytree's own leaves take several times as long.
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.layout is torch.strided else []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [leaf for branch in tree for leaf in _tensors(branch)]
