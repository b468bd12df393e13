"""What operations on logits cost: collectives and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import mcore_logprobs as ml
from mcore_logprobs import vocab_parallel_token_stats
from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.kernels import budgets
from tests.engine import run
from tests.engine.cases import parse
from tests.helpers.memory import TensorsMade
from tests.helpers.shards import (
    VOCAB,
    make_target,
    on_ranks,
    shard,
    world_group,
)
from tests.ops import OPERATIONS

ALL = {"entropy": True, "target_rank": True}

# ---- what is sent -------------------------------------------------------------------------------

# A case of the engine: collectives forward and backward.
SENT = {
    "token_stats logits entropy=True sum_pi_squared=True chunk_size=3": "all_gather |",
    "token_stats logits target_rank=True": "all_reduce all_gather |",
    "target_rank logits": "all_reduce all_gather |",
    "logprobs logits label_smoothing=0.1": "all_gather |",
    "entropy logits": "all_gather |",
    "log_softmax logits": "all_gather | all_reduce",
    "topk logits": "all_gather |",
    "argmax logits": "all_gather |",
    "gather logits": "all_reduce |",
    "gather logits log_softmax=True": "all_gather |",
    "topk_distill logits": "all_gather |",
    "topk_distill logits normalize=topk": "all_reduce |",
    "topk_distill logits normalize=topk entropy=True": "all_gather |",
    "kl_div logits": "all_gather |",
    "kl_div logits kind=jsd": "all_gather all_reduce |",
    "kl_div hidden kind=jsd": "all_gather all_reduce | all_reduce",
    "token_stats hidden lora=True frozen=A": "all_gather | all_reduce",
    "token_stats hidden lora=True": "all_gather | all_reduce all_reduce",
    "soft_cross_entropy logits": "all_gather |",
    "sampling_logprobs logits replay=True": "all_gather |",
    "answers hidden topk=3": "all_gather all_gather | all_reduce",
    "topk_kl_div logits": "all_gather |",
    "topk_kl_div hidden tail=bin": "all_gather | all_reduce",
    "sample logits": "all_gather all_gather |",
    "sample hidden top_p=0.7": "all_gather all_reduce all_gather |",
    "linear_map hidden": "all_gather | all_gather all_reduce",
    "linear_policy_loss hidden entropy=True": "all_gather all_reduce |",
    "all_to_all_vp2sp logits": "all_to_all | all_to_all",
    "all_to_all_sp2vp logits": "all_to_all | all_to_all",
}


def test_collectives_of_every_operation(ranks):
    cases = [parse([*line.split(), "tp=2"]) for line in SENT]
    found = {}
    for line, runs in zip(SENT, ranks(2).run_many(run.sent, cases), strict=True):
        assert isinstance(runs, list), runs
        assert runs[0] == runs[1]
        forward, backward = runs[0]
        found[line] = " ".join([*forward, "|", *backward])
    assert found == SENT
    assert {line.split()[0] for line in SENT} == OPERATIONS.keys()


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


@pytest.mark.parametrize(("world", "chunk_size"), [(2, 5), (3, None)])
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


@pytest.mark.parametrize(
    ("kind", "copies"),
    [
        ("forward", 3),
        ("reverse", 4),
        ("jsd", 5),
        ("skewed_forward", 6),
        ("skewed_reverse", 7),
        ("total_variation", 6),
    ],
)
def test_a_divergence_s_gradient_makes_nothing_of_its_value(kind: str, copies: int) -> None:
    """The gradient and what it takes of each column; the columns' shares would be three more."""
    student, teacher = torch.randn(8, 1000, requires_grad=True), torch.randn(8, 1000)
    value = ml.vocab_parallel_kl_div(student, teacher, kind=kind, backend="torch").sum()
    with TensorsMade() as backward:
        value.backward()
    assert len(backward.larger_than(student.nbytes - 1)) <= copies


def _allocations(dtype: torch.dtype, options: dict, chunk_size: int) -> tuple:
    rows, vocab = 64, 1024 * dist.get_world_size() if dist.is_initialized() else 1024
    leaf = shard(torch.randn(2, rows, vocab).to(dtype))[0]
    logits = leaf.transpose(0, 1)
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
@pytest.mark.parametrize(("world", "dtype"), [(1, torch.float32), (2, torch.bfloat16)], ids=str)
def test_the_gradient_is_the_only_tensor_of_the_logits_size(ranks, world, dtype, options):
    for nbytes, chunk, made, peak, after, large, backward_peak in on_ranks(
        ranks, world, _summary, dtype, options, 4
    ):
        rows = 128 * 8 * 32  # a few numbers per row (and what the wire still holds)
        assert max(m.nbytes for m in made) <= chunk
        assert peak <= 4 * chunk + rows
        assert after <= rows  # the logits themselves are all that is kept besides
        assert [m.nbytes for m in large] == [nbytes]
        assert large[0].dtype == dtype
        assert backward_peak <= nbytes + 4 * chunk + rows


@pytest.mark.parametrize("options", [{"top_k": 900}, {"top_k": 900, "top_p": 0.9}], ids=str)
def test_memory_of_a_large_top_k(options):
    """Of each row's candidates a value and a column; what is made of them is made in steps."""
    rows, copy = 256, 1 << 18
    logits = (torch.randn(rows, 4096) * 3.0).bfloat16()
    target, many = logits.argmax(-1), rows * (901 + 225)
    whole = ml.vocab_parallel_sampling_logprobs(logits, target, **options)
    sizes = replace(budgets.of("cpu"), copy_bytes=copy)
    with budgets.use(sizes), TensorsMade() as made:
        stepwise = ml.vocab_parallel_sampling_logprobs(logits, target, **options)
    assert torch.equal(stepwise, whole)
    assert made.peak <= (4 + 8) * many + 4 * copy
