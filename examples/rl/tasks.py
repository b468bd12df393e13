"""Tasks: where prompts come from and how an answer is scored.

A task is addressed by index, so that the data order is a function of the step and nothing else;
a resumed run sees the same prompts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Protocol

from .config import TaskSection
from .errors import SetupError

_ENTRIES = 1_000_000


@dataclass(frozen=True)
class Problem:
    question: str
    entry: Any  # what the scorer needs


class Task(Protocol):
    shots: list[tuple[str, str]]  # solved examples shown before each question

    def problem(self, index: int) -> Problem: ...

    def score(self, problem: Problem, answer: str) -> float: ...


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
        options = {"letters": 8, "prompt_length": 4, "answer_length": 4, **section.options}
        unknown = sorted(set(options) - {"letters", "prompt_length", "answer_length"})
        if unknown:
            raise SetupError(f"task echo: unknown option {', '.join(unknown)}")
        self.shots: list[tuple[str, str]] = []
        self._letters = [chr(ord("a") + i) for i in range(options["letters"])]
        self._prompt_length = options["prompt_length"]
        self._answer_length = options["answer_length"]
        self._seed = seed

    def problem(self, index: int) -> Problem:
        rng = random.Random(self._seed * 1_000_003 + index)
        question = "".join(rng.choices(self._letters, k=self._prompt_length))
        return Problem(question, question[0])

    def score(self, problem: Problem, answer: str) -> float:
        hits = sum(letter == problem.entry for letter in answer[: self._answer_length])
        return hits / self._answer_length


def make_task(section: TaskSection, *, seed: int) -> Task:
    task = EchoTask if section.name == "echo" else ReasoningGymTask
    return task(section, seed=seed)
