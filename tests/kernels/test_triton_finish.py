"""The kernels of small calls against plain torch in float32 and float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels import reference, triton_backend, triton_finish
from mcore_logprobs.kernels.segments import Segments
from mcore_logprobs.kernels.stats import (
    DROPPED,
    ELSEWHERE,
    RowResults,
    RowSpec,
    TargetIds,
    finish,
    gradient_coefficients,
    gradient_spec,
    merge,
)
from mcore_logprobs.logits.opening import localize_target
from tests.helpers.oracles import assert_no_worse
from tests.kernels.common import (
    DEVICE,
    EVERYTHING,
    TRANSFORMS,
    lay_out,
    make_logits,
    make_spec,
    make_target,
)
from tests.kernels.interpreter import interpreted

WIDTH = 900
START = 64  # of this shard's columns
IDS = TargetIds(START, START + WIDTH, -100)
VALUES = ("logprobs", "entropy", "lse", "sum_pi_squared")


def _rows(dtype: torch.dtype = torch.float32, valid: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of every kind (row 0 all -inf, row 3 NaN, row 4 +inf), targets, which rows to keep."""
    logits = make_logits(11, WIDTH, dtype, "holes")
    logits[3, 5], logits[4, 7] = torch.nan, torch.inf
    target = make_target(11, valid, logits.nan_to_num(0.0, 0.0, -torch.inf))
    keep = torch.arange(11, device=DEVICE) % 5 != 2
    return logits, target, keep


def _global(target: Tensor, keep: Tensor) -> Tensor:
    """Columns as global ids: -1 becomes another shard's, a row that is not kept the ignored one."""
    return torch.where(target >= 0, target + START, START - 1).where(keep, -100)


def _shards(logits: Tensor, target: Tensor, spec: RowSpec, tp: int) -> Tensor:
    """The reference's statistics of each rank's columns, `[tp, k, n]`, as gathered."""
    width = logits.shape[1] // tp
    parts = []
    for rank, shard in enumerate(logits.split(width, 1)):
        own = target - rank * width
        here = torch.where((own >= 0) & (own < width), own, -1)
        valid = max(0, min(width, spec.valid - rank * width))
        # The target's value in the logits' own dtype, on every rank.
        threshold = reference.gather_target(logits, target, 0.0)
        parts.append(
            reference.row_stats(
                shard, here, RowSpec(valid, **EVERYTHING), threshold=threshold, chunk_size=4
            )
        )
    return torch.stack(parts)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
@interpreted
def test_targets_are_localized_as_in_torch(dtype):
    for start_rank, ignore_index in ((0, None), (1, 7), (2, 255 if dtype == torch.uint8 else -100)):
        shard = VocabShard(None, 40, 110)
        target = torch.randint(0, 110, (3, 700), device=DEVICE).to(dtype)
        if ignore_index is not None:
            target[:, ::9] = ignore_index
        start = 40 * start_rank
        column, keep = triton_backend.localize(
            target.t()[:5], start=start, width=40, vocab_size=110, ignore_index=ignore_index
        )
        plain = localize_target(target.t()[:5].long(), shard, ignore_index)
        own = target.t()[:5].long() - start
        expected = torch.where((own >= 0) & (own < 40), own, ELSEWHERE)
        assert torch.equal(column, expected.where(plain.keep, DROPPED))
        assert torch.equal(keep, plain.keep)
        assert (column.dtype, keep.dtype) == (torch.int64, torch.bool)


def _check_results(got: RowResults, plain: RowResults, exact: RowResults, ulps: float) -> None:
    for name in VALUES:
        values = (getattr(got, name), getattr(plain, name), getattr(exact, name))
        assert (values[0] is None) == (values[1] is None), name
        if values[0] is not None:
            nan = values[2].isnan()
            assert torch.equal(values[0].isnan(), nan), name
            assert_no_worse(*(x[~nan] for x in values), ulps=ulps, name=name)
    if plain.target_rank is not None:
        assert torch.equal(got.target_rank, plain.target_rank)


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@interpreted
def test_shards_finish_as_in_torch(tp, label_smoothing):
    logits, target, keep = _rows(valid=WIDTH - 350)
    spec = RowSpec(WIDTH - 350, **(EVERYTHING | {"smoothing": label_smoothing > 0.0}))
    names = RowSpec(1, **EVERYTHING).fields
    places = [names.index(name) for name in spec.fields]
    parts = _shards(logits, target, spec, tp)[:, places]
    exact = finish(
        merge(_shards(logits.double(), target, spec, tp)[:, places], spec), spec, label_smoothing
    )
    plain = finish(merge(parts, spec), spec, label_smoothing)
    # As gathered; as a slice of something wider; with the fields outside the parts.
    wider = torch.full((tp, len(spec.fields) + 2, 11), torch.nan, device=DEVICE)
    wider[:, 1:-1] = parts
    outside = parts.transpose(0, 1).contiguous().transpose(0, 1)
    for given in (parts.contiguous(), wider[:, 1:-1], outside):
        column = target.where(keep, DROPPED)
        got, norms = triton_backend.finish_rows(given, column, spec, label_smoothing)
        _check_results(got, plain.blanked(keep), exact.blanked(keep), ulps=6.0)
        row = dict(zip(spec.norms, norms, strict=True))
        finite = exact.norms.log_sum.isfinite()
        assert torch.equal(row["top"][finite], plain.norms.top[finite])
        expected = {
            "sum": (plain.norms.log_sum.exp(), exact.norms.log_sum.exp()),
            "entropy": (plain.norms.entropy, exact.norms.entropy),
            "finite": (plain.norms.finite, exact.norms.finite),
            "sum_pi_squared": (plain.norms.sum_pi_squared, exact.norms.sum_pi_squared),
        }
        for name in spec.norms[1:]:
            assert_no_worse(
                row[name][finite], *(x[finite] for x in expected[name]), ulps=8.0, name=name
            )


