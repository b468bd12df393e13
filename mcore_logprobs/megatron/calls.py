"""What one call of a patched model is asked for: its settings, policy loss and targets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.ops.loss_function import check_denominator


@dataclass(frozen=True)
class PerToken:
    """A function for the head and its per-token tensors `[b, s, ...]`.

    Checked here, so that every pipeline stage checks them.

    Raises:
        ValueError: no function, tensors of another kind or that require a gradient.
    """

    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"expected a callable, got {type(self.function).__name__}")
        for place, tensor in enumerate(self.tensors):
            name = f"per_token_tensors[{place}]"
            if not isinstance(tensor, Tensor) or tensor.dim() < 2:
                got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"{name}: expected a tensor [b, s, ...] like labels, got {got}")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{name}: requires a gradient, but none flows to it; detach it")

    def sequence_first(self, labels: Tensor) -> tuple[Tensor, ...]:
        """The per-token tensors as `[s, b, ...]`.

        Raises:
            ValueError: a tensor whose shape does not start with that of labels, `[b, s]`.
        """
        for place, tensor in enumerate(self.tensors):
            if tensor.shape[:2] != labels.shape:
                raise ValueError(
                    f"per_token_tensors[{place}]: expected a shape that starts with labels' "
                    f"{tuple(labels.shape)}, got {tuple(tensor.shape)}"
                )
        return tuple(tensor.transpose(0, 1).contiguous() for tensor in self.tensors)


@dataclass(frozen=True)
class PolicyLoss(PerToken):
    """A policy loss to form in the head: the arguments of `linear_policy_loss`.

    Raises:
        ValueError: as `PerToken`; a denominator that is not a finite number above 0 (a CUDA
            tensor's value is not looked at).
    """

    denominator: float | Tensor = 1.0

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"loss_fn: expected a callable, got {type(self.function).__name__}")
        super().__post_init__()
        check_denominator(self.denominator)


@dataclass(frozen=True)
class Call:
    """What the open `with` blocks of a `PatchHandle` ask of a call.

    Attributes:
        config: the patch's settings, as `PatchHandle.options` has changed them.
        policy: of `PatchHandle.policy_loss`.
        mapped: of `PatchHandle.map`.
        targets: of `PatchHandle.targets`, `[b, s]`.
        temperature: of `PatchHandle.options`, where it is a tensor that broadcasts to `[b, s]`.
    """

    config: LogprobConfig
    policy: PolicyLoss | None = None
    mapped: PerToken | None = None
    targets: Tensor | None = None
    temperature: Tensor | None = None


class OpenBlocks:
    """The `with` blocks that are open on a patched head, in the order in which they were entered.

    Each takes its own change back when it ends, whichever ends first. A copy has none open: the
    block around a `copy.deepcopy` of the model never ends for the copy.
    """

    def __init__(self, config: LogprobConfig) -> None:
        self._config = config
        self._changes: list[Callable[[Call], Call]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenBlocks, (self._config,)

    @property
    def call(self) -> Call:
        """The patch's settings with every open block's change, the innermost block's last.

        Raises:
            ValueError: changes that do not go together once a block between them has ended.
        """
        call = Call(self._config)
        for change in self._changes:
            call = change(call)
        return call

    @contextlib.contextmanager
    def open(self, change: Callable[[Call], Call]) -> Iterator[None]:
        self._changes.append(change)
        try:
            yield
        finally:
            self._changes.remove(change)


@dataclass
class Running:
    """A forward pass of the model that is under way.

    Attributes:
        labels: what it was given, or NOT_TOLD where the model's method does not say.
        loss_mask: the same.
        reached: whether the patched loss was called with these labels.
    """

    labels: Any
    loss_mask: Any
    reached: bool = False


NOT_TOLD: Any = object()
