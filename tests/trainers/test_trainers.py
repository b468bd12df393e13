"""The day's rows; `python -m tests.trainers` has all."""

from __future__ import annotations

import pytest

from tests.trainers.frame import Row, check, rows, run, unavailable


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in rows() if not row.night])
def test_switched_trains_as_plain(row: Row) -> None:
    if why := unavailable(row):
        pytest.fail(why)
    check(row, run(row))
