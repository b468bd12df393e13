"""Mistakes: a ValueError on every rank, before anything is sent, that says what was expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import mcore_logprobs
from mcore_logprobs.bench.counting import CollectivesMade
from tests.helpers.distributed import grid_groups
from tests.logits.common import VOCAB

WIDTH = VOCAB // 2
WITH_TARGET = (
    "vocab_parallel_logprobs",
    "vocab_parallel_token_stats",
    "vocab_parallel_target_rank",
)
WITHOUT_TARGET = ("vocab_parallel_entropy", "vocab_parallel_log_softmax")
NAN = float("nan")


def _refused(name: str, logits: Any, target: Any, options: dict) -> tuple[str, list[str]]:
    """The ValueError's message on this rank, and what was sent before it."""
    options = dict(options)
    group = options.pop("group", "world")
    if group == "world":
        options["tp_group"] = dist.group.WORLD
    elif group == "outside":  # a group that rank 0 alone is in
        alone = dist.new_group([0])
        options["tp_group"] = alone
    operands = (logits,) if name in WITHOUT_TARGET else (logits, target)
    with CollectivesMade() as made:
        try:
            getattr(mcore_logprobs, name)(*operands, **options)
        except ValueError as error:
            return str(error), made.names
    return "", made.names


def _check(ranks, name: str, logits: Any, target: Any, options: dict, *parts: str) -> None:
    for message, sent in ranks(2).run(_refused, name, logits, target, options):
        assert message, f"{name} accepted {options}"
        assert sent == []
        for part in parts:
            assert part in message, f"{part!r} is missing in: {message}"


LOGITS = torch.zeros(4, 3, WIDTH)
TARGET = torch.zeros(4, 3, dtype=torch.int64)

# what is passed, and what the message must name: the argument, what was expected, what came
OPTIONS = {
    "temperature 0": ({"temperature": 0.0}, ("temperature", "> 0", "0.0")),
    "negative temperature": ({"temperature": -1.0}, ("temperature", "> 0", "-1.0")),
    "NaN temperature": ({"temperature": NAN}, ("temperature", "nan")),
    "infinite temperature": ({"temperature": float("inf")}, ("temperature", "inf")),
    "temperature of no number": ({"temperature": "hot"}, ("temperature", "'hot'")),
    "tensor temperature": ({"temperature": torch.ones(2)}, ("temperature",)),
    "chunk_size 0": ({"chunk_size": 0}, ("chunk_size", ">= 1", "0")),
    "negative chunk_size": ({"chunk_size": -3}, ("chunk_size", "-3")),
    "chunk_size of a float": ({"chunk_size": 2.0}, ("chunk_size", "2.0")),
    "unknown backend": ({"backend": "cuda"}, ("backend", "torch", "triton", "'cuda'")),
    "vocab_size 0": ({"vocab_size": 0}, ("vocab_size", f"1 to {VOCAB}", "0")),
    "vocab_size past V": ({"vocab_size": VOCAB + 1}, ("vocab_size", f"{VOCAB}", f"{VOCAB + 1}")),
    "vocab_size of a float": ({"vocab_size": 12.0}, ("vocab_size", "12.0")),
    "no group": ({"group": None}, ("tp_group", "2 ranks")),
    "no process group": ({"group": None, "tp_group": "tp"}, ("tp_group", "ProcessGroup", "'tp'")),
}


@pytest.mark.parametrize("name", [*WITH_TARGET, *WITHOUT_TARGET])
def test_option_out_of_range(ranks, name):
    for options, parts in OPTIONS.values():
        _check(ranks, name, LOGITS, TARGET, options, *parts)


@pytest.mark.parametrize("name", ["vocab_parallel_logprobs", "vocab_parallel_token_stats"])
def test_smoothing_and_softcap_out_of_range(ranks, name):
    for value in (-0.1, 1.0, 2, NAN, "a little"):
        _check(
            ranks, name, LOGITS, TARGET, {"label_smoothing": value}, "label_smoothing", repr(value)
        )
    for value in (0.0, -30.0, NAN):
        _check(ranks, name, LOGITS, TARGET, {"softcap": value}, "softcap", repr(value))


