"""Faults put into a drop-in while a row runs switched: each must turn the row red.

A drop-in reaches the library by its module's name `ours`. In a rank of a run with a fault that name
is the library with one thing wrong; everything else of the drop-in and of the framework is as is.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mcore_logprobs
from mcore_logprobs.dropin.installed import FRAMEWORKS
from mcore_logprobs.sources.lazy_rows import Rows
from tests.trainers.frame import own_modules

# Fault -> the number that must tell it (see `frame.Tolerance`).
FAULTS = {
    "temperature ignored": "logprobs",
    "gradient scaled": "grad_norm",
    "masked token unmasked": "grad_norm",
}
# Framework -> the layout and option of the row that is run with them.
FAULTY = {
    "areal": ("TP 1", "1.0.4, decoupled PPO, checkpoints"),
    "megatron_rl": ("TP 1", "GRPO"),
    "miles": ("TP 1", "GRPO"),
    "ms_swift": ("TP 1", "4.6.0, GRPO, KL to a reference"),
    "nemo_rl": ("TP 1", "GRPO, packed"),
    "roll": ("TP 1", "PPO, KL"),
    "skyrl": ("TP 2 x SP", "PPO, packed, fused_lm_head_logprob"),
    "slime": ("TP 1", "GRPO"),
    "verl": ("TP 1", "fused, external_lib"),  # on logits verl applies the temperature itself
}
# NeMo-RL divides the logits itself; the others' training applies none.
_NO_TEMPERATURE = ("megatron_rl", "nemo_rl", "roll")
_LOGPROBS = (
    "context_parallel_gather",
    "linear_token_stats",
    "vocab_parallel_logprobs",
    "vocab_parallel_sampling_logprobs",
    "vocab_parallel_token_stats",
)
_RESULTS = {"verl": ("_flat",)}  # functions of a drop-in that a patched model's results go through


def faults(framework: str) -> dict[str, str]:
    """Those of `FAULTS` that the framework's drop-in can have."""
    without = ("temperature ignored",) if framework in _NO_TEMPERATURE else ()
    return {fault: told_by for fault, told_by in FAULTS.items() if fault not in without}


def put(framework: str, fault: str) -> None:
    """Into the framework's drop-in, in this process and for good."""
    assert fault in FAULTS, fault
    for module in own_modules(framework):  # miles' are slime's too
        if hasattr(module, "ours"):
            module.ours = _Library(fault)
    dropin = importlib.import_module(f"mcore_logprobs.dropin.{FRAMEWORKS[framework].module}")
    common = importlib.import_module("mcore_logprobs.dropin._common")
    common.ours = _Library(fault)  # type: ignore[attr-defined]
    if (framework, fault) == ("ms_swift", "temperature ignored"):  # it divides the logits itself
        Rows.divide_ = lambda rows, places, by: None  # type: ignore[method-assign]
    for name in _RESULTS.get(framework, ()):
        setattr(dropin, name, _faulty(getattr(dropin, name), fault))


class _Library:
    """`mcore_logprobs` with a fault."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        thing = getattr(mcore_logprobs, name)
        if name in _LOGPROBS or (name == "LogprobConfig" and self._fault == "temperature ignored"):
            return _faulty(thing, self._fault)
        return thing


def _faulty(function: Callable[..., Any], fault: str) -> Callable[..., Any]:
    def call(*given: Any, **options: Any) -> Any:
        if fault == "temperature ignored":
            options.pop("temperature", None)
            return function(*given, **options)
        found = function(*given, **options)
        if isinstance(found, Tensor):
            return _Fault.apply(found, fault)
        name = "log_probs" if hasattr(found, "log_probs") else "logprobs"
        return dataclasses.replace(found, **{name: _Fault.apply(getattr(found, name), fault)})

    return call


class _Fault(torch.autograd.Function):
    """The log-probabilities as they are, their gradient with a fault."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, fault: str) -> Tensor:
        ctx.fault = fault
        return logprobs.view_as(logprobs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        if ctx.fault == "gradient scaled":
            return 1.01 * grad, None
        # A token that the loss takes out has no gradient: it gets that of a usual one.
        return grad.where(grad != 0, grad.abs().mean()), None
