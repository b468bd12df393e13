"""Models that a framework builds give lazy logits, from their first call on.

Megatron's model classes are watched and not replaced: a model that is made while this is on is
patched at its first call, when the framework has put its adapters and wrappers around it. Calls
with labels give Megatron's loss; those without a `LazyLogits`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.megatron.adapters import is_adapter
from mcore_logprobs.megatron.head_patch import patch_of
from mcore_logprobs.megatron.heads import has_head, head_report, head_tp_group, say_unfused
from mcore_logprobs.megatron.imports import after_import
from mcore_logprobs.megatron.patch import patch_own_stage

logger = logging.getLogger("mcore_logprobs")
FUSED = ("auto", "require", False)
_CLASSES = {
    "megatron.core.models.gpt.gpt_model": "GPTModel",
    "megatron.core.models.hybrid.hybrid_model": "HybridModel",
    "megatron.core.models.mamba.mamba_model": "MambaModel",
}
_OF_A_HEAD = ("chunk_size", "backend", "logits_dtype", "saved_bytes")
_MARK = "_mcore_logprobs_lazy"
_said: list[str] = []
_settings: dict[object, str] = {}  # of those that are on, the latest last


def check_fused(fused: object) -> None:
    """One of `FUSED`, or a ValueError."""
    if not any(fused is known or (isinstance(fused, str) and fused == known) for known in FUSED):
        raise ValueError(f"fused: expected 'auto', 'require' or False, got {fused!r}")


def lazy_models(fused: str) -> Callable[[], None]:
    """Let models of Megatron's classes give lazy logits if they are made while this is on.

    Args:
        fused: "auto": whatever reads the logits of a model gets real ones, with a log line;
            "require": an error.

    Returns: a function that undoes it.
    """
    undo = [
        after_import(module, functools.partial(_watch, name)) for module, name in _CLASSES.items()
    ]
    mine = object()
    _settings[mine] = fused

    def off() -> None:
        _settings.pop(mine, None)
        for each in undo:
            each()

    return off


def head_settings(config: object) -> dict[str, Any]:
    """Of `LogprobConfig`, for a model that a drop-in patches: what the model's own config has of a
    head, and `fused` as the latest switch has it where that says nothing.
    """
    own = LogprobConfig() if config is None else LogprobConfig.from_transformer_config(config)
    fused: object = own.fused
    if not hasattr(config, "logprob_fused"):
        fused = _switched_fused()
    return {"fused": fused, **{name: getattr(own, name) for name in _OF_A_HEAD}}


def _switched_fused() -> bool | Literal["require"]:
    return "require" if list(_settings.values())[-1:] == ["require"] else True


def _watch(name: str, module: object) -> None:
    """Look at each model that is made of the class before its calls, without a setting in vain.

    Not in a forward pre-hook: torch has looked up the model's forward by then, and the patch of a
    hybrid model replaces it.
    """
    owner = getattr(module, name, None)
    if owner is None or getattr(owner.__call__, _MARK, False):
        return
    make, run = owner.__init__, owner.__call__

    @functools.wraps(make)
    def init(self: nn.Module, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)
        if _settings:
            vars(self)[_MARK] = True

    @functools.wraps(run)
    def call(self: nn.Module, *args: object, **kwargs: object) -> object:
        if _MARK in vars(self):
            before_call(self)
        return run(self, *args, **kwargs)

    setattr(call, _MARK, True)
    owner.__init__, owner.__call__ = init, call


def before_call(model: Any) -> None:
    """Patch a model that has a head and no patch; take the patch back once this is off."""
    if not has_head(model):
        return
    present = patch_of(model)
    if not _settings:
        if present is not None and present.automatic:
            present.retire()
        return
    fused = _switched_fused()
    is_stale = present is not None and (
        not present.has_its_layer  # an adapter was put around it since, or another in its place
        or present.automatic != fused  # switched on again since, with another setting
    )
    if present is not None and present.can_lend and is_stale:
        try:
            present.check_removable()
        except ValueError as error:  # somebody else has patched it too
            _say_once(f"{type(model).__name__}: its lazy logits stay as they were: {error}")
            return
        present.retire()
        present = None
    layer = model.output_layer
    has_vocabulary = is_adapter(layer) or hasattr(layer, "output_size_per_partition")
    if present is not None or not has_vocabulary:
        return  # a patch of somebody's own; a critic's head
    settings = head_settings(model.config)
    if settings["fused"] is False:
        return  # the model's own setting
    report = head_report(model)
    if settings["fused"] != "require" and not report.fusable:
        say_unfused(report.reason, head_tp_group(layer))
        return
    patch_own_stage(model, LogprobConfig(output="loss", logits="lazy", **settings))
    patch = patch_of(model)
    assert patch is not None
    patch.automatic = fused
    _say_once(f"{type(model).__name__}: gives lazy logits from now on")


def _say_once(line: str) -> None:
    if line not in _said:
        _said.append(line)
        if os.environ.get("RANK", "0") == "0":
            logger.warning(line)
