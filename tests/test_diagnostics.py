"""Train against rollout: every figure against plain numpy, one token and one sequence at a time."""

from __future__ import annotations

import json
import math
import re
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mcore_logprobs.diagnostics import MismatchStats, compare_logprobs, report


def _inputs(rows: int = 5, length: int = 11) -> tuple:
    """Rollout log-probabilities, the trainer's near them, a ragged mask (one row empty), ranks."""
    rng = np.random.default_rng(3)
    rollout = -rng.exponential(1.0, (rows, length))
    train = rollout + rng.normal(0, 0.3, (rows, length))
    mask = np.arange(length) < rng.integers(1, length, (rows, 1))
    mask[1] = False
    ranks = rng.geometric(0.2, (rows, length)) - 1
    # What is masked out must not matter.
    train[~mask] = np.nan
    rollout[~mask] = -np.inf
    return train, rollout, mask, ranks


def _expected(train, rollout, mask, percentiles) -> dict:
    d = train[mask] - rollout[mask]
    r = np.exp(d)
    rows = [row for row in zip(train, rollout, mask, strict=True) if row[2].any()]
    sums = np.array([(t[m] - q[m]).sum() for t, q, m in rows])
    lengths = np.array([m.sum() for _, _, m in rows])
    weights = np.exp(sums)
    return {
        "tokens": len(d),
        "sequences": len(sums),
        "k1": np.mean(-d),
        "k2": np.mean(d**2 / 2),
        "k3": np.mean(r - 1 - d),
        "abs_diff_mean": np.abs(d).mean(),
        "abs_diff_max": np.abs(d).max(),
        "ratio_percentiles": dict(zip(percentiles, np.percentile(r, percentiles), strict=True)),
        "effective_sample_size": r.sum() ** 2 / (r**2).sum(),
        "sequence_ratio": weights,
        "sequence_ratio_normalized": np.exp(sums / lengths),
        "sequence_effective_sample_size": weights.sum() ** 2 / (weights**2).sum(),
    }


def _assert_equal(stats: MismatchStats, expected: dict) -> None:
    for name, value in expected.items():
        got = getattr(stats, name)
        if isinstance(value, dict):
            assert got == pytest.approx(value, rel=1e-12)
        else:
            np.testing.assert_allclose(np.asarray(got), value, rtol=1e-12, err_msg=name)


PERCENTS = (0, 2.5, 50, 97, 100)


def test_against_numpy():
    train, rollout, mask, _ = _inputs()
    stats = compare_logprobs(train, rollout, mask, percentiles=PERCENTS)
    _assert_equal(stats, _expected(train, rollout, mask, PERCENTS))
    assert stats.target_ranks is None
    assert stats.tokens < mask.size
    assert stats.sequences == 4


def test_sequences_along_the_first_dimension_and_mixed_dtypes():
    train, rollout, mask, _ = _inputs()
    train, rollout = train.astype(np.float32), rollout.astype(np.float32)
    expected = _expected(train.astype(float), rollout.astype(float), mask, PERCENTS)
    stats = compare_logprobs(
        torch.tensor(train.T).requires_grad_(),
        torch.tensor(rollout.T.astype(float)),
        torch.tensor(mask.T).int(),
        seq_dim=0,
        percentiles=PERCENTS,
    )
    _assert_equal(stats, expected)


def test_packed_sequences_are_told_apart():
    train, rollout, mask, _ = _inputs()
    lengths = [3, 11, 0, 6, 2]
    pieces = [np.concatenate([x[i, :n] for i, n in enumerate(lengths)]) for x in (train, rollout)]
    packed_mask = np.concatenate([mask[i, :n] for i, n in enumerate(lengths)])
    cu_seqlens = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    ragged = mask & (np.arange(11) < np.array(lengths)[:, None])
    stats = compare_logprobs(
        pieces[0][None], pieces[1][None], packed_mask[None], cu_seqlens=cu_seqlens
    )
    expected = _expected(train, rollout, ragged, PERCENTS)
    del expected["ratio_percentiles"]
    _assert_equal(stats, expected)
    assert stats.sequences == 3


def test_rows_of_packed_sequences_are_told_apart_too():
    x = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]).double()
    d = torch.tensor([[0.1, 0.2, 0.4], [-0.1, 0.3, 0.5]]).double()
    stats = compare_logprobs(x + d, x, cu_seqlens=torch.tensor([0, 2, 3]))
    expected = torch.tensor([0.1 + 0.2, 0.4, -0.1 + 0.3, 0.5]).double().exp()
    torch.testing.assert_close(stats.sequence_ratio, expected)


def test_no_mask_is_every_token_and_equal_inputs_show_no_mismatch():
    x = -torch.rand(3, 4)
    stats = compare_logprobs(x, x.clone())
    assert (stats.tokens, stats.sequences) == (12, 3)
    assert stats.k1 == stats.k2 == stats.k3 == stats.abs_diff_max == 0
    assert stats.effective_sample_size == pytest.approx(12)
    assert set(stats.ratio_percentiles.values()) == {1.0}
    assert stats.sequence_ratio.tolist() == [1.0] * 3


