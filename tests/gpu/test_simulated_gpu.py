"""What runs on the simulated GPU, each in a process that loads it before torch."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.trainers.frame import free_port

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None,
    reason="this build of torch has a CUDA of its own, which cannot be simulated beside it",
)
REPO = Path(__file__).resolve().parents[2]
SNIPPETS = sorted(path.stem for path in (REPO / "examples" / "snippets").glob("*.py"))
SNIPPETS.remove("tiny")  # what the others run on


def python(*words: str, timeout: float = 200.0, **environment: str) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": str(REPO)} | environment,
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_path(path: str, *words: str) -> tuple[str, ...]:
    """A script on the simulated GPU."""
    code = "import os, runpy, sys; sys.argv[:] = sys.argv[1:]; "
    code += "sys.path.insert(0, os.path.dirname(sys.argv[0])); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return ("-W", "ignore", "-c", f"import tests.gpu.simulated; {code}", path, *words)


def test_random_settings() -> None:
    python("-m", "tests.gpu", "1", "0")


@pytest.mark.night
@pytest.mark.timeout(1200)
def test_many_random_settings() -> None:
    seed = random.SystemRandom().randrange(2**31)
    python("-m", "tests.gpu", "100", str(seed), timeout=1200.0)


def test_it_is_a_gpu() -> None:
    """Results are on it, backwards are in its thread, and it takes no CPU tensor in between."""
    assert python("-c", IS_A_GPU).split() == ["True", "True", "refused"]


def test_sums_of_lazy_logits_under_autocast() -> None:
    """In float32 as those of real logits, which float16 would not hold."""
    assert python("-c", SUMS).split() == ["torch.float32"] * 4 + ["True"]


SUMS = """
import tests.gpu.simulated
import torch
from tests.helpers.lazy import lazy_logits

hidden = torch.full((4, 2, 3), 100.0, dtype=torch.float16, device="cuda")
weight = torch.full((5, 3), 100.0, dtype=torch.float16, device="cuda")
with torch.autocast("cuda", torch.float16):
    both = lazy_logits(hidden, weight), hidden @ weight.t()
    sums = [x.sum() for x in both]
    for x in (*sums, *(torch.linalg.vector_norm(x, dim=-1) for x in both)):
        print(x.dtype)
print(bool(torch.equal(sums[0].cpu(), sums[1].cpu())))
"""


IS_A_GPU = """
import tests.gpu.simulated
import threading
import torch
import mcore_logprobs as m

threads = []

class Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        threads.append(threading.get_ident())
        return g

logits = torch.randn(5, 24, device="cuda", requires_grad=True)
target = torch.arange(5, device="cuda")
logprobs = m.vocab_parallel_logprobs(Watched.apply(logits), target)
logprobs.sum().backward()
expected = logits.detach().cpu().log_softmax(-1)[range(5), range(5)]
print(logprobs.is_cuda and torch.allclose(logprobs.detach().cpu(), expected))
print(logits.grad.is_cuda and threads != [threading.get_ident()])
try:
    logprobs * torch.ones(5)
except RuntimeError:
    print("refused")
"""


@pytest.mark.night
def test_a_wrong_operation_is_caught() -> None:
    """A tensor that is made on the CPU fails the case, and the line reruns it."""
    printed = python("-c", MISTAKE)
    assert "device=cuda" in printed
    assert "all tensors" in printed


MISTAKE = """
import tests.gpu.simulated
import torch
from mcore_logprobs.kernels import reference
from tests.engine.cases import parse
from tests.engine.run import failures

before = reference.gather_target
reference.gather_target = lambda *args: before(*args) + torch.zeros(12)
print(*failures([parse(["logprobs", "logits", "device=cuda"])]))
"""


def test_doctor_and_a_patched_model() -> None:
    """Each check of the self-test is within its bound, and a model that is built where there is a
    GPU lies on it and trains as without the patch."""
    assert python("-W", "ignore", "-c", PATCHED).split() == ["True"] * 5


PATCHED = """
import tests.gpu.simulated
import torch
from mcore_logprobs import LogprobConfig, patch_model
from mcore_logprobs.cpu_megatron import models
from mcore_logprobs.debug.doctor import self_test

print(all(test.ok for test in self_test("cuda")))
models.init_model_parallel()
config = models.transformer_config(hidden_size=32, num_attention_heads=4)
model = models.build_gpt_model(config, vocab_size=96, max_sequence_length=64)
print(all(p.is_cuda for p in model.parameters()))
ids = torch.randint(96, (2, 16)).cuda()
call = ids, torch.arange(16).cuda().expand(2, -1), None
found = []
for patched in (False, True):
    model.zero_grad()
    if patched:
        with patch_model(model, LogprobConfig(fused="require")):
            loss = -model(*call, labels=ids).logprobs
    else:
        loss = model(*call, labels=ids)
    (loss * torch.linspace(0.5, 1.5, 32).cuda().view(2, 16)).sum().backward()
    found.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
# A temperature in a CPU tensor is a number, as it is for the functions.
hot = []
for temperature in (0.5, torch.tensor(0.5)):
    with patch_model(model) as handle, handle.options(temperature=temperature):
        hot.append(model(*call, labels=ids).logprobs)
print(torch.equal(*hot))
(expected, gradients), (got, own) = found
print(torch.allclose(got, expected, atol=1e-5))
print(all(torch.allclose(a, b, atol=1e-4) for a, b in zip(gradients, own)))
models.destroy_model_parallel()
"""


@pytest.mark.night
@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_run_where_there_is_a_gpu(name: str) -> None:
    python(*run_path(f"examples/snippets/{name}.py"))


def metrics(device: str, folder: Path) -> list[dict[str, float]]:
    """A run's numbers, a step each."""
    config = yaml.safe_load((REPO / "configs" / "tiny-cpu.yaml").read_text())
    config |= {"name": device, "device": device, "steps": 3, "save_every": 2}
    config["parallel"] = {"tp": 1, "cp": 1, "pp": 1, "sequence_parallel": False}
    config["rollout"] |= {"engine": "transformers"}
    path = folder / f"{device}.yaml"
    path.write_text(yaml.safe_dump(config))
    words = ["examples/rl_step.py", "--config", str(path), "--output-dir", str(folder)]
    command = run_path(*words) if device == "cuda" else ("-W", "ignore", *words)
    python(
        *command,
        CUDA_VISIBLE_DEVICES="0" if device == "cuda" else "",
        **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())},
    )
    lines = (folder / device / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.night
def test_the_example_trains_as_on_a_cpu(tmp_path: Path) -> None:
    """Megatron's optimizer gives the numbers that torch's does, over several updates a step."""
    on_cpu, on_gpu = (metrics(device, tmp_path) for device in ("cpu", "cuda"))
    assert len(on_gpu) == 3
    for expected, got in zip(on_cpu, on_gpu, strict=True):
        for name in ("reward", "loss", "entropy", "grad_norm", "clip_fraction"):
            assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
