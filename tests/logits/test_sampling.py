"""vocab_parallel_sampling_logprobs against a plain loop over rows in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mcore_logprobs import vocab_parallel_logprobs, vocab_parallel_sampling_logprobs
from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.ops import sampling_cut
from mcore_logprobs.ops.sampling import CutGradient, SavedCut
from mcore_logprobs.ops.source import given_logits
from tests.helpers import oracles
from tests.helpers.memory import TensorsMade
from tests.logits.common import (
    DTYPES,
    LAYOUTS,
    VOCAB,
    WORLDS,
    accumulator,
    gradient_of_view,
    make_target,
    on_ranks,
    shard,
    world_group,
)

# (top_k, top_p)
FILTERS = [(None, 0.9), (5, 1.0), (7, 0.8), (1, 1.0), (3, 0.3), (0, 0.5), (-1, 0.05), (20, 0.999)]


def test_against_plain_torch_in_float64():
    """The operation on one process, line by line."""
    # 16 rows of 12 columns: with top_k = 6 and then top_p = 0.8, a third or so of a row is kept,
    # so that some targets are and some are not.
    logits = torch.randn(16, 12, dtype=torch.float64, requires_grad=True)
    target = torch.arange(16) % 12
    upstream = torch.randn(16, dtype=torch.float64)
    out = vocab_parallel_sampling_logprobs(
        logits, target, top_k=6, top_p=0.8, temperature=0.7, chunk_size=5
    )

    z = logits / 0.7
    ordered, order = z.detach().sort(-1, descending=True)
    p = ordered.softmax(-1) * (torch.arange(12) < 6)
    p = p / p.sum(-1, keepdim=True)
    kept = (torch.arange(12) < 6) & (p.cumsum(-1) - p < 0.8)  # the mass before it is under top_p
    mask = torch.zeros_like(kept).scatter(-1, order, kept)
    logp = z.masked_fill(~mask, -torch.inf).log_softmax(-1)
    expected = logp.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    hit = expected.isfinite()
    assert hit.any()
    assert not hit.all()

    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    (grad,) = torch.autograd.grad(out[hit], logits, upstream[hit])
    (expected_grad,) = torch.autograd.grad(expected[hit], logits, upstream[hit])
    # Through -inf columns plain torch's gradient is 0 too.
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def kept_mask(row: Tensor, top_k: int | None, top_p: float, temperature: float) -> Tensor:
    """The definition, token by token: `[V]` raw logits -> bool `[V]`."""
    vocab = row.shape[0]
    z = row.double() / temperature
    order = sorted(range(vocab), key=lambda v: (-float(row[v]), v))
    if top_k is not None and 0 < top_k < vocab:
        kth = float(row[order[top_k - 1]])
        order = [v for v in order if float(row[v]) >= kth]
    mass = (z[order] - z[order[0]]).exp().tolist()
    total = math.fsum(mass)
    kept = torch.zeros(vocab, dtype=torch.bool)
    before = 0.0
    for v, weight in zip(order, mass, strict=True):
        if top_p < 1.0 and before > 0.0 and before >= top_p * total:
            break
        kept[v] = True
        before += weight
    return kept


def _run(
    whole: Tensor,
    target: Tensor,
    upstream: Tensor,
    layout: str,
    candidates: int | None,
    options: dict,
) -> tuple:
    leaf, logits = shard(whole, layout)
    before = leaf.detach().clone()
    saved = sampling_cut._TOP_P_CANDIDATES, sampling_cut._MAX_CANDIDATES
    if candidates is not None:
        sampling_cut._TOP_P_CANDIDATES = sampling_cut._MAX_CANDIDATES = candidates
    try:
        with CollectivesMade() as forward:
            out = vocab_parallel_sampling_logprobs(
                logits, target, tp_group=world_group(), **options
            )
    finally:
        sampling_cut._TOP_P_CANDIDATES, sampling_cut._MAX_CANDIDATES = saved
    with CollectivesMade() as backward:
        (grad,) = torch.autograd.grad(out, leaf, upstream)
    assert torch.equal(leaf.detach().nan_to_num(99.0), before.nan_to_num(99.0))
    assert not backward.made
    return out.detach(), gradient_of_view(grad, layout), forward.names


def _reference(
    whole: Tensor,
    target: Tensor,
    upstream: Tensor,
    kept: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    leaf = whole.detach().to(torch.float64 if dtype == torch.float64 else whole.dtype)
    leaf.requires_grad_()
    live = (target >= 0).unsqueeze(-1)
    column = target.clamp(min=0).unsqueeze(-1)
    z = (torch.where(live, leaf, 0.0).to(dtype) / temperature).masked_fill(~kept, -torch.inf)
    possible = z.amax(-1, keepdim=True) > -torch.inf  # else log_softmax is NaN
    logp = torch.where(possible, z.log_softmax(-1).gather(-1, column), -torch.inf)
    out = torch.where(live, logp, 0.0).squeeze(-1)
    (grad,) = torch.autograd.grad(out, leaf, upstream.to(dtype))
    return out.detach(), grad


def _check(
    ranks,
    world: int,
    whole: Tensor,
    target: Tensor,
    *,
    layout: str = "plain",
    candidates: int | None = None,
    **options,
) -> list:
    dtype = accumulator(whole.dtype)
    vocab = options.get("vocab_size") or whole.shape[-1]
    temperature = options.get("temperature", 1.0)
    kept = torch.zeros(whole.shape, dtype=torch.bool)
    for row, mask in zip(whole.flatten(0, -2), kept.flatten(0, -2), strict=True):
        if not row.isnan().any():
            top_k, top_p = options.get("top_k"), options.get("top_p", 1.0)
            mask[:vocab] = kept_mask(row[:vocab], top_k, top_p, temperature)
    upstream = torch.randn(target.shape, dtype=dtype)
    args = (whole, target, upstream, kept, temperature)
    exact, exact_grad = _reference(*args, torch.float64)
    plain, plain_grad = _reference(*args, dtype)
    results = on_ranks(ranks, world, _run, whole, target, upstream, layout, candidates, options)
    for out, _, _ in results:
        assert out.dtype == dtype
        assert torch.equal(out, results[0][0])
        oracles.assert_no_worse(out, plain, exact, name="logprobs")
    grad = torch.cat([result[1] for result in results], -1)
    assert grad.dtype == whole.dtype
    oracles.assert_no_worse(grad, plain_grad, exact_grad, name="gradient")
    # The kept set itself: exactly those columns have a gradient, where the target has one.
    assert not grad[~kept].any()
    return results


@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_values_and_gradients(ranks, world, dtype, top_k, top_p):
    whole = (torch.randn(3, 40, VOCAB) * 2).to(dtype)
    target = make_target((3, 40), VOCAB)
    _check(ranks, world, whole, target, top_k=top_k, top_p=top_p, temperature=0.7)


@pytest.mark.parametrize(("dtype", "candidates"), [(torch.float32, None), (torch.bfloat16, 3)])
@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
@pytest.mark.parametrize("world", WORLDS)
def test_ties(ranks, world, dtype, top_k, top_p, candidates):
    """Logits of a few values each: cut-offs among equal ones, on this rank's and on others'."""
    whole = ((torch.randn(200, VOCAB) * 3).round() / 2).to(dtype)
    target = make_target((200,), VOCAB)
    options = {"top_k": top_k, "top_p": top_p}
    _check(ranks, world, whole, target, candidates=candidates, **options)


@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_search(ranks, world, dtype, top_k, top_p):
    """So few candidates that nearly every row is searched for."""
    whole = (torch.randn(120, VOCAB) * 2).to(dtype)
    target = make_target((120,), 17)
    options = {"top_k": top_k, "top_p": top_p, "vocab_size": 17, "temperature": 1.7}
    results = _check(ranks, world, whole, target, candidates=2, **options)
    if world > 1 and top_k != 1 and top_p >= 0.5:
        assert len(results[0][2]) > 3  # it was one


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.95), (300, 1.0), (2000, 0.9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_wide_rows_peaked_and_flat(ranks, world, dtype, top_k, top_p):
    whole = torch.randn(12, 2400) * torch.logspace(-2, 1.2, 12).unsqueeze(-1)
    whole[3] = 1.25  # exactly flat, with a mass of ties at every cut-off
    whole = whole.to(dtype)
    target = whole.float().softmax(-1).multinomial(1).squeeze(-1)
    _check(ranks, world, whole, target, top_k=top_k, top_p=top_p, chunk_size=5)


@pytest.mark.parametrize("candidates", [None, 1])
@pytest.mark.parametrize("offset", [-120.0, 0.0, 80.0, 1e4])
@pytest.mark.parametrize("world", WORLDS)
def test_logits_far_from_zero(ranks, world, offset, candidates):
    whole = torch.randn(40, VOCAB) * 2 + offset
    target = make_target((40,), VOCAB)
    _check(ranks, world, whole, target, top_k=9, top_p=0.9, candidates=candidates)


@pytest.mark.parametrize("candidates", [None, 1])
@pytest.mark.parametrize(("top_k", "top_p"), FILTERS[:3])
@pytest.mark.parametrize("world", WORLDS)
def test_minus_infinity_and_huge(ranks, world, top_k, top_p, candidates):
    whole = torch.randn(60, VOCAB) * 3
    whole[torch.rand(60, VOCAB) < 0.7] = -torch.inf
    whole[:, 5] = torch.randn(60)
    whole[0] = -torch.inf
    whole[0, 13] = -2.0
    whole[1, 2] = 3e38
    whole[2] = -3e38
    target = make_target((60,), VOCAB)
    options = {"top_k": top_k, "top_p": top_p}
    _check(ranks, world, whole, target, candidates=candidates, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_layouts(ranks, world, layout):
    whole = torch.randn(4, 5, VOCAB)
    target = make_target((4, 5), VOCAB)
    options = {"top_k": 6, "top_p": 0.8, "chunk_size": 3, "candidates": 2}
    _check(ranks, world, whole, target, layout=layout, **options)


@pytest.mark.parametrize("candidates", [None, 1])
@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_leading_shapes(ranks, world, lead, candidates):
    whole = torch.randn(*lead, VOCAB)
    target = make_target(lead, VOCAB, ignored=0.0)
    if lead == ():
        options = {"top_k": 5, "top_p": 0.9}
        args = (whole, target, torch.tensor(1.0), "plain", candidates, options)
        rows = (whole.unsqueeze(0), target.unsqueeze(0), torch.ones(1), *args[3:])
        one, two = on_ranks(ranks, world, _run, *args), on_ranks(ranks, world, _run, *rows)
        for of_row, of_rows in zip(one, two, strict=True):
            assert torch.equal(of_row[0], of_rows[0][0])
            assert torch.equal(of_row[1], of_rows[1][0])
        return
    _check(ranks, world, whole, target, top_k=5, top_p=0.9, candidates=candidates)


@pytest.mark.parametrize("candidates", [None, 1])
@pytest.mark.parametrize("world", WORLDS)
def test_ignored_rows_may_hold_anything(ranks, world, candidates):
    whole = torch.randn(6, VOCAB)
    whole[1], whole[3], whole[4] = torch.nan, -torch.inf, torch.inf
    target = make_target((6,), VOCAB, ignored=0.0)
    target[[1, 3, 4]] = -100
    _check(ranks, world, whole, target, top_p=0.7, candidates=candidates)


@pytest.mark.parametrize("top_k", [None, 0, -1, VOCAB, 10**6, 17])
@pytest.mark.parametrize("world", WORLDS)
def test_both_off_is_the_plain_logprob(ranks, world, top_k):
    on_ranks(ranks, world, _both_off, torch.randn(9, VOCAB), make_target((9,), 17), top_k)


def _both_off(whole: Tensor, target: Tensor, top_k: int | None) -> None:
    logits = shard(whole)[1]
    common = {"tp_group": world_group(), "vocab_size": 17, "temperature": 0.7}
    found = vocab_parallel_sampling_logprobs(logits, target, top_k=top_k, top_p=1.0, **common)
    assert torch.equal(found, vocab_parallel_logprobs(logits, target, **common))


def test_collectives_of_peaked_rows(ranks):
    whole = torch.randn(20, 4000) * 5
    target = whole.argmax(-1)
    for top_k, top_p, expected in (
        (None, 0.9, ["all_gather", "all_reduce"]),
        (50, 1.0, ["all_gather"]),
        (50, 0.9, ["all_gather", "all_reduce"]),
    ):
        options = {"top_k": top_k, "top_p": top_p}
        args = (whole, target, torch.randn(20), "plain", None, options)
        assert all(names == expected for _, _, names in ranks(2).run(_run, *args))


def _by_temperature(
    whole: Tensor, target: Tensor, upstream: Tensor, layout: str, candidates: int | None, how: str
) -> list:
    """With a temperature a row, and row by row with that row's own."""
    width = whole.shape[-1]
    temperature = torch.linspace(0.5, 1.7, 20).view(4, 5)
    options: dict = {"top_k": 9, "top_p": 0.8}
    ids = torch.stack([torch.randperm(width)[:6] for _ in range(20)])
    if how == "replay":
        options = {"kept_ids": (ids.flatten(), torch.arange(21) * 6)}
    together = _run(
        whole, target, upstream, layout, candidates, options | {"temperature": temperature}
    )
    alone = []
    for i in range(20):
        if how == "replay":
            options = {"kept_ids": (ids[i], torch.tensor([0, 6]))}
        options["temperature"] = temperature.flatten()[i].item()
        row = [x.flatten(0, 1)[i : i + 1] for x in (whole, target, upstream)]
        alone.append(_run(*row, "plain", candidates, options))
    return [together[:2], [torch.cat([x[i] for x in alone]) for i in (0, 1)]]


