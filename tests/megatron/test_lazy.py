"""Lazy logits of real Megatron models: a plain RL step on them equals one on real logits."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_logprobs as ours
from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.kernels import budgets
from mcore_logprobs.megatron import patch_gpt_model
from mcore_logprobs.megatron.head_loss import lazy_mtp_loss
from mcore_logprobs.sources.lazy import LazyLogits
from tests.helpers.lazy import Seen
from tests.megatron import test_fsdp, test_lora
from tests.megatron.common import (
    SEQ,
    VOCAB,
    make_batch,
    megatron,
    relative,
    tiny_config,
    worst,
)
from tests.megatron.test_pipeline import train_step, wrapped_chunks

LARGE = 1 << 14
LAZY = LogprobConfig(logits="lazy", fused="require")


def objective(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the last two thirds of each sequence, as RL code has them:
    sequence by sequence, over a temperature, with another one for a second consumer.
    """
    logits = logits.float() if logits.dtype != torch.float64 else logits
    total, found = logits.new_zeros(()), []
    start = labels.shape[1] // 3
    for one, target, weight in zip(logits, labels, weights, strict=True):
        one, target, weight = one[start:] / 0.8, target[start:], weight[start:]
        stats = ours.vocab_parallel_token_stats(one, target, entropy=True)
        assert stats.entropy is not None
        total = total + ((stats.entropy * 0.1 - stats.logprobs) * weight).sum()
        found.append(stats.logprobs.detach())
    scores = ours.vocab_parallel_gather(logits[:, ::5] * 0.5, labels[:, ::5, None])
    return total + scores.square().mean(), torch.stack(found)


def step(model: Any, batch: dict[str, Any], **call: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    """(log-probabilities, gradients by name, what the model returned)."""
    model.zero_grad(set_to_none=True)
    logits = model(**batch["inputs"], **call)
    loss, logprobs = objective(logits, batch["labels"], batch["weights"])
    loss.backward()
    grads = {
        n: test_fsdp.whole(p.grad).clone()
        for n, p in model.named_parameters()
        if p.grad is not None
    }
    return logprobs, grads, logits


def compare(layout: dict[str, Any], overrides: dict[str, Any], build: dict[str, Any]) -> Any:
    packed = build.pop("packed", False)
    with megatron(**layout) as parallel_state:
        config = tiny_config(layout.get("tp", 1), **overrides)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, **build)
        batch = make_batch(parallel_state, packed=packed)
        expected, expected_grads, real = step(model, batch)
        keys = [vars(m).keys() for m in model.modules()]
        with patch_gpt_model(model, LAZY):
            got, grads, logits = step(model, batch)
            assert isinstance(logits, LazyLogits)
            assert (logits.shape, logits.dtype) == (real.shape, real.dtype)
            assert logits.requires_grad
            with torch.no_grad():
                inference = model(**batch["inputs"])
                _, scores = objective(inference, batch["labels"], batch["weights"])
            assert not inference.requires_grad
        with patch_gpt_model(model, LogprobConfig(logits="lazy")):
            whole = model(**batch["inputs"]).detach() + 0.0
        assert [vars(m).keys() for m in model.modules()] == keys
        return {
            "logprobs": relative(got, expected),
            "without gradients": relative(scores, expected),
            "grad": worst(grads, expected_grads),
            "materialized": relative(whole, real.detach()),
        }


