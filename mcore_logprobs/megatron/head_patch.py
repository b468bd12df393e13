"""One patched head: what takes the place of its model's functions, and how it is undone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.megatron.arguments import Arguments, HeadMethod
from mcore_logprobs.megatron.calls import NOT_PASSED, Call, ForwardState, check_shifted
from mcore_logprobs.megatron.deferred import DeferredLogits, DeferringHead, Weak, scale_deferred
from mcore_logprobs.megatron.fsdp import attach_backward_hooks
from mcore_logprobs.megatron.head_loss import (
    check_gradient,
    head_output,
    ignored_by_own_loss,
    lazy_mtp_loss,
    mtp_loss,
    own_columns,
)
from mcore_logprobs.megatron.heads import (
    HeadReport,
    check_head,
    check_vocabulary,
    head_report,
    head_tp_group,
    kind_reason,
    loss_reason,
    own_loss,
    require_fused,
    say_left_out,
    say_unfused,
    scale_reason,
    settings_reason,
    unseen_reason,
)
from mcore_logprobs.megatron.lazy import lazy_logits, lazy_reason
from mcore_logprobs.megatron.mtp import (
    check_not_counted,
    mtp_layers,
    of_main_head,
    without_mtp,
)
from mcore_logprobs.megatron.open_blocks import OpenBlocks
from mcore_logprobs.megatron.output_processor import logprob_output_processor
from mcore_logprobs.megatron.schedule_plan import carry_stats
from mcore_logprobs.ops.token_stats import TokenStats
from mcore_logprobs.sources.lazy import LazyLogits

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

# Of Megatron's dev branch: whether the output layer is asked for its own loss.
_OWN_HEAD_LOSS = "fuse_linear_cross_entropy"
# Attributes of a model that a patch takes the place of, of which there is always one.
_REPLACED = ("compute_language_model_loss", "_postprocess", "forward")


Logits = DeferredLogits | LazyLogits | Tensor


class _Absent:
    """Stands for an instance attribute that was not there: the class itself, as in a copy."""


def patch_of(language_model: object) -> HeadPatch | None:
    """The patch that is on a language model now, or None.

    Raises:
        ValueError: the model is a shallow copy, which shares the patch of another one.
    """
    own = vars(language_model)
    # By any of them: somebody may have put a loss of theirs over ours.
    found = map(_patch_behind, map(own.get, _REPLACED))
    patch = next((each for each in found if each is not None), None)
    if patch is not None and patch.model not in (None, language_model):
        raise ValueError(
            f"{type(language_model).__name__}: expected the patched model or a deep copy, got a "
            "shallow copy (copy.copy), whose patch is the other model's: copy it before it is "
            "patched, or use copy.deepcopy"
        )
    return patch


def _patch_behind(replaced: object) -> HeadPatch | None:
    owner = getattr(replaced, "__self__", None)
    return owner if isinstance(owner, HeadPatch) else None


class HeadPatch(DeferringHead):
    """One patched head.

    Attributes:
        automatic: the `fused` of a switched framework that put it on (`dropin.lazy_models`), so
            that a patch of the user's may take its place for as long as that one is on; else False.

    Bound methods of this object take the place of the model's and its output
    layer's, so that a deep copy of the model gets a patch of its own. It does not hold the model,
    which goes when its owner drops it, as an unpatched one does."""

    def __init__(self, model: LanguageModule, config: LogprobConfig) -> None:
        super().__init__(model.output_layer)
        self._model = Weak(model)
        self.method = HeadMethod(model)
        self.own_loss = own_loss(model)
        self.config, self.report = config, self._report_for(config)
        self.installed = False
        self.automatic: bool | str = False
        self._lent: tuple[LogprobConfig, OpenBlocks] | None = None  # the automatic patch's
        # What was replaced, by whether it is the model's and its name, and what was there.
        self._replaced: dict[tuple[bool, str], Any] = {}
        self.blocks = OpenBlocks(config)
        self._running: list[ForwardState] = []

    @property
    def model(self) -> LanguageModule:
        """The model, or None for the layer of a model that is gone."""
        return self._model()

    @property
    def layer(self) -> ColumnParallelLinear:
        """The layer that was patched, or that which the model has instead if it has dropped it."""
        layer = self._layer()
        return self.model.output_layer if layer is None else layer

    def _report_for(self, config: LogprobConfig) -> HeadReport:
        # Lazy logits are for calls without labels, which have no loss.
        if self.own_loss and config.output == "loss" and config.logits == "real":
            return HeadReport(False, loss_reason(self.model))
        return head_report(self.model, config)

    @property
    def can_lend(self) -> bool:
        """Whether this patch may serve other settings."""
        return bool(self.automatic) and self._lent is None

    def lend(self, config: LogprobConfig) -> None:
        """Serve other settings until the next `remove`."""
        self._lent = self.config, self.blocks
        self._settle(config)

    def serves(self, blocks: OpenBlocks) -> bool:
        """Whether this patch is on, with the settings that came with these blocks."""
        return self.installed and self.blocks is blocks

    def retire(self) -> None:
        """End an automatic patch; settings that stand in its place stay until `remove`."""
        self.automatic = False
        if self._lent is None:
            self.remove()
        self._lent = None

    @property
    def has_its_layer(self) -> bool:
        """Whether the model still has the output layer that was patched."""
        return self.model.output_layer is self._layer()

    def _settle(self, config: LogprobConfig) -> None:
        self.config, self.report = config, self._report_for(config)
        self.blocks = OpenBlocks(config)

    def check(self, config: LogprobConfig, logit_bias: Tensor | None = None) -> str:
        """Why the head would not be fused under these settings, or "".

        Raises:
            ValueError: `check_vocabulary`'s and, of a head that is to be fused, `check_head`'s;
                check_labels of a model whose labels cannot be checked.
        """
        if config.check_labels and not self.method.tokens:
            raise ValueError(f"check_labels: expected False for {self.method.lacking}")
        check_vocabulary(self.layer, config, logit_bias)
        report = self._report_for(config)
        if config == self.config:  # somebody may have put a hook on the layer since
            self.report = report
        if report.fusable and config.fused:
            check_head(self.layer, config)
        return report.reason

    @property
    def call(self) -> Call:
        """What the open `with` blocks ask of a call."""
        return self.blocks.call

    def install(self) -> None:
        model = self.model
        with_labels = _WithLabels(self)
        self._replace("compute_language_model_loss", self.compute_language_model_loss)
        self.reason = kind_reason(self.layer)
        if not self.reason:
            self._replace("forward", self.forward, of_model=False)
        if hasattr(model, "_scale_logits") and not scale_reason(model._scale_logits):
            self._replace("_scale_logits", self.scale_logits)
        self._replace(self.method.name, with_labels)
        if vars(model).get(_OWN_HEAD_LOSS) and not self.own_loss:
            # The output layer would be asked for its own loss, and the model's not be called.
            self._replace(_OWN_HEAD_LOSS, False)
        if hasattr(model, "build_schedule_plan"):
            self._replace("build_schedule_plan", self.build_schedule_plan)
        if self.config.fused and self.report.reason:
            say_unfused(self.report.reason, head_tp_group(self.layer))
        self.installed = True

    def check_removable(self) -> None:
        if self._lent is None:
            self._check_in_place()

    def _check_in_place(self) -> None:
        for of_model, name in self._replaced:
            owner = self._owner(of_model)
            if owner is None:
                continue
            present = vars(owner).get(name)
            ours = present is False if name == _OWN_HEAD_LOSS else _patch_behind(present) is self
            if not ours:
                raise ValueError(
                    f"{type(owner).__name__}.{name} was replaced by something else after the "
                    "patch; undo that first"
                )

    def remove(self) -> None:
        if self._lent is not None:
            config, blocks = self._lent
            self._settle(config)
            self.blocks, self._lent = blocks, None  # with what is open in them
        else:
            self._take_off()

    def _take_off(self) -> None:
        for (of_model, name), before in reversed(self._replaced.items()):
            owner = self._owner(of_model)
            attributes = {name: None} if owner is None else vars(owner)
            if before is _Absent:
                del attributes[name]
            else:
                attributes[name] = before
        self._replaced.clear()
        self.installed = False

    def follow_layer(self) -> None:
        """Go over to the output layer that the model has now, if it is another.

        Raises:
            ValueError: something else has replaced one of the patched attributes since.
        """
        if self.has_its_layer:
            return
        self._check_in_place()
        self._take_off()
        self._layer, self.reason, self.latest = Weak(self.model.output_layer), "", None
        self.report = self._report_for(self.config)
        self.install()

    def _owner(self, of_model: bool) -> object:
        """None for a layer that the model has dropped since."""
        return self.model if of_model else self._layer()

    def _replace(self, name: str, ours: object, *, of_model: bool = True) -> None:
        attributes = vars(self._owner(of_model))
        self._replaced[of_model, name] = attributes.get(name, _Absent)
        attributes[name] = ours

    def original(self, name: str) -> Callable[..., Any]:
        """The model's attribute as it would be without this patch."""
        before = self._replaced.get((True, name), _Absent)
        return getattr(type(self.model), name).__get__(self.model) if before is _Absent else before

    # What the model calls.

    @property
    def _without_labels(self) -> bool:
        return bool(self._running) and self._running[-1].labels is None

    @property
    def _wants_lazy(self) -> bool:
        """Whether a call without labels is to give lazy logits; a sampler's gets real ones."""
        return self.call.config.logits == "lazy" and not self._running[-1].samples

    def forward(self, *args: Any, **kwargs: Any) -> tuple[object, Tensor | None]:
        """In place of the output layer's."""
        if not self._running and (other := _patch_behind(self._replaced.get((False, "forward")))):
            return other.forward(*args, **kwargs)  # of another patched model with this layer
        if self._without_labels:
            self._running[-1].reached = True
        output = super().forward(*args, **kwargs)
        if self._running and self._running[-1].in_processor:
            require_fused(self.call.config, self.why_real(), head_tp_group(self.layer))
        if self.reason and self._without_labels and self._wants_lazy and self.model is not None:
            require_fused(self.call.config, self.reason, head_tp_group(self.layer))
        return output

    def _given_out(self, deferred: DeferredLogits) -> object:
        if not self._without_labels:
            return deferred
        self.latest = None
        return lazy_logits(deferred.head, self.call.config)

    def scale_logits(self, logits: DeferredLogits | Tensor) -> DeferredLogits | Tensor:
        """In place of `model._scale_logits`."""
        original = self.original("_scale_logits")
        return scale_deferred(logits, self.model.config, original)

    def build_schedule_plan(self, *args: object, **kwargs: object) -> object:
        """In place of the model's: a plan whose head runs with the blocks that are open now."""
        plan = self.original("build_schedule_plan")(*args, **kwargs)
        call, node = self.call, plan.post_process
        if node is not None and call.config.check_labels and call.draw is None:
            # Now: by the head's turn multi-token prediction has shifted the plan's ids.
            state, ignored = node.chunk_state, call.config.ignore_index
            labels = state.labels if call.target is None else call.target
            check_shifted(state.input_ids, labels, ignored, rows=call.rows)
            call = replace(call, labels_checked=True)
        around = functools.partial(self.blocks.open, lambda _: call)
        carry_stats(plan, around, mapped=call.mapped is not None)
        return plan

    @contextlib.contextmanager
    def running(self, running: ForwardState) -> Iterator[None]:
        self._running.append(running)
        try:
            yield
        finally:
            self._running.pop()
            self.latest = None  # hidden states are large

    def check_ended(self, call: Call, running: ForwardState) -> None:
        """After a forward, which ends in the patched output layer, and with labels in the loss.

        Raises:
            RuntimeError: it did not call the patched loss with its labels, and more was asked for
                than Megatron's loss: another result, or settings that it does not see.
            ValueError: the same under fused="require"; no labels, as only the loss could tell,
                although an open block needs them; no lazy logits under fused="require".
        """
        if running.reached:
            return
        if running.labels is None or running.labels is NOT_PASSED:
            if block := call.needs_labels:
                name = self.method.labels or "labels"
                raise ValueError(
                    f"inside PatchHandle.{block}: expected a call with {name}, got none"
                )
            if call.config.logits == "lazy" and not running.samples:
                why = self.why_real() if running.labels is None else self.method.unclear
                require_fused(call.config, why, head_tp_group(self.layer))
            return
        reason = (
            f"{type(self.model).__name__} computed its loss without calling the patched "
            "compute_language_model_loss, which something has replaced since or goes around"
        )
        if not call.wants_only_loss or call.unseen:
            raise RuntimeError(
                f"{reason}: expected output='loss' and no setting that Megatron's loss does not "
                "see, or a patch put on after that"
            )
        require_fused(call.config, reason, head_tp_group(self.layer))

    def _reason_against(self, weight: Tensor, gather: bool | None, other: dict[str, object]) -> str:
        reason = super()._reason_against(weight, gather, other)
        if not reason and self._without_labels:
            return lazy_reason(self.model, self.layer, weight)
        return reason

    def refusal(self) -> str:
        """Why this call's logits are not deferred, whatever the layer."""
        if self.model is None:
            return "its model is gone"
        if not self._running:
            return "the output layer was called outside the model's own forward"
        if self._running[-1].in_processor:
            return "an output_processor takes the logits"
        config = self.call.config
        if self._without_labels and not self._wants_lazy:
            return "there are no labels"
        if not config.fused:
            return "fused=False"
        return scale_reason(getattr(self.model, "_scale_logits", None)) or settings_reason(
            self.layer, config
        )

    def why_real(self) -> str:
        if self.model is not None and not self.has_its_layer:
            return (
                "the model's output layer is not the one that was patched (it has an adapter, or "
                "is another layer): patch the model again"
            )
        return super().why_real()

    def compute_language_model_loss(
        self, labels: Tensor, logits: Logits, *args: object, **kwargs: object
    ) -> TokenStats | Tensor:
        """In place of the model's: labels [b, s], logits [s, b, V/TP] or a handle."""
        original = self.original("compute_language_model_loss")
        call, tp_group = self.call, head_tp_group(self.layer)
        running = self._running[-1] if self._running else ForwardState(NOT_PASSED, NOT_PASSED)
        main = running.labels is NOT_PASSED or labels is running.labels
        running.reached |= main
        if main and not (self.own_loss and call.wants_only_loss):
            if self.own_loss and call.loses_own_loss:
                say_left_out(loss_reason(self.model), f"PatchHandle.{call.loses_own_loss}")
            return head_output(labels, logits, call, head=self, tp_group=tp_group)
        if main and call.unseen:  # a tensor of PatchHandle.options, which no other block took
            raise ValueError(unseen_reason(self.model, call.unseen))
        mask, ignored = running.loss_mask, ignored_by_own_loss(self.model.config)
        if isinstance(logits, LazyLogits) and not self.own_loss:
            return lazy_mtp_loss(
                labels, logits, call.config, tp_group=tp_group, loss_mask=mask, ignored=ignored
            )
        if isinstance(logits, DeferredLogits):
            known = logits.materialize() if self.own_loss else logits.computed()
            if known is None:
                return mtp_loss(
                    labels, logits, call.config, tp_group=tp_group, loss_mask=mask, ignored=ignored
                )
            logits = known
        else:
            check_gradient(logits, self.latest)
        if main:
            require_fused(call.config, loss_reason(self.model), tp_group)
        if not self.own_loss:  # Megatron's takes a shard, and would take whole rows for one
            own = own_columns(logits, tp_group, getattr(self.base, "output_size", None))
            # A copy: it writes over float32 logits, and the gathered ones are read again.
            logits = logits if own is logits else own.contiguous()
        return original(labels, logits, *args, **kwargs)


