"""Log-probabilities of a batch without gradient, and the loss under the sampler's filter.

A sampler with top-p draws from what its filter leaves, so that the trainer's log-probability is
taken over the same tokens: by its own sums ("trainer"), or by the engine's record of what it kept
("engine"), which differs at the edge of the filter alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs import (
    TokenStats,
    patch_model,
    vocab_parallel_logprobs,
    vocab_parallel_sampling_logprobs,
    vocab_parallel_token_stats,
)
from mcore_logprobs.losses import kl_k3

from .data import Batch, MicroBatch, kept_ids
from .layout import whole_rows


@dataclass
class Scores:
    """Of a batch's labels, [n, s] each, the same on every rank."""

    stats: TokenStats  # of the whole distribution, at the sampler's temperature
    trainer: Tensor  # log-probability under the trainer's own top-p; stats' where there is none
    engine: Tensor  # log-probability under the ids that the engine kept

    def under(self, kept_tokens: str) -> Tensor:
        return self.engine if kept_tokens == "engine" else self.trainer


@torch.no_grad()
def score(trainer: Any, model: Any, batch: Batch) -> Scores:
    """Log-probabilities, entropy and ranks of the batch's labels. Collective."""

    def keep(micro: MicroBatch, out: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        if trainer.filtered:  # out is logits
            options = {"entropy": True, "target_rank": True, **_options(trainer)}
            b = micro.batch
            z, labels = answer_rows(b, out)
            s = vocab_parallel_token_stats(z, labels, **options)
            by_filter = [under_filter(trainer, b, z, by) for by in ("trainer", "engine")]
            found = [
                in_place(b, rows, blank)
                for rows, blank in [
                    (s.logprobs, 0),
                    (s.entropy, 0),
                    (s.target_rank, -1),
                    (s.lse, 0),
                    (by_filter[0], 0),
                    (by_filter[1], 0),
                ]
            ]
        else:
            found = [out.logprobs, out.entropy, out.target_rank, out.lse]
            found += [out.logprobs, out.logprobs]
        return found[0].sum(), micro.batch.mask.sum().int(), found

    config = replace(trainer.logprobs, entropy=True, target_rank=True)
    with patch_model(model, config):
        parts = trainer.run(model, batch, keep, forward_only=True, labels=not trainer.filtered)
    logprobs, entropy, rank, lse, by_trainer, by_engine = (
        whole_rows([part[i] for part in parts], batch.tokens.shape, dtype, trainer.layout)
        for i, dtype in enumerate(
            [torch.float32, torch.float32, torch.int64, torch.float32, torch.float32, torch.float32]
        )
    )
    return Scores(TokenStats(logprobs, entropy, rank, lse), by_trainer, by_engine)


def with_numbers(trainer: Any, batch: Batch) -> Batch:
    """The batch with what an objective of whole sequences or batches takes, after a pass for it."""
    if trainer.loss.passes == 1:
        return batch
    first = score(trainer, trainer.policy.model, batch).under(trainer.config.rollout.kept_tokens)
    args = (first, batch.old_logprobs, batch.advantages, batch.mask)
    return replace(batch, **trainer.loss.second_pass(*args))


def answer_rows(batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, V/TP], [rows]: logits and labels of the sampled tokens alone. Top-p sorts a whole
    vocabulary for every row, and most rows are prompt."""
    return logits[batch.mask], batch.labels[batch.mask]


def in_place(batch: Batch, rows: Tensor, blank: float) -> Tensor:
    """[rows] -> [b, s], `blank` where no token was sampled. Differentiable."""
    return torch.full(batch.mask.shape, blank, dtype=rows.dtype, device=rows.device).masked_scatter(
        batch.mask, rows
    )


def under_filter(trainer: Any, batch: Batch, logits: Tensor, kept_tokens: str) -> Tensor:
    """[rows] log-probability of the labels among the tokens that the sampler's top-p leaves."""
    labels, options = batch.labels[batch.mask], _options(trainer)
    top_p = trainer.config.rollout.top_p
    own = vocab_parallel_sampling_logprobs(logits, labels, top_p=top_p, **options)
    if kept_tokens == "trainer" or batch.kept_ids is None:
        return own
    recorded, kept = kept_ids(batch.kept_ids[batch.mask])
    replayed = vocab_parallel_sampling_logprobs(logits, labels, kept_ids=kept, **options)
    return torch.where(recorded, replayed, own)


def filtered_loss(trainer: Any, micro: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the losses, log-probabilities [b, s]): the ratio under the sampler's filter, the KL
    term between whole distributions."""
    b, surrogate = micro.batch, trainer.loss.loss
    z, labels = answer_rows(b, logits)
    by_filter = under_filter(trainer, b, z, trainer.config.rollout.kept_tokens)
    logprobs = in_place(b, by_filter, 0.0)
    per_token = surrogate(logprobs, None, *(getattr(b, name) for name in surrogate.tensors))
    if trainer.loss.kl_coef > 0:
        whole = in_place(b, vocab_parallel_logprobs(z, labels, **_options(trainer)), 0.0)
        per_token = per_token + trainer.loss.kl_coef * kl_k3(whole, b.ref_logprobs)
    return torch.where(b.mask, per_token, 0.0).sum(), logprobs


def _options(trainer: Any) -> dict[str, Any]:
    return {
        "temperature": trainer.logprobs.temperature,
        "vocab_size": trainer.logprobs.vocab_size,
    }
