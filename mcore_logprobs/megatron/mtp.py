"""Leaving a model's multi-token prediction out of a call (`mtp="off"`)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from mcore_logprobs.megatron.ddp import wait_for_parameters


def mtp_layers(model: nn.Module) -> int:
    """How many multi-token prediction layers a language model has."""
    return getattr(model.config, "mtp_num_layers", None) or 0


def of_main_head(model: nn.Module, hidden_states: Tensor) -> Tensor:
    """The main head's of hidden states that have those of the MTP layers joined to them.

    `_postprocess` of a schedule plan gets such, or that of a stage behind the MTP layers.
    """
    return torch.chunk(hidden_states, 1 + mtp_layers(model), dim=0)[0]


# Its hook on the output layer takes every (1 + mtp_num_layers)-th call for the main head's.
_LOGITS_SAVER = "megatron.training.distillation.logits_saver"


def check_not_counted(layer: nn.Module) -> None:
    """For a call that leaves the MTP heads out.

    Raises:
        ValueError: Megatron's `--logits-save-dir` counts the output layer's calls.
    """
    counted = (getattr(hook, "__module__", "") for hook in layer._forward_hooks.values())
    if layer.training and _LOGITS_SAVER in counted:
        raise ValueError(
            "mtp: expected 'keep', and in training no PatchHandle.sample, with Megatron's "
            "--logits-save-dir, whose hook on the output layer counts the MTP heads' calls, which "
            "this call leaves out"
        )


@contextlib.contextmanager
def without_mtp(model: nn.Module) -> Iterator[None]:
    """While open, `model` has no multi-token prediction: its layers pass hidden states through.

    `mtp_process` stays as it is: with it the model finds a tied head's weight, which is the
    embedding's on the last pipeline stage too, and a HybridModel calls its MTP layers.
    """
    own = vars(model)
    config = own["config"]
    without = copy.copy(config)
    # A GPTModel splits hidden states into 1 + this many (0.15 and 0.16, if it is not None). A
    # HybridModel, which has no _postprocess, takes no 0.
    without.mtp_num_layers = 0 if hasattr(model, "_postprocess") else None
    # It replaces a registered module, because torch.compile's guards check those.
    modules = own["_modules"]
    layers = modules.get("mtp")
    own["config"] = without
    if layers is not None:
        modules["mtp"] = _PassThrough(_of_mtp_alone(model))
    try:
        yield
    finally:
        own["config"] = config
        if layers is not None:
            modules["mtp"] = layers


def _of_mtp_alone(model: nn.Module) -> nn.ModuleList:
    """What only the call of the MTP layers would run: they, and an embedding made for them.

    Behind the first pipeline stage the embedding is theirs, and its weight may be the head's too.
    """
    modules = vars(model)["_modules"]
    names = ["mtp"] if getattr(model, "pre_process", True) else ["mtp", "embedding"]
    return nn.ModuleList([modules[name] for name in names if modules.get(name) is not None])


class _PassThrough(nn.Module):
    """In place of the MTP layers: its call returns the hidden states.

    Megatron's DDP counts the gradients of each bucket, and raises where one is missing. So those of
    its parameters, which have a `main_grad`, are 0; without it there are none. The distributed
    optimizer's gather of parameters, which modules' hooks wait for, is waited for.
    """

    def __init__(self, left_out: nn.ModuleList) -> None:
        super().__init__()
        self.left_out = left_out  # registered: a HybridModel's forward reads the parameters

    def forward(self, *args: object, hidden_states: Tensor, **kwargs: object) -> Tensor:
        wait_for_parameters(self.left_out)
        inside = self.left_out.parameters()
        parameters = [p for p in inside if p.requires_grad and hasattr(p, "main_grad")]
        if not (parameters and hidden_states.requires_grad):
            return hidden_states
        return _LeftOut.apply(hidden_states, *parameters)


class _LeftOutContext(FunctionCtx):
    parameters: tuple[Tensor, ...]


class _LeftOut(torch.autograd.Function):
    """Its first argument, and gradients of 0 for the others."""

    @staticmethod
    def forward(ctx: _LeftOutContext, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: _LeftOutContext, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad, *(p.new_zeros(()).expand_as(p) for p in ctx.parameters))
