"""The torch backend and the merge: properties that hold for any logits, found by hypothesis.

Distributions, cuts, permutations and chunks are drawn; expectations come from float64.
"""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcore_logprobs.kernels import pairs, reference
from mcore_logprobs.kernels.chunk import Chunk, Processing, row_chunks
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec, finalize, merge
from tests.helpers import oracles
from tests.helpers.memory import TensorsMade
from tests.kernels.common import EVERYTHING


@st.composite
def rows(draw) -> tuple[Tensor, Tensor]:
    """(logits `[n, v]`, some far from 0, some with -inf; target `[n]` at finite columns)."""
    n, v = draw(st.integers(1, 6)), draw(st.integers(2, 40))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    scale = draw(st.sampled_from([0.1, 1.0, 5.0, 40.0]))
    logits = torch.randn(n, v, generator=generator) * scale + draw(st.sampled_from([0, -300, 300]))
    target = torch.randint(0, v, (n,), generator=generator)
    if draw(st.booleans()):
        gone = torch.rand(n, v, generator=generator) < draw(st.sampled_from([0.1, 0.9]))
        logits[gone.scatter(-1, target[:, None], False)] = -torch.inf
    return logits, target


def _cut(logits: Tensor, target: Tensor, cuts: list[int], chunk_size: int) -> Tensor:
    """Each shard's statistics, `[parts, k, n]`; shards lie between cuts and may be empty."""
    width = logits.shape[1]
    edges = [0, *sorted(min(cut, width) for cut in cuts), width]
    own = logits.gather(1, target[:, None]).squeeze(1)
    parts = []
    for start, stop in pairwise(edges):
        here = (target >= start) & (target < stop)
        parts.append(
            reference.stats(
                Chunk(logits[:, start:stop], stop - start),
                torch.where(here, target - start, -1),
                EVERYTHING,
                threshold=own,
                chunk_size=chunk_size,
            )
        )
    return torch.cat(parts)


@given(rows(), st.lists(st.integers(0, 40), max_size=4), st.integers(1, 7))
def test_shards_merge_to_the_whole(drawn, cuts, chunk_size):
    logits, target = drawn
    parts = _cut(logits, target, cuts, chunk_size)
    merged, softmax = finalize(merge(parts, EVERYTHING), EVERYTHING)
    exact = oracles.token_stats(logits, target)
    plain = oracles.token_stats(logits, target, dtype=torch.float32)
    oracles.assert_no_worse(merged.logprobs, plain.logprobs, exact.logprobs, name="logprobs")
    oracles.assert_no_worse(merged.entropy, plain.entropy, exact.entropy, name="entropy")
    oracles.assert_no_worse(merged.lse, plain.lse, exact.lse, name="lse")
    squares = (logits.double().log_softmax(-1).exp() ** 2).sum(-1)
    torch.testing.assert_close(merged.sum_pi_squared.double(), squares, rtol=1e-6, atol=1e-9)
    assert torch.equal(merged.target_rank, exact.target_rank)
    assert torch.equal(softmax.finite.long(), logits.isfinite().sum(-1))
    # Rounding takes nothing out of its bounds.
    assert (merged.logprobs <= 0).all()
    assert (merged.entropy >= 0).all()
    smoothed = finalize(merge(parts, EVERYTHING), EVERYTHING, label_smoothing=0.1).results.logprobs
    given = (oracles.token_stats(logits, target, label_smoothing=0.1, dtype=dtype).logprobs
             for dtype in (torch.float32, torch.float64))  # fmt: skip
    oracles.assert_no_worse(smoothed, *given, name="label smoothing", ulps=8.0)
    assert (smoothed <= 0).all()
    # Two at a time, from the other end, gives the same as all at once.
    folded = parts[-1]
    for part in parts.flip(0)[1:]:
        folded = merge(torch.stack([folded, part]), EVERYTHING)
    torch.testing.assert_close(folded, merge(parts, EVERYTHING), rtol=2e-6, atol=2e-6)


@given(rows(), st.randoms(), st.integers(1, 7))
def test_rows_do_not_know_each_other(drawn, random, chunk_size):
    logits, target = drawn
    order = list(range(len(logits)))
    random.shuffle(order)
    straight = _cut(logits, target, [7], 1)
    shuffled = _cut(logits[order], target[order], [7], chunk_size)
    torch.testing.assert_close(shuffled, straight[..., order], rtol=1e-6, atol=0)


# ---- the gradient kernel ------------------------------------------------------------------------


