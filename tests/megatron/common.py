"""What the rank functions of these tests share: tiny models, batches, one step's gradients."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.cpu_megatron.runtime import cpu_runtime
from mcore_logprobs.megatron import patch_gpt_model
from mcore_logprobs.ops.token_stats import TokenStats
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
VOCAB = 96
SEQ = 24
# Of a hybrid model's Mamba mixers: 8 heads in 4 groups, which TP 2 by CP 2 divides.
MAMBA = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "mamba_state_dim": 8,
    "mamba_num_groups": 4,
}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}


@contextlib.contextmanager
def megatron(**layout: Any) -> Iterator[Any]:
    """CPU runtime and parallel state of a layout; yields `megatron.core.parallel_state`."""
    warnings.filterwarnings("ignore")
    with cpu_runtime():
        mm.init_model_parallel(**layout)
        from megatron.core import parallel_state
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        MTPLossLoggingHelper.tracker.clear()  # it has as many losses as another test's model
        yield parallel_state


def tiny_config(tp: int = 1, **overrides: Any) -> Any:
    """A config that TP 1, 2 or 3 divides."""
    heads = 6 if tp == 3 else 4
    sizes = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_query_groups": heads // 2}
    if tp == 3:
        sizes["num_query_groups"] = 3
    return mm.transformer_config(**{**sizes, **overrides})


def zigzag(x: Tensor, rank: int, size: int, bounds: tuple[int, ...] | None = None) -> Tensor:
    """What CP rank `rank` holds of [b, s]: pieces rank and 2*size-1-rank of each sequence."""
    bounds = bounds or (0, x.shape[1])
    parts = []
    for start, end in itertools.pairwise(bounds):
        pieces = x[:, start:end].chunk(2 * size, dim=1)
        parts += [pieces[rank], pieces[2 * size - 1 - rank]]
    return torch.cat(parts, dim=1)


def make_batch(
    parallel_state: Any, *, batch: int = 2, packed: bool = False, seed: int = 7
) -> dict[str, Any]:
    """This rank's tokens, labels and token weights, and what else the model wants."""
    generator = torch.Generator().manual_seed(seed)
    batch = 1 if packed else batch
    ids = torch.randint(0, VOCAB, (batch, SEQ + 1), generator=generator)
    weights = torch.rand(batch, SEQ, generator=generator) + 0.5
    bounds = (0, 8, SEQ) if packed else (0, SEQ)
    rank = parallel_state.get_context_parallel_rank()
    size = parallel_state.get_context_parallel_world_size()
    position = torch.arange(SEQ).expand(batch, SEQ)
    tokens, labels, position, weights = (
        zigzag(x, rank, size, bounds).contiguous()
        for x in (ids[:, :-1], ids[:, 1:], position, weights)
    )
    inputs = {"input_ids": tokens, "position_ids": position, "attention_mask": None}
    if packed:
        from megatron.core.packed_seq_params import PackedSeqParams

        cu = torch.tensor(bounds, dtype=torch.int32)
        # Mamba mixers tell sequences apart by what this field makes (0.17 and later).
        total = {"total_tokens": SEQ} if hasattr(PackedSeqParams, "total_tokens") else {}
        inputs["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            cu_seqlens_q_padded=cu,
            cu_seqlens_kv_padded=cu,
            max_seqlen_q=SEQ - 8,
            max_seqlen_kv=SEQ - 8,
            **total,
        )
    return {"inputs": inputs, "labels": labels, "weights": weights}


def loss_of(output: Any) -> Tensor:
    return output.loss if isinstance(output, TokenStats) else output


def step(model: Any, batch: dict[str, Any], **call: Any) -> tuple[Any, dict[str, Tensor]]:
    """(what the model returned, gradients by parameter name), each token with its own weight."""
    model.zero_grad(set_to_none=True)
    output = model(**batch["inputs"], labels=batch["labels"], **call)
    (loss_of(output) * batch["weights"]).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output, grads


def relative(got: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value; inf where anything is not finite."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if not (torch.isfinite(got).all() and torch.isfinite(expected).all()):
        return float("inf")
    scale = expected.double().abs().max().clamp(min=1e-30)
    return ((got.double() - expected.double()).abs().max() / scale).item()


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest `relative` over parameters that both must have."""
    assert got.keys() == expected.keys(), sorted(got.keys() ^ expected.keys())
    assert expected
    return max(relative(got[n], expected[n]) for n in expected)


def worst_beyond_rounding(
    got: dict[str, Tensor], expected: dict[str, Tensor], exact: dict[str, Tensor]
) -> float:
    """The same, less what `expected` itself is off by.

    Some gradients are what is left of terms that cancel (a Mamba mixer's dt_bias, 3e-5 of the
    model's largest): a last bit of the logits' gradient shows in the fifth digit there.

    Args:
        exact: from the same float32 model with a float64 loss. What is off by 1e-4 there has
            another loss (multi-token prediction) and no allowance.
    """

    def error(name: str) -> float:
        apart = relative(got[name], expected[name])
        rounding = relative(expected[name], exact[name]) if name in exact else 1.0
        if rounding > 1e-4:
            return apart
        return min(apart, max(0.0, relative(got[name], exact[name]) - rounding))

    assert got.keys() == expected.keys()
    assert expected
    return max(error(name) for name in expected)


def float64_loss_gradients(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Those of `step` on the unpatched model, its loss formed in float64 from gathered logits."""
    model.zero_grad(set_to_none=True)
    logp = model(**batch["inputs"], runtime_gather_output=True).double().log_softmax(-1)
    loss = -logp.gather(-1, batch["labels"][..., None])[..., 0]
    (loss * batch["weights"]).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def patched_errors(
    model: Any, batch: dict[str, Any], settings: dict[str, Any] | None = None
) -> dict[str, float]:
    """Errors of a patched step against the unpatched one, and of its log-probabilities against
    float64 from the model's own gathered logits. The patch must leave no trace."""
    wanted = LogprobConfig(entropy=True, **(settings or {}))
    expected, expected_grads = step(model, batch)
    modules = [dict(vars(m)) for m in model.modules()]  # after a step, which adds what it caches
    with torch.no_grad():
        logits = model(**batch["inputs"], runtime_gather_output=True).double()  # [b, s, V]
    logp = logits.log_softmax(-1)
    exact_grads = float64_loss_gradients(model, batch)
    with patch_gpt_model(model, wanted):
        keys = list(model.state_dict())
        got, grads = step(model, batch)
    assert list(model.state_dict()) == keys
    for module, before in zip(model.modules(), modules, strict=True):
        assert vars(module).keys() == before.keys(), type(module)
    assert isinstance(got, TokenStats)
    return {
        "loss": relative(loss_of(got), expected),
        "grad": worst_beyond_rounding(grads, expected_grads, exact_grads),
        "float64": relative(got.logprobs, logp.gather(-1, batch["labels"][..., None])[..., 0]),
        "entropy": relative(got.entropy, -(logp.exp() * logp).sum(-1)),
    }


def reduced_norm(model: Any, attribute: str = "grad") -> float:
    """Global norm of the gradients, with CP, DP and sequence-parallel parts already summed."""
    from megatron.core import parallel_state

    total = torch.zeros((), dtype=torch.float64)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for param in model.parameters():
        if getattr(param, "tensor_model_parallel", False) or tp_rank == 0:
            total += getattr(param, attribute).double().pow(2).sum()
    dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    return total.sqrt().item()
