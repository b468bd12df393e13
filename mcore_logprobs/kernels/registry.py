"""Which backend computes a block of rows, and why.

`auto` takes the fastest backend that can serve a call and falls back to torch; a backend asked for
by name that cannot be had is a ValueError, never a silent substitute.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels.stats import RowSpec

__all__ = ["BACKENDS", "Backend", "Choice", "default_chunk_size", "explain", "select"]

BACKENDS = ("auto", "torch", "triton")
logger = logging.getLogger("mcore_logprobs")

# Bytes of one float32 copy of a chunk. On a CPU it should stay in the cache; on a GPU it must be
# large enough to fill the chip. The torch backend holds at most two such copies.
_CHUNK_BYTES = {"cpu": 2 << 20, "other": 64 << 20}


class Backend(Protocol):
    """A module with these three functions; `reference` documents them."""

    def row_stats(
        self,
        logits: Tensor,
        target: Tensor,
        spec: RowSpec,
        *,
        bias: Tensor | None = None,
        threshold: Tensor | None = None,
        chunk_size: int,
    ) -> Tensor: ...

    def count_higher(
        self, logits: Tensor, target: Tensor, threshold: Tensor, *, valid: int, chunk_size: int
    ) -> Tensor: ...

    def grad_logits(
        self,
        logits: Tensor,
        target: Tensor,
        lse: Tensor,
        coef: Tensor,
        spec: RowSpec,
        *,
        bias: Tensor | None = None,
        out: Tensor,
        chunk_size: int,
    ) -> None: ...


@dataclass(frozen=True)
class Choice:
    """A backend's name, whether it can be had, and the reason either way."""

    name: str
    available: bool
    reason: str


def default_chunk_size(width: int, device: torch.device) -> int:
    """Rows at a time for `width` columns, from the memory budget of the device."""
    budget = _CHUNK_BYTES["cpu" if device.type == "cpu" else "other"]
    return max(1, budget // (4 * max(1, width)))


@cache
def explain(device_type: str) -> tuple[Choice, ...]:
    """Every backend for tensors on this type of device, best first."""
    return (Choice("torch", True, "eager torch, on any device"),)


def select(backend: str, logits: Tensor) -> Backend:
    """The module that serves this call, for logits of this device, dtype, size and layout.

    Raises:
        ValueError: an unknown name, or a backend that cannot be had here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    if backend == "triton":
        raise ValueError("backend='triton': not available")
    return reference
