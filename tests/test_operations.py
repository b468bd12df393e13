"""Every operation of the table `ops.py`: values, gradients, tensors changed in between, mistakes.

A case that fails says the line that reruns it alone. The night's part adds random cases to those
that hold every pair of settings: 100 an operation, or MCORE_LOGPROBS_DEEP.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import random
from collections import Counter
from typing import Any

import pytest

from mcore_logprobs.debug import invariance
from mcore_logprobs.kernels.stats import RowResults
from mcore_logprobs.ops.row_statistics import Statistics
from tests.engine import cases, run
from tests.helpers.covering import covering
from tests.helpers.distributed import get_pool
from tests.ops import FLAGS, OPERATIONS, PER_TOKEN

DEEP = int(os.environ.get("MCORE_LOGPROBS_DEEP", "100"))
CALLS = [(name, source) for name, op in OPERATIONS.items() for source in op.sources]


def passes(some: list[cases.Case]) -> None:
    found = run.failures(some)
    report = "\n".join([f"{len(found)} of {len(some)} cases fail:", *found])
    assert not found, report


# By day, of the functions that give one statistic, one: the table's token_stats has all of them.
ONE_STATISTIC = ("entropy", "target_rank")
BY_DAY = [call for call in CALLS if call[0] not in ONE_STATISTIC]


@pytest.mark.parametrize(("name", "source"), BY_DAY)
def test_every_pair_with_an_option_of_its_own(name: str, source: str) -> None:
    passes(cases.fewer_cases_of(OPERATIONS[name], source))


Pair = tuple[tuple[str, Any], ...]


def pairs_of(some: list[cases.Case]) -> set[Pair]:
    """(name, value) twice, each pair once however many cases have it."""
    return {
        pair for case in some for pair in itertools.combinations(sorted(case.setting.items()), 2)
    }


@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_every_pair_of_settings_is_tried_by_day(source: str) -> None:
    """Of the settings that operations share: with two operations, or with all that have it."""
    by_day, possible = Counter[Pair](), Counter[Pair]()
    for name in (name for name, other in BY_DAY if other == source):
        op = OPERATIONS[name]
        by_day.update(pairs_of(cases.fewer_cases_of(op, source)))
        own = (op.axes | op.options).keys()
        every_pair = pairs_of(cases.cases_of(op, source))
        possible.update(pair for pair in every_pair if own.isdisjoint(dict(pair)))
    assert len(possible) > 1000
    assert [pair for pair, count in possible.items() if by_day[pair] < min(2, count)] == []


@pytest.mark.night
@pytest.mark.parametrize(("name", "source"), CALLS)
def test_every_pair_of_settings(name: str, source: str) -> None:
    passes(cases.cases_of(OPERATIONS[name], source))


@pytest.mark.night
@pytest.mark.parametrize(("name", "source"), CALLS)
def test_random_settings(name: str, source: str) -> None:
    drawn = cases.random_cases(OPERATIONS[name], source, random.SystemRandom())
    passes(list(itertools.islice(drawn, DEEP)))


@pytest.mark.night
@pytest.mark.parametrize(("name", "source"), CALLS)
def test_under_torch_compile(name: str, source: str) -> None:
    passes(cases.compiled_cases(OPERATIONS[name], source))


@pytest.mark.night
@pytest.mark.parametrize(("name", "source"), CALLS)
def test_with_symbolic_sizes_under_torch_compile(name: str, source: str) -> None:
    passes(cases.symbolic_cases(OPERATIONS[name], source))


@pytest.mark.parametrize("name", ["logprobs", pytest.param("topk", marks=pytest.mark.night)])
def test_a_rank_of_padding_under_torch_compile(name: str) -> None:
    """What it sends is constant, which torch would send in the backward once more."""
    words = ("logits", "tp=2", "vocab=66", "vocab_size=11", "compiled=aot_eager")
    passes([cases.parse([name, *words])])


@pytest.mark.parametrize("name", [name for name, source in CALLS if source == "hidden"])
def test_several_blocks_of_columns(name: str) -> None:
    passes(cases.wide_cases(OPERATIONS[name]))


def test_one_row_and_none() -> None:
    passes(list(cases.unusual_cases()))


def test_odd_widths() -> None:
    passes(list(cases.narrow_cases()))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_group_that_is_not_the_world(sequence_parallel: bool) -> None:
    """Four ranks, of which each two are a TP group with a batch of their own."""
    pairs = [
        tuple(cases.parse([name, source, "tp=2", f"seed={seed}"]) for seed in (1, 2))
        for name, source in CALLS
    ]
    if sequence_parallel:
        told = {"sequence_parallel": True, "lead": "[s, b]"}
        pairs = [
            tuple(dataclasses.replace(case, setting=case.setting | told) for case in pair)
            for pair in pairs
            if pair[0].source == "hidden"
        ]
    for pair, found in zip(pairs, get_pool(4).run_many(run.on_subgroup, pairs), strict=True):
        assert isinstance(found, list), found
        run.check(pair[0], found[:2])
        run.check(pair[1], found[2:])


DIFFERENTIABLE = [(name, source) for name, source in CALLS if OPERATIONS[name].differentiable]


@pytest.mark.parametrize(("name", "source"), DIFFERENTIABLE)
def test_tensors_changed_between_forward_and_backward(name: str, source: str) -> None:
    """The backward raises torch's error, or gives the gradient at the values of the forward."""
    passes(cases.tampered_cases(OPERATIONS[name], source))


