"""Megatron-Bridge's own LoRA around a model's layers; `test_newer_megatron.py` runs these.

Bridge's DoRA cannot be on an output layer: it takes no `weight`, which Megatron hands that one.

`test_lora.py` has the same layout in classes of its own, which every release of Megatron takes.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.cpu_megatron.training import cpu_training
from mcore_logprobs.megatron import head_report
from tests.dropin.frameworks import MAIN, source_root, versions
from tests.megatron.common import VOCAB, make_batch, megatron, tiny_config
from tests.megatron.test_lora import against_unpatched
from tests.trainers.absent import stand_in
from tests.trainers.bridge import package, without_tensorboard

TARGETS = ["output_layer", "linear_qkv"]


def lora_class(version: str) -> Any:
    """Bridge's `LoRA`, which imports Transformer Engine for layers that are not used here."""
    if "megatron.bridge.peft" not in sys.modules:
        # First, as these ask whether the engine is there and would take the stand-in for it.
        for asking in ("dist_checkpointing", "models.hybrid.hybrid_layer_specs"):
            importlib.import_module(f"megatron.core.{asking}")
        importlib.import_module("megatron.training.models.hybrid")
        without_tensorboard()
        root = source_root("megatron-bridge", version) / ("src" if version == MAIN else "")
        for part in ("", ".peft", ".utils"):
            folder = f"megatron.bridge{part}"
            package(folder, root / folder.replace(".", "/"))
        absent = stand_in("transformer_engine", "modelopt", "wandb")
        importlib.import_module("megatron.bridge.peft.utils").HAVE_TE = False
        importlib.import_module("megatron.bridge.peft.lora")
        absent()
    return sys.modules["megatron.bridge.peft.lora"].LoRA


def build(version: str, tp: int, sequence_parallel: bool) -> Any:
    """A tiny GPT as Bridge's `LoRA` leaves it, B drawn and not 0."""
    config = tiny_config(tp, sequence_parallel=sequence_parallel)
    model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=False)
    (model,) = lora_class(version)(target_modules=TARGETS, dim=6, alpha=9)([model], training=True)
    torch.manual_seed(5 + torch.distributed.get_rank())
    for parameter_name, parameter in model.named_parameters():
        if "linear_out" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.2)
    learning = [n for n, p in model.named_parameters() if p.requires_grad]
    assert learning
    assert all(".adapter." in n for n in learning)
    return model


def lora(version: str, tp: int, sequence_parallel: bool) -> dict[str, float]:
    """Fused, its adapter on and off: what a reference policy is computed with."""
    with cpu_training(), megatron(tp=tp) as parallel_state:
        model = build(version, tp, sequence_parallel)
        assert head_report(model) == (True, "")
        batch = make_batch(parallel_state)
        errors = against_unpatched(model, batch)
        with_adapter = model(**batch["inputs"])
        model.output_layer.disable_adapter_layers()
        assert head_report(model) == (True, "")
        assert not torch.equal(model(**batch["inputs"]), with_adapter)
        off = against_unpatched(model, batch)
        return errors | {f"off, {name}": error for name, error in off.items()}


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True)], ids=str)
@pytest.mark.parametrize(("_", "version"), versions("megatron-bridge"))
def test_lora(ranks, _, version, tp, sequence_parallel):
    for errors in ranks(tp).run(lora, version, tp, sequence_parallel):
        assert max(errors.values()) < 2e-5, errors
