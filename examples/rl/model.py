"""Megatron's GPTModel for a transformers Llama config, and its weights' way in and out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import RunConfig
from .convert import Sizes, Slot, slot_of, to_megatron, to_transformers
from .errors import SetupError
from .layout import Layout, on_main


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


class WeightBridge:
    """Moves weights between rank 0's rollout engine and the ranks' Megatron shards."""

    def __init__(self, llama: Any, layout: Layout) -> None:
        self.layout = layout
        self.sizes = Sizes.of(llama, layout.tp)
        self.layers = llama.num_hidden_layers
        self.tied = llama.tie_word_embeddings
        self.hidden = llama.hidden_size

    def load(self, model: Any, engine: Any | None) -> None:
        """Rank 0 broadcasts each whole tensor, every rank keeps its shard. `engine` on rank 0."""
        source = dict(engine.model.named_parameters()) if engine else {}
        shapes = on_main(lambda: {n: (tuple(p.shape), p.dtype) for n, p in source.items()})
        targets = self._targets(model)
        with torch.no_grad():
            for slot in self._slots(targets):
                whole = [self._broadcast(source.get(n), *shapes[n]) for n in slot.names]
                for param in targets.get(slot.names, []):
                    shard = to_megatron(
                        slot, whole, self.sizes, rank=self.layout.tp_rank, tp=self.layout.tp
                    )
                    if shard.shape != param.shape:
                        raise ValueError(f"{slot}: expected {param.shape}, got {shard.shape}")
                    param.copy_(shard)

    def store(self, model: Any, engine: Any | None) -> None:
        """The reverse: the trained weights, whole again, go into the rollout engine's tensors."""
        lay = self.layout
        wanted = dict(engine.model.named_parameters()) if engine else {}
        targets = self._targets(model)
        with torch.no_grad():
            for slot in self._slots(targets):
                stage = self._stage_of(slot)
                whole: list[Tensor] = []
                if lay.pp_rank == stage and lay.cp_rank == 0 and lay.dp_rank == 0:
                    shards = self._gather_tp(targets[slot.names][0])
                    whole = to_transformers(slot, shards, self.sizes) if shards else []
                if stage:  # another stage's: its first TP rank hands the tensors to rank 0
                    whole = self._send_to_main(whole, [wanted.get(n) for n in slot.names], stage)
                if lay.is_main:
                    for name, tensor in zip(slot.names, whole, strict=True):
                        wanted[name].copy_(tensor)

    def _targets(self, model: Any) -> dict[tuple[str, ...], list[Tensor]]:
        """This rank's parameters by the transformers names that they are made of."""
        offset = self.layout.pp_rank * (self.layers // self.layout.pp)
        found: dict[tuple[str, ...], list[Tensor]] = {}
        for name, param in model.named_parameters():
            slot = slot_of(name, layer_offset=offset)
            names = slot.names
            if self.tied and names == ("lm_head.weight",):
                names = ("model.embed_tokens.weight",)  # the last stage's copy of the embedding
            found.setdefault(names, []).append(param)
        return found

    def _slots(self, targets: dict[tuple[str, ...], list[Tensor]]) -> Iterator[Slot]:
        """All slots of the whole model, in one order on every rank."""
        inside = [
            "input_layernorm.weight",
            "self_attention.linear_qkv.weight",
            "self_attention.linear_proj.weight",
            "pre_mlp_layernorm.weight",
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2.weight",
        ]
        names = ["embedding.word_embeddings.weight"]
        names += [f"decoder.layers.{i}.{n}" for i in range(self.layers) for n in inside]
        names += ["decoder.final_layernorm.weight"]
        names += [] if self.tied else ["output_layer.weight"]
        slots = [slot_of(name, layer_offset=0) for name in names]
        missing = set(targets) - {slot.names for slot in slots}
        assert not missing, f"Megatron parameters without a slot: {missing}"
        yield from slots

    def _stage_of(self, slot: Slot) -> int:
        if slot.layer is not None:
            return slot.layer // (self.layers // self.layout.pp)
        return 0 if slot.names == ("model.embed_tokens.weight",) else self.layout.pp - 1

    def _broadcast(self, tensor: Tensor | None, shape: tuple, dtype: torch.dtype) -> Tensor:
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype, device=self.layout.device)
        tensor = tensor.detach().contiguous()
        dist.broadcast(tensor, src=0)
        return tensor

    def _gather_tp(self, shard: Tensor) -> list[Tensor]:
        """All shards on the group's first rank, nothing on the others."""
        from megatron.core import parallel_state as ps

        if self.layout.tp == 1:
            return [shard.detach()]
        first = self.layout.tp_rank == 0
        out = [torch.empty_like(shard) for _ in range(self.layout.tp)] if first else None
        dist.gather(
            shard.detach().contiguous(),
            out,
            dst=ps.get_tensor_model_parallel_src_rank(),
            group=ps.get_tensor_model_parallel_group(),
        )
        return out or []

    def _send_to_main(
        self, whole: list[Tensor], like: list[Tensor | None], stage: int
    ) -> list[Tensor]:
        lay = self.layout
        if whole:
            for tensor in whole:
                dist.send(tensor.contiguous(), dst=0)
            return []
        if lay.is_main:
            sender = stage * (lay.world // lay.pp)  # Megatron's order: the pipeline is outermost
            received = [torch.empty_like(t) for t in like if t is not None]
            for tensor in received:
                dist.recv(tensor, src=sender)
            return received
        return []
