"""What README, docs/costs.md and the docstrings say of collectives is what a count shows."""

from __future__ import annotations

from collections import Counter

from tests.engine import cases, run
from tests.helpers.distributed import get_pool
from tests.ops import OPERATIONS

TILES = 3
GATHER, REDUCE, SCATTER = "all_gather", "all_reduce", "reduce_scatter"
# Forward and backward, from logits: one all-gather and nothing, but for these.
FROM_LOGITS = {
    "target_rank": ({REDUCE: 1, GATHER: 1}, {}),
    "log_softmax": ({GATHER: 1}, {REDUCE: 1}),
    "gather": ({REDUCE: 1}, {}),
    "sample": ({GATHER: 2}, {}),
    "all_to_all_vp2sp": ({"all_to_all": 1}, {"all_to_all": 1}),
    "all_to_all_sp2vp": ({"all_to_all": 1}, {"all_to_all": 1}),
}
# From hidden states: one all-gather, and dHidden's sum per tile in the backward, but for these.
FROM_HIDDEN = {
    "gather": ({REDUCE: 1}, {REDUCE: TILES}),
    "sample": ({GATHER: 2}, {}),
    # Its function's collectives per tile, in the forward and again in the backward.
    "linear_map": ({GATHER: TILES}, {GATHER: TILES, REDUCE: TILES}),
    "linear_policy_loss": ({GATHER: TILES, REDUCE: TILES}, {}),
}


def sent(lines: list[list[str]]) -> list[tuple[Counter, Counter]]:
    answers = get_pool(2).run_many(run.sent, [cases.parse(line) for line in lines])
    found = []
    for line, answer in zip(lines, answers, strict=True):
        assert isinstance(answer, list), (line, answer)
        assert answer[0] == answer[1]
        found.append((Counter(answer[0][0]), Counter(answer[0][1])))
    return found


def test_from_logits() -> None:
    names = [name for name, op in OPERATIONS.items() if op.from_logits]
    lines = [[name, "logits", "tp=2", "lead=[n]"] for name in names]
    for name, found in zip(names, sent(lines), strict=True):
        assert found == FROM_LOGITS.get(name, ({GATHER: 1}, {})), name


def test_from_hidden_states() -> None:
    """Of three tiles; under sequence parallelism each is gathered wherever it is multiplied."""
    names = [name for name, op in OPERATIONS.items() if op.from_hidden]
    common = ["tp=2", "lead=[n]", "chunk_size=4"]
    lines = [[name, "hidden", *common] for name in names]
    for name, found in zip(names, sent(lines), strict=True):
        assert found == FROM_HIDDEN.get(name, ({GATHER: 1}, {REDUCE: TILES})), name
    lines = [[*line, "sequence_parallel=True"] for line in lines]
    for name, found in zip(names, sent(lines), strict=True):
        without = FROM_HIDDEN.get(name, ({GATHER: 1}, {REDUCE: TILES}))
        forward, backward = Counter(without[0]), Counter(without[1])
        # What sums dHidden scatters it; `linear_gather`'s own all-reduce is of its results.
        summing = forward if name == "linear_policy_loss" else backward
        if summing[REDUCE]:
            summing[SCATTER] = summing.pop(REDUCE)
        forward[GATHER] += TILES
        if backward:
            backward[GATHER] += TILES
        assert found == (forward, backward), name
