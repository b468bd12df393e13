"""AReaL's own local scheduler starts an actor and a reference colocated with it, on a CPU.

    python -m tests.dropin.areal_scheduler COMMAND

Runs in an environment that can import AReaL; COMMAND is the actor's `scheduling_spec.cmd`. Prints
which module's `gather_logprobs` each role's worker calls.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import types
from typing import Any

from areal.api import Job
from areal.api.cli_args import SchedulingSpec, SchedulingStrategy, SchedulingStrategyType
from areal.api.engine_api import TrainEngine
from areal.infra.scheduler.local import LocalScheduler
from areal.infra.utils.concurrent import run_async_task


def _refuses(self: Any, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError


def _probe(self: Any) -> list[str]:
    """In a worker: where the functions come from that AReaL's Megatron engine imports."""
    from areal.engine.megatron_utils import packed_context_parallel
    from areal.utils.functional import vocab_parallel

    names = [
        vocab_parallel.gather_logprobs,
        vocab_parallel.gather_logprobs_entropy,
        packed_context_parallel.split_packed_seqs_for_context_parallel,
    ]
    return [name.__module__ for name in names]


# An engine that a worker agrees to make, with nothing in it but the question.
_members = dict.fromkeys(TrainEngine.__abstractmethods__, _refuses)
_members |= {"initialized": False, "__init__": lambda self, *args, **kwargs: None}
_members |= {"probe": _probe, "__module__": __name__}
Probe = types.new_class("Probe", (TrainEngine,), {}, lambda names: names.update(_members))


# A forked worker imports AReaL again, for longer than a minute on a machine that is busy.
_wait = functools.partial(LocalScheduler._wait_for_fork_ready, timeout=300)


def main(command: str) -> None:
    LocalScheduler._wait_for_fork_ready = staticmethod(_wait)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = LocalScheduler(
            gpu_devices=[0],
            startup_timeout=120,
            experiment_name="dropin",
            trial_name="trial",
            fileroot=folder,
            nfs_record_root=folder,
        )
        spec = SchedulingSpec(cpu=1, gpu=0, mem=1, port_count=2, cmd=command)
        colocated = SchedulingStrategy(
            type=SchedulingStrategyType.colocation, target="actor", fork=True
        )
        try:
            for role, more in (("actor", {}), ("ref", {"scheduling_strategy": colocated})):
                scheduler.create_workers(Job(replicas=1, tasks=[spec], role=role, **more))
                (worker,) = scheduler.get_workers(role, timeout=120)
                engine = f"{role}/0"
                run_async_task(scheduler.create_engine, worker.id, f"{__spec__.name}.Probe", engine)
                found = scheduler.call_engine(worker.id, "probe", engine)
                print("FOUND", role, *found, flush=True)
        finally:
            scheduler.delete_workers(None)


if __name__ == "__main__":
    main(sys.argv[1])
