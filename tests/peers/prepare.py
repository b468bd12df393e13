"""What a framework's tests need beyond `process.py`, and adapters for its private helpers."""

from __future__ import annotations

import functools
import typing
from typing import Any

import typing_extensions

from mcore_logprobs.dropin import areal
from mcore_logprobs.megatron.imports import after_import
from tests.peers import workers
from tests.trainers.absent import stand_in_for_jaxtyping
from tests.trainers.bridge import without_tensorboard


def skyrl() -> None:
    """Ray that was never started; shapes in annotations; what pydantic asks for on Python 3.11."""
    import ray  # type: ignore[import-not-found]

    ray.is_initialized = lambda: False
    stand_in_for_jaxtyping()
    typing.TypedDict = typing_extensions.TypedDict


def nemo_rl() -> None:
    """Forked workers instead of a Ray cluster, and no monitor of its GPUs."""
    import ray  # type: ignore[import-not-found]

    ray.get = lambda results: results
    without_tensorboard()
    replaced: dict[str, dict[str, Any]] = {
        "nemo_rl.distributed.virtual_cluster": {
            "init_ray": lambda: None,
            "RayVirtualCluster": workers.Cluster,
        },
        "nemo_rl.distributed.worker_groups": {
            "RayWorkerBuilder": workers.Builder,
            "RayWorkerGroup": workers.WorkerGroup,
        },
        "nemo_rl.utils.logger": {"RayGpuMonitorLogger": _NoMonitor},
    }
    for module, names in replaced.items():
        after_import(module, functools.partial(_replace, names))
    after_import("nemo_rl.models", _older_transformers)


def _replace(names: dict[str, Any], module: Any) -> None:
    vars(module).update(names)


def _older_transformers(module: Any) -> None:
    """It asks for a release before the environment's, for tokenizers of other models."""
    import transformers

    transformers.__version__ = "5.8.1"


def megatron_rl() -> None:
    """No download of data sets, which the tests' conftest begins with."""
    without_tensorboard()
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    after_import(name, functools.partial(_replace, {"download_and_extract_asset": _nothing}))


def _nothing(**options: object) -> None: ...


class _NoMonitor:
    def __init__(self, **options: object) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def _collect_gpu_sku(self) -> dict[str, str]:
        return {}


# ---- adapters ------------------------------------------------------------------------------------


def areal_logprobs(
    logits: Any, labels: Any, tp_group: Any, temperature: float = 1.0, chunk_size: int = 1024
) -> Any:
    return areal.gather_logprobs(logits, labels, temperature, tp_group, chunk_size)


def areal_logprobs_entropy(
    logits: Any, labels: Any, tp_group: Any, temperature: float = 1.0, chunk_size: int = 1024
) -> Any:
    return areal.gather_logprobs_entropy(logits, labels, temperature, tp_group, chunk_size)
