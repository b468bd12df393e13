"""miles' `miles.backends.training_utils`: `loss_hub.math_utils`, `.logit_processors`, `cp_utils`.

    from mcore_logprobs.dropin.miles import get_log_probs_and_entropy

Groups are those of miles' own parallel state, which its FSDP backend has too. miles began as a copy
of slime: what both have is that of `mcore_logprobs.dropin.slime`, with miles' padded batches
(qkv_format "bshd").
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.dropin import slime
from mcore_logprobs.dropin._common import setting
from mcore_logprobs.dropin.slime import (
    all_gather_with_cp,
    get_logits_and_tokens_offset_with_cp,
    slice_log_prob_with_cp,
    slice_with_cp,
)

__all__ = [
    "all_gather_with_cp",
    "calculate_log_probs_and_entropy",
    "get_log_probs_and_entropy",
    "get_logits_and_tokens_offset_with_cp",
    "slice_log_prob_with_cp",
    "slice_with_cp",
]


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: ProcessGroup | None,
    with_entropy: bool = False,
    entropy_requires_grad: bool = True,
    chunk_size: int = -1,
    true_on_policy: bool = False,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`[n, V/TP]`, targets `[n]` -> (float32 log-probabilities `[n, 1]`, entropy `[n]` or None).

    tp_group None: every rank, as in slime and in miles' entropy (its log-probabilities fail on
    None). chunk_size: rows at a time; -1: from a memory budget. vocab_size: ignored, as in
    miles without true_on_policy.

    Raises:
        ValueError: true_on_policy, whose log-softmax of gathered logits in the rollout engine's
            dtype has other bits.
    """
    _refuse_true_on_policy(true_on_policy)
    return slime.calculate_log_probs_and_entropy(
        logits, tokens, tp_group, with_entropy, chunk_size, with_entropy_grad=entropy_requires_grad
    )


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: object,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    entropy_requires_grad: bool = True,
    non_loss_data: bool = True,
    max_seq_lens: Sequence[int] | None = None,
) -> dict[str, list[Tensor]]:
    """slime's function of this name, which gives its second result: {"log_probs": [...], ...}.

    With args.qkv_format "bshd" logits are `[b, max_seq_len, V/TP]` and max_seq_lens is needed.
    As in miles, an args.rollout_temperature of 0 or less (greedy) leaves logits as they are.

    Raises:
        ValueError: args.true_on_policy_mode; no max_seq_lens for "bshd"; logits of another shape.
    """
    _refuse_true_on_policy(setting(args, "true_on_policy_mode", False))
    padded = setting(args, "qkv_format", "thd") != "thd"
    if padded and max_seq_lens is None:
        raise ValueError("max_seq_lens: expected the padded lengths with bshd, got None")
    lengths = max_seq_lens if padded else None
    temperature = setting(args, "rollout_temperature", 1.0)
    return slime.responses_of(
        logits,
        args,
        unconcat_tokens,
        slime.Layout(logits, args, total_lengths, response_lengths, lengths),
        with_entropy=with_entropy,
        entropy_grad=entropy_requires_grad,
        temperature=temperature if temperature > 0 else 1.0,
    )


def _refuse_true_on_policy(asked: bool) -> None:
    if asked:
        raise ValueError(
            "true_on_policy: expected False: its log-softmax in the rollout engine's dtype is "
            "miles' own"
        )
