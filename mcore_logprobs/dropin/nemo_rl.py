"""NeMo-RL's `nemo_rl.distributed.model_utils`: its names and signatures on our operations.

    from mcore_logprobs.dropin.nemo_rl import from_parallel_logits_to_logprobs

Differences that a user can see, all on purpose: results are float32 whatever the logits' dtype
(float64 for float64 ones), no input is modified, gradients have their input's dtype; context
parallelism and packing work on the fused path; a range or rank that is not this process's raises;
so does, on a CPU, a target outside the vocabulary that is not -100.
"""

from __future__ import annotations

from mcore_logprobs.dropin.nemo_context import (
    _AllReduceSum,
    _get_tokens_on_this_cp_rank,
    all_to_all_sq2vp,
    all_to_all_vp2sq,
    allgather_cp_sharded_tensor,
    cp_load_balanced_to_contiguous,
    cp_shift_next,
    group_all_reduce_sum,
    group_all_reduce_sum_with_grad,
)
from mcore_logprobs.dropin.nemo_distill import (
    _compute_distributed_log_softmax,
    _compute_distributed_log_softmax_with_grad,
    _compute_distributed_softmax,
    distributed_vocab_topk,
    gather_logits_at_global_indices,
    get_distillation_topk_logprobs_from_logits,
    vocab_parallel_argmax,
    vocab_parallel_full_log_softmax,
    vocab_parallel_gather_columns,
    vocab_parallel_log_softmax,
)
from mcore_logprobs.dropin.nemo_functions import (
    AllGatherCPTensor,
    ChunkedDistributedEntropy,
    ChunkedDistributedGatherLogprob,
    ChunkedDistributedHiddenStatesToLogprobs,
    ChunkedDistributedLogprob,
    ChunkedDistributedLogprobWithSampling,
    DistributedCrossEntropy,
    DistributedLogprob,
    DistributedLogprobWithSampling,
)
from mcore_logprobs.dropin.nemo_fusion import (
    _gpt_forward_with_linear_ce_fusion,
    from_parallel_hidden_states_to_logprobs,
    patch_gpt_model_forward_for_linear_ce_fusion,
    unpatch_gpt_model_forward_for_linear_ce_fusion,
)
from mcore_logprobs.dropin.nemo_logprobs import (
    dtensor_from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    get_logprobs_from_vocab_parallel_logits,
    get_next_token_logprobs_from_logits,
)

__all__ = [
    "AllGatherCPTensor",
    "ChunkedDistributedEntropy",
    "ChunkedDistributedGatherLogprob",
    "ChunkedDistributedHiddenStatesToLogprobs",
    "ChunkedDistributedLogprob",
    "ChunkedDistributedLogprobWithSampling",
    "DistributedCrossEntropy",
    "DistributedLogprob",
    "DistributedLogprobWithSampling",
    "_AllReduceSum",
    "_compute_distributed_log_softmax",
    "_compute_distributed_log_softmax_with_grad",
    "_compute_distributed_softmax",
    "_get_tokens_on_this_cp_rank",
    "_gpt_forward_with_linear_ce_fusion",
    "all_to_all_sq2vp",
    "all_to_all_vp2sq",
    "allgather_cp_sharded_tensor",
    "cp_load_balanced_to_contiguous",
    "cp_shift_next",
    "distributed_vocab_topk",
    "dtensor_from_parallel_logits_to_logprobs",
    "from_parallel_hidden_states_to_logprobs",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
    "gather_logits_at_global_indices",
    "get_distillation_topk_logprobs_from_logits",
    "get_logprobs_from_vocab_parallel_logits",
    "get_next_token_logprobs_from_logits",
    "group_all_reduce_sum",
    "group_all_reduce_sum_with_grad",
    "patch_gpt_model_forward_for_linear_ce_fusion",
    "unpatch_gpt_model_forward_for_linear_ce_fusion",
    "vocab_parallel_argmax",
    "vocab_parallel_full_log_softmax",
    "vocab_parallel_gather_columns",
    "vocab_parallel_log_softmax",
]
