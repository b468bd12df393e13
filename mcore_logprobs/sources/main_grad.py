"""Megatron's gradient buffer of a weight, into which its gradient is added in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MainGrad:
    """Megatron's gradient buffer of a weight, apart from the weight's values.

    What is saved for a backward may come back as another tensor, without the parameter's
    attributes.
    """

    parameter: Any

    @classmethod
    def of(cls, weight: Any) -> MainGrad | None:
        """The weight's, or None without gradients: a reference model has no buffers.

        Raises:
            ValueError: the weight learns, and has no `main_grad` of its shape.
        """
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return None
        main_grad = getattr(weight, "main_grad", None)
        if not isinstance(main_grad, Tensor) or main_grad.shape != weight.shape:
            got = None if main_grad is None else tuple(getattr(main_grad, "shape", ()))
            raise ValueError(
                "gradient_accumulation_fusion=True: expected weight.main_grad of shape "
                f"{tuple(weight.shape)}, got {got}"
            )
        return cls(weight)

    @property
    def buffer(self) -> Tensor:
        return self.parameter.main_grad

    def dummy_wgrad(self) -> Tensor | None:
        """The gradient that autograd is given for a weight whose true one went into the buffer.

        Megatron's convention: a parameter with the attribute `grad_added_to_main_grad` has it set,
        and gets a tensor of the right shape whose values are not read (zeros if `zero_out_wgrad`),
        so that the data-parallel hooks fire; any other gets None.
        """
        if not hasattr(self.parameter, "grad_added_to_main_grad"):
            return None
        self.parameter.grad_added_to_main_grad = True
        if getattr(self.parameter, "zero_out_wgrad", False):
            return torch.zeros_like(self.parameter)
        return torch.empty_like(self.parameter)
