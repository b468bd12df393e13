"""The day's rows; `python -m tests.trainers` has all. And that a fault is seen."""

from __future__ import annotations

import dataclasses

import pytest

from tests.trainers.compare import check, differences
from tests.trainers.faults import FAULTY, faults
from tests.trainers.frame import PLAIN, SWITCHED, Row, rows, run, unavailable


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in rows() if not row.night])
def test_switched_trains_as_plain(row: Row) -> None:
    if why := unavailable(row):
        pytest.fail(why)
    check(row, run(row))


@pytest.mark.night
@pytest.mark.parametrize("framework", FAULTY)
def test_a_fault_turns_the_row_red(framework: str) -> None:
    (row,) = [r for r in rows(framework) if (r.layout, r.option) == FAULTY[framework]]
    if why := unavailable(row):
        pytest.skip(why)
    faulty = [dataclasses.replace(SWITCHED, fault=fault) for fault in faults(framework)]
    plain, *others = run(row, [PLAIN, *faulty])
    for (fault, told_by), traces in zip(faults(framework).items(), others, strict=True):
        with pytest.raises(AssertionError, match="expected at most"):
            check(row, [plain, traces, traces])
        found = differences(plain, traces)[told_by]
        assert found > 10 * getattr(row.tolerance, told_by), f"{fault}: {told_by} {found:.1e}"
