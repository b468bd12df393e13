"""The gradient's kernel against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_logprobs.kernels import reference, triton_backend
from mcore_logprobs.kernels.stats import RowSpec
from tests.helpers.oracles import assert_no_worse
from tests.kernels.common import (
    DEVICE,
    DTYPES,
    TRANSFORMS,
    far_rows,
    lay_out,
    make_bias,
    make_logits,
    make_spec,
    make_target,
)
from tests.kernels.interpreter import interpreted

BOTH = {"entropy": True, "smoothing": True}


def _check(
    logits: Tensor,
    spec: RowSpec,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    rows = logits.shape[0]
    target = make_target(rows, spec.valid, logits)
    coef = torch.randn(4, rows, device=DEVICE)
    coef[:, 2::5] = 0.0
    wide = None if bias is None else bias.double()
    z = reference.finished_logits(
        logits[:, : spec.valid].double(), spec, None if wide is None else wide[: spec.valid]
    )
    shift = z.amax(-1) if spec.valid and rows else torch.zeros(rows, device=DEVICE)
    shift = torch.where(shift.isneginf(), 0.0, shift).float()
    coef[:2] /= (z - shift.unsqueeze(-1)).exp().sum(-1).clamp(min=1.0)
    exact = torch.full(logits.shape, torch.nan, dtype=torch.float64, device=DEVICE)
    reference.grad_logits(
        logits.double(), target, shift.double(), coef.double(), spec,
        bias=wide, out=exact, chunk_size=16,
    )  # fmt: skip
    plain = torch.full_like(exact, torch.nan, dtype=out_dtype or logits.dtype)
    common = {"bias": bias, "chunk_size": 16}
    reference.grad_logits(logits, target, shift, coef, spec, out=plain, **common)
    if out is None:
        out = torch.full_like(plain, torch.nan)
    triton_backend.grad_logits(logits, target, shift, coef, spec, out=out, **common)
    assert_no_worse(out, plain, exact, name="gradient")
    assert (out[:, spec.valid :] == 0).all()
    assert (out[2::5] == 0).all()
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 1152, 20000])
@interpreted
def test_widths_that_are_no_multiple_of_the_tile(width, dtype):
    for rows in (1, 6):
        _check(make_logits(rows, width, dtype), RowSpec(width, **BOTH))


@pytest.mark.parametrize("wanted", [{}, {"entropy": True}, {"smoothing": True}], ids=str)
@interpreted
def test_each_term_alone(wanted):
    _check(make_logits(4, 700, torch.bfloat16, "holes"), RowSpec(650, **wanted))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", ["normal", "low", "high", "holes"])
@interpreted
def test_scale_softcap_bias_and_temperature(transform, kind):
    options = TRANSFORMS[transform]
    for dtype in (torch.bfloat16, torch.float32):
        logits = make_logits(6, 1152, dtype, kind)
        _check(logits, make_spec(1100, options, BOTH), bias=make_bias(options, 1152))


@interpreted
def test_masked_columns_get_zero_whatever_they_hold():
    logits = make_logits(4, 1152, torch.float32)
    for valid in (1024, 1000, 1, 0):
        logits[:, valid:] = torch.nan
        if valid:
            _check(logits, RowSpec(valid, **BOTH))
    out = torch.full_like(logits, torch.nan)
    nobody, zeros = torch.full((4,), -1, device=DEVICE), torch.zeros(4, device=DEVICE)
    ones = torch.ones(4, 4, device=DEVICE)
    triton_backend.grad_logits(logits, nobody, zeros, ones, RowSpec(0, **BOTH), out=out)
    assert (out == 0).all()


@interpreted
def test_rows_without_coefficients_are_zero_whatever_they_hold():
    logits = torch.full((2, 1152), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    logits[0] = 1.0
    out = torch.full_like(logits, torch.nan)
    coef = torch.zeros(4, 2, device=DEVICE)
    coef[0, 0] = 1.0
    target, shift = torch.tensor([3, 4], device=DEVICE), torch.full((2,), torch.nan, device=DEVICE)
    shift[0] = 8.0
    triton_backend.grad_logits(logits, target, shift, coef, RowSpec(1152, **BOTH), out=out)
    assert (out[0] > 0).all()
    assert (out[1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_in_place(dtype):
    logits = make_logits(6, 1152, dtype)
    out, target = torch.empty_like(logits), make_target(6, 1100, logits)
    shift, coef = torch.full((6,), 10.0, device=DEVICE), torch.randn(4, 6, device=DEVICE)
    spec = RowSpec(1100, **BOTH)
    triton_backend.grad_logits(logits, target, shift, coef, spec, out=out)
    triton_backend.grad_logits(logits, target, shift, coef, spec, out=logits)
    assert torch.equal(logits, out)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@interpreted
def test_float32_logits_to_a_gradient_of_another_dtype(out_dtype):
    _check(make_logits(5, 1152, torch.float32), RowSpec(1152, **BOTH), out_dtype=out_dtype)


@pytest.mark.parametrize("layout", ["wide", "every other", "far"])
@interpreted
def test_rows_with_a_stride_in_and_out(layout):
    rows = 2 if layout == "far" else 6
    logits = make_logits(rows, 1152, torch.bfloat16)
    far = far_rows(rows, 1152, torch.bfloat16) if layout == "far" else None
    spaced = lay_out(torch.zeros_like(logits), "wide")
    _check(lay_out(logits, layout), RowSpec(1152, **BOTH), out=spaced if far is None else far)


@interpreted
def test_smoothing_reaches_every_finite_column_however_unlikely():
    logits = make_logits(2, 300, torch.float32)
    logits[:, 7], logits[:, 8] = -3e4, -torch.inf
    out = _check(logits, RowSpec(300, smoothing=True))
    assert (out[:, 7] != 0).all()
    assert (out[:, 8] == 0).all()


@interpreted
def test_zero_rows():
    _check(make_logits(0, 1152, torch.bfloat16), RowSpec(1152, **BOTH))
