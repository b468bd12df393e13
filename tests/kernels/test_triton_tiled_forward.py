"""The tiled forward that is measured beside the chunked one gives the same statistics."""

from __future__ import annotations

import pytest
import torch

from benchmarks.tiled_forward import TileConfig, tiled_row_stats
from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.stats import StatsSpec
from tests.kernels.common import DEVICE, assert_stats, make_target, row_stats
from tests.kernels.interpreter import interpreted


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@interpreted
def test_against_the_reference(dtype):
    # Not bfloat16, which the interpreter multiplies as integers.
    rows, columns, valid, depth = 67, 333, 300, 96
    hidden = torch.randn(rows, depth, device=DEVICE).to(dtype)
    weight = (torch.randn(columns, depth, device=DEVICE) / 5).to(dtype)
    exact = hidden.double() @ weight.double().t()
    spec = StatsSpec(entropy=True)
    target = make_target(rows, valid, exact)
    got = tiled_row_stats(hidden, weight, target, valid, TileConfig(32, 64, 32, 4, 2))
    plain = row_stats(reference, Chunk(exact.float(), valid), target, spec)
    truth = row_stats(reference, Chunk(exact, valid), target, spec)
    # tf32 is what Triton multiplies float32 in on a GPU.
    ulps = 2e4 if dtype == torch.float32 and DEVICE == "cuda" else 8.0
    assert_stats(got, plain, truth, spec, ulps=ulps)
