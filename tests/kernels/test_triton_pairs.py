"""The kernels for two sides against the reference in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch.utils.flop_counter import FlopCounterMode

from mcore_logprobs import linear_kl_div, vocab_parallel_kl_div
from mcore_logprobs.kernels import pairs, reference
from mcore_logprobs.kernels import triton as triton_backend
from mcore_logprobs.kernels.chunk import Chunk, Processing
from mcore_logprobs.kernels.pairs import KINDS, PairSpec, finalize_pair, merge_pairs
from mcore_logprobs.kernels.triton import common, pair_statistics, sides
from mcore_logprobs.kernels.triton.common import Plan
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.pair_source import beside
from tests.helpers.covering import covering
from tests.kernels.common import (
    DEVICE,
    TRANSFORMS,
    doubled,
    far_rows,
    lay_out,
    make_chunk,
    make_logits,
    setting_id,
)
from tests.kernels.interpreter import interpreted
from tests.kernels.two_sides import (
    BETA,
    check_pair,
    divergence_of,
    far_apart,
    masked_with_numbers,
    run_pair,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [(BF16, BF16), (FP32, FP32), (FP32, BF16), (FP16, FP32)]
# What `make_chunk` does with either side; one side's kernels are run with all of them.
HOW = ("plain", "scale", "softcap", "softcap, rows", "bias, rows", "all")
# Rows and columns: a part of a tile; a tile, a masked one and one column more; several tiles that
# several programs read, a masked one, and one column more.
AXES: dict[str, tuple[Any, ...]] = {
    "kind": KINDS,
    "dtypes": tuple(DTYPES),
    "values": ("normal", "low", "high", "holes"),
    "shape": ((3, 33), (3, 300), (3, 4200)),
    "student": HOW,
    "teacher": HOW,
    "student lies": ("", "wide", "every other"),
    "teacher lies": ("", "wide", "every other"),
    "out": ("fresh", "wide", "in place", "bfloat16"),
}


def fits(setting: dict[str, Any]) -> bool:
    """Where one side has -inf so has the other: the divergence has an exact answer."""
    holes = setting.get("values") == "holes"
    capped = {"softcap" in TRANSFORMS[setting[s]] for s in ("student", "teacher") if s in setting}
    other = setting.get("out") == "bfloat16" and setting.get("dtypes", DTYPES[1])[0] != FP32
    return not other and not (holes and len(capped) == 2)


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
    sides = []
    for side, dtype in zip(("student", "teacher"), setting["dtypes"], strict=True):
        logits = make_logits(rows, width, dtype, setting["values"])
        if setting[f"{side} lies"]:
            logits = lay_out(logits, setting[f"{side} lies"])
        logits[:, width - 7 :] = torch.nan if side == "student" else torch.inf  # masked
        sides.append(make_chunk(logits, width - 7, **TRANSFORMS[setting[side]]))
    out = torch.full_like(sides[0].logits, torch.nan)
    if setting["out"] == "in place":
        out = sides[0].logits
    elif setting["out"] == "bfloat16":
        out = out.bfloat16()
    elif setting["out"] == "wide":
        out = lay_out(out, "wide")
    ulps = 8.0 if setting["values"] == "normal" else 16.0
    check_pair(triton_backend, *sides, setting["kind"], out=out, ulps=ulps)


@pytest.mark.parametrize("kind", ["forward", "reverse", "cross_entropy"])
@interpreted
def test_finite_logits_are_not_bounded(kind):
    student, teacher = far_apart(kind, 1200)
    out = torch.empty(3, 1200, device=DEVICE)
    check_pair(triton_backend, student, teacher, kind, out=out, ulps=8)


@pytest.mark.parametrize("kind", ["forward", "reverse", "cross_entropy"])
@interpreted
def test_columns_that_are_masked_with_numbers_cost_nothing(kind):
    """Some lanes and groups have nothing else."""
    student, teacher = masked_with_numbers(kind, 1200)
    check_pair(
        triton_backend, student, teacher, kind, out=torch.empty(16, 1200, device=DEVICE), ulps=8
    )


@pytest.mark.parametrize("lacks", ["student", "teacher"])
@interpreted
def test_columns_that_one_side_lacks_cost_much_and_stay_finite(lacks):
    # A tile, a masked one and some columns more. The first is nothing but -inf on one side: its
    # columns are as far away as the others, whose probability is 0 too.
    student, teacher = make_logits(3, 1700, BF16), make_logits(3, 1700, BF16)
    holes = student if lacks == "student" else teacher
    holes[0, :1050], holes[1, ::3], holes[2] = -torch.inf, -torch.inf, -torch.inf
    both, upstream = (Chunk(student, 1700), Chunk(teacher, 1700)), torch.ones(3, device=DEVICE)
    for kind in KINDS:
        want, got = (
            run_pair(kernels, *both, kind, upstream, torch.empty(3, 1700, device=DEVICE))
            for kernels in (pairs, triton_backend)
        )
        # -1e4 is counted from a block's own maximum, which is not the reference's.
        for x, y in zip(got, want, strict=True):
            assert x.isfinite().all()
            torch.testing.assert_close(x, y, rtol=5e-3, atol=1e-3)
        assert got[0][2] == 0
        assert (got[2][2] == 0).all()


@interpreted
def test_a_shard_without_true_vocabulary_adds_nothing():
    both = [make_chunk(make_logits(2, 40, BF16)) for _ in range(2)]
    empty = [replace(side, valid=0) for side in both]
    for kind in KINDS:
        spec = PairSpec(kind, BETA)
        (whole,), (nothing,) = (triton_backend.pair_stats(*given, spec) for given in (both, empty))
        assert nothing[0::2][:2].isneginf().all()
        assert (nothing[1::2] == 0).all()
        merged, norms = merge_pairs(torch.stack([nothing, whole]), spec), finalize_pair(whole, spec)
        torch.testing.assert_close(merged, whole, rtol=1e-6, atol=1e-6)
        given, ones = (*empty, norms.softmax), torch.ones(2, device=DEVICE)
        out = torch.full_like(both[0].logits, torch.nan)
        triton_backend.pair_grad(*given, norms.value, ones, spec, out=out)
        assert (out == 0).all()
        assert (triton_backend.pair_sums(*given, spec) == 0).all()


@pytest.mark.parametrize("splits", [1, 2, 5])
@interpreted
def test_the_splits_of_a_row_merge_as_shards_do(splits):
    student, teacher = make_logits(3, 620, FP32), make_logits(3, 620, FP32)
    student[0, :300] = teacher[0, :300] = -torch.inf  # the first splits are empty there
    student[1] = -torch.inf
    plan = Plan(splits, -(-620 // splits // 128) * 128, 4, 32)  # up to five tiles a program
    both = make_chunk(student), make_chunk(teacher)
    for kind in ("forward", "reverse", "cross_entropy", "jsd"):  # the others' are jsd's
        spec = PairSpec(kind, BETA)
        stats = pair_statistics.launch_pair_stats(*both, spec, plan)
        assert len(stats) == splits
        want = finalize_pair(pairs.pair_stats(*both, spec, chunk_size=16)[0], spec)
        got = finalize_pair(merge_pairs(stats, spec), spec)
        torch.testing.assert_close(got.value, want.value, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(got.softmax, want.softmax, rtol=1e-6, atol=1e-6)
        assert torch.equal(got.usable, want.usable)
    sums = pair_statistics.launch_pair_sums(*both, want.softmax, PairSpec("jsd"), plan)
    exact = pairs.pair_sums(*both, want.softmax, PairSpec("jsd"), chunk_size=16)
    torch.testing.assert_close(sums.sum(0), exact, rtol=2e-6, atol=2e-6)


@interpreted
def test_several_programs_write_a_row():
    student, teacher = (
        make_chunk(make_logits(2, 2100, FP32)),
        make_chunk(make_logits(2, 2100, BF16)),
    )
    with mock.patch.object(common, "_SPAN", 2048):
        assert common.span_plan(2100, 1024)[0] == common.span_plan(2100, 2048)[0] == 2
        for kind in ("reverse", "jsd"):
            check_pair(
                triton_backend,
                student,
                teacher,
                kind,
                out=torch.empty_like(student.logits),
                ulps=8.0,
            )


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 33), (3, 2100)])
@interpreted
def test_a_gradient_fills_its_columns_and_no_others(rows, width):
    """Of the last row nothing is asked; the widest rows are written by two programs each."""
    sides = [make_chunk(make_logits(rows, width, FP32)) for _ in range(2)]
    home = torch.full((rows, width + 32), 7.0, device=DEVICE)
    out = home[:, 16:-16]
    with mock.patch.object(common, "_SPAN", 2048):
        check_pair(triton_backend, *sides, "forward", out=out, ulps=8.0)
    assert (home[:, :16] == 7).all()
    assert (home[:, -16:] == 7).all()


@pytest.mark.parametrize("kind", ["forward", "jsd"])
@interpreted
def test_masked_columns_of_a_row_with_nan_have_no_gradient(kind):
    sides = [make_chunk(make_logits(2, 40, FP32), 37) for _ in range(2)]
    sides[0].logits[0, 3] = torch.nan
    grad = run_pair(triton_backend, *sides, kind, torch.ones(2, device=DEVICE), sides[0].logits)[2]
    assert grad[0, :37].isnan().all()
    assert (grad[:, 37:] == 0).all()


@interpreted
def test_rows_far_apart_that_share_memory_and_none_at_all():
    student, teacher = make_logits(4, 300, FP16), make_logits(4, 300, FP32)
    far, out = make_chunk(lay_out(student, "far")), far_rows(4, 300, FP16)
    check_pair(triton_backend, far, make_chunk(teacher), "jsd", out=out, ulps=8.0)
    check_pair(
        triton_backend, make_chunk(teacher), far, "reverse", out=torch.empty_like(teacher), ulps=8.0
    )
    # Divergences of about 1: a gradient takes over the rounding of its row's.
    one = make_chunk((teacher[:1] / 3.0).expand(3, -1))
    other = make_chunk(make_logits(3, 300, FP32) / 3.0)
    check_pair(triton_backend, other, one, "reverse", out=torch.empty_like(other.logits), ulps=8.0)
    nothing = make_logits(0, 300, BF16)
    for kind in ("forward", "jsd"):
        given = make_chunk(nothing), make_chunk(nothing), kind, torch.zeros(0, device=DEVICE)
        value, _, grad = run_pair(triton_backend, *given, torch.empty_like(nothing))
        assert (value.shape, grad.shape) == ((0,), (0, 300))


@pytest.mark.parametrize("kind", KINDS)
@interpreted
def test_a_row_with_nan_or_inf_is_nan_and_no_other(kind):
    student, teacher = make_logits(10, 300, FP32), make_logits(10, 300, BF16)
    both, ones = (make_chunk(student), make_chunk(teacher)), torch.ones(10, device=DEVICE)
    clean = [replace(side, logits=side.logits[:2].clone()) for side in both]
    want = run_pair(triton_backend, *clean, kind, ones[:2], torch.empty_like(student[:2]))
    for row in (2, 6):  # of the second four nothing is asked
        student[row, 7] = teacher[row + 1, 299] = torch.nan
        student[row + 2, 298], teacher[row + 3] = torch.inf, torch.inf
    ones[6:] = 0.0
    value, _, grad = run_pair(triton_backend, *both, kind, ones, torch.full_like(student, 7.0))
    assert value[2:].isnan().all()
    assert grad[2:6].isnan().all()
    assert (grad[6:] == 0).all()
    assert torch.equal(value[:2], want[0])
    assert torch.equal(grad[:2], want[2])


@pytest.mark.parametrize("kind", ["jsd", "skewed_forward", "skewed_reverse", "total_variation"])
@interpreted
def test_rows_that_are_masked_throughout_with_the_least_number_are_equal(kind):
    """A sum of both sides' maxima overflows there."""
    masked = torch.full((2, 40), torch.finfo(FP32).min, device=DEVICE)
    sides, ones = [make_chunk(masked.clone()) for _ in range(2)], torch.ones(2, device=DEVICE)
    value, _, grad = run_pair(triton_backend, *sides, kind, ones, torch.full_like(masked, 7.0))
    assert (value == 0).all()
    assert (grad == 0).all()


