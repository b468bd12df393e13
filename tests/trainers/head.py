"""A head that rounds no logits, for the plain run of a bfloat16 row."""

from __future__ import annotations

from typing import Any


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
