"""What vocab_parallel_token_stats costs: collectives and memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mcore_logprobs import vocab_parallel_token_stats
from mcore_logprobs.bench.counting import CollectivesMade
from tests.helpers.memory import TensorsMade
from tests.logits.common import (
    VOCAB,
    make_target,
    on_ranks,
    shard,
    world_group,
)

ALL = {"entropy": True, "target_rank": True}


def _traffic(options: dict, dtype: torch.dtype, chunk_size: int | None) -> tuple:
    _, logits = shard(torch.randn(32, 8 * dist.get_world_size()).to(dtype))
    target = make_target((32,), logits.shape[-1])
    with CollectivesMade() as forward:
        out = vocab_parallel_token_stats(
            logits, target, tp_group=world_group(), chunk_size=chunk_size, **options
        )
    with CollectivesMade() as backward:
        out.logprobs.sum().backward()
    return forward.names, forward.nbytes, backward.names


@pytest.mark.parametrize("chunk_size", [None, 5])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("options", "numbers"),
    [({}, 3), ({"entropy": True}, 4), ({"entropy": True, "label_smoothing": 0.1}, 6)],
    ids=["plain", "entropy", "smoothing"],
)
def test_one_all_gather_forward_and_nothing_backward(ranks, world, options, numbers, chunk_size):
    for names, nbytes, backward in ranks(world).run(_traffic, options, torch.bfloat16, chunk_size):
        assert names == ["all_gather"]
        assert nbytes == numbers * 32 * 4
        assert backward == []


def test_the_rank_takes_one_collective_more(ranks):
    for names, nbytes, backward in ranks(2).run(_traffic, ALL, torch.float32, 5):
        assert len(names) == 2
        assert names[-1] == "all_gather"
        assert nbytes <= (5 + 1) * 32 * 4
        assert backward == []


def _alone() -> list[str]:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    logits = torch.randn(4, VOCAB, requires_grad=True)
    with CollectivesMade() as made:
        out = vocab_parallel_token_stats(
            logits, make_target((4,), VOCAB), tp_group=alone, entropy=True, target_rank=True
        )
        out.logprobs.sum().backward()
    return made.names


def test_a_group_of_one_says_nothing(ranks):
    assert ranks(2).run(_alone) == [[], []]


def _allocations(dtype: torch.dtype, options: dict, chunk_size: int) -> tuple:
    rows, vocab = 64, 1024 * dist.get_world_size() if dist.is_initialized() else 1024
    leaf, logits = shard(torch.randn(2, rows, vocab).to(dtype).transpose(0, 1), "transposed")
    target = make_target((rows, 2), vocab)
    with TensorsMade() as forward:
        out = vocab_parallel_token_stats(
            logits, target, tp_group=world_group(), chunk_size=chunk_size, **options
        )
    after_forward = forward.live
    total = out.logprobs.sum()
    if out.entropy is not None:
        total = total + out.entropy.sum()
    with TensorsMade() as backward:
        total.backward()
    chunk = chunk_size * 1024 * 4  # one chunk in float32
    return leaf.nbytes, chunk, forward, after_forward, backward


def _summary(dtype: torch.dtype, options: dict, chunk_size: int) -> tuple:
    nbytes, chunk, forward, after, backward = _allocations(dtype, options, chunk_size)
    large = [made for made in backward.made if made.nbytes > 2 * chunk]
    return nbytes, chunk, forward.made, forward.peak, after, large, backward.peak


@pytest.mark.parametrize(
    "options",
    [{}, ALL, ALL | {"temperature": 0.5, "softcap": 9.0, "label_smoothing": 0.1}],
    ids=["plain", "all", "everything"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_the_gradient_is_the_only_tensor_of_the_logits_size(ranks, world, dtype, options):
    for nbytes, chunk, made, peak, after, large, backward_peak in on_ranks(
        ranks, world, _summary, dtype, options, 4
    ):
        rows = 128 * 8 * 32  # a few numbers a row (and what the wire still holds)
        assert max(m.nbytes for m in made) <= chunk
        assert peak <= 4 * chunk + rows
        assert after <= rows  # the logits themselves are all that is kept besides
        assert [m.nbytes for m in large] == [nbytes]
        assert large[0].dtype == dtype
        assert backward_peak <= nbytes + 4 * chunk + rows
