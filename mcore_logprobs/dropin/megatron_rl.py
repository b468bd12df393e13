"""Megatron-LM's own RL: `megatron.rl.rl_utils`.

    import mcore_logprobs.dropin.megatron_rl as ours
    rl_utils.get_logprobs = ours.get_logprobs

Upstream gathers the whole vocabulary on every TP rank and loops over the batch; here no logits are
held at all.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import mcore_logprobs as ours
from mcore_logprobs.dropin._common import ONE_PROCESS, grad_unless, or_one_process
from mcore_logprobs.dropin.nemo_context import IGNORED, next_tokens

__all__ = ["get_logprobs", "selective_log_softmax"]


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Whole-vocabulary logits `[..., V]`, ids `[...]` -> float32 log-probabilities `[...]`.

    Ids are used as they are (not shifted). Upstream's result has the logits' dtype and is formed
    in it; this one is float32, without a float32 copy of the logits.
    """
    return ours.vocab_parallel_logprobs(logits, index, tp_group=ONE_PROCESS)


def get_logprobs(
    model: Any,
    tokens: Tensor,
    position_ids: Tensor | None,
    no_grad: bool = False,
    sequence_packing: bool = False,
    packed_seq_params: Any = None,
) -> Tensor:
    """Log-probabilities of each next token, float32 `[b, s - 1]`; other stages: what model gives.

    Shape:
        tokens, position_ids: `[b, s]`, whole sequences on every rank, unshifted.

    Context parallelism: tokens are split zigzag here (s divides by 2 * CP; packed sequences each by
    themselves) and the result is gathered on every rank; its backward sums over CP, as upstream's.

    packed_seq_params with qkv_format "thd": tokens are one bin `[1, s]`; 0 stands at each
    sequence's last token, where upstream has the log-probability of the next sequence's first.
    sequence_packing is of no effect without them: a bin then counts as one sequence, as upstream.
    """
    cp = or_one_process(ours.ParallelGroups.from_model(model).cp)
    packed = packed_seq_params if getattr(packed_seq_params, "qkv_format", "") == "thd" else None
    cu_seqlens = None
    if packed is not None:
        padded = getattr(packed, "cu_seqlens_q_padded", None)
        cu_seqlens = packed.cu_seqlens_q if padded is None else padded

    def local(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return ours.context_parallel_shard(x, cp_group=cp, cu_seqlens=cu_seqlens)

    labels = local(next_tokens(tokens, cu_seqlens=cu_seqlens))
    extra = {} if packed is None else {"packed_seq_params": packed}
    config = ours.LogprobConfig(output="stats", ignore_index=IGNORED)
    with grad_unless(no_grad), _without_flash_decode(model), ours.patch_gpt_model(model, config):
        stats = model(local(tokens), local(position_ids), None, labels=labels, **extra)
    if not isinstance(stats, ours.TokenStats):
        return stats  # a pipeline stage without a head
    whole = ours.context_parallel_gather(stats.logprobs, cp_group=cp, cu_seqlens=cu_seqlens)
    return whole[:, :-1]


class _without_flash_decode:
    """Off for the call: a config made for inference would change the training forward."""

    def __init__(self, model: Any) -> None:
        found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        self._on = [c for c in found.values() if getattr(c, "flash_decode", False)]

    def __enter__(self) -> None:
        for config in self._on:
            config.flash_decode = False

    def __exit__(self, *_: object) -> None:
        for config in self._on:
            config.flash_decode = True
