"""The process that a row runs in: imports what the row shares, then forks each run's ranks.

python -m tests.trainers.ranks FOLDER: reads FOLDER/job, writes FOLDER/traces.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.trainers import faults
from tests.trainers.frame import How, Row, counting, free_port, module
from tests.trainers.half import unrounded_head


class _Pickler(pickle.Pickler):
    """Tensors as arrays: Megatron replaces what torch pickles them by, and releases differ.

    NumPy knows no bfloat16, whose numbers are float32's too.
    """

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is torch.Tensor:
            whole = thing.float() if thing.dtype is torch.bfloat16 else thing
            return torch.from_numpy, (whole.detach().numpy(),)
        return NotImplemented


def _rank(row: Row, paths: list[Path], how: How, rank: int, port: int, folder: Path) -> None:
    """Never returns: the rank's trace is written, or its traceback is in its output."""
    output = folder / f"output{rank}"
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    status = 1
    try:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(row.processes),
            LOCAL_WORLD_SIZE=str(row.processes),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        if how.switched:
            os.environ.update(row.environment)
        elif row.settings.get("unrounded_head"):
            unrounded_head()
        if how.fault:
            faults.put(row.framework, how.fault)
        torch.set_num_threads(row.settings.get("threads", 1))
        drive = module(row.framework).drive
        how = dataclasses.replace(how, folder=str(folder))
        with counting(row.framework, paths, row.calls) as (ours, theirs):
            trace = drive(row, how)
        trace.ours += ours  # a framework with workers of its own counts in them
        trace.theirs += theirs
        sys.stdout.flush()
        sys.stderr.flush()
        trace.output += output.read_text(errors="replace")
        (folder / f"trace{rank}").write_bytes(pickle.dumps(trace))
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not the launcher's own end, nor a wait for a framework's threads


def _run(row: Row, paths: list[Path], how: How, folder: Path) -> list:
    port = free_port()
    children = {}
    for rank in range(row.processes):
        child = os.fork()
        if child == 0:
            _rank(row, paths, how, rank, port, folder)
        children[child] = rank
    try:
        while children:
            child, status = os.wait()
            rank = children.pop(child)
            if status:
                text = (folder / f"output{rank}").read_text(errors="replace")
                raise RuntimeError(f"{how}, rank {rank}: {text[-6000:]}")
    finally:
        for child in children:  # they would wait for the one that failed
            os.kill(child, 9)
    return [pickle.loads((folder / f"trace{r}").read_bytes()) for r in range(row.processes)]


def main(folder: Path) -> None:
    row, paths, runs = pickle.loads((folder / "job").read_bytes())
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork: a rank would wait for them
    module(row.framework).prepare(row, folder)
    gc.freeze()  # a collection in a rank would copy the modules' pages
    traces = [_run(row, paths, how, folder) for how in runs]
    with open(folder / "traces", "wb") as file:
        _Pickler(file).dump(traces)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
        status = 0
    except BaseException as error:
        print(error if isinstance(error, RuntimeError) else traceback.format_exc(), flush=True)
        status = 1
    os._exit(status)  # what extensions say of their leaks at the end would hide what failed
