"""Small builders around Megatron-Core: parallel state, a Llama-like config, GPTModels.

With a GPU they take Transformer Engine's layers where that package imports and Megatron's local
ones otherwise; without one, the layers of `layers`, inside `cpu_runtime()` (usage there).
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import inspect
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mcore_logprobs.cpu_megatron.layers import CpuCoreAttention, CpuNorm
from mcore_logprobs.cpu_megatron.runtime import gpu_present

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

_made: list[dist.ProcessGroup] = []  # by init_model_parallel


def init_model_parallel(
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    vp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    seed: int = 1234,
) -> None:
    """Set up `megatron.core.parallel_state` and its generators; a repeated call only reseeds.

    The rest of the world is data parallel. `ep` and `etp` are the experts' parallel sizes (`etp`
    None: that of `tp`); Megatron cuts the experts' grid out of the same ranks. Starts a
    one-process gloo world where `torch.distributed` is not running and no launcher set RANK. The
    order of ranks is Megatron's default: TP fastest, then CP, DP, PP. Collective over the world.
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
    layout = (tp, cp, pp, vp, ep, etp or tp)
    if parallel_state.model_parallel_is_initialized() and _current_layout() != layout:
        destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        others = all_groups()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp or tp,
            create_gloo_process_groups=False,
        )
        _made.extend(group for group in all_groups() if group not in others)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _current_layout() -> tuple[int, int, int, int | None, int, int]:
    from megatron.core import parallel_state as ps

    return (
        ps.get_tensor_model_parallel_world_size(),
        ps.get_context_parallel_world_size(),
        ps.get_pipeline_model_parallel_world_size(),
        ps.get_virtual_pipeline_model_parallel_world_size(),
        ps.get_expert_model_parallel_world_size(),
        ps.get_expert_tensor_parallel_world_size(),
    )


def destroy_model_parallel() -> None:
    """Undo `init_model_parallel`, its process groups included; torch.distributed keeps running."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    end_groups(_made)
    _made.clear()
    # Models are cycles that hold groups, and a group's threads run for as long as it is held.
    gc.collect()


def all_groups() -> list[dist.ProcessGroup]:
    """This rank's live process groups, the world's included."""
    return list(dist.distributed_c10d._world.pg_map)


def end_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy process groups of this rank; those already destroyed are left as they are.

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
    **overrides: object,
) -> TransformerConfig:
    """A Llama-like TransformerConfig (RMSNorm, gated SiLU, no biases, no dropout).

    Parallel sizes are those of `megatron.core.parallel_state`. `overrides` are TransformerConfig's
    own fields (those of MLATransformerConfig with multi_latent_attention=True). Megatron's compiled
    and CUDA-only fusions are off, so that it runs everywhere. Virtual stages overlap what they
    send, as by Megatron-LM's defaults: without that two stages take one tensor for another.

    Raises:
        ValueError: multi-latent attention with tensor parallelism, for which Megatron's layers
            without Transformer Engine give wrong gradients.
    """
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    tp, cp, pp, vp, ep, etp = _current_layout()
    fields: dict[str, object] = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "num_query_groups": num_query_groups or num_attention_heads,
        "ffn_hidden_size": ffn_hidden_size or 2 * hidden_size,
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
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
        "overlap_p2p_comm": vp is not None,
        "batch_p2p_comm": vp is None,
    }
    if overrides.get("multi_latent_attention"):
        if tp > 1:
            raise ValueError(
                f"multi_latent_attention: expected tensor-parallel size 1, got {tp}: Megatron's "
                "layers without Transformer Engine do not sum its gradients over the ranks"
            )
        return MLATransformerConfig(**{**fields, "rope_type": "rope", **overrides})
    return TransformerConfig(**{**fields, **overrides})


def build_gpt_model(
    config: TransformerConfig,
    *,
    vocab_size: int,
    max_sequence_length: int = 4096,
    tied: bool = True,
    rotary_base: float = 10000,
    mtp: bool = False,
    vp_stage: int | None = None,
    seed: int | None = 1234,
    **gpt_kwargs: object,
) -> GPTModel:
    """This rank's GPTModel (with virtual pipelining: the chunk `vp_stage`), with RoPE; where a GPU
    is present, on it.

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
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=tied,
        rotary_base=rotary_base,
        vp_stage=vp_stage,
        **{"position_embedding_type": "rope", **gpt_kwargs},
    )
    _share_out_gates(model)
    return model.cuda() if gpu_present() else model


