"""The row statistics' kernel against the reference in float64."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels import triton as triton_backend
from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.stats import StatsSpec, merge
from mcore_logprobs.kernels.triton import common
from tests.kernels.common import (
    DEVICE,
    DTYPES,
    EVERYTHING,
    TRANSFORMS,
    assert_stats,
    doubled,
    lay_out,
    make_chunk,
    make_logits,
    make_target,
    make_threshold,
    row_stats,
)
from tests.kernels.interpreter import interpreted


def _check(chunk: Chunk, spec: StatsSpec = EVERYTHING, *, ulps: float = 4.0) -> Tensor:
    before = chunk.logits.clone()
    target = make_target(len(chunk.logits), chunk.valid, chunk.logits)
    threshold = make_threshold(chunk, target) if spec.rank else None
    got = row_stats(triton_backend, chunk, target, spec, threshold=threshold)
    assert got.dtype == torch.float32
    assert torch.equal(chunk.logits.nan_to_num(7.0), before.nan_to_num(7.0)), "was modified"
    plain = row_stats(reference, chunk, target, spec, threshold=threshold)
    limit = None if threshold is None else threshold.double()
    exact = row_stats(reference, doubled(chunk), target, spec, threshold=limit)
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
        _check(make_chunk(make_logits(rows, width, dtype)))


@interpreted
def test_one_program_walks_over_all_tiles_where_rows_are_many():
    logits = make_logits(33, 9000, torch.bfloat16)
    if DEVICE == "cpu":
        assert common.launch_plan(33, 9000, logits).splits == 1
    _check(make_chunk(logits))


@pytest.mark.parametrize("transform", TRANSFORMS)
@interpreted
def test_scale_softcap_bias_and_temperature(transform):
    options = TRANSFORMS[transform]
    rows = {name: how for name, how in options.items() if name != "temperature"} | {"rows": True}
    for dtype in (torch.bfloat16, torch.float32):
        for how in (options, rows):
            _check(make_chunk(make_logits(5, 1152, dtype), 1100, **how), ulps=8.0)


@interpreted
def test_a_bias_over_whole_tiles():
    _check(make_chunk(make_logits(2, 9000, torch.bfloat16), bias=True), ulps=8.0)


@pytest.mark.parametrize("kind", ["low", "high", "holes"])
@pytest.mark.parametrize("transform", ["plain", "temperature", "all"])
@interpreted
def test_extreme_logits(kind, transform):
    options = TRANSFORMS[transform]
    for dtype in DTYPES:
        _check(make_chunk(make_logits(6, 1152, dtype, kind), **options), ulps=8.0)


@pytest.mark.parametrize("wanted", [{}, *({name: True} for name in vars(EVERYTHING))], ids=str)
@interpreted
def test_each_statistic_alone(wanted):
    chunk = make_chunk(make_logits(4, 700, torch.bfloat16, "holes"))
    _check(chunk, StatsSpec(**wanted))


@interpreted
def test_masked_columns_count_for_nothing_whatever_they_hold():
    logits = make_logits(4, 1152, torch.float32)
    for valid in (1024, 1000, 1):
        logits[:, valid:] = torch.nan
        _check(make_chunk(logits, valid))


@interpreted
def test_a_shard_without_true_vocabulary_merges_as_nothing():
    spec, logits = StatsSpec(entropy=True, smoothing=True), make_logits(3, 64, torch.bfloat16)
    nobody = torch.full((3,), -1, device=DEVICE)
    empty = row_stats(triton_backend, Chunk(logits, 0), nobody, spec)
    assert torch.equal(empty[0], torch.full((3,), -torch.inf, device=DEVICE))
    assert torch.equal(empty[1:], torch.zeros(len(spec.fields) - 1, 3, device=DEVICE))
    other = row_stats(triton_backend, Chunk(logits, 64), nobody, spec)
    assert torch.equal(merge(torch.stack([empty, other]), spec), other)


@pytest.mark.parametrize("layout", ["wide", "every other", "far"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@interpreted
def test_rows_with_a_stride(layout, dtype):
    rows = 2 if layout == "far" else 5
    _check(make_chunk(lay_out(make_logits(rows, 1152, dtype), layout)))


@interpreted
def test_rows_that_share_memory():
    _check(make_chunk(make_logits(1, 300, torch.float32).expand(4, -1)))


@interpreted
def test_zero_rows():
    for width in (1, 1152):
        got = _check(make_chunk(make_logits(0, width, torch.bfloat16)))
        assert got.shape == (len(EVERYTHING.fields), 0) == (8, 0)


@interpreted
def test_nan_stays_in_its_row():
    logits = make_logits(3, 5000, torch.float32)
    spec, chunk = StatsSpec(entropy=True), Chunk(logits, 5000)
    target = torch.tensor([1, 2, 3], device=DEVICE)
    clean = row_stats(triton_backend, chunk, target, spec)
    logits[1, 4321] = torch.nan
    got = row_stats(triton_backend, chunk, target, spec)
    assert got[1, 1].isnan()
    assert torch.equal(got[:, ::2], clean[:, ::2])


@interpreted
def test_a_plan_covers_every_column_once():
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.empty(0, dtype=dtype, device=DEVICE)
        for rows in (1, 7, 1000, 8192):
            for width in (0, 1, 33, 4096, 4097, 50257, 152064):
                plan = common.launch_plan(rows, width, logits)
                assert plan.splits * plan.columns >= width > (plan.splits - 1) * plan.columns or (
                    plan.splits == 1 and width == 0
                )
                assert plan.columns % plan.tile == 0


@triton.jit
def _tanh_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, common.tanh(tl.load(x_ptr + at)))


@interpreted
def test_tanh_is_right_to_a_few_units_in_the_last_place():
    x = torch.cat([torch.logspace(-30, 2, 1020), torch.tensor([0.0, 0.5499, 0.55, torch.inf])])
    x = torch.cat([x, -x]).to(DEVICE)
    got = torch.empty_like(x)
    exact = x.double().tanh()
    _tanh_kernel[(1,)](x, got, SIZE=2048)
    units = 4 if DEVICE == "cuda" else 2  # a GPU's exp2 is right to 2 units itself
    assert ((got.double() - exact).abs() <= units * 2.0**-23 * exact.abs()).all()
