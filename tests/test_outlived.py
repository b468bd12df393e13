"""Nothing that an operation makes outlives its call, its backward and its result.

Plain torch frees all of it by counting references; so must we, as Python's cyclic collector may be
off (`tests/helpers/outlived.py`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mcore_logprobs as ml
from mcore_logprobs import losses
from tests.engine.cases import Case, Problem, cases_of, random_cases
from tests.engine.run import place, upstreams
from tests.helpers.distributed import get_pool, grid_groups
from tests.helpers.outlived import NoCollector, outlived
from tests.ops import OPERATIONS

CALLS = [(name, source) for name, op in OPERATIONS.items() for source in op.sources]


def of_case(case: Case) -> list[str]:
    """What one call leaves behind: after its backward, without one, and without gradients.

    All outputs are differentiated: the graph of one that is not stays with it, as in plain torch.
    """
    case = replace(case, setting=case.setting | {"upstream": "all"})
    held = place(case, Problem(case))
    leaves = [x for x in held.leaves.values() if x.requires_grad]

    def call(mine: Any) -> dict[str, Tensor]:
        return case.operation(case.source, mine.head, mine.side, mine.keywords)

    def with_backward() -> dict[str, Tensor]:
        outputs = call(held)
        roots = upstreams(case, outputs, case.setting["tp"])
        if roots:
            wanted, incoming = zip(*roots, strict=True)
            torch.autograd.grad(wanted, leaves, incoming, allow_unused=True)
        return outputs

    ways: dict[str, Callable[[], list[str]]] = {
        "backward": lambda: outlived(with_backward, result_alone=True),
        "forward": lambda: outlived(lambda: call(place(case, Problem(case)))),
    }
    found = {name: way() for name, way in ways.items()}
    with torch.no_grad():
        found["no_grad"] = outlived(lambda: call(held), result_alone=True)
    return [f"{case}, {name}: {left}" for name, left in found.items() if left]


def of_cases(cases: Sequence[Case]) -> list[str]:
    with NoCollector() as cycles:
        found = [line for case in cases for line in of_case(case)]
    return found + cycles.held


def some_cases(tp: int, count: int, calls: Sequence[tuple[str, str]] = CALLS) -> list[Case]:
    """Of operations, from both sources; each with other settings."""
    rng, found = random.Random(0), []
    for name, source in calls:
        drawn = random_cases(OPERATIONS[name], source, rng, tp=tp)
        found += itertools.islice(drawn, count)
    return found


def test_every_operation() -> None:
    of_cases(some_cases(1, 1)[:1])  # what is imported and cached at a first call
    assert of_cases(some_cases(1, 2)) == []


def test_every_operation_on_two_ranks() -> None:
    """From hidden states where it has them; by night from both."""
    calls = [(name, op.sources[-1]) for name, op in OPERATIONS.items()]
    cases = some_cases(2, 1, calls)
    get_pool(2).run(of_cases, cases[:1])
    assert get_pool(2).run(of_cases, cases) == [[], []]


@pytest.mark.night
@pytest.mark.parametrize(("name", "source"), CALLS)
def test_every_pair_of_settings(name: str, source: str) -> None:
    cases = cases_of(OPERATIONS[name], source)
    for tp in (1, 2):
        mine = [case for case in cases if case.setting["tp"] == tp]
        get_pool(tp).run(of_cases, mine[:1])
        for found in get_pool(tp).run(of_cases, mine, timeout=600):
            assert found == []


# ---- what takes no logits -----------------------------------------------------------------------


def learning(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def stats_of() -> ml.TokenStats:
    target = torch.randint(0, 7, (2, 8))
    own = grid_groups().tp
    return ml.vocab_parallel_token_stats(learning(2, 8, 7), target, entropy=True, tp_group=own)


def loss_of(name: str) -> Tensor:
    objective = losses.OBJECTIVES[name]()
    logprobs = learning(6)
    given = {n: torch.rand(6, dtype=torch.float64) for n in objective.tensors}
    return objective(logprobs, torch.rand(6, dtype=torch.float64), *given.values())


def other_calls() -> dict[str, Callable[[], Any]]:
    """Of two context-parallel ranks."""
    cp = {"cp_group": grid_groups(cp=2).cp}
    packed = {"cu_seqlens": torch.tensor([0, 8, 16])}
    tree = ml.PrefixTree.from_branches([[1, 2, 3], [1, 2, 4, 5]])
    calls: dict[str, Callable[[], Any]] = {
        "stats": lambda: stats_of().map(lambda x: 2 * x).to(torch.float32)[0],
        "detached": lambda: stats_of().detach(),
        "unpack": lambda: stats_of().unpack(torch.tensor([0, 3, 8]), [2, 5]),
        "gathered stats": lambda: stats_of().gather_cp(**cp),
        "positions": lambda: ml.context_parallel_positions(16, **cp),
        "reshard": lambda: ml.reshard_vocabulary(
            learning(4, 3), dim=0, source_group=cp["cp_group"], tp_group=cp["cp_group"]
        ),
        "branches": lambda: tree.branches(learning(len(tree.rows))),
        "sum of branches": lambda: tree.sum_of_branches(tree.branches(learning(len(tree.rows)))),
        **{f"{name}": lambda name=name: loss_of(name) for name in losses.OBJECTIVES},
    }
    for layout in ("zigzag", "contiguous"):
        for more in ({}, packed):
            how = {**cp, "layout": layout, **more}
            key = f"{layout} {list(more)}"
            calls[f"shard {key}"] = lambda how=how: ml.context_parallel_shard(
                learning(2, 16), **how
            )
            calls[f"shift {key}"] = lambda how=how: ml.context_parallel_shift(learning(2, 8), **how)
            for grad in ("sum", "slice"):
                calls[f"gather {key} {grad}"] = lambda how=how, grad=grad: (
                    ml.context_parallel_gather(learning(2, 8), grad=grad, **how)
                )
    return calls


def pieces_of(result: Any) -> list[Any]:
    return result if isinstance(result, list) else [result]


def of_other_calls() -> list[str]:
    def backward(call: Callable[[], Any]) -> None:
        result = call()
        parts = [x.logprobs if isinstance(x, ml.TokenStats) else x for x in pieces_of(result)]
        if any(x.requires_grad for x in parts):
            sum(x.double().sum() for x in parts).backward()

    calls = other_calls()
    for call in calls.values():
        backward(call)
    found = {}
    with NoCollector() as cycles:
        for name, call in calls.items():
            found[f"{name}, forward"] = outlived(call)
            found[f"{name}, backward"] = outlived(lambda call=call: backward(call))
            with torch.no_grad():
                found[f"{name}, no_grad"] = outlived(call, result_alone=True)
    return [f"{name}: {left}" for name, left in found.items() if left] + cycles.held


def test_other_public_calls() -> None:
    assert get_pool(2).run(of_other_calls) == [[], []]


def test_no_public_call_is_forgotten() -> None:
    kinds = ("vocab_parallel_", "linear_", "context_parallel_", "all_to_all_")
    known = {
        f.__name__ for op in OPERATIONS.values() for f in (op.from_logits, op.from_hidden) if f
    }
    public = {name for name in ml.__all__ if name.startswith(kinds)}
    apart = {f"context_parallel_{name}" for name in ("gather", "positions", "shard", "shift")}
    assert public - apart == known - apart


# ---- the measure itself -------------------------------------------------------------------------


def test_the_measure_sees_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.outlived.PATIENCE", 0.05)
    weight, kept = nn.Linear(4, 3), []

    def in_a_cycle() -> None:
        class Handle: ...

        handle = Handle()
        handle.hidden, handle.weight = torch.randn(5, 4), weight.weight  # type: ignore[attr-defined]
        handle.compute = lambda: handle  # type: ignore[attr-defined]

    def in_a_graph() -> None:
        kept.append(weight(torch.randn(5, 4)).sum())

    def in_a_result() -> Any:
        result = weight(torch.randn(5, 4)).sum()
        result.hidden = torch.randn(5, 4)
        return result

    def nothing() -> Tensor:
        return weight(torch.randn(5, 4)).sum()

    with NoCollector() as cycles:
        assert outlived(nothing) == []
        assert outlived(in_a_cycle) == ["aten.randn.default [5, 4]"]
        assert outlived(in_a_result) == []
        assert "aten.randn.default [5, 4]" in outlived(in_a_result, result_alone=True)
        assert len(outlived(in_a_graph)) > 1
    assert cycles.held == ["Handle -> [3, 4]", "Handle -> [5, 4]"]
    with NoCollector() as cycles:
        outlived(nothing)
    assert cycles.held == []
