"""Mistakes of one rank or one group; those of every operation are in `ops.MISTAKES`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import mcore_logprobs
from mcore_logprobs.bench.counting import CollectivesMade
from tests.helpers.distributed import grid_groups
from tests.helpers.shards import VOCAB

LOGITS = torch.zeros(4, 3, VOCAB // 2)
TARGET = torch.zeros(4, 3, dtype=torch.int64)


def _not_a_member() -> tuple[str, list[str]] | None:
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        logits = torch.zeros(4, 3, VOCAB)
        out = mcore_logprobs.vocab_parallel_logprobs(logits, TARGET, tp_group=alone)
        assert torch.allclose(out, torch.tensor(float(VOCAB)).log().neg())
        return None
    with CollectivesMade() as made:
        try:
            mcore_logprobs.vocab_parallel_logprobs(LOGITS, TARGET, tp_group=alone)
        except ValueError as error:
            return str(error), made.names
    return "", made.names


def test_a_rank_outside_its_group_is_told_so(ranks):
    inside, outside = ranks(2).run(_not_a_member)
    assert inside is None
    message, sent = outside
    assert sent == []
    assert "tp_group" in message
    assert "not in the group" in message


def _different_batches() -> None:
    """TP pairs with batches of their own: only one pair is wrong, and the other must go on."""
    groups = grid_groups(tp=2, cp=2)
    bad = groups.cp.rank() == 1
    target = torch.full((4, 3), VOCAB if bad else 0)
    mcore_logprobs.vocab_parallel_logprobs(LOGITS, target, tp_group=groups.tp)


def test_the_wrong_group_fails_alone(ranks):
    results = ranks(4).run_expecting_errors(_different_batches)
    assert results[:2] == [None, None]
    for error in results[2:]:
        assert isinstance(error, ValueError)


def _too_large() -> None:
    mcore_logprobs.vocab_parallel_logprobs(LOGITS, TARGET + VOCAB, tp_group=dist.group.WORLD)


def test_a_mistake_leaves_the_ranks_in_step(ranks):
    """After a refusal the next call works: no rank has sent anything alone."""
    for error in ranks(2).run_expecting_errors(_too_large):
        assert "target" in str(error)
    for value in ranks(2).run(_fine):
        assert value == pytest.approx(-torch.tensor(float(VOCAB)).log().item())


def _fine() -> float:
    out = mcore_logprobs.vocab_parallel_logprobs(LOGITS, TARGET, tp_group=dist.group.WORLD)
    return out.mean().item()


def test_a_backend_that_cannot_be_had_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"triton.*CUDA"):
        mcore_logprobs.vocab_parallel_logprobs(torch.zeros(2, 4), TARGET[0, :2], backend="triton")
