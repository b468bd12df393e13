"""A user's loss function on log-probabilities: called for some rows, its graph checked.

Shared by the policy loss that is formed in the head and by its counterpart on real logits, so that
both refuse the same mistakes.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mcore_logprobs.checks import check_called
from mcore_logprobs.ops.captured import name_of, walk_graph

LossFn = Callable[..., Tensor]


def check_loss_fn(
    loss_fn: object, per_token_tensors: Sequence[Tensor], named: Sequence[str] = ()
) -> None:
    """A callable that takes log-probabilities, entropy and these tensors, or a ValueError.

    Args:
        named: what it is given by name besides.
    """
    first = ("logprobs", "entropy or None")
    check_called("loss_fn", loss_fn, first, len(per_token_tensors), named)


def taken_by_name(loss_fn: Any, given: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Those of the tensors whose names are parameters of the function."""
    try:
        parameters = inspect.signature(loss_fn).parameters
    except (TypeError, ValueError):  # no function, or a builtin
        return {}
    return {name: x for name, x in given.items() if x is not None and name in parameters}


def check_denominator(denominator: float | Tensor) -> None:
    """A finite number above 0, or a tensor of one such element.

    The value of a tensor is seen on a CPU only: elsewhere it would take a sync.

    Raises:
        ValueError: says what was expected and what was given.
    """
    if isinstance(denominator, Tensor):
        if denominator.numel() != 1 or denominator.requires_grad or denominator.is_complex():
            raise ValueError(
                "denominator: expected a number or a tensor of one real element without gradient, "
                f"got shape {tuple(denominator.shape)}, {denominator.dtype}"
            )
        if denominator.device.type != "cpu":
            return  # pragma: no cover (CUDA)
        denominator = denominator.item()
    elif isinstance(denominator, bool) or not isinstance(denominator, numbers.Real):
        raise ValueError(f"denominator: expected a number, got {denominator!r}")
    if not (math.isfinite(denominator) and denominator > 0):
        raise ValueError(f"denominator: expected a finite number > 0, got {denominator!r}")


def float64_denominator(denominator: float | Tensor, device: torch.device) -> Tensor:
    """The checked denominator as a float64 scalar on the device; no sync."""
    check_denominator(denominator)
    if isinstance(denominator, Tensor):
        return denominator.detach().reshape(()).to(device, torch.float64)
    return torch.full((), float(denominator), dtype=torch.float64, device=device)


def sum_of_losses(
    fn: LossFn,
    logprobs: Tensor,
    entropy: Tensor | None,
    tensors: tuple[Tensor, ...],
    *,
    valid_mask: Tensor,
    denominator: Tensor,
    named: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The sum of `fn`'s losses over the denominator, a float64 scalar; 0 where no row counts.

    The function gets copies, so that it may change them in place. Where gradients are enabled and
    logprobs or entropy require one, the result is differentiable by them and by nothing else.

    Args:
        logprobs, entropy, tensors: `[n]` each, the tensors `[n, ...]`.
        valid_mask: bool `[n]`, the rows that count.
        denominator: of `float64_denominator`.
        named: more statistics `[n]`, given by name.

    Raises:
        ValueError: no loss per row; a loss cut off from logprobs and entropy where one of them
            requires a gradient; a loss that depends on another tensor that requires one.
    """
    copies = [None if x is None else x.clone() for x in (logprobs, entropy)]
    more = {name: x.clone() for name, x in (named or {}).items()}
    # The originals too: under a caller's torch.compile the copies are inside a compiled node.
    ours = (logprobs, entropy, *copies, *(named or {}).values(), *more.values())
    roots = [get_gradient_edge(x).node for x in ours if x is not None and x.requires_grad]
    loss = fn(*copies, *(t.detach().clone() for t in tensors), **more)
    if not isinstance(loss, Tensor) or loss.shape != logprobs.shape:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn: expected a loss per row of shape {tuple(logprobs.shape)}, got {got}"
        )
    if loss.is_complex():
        raise ValueError(f"loss_fn: expected real numbers, got a loss of {loss.dtype}")
    if torch.is_grad_enabled():
        _check_graph(loss, roots, fn)
    total = torch.where(valid_mask, loss, 0.0).sum(dtype=torch.float64) / denominator
    return torch.where(valid_mask.any(), total, 0.0)


def _check_graph(loss: Tensor, roots: list[Any], fn: LossFn) -> None:
    connected, captured = walk_graph(loss, roots)
    if captured:
        raise ValueError(
            f"loss_fn: the loss depends on {name_of(captured, fn)}, which requires a gradient "
            "but gets none here: detach it, or take the loss of linear_token_stats's results"
        )
    if roots and not connected:
        raise ValueError(
            "loss_fn: the loss is cut off from the log-probabilities and the entropy, so that "
            "nothing would learn from it: expected a differentiable function of them, got a loss "
            f"of {loss.dtype} that was detached, formed under no_grad, made constant or rounded"
        )
