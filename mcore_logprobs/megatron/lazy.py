"""From an output layer's call to `LazyLogits`: what the handle cannot know of Megatron."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.megatron.deferred import DeferredLogits
from mcore_logprobs.ops.linear_map import map_logits
from mcore_logprobs.ops.local_largest import local_largest
from mcore_logprobs.sources.head import HeadLogits
from mcore_logprobs.sources.lazy import LazyLogits
from mcore_logprobs.sources.lazy_rows import LazyHead


def lazy_logits(call: DeferredLogits, layer: Any, config: LogprobConfig) -> LazyLogits:
    """The logits `[s, b, V/TP]` of a deferred call of `layer`, as a tensor for anybody."""
    head = LazyHead(
        hidden=call.hidden,
        weight=call.weight,
        bias=call.bias,
        dtype=call.dtype,
        sequence_parallel=call.sequence_parallel,
        tp_group=call.tp_group,
        operands=call.operands,
        product=call.compute,
        materialized=materialized,
        largest=local_largest,
        into_main_grad=partial(into_main_grad, layer),
        lora_tensors=() if call.lora is None else (call.lora.a, call.lora.b),
        call_layer=call.call_head,
        output_dtype=call.output_dtype,
        logits_dtype=config.logits_dtype,
        chunk_size=config.chunk_size,
        backend=config.backend,
        saved_bytes=config.saved_bytes,
        require=config.fused == "require",
    )
    return LazyLogits.of_head(head)


def materialized(source: HeadLogits, dtype: torch.dtype) -> Tensor:
    """All logits `[m, V/TP]` of a source, in a dtype."""
    # A copy: what a tile's function gives may be the tile's own memory.
    return map_logits(source, partial(_cast, dtype))


def _cast(dtype: torch.dtype, logits: Tensor) -> Tensor:
    return logits.to(dtype, copy=True)


def into_main_grad(layer: Any, weight: Tensor) -> bool:
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
