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
    ],
    ids=["value", "processes", "file"],
)
def test_mistakes_are_told_before_any_process_starts(given, nproc, message) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **({"NPROC": nproc} if nproc else {})}
    done = run(sys.executable, "examples/rl_step.py", *given, "--print-processes", **environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 4
