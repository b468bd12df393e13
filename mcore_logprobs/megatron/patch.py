"""Patch a Megatron model so that labels give log-probabilities, and undo it without a trace.

The seam: Megatron's models finish in `logits, _ = self.output_layer(hidden, weight=...)`, then
(from 0.17) `self._scale_logits(logits)`, then `self.compute_language_model_loss(labels, logits)`.
The patch replaces these on the model *instance*: the output layer returns a `DeferredLogits`, the
loss consumes it. It is `output_layer.forward` that is replaced and not the layer, so that calling
the module runs its hooks, which drive the distributed optimizer's parameter gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.groups import group_size, megatron_parallel_state
from mcore_logprobs.megatron.handle import PatchHandle, check_own_loss
from mcore_logprobs.megatron.head_patch import HeadPatch, patch_of
from mcore_logprobs.megatron.heads import (
    find_language_models,
    has_head,
    say_padding,
    say_replaced,
)
from mcore_logprobs.spelling import suggesting

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule


@suggesting
def patch_model(model: object, config: LogprobConfig | None = None) -> PatchHandle:
    """Make `model(..., labels=labels)` return what `config` asks for on the last pipeline stage.

    Args:
        model: a GPTModel, HybridModel, MambaModel, T5Model or BertModel, any wrapper around one
            (DDP, Float16Module, FSDP, `torch.compile`, PEFT, a vision-language model), or a list of
            virtual pipeline chunks. Stages without an output layer are left as they are. It may
            also be wrapped later.
        config: None reads `model.config` (`LogprobConfig.from_transformer_config`).

    Returns: a `PatchHandle`; call its `.remove()`, or use it as a context manager.

    With `output="stats"` the model returns a `TokenStats` of `[b, s]` tensors (`[b, s/CP]` under
    context parallelism), with `output="loss"` the usual `[b, s]` loss. Without labels it behaves as
    if never patched; with `logits="lazy"` it returns a `LazyLogits`. Multi-token prediction keeps
    its own losses. With `mtp="off"` calls with labels leave it out.

    Patching again with an equal config returns another handle on the same patch, whose `with` block
    leaves the outer patch in place; if the model has another output layer since, such as one with
    an adapter, the patch goes over to it. Patching with another config raises. Some heads and calls
    cannot be fused: a hook on the output layer, `runtime_gather_output=True` or an adapter of an
    unknown kind. The logits are then computed, and one log line says why. `fused="require"` raises
    instead, here or in the call.

    The head multiplies and rounds as its layer does. Under autocast it multiplies in autocast's
    dtype. If the layer has an `output_dtype`, the logits are rounded to it.

    T5Model and BertModel call their labels `lm_labels`. Megatron's datasets for them put -1 where
    nothing counts: set `ignore_index=-1`. A BertModel returns a pair, whose first part is replaced.
    Its labels are not the next tokens, so `check_labels` is refused.

    A model class with a `compute_language_model_loss` of its own is called with real logits under
    `output="loss"`, and refused under `output="stats"`; so is one for which it was replaced on
    Megatron's `LanguageModule`.

    Call it on every pipeline stage.

    Collectives: with `fused="require"` one gather of the stages' reports, else none. In the model's
    forward: those of the operation over TP. Under FSDP2, if the output layer is a module of its
    own, one more all-gather of its weight.

    Raises:
        ValueError: on every stage: no language model found; settings that are not a LogprobConfig,
            misspelled on `model.config` or not supported yet; a head that cannot be fused under
            `fused="require"`; a loss of the model's own that the settings would leave out. On the
            head's stage, with `fused="require"` on every stage: already patched with another
            config; a vocab_size, invariant_segments or check_labels that the model cannot have.
            Nothing is patched then.
    """
    return _patched(model, config, _of_all_stages)


def patch_own_stage(model: object, config: LogprobConfig) -> PatchHandle:
    """`patch_model` within a call of the model, where other stages may be anywhere.

    No collective: with `fused="require"` a head that cannot be fused raises on its own stage only.
    """
    return _patched(model, config, lambda model, reason: [reason])


def patch_built(
    model: object, config: LogprobConfig, *, checked_later: bool = False
) -> PatchHandle:
    """`patch_model` of what a model provider has built.

    A stage of a virtual pipeline builds several chunks one by one, and their constructors wait for
    other stages (tied embeddings, multi-token prediction): no collective in between. There
    `fused="require"` raises on the head's own stage only; with `checked_later`, where
    `patch_model` follows for the list of chunks, that does.
    """
    chunks = find_language_models(model)
    state = megatron_parallel_state()
    size = getattr(state, "get_virtual_pipeline_model_parallel_world_size", lambda: None)()
    if (size or 1) == 1 and all(getattr(chunk, "vp_stage", None) is None for chunk in chunks):
        return patch_model(model, config)
    if checked_later:
        return _patched(model, config, lambda model, reason: [])
    return patch_own_stage(model, config)


def _patched(
    model: object,
    config: LogprobConfig | None,
    reasons_of: Callable[[object, str], list[str]],
) -> PatchHandle:
    if config is not None and not isinstance(config, LogprobConfig):
        raise ValueError(f"config: expected a LogprobConfig or None, got {type(config).__name__}")
    heads = []
    settings, reason = config, ""
    try:
        for language_model in find_language_models(model):
            settings = config or LogprobConfig.from_transformer_config(language_model.config)
            check_own_loss(language_model, settings)
            if has_head(language_model):
                head, is_ours = _head_patch(language_model, settings)
                why = head.check(settings)
                reason = reason or why
                heads.append((head, is_ours))
    except ValueError as error:
        if settings is not None and settings.fused == "require":
            reasons_of(model, str(error))  # the other stages wait there
        raise
    assert settings is not None
    if settings.fused == "require":
        for why in reasons_of(model, reason):
            if why:
                raise ValueError(f"fused='require', but {why}")
    changed = []
    try:
        for head, is_ours in heads:
            if is_ours:
                changed.append(head)
                head.lend(settings) if head.installed else head.install()
                say_padding(head.model, settings)
                if settings.output == "loss" and not head.own_loss:
                    say_replaced(head.model)
    except BaseException:
        for head in changed:  # not of a later one, whose automatic patch is still on
            head.remove()
        raise
    return PatchHandle(model, heads, settings)


def _head_patch(language_model: LanguageModule, settings: LogprobConfig) -> tuple[HeadPatch, bool]:
    """(the patch of a head; whether it is to be put on, or to be given these settings).

    One that is on already goes over to the output layer that the model has now.

    Raises:
        ValueError: it is on with settings that it may not change.
    """
    head = patch_of(language_model)
    if head is None:
        return HeadPatch(language_model, settings), True
    is_ours = head.config != settings
    if is_ours and not head.can_lend:
        theirs, ours = head.config.as_dict(), settings.as_dict()
        differ = [k for k in ours if ours[k] != theirs[k]]
        raise ValueError(
            f"{type(language_model).__name__} is patched already: expected "
            + ", ".join(f"{k}={theirs[k]!r}" for k in differ)
            + ", got "
            + ", ".join(f"{k}={ours[k]!r}" for k in differ)
            + "; call unpatch_model first"
        )
    head.follow_layer()
    return head, is_ours


@suggesting
def unpatch_model(model: object) -> None:
    """Undo `patch_model`; the model's and its output layer's `__dict__` are as before.

    A model that is not patched is not changed.

    Raises:
        ValueError: something else has replaced one of the patched attributes since; undo that
            first. Nothing is changed then.
    """
    patches = [p for m in find_language_models(model) if (p := patch_of(m)) is not None]
    for patch in patches:
        patch.check_removable()
    for patch in patches:
        patch.remove()


patch_gpt_model = patch_model
unpatch_gpt_model = unpatch_model


def _of_all_stages(model: object, reason: str) -> list[str]:
    """`reason` of every pipeline stage. Collective over the pipeline group, where there is one."""
    state = megatron_parallel_state()
    language_model = find_language_models(model)[0]
    group = getattr(getattr(language_model, "pg_collection", None), "pp", None)
    if group is None and state is not None:
        group = state.get_pipeline_model_parallel_group(check_initialized=False)
    if group is None or group_size(group) == 1:
        return [reason]
    reasons: list[str] = [""] * group_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    return reasons
