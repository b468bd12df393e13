"""A patched float32 model under `torch.autocast`: the head multiplies what autocast would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs import LogprobConfig, patch_model
from mcore_logprobs.cpu_megatron import models as mm
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

LOW = torch.bfloat16
ROUNDING = 2.0**-8  # of a gradient, once


def head_in_float64(tp: int, bias: bool, inside: bool) -> dict[str, float]:
    """Values and the head's gradients from its own hidden states and weight, rounded to LOW."""
    with megatron(tp=tp) as parallel_state:
        config = tiny_config(tp, sequence_parallel=tp > 1)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=False)
        layer, batch = model.output_layer, make_batch(parallel_state)
        if bias:
            layer.bias = torch.nn.Parameter(torch.linspace(-2, 2, layer.weight.shape[0]).to(LOW))
            layer.bias.data = layer.bias.data.float()
        seen: list[Tensor] = []
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with patch_model(model, LogprobConfig(fused="require", entropy=True)):
            with torch.autocast("cpu", LOW):
                stats = model(**batch["inputs"], labels=batch["labels"])
                loss = ((stats.logprobs + 0.3 * stats.entropy) * batch["weights"]).sum()
            # The head's alone: Megatron's own backward works inside autocast only.
            with torch.autocast("cpu", LOW, enabled=inside):
                found = torch.autograd.grad(loss, [seen[0], layer.weight])

        def whole(x: Tensor) -> Tensor:
            return torch.cat(gathered(x.detach(), parallel_state)).double().requires_grad_()

        hidden = seen[0].detach().to(LOW).double()
        if tp > 1:
            hidden = torch.cat(gathered(hidden, parallel_state))
        hidden.requires_grad_()
        weight = whole(layer.weight.to(LOW))
        z = hidden @ weight.t() + (whole(layer.bias) if bias else 0.0)
        logp = z.log_softmax(-1).transpose(0, 1)
        picked = logp.gather(-1, batch["labels"][..., None])[..., 0]
        entropy = -(logp.exp() * logp).sum(-1)
        ((picked + 0.3 * entropy) * batch["weights"]).sum().backward()
        assert [g.dtype for g in found] == [seen[0].dtype, torch.float32]
        rank = parallel_state.get_tensor_model_parallel_rank()
        return {
            "logprobs": relative(stats.logprobs, picked),
            "entropy": relative(stats.entropy, entropy),
            "hidden": relative(found[0], hidden.grad.chunk(tp)[rank]) / ROUNDING,
            "weight": relative(found[1], weight.grad.chunk(tp)[rank]) / ROUNDING,
        }


def gathered(x: Tensor, parallel_state: Any) -> list[Tensor]:
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x.contiguous(), group=group)
    return parts


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize(("tp", "bias"), [(1, False), (1, True), (2, False)])
def test_against_float64_from_rounded_operands(ranks, tp, bias, inside):
    for errors in ranks(tp).run(head_in_float64, tp, bias, inside):
        assert max(errors.pop("weight"), errors.pop("hidden")) < 1.5
        assert max(errors.values()) < 1e-5, errors


def like_unpatched(mtp: bool, tied: bool) -> None:
    """As far from the float32 step as the unpatched model, and not further."""
    with megatron() as parallel_state:
        config = tiny_config(**({"mtp_num_layers": 1} if mtp else {}))
        model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=tied, mtp=mtp)
        batch = make_batch(parallel_state)
        exact, exact_grads = step(model, batch)

        def errors() -> tuple[float, float]:
            with torch.autocast("cpu", LOW):  # Megatron's own backward needs it too
                got, grads = step(model, batch)
            assert all(grad.dtype == torch.float32 for grad in grads.values())
            return relative(loss_of(got), exact), worst(grads, exact_grads)

        unpatched = errors()
        assert min(unpatched) > 1e-5
        for fused in ("require", True, False):
            with patch_model(model, LogprobConfig(fused=fused)):
                for got, expected in zip(errors(), unpatched, strict=True):
                    assert got < 1.5 * expected


@pytest.mark.parametrize(("mtp", "tied"), [(False, True), (True, False)])
def test_no_further_off_than_unpatched(ranks, mtp, tied):
    ranks(1).run(like_unpatched, mtp, tied)


def with_a_lora(way: str) -> None:
    """In a block of the handle, on a LoRA's head: as far from float32 as from whole logits."""
    with megatron() as parallel_state:
        model = test_lora.build(1)
        batch = make_batch(parallel_state)

        def ask(fused: Any) -> tuple[Tensor, dict[str, Tensor]]:
            model.zero_grad(set_to_none=True)
            with patch_model(model, LogprobConfig(fused=fused)) as handle:
                block = {
                    "policy": handle.policy_loss(lambda x, _, w: -x * w, batch["weights"]),
                    "map": handle.map(lambda z, w: z.logsumexp(-1) * w, batch["weights"]),
                }[way]
                with block:
                    found = model(**batch["inputs"], labels=batch["labels"])
            found = found.policy_loss if way == "policy" else found.sum()
            found.backward()
            return found.detach(), {
                n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
            }

        exact, exact_grads = ask("require")
        errors = []
        for fused in ("require", False):
            with torch.autocast("cpu", LOW):
                value, grads = ask(fused)
            errors.append((relative(value, exact), worst(grads, exact_grads)))
        for got, expected in zip(*errors, strict=True):
            assert 0.0 < got < 1.5 * max(expected, ROUNDING)


@pytest.mark.parametrize("way", ["policy", "map"])
def test_lora_and_blocks(ranks, way):
    ranks(1).run(with_a_lora, way)


def into_main_grad() -> float:
    """The gradient of a weight that was cast goes into its main_grad, and nothing is lost."""
    with megatron() as parallel_state:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )

        config = tiny_config()
        model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=False)
        ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
        )
        batches = [make_batch(parallel_state, seed=seed) for seed in range(2)]

        def accumulate() -> dict[str, Tensor]:
            ddp.zero_grad_buffer()
            for batch in batches:
                with torch.autocast("cpu", LOW):
                    loss_of(ddp(**batch["inputs"], labels=batch["labels"])).sum().backward()
            return {n: p.main_grad.clone() for n, p in model.named_parameters()}

        with patch_model(ddp, LogprobConfig(fused="require")):
            expected = accumulate()
            assert all(grad.any() for grad in expected.values())
            layer = model.output_layer
            layer.gradient_accumulation_fusion = True
            layer.weight.grad_added_to_main_grad = False
            error = worst(accumulate(), expected)
            assert layer.weight.grad_added_to_main_grad  # not by DDP
            return error


def test_into_main_grad(ranks):
    assert ranks(1).run(into_main_grad) == [0.0]
