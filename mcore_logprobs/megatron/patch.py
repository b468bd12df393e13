"""Patch a Megatron model so that labels give log-probabilities, and undo it without a trace.

The seam: Megatron's models finish in `logits, _ = self.output_layer(hidden, weight=...)`, then
(from 0.17) `self._scale_logits(logits)`, then `self.compute_language_model_loss(labels, logits)`.
The patch replaces these on the model *instance*: the output layer returns a `DeferredLogits`, the
loss consumes it. It is `output_layer.forward` that is replaced and not the layer, so that calling
the module runs its hooks, which drive the distributed optimizer's parameter gather.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mcore_logprobs.config import LogprobConfig, refuse_unsupported
from mcore_logprobs.logits.token_stats import TokenStats
from mcore_logprobs.megatron.deferred import DeferredLogits, DeferringHead, scale_deferred
from mcore_logprobs.megatron.head_loss import head_output, plain_loss_config
from mcore_logprobs.megatron.heads import (
    HeadReport,
    find_language_models,
    has_head,
    head_report,
    head_tp_group,
    say_unfused,
    takes_fused_path,
)


def patch_gpt_model(model: Any, config: LogprobConfig | None = None) -> PatchHandle:
    """Make `model(..., labels=labels)` return what `config` asks for on the last pipeline stage.

    Args:
        model: a GPTModel, HybridModel or MambaModel, any wrapper around one (DDP, Float16Module, a
            vision-language model), or a list of virtual pipeline chunks. Stages without an output
            layer are left alone.
        config: None reads `model.config` (`LogprobConfig.from_transformer_config`).

    Returns: a `PatchHandle`; call its `.remove()`, or use it as a context manager.

    With `output="stats"` the model returns a `TokenStats` of `[b, s]` tensors (`[b, s/CP]` under
    context parallelism), with `output="loss"` the usual `[b, s]` loss. With `labels=None` it
    behaves as if never patched. Multi-token prediction keeps its own, unmodified losses.

    Patching again with an equal config returns another handle on the same patch, whose `with`
    block leaves the outer patch in place; another config raises. A head whose logits cannot be
    deferred (`head_report` says why) computes them and goes on from there, which one log line says;
    `fused="require"` raises instead.

    Collectives: none here; in the model's forward those of the operation over TP.

    Raises:
        ValueError: no language model found; already patched with another config; a setting that
            is not supported yet; a head that cannot be fused under `fused="require"`. Nothing is
            patched then.
    """
    language_models = find_language_models(model)
    heads = []
    for language_model in language_models:
        if not has_head(language_model):
            continue
        wanted = config or LogprobConfig.from_transformer_config(language_model.config)
        refuse_unsupported(wanted)
        present = _patch_of(language_model)
        if present is not None and present.config != wanted:
            raise ValueError(
                f"{type(language_model).__name__} is patched already, with {present.config}; "
                f"got {wanted}. Call unpatch_gpt_model first"
            )
        heads.append((present or _HeadPatch(language_model, wanted), present is None))
    for head, is_new in heads:
        if is_new:
            head.install()
    return PatchHandle(model, heads)


def unpatch_gpt_model(model: Any) -> None:
    """Undo `patch_gpt_model`; the model's and its output layer's `__dict__` are as before.

    A model that is not patched is left alone.

    Raises:
        ValueError: something else has replaced one of the patched attributes since; undo that
            first. Nothing is changed then.
    """
    patches = [p for m in find_language_models(model) if (p := _patch_of(m)) is not None]
    for patch in patches:
        patch.check_removable()
    for patch in patches:
        patch.remove()


class PatchHandle:
    """What `patch_gpt_model` returns.

    Attributes:
        reports: a `HeadReport` for each head of this rank (none on stages without one).
    """

    def __init__(self, model: Any, heads: list[tuple[_HeadPatch, bool]]) -> None:
        self._model = model
        self._owned = [head for head, is_new in heads if is_new]
        self._heads = [head for head, _ in heads]

    @property
    def reports(self) -> list[HeadReport]:
        return [head.report for head in self._heads]

    @property
    def active(self) -> bool:
        """Whether a head of this rank is patched by this patch now."""
        return any(head.installed for head in self._heads)

    def remove(self) -> None:
        """Undo the patch, whoever made it; a second call does nothing."""
        _remove(self._heads)

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(self, *exc: Any) -> None:
        """Undo what this handle's own call patched."""
        _remove(self._owned)


