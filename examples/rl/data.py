"""What a step works on: tasks with their scorers, and the batch that answers become."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs import context_parallel_positions, context_parallel_shard

from .config import SetupError, TaskSection, unknown_keys
from .rollout import Sample

IGNORE = -100


# ---- tasks ---------------------------------------------------------------------------------------

# A task has `shots` (solved examples shown before each question), `problem(index)` and
# `score(problem, answer)`. By index, so that a resumed run sees the same prompts.
_ENTRIES = 1_000_000


@dataclass(frozen=True)
class Problem:
    question: str
    entry: Any  # what the scorer needs


class ReasoningGymTask:
    """A reasoning-gym task, scored by its own scorer (1 for the bare answer, less around it)."""

    def __init__(self, section: TaskSection, *, seed: int) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise SetupError(
                f"task {section.name!r} needs reasoning-gym ({error}); pip install reasoning-gym"
            ) from None
        try:
            # The size bounds indexing only: entries are made on demand from seed + index.
            self._dataset = reasoning_gym.create_dataset(
                section.name, seed=seed, size=_ENTRIES, **section.options
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise SetupError(f"task {section.name!r}: {error}") from None
        shown = [self._dataset[_ENTRIES - 1 - i] for i in range(section.examples)]
        self.shots = [(entry["question"], entry["answer"]) for entry in shown]

    def problem(self, index: int) -> Problem:
        entry = self._dataset[index]
        return Problem(entry["question"], entry)

    def score(self, problem: Problem, answer: str) -> float:
        return float(self._dataset.score_answer(answer.strip(), problem.entry))


class EchoTask:
    """Letters in; the answer is the first of them, again and again. For a model of a few thousand
    parameters: the score is the share of right letters, so that chance gives 1 / letters."""

    def __init__(self, section: TaskSection, *, seed: int) -> None:
        known = {"letters": 8, "prompt_length": 4, "answer_length": 4}
        if unknown := unknown_keys(section.options, known):
            raise SetupError(f"task echo: unknown option {unknown}")
        for name, value in section.options.items():
            if type(value) is not int or not 1 <= value <= 26:
                raise SetupError(f"task echo: {name}: expected an int from 1 to 26, got {value!r}")
        letters, self._prompt_length, self._answer_length = (known | section.options).values()
        self._letters, self._seed = [chr(ord("a") + i) for i in range(letters)], seed
        self.shots: list[tuple[str, str]] = []

    def problem(self, index: int) -> Problem:
        rng = random.Random(self._seed * 1_000_003 + index)
        question = "".join(rng.choices(self._letters, k=self._prompt_length))
        return Problem(question, question[0])

    def score(self, problem: Problem, answer: str) -> float:
        hits = sum(letter == problem.entry for letter in answer[: self._answer_length])
        return hits / self._answer_length


def make_task(section: TaskSection, *, seed: int) -> EchoTask | ReasoningGymTask:
    return (EchoTask if section.name == "echo" else ReasoningGymTask)(section, seed=seed)


# ---- from answers to tensors ---------------------------------------------------------------------


@dataclass
class Batch:
    """Whole sequences, the same on every rank. labels[i] is tokens[i + 1] where that token was
    sampled and IGNORE elsewhere; every other tensor is aligned with the labels, [n, s]. What an
    objective's loss takes, it takes by these names."""

    tokens: Tensor
    labels: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor  # of the policy before the step's first update
    ref_logprobs: Tensor  # of the policy before training
    weights: Tensor  # truncated importance weights
    # What a two-pass objective's `second_pass` makes.
    first_logprobs: Tensor | None = None
    sequence_log_ratio: Tensor | None = None
    importance_weights: Tensor | None = None
    chosen: Tensor | None = None
    kept_ids: Tensor | None = None  # int32 [n, s, k], what the engine's filter kept; -1 fills up

    @property
    def mask(self) -> Tensor:
        return self.labels != IGNORE

    @property
    def teacher_logprobs(self) -> Tensor:
        return self.ref_logprobs

    def map(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: None if t is None else fn(t) for name, t in values.items()})


def group_advantages(samples: list[Sample], *, normalise_std: bool) -> None:
    """GRPO: an answer's reward against those of the other answers to the same prompt."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    for group in groups.values():
        rewards = [sample.reward for sample in group]
        scale = pstdev(rewards) + 1e-4 if normalise_std else 1.0
        for sample in group:
            alike = min(rewards) == max(rewards)  # their mean may be off by a rounding
            sample.advantage = 0.0 if alike else (sample.reward - fmean(rewards)) / scale


def make_batch(
    samples: list[Sample],
    *,
    pad: int,
    multiple: int,
    device: torch.device,
    all_tokens: bool = False,
) -> Batch:
    """Right-pads to a multiple of `multiple` (2 * CP, and TP under sequence parallelism).

    `all_tokens` labels the prompts too.
    """
    longest = max(len(s.tokens) for s in samples)
    shape = (len(samples), -(-longest // multiple) * multiple)
    batch = Batch(
        torch.full(shape, pad),
        torch.full(shape, IGNORE),
        *(torch.zeros(shape) for _ in range(4)),
        torch.ones(shape),
    )
    if not all_tokens and any(s.kept for s in samples):
        widest = max(len(ids or ()) for s in samples for ids in s.kept)
        batch.kept_ids = torch.full((*shape, widest), -1, dtype=torch.int32)
    for i, sample in enumerate(samples):
        end = len(sample.tokens)
        batch.tokens[i, :end] = torch.tensor(sample.tokens)
        # The label of position p is token p + 1: shifted here, before any split over ranks.
        answer = slice(0 if all_tokens else sample.prompt_length - 1, end - 1)
        batch.labels[i, answer] = batch.tokens[i, answer.start + 1 : end]
        if not all_tokens:
            batch.rollout_logprobs[i, answer] = torch.tensor(sample.logprobs)
            batch.advantages[i, answer] = sample.advantage
        if batch.kept_ids is not None:
            for position, ids in enumerate(sample.kept, start=answer.start):
                batch.kept_ids[i, position, : len(ids or ())] = torch.tensor(ids or ())
    return batch.map(lambda t: t.to(device))


def kept_ids(kept: Tensor) -> tuple[Tensor, Tensor]:
    """[..., k], filled up with -1 -> (ids one after another, offsets [rows + 1]), the `kept_ids`
    of PatchHandle.replay."""
    present = kept >= 0
    return kept[present], torch.nn.functional.pad(present.sum(-1).flatten().cumsum(0), (1, 0))


def micro_batches(batch: Batch, *, size: int, layout: Any) -> Iterator[tuple[Batch, Tensor]]:
    """What one forward pass sees: rows of this data-parallel rank, positions of this CP rank,
    [size, s / CP], and the positions' numbers in the whole sequence."""
    rows, cp_group = batch.tokens.shape[0] // layout.dp, layout.cp_group
    positions = context_parallel_positions(batch.tokens.shape[1], cp_group=cp_group)
    positions = positions.to(batch.tokens.device).expand(size, -1)
    for start in range(layout.dp_rank * rows, (layout.dp_rank + 1) * rows, size):
        part = batch.map(lambda t, at=start: t[at : at + size])
        yield part.map(lambda t: context_parallel_shard(t, cp_group=cp_group)), positions
