"""Ranks of a launcher: each has a hash seed of its own, and sets of texts another order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_BY_SEED = """
import sys, torch, torch.distributed as dist
from mcore_logprobs.diagnostics import explain_mismatch

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
z = 2.0 * torch.randn(2, 40, 64)
target = torch.randint(0, 60, (2, 40))
engine = z.clone()
engine[..., 60:] = -torch.inf
train, rollout = (
    x.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1) for x in (z, engine / 0.7)
)
found = explain_mismatch(
    train,
    rollout,
    target,
    logits=z.chunk(2, -1)[rank],
    temperature=0.7,
    vocab_size=60,
    tp_group=dist.group.WORLD,
)
dist.barrier()
dist.destroy_process_group()
print(found.remainder.max_abs, [cause.name for cause in found.causes])
"""


@pytest.mark.night
def test_explain_mismatch(tmp_path: Path) -> None:
    """Its figures take collectives, setting by setting."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _BY_SEED, str(rank), str(tmp_path / "store")],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, seed in enumerate((3, 4))
    ]
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    lines = [text.strip().splitlines()[-1] for text in printed]
    assert lines[0] == lines[1]
    remainder, causes = lines[0].split(" ", 1)
    assert float(remainder) < 1e-5
    assert causes.strip() == "['padded vocabulary counted', 'temperature not applied']"
