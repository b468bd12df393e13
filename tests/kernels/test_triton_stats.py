"""The row statistics' kernel against the reference in float64."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels import reference, triton_backend, triton_common
from mcore_logprobs.kernels.stats import RowSpec, merge
from tests.kernels.common import (
    DEVICE,
    DTYPES,
    EVERYTHING,
    TRANSFORMS,
    assert_stats,
    lay_out,
    make_bias,
    make_logits,
    make_spec,
    make_target,
    make_threshold,
)
from tests.kernels.interpreter import interpreted


def _check(
    logits: Tensor, spec: RowSpec, *, bias: Tensor | None = None, ulps: float = 4.0
) -> Tensor:
    before = logits.clone()
    rows = logits.shape[0]
    target = make_target(rows, spec.valid, logits)
    threshold = make_threshold(logits, spec, bias, target) if spec.rank else None
    arguments = {"bias": bias, "threshold": threshold, "chunk_size": 16}
    got = triton_backend.row_stats(logits, target, spec, **arguments)
    assert got.dtype == torch.float32
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "the input was modified"
    plain = reference.row_stats(logits, target, spec, **arguments)
    exact = reference.row_stats(
        logits.double(), target, spec, bias=None if bias is None else bias.double(),
        threshold=None if threshold is None else threshold.double(), chunk_size=16,
    )  # fmt: skip
    if spec.rank:  # counts are exact in either dtype, but z of a bias is rounded in float32
        exact[spec.fields.index("higher")] = plain[spec.fields.index("higher")].double()
    assert_stats(got, plain, exact, spec, ulps=ulps)
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 1152, 9000])
@interpreted
def test_widths_that_are_no_multiple_of_the_tile(width, dtype):
    # 9000 columns are several tiles, over which a row's programs are spread.
    for rows in (1, 3):
        _check(make_logits(rows, width, dtype), RowSpec(width, **EVERYTHING))


@interpreted
def test_one_program_walks_over_all_tiles_where_rows_are_many():
    logits = make_logits(33, 9000, torch.bfloat16)
    if DEVICE == "cpu":
        assert triton_common.launch_plan(33, 9000, logits).splits == 1
    _check(logits, RowSpec(9000, **EVERYTHING))


@pytest.mark.parametrize("transform", TRANSFORMS)
@interpreted
def test_scale_softcap_bias_and_temperature(transform):
    options = TRANSFORMS[transform]
    for dtype in (torch.bfloat16, torch.float32):
        logits = make_logits(5, 1152, dtype)
        spec = make_spec(1100, options, EVERYTHING)
        _check(logits, spec, bias=make_bias(options, 1152), ulps=8.0)


@interpreted
def test_a_bias_over_whole_tiles():
    logits = make_logits(2, 9000, torch.bfloat16)
    _check(logits, RowSpec(9000, **EVERYTHING), bias=make_bias({"bias": True}, 9000), ulps=8.0)


@pytest.mark.parametrize("kind", ["low", "high", "holes"])
@pytest.mark.parametrize("transform", ["plain", "temperature", "all"])
@interpreted
def test_extreme_logits(kind, transform):
    options = TRANSFORMS[transform]
    for dtype in DTYPES:
        logits = make_logits(6, 1152, dtype, kind)
        spec = make_spec(1152, options, EVERYTHING)
        _check(logits, spec, bias=make_bias(options, 1152), ulps=8.0)


@pytest.mark.parametrize("wanted", [{}, *({name: True} for name in EVERYTHING)], ids=str)
@interpreted
def test_each_statistic_alone(wanted):
    _check(make_logits(4, 700, torch.bfloat16, "holes"), RowSpec(700, **wanted))


@interpreted
def test_masked_columns_count_for_nothing_whatever_they_hold():
    logits = make_logits(4, 1152, torch.float32)
    for valid in (1024, 1000, 1):
        logits[:, valid:] = torch.nan
        _check(logits, RowSpec(valid, **EVERYTHING))


@interpreted
def test_a_shard_without_true_vocabulary_merges_as_nothing():
    spec = RowSpec(0, entropy=True, smoothing=True)
    nobody = torch.full((3,), -1, device=DEVICE)
    empty = triton_backend.row_stats(make_logits(3, 64, torch.bfloat16), nobody, spec)
    assert torch.equal(empty[0], torch.full((3,), -torch.inf, device=DEVICE))
    assert torch.equal(empty[1:], torch.zeros(len(spec.fields) - 1, 3, device=DEVICE))
    other = triton_backend.row_stats(
        make_logits(3, 64, torch.bfloat16), nobody, RowSpec(64, entropy=True, smoothing=True)
    )
    assert torch.equal(merge(torch.stack([empty, other]), spec), other)


@pytest.mark.parametrize("layout", ["wide", "every other", "far"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@interpreted
def test_rows_with_a_stride(layout, dtype):
    rows = 2 if layout == "far" else 5
    _check(lay_out(make_logits(rows, 1152, dtype), layout), RowSpec(1152, **EVERYTHING))


@interpreted
def test_rows_that_share_memory():
    _check(make_logits(1, 300, torch.float32).expand(4, -1), RowSpec(300, **EVERYTHING))


@interpreted
def test_zero_rows():
    for width in (1, 1152):
        got = _check(make_logits(0, width, torch.bfloat16), RowSpec(width, **EVERYTHING))
        assert got.shape == (len(RowSpec(width, **EVERYTHING).fields), 0) == (8, 0)


@interpreted
def test_nan_stays_in_its_row():
    logits = make_logits(3, 5000, torch.float32)
    spec = RowSpec(5000, entropy=True)
    target = torch.tensor([1, 2, 3], device=DEVICE)
    clean = triton_backend.row_stats(logits, target, spec)
    logits[1, 4321] = torch.nan
    got = triton_backend.row_stats(logits, target, spec)
    assert got[1, 1].isnan()
    assert torch.equal(got[:, ::2], clean[:, ::2])


@interpreted
def test_a_plan_covers_every_column_once():
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.empty(0, dtype=dtype, device=DEVICE)
        for rows in (1, 7, 1000, 8192):
            for width in (0, 1, 33, 4096, 4097, 50257, 152064):
                plan = triton_common.launch_plan(rows, width, logits)
                assert plan.splits * plan.columns >= width > (plan.splits - 1) * plan.columns or (
                    plan.splits == 1 and width == 0
                )
                assert plan.columns % plan.tile == 0


@pytest.mark.parametrize("names", ["stages3", "prefetch", "ratio", "prefetch,ratio"])
@interpreted
def test_candidates_are_right_to_rounding(names):
    with triton_common.use_candidate(names):
        for rows, width in ((1, 9000), (33, 8200)):
            logits = make_logits(rows, width, torch.bfloat16)
            _check(logits, RowSpec(width - 5, softcap=3.0, entropy=True), ulps=16.0)
    with pytest.raises(ValueError, match=r"MCORE_LOGPROBS_TRITON: expected some of .*'stages4'"):
        triton_common.use_candidate("stages4").__enter__()


@triton.jit
def _tanh_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, SERIES: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, triton_common.tanh(tl.load(x_ptr + at), SERIES))


@interpreted
def test_tanh_is_right_to_a_few_units_in_the_last_place():
    x = torch.cat([torch.logspace(-30, 2, 1020), torch.tensor([0.0, 0.5499, 0.55, torch.inf])])
    x = torch.cat([x, -x]).to(DEVICE)
    got = torch.empty_like(x)
    exact = x.double().tanh()
    _tanh_kernel[(1,)](x, got, SIZE=2048, SERIES=False)
    assert ((got.double() - exact).abs() <= 2.0**-22).all()
    _tanh_kernel[(1,)](x, got, SIZE=2048, SERIES=True)
    units = 4 if DEVICE == "cuda" else 2  # a GPU's exp2 is right to 2 units itself
    assert ((got.double() - exact).abs() <= units * 2.0**-23 * exact.abs()).all()