@pytest.mark.parametrize("wanted", [{}, *({name: True} for name in EVERYTHING)], ids=str)
@interpreted
def test_each_statistic_alone_and_where_all_columns_are_here(wanted):
    logits, target, keep = _rows(torch.bfloat16, WIDTH - 1)
    spec = RowSpec(WIDTH - 1, **wanted)
    smoothing = 0.2 if wanted.get("smoothing") else 0.0
    results = []
    for given in (logits, logits.double()):
        threshold = reference.gather_target(given, target, 0.0)
        stats = reference.row_stats(given, target, spec, threshold=threshold, chunk_size=4)
        results.append(finish(stats, spec, smoothing).blanked(keep))
    ids = _global(target, keep)
    got, norms, column = triton_backend.finished_stats(logits, ids, IDS, spec, smoothing)
    _check_results(got, *results, ulps=6.0)
    assert norms.shape == (len(spec.norms), 11)
    assert torch.equal(column, target.where(keep, DROPPED))
    empty, _, none = triton_backend.finished_stats(logits[:0], ids[:0], IDS, spec, smoothing)
    assert empty.logprobs.shape == empty.lse.shape == none.shape == (0,)
    if not wanted.get("rank"):  # rows without targets are all kept
        got, _, column = triton_backend.finished_stats(logits, None, IDS, spec, smoothing)
        assert column is None
        threshold = torch.zeros(11, device=DEVICE)
        elsewhere = torch.full_like(target, ELSEWHERE)
        results = [
            finish(
                reference.row_stats(given, elsewhere, spec, threshold=threshold, chunk_size=4),
                spec, smoothing,
            ).results
            for given in (logits, logits.double())
        ]  # fmt: skip
        _check_results(got, *results, ulps=6.0)


@pytest.mark.parametrize("segments", [None, Segments(2, 450), Segments(4, 225)], ids=str)
@interpreted
def test_statistics_of_global_ids_are_those_of_their_columns(segments):
    logits, target, keep = _rows(torch.bfloat16)
    spec, ids = RowSpec(WIDTH - 3, entropy=True), _global(target, keep)
    spaced = torch.stack([ids, ids], 1)[:, 1]
    stats, column = triton_backend.located_stats(logits, spaced, IDS, spec, segments)
    assert torch.equal(column, target.where(keep, DROPPED))
    if segments is None:
        expected = triton_backend.row_stats(logits, column, spec)
    else:
        expected = triton_backend.segment_stats(logits, column, spec, segments)
    torch.testing.assert_close(stats, expected, rtol=0, atol=0, equal_nan=True)
    same, own = triton_backend.own_logits(logits, spaced, IDS)
    assert torch.equal(same, column)
    expected = reference.gather_target(logits, column, 0.0).float()
    torch.testing.assert_close(own, expected, rtol=0, atol=0, equal_nan=True)


@interpreted
def test_parts_merge_as_shards_do():
    spec = RowSpec(64, entropy=True, rank=True, smoothing=True, sum_pi_squared=True)
    for splits, rows in ((1, 3), (2, 1), (5, 16), (8, 19)):
        parts = torch.rand(3, splits, len(spec.fields), rows, device=DEVICE)
        parts[:, :, 0] = 40.0 * parts[:, :, 0] - 20.0
        parts[:, 0, 0, 0], parts[:, 0, 1:5, 0] = -torch.inf, 0.0
        got = triton_finish.merge_parts(parts, spec)
        for group in range(3):
            expected = merge(parts[group], spec)
            torch.testing.assert_close(got[group], expected, rtol=2e-6, atol=1e-6)


UPSTREAM: dict[str, tuple[str, ...]] = {
    "logprobs": ("logprobs",),
    "entropy": ("entropy",),
    "lse": ("lse",),
    "sum_pi_squared": ("sum_pi_squared",),
    "all": VALUES,
}


