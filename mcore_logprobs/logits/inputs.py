"""What every operation does to its arguments first: check them, before any collective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_chunk_size, check_positive
from mcore_logprobs.groups import VocabShard, resolve_tp_group
from mcore_logprobs.kernels.backend import BACKENDS
from mcore_logprobs.logits.dtensor import unwrap_logits, unwrap_rows

__all__ = [
    "LocalTarget",
    "LogitsInput",
    "check_group_tensor",
    "check_target",
    "localize_target",
    "open_logits",
]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@dataclass(frozen=True)
class LogitsInput:
    """A checked logits tensor: this rank's local `[..., V/TP]`, and where its columns lie."""

    logits: Tensor
    shard: VocabShard
    tp_group: ProcessGroup | None


def open_logits(
    vocab_parallel_logits: Tensor,
    *,
    tp_group: ProcessGroup | None,
    vocab_size: int | None = None,
    backend: str = "auto",
    chunk_size: int | None = None,
    temperature: float = 1.0,
    name: str = "vocab_parallel_logits",
) -> LogitsInput:
    """Check the arguments that all operations on logits share; resolve the group.

    A DTensor sharded on its last dimension brings its own group.

    Raises:
        ValueError: anything that is off, with what was expected and what came.
    """
    logits, tp_group = unwrap_logits(vocab_parallel_logits, tp_group, name)
    check_group_tensor(logits, name, min_dim=1)
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    check_chunk_size(chunk_size)
    check_positive("temperature", temperature)
    group = resolve_tp_group(tp_group)
    return LogitsInput(logits, VocabShard.of(logits.shape[-1], group, vocab_size), group)


def check_group_tensor(tensor: Tensor, name: str, *, min_dim: int) -> None:
    """A floating-point torch tensor with at least `min_dim` dimensions, or a ValueError."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _FLOATS:
        raise ValueError(f"{name}: expected dtype in {_names(_FLOATS)}, got {tensor.dtype}")
    if tensor.dim() < min_dim:
        raise ValueError(
            f"{name}: expected at least {min_dim} dimension(s), got shape {tuple(tensor.shape)}"
        )


def check_target(
    target: Tensor, shape: torch.Size, device: torch.device, *, name: str = "target"
) -> Tensor:
    """Integer ids of exactly this shape and device, as int64; a DTensor gives its local part.

    Raises:
        ValueError: no tensor, no integers, another shape or device.
    """
    target = unwrap_rows(target, name)
    if not isinstance(target, Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(target).__name__}")
    if target.dtype not in _INTS:
        raise ValueError(f"{name}: expected an integer dtype, got {target.dtype}")
    if target.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(target.shape)}")
    if target.device != device:
        raise ValueError(f"{name}: expected device {device}, got {target.device}")
    return target.long()


@dataclass(frozen=True)
class LocalTarget:
    """Targets as one shard sees them; both `[n]`.

    Attributes:
        column: int64, this rank's column, or -1 where another rank owns it or it is ignored.
        keep: bool, False where the target is ignore_index.
    """

    column: Tensor
    keep: Tensor


def localize_target(
    target: Tensor, shard: VocabShard, ignore_index: int | None, *, name: str = "target"
) -> LocalTarget:
    """Global ids to this shard's columns.

    On CPU an id outside [0, vocab_size) is a ValueError; on CUDA it fails a device-side assert,
    without a sync.

    Args:
        target: int64 of any shape; global ids or ignore_index.
    """
    keep = torch.ones_like(target, dtype=torch.bool)
    if ignore_index is not None:
        keep = target != ignore_index
    inside = ((target >= 0) & (target < shard.vocab_size)) | ~keep
    if target.device.type == "cpu":
        if not bool(inside.all()):
            bad = target[~inside]
            raise ValueError(
                f"{name}: expected ids in [0, {shard.vocab_size}) or ignore_index "
                f"{ignore_index}, got {bad[:8].tolist()}{'...' if bad.numel() > 8 else ''}"
            )
    else:
        torch._assert_async(inside.all(), f"{name}: id outside [0, {shard.vocab_size})")
    column = target - shard.start
    here = keep & (column >= 0) & (column < shard.width)
    return LocalTarget(torch.where(here, column, -1), keep)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
