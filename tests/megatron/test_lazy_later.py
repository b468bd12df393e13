"""Lazy logits are those of the model's call, whatever is changed before they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mcore_logprobs import LogprobConfig, vocab_parallel_entropy, vocab_parallel_logprobs
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron import patch_gpt_model
from mcore_logprobs.sources.lazy import LazyLogits
from tests.megatron import test_lora, test_peft
from tests.megatron.common import VOCAB, make_batch, megatron, relative, tiny_config, worst

LAZY = LogprobConfig(logits="lazy")
USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "fused": lambda logits, _: vocab_parallel_entropy(logits),
    "real": lambda logits, _: logits.sigmoid().mean(-1),
    "a function": lambda logits, labels: vocab_parallel_logprobs(Doubled.apply(logits), labels),
    "a checkpoint": lambda logits, labels: checkpoint(
        vocab_parallel_logprobs, logits, labels, use_reentrant=True
    ),
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2.0 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2.0 * grads[0]


def plain() -> Any:
    return mm.build_gpt_model(tiny_config(num_layers=1), vocab_size=VOCAB, tied=False)


def both(
    make: Callable[[], Any], use: str, later: Callable[[Any], object], *, lazy: bool = True
) -> None:
    """A call, something that changes, and a use: patched as unpatched."""
    with megatron() as parallel_state:
        batch, found = make_batch(parallel_state), []
        for patched in (False, True):
            model = make()

            def step(model: Any = model) -> tuple[Any, Tensor]:
                logits = model(**batch["inputs"])
                undo = later(model)
                values = USES[use](logits, batch["labels"])
                if callable(undo):
                    undo()
                return logits, values

            if patched:
                with patch_gpt_model(model, LAZY):
                    logits, values = step()
                assert isinstance(logits, LazyLogits) == lazy
            else:
                _, values = step()
            (values * batch["weights"]).sum().backward()
            named = model.named_parameters()
            grads = {n: p.grad for n, p in named if p.grad is not None}
            found.append((values.detach(), grads))
        (expected, expected_grads), (got, grads) = found
        assert relative(got, expected) < 1e-5
        assert worst(grads, expected_grads) < 1e-4


def another_weight(model: Any) -> Callable[[], None]:
    layer, before = model.output_layer, model.output_layer.weight
    layer.weight = nn.Parameter(torch.randn_like(before))

    def undo() -> None:
        layer.weight = before

    return undo


def thawed(model: Any) -> None:
    for parameter in model.output_layer.parameters():
        parameter.requires_grad_(True)


def frozen(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        model = make()
        for parameter in model.output_layer.parameters():
            parameter.requires_grad_(False)
        return model

    return made


def in_training(model: Any) -> None:
    model.train()


def adapter_off(model: Any) -> Callable[[], None]:
    layer = model.output_layer
    layer._adapter_enabled = False

    def undo() -> None:
        layer._adapter_enabled = True

    return undo


@pytest.mark.parametrize("use", USES)
def test_another_weight(use: str) -> None:
    both(plain, use, another_weight)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("lora", [False, True])
def test_a_head_that_was_frozen(use: str, lora: bool) -> None:
    both(frozen(lambda: test_lora.build(1)) if lora else frozen(plain), use, thawed)


@pytest.mark.parametrize("use", USES)
def test_an_adapter_that_is_switched_off(use: str) -> None:
    both(lambda: test_lora.build(1), use, adapter_off)


@pytest.mark.parametrize("use", USES)
def test_dropout_that_is_switched_on(use: str) -> None:
    both(lambda: test_lora.build(1, dropout=0.5).eval(), use, in_training)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("names", [("first",), ("first", "second")])
def test_adapters_of_peft(use: str, names: tuple[str, ...]) -> None:
    """With two of them a part of the product is no parameter: real logits."""
    both(lambda: test_peft.build(1, names=names), use, lambda model: None, lazy=len(names) == 1)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside: bool) -> None:
    """Under autocast in the call alone, or at the use alone."""
    with megatron() as parallel_state, torch.no_grad():
        model, batch = plain(), make_batch(parallel_state)

        def step() -> list[Tensor]:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                logits = model(**batch["inputs"])
            with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
                return [logits + 0.0, vocab_parallel_entropy(logits)]

        expected = step()
        with patch_gpt_model(model, LAZY):
            got = step()
        assert torch.equal(got[0], expected[0])
        assert relative(got[1], expected[1]) < (1e-2 if inside else 1e-5)
