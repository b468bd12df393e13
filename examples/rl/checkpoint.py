"""Checkpoints that resume bit for bit on the same layout: one file a rank, one for the run.

Kept: model, optimizer, every random generator and the step, which fixes the data order. The
reference model is the starting weights and is loaded again from their source; the rollout engine
gets its weights from the resumed model, and vLLM samples by the step's own seeds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .config import RunConfig, SetupError
from .layout import Layout, on_all, on_main

_RUN_KEYS = ("seed", "model", "parallel", "task", "rollout", "grpo", "optimizer", "logprobs")


def save(path: Path, trainer: Any) -> None:
    """Collective. Written beside `path` and renamed, so that a checkpoint is whole or absent."""
    layout = trainer.layout
    partial = path.with_name(path.name + ".partial")
    if layout.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        run = {"step": trainer.step, "world": layout.world, "config": trainer.config.to_dict()}
        (partial / "run.json").write_text(json.dumps(run, indent=2))
    dist.barrier()
    torch.save(
        {
            "model": trainer.policy.gpt_model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "generators": generator_states(),
        },
        partial / f"rank_{layout.rank}.pt",
    )
    dist.barrier()
    if layout.is_main:
        shutil.rmtree(path, ignore_errors=True)
        os.replace(partial, path)
    dist.barrier()


def load(path: Path, trainer: Any) -> int:
    """Collective; loads model, optimizer and generators, and returns the step that was saved.
    Raises SetupError on every rank where the checkpoint is missing, of another layout or of another
    run."""
    run = on_main(lambda: _read_run(path, trainer.config, trainer.layout))
    state = on_all(lambda: _read_rank(path / f"rank_{trainer.layout.rank}.pt"))
    trainer.policy.gpt_model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    set_generator_states(state["generators"])
    return run["step"]


def _read_run(path: Path, config: RunConfig, layout: Layout) -> dict:
    file = path / "run.json"
    if not file.is_file():
        raise SetupError(f"{path} is no checkpoint: {file.name} is missing")
    run = json.loads(file.read_text())
    if run["world"] != layout.world:
        raise SetupError(
            f"{path} was saved by {run['world']} processes, this run has {layout.world}"
        )
    # Through JSON, so that both sides have its types.
    now = json.loads(json.dumps(config.to_dict()))
    for key in _RUN_KEYS:
        if run["config"][key] != now[key]:
            raise SetupError(
                f"{path} was saved with {key} = {run['config'][key]}, this run has {now[key]}; "
                "a checkpoint resumes the same run on the same layout"
            )
    return run


def _read_rank(file: Path) -> dict:
    if not file.is_file():
        raise SetupError(f"checkpoint file {file} is missing")
    return torch.load(file, map_location="cpu", weights_only=False)


def generator_states() -> dict[str, Any]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "python": random.getstate(),
    }


def set_generator_states(states: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    get_cuda_rng_tracker().set_states(states["megatron"])
    torch.cuda.set_rng_state(states["cuda"])
    torch.set_rng_state(states["torch"])
