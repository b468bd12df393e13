"""What the drop-in names share: groups and ranges as those projects mean them, and gradients."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.groups import group_rank, group_size, resolve_tp_group
from mcore_logprobs.logits.token_stats import vocab_parallel_logprobs

__all__ = [
    "ONE_PROCESS",
    "Applied",
    "check_vocab_range",
    "grad_unless",
    "no_targets",
    "or_one_process",
    "rows_a_chunk",
    "setting",
    "share_of_gradient",
    "token_logprobs",
]


class _OneProcess:
    """Stands for a group of this process alone, where a NeMo-RL function means that by None.

    Our own None means Megatron's group, which is not the same; and a real group of one rank would
    have to be made by every rank.
    """

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ONE_PROCESS: Any = _OneProcess()


def or_one_process(group: ProcessGroup | None) -> ProcessGroup:
    """The group; this process alone for None."""
    return ONE_PROCESS if group is None else group


class Applied:
    """A class used as an autograd function is, by `NAME.apply(...)`, that only forwards.

    Subclasses define `forward(ctx, ...)`; `apply` takes the same arguments without ctx. There is no
    backward: the operations within bring their own.
    """

    forward: ClassVar[Callable[..., Tensor]]
    apply: ClassVar[Callable[..., Tensor]]

    def __init_subclass__(cls) -> None:
        forward = cls.forward
        signature = inspect.signature(forward)
        visible = list(signature.parameters.values())[1:]

        @functools.wraps(forward)
        def apply(*args: Any, **kwargs: Any) -> Tensor:
            return forward(None, *args, **kwargs)

        apply.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
        cls.apply = staticmethod(apply)


def grad_unless(inference_only: bool) -> contextlib.AbstractContextManager[Any]:
    """No gradient where `inference_only`; else as the caller has it."""
    return torch.no_grad() if inference_only else contextlib.nullcontext()


def check_vocab_range(
    vocab_start_index: int, vocab_end_index: int, width: int, group: ProcessGroup | None
) -> None:
    """Hold a caller's `[start, end)` to what the group's rank owns.

    Raises:
        ValueError: it is another range than `[rank * width, (rank + 1) * width)`.
    """
    resolved = resolve_tp_group(group)
    rank = group_rank(resolved)
    expected = (rank * width, (rank + 1) * width)
    if (int(vocab_start_index), int(vocab_end_index)) != expected:
        raise ValueError(
            f"vocab_start_index, vocab_end_index: expected {expected} for rank {rank} of "
            f"{group_size(resolved)} with {width} columns, got "
            f"({vocab_start_index}, {vocab_end_index})"
        )


def no_targets(vocab_parallel_logits: Tensor) -> Tensor:
    """A target for calls that want statistics of the distribution alone: id 0 everywhere."""
    return vocab_parallel_logits.new_zeros(vocab_parallel_logits.shape[:-1], dtype=torch.int64)


def setting(node: Any, name: str, default: Any = None) -> Any:
    """A field of a framework's configuration: a mapping, an OmegaConf node, args or a dataclass."""
    if isinstance(node, Mapping):
        return node.get(name, default)
    return getattr(node, name, default)


class _ShareOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.ranks, None


def share_of_gradient(x: Tensor, ranks: int) -> Tensor:
    """x itself; the backward divides by `ranks`.

    For callers who sum the gradient over the ranks themselves, where our operation has summed it
    already.
    """
    return x if ranks == 1 else _ShareOfGradient.apply(x, ranks)


def rows_a_chunk(chunk_size: int | None, batch: int) -> int | None:
    """Their chunk is of sequence positions, ours of rows."""
    return None if chunk_size is None else chunk_size * max(1, batch)


def token_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    group: ProcessGroup | None,
    *,
    chunk_size: int | None,
    inference_only: bool,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Tensor:
    """Log-probabilities of targets as they are: `[b, s, V/TP]`, `[b, s]` -> `[b, s]`."""
    options: dict[str, Any] = {
        "tp_group": group,
        "chunk_size": rows_a_chunk(chunk_size, vocab_parallel_logits.shape[0]),
    }
    with grad_unless(inference_only):
        if (top_k is None or top_k <= 0) and top_p >= 1.0:
            return vocab_parallel_logprobs(vocab_parallel_logits, target, **options)
        from mcore_logprobs.logits.sampling import vocab_parallel_sampling_logprobs

        return vocab_parallel_sampling_logprobs(
            vocab_parallel_logits, target, top_k=top_k, top_p=top_p, **options
        )