# In place of labels where tokens are drawn: the model's method asks for the loss.
_DRAWN = torch.empty(0, dtype=torch.int64)


class _WithLabels:
    """Calls the model's method that ends in the head, and knows meanwhile what it was given.

    The main head's loss is called with the labels' very tensor, multi-token prediction's heads with
    shifted copies of it (0.15 to 0.19).
    """

    def __init__(self, patch: HeadPatch) -> None:
        self.__self__ = patch  # as a bound method has it
        self.__signature__ = patch.method.signature

    def __call__(self, *args: object, **kwargs: object) -> object:
        patch = self.__self__
        method, call = patch.method, patch.call
        arguments = Arguments(method, args, kwargs)
        if arguments.ends_before_head:
            return arguments.call(patch.original(method.name))
        patch.blocks.check_recomputed()
        labels, tokens = _take_labels(arguments, method, call), arguments[method.tokens]
        checked = call.config.check_labels and call.draw is None and not call.labels_checked
        if checked:
            ignored = call.config.ignore_index
            check_shifted(tokens, labels, ignored, name=method.labels, rows=call.rows)
        mtp = "off" if call.draw is not None else call.config.mtp
        has_mtp = mtp_layers(patch.model) > 0
        if call.rows is not None and mtp == "keep" and has_mtp:
            raise ValueError(
                "rows: expected mtp='off' for a model with multi-token prediction, whose losses "
                "are of whole sequences (PatchHandle.options(mtp='off'))"
            )
        samples = arguments.has("inference_context") or arguments.has("inference_params")
        running = ForwardState(labels, arguments["loss_mask"], samples=samples)
        processed = arguments.has("output_processor")
        if processed:
            processor = arguments["output_processor"]
            ours = getattr(processor, "func", processor) is logprob_output_processor
            if ours:
                _check_not_voided(call, patch.config)
            arguments["output_processor"] = functools.partial(_process, processor, running)
        left_out = labels is not None and mtp == "off" and has_mtp
        if left_out:
            check_not_counted(patch.layer)
        if left_out and not arguments["mtp_in_postprocess"]:  # NOT_PASSED where there is none
            joined = arguments["hidden_states"]
            assert isinstance(joined, Tensor)
            arguments["hidden_states"] = of_main_head(patch.model, joined)
        cut = without_mtp(patch.model) if left_out else contextlib.nullcontext()
        with patch.running(running), cut:
            # Looked up here: dynamo, which breaks a graph before it, would find this wrapper again.
            output = arguments.call(patch.original(method.name))
        is_hidden = labels is NOT_PASSED or (labels is not None and tokens is NOT_PASSED)
        if checked and running.reached and is_hidden:
            raise ValueError(f"check_labels: expected False for {method.unclear}")
        if processed:
            if not running.reached:
                _check_not_voided(call, patch.config)
            return output
        patch.check_ended(call, running)
        if labels is None:
            return output
        output = patch.blocks.recomputable(output)
        return attach_backward_hooks(output, patch.model, patch.layer)


