"""Checks of plain settings: what passes, what is refused, and what a refusal says."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from mcore_logprobs import checks

# name: (accepted, refused)
VALUES: dict[str, tuple[list, list]] = {
    "check_flag": ([True, False], [0, 1, None, "true", torch.tensor(True)]),
    "check_integer": ([0, -100, 1 << 40], [True, 1.0, None, "1"]),
    "check_count": ([1, 7], [0, -1, True, 1.0, None, "1"]),
    "check_optional_count": ([None, 1], [0, False, 2.0]),
    "check_positive": (
        [1, 0.5, Fraction(1, 3)],
        [0, 0.0, -1.0, math.inf, math.nan, 10**400, True, None, "1.0", torch.ones(1)],
    ),
    "check_optional_positive": ([None, 30.0], [0.0, -math.inf, "30"]),
    "check_fraction": ([0, 0.0, 0.999], [1, 1.0, -1e-9, math.nan, False, None]),
    "check_top_k": ([None, -1, 0, 50], [-2, 1.0, True, "5"]),
    "check_top_p": ([1, 1.0, 1e-3], [0, 0.0, 1.001, math.nan, True, None]),
    "check_logits_dtype": (
        [torch.float32, torch.bfloat16, torch.float16],
        [torch.float64, torch.int8, "float32", None],
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_accepts_and_refuses(name) -> None:
    check = getattr(checks, name)
    accepted, refused = VALUES[name]
    for value in accepted:
        check("setting", value)
    for value in refused:
        with pytest.raises(ValueError, match=r"^setting: expected ") as caught:
            check("setting", value)
        assert str(caught.value) == f"setting: expected {check.expected}, got {value!r}"


def test_choices() -> None:
    checks.check_choice("kind", "forward", ("forward", "reverse"))
    for value in ("sideways", None, 1, torch.ones(2), ("forward",)):
        with pytest.raises(
            ValueError, match=r"kind: expected one of \('forward', 'reverse'\), got "
        ):
            checks.check_choice("kind", value, ["forward", "reverse"])
