"""Megatron-Bridge from a checkout, on a CPU: its model providers, loader, set-up and checkpoints.

NeMo-RL and SkyRL build and load their models by it. Its packages import every model that it knows,
most of which need a GPU's libraries, so that `megatron.bridge` and its `models` are made here with
the same paths, and without what they import; everything below them is Megatron-Bridge's own.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import sys
import types
from pathlib import Path
from typing import Any

from mcore_logprobs.cpu_megatron.bridged import bridged_block_spec
from tests.trainers import requirements
from tests.trainers.absent import stand_in
from tests.trainers.frame import checkout

# Transformer Engine is asked for by name; Megatron is imported first, and does without.
ABSENT = ("transformer_engine", "datasets", "modelopt")
_MEGATRON = (  # what asks whether Transformer Engine is there
    "megatron.core.extensions.transformer_engine",
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
    "megatron.core.dist_checkpointing",
    "megatron.core.inference.engines",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.optimizer",
    "megatron.core.transformer.cuda_graphs",
    "megatron.training.training",
)
_PROVIDERS = {"gpt_provider": "GPTModelProvider", "t5_provider": "T5ModelProvider"}


def paths_with_bridge(repository: str, needed: Path) -> list[Path] | str:
    """A framework's checkout, Megatron-LM's before the installed one, and what it needs."""
    folders = [checkout(name) for name in (repository, "Megatron-Bridge", "Megatron-LM")]
    if not needed.is_dir():
        return requirements.missing(needed)
    own, bridge, megatron = folders
    if own is None or bridge is None or megatron is None:
        wanted = f"{repository}, Megatron-Bridge and Megatron-LM"
        return f"no checkouts of {wanted}: tests/run.sh --all --peers DIR"
    return [own, megatron, needed]


def without_tensorboard() -> None:
    """Lets modules import torch's SummaryWriter, which asks tensorboard for its version."""
    for name in ("torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
        board: Any = types.ModuleType(name)
        board.SummaryWriter, board.__path__ = object, []
        sys.modules[name] = board


def import_bridge(source: Path) -> None:
    """Makes `megatron.bridge` of a checkout importable, with Qwen2; inside `cpu_training`.

    source: the checkout's `src`.
    """
    stand_in("ray", "wandb")
    without_tensorboard()
    for name in _MEGATRON:
        importlib.import_module(name)
    stand_in(*ABSENT)
    logging.getLogger("megatron.bridge").setLevel(logging.WARNING)  # not what it cannot import
    root = source / "megatron" / "bridge"
    bridge = package("megatron.bridge", root)
    models = package("megatron.bridge.models", root / "models")
    for module, name in _PROVIDERS.items():
        setattr(models, name, getattr(importlib.import_module(f"{models.__name__}.{module}"), name))
    auto = importlib.import_module(f"{models.__name__}.conversion.auto_bridge")
    bridge.AutoBridge = auto.AutoBridge
    importlib.import_module(f"{models.__name__}.qwen.qwen2_bridge")
    # Its layers are Transformer Engine's.
    sys.modules[f"{models.__name__}.gpt_provider"].transformer_engine_layer_spec = (  # type: ignore
        lambda config: bridged_block_spec(config)
    )


def package(name: str, folder: Path) -> Any:
    """A package of a folder's modules, without what its own __init__ imports."""
    made: Any = types.ModuleType(name)
    made.__path__ = [str(folder)]
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    setattr(importlib.import_module(parent), child, made)
    return made
