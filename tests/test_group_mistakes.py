"""Operations over a CP or data-parallel group of which one rank is called with something wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mcore_logprobs as ml
from mcore_logprobs import collectives, consistency, losses
from mcore_logprobs.bench.counting import CollectivesMade
from tests.helpers.distributed import RankError, get_pool

X, MASK = torch.linspace(-2, -1, 16).view(2, 8), torch.ones(2, 8)


def call(operation: str, **changes: Any) -> Any:
    """One of the operations that talk over a group; the same arguments on every rank."""
    group = dist.group.WORLD
    x, mask = changes.pop("x", X), changes.pop("mask", MASK)
    loss = changes.pop("loss", losses.M2POLoss())
    advantages = changes.pop("advantages", X)
    control = losses.AdaptiveEntropy(value=changes.pop("value", 0.0))
    calls: dict[str, Callable[[], Any]] = {
        "gather": lambda: ml.context_parallel_gather(x, cp_group=group, **changes),
        "shift": lambda: ml.context_parallel_shift(x, cp_group=group, **changes),
        "gather_cp": lambda: ml.TokenStats(x, None, None, x).gather_cp(group, **changes),
        "aggregation": lambda: losses.aggregation(mask, group=group, **changes),
        "after": lambda: control.after(x, mask, group=group),
        "top_entropy_mask": lambda: losses.top_entropy_mask(x, mask, group=group, **changes),
        "second_pass": lambda: loss.second_pass(x, X, advantages, mask, group=group, **changes),
        "kto_reference": lambda: losses.kto_reference(x, X, group=group),
    }
    return calls[operation]()


def refusal(operation: str, changes: dict[str, Any]) -> str:
    """Why the call is refused, or nothing."""
    try:
        call(operation, **changes)
    except ValueError as error:
        return str(error)
    return ""


def left_in_the_store() -> str:
    dist.barrier()  # every rank is done with it
    reason = collectives._reason_left(dist.group.WORLD)
    dist.barrier()
    return reason


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("gather", {"x": X[:, :7]}, "sequence length: expected a multiple of"),
    ("gather", {"x": None}, "x: expected a torch.Tensor, got NoneType"),
    ("gather", {"grad": "mean"}, "grad: expected one of"),
    ("gather", {"cu_seqlens": torch.tensor([0, 6, 16])}, "cu_seqlens: expected to "),
    ("shift", {"layout": "ring"}, "layout: expected one of"),
    ("shift", {"fill": "0"}, "fill: expected a number, got str"),
    ("shift", {"lengths": [99]}, "lengths: expected 0 to the padded lengths"),
    ("gather_cp", {"seq_dim": 2}, "seq_dim: out of range for shape (2, 8), got 2"),
    ("aggregation", {"mask": None}, "mask: expected a torch.Tensor, got NoneType"),
    ("aggregation", {"mask": 2 * MASK}, "mask: expected only 0"),
    ("aggregation", {"mode": "tokens"}, "mode: expected one of"),
    ("aggregation", {"mode": "prompt", "answers": 3}, "answers: expected a divisor of the 2"),
    ("after", {"mask": None}, "mask: expected the shape (2, 8) of the others, got NoneType"),
    ("after", {"x": None}, "entropy: expected a torch.Tensor, got NoneType"),
    ("top_entropy_mask", {"share": 0}, "share: expected a number in (0, 1]"),
    ("top_entropy_mask", {"mask": MASK[:1]}, "mask: expected the shape (2, 8) of the others"),
    ("second_pass", {"mask": MASK[0]}, "mask: expected the shape (2, 8) of the others"),
    ("second_pass", {"x": None}, "logprobs: expected a torch.Tensor, got NoneType"),
    ("second_pass", {"x": X[:1]}, "advantages: expected a number or a tensor"),
    ("second_pass", {"loss": losses.ClippedLoss()}, "second_pass: expected an objective of two"),
    ("kto_reference", {"x": None}, "logprobs: expected a torch.Tensor, got NoneType"),
    ("kto_reference", {"x": X[0]}, "ref_logprobs: expected the shape (8,) of the others"),
]


def first_call(case: tuple[str, dict[str, Any]]) -> tuple[str, str, str]:
    """What the first call says where the last rank alone is wrong, then the same with no fault;
    then what is left in the store."""
    operation, changes = case
    consistency._agreed.clear()
    is_wrong = dist.get_rank() == dist.get_world_size() - 1
    found = refusal(operation, changes if is_wrong else {})
    after = refusal(operation, {})
    return found, after, left_in_the_store()


@pytest.mark.parametrize("world", [2, 3])
def test_a_first_call_that_one_rank_refuses_raises_on_every_rank(ranks, world):
    cases = [(operation, changes) for operation, changes, _ in MISTAKES]
    answers = ranks(world).run_many(first_call, cases, timeout=20)
    for (operation, _, expected), found in zip(MISTAKES, answers, strict=True):
        *others, (wrong, *settled) = found
        assert wrong.startswith(expected), wrong
        for told, *rest in others:
            assert f" on rank {world - 1}: {expected}" in told, (operation, told)
            assert told.startswith("another rank stopped: "), told
            assert rest == settled == ["", ""]


DIFFERENT: list[tuple[str, dict[str, Any], str]] = [
    ("gather", {"x": X[:1]}, "x.shape: {} [2, 8] on rank 0, [1, 8] on rank 1"),
    ("gather", {"x": X.double()}, "x.dtype: {} torch.float32 on rank 0, torch.float64 on rank 1"),
    (
        "gather",
        {"x": X.clone().requires_grad_()},
        "x.requires_grad: {} False on rank 0, True on rank 1",
    ),
    (
        "shift",
        {"x": X.clone().requires_grad_()},
        "x.requires_grad: {} False on rank 0, True on rank 1",
    ),
    ("gather", {"layout": "contiguous"}, "layout: {} 'zigzag' on rank 0, 'contiguous' on rank 1"),
    ("gather", {"grad": "slice"}, "grad: {} 'sum' on rank 0, 'slice' on rank 1"),
    ("gather", {"cu_seqlens": torch.tensor([0, 8, 16])}, "cu_seqlens: {} (2,) int64 [0, 16] hash"),
    ("shift", {"fill": -100}, "fill: {} 0.0 on rank 0, -100.0 on rank 1"),
    ("shift", {"lengths": [9]}, "lengths: {} (1,) int64 [16] hash"),
    ("gather_cp", {"seq_dim": 0}, "seq_dim: {} 1 on rank 0, 0 on rank 1"),
    ("aggregation", {"mode": "sequence"}, "mode: {} 'token' on rank 0, 'sequence' on rank 1"),
    ("aggregation", {"averaged_ranks": 2}, "averaged_ranks: {} 1 on rank 0, 2 on rank 1"),
    ("after", {"value": 0.5}, "control.value: {} 0.0 on rank 0, 0.5 on rank 1"),
    ("top_entropy_mask", {"share": 0.5}, "share: {} 0.2 on rank 0, 0.5 on rank 1"),
    ("top_entropy_mask", {"x": X.half()}, "dtype: {} torch.float32 on rank 0, torch.float16 on"),
    ("second_pass", {"loss": losses.KLCovLoss()}, "objective: {} 'M2POLoss' on rank 0, 'KLCov"),
    ("second_pass", {"loss": losses.M2POLoss(0.1)}, "settings.threshold: {} 0.04 on rank 0, 0.1"),
    (
        "second_pass",
        {"advantages": X.double()},
        "dtypes: {} "
        + " on rank 0, ".join(f"[{2 * 'torch.float32, '}torch.float{n}]" for n in (32, 64)),
    ),
]


def other_arguments(case: tuple[str, dict[str, Any], str]) -> tuple[str, list[str]]:
    operation, changes, level = case
    consistency._agreed.clear()
    with mock.patch.dict(os.environ, {consistency.VARIABLE: level}), CollectivesMade() as made:
        return refusal(operation, changes if dist.get_rank() == 1 else {}), made.names


@pytest.mark.parametrize("level", ["", "1"])
def test_other_arguments_on_a_rank_raise_on_every_rank(ranks, level):
    """At the first call; with the check in every call."""
    cases = [(operation, changes, level) for operation, changes, _ in DIFFERENT]
    answers = ranks(2).run_many(other_arguments, cases, timeout=20)
    for (*_, expected), found in zip(DIFFERENT, answers, strict=True):
        for said, made in found:
            if level == "1":
                assert said.startswith("the ranks of the group make different calls; "), said
                assert expected.replace(" {}", "") in said
                assert made == ["all_gather"]
            else:
                expected_start = expected.format(
                    "expected the same on every rank of the group, got"
                )
                assert said.startswith(expected_start), said
                assert made == []


def slices_that_learn_on_one_rank() -> str:
    consistency._agreed.clear()
    x = X.clone().requires_grad_(dist.get_rank() == 1)
    return refusal("gather", {"x": x, "grad": "slice"})


def test_what_no_backward_sends_may_require_a_gradient_on_one_rank(ranks):
    assert ranks(2).run(slices_that_learn_on_one_rank, timeout=20) == ["", ""]


def other_numbers_of_answers() -> str:
    consistency._agreed.clear()
    options = {"mode": "prompt", "answers": 3 if dist.get_rank() else 2}
    return refusal("aggregation", {"mask": torch.ones(6, 8), **options})


def test_other_numbers_of_answers_raise_on_every_rank(ranks):
    for said in ranks(2).run(other_numbers_of_answers, timeout=20):
        assert said.startswith("answers: expected the same on every rank of the group, got 2 on")


def another_operation() -> str:
    consistency._agreed.clear()
    return refusal("aggregation" if dist.get_rank() else "kto_reference", {})


def test_another_operation_on_a_rank_raises_on_every_rank(ranks):
    for said in ranks(2).run(another_operation, timeout=20):
        assert said.startswith("operation: expected the same on every rank of the group, got kto")


def own_arguments() -> list[str]:
    consistency._agreed.clear()
    rank = dist.get_rank()
    own: list[tuple[str, dict[str, Any]]] = [
        ("aggregation", {"mask": MASK[:, : 3 + rank], "micro_batches": 1 + rank}),
        ("after", {"x": X[:, : 3 + rank], "mask": MASK[:, : 3 + rank]}),
        ("top_entropy_mask", {"mask": MASK * (torch.arange(8) > rank)}),
        ("gather", {"cu_seqlens": torch.tensor([0, 16]) if rank else None}),
        ("second_pass", {"advantages": X.long() if rank else X.bfloat16()}),
    ]
    return [refusal(*each) for each in own]


def test_what_is_a_rank_s_own_may_differ(ranks):
    assert ranks(2).run(own_arguments, timeout=20) == [[""] * 5] * 2


# ---- later calls ---------------------------------------------------------------------------------


def refuses_a_later_call(operation: str, changes: dict[str, Any], ends: bool) -> None:
    """Rank 1 does, and its process ends; or it goes on, and ends after its next call."""
    consistency._agreed.clear()
    assert refusal(operation, {}) == ""
    if dist.get_rank() != 1:
        call(operation)
    assert refusal(operation, changes)
    if not ends:
        consistency._PATIENCE["cpu"] = 0.5
        said = refusal(operation, {})
        assert said.endswith(
            "expected the same call on every rank of the group, got one on rank 1, which has "
            "raised before, and none within 0.5 s on every other rank"
        ), said
    os._exit(1)


NAMES = {"gather": "context_parallel_gather", "aggregation": "aggregation"}
NAMES |= {"top_entropy_mask": "top_entropy_mask"}
LATER = [MISTAKES[2], MISTAKES[10], MISTAKES[14]]


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "goes on"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("operation", "changes", "expected"), LATER)
def test_the_others_are_told_why_a_rank_ended(operation, changes, expected, world, ends):
    pool = get_pool(world)
    with pytest.raises(RankError) as caught:
        pool.run(refuses_a_later_call, operation, changes, ends, timeout=20)
    pool.close()
    told, ended, *more = caught.value.errors
    assert str(ended) == "the process died"
    for error in (told, *more):
        assert isinstance(error, ValueError)
        assert f"another rank stopped: {NAMES[operation]} on rank 1: {expected}" in str(error)


def all_refuse_alike() -> tuple[list[str], str, list[str]]:
    """In a first call and in a later one; each rank late in turn."""
    consistency._agreed.clear()
    said = []
    for turn in range(4):
        if dist.get_rank() == turn % 2:
            time.sleep(0.2)
        said.append(refusal("aggregation", {"mode": "tokens"} if turn in (0, 2) else {}))
    left = left_in_the_store()
    with CollectivesMade() as made:
        said.append(refusal("aggregation", {}))
    return said, left, made.names


def test_ranks_that_all_refuse_go_on(ranks):
    for said, left, made in ranks(2).run(all_refuse_alike, timeout=20):
        assert [bool(each) for each in said] == [True, False, True, False, False]
        assert left == ""
        assert made == ["all_reduce"]


def one_is_late(changes: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The first call, of which rank 0 compares nothing, and calls after it."""
    consistency._agreed.clear()
    consistency._PATIENCE["cpu"] = 0.2
    try:
        if dist.get_rank() == 1:
            time.sleep(1.0)
        with CollectivesMade() as made:
            said = [refusal("aggregation", changes) for changes in ({}, {}, {})]
            consistency._PATIENCE["cpu"] = 30.0
            said.append(refusal("kto_reference", {}))
        return said, made.names
    finally:
        consistency._PATIENCE["cpu"] = 30.0


