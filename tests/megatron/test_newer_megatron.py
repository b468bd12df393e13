"""The adapter on the newest Megatron-Core, which pip does not install on this Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_logprobs.megatron import megatron_features

WHEEL = "MCORE_LOGPROBS_MEGATRON_019"
HERE = Path(__file__).parent
REPO = HERE.parents[1]


# What looks closest at a release's own code, and what stands on that.
CLOSEST = ("newer_checks", "test_patch", "test_heads", "test_hybrid", "test_release_matrix")
OTHERS = (
    *("test_mtp", "test_pipeline", "test_joints", "test_policy_loss", "test_schedule_plan"),
    *("test_expert_parallel", "test_llava", "test_dynamic_cp", "test_autocast"),
    *("test_megatron_fsdp", "test_offloading"),
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("files", "least"),
    [(CLOSEST, 60), pytest.param(OTHERS, 60, marks=pytest.mark.night)],
    ids=["closest", "others"],
)
def test_on_newer_megatron(files, least):
    """Its own checks and the older ones, in a process that has the unpacked wheel first."""
    unpacked = os.environ.get(WHEEL)
    assert unpacked, (
        f"{WHEEL} is not set: it must name a folder with megatron-core 0.19 unpacked. "
        "`bash tests/run.sh` downloads it; by hand: pip download --no-deps --python-version 3.12 "
        "--only-binary=:all: megatron-core==0.19.2, unzip it, and set the variable"
    )
    assert (Path(unpacked) / "megatron" / "core").is_dir(), f"{WHEEL}={unpacked} holds no megatron"
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([unpacked, str(REPO), env.get("PYTHONPATH", "")])
    probe = "from mcore_logprobs.megatron import *; print(megatron_features()['megatron-core'])"
    version = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", probe], env=env, capture_output=True, text=True
    ).stdout.split()[-1]
    assert tuple(int(n) for n in version.split(".")[:2]) >= (0, 19), version

    run = subprocess.run(
        [sys.executable, "-m", "pytest", *(str(HERE / f"{name}.py") for name in files)],
        env=env,
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=850,
    )
    report = run.stdout[-6000:] + run.stderr[-2000:]
    assert run.returncode == 0, report
    assert int(re.findall(r"(\d+) passed", run.stdout)[-1]) > least, report


def test_features_of_the_installed_megatron():
    found = megatron_features()
    assert "compute_language_model_loss" in found["GPTModel"]
    assert re.match(r"\d+\.\d+", found["megatron-core"])
