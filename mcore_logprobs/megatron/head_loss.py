"""From a head's (deferred) logits and Megatron's labels to a TokenStats or a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.fused.loss_function import open_denominator, sum_of_losses
from mcore_logprobs.fused.map import flat_results, linear_map
from mcore_logprobs.fused.policy_loss import linear_policy_loss
from mcore_logprobs.fused.sampling import linear_filtered_stats
from mcore_logprobs.fused.token_stats import linear_token_stats
from mcore_logprobs.groups import group_rank, group_size
from mcore_logprobs.logits.sampling import vocab_parallel_sampling_logprobs
from mcore_logprobs.logits.token_stats import TokenStats, vocab_parallel_token_stats
from mcore_logprobs.megatron.calls import Call, PerToken, PolicyLoss
from mcore_logprobs.megatron.deferred import DeferredLogits, DeferringHead
from mcore_logprobs.megatron.heads import require_fused

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

    A handle takes the fused path, real logits the operations on logits: for `reason`, if their
    caller knows it. `head` is what stands in for the output layer's forward. Collectives: those of
    the operation over TP.

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
    if known is not None:
        require_fused(config, reason, tp_group)

    options = _options(config, tp_group) | {
        "entropy": config.entropy,
        "target_rank": config.target_rank,
        "sum_pi_squared": config.sum_pi_squared,
        "temperature": config.temperature,
        "vocab_size": config.vocab_size,
        "ignore_index": config.ignore_index,
        "label_smoothing": config.label_smoothing,
        "softcap": config.softcap,
    }
    target = labels.transpose(0, 1).contiguous()  # [s, b]
    if call.temperature is not None:
        options["temperature"] = _sequence_first(call.temperature, labels)
    if known is not None:
        known = _own_columns(known, tp_group, getattr(head.base, "output_size", None))
    if call.mapped is not None:
        return _mapped(call.mapped, known, logits, labels, config, head.base, tp_group)
    tensors = call.policy.sequence_first(labels) if call.policy else ()
    if config.top_k is not None or config.top_p < 1.0:
        stats = _filtered(known, logits, target, config, head.base, options)
        if call.policy:
            keep = target != config.ignore_index
            stats = _with_policy_loss(stats, keep, call.policy, tensors)
    elif known is None:
        assert isinstance(logits, DeferredLogits)
        options |= {"compact": config.compact, "logits_dtype": config.logits_dtype}
        stats = _from_hidden(logits, target, call.policy, tensors, head.base, options)
    else:
        stats = vocab_parallel_token_stats(known, target, **options)
        if call.policy:
            keep = target != config.ignore_index
            stats = _with_policy_loss(stats, keep, call.policy, tensors)
    stats = stats.map(lambda x: x.transpose(0, 1).contiguous())
    return stats if config.output == "stats" or call.policy else stats.loss


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
    options = _options(config, tp_group) | {
        "ignore_index": None,
        "logits_dtype": config.logits_dtype,
    }
    stats = _from_hidden(logits, target.masked_fill(outside, 0), None, (), head.base, options)
    wants_top = (
        bool(outside.any()) if outside.device.type == "cpu" else not isinstance(loss_mask, Tensor)
    )
    top: Tensor | float = 0.0
    if wants_top:
        mine = logits.largest().values.to(stats.lse.dtype)
        top = all_gather_stack(mine, tp_group).amax(0)
    loss = torch.where(outside, stats.lse - top, -stats.logprobs)
    return loss.transpose(0, 1).contiguous()


def _filtered(
    known: Tensor | None,
    logits: Any,
    target: Tensor,
    config: LogprobConfig,
    layer: Any,
    options: dict[str, Any],
) -> TokenStats:
    """Log-probabilities under top_k and top_p, the other statistics of the whole distribution.

    `[s, b]` tensors, from real logits or from hidden states.
    """
    filters: dict[str, Any] = {"top_k": config.top_k, "top_p": config.top_p}
    # LogprobConfig refuses both beside a filter.
    refused = ("label_smoothing", "invariant_segments")
    options = {k: v for k, v in options.items() if k not in refused}
    if known is None:
        options |= {"compact": config.compact, "logits_dtype": config.logits_dtype}

        def in_head(hidden: Tensor, weight: Tensor, head: dict[str, Any]) -> TokenStats:
            return linear_filtered_stats(hidden, weight, target, **filters, **(options | head))

        return _stats_in_head(logits, layer, in_head)
    if options["softcap"] is not None:
        known = torch.tanh(known.float() / options["softcap"]) * options["softcap"]
    options = {k: v for k, v in options.items() if k != "softcap"}
    sampled = {"tp_group", "temperature", "vocab_size", "ignore_index", "chunk_size", "backend"}
    filters |= {k: v for k, v in options.items() if k in sampled}
    whole = vocab_parallel_token_stats(known, target, **options)
    return replace(whole, logprobs=vocab_parallel_sampling_logprobs(known, target, **filters))


def _mapped(
    mapped: PerToken,
    known: Tensor | None,
    logits: Any,
    labels: Tensor,
    config: LogprobConfig,
    layer: Any,
    tp_group: Any,
) -> Any:
    """What `PatchHandle.map` gives: the function's results, `[b, s, ...]` each."""
    tensors = mapped.sequence_first(labels)
    keep = (labels != config.ignore_index).transpose(0, 1).contiguous()
    if known is None:
        structure: list[Any] = []

        def in_head(hidden: Tensor, weight: Tensor, head: dict[str, Any]) -> Any:
            results = linear_map(
                hidden,
                weight,
                mapped.function,
                *tensors,
                mask=keep,
                compact=config.compact,
                softcap=config.softcap,
                logits_dtype=config.logits_dtype,
                chunk_size=config.chunk_size,
                **head,
            )
            flat, spec = pytree.tree_flatten(results)
            structure.append(spec)
            return tuple(flat)

        flat = _with_head(logits, layer, in_head)
        found = pytree.tree_unflatten(list(flat), structure[-1])
    else:
        z = known.float() if known.dtype != torch.float64 else known
        if config.softcap is not None:
            z = torch.tanh(z / config.softcap) * config.softcap
        rows = (t.reshape(-1, *t.shape[2:]) for t in tensors)
        z = z.reshape(-1, z.shape[-1])
        found = pytree.tree_unflatten(*flat_results(mapped.function(z, *rows), z.shape[0]))

        def place(x: Tensor) -> Tensor:
            x = x.reshape(*keep.shape, *x.shape[1:])
            # Not 0, with which a bool would become an integer.
            return torch.where(
                keep.view(*keep.shape, *(1,) * (x.dim() - 2)), x, torch.zeros_like(x)
            )

        found = pytree.tree_map_only(Tensor, place, found)
    return pytree.tree_map_only(Tensor, lambda x: x.transpose(0, 1).contiguous(), found)


