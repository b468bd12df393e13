"""The collectives that a piece of code makes, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# c10d's operators: a short name, and which argument holds what this rank puts in.
_OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    "barrier": ("barrier", 0),
    "monitored_barrier_": ("barrier", 0),
}


@dataclass(frozen=True)
class Collective:
    """One collective: its name ("all_gather", ...), and the bytes that this rank puts in."""

    name: str
    nbytes: int


class CollectivesMade(TorchDispatchMode):
    """Within it, every collective is recorded, by whatever Python name it was called.

    Works in the backward pass too, on the CPU.

        with CollectivesMade() as made:
            ...
        made.names == ["all_gather"]
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Collective] = []

    @property
    def names(self) -> list[str]:
        return [made.name for made in self.made]

    @property
    def nbytes(self) -> int:
        return sum(made.nbytes for made in self.made)

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name, position = _OPERATORS[func._schema.name.removeprefix("c10d::")]
            sent = [leaf for leaf in tree_leaves(args[position]) if isinstance(leaf, torch.Tensor)]
            self.made.append(Collective(name, sum(tensor.nbytes for tensor in sent)))
        elif func.namespace.startswith("_c10d_functional"):
            name = func._schema.name.split("::")[1]
            if name != "wait_tensor":
                sent = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
                self.made.append(Collective(name, sum(tensor.nbytes for tensor in sent)))
        return func(*args, **(kwargs or {}))
