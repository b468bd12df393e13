"""From a head's (deferred) logits and Megatron's labels to a TokenStats or a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.groups import group_rank, group_size
from mcore_logprobs.megatron.calls import Call
from mcore_logprobs.megatron.deferred import DeferredLogits, DeferringHead
from mcore_logprobs.megatron.heads import require_fused
from mcore_logprobs.ops.head import head_logits
from mcore_logprobs.ops.linear_map import map_logits
from mcore_logprobs.ops.policy_loss import loss_of_stats, policy_loss
from mcore_logprobs.ops.result import TokenStats
from mcore_logprobs.ops.sampling import filtered_stats
from mcore_logprobs.ops.source import given_logits
from mcore_logprobs.ops.token_stats import token_stats

_TOUCHED = "something computed the logits before the loss did (a logger, an in-place operation)"
_REPLACED = (
    "the logits changed between the output layer and the loss (an adapter around the layer, or the "
    "model's own code)"
)


def head_output(
    labels: Tensor,  # [b, s]
    logits: Tensor | DeferredLogits,  # [s, b, V/TP]
    call: Call,
    *,
    head: DeferringHead,
    tp_group: Any,
    reason: str = "",
) -> Any:
    """What a patched model returns: a TokenStats of [b, s] tensors, or the [b, s] loss.

    Inside `PatchHandle.map`, what its function gives.

    Deferred logits are one source of logits, real ones another: for `reason`, if their caller knows
    it. `head` is what stands in for the output layer's forward. Collectives: those of the operation
    over TP.

    Raises:
        ValueError: real logits under fused="require"; those of the operations.
        RuntimeError: logits that have lost the gradient of what they were computed from.
    """
    config = call.config
    b_s = torch.Size((logits.shape[1], logits.shape[0]))
    if labels.shape != b_s:
        raise ValueError(f"labels: expected shape {tuple(b_s)}, got {tuple(labels.shape)}")
    if isinstance(logits, DeferredLogits):
        known = logits.computed()
        if known is not None:
            reason = reason or _TOUCHED
        elif not config.fused:
            known = logits.materialize()
    else:
        known = logits
        reason = reason or head.reason or _REPLACED
        check_gradient(logits, head.latest)
    options: dict[str, Any] = {
        "tp_group": tp_group,
        "softcap": config.softcap,
        "chunk_size": config.chunk_size,
    }
    if call.mapped is None:
        options |= {
            "backend": config.backend,
            "invariant_segments": config.invariant_segments,
            "vocab_size": config.vocab_size,
            "temperature": config.temperature
            if call.temperature is None
            else _sequence_first(call.temperature, labels),
        }
    if known is not None:
        require_fused(config, reason, tp_group)
        known = _own_columns(known, tp_group, getattr(head.base, "output_size", None))
        found = _output(given_logits(known, **options), labels, call)
    else:
        assert isinstance(logits, DeferredLogits)
        filtered = config.top_k is not None or config.top_p < 1.0
        options |= {
            "compact": config.compact,
            "logits_dtype": config.logits_dtype,
            "may_round": call.mapped is None and not filtered,
        }
        found = _in_head(logits, head.base, options, lambda source: _output(source, labels, call))
    if isinstance(found, TokenStats):
        stats = found.map(lambda x: x.transpose(0, 1).contiguous())
        return stats if config.output == "stats" or call.policy or call.mapped else stats.loss
    return pytree.tree_map_only(Tensor, lambda x: x.transpose(0, 1).contiguous(), found)


def _output(source: Any, labels: Tensor, call: Call) -> Any:
    """The call's result as `[s, b, ...]` tensors."""
    config, policy = call.config, call.policy
    target = labels.transpose(0, 1).contiguous()
    if call.mapped is not None:
        tensors = call.mapped.sequence_first(labels)
        keep = target != config.ignore_index
        return map_logits(source, call.mapped.function, *tensors, mask=keep)
    wanted: dict[str, Any] = {
        "entropy": config.entropy,
        "target_rank": config.target_rank,
        "sum_pi_squared": config.sum_pi_squared,
        "ignore_index": config.ignore_index,
    }
    if config.top_k is not None or config.top_p < 1.0:
        stats = filtered_stats(source, target, top_k=config.top_k, top_p=config.top_p, **wanted)
        if policy is None:
            return stats
        keep = target != config.ignore_index
        tensors = policy.sequence_first(labels)
        loss = loss_of_stats(stats, keep, policy.function, *tensors, denominator=policy.denominator)
        return replace(stats.detach(), policy_loss=loss)
    wanted["label_smoothing"] = config.label_smoothing
    if policy is None:
        return token_stats(source, target, **wanted)
    tensors = policy.sequence_first(labels)
    loss, stats = policy_loss(
        source, target, policy.function, *tensors, denominator=policy.denominator, **wanted
    )
    return replace(stats, policy_loss=loss)


