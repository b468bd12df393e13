"""The kernels for two sides against the reference in float64, and behind the public operations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mcore_logprobs import linear_kl_div, vocab_parallel_kl_div, vocab_parallel_soft_cross_entropy
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels import pairs, reference
from mcore_logprobs.kernels import triton as triton_backend
from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.pairs import KINDS, PairSpec, finalize_pair, merge_pairs
from mcore_logprobs.kernels.triton import pair_statistics, sides
from mcore_logprobs.kernels.triton.common import Plan
from mcore_logprobs.ops.source import given_logits
from tests.helpers.distributed import get_pool
from tests.helpers.oracles import assert_no_worse
from tests.kernels.common import (
    DEVICE,
    TRANSFORMS,
    doubled,
    far_rows,
    lay_out,
    make_chunk,
    make_logits,
)
from tests.kernels.interpreter import interpreted
from tests.test_divergences import of_shards

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [(BF16, BF16), (FP32, FP32), (FP32, BF16), (FP16, FP32)]
BETA = 0.3


def _run(kernels: Any, student: Chunk, teacher: Chunk, kind: str, upstream: Tensor, out: Tensor):
    """(value, KL from the mixture, gradient) of whole rows, by these kernels."""
    spec, size = PairSpec(kind, BETA), {"chunk_size": 16}
    stats = kernels.pair_stats(student, teacher, spec, **size)
    done = finalize_pair(merge_pairs(stats, spec), spec)
    value, inner = done.value, done.value
    norms = (done.softmax,)
    if spec.two_pass:
        from_teacher, inner = kernels.pair_sums(student, teacher, *norms, spec, **size)
        value = BETA * from_teacher + (1.0 - BETA) * inner
    upstream = torch.where(done.usable, upstream, 0.0)
    kernels.pair_grad(student, teacher, *norms, inner, upstream, spec, out=out, **size)
    return torch.where(done.usable, value, 0.0), inner, out


def _check(
    student: Chunk,
    teacher: Chunk,
    kinds: tuple[str, ...] = KINDS,
    *,
    out: Tensor | None = None,
    ulps: float = 8.0,
) -> None:
    before = student.logits.clone(), teacher.logits.clone()
    rows, width = student.logits.shape
    upstream = torch.randn(rows, device=DEVICE)
    upstream[2::5] = 0.0
    for kind in kinds:
        exact = _run(
            pairs, doubled(student), doubled(teacher), kind, upstream.double(),
            torch.empty(rows, width, dtype=torch.float64, device=DEVICE),
        )  # fmt: skip
        fresh = torch.full_like(student.logits if out is None else out, torch.nan)
        plain = _run(pairs, student, teacher, kind, upstream, fresh)
        written = torch.full_like(fresh, torch.nan) if out is None else out
        got = _run(triton_backend, student, teacher, kind, upstream, written)
        assert got[0].dtype == FP32
        for name, *three in zip(("value", "inner", "gradient"), got, plain, exact, strict=True):
            assert_no_worse(*three, name=f"{kind} {name}", ulps=ulps)
        assert (got[2][:, student.valid :] == 0).all()
        assert (got[2][2::5] == 0).all()
    for side, copy in zip((student, teacher), before, strict=True):
        assert torch.equal(side.logits.nan_to_num(7.0), copy.nan_to_num(7.0)), "modified"


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@interpreted
def test_widths_that_are_no_multiple_of_the_tile(dtypes):
    for width in (1, 33, 1152):
        _check(*(make_chunk(make_logits(3, width, dtype)) for dtype in dtypes))


@pytest.mark.parametrize("kind", KINDS)
@interpreted
def test_several_tiles_and_several_programs_a_row(kind):
    student, teacher = make_logits(3, 9000, FP32), make_logits(3, 9000, BF16)
    plan = sides.pair_plan(student, teacher, 9000)
    if DEVICE == "cpu":
        assert (plan.splits, plan.columns // plan.tile) == (3, 2)
    _check(make_chunk(student), make_chunk(teacher), (kind,))


@interpreted
def test_one_program_walks_over_all_tiles_where_rows_are_many():
    student, teacher = (make_logits(32, 5000, BF16) for _ in range(2))
    if DEVICE == "cpu":
        assert sides.pair_plan(student, teacher, 5000).splits == 1
    _check(make_chunk(student), make_chunk(teacher), ("reverse",))


@pytest.mark.parametrize("transform", [*TRANSFORMS, "rows"])
@interpreted
def test_scale_softcap_bias_and_temperature_of_eithermake_chunk(transform):
    options = {"rows": True} if transform == "rows" else TRANSFORMS[transform]
    student, teacher = make_logits(3, 1152, FP32), make_logits(3, 1152, BF16)
    warm = make_chunk(student, 1100, temperature=1.3)
    _check(make_chunk(student, 1100, **options), make_chunk(teacher, 1100), ("forward", "jsd"))
    _check(warm, make_chunk(teacher, 1100, **options), ("reverse", "cross_entropy"))
    if transform in ("bias", "softcap"):
        both = (make_chunk(x, 1100, rows=True, **options) for x in (student, teacher))
        _check(*both, ("jsd",))


@pytest.mark.parametrize("kind", ["low", "high", "holes"])
@interpreted
def test_extreme_logits(kind):
    # Where one side has -inf so has the other: the divergence has an exact answer.
    for dtypes, kinds in zip(DTYPES[1:3], (KINDS[::2], KINDS[1::2]), strict=True):
        _check(*(make_chunk(make_logits(4, 300, d, kind)) for d in dtypes), kinds, ulps=16)


@interpreted
def test_columns_that_one_side_lacks_cost_much_and_stay_finite():
    # Several tiles, of which the first are nothing but -inf on one side: their columns are as far
    # away as the others, whose probability is 0 too.
    for lacks in ("student", "teacher"):
        student, teacher = make_logits(4, 5000, BF16), make_logits(4, 5000, BF16)
        holes = student if lacks == "student" else teacher
        holes[:2, :3000], holes[2, ::3], holes[3] = -torch.inf, -torch.inf, -torch.inf
        upstream = torch.ones(4, device=DEVICE)
        for kind in KINDS:
            arguments = Chunk(student, 5000), Chunk(teacher, 5000), kind, upstream
            want = _run(pairs, *arguments, torch.empty(4, 5000, device=DEVICE))
            got = _run(triton_backend, *arguments, torch.empty(4, 5000, device=DEVICE))
            # -1e4 is counted from a block's own maximum, which is not the reference's.
            for x, y in zip(got, want, strict=True):
                assert x.isfinite().all()
                torch.testing.assert_close(x, y, rtol=5e-3, atol=1e-3)
            assert got[0][3] == 0
            assert (got[2][3] == 0).all()


@interpreted
def test_masked_columns_count_for_nothing_whatever_they_hold():
    student, teacher = make_logits(4, 1152, FP32), make_logits(4, 1152, BF16)
    for valid in (1024, 1000, 1):
        student[:, valid:], teacher[:, valid:] = torch.nan, torch.inf
        _check(make_chunk(student, valid), make_chunk(teacher, valid))


@interpreted
def test_shards_merge_and_one_without_true_vocabulary_adds_nothing():
    student, teacher = (make_logits(5, 300, BF16) for _ in range(2))
    for kind in KINDS:
        spec = PairSpec(kind, BETA)
        both = make_chunk(student), make_chunk(teacher)
        (whole,) = triton_backend.pair_stats(*both, spec)
        halves = torch.cat(
            [
                triton_backend.pair_stats(
                    *(make_chunk(x[:, columns], min(width, 150)) for x in (student, teacher)), spec
                )
                for columns, width in ((slice(150), 150), (slice(150, 300), 150), (slice(9), 0))
            ]
        )
        assert torch.equal(halves[2][0::2][:2], torch.full((2, 5), -torch.inf, device=DEVICE))
        assert torch.equal(halves[2][1::2], torch.zeros(2, 5, device=DEVICE))
        got, want = (finalize_pair(stats, spec) for stats in (merge_pairs(halves, spec), whole))
        torch.testing.assert_close(got.value, want.value, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(got.softmax, want.softmax, rtol=1e-6, atol=1e-6)
        out = torch.full_like(student, torch.nan)
        nothing = (make_chunk(student, 0), make_chunk(teacher, 0), want.softmax)
        triton_backend.pair_grad(*nothing, want.value, torch.ones(5, device=DEVICE), spec, out=out)
        assert (out == 0).all()
        assert (triton_backend.pair_sums(*nothing, spec) == 0).all()


@pytest.mark.parametrize("splits", [1, 2, 5])
@interpreted
def test_the_splits_of_a_row_merge_as_shards_do(splits):
    student, teacher = make_logits(3, 2500, FP32), make_logits(3, 2500, FP32)
    student[0, :1000] = teacher[0, :1000] = -torch.inf  # the first splits are empty there
    student[1] = -torch.inf
    plan = Plan(splits, -(-2500 // splits // 512) * 512, 4, 128)
    both = make_chunk(student), make_chunk(teacher)
    for kind in KINDS:
        spec = PairSpec(kind, BETA)
        stats = pair_statistics.launch_pair_stats(*both, spec, plan)
        assert len(stats) == splits
        want = finalize_pair(pairs.pair_stats(*both, spec, chunk_size=16)[0], spec)
        got = finalize_pair(merge_pairs(stats, spec), spec)
        torch.testing.assert_close(got.value, want.value, rtol=2e-6, atol=2e-6)
        assert torch.equal(got.usable, want.usable)
    sums = pair_statistics.launch_pair_sums(*both, want.softmax, PairSpec("jsd"), plan)
    exact = pairs.pair_sums(*both, want.softmax, PairSpec("jsd"), chunk_size=16)
    torch.testing.assert_close(sums.sum(0), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("layout", ["wide", "every other", "far"])
@interpreted
def test_rows_with_a_stride(layout):
    rows = 2 if layout == "far" else 6
    student, teacher = make_logits(rows, 1152, BF16), make_logits(rows, 1152, FP32)
    far = far_rows(rows, 1152, BF16) if layout == "far" else lay_out(student, "wide")
    _check(make_chunk(lay_out(student, layout)), make_chunk(teacher), ("jsd",), out=far)
    _check(make_chunk(student), make_chunk(lay_out(teacher, layout)), ("reverse",))


@interpreted
def test_rows_that_share_memory_and_none_at_all():
    # Divergences of about 1: a gradient takes over the rounding of its row's.
    student, teacher = make_logits(4, 300, FP32) / 3.0, make_logits(1, 300, FP32) / 3.0
    _check(make_chunk(student), make_chunk(teacher.expand(4, -1)))
    nothing = make_logits(0, 300, BF16)
    for kind in KINDS:
        none = make_chunk(nothing), make_chunk(nothing)
        upstream = torch.zeros(0, device=DEVICE)
        value, _, grad = _run(triton_backend, *none, kind, upstream, torch.empty_like(nothing))
        assert (value.shape, grad.shape) == ((0,), (0, 300))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@interpreted
def test_in_place_and_into_another_dtype(dtype):
    student, teacher = make_logits(6, 1152, dtype), make_logits(6, 1152, BF16)
    upstream = torch.randn(6, device=DEVICE)
    for kind in KINDS if dtype == FP32 else ("forward", "jsd"):
        fresh, over = torch.empty_like(student), student.clone()
        _run(triton_backend, make_chunk(student), make_chunk(teacher), kind, upstream, fresh)
        _run(triton_backend, make_chunk(over), make_chunk(teacher), kind, upstream, over)
        assert torch.equal(over, fresh)
    wide = make_logits(6, 1152, FP32)
    _check(make_chunk(wide), make_chunk(teacher), ("forward",), out=torch.empty_like(student))


@pytest.mark.parametrize("kind", KINDS)
@interpreted
def test_a_row_with_nan_or_inf_is_nan_and_no_other(kind):
    student, teacher = make_logits(8, 1152, FP32), make_logits(8, 1152, BF16)
    both = make_chunk(student), make_chunk(teacher)
    ones = torch.ones(8, device=DEVICE)
    clean = _run(triton_backend, *both, kind, ones, torch.empty_like(student))
    student[0, 7] = teacher[1, 1150] = torch.nan
    student[2, 1151] = teacher[3, 0] = torch.inf
    student[4], teacher[5] = torch.nan, torch.inf
    upstream = torch.ones(8, device=DEVICE)
    for asked in (True, False):
        upstream[:6] = float(asked)
        out = torch.full_like(student, 7.0)
        value, _, grad = _run(triton_backend, *both, kind, upstream, out)
        assert value[:6].isnan().all()
        assert grad[:6].isnan().all() if asked else (grad[:6] == 0).all()
        assert torch.equal(value[6:], clean[0][6:])
        assert torch.equal(grad[6:], clean[2][6:])


@interpreted
def test_equal_distributions_differ_by_nothing_and_close_ones_keep_their_digits():
    logits = make_logits(3, 2100, FP32)
    near = logits + 1e-2 * torch.randn(3, 2100, device=DEVICE)
    for kind in ("forward", "reverse", "jsd"):
        upstream, out = torch.ones(3, device=DEVICE), torch.empty_like(logits)
        value, _, grad = _run(
            triton_backend, make_chunk(logits), make_chunk(logits + 0), kind, upstream, out
        )
        assert (value == 0).all()
        assert (grad == 0).all()
        both = make_chunk(near), make_chunk(logits)
        exact = _run(pairs, *map(doubled, both), kind, upstream.double(), out.double())
        got = _run(triton_backend, *both, kind, upstream, out)
        assert exact[0].max() < 2e-4
        assert (got[0] - exact[0]).abs().max() < 5e-7


@triton.jit
def _mixture_kernel(gap_ptr, out_ptr, beta, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    gap = tl.load(gap_ptr + at)
    p_over, q_over = sides.over_mixture(-1.0 - gap, -1.0 + 0.0 * gap, beta)
    tl.store(out_ptr + at, p_over)
    tl.store(out_ptr + SIZE + at, q_over)


@pytest.mark.parametrize("beta", [0.5, 0.001, 0.9])
@interpreted
def test_logarithms_over_the_mixture_are_right_where_the_two_are_close_and_far(beta):
    gap = torch.cat([torch.logspace(-6, 3, 255), torch.zeros(1)])
    gap = torch.cat([gap, -gap]).to(DEVICE)  # log q - log p
    got = torch.empty(2, 512, device=DEVICE)
    _mixture_kernel[(1,)](gap, got, beta, SIZE=512)
    logp, logq = (-1.0 - gap).double(), torch.full_like(gap, -1.0).double()
    mixture = torch.logaddexp(logq + math.log(beta), logp + math.log1p(-beta))
    gap, exact = logq - logp, torch.stack([logp - mixture, logq - mixture])
    larger = exact.amax(0)  # of the likelier side; M is that much smaller
    allowed = 1e-6 * exact.abs() + torch.where(exact < 0, 5e-7 * gap.abs(), 0.0)
    # Where M is far smaller than either, 1 + w (exp(-|gap|) - 1) has cancelled.
    allowed = allowed + torch.where(larger > 0.3, 2e-7 * larger.exp(), 0.0)
    assert ((got.double() - exact).abs() <= allowed).all()


# ---- the public operations ----


def _operation(kind: str, student: Tensor, teacher: Tensor, **options: Any) -> Tensor:
    if kind == "cross_entropy":
        return vocab_parallel_soft_cross_entropy(student, teacher, **options)
    return vocab_parallel_kl_div(student, teacher, kind=kind, beta=BETA, **options)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@interpreted
def test_operations_on_logits_agree_with_torch(dtypes):
    # [s, b, V] seen as [b, s, V], or as it is: one block; [b, s, V] without one position: three.
    raw, other = (make_logits(12, 300, dtype).view(4, 3, 300) for dtype in dtypes)
    mask = torch.tensor([[True, True, False], [True] * 3, [False, True, True]], device=DEVICE)
    upstream = torch.randn(3, 3, device=DEVICE)
    upstream[1, 1] = 0.0
    options = {
        "temperature": torch.rand(3, 1, device=DEVICE) + 0.5, "teacher_temperature": 1.2,
        "mask": mask, "vocab_size": 280,
    }  # fmt: skip

    def seen(x: Tensor, first: int) -> Tensor:
        return x.transpose(0, 1)[:, first : first + 3]

    def as_it_lies(x: Tensor, first: int) -> Tensor:
        return x[first : first + 3]

    def in_blocks(x: Tensor, first: int) -> Tensor:
        return x.view(3, 4, 300)[:, first : first + 3]

    assert len(list(given_logits(in_blocks(raw, 0)).chunks())) == 3
    # Every kind in every layout, each with one pair of dtypes; with all of them: widths, above.
    cases = list(itertools.product(KINDS, (seen, as_it_lies, in_blocks)))
    for kind, layout in cases[DTYPES.index(dtypes) :: len(DTYPES)]:
        results = []
        teacher = layout(other, 1)
        for backend in ("torch", "triton"):
            leaf = raw.clone().requires_grad_()
            logits = layout(leaf, 0)
            value = _operation(kind, logits, teacher, backend=backend, **options)
            value.backward(upstream)
            results.append((value, leaf.grad))
        torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=2e-6)
        # A difference of two roundings of the gradient's dtype.
        step = torch.finfo(dtypes[0]).eps if dtypes[0] != FP32 else 1e-5
        torch.testing.assert_close(results[1][1], results[0][1], rtol=step, atol=1e-6)


@pytest.mark.parametrize("given", [True, False])
@interpreted
def test_the_fused_path_agrees_with_torch(given):
    hidden, weight = torch.randn(7, 16, device=DEVICE), torch.randn(300, 16, device=DEVICE)
    teacher: dict[str, Any] = {"teacher_logits": torch.randn(7, 300, device=DEVICE)}
    if not given:
        teacher = {
            "teacher_hidden": torch.randn(7, 8, device=DEVICE),
            "teacher_weight": torch.randn(300, 8, device=DEVICE),
            "teacher_bias": torch.randn(300, device=DEVICE),
            "teacher_softcap": 3.0,
        }
    for kind in ("forward", "reverse", "jsd"):
        results = []
        for backend in ("torch", "triton"):
            leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
            value = linear_kl_div(
                *leaves, **teacher, kind=kind, softcap=5.0, temperature=0.7, vocab_size=290,
                chunk_size=4, backend=backend,
            )  # fmt: skip
            (value * torch.linspace(0.5, 2.0, 7, device=DEVICE)).sum().backward()
            results.append((value, *(leaf.grad for leaf in leaves)))
        for torchs, tritons in zip(*results, strict=True):
            torch.testing.assert_close(tritons, torchs, rtol=1e-4, atol=1e-5)


@interpreted
def test_triton_serves_a_pair_only_if_it_serves_both():
    logits = make_logits(3, 8, BF16)
    assert backends.select("triton", logits, logits.float()) is triton_backend
    default = triton_backend if DEVICE == "cuda" else reference
    assert backends.select("auto", logits, logits) is default
    assert backends.select("torch", logits, logits) is reference
    square = torch.randn(3, 3, device=DEVICE)
    hidden, weight = torch.randn(2, 3, 4, device=DEVICE)
    for refused, reason in ((square.double(), "float64"), (square.t(), "last stride is 1")):
        assert backends.select("auto", square, refused) is reference
        for pair in ((square, refused), (refused, square)):
            with pytest.raises(ValueError, match=reason):
                vocab_parallel_kl_div(*pair, backend="triton")
        with FlopCounterMode(display=False) as flops, pytest.raises(ValueError, match=reason):
            linear_kl_div(hidden, weight, refused, backend="triton")
        assert flops.get_total_flops() == 0


# ---- over two ranks ----


@pytest.mark.skipif(DEVICE == "cuda", reason="the ranks' tensors are the CPU's: interpreted alone")
@interpreted
def test_shards_of_two_ranks_agree_with_torch():
    ranks = get_pool(2)  # of the process that interprets, and so they do
    student, teacher = torch.randn(5, 300) * 3, (torch.randn(5, 300) * 3).bfloat16()
    upstream = torch.randn(5)
    for kind in KINDS:
        options = {"vocab_size": 290, "temperature": 0.8}
        torchs, tritons = (
            ranks.run(of_shards, student, teacher, upstream, kind, backend=backend, **options)
            for backend in ("torch", "triton")
        )
        for got, want in zip(tritons, torchs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
        assert torch.equal(tritons[0][0], tritons[1][0])