def _remove(heads: list[_HeadPatch]) -> None:
    heads = [head for head in heads if head.installed]
    for head in heads:
        head.check_removable()
    for head in heads:
        head.remove()


def _patch_of(language_model: Any) -> _HeadPatch | None:
    replaced = vars(language_model).get("compute_language_model_loss")
    owner = getattr(replaced, "__self__", None)
    return owner if isinstance(owner, _HeadPatch) else None


class _HeadPatch:
    """One patched head. Bound methods of this object take the place of the model's, so that a
    deep copy of the model gets a patch of its own."""

    def __init__(self, model: Any, config: LogprobConfig) -> None:
        self.model = model
        self.layer = model.output_layer
        self.config = config
        self.report = head_report(model, softcap=config.softcap)
        self.fused = takes_fused_path(config, self.report)
        self.installed = False
        self._deferring = DeferringHead(self.layer)
        self._plain = plain_loss_config(config)
        self._replaced: list[tuple[Any, str, Any]] = []  # owner, name, what we put there
        self._before: dict[str, Any] = {}  # instance attributes that were there, by owner and name
        self._main_labels: list[Any] = []  # of the forward passes that are running, if known

    def install(self) -> None:
        self._replace(self.model, "compute_language_model_loss", self.compute_language_model_loss)
        if self.fused:
            self._replace(self.layer, "forward", self._deferring.forward)
            if hasattr(self.model, "_scale_logits"):
                self._replace(self.model, "_scale_logits", self.scale_logits)
        elif self.config.fused:
            say_unfused(self.report.reason, head_tp_group(self.layer))
        if getattr(self.model.config, "mtp_num_layers", None):
            # Both kinds of head end in the same loss: only its caller's labels tell them apart.
            name = "_postprocess" if hasattr(self.model, "_postprocess") else "forward"
            self._replace(self.model, name, _WithLabels(self, self._original(self.model, name)))
        self.installed = True

    def check_removable(self) -> None:
        for owner, name, ours in self._replaced:
            # Bound methods are equal, not identical, from one look-up to the next.
            if vars(owner).get(name) != ours:
                raise ValueError(
                    f"{type(owner).__name__}.{name} was replaced by something else after the "
                    "patch; undo that first"
                )

    def remove(self) -> None:
        for owner, name, _ in reversed(self._replaced):
            key = self._key(owner, name)
            if key in self._before:
                vars(owner)[name] = self._before[key]
            else:
                del vars(owner)[name]
        self._replaced.clear()
        self._before.clear()
        self.installed = False

    def _replace(self, owner: Any, name: str, ours: Any) -> None:
        if name in vars(owner):
            self._before[self._key(owner, name)] = vars(owner)[name]
        vars(owner)[name] = ours
        self._replaced.append((owner, name, ours))

    def _key(self, owner: Any, name: str) -> str:
        return ("model." if owner is self.model else "output_layer.") + name

    def _original(self, owner: Any, name: str) -> Callable[..., Any]:
        """The attribute as it would be without this patch."""
        key = self._key(owner, name)
        if key in self._before:
            return self._before[key]
        return getattr(type(owner), name).__get__(owner)

    # What the model calls.

    def scale_logits(self, logits: Any) -> Any:
        """In place of `model._scale_logits`."""
        original = self._original(self.model, "_scale_logits")
        return scale_deferred(logits, self.model.config, original)

    def compute_language_model_loss(
        self, labels: Tensor, logits: Any, *args: Any, **kwargs: Any
    ) -> TokenStats | Tensor:
        """In place of the model's: labels [b, s], logits [s, b, V/TP] or a handle."""
        config = self.config
        if self._main_labels and labels is not self._main_labels[-1]:
            if not isinstance(logits, DeferredLogits):
                original = self._original(self.model, "compute_language_model_loss")
                return original(labels, logits, *args, **kwargs)
            config = self._plain
        return head_output(
            labels,
            logits,
            config,
            tp_group=head_tp_group(self.layer),
            layer=self.layer,
        )


class _WithLabels:
    """Calls the model's method and remembers, while it runs, which labels it was given.

    The main head's loss is called with that very tensor, multi-token prediction's heads with
    shifted copies of it (0.15 to 0.19).
    """

    def __init__(self, patch: _HeadPatch, original: Callable[..., Any]) -> None:
        self._patch = patch
        self._wrapped = original
        self.__signature__ = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.__signature__.bind(*args, **kwargs)
        running = self._patch._main_labels
        running.append(bound.arguments.get("labels"))
        try:
            return self._wrapped(*args, **kwargs)
        finally:
            running.pop()