def mtp_loss(
    labels: Tensor,  # [b, s]
    logits: DeferredLogits,
    config: LogprobConfig,
    *,
    head: DeferringHead,
    tp_group: Any,
    loss_mask: Any,
) -> Tensor:
    """Megatron's own loss for a multi-token prediction head, [b, s], from hidden states.

    Equal to `vocab_parallel_cross_entropy` for every label: that knows no ignore_index, and gives a
    label outside the vocabulary the loss lse - max, whose gradient is that of lse. The maximum is
    for the log alone; where a loss mask comes with the call it is left out on a GPU, since the
    mask is there to drop such labels, and finding them costs a pass over the vocabulary.

    Collectives: those of `linear_token_stats`; with the maximum one all-gather of [s, b] over TP.
    """
    target = labels.transpose(0, 1).contiguous()  # [s, b]
    columns = logits.weight.shape[0] * group_size(tp_group)
    outside = (target < 0) | (target >= columns)
    options = {
        "tp_group": tp_group,
        "chunk_size": config.chunk_size,
        "backend": config.backend,
        "invariant_segments": config.invariant_segments,
        "logits_dtype": config.logits_dtype,
        "may_round": True,
    }
    inside = target.masked_fill(outside, 0)
    stats = _in_head(
        logits, head.base, options, lambda source: token_stats(source, inside, ignore_index=None)
    )
    wants_top = (
        bool(outside.any()) if outside.device.type == "cpu" else not isinstance(loss_mask, Tensor)
    )
    top: Tensor | float = 0.0
    if wants_top:
        mine = logits.largest().values.to(stats.lse.dtype)
        top = all_gather_stack(mine, tp_group).amax(0)
    loss = torch.where(outside, stats.lse - top, -stats.logprobs)
    return loss.transpose(0, 1).contiguous()


def _sequence_first(temperature: Tensor, labels: Tensor) -> Tensor:
    """A temperature that broadcasts to labels' `[b, s]`, as `[s, b]`."""
    try:
        return temperature.expand(labels.shape).transpose(0, 1)
    except RuntimeError as error:
        raise ValueError(
            f"temperature: expected a tensor that broadcasts to labels' {tuple(labels.shape)}, got "
            f"shape {tuple(temperature.shape)}"
        ) from error


def _in_head(
    logits: DeferredLogits, layer: Any, options: dict[str, Any], fn: Callable[[Any], Any]
) -> Any:
    """`fn(source)`, a pytree of tensors, where the whole weight of this rank is there."""
    # Megatron scales the product with its bias, the operation the product alone.
    bias = logits.bias
    if bias is not None and logits.scale != 1.0:
        bias = bias * logits.scale
    structure: list[Any] = []

    def with_weight(hidden: Tensor, weight: Tensor) -> tuple[Any, ...]:
        hidden, weight, lora = logits.operands(hidden, weight)
        given = options
        if logits.output_dtype is not None and hidden.dtype != torch.float64:
            given = options | {"logits_dtype": logits.output_dtype}
        source = head_logits(
            hidden,
            weight,
            bias=None if bias is None else bias.to(hidden.dtype),
            lora=lora,
            logit_scale=logits.scale,
            sequence_parallel=logits.sequence_parallel,
            gradient_accumulation_fusion=_into_main_grad(layer, weight),
            **(given | {"tp_group": logits.tp_group}),
        )
        flat, spec = pytree.tree_flatten(fn(source))
        structure.append(spec)
        return tuple(flat)

    return pytree.tree_unflatten(list(logits.with_head(with_weight)), structure[-1])


def _into_main_grad(layer: Any, weight: Tensor) -> bool:
    """Whether the weight's gradient goes into `weight.main_grad`, as the layer's own would.

    Not without gradients, as a reference model has no buffers; not a weight that autocast has cast;
    nor where FSDP makes the buffer when the gradient arrives, which it takes from autograd as well.
    """
    return bool(
        layer.gradient_accumulation_fusion
        and torch.is_grad_enabled()
        and weight.requires_grad
        and isinstance(getattr(weight, "main_grad", None), Tensor)
        and not hasattr(weight, "__fsdp_param__")
    )


def check_gradient(logits: Tensor, latest: DeferredLogits | None) -> None:
    """Real logits that reached the loss must carry the gradient of the deferred ones."""
    if latest is None or not torch.is_grad_enabled():
        return
    inputs = [latest.hidden, latest.weight, *(latest.lora[:2] if latest.lora else ())]
    trains = any(x.requires_grad for x in inputs)
    if trains and not (logits.requires_grad and latest.is_ancestor_of(logits)):
        raise RuntimeError(
            "the logits lost their gradient between the patched output layer and the loss: they "
            "went through a torch.autograd.Function or no_grad, which see no gradient in deferred "
            "logits. Patch with LogprobConfig(fused=False)"
        )


def _own_columns(logits: Tensor, tp_group: Any, padded_vocab_size: int | None) -> Tensor:
    """This rank's vocabulary shard of logits that a head has gathered; others as they are.

    The gather's backward takes each rank's own columns of the gradient, and only those are filled.
    """
    size = group_size(tp_group)
    if size == 1 or padded_vocab_size is None or logits.shape[-1] != padded_vocab_size:
        return logits
    width = padded_vocab_size // size
    return logits.narrow(-1, group_rank(tp_group) * width, width)
