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
from torch.utils import _pytree as pytree

from mcore_logprobs.ops.result import TokenStats, flatten

if TYPE_CHECKING:
    from megatron.core.models.common.model_chunk_schedule_plan import (
        TransformerModelChunkSchedulePlan,
    )


@dataclass(eq=False)
class ScheduledStats(TokenStats):
    """A TokenStats that a schedule node can take for a tensor.

    Gradients go by the place of their tensor among the leaves: those that required one before a
    node detached it, a policy loss and the top k's values among them.
    """

    def __post_init__(self) -> None:
        self._learning: list[int] | None = None

    @classmethod
    def of(cls, stats: TokenStats) -> ScheduledStats:
        return cls(**{f.name: getattr(stats, f.name) for f in fields(stats)})

    @property
    def _base(self) -> None:
        """Nodes copy views; these are none."""
        return None

    def leaves(self) -> list[Tensor]:
        return pytree.tree_leaves(self._tensors())

    def detach(self) -> ScheduledStats:
        detached = ScheduledStats.of(super().detach())
        detached._learning = [i for i, x in enumerate(self.leaves()) if x.requires_grad]
        return detached

    @property
    def requires_grad(self) -> bool:
        return any(x.requires_grad for x in self.leaves())

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """Of a detached one: whether the loss's gradients are to be found in `.grad`."""
        leaves = self.leaves()
        assert self._learning is not None
        self._leaves = {i: leaves[i].requires_grad_(value) for i in self._learning}
        if self.policy_loss is not None:  # Megatron scales what a loss function returns in place
            self.policy_loss = self.policy_loss.clone()

    @property
    def grad(self) -> Gradients:
        return {i: x.grad for i, x in self._leaves.items()}


Gradients = dict[int, Tensor | None]  # by leaf, as `ScheduledStats.grad` has them

pytree.register_pytree_node(ScheduledStats, flatten, lambda values, _: ScheduledStats(*values))


def carry_stats(
    plan: TransformerModelChunkSchedulePlan,
    around: Callable[[], AbstractContextManager[object]],
    *,
    mapped: bool = False,
) -> None:
    """Make a schedule plan's head node, if it has one, return a TokenStats that trains.

    Args:
        around: makes a context manager for the node's forward, which runs long after the plan is
            made.
        mapped: whether the output is that of a function of the caller's.

    Raises:
        TypeError: in that forward, if a caller's function gave anything but one tensor.
    """
    node = plan.post_process
    if node is None:
        return
    forward, backward = node.forward_func, node.backward_func

    def forward_func(*inputs: Tensor) -> object:
        with around():
            output = forward(*inputs)
        if mapped and not isinstance(output, Tensor):
            raise TypeError(
                "PatchHandle.map in a schedule plan (combined 1F1B): expected fn to return one "
                f"tensor, got {type(output).__name__}"
            )
        return ScheduledStats.of(output) if isinstance(output, TokenStats) else output

    def backward_func(outputs: tuple[object, ...], grads: tuple[Gradients, ...]) -> object:
        (output,) = outputs
        if not isinstance(output, ScheduledStats):
            return backward(outputs, grads)
        leaves = output.leaves()
        pairs = [(leaves[i], grad) for i, grad in grads[0].items() if grad is not None]
        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
        return tuple(grad for _, grad in pairs)

    node.forward_func, node.backward_func = forward_func, backward_func
