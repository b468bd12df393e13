"""Exact per-token log-probabilities, entropy, target ranks and top-k for Megatron-Core.

From a vocabulary sharded over tensor-parallel ranks and a sequence sharded over context-parallel
ranks; and from hidden states, without ever holding the logits. Names load on first use: importing
the package needs neither CUDA nor Triton nor Transformer Engine nor Megatron.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Where each public name lives. The one list: __all__, __getattr__ and __dir__ derive from it.
_EXPORTS = {
    "mcore_logprobs.config": ("LogprobConfig", "add_logprob_args"),
    "mcore_logprobs.context_parallel": (
        "context_parallel_gather",
        "context_parallel_positions",
        "context_parallel_shard",
        "context_parallel_shift",
    ),
    "mcore_logprobs.groups": ("ParallelGroups", "VocabShard"),
    "mcore_logprobs.megatron": (
        "PatchHandle",
        "logprob_output_processor",
        "patch_gpt_model",
        "unpatch_gpt_model",
    ),
    "mcore_logprobs.ops.linear": ("linear_token_stats",),
    "mcore_logprobs.ops.linear_loss": ("linear_policy_loss",),
    "mcore_logprobs.ops.log_softmax": ("vocab_parallel_log_softmax",),
    "mcore_logprobs.ops.logprobs": ("vocab_parallel_entropy", "vocab_parallel_logprobs"),
    "mcore_logprobs.ops.target_rank": ("vocab_parallel_target_rank",),
    "mcore_logprobs.ops.token_stats": ("TokenStats", "vocab_parallel_token_stats"),
    "mcore_logprobs.ops.topk": ("vocab_parallel_argmax", "vocab_parallel_topk"),
    "mcore_logprobs.ops.gather": ("vocab_parallel_gather",),
    "mcore_logprobs.ops.sampling": ("vocab_parallel_sampling_logprobs",),
    "mcore_logprobs.ops.distill": (
        "vocab_parallel_kl_div",
        "vocab_parallel_soft_cross_entropy",
        "vocab_parallel_topk_distill",
    ),
    "mcore_logprobs.ops.linear_distill": ("linear_kl_div",),
    "mcore_logprobs.ops.layout": ("all_to_all_sp2vp", "all_to_all_vp2sp"),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
