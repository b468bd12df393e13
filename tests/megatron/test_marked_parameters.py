"""Parameters that a layer's own call has marked `grad_added_to_main_grad`, beside a patched head.

With gradient_accumulation_fusion Megatron's layers add weight gradients to `main_grad` and mark the
parameter. DDP takes nothing more from autograd for it until the step is over, in whichever order
the calls of the step come.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs import LogprobConfig, patch_model, vocab_parallel_logprobs
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron.ddp import accumulated
from tests.megatron import test_lora, test_peft
from tests.megatron.common import VOCAB, loss_of, make_batch, megatron, relative, tiny_config

AUTOCAST = ("autocast", "tied and autocast")
ORDERS = [("labels", "labels"), ("labels", "logits"), ("logits", "labels")]


@contextlib.contextmanager
def apex() -> Iterator[None]:
    """The two functions of Apex's CUDA extension that Megatron's layers call, in torch."""
    from megatron.core.tensor_parallel import layers

    def accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        main_grad += (grad_output.t().to(main_grad.dtype)) @ total_input.to(main_grad.dtype)

    extension = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    layers.fused_weight_gradient_mlp_cuda = extension
    available, layers._grad_accum_fusion_available = layers._grad_accum_fusion_available, True
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = available
        del layers.fused_weight_gradient_mlp_cuda


def build(head: str, tp: int) -> Any:
    if head == "bridge":
        return test_lora.build(tp, gradient_accumulation_fusion=True)
    if head in AUTOCAST:
        config = tiny_config(tp, gradient_accumulation_fusion=True)
        return mm.build_gpt_model(config, vocab_size=VOCAB, tied=head == "tied and autocast")
    names = ("first", "second") if head == "two adapters" else ("first",)
    model = test_peft.build(tp, names=names, sequence_parallel="parallel" in head)
    for _, layer in model.output_layer.lora_B.items():
        layer.gradient_accumulation_fusion = True
    return model


def main_grads(
    head: str, how: tuple[str, ...], settings: dict[str, Any], overlap: bool = False
) -> dict[str, float]:
    """How far main_grad of the head's parameters is from the unpatched model's; with `overlap` the
    ranks are data-parallel ones.
    """
    tp = 1 if overlap else torch.distributed.get_world_size()
    with megatron(tp=tp) as parallel_state, apex():
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        model = build(head, tp)
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=overlap
        )
        ddp = DistributedDataParallel(model.config, config, model)
        of_head = "embedding.word" if head == "tied and autocast" else "output_layer."
        marked = [
            (name, p)
            for name, p in model.named_parameters()
            if p.requires_grad and name.startswith(of_head)
        ]

        def losses(kind: str, batch: dict[str, Any]) -> Tensor:
            if kind == "labels":
                output = loss_of(ddp(**batch["inputs"], labels=batch["labels"]))
                return (output * batch["weights"]).sum()
            logits = ddp(**batch["inputs"])
            loss = logits.float().log_softmax(-1).square().mean()
            if kind == "both":
                loss = loss - (vocab_parallel_logprobs(logits, batch["labels"])).sum()
            return loss

        def accumulate() -> dict[str, Tensor]:
            ddp.zero_grad_buffer()
            for seed, kind in enumerate(how):
                own_seeds = 100 * parallel_state.get_data_parallel_rank()
                batch = make_batch(parallel_state, seed=own_seeds + seed)
                not_last = overlap and seed + 1 < len(how)
                with (
                    torch.autocast("cpu", torch.bfloat16, enabled=head in AUTOCAST),
                    ddp.no_sync() if not_last else contextlib.nullcontext(),
                ):
                    losses(kind, batch).backward()
            finalize_model_grads([ddp])  # A under sequence parallelism is summed over TP
            return {name: p.main_grad.clone() for name, p in marked}

        expected = accumulate()
        with patch_model(ddp, LogprobConfig(**settings)):
            found = accumulate()
        assert len(marked) >= (1 if head in AUTOCAST else 2)
        assert all(grad.any() for grad in expected.values())
        return {name: relative(found[name], grad) for name, grad in expected.items()}


@pytest.mark.parametrize("flag", ["gradient_accumulation_fusion", "fuse_wgrad_accumulation"])
def test_the_flag_of_a_layer(flag: str) -> None:
    """Megatron's, and Transformer Engine's."""
    weight = torch.nn.Parameter(torch.ones(2, 3))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(2, 3), False
    accumulated(types.SimpleNamespace(**{flag: True}), weight).sum().backward()
    assert weight.grad_added_to_main_grad
    assert torch.equal(weight.main_grad, torch.ones(2, 3))
    assert accumulated(types.SimpleNamespace(**{flag: False}), weight) is weight


HEADS = ["bridge", "peft", "peft, sequence parallel", "two adapters", *AUTOCAST]


def check(head: str, ranks: Any, *how: Any, world: int = 0) -> None:
    world = world or (1 if head in AUTOCAST else 2)
    for errors in ranks(world).run(main_grads, head, *how):
        # Unpatched, autocast rounds the logits and their gradients to bfloat16.
        assert max(errors.values()) < (1e-2 if head in AUTOCAST else 1e-5), errors


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("order", ORDERS, ids=" then ".join)
def test_a_layer_s_own_call_in_the_same_step(ranks: Any, head: str, order: Any) -> None:
    check(head, ranks, order, {})


@pytest.mark.parametrize("head", HEADS)
def test_with_reductions_that_overlap(ranks: Any, head: str) -> None:
    """A gradient that comes after its bucket's reduction was started is another rank's no more."""
    check(head, ranks, ("labels", "logits", "labels"), {}, True, world=2)


@pytest.mark.parametrize("head", HEADS)
def test_two_consumers_of_lazy_logits(ranks: Any, head: str) -> None:
    """One has them from hidden states, the other from the layer's own call."""
    check(head, ranks, ("both",), {"logits": "lazy"})


def test_which_gradients_go_into_main_grad() -> None:
    """Not where there is no buffer yet, nor where FSDP makes it when the gradient arrives."""
    from mcore_logprobs.megatron.ddp import into_main_grad

    layer = types.SimpleNamespace(gradient_accumulation_fusion=True)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.main_grad = None
    assert not into_main_grad(layer, weight)
    weight.main_grad = torch.zeros(2)
    assert into_main_grad(layer, weight)
    weight.__fsdp_param__ = True
    assert not into_main_grad(layer, weight)


def test_a_cast_weight_s_gradient_goes_into_main_grad() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.main_grad = torch.zeros(2)
    layer: Any = types.SimpleNamespace(gradient_accumulation_fusion=True)
    cast = accumulated(layer, weight, torch.bfloat16)
    assert cast.dtype is torch.bfloat16
    cast.sum().backward()
    assert weight.main_grad.tolist() == [1.0, 1.0]
