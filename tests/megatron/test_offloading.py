"""A patched model under activation offloading and recompute, against the model without either.

Megatron's own offloading needs Transformer Engine and CUDA tensors, so `Offloaded` packs and
unpacks by its rules (fine_grained_activation_offload of 0.19): parameters stay where they are,
every other tensor is copied row by row into a buffer of its own and comes back as a new tensor,
without its strides, its version or its identity. Here it is open around the whole forward, the head
included, as `torch.autograd.graph.save_on_cpu` would be.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mcore_logprobs import LogprobConfig, patch_model
from mcore_logprobs.cpu_megatron import models as mm
from tests.helpers.covering import every_pair
from tests.megatron import test_lora
from tests.megatron.common import (
    VOCAB,
    loss_of,
    make_batch,
    megatron,
    relative,
    step,
    tiny_config,
    worst,
)

RECOMPUTE: dict[str, dict[str, Any]] = {
    "": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


class Offloaded(saved_tensors_hooks):
    """Attributes: `packed`, the shapes of what was packed."""

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)
        self.packed: list[torch.Size] = []

    def pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter):
            return tensor
        self.packed.append(tensor.shape)
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
        return (buffer.copy_(tensor),)

    def unpack(self, state: Any) -> Tensor:
        if isinstance(state, Tensor):
            return state
        return torch.empty(state[0].shape, dtype=state[0].dtype).copy_(state[0])


# By name: settings, the handle's block, and what is summed of what the model returns.
WAYS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "loss": ({"output": "loss"}, None, loss_of),
    "stats": (
        {"entropy": True, "sum_pi_squared": True, "temperature": 0.7},
        None,
        lambda out: out.logprobs - 0.3 * out.entropy + 0.2 * out.sum_pi_squared,
    ),
    "compact": ({"compact": True, "chunk_size": 7}, None, loss_of),
    "top_p": ({"top_p": 0.999}, None, loss_of),
    "invariant": ({"invariant_segments": 2, "backend": "torch"}, None, loss_of),
    "own temperature": (
        {},
        lambda handle, batch: handle.options(temperature=batch["weights"] + 0.2),
        loss_of,
    ),
    "policy": (
        {"entropy": True},
        lambda handle, batch: handle.policy_loss(
            lambda logp, entropy, w: -(logp + 0.1 * entropy) * w, batch["weights"]
        ),
        lambda out: out.policy_loss,
    ),
    "map": (
        {},
        lambda handle, batch: handle.map(lambda z, w: z.tanh().sum(-1) * w, batch["weights"]),
        lambda out: out,
    ),
}
# By night: each rank compiles its kernels.
COMPILED = {"invariant, compiled": ({"invariant_segments": 2}, None, loss_of)}


def ask(model: Any, batch: dict[str, Any], way: str, fused: Any, hooks: Any) -> Any:
    """(values, their gradients) with `hooks` open around the forward."""
    settings, block, values_of = (WAYS | COMPILED)[way]
    model.zero_grad(set_to_none=True)
    with patch_model(model, LogprobConfig(fused=fused, **settings)) as handle:
        opened = block(handle, batch) if block else contextlib.nullcontext()
        with hooks, opened:
            values = values_of(model(**batch["inputs"], labels=batch["labels"]))
    (values * (batch["weights"] if values.dim() else 1.0)).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return values.detach(), grads


def strided(module: Any, args: Any, out: Any) -> Any:
    """A forward hook: the logits as a view that is laid out batch first."""
    return out[0].transpose(0, 1).contiguous().transpose(0, 1), out[1]


def errors(tp: int, way: str, fused: Any, recompute: str = "", kind: str = "") -> dict[str, float]:
    with megatron(tp=tp) as parallel_state:
        config = RECOMPUTE[recompute] | ({"mtp_num_layers": 1} if kind == "mtp" else {})
        if kind == "lora":
            model = test_lora.build(tp, sequence_parallel=tp > 1, **config)
        else:
            made = tiny_config(tp, sequence_parallel=tp > 1, **config)
            tied = kind == "tied"
            model = mm.build_gpt_model(made, vocab_size=VOCAB, tied=tied, mtp=kind == "mtp")
        batch = make_batch(parallel_state)
        hooks = Offloaded()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            plain, plain_grads = step(model, batch)
            expected, expected_grads = ask(model, batch, way, fused, contextlib.nullcontext())
            if kind == "strided":
                model.output_layer.register_forward_hook(strided)
            got, grads = ask(model, batch, way, fused, hooks)
        assert hooks.packed
        found = {"values": relative(got, expected), "grad": worst(grads, expected_grads)}
        if way == "loss" and kind != "autocast":
            found |= {
                "unpatched": relative(got, plain),
                "unpatched grad": worst(grads, plain_grads),
            }
        return found


@every_pair(tp=(1, 2), way=tuple(WAYS), fused=("require", False))
def test_offloading(ranks, tp, way, fused):
    for found in ranks(tp).run(errors, tp, way, fused):
        assert max(found.values()) < 1e-6, found


@every_pair(
    kind=("", "tied", "mtp", "lora", "autocast"),
    recompute=("full", "selective"),
    fused=("require", False),
    way=("loss", "policy"),
)
def test_offloading_and_recompute(ranks, kind, recompute, fused, way):
    tp = 1 if kind == "autocast" else 2  # Megatron's sequence parallelism gathers one dtype
    for found in ranks(tp).run(errors, tp, way, fused, recompute, kind):
        assert max(found.values()) < 1e-6, found


@pytest.mark.night
@pytest.mark.parametrize("kind", ["", "strided"])
def test_offloading_of_compiled_kernels(ranks, kind):
    for found in ranks(2).run(errors, 2, "invariant, compiled", False, "", kind):
        assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize("way", WAYS)
def test_offloading_of_strided_logits(ranks, way):
    for found in ranks(2).run(errors, 2, way, True, "", "strided"):
        assert max(found.values()) < 1e-6, found
