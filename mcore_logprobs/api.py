"""The public names, where `mcore_logprobs` finds them."""

from mcore_logprobs.config import LogprobConfig, add_logprob_args
from mcore_logprobs.context_parallel import (
    context_parallel_gather,
    context_parallel_positions,
    context_parallel_shard,
    context_parallel_shift,
)
from mcore_logprobs.groups import ParallelGroups, VocabShard
from mcore_logprobs.megatron import (
    PatchHandle,
    logprob_model_hook,
    logprob_output_processor,
    patch_gpt_model,
    patch_model,
    patched_model_provider,
    unpatch_gpt_model,
    unpatch_model,
)
from mcore_logprobs.ops.all_to_all import all_to_all_sp2vp, all_to_all_vp2sp
from mcore_logprobs.ops.divergence import (
    linear_kl_div,
    vocab_parallel_kl_div,
    vocab_parallel_soft_cross_entropy,
)
from mcore_logprobs.ops.gather import (
    linear_gather,
    linear_topk_distill,
    vocab_parallel_gather,
    vocab_parallel_topk_distill,
)
from mcore_logprobs.ops.linear_map import linear_map
from mcore_logprobs.ops.log_softmax import vocab_parallel_log_softmax
from mcore_logprobs.ops.policy_loss import linear_policy_loss
from mcore_logprobs.ops.reshard import reshard_vocabulary
from mcore_logprobs.ops.result import TokenStats
from mcore_logprobs.ops.sample import linear_sample, vocab_parallel_sample
from mcore_logprobs.ops.sampling import linear_sampling_logprobs, vocab_parallel_sampling_logprobs
from mcore_logprobs.ops.token_stats import (
    linear_token_stats,
    vocab_parallel_entropy,
    vocab_parallel_logprobs,
    vocab_parallel_target_rank,
    vocab_parallel_token_stats,
)
from mcore_logprobs.ops.topk import linear_topk, vocab_parallel_argmax, vocab_parallel_topk
from mcore_logprobs.ops.topk_divergence import linear_topk_kl_div, vocab_parallel_topk_kl_div
from mcore_logprobs.prefix_tree import PrefixTree

__all__ = [
    "LogprobConfig",
    "ParallelGroups",
    "PatchHandle",
    "PrefixTree",
    "TokenStats",
    "VocabShard",
    "add_logprob_args",
    "all_to_all_sp2vp",
    "all_to_all_vp2sp",
    "context_parallel_gather",
    "context_parallel_positions",
    "context_parallel_shard",
    "context_parallel_shift",
    "linear_gather",
    "linear_kl_div",
    "linear_map",
    "linear_policy_loss",
    "linear_sample",
    "linear_sampling_logprobs",
    "linear_token_stats",
    "linear_topk",
    "linear_topk_distill",
    "linear_topk_kl_div",
    "logprob_model_hook",
    "logprob_output_processor",
    "patch_gpt_model",
    "patch_model",
    "patched_model_provider",
    "reshard_vocabulary",
    "unpatch_gpt_model",
    "unpatch_model",
    "vocab_parallel_argmax",
    "vocab_parallel_entropy",
    "vocab_parallel_gather",
    "vocab_parallel_kl_div",
    "vocab_parallel_log_softmax",
    "vocab_parallel_logprobs",
    "vocab_parallel_sample",
    "vocab_parallel_sampling_logprobs",
    "vocab_parallel_soft_cross_entropy",
    "vocab_parallel_target_rank",
    "vocab_parallel_token_stats",
    "vocab_parallel_topk",
    "vocab_parallel_topk_distill",
    "vocab_parallel_topk_kl_div",
]
