"""The end of a policy loss's backward: gradients times an upstream, in one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_logprobs.kernels import reference
from tests.kernels.common import DEVICE
from tests.kernels.interpreter import interpreted

COUNT = 5000  # more than a tile, and no multiple of one


def check_scale(module: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for value in (0.0, 0.37):
            grad = torch.randn(COUNT, device=DEVICE)
            grad[7] = torch.nan
            upstream = torch.tensor(value, device=DEVICE)
            wanted = torch.zeros(COUNT, device=DEVICE) if value == 0.0 else grad * value
            out = torch.full((COUNT,), 3.0, dtype=dtype, device=DEVICE)
            module.scale(grad.clone(), upstream, out=out)
            torch.testing.assert_close(out, wanted.to(dtype), equal_nan=True)
            before = torch.randn(COUNT, device=DEVICE).to(dtype)
            total = before.clone()
            module.scale(grad.clone(), upstream, out=total, add=True)
            torch.testing.assert_close(total, (before.float() + wanted).to(dtype), equal_nan=True)
            if dtype == torch.float32:
                module.scale(grad, upstream, out=grad)
                torch.testing.assert_close(grad, wanted, equal_nan=True)
    strided = torch.randn(6, 4, device=DEVICE).t()
    out = torch.empty_like(strided)
    module.scale(strided, torch.tensor(2.0, device=DEVICE), out=out)
    torch.testing.assert_close(out, 2.0 * strided)


def test_scale_of_torch() -> None:
    check_scale(reference)


@interpreted
def test_scale_of_triton() -> None:
    from mcore_logprobs.kernels import triton

    check_scale(triton)


class Passes(TorchDispatchMode):
    """How often a tensor of COUNT numbers is written."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += isinstance(out, torch.Tensor) and out.numel() == COUNT
        return out


@pytest.mark.parametrize("value", [0.0, 2.0])
@pytest.mark.parametrize("add", [False, True])
def test_one_pass_on_a_cpu_and_none_where_nothing_is_added(value: float, add: bool) -> None:
    grad, out = torch.ones(COUNT), torch.ones(COUNT)
    with Passes() as passes:
        reference.scale(grad, torch.tensor(value), out=out, add=add)
    assert passes.count == (0 if add and value == 0.0 else 1)
