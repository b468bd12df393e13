"""Small builders around Megatron-Core: parallel state, a Llama-like config, GPTModels.

With a GPU they take Transformer Engine's layers where that package imports and Megatron's local
ones otherwise; without one, the layers of `layers`, inside `cpu_runtime()` (usage there).
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from mcore_logprobs.cpu_megatron.layers import CpuCoreAttention, CpuNorm
from mcore_logprobs.cpu_megatron.runtime import gpu_present

_made: list[dist.ProcessGroup] = []  # by init_model_parallel


def init_model_parallel(
    *, tp: int = 1, cp: int = 1, pp: int = 1, vp: int | None = None, seed: int = 1234
) -> None:
    """Set up `megatron.core.parallel_state` and its generators; a repeated call only reseeds.

    The rest of the world is data parallel. Starts a one-process gloo world where
    `torch.distributed` is not running and no launcher set RANK. The order of ranks is Megatron's
    default: TP fastest, then CP, DP, PP. Collective over the world.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group("nccl" if gpu_present() else "gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() % (tp * cp * pp):
        raise ValueError(
            f"expected a world size divisible by tp * cp * pp = {tp} * {cp} * {pp}, got "
            f"{dist.get_world_size()}"
        )
    wanted = (tp, cp, pp, vp)
    if parallel_state.model_parallel_is_initialized() and _current_layout() != wanted:
        destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        others = all_groups()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp,
            create_gloo_process_groups=False,
        )
        _made.extend(group for group in all_groups() if group not in others)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _current_layout() -> tuple[int, int, int, int | None]:
    from megatron.core import parallel_state as ps

    return (
        ps.get_tensor_model_parallel_world_size(),
        ps.get_context_parallel_world_size(),
        ps.get_pipeline_model_parallel_world_size(),
        ps.get_virtual_pipeline_model_parallel_world_size(),
    )


def destroy_model_parallel() -> None:
    """Undo `init_model_parallel`, its process groups included; torch.distributed keeps running."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    end_groups(_made)
    _made.clear()


def all_groups() -> list[dist.ProcessGroup]:
    """This rank's live process groups, the world's included."""
    return list(dist.distributed_c10d._world.pg_map)


def end_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy process groups of this rank; those already destroyed are left alone.

    A gloo group's threads wake a hundred times a second as long as it lives: ranks that collect
    hundreds of groups spend their cores on that.
    """
    for group in groups:
        if group in all_groups():
            dist.destroy_process_group(group)


def transformer_config(
    *,
    num_layers: int = 2,
    hidden_size: int = 32,
    num_attention_heads: int = 4,
    num_query_groups: int | None = None,
    ffn_hidden_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    **overrides: Any,
) -> Any:
    """A Llama-like TransformerConfig (RMSNorm, gated SiLU, no biases, no dropout).

    Parallel sizes are those of `megatron.core.parallel_state`. `overrides` are TransformerConfig's
    own fields. Megatron's compiled and CUDA-only fusions are off, so that it runs everywhere.
    """
    from megatron.core.transformer import TransformerConfig

    tp, cp, pp, vp = _current_layout()
    fields: dict[str, Any] = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "num_query_groups": num_query_groups or num_attention_heads,
        "ffn_hidden_size": ffn_hidden_size or 2 * hidden_size,
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vp,
        "sequence_parallel": sequence_parallel and tp > 1,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "mtp_loss_scaling_factor": 0.1,
        "use_cpu_initialization": not gpu_present(),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
    }
    return TransformerConfig(**{**fields, **overrides})


def build_gpt_model(
    config: Any,
    *,
    vocab_size: int,
    max_sequence_length: int = 4096,
    tied: bool = True,
    rotary_base: float = 10000,
    mtp: bool = False,
    vp_stage: int | None = None,
    seed: int | None = 1234,
    **gpt_kwargs: Any,
) -> Any:
    """This rank's GPTModel (with virtual pipelining: the chunk `vp_stage`), with RoPE.

    `vocab_size` is the padded one, divisible by TP. `mtp` builds the multi-token prediction block
    (`config.mtp_num_layers`). `seed` makes weights that are the same at every TP and CP, and for
    one pipeline stage also at every data-parallel rank; None leaves the generator alone.
    `gpt_kwargs` go to GPTModel.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    if seed is not None:
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        torch.manual_seed(seed + 1000 * pp_rank + 17 * (vp_stage or 0))
    block = gpt_block_spec(config, vp_stage=vp_stage)
    if mtp:
        gpt_kwargs["mtp_block_spec"] = _mtp_block_spec(config, block, vp_stage)
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        rotary_base=rotary_base,
        vp_stage=vp_stage,
        **gpt_kwargs,
    )


def build_gpt_chunks(config: Any, **kwargs: Any) -> list[Any]:
    """One `build_gpt_model` for each virtual pipeline chunk of this rank (one without them)."""
    chunks = config.virtual_pipeline_model_parallel_size
    if chunks is None:
        return [build_gpt_model(config, **kwargs)]
    return [build_gpt_model(config, vp_stage=stage, **kwargs) for stage in range(chunks)]


def gpt_block_spec(config: Any, *, vp_stage: int | None = None) -> Any:
    """The decoder's TransformerBlockSubmodules for this pipeline stage, for this machine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    if gpu_present():
        return _gpu_layer_spec(config)
    layer = get_gpt_layer_local_spec(
        normalization=config.normalization, qk_layernorm=config.qk_layernorm
    )
    _put_cpu_layers(layer)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=CpuNorm)


def _put_cpu_layers(layer: Any) -> None:
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = CpuNorm
    attention = parts.self_attention
    attention = getattr(attention, "submodules", None) or _bound_submodules(attention)
    attention.core_attention = CpuCoreAttention


def _bound_submodules(builder: Any) -> Any:
    """The submodules that a `functools.partial`-like attention builder carries."""
    found = getattr(builder, "keywords", {}).get("submodules")
    if found is None:
        raise ValueError(f"no submodules in the self-attention spec {builder!r}")
    return found


def _mtp_block_spec(config: Any, block: Any, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    gpu = gpu_present()
    spec = get_gpt_mtp_block_spec(
        config, block, use_transformer_engine=gpu and _te_imports(), vp_stage=vp_stage
    )
    if spec is not None and not gpu:
        for layer in spec.layer_specs:
            names = {f.name for f in dataclasses.fields(layer.submodules)}
            for name in names & {"enorm", "hnorm", "layer_norm"}:
                setattr(layer.submodules, name, CpuNorm)
    return spec


# Everything below needs a GPU and is not run by this project's CPU tests.


def _gpu_layer_spec(config: Any) -> Any:
    """Transformer Engine's GPT layer (it knows CP) where it imports, else Megatron's local one."""
    from megatron.core.models.gpt import gpt_layer_specs

    if _te_imports():
        make = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
    elif config.context_parallel_size == 1 and not config.sequence_parallel:
        make = gpt_layer_specs.get_gpt_layer_local_spec
    else:
        raise ValueError(
            "context and sequence parallelism on GPU need Transformer Engine, which does not "
            "import here; run on CPU (CUDA_VISIBLE_DEVICES=) or at CP 1 without them"
        )
    wanted = {"normalization": config.normalization, "qk_layernorm": config.qk_layernorm}
    known = inspect.signature(make).parameters
    return make(**{k: v for k, v in wanted.items() if k in known})


def _te_imports() -> bool:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError):
        return False
    return True
