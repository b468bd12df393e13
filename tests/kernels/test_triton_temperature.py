"""A temperature a row in the Triton kernels: the reference's statistics and gradient."""

from __future__ import annotations

import pytest
import torch

from mcore_logprobs.kernels import reference, triton_grad, triton_stats
from mcore_logprobs.kernels.stats import RowSpec
from tests.kernels.common import DEVICE, EVERYTHING, make_logits, make_target, make_threshold
from tests.kernels.interpreter import interpreted

OPTIONS = {
    "plain": {},
    "scale": {"logit_scale": 0.25},
    "softcap": {"softcap": 3.0, "logit_scale": 0.5},
    "bias": {"bias": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@interpreted
def test_statistics_and_gradient(name, dtype):
    rows, width, valid = 5, 700, 650
    options = dict(OPTIONS[name])
    bias = torch.randn(width, device=DEVICE) if options.pop("bias", False) else None
    spec = RowSpec(valid, **options, **EVERYTHING)
    logits = make_logits(rows, width, dtype)
    target = make_target(rows, valid, logits)
    temperature = torch.linspace(0.5, 2.0, rows, device=DEVICE)
    threshold = make_threshold(logits, spec, bias, target)
    if bias is not None:
        threshold = threshold / temperature
    inputs = {"bias": bias, "temperature": temperature}
    want = reference.row_stats(logits, target, spec, threshold=threshold, chunk_size=rows, **inputs)
    got = triton_stats.row_stats(logits, target, spec, threshold=threshold, **inputs)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    coef = torch.randn(len(spec.coefficients), rows, device=DEVICE)
    shift = want[0]
    grads = [torch.empty(rows, width, device=DEVICE) for _ in range(2)]
    reference.grad_logits(
        logits, target, shift, coef, spec, out=grads[0], chunk_size=rows, **inputs
    )
    triton_grad.grad_logits(logits, target, shift, coef, spec, out=grads[1], **inputs)
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-5, atol=2e-6)
