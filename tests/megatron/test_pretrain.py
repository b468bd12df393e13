"""Real pretraining runs on the newest Megatron-Core: in the ranks' processes, and by torchrun."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.pretrain_checks import FLAGS, PATCH, SCRIPT, TP_SP

HERE = Path(__file__).parent
REPO = HERE.parents[1]


def environment(unpacked: str) -> dict[str, str]:
    """Of a process that has the unpacked wheel first."""
    assert (Path(unpacked) / "megatron" / "training").is_dir(), f"no megatron.training: {unpacked}"
    path = os.pathsep.join([unpacked, str(REPO), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def check_release(unpacked: str, *, timeout: float = 600) -> int:
    """Runs `pretrain_checks` on the release unpacked there; returns how many tests passed.

    Raises: AssertionError with pytest's report where one did not.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(HERE / "pretrain_checks.py")],
        env=environment(unpacked),
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return int(re.findall(r"(\d+) passed", done.stdout)[-1])


@pytest.mark.timeout(650)
def test_pretrain_on_the_newest_release():
    assert check_release(os.environ["MCORE_LOGPROBS_MEGATRON_019"]) >= 8


@pytest.mark.night
@pytest.mark.timeout(300)
def test_run_under_torchrun_and_a_plain_resume(tmp_path):
    """Two real launches with Megatron's default checkpoints: patched, then resumed unpatched.

    One iteration after the checkpoint: Megatron's float32 optimizer then gives every parameter one
    and the same step count, which torch's AdamW counts up once a parameter, patched or not.
    `pretrain_checks` resumes for longer, from the other checkpoint format.
    """
    flags = FLAGS.replace("--ckpt-format torch", "--save-interval 2 --vocab-size 64")
    flags += " --train-iters 3"
    patched = launch(["-m", "mcore_logprobs", "run", SCRIPT], f"{flags} {PATCH} --save {tmp_path}")
    assert "INFO:mcore_logprobs:patched GPTModel" in patched
    plain = launch([SCRIPT], f"{flags} --load {tmp_path} --ckpt-step 2")
    assert "mcore_logprobs" not in plain.split("end of arguments")[1]
    wanted = r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+)"
    assert len(re.findall(wanted, patched)) == 3
    assert re.findall(wanted, plain) == re.findall(wanted, patched)[2:]


def launch(command: list[str], flags: str) -> str:
    """Output of two ranks."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, f"--master-port={port}", *command, *flags.split(), *TP_SP.split()],
        env={
            **environment(os.environ["MCORE_LOGPROBS_MEGATRON_019"]),
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        },
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout + done.stderr