def _share_out_gates(model: LanguageModule) -> None:
    """Give each TP rank its part of the gates and its part of what they gate.

    Before 0.16 Megatron's CPU initialization cuts a gated MLP's first weight into contiguous parts,
    so that the same seed makes another model at another TP; from 0.16 on it does this by itself.
    Collectives: where it does not, an all-gather over TP for each such weight.
    """
    from megatron.core import parallel_state

    config = model.config
    if not (config.gated_linear_unit and config.use_cpu_initialization):
        return
    for name, module in model.named_modules():
        if not name.endswith("linear_fc1"):
            continue
        weight = module.weight
        if getattr(weight, "partition_stride", 2) != 1:
            continue
        group = parallel_state.get_tensor_model_parallel_group()
        if getattr(module, "is_expert", False):
            group = parallel_state.get_expert_tensor_parallel_group()
        size, rank = group.size(), group.rank()
        gathered = weight.data.new_empty((size * weight.shape[0], *weight.shape[1:]))
        dist.all_gather_into_tensor(gathered, weight.data.contiguous(), group=group)
        gate, up = gathered.chunk(2)
        weight.data.copy_(torch.cat((gate.chunk(size)[rank], up.chunk(size)[rank])))


def build_gpt_chunks(config: TransformerConfig, **kwargs: Any) -> list[GPTModel]:
    """One `build_gpt_model` for each virtual pipeline chunk of this rank (one without them)."""
    chunks = config.virtual_pipeline_model_parallel_size
    if chunks is None:
        return [build_gpt_model(config, **kwargs)]
    return [build_gpt_model(config, vp_stage=stage, **kwargs) for stage in range(chunks)]


def build_hybrid_model(
    config: TransformerConfig,
    *,
    vocab_size: int,
    pattern: str,
    max_sequence_length: int = 4096,
    tied: bool = True,
    vp_stage: int | None = None,
    seed: int | None = 1234,
    **model_kwargs: object,
) -> LanguageModule:
    """This rank's HybridModel, or MambaModel where Megatron has only that (before 0.18).

    `pattern` has a letter a layer: M a Mamba mixer (on a CPU Megatron's own, over the torch kernels
    of `mamba`), * attention, - an MLP, E a mixture of experts. `config.num_layers` is its length.
    Where Megatron reads them in a pattern (from 0.17 on), "/" precedes the layers of each
    multi-token prediction head (`config.mtp_num_layers`) and "|" ends a pipeline stage.
    `model_kwargs` go to the model; the rest as for `build_gpt_model`.

    Raises:
        ValueError: a pattern with layers or marks that this Megatron does not have.
    """
    from megatron.core import parallel_state

    model_class, block = hybrid_model_class()
    known = inspect.signature(model_class.__init__).parameters
    unified = "hybrid_layer_pattern" in known
    if not unified and set(pattern) & set("/|"):
        raise ValueError(f"this Megatron's {model_class.__name__} has no marks in {pattern!r}")
    if seed is not None:
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        torch.manual_seed(seed + 1000 * pp_rank + 17 * (vp_stage or 0))
    if "vp_stage" in known:
        model_kwargs["vp_stage"] = vp_stage
    stack = "hybrid_stack_spec" if "hybrid_stack_spec" in known else "mamba_stack_spec"
    model_kwargs[stack] = hybrid_stack_spec(config, pattern)
    model_kwargs["hybrid_layer_pattern" if unified else "hybrid_override_pattern"] = pattern
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    # The stack takes Transformer Engine's norm for its last one; all else comes from the spec.
    te_norm = block.TENorm
    if not gpu_present():
        block.TENorm = CpuNorm
    try:
        model = model_class(
            config=config,
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=tied,
            **model_kwargs,
        )
    finally:
        block.TENorm = te_norm
    _share_out_gates(model)
    return model.cuda() if gpu_present() else model


def build_hybrid_chunks(config: TransformerConfig, **kwargs: Any) -> list[LanguageModule]:
    """One `build_hybrid_model` for each virtual pipeline chunk of this rank."""
    chunks = config.virtual_pipeline_model_parallel_size
    if chunks is None:
        return [build_hybrid_model(config, **kwargs)]
    return [build_hybrid_model(config, vp_stage=stage, **kwargs) for stage in range(chunks)]


def hybrid_model_class() -> tuple[type[LanguageModule], Any]:
    """(HybridModel, the module of its stack), or MambaModel's where there is no HybridModel."""
    if importlib.util.find_spec("megatron.core.models.hybrid"):
        from megatron.core.models.hybrid import hybrid_block
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        return HybridModel, hybrid_block
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm import mamba_block

    return MambaModel, mamba_block