@pytest.mark.parametrize(("how", "candidates"), [("both", None), ("both", 1), ("replay", None)])
@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_temperature_a_row(ranks, world, layout, how, candidates):
    whole, target = torch.randn(4, 5, VOCAB) * 2, make_target((4, 5), VOCAB)
    args = (whole, target, torch.randn(4, 5), layout, candidates, how)
    for together, alone in on_ranks(ranks, world, _by_temperature, *args):
        torch.testing.assert_close(together[0].flatten(), alone[0])
        torch.testing.assert_close(together[1].flatten(0, 1), alone[1])
        assert alone[1].any()


# ---- replay -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_replay_of_what_the_filters_keep(ranks, world, dtype, layout):
    whole = (torch.randn(4, 9, VOCAB) * 2).to(dtype)
    target = make_target((4, 9), VOCAB)
    upstream = torch.randn(4, 9, dtype=accumulator(dtype))
    temperature = 0.8
    masks = [kept_mask(row, 9, 0.8, temperature) for row in whole.flatten(0, 1)]
    masks[5] = torch.zeros(VOCAB, dtype=torch.bool)  # nothing was recorded
    kept = torch.stack(masks).view(4, 9, VOCAB)
    ids = [mask.nonzero().squeeze(-1)[torch.randperm(int(mask.sum()))] for mask in masks]
    offsets = torch.tensor([0, *(i.numel() for i in ids)]).cumsum(0)
    options = {"kept_ids": (torch.cat(ids), offsets), "temperature": temperature}
    args = (whole, target, upstream, kept, temperature)
    exact, exact_grad = _reference(*args, torch.float64)
    plain, plain_grad = _reference(*args, accumulator(dtype))
    results = on_ranks(ranks, world, _run, whole, target, upstream, layout, None, options)
    for out, _, names in results:
        oracles.assert_no_worse(out, plain, exact, name="logprobs")
        assert names == ([] if world == 1 else ["all_gather"])
    grad = torch.cat([result[1] for result in results], -1)
    oracles.assert_no_worse(grad, plain_grad, exact_grad, name="gradient")


