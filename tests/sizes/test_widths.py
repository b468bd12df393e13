"""Operations at real vocabularies and token counts, values and gradients against float64.

The hidden size is 4 to 16, which changes nothing in how a call is cut and costs little. By day the
shapes at which `linear_policy_loss` was once wrong, and each operation from hidden states once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine import cases, run
from tests.helpers.distributed import RankError, RankPool, get_pool
from tests.sizes import shapes

_AT_ONCE = 8  # cases of one dispatch, whose results are held
_TIMEOUT = 300.0


@pytest.fixture(scope="module")
def two_processes() -> Iterator[list[RankPool]]:
    """Each for cases of one rank: the checks of two cases run at the same time."""
    pools = [RankPool(1), RankPool(1)]
    yield pools
    for pool in pools:
        pool.close()


def failed(case: cases.Case) -> list[str]:
    return run.failures([case])


def passes(some: Sequence[cases.Case], two_processes: list[RankPool]) -> None:
    alone = [case for case in some if case.setting["tp"] == 1]
    jobs = zip(two_processes, (alone[::2], alone[1::2]), strict=True)
    with ThreadPoolExecutor(2) as threads:
        answers = threads.map(lambda job: job[0].run_many(failed, job[1], _TIMEOUT), jobs)
    found = [words for answer in answers for each in answer for words in reported(each)]
    together = [case for case in some if case.setting["tp"] == 2]
    for start in range(0, len(together), _AT_ONCE):
        part = together[start : start + _AT_ONCE]
        runs = get_pool(2).run_many(run.on_rank, part, _TIMEOUT)
        for case, answer in zip(part, runs, strict=True):
            found += run.told(case, answer)
    report = "\n".join([f"{len(found)} of {len(some)} cases fail:", *found])
    assert not found, report


def reported(answer: list | RankError) -> list[str]:
    return [str(answer)] if isinstance(answer, RankError) else answer[0]


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (2200, 16032),
        pytest.param(4362, 9496, marks=pytest.mark.night),
        pytest.param(10012, 4040, marks=pytest.mark.night),
        (20638, 2004),
    ],
)
def test_policy_loss_past_its_first_tile(rows: int, width: int) -> None:
    """Float32, all defaults: V 128256 over TP 8, 151936 over 16, 129280 over 32, 64128 over 32."""
    assert not run.failures([shapes.policy_case(rows, width)])


@pytest.mark.parametrize("name", [name for name, op in shapes.OPERATIONS.items() if op.from_hidden])
def test_two_tiles_of_two_blocks(name: str) -> None:
    assert not run.failures([shapes.sample_case(name)])


@pytest.mark.night
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("source", ["hidden", "logits"])
def test_around_every_boundary(source: str, part: int, two_processes: list[RankPool]) -> None:
    passes(shapes.cases_from(source)[part::8], two_processes)


@pytest.mark.night
@pytest.mark.parametrize("part", range(4))
def test_policy_loss_at_random_shapes(part: int, two_processes: list[RankPool]) -> None:
    """200 of them."""
    passes(shapes.random_policy_cases(200, seed=34)[part::4], two_processes)
