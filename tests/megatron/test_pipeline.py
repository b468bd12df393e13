"""Through Megatron's own schedules: pipelines, DDP, Float16Module, microbatches, loss scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.context_parallel import context_parallel_gather
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron import patch_gpt_model
from tests.megatron.common import (
    SEQ,
    VOCAB,
    loss_of,
    make_batch,
    megatron,
    reduced_norm,
    relative,
    tiny_config,
    worst,
)


def wrapped_chunks(config: Any, *, ddp: dict[str, Any] | None = None, **build: Any) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    chunks = mm.build_gpt_chunks(config, vocab_size=VOCAB, **build)
    if config.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **(ddp or {}))
    return [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]


def train_step(
    config: Any,
    chunks: list[Any],
    batches: list[Any],
    loss_func: Any,
    *,
    forward_only: bool = False,
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """One step by Megatron's schedule: (what loss_func reported, main_grad by parameter name)."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config.finalize_model_grads_func = finalize_model_grads
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    for chunk in chunks:
        chunk.zero_grad_buffer()

    def forward_step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        output = model(**batch["inputs"], labels=batch["labels"])
        return output, lambda out: loss_func(out, batch)

    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=SEQ,
        micro_batch_size=2,
        forward_only=forward_only,
    )
    grads = {
        f"{i}.{name}".replace("module.", ""): param.main_grad.clone()
        for i, chunk in enumerate(chunks)
        for name, param in chunk.named_parameters()
    }
    return reports, grads


def furthest(
    steps: list[tuple[list[Any], dict[str, torch.Tensor]]],
    wanted: tuple[list[Any], dict[str, torch.Tensor]],
) -> float:
    """How far results of `train_step` are from those of another; a stage may report no losses."""
    losses, grads = wanted
    apart = [worst(found, grads) for _, found in steps]
    for reports, _ in steps:
        apart += [relative(x, y) for x, y in zip(reports, losses, strict=True)]
    return max(apart)


def weighted(output: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    loss = (loss_of(output).float() * batch["weights"]).mean()
    return loss, loss_of(output).detach().clone()


def compare(
    layout: dict[str, Any],
    *,
    tied: bool = True,
    mtp: bool = False,
    settings: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    **config: Any,
) -> dict[str, float]:
    """`against_unpatched` of a GPT model."""
    with megatron(**layout) as parallel_state:
        extra = {"mtp_num_layers": 1} if mtp else {}
        pp = layout.get("pp", 1)
        made = tiny_config(
            num_layers=4,
            sequence_parallel=layout.get("tp", 1) > 1,
            microbatch_group_size_per_vp_stage=pp,
            **extra,
            **config,
        )
        chunks = wrapped_chunks(made, tied=tied, mtp=mtp, ddp=ddp)
        batches = [make_batch(parallel_state, seed=i) for i in range(4)]
        return against_unpatched(parallel_state, made, chunks, batches, settings or {})


def against_unpatched(
    parallel_state: Any,
    config: Any,
    chunks: list[Any],
    batches: list[Any],
    settings: dict[str, Any],
) -> dict[str, float]:
    """Errors of a patched step against the unpatched one of the same wrapped model, and of that
    one's losses against a forward's alone, in which stages exchange less.
    """
    alone, _ = train_step(config, chunks, batches, weighted, forward_only=True)
    expected, expected_grads = train_step(config, chunks, batches, weighted)
    with patch_gpt_model(chunks, LogprobConfig(**settings)) as handle:
        got, grads = train_step(config, chunks, batches, weighted)
    last = parallel_state.is_pipeline_last_stage()
    assert len(handle.reports) == (1 if last else 0)
    assert len(got) == (len(batches) if last else 0)
    losses = [relative(g, e) for g, e in zip(got, expected, strict=True)]
    plain = [relative(e, a) for e, a in zip(expected, alone, strict=True)]
    return {
        "loss": max(losses, default=0.0),
        "plain": max(plain, default=0.0),
        "grad": worst(grads, expected_grads),
    }


@pytest.mark.parametrize("output", ["stats", "loss"])
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ({"tp": 2}, {}),
        ({"tp": 2}, {"ddp": {"overlap_grad_reduce": True}}),
        ({"pp": 2}, {}),
        ({"pp": 2}, {"tied": False}),
        ({"pp": 2}, {"mtp": True}),
        ({"pp": 2, "vp": 2}, {}),
        ({"tp": 2, "pp": 2}, {}),
        ({"cp": 2, "pp": 2}, {}),
    ],
    ids=["tp2", "overlap", "pp2-tied", "pp2-untied", "pp2-mtp", "vp2", "tp2-pp2", "cp2-pp2"],
)
def test_schedules(ranks, layout, options, output):
    world = layout.get("tp", 1) * layout.get("cp", 1) * layout.get("pp", 1)
    for errors in ranks(world).run(compare, layout, settings={"output": output}, **options):
        assert max(errors.values()) < 1e-5


