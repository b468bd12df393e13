"""What a step reports: computed, printed as a table, written as a line of JSON."""

from __future__ import annotations

import dataclasses
import json
import resource
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mcore_logprobs import TokenStats
from mcore_logprobs.diagnostics import compare_logprobs
from mcore_logprobs.losses import kl_k3

from .batch import Batch
from .layout import Layout
from .rollout import Sample


@dataclass
class StepRecord:
    """One step. Log-probability figures are over the sampled tokens, in nats, and before the
    step's first update; `rollout_*` holds the trainer against the rollout engine."""

    step: int
    reward: float
    reward_std: float
    answer_tokens: float
    loss: float
    kl_reference: float
    entropy: float
    target_rank_mean: float
    target_rank_p95: float
    clip_fraction: float
    grad_norm: float
    rollout_diff_mean: float
    rollout_diff_max: float
    rollout_kl_k3: float
    rollout_tokens_per_s: float
    train_tokens_per_s: float
    peak_memory_gib: float
    seconds: float


def token_metrics(batch: Batch, stats: TokenStats) -> dict[str, float]:
    """From the old policy's statistics, its reference and the rollout engine's figures."""
    mask = batch.mask
    mismatch = compare_logprobs(
        stats.logprobs, batch.rollout_logprobs, mask, target_rank=stats.target_rank, seq_dim=1
    )
    return {
        "kl_reference": kl_k3(stats.logprobs, batch.ref_logprobs)[mask].mean().item(),
        "entropy": stats.entropy[mask].mean().item(),
        "target_rank_mean": mismatch.target_ranks.mean,
        "target_rank_p95": mismatch.target_ranks.p95,
        "rollout_diff_mean": mismatch.abs_diff_mean,
        "rollout_diff_max": mismatch.abs_diff_max,
        "rollout_kl_k3": mismatch.k3,
    }


def sample_metrics(samples: list[Sample]) -> dict[str, float]:
    rewards = torch.tensor([s.reward for s in samples])
    return {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
        "answer_tokens": fmean(len(s.logprobs) for s in samples),
    }


def peak_memory_gib(layout: Layout) -> float:
    """Largest peak of any rank since its start: device memory on a GPU, resident memory on CPU."""
    if layout.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    value = torch.tensor(peak, device=layout.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


class Reporter:
    """Rank 0's table, JSON lines and samples of text; silent on the other ranks."""

    def __init__(
        self, run_dir: Path, layout: Layout, console: Console, *, resume_step: int
    ) -> None:
        self.records: list[StepRecord] = []
        self._active = layout.is_main
        self._path = run_dir / "metrics.jsonl"
        self._console = console
        if not self._active:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        if resume_step and self._path.exists():
            lines = [json.loads(line) for line in self._path.read_text().splitlines()]
            self.records = [StepRecord(**line) for line in lines if line["step"] <= resume_step]
        text = "".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in self.records)
        self._path.write_text(text)

    def add(self, record: StepRecord, samples: list[Sample], questions: list[str]) -> None:
        if not self._active:
            return
        self.records.append(record)
        with self._path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")
        best = max(samples, key=lambda s: s.reward)
        self._console.print(step_table(record))
        question = " ".join(questions[best.group].split())
        self._console.print(
            f"  best answer (reward {best.reward:.2f}): {question!r} -> {best.text!r}\n",
            markup=False,
            highlight=False,
        )


def step_table(r: StepRecord) -> Table:
    """Two columns of pairs, so that a step fits on a screen."""
    pairs = [
        ("reward", f"{r.reward:.3f} ± {r.reward_std:.3f}"),
        ("answer length", f"{r.answer_tokens:.1f} tokens"),
        ("loss", f"{r.loss:+.5f}"),
        ("gradient norm", f"{r.grad_norm:.4f}"),
        ("KL to reference (k3)", f"{r.kl_reference:.2e}"),
        ("clip fraction", f"{r.clip_fraction:.3f}"),
        ("entropy", f"{r.entropy:.4f} nats"),
        ("target rank mean / p95", f"{r.target_rank_mean:.1f} / {r.target_rank_p95:.0f}"),
        ("train - rollout, mean |d|", f"{r.rollout_diff_mean:.2e}"),
        ("train - rollout, max |d|", f"{r.rollout_diff_max:.2e}"),
        ("train vs rollout KL (k3)", f"{r.rollout_kl_k3:.2e}"),
        ("peak memory of a rank", f"{r.peak_memory_gib:.2f} GiB"),
        ("rollout", f"{r.rollout_tokens_per_s:.0f} tokens/s"),
        ("training", f"{r.train_tokens_per_s:.0f} tokens/s"),
    ]
    table = Table(title=f"step {r.step}   ({r.seconds:.1f} s)", title_justify="left")
    for justify in ("left", "right", "left", "right"):
        table.add_column(justify=justify)
    table.show_header = False
    for left, right in zip(pairs[::2], pairs[1::2], strict=True):
        table.add_row(*left, *right)
    return table
