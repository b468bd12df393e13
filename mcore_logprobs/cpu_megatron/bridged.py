"""GPT layers on a CPU with parameters named as Transformer Engine's, for loaders that expect these.

mbridge, Megatron-Bridge and the converters of trainers map Hugging Face weights to the names of
Transformer Engine's layers: there the norm before a linear layer is part of it, as
`linear_qkv.layer_norm_weight`. Megatron's local layers have `input_layernorm.weight`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_logprobs.cpu_megatron.layers import CpuNorm

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec


def bridged_block_spec(
    config: TransformerConfig, *unused: object, vp_stage: int | None = None, **more: Any
) -> ModuleSpec:
    """The decoder's TransformerBlockSubmodules for this pipeline stage, with those names.

    Takes the arguments of Megatron's `get_gpt_decoder_block_spec`, so that it can stand in for it.
    RMSNorm and dense layers only.

    Raises:
        ValueError: config has another norm, or experts.
    """
    from megatron.core.transformer.identity_op import IdentityOp

    from mcore_logprobs.cpu_megatron.models import _bound_submodules, gpt_block_spec

    if config.normalization != "RMSNorm" or config.num_moe_experts:
        raise ValueError(
            "expected RMSNorm and no experts, got "
            f"{config.normalization}, num_moe_experts={config.num_moe_experts}"
        )
    block = gpt_block_spec(config, vp_stage=vp_stage)
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        for name, linear in (("self_attention", "linear_qkv"), ("mlp", "linear_fc1")):
            part = getattr(parts, name)
            submodules = getattr(part, "submodules", None) or _bound_submodules(part)
            setattr(submodules, linear, norm_linear())
        if config.qk_layernorm:
            attention = getattr(parts.self_attention, "submodules", None)
            attention = attention or _bound_submodules(parts.self_attention)
            attention.q_layernorm = attention.k_layernorm = CpuNorm
    return block


@functools.cache
def norm_linear() -> type[nn.Module]:
    """A ColumnParallelLinear that normalizes its input first, by a weight of its own."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class LayerNormColumnParallelLinear(ColumnParallelLinear):
        """`layer_norm_weight` [h] and `weight` [out/TP, h]; input [s, b, h] or [s/TP, b, h]."""

        def __init__(
            self, input_size: int, output_size: int, *, config: TransformerConfig, **options: object
        ):
            super().__init__(input_size, output_size, config=config, **options)
            norm = torch.ones(input_size, dtype=config.params_dtype)
            self.layer_norm_weight = nn.Parameter(norm)
            # Its gradient is a part of the sum there: `finalize_model_grads` adds the parts up.
            self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore
            self._eps = config.layernorm_epsilon

        def forward(self, input_: Tensor, *rest: object, **options: object) -> object:
            normal = nn.functional.rms_norm(
                input_, (input_.shape[-1],), self.layer_norm_weight, self._eps
            )
            return super().forward(normal, *rest, **options)

    return LayerNormColumnParallelLinear
