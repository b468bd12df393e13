"""From answers to tensors: padding, shifted labels, and the split over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from statistics import fmean, pstdev

import torch
from torch import Tensor

from mcore_logprobs import context_parallel_positions, context_parallel_shard

from .rollout import Sample

IGNORE = -100


@dataclass
class Batch:
    """Whole sequences, the same on every rank. labels[i] is tokens[i + 1] where that token was
    sampled and IGNORE elsewhere; every other tensor is aligned with the labels."""

    tokens: Tensor  # int64 [n, s]
    labels: Tensor  # int64 [n, s]
    advantages: Tensor  # float32 [n, s]
    rollout_logprobs: Tensor  # float32 [n, s]
    old_logprobs: Tensor  # float32 [n, s], zeros until computed
    ref_logprobs: Tensor  # float32 [n, s], zeros until computed

    @property
    def mask(self) -> Tensor:
        return self.labels != IGNORE

    def map(self, fn) -> Batch:
        return Batch(**{f.name: fn(getattr(self, f.name)) for f in fields(self)})


def group_advantages(samples: list[Sample], *, normalise_std: bool) -> None:
    """GRPO: an answer's reward against those of the other answers to the same prompt."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    for group in groups.values():
        rewards = [sample.reward for sample in group]
        scale = pstdev(rewards) + 1e-4 if normalise_std else 1.0
        for sample in group:
            sample.advantage = (sample.reward - fmean(rewards)) / scale


def make_batch(
    samples: list[Sample],
    *,
    pad: int,
    multiple: int,
    device: torch.device,
    all_tokens: bool = False,
) -> Batch:
    """Right-pads to a multiple of `multiple` (2 * CP, and TP under sequence parallelism).

    `all_tokens` labels the prompts too, for the self-check.
    """
    longest = max(len(s.tokens) for s in samples)
    shape = (len(samples), -(-longest // multiple) * multiple)
    batch = Batch(
        tokens=torch.full(shape, pad),
        labels=torch.full(shape, IGNORE),
        advantages=torch.zeros(shape),
        rollout_logprobs=torch.zeros(shape),
        old_logprobs=torch.zeros(shape),
        ref_logprobs=torch.zeros(shape),
    )
    for i, sample in enumerate(samples):
        end = len(sample.tokens)
        batch.tokens[i, :end] = torch.tensor(sample.tokens)
        # The label of position p is token p + 1: shifted here, before any split over ranks.
        answer = slice(0 if all_tokens else sample.prompt_length - 1, end - 1)
        batch.labels[i, answer] = batch.tokens[i, answer.start + 1 : end]
        if not all_tokens:
            batch.rollout_logprobs[i, answer] = torch.tensor(sample.logprobs)
            batch.advantages[i, answer] = sample.advantage
    return batch.map(lambda t: t.to(device))


@dataclass
class MicroBatch:
    """What one forward pass sees: rows of this data-parallel rank, positions of this CP rank."""

    batch: Batch  # [micro_batch, s / CP]
    position_ids: Tensor  # [micro_batch, s / CP], global positions


def micro_batches(
    batch: Batch, *, size: int, dp_rank: int, dp: int, cp_group
) -> Iterator[MicroBatch]:
    rows = batch.tokens.shape[0] // dp
    for start in range(dp_rank * rows, (dp_rank + 1) * rows, size):
        local = batch.map(
            lambda t, at=start: context_parallel_shard(
                t[at : at + size], cp_group=cp_group, seq_dim=1
            )
        )
        positions = context_parallel_positions(batch.tokens.shape[1], cp_group=cp_group)
        yield MicroBatch(local, positions.to(batch.tokens.device).expand(size, -1))