def _upstream(names: tuple[str, ...], rows: int) -> dict[str, Tensor]:
    grads = {}
    for place, name in enumerate(names):
        grads[name] = torch.randn(2 * rows, device=DEVICE)[::2]
        grads[name][6] = 0.0
        if place == 1:
            grads[name] = torch.full((1,), -0.7, device=DEVICE).expand(rows)
    return grads


def _check_gradient(
    logits: Tensor,
    spec: RowSpec,
    names: tuple[str, ...],
    *,
    label_smoothing: float = 0.0,
    temperature: Tensor | None = None,
    out: Tensor | None = None,
    target: Tensor | None = None,
) -> Tensor:
    rows = logits.shape[0]
    clean = logits.nan_to_num(0.0, 0.0, -torch.inf)
    target = make_target(rows, spec.valid, clean) if target is None else target
    keep = torch.arange(rows, device=DEVICE) % 5 != 2
    grads = _upstream(names, rows)

    def plain(wide: torch.dtype) -> Tensor:
        given = logits.to(wide) if wide == torch.float64 else logits
        options: dict[str, Any] = {"temperature": temperature, "chunk_size": 4}
        threshold = reference.gather_target(given, target, 0.0)
        stats = reference.row_stats(given, target, spec, threshold=threshold, **options)
        norms = finish(stats, spec, label_smoothing).norms
        upstream = RowResults(**{name: grad.to(stats.dtype) for name, grad in grads.items()})
        narrow = gradient_spec(spec, upstream)
        coef = gradient_coefficients(
            upstream, norms, narrow, keep=keep, label_smoothing=label_smoothing
        )
        written = torch.full(logits.shape, torch.nan, dtype=given.dtype, device=DEVICE)
        reference.grad_logits(given, target, norms.top, coef, narrow, out=written, **options)
        return written

    common = {"temperature": temperature}
    _, norms, column = triton_backend.finished_stats(
        logits, _global(target, keep), IDS, spec, label_smoothing, **common
    )
    out = torch.full_like(logits, torch.nan) if out is None else out
    triton_backend.results_grad(
        logits, column, RowResults(**grads), norms, spec, label_smoothing, out=out, **common
    )
    exact, expected = plain(torch.float64), plain(torch.float32)
    nan = exact.isnan()
    assert torch.equal(out.isnan(), nan)
    assert_no_worse(
        out.masked_fill(nan, 0.0), expected.masked_fill(nan, 0.0), exact.masked_fill(nan, 0.0),
        name="gradient", ulps=6.0,
    )  # fmt: skip
    assert (out[:, spec.valid :] == 0).all()
    assert (out[~keep] == 0).all()
    return out


@pytest.mark.parametrize("asked", UPSTREAM)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@interpreted
def test_the_gradient_from_upstream_ones(asked, dtype):
    logits, _, _ = _rows(dtype)
    logits[6, 9] = torch.nan
    out = _check_gradient(logits, RowSpec(WIDTH - 9, **EVERYTHING), UPSTREAM[asked])
    if asked != "all":  # there the expanded one asks for row 6 too
        assert (out[6] == 0).all()
    assert out[3, : WIDTH - 9].isnan().all()


@pytest.mark.parametrize("transform", ["temperature", "scale", "softcap"])
@interpreted
def test_the_gradient_of_transformed_and_smoothed_logits(transform):
    wanted = EVERYTHING | {"rank": False}
    for own in (None, torch.linspace(0.5, 2.0, 11, device=DEVICE)):
        logits, _, _ = _rows()
        spec = make_spec(WIDTH, TRANSFORMS[transform], wanted)
        if own is not None:
            spec = replace(spec, temperature=1.0)
        _check_gradient(logits, spec, VALUES, label_smoothing=0.1, temperature=own)
        _check_gradient(logits, spec, ("entropy", "lse"), label_smoothing=0.1, temperature=own)


@interpreted
def test_the_gradient_of_rows_with_strides_in_place_and_of_another_shard():
    logits, _, _ = _rows(torch.bfloat16)
    wide = lay_out(logits, "wide")
    spaced = lay_out(torch.zeros_like(logits), "every other")
    spec = RowSpec(WIDTH, **EVERYTHING)
    _check_gradient(wide, spec, VALUES, out=spaced)
    elsewhere = torch.full((11,), -1, device=DEVICE)
    _check_gradient(logits, spec, VALUES, target=elsewhere)
    ids = _global(elsewhere.clamp(min=3), elsewhere < 0)
    _, norms, column = triton_backend.finished_stats(logits, ids, IDS, spec, 0.0)
    upstream, out = RowResults(**_upstream(VALUES, 11)), torch.empty_like(logits)
    for where in (out, logits):
        triton_backend.results_grad(logits, column, upstream, norms, spec, 0.0, out=where)
    torch.testing.assert_close(logits, out, rtol=0, atol=0, equal_nan=True)
