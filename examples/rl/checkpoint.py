"""Checkpoints that resume bit for bit on the same layout: one file per rank, one for the run.

Kept: model, optimizer, every random generator and the step, which fixes the data order. The
reference model is the starting weights; the rollout engine gets its weights from the resumed model.

A file holds tensors, numbers and texts alone, so that it loads with `weights_only=True`: reading
somebody else's checkpoint runs none of its code.
"""

from __future__ import annotations

import dataclasses
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
from .layout import Layout, on_main

_RUN_KEYS = ("seed", "model", "parallel", "task", "rollout", "grpo", "optimizer", "logprobs")


def save(path: Path, trainer: Any) -> None:
    """Collective. Written beside `path` and renamed, so that a checkpoint is whole or absent."""
    layout, partial = trainer.layout, path.with_name(path.name + ".partial")
    if layout.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        config = dataclasses.asdict(trainer.config)
        run = {"step": trainer.step, "world": layout.world, "config": config}
        (partial / "run.json").write_text(json.dumps(run, indent=2))
    dist.barrier()
    state = {
        "model": _tensors(trainer.policy.gpt_model.state_dict()),
        "optimizer": trainer.optimizer.state_dict(),
        "generators": {name: get() for name, (get, _) in _generators().items()},
    }
    torch.save(state, partial / f"rank_{layout.rank}.pt")
    dist.barrier()
    if layout.is_main:
        shutil.rmtree(path, ignore_errors=True)
        os.replace(partial, path)
    dist.barrier()


def load(path: Path, trainer: Any) -> int:
    """Collective; loads model, optimizer and generators, and returns the step that was saved.
    Raises SetupError on every rank where the checkpoint is missing, of another layout or of another
    run, or where a rank's file holds anything but plain data."""
    run = on_main(lambda: _read_run(path, trainer.config, trainer.layout))
    state = _read_state(path / f"rank_{trainer.layout.rank}.pt", trainer.layout.world)
    model = trainer.policy.gpt_model
    own = model.state_dict()
    layers = {name: own[name] for name in own.keys() - _tensors(own).keys()}
    model.load_state_dict(layers | state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    for name, (_, put) in _generators().items():
        put(state["generators"][name])
    return run["step"]


def _read_run(path: Path, config: RunConfig, layout: Layout) -> dict:
    file = path / "run.json"
    if not file.is_file():
        raise SetupError(f"{path} is no checkpoint: {file.name} is missing")
    try:
        run = json.loads(file.read_text())
        world, saved, _ = run["world"], {key: run["config"][key] for key in _RUN_KEYS}, run["step"]
    except (ValueError, LookupError, TypeError) as error:
        raise SetupError(
            f"{file} is refused: expected what this version of the example writes ({error!r})"
        ) from None
    if world != layout.world:
        raise SetupError(f"{path} was saved by {world} processes, this run has {layout.world}")
    for rank in range(layout.world):
        if not (path / f"rank_{rank}.pt").is_file():
            raise SetupError(f"checkpoint file {path / f'rank_{rank}.pt'} is missing")
    now = json.loads(json.dumps(dataclasses.asdict(config)))  # both sides have JSON's types
    for key in _RUN_KEYS:
        if saved[key] != now[key]:
            raise SetupError(
                f"{path} was saved with {key} = {saved[key]}, this run has {now[key]}; "
                "a checkpoint resumes the same run on the same layout"
            )
    return run


def _tensors(state: dict) -> dict:
    """What of a model's state is a tensor: the rest, `_extra_state`, is Transformer Engine's pickle
    of FP8 scales, which this example has none of."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _read_state(file: Path, world: int) -> dict:
    """Collective: a file that is refused on one rank is refused on all."""
    state: dict = {}
    problem = None
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of pickle, zip or torch, by what is wrong with the file
        reason = type(error).__name__  # torch's own words recommend to load it all the same
        problem = f"{file} is refused: expected tensors and plain data alone ({reason})"
    problems: list[str | None] = [None] * world
    dist.all_gather_object(problems, problem)
    for found in problems:
        if found is not None:
            raise SetupError(found)
    return state


def _numpy_state() -> list:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 (the one that libraries use)
    return [kind, keys.tolist(), *rest]


def _set_numpy_state(state: list) -> None:
    kind, keys, *rest = state
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002


def _generators() -> dict[str, tuple[Any, Any]]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    return {
        "torch": (torch.get_rng_state, torch.set_rng_state),
        "cuda": (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
        "megatron": (tracker.get_states, tracker.set_states),
        "numpy": (_numpy_state, _set_numpy_state),
        "python": (random.getstate, random.setstate),
    }
