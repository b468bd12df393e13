"""A rank's part of whole tensors, and a function on every rank of a pool."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WORLDS = (1, 2, 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
VOCAB = 24  # divides into 1, 2 and 3 shards


def world_group() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def world_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def on_ranks(ranks: Any, world: int, fn: Any, *args: Any, **kwargs: Any) -> list:
    """fn on every rank of a pool; in this process, where nothing is initialised, for one rank."""
    return [fn(*args, **kwargs)] if world == 1 else ranks(world).run(fn, *args, **kwargs)


def shard(whole: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's columns of `[..., V]`: (leaf that requires grad, the same)."""
    leaf = whole.chunk(world_size(), -1)[world_rank()].contiguous().clone().requires_grad_()
    return leaf, leaf


def make_target(lead: tuple[int, ...], vocab: int, ignored: float = 0.2) -> Tensor:
    target = torch.randint(0, vocab, lead)
    return torch.where(torch.rand(lead) < ignored, -100, target)
