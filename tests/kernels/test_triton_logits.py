"""The kernels for one side of logits against the reference in float64: statistics and gradient."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.tiled_forward import TileConfig, tiled_row_stats
from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels import triton as triton_backend
from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec, by_name, merge
from mcore_logprobs.kernels.triton import common, gradient
from mcore_logprobs.kernels.triton.statistics import launch_stats
from tests.helpers.covering import covering
from tests.kernels.common import (
    DEVICE,
    DTYPES,
    EVERYTHING,
    TRANSFORMS,
    assert_stats,
    doubled,
    far_rows,
    lay_out,
    make_chunk,
    make_logits,
    make_target,
    make_threshold,
    row_stats,
    setting_id,
)
from tests.kernels.gradients import check_gradient, make_terms
from tests.kernels.interpreter import interpreted

BF16, FP16, FP32 = DTYPES


def check_statistics(chunk: Chunk, spec: StatsSpec = EVERYTHING, *, ulps: float = 4.0) -> Tensor:
    before = chunk.logits.clone()
    target = make_target(len(chunk.logits), chunk.valid, chunk.logits)
    threshold = make_threshold(chunk, target) if spec.rank else None
    got = row_stats(triton_backend, chunk, target, spec, threshold=threshold)
    assert got.dtype == torch.float32
    assert torch.equal(chunk.logits.nan_to_num(7.0), before.nan_to_num(7.0)), "was modified"
    plain = row_stats(reference, chunk, target, spec, threshold=threshold)
    limit = None if threshold is None else threshold.double()
    exact = row_stats(reference, doubled(chunk), target, spec, threshold=limit)
    if spec.rank:  # with a softcap or a bias it is float32's own values that are compared
        exact[spec.fields.index("higher")] = plain[spec.fields.index("higher")].double()
    assert_stats(got, plain, exact, spec, multiplier=chunk.processing.multiplier, ulps=ulps)
    return got


def check(chunk: Chunk, *, out: str = "fresh", ulps: float = 4.0) -> None:
    """Statistics and gradients, of one entry per row and of several, alone and with statistics."""
    check_statistics(chunk, ulps=ulps)
    dtype = chunk.logits.dtype
    fresh = torch.full(chunk.logits.shape, torch.nan, dtype=getattr(torch, out, dtype))
    fresh = fresh.to(DEVICE)
    written = lay_out(fresh, out) if out == "wide" else fresh
    one, several = (make_terms(chunk, EVERYTHING, entries) for entries in (None, 5))
    check_gradient(triton_backend, chunk, one, written)
    check_gradient(
        triton_backend, chunk, several, written.fill_(torch.nan), inplace=dtype == fresh.dtype
    )
    check_gradient(
        triton_backend, chunk, several._replace(row_max=None, coef=None), written.fill_(torch.nan)
    )


# Rows and columns: a part of a tile; a masked tile and some columns more; one whole tile; several
# tiles that several programs read, a masked one, and one column more.
SHAPES = ((4, 33), (4, 300), (3, 512), (3, 4200))
AXES: dict[str, tuple[Any, ...]] = {
    "transform": tuple(TRANSFORMS),
    "kind": ("normal", "low", "high", "holes"),
    "dtype": ("bfloat16", "float16", "float32"),
    "shape": SHAPES,
    "layout": ("", "wide", "every other"),
    "out": ("fresh", "wide", "bfloat16", "float16"),
}


def fits(setting: dict[str, Any]) -> bool:
    narrow = setting.get("out") in ("bfloat16", "float16")
    return not narrow or setting.get("dtype", "float32") == "float32"


@pytest.mark.parametrize("setting", covering(AXES, fits, involving=["shape"]), ids=setting_id)
@interpreted
def test_every_setting_at_every_shape(setting):
    run_setting(setting)


@pytest.mark.night
@pytest.mark.parametrize("setting", covering(AXES, fits), ids=setting_id)
@interpreted
def test_every_pair_of_settings(setting):
    run_setting(setting)


def run_setting(setting: dict[str, Any]) -> None:
    rows, width = setting["shape"]
    logits = make_logits(rows, width, getattr(torch, setting["dtype"]), setting["kind"])
    if setting["layout"]:
        logits = lay_out(logits, setting["layout"])
    valid = width if width == 512 else width - 7
    logits[:, valid:] = torch.nan  # what is masked may hold anything
    chunk = make_chunk(logits, valid, **TRANSFORMS[setting["transform"]])
    usual = (setting["transform"], setting["kind"]) == ("plain", "normal")
    check(chunk, out=setting["out"], ulps=4.0 if usual else 8.0)


@pytest.mark.parametrize("entries", [None, 5])
@interpreted
def test_one_coefficient_alone_is_something_that_is_asked(entries: int | None) -> None:
    """Kernels pass over rows of which nothing is: every coefficient must count for that."""
    count = len(EVERYTHING.coefficients)
    chunk = make_chunk(torch.randn(count + 2, 300, device=DEVICE), 290)
    terms = make_terms(chunk, EVERYTHING, entries)
    coef = torch.zeros(count, count + 2, device=DEVICE)
    asked = [row for row in range(count + 2) if row % 5 != 2]  # as in `make_terms`
    for row, of_coefficient in zip(asked[:count], coef, strict=True):
        of_coefficient[row] = 0.5 + row
    upstream = terms.upstream if entries else torch.zeros_like(terms.upstream)
    out = torch.full_like(chunk.logits, torch.nan)
    check_gradient(triton_backend, chunk, terms._replace(coef=coef, upstream=upstream), out)


@pytest.mark.parametrize("wanted", [{}, *({name: True} for name in vars(EVERYTHING))], ids=str)
@interpreted
def test_each_statistic_alone(wanted):
    chunk, spec = make_chunk(make_logits(4, 300, BF16, "holes"), 290), StatsSpec(**wanted)
    check_statistics(chunk, spec)
    check_gradient(
        triton_backend, chunk, make_terms(chunk, spec), torch.full_like(chunk.logits, torch.nan)
    )


@interpreted
def test_the_splits_of_a_row_merge_as_shards_do():
    logits = make_logits(3, 620, FP32)
    logits[0, :300] = -torch.inf  # the first split is empty there
    logits[1] = -torch.inf
    chunk, target = make_chunk(logits), torch.tensor([310, -1, 5], device=DEVICE)
    given = chunk, target, EVERYTHING, make_threshold(chunk, target)
    want = row_stats(reference, *given)
    for splits in (1, 2, 5):  # up to five tiles a program
        plan = common.Plan(splits, -(-620 // splits // 128) * 128, 4, 32)
        found = launch_stats(*given, plan)
        assert len(found) == splits
        got = merge(found, EVERYTHING)
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-4)


@interpreted
def test_several_programs_write_a_row():
    with mock.patch.object(common, "_SPAN", 4096):
        for dtype, valid in ((BF16, 4190), (FP32, 4090)):  # the second program's: some, none
            chunk = make_chunk(make_logits(3, 4200, dtype), valid)
            splits, _ = common.span_plan(4200, gradient._TILE_BYTES // dtype.itemsize)
            assert splits == 2
            out = torch.full_like(chunk.logits, torch.nan)
            check_gradient(triton_backend, chunk, make_terms(chunk, EVERYTHING), out)


@interpreted
def test_more_entries_than_a_program_writes_and_none():
    assert gradient._ENTRIES < 130
    chunk = make_chunk(make_logits(2, 300, FP16), 290)
    for entries in (130, 0):
        terms = make_terms(chunk, EVERYTHING, entries)
        check_gradient(triton_backend, chunk, terms, torch.full_like(chunk.logits, torch.nan))


@interpreted
def test_in_place_is_the_same():
    for dtype in DTYPES:
        logits = make_logits(3, 300, dtype)
        terms, out = make_terms(Chunk(logits, 290), EVERYTHING), torch.empty_like(logits)
        triton_backend.grad(Chunk(logits, 290), terms, out=out)
        triton_backend.grad(Chunk(logits, 290), terms, out=logits)
        assert torch.equal(logits, out)


@interpreted
def test_rows_far_apart_that_share_memory_and_none_at_all():
    far = lay_out(make_logits(4, 300, FP16), "far")
    check_statistics(make_chunk(far))
    terms = make_terms(make_chunk(far), EVERYTHING)
    check_gradient(triton_backend, make_chunk(far), terms, far_rows(4, 300, FP16))
    check_statistics(make_chunk(make_logits(1, 300, FP32).expand(3, -1)))
    for width in (1, 300):
        check(make_chunk(make_logits(1, width, BF16)))
        nothing = make_chunk(make_logits(0, width, BF16))
        check(nothing)
        assert check_statistics(nothing).shape == (len(EVERYTHING.fields), 0)


@interpreted
def test_a_shard_with_one_column_of_the_true_vocabulary_or_none():
    logits = make_logits(3, 64, FP32)
    spec, nobody = StatsSpec(entropy=True, smoothing=True), torch.full((3, 1), -1, device=DEVICE)
    alone = row_stats(triton_backend, Chunk(logits, 64), nobody[:, 0], spec)
    logits[:, 1:] = torch.nan
    check(make_chunk(logits, 1))
    logits[:] = torch.nan
    empty = row_stats(triton_backend, Chunk(logits, 0), nobody[:, 0], spec)
    assert torch.equal(empty[0], torch.full((3,), -torch.inf, device=DEVICE))
    assert torch.equal(empty[1:], torch.zeros(len(spec.fields) - 1, 3, device=DEVICE))
    assert torch.equal(merge(torch.stack([empty, alone]), spec), alone)
    out, ones = torch.full_like(logits, torch.nan), torch.ones(4, 3, device=DEVICE)
    terms = GradientTerms(nobody, ones[:1].t(), ones[0], ones, EVERYTHING)
    triton_backend.grad(Chunk(logits, 0), terms, out=out)
    assert (out == 0).all()


@interpreted
def test_nan_stays_in_its_row():
    logits, spec = make_logits(3, 300, FP32), StatsSpec(entropy=True)
    chunk, target = Chunk(logits, 300), torch.tensor([1, 2, 3], device=DEVICE)
    clean = row_stats(triton_backend, chunk, target, spec)
    for column in (5, 299):  # of the masked tile, and of the columns after it
        logits[1, column] = torch.nan
        got = row_stats(triton_backend, chunk, target, spec)
        assert got[1, 1].isnan()
        assert torch.equal(got[:, ::2], clean[:, ::2])
        logits[1, column] = 0.0


@interpreted
def test_rows_without_coefficients_are_zero_whatever_they_hold():
    logits = torch.full((2, 300), torch.nan, dtype=BF16, device=DEVICE)
    logits[0] = 1.0
    out = torch.full_like(logits, torch.nan)
    coef = torch.zeros(len(EVERYTHING.coefficients), 2, device=DEVICE)
    coef[0, 0] = 1.0
    target, shift = torch.tensor([[3], [4]], device=DEVICE), torch.tensor([8.0, torch.nan])
    upstream = torch.zeros(2, 1, device=DEVICE)
    terms = GradientTerms(target, upstream, shift.to(DEVICE), coef, EVERYTHING)
    triton_backend.grad(Chunk(logits, 300), terms, out=out)
    assert (out[0] > 0).all()
    assert (out[1] == 0).all()


@interpreted
def test_smoothing_reaches_every_finite_column_however_unlikely():
    logits = make_logits(2, 300, FP32)
    logits[:, 7], logits[:, 8] = -3e4, -torch.inf
    chunk = make_chunk(logits)
    terms = make_terms(chunk, StatsSpec(smoothing=True))
    out = check_gradient(triton_backend, chunk, terms, torch.full_like(logits, torch.nan))
    assert (out[:, 7] != 0).all()
    assert (out[:, 8] == 0).all()


@interpreted
def test_a_plan_covers_every_column_once():
    for dtype in (BF16, FP32):
        logits = torch.empty(0, dtype=dtype, device=DEVICE)
        for rows in (1, 7, 1000, 8192):
            for width in (0, 1, 33, 4096, 4097, 50257, 152064):
                plan = common.launch_plan(rows, width, logits)
                assert plan.splits * plan.columns >= width > (plan.splits - 1) * plan.columns or (
                    plan.splits == 1 and width == 0
                )
                assert plan.columns % plan.tile == 0
    if DEVICE == "cpu":
        assert [common.launch_plan(rows, 9000, logits).splits for rows in (1, 4, 33)] == [5, 5, 1]


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


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@interpreted
def test_the_tiled_forward_that_benchmarks_compare_gives_the_same_statistics(dtype):
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
    ulps = 2e4 if dtype == FP32 and DEVICE == "cuda" else 8.0
    assert_stats(got, plain, truth, spec, ulps=ulps)


@interpreted
def test_the_target_s_own_column_is_never_counted_as_larger():
    """Also if another path has computed the threshold an ulp below it."""
    logits, spec = torch.randn(4, 300, device=DEVICE), StatsSpec(rank=True)
    target = torch.tensor([0, 299, 17, 160], device=DEVICE)
    own = logits.gather(1, target.unsqueeze(1))
    below = own.squeeze(1).nextafter(torch.full_like(target, -torch.inf, dtype=torch.float32))
    found = row_stats(triton_backend, Chunk(logits, 300), target, spec, below)
    assert torch.equal(by_name(spec.fields, found)["higher"], (logits > own).sum(1).float())
