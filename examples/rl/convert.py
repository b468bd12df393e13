"""Weights between transformers' Llama layout and Megatron's, sharded over tensor parallelism.

Three things differ:
- Megatron fuses query, key and value into one matrix whose rows go group by group (the queries of
  a key-value head, its key, its value), so that a TP shard holds whole groups;
- it fuses gate and up, and each TP shard holds its part of the gate and then its part of the up;
- its vocabulary is padded to a multiple of TP.
Rotary positions are alike: both rotate halves (`rotary_interleaved=False`). The GGUF file itself
interleaves them, which transformers undoes on loading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


def slot_of(megatron_name: str, *, layer_offset: int) -> Slot:
    """Maps a GPTModel parameter name, of the local or the Transformer Engine layer spec."""
    outside = {
        "embedding.word_embeddings.weight": ("model.embed_tokens.weight", "vocab"),
        "output_layer.weight": ("lm_head.weight", "vocab"),
        "decoder.final_layernorm.weight": ("model.norm.weight", "replicated"),
    }
    if megatron_name in outside:
        name, kind = outside[megatron_name]
        return Slot((name,), kind)
    inside = {
        "input_layernorm.weight": (("input_layernorm",), "replicated"),
        "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm",), "replicated"),
        "self_attention.linear_qkv.weight": (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "qkv",
        ),
        "self_attention.linear_proj.weight": (("self_attn.o_proj",), "row"),
        "pre_mlp_layernorm.weight": (("post_attention_layernorm",), "replicated"),
        "mlp.linear_fc1.layer_norm_weight": (("post_attention_layernorm",), "replicated"),
        "mlp.linear_fc1.weight": (("mlp.gate_proj", "mlp.up_proj"), "gate_up"),
        "mlp.linear_fc2.weight": (("mlp.down_proj",), "row"),
    }
    prefix, _, rest = megatron_name.removeprefix("decoder.layers.").partition(".")
    if not megatron_name.startswith("decoder.layers.") or rest not in inside:
        raise KeyError(f"no transformers counterpart of Megatron parameter {megatron_name}")
    layer = int(prefix) + layer_offset
    names, kind = inside[rest]
    return Slot(tuple(f"model.layers.{layer}.{n}.weight" for n in names), kind, layer)


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
