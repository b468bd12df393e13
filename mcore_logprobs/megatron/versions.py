"""Which of Megatron-Core's hooks are there: found by signatures, never by version numbers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

from torch import nn

_MODELS = {
    "GPTModel": "megatron.core.models.gpt",
    "MambaModel": "megatron.core.models.mamba",
    "HybridModel": "megatron.core.models.hybrid.hybrid_model",
}


def takes(function: Callable[..., object] | None, parameter: str) -> bool:
    """Whether `function` has a parameter of this name."""
    if function is None:
        return False
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def has_output_processor(model_class: type[nn.Module]) -> bool:
    """Whether `model_class.forward` takes `output_processor=` (GPTModel of 0.18 and later)."""
    return takes(model_class.forward, "output_processor")


def megatron_features() -> dict[str, str]:
    """What `doctor` prints of Megatron: name -> what was found, or why it did not import.

    Imports Megatron-Core. Keys: "megatron-core" (its version) and one for each model class, whose
    value lists the hooks of this library's seam.
    """
    try:
        core = importlib.import_module("megatron.core")
    except Exception as error:  # a broken CUDA library raises anything
        return {"megatron-core": f"does not import: {type(error).__name__}: {error}"}
    features = {"megatron-core": str(getattr(core, "__version__", "unknown version"))}
    for name, path in _MODELS.items():
        try:
            model_class = getattr(importlib.import_module(path), name)
        except Exception as error:
            features[name] = f"not there: {type(error).__name__}: {error}"
            continue
        hooks = [
            hook
            for hook in ("compute_language_model_loss", "_scale_logits", "_postprocess")
            if hasattr(model_class, hook)
        ]
        if has_output_processor(model_class):
            hooks.append("forward(output_processor=)")
        features[name] = ", ".join(hooks) or "none of the hooks this library needs"
    return features