def _grad(
    chunk: Chunk, target: Tensor, upstream: Tensor, coef: Tensor, spec: StatsSpec, **options
) -> Tensor:
    """Of one entry per row."""
    out = options.pop("out", torch.empty_like(chunk.logits))
    shift = torch.where(chunk.logits.isnan(), -torch.inf, chunk.logits).amax(-1)
    entries = target.unsqueeze(-1), upstream.unsqueeze(-1)
    reference.grad(chunk, GradientTerms(*entries, shift, coef, spec), out=out, **options)
    return out


@given(rows(), st.integers(1, 7))
def test_the_gradient_is_the_formula(drawn, chunk_size):
    logits, target = drawn
    n, v = logits.shape
    generator = torch.Generator().manual_seed(n * 41 + v)
    coef = torch.randn(5, n, generator=generator)
    spec = StatsSpec(entropy=True, smoothing=True, sum_pi_squared=True)
    assert spec.coefficients == ("weight", "moment", "finite", "squares")
    given = coef[[0, 1, 3, 4]]
    found = _grad(Chunk(logits, v), target, coef[2], given, spec, chunk_size=chunk_size)
    z = logits.double()
    a, b, c, d, e = coef.double().unsqueeze(-1)
    shifted = z - z.amax(-1, keepdim=True)
    finite = ~z.isneginf()
    w = shifted.exp()
    exact = torch.where(finite, w * (a + b * shifted + e * w), 0.0).nan_to_num(0.0)
    exact = exact + torch.where(finite, d, 0.0)
    exact[torch.arange(n), target] += c.squeeze(-1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flags", list(product((False, True), repeat=len(vars(EVERYTHING)))))
def test_two_float32_copies_of_a_chunk_at_most(flags, dtype):
    """And a bool one; `Budgets.copy_bytes` is of one of them."""
    spec, logits, target = StatsSpec(*flags), torch.randn(64, 4096).to(dtype), torch.arange(64)
    threshold = logits[:, 0].float() if spec.rank else None
    coef = torch.ones(len(spec.coefficients), 64)
    copy = 4 * logits.numel()
    with TensorsMade() as made:
        reference.stats(Chunk(logits, 4096), target, spec, threshold=threshold, chunk_size=64)
    assert 0.9 * copy < made.peak < 2.3 * copy
    with TensorsMade() as made:
        _grad(Chunk(logits, 4096), target, coef[0], coef, spec, chunk_size=64, out=logits.clone())
    assert 0.9 * copy < made.peak < (2.3 + dtype.itemsize / 4) * copy  # with `out`


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", pairs.KINDS)
def test_float32_copies_of_two_sides(kind, dtype):
    spec, sides = pairs.PairSpec(kind), torch.randn(2, 64, 4096).to(dtype)
    student, teacher = (Chunk(logits, 4096) for logits in sides)
    copy = 4 * sides[0].numel()
    with TensorsMade() as made:
        stats = reference.pair_stats(student, teacher, spec, chunk_size=64)
    assert 2.9 * copy < made.peak < 4.6 * copy
    whole = pairs.finalize_pair(stats[0], spec)
    with TensorsMade() as made:
        reference.pair_sums(student, teacher, whole.softmax, spec, chunk_size=64)
    assert spec.kind in pairs.ONE_PASS or 2.9 * copy < made.peak < 8.4 * copy
    out = torch.empty_like(sides[0])
    terms = whole.softmax, whole.value, torch.ones(64), spec
    with TensorsMade() as made:
        reference.pair_grad(student, teacher, *terms, out=out, chunk_size=64)
    assert 1.9 * copy < made.peak < 6.1 * copy


@given(rows())
def test_a_row_with_no_coefficient_gets_exactly_nothing(drawn):
    logits, target = drawn
    coef, upstream = torch.randn(3, len(logits)), torch.randn(len(logits))
    coef[:, 0] = upstream[0] = 0.0
    logits[0] = float("nan")
    spec, chunk = StatsSpec(entropy=True, smoothing=True), Chunk(logits, logits.shape[1])
    found = _grad(chunk, target, upstream, coef, spec, chunk_size=4)
    assert not found[0].any()
    assert found[1:].isfinite().all()


@pytest.mark.parametrize("valid", [0, 1, 5, 8])
def test_masked_columns_get_exactly_nothing(valid):
    logits = torch.randn(3, 8)
    logits[:, valid:] = float("nan")
    coef, upstream = torch.randn(3, 3), torch.randn(3)
    spec, chunk = (
        StatsSpec(entropy=True, smoothing=True),
        Chunk(logits, valid, Processing.of(softcap=3.0)),
    )
    target = torch.tensor([-1, 0, 0]) if valid else torch.tensor([-1, -1, -1])
    found = _grad(chunk, target, upstream, coef, spec, chunk_size=2)
    assert not found[:, valid:].any()
    assert found.isfinite().all()


def test_over_the_logits_themselves():
    logits = torch.randn(5, 8)
    coef, upstream, target = torch.randn(2, 5), torch.randn(5), torch.tensor([0, 3, -1, 7, 2])
    chunk = Chunk(logits, 6, Processing.of(temperature=0.5, softcap=2.0))
    given = (torch.where(target < 6, target, -1), upstream, coef, StatsSpec(entropy=True))
    expected = _grad(chunk, *given, chunk_size=2)
    _grad(chunk, *given, out=logits, chunk_size=2)
    assert torch.equal(logits, expected)


def test_processed_logits_take_their_steps_in_order():
    raw = torch.randn(4, 9) * 4
    kept = raw.clone()
    for bias, softcap, scale, temperature in product(
        (None, torch.randn(9)), (None, 2.5), (1.0, 0.25), (1.0, 0.6)
    ):
        options = {"logit_scale": scale, "softcap": softcap, "temperature": temperature}
        found = Chunk(raw, raw.shape[1], Processing.of(bias=bias, **options)).processed()
        exact = oracles.finished_logits(raw, bias=bias, **options)
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
        assert torch.equal(raw, kept)


def test_processed_logits_of_every_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raw = torch.randn(2, 3).to(dtype)
        found = Chunk(raw, raw.shape[1]).processed()
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(found.double(), raw.double())


@pytest.mark.parametrize(("rows_", "size"), [(0, 3), (1, 1), (7, 3), (6, 3), (5, 100)])
def test_chunks_cover_the_rows_once(rows_, size):
    chunks = list(row_chunks(rows_, size))
    covered = [i for chunk in chunks for i in range(chunk.start, chunk.stop)]
    assert covered == list(range(rows_))
    assert all(chunk.stop - chunk.start <= size for chunk in chunks)


def test_a_capped_row_of_nan_that_asks_for_nothing_gets_nothing():
    logits = torch.randn(3, 9)
    logits[1] = torch.nan
    chunk = Chunk(logits, 8, Processing.of(0.5, 4.0, 0.7))
    coef, upstream = torch.randn(1, 3), torch.randn(3)
    coef[:, 1] = upstream[1] = 0.0
    target, out = torch.tensor([2, 3, -1]), torch.full_like(logits, torch.nan)
    _grad(chunk, target, upstream, coef, StatsSpec(), out=out, chunk_size=2)
    assert (out[1] == 0).all()
    assert (out[:, 8] == 0).all()
    assert (out[::2, :8] != 0).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_parts_of_sides_with_other_temperatures_merge(kind):
    """The parts' maxima are apart, those of whole rows close."""
    s, t = torch.randn(2, 4, 60)
    s[:, 40:] += 0.6
    temperature = torch.linspace(0.5, 1.5, 4)
    both = [
        Chunk(s, 60, Processing.of(temperature=1.9)),
        Chunk(t, 60, Processing.of(temperature=temperature)),
    ]
    spec = pairs.PairSpec(kind)
    parts = [
        pairs.pair_stats(*(side.columns(part) for side in both), spec, chunk_size=3)
        for part in (slice(0, 20), slice(20, 45), slice(45, 60))
    ]
    multipliers = tuple(side.processing.multiplier for side in both)
    found = pairs.finalize_pair(pairs.merge_pairs(torch.cat(parts), spec, multipliers), spec).value
    logp = (s.double() / 1.9).log_softmax(-1)
    logq = (t.double() / temperature.double().unsqueeze(1)).log_softmax(-1)
    if kind == "reverse":
        logp, logq = logq, logp
    exact = (logq.exp() * (logq - logp)).sum(-1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["forward", "reverse", "cross_entropy"])
@pytest.mark.parametrize("lacking", [0, 1], ids=["student", "teacher"])
def test_merged_parts_that_one_side_lacks_merge_again(kind: str, lacking: int) -> None:
    both = torch.randn(2, 2, 12)
    both[lacking, :, :8] = -torch.inf
    spec = pairs.PairSpec(kind)

    def of(part: slice) -> Tensor:
        sides = (Chunk(x[:, part], x[:, part].shape[1], Processing.of()) for x in both)
        return pairs.pair_stats(*sides, spec, chunk_size=2)

    parts = torch.cat([of(slice(0, 4)), of(slice(4, 8)), of(slice(8, 12))])
    twice = torch.stack([pairs.merge_pairs(parts[:2], spec), parts[2]])
    found = pairs.finalize_pair(pairs.merge_pairs(twice, spec), spec).value
    whole = pairs.finalize_pair(of(slice(0, 12))[0], spec).value
    torch.testing.assert_close(found, whole)
