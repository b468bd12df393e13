"""Models in wrappers that hand attributes on, and losses that go around the patch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.megatron import find_language_models, patch_model
from mcore_logprobs.sources.lazy import LazyLogits
from tests.megatron.common import make_batch, megatron
from tests.megatron.test_other_uses import gpt, hybrid


class Delegating(nn.Module):
    """As PEFT's PeftModel and LoraModel: what it lacks is the inner model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


class WithLossMethod(nn.Module):
    """As a vision-language model with Megatron's interface."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.language_model = model

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        return self.language_model.compute_language_model_loss(labels, logits)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.language_model(*args, **kwargs)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "delegating": Delegating,
    "delegating twice": lambda model: Delegating(Delegating(model)),
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "a loss method": WithLossMethod,
}


@pytest.mark.parametrize("build", [gpt, hybrid])
@pytest.mark.parametrize("name", WRAPPERS)
def test_the_model_within_is_patched(name: str, build: Callable[[], Any]) -> None:
    with megatron() as parallel_state:
        model, batch = build(), make_batch(parallel_state)
        wrapper = WRAPPERS[name](model)
        assert find_language_models(wrapper) == [model]
        before = [dict(vars(x)) for x in (wrapper, model, model.output_layer)]
        config = LogprobConfig(temperature=0.5, logits="lazy", fused="require")
        with patch_model(model, config):
            expected = model(**batch["inputs"], labels=batch["labels"])
        with patch_model(wrapper, config) as handle:
            stats = wrapper(**batch["inputs"], labels=batch["labels"])
            lazy = wrapper(**batch["inputs"])
            assert handle.active
            assert len(handle.reports) == 1
        torch.testing.assert_close(stats.logprobs, expected.logprobs)
        assert type(lazy) is LazyLogits
        after = [dict(vars(x)) for x in (wrapper, model, model.output_layer)]
        assert [list(x) for x in after] == [list(x) for x in before]


class Unknown(nn.Module):
    """A model of another kind: its class has no method that the patch could follow labels through."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.output_layer = model.config, model.output_layer
        self.compute_language_model_loss = model.compute_language_model_loss
        self._postprocess = model._postprocess


def test_a_model_that_cannot_be_patched_is_left_as_it_is() -> None:
    with megatron():
        model = Unknown(gpt())
        before = dict(vars(model)), dict(vars(model.output_layer))
        for _ in range(2):  # nor does a second try take it for a patched one
            with pytest.raises(AttributeError, match="_postprocess"):
                patch_model(model, LogprobConfig())
            assert (dict(vars(model)), dict(vars(model.output_layer))) == before
