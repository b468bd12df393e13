"""Lazy logits of a head without Megatron, and what counts products and large tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_logprobs.collectives import all_gather_dim0
from mcore_logprobs.groups import resolve_tp_group
from mcore_logprobs.ops.linear_map import map_logits
from mcore_logprobs.ops.row_summary import row_summary
from mcore_logprobs.sources.lazy import LazyLogits
from mcore_logprobs.sources.lazy_head import LazyHead
from mcore_logprobs.sources.lora import LoRAInput

PRODUCTS = ("mm", "addmm", "bmm", "matmul", "linear", "dot", "mv", "baddbmm")


def lazy_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    lora: LoRAInput | None = None,
    tp_group: Any = None,
    sequence_parallel: bool = False,
    **settings: Any,
) -> LazyLogits:
    """`[s, b, V/TP]` of `hidden @ weight^T + bias` and a LoRA's part."""
    group = resolve_tp_group(tp_group)

    def product(hidden: Tensor, weight: Tensor) -> Tensor:
        if sequence_parallel:
            assert not torch.is_grad_enabled(), "for values alone here"
            hidden = all_gather_dim0(hidden, group)
        logits = hidden @ weight.t()
        if lora is not None:
            logits = logits + (hidden @ lora[0].t() * lora[2]) @ lora[1].t()
        return logits if bias is None else logits + bias

    head = LazyHead(
        hidden=hidden,
        weight=weight,
        bias=bias,
        dtype=hidden.dtype,
        sequence_parallel=sequence_parallel,
        tp_group=group,
        operands=lambda hidden, weight: (hidden, weight, lora),
        product=product,
        mapped=map_logits,
        summary=row_summary,
        into_main_grad=lambda weight: False,
        lora_tensors=() if lora is None else lora[:2],
        **settings,
    )
    return LazyLogits.of_head(head)


class Seen(TorchDispatchMode):
    """Counts products, and the numbers of the largest tensor that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func._schema.name.split("::")[1] in PRODUCTS
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not isinstance(x, LazyLogits) and x.device.type != "meta":
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return out
