"""What type checkers see of the names that `__init__.py` loads on first use."""
# isort: skip_file

from mcore_logprobs.config import (
    LogprobConfig as LogprobConfig,
    add_logprob_args as add_logprob_args,
)
from mcore_logprobs.context_parallel import (
    context_parallel_gather as context_parallel_gather,
    context_parallel_positions as context_parallel_positions,
    context_parallel_shard as context_parallel_shard,
    context_parallel_shift as context_parallel_shift,
)
from mcore_logprobs.groups import (
    ParallelGroups as ParallelGroups,
    VocabShard as VocabShard,
)
from mcore_logprobs.megatron import (
    PatchHandle as PatchHandle,
    logprob_output_processor as logprob_output_processor,
    patch_gpt_model as patch_gpt_model,
    unpatch_gpt_model as unpatch_gpt_model,
)
from mcore_logprobs.ops.distill import (
    vocab_parallel_kl_div as vocab_parallel_kl_div,
    vocab_parallel_soft_cross_entropy as vocab_parallel_soft_cross_entropy,
    vocab_parallel_topk_distill as vocab_parallel_topk_distill,
)
from mcore_logprobs.ops.gather import (
    vocab_parallel_gather as vocab_parallel_gather,
)
from mcore_logprobs.ops.layout import (
    all_to_all_sp2vp as all_to_all_sp2vp,
    all_to_all_vp2sp as all_to_all_vp2sp,
)
from mcore_logprobs.ops.linear import (
    linear_token_stats as linear_token_stats,
)
from mcore_logprobs.ops.linear_distill import (
    linear_kl_div as linear_kl_div,
)
from mcore_logprobs.ops.linear_loss import (
    linear_policy_loss as linear_policy_loss,
)
from mcore_logprobs.ops.log_softmax import (
    vocab_parallel_log_softmax as vocab_parallel_log_softmax,
)
from mcore_logprobs.ops.logprobs import (
    vocab_parallel_entropy as vocab_parallel_entropy,
    vocab_parallel_logprobs as vocab_parallel_logprobs,
)
from mcore_logprobs.ops.sampling import (
    vocab_parallel_sampling_logprobs as vocab_parallel_sampling_logprobs,
)
from mcore_logprobs.ops.target_rank import (
    vocab_parallel_target_rank as vocab_parallel_target_rank,
)
from mcore_logprobs.ops.token_stats import (
    TokenStats as TokenStats,
    vocab_parallel_token_stats as vocab_parallel_token_stats,
)
from mcore_logprobs.ops.topk import (
    vocab_parallel_argmax as vocab_parallel_argmax,
    vocab_parallel_topk as vocab_parallel_topk,
)

__version__: str
__all__: list[str]