@pytest.mark.parametrize(("name", "source"), CALLS)
def test_mistakes_are_refused_on_every_rank_before_any_collective(name: str, source: str) -> None:
    words = ["tp=2", "ignored=True", *(["bias=True", "lora=True"] if source == "hidden" else [])]
    case = cases.parse([name, source, *words])
    for found in get_pool(2).run(run.refusals, case):
        assert found
        for expected, message, sent in found:
            assert expected in message
            assert sent == []


def test_a_wrong_operation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient a thousandth off in one token fails each case; the line reruns the case."""
    import torch

    right = OPERATIONS["logprobs"]

    def wrong(*args: object, **options: object) -> torch.Tensor:
        out = right.from_logits(*args, **options)  # type: ignore[misc]
        return out + 1e-3 * (out - out.detach()) * (out == out.min())

    case = cases.parse(["logprobs", "logits", "dtype=float64", "layout=transposed"])
    passes([case])
    monkeypatch.setitem(OPERATIONS, "logprobs", dataclasses.replace(right, from_logits=wrong))
    (message,) = run.failures([case])
    assert "dlogits: error" in message
    line = message.splitlines()[0].removeprefix("python -m tests.engine ")
    assert str(cases.parse(line.split())) == str(case)


def test_the_table_has_every_statistic() -> None:
    """What tests make from it asks for all there are; one that is missing is never tried."""
    flags = inspect.signature(Statistics.of).parameters.values()
    assert {p.name for p in flags if p.default is False} == set(FLAGS)
    assert set(RowResults._fields) == set(PER_TOKEN)
    assert {name: True for name in FLAGS if name != "target_rank"} == invariance._FLAGS


def test_covering_holds_every_pair_that_fits() -> None:
    axes = {"a": (0, 1, 2), "b": ("x", "y"), "c": (None, 5, 7), "d": (False, True), "e": (0, 1)}

    def fits(row: dict) -> bool:
        return not (row.get("a") == 2 and row.get("b", "y") == "x") and row.get("e") != 1

    rows = covering(axes, fits, [("a", "c", "d")])
    assert len(rows) <= 20
    everything = [dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values())]
    for names in [*itertools.combinations(axes, 2), ("a", "c", "d")]:
        held, possible = (
            {tuple(row[name] for name in names) for row in some if fits(row)}
            for some in (rows, everything)
        )
        assert held == possible, names
