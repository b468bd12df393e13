"""ms-swift's `swift.megatron.trainers.vocab_parallel_utils` and `.gkd_utils`.

    from mcore_logprobs.dropin.ms_swift import compute_logps_and_entropy_from_logits

On Megatron's TP group. Labels are Megatron's, already shifted; -100 gives log-probability 0;
temperatures are applied by the caller. The gradients are right under TP (those of ms-swift up to
4.5.2 are not) and no input is modified (ms-swift 4.6 overwrites its logits).
"""

from __future__ import annotations

from torch import Tensor

import mcore_logprobs as ours

__all__ = [
    "compute_logps_and_entropy_from_logits",
    "tp_gather_topk",
    "vocab_parallel_entropy",
    "vocab_parallel_gather_logps",
    "vocab_parallel_kl_div",
    "vocab_parallel_log_softmax",
    "vocab_parallel_topk",
]

_MASKED = -100
# Rows at a time in ms-swift, which has no setting for them: here they come from the memory budget,
# or from the patched model's settings. Another number is taken as it is.
_DEFAULT_ROWS = 512


def _rows(chunk_size: int) -> int | None:
    return None if chunk_size == _DEFAULT_ROWS else chunk_size


def vocab_parallel_log_softmax(logits: Tensor) -> Tensor:
    """`[..., V/TP]` -> float32 log-probabilities of the same shape; differentiable."""
    return ours.vocab_parallel_log_softmax(logits)


def vocab_parallel_entropy(log_probs: Tensor, chunk_size: int = 512) -> Tensor:
    """Log-probabilities `[..., V/TP]` -> entropy `[...]` in nats (>= 0); differentiable.

    The gradient for log_probs is that of the entropy of softmax(log_probs), -p (log p + H), where
    ms-swift's is -p (log p + 1): after `vocab_parallel_log_softmax` both give the logits the same.
    """
    return ours.vocab_parallel_entropy(log_probs, chunk_size=_rows(chunk_size))


def vocab_parallel_kl_div(input_log_probs: Tensor, target_log_probs: Tensor) -> Tensor:
    """KL(target || input) = sum exp(target) (target - input): `[..., V/TP]` twice -> `[...]`.

    Differentiable in both; gradients differ from ms-swift's by multiples of exp(input) and
    exp(target), which the log-softmax before it takes out.
    """
    value = ours.vocab_parallel_kl_div(input_log_probs, target_log_probs.detach(), kind="forward")
    if not target_log_probs.requires_grad:
        return value
    # The same number again, for its gradient in the other argument.
    other = ours.vocab_parallel_kl_div(target_log_probs, input_log_probs.detach(), kind="reverse")
    return value + (other - other.detach())


def vocab_parallel_gather_logps(
    logits: Tensor, labels: Tensor, log_probs: Tensor | None = None
) -> Tensor:
    """`[b, s, V/TP]`, `[b, s]` -> float32 `[b, s]`, 0 where the label is -100; differentiable.

    log_probs (ms-swift up to 4.5.2): what `vocab_parallel_log_softmax` gave, read in place of the
    logits.
    """
    if log_probs is None:
        return ours.vocab_parallel_logprobs(logits, labels, ignore_index=_MASKED)
    return ours.vocab_parallel_gather(log_probs, labels.unsqueeze(-1)).squeeze(-1)


def compute_logps_and_entropy_from_logits(
    logits: Tensor,
    labels: Tensor,
    compute_entropy: bool = False,
    entropy_chunk_size: int = 512,
) -> tuple[Tensor, Tensor | None]:
    """(log-probabilities, entropy or None), `[b, s]` each, in one pass over the logits.

    A label of -100 gives log-probability 0 without gradient; the entropy there is that of the
    distribution, as in ms-swift. entropy_chunk_size: rows at a time; ms-swift's default: from a
    memory budget.
    """
    asked = labels != _MASKED
    if not compute_entropy:
        return ours.vocab_parallel_logprobs(logits, labels, ignore_index=_MASKED), None
    stats = ours.vocab_parallel_token_stats(
        logits, labels.where(asked, 0), entropy=True, chunk_size=_rows(entropy_chunk_size)
    )
    return stats.logprobs.where(asked, 0.0), stats.entropy


def vocab_parallel_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`[..., V/TP]` -> (float32 logits, global ids) `[..., k]`, largest first; differentiable."""
    return ours.vocab_parallel_topk(logits, k)


def tp_gather_topk(logits: Tensor, indices: Tensor) -> Tensor:
    """`[..., V/TP]`, global ids `[..., k]` -> float32 logits `[..., k]`; differentiable."""
    return ours.vocab_parallel_gather(logits, indices)
