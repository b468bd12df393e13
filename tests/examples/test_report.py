"""What a run leaves behind: lines of JSON that survive an interruption, and the plot."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rl.evaluate import Evaluation
from rl.report import Reporter, StepRecord, plot_run, run_steps

LAYOUT = SimpleNamespace(is_main=True)


def _record(step: int) -> StepRecord:
    names = [f.name for f in dataclasses.fields(StepRecord)]
    return StepRecord(**dict.fromkeys(names, 0.5 * step + 0.1) | {"step": step})


def test_resume_drops_later_steps_and_half_a_line(tmp_path: Path) -> None:
    lines = [json.dumps(dataclasses.asdict(_record(step))) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n" + lines[0][:40])
    trainer = SimpleNamespace(step=2, layout=LAYOUT, config=SimpleNamespace(run_dir=tmp_path))
    reporter = Reporter(trainer)
    assert reporter.records == [_record(1), _record(2)]
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert kept == lines[:2]


def test_an_interrupted_run_keeps_its_lines_and_its_plot(tmp_path: Path) -> None:
    class Interrupted:
        """Two steps, then Ctrl-C in the third."""

        layout, step, engine = LAYOUT, 0, SimpleNamespace(name="vLLM")
        config = SimpleNamespace(
            run_dir=tmp_path,
            steps=5,
            save_every=0,
            minutes=0.0,
            name="run",
            task=SimpleNamespace(name="t", eval_questions=0),
            parallel=SimpleNamespace(tp=1, cp=1, pp=1),
        )

        def train_step(self) -> tuple:
            self.step += 1
            if self.step == 3:
                raise KeyboardInterrupt
            sample = SimpleNamespace(reward=1.0, group=0, text="a")
            return _record(self.step), [sample], ["q"]

        def say(self, text: str) -> None:
            said.append(text)

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_steps(Interrupted())
    assert [text[:23] for text in said[:2]] == [
        "step 1/5   reward 0.600",
        "step 2/5   reward 1.100",
    ]
    assert "step 2, 1.1 s" in said[2]  # the table of the last step alone
    assert "best answer: 'q' -> 'a'" in said
    steps = [json.loads(x)["step"] for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("steps", [1, 80])
def test_plot(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "a" / "run.png"
    held_out = [Evaluation(0, [0.0, 0.5]), Evaluation(steps, [1.0, 0.5])][: steps // 20]
    plot_run([_record(i + 1) for i in range(steps)], path, title="a run", held_out=held_out)
    assert path.stat().st_size > 20_000
