"""From a head's (deferred) logits and Megatron's labels to a TokenStats or a loss."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.groups import group_rank, group_size
from mcore_logprobs.logits.token_stats import TokenStats
from mcore_logprobs.megatron.deferred import DeferredLogits


def head_output(
    labels: Tensor,  # [b, s]
    logits: Tensor | DeferredLogits,  # [s, b, V/TP]
    config: LogprobConfig,
    *,
    layer: Any,
    tp_group: Any,
) -> TokenStats | Tensor:
    """What a patched model returns: a TokenStats of [b, s] tensors, or the [b, s] loss.

    `layer` is the output layer that the logits come from. A handle takes the fused path, real
    logits the operations on logits. Collectives: those of `linear_token_stats` or
    `vocab_parallel_token_stats` over TP.
    """
    target = labels.transpose(0, 1).contiguous()  # [s, b]
    common: dict[str, Any] = {
        "entropy": config.entropy,
        "target_rank": config.target_rank,
        "tp_group": tp_group,
        "temperature": config.temperature,
        "vocab_size": config.vocab_size,
        "ignore_index": config.ignore_index,
        "label_smoothing": config.label_smoothing,
        "softcap": config.softcap,
        "chunk_size": config.chunk_size,
        "backend": config.backend,
    }
    if isinstance(logits, DeferredLogits):
        from mcore_logprobs.fused.token_stats import linear_token_stats

        # Megatron scales the product with its bias, the operation the product alone.
        bias = logits.bias
        if bias is not None and logits.scale != 1.0:
            bias = bias * logits.scale
        stats = linear_token_stats(
            logits.hidden,
            logits.weight,
            target,
            bias=bias,
            logit_scale=logits.scale,
            sequence_parallel=logits.sequence_parallel,
            logits_dtype=config.logits_dtype,
            gradient_accumulation_fusion=(
                layer.gradient_accumulation_fusion and logits.weight.requires_grad
            ),
            **common,
        )
    else:
        from mcore_logprobs.logits.token_stats import vocab_parallel_token_stats

        shard = _own_columns(logits, tp_group, getattr(layer, "output_size", None))
        stats = vocab_parallel_token_stats(shard, target, **common)
    stats = _batch_first(stats)
    return stats if config.output == "stats" else stats.loss


def plain_loss_config(config: LogprobConfig) -> LogprobConfig:
    """For multi-token prediction's heads: Megatron's own loss, by the same means as the main head.

    The softcap stays, since it belongs to the model; temperature, smoothing and masks do not.
    """
    return LogprobConfig(
        output="loss",
        fused=config.fused,
        softcap=config.softcap,
        logits_dtype=config.logits_dtype,
        chunk_size=config.chunk_size,
        backend=config.backend,
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


def _batch_first(stats: TokenStats) -> TokenStats:
    def turn(x: Any) -> Any:
        return None if x is None else x.transpose(0, 1).contiguous()

    return dataclasses.replace(
        stats, **{f.name: turn(getattr(stats, f.name)) for f in dataclasses.fields(stats)}
    )
