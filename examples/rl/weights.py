"""Megatron's GPTModel for a transformers Llama config, and its weights' way in and out.

Megatron-Bridge does this for many models, on Python 3.12 and GPUs; this file is for Llamas, on
anything. Between transformers' layout and Megatron's, three things differ:
- Megatron fuses query, key and value into one matrix whose rows go group by group (the queries of
  a key-value head, its key, its value), so that a TP shard holds whole groups;
- it fuses gate and up, and each TP shard holds its part of the gate and then its part of the up;
- its vocabulary is padded to a multiple of TP.
Rotary positions are alike: both rotate halves (`rotary_interleaved=False`). The GGUF file itself
interleaves them, which transformers undoes on loading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import RunConfig, SetupError
from .layout import Layout, on_main

# Of Llama 3's rotary positions Megatron takes the factor alone.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def build_gpt_model(llama: Any, config: RunConfig, layout: Layout) -> Any:
    """This rank's part of the model: on a CPU with `mcore_logprobs.cpu_megatron`'s layers, on a GPU
    with Transformer Engine's where that package imports and Megatron's local ones otherwise."""
    from mcore_logprobs.cpu_megatron import models as megatron_models

    # transformers 5 keeps them together, 4 apart.
    rope = {"rope_theta": getattr(llama, "rope_theta", 10000.0)}
    rope |= getattr(llama, "rope_parameters", None) or getattr(llama, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", "default")
    extra = {}
    if rope_type == "llama3":
        extra = {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        for name, built_in in _LLAMA3_ROPE.items():
            if rope.get(name, built_in) != built_in:
                raise SetupError(f"rotary positions: expected {name} {built_in}, got {rope[name]}")
    elif rope_type != "default":
        raise SetupError(f"rotary positions of type {rope_type!r} are not covered")
    if getattr(llama, "attention_bias", False) or getattr(llama, "mlp_bias", False):
        raise SetupError("Llama models with biases are not covered")
    transformer_config = megatron_models.transformer_config(
        num_layers=llama.num_hidden_layers,
        hidden_size=llama.hidden_size,
        num_attention_heads=llama.num_attention_heads,
        num_query_groups=llama.num_key_value_heads,
        ffn_hidden_size=llama.intermediate_size,
        kv_channels=llama.head_dim,
        layernorm_epsilon=llama.rms_norm_eps,
        dtype=getattr(torch, config.model.dtype),
        sequence_parallel=config.parallel.sequence_parallel,
        # The loss function returns sums; finalize_model_grads divides by the tokens of all ranks,
        # so that a token weighs the same under every TP, CP, PP and DP.
        calculate_per_token_loss=True,
    )
    model = megatron_models.build_gpt_model(
        transformer_config,
        vocab_size=Sizes.of(llama, layout.tp).padded_vocab,
        max_sequence_length=llama.max_position_embeddings,
        tied=llama.tie_word_embeddings,
        rotary_base=rope["rope_theta"],
        **extra,
    )
    return model.to(layout.device)


@dataclass
class Policy:
    """A model that is asked for log-probabilities: bare, for its weights, and as it is called."""

    gpt_model: Any
    model: Any


def build_policy(
    llama: Any, bridge: WeightBridge, engine: Any | None, config: RunConfig, *, trainable: bool
) -> Policy:
    """Collective; with the weights of `engine`, which rank 0 holds."""
    model = build_gpt_model(llama, config, bridge.layout)
    bridge.load(model, engine)
    return Policy(model, wrap_ddp(model, config, trainable=trainable))


def wrap_ddp(model: Any, config: RunConfig, *, trainable: bool) -> Any:
    """As the schedules call it: in Float16Module under bfloat16, and where it is trained in
    Megatron's DDP, whose buffers gather the gradients."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    transformer_config, wrapped = model.config, model
    if config.model.dtype == "bfloat16":
        wrapped = Float16Module(transformer_config, wrapped)
    if not trainable:
        return wrapped.requires_grad_(False)
    wrapped = DistributedDataParallel(
        config=transformer_config,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        module=wrapped,
    )
    transformer_config.finalize_model_grads_func = finalize_model_grads
    transformer_config.no_sync_func = wrapped.no_sync
    return wrapped