def test_k3_keeps_differences_that_float32_would_round_away():
    x = -torch.rand(1000, dtype=torch.float64)
    stats = compare_logprobs(x + 1e-9, x)
    assert stats.k3 == pytest.approx(5e-19, rel=1e-3)


def test_the_estimators_estimate_the_divergence():
    """On tokens drawn from a known distribution, k1 and k3 come near its exact KL."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(0)
    p = (q + 0.3 * torch.randn(50, generator=generator, dtype=torch.float64)).log_softmax(0)
    exact = (q.exp() * (q - p)).sum().item()
    drawn = torch.multinomial(q.exp(), 200_000, replacement=True, generator=generator)
    stats = compare_logprobs(p[drawn], q[drawn])
    assert stats.k1 == pytest.approx(exact, rel=0.05)
    assert stats.k3 == pytest.approx(exact, rel=0.02)
    assert compare_logprobs(q[drawn], p[drawn]).k1 < 0


def test_impossible_tokens_and_huge_ratios():
    rollout = torch.tensor([[-1.0, -2.0, -800.0]])
    stats = compare_logprobs(torch.tensor([[-1.0, -math.inf, -1.0]]), rollout)
    assert stats.k1 == stats.k3 == stats.abs_diff_max == math.inf
    assert stats.ratio_percentiles[0.1] >= 0
    assert stats.sequence_ratio.tolist() == [0.0]
    stats = compare_logprobs(torch.tensor([[-1.0, -2.0, -1.0]]), rollout)
    assert stats.sequence_ratio.tolist() == [math.inf]
    assert stats.effective_sample_size == pytest.approx(1)
    assert "inf" in report(stats)


def test_target_ranks_in_doubling_bins():
    train, rollout, mask, ranks = _inputs(40, 50)
    ranks[0, 0] = -1
    mask[0, 0] = True
    train[0, 0] = rollout[0, 0] = -1
    histogram = compare_logprobs(train, rollout, mask, target_rank=ranks).target_ranks
    counted = ranks[mask & (ranks >= 0)]
    assert histogram is not None
    assert sum(histogram.counts) == len(counted) == mask.sum() - 1
    assert histogram.labels[:5] == ["0", "1", "2-3", "4-7", "8-15"]
    for first, last, count in zip(histogram.first, histogram.last, histogram.counts, strict=True):
        assert count == ((counted >= first) & (counted <= last)).sum()
    assert histogram.first[-1] <= counted.max() <= histogram.last[-1]
    assert histogram.mean == pytest.approx(counted.mean())
    assert histogram.median == pytest.approx(np.percentile(counted, 50))
    assert histogram.p95 == pytest.approx(np.percentile(counted, 95))


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4, 151935])
def test_one_rank_lies_in_its_bin(rank):
    x = torch.zeros(2)
    histogram = compare_logprobs(x, x, target_rank=torch.tensor([rank, -1])).target_ranks
    assert histogram is not None
    assert histogram.counts[-1] == sum(histogram.counts) == 1
    assert histogram.first[-1] <= rank <= histogram.last[-1]
    only_ignored = compare_logprobs(x, x, target_rank=torch.tensor([-1, -1]))
    assert only_ignored.target_ranks is None


def test_inputs_are_not_modified_and_scalars_are_json():
    train, rollout, mask, ranks = (torch.as_tensor(x) for x in _inputs())
    kept = [x.clone() for x in (train, rollout, mask, ranks)]
    stats = compare_logprobs(train, rollout, mask, target_rank=ranks)
    for x, before in zip((train, rollout, mask, ranks), kept, strict=True):
        assert torch.equal(x.nan_to_num(), before.nan_to_num())
    scalars = json.loads(json.dumps(stats.to_dict()))
    assert scalars["k3"] == stats.k3
    assert scalars["ratio_p50"] == stats.ratio_percentiles[50.0]
    assert scalars["ess_fraction"] == stats.effective_sample_size / stats.tokens
    assert scalars["target_rank_mean"] == stats.target_ranks.mean


@pytest.mark.parametrize("with_ranks", [False, True])
def test_report_says_the_figures_and_draws_them(tmp_path, with_ranks):
    train, rollout, mask, ranks = _inputs()
    stats = compare_logprobs(train, rollout, mask, target_rank=ranks if with_ranks else None)
    path = tmp_path / "mismatch.png"
    text = report(stats, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
    for figure in (f"{stats.k1:+.3e}", f"{stats.k3:.3e}", f"{stats.abs_diff_max:.3e}"):
        assert figure in text
    assert ("rank 2-3" in text) == with_ranks
    assert report(stats) == text


def test_without_matplotlib_the_text_works_and_the_figure_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    stats = compare_logprobs(torch.zeros(3), torch.zeros(3))
    assert report(stats).splitlines()[0].endswith("3 / 1")
    with pytest.raises(ImportError, match=r"mcore-logprobs\[examples\]"):
        report(stats, "never.png")


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((X, X[:1]), {}, r"rollout_logprobs: expected shape \[2, 3\], got \[1, 3\]"),
        ((X, X.long()), {}, "expected floating dtypes, got torch.float32 and torch.int64"),
        ((X, X, X[0]), {}, r"mask: expected shape \[2, 3\], got \[3\]"),
        ((X, X, X + 0.5), {}, "mask: expected only 0 and 1"),
        ((X, X, X), {}, "mask: expected at least one token, got none"),
        ((X, X + math.nan), {}, "expected no NaN under the mask, got 6 of 6 tokens"),
        ((X - math.inf, X - math.inf), {}, "expected no NaN under the mask"),
        ((X, X), {"target_rank": X}, "target_rank: expected an integer dtype"),
        ((X, X), {"target_rank": X[0].long()}, r"target_rank: expected shape \[2, 3\], got \[3\]"),
        ((X, X), {"percentiles": (101,)}, "percentiles: expected values from 0 to 100, got 101"),
        ((X, X), {"percentiles": "50"}, "percentiles: expected values from 0 to 100, got '5'"),
        ((X, X), {"percentiles": (None,)}, "percentiles: expected values from 0 to 100, got None"),
        ((X, X), {"percentiles": 50}, "percentiles: expected a sequence of numbers, got 50"),
        ((X, X), {"seq_dim": 2}, "seq_dim"),
        ((X, X), {"seq_dim": True}, "seq_dim: expected an int, got True"),
        ((X, X), {"cu_seqlens": torch.tensor([0, 2])}, "expected to rise from 0 to 3"),
        ((X, X), {"cu_seqlens": torch.tensor([0.0, 3.0])}, "expected integers"),
    ],
)
def test_mistakes_are_refused(args, options, message):
    with pytest.raises(ValueError, match=message):
        compare_logprobs(*args, **options)


def _share(inputs: tuple, rows: list[slice]) -> dict:
    mine = rows[dist.get_rank()]
    train, rollout, mask, ranks = (x[mine] for x in inputs)
    stats = compare_logprobs(train, rollout, mask, target_rank=ranks, group=dist.group.WORLD)
    return {"scalars": stats.to_dict(), "sequence_ratio": stats.sequence_ratio}


def test_a_group_s_statistics_are_those_of_all_its_sequences(ranks):
    inputs = _inputs(7, 9)
    train, rollout, mask, target = inputs
    whole = compare_logprobs(train, rollout, mask, target_rank=target)
    # Uneven shares; the second rank's only row is fully masked out.
    shares = [slice(0, 1), slice(1, 2), slice(2, 7)]
    for got in ranks(3).run(_share, inputs, shares):
        assert got["scalars"] == whole.to_dict()
        assert torch.equal(got["sequence_ratio"], whole.sequence_ratio)


def test_an_error_in_a_group_is_raised_on_every_rank(ranks):
    inputs = tuple(torch.as_tensor(x) for x in _inputs(4, 5))
    inputs[0][0, 0] = math.nan
    inputs[2][0, 0] = True
    errors = ranks(2).run_expecting_errors(_share, inputs, [slice(0, 2), slice(2, 4)])
    assert [type(e) for e in errors] == [ValueError, ValueError]
    assert all("expected no NaN" in str(e) for e in errors)


def _mistaken(inputs: tuple, mistake: str) -> None:
    train, rollout, mask, target = inputs
    options: dict = {"target_rank": target}
    if dist.get_rank() == 1:
        if mistake == "no target_rank":
            options = {}
        elif mistake == "shape":
            train = train[:1]
        else:
            options["percentiles"] = (101,)
    compare_logprobs(train, rollout, mask, **options, group=dist.group.WORLD)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("no target_rank", "target_rank: expected it on every rank .*, got None on rank 1"),
        ("shape", r"rollout_logprobs: expected shape \[1, 5\], got \[4, 5\]"),
        ("percentiles", "percentiles: expected values from 0 to 100, got 101"),
    ],
)
def test_a_mistake_of_one_rank_is_raised_on_every_rank(ranks, mistake, said):
    """Not waited for until the group gives up."""
    inputs = tuple(torch.as_tensor(x) for x in _inputs(4, 5))
    errors = ranks(2).run_expecting_errors(_mistaken, inputs, mistake)
    assert [type(e) for e in errors] == [ValueError, ValueError]
    for rank, error in enumerate(errors):
        assert re.search(said, str(error)), error
        named = rank == 0 and mistake != "no target_rank"
        assert str(error).startswith("rank 1 of the group: ") == named
