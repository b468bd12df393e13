"""A patched model's settings reach the operation, with labels and by lazy logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import mcore_logprobs as ml
from mcore_logprobs import LogprobConfig, patch_model
from mcore_logprobs.cpu_megatron import models as mm
from tests.megatron.common import VOCAB, make_batch, megatron

BF16 = torch.bfloat16


def model_and_batch(parallel_state: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Any], Tensor]:
    """(a model, its inputs, labels `[b, s]` that all count)."""
    config = mm.transformer_config(num_layers=1, dtype=dtype)
    model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=False).to(dtype)
    batch = make_batch(parallel_state)
    return model, batch["inputs"], batch["labels"].clamp(min=0)


def gradient_of(values: Tensor, weight: Tensor) -> Tensor:
    upstream = torch.linspace(-1.0, 2.0, values.numel()).view(values.shape)
    (grad,) = torch.autograd.grad(values, weight, upstream)
    return grad


class SavedNumbers(saved_tensors_hooks):
    """How many numbers are saved for backwards within it."""

    def __init__(self) -> None:
        self.count = 0
        super().__init__(self._counted, lambda x: x)

    def _counted(self, x: Tensor) -> Tensor:
        self.count += x.numel()
        return x


def test_saved_bytes() -> None:
    """The head's logits are kept, or nothing of their size is."""
    with megatron() as parallel_state:
        model, inputs, labels = model_and_batch(parallel_state, torch.float32)
        numbers = []
        for kept in (0, 1 << 20):
            saved = SavedNumbers()
            with patch_model(model, LogprobConfig(saved_bytes=kept)), saved:
                model(**inputs, labels=labels)
            numbers.append(saved.count)
        assert numbers[1] - numbers[0] >= labels.numel() * VOCAB


def test_saved_bytes_and_logits_dtype_of_lazy_logits() -> None:
    """For whoever consumes them: as the patch's settings have it."""
    with megatron() as parallel_state:
        model, inputs, labels = model_and_batch(parallel_state, torch.float32)
        target, numbers, found = labels.t().contiguous(), [], {}
        for settings in ({}, {"saved_bytes": 1 << 20}, {"logits_dtype": BF16}):
            with patch_model(model, LogprobConfig(logits="lazy", **settings)):
                lazy = model(**inputs).transpose(0, 1)
                with (saved := SavedNumbers()):
                    found[str(settings)] = ml.vocab_parallel_logprobs(lazy, target)
            numbers.append(saved.count)
        assert numbers[1] - numbers[0] >= labels.numel() * VOCAB
        plain, kept, rounded = found.values()
        assert torch.equal(plain, kept)
        assert 1e-5 < (plain - rounded).abs().max() < 0.1


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}], ids=str)
def test_low_precision_logits(settings: dict[str, Any]) -> None:
    """Bit for bit the function's: statistics alone may have all products in the logits' dtype."""
    function = ml.linear_sampling_logprobs if settings else ml.linear_token_stats
    settings = {"logits_dtype": BF16, **settings}

    def values_of(found: Any) -> Tensor:
        return found if isinstance(found, Tensor) else found.logprobs

    with megatron() as parallel_state:
        model, inputs, labels = model_and_batch(parallel_state, BF16)
        weight, seen = model.output_layer.weight, []
        model.decoder.register_forward_hook(lambda _, args, out: seen.append(out.detach()))
        with patch_model(model, LogprobConfig(**settings)):
            ours = values_of(model(**inputs, labels=labels)).t()
            grad = gradient_of(ours, weight)
        expected = values_of(function(seen[0], weight, labels.t().contiguous(), **settings))
        assert torch.equal(ours, expected)
        assert torch.equal(grad, gradient_of(expected, weight))


def test_a_divergence_beside_segments_has_none_itself() -> None:
    with megatron() as parallel_state:
        model, inputs, labels = model_and_batch(parallel_state, torch.float32)
        teacher = torch.randn(*labels.shape, VOCAB)
        found = []
        for segments in (None, 8):
            with (
                patch_model(model, LogprobConfig(invariant_segments=segments)) as handle,
                handle.divergence(teacher_logits=teacher),
            ):
                stats = model(**inputs, labels=labels)
            found.append(
                (stats.divergence, gradient_of(stats.divergence, model.output_layer.weight))
            )
        for got, expected in zip(*found, strict=True):
            assert torch.equal(got, expected)


def test_entropy_of_a_record_by_the_model_s_setting() -> None:
    with megatron() as parallel_state:
        model, inputs, labels = model_and_batch(parallel_state, torch.float32)
        ids = torch.stack([labels.flatten(), (labels.flatten() + 1) % VOCAB], 1)
        record = ids.flatten(), torch.arange(labels.numel() + 1) * 2
        found = []
        for config, flags in (({"entropy": True}, {}), ({}, {"entropy": True})):
            with (
                patch_model(model, LogprobConfig(**config)) as handle,
                handle.replay(record, **flags),
            ):
                found.append(model(**inputs, labels=labels).kept_entropy)
        torch.testing.assert_close(*found)
        assert found[0].any()


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}], ids=str)
def test_statistics_beside_a_policy_loss_carry_no_gradient(settings: dict[str, Any]) -> None:
    with megatron() as parallel_state:
        model, inputs, labels = model_and_batch(parallel_state, torch.float32)
        with (
            patch_model(model, LogprobConfig(entropy=True, **settings)) as handle,
            handle.policy_loss(lambda logprobs, entropy: -logprobs.clamp(min=-9.0)),
        ):
            stats = model(**inputs, labels=labels)
        assert stats.policy_loss.requires_grad
        assert not stats.logprobs.requires_grad
        assert stats.entropy is None or not stats.entropy.requires_grad


@pytest.mark.parametrize("called_inside", [True, False])
def test_lazy_logits_are_those_of_the_call_s_autocast(called_inside: bool) -> None:
    """Whether the one who computes them is within autocast, or behind it."""

    def autocast(inside: bool) -> torch.autocast:
        return torch.autocast("cpu", BF16, enabled=inside)

    with megatron() as parallel_state, torch.no_grad():
        model, inputs, _ = model_and_batch(parallel_state, torch.float32)
        with autocast(called_inside):
            plain = model(**inputs)
            with patch_model(model, LogprobConfig(logits="lazy")):
                lazy = model(**inputs)
        with autocast(not called_inside):
            real = torch.sin(lazy)
        assert plain.dtype == (BF16 if called_inside else torch.float32)
        assert torch.equal(real, torch.sin(plain))
