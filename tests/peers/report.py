"""A pytest plugin: what is collected, what is left out, and how each test ended, as JSON lines.

In the processes of a framework's tests this package goes by another name (`at_start`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from .process import reason

JOB = json.loads(os.environ["MCORE_LOGPROBS_PEER"])
FOLDER = Path(JOB["folder"])
RANK = os.environ.get("RANK", "0")


def _write(**line: Any) -> None:
    with open(FOLDER / f"report{RANK}", "a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    for item in items:
        _write(found=item.nodeid)
    if not JOB["named"]:
        items[:] = [item for item in items if not reason(JOB["files"], item.nodeid)]
    for module in {item.module for item in items} if JOB["start"] else ():
        getattr(module, JOB["start"])()


def pytest_runtest_logstart(nodeid: str, location: object) -> None:
    (FOLDER / "running").write_text(nodeid)  # for processes that do not inherit the environment


def pytest_runtest_logreport(report: Any) -> None:
    if report.outcome != "passed" or report.when == "call":
        reason = "" if report.outcome == "passed" else str(report.longrepr)[-3000:]
        _write(test=report.nodeid, outcome=report.outcome, when=report.when, reason=reason)


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    sys.stdout.flush()
