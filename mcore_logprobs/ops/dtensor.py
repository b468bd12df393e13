"""DTensor inputs: logits sharded on the vocabulary over one mesh dimension, targets over CP.

A DTensor is opened at the front door; everything behind it sees local tensors and groups.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup


def _dtensor_class() -> Any | None:
    """The DTensor class if anybody has imported it: no tensor can be one before."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def unwrap_logits(
    logits: Tensor, tp_group: ProcessGroup | None, name: str
) -> tuple[Tensor, ProcessGroup | None]:
    """A DTensor `[..., V]` -> its local `[..., V/TP]` and the group of the mesh dimension that
    shards the last dimension; anything else as it came.

    The other mesh dimensions may shard leading dimensions (batch, sequence) or replicate: then the
    operation works on this rank's rows. Differentiable.

    Raises:
        ValueError: the vocabulary is not sharded evenly over exactly one mesh dimension, a
            placement is partial, or tp_group is another group.
    """
    dtensor = _dtensor_class()
    if dtensor is None or not isinstance(logits, dtensor):
        return logits, tp_group
    last = logits.dim() - 1
    mesh, placements = logits.device_mesh, logits.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"{name}: expected no partial placement, got {placements}")
    sharding = [
        i for i, p in enumerate(placements) if p.is_shard() and p.dim % logits.dim() == last
    ]
    if len(sharding) != 1:
        raise ValueError(
            f"{name}: expected a DTensor whose last dimension is sharded over one mesh dimension, "
            f"got placements {placements} on mesh {mesh.mesh_dim_names}"
        )
    group = mesh.get_group(sharding[0])
    if logits.shape[-1] % group.size():
        raise ValueError(
            f"{name}: expected the vocabulary divisible by the mesh dimension's size "
            f"{group.size()}, got {logits.shape[-1]}"
        )
    if tp_group is not None and tp_group != group:
        raise ValueError(f"tp_group: expected None or the group of {name}'s mesh dimension")
    return logits.to_local(), group


def unwrap_rows(rows: Tensor, name: str) -> Tensor:
    """A per-row DTensor (targets, ids) -> its local part; anything else as it came.

    Raises:
        ValueError: a placement is partial.
    """
    dtensor = _dtensor_class()
    if dtensor is None or not isinstance(rows, dtensor):
        return rows
    if any(placement.is_partial() for placement in rows.placements):
        raise ValueError(f"{name}: expected no partial placement, got {rows.placements}")
    return rows.to_local()
