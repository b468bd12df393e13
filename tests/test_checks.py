"""Checks of plain settings: what passes, what is refused, and what a refusal says."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mcore_logprobs import checks
from mcore_logprobs.collectives import saved_tensors_hooks

# name: (accepted, refused)
VALUES: dict[str, tuple[list, list]] = {
    "check_flag": ([True, False], [0, 1, None, "true", torch.tensor(True)]),
    "check_integer": ([0, -100, 1 << 40], [True, 1.0, None, "1"]),
    "check_count": ([1, 7], [0, -1, True, 1.0, None, "1"]),
    "check_optional_count": ([None, 1], [0, False, 2.0]),
    "check_positive": (
        [1, 0.5, Fraction(1, 3), np.float32(0.2), np.float16(0.2), np.int64(3)],
        [
            *(0, 0.0, -1.0, math.inf, math.nan, 10**400, True, None, "1.0", torch.ones(1)),
            *(np.float32("inf"), np.float16("nan")),
        ],
    ),
    "check_optional_positive": ([None, 30.0], [0.0, -math.inf, "30"]),
    "check_scale": (
        [1, 0.5, Fraction(1, 3), 1.2e-38, 8.5e37],
        [0, -1.0, math.inf, math.nan, 10**400, 1.1e-38, 1e-40, 8.6e37, 1e300, True, None, "1.0"],
    ),
    "check_optional_scale": ([None, 30.0], [0.0, 1e300, -math.inf, "30"]),
    "check_scale_or_zero": ([0, 0.0, 0.5, 8.5e37], [-1.0, 1e-40, 1e300, math.nan, False, None]),
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


def test_a_torch_that_tells_tracing_by_another_name(monkeypatch) -> None:
    """2.4 has the second of these two names only."""
    older = SimpleNamespace(get_innermost_proxy_mode=proxy_tensor.get_proxy_mode)
    found = []

    def asking(x: torch.Tensor) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, proxy_tensor.__name__, older)
            found.append(checks.is_traced(x))
        return x

    make_fx(asking)(torch.ones(2))
    asking(torch.ones(2))
    assert found == [True, False]


def test_a_torch_that_does_not_tell_saved_tensor_hooks(monkeypatch) -> None:
    """Up to 2.7: then consumers of lazy logits share nothing, as if there were some."""
    assert not saved_tensors_hooks()
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    assert saved_tensors_hooks()