@interpreted
def test_equal_distributions_differ_by_nothing_and_close_ones_keep_their_digits():
    logits = make_logits(2, 1100, FP32)
    near = logits + 1e-2 * torch.randn(2, 1100, device=DEVICE)
    both, upstream = (make_chunk(near), make_chunk(logits)), torch.ones(2, device=DEVICE)
    for kind in ("forward", "reverse", "jsd"):
        out = torch.empty_like(logits)
        value, _, grad = run_pair(
            triton_backend, both[1], make_chunk(logits + 0), kind, upstream, out
        )
        assert (value == 0).all()
        assert (grad == 0).all()
        exact = run_pair(pairs, *map(doubled, both), kind, upstream.double(), out.double())
        got = run_pair(triton_backend, *both, kind, upstream, out)
        assert exact[0].max() < 2e-4
        assert (got[0] - exact[0]).abs().max() < 5e-7


@pytest.mark.parametrize("apart", [1e-4, 1.0])
@interpreted
def test_close_distributions_keep_their_digits_relative_to_themselves(apart):
    rows, width = 3, 2100
    logits = torch.randn(rows, width, device=DEVICE) * 2
    near = logits + apart * torch.randn(rows, width, device=DEVICE)
    # Groups, tiles and splits whose maxima differ, and columns that neither side has.
    slope = torch.linspace(0, 20, width, device=DEVICE)
    near[1], logits[1] = near[1] + slope, logits[1] + slope
    near[2, ::3] = logits[2, ::3] = -torch.inf
    temperature = torch.linspace(0.5, 2.0, rows, device=DEVICE)
    both = [
        Chunk(x, width - 5, Processing.of(0.5, None, temperature)) for x in (near, logits)
    ]  # fmt: skip
    for kind in ("forward", "reverse", "skewed_forward", "skewed_reverse"):
        want = divergence_of(pairs, *map(doubled, both), kind)
        for kernels in (pairs, triton_backend):
            got = divergence_of(kernels, *both, kind)
            torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=0.0)
        plan, spec = Plan(3, 768, 4, 32), PairSpec(kind, BETA)
        if not spec.two_pass:
            stats = pair_statistics.launch_pair_stats(*both, spec, plan)
            multipliers = tuple(side.processing.multiplier for side in both)
            merged = merge_pairs(stats, spec, multipliers)
            got = finalize_pair(merged, spec).value
            torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=0.0)


