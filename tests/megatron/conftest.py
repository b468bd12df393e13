"""Ranks are forked with Megatron imported: seconds each otherwise, at the first model of each."""

from __future__ import annotations

from tests.helpers.distributed import preloaded

preloaded += [
    "torch._dynamo",
    "megatron.core.distributed",
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.mamba",
    "megatron.core.models.multimodal.llava_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "tests.megatron.release_features",
]
