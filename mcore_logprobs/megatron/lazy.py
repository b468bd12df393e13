"""From an output layer's call to `LazyLogits`: what the handle cannot know of Megatron."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mcore_logprobs.checks import autocast_enabled
from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.groups import resolve_tp_group
from mcore_logprobs.megatron.adapters import HeadLoRA, base_layer, head_lora
from mcore_logprobs.megatron.ddp import accumulated, into_main_grad
from mcore_logprobs.megatron.fsdp import is_sharded
from mcore_logprobs.megatron.heads import reshards_after_forward
from mcore_logprobs.ops.linear_map import map_logits
from mcore_logprobs.ops.row_summary import row_summary
from mcore_logprobs.sources.lazy import LazyLogits
from mcore_logprobs.sources.lazy_head import LazyHead
from mcore_logprobs.sources.lora import LoRAInput

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear


def call_of(
    layer: nn.Module,
    hidden: Tensor,
    weight: Tensor,
    product: Callable[[Tensor, Tensor], Tensor],
    call_layer: Callable[[Callable[[Tensor, Tensor], object]], object],
) -> LazyHead:
    """A call of an output layer that is not made.

    Args:
        layer: a ColumnParallelLinear, or a LoRA around one.
        product, call_layer: as in `LazyHead`; the latter is for a weight that FSDP shards again.
    """
    base, lora = base_layer(layer), head_lora(layer)
    training = lora is not None and layer.training  # where a dropout counts
    output_dtype = getattr(base, "output_dtype", None)
    cast = _autocast_dtype(hidden)

    def under_autocast(hidden: Tensor, weight: Tensor) -> Tensor:
        # As in the call: autocast may have begun or ended by the time the logits are read.
        if _autocast_dtype(hidden) == cast:
            return product(hidden, weight)
        with torch.autocast(hidden.device.type, dtype=cast, enabled=cast is not None):
            return product(hidden, weight)

    def as_in_call() -> bool:
        now = head_lora(layer)
        if now is None or lora is None:
            return now is lora
        same = now.a is lora.a and now.b is lora.b and now.scale == lora.scale
        return same and layer.training == training

    return LazyHead(
        hidden=hidden,
        weight=weight,
        bias=None if base.skip_bias_add else base.bias,
        dtype=output_dtype or cast or hidden.dtype,
        sequence_parallel=base.sequence_parallel,
        tp_group=resolve_tp_group(getattr(base, "tp_group", None)),
        operands=partial(_operands, base, lora, cast),
        product=under_autocast,
        as_in_call=as_in_call,
        mapped=map_logits,
        summary=row_summary,
        into_main_grad=partial(into_main_grad, base),
        lora_tensors=() if lora is None else (lora.a, lora.b),
        call_layer=call_layer if reshards_after_forward(layer) else None,
        output_dtype=output_dtype,
    )


def lazy_reason(model: nn.Module, layer: nn.Module, weight: Tensor) -> str:
    """Why a call that could be deferred cannot give lazy logits, or ""."""
    if is_sharded(weight, model, layer, base_layer(layer)):
        return "FSDP shards its weight, which lazy logits need outside the model's forward"
    lora = head_lora(layer)
    if lora is not None and not all(type(x) is nn.Parameter for x in (lora.a, lora.b)):
        return "several adapters are active on it, which lazy logits cannot follow"
    return ""


def lazy_logits(head: LazyHead, config: LogprobConfig) -> LazyLogits:
    """The logits `[s, b, V/TP]` of a call that was not made, as a tensor for anybody."""
    settings = replace(
        head,
        logits_dtype=config.logits_dtype,
        chunk_size=config.chunk_size,
        backend=config.backend,
        saved_bytes=config.saved_bytes,
        require=config.fused == "require",
    )
    return LazyLogits.of_head(settings)


def _operands(
    base: ColumnParallelLinear,
    lora: HeadLoRA | None,
    dtype: torch.dtype | None,
    hidden: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor, LoRAInput | None]:
    """(hidden, weight, LoRA) as they are multiplied: all of it is cast to dtype, autocast's.

    Collectives: with a LoRA one all-gather of `[r/TP, h]` over TP.
    """
    gathered = None if lora is None else lora.whole()
    if dtype is None:
        return hidden, weight, gathered
    cast = gathered and (gathered[0].to(dtype), gathered[1].to(dtype), gathered[2])
    if weight.dtype != dtype:
        weight = accumulated(base, weight, dtype)
    return hidden.to(dtype), weight, cast


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """What autocast casts a product's operands to now; None where it leaves them."""
    device = hidden.device.type
    if hidden.dtype == torch.float64 or not autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
