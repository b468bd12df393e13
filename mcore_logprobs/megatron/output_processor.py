"""The official hook, for those who want no patch: `GPTModel.forward(output_processor=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.megatron.calls import Call, check_shifted
from mcore_logprobs.megatron.deferred import DeferredLogits, DeferringHead, in_place, scale_deferred
from mcore_logprobs.megatron.fsdp import attach_backward_hooks
from mcore_logprobs.megatron.head_loss import head_output
from mcore_logprobs.megatron.heads import (
    check_head,
    head_tp_group,
    kind_reason,
    scale_reason,
    settings_reason,
)
from mcore_logprobs.ops.token_stats import TokenStats

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig


def logprob_output_processor(
    *,
    hidden_states: Tensor,
    output_layer: ColumnParallelLinear,
    output_weight: Tensor | None = None,
    labels: Tensor | None = None,
    input_ids: Tensor | None = None,
    runtime_gather_output: bool | None = None,
    context: LogprobConfig | None = None,
    scale_logits: Any = None,
    config: TransformerConfig | None = None,
    **unused: object,
) -> TokenStats | Tensor:
    """Megatron's output processor (0.18 and later): what a patched model returns, without a patch.

        stats = model(ids, positions, mask, labels=labels,
                      output_processor=logprob_output_processor,
                      output_processor_context=LogprobConfig(entropy=True))

    Shape: hidden_states [s, b, h] ([s/TP, b, h] under sequence parallelism), labels [b, s]; a
    TokenStats of [b, s] tensors or a [b, s] loss. With labels=None: logits [b, s, V/TP].

    `context` is a `LogprobConfig`; None reads the model's config. The output layer is called as a
    module, so that its hooks run. Under the combined 1F1B schedule (`build_schedule_plan`) with
    only output="loss"; a patched model gives its TokenStats there, too. In a call of a patched
    model the patch's settings do not count, and in a block of its `PatchHandle` the call raises.

    Raises:
        ValueError: a context that is not a LogprobConfig, or that a processor cannot honor:
            logits="lazy" in a call without labels, mtp="off" of a model with multi-token
            prediction; a head that cannot be fused under fused="require"; labels that check_labels
            refuses; those of the operations.
    """
    if context is not None and not isinstance(context, LogprobConfig):
        raise ValueError(
            f"output_processor_context: expected a LogprobConfig or None, got {type(context)}"
        )
    if context is None:
        context = LogprobConfig.from_transformer_config(config)
    if context.mtp == "off" and getattr(config, "mtp_num_layers", None):
        raise ValueError("mtp: expected 'keep' for an output processor, got 'off': patch the model")
    if context.logits == "lazy" and labels is None:
        raise ValueError(
            "logits: expected 'real' for an output processor without labels, got 'lazy': patch the "
            "model"
        )
    if context.check_labels:
        # In a schedule plan multi-token prediction has shifted them by now.
        mtp = getattr(config, "mtp_num_layers", None)
        shifted = mtp and getattr(config, "overlap_moe_expert_parallel_comm", False)
        check_shifted(None if shifted else input_ids, labels, context.ignore_index)
    call = {"weight": output_weight, "runtime_gather_output": runtime_gather_output}
    scale = scale_logits or (lambda logits: logits)
    if labels is None:
        return scale(output_layer(hidden_states, **call)[0]).transpose(0, 1).contiguous()

    head = _Head(output_layer, scale_logits, context)
    logits = scale_deferred(_call(head, hidden_states, call), config, scale)
    if isinstance(logits, DeferredLogits):
        check_head(output_layer, context)
    tp_group = head_tp_group(output_layer)
    output = head_output(labels, logits, Call(context), head=head, tp_group=tp_group)
    return attach_backward_hooks(output, output_layer, output_layer, output_weight)


class _Head(DeferringHead):
    """What stands in for the output layer's forward in one call."""

    def __init__(self, layer: nn.Module, scale_logits: object, context: LogprobConfig) -> None:
        super().__init__(layer)
        self._scale_logits, self._context = scale_logits, context

    def refusal(self) -> str:
        if not self._context.fused:
            return "fused=False"
        return scale_reason(self._scale_logits) or settings_reason(self.layer, self._context)


def _call(
    head: DeferringHead, hidden: Tensor, call: Mapping[str, object]
) -> DeferredLogits | Tensor:
    """Call the module, hooks and all, with a forward that returns a handle for this once."""
    layer = head.layer
    head.reason = kind_reason(layer)
    if head.reason:
        return layer(hidden, **call)[0]
    with in_place(layer, head.forward):
        return layer(hidden, **call)[0]
