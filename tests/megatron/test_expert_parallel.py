"""Patched models with experts: EP 2, its token dispatchers over gloo, multi-latent attention."""

from __future__ import annotations

import re
import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_logprobs.cpu_megatron import models as mm
from tests.megatron.common import (
    MOE,
    VOCAB,
    make_batch,
    megatron,
    patched_errors,
    relative,
    tiny_config,
)

MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}


def build(layout: dict[str, Any], tied: bool = True, **config: Any) -> Any:
    made = tiny_config(sequence_parallel=layout.get("tp", 1) > 1, **config)
    return mm.build_gpt_model(made, vocab_size=VOCAB, tied=tied)


def compare(
    layout: dict[str, Any],
    config: dict[str, Any],
    *,
    settings: dict[str, Any] | None = None,
    packed: bool = False,
    tied: bool = True,
) -> dict[str, float]:
    with megatron(**layout) as parallel_state:
        model = build(layout, tied, **config)
        # Expert-parallel ranks have tokens of their own.
        seed = 7 + parallel_state.get_data_parallel_rank()
        return patched_errors(model, make_batch(parallel_state, seed=seed, packed=packed), settings)


@pytest.mark.parametrize("fused", ["require", False], ids=["fused", "logits"])
@pytest.mark.parametrize(
    "layout",
    [{"ep": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"cp": 2, "ep": 2}],
    ids=["ep2", "tp2-ep2", "cp2-ep2"],
)
def test_same_loss_and_gradients(ranks, layout, fused):
    for errors in ranks(2).run(compare, layout, MOE, settings={"fused": fused}):
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_untied_with_each_dispatcher(ranks, dispatcher):
    config = {**MOE, "moe_token_dispatcher_type": dispatcher}
    for errors in ranks(2).run(compare, {"ep": 2}, config, tied=False):
        assert max(errors.values()) < 1e-5


def test_multi_latent_attention(ranks):
    for errors in ranks(2).run(compare, {"cp": 2}, MLA):
        assert max(errors.values()) < 1e-5


def over_tensor_parallel_ranks() -> None:
    """Plain Megatron's gradients are wrong there."""
    with megatron(tp=2), pytest.raises(ValueError, match="expected tensor-parallel size 1, got 2"):
        tiny_config(2, **MLA)


def test_multi_latent_attention_over_tensor_parallel_ranks(ranks):
    ranks(2).run(over_tensor_parallel_ranks)


def losses_of_experts(layout: dict[str, Any]) -> torch.Tensor:
    """The losses of both batches, whichever data-parallel rank has them."""
    with megatron(**layout) as parallel_state:
        model = build({}, **MOE)
        _weights_by_name(model, 2 * parallel_state.get_expert_model_parallel_rank())
        losses = []
        for seed in (7, 8):
            batch = make_batch(parallel_state, seed=seed)
            losses.append(model(**batch["inputs"], labels=batch["labels"]).detach())
        return torch.stack(losses)


def _weights_by_name(model: Any, first_expert: int) -> None:
    """Weights that depend on a parameter's name alone, an expert's with its global number."""
    for name, param in model.named_parameters():
        match = re.search(r"(?<=local_experts\.)\d+", name)
        if match:
            name = f"{name[: match.start()]}{int(match[0]) + first_expert}{name[match.end() :]}"
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        with torch.no_grad():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)


def test_expert_parallel_runtime_agrees_with_one_process(ranks):
    """The dispatcher over gloo moves tokens to the right experts and back."""
    one = ranks(1).run(losses_of_experts, {})[0]
    for two in ranks(2).run(losses_of_experts, {"ep": 2}):
        assert relative(two, one) < 1e-6


def sizes_as_tensors() -> torch.Tensor:
    with megatron(ep=2):
        rank = dist.get_rank()
        sent = torch.arange(6.0) + 10 * rank
        out = torch.empty(6)
        splits = torch.tensor([2, 4] if rank == 0 else [4, 2])
        dist.all_to_all_single(out, sent, splits, splits)
        return out


def test_all_to_all_takes_sizes_as_tensors(ranks):
    first, second = ranks(2).run(sizes_as_tensors)
    assert first.tolist() == [0, 1, 10, 11, 12, 13]
    assert second.tolist() == [2, 3, 4, 5, 14, 15]
