"""Whether a gradient may be written over the logits it belongs to."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_inplace_backward"]


def check_inplace_backward(logits: Tensor) -> None:
    """Refuse `inplace_backward=True` where the logits are needed elsewhere, as far as can be seen.

    Seen are: a leaf, retained gradients, a view's base that others may hold, overlapping memory
    (an expanded tensor), and an operation that saved its own output for its backward (softmax,
    tanh, exp, ...). Not seen are other consumers that come later.

    Raises:
        ValueError: says which.
    """
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return
    if logits.is_leaf:
        raise ValueError("inplace_backward=True: expected the output of an operation, got a leaf")
    if logits.retains_grad:
        raise ValueError("inplace_backward=True: the logits retain their gradient (retain_grad())")
    if any(
        size > 1 and stride == 0 for size, stride in zip(logits.shape, logits.stride(), strict=True)
    ):
        raise ValueError("inplace_backward=True: the logits are an expanded tensor")
    node = logits.grad_fn
    if hasattr(node, "_saved_result") or hasattr(node, "_saved_output"):
        raise ValueError(
            f"inplace_backward=True: {type(node).__name__} needs the logits for its own backward"
        )
