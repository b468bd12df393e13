"""A trainer of the example inside a rank, as the tests of its steps start it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import rl_step
import torch
import transformers.models.llama.modeling_llama  # noqa: F401 (once, for the ranks too)
from rl.config import load_config, override, validate
from rl.layout import Layout
from rl_step import GrpoTrainer

from mcore_logprobs.cpu_megatron.models import destroy_model_parallel
from mcore_logprobs.cpu_megatron.runtime import cpu_runtime
from tests.helpers.distributed import RankPool
from tests.helpers.documents import ROOT

TINY = ROOT / "configs" / "tiny-cpu.yaml"
SMOLLM2 = ROOT / "configs" / "smollm2-cpu.yaml"
Ranks = Callable[[int], RankPool]


@contextmanager
def trainer_of(
    path: Path = TINY, *, sections: dict[str, dict[str, Any]] | None = None, **given: Any
) -> Iterator[Any]:
    """A Trainer inside a rank; `given` is what the command line can give."""
    config = override(load_config(path), **given)
    # vLLM has a file of its own, test_vllm.py.
    rollout = dataclasses.replace(config.rollout, engine="transformers")
    config = dataclasses.replace(config, rollout=rollout)
    for name, values in (sections or {}).items():
        section = getattr(config, name)
        section = (
            {**section, **values}
            if isinstance(section, dict)
            else dataclasses.replace(section, **values)
        )
        config = dataclasses.replace(config, **{name: section})
    validate(config, torch.distributed.get_world_size())
    with cpu_runtime():
        try:
            yield GrpoTrainer(config, Layout(config), say=lambda text: None)
        finally:
            destroy_model_parallel()


def without_filter(wanted: bool = True) -> AbstractContextManager[Any]:
    """The trainer's own log-probabilities are over the whole vocabulary, whatever was sampled."""
    if not wanted:
        return nullcontext()
    whole = {"top_p": 1.0, "min_p": 0.0}
    patch = rl_step.patch_model
    return mock.patch.object(
        rl_step,
        "patch_model",
        lambda model, config: patch(model, dataclasses.replace(config, **whole)),
    )
