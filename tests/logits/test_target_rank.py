"""vocab_parallel_target_rank: exact counts, ties, masks, and the same as token_stats gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_logprobs import vocab_parallel_target_rank, vocab_parallel_token_stats
from mcore_logprobs.bench.counting import CollectivesMade
from tests.helpers import oracles
from tests.helpers.memory import TensorsMade
from tests.logits.common import (
    DTYPES,
    LAYOUTS,
    VOCAB,
    WORLDS,
    make_target,
    on_ranks,
    shard,
    world_group,
    world_size,
)


def test_against_plain_torch_in_float64():
    """The operation on one process, line by line."""
    # 50 rows of whole numbers from 0 to 4 in 11 columns: ties in every row, and ranks of every
    # size. The last column is padding and higher than all.
    logits = torch.randint(0, 5, (50, 11)).double()
    logits[:, 10] = 9.0
    target = torch.randint(0, 10, (50,))
    target[7] = -100
    rank = vocab_parallel_target_rank(logits, target, vocab_size=10, chunk_size=8)

    for row, column, found in zip(logits.tolist(), target.tolist(), rank.tolist(), strict=True):
        if column == -100:
            assert found == -1
        else:
            assert found == sum(value > row[column] for value in row[:10])  # ties are not higher
    assert {0, 5, -1} <= set(rank.tolist())


def _ranks_both_ways(whole: Tensor, target: Tensor, layout: str, options: dict) -> Tensor:
    leaf, logits = shard(whole, layout)
    version = leaf._version
    options = {"tp_group": world_group(), **options}
    with CollectivesMade() as made:
        alone = vocab_parallel_target_rank(logits, target, **options)
    assert len(made.names) == (2 if world_size() > 1 and whole.numel() else 0)
    stats = vocab_parallel_token_stats(logits, target, target_rank=True, **options)
    assert alone.dtype == torch.int64
    assert not alone.requires_grad
    assert torch.equal(alone, stats.target_rank)
    assert leaf._version == version
    return alone


def _check(ranks, world: int, whole: Tensor, target: Tensor, options: dict, layout: str) -> None:
    exact_options = {k: v for k, v in options.items() if k not in ("chunk_size",)}
    exact = oracles.token_stats(whole, target, **exact_options).target_rank
    for found in on_ranks(ranks, world, _ranks_both_ways, whole, target, layout, options):
        assert torch.equal(found, exact)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_size": 1},
        {"chunk_size": 7, "vocab_size": 11},
        {"vocab_size": 1, "temperature": 0.3},
        {"ignore_index": 0},
        {"ignore_index": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_counts(ranks, world, dtype, options):
    whole = (torch.randn(4, 9, VOCAB) * 2).to(dtype)
    ignored = 0.0 if "ignore_index" in options else 0.2
    target = make_target((4, 9), options.get("vocab_size", VOCAB), ignored)
    _check(ranks, world, whole, target, options, "plain")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_layouts(ranks, world, layout):
    whole = torch.randn(4, 5, VOCAB)
    _check(ranks, world, whole, make_target((4, 5), VOCAB), {"chunk_size": 3}, layout)


@pytest.mark.parametrize("lead", [(), (0,), (3, 0)], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_scalars_and_nothing(ranks, world, lead):
    target = make_target(lead, VOCAB, ignored=0.0)
    _check(ranks, world, torch.randn(*lead, VOCAB), target, {}, "plain")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_ties_count_as_not_higher(ranks, world, dtype):
    whole = torch.randint(-2, 3, (64, VOCAB)).to(dtype)
    target = make_target((64,), VOCAB)
    _check(ranks, world, whole, target, {"temperature": 0.7}, "plain")
    equal = torch.zeros(8, VOCAB, dtype=dtype)
    for found in on_ranks(ranks, world, _ranks_both_ways, equal, torch.arange(8), "plain", {}):
        assert not found.any()


@pytest.mark.parametrize("softcap", [2.0, 30.0])
@pytest.mark.parametrize("world", WORLDS)
def test_softcap_and_temperature_keep_the_rank(ranks, world, softcap):
    """float32's tanh makes ties of different logits; the rank must not see them."""
    whole = torch.randn(16, VOCAB) * 200
    target = make_target((16,), VOCAB)
    exact = oracles.token_stats(whole, target).target_rank
    options = {"softcap": softcap, "temperature": 1.7}
    for found in on_ranks(ranks, world, _stats_rank, whole, target, options):
        assert torch.equal(found, exact)


def _stats_rank(whole: Tensor, target: Tensor, options: dict) -> Tensor:
    _, logits = shard(whole)
    return vocab_parallel_token_stats(
        logits, target, target_rank=True, tp_group=world_group(), **options
    ).target_rank


@pytest.mark.parametrize("world", WORLDS)
def test_extremes(ranks, world):
    whole = torch.randn(VOCAB, VOCAB)
    whole[:, 7] = -torch.inf
    whole[:, 3] = torch.inf
    target = torch.arange(VOCAB)
    found = on_ranks(ranks, world, _only_rank, whole, target)[0]
    assert found[3] == 0
    assert found[7] == VOCAB - 1
    order = whole.argsort(-1, descending=True)
    place = (order == target[:, None]).nonzero()[:, 1]
    assert torch.equal(found, place)


def _only_rank(whole: Tensor, target: Tensor) -> Tensor:
    _, logits = shard(whole)
    return vocab_parallel_target_rank(logits, target, tp_group=world_group())


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize("world", WORLDS)
def test_masked_columns_and_ignored_rows_may_hold_anything(ranks, world, junk):
    whole = torch.randn(12, VOCAB)
    target = make_target((12,), 13)
    exact = oracles.token_stats(whole, target, vocab_size=13).target_rank
    whole[:, 13:] = junk
    whole[target == -100] = junk
    for found in on_ranks(
        ranks, world, _ranks_both_ways, whole, target, "plain", {"vocab_size": 13}
    ):
        assert torch.equal(found, exact)


def test_memory_is_one_chunk():
    logits = torch.randn(256, 1024).bfloat16()
    target = make_target((256,), 1024)
    with TensorsMade() as made:
        vocab_parallel_target_rank(logits, target, chunk_size=4)
    assert made.peak <= 2 * 4 * 1024 * 4 + 256 * 8 * 12