def _sequence_first(temperature: Tensor, labels: Tensor) -> Tensor:
    """A temperature that broadcasts to labels' `[b, s]`, as `[s, b]`."""
    try:
        return temperature.expand(labels.shape).transpose(0, 1)
    except RuntimeError as error:
        raise ValueError(
            f"temperature: expected a tensor that broadcasts to labels' {tuple(labels.shape)}, got "
            f"shape {tuple(temperature.shape)}"
        ) from error


def _options(config: LogprobConfig, tp_group: Any) -> dict[str, Any]:
    return {
        "tp_group": tp_group,
        "chunk_size": config.chunk_size,
        "backend": config.backend,
        "invariant_segments": config.invariant_segments,
    }


def _from_hidden(
    logits: DeferredLogits,
    target: Tensor,
    policy: PolicyLoss | None,
    tensors: tuple[Tensor, ...],
    layer: Any,
    options: dict[str, Any],
) -> TokenStats:
    """By the fused path; `[s, b]` tensors."""

    def in_head(hidden: Tensor, weight: Tensor, head: dict[str, Any]) -> TokenStats:
        head = options | head
        if policy is None:
            return linear_token_stats(hidden, weight, target, **head)
        loss, stats = linear_policy_loss(
            hidden,
            weight,
            target,
            policy.function,
            *tensors,
            denominator=policy.denominator,
            **head,
        )
        return replace(stats, policy_loss=loss)

    return _stats_in_head(logits, layer, in_head)


def _stats_in_head(logits: DeferredLogits, layer: Any, fn: Callable[..., TokenStats]) -> TokenStats:
    """As `_with_head`, of a function that gives a TokenStats."""

    def in_head(*args: Any) -> tuple[Tensor | None, ...]:
        stats = fn(*args)
        return tuple(getattr(stats, f.name) for f in fields(stats))

    return TokenStats(*_with_head(logits, layer, in_head))  # type: ignore[arg-type]


def _with_head(
    logits: DeferredLogits, layer: Any, fn: Callable[..., tuple[Tensor | None, ...]]
) -> tuple[Tensor | None, ...]:
    """`fn(hidden, weight, the head's keywords)` where the whole weight of this rank is there."""
    # Megatron scales the product with its bias, the operation the product alone.
    bias = logits.bias
    if bias is not None and logits.scale != 1.0:
        bias = bias * logits.scale

    def in_head(hidden: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        head = {
            "tp_group": logits.tp_group,
            "bias": bias,
            "lora": None if logits.lora is None else logits.lora.whole(),
            "logit_scale": logits.scale,
            "sequence_parallel": logits.sequence_parallel,
            "gradient_accumulation_fusion": _into_main_grad(layer, weight),
        }
        return fn(hidden, weight, head)

    return logits.with_head(in_head)


def _into_main_grad(layer: Any, weight: Tensor) -> bool:
    """Whether the weight's gradient goes into `weight.main_grad`, as the layer's own would.

    Not without gradients, as a reference model has no buffers; nor where FSDP makes the buffer when
    the gradient arrives, which it takes from autograd as well.
    """
    return bool(
        layer.gradient_accumulation_fusion
        and torch.is_grad_enabled()
        and weight.requires_grad
        and isinstance(getattr(weight, "main_grad", None), Tensor)
        and not hasattr(weight, "__fsdp_param__")
    )


def _with_policy_loss(
    stats: TokenStats, keep: Tensor, policy: PolicyLoss, tensors: tuple[Tensor, ...]
) -> TokenStats:
    """What `linear_policy_loss` gives, from statistics of real logits."""
    total = sum_of_losses(
        policy.function,
        stats.logprobs.reshape(-1),
        None if stats.entropy is None else stats.entropy.reshape(-1),
        tuple(t.reshape(-1, *t.shape[2:]) for t in tensors),
        keep=keep.reshape(-1),
        denominator=open_denominator(policy.denominator, keep.device),
    )
    return replace(stats.detach(), policy_loss=total.to(stats.logprobs.dtype))


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
