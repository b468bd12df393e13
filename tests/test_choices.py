"""Top-k, gathered columns and filters: ties and signs, NaN, rows that are hard to cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    linear_sampling_logprobs,
    vocab_parallel_argmax,
    vocab_parallel_gather,
    vocab_parallel_logprobs,
    vocab_parallel_sampling_logprobs,
    vocab_parallel_topk,
)
from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels import largest
from mcore_logprobs.kernels.largest import largest_columns
from mcore_logprobs.ops import sampling_cut, sampling_search
from mcore_logprobs.ops.sampling import CutGradient, SavedCut
from mcore_logprobs.sources.given import given_logits
from tests.helpers.shards import VOCAB, make_target, on_ranks, shard, world_group

# ---- top-k --------------------------------------------------------------------------------------


def _topk(whole: Tensor) -> tuple[Tensor, Tensor]:
    logits, group = shard(whole)[1], world_group()
    return vocab_parallel_topk(logits, 7, tp_group=group)[1], vocab_parallel_argmax(
        logits, tp_group=group
    )


@pytest.mark.parametrize("world", [1, 3])
def test_all_equal_and_signed_zeros(ranks, world):
    whole = torch.zeros(5, VOCAB)
    whole[1], whole[2, ::2], whole[3, 1::2], whole[4] = -3.0, -0.0, -0.0, -torch.inf
    for ids, best in on_ranks(ranks, world, _topk, whole):
        assert ids.tolist() == [list(range(7))] * 5
        assert not best.any()


@pytest.mark.parametrize("k", [1, 5, 12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equal_values_and_nan_are_chosen_by_column(dtype, k):
    """Rows without a tie, of nothing but ties, of both zeros, and with the NaN that a CPU makes."""
    x = torch.randn(9, 12).to(dtype)
    x[1], x[2, ::2], x[3] = 1.0, 0.0, torch.where(torch.arange(12) % 3 == 0, -0.0, 0.0)
    x[4, [2, 7]] = torch.tensor(torch.inf, dtype=dtype) - torch.inf
    x[5, [1, 8, 9]], x[6] = torch.nan, -torch.inf
    x[7:] = torch.randint(0, 3, (2, 12)).to(dtype)
    expected = x.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
    assert torch.equal(largest_columns(x, k).sort(-1).values, expected)
    values, _ = vocab_parallel_topk(x, k)
    assert values[4:6, 0].isnan().all()


@pytest.mark.parametrize("width", [9, 64, 1000, 4099])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_groups_of_columns_change_nothing(dtype, width):
    """The k largest by the maxima of groups, among equals the first ones, and the same by keys."""
    x = torch.randn(12, width + 5).to(dtype)[:, :width]
    x[1], x[2, ::2], x[3, 1::7] = 1.0, 5.0, torch.nan
    x[4], x[5, -3:] = torch.arange(width), torch.inf
    x[6:9] = torch.randint(0, 3, (3, width)).to(dtype)
    x[9], x[9, -1] = -torch.inf, -2.0
    for k in (1, 2, 7, 128):
        if k > width:
            continue
        expected = x.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
        assert torch.equal(largest_columns(x, k).sort(-1).values, expected)
        assert torch.equal(largest._largest_of_keys(x, k).sort(-1).values, expected)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_few_columns_are_sorted(device):
    on = torch.device(device)
    assert largest.copied_numbers(152064, 1, on) < 4 * 1000
    assert largest.copied_numbers(152064, 128, on) < 4 * 5000
    assert largest.copied_numbers(1000, 999, on) == 4 * 1000


def test_a_nan_of_either_sign_is_the_largest_by_keys_too():
    """What a GPU takes; a NaN that a CPU makes has its sign bit set."""
    nan = torch.tensor([-torch.inf]) - torch.tensor([-torch.inf])
    x = torch.tensor([[1.0, 3.0, 2.0, 5.0]])
    x[0, 2] = torch.copysign(nan, torch.tensor(-1.0))[0]
    x = torch.cat([x, x.roll(1, 1)])
    assert largest._largest_of_keys(x, 1).tolist() == [[2], [3]]
    assert largest._largest_of_keys(x.bfloat16(), 2).sort().values.tolist() == [[2, 3], [0, 3]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_keys_tell_what_the_dtype_tells(dtype):
    x = torch.randn(5, 24).to(dtype)
    tiny = torch.finfo(dtype).tiny
    x[0] = 1.0 + torch.finfo(dtype).eps * torch.arange(24).to(dtype) % 7
    x[1] = tiny * torch.randperm(24).to(dtype)
    x[2] = torch.tensor([0.0, -0.0] * 12)
    x[3, ::3] = -torch.inf
    x[4, 1::5] = torch.inf
    kept = x.clone()
    for k in (1, 7, 23):
        columns = largest._largest_of_keys(x, k).sort(-1).values
        expected = x.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
        assert torch.equal(columns, expected)
        assert torch.equal(largest_columns(x, k).sort(-1).values, expected)
        assert torch.equal(x.signbit(), kept.signbit())
        assert torch.equal(x, kept)


# ---- gather -------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_softmax", [False, True])
def test_gradients_of_one_id_add_up_in_float32(log_softmax):
    """50 entries over 3 ids: summed in bfloat16 they would be far off."""
    ids, logits = torch.randint(0, 3, (9, 50)) * 7, torch.randn(9, VOCAB).bfloat16()
    upstream, grads = torch.randn(9, 50), []
    for x in (logits, logits.float()):
        leaf = x.requires_grad_()
        out = vocab_parallel_gather(leaf, ids, log_softmax=log_softmax)
        grads.append(torch.autograd.grad(out, leaf, upstream)[0])
    assert torch.equal(grads[0], grads[1].bfloat16())


def test_no_ids():
    logits = torch.randn(3, VOCAB, requires_grad=True)
    out = vocab_parallel_gather(logits, torch.zeros(3, 0, dtype=torch.int64), log_softmax=True)
    assert out.shape == (3, 0)
    out.sum().backward()
    assert not logits.grad.any()


# ---- filters ------------------------------------------------------------------------------------


def _both_off(whole: Tensor, target: Tensor) -> None:
    logits = shard(whole)[1]
    common = {"tp_group": world_group(), "vocab_size": 17, "temperature": 0.7}
    expected = vocab_parallel_logprobs(logits, target, **common)
    for top_k in (None, 0, -1, VOCAB, 10**6, 17):
        found = vocab_parallel_sampling_logprobs(logits, target, top_k=top_k, **common)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("world", [1, 2])
def test_both_off_is_the_plain_logprob(ranks, world):
    on_ranks(ranks, world, _both_off, torch.randn(9, VOCAB), make_target((9,), 17))


def test_the_largest_and_smallest_numbers():
    whole = torch.randn(4, VOCAB)
    whole[0, 2], whole[1], whole[2] = 3e38, -3e38, -torch.inf
    whole[2, 13] = -2.0
    target = torch.tensor([2, 0, 13, 5])
    for options in ({"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}):
        found = vocab_parallel_sampling_logprobs(whole, target, **options)
        assert found[[0, 2]].tolist() == [0.0, 0.0]
        assert not found.isnan().any()


def _sent(whole: Tensor, target: Tensor, options: dict) -> list[str]:
    with CollectivesMade() as made:
        logits = shard(whole)[1]
        vocab_parallel_sampling_logprobs(logits, target, tp_group=world_group(), **options)
    return made.names


def test_collectives_of_peaked_rows(ranks):
    whole = torch.randn(20, 4000) * 5
    for options, more in (
        ({"top_p": 0.9}, ["all_reduce"]),
        ({"top_k": 50}, []),
        ({"top_k": 50, "top_p": 0.9}, ["all_reduce"]),
    ):
        for names in ranks(2).run(_sent, whole, whole.argmax(-1), options):
            assert names == ["all_gather", *more]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_the_search_takes_as_many_rounds_as_suffice(dtype, monkeypatch):
    """On a GPU nobody asks whether it is done: the same cut, found by a number of rounds alone."""
    logits = torch.randn(8, 3000).mul(1e-2)
    logits[1], logits[2, ::2], logits[3] = 0.0, 1.0, torch.randn(3000) * 50.0
    logits[4], logits[5, 7:], logits[6] = logits[4] - 3e4, -torch.inf, logits[6] * 1e-4
    logits[7] = torch.randint(0, 3, (3000,)).float()
    logits = logits.to(dtype)
    target = logits.argsort(-1, descending=True)[:, 900]
    cases = ({"top_p": 0.5}, {"top_k": 1500}, {"top_k": 1500, "top_p": 0.7}, {"top_p": 0.999})
    want = [vocab_parallel_sampling_logprobs(logits, target, **options) for options in cases]
    monkeypatch.setattr(sampling_cut, "_candidates", lambda top_k: 1)
    asked = []
    # Asked before each round; None: never done before the rounds are through.
    never = property(lambda own: asked.append(bool((own.high - own.low == 1).all())))
    monkeypatch.setattr(sampling_search._Interval, "is_one_value", never)
    for options, expected in zip(cases, want, strict=True):
        asked.clear()
        found = vocab_parallel_sampling_logprobs(logits, target, **options)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert len(asked) >= 13, "every row is searched for"
        assert asked[-1], "the last round but one found every cut"


@pytest.mark.parametrize(("top_k", "top_p"), [(2, None), (None, 0.9)])
def test_a_target_made_again_below_the_cut_keeps_its_gradient(top_k, top_p):
    """A backward from hidden states multiplies again, and a GPU may round the second time."""
    logits = torch.tensor([[3.0, 2.0, -4.0, -5.0]])
    column, keep = torch.tensor([1]), torch.tensor([True])
    shard = VocabShard.of(4, None, None)
    opts = sampling_search.FilterOptions(shard, 1.0, top_k, top_p)
    source = given_logits(logits)
    local_sum = (logits - logits.max()).exp().sum(-1)
    cut = sampling_cut.find_cut(source, list(source.chunks()), local_sum, column, keep, opts)
    assert cut.limit.item() == -1.0, "the target is the last one kept"
    upstream = torch.tensor([0.7])
    gradient = CutGradient(upstream, keep, column, SavedCut.of(cut), opts)
    again = torch.nextafter(logits, torch.tensor(-torch.inf))
    probability = torch.softmax(logits[0, :2].double(), 0)[1]
    found = gradient.of_logits(again, slice(0, 1))[0, 1]
    torch.testing.assert_close(found.double(), 0.7 * (1.0 - probability), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_k": 3}, {"top_k": 7}, {"min_p": 1e-9}])
def test_a_disallowed_target_has_no_gradient_of_its_own_under_a_filter(filters):
    """Also where fewer ids are left than top-k keeps, and the k-th largest logit is -inf."""
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    target, upstream = torch.tensor([2, 6, 5]), torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
    disallowed = list(range(6))
    masked = (hidden @ weight.t()).index_fill(1, torch.tensor(disallowed), -torch.inf)
    allowed = masked.log_softmax(-1).gather(1, target.unsqueeze(1)).squeeze(1)
    expected = torch.autograd.grad(allowed, [hidden, weight], upstream)
    options = {"disallowed_ids": disallowed, **filters}
    for found in (
        linear_sampling_logprobs(hidden, weight, target, **options),
        vocab_parallel_sampling_logprobs(hidden @ weight.t(), target, **options),
    ):
        torch.testing.assert_close(found, allowed)
        assert found.isneginf().tolist() == [True, False, True]
        torch.testing.assert_close(torch.autograd.grad(found, [hidden, weight], upstream), expected)
