"""Before the first step: are the numbers right? Two independent witnesses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import vocab_parallel_token_stats

from .batch import Batch
from .errors import SetupError
from .layout import Layout, from_last_stage, on_main
from .policy import Policy


def check_against_rollout_engine(policy: Policy, engine: Any | None, batch: Batch) -> float:
    """Largest |difference| of log-probabilities, Megatron's against transformers', on one text.

    Two implementations of the model and two of the log-probability share nothing but the weights.
    """
    ours = policy.stats(batch).logprobs
    temperature = policy.config.rollout.temperature

    def compare() -> float:
        theirs = engine.score(batch.tokens, batch.labels, temperature)
        return (ours - theirs)[batch.mask].abs().max().item()

    return on_main(compare)


@torch.no_grad()
def check_against_single_process(policy: Policy, batch: Batch) -> dict[str, float]:
    """The TP-sharded operation against one process that holds the whole vocabulary.

    The logits are gathered over TP, and each rank computes its statistics alone (a group of one).
    Returns the largest difference of log-probability and entropy, and of target rank.
    """
    from megatron.core import parallel_state as ps

    layout = policy.layout
    alone = single_rank_group(layout)
    tp_group = ps.get_tensor_model_parallel_group()
    worst = torch.zeros(3, device=layout.device)

    def measure(micro: Any, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        options = {
            "entropy": True,
            "target_rank": True,
            "temperature": policy.score_config.temperature,
            "vocab_size": policy.score_config.vocab_size,
        }
        labels = micro.batch.labels
        sharded = vocab_parallel_token_stats(logits, labels, tp_group=tp_group, **options)
        whole = vocab_parallel_token_stats(
            _gather_vocabulary(logits, tp_group), labels, tp_group=alone, **options
        )
        pairs = (
            (sharded.logprobs, whole.logprobs),
            (sharded.entropy, whole.entropy),
            (sharded.target_rank, whole.target_rank),
        )
        return logits.sum(), labels.sum().int(), torch.stack([_distance(a, b) for a, b in pairs])

    for found in policy.run(batch, measure, forward_only=True, with_labels=False):
        worst = torch.maximum(worst, found)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    logprob, entropy, rank = from_last_stage(worst, layout).tolist()
    return {"logprobs": logprob, "entropy": entropy, "target_rank": rank}


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() - b.double()).abs().max().float()


def single_rank_group(layout: Layout) -> Any:
    """A process group of this rank alone. Every rank has to make every group."""
    groups = [dist.new_group([rank]) for rank in range(layout.world)]
    return groups[layout.rank]


def _gather_vocabulary(logits: Tensor, tp_group: Any) -> Tensor:
    """[b, s, V/TP] -> [b, s, V] on every TP rank."""
    parts = [torch.empty_like(logits) for _ in range(tp_group.size())]
    dist.all_gather(parts, logits.contiguous(), group=tp_group)
    return torch.cat(parts, dim=-1)


def require_close(difference: float, bound: float) -> None:
    if not difference < bound:  # also catches NaN
        raise SetupError(
            f"self-check failed: Megatron's log-probabilities differ from transformers' by "
            f"{difference:.3e} on the same text, the bound is {bound:.1e}. Training on them would "
            "be off-policy from the first token. Usual causes: weights converted in another layout "
            "(query-key-value groups, gate and up, rotary order), another RoPE base or norm "
            "epsilon, padded vocabulary counted in the softmax, or a half-precision model held to "
            "a float32 bound (selfcheck.max_logprob_diff)."
        )
