"""Megatron's DDP and distributed optimizer, with both of their overlaps, over several steps.

The parameters are gathered while the next forward runs, by hooks on the modules that need them; a
rank's copy of what other ranks own is spoilt after each step, so that a call which goes around a
hook reads NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mcore_logprobs import LogprobConfig, patch_model, vocab_parallel_logprobs
from mcore_logprobs.cpu_megatron import models as mm
from tests.megatron.common import SEQ, VOCAB, loss_of, make_batch, megatron, tiny_config
from tests.megatron.test_lora import LoRALinear, ParallelLinearAdapter

STEPS, MICROBATCHES = 3, 2
MODES = {
    "stats": LogprobConfig(fused="require"),
    "loss": LogprobConfig(fused="require", output="loss"),
    "policy loss": LogprobConfig(fused="require"),
    "mtp off": LogprobConfig(fused="require", mtp="off"),
    "lazy": LogprobConfig(fused="require", logits="lazy"),
}


def _named_as_cuda(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type`, of which Megatron's optimizer knows CUDA's names alone."""
    kind = _TYPE(tensor, *args, **kwargs)
    return kind.replace("torch.", "torch.cuda.") if isinstance(kind, str) else kind


_TYPE = torch.Tensor.type


def spoil(wrapped: Any, rank: int, ranks: int) -> None:
    """NaN in every parameter that another rank's optimizer owns."""
    for group in wrapped.bucket_groups:
        for bucket in group.buckets:
            parts = bucket.param_data.chunk(ranks)
            for owner, part in enumerate(parts):
                if owner != rank:
                    part.fill_(float("nan"))


def weighted(values: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    loss = (values * batch["weights"]).mean()
    return loss, loss.detach().clone()


def train(
    mode: str | None,
    tied: bool,
    mtp: bool,
    fusion: bool,
    *,
    factor: float = 0.1,
    lora: bool = False,
) -> list[list[float]]:
    """Of each step the losses and the gradient norm; mode None: without a patch.

    Args:
        factor: of multi-token prediction's loss.
        lora: whether the head is frozen, with a LoRA around it, which has a bucket of its own.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    overlaps = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    with megatron() as parallel_state, mock.patch.object(torch.Tensor, "type", _named_as_cuda):
        extra = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": factor}
        config = tiny_config(**(extra if mtp else {}))
        model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=tied, mtp=mtp)
        if lora:
            head = model.output_layer
            head.weight.requires_grad_(False)
            model.output_layer = LoRALinear(head, ParallelLinearAdapter(head))
        wrapped = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=True,
                bucket_size=700 if lora else 3000,
                **overlaps,
            ),
            model,
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, **overlaps),
            [wrapped],
            use_gloo_process_groups=False,
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        config.no_sync_func = wrapped.no_sync
        handle = None if mode is None else patch_model(wrapped, MODES[mode])
        if handle is not None and not lora:
            model.output_layer.gradient_accumulation_fusion = fusion
        rank = parallel_state.get_data_parallel_rank()

        def forward_step(batches: Iterator[dict[str, Any]], model: Any) -> Any:
            batch = next(batches)
            if mode == "lazy":
                logits = model(**batch["inputs"])
                target = batch["labels"]
                return logits, lambda x: weighted(-vocab_parallel_logprobs(x, target), batch)
            if mode == "policy loss":
                assert handle is not None
                weights = batch["weights"]
                with handle.policy_loss(
                    lambda lp, entropy, w: -lp * w, weights, denominator=weights.numel()
                ):
                    output = model(**batch["inputs"], labels=batch["labels"])
                return output, lambda x: (x.policy_loss, x.policy_loss.detach().clone())
            output = model(**batch["inputs"], labels=batch["labels"])
            return output, lambda x: weighted(loss_of(x), batch)

        found = []
        for number in range(STEPS):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            seeds = (100 * number + 10 * rank + i for i in range(MICROBATCHES))
            batches = [make_batch(parallel_state, seed=seed) for seed in seeds]
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=wrapped,
                num_microbatches=MICROBATCHES,
                seq_length=SEQ,
                micro_batch_size=2,
                forward_only=False,
            )
            _, norm, _ = optimizer.step()
            found.append([*map(float, losses), float(norm)])
            spoil(wrapped, rank, parallel_state.get_data_parallel_world_size())
        if handle is not None:
            handle.remove()
        return found


@pytest.mark.parametrize(
    ("mode", "tied", "mtp", "fusion"),
    [
        ("stats", True, False, True),
        ("policy loss", False, False, True),
        ("lazy", True, False, False),
        pytest.param("loss", True, True, True, marks=pytest.mark.night),
        pytest.param("stats", False, True, False, marks=pytest.mark.night),
        pytest.param("policy loss", True, True, False, marks=pytest.mark.night),
        pytest.param("lazy", False, False, True, marks=pytest.mark.night),
    ],
)
def test_steps_are_those_of_an_unpatched_model(ranks, mode, tied, mtp, fusion):
    expected = torch.tensor(ranks(2).run(train, None, tied, mtp, False))
    got = torch.tensor(ranks(2).run(train, mode, tied, mtp, fusion))
    assert expected.isfinite().all()
    assert not torch.equal(expected[0], expected[1])  # each rank has tokens of its own
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def test_steps_without_multi_token_prediction(ranks):
    """Nobody calls its layers, whose hooks wait for their parameters' gather."""
    expected = torch.tensor(ranks(2).run(train, None, True, True, False, factor=0.0))
    got = torch.tensor(ranks(2).run(train, "mtp off", True, True, False))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("mode", ["stats", "policy loss", "lazy"])
def test_steps_of_a_lora(ranks, mode):
    """Nobody calls the modules inside it, whose hooks wait for their parameters' gather."""
    expected = torch.tensor(ranks(2).run(train, None, False, False, False, lora=True))
    got = torch.tensor(ranks(2).run(train, mode, False, False, False, lora=True))
    assert expected.isfinite().all()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)
