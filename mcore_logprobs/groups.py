"""Process groups: which ranks share a vocabulary (TP) and which share a sequence (CP).

Operations look their groups up here, once per call. Below the public functions a group is always
explicit: a `ProcessGroup`, or `None` for one process.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup


def _resolve(name: str, getter: str, group: ProcessGroup | None) -> ProcessGroup | None:
    """Turn a caller's `group` into an explicit one, or None for one process.

    In order: the caller's own; Megatron's, where `megatron.core.parallel_state` is initialized; one
    process, where torch.distributed is not initialized or has one rank. Several ranks and none of
    these is a ValueError: a shard must never pass for the whole vocabulary or sequence.
    """
    if group is not None:
        # What `new_group` gives a process that the group leaves out is no ProcessGroup.
        nothing = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None
        outside = type(group) is type(nothing) and group == nothing
        if not outside and not (hasattr(group, "size") and hasattr(group, "rank")):
            raise ValueError(f"{name}: expected a torch.distributed ProcessGroup, got {group!r}")
        if outside or group.rank() < 0:
            raise ValueError(f"{name}: this process (rank {_global_rank()}) is not in the group")
        return group
    state = megatron_parallel_state()
    if state is not None:
        return getattr(state, getter)()
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"{name}=None, but torch.distributed has {dist.get_world_size()} ranks and Megatron's "
            f"parallel_state is not initialized: pass {name}=..., the group whose ranks share the "
            f"{'vocabulary' if name == 'tp_group' else 'sequence'} "
            "(if nothing is sharded, a group of only this rank)"
        )
    return None


# The tensor-parallel and the context-parallel group that `group=None` means.
resolve_tp_group = partial(_resolve, "tp_group", "get_tensor_model_parallel_group")
resolve_cp_group = partial(_resolve, "cp_group", "get_context_parallel_group")


def megatron_parallel_state() -> Any | None:
    """`megatron.core.parallel_state` if someone imported *and* initialized it, else None.

    Looked up in sys.modules: whoever initialized it has imported it, and no one else should pay
    for the import.
    """
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    return state


def group_size(group: ProcessGroup | None) -> int:
    """Ranks in the group; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """This process's rank within the group; 0 for None."""
    return 0 if group is None else group.rank()


def _global_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@dataclass(frozen=True)
class ParallelGroups:
    """The two groups that this library communicates over; None means one process.

    Attributes:
        tp: tensor-parallel group, whose ranks share the vocabulary.
        cp: context-parallel group, whose ranks share the sequence.
    """

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None

    @classmethod
    def from_megatron(cls) -> ParallelGroups:
        """Megatron's global groups.

        Raises:
            ValueError: `megatron.core.parallel_state` is not initialized.
        """
        state = megatron_parallel_state()
        if state is None:
            raise ValueError(
                "megatron.core.parallel_state is not initialized: call initialize_model_parallel "
                "first, or use ParallelGroups.from_model or from_device_mesh"
            )
        return cls(
            tp=state.get_tensor_model_parallel_group(), cp=state.get_context_parallel_group()
        )

    @classmethod
    def from_model(cls, model: object) -> ParallelGroups:
        """The groups that a Megatron model was built with.

        Reads, through any wrapper's `.module`: `pg_collection` (once named `model_comm_pgs`), then
        the model's `tp_group` and `cp_group`; what the model does not carry comes from
        Megatron's global groups.

        Raises:
            ValueError: the model lacks one of them and Megatron's are not initialized.
        """
        module, tp, cp = model, None, None
        while module is not None:
            collection = getattr(module, "pg_collection", None)
            if collection is None:
                collection = getattr(module, "model_comm_pgs", None)
            # What is further in goes before what a wrapper carries.
            tp = getattr(collection, "tp", None) or getattr(module, "tp_group", None) or tp
            cp = getattr(collection, "cp", None) or getattr(module, "cp_group", None) or cp
            if tp is not None and cp is not None:
                return cls(tp=tp, cp=cp)
            module = getattr(module, "module", None)
        if megatron_parallel_state() is None:
            lacking = " and ".join(n for n, g in (("tp", tp), ("cp", cp)) if g is None)
            raise ValueError(
                f"the model carries no {lacking} group, and megatron.core.parallel_state is not "
                "initialized: call initialize_model_parallel first, or make ParallelGroups(tp, cp)"
            )
        fallback = cls.from_megatron()
        return cls(tp=tp or fallback.tp, cp=cp or fallback.cp)

    @classmethod
    def from_device_mesh(cls, mesh: Any, *, tp: str = "tp", cp: str = "cp") -> ParallelGroups:
        """The groups of a `torch.distributed.DeviceMesh`'s dimensions named `tp` and `cp`.

        A dimension that the mesh lacks is None here, of one process. To a function `tp_group=None`
        means Megatron's group, and on several ranks without one it raises: for a vocabulary that is
        not sharded pass a group of only this rank.

        Raises:
            ValueError: the mesh has no named dimensions, or neither of the two.
        """
        names = tuple(mesh.mesh_dim_names or ())
        if tp not in names and cp not in names:
            raise ValueError(
                f"device mesh: expected a dimension named {tp!r} or {cp!r}, got {names}"
            )
        return cls(
            tp=mesh.get_group(tp) if tp in names else None,
            cp=mesh.get_group(cp) if cp in names else None,
        )


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the padded vocabulary: global ids `[start, end)`.

    Attributes:
        group: the TP group, None for one process.
        width: columns on this rank, V/TP, the same on every rank.
        vocab_size: true vocabulary size, at most V; global columns at or past it count as -inf.
        rank, tp_size: this process's in the group.
        start: this rank's first column.
        valid_width: how many of this rank's columns are true vocabulary; they come first. May be 0.
    """

    group: ProcessGroup | None
    width: int
    vocab_size: int
    rank: int
    tp_size: int
    start: int
    valid_width: int

    @classmethod
    def of(cls, width: int, group: ProcessGroup | None, vocab_size: int | None) -> VocabShard:
        """The shard of `width` columns that this rank of the (explicit) group owns.

        Raises:
            ValueError: no columns, or vocab_size outside [1, V].
        """
        rank, tp_size = group_rank(group), group_size(group)
        padded = width * tp_size
        if width < 1:
            raise ValueError(f"vocabulary shard: expected at least 1 column, got {width}")
        if vocab_size is None:
            vocab_size = padded
        elif isinstance(vocab_size, bool) or not isinstance(vocab_size, int):
            raise ValueError(f"vocab_size: expected an int or None, got {vocab_size!r}")
        elif not 1 <= vocab_size <= padded:
            hint = ""
            if vocab_size > padded:
                hint = f"; is tp_group, of size {tp_size}, the tensor-parallel group?"
            raise ValueError(
                f"vocab_size: expected 1 to {padded} (V/TP {width} x TP {tp_size}), got "
                f"{vocab_size}{hint}"
            )
        start = rank * width
        valid_width = max(0, min(width, vocab_size - start))
        return cls(group, width, vocab_size, rank, tp_size, start, valid_width)

    @property
    def end(self) -> int:
        return self.start + self.width

    @property
    def padded_size(self) -> int:
        """V, the padded global vocabulary."""
        return self.width * self.tp_size
