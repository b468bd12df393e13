"""Held-out questions: never trained on, asked again with the same seeds, compared one by one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rl.config import RunConfig, SetupError, TaskSection
from rl.data import make_task
from rl.evaluate import Evaluation, Evaluator, Questions


def _questions(eval_questions: int, letters: int = 3) -> Questions:
    options = {"letters": letters, "prompt_length": 3}  # letters ** 3 questions
    section = TaskSection("echo", options, eval_questions=eval_questions)
    return Questions(make_task(section, seed=4), RunConfig(task=section))


def test_training_never_asks_a_held_out_question() -> None:
    questions = _questions(20)
    held_out = [p.question for p in questions.held_out]
    assert len(set(held_out)) == len(held_out) == 20
    asked = {questions.training(i).question for i in range(400)}
    assert asked.isdisjoint(held_out)
    assert len(asked) == 7  # all that are left
    assert [questions.training(i).question for i in range(9)] == [
        _questions(20).training(i).question for i in range(9)
    ]


def test_more_questions_than_the_task_has() -> None:
    with pytest.raises(SetupError, match=r"eval_questions: expected at most 8 .*, got 9"):
        _questions(9, letters=2)
    with pytest.raises(SetupError, match="leave none to train on"):
        _questions(8, letters=2).training(0)


def test_a_gain_is_taken_question_by_question() -> None:
    before, after = Evaluation(0, [0.0, 1.0, 0.0]), Evaluation(9, [0.5, 1.0, 1.0])
    gain = after.against(before)
    assert gain.mean == pytest.approx(0.5)
    assert gain.error == pytest.approx((0.25 / 3) ** 0.5)  # of 0.5, 0 and 1
    assert before.mean == pytest.approx(1 / 3)
    assert before.error == pytest.approx(1 / 3)


def test_when_it_evaluates_and_what_a_resume_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl.evaluate.on_main", lambda fn: fn())
    asked, said = [], []

    class Trainer:
        engine = "engine"
        layout = SimpleNamespace(is_main=True)
        config = SimpleNamespace(task=TaskSection(eval_questions=2, eval_every=2), run_dir=tmp_path)
        say = said.append
        step = 0

        def __init__(self) -> None:
            self.questions = SimpleNamespace(held_out=["p", "q"], answer=self.answer)

        def answer(self, *given: Any) -> list:
            asked.append((str(given[0]), tuple(given[1]), *given[2:]))
            return [SimpleNamespace(reward=0.1 * self.step), SimpleNamespace(reward=0.5)]

    def steps(trainer: Trainer, until: int) -> list[int]:
        evaluator = Evaluator(trainer)
        evaluator.after_step()
        while trainer.step < until:
            trainer.step += 1
            evaluator.after_step()
        evaluator.after_step(last=True)
        lines = (tmp_path / "eval.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [e.step for e in evaluator.done]
        return [e.step for e in evaluator.done]

    assert steps(Trainer(), 3) == [0, 2, 3]
    assert "2 held-out questions: reward 0.350 +- 0.150; against step 0 +0.100 +- 0.100" in said[1]
    resumed = Trainer()
    resumed.step = 2
    assert steps(resumed, 4) == [0, 2, 4]
    assert len(set(asked)) == 1  # the same questions with the same seeds every time
