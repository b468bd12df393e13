"""Running sums by GEMMs."""

from __future__ import annotations

import pytest
import torch

from mcore_logprobs.kernels.scan import running_sum


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 700, 128 * 128, 128 * 130 + 5])
@pytest.mark.parametrize("lead", [(), (3,), (2, 1)])
def test_against_cumsum(lead: tuple[int, ...], length: int) -> None:
    x = torch.rand(*lead, length, dtype=torch.float64) - 0.2
    before = x.clone()
    torch.testing.assert_close(running_sum(x), x.cumsum(-1), rtol=1e-12, atol=1e-11)
    assert torch.equal(x, before)