def hybrid_stack_spec(config: TransformerConfig, pattern: str) -> ModuleSpec:
    """The stack's spec with the layers that `pattern` names, made of the GPT layer's parts; on a
    GPU Megatron's own."""
    if gpu_present():
        return _gpu_hybrid_stack_spec()
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer import transformer_layer
    from megatron.core.transformer.spec_utils import ModuleSpec

    _, block = hybrid_model_class()
    stack = getattr(block, "HybridStack", None) or block.MambaStack
    layers = getattr(block, "HybridStackSubmodules", None) or block.MambaStackSubmodules
    plain = transformer_layer.TransformerLayer
    submodules = transformer_layer.TransformerLayerSubmodules
    dense = _layer_spec(config, experts=None).submodules
    specs = {
        "attention_layer": ModuleSpec(
            module=plain,
            submodules=submodules(
                input_layernorm=dense.input_layernorm,
                self_attention=dense.self_attention,
                self_attn_bda=dense.self_attn_bda,
            ),
        ),
        "mlp_layer": ModuleSpec(module=MLPLayer, submodules=_mlp_submodules(submodules, dense)),
    }
    if "M" in pattern:
        specs["mamba_layer"] = _mamba_layer_spec(dense.input_layernorm, dense.self_attn_bda)
    names = {field.name for field in dataclasses.fields(layers)}
    if "E" in pattern:
        sparse = _layer_spec(config, experts=config.num_moe_experts).submodules
        specs["moe_layer"] = ModuleSpec(
            module=getattr(transformer_layer, "MoETransformerLayer", plain),
            submodules=_mlp_submodules(submodules, sparse),
        )
    if "/" in pattern:
        specs["mtp_block_spec"] = _hybrid_mtp_spec(dense.input_layernorm)
    if specs.keys() - names:
        raise ValueError(f"{layers.__name__} has no {sorted(specs.keys() - names)} for {pattern!r}")
    return ModuleSpec(module=stack, submodules=layers(**specs))


def _mlp_submodules(
    submodules: type[TransformerLayerSubmodules], parts: TransformerLayerSubmodules
) -> TransformerLayerSubmodules:
    return submodules(
        pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda
    )


def _mamba_layer_spec(norm: object, bias_dropout_add: object) -> object:
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    mixer = ModuleSpec(
        module=MambaMixer,
        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    parts = MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=bias_dropout_add)
    return ModuleSpec(module=MambaLayer, submodules=parts)


def _hybrid_mtp_spec(norm: object) -> object:
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec

    layer = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=norm,
        hnorm=norm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,  # built from the pattern
        layer_norm=norm,
    )
    specs = [ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=layer)]
    return ModuleSpec(
        module=mtp.MultiTokenPredictionBlock,
        submodules=mtp.MultiTokenPredictionBlockSubmodules(layer_specs=specs),
    )


def gpt_block_spec(
    config: TransformerConfig, *, vp_stage: int | None = None
) -> TransformerBlockSubmodules | ModuleSpec:
    """The decoder's TransformerBlockSubmodules for this pipeline stage, for this machine."""
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    layer = _layer_spec(config, experts=config.num_moe_experts)
    if gpu_present():
        return layer
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=CpuNorm)


def _layer_spec(config: TransformerConfig, *, experts: int | None) -> ModuleSpec:
    """A GPT layer with an MLP or with `experts`; on a CPU Megatron's local one with our parts."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    if gpu_present():
        return _gpu_layer_spec(config, experts)
    layer = get_gpt_layer_local_spec(
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
        num_experts=experts,
        multi_latent_attention=config.multi_latent_attention,
    )
    _put_cpu_layers(layer)
    return layer


def _put_cpu_layers(layer: ModuleSpec) -> None:
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = CpuNorm
    attention = parts.self_attention
    attention = getattr(attention, "submodules", None) or _bound_submodules(attention)
    attention.core_attention = CpuCoreAttention


def _bound_submodules(builder: Any) -> Any:
    """The submodules that a `functools.partial`-like attention builder carries."""
    submodules = getattr(builder, "keywords", {}).get("submodules")
    if submodules is None:
        raise ValueError(f"no submodules in the self-attention spec {builder!r}")
    return submodules


def _mtp_block_spec(config: object, block: object, vp_stage: int | None) -> object:
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


def _gpu_layer_spec(config: TransformerConfig, experts: int | None) -> ModuleSpec:
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
    options = {
        "normalization": config.normalization,
        "qk_layernorm": config.qk_layernorm,
        "num_experts": experts,
        "multi_latent_attention": config.multi_latent_attention,
    }
    known = inspect.signature(make).parameters
    return make(**{k: v for k, v in options.items() if k in known})


def _gpu_hybrid_stack_spec() -> object:
    if importlib.util.find_spec("megatron.core.models.hybrid"):
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        return hybrid_stack_spec
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

    return mamba_stack_spec


def _te_imports() -> bool:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError):
        return False
    return True
