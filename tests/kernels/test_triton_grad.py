"""The gradient's kernel against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels import triton as triton_backend
from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec
from tests.helpers.oracles import assert_no_worse
from tests.kernels.common import (
    DEVICE,
    DTYPES,
    TRANSFORMS,
    doubled,
    far_rows,
    lay_out,
    make_chunk,
    make_logits,
    make_target,
)
from tests.kernels.interpreter import interpreted

ALL = StatsSpec(entropy=True, smoothing=True, sum_pi_squared=True)


def _check(
    chunk: Chunk,
    spec: StatsSpec = ALL,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Of one entry a row, the target."""
    logits, rows = chunk.logits, len(chunk.logits)
    target = make_target(rows, chunk.valid, logits).unsqueeze(1)
    upstream = torch.randn(rows, 1, device=DEVICE)
    coef = torch.randn(len(spec.coefficients), rows, device=DEVICE)
    coef[:, 2::5] = upstream[2::5] = 0.0
    z = doubled(chunk).processed()
    shift = z.amax(-1) if chunk.valid and rows else torch.zeros(rows, device=DEVICE)
    shift = torch.where(shift.isneginf(), 0.0, shift).float()
    total = (z - shift.unsqueeze(-1)).exp().sum(-1).clamp(min=1.0)
    for name, row in spec.named_coefficients(coef).items():
        row /= {"finite": 1.0, "squares": total**2}.get(name, total)
    given = (target, upstream, shift, coef)
    exact = torch.full(logits.shape, torch.nan, dtype=torch.float64, device=DEVICE)
    wide = (target, *(x.double() for x in given[1:]))
    reference.grad(doubled(chunk), GradientTerms(*wide, spec), out=exact, chunk_size=16)
    plain = torch.full_like(exact, torch.nan, dtype=out_dtype or logits.dtype)
    reference.grad(chunk, GradientTerms(*given, spec), out=plain, chunk_size=16)
    if out is None:
        out = torch.full_like(plain, torch.nan)
    triton_backend.grad(chunk, GradientTerms(*given, spec), out=out)
    assert_no_worse(out, plain, exact, name="gradient")
    assert (out[:, chunk.valid :] == 0).all()
    assert (out[2::5] == 0).all()
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 1152, 20000])
@interpreted
def test_widths_that_are_no_multiple_of_the_tile(width, dtype):
    for rows in (1, 6):
        _check(make_chunk(make_logits(rows, width, dtype)))


@pytest.mark.parametrize("wanted", [None, "entropy", "smoothing", "sum_pi_squared"])
@interpreted
def test_each_term_alone(wanted):
    spec = StatsSpec(**({wanted: True} if wanted else {}))
    _check(make_chunk(make_logits(4, 700, torch.bfloat16, "holes"), 650), spec)


@pytest.mark.parametrize("transform", [*TRANSFORMS, "rows"])
@pytest.mark.parametrize("kind", ["normal", "low", "high", "holes"])
@interpreted
def test_scale_softcap_bias_and_temperature(transform, kind):
    options = TRANSFORMS.get(transform, {"rows": True})
    for dtype in (torch.bfloat16, torch.float32):
        _check(make_chunk(make_logits(6, 1152, dtype, kind), 1100, **options))
        if options.get("bias") or options.get("softcap"):
            rows = {name: how for name, how in options.items() if name != "temperature"}
            _check(make_chunk(make_logits(6, 1152, dtype, kind), 1100, rows=True, **rows))


@interpreted
def test_masked_columns_get_zero_whatever_they_hold():
    logits = make_logits(4, 1152, torch.float32)
    for valid in (1024, 1000, 1, 0):
        logits[:, valid:] = torch.nan
        if valid:
            _check(make_chunk(logits, valid))
    out = torch.full_like(logits, torch.nan)
    nobody, ones = torch.full((4, 1), -1, device=DEVICE), torch.ones(4, 4, device=DEVICE)
    terms = GradientTerms(nobody, ones[:, :1], ones[0], ones, ALL)
    triton_backend.grad(Chunk(logits, 0), terms, out=out)
    assert (out == 0).all()


@interpreted
def test_rows_without_coefficients_are_zero_whatever_they_hold():
    logits = torch.full((2, 1152), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    logits[0] = 1.0
    out = torch.full_like(logits, torch.nan)
    coef = torch.zeros(4, 2, device=DEVICE)
    coef[0, 0] = 1.0
    target, shift = torch.tensor([[3], [4]], device=DEVICE), torch.tensor([8.0, torch.nan])
    upstream = torch.zeros(2, 1, device=DEVICE)
    terms = GradientTerms(target, upstream, shift.to(DEVICE), coef, ALL)
    triton_backend.grad(Chunk(logits, 1152), terms, out=out)
    assert (out[0] > 0).all()
    assert (out[1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_in_place(dtype):
    logits = make_logits(6, 1152, dtype)
    out, target = torch.empty_like(logits), make_target(6, 1100, logits).unsqueeze(1)
    shift, coef = torch.full((6,), 10.0, device=DEVICE), torch.randn(4, 6, device=DEVICE)
    given = (target, torch.randn(6, 1, device=DEVICE), shift, coef, ALL)
    triton_backend.grad(Chunk(logits, 1100), GradientTerms(*given), out=out)
    triton_backend.grad(Chunk(logits, 1100), GradientTerms(*given), out=logits)
    assert torch.equal(logits, out)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@interpreted
def test_float32_logits_to_a_gradient_of_another_dtype(out_dtype):
    _check(make_chunk(make_logits(5, 1152, torch.float32)), out_dtype=out_dtype)


@pytest.mark.parametrize("layout", ["wide", "every other", "far"])
@interpreted
def test_rows_with_a_stride_in_and_out(layout):
    rows = 2 if layout == "far" else 6
    logits = make_logits(rows, 1152, torch.bfloat16)
    far = far_rows(rows, 1152, torch.bfloat16) if layout == "far" else None
    spaced = lay_out(torch.zeros_like(logits), "wide")
    _check(make_chunk(lay_out(logits, layout)), out=spaced if far is None else far)


@interpreted
def test_smoothing_reaches_every_finite_column_however_unlikely():
    logits = make_logits(2, 300, torch.float32)
    logits[:, 7], logits[:, 8] = -3e4, -torch.inf
    out = _check(make_chunk(logits), StatsSpec(smoothing=True))
    assert (out[:, 7] != 0).all()
    assert (out[:, 8] == 0).all()


@interpreted
def test_zero_rows():
    _check(make_chunk(make_logits(0, 1152, torch.bfloat16)))