@pytest.mark.parametrize("name", [*WITH_TARGET, *WITHOUT_TARGET])
def test_logits_of_a_wrong_kind(ranks, name):
    _check(ranks, name, LOGITS.long(), TARGET, {}, "vocab_parallel_logits", "float32", "int64")
    _check(ranks, name, LOGITS.bool(), TARGET, {}, "vocab_parallel_logits", "bool")
    _check(ranks, name, LOGITS.to(torch.complex64), TARGET, {}, "vocab_parallel_logits", "complex")
    _check(ranks, name, [[1.0, 2.0]], TARGET, {}, "vocab_parallel_logits", "Tensor", "list")
    _check(ranks, name, torch.tensor(1.0), TARGET, {}, "vocab_parallel_logits", "dimension", "()")
    _check(ranks, name, torch.zeros(4, 3, 0), TARGET, {}, "vocabulary", "0")


@pytest.mark.parametrize("name", WITH_TARGET)
def test_target_of_a_wrong_kind(ranks, name):
    _check(ranks, name, LOGITS, TARGET.float(), {}, "target", "integer", "float32")
    _check(ranks, name, LOGITS, TARGET.bool(), {}, "target", "integer", "bool")
    _check(ranks, name, LOGITS, TARGET.tolist(), {}, "target", "Tensor", "list")
    _check(ranks, name, LOGITS, None, {}, "target", "Tensor", "NoneType")
    _check(ranks, name, LOGITS, TARGET.t(), {}, "target", "(4, 3)", "(3, 4)")
    _check(ranks, name, LOGITS, TARGET.flatten(), {}, "target", "(4, 3)", "(12,)")
    _check(ranks, name, LOGITS, TARGET[..., None], {}, "target", "(4, 3)", "(4, 3, 1)")
    _check(ranks, name, LOGITS, TARGET[:1], {}, "target", "(4, 3)", "(1, 3)")
    _check(ranks, name, LOGITS, TARGET.to("meta"), {}, "target", "device", "cpu", "meta")


@pytest.mark.parametrize("name", WITH_TARGET)
@pytest.mark.parametrize(
    ("bad", "options"),
    [
        (VOCAB, {}),
        (-1, {}),
        (-101, {}),
        (2**31, {}),
        (11, {"vocab_size": 11}),  # there is such a column, but it is padding
        (-100, {"ignore_index": -1}),
        (-100, {"ignore_index": None}),
    ],
    ids=str,
)
def test_target_past_the_vocabulary(ranks, name, bad, options):
    target = TARGET.clone()
    target[1, 2] = bad
    limit = options.get("vocab_size", VOCAB)
    _check(ranks, name, LOGITS, target, options, "target", f"[0, {limit})", str(bad))


@pytest.mark.parametrize("bad", [True, -1.5, "ignored"], ids=str)
@pytest.mark.parametrize("name", WITH_TARGET)
def test_ignore_index_of_a_wrong_kind(ranks, name, bad):
    _check(ranks, name, LOGITS, TARGET, {"ignore_index": bad}, "ignore_index", "an int", repr(bad))


def test_ignore_index_of_a_wrong_kind_from_hidden_states():
    with pytest.raises(ValueError, match="ignore_index: expected None or an int, got True"):
        mcore_logprobs.linear_token_stats(
            torch.randn(3, 2), torch.randn(4, 2), TARGET[0, :3], ignore_index=True
        )


def test_flags_are_bools(ranks):
    for flag in ("entropy", "target_rank"):
        _check(ranks, "vocab_parallel_token_stats", LOGITS, TARGET, {flag: 1}, flag, "1")


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


def test_a_mistake_leaves_the_ranks_in_step(ranks):
    """After a refusal the next call works: no rank has sent anything alone."""
    _check(ranks, "vocab_parallel_logprobs", LOGITS, TARGET + VOCAB, {}, "target")
    for value in ranks(2).run(_fine):
        assert value == pytest.approx(-torch.tensor(float(VOCAB)).log().item())


def _fine() -> float:
    out = mcore_logprobs.vocab_parallel_logprobs(LOGITS, TARGET, tp_group=dist.group.WORLD)
    return out.mean().item()


def test_a_backend_that_cannot_be_had_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"triton.*CUDA"):
        mcore_logprobs.vocab_parallel_logprobs(torch.zeros(2, 4), TARGET[0, :2], backend="triton")
