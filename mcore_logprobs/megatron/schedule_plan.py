"""TokenStats through Megatron's combined 1F1B schedule (`build_schedule_plan`).

That schedule runs a model as nodes. Each node detaches what the one before it returned, and starts
the backward of what it returned itself from the gradients that the next node found; both are
written for tensors. Here the head's node and its output learn the same for a TokenStats.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_logprobs.ops.token_stats import TokenStats

if TYPE_CHECKING:
    from megatron.core.models.common.model_chunk_schedule_plan import (
        TransformerModelChunkSchedulePlan,
    )


@dataclass
class ScheduledStats(TokenStats):
    """A TokenStats that a schedule node can take for a tensor: policy_loss is part of it here."""

    @classmethod
    def of(cls, stats: TokenStats) -> ScheduledStats:
        return cls(**{f.name: getattr(stats, f.name) for f in fields(stats)})

    @property
    def _base(self) -> None:
        """Nodes copy views; these are none."""
        return None

    @property
    def requires_grad(self) -> bool:
        return any(x.requires_grad for x in self._tensors().values())

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """Of a detached one: whether the loss's gradients are to be found in `.grad`.

        Those of a policy loss and a divergence alone where there is a policy loss: the statistics
        are for information then.
        """
        if self.policy_loss is not None:
            leaf = self.policy_loss.requires_grad_(value)
            self._leaves = {"policy_loss": leaf}
            if self.divergence is not None:
                self._leaves["divergence"] = self.divergence.requires_grad_(value)
            self.policy_loss = leaf.clone()  # Megatron scales what a loss function returns in place
            return
        self._leaves = {n: x for n, x in self._per_token().items() if x.is_floating_point()}
        for x in self._leaves.values():
            x.requires_grad_(value)

    @property
    def grad(self) -> dict[str, Tensor | None]:
        """Gradients by field."""
        return {name: x.grad for name, x in self._leaves.items()}


Gradients = dict[str, Tensor | None]  # by field, as `ScheduledStats.grad` has them


def carry_stats(
    plan: TransformerModelChunkSchedulePlan, around: Callable[[], AbstractContextManager[object]]
) -> None:
    """Make a schedule plan's head node, if it has one, return a TokenStats that trains.

    `around()` is a context manager for the node's forward, which runs long after the plan is made.
    """
    node = plan.post_process
    if node is None:
        return
    forward, backward = node.forward_func, node.backward_func

    def forward_func(*inputs: Tensor) -> object:
        with around():
            output = forward(*inputs)
        return ScheduledStats.of(output) if isinstance(output, TokenStats) else output

    def backward_func(outputs: tuple[object, ...], grads: tuple[Gradients, ...]) -> object:
        (output,) = outputs
        if not isinstance(output, ScheduledStats):
            return backward(outputs, grads)
        pairs = [
            (getattr(output, name), grad) for name, grad in grads[0].items() if grad is not None
        ]
        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
        return tuple(grad for _, grad in pairs)

    node.forward_func, node.backward_func = forward_func, backward_func