def _replay_single(whole: Tensor) -> None:
    logits = shard(whole)[1]
    kept = (torch.tensor([3, 20, 9], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32))
    out = vocab_parallel_sampling_logprobs(
        logits, torch.tensor(20), kept_ids=kept, tp_group=world_group()
    )
    torch.testing.assert_close(out, whole[[3, 20, 9]].log_softmax(-1)[1])


@pytest.mark.parametrize("world", WORLDS)
def test_replay_of_one_row(ranks, world):
    on_ranks(ranks, world, _replay_single, torch.randn(VOCAB))


def _padding_alone(whole: Tensor, target: Tensor, upstream: Tensor, options: dict) -> list[Tensor]:
    leaf, logits = shard(whole)
    out = vocab_parallel_sampling_logprobs(
        logits, target, tp_group=world_group(), vocab_size=5, **options
    )
    return [out.detach(), torch.autograd.grad(out, leaf, upstream)[0]]


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 3},
        {"top_p": 0.8},
        {"kept_ids": (torch.arange(12) % 5, torch.arange(7) * 2)},
    ],
    ids=["top_k", "top_p", "replay"],
)
def test_a_shard_of_padding_alone(ranks, options):
    """5 true columns of 12: the second rank of two owns none, and holds NaN."""
    whole, target, upstream = torch.randn(6, 12), torch.arange(6) % 5, torch.randn(6)
    whole[:, 5:] = torch.nan
    value, grad = _padding_alone(whole[:, :5], target, upstream, options)
    (first, on_first), (second, on_second) = ranks(2).run(
        _padding_alone, whole, target, upstream, options
    )
    assert value.isfinite().any()
    for found in (first, second):
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(on_first[:, :5], grad, rtol=1e-6, atol=1e-6)
    assert not on_first[:, 5:].any()
    assert not on_second.any()