class WeightBridge:
    """Moves weights between rank 0's rollout engine and the ranks' Megatron shards."""

    def __init__(self, llama: Any, layout: Layout) -> None:
        self.layout, self.layers = layout, llama.num_hidden_layers
        self.sizes, self.tied = Sizes.of(llama, layout.tp), llama.tie_word_embeddings

    @torch.no_grad()
    def load(self, model: Any, engine: Any | None) -> None:
        """Rank 0 broadcasts each whole tensor, every rank keeps its shard. `engine` on rank 0."""
        lay, source = self.layout, dict(engine.model.named_parameters()) if engine else {}
        shapes = on_main(lambda: {n: (tuple(p.shape), p.dtype) for n, p in source.items()})
        targets = self._targets(model)
        for slot in self._slots():
            whole = []
            for name in slot.names:
                shape, dtype = shapes[name]
                tensor = torch.empty(shape, dtype=dtype, device=lay.device)
                if lay.is_main:
                    tensor.copy_(source[name])
                dist.broadcast(tensor, src=0)
                whole.append(tensor)
            for param in targets.get(slot.names, []):
                shard = to_megatron(slot, whole, self.sizes, rank=lay.tp_rank, tp=lay.tp)
                assert shard.shape == param.shape, f"{slot}: {shard.shape} for {param.shape}"
                param.copy_(shard)

    @torch.no_grad()
    def store(self, model: Any, engine: Any | None) -> None:
        """The reverse: the trained weights, whole again, go into the rollout engine's tensors."""
        lay, wanted = self.layout, dict(engine.model.named_parameters()) if engine else {}
        targets, stage_size = self._targets(model), lay.world // lay.pp
        for slot in self._slots():
            # Megatron's order of ranks: pipeline outermost, so that this is the stage's first.
            owner, whole = self._stage_of(slot) * stage_size, []
            if owner <= lay.rank < owner + stage_size and lay.cp_rank == lay.dp_rank == 0:
                shard = targets[slot.names][0].contiguous()
                shards = [torch.empty_like(shard) for _ in range(lay.tp)]
                dist.all_gather(shards, shard, group=lay.tp_group)
                whole = to_transformers(slot, shards, self.sizes)
            if owner and lay.rank == owner:
                for tensor in whole:
                    dist.send(tensor.contiguous(), dst=0)
            if lay.is_main:
                if owner:
                    whole = [torch.empty_like(wanted[n], device=lay.device) for n in slot.names]
                    for tensor in whole:
                        dist.recv(tensor, src=owner)
                for name, tensor in zip(slot.names, whole, strict=True):
                    wanted[name].copy_(tensor)

    def _targets(self, model: Any) -> dict[tuple[str, ...], list[Tensor]]:
        """This rank's parameters by the transformers names that they are made of."""
        offset = self.layout.pp_rank * (self.layers // self.layout.pp)
        found: dict[tuple[str, ...], list[Tensor]] = {}
        for name, param in model.named_parameters():
            names = slot_of(name, layer_offset=offset).names
            if self.tied and names == ("lm_head.weight",):
                names = ("model.embed_tokens.weight",)  # the last stage's copy of the embedding
            found.setdefault(names, []).append(param)
        return found

    def _slots(self) -> Iterator[Slot]:
        """All slots of the whole model, in one order on every rank."""
        outside = [name for name in _OUTSIDE if not (self.tied and name == "output_layer.weight")]
        inside = [name for name in _INSIDE if "layer_norm_weight" not in name]
        names = [f"decoder.layers.{i}.{n}" for i in range(self.layers) for n in inside]
        return (slot_of(name, layer_offset=0) for name in [*outside, *names])

    def _stage_of(self, slot: Slot) -> int:
        if slot.layer is not None:
            return slot.layer // (self.layers // self.layout.pp)
        return 0 if slot.names == ("model.embed_tokens.weight",) else self.layout.pp - 1


@dataclass(frozen=True)
class Sizes:
    heads: int
    groups: int  # key-value heads
    vocab: int  # true vocabulary
    padded_vocab: int

    @classmethod
    def of(cls, llama: Any, tp: int) -> Sizes:
        padded = -(-llama.vocab_size // tp) * tp
        return cls(llama.num_attention_heads, llama.num_key_value_heads, llama.vocab_size, padded)


@dataclass(frozen=True)
class Slot:
    """One Megatron parameter: the transformers tensors it is made of, and how it is cut."""

    names: tuple[str, ...]  # transformers' names
    kind: str  # "vocab" | "qkv" | "gate_up" | "row" | "replicated"
    layer: int | None = None  # global layer number, or None outside the layers


_OUTSIDE = {
    "embedding.word_embeddings.weight": ("model.embed_tokens", "vocab"),
    "decoder.final_layernorm.weight": ("model.norm", "replicated"),
    "output_layer.weight": ("lm_head", "vocab"),
}
# layer_norm_weight: Transformer Engine's fused layers.
_INSIDE = {
    "input_layernorm.weight": ("input_layernorm", "replicated"),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm", "replicated"),
    "self_attention.linear_qkv.weight": (
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "qkv",
    ),
    "self_attention.linear_proj.weight": ("self_attn.o_proj", "row"),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm", "replicated"),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm", "replicated"),
    "mlp.linear_fc1.weight": ("mlp.gate_proj mlp.up_proj", "gate_up"),
    "mlp.linear_fc2.weight": ("mlp.down_proj", "row"),
}


def slot_of(megatron_name: str, *, layer_offset: int) -> Slot:
    """Maps a GPTModel parameter name, of the local or the Transformer Engine layer spec."""
    if megatron_name in _OUTSIDE:
        name, kind = _OUTSIDE[megatron_name]
        return Slot((f"{name}.weight",), kind)
    number, _, rest = megatron_name.removeprefix("decoder.layers.").partition(".")
    if not megatron_name.startswith("decoder.layers.") or rest not in _INSIDE:
        raise KeyError(f"no transformers counterpart of Megatron parameter {megatron_name}")
    names, kind = _INSIDE[rest]
    layer = int(number) + layer_offset
    return Slot(tuple(f"model.layers.{layer}.{n}.weight" for n in names.split()), kind, layer)


def to_megatron(slot: Slot, tensors: list[Tensor], sizes: Sizes, *, rank: int, tp: int) -> Tensor:
    """Whole transformers tensors -> this TP rank's shard of the Megatron parameter."""
    if slot.kind == "replicated":
        return tensors[0]
    if slot.kind == "row":  # [out, in]: the input side is sharded
        return tensors[0].chunk(tp, dim=1)[rank]
    if slot.kind == "vocab":  # [V, h]
        missing = sizes.padded_vocab - tensors[0].shape[0]
        return torch.nn.functional.pad(tensors[0], (0, 0, 0, missing)).chunk(tp, dim=0)[rank]
    if slot.kind == "gate_up":
        return torch.cat([t.chunk(tp, dim=0)[rank] for t in tensors])
    assert slot.kind == "qkv", slot.kind
    by_group = [t.unflatten(0, (sizes.groups, -1)) for t in tensors]  # [groups, rows, h]
    return torch.cat(by_group, dim=1).chunk(tp, dim=0)[rank].flatten(0, 1)


def to_transformers(slot: Slot, shards: list[Tensor], sizes: Sizes) -> list[Tensor]:
    """The shards of all TP ranks -> whole transformers tensors: the inverse of `to_megatron`."""
    if slot.kind == "replicated":
        return [shards[0]]
    if slot.kind == "row":
        return [torch.cat(shards, dim=1)]
    if slot.kind == "vocab":
        return [torch.cat(shards)[: sizes.vocab]]
    if slot.kind == "gate_up":
        gates, ups = zip(*(s.chunk(2, dim=0) for s in shards), strict=True)
        return [torch.cat(gates), torch.cat(ups)]
    assert slot.kind == "qkv", slot.kind
    groups = torch.cat(shards).unflatten(0, (sizes.groups, -1))  # [groups, rows, h]
    head_dim = groups.shape[1] // (sizes.heads // sizes.groups + 2)
    queries = groups.shape[1] - 2 * head_dim
    return [t.flatten(0, 1) for t in groups.split([queries, head_dim, head_dim], dim=1)]
