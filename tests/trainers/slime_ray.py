"""slime's own `train.py` with real Ray: for the rows of `tests.trainers.slime` that say "ray".

A row's process starts a Ray instance and then runs `train.py` as a user does, by its command line.
Ray starts slime's rollout manager and one train actor for each rank, in processes of their own.
`at_start/sitecustomize.py` is on PYTHONPATH of them all: what a CPU needs is put into each when it
imports slime, and a train actor writes down what a rank in process would have kept.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from mcore_logprobs.cpu_megatron.training import cpu_training
from mcore_logprobs.megatron.imports import after_import
from tests.trainers import faults, slime, workers
from tests.trainers.absent import stand_in
from tests.trainers.frame import How, Row, Trace, counting

_open = contextlib.ExitStack()  # to the end of the process
SAID = "the train actor's MCORE_LOGPROBS_FUSED is {!r}"


# ---- in the row's process ------------------------------------------------------------------------


def drive(row: Row, how: How) -> Trace:
    """Starts Ray, runs `train.py` to its end, and joins the train actors' traces."""
    import ray  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        workers.tell(row, how, folder, "slime", __name__)
        os.environ |= {
            "PYTHONWARNINGS": "ignore",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_COLOR_PREFIX": "0",
        }
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray counts what it names
        actors = row.settings["actors"]
        # A rank is a "GPU" to slime; the rollout manager has a CPU of its own.
        ray.init(num_cpus=actors + 1, num_gpus=actors, include_dashboard=False, _temp_dir=folder)
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        try:
            output = _train_py(row, how)
        finally:
            ray.shutdown()
        traces = workers.read(folder, [f"rank {rank}" for rank in range(actors)])
    return workers.join(traces, output)


def _train_py(row: Row, how: How) -> str:
    given = slime.paths(row)
    assert not isinstance(given, str), given
    script = given[0] / "train.py"
    done = subprocess.run(
        [sys.executable, str(script), *slime.arguments(row, how)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=row.timeout,
    )
    assert not done.returncode, f"train.py: {done.returncode}: {done.stdout[-6000:]}"
    return done.stdout


# ---- in train.py and in Ray's workers ------------------------------------------------------------


def ready() -> None:
    """What `tests.trainers.slime.train` does in process, when each module is imported."""
    row, how = workers.told()
    if how.fault:
        faults.put(row.framework, how.fault)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray has seen what it needs of it
    _open.enter_context(cpu_training())
    stand_in(*slime.ENGINES)
    backend = "slime.backends.megatron_utils"
    acts: dict[str, Callable[[Any], None]] = {
        "slime.utils.accelerator": lambda m: m.set_accelerator(slime.cpu_accelerator()),
        "slime.utils.arguments": _float32,
        "slime.utils.reloadable_process_group": lambda m: slime.forward_new_names(
            m.ReloadableProcessGroup
        ),
        "slime.observability.logging_utils": lambda m: setattr(m, "log", slime.keep_metrics),
        f"{backend}.initialize": _numpy_1,
        f"{backend}.actor": functools.partial(_observe, row),
    }
    for name, act in acts.items():
        after_import(name, act)


def _float32(arguments: Any) -> None:
    parse = arguments.parse_args

    def parse_args(*given: Any, **options: Any) -> Any:
        args = parse(*given, **options)
        args.bf16, args.params_dtype = False, torch.float32  # slime knows bf16 and fp16 only
        return args

    arguments.parse_args = parse_args


def _numpy_1(initialize: Any) -> None:
    """slime asserts that numpy's version begins with "1."."""

    class Numpy:
        __version__ = "1.0"

        def __getattr__(self, name: str) -> Any:
            import numpy

            return getattr(numpy, name)

    initialize.np = Numpy()


def _observe(row: Row, module: Any) -> None:
    """Counts calls in the actor's `train`, and writes the trace after each."""
    owner = module.MegatronTrainRayActor
    init, train = owner.init, owner.train
    trace, before = slime._trace, {}
    given = slime.paths(row)
    assert not isinstance(given, str)

    @functools.wraps(init)
    def observed_init(self: Any, *args: Any, **options: Any) -> Any:
        found = init(self, *args, **options)
        before.update(slime.parameters(self))
        trace.output = SAID.format(os.environ.get("MCORE_LOGPROBS_FUSED")) + "\n"
        return found

    @functools.wraps(train)
    def observed_train(self: Any, *args: Any, **options: Any) -> Any:
        seen = Trace()
        with (
            counting(row.framework, given, row.calls) as (ours, theirs),
            slime.step_watched(row, seen),
        ):
            found = train(self, *args, **options)
        trace.ours += ours
        trace.theirs += theirs
        trace.logits += seen.logits
        trace.parameters = slime.parameters(self)
        trace.moved = max(float((trace.parameters[k] - x).abs().max()) for k, x in before.items())
        workers.write(trace, f"rank {os.environ['RANK']}")
        return found

    owner.init, owner.train = observed_init, observed_train
