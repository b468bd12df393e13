"""The adapter on the newest Megatron-Core, which pip does not install on this Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_logprobs.megatron import megatron_features
from tests.megatron.pretrain_checks import FLAGS, PATCH, SCRIPT, TP_SP
from tests.trainers.frame import free_port

WHEEL = "MCORE_LOGPROBS_MEGATRON_019"
HERE = Path(__file__).parent
REPO = HERE.parents[1]


# What looks closest at a release's own code, and what stands on that.
CLOSEST = ("newer_checks", "pretrain_checks", "test_release_matrix", "test_heads")
OTHERS = (
    *("bridge_peft_checks", "test_patch", "test_hybrid", "test_mtp", "test_pipeline"),
    *("test_joints", "test_policy_loss", "test_schedule_plan", "test_expert_parallel"),
    *("test_llava", "test_dynamic_cp", "test_autocast", "test_megatron_fsdp"),
    *("test_offloading", "test_outlived", "test_distributed_optimizer", "test_lm_labels"),
    *("test_wrappers", "test_unpatch"),
)


def environment() -> dict[str, str]:
    """Of a process that has the unpacked wheel first."""
    unpacked = os.environ.get(WHEEL)
    assert unpacked, (
        f"{WHEEL} is not set: it must name a folder with megatron-core 0.19 unpacked. "
        "`bash tests/run.sh` downloads it; by hand: pip download --no-deps --python-version 3.12 "
        "--only-binary=:all: megatron-core==0.19.2, unzip it, and set the variable"
    )
    assert (Path(unpacked) / "megatron" / "core").is_dir(), f"{WHEEL}={unpacked} holds no megatron"
    path = os.pathsep.join([unpacked, str(REPO), os.environ.get("PYTHONPATH", "")])
    # Megatron sets NVTE_* for the models that another test has built in this process.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("NVTE_")}
    return {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.own_sizes
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("files", "least"),
    [(CLOSEST, 70), pytest.param(OTHERS, 140, marks=pytest.mark.night)],
    ids=["closest", "others"],
)
def test_on_newer_megatron(files, least):
    """Its own checks and the older ones, in a process that has the unpacked wheel first."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *(str(HERE / f"{name}.py") for name in files)],
        env=environment(),
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


@pytest.mark.night
@pytest.mark.timeout(600)
def test_run_under_torchrun(tmp_path):
    """Real launches with Megatron's default checkpoints: patched, then resumed unpatched.

    One iteration after the checkpoint: Megatron's float32 optimizer then gives every parameter one
    and the same step count, which torch's AdamW counts up once a parameter, patched or not.
    `pretrain_checks` resumes for longer, from the other checkpoint format.
    """
    flags = FLAGS.replace("--ckpt-format torch", "--save-interval 2 --vocab-size 64")
    flags += " --train-iters 3"
    patched = launch(["-m", "mcore_logprobs", "run", SCRIPT], f"{flags} {PATCH} --save {tmp_path}")
    assert "INFO:mcore_logprobs:patched GPTModel" in patched
    wanted = r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+)"
    assert len(re.findall(wanted, patched)) == 3
    plain = launch([SCRIPT], f"{flags} --load {tmp_path} --ckpt-step 2")
    assert "mcore_logprobs" not in plain.split("end of arguments")[1]
    assert re.findall(wanted, plain) == re.findall(wanted, patched)[2:]


def launch(command: list[str], flags: str) -> str:
    """Output of two ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    torchrun += ["--local-addr=127.0.0.1", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*torchrun, *command, *flags.split(), *TP_SP.split()],
        env={
            **environment(),
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