# ---- errors and memory --------------------------------------------------------------------------


def _bad(whole: Tensor, target: object, options: dict) -> None:
    vocab_parallel_sampling_logprobs(shard(whole)[1], target, tp_group=world_group(), **options)


_IDS = torch.arange(3)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (_IDS, {"top_k": -2}, "top_k: expected"),
        (_IDS, {"top_k": 2.0}, "top_k: expected"),
        (_IDS, {"top_k": True}, "top_k: expected"),
        (_IDS, {"top_p": 0.0}, "top_p: expected"),
        (_IDS, {"top_p": 1.1}, "top_p: expected"),
        (_IDS, {"top_p": float("nan")}, "top_p: expected"),
        (_IDS, {"top_p": None}, "top_p: expected"),
        (_IDS, {"top_p": 0.9, "temperature": 0.0}, "temperature: expected"),
        (_IDS[:2], {"top_p": 0.9}, "target: expected shape"),
        (_IDS + VOCAB, {"top_p": 0.9}, "target: expected ids"),
        (_IDS, {"kept_ids": _IDS}, "kept_ids: expected (flat_ids, offsets)"),
        (_IDS, {"kept_ids": (_IDS, _IDS)}, "kept_ids[1]: expected shape"),
        (_IDS, {"kept_ids": (_IDS.float(), torch.arange(4))}, "kept_ids[0]: expected an integer"),
        (_IDS, {"kept_ids": (_IDS, torch.tensor([0, 1, 2, 2]))}, "offsets that rise"),
        (_IDS, {"kept_ids": (_IDS, torch.tensor([0, 2, 1, 3]))}, "offsets that rise"),
        (_IDS, {"kept_ids": (_IDS + VOCAB, torch.arange(4))}, "kept_ids: expected ids in"),
        (_IDS, {"kept_ids": (_IDS * 0, torch.tensor([0, 2, 3, 3]))}, "at most once a row"),
        (_IDS, {"kept_ids": (_IDS, torch.arange(4)), "top_k": 5}, "top_k and top_p to be off"),
    ],
    ids=str,
)
def test_bad_input_raises_on_every_rank(ranks, target, options, message):
    for error in ranks(2).run_expecting_errors(_bad, torch.randn(3, VOCAB), target, options):
        assert isinstance(error, ValueError)
        assert message in str(error)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_within_four_chunks(dtype, flat):
    logits = (torch.randn(64, 8192) * (0.1 if flat else 8.0)).to(dtype).requires_grad_()
    copy = 8 * 8192 * 4  # a float32 copy of a chunk of 8 rows
    target = logits.detach().argmax(-1)
    with TensorsMade() as made:
        out = vocab_parallel_sampling_logprobs(logits, target, top_p=0.9, chunk_size=8)
    assert out.isfinite().all()
    # What is held for each row whatever its width is a few hundred numbers.
    per_row = 64 * 8 * 128 * 12
    assert made.peak <= 4 * copy + per_row
    assert not made.larger_than(copy)
    with TensorsMade() as made:
        out.sum().backward()
    assert [m.dtype for m in made.larger_than(copy)] == [dtype]  # the gradient itself
    assert made.peak <= logits.nbytes + 4 * copy


@pytest.mark.parametrize(("top_k", "top_p"), [(2, None), (None, 0.9)])
def test_a_target_made_again_below_the_cut_keeps_its_gradient(top_k, top_p):
    """A backward from hidden states multiplies again, and a GPU may round the second time."""
    logits = torch.tensor([[3.0, 2.0, -4.0, -5.0]])
    column, keep = torch.tensor([1]), torch.tensor([True])
    shard = VocabShard.of(4, None, None)
    opts = sampling_cut.FilterOptions(shard, 1.0, top_k, top_p)
    values = sampling_cut.Values(list(given_logits(logits).chunks()), 1, torch.float32)
    cut = sampling_cut.find_cut(values, column, keep, opts)
    assert cut.limit.item() == -1.0, "the target is the last one kept"
    upstream = torch.tensor([0.7])
    gradient = CutGradient(upstream, keep, column, SavedCut.of(cut), opts)
    again = torch.nextafter(logits, torch.tensor(-torch.inf))
    probability = torch.softmax(logits[0, :2].double(), 0)[1]
    found = gradient.of_logits(again, slice(0, 1))[0, 1]
    torch.testing.assert_close(found.double(), 0.7 * (1.0 - probability), rtol=1e-6, atol=0.0)
