"""Equality of bits, for tests of `invariant_segments`."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether they agree in dtype, shape and every bit; NaN and -0.0 count as what they are."""
    bits = _INTEGERS[a.element_size()]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.contiguous().view(bits), b.contiguous().view(bits)
    )


def assert_same_bits(
    found: Tensor | dict[str, Tensor], expected: Tensor | dict[str, Tensor], what: str
) -> None:
    """`same_bits` of tensors, or of every tensor by name."""
    if isinstance(found, Tensor):
        found, expected = {"": found}, {"": expected}
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert same_bits(value, expected[name]), (
            f"{what}: {name} differs by up to {(value - expected[name]).abs().max()}"
        )
