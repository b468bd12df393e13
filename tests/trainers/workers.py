"""Rows whose framework starts the ranks itself: what its processes are told, and their traces.

A row's process calls `tell`, then starts the framework as a user does. `at_start/sitecustomize.py`
is on PYTHONPATH of every process that comes from it, and calls the module's `ready` when the
framework is first imported there. Each rank's process writes a trace, and `join` makes them one.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.trainers.frame import How, Row, Trace

_FOLDER = "MCORE_LOGPROBS_RUN"  # has a file `row`; the ranks write their traces there
_READY = "MCORE_LOGPROBS_RUN_READY"  # "PACKAGE MODULE", for `at_start/sitecustomize.py`


def tell(row: Row, how: How, folder: str, package: str, module: str) -> None:
    """Has `module.ready()` called in every process started from now on that imports `package`."""
    Path(folder, "row").write_bytes(pickle.dumps((row, how)))
    at_start = str(Path(__file__).parent / "at_start")
    os.environ[_FOLDER] = folder
    os.environ[_READY] = f"{package} {module}"
    os.environ["PYTHONPATH"] = os.pathsep.join([at_start, os.environ["PYTHONPATH"]])
    sys.path.insert(0, at_start)  # which AReaL makes its workers' PYTHONPATH of


def told() -> tuple[Row, How]:
    """In such a process: what it runs for."""
    row, how = pickle.loads(Path(os.environ[_FOLDER], "row").read_bytes())
    return row, how


def write(trace: Trace, name: str) -> None:
    """In such a process: its trace so far, in place of an earlier one of the same name."""
    Path(os.environ[_FOLDER], f"trace {name}").write_bytes(pickle.dumps(trace))


def read(folder: str, names: Sequence[str]) -> list[Trace]:
    """The traces that were written, which must be those of `names`."""
    written = {file.name.partition(" ")[2]: file for file in Path(folder).glob("trace *")}
    assert sorted(written) == sorted(names), f"expected traces of {names}, got {sorted(written)}"
    return [pickle.loads(written[name].read_bytes()) for name in names]


def join(traces: Sequence[Trace], output: str) -> Trace:
    """The ranks' traces, in order, as one."""
    joined = Trace(output=output, moved=min(trace.moved for trace in traces))
    for rank, trace in enumerate(traces):
        for name in ("logprobs", "entropy", "metrics", "grad_norm", "logits"):
            getattr(joined, name).extend(getattr(trace, name))
        joined.parameters |= {f"rank {rank}: {name}": x for name, x in trace.parameters.items()}
        joined.ours += trace.ours
        joined.theirs += trace.theirs
        joined.output += trace.output
    return joined
