"""vLLM as the rollout engine, on a tiny model: a step, its sync, resume, and how it fails.

`bash tests/run.sh` installs vLLM where it has a wheel; elsewhere these tests say that they need it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.examples.common import trainer_of, without_filter
from tests.helpers.distributed import RankPool

pytestmark = [
    pytest.mark.night,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here; bash tests/run.sh does it where there is a wheel",
    ),
]

# Wide enough for vLLM's attention on a CPU (heads of 32), and more ids than letters.
MODEL = {
    "vocab_size": 27,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}


def _sections(**rollout: Any) -> dict[str, dict[str, Any]]:
    sampling = {"temperature": 0.8, "top_p": 0.9, "importance_cap": 2.0}
    return {
        "model": {"random": MODEL},
        "rollout": {
            "engine": "vllm",
            "prompts": 4,
            "group_size": 4,
            "max_model_len": 64,
            **sampling,
            **rollout,
        },
        "parallel": {"sequence_parallel": False},
        "task": {"eval_questions": 4, "eval_every": 1},
        "grpo": {"micro_batch": 8},
        "optimizer": {"lr": 0.004},
    }


def _steps(out: str) -> Any:
    """Two steps, then a resume after the first of them; what each reports."""
    import dataclasses

    from rl.checks import self_check
    from rl.layout import on_main
    from rl.report import run_steps

    given = {"tp": 2, "cp": 1, "steps": 2, "save_every": 1}
    with trainer_of(sections=_sections(), output_dir=out + "/a", **given) as trainer:
        self_check(trainer)
        straight = [dataclasses.asdict(r) for r in run_steps(trainer)]
        on_main(lambda: trainer.engine.close() if trainer.engine else None)
    with trainer_of(sections=_sections(), output_dir=out + "/b", **given) as trainer:
        trainer.resume(Path(out) / "a" / "tiny-cpu" / "checkpoints" / "step_1")
        resumed = [dataclasses.asdict(r) for r in run_steps(trainer)]
        # The engine now dies in the middle of a run, on every rank an error that says so.
        on_main(lambda: os.kill(trainer.engine.process.pid, signal.SIGKILL))
        started = time.monotonic()
        try:
            trainer.train_step()
            error = "none"
        except ValueError as raised:
            error = str(raised)
        return straight, resumed, error, time.monotonic() - started


@pytest.mark.timeout(280)
def test_steps_sync_resume_and_death(ranks: Any, tmp_path: Path) -> None:
    results = _run(ranks(2), _steps, str(tmp_path))
    straight, resumed, _, _ = results[0]
    assert [r["step"] for r in straight] == [1, 2]
    for record in straight:
        # The second step's rollout is of weights that an update has moved and the sync has sent.
        assert record["rollout_diff_max"] < 1e-3
        assert record["grad_norm"] > 0
        assert record["importance_weight"] == pytest.approx(1, abs=1e-3)
    timed = ("seconds", "rollout_tokens_per_s", "train_tokens_per_s", "peak_memory_gib")
    for key in set(straight[1]) - set(timed):
        assert resumed[0][key] == pytest.approx(straight[1][key], rel=1e-4, abs=1e-5), key
    for _, _, error, seconds in results:
        assert "vLLM's process ended (signal 9)" in error
        assert seconds < 60
    # Held-out questions, before each step and after the last; a resume answers them alike.
    found = {run: (tmp_path / run / "tiny-cpu" / "eval.jsonl").read_text() for run in "ab"}
    evaluated = [json.loads(line)["step"] for line in found["a"].splitlines()]
    assert evaluated == [0, 1, 2]
    assert found["b"].splitlines() == found["a"].splitlines()[1:]
    lines = (tmp_path / "b" / "tiny-cpu" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 1


def _hang(out: str) -> tuple[str, float]:
    from rl.layout import on_main

    sections = _sections(kept_tokens="engine")
    with trainer_of(sections=sections, output_dir=out, tp=2, cp=1) as trainer:
        record, _, _ = trainer.train_step()
        assert record.rollout_diff_max < 1e-3
        assert record.outside_filter == 0
        on_main(lambda: os.kill(trainer.engine.process.pid, signal.SIGSTOP))
        if trainer.engine:  # a healthy step may be slow on a busy machine; this one has stopped
            trainer.engine.timeout = 3.0
        started = time.monotonic()
        try:
            trainer.train_step()
        except ValueError as error:
            return str(error), time.monotonic() - started
        return "none", 0.0


def _min_p(
    out: str, kept_tokens: str, filters: dict[str, float], ignore: bool = False
) -> tuple[float, float, float]:
    sections = _sections(kept_tokens=kept_tokens, **filters)
    trained = trainer_of(sections=sections, output_dir=out, tp=2, cp=1)
    with trained as trainer, without_filter(ignore):
        record, _, _ = trainer.train_step()
        return record.rollout_diff_max, record.outside_filter, record.grad_norm


@pytest.mark.timeout(280)
@pytest.mark.parametrize("kept_tokens", ["trainer", "engine"])
def test_min_p(ranks: Any, tmp_path: Path, kept_tokens: str) -> None:
    """vLLM's processed log-probabilities under min-p; with top-p too where its ids are replayed."""
    filters = {"min_p": 0.2, "top_p": 0.9 if kept_tokens == "engine" else 1.0}
    for diff, outside, grad in _run(ranks(2), _min_p, str(tmp_path), kept_tokens, filters):
        assert diff < 1e-4
        assert outside == 0
        assert grad > 0
    if kept_tokens == "trainer":  # and it does take tokens away
        for diff, _, _ in _run(ranks(2), _min_p, str(tmp_path), kept_tokens, filters, True):
            assert diff > 0.05


@pytest.mark.timeout(280)
def test_a_hanging_engine(ranks: Any, tmp_path: Path) -> None:
    for error, seconds in _run(ranks(2), _hang, str(tmp_path)):
        assert "vLLM was silent for 3 s while" in error
        assert "not one layer or tensor done" in error
        assert seconds < 60


def _run(pool: RankPool, fn: Any, *args: Any) -> list:
    return pool.run(fn, *args, timeout=270)
