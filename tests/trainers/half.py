"""Rows in bfloat16: what may differ, and a head that rounds no logits for the plain run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from tests.trainers.frame import UNBOUNDED, Row, Tolerance

ALIKE = dataclasses.replace(UNBOUNDED, logprobs=1e-4, grad_norm=1e-4)


def rounded(given: Row, **tolerance: float) -> Row:
    """The row with a bfloat16 model, and tolerances of its own.

    Lazy logits are not rounded to bfloat16, the plain run's are: log-probabilities near -10 are
    0.06 apart. Parameters near 1 are 0.008 apart.
    """
    bounds = {"logprobs": 0.25, "entropy": 0.1, "metrics": 0.03, "grad_norm": 0.03}
    return dataclasses.replace(
        given,
        option=f"{given.option}, bfloat16",
        settings={**given.settings, "bf16": True, "alike": False},
        tolerance=Tolerance(**{**bounds, "parameters": math.inf, **tolerance}),
        told_apart=2.5,
    )


def rounded_alike(given: Row, *, real: bool = False, **tolerance: float) -> Row:
    """The row in bfloat16, where both runs round logits alike: the first update agrees as in
    float32.

    Neither rounds them, as the plain run's head is `unrounded_head`. After the first update a
    parameter may be rounded the other way, so that `rounded`'s tolerances stay.

    real: both have the framework's own logits (MCORE_LOGPROBS_FUSED=false), and agree to the end.
    """
    row = rounded(given, **tolerance)
    if not real:
        settings = {**row.settings, "unrounded_head": True}
        return dataclasses.replace(row, settings=settings, first=ALIKE)
    return dataclasses.replace(
        row,
        option=f"{row.option}, real logits",
        environment={**row.environment, "MCORE_LOGPROBS_FUSED": "false"},
        tolerance=Tolerance(**tolerance),
        told_apart=given.told_apart,
        first=ALIKE,
    )


def dtype(row: Row) -> torch.dtype:
    """The model's; see `rounded`."""
    return torch.bfloat16 if row.settings.get("bf16") else torch.float32


def dtype_name(row: Row) -> str:
    return str(dtype(row)).removeprefix("torch.")


def unrounded_head() -> None:
    """Makes GPTModel's head multiply its bfloat16 operands in float64; its logits are float32.

    What a trainer computes from them is what it should get from lazy logits.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    made = GPTModel.__init__

    def init(self: Any, *given: Any, **options: Any) -> None:
        made(self, *given, **options)
        if (head := getattr(self, "output_layer", None)) is None:
            return  # a pipeline stage that is not the last
        multiply = head._forward_impl

        def product(input: Any, weight: Any, *given: Any, **options: Any) -> Any:
            return multiply(input.double(), weight.double(), *given, **options).float()

        head._forward_impl = product

    GPTModel.__init__ = init
