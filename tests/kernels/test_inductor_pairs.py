"""The compiled CPU kernels for two sides against the reference in float64.

Each kind of divergence and of tensor (dtype, contiguous or not) compiles kernels of its own, in a
few seconds each. By day most cases share those of float32 logits with padding, of which no chunk is
contiguous.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mcore_logprobs import linear_kl_div, vocab_parallel_kl_div
from mcore_logprobs.kernels import budgets, inductor, pairs, reference
from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.inductor import common
from mcore_logprobs.kernels.inductor import pairs as compiled
from mcore_logprobs.kernels.pairs import KINDS, PairSpec
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.pair_source import beside
from tests.helpers.covering import covering
from tests.kernels.common import TRANSFORMS, doubled, lay_out, make_chunk, make_logits, setting_id
from tests.kernels.two_sides import (
    check_pair,
    divergence_of,
    far_apart,
    masked_with_numbers,
    run_pair,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCK = compiled._BLOCK
# Columns: two whole blocks, a part of a third, and masked ones.
WIDTH, VALID = 2 * BLOCK + 90, 2 * BLOCK + 83


pytestmark = pytest.mark.usefixtures("must_compile")


@pytest.fixture
def seen(monkeypatch) -> list[str]:
    """The compiled kernels that were called, by name."""
    names: list[str] = []

    def spy(function: Any, *args: Any) -> Any:
        result = common.call_compiled(function, *args)
        names.append(function.__name__.strip("_"))
        return result

    monkeypatch.setattr(compiled, "call_compiled", spy)
    return names


def expected_kernels(kind: str, *, in_place: bool = False) -> list[str]:
    if common.vector_bits() == 0:  # the reference's then
        return []
    sums = ["pair_sums_kernel"] if PairSpec(kind).two_pass else []
    return ["pair_stats_kernel", *sums, f"pair_grad_{'in_place_' if in_place else ''}kernel"]


AXES: dict[str, tuple[Any, ...]] = {
    "kind": KINDS,
    "dtypes": ((BF16, BF16), (FP32, FP32), (FP32, BF16), (FP16, FP32)),
    "values": ("normal", "low", "high", "holes"),
    "valid": (VALID, 2 * BLOCK, WIDTH),
    "student": ("plain", "scale", "rows"),
    "teacher": ("plain", "scale", "rows"),
    "student lies": ("", "wide"),
    "teacher lies": ("", "every other"),
    "out": ("fresh", "wide", "in place"),
}


def run_setting(setting: dict[str, Any], seen: list[str]) -> None:
    sides, valid = [], setting["valid"]
    for side, dtype in zip(("student", "teacher"), setting["dtypes"], strict=True):
        logits = make_logits(5, WIDTH, dtype, setting["values"])
        if setting[f"{side} lies"]:
            logits = lay_out(logits, setting[f"{side} lies"])
        logits[:, valid:] = torch.nan if side == "student" else torch.inf  # masked
        sides.append(make_chunk(logits, valid, **TRANSFORMS[setting[side]]))
    in_place = setting["out"] == "in place"
    out = sides[0].logits if in_place else torch.full_like(sides[0].logits, torch.nan)
    if setting["out"] == "wide":
        out = lay_out(out, "wide")
    ulps = 8.0 if setting["values"] == "normal" else 16.0
    check_pair(inductor, *sides, setting["kind"], out=out, ulps=ulps)
    assert seen == expected_kernels(setting["kind"], in_place=in_place)


@pytest.mark.night
@pytest.mark.parametrize("setting", covering(AXES, lambda setting: True), ids=setting_id)
def test_every_pair_of_settings(setting, seen):
    run_setting(setting, seen)


def by_day(kind: str, dtypes: tuple[torch.dtype, torch.dtype], *others: Any) -> dict[str, Any]:
    return dict(zip(AXES, (kind, dtypes, *others), strict=True))


@pytest.mark.parametrize(
    "setting",
    [
        by_day("forward", (FP32, BF16), "holes", VALID, "rows", "rows", "wide", "", "in place"),
        by_day("jsd", (FP32, FP32), "low", VALID, "scale", "scale", "", "", "fresh"),
    ],
    ids=setting_id,
)
def test_settings(setting, seen):
    run_setting(setting, seen)


@pytest.mark.parametrize(
    ("kind", "beta"),
    [
        ("forward", 0.3),
        ("jsd", 0.5),
        pytest.param("jsd", 0.01, marks=pytest.mark.night),
        pytest.param("reverse", 0.3, marks=pytest.mark.night),
        pytest.param("skewed_forward", 0.1, marks=pytest.mark.night),
        pytest.param("skewed_forward", 0.99999, marks=pytest.mark.night),
        pytest.param("skewed_reverse", 0.1, marks=pytest.mark.night),
        pytest.param("skewed_reverse", 0.99999, marks=pytest.mark.night),
        pytest.param("total_variation", 0.3, marks=pytest.mark.night),
    ],
)
@pytest.mark.parametrize("apart", [1e-4, 1e-2, 2.0])
def test_close_distributions_keep_their_digits(kind, beta, apart, seen):
    logits = 2.0 * torch.randn(3, WIDTH)
    near = logits + apart * torch.randn(3, WIDTH)
    slope = torch.linspace(0, 20, WIDTH)  # blocks whose maxima differ
    near[1], logits[1] = near[1] + slope, logits[1] + slope
    near[2, ::3] = logits[2, ::3] = -torch.inf
    both = [make_chunk(x, VALID, rows=True, logit_scale=0.5) for x in (near, logits)]
    ones = torch.ones(3)

    def run(kernels: Any, sides: list[Chunk], upstream: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(sides[0].logits)
        _, _, grad = run_pair(kernels, *sides, kind, upstream, out, beta)
        return divergence_of(kernels, *sides, kind, beta).double(), grad.double()

    exact = run(pairs, [doubled(side) for side in both], ones.double())
    plain, got = run(pairs, both, ones), run(inductor, both, ones)
    torch.testing.assert_close(got[0], exact[0], rtol=2e-3, atol=0.0)

    def error(found: tuple[Tensor, Tensor]) -> Tensor:
        return (found[1] - exact[1]).abs().sum(1) / exact[1].abs().sum(1)

    assert (error(got) <= 2.0 * error(plain) + 1e-6).all()
    assert set(seen) == set(expected_kernels(kind))


@pytest.mark.parametrize("kind", ["forward", "jsd"])
def test_equal_distributions_differ_by_nothing(kind, seen):
    logits = 2.0 * torch.randn(3, WIDTH)
    both = [make_chunk(x, VALID, rows=True) for x in (logits, logits.clone())]
    value, _, grad = run_pair(inductor, *both, kind, torch.ones(3), torch.empty_like(logits))
    assert (value == 0).all()
    assert (grad == 0).all()
    assert seen == expected_kernels(kind)


def test_a_gradient_over_the_teacher_s_logits_is_the_references(seen):
    """And the kernel serves later calls."""
    for aliased in ("teacher", "both"):
        sides = torch.randn(2, 3, WIDTH)
        given = [Chunk(sides[1].clone(), VALID), Chunk(sides[1].clone(), VALID)]
        want = run_pair(pairs, *given, "forward", torch.ones(3), torch.empty_like(sides[0]))[2]
        teacher = given[0] if aliased == "both" else given[1]
        got = run_pair(inductor, given[0], teacher, "forward", torch.ones(3), teacher.logits)[2]
        torch.testing.assert_close(got, want)
    assert seen == 2 * expected_kernels("forward")[:-1]


@pytest.mark.parametrize("kind", ["forward", "jsd"])
def test_a_row_with_nan_or_inf_is_nan_and_no_other(kind, seen):
    student, teacher = torch.randn(2, 10, WIDTH)
    both, ones = [Chunk(side, VALID) for side in (student, teacher)], torch.ones(10)
    want = run_pair(inductor, *both, kind, ones, torch.empty_like(student))
    for row in (2, 6):  # of the second four nothing is asked
        student[row, 7] = teacher[row + 1, VALID - 1] = torch.nan
        student[row + 2, BLOCK], teacher[row + 3] = torch.inf, torch.inf
    ones[6:] = 0.0
    value, _, grad = run_pair(inductor, *both, kind, ones, torch.full_like(student, 7.0))
    assert value[2:].isnan().all()
    assert grad[2:6, :VALID].isnan().all()
    assert (grad[6:] == 0).all()
    assert (grad[:, VALID:] == 0).all()
    assert torch.equal(value[:2], want[0][:2])
    assert torch.equal(grad[:2], want[2][:2])
    assert seen == 2 * expected_kernels(kind)


@pytest.mark.parametrize("lacks", ["student", "teacher"])
def test_columns_that_one_side_lacks_cost_much_and_stay_finite(lacks):
    student, teacher = torch.randn(2, 3, WIDTH)
    holes = student if lacks == "student" else teacher
    holes[0, : BLOCK + 50], holes[1, ::3], holes[2] = -torch.inf, -torch.inf, -torch.inf
    both = [Chunk(side, VALID) for side in (student, teacher)]
    for kind in ("forward", "jsd"):
        want, got = (
            run_pair(kernels, *both, kind, torch.ones(3), torch.empty_like(student))
            for kernels in (pairs, inductor)
        )
        # -1e4 is counted from a block's own maximum, which is not the whole row's.
        for x, y in zip(got, want, strict=True):
            assert x.isfinite().all()
            torch.testing.assert_close(x, y, rtol=5e-3, atol=1e-3)
        assert got[0][2] == 0
        assert (got[2][2] == 0).all()


REVERSE = pytest.param("reverse", marks=pytest.mark.night)  # kernels of its own


@pytest.mark.parametrize("kind", ["forward", REVERSE])
def test_finite_logits_are_not_bounded(kind):
    student, teacher = far_apart(kind, 1200, padding=3)
    check_pair(inductor, student, teacher, kind, out=torch.empty(3, 1203), ulps=8)


CROSS_ENTROPY = pytest.param("cross_entropy", marks=pytest.mark.night)  # likewise


@pytest.mark.parametrize("kind", ["forward", REVERSE, CROSS_ENTROPY])
def test_columns_that_are_masked_with_numbers_cost_nothing(kind):
    """Some blocks have nothing else."""
    student, teacher = masked_with_numbers(kind, WIDTH, padding=3)
    check_pair(inductor, student, teacher, kind, out=torch.empty(16, WIDTH + 3), ulps=8)


@pytest.mark.parametrize("kind", ["forward", pytest.param("jsd", marks=pytest.mark.night)])
def test_nothing_of_the_logits_size_is_made(kind):
    if not expected_kernels("forward"):
        pytest.skip("a CPU without vectors: eager torch, which makes copies")
    sides = [torch.randn(64, 4 * BLOCK + 90) for _ in range(2)]
    student, teacher = (Chunk(side, 4 * BLOCK) for side in sides)

    def passes() -> None:
        given = student, teacher, kind, torch.ones(64)
        run_pair(inductor, *given, sides[0])

    passes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        passes()
    allocated = [event.cpu_memory_usage for event in profiled.events()]
    assert 0 < max(allocated) < sides[0].nbytes / 16


@pytest.mark.parametrize(
    ("rows", "valid", "how"),
    [(5, VALID, "softcap"), (5, VALID, "bias"), (1, VALID, "plain"), (5, BLOCK + 9, "plain")],
    ids=["softcap", "bias", "one row", "one block"],
)
def test_what_is_rare_is_the_references(rows, valid, how, seen):
    sides = torch.randn(2, rows, WIDTH)
    both = [make_chunk(sides[0], valid, **TRANSFORMS[how]), Chunk(sides[1], valid)]
    for kind in ("reverse", "jsd"):
        got, want = (
            run_pair(kernels, *both, kind, torch.ones(rows), torch.empty_like(sides[0]))
            for kernels in (inductor, pairs)
        )
        torch.testing.assert_close(got, want, rtol=0.0, atol=0.0)
    assert not seen


def test_without_vectors_it_is_the_references(monkeypatch, caplog, seen):
    sides = torch.randn(2, 5, WIDTH)
    both = [Chunk(side, VALID) for side in sides]
    monkeypatch.setattr(compiled, "vector_bits", lambda: 0)
    compiled._has_vectors.cache_clear()
    try:
        with caplog.at_level(logging.INFO, logger="mcore_logprobs"):
            got, want = (
                run_pair(kernels, *both, "jsd", torch.ones(5), torch.empty_like(sides[0]))
                for kernels in (inductor, pairs)
            )
    finally:
        compiled._has_vectors.cache_clear()
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0)
    assert not seen
    (record,) = caplog.records
    assert "no vectors here; the torch backend takes over" in record.getMessage()


def test_where_torch_compiles_nothing_the_reference_takes_over():
    sides = torch.randn(2, 5, WIDTH)
    both = [Chunk(side, VALID) for side in sides]
    with torch.compiler.set_stance("force_eager"):
        for kind in ("reverse", "jsd"):
            got, want = (
                run_pair(kernels, *both, kind, torch.ones(5), torch.empty_like(sides[0]))
                for kernels in (inductor, pairs)
            )
            torch.testing.assert_close(got, want, rtol=0.0, atol=0.0)


def test_auto_takes_it_for_large_logits_and_a_divergence_is_torchs(seen):
    columns = 8 * BLOCK
    rows = budgets.CPU.compiled_numel // columns
    large = torch.zeros(rows, columns)

    def of_a_pair(student: Tensor, teacher: Tensor, **options: Any) -> object:
        by_name = {"backend": options["backend"]} if "backend" in options else {}
        return beside(given_logits(student, **options), given_logits(teacher, **by_name)).backend

    assert of_a_pair(large, large.bfloat16()) is inductor
    assert of_a_pair(large[1:], large[1:]) is reference
    assert of_a_pair(large, large.double()) is of_a_pair(large.double(), large) is reference
    assert of_a_pair(large[:2], large[:2], backend="inductor") is inductor
    # As in a patched model, where they are the student's.
    invariant: Any = of_a_pair(large[:2], large[:2], backend="inductor", invariant_segments=8)
    assert invariant is inductor.INVARIANT
    assert of_a_pair(large[1:], large[1:], invariant_segments=8) is reference

    torch.manual_seed(1)
    logits, teacher = torch.randn(2, 2, rows // 2 + 1, columns)
    mask = torch.rand(2, rows // 2 + 1) < 0.8
    hidden, of_teacher = torch.randn(rows, 8), torch.randn(rows, 4)
    weight, teacher_weight = torch.randn(columns, 8), torch.randn(columns, 4)

    def run(backend: str) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (logits, hidden, weight)]
        shared: Any = {"vocab_size": columns - 5, "backend": backend}
        value = vocab_parallel_kl_div(leaves[0], teacher, mask=mask, **shared)
        upstream = torch.linspace(-1.0, 2.0, value.numel()).view_as(value)
        side = {"teacher_hidden": of_teacher, "teacher_weight": teacher_weight}
        linear = linear_kl_div(leaves[1], leaves[2], **side, **shared)
        loss = (value * upstream).sum() + linear.square().mean()
        return [value, linear, *torch.autograd.grad(loss, leaves)]

    for got, want in zip(run("auto"), run("torch"), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    # In place where the chunk is the head's own.
    both = expected_kernels("forward"), expected_kernels("forward", in_place=True)
    assert sorted(seen) == sorted(both[0] + both[1])
