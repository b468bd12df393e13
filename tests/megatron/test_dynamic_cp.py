"""Context-parallel groups that change from call to call, through the patched model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import (
    LogprobConfig,
    context_parallel_gather,
    context_parallel_shard,
    context_parallel_shift,
    patch_model,
)
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.groups import resolve_tp_group
from mcore_logprobs.ops.gather import vocab_parallel_gather
from tests.megatron.common import SEQ, VOCAB, megatron, relative, tiny_config, worst

BOUNDS = (0, 8, SEQ)
LAYERS, TOP = 2, 3


def packed_params(cu: Tensor, size: int, group: Any) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu,
        cu_seqlens_kv_padded=cu,
        max_seqlen_q=SEQ - 8,
        max_seqlen_kv=SEQ - 8,
        local_cp_size=size,
        cp_group=group,
    )


def in_turn(layout: dict[str, Any]) -> list[dict[str, float]]:
    """One model, calls over 1, 2, 1 and 2 ranks: each against the whole sequences in float64.

    Learned positions: Megatron's rotary ones take the group that the model was built with.
    """
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, VOCAB, (1, SEQ), generator=generator)
    weights = torch.rand(1, SEQ, generator=generator) + 0.5
    routes = torch.randint(0, VOCAB, (1, SEQ, LAYERS, TOP), generator=generator, dtype=torch.int32)
    mask = torch.rand(1, SEQ, generator=generator) < 0.7
    cu = torch.tensor(BOUNDS, dtype=torch.int32)
    position = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(BOUNDS)])
    labels = context_parallel_shift(ids, cp_group=_alone(), cu_seqlens=cu, fill=-100)
    errors = []
    with megatron(**layout) as state:
        model = mm.build_gpt_model(
            tiny_config(layout.get("tp", 1)),
            vocab_size=VOCAB,
            position_embedding_type="learned_absolute",
        )
        two = state.get_data_parallel_group(with_context_parallel=True)
        whole = {"input_ids": ids, "position_ids": position.unsqueeze(0), "attention_mask": None}
        whole["packed_seq_params"] = packed_params(cu, 1, None)
        z = model(**whole, runtime_gather_output=True)
        exact = _expected(z, labels, weights, routes, mask)
        model.zero_grad(set_to_none=True)
        exact["loss"].backward()
        exact_grads = {n: p.grad.clone() for n, p in model.named_parameters()}

        def chosen(z: Tensor, routes: Tensor, mask: Tensor) -> Tensor:
            found = vocab_parallel_gather(z, routes.flatten(1), tp_group=resolve_tp_group(None))
            return torch.where(mask.unsqueeze(-1), found, 0.0)

        config = LogprobConfig(entropy=True)
        with patch_model(model, config) as handle:
            for size in (1, 2, 1, 2):
                group = two if size == 2 else _alone()
                split = {"cp_group": group, "cu_seqlens": cu}
                tokens, at, own, kept, near = (
                    context_parallel_shard(x, **split)
                    for x in (ids, position.unsqueeze(0), weights, mask, routes)
                )
                assert near.shape == (1, SEQ // size, LAYERS, TOP)
                inputs = {"input_ids": tokens, "position_ids": at, "attention_mask": None}
                inputs["packed_seq_params"] = packed_params(cu, size, two if size == 2 else None)
                targets = context_parallel_shift(tokens, fill=-100, **split)
                model.zero_grad(set_to_none=True)
                with handle.policy_loss(_weighted, own, kept):
                    stats = model(**inputs, labels=targets)
                stats.policy_loss.backward()
                grads = {n: p.grad for n, p in model.named_parameters()}
                if size == 2:
                    for grad in grads.values():
                        dist.all_reduce(grad, group=two)
                with torch.no_grad(), handle.map(chosen, near, kept):
                    found = model(**inputs, labels=targets)
                gathered = stats.gather_cp(**split)
                errors.append(
                    {
                        "logprobs": relative(gathered.logprobs, exact["logprobs"]),
                        "entropy": relative(gathered.entropy, exact["entropy"]),
                        "routes": relative(context_parallel_gather(found, **split), exact["found"]),
                        "grad": worst(grads, exact_grads),
                    }
                )
    return errors


def _alone() -> Any:
    """A group of this rank alone: what a call over one rank passes."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _weighted(logprobs: Tensor, entropy: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    return -(logprobs + 0.1 * entropy) * weights * mask


def _expected(
    z: Tensor, labels: Tensor, weights: Tensor, routes: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    logp = z.double().log_softmax(-1)
    keep = labels != -100
    picked = logp.gather(-1, labels.clamp(min=0).unsqueeze(-1))[..., 0] * keep
    entropy = -(logp.exp() * logp).sum(-1) * keep
    found = z.gather(-1, routes.flatten(2).long()) * (mask & keep).unsqueeze(-1)
    loss = _weighted(picked, entropy, weights, mask).sum()
    return {"logprobs": picked, "entropy": entropy, "found": found, "loss": loss}


@pytest.mark.parametrize("layout", [{}, {"cp": 2}, {"tp": 2}], ids=str)
def test_groups_that_change_from_call_to_call(ranks, layout):
    for found in ranks(2 * layout.get("tp", 1)).run(in_turn, layout):
        for errors in found:
            assert max(errors.values()) < 2e-5, found