def bf16_errors(tp: int) -> dict[str, float]:
    """How far bf16 patched and unpatched are from float32 with the same weights."""
    with megatron(tp=tp) as parallel_state:
        batches = [make_batch(parallel_state, seed=i) for i in range(2)]
        results = {}
        for name, dtype in {"exact": torch.float32, "plain": torch.bfloat16}.items():
            config = tiny_config(dtype=dtype, sequence_parallel=True, params_dtype=torch.float32)
            chunks = wrapped_chunks(config)
            with torch.no_grad():  # float32 gets the rounded weights
                for param in chunks[0].parameters():
                    param.copy_(param.bfloat16())
            results[name] = train_step(config, chunks, batches, weighted)
        for output in ("stats", "loss"):
            with patch_gpt_model(chunks, LogprobConfig(output=output)):
                results[output] = train_step(config, chunks, batches, weighted)
        exact = results.pop("exact")
        errors = {}
        for name, (losses, grads) in results.items():
            off = [(g - e).double().pow(2).sum() for g, e in zip(losses, exact[0], strict=True)]
            errors[f"{name} loss"] = sum(off).sqrt().item()
            off = [(grads[n] - exact[1][n]).double().pow(2).sum() for n in grads]
            errors[f"{name} grad"] = sum(off).sqrt().item()
        return errors


def test_bf16_is_no_worse_than_unpatched(ranks):
    for errors in ranks(2).run(bf16_errors, 2):
        assert errors["plain loss"] > 0
        for output in ("stats", "loss"):
            # The head no longer rounds its logits: losses are nearer to float32, gradients too.
            assert errors[f"{output} loss"] < errors["plain loss"]
            assert errors[f"{output} grad"] < 1.02 * errors["plain grad"]


def gathered_loss_norm(cp: int, outputs: int, grad: str, per_token: bool) -> float:
    """Gradient norm of a loss that each CP rank computes whole; the rest of the world is DP."""
    with megatron(cp=cp) as parallel_state:
        config = tiny_config(calculate_per_token_loss=per_token)
        chunks = wrapped_chunks(config)
        # The whole sequence's weights, on every rank.
        whole = [torch.rand(2, SEQ, generator=torch.Generator().manual_seed(i)) for i in range(2)]
        batches = [{**make_batch(parallel_state, seed=i), "whole": w} for i, w in enumerate(whole)]

        def loss_func(stats: Any, batch: dict[str, Any]) -> tuple[Any, ...]:
            logprobs = context_parallel_gather(
                stats.logprobs,
                cp_group=parallel_state.get_context_parallel_group(),
                grad=grad,
            )
            loss = -(logprobs * batch["whole"]).sum()
            tokens = torch.tensor(logprobs.numel(), dtype=torch.int)
            report = {"loss": loss.detach().clone()}
            return (loss / tokens, report) if outputs == 2 else (loss, tokens, report)

        with patch_gpt_model(chunks):
            train_step(config, chunks, batches, loss_func)
        return reduced_norm(chunks[0], "main_grad")


def test_two_outputs_with_calculate_per_token_loss(ranks):
    """Megatron does not average these over ranks, as the pages say."""
    run = ranks(2).run
    for cp in (1, 2):
        averaged = run(gathered_loss_norm, cp, 2, "slice", False)
        added = run(gathered_loss_norm, cp, 2, "slice", True)
        assert added == pytest.approx([2 * norm for norm in averaged], rel=1e-5)


@pytest.mark.parametrize(
    ("outputs", "per_token", "right", "wrong"),
    [(2, False, "slice", "sum"), (3, False, "sum", "slice"), (3, True, "sum", "slice")],
    ids=["two", "three", "three-per-token"],
)
def test_context_parallel_loss_scale(ranks, outputs, per_token, right, wrong):
    """DESIGN section 4: with the right `grad` CP 1 and CP 2 agree, with the other they do not."""
    run = ranks(2).run
    one = run(gathered_loss_norm, 1, outputs, right, per_token)
    for grad, factor in {right: 1.0, wrong: 2.0 if outputs == 2 else 0.5}.items():
        two = run(gathered_loss_norm, 2, outputs, grad, per_token)
        assert two == pytest.approx([factor * norm for norm in one], rel=1e-5)