@triton.jit
def _mixture_kernel(gap_ptr, out_ptr, beta, kept, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    gap = tl.load(gap_ptr + at)
    p_over, q_over = sides.over_mixture(-1.0 - gap, -1.0 + 0.0 * gap, (beta, kept))
    tl.store(out_ptr + at, p_over)
    tl.store(out_ptr + SIZE + at, q_over)


@pytest.mark.parametrize("beta", [0.5, 0.001, 0.9, 1e-5, 1 - 1e-5])
@interpreted
def test_logarithms_over_the_mixture_are_right_where_the_two_are_close_and_far(beta):
    gap = torch.cat([torch.logspace(-6, 3, 255), torch.zeros(1)])
    gap = torch.cat([gap, -gap]).to(DEVICE)  # log q - log p
    got = torch.empty(2, 512, device=DEVICE)
    _mixture_kernel[(1,)](gap, got, beta, 1.0 - beta, SIZE=512)
    logp, logq = (-1.0 - gap).double(), torch.full_like(gap, -1.0).double()
    mixture = torch.logaddexp(logq + math.log(beta), logp + math.log1p(-beta))
    gap, exact = logq - logp, torch.stack([logp - mixture, logq - mixture])
    allowed = 1e-6 * exact.abs() + torch.where(exact < 0, 5e-7 * gap.abs(), 0.0)
    allowed = allowed + 2e-16  # float64's own
    assert ((got.double() - exact).abs() <= allowed).all()


@interpreted
def test_triton_serves_a_pair_only_if_it_serves_both():
    logits = make_logits(3, 8, BF16)

    def of_a_pair(student: torch.Tensor, teacher: torch.Tensor, backend: str) -> object:
        sides = (given_logits(side, backend=backend) for side in (student, teacher))
        return beside(*sides).backend

    assert of_a_pair(logits, logits.float(), "triton") is triton_backend
    default = triton_backend if DEVICE == "cuda" else reference
    assert of_a_pair(logits, logits, "auto") is default
    assert of_a_pair(logits, logits, "torch") is reference
    square = torch.randn(3, 3, device=DEVICE)
    hidden, weight = torch.randn(2, 3, 4, device=DEVICE)
    for refused, reason in ((square.double(), "float64"), (square.t(), "last stride is 1")):
        assert of_a_pair(square, refused, "auto") is reference
        for pair in ((square, refused), (refused, square)):
            with pytest.raises(ValueError, match=reason):
                vocab_parallel_kl_div(*pair, backend="triton")
        with FlopCounterMode(display=False) as flops, pytest.raises(ValueError, match=reason):
            linear_kl_div(hidden, weight, refused, backend="triton")
        assert flops.get_total_flops() == 0
