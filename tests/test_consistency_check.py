"""MCORE_LOGPROBS_CHECK=1: every argument of every call is compared."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import mcore_logprobs as ml
from mcore_logprobs import collectives, consistency
from mcore_logprobs.bench.counting import CollectivesMade
from tests.test_consistency import (
    HIDDEN,
    ROWS,
    call,
    checking,
    message,
    refusal,
    scaled,
)


class _CheckAlone(CollectivesMade):
    """Raises instead of any collective but the check's: without it different calls would hang."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sent = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            is_check = not self.made and all(tensor.dtype == torch.uint8 for tensor in sent)
            assert is_check, f"{func} instead of the check, or after it"
        return super().__torch_dispatch__(func, types, args, kwargs)


def checked(operation: str, per_rank: dict[str, list[Any]]) -> tuple[str, list[str]]:
    rank = dist.get_rank()
    changes = {name: values[rank] for name, values in per_rank.items()}
    operation, width = changes.pop("operation", operation), changes.pop("width", 12)
    with checking, _CheckAlone() if per_rank else CollectivesMade() as made:
        return message(operation, width, **changes), made.names


LEARNING = [torch.ones(ROWS, HIDDEN), torch.ones(ROWS, HIDDEN).requires_grad_()]
TARGETS = [torch.tensor([0, 5, 10, 15]), torch.tensor([0, 5, 10, 14])]


@pytest.mark.parametrize(
    ("operation", "per_rank", "parts"),
    [
        ("logprobs", {"temperature": [1.0, 0.7]}, ["temperature: 1.0 on rank 0, 0.7 on rank 1"]),
        ("logprobs", {"target": TARGETS}, ["target: (4,) int64 [0, 5, 10, 15] hash", "10, 14]"]),
        (
            "logprobs",
            {"target": [TARGETS[0], TARGETS[0].int()]},
            ["target: (4,) int64", "(4,) int32", "on rank 1"],
        ),
        ("logprobs", {"rows": [4, 5]}, ["target: (4,) int64", "(5,) int64", "on rank 1"]),
        ("logprobs", {"rows": [4, 0]}, ["target: (4,) int64", "(0,) int64", "on rank 1"]),
        (
            "entropy",
            {"width": [12, 13]},
            ["columns: 12 on rank 0, 13", "(4, 12) float32 on rank 0, (4, 13) float32 on rank 1"],
        ),
        ("token_stats", {"vocab_size": [None, 20], "temperature": [2, 2]}, ["None on rank 0, 20"]),
        ("topk", {"operation": ["topk", "entropy"]}, ["operation: vocab_parallel_topk on rank 0"]),
        (
            "linear_token_stats",
            {"compact": [False, True], "target": TARGETS},
            ["compact: False on rank 0, True on rank 1", "target: "],
        ),
        ("linear_policy_loss", {"denominator": [1.0, 3]}, ["denominator: 1.0 on rank 0, 3 on"]),
        (
            "linear_policy_loss",
            {"loss_fn": [partial(scaled, by=2.0), partial(scaled, by=3.0)]},
            ["loss_fn(by=): 2.0 on rank 0, 3.0 on rank 1"],
        ),
        ("kl_div", {"kind": ["forward", "jsd"]}, ["kind: 'forward' on rank 0, 'jsd' on rank 1"]),
        ("gather", {"log_softmax": [False, True]}, ["log_softmax: False on rank 0, True on"]),
        # One rank alone would be in the backward's all-reduce.
        ("linear_topk", {"hidden": LEARNING}, ["float32 on rank 0, (4, 3) float32 that requires"]),
    ],
    ids=range(14),
)
def test_the_check_names_rank_and_value(ranks, operation, per_rank, parts):
    for found, sent in ranks(2).run(checked, operation, per_rank, timeout=60):
        assert found.startswith("the ranks of the TP group make different calls; ")
        assert sent == ["all_gather"]
        for part in parts:
            assert part in found, found


def test_an_object_is_not_told_by_its_address() -> None:
    """What a partial binds has another address on each rank."""
    one, other = (consistency._value("loss_fn(0)", object()) for _ in range(2))
    assert one == other == "<object object>"


def changes_its_width_under_the_check() -> tuple[str, float]:
    assert message("logprobs", 12) == ""
    started = time.monotonic()
    found, _ = checked("logprobs", {"width": [12, 13]})
    return found, time.monotonic() - started


