"""examples/run_rl_step.sh before its environment: help, and mistakes in a configuration."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.helpers.documents import ROOT


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def test_help_needs_no_environment() -> None:
    done = run("bash", "examples/run_rl_step.sh", "--help", PATH="/usr/bin:/bin", PYTHON="/none")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    flags = set(re.findall(r"--[a-z][a-z-]+", done.stdout.replace("--cp N --pp N", "--cp --pp")))
    parser = (ROOT / "examples/rl/config.py").read_text()
    assert flags == set(re.findall(r'add\("(--[a-z-]+)"', parser))
    for config in ROOT.glob("configs/*.yaml"):
        assert re.search(rf"configs/{config.name}: \S+", done.stdout)


@pytest.mark.parametrize(
    ("given", "nproc", "message"),
    [
        (["--config", "configs/smollm2-cpu.yaml", "--steps", "0"], None, "steps: expected >= 1"),
        (["--config", "configs/smollm2-cpu.yaml"], "4", "needs a multiple of 3 processes, got 4"),
        (["--config", "configs/missing.yaml"], None, "configs/missing.yaml"),
        (["--config", "configs/tiny-cpu.yaml", "--tp", "3"], None, "heads (4) do not divide by TP"),
        (["--config", "LR"], None, "optimizer.lr: expected > 0, got -1.0"),
    ],
    ids=["value", "processes", "file", "heads", "lr"],
)
def test_mistakes_are_told_once_before_any_process_starts(given, nproc, message, tmp_path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("optimizer: {lr: -1}\n")
    given = [str(wrong) if word == "LR" else word for word in given]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **({"NPROC": nproc} if nproc else {})}
    done = run(sys.executable, "examples/rl_step.py", *given, "--print-processes", **environment)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 4


def test_one_rank_tells_a_mistake() -> None:
    """Started by torchrun itself: the ranks find it alike."""
    given = ["examples/rl_step.py", "--config", "configs/tiny-cpu.yaml", "--steps", "0"]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(sys.executable, *command, *given, **{**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode != 0
    assert done.stderr.count("error: steps: expected >= 1, got 0") == 1