def test_a_rank_may_be_late(ranks):
    for said, made in ranks(2).run(one_is_late, {}, timeout=20):
        assert said == [""] * 4
        assert made == ["all_reduce"] * 4


def refuses_late() -> None:
    """The first call: rank 0 waits for it in the collective by then."""
    consistency._agreed.clear()
    if dist.get_rank() == 0:
        consistency._PATIENCE["cpu"] = 0.1
        call("aggregation")
    time.sleep(1.5)
    assert refusal("aggregation", {"mode": "tokens"})
    os._exit(1)


def test_a_late_rank_s_refusal_is_told_too():
    with pytest.raises(RankError) as caught:
        get_pool(2).run(refuses_late, timeout=20)
    get_pool(2).close()
    told, _ = caught.value.errors
    assert isinstance(told, ValueError)
    assert "another rank stopped: aggregation on rank 1: mode: expected one of" in str(told)


OPERATIONS = dict.fromkeys(operation for operation, *_ in MISTAKES)


def later_calls(operation: str) -> tuple[int, list[str]]:
    """How often a later call asks for the store, and its collectives."""
    call(operation)
    with (
        mock.patch.object(consistency, "group_store", wraps=consistency.group_store) as one,
        mock.patch.object(collectives, "group_store", wraps=collectives.group_store) as other,
        CollectivesMade() as made,
    ):
        call(operation)
    return one.call_count + other.call_count, made.names


def test_later_calls_cost_nothing(ranks):
    found = ranks(2).run_many(later_calls, OPERATIONS, timeout=20)
    names = {"gather": ["all_gather"], "shift": ["all_gather"], "gather_cp": ["all_gather"] * 2}
    names |= {"top_entropy_mask": ["all_gather"] * 2, "second_pass": ["all_gather"] * 2}
    for operation, each in zip(OPERATIONS, found, strict=True):
        assert each == [(0, names.get(operation, ["all_reduce"]))] * 2