LAYOUTS: dict[str, Any] = {
    "tied": (1, {}, {}, {"tied": True}),
    "TP 2": (2, {"tp": 2}, {}, {"tied": False}),
    "TP 3, SP": (3, {"tp": 3}, {"sequence_parallel": True}, {"tied": True}),
    "CP 2": (2, {"cp": 2}, {}, {}),
    "CP 2, packed": (2, {"cp": 2}, {}, {"packed": True}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_equals_one_on_real_logits(ranks: Any, name: str) -> None:
    size, *case = LAYOUTS[name]
    for errors in ranks(size).run(compare, *case):
        assert errors["logprobs"] < 2e-6, errors
        assert errors["without gradients"] < 2e-6, errors
        assert errors["grad"] < 1e-4, errors
        assert errors["materialized"] < 1e-6, errors


def adapter_hook(factor: float) -> Any:
    """mcore_adapter's hook by its name: an autograd function that gives the logits on."""

    class Contiguous(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            return logits

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0].contiguous() * factor

    def mca_lora_logits_postprocess_hook(module: Any, given: Any, output: Any) -> Any:
        logits, bias = output
        return Contiguous.apply(logits), bias

    mca_lora_logits_postprocess_hook.__module__ = "mcore_adapter.models.model_utils"
    return mca_lora_logits_postprocess_hook


def with_hook(factor: float) -> dict[str, Any]:
    """A step with the hook: plain, and with lazy logits."""
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        model.output_layer.register_forward_hook(adapter_hook(factor))
        state = torch.get_rng_state()
        expected, expected_grads, _ = step(model, batch)
        with patch_gpt_model(model, LAZY if factor == 1.0 else LogprobConfig(logits="lazy")):
            got, grads, logits = step(model, batch)
            labels = {"labels": batch["labels"]}
            loss = model(**batch["inputs"], **labels).logprobs
        with patch_gpt_model(model, LogprobConfig(fused=False)):
            same = model(**batch["inputs"], **labels).logprobs
        assert torch.equal(state, torch.get_rng_state()), "the caller's random numbers"
        return {
            "lazy": isinstance(logits, LazyLogits),
            "logprobs": relative(got, expected),
            "grad": worst(grads, expected_grads),
            "with labels": relative(loss, same),
        }


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_hook_that_gives_the_logits_on(ranks: Any, factor: float) -> None:
    """ROLL's hook changes nothing: logits stay lazy; one that does anything else gets real ones."""
    (found,) = ranks(1).run(with_hook, factor)
    assert found["lazy"] == (factor == 1.0)
    assert found["logprobs"] < 2e-6, found
    assert found["grad"] < 1e-4, found
    assert found["with labels"] < 2e-6, found


def with_lora(tp: int, sequence_parallel: bool) -> dict[str, float]:
    with megatron(tp=tp) as parallel_state:
        model = test_lora.build(tp, sequence_parallel=sequence_parallel)
        batch = make_batch(parallel_state)
        expected, expected_grads, _ = step(model, batch)
        with patch_gpt_model(model, LAZY):
            got, grads, _ = step(model, batch)
        assert sum("adapter" in name for name in grads) == 2
        return {"logprobs": relative(got, expected), "grad": worst(grads, expected_grads)}


def under_fsdp(tp: int, wrapping: dict[str, Any]) -> dict[str, float]:
    """Real logits: two calls and then two backwards, of which the first frees the whole weight."""
    with megatron(tp=tp) as parallel_state:
        model = mm.build_gpt_model(tiny_config(tp), vocab_size=VOCAB, tied=False)
        batches = [make_batch(parallel_state, seed=seed) for seed in range(2)]

        def train() -> tuple[list[Tensor], dict[str, Tensor]]:
            model.zero_grad(set_to_none=True)
            losses = [objective(model(**b["inputs"]), b["labels"], b["weights"]) for b in batches]
            for loss, _ in losses:
                loss.backward()
            named = model.named_parameters()
            grads = {n: test_fsdp.whole(p.grad).clone() for n, p in named if p.grad is not None}
            return [values for _, values in losses], grads

        expected, expected_grads = train()
        test_fsdp.wrap(model, parallel_state.get_data_parallel_group(), **wrapping)
        with patch_gpt_model(model, LogprobConfig(logits="lazy")):
            got, grads = train()
        with (
            patch_gpt_model(model, LAZY),
            pytest.raises(ValueError, match="FSDP shards its weight"),
        ):
            model(**batches[0]["inputs"])
        return {
            "logprobs": max(relative(g, e) for g, e in zip(got, expected, strict=True)),
            "grad": worst(grads, expected_grads),
        }


@pytest.mark.parametrize(
    ("size", "check", "case"),
    [
        (2, with_lora, (2, True)),
        *((2, under_fsdp, (1, wrapping)) for wrapping in test_fsdp.WRAPPINGS.values()),
        (2, under_fsdp, (2, test_fsdp.OWN)),
    ],
    ids=["LoRA, SP", *(f"FSDP2, {name}" for name in test_fsdp.WRAPPINGS), "FSDP2, TP 2"],
)
def test_heads(ranks: Any, size: int, check: Any, case: Any) -> None:
    for errors in ranks(size).run(check, *case):
        assert max(errors.values()) < 1e-4, errors


# ---- wrappers, schedules, main_grad --------------------------------------------------------------


def in_schedule(layout: dict[str, Any], overrides: dict[str, Any], build: dict[str, Any]) -> Any:
    """Megatron's schedule, DDP and Float16Module around it: lazy against real and float64."""
    with megatron(**layout) as parallel_state:
        bf16 = overrides.get("bf16", False)
        config = tiny_config(layout.get("tp", 1), **overrides)
        chunks = wrapped_chunks(config, **build)
        batches = [make_batch(parallel_state, seed=seed) for seed in (3, 4, 5)]
        for batch in batches:
            batch["targets"], batch["labels"] = batch["labels"], None

        def run() -> tuple[list[Any], dict[str, Tensor]]:
            def loss(logits: Any, batch: dict[str, Any]) -> Any:
                total, logprobs = objective(logits, batch["targets"], batch["weights"])
                return total, (type(logits).__name__, logprobs)

            return train_step(config, chunks, batches, loss)

        reports, expected = run()
        with patch_gpt_model(chunks, LAZY):
            lazies, got = run()
        found: dict[str, Any] = {"grad": worst(got, expected), "bf16": bf16}
        if reports:
            found["kinds"] = {kind for kind, _ in lazies}
            found["logprobs"] = max(
                relative(a[1], b[1]) for a, b in zip(lazies, reports, strict=True)
            )
        return found


@pytest.mark.parametrize(
    ("size", "layout", "overrides", "build", "tolerance"),
    [
        (2, {"pp": 2}, {"gradient_accumulation_fusion": False}, {}, 1e-4),
        (
            2,
            {"tp": 2},
            {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16},
            {},
            5e-2,
        ),
    ],
    ids=["PP 2", "TP 2, Float16Module"],
)
def test_through_megatrons_schedule(
    ranks: Any, size: int, layout: Any, overrides: Any, build: Any, tolerance: float
) -> None:
    found = ranks(size).run(in_schedule, layout, overrides, build)
    assert {"LazyLogits"} in [each.get("kinds") for each in found]
    for each in found:
        assert each["grad"] < tolerance, each
        assert each.get("logprobs", 0.0) < tolerance, each


# ---- products and memory -------------------------------------------------------------------------


def products_and_memory() -> dict[str, Any]:
    """Of one training step, the head in several tiles and blocks."""
    small = replace(budgets.CPU, tile_rows=16, chunk_bytes=1 << 14, min_block=64, max_block=1 << 11)
    with megatron() as parallel_state, pytest.MonkeyPatch.context() as patch:
        model = mm.build_gpt_model(tiny_config(), vocab_size=LARGE, tied=False)
        batch = make_batch(parallel_state)
        found: dict[str, Any] = {}
        with patch_gpt_model(model, LAZY):
            with Seen() as forward:
                logits = model(**batch["inputs"])
            with Seen() as recorded:
                part = (logits[:, 5:].float() / 0.7).flatten(0, 1)
            found["recorded"] = recorded.products
            with Seen() as consumed:
                target = batch["labels"][:, 5:].flatten()
                loss = ours.vocab_parallel_logprobs(part, target).sum()
            found["consumed"] = consumed.products
            with Seen() as backward:
                head = logits.view_of_head.rows.head
                torch.autograd.grad(loss, [head.hidden, head.weight], retain_graph=True)
            found["backward"] = backward.products
            patch.setattr(budgets, "CPU", small)
            with Seen() as whole:
                loss = ours.vocab_parallel_logprobs(part, target).sum()
                loss.backward()
            found["largest"] = max(x.largest for x in (forward, recorded, whole))
        return found


@pytest.mark.own_sizes
def test_products_are_counted_and_no_logits_exist(ranks: Any) -> None:
    (found,) = ranks(1).run(products_and_memory)
    assert found["recorded"] == 0
    assert found["consumed"] == 4, "one per block of columns"
    assert found["backward"] == 3 * 4, "the logits again, dHidden and dWeight"
    assert found["largest"] == LARGE * 32, "the head's weight and its gradient"
    assert found["largest"] < 2 * (SEQ - 5) * LARGE, "of the rows that are asked for"


def mtp_losses() -> float:
    """Megatron's loss of lazy logits, with labels outside the vocabulary, against the unpatched."""
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        labels = batch["labels"].clone()
        labels[0, :5] = torch.tensor([-100, -1, VOCAB, 0, VOCAB - 1])

        def losses(patched: bool) -> list[Tensor]:
            model.zero_grad(set_to_none=True)
            logits = model(**batch["inputs"]).transpose(0, 1)
            assert isinstance(logits, LazyLogits) == patched
            if patched:
                loss = lazy_mtp_loss(
                    labels, logits, LAZY, tp_group=None, loss_mask=None, ignored=None
                )
            else:
                loss = model.compute_language_model_loss(labels, logits.contiguous())
            (loss * batch["weights"]).sum().backward()
            return [loss, *(p.grad.clone() for p in model.parameters())]

        expected = losses(False)
        with patch_gpt_model(model, LAZY):
            got = losses(True)
        return max(relative(a, b) for a, b in zip(got, expected, strict=True))


def test_multi_token_predictions_loss(ranks: Any) -> None:
    """As a call without labels asks for it; `newer_checks` has whole models, from 0.19 on."""
    assert ranks(1).run(mtp_losses)[0] < 1e-4


# ---- what is left alone --------------------------------------------------------------------------


def other_calls() -> None:
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        expected = model(**batch["inputs"], labels=batch["labels"])
        with patch_gpt_model(model, LogprobConfig(logits="lazy", output="loss")) as handle:
            loss = model(**batch["inputs"], labels=batch["labels"])
            torch.testing.assert_close(loss, expected)
            gathered = model(**batch["inputs"], runtime_gather_output=True)
            assert type(gathered) is Tensor
            with handle.options(logits="real"):
                assert type(model(**batch["inputs"])) is Tensor
            hook = model.output_layer.register_forward_hook(lambda *_: None)
            assert type(model(**batch["inputs"])) is Tensor
            with (
                handle.options(fused="require"),
                pytest.raises(ValueError, match="fused='require', but a forward hook"),
            ):
                model(**batch["inputs"])
            hook.remove()
            gc.disable()
            logits = model(**batch["inputs"])
            hidden = logits.view_of_head.rows.head.hidden
            del logits
            assert len(gc.get_referrers(hidden)) <= 2, "an unused handle keeps nothing"
            gc.enable()


def test_calls_that_are_not_lazy(ranks: Any) -> None:
    ranks(1).run(other_calls)


def test_settings() -> None:
    assert LogprobConfig.from_dict({"logits": "lazy"}).logits == "lazy"
    with pytest.raises(ValueError, match="logits: expected 'real' with fused=False"):
        LogprobConfig(logits="lazy", fused=False)
    with pytest.raises(ValueError, match=r"LogprobConfig\.logits: expected .*'real'.*'lazy'"):
        LogprobConfig(logits="never")  # type: ignore[arg-type]
