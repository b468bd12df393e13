"""AReaL's own scheduler and controllers: for rows of `tests.trainers.areal` that say "services".

A row's process is what AReaL's trainer is: its `LocalScheduler` starts a worker for each rank of
the actor by `scheduling_spec.cmd`, which fork those of the reference, and `PPOActorController`
sends the trajectories to both over HTTP. What a CPU needs is put into each worker when it imports
AReaL (`tests.trainers.workers`), and each writes down what a rank in process would have kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_logprobs.megatron.imports import after_import
from tests.trainers import areal, faults, workers
from tests.trainers.frame import How, Row, Trace, counting

PLAIN = "python -m areal.infra.rpc.rpc_server"
SWITCHED = "python -m mcore_logprobs.dropin areal -m areal.infra.rpc.rpc_server"  # the page's
_open = contextlib.ExitStack()  # to the end of the process


# ---- in the row's process ------------------------------------------------------------------------


def drive(row: Row, how: How) -> Trace:
    """Runs AReaL's controllers from `initialize` to the end, and joins the workers' traces."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        workers.tell(row, how, folder, "areal", __name__)
        with _controllers(row, how, folder) as (actor, reference):
            own = _steps(actor, reference)
        ranks = range(row.settings["tp"] * row.settings["dp"])
        names = [f"{role} {rank}" for role in ("actor", "ref") for rank in ranks]
        traces = workers.read(folder, names)
        logs = [file.read_text() for file in Path(folder).glob("**/merged.log")]
    for name, each in zip(names, traces, strict=True):
        calls = each.ours if how.switched else each.theirs
        assert calls, f"worker {name}: expected calls, got {each.ours} and {each.theirs}"
    joined = workers.join(traces, "".join(logs))
    joined.moved = min(each.moved for each in traces if each.moved)
    for name in ("logprobs", "entropy", "metrics", "grad_norm"):
        setattr(joined, name, getattr(own, name))
    return joined


@contextlib.contextmanager
def _controllers(row: Row, how: How, folder: str) -> Iterator[tuple[Any, Any]]:
    """The actor's and the reference's, whose workers are ready; ends them."""
    from areal.api import cli_args as settings  # type: ignore[import-not-found]
    from areal.engine.megatron_engine import (  # type: ignore[import-not-found]
        MegatronPPOActor,
    )
    from areal.infra.scheduler.local import LocalScheduler  # type: ignore[import-not-found]

    LocalScheduler._wait_for_fork_ready = staticmethod(
        # A forked worker imports AReaL again, for longer than a minute on a machine that is busy.
        functools.partial(LocalScheduler._wait_for_fork_ready, timeout=row.timeout)
    )
    scheduler = LocalScheduler(
        gpu_devices=[0],
        startup_timeout=row.timeout,
        experiment_name="rows",
        trial_name="row",
        fileroot=folder,
        nfs_record_root=folder,
    )
    needs = {"cpu": 1, "gpu": 0, "mem": 1, "port_count": 2}
    command, environment = (SWITCHED, row.environment) if how.switched else (PLAIN, {})
    spec = settings.SchedulingSpec(cmd=command, env_vars=dict(environment), **needs)
    config = dataclasses.replace(areal.actor_config(row, how), scheduling_spec=(spec,))
    actor = MegatronPPOActor.as_controller(config, scheduler)
    colocated = settings.SchedulingStrategy(
        type=settings.SchedulingStrategyType.colocation, target="actor", fork=True
    )
    spec = settings.SchedulingSpec(cmd=PLAIN, **needs)  # not read: the actor's workers fork them
    config = dataclasses.replace(
        config, scheduling_spec=(spec,), scheduling_strategy=colocated, optimizer=None
    )
    reference = MegatronPPOActor.as_controller(config, scheduler)
    try:
        for role, controller in (("actor", actor), ("ref", reference)):
            controller.initialize(role=role, addr=None, ft_spec=areal.finetune_spec())
        yield actor, reference
    finally:
        scheduler.delete_workers(None)


def _steps(actor: Any, reference: Any) -> Trace:
    """What AReaL's trainer does with trajectories, in its order."""
    from areal.infra.rpc.rtensor import RTensor  # type: ignore[import-not-found]

    trace = Trace()
    for step in range(areal.STEPS):
        batch = areal.trajectories(step)
        reference_logprobs = reference.compute_logp(batch)
        logprobs = RTensor.localize(actor.compute_logp(batch))
        areal.note_logprobs(trace, step, batch, logprobs)
        for each, x in zip(batch, reference_logprobs, strict=True):
            each["ref_logp"] = x
        actor.ppo_update(actor.compute_advantages(batch))
        actor.step_lr_scheduler()
        areal.note_stats(trace, actor.export_stats())
    return trace


# ---- in AReaL's workers --------------------------------------------------------------------------


def ready() -> None:
    """What `tests.trainers.areal` does in process, when AReaL is first imported."""
    from mcore_logprobs.cpu_megatron.training import cpu_devices

    row, how = workers.told()
    if how.fault:
        faults.put(row.framework, how.fault)
    _open.enter_context(cpu_devices())
    areal.before_import()
    after_import("areal.engine.megatron_engine", functools.partial(_observe, row))


def _observe(row: Row, module: Any) -> None:
    """Counts calls in the engine's methods, and writes the trace after each."""
    areal.on_a_cpu(module)
    paths = areal.paths(row)
    assert not isinstance(paths, str), paths
    owner, trace, before = module.MegatronPPOActor, Trace(), {}

    def observed(name: str) -> Any:
        method = getattr(owner, name)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            seen = Trace()
            with (
                counting(row.framework, paths, row.calls) as (ours, theirs),
                areal.step_watched(row, seen),
            ):
                returned = method(self, *args, **options)
            trace.ours += ours
            trace.theirs += theirs
            trace.logits += seen.logits
            trace.parameters = areal.parameters(self)
            if not before:
                before.update(trace.parameters)
            moved = [float((x - before[k]).abs().max()) for k, x in trace.parameters.items()]
            trace.moved = max(moved)
            role = "actor" if self.config.optimizer else "ref"
            workers.write(trace, f"{role} {os.environ['RANK']}")
            return returned

        return call

    for name in ("initialize", "compute_logp", "ppo_update"):
        setattr(owner, name, observed(name))