def _take_labels(arguments: Arguments, method: HeadMethod, call: Call) -> object:
    """The call's labels, or what an open block has in their place, which the call then gets too."""
    block = "targets" if call.draw is None else "sample"
    in_their_place = call.target if call.draw is None else _DRAWN
    if in_their_place is not None:
        if not method.labels:
            raise ValueError(
                f"inside PatchHandle.{block}: expected a model that takes labels, got "
                f"{method.lacking}"
            )
        if arguments.has(method.labels):
            raise ValueError(f"inside PatchHandle.{block}: expected a call without {method.labels}")
        arguments.labels = in_their_place
    if arguments.labels is None and (block := call.needs_labels):
        raise ValueError(
            f"inside PatchHandle.{block}: expected a call with {method.labels}, got none; pass "
            f"{method.labels}= or open PatchHandle.targets too"
        )
    return arguments.labels


def _check_not_voided(call: Call, config: LogprobConfig) -> None:
    """Raise a ValueError where an output processor goes around what open blocks ask for.

    Args:
        config: the patch's, which such a call may leave out.
    """
    changed = call.config != config or call.temperature is not None or call.logit_bias is not None
    asked = [*call.blocks, *(["options"] if changed else [])]
    if asked:
        raise ValueError(
            f"inside PatchHandle.{asked[0]}: expected no output_processor, or one that calls "
            "compute_language_model_loss, got one that goes around the patch"
        )


def _process(processor: object, running: ForwardState, **given: object) -> object:
    """Call an output processor, which may do anything with the logits that it asks for.

    `logprob_output_processor` asks for none here: it replaces the layer's forward for its call.
    """
    assert callable(processor)
    running.in_processor = True
    try:
        return processor(**given)
    finally:
        running.in_processor = False
