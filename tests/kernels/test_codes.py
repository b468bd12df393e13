"""Logits kept as int16 codes for the backward: each within half a step, and what is not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.kernels import codes
from mcore_logprobs.kernels.chunk import Chunk, Processing
from tests.kernels.common import DEVICE
from tests.kernels.interpreter import interpreted


def rows_to_encode() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    y = torch.randn(9, 150, generator=generator)
    y[1] *= 1e-4
    y[2] = 4.0
    y[3] = y[3] * 5.0 + 1e4
    y[4] *= 200.0  # more than the range
    y[5, ::2] = -torch.inf
    y[6] = -torch.inf
    y[7, 3] = torch.nan
    y[8, 3] = torch.inf
    return y


def check_codes(module: Any, device: str) -> None:
    y = rows_to_encode().to(device)
    temperature = torch.linspace(0.5, 2.0, len(y), device=device)
    for own in (0.7, temperature):
        chunk = Chunk(y, y.shape[1], Processing.of(1.5, temperature=own))
        out = torch.full((len(y), 160), 77, dtype=torch.int16, device=device)[:, :150]
        scale = module.encode(chunk, out=out, chunk_size=4)
        found = torch.empty(len(y), 176, device=device)[:, :150]
        module.decode(out, scale, out=found, chunk_size=4)
        multiplier = (1.5 / torch.as_tensor(own)).to(device).expand(len(y)).unsqueeze(1)
        whole = slice(0, 7)
        finite = y[whole] > -torch.inf
        assert torch.equal(found[whole] > -torch.inf, finite)
        top = y[whole].amax(-1, keepdim=True)
        assert torch.equal(found[whole].amax(-1, keepdim=True), top)
        low = torch.maximum(y[whole], top - codes.RANGE / multiplier[whole])
        off = ((found[whole] - low) * multiplier[whole]).double()[finite].abs()
        ulp = torch.where(finite, y[whole].abs(), 0.0).amax(-1) * 2.0**-23
        own_ulp = (ulp.unsqueeze(1) * multiplier[whole]).expand_as(low)[finite]
        assert (off <= 2.0**-11 * 1.001 + own_ulp).all()
        near = ((found[1] - y[1]) * multiplier[1]).abs().max()
        assert near <= (y[1].max() - y[1].min()) * multiplier[1] / 1.3e5 + 1e-9


def test_codes_are_within_half_a_step() -> None:
    check_codes(codes, "cpu")


@interpreted
def test_codes_of_triton_are_within_half_a_step() -> None:
    from mcore_logprobs.kernels import triton

    check_codes(triton, DEVICE)


@interpreted
def test_codes_of_rows_wider_than_a_tile_of_triton() -> None:
    """The largest and the least of a row in its first two tiles, either way round."""
    from mcore_logprobs.kernels import triton

    y = torch.randn(3, 4500, device=DEVICE)  # tiles of 2048 columns, and the rest
    y[0, 7], y[0, 2100] = 9.0, -9.0
    y[1, 2100], y[1, 7] = 9.0, -9.0
    y[2, 2500] = -torch.inf
    chunk, finite = Chunk(y, y.shape[1], Processing.of()), y > -torch.inf
    out, found = torch.full_like(y, 77, dtype=torch.int16), torch.empty_like(y)
    scale = triton.encode(chunk, out=out, chunk_size=4)
    triton.decode(out, scale, out=found, chunk_size=4)
    assert torch.equal(found > -torch.inf, finite)
    assert (found - y)[finite].abs().max() <= 2.0**-11 * 1.02