def test_the_check_names_a_width_that_changes_on_one_rank_at_once(ranks):
    for found, seconds in ranks(2).run(changes_its_width_under_the_check, timeout=60):
        assert "(4, 12) float32 on rank 0, (4, 13) float32 on rank 1" in found
        assert seconds < 10.0


@pytest.mark.parametrize("operation", ["logprobs", "linear_policy_loss", "sampling"])
def test_the_check_is_one_more_collective_where_all_agree(ranks, operation):
    for found, sent in ranks(2).run(checked, operation, {}):
        assert found == ""
        assert sent[0] == "all_gather"
    once = ranks(2).run(without_the_check, operation)[0]
    assert len(sent) == len(once) + 1


def without_the_check(operation: str) -> list[str]:
    with CollectivesMade() as made:
        call(operation, 12)
    return made.names


def patched_models_that_differ(change: str) -> str:
    from mcore_logprobs.megatron import patch_gpt_model
    from tests.megatron.common import VOCAB, make_batch, megatron, mm, tiny_config

    rank = dist.get_rank()
    with megatron(tp=2) as parallel_state:
        model = mm.build_gpt_model(tiny_config(2), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        labels = batch["labels"] + (rank if change == "labels" else 0)
        temperature = 0.5 + (rank if change == "temperature" else 0)
        with checking, patch_gpt_model(model, ml.LogprobConfig(temperature=temperature)):
            return refusal(model, **batch["inputs"], labels=labels)


def test_the_check_compares_what_a_patched_model_is_asked(ranks):
    for found in ranks(2).run(patched_models_that_differ, "temperature", timeout=120):
        assert "config.temperature: 0.5 on rank 0, 1.5 on rank 1" in found
    for found in ranks(2).run(patched_models_that_differ, "labels", timeout=120):
        assert "labels: (2, 24) int64" in found
    assert ranks(2).run(patched_models_that_differ, "", timeout=120) == ["", ""]


def many_tensors(last: list[float]) -> str:
    """A call whose arguments' description is longer than the message."""
    tensors = [torch.zeros(ROWS)] * 99 + [torch.full((ROWS,), last[dist.get_rank()])]
    with checking:
        return refusal(
            ml.linear_policy_loss,
            torch.ones(ROWS, HIDDEN),
            torch.ones(12, HIDDEN),
            torch.arange(ROWS),
            lambda logprobs, entropy, *tensors: logprobs,
            *tensors,
            tp_group=dist.group.WORLD,
        )


def test_a_call_too_long_to_describe_is_compared_as_a_whole(ranks):
    assert ranks(2).run(many_tensors, [1.0, 1.0]) == ["", ""]
    for found in ranks(2).run(many_tensors, [1.0, 2.0]):
        assert "make different calls; all arguments: hash " in found


def test_where_torch_tells_no_store_nothing_is_compared():
    unknown = object()
    assert collectives.group_store(unknown) is None
    collectives.leave_reason(unknown, "why")
    assert collectives._reason_left(unknown) == ""
    own = consistency._Posted(3)
    assert consistency._posted_by_all(own, unknown, patience=0.0) == [own]


def test_a_long_argument_is_told_by_its_hash():
    one, other = (consistency._value("x", [*range(100), end]) for end in (1, 2))
    assert len(one) < 200
    assert one != other
    longest, longer = "a" * 118, "a" * 119  # and two quotation marks
    assert consistency._value("x", longest) == repr(longest)
    assert consistency._value("x", longer)[:123] == "'" + longer + "..."
    more = consistency._value("x", torch.arange(5))
    assert more[:-8] == "(5,) int64 [0, 1, 2, 3, ...] hash "


def test_values_of_a_shard_are_not_compared():
    one, other = torch.zeros(2, 3), torch.ones(2, 3)
    for name in ("hidden", "teacher_weight", "student_logits"):
        assert consistency._value(name, one) == consistency._value(name, other)
    for name in ("temperature", "per_token_tensors", "teacher_topk_logits"):
        assert consistency._value(name, one) != consistency._value(name, other)


def test_a_meta_tensor_is_compared_without_its_values():
    posted = consistency._Posted(3)
    posted.add({"target": torch.zeros(2, dtype=torch.int64, device="meta")})
    assert posted == consistency._Posted(3, options={"target": "a tensor"})


def with_another_value() -> str:
    with mock.patch.dict(os.environ, {consistency.VARIABLE: "true"}):
        return message("logprobs", 12)


def test_the_check_s_variable_is_0_or_1(ranks):
    for found in ranks(2).run(with_another_value):
        assert found == "MCORE_LOGPROBS_CHECK: expected 0 or 1, got 'true'"
