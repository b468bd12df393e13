"""Questions that training never sees, answered before, during and after it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from .config import RunConfig, SetupError
from .data import Problem
from .layout import on_main
from .rollout import Sample

_FIRST = 800_000  # index of the first held-out question, far from those of the training steps
_STRIDE = 10_007  # how far on a training step looks for a question that is not held out
_SEED = 900_000_000  # the answers' seeds, the same in every evaluation


class Questions:
    """A task's questions in two parts: `held_out`, and `training(index)`, which is never one of
    them; and how they are asked and scored. On rank 0."""

    def __init__(self, task: Any, config: RunConfig) -> None:
        self._task, self._config, wanted = task, config, config.task.eval_questions
        self.held_out: list[Problem] = []
        self._taken = {question for question, _ in task.shots}
        for index in range(_FIRST, _FIRST + 50 * wanted):
            if len(self.held_out) == wanted:
                break
            problem = task.problem(index)
            if problem.question not in self._taken:
                self._taken.add(problem.question)
                self.held_out.append(problem)
        if len(self.held_out) < wanted:
            raise SetupError(
                f"task.eval_questions: expected at most {len(self.held_out)} (the task has no more "
                f"distinct questions), got {wanted}"
            )

    def training(self, index: int) -> Problem:
        for attempt in range(1000):
            problem = self._task.problem(index + attempt * _STRIDE)
            if problem.question not in self._taken:
                return problem
        raise SetupError(
            f"task.eval_questions: {len(self.held_out)} questions held out leave none to train on"
        )

    def encode(self, engine: Any, question: str) -> list[int]:
        encode = engine.tokenizer.encode_prompt
        return encode(question, self._task.shots, self._config.task.system)

    def answer(
        self, engine: Any, problems: list[Problem], group_size: int, seed: int
    ) -> list[Sample]:
        """Scored answers, `group_size` to each problem."""
        prompts = [self.encode(engine, p.question) for p in problems]
        samples = engine.generate(
            prompts, group_size=group_size, seed=seed, rollout=self._config.rollout
        )
        for sample in samples:
            sample.reward = self._task.score(problems[sample.group], sample.text)
        return samples


@dataclass(frozen=True)
class Evaluation:
    """Rewards of the held-out questions, one answer each, in the questions' order."""

    step: int
    rewards: list[float]

    @property
    def mean(self) -> float:
        return fmean(self.rewards)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return stdev(self.rewards) / math.sqrt(len(self.rewards))

    def against(self, other: Evaluation) -> Evaluation:
        """The differences, question by question."""
        pairs = zip(self.rewards, other.rewards, strict=True)
        return Evaluation(self.step, [a - b for a, b in pairs])


class Records:
    """A file of JSON lines, of dataclasses with a `step`; after a resume, of those up to its step.
    On rank 0."""

    def __init__(self, path: Path, kind: type, resumed: int) -> None:
        # A run that was killed may have left half a line behind: a whole one ends in a newline.
        try:
            text = path.read_text(encoding="utf-8") if resumed and path.exists() else ""
            lines = text.split("\n")[:-1]
            found = [kind(**json.loads(line)) for line in lines]
        except (ValueError, TypeError) as error:
            raise SetupError(
                f"{path}: expected lines that this version of the example wrote ({error}); move it "
                "away, and the resumed run begins a new one"
            ) from None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        self.path, self.all = path, []
        for record in found:
            if record.step <= resumed:
                self.add(record)

    def add(self, record: Any) -> None:
        self.all.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")


class Evaluator:
    """Evaluates at step 0, every `task.eval_every` steps and at the end, and keeps eval.jsonl."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.section = trainer, trainer.config.task
        self.done: list[Evaluation] = []  # on rank 0
        if trainer.layout.is_main and self.section.eval_questions:
            path = trainer.config.run_dir / "eval.jsonl"
            self._records = Records(path, Evaluation, trainer.step)
            self.done = self._records.all

    def after_step(self, *, last: bool = False) -> None:
        """Collective: evaluates where the step asks for it, once."""
        step = self.trainer.step
        if self.section.eval_questions and (last or step % self.section.eval_every == 0):
            on_main(lambda: self._evaluate(step))

    def _evaluate(self, step: int) -> None:
        if any(e.step == step for e in self.done):
            return
        trainer, problems = self.trainer, self.trainer.questions.held_out
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):  # an engine may draw from torch's own generator
            torch.manual_seed(_SEED)
            samples = trainer.questions.answer(trainer.engine, problems, 1, _SEED)
        found = Evaluation(step, [round(s.reward, 4) for s in samples])
        self._records.add(found)
        text = f"{len(problems)} held-out questions: reward {found.mean:.3f} +- {found.error:.3f}"
        if step and self.done[0].step == 0:
            gain = found.against(self.done[0])
            text += f"; against step 0 {gain.mean:+.3f} +- {gain.error:.3f}"
        trainer.say(f"  {text}")
