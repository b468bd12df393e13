"""What a step reports: a line on the screen, a line of JSON, and the run as one picture."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
import torch.distributed as dist

from mcore_logprobs import TokenStats
from mcore_logprobs.diagnostics import compare_logprobs
from mcore_logprobs.losses import kl_k3

from . import checkpoint
from .data import Batch
from .evaluate import Evaluation, Evaluator, Records
from .layout import Layout, on_main
from .rollout import Sample


@dataclass
class StepRecord:
    """One step. Log-probability figures are over the sampled tokens, in nats, and before the
    step's first update. `rollout_*` compares the trainer with the rollout engine under the same
    temperature and filter; `outside_filter` is the share of tokens left out of the loss, which the
    trainer's filter excludes or for which the engine kept too many ids to report."""

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
    importance_weight: float
    outside_filter: float
    rollout_tokens_per_s: float
    train_tokens_per_s: float
    peak_memory_gib: float
    seconds: float


def token_metrics(batch: Batch, stats: TokenStats, sampled: int, has_kl: bool) -> dict[str, float]:
    """From the old policy's statistics, its reference and the rollout engine's figures; `sampled`
    tokens before some were left out."""
    mask = batch.mask
    mismatch = compare_logprobs(
        stats.logprobs, batch.rollout_logprobs, mask, target_rank=stats.target_rank, seq_dim=1
    )
    kl = kl_k3(stats.logprobs, batch.ref_logprobs)[mask].mean().item() if has_kl else 0.0
    return {
        "kl_reference": kl,
        "entropy": stats.entropy[mask].mean().item(),
        "target_rank_mean": mismatch.target_ranks.mean,
        "target_rank_p95": mismatch.target_ranks.p95,
        "rollout_diff_mean": mismatch.abs_diff_mean,
        "rollout_diff_max": mismatch.abs_diff_max,
        "rollout_kl_k3": mismatch.k3,
        "importance_weight": batch.weights[mask].mean().item(),
        "outside_filter": 1.0 - mask.sum().item() / sampled,
    }


def step_metrics(
    samples: list[Sample],
    updates: list[dict[str, float]],
    batch: Batch,
    layout: Layout,
    seconds: float,
    rollout_seconds: float,
) -> dict[str, float]:
    """The answers', means over the step's updates, and its speed."""
    rewards, answer_tokens = [s.reward for s in samples], sum(len(s.logprobs) for s in samples)
    return {
        "reward": fmean(rewards),
        "reward_std": pstdev(rewards),
        "answer_tokens": answer_tokens / len(samples),
        **{key: fmean(u[key] for u in updates) for key in updates[0]},
        "rollout_tokens_per_s": answer_tokens / rollout_seconds,
        # Every token of the batch, padding included, once for each update.
        "train_tokens_per_s": batch.tokens.numel() * len(updates) / (seconds - rollout_seconds),
        "peak_memory_gib": peak_memory_gib(layout),
        "seconds": seconds,
    }


def peak_memory_gib(layout: Layout) -> float:
    """Largest peak of any rank since its start: device memory on a GPU, resident memory on CPU."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if layout.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    value = torch.tensor(peak, device=layout.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


class Reporter:
    """On rank 0: metrics.jsonl, a line per step and the last step's table. Silent elsewhere."""

    def __init__(self, trainer: Any) -> None:
        self.records: list[StepRecord] = []
        self._trainer, self._best = trainer, ""
        if trainer.layout.is_main:
            self._file = Records(trainer.config.run_dir / "metrics.jsonl", StepRecord, trainer.step)
            self.records = self._file.all

    def add(self, record: StepRecord, samples: list[Sample], questions: list[str]) -> None:
        if self._trainer.layout.is_main:
            self._file.add(record)
            self._trainer.say(step_line(record, self._trainer.config.steps))
            best = max(samples, key=lambda s: s.reward)
            self._best = f"{' '.join(questions[best.group].split())!r} -> {best.text!r}"

    def finish(self, held_out: Sequence[Evaluation]) -> None:
        """The last step's table and the picture, of as many steps as there are."""
        trainer, config, p = self._trainer, self._trainer.config, self._trainer.config.parallel
        if not trainer.layout.is_main or not self.records:
            return
        trainer.say("\n" + step_table(self.records[-1]))
        trainer.say(f"best answer: {self._best}")
        a, b = self.records[0], self.records[-1]
        trainer.say(f"reward: {a.reward:.3f} in step {a.step}, {b.reward:.3f} in step {b.step}")
        plot, layout = config.run_dir / "run.png", f"TP {p.tp} x CP {p.cp} x PP {p.pp}"
        title = f"{config.name}: {config.task.name}, rollout by {trainer.engine.name}, {layout}"
        plot_run(self.records, plot, title=title, held_out=held_out)
        trainer.say(f"wrote {self._file.path} and {plot}")


def run_steps(trainer: Any) -> list[StepRecord]:
    """Steps up to `config.steps`, with their lines, checkpoints and the plot. What ends a run early
    leaves the lines of the steps that it made, and an error or Ctrl-C the plot too."""
    config = trainer.config
    if trainer.step >= config.steps:
        trainer.say(f"nothing to do: step {trainer.step} of {config.steps} is done")
    if trainer.step > config.steps:  # its records, opened, would lose their later steps
        return []
    reporter, evaluator = Reporter(trainer), Evaluator(trainer)
    until = time.monotonic() + 60 * config.minutes
    try:
        evaluator.after_step()
        while trainer.step < config.steps:
            if config.minutes and not on_main(lambda: time.monotonic() < until):
                break  # by one clock for all ranks
            reporter.add(*trainer.train_step())
            evaluator.after_step()
            if config.save_every and trainer.step % config.save_every == 0:
                checkpoint.save(config.run_dir / "checkpoints" / f"step_{trainer.step}", trainer)
        evaluator.after_step(last=True)
    finally:
        reporter.finish(evaluator.done)
    dist.barrier()
    return reporter.records


def step_line(r: StepRecord, steps: int) -> str:
    return (
        f"step {r.step:{len(str(steps))}}/{steps}   reward {r.reward:.3f}   loss {r.loss:+.4f}   "
        f"entropy {r.entropy:.3f}   trainer - engine {r.rollout_diff_max:.1e}   {r.seconds:.1f} s"
    )


def step_table(r: StepRecord) -> str:
    """Two columns of pairs, so that a step fits on a screen."""
    pairs = [
        ("reward", f"{r.reward:.3f} +- {r.reward_std:.3f}"),
        ("answer length", f"{r.answer_tokens:.1f} tokens"),
        ("loss", f"{r.loss:+.5f}"),
        ("gradient norm", f"{r.grad_norm:.4f}"),
        ("entropy", f"{r.entropy:.4f} nats"),
        ("KL to the reference", f"{r.kl_reference:.2e}"),
        ("rank, mean / p95", f"{r.target_rank_mean:.1f} / {r.target_rank_p95:.0f}"),
        ("clip fraction", f"{r.clip_fraction:.3f}"),
        ("trainer - engine, mean", f"{r.rollout_diff_mean:.2e}"),
        ("trainer - engine, largest", f"{r.rollout_diff_max:.2e}"),
        ("trainer, engine: KL", f"{r.rollout_kl_k3:.2e}"),
        ("importance weight, mean", f"{r.importance_weight:.4f}"),
        ("outside the filter", f"{r.outside_filter:.2%}"),
        ("peak memory of a rank", f"{r.peak_memory_gib:.2f} GiB"),
        ("rollout", f"{r.rollout_tokens_per_s:.0f} tokens/s"),
        ("training", f"{r.train_tokens_per_s:.0f} tokens/s"),
    ]
    cells = [f"{name:<26}{value:>16}" for name, value in pairs]
    rows = [f"  {a}    {b}" for a, b in zip(cells[::2], cells[1::2], strict=True)]
    return "\n".join([f"step {r.step}, {r.seconds:.1f} s", *rows])


# ---- the run as one picture ----------------------------------------------------------------------

_INK, _FAINT = "#1f2933", "#d5dbe1"
_BLUE, _RED, _GREEN, _VIOLET = "#2563eb", "#dc2626", "#059669", "#7c3aed"


def plot_run(
    records: list[StepRecord], path: Path, *, title: str, held_out: Sequence[Evaluation] = ()
) -> None:
    """Writes a PNG of six panels. Needs at least one record. A panel's legend stands above it; a
    curve with an axis of its own has that axis in its colour."""
    import matplotlib

    matplotlib.use("Agg")
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # fonts it looks for first
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    colours = dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), _INK)
    plt.rcParams.update({"font.size": 9, "axes.edgecolor": _FAINT, **colours})
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), constrained_layout=True)
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    x, dot = [r.step for r in records], {"lw": 1.8, "ms": 4, "marker": "o"}
    if many := len(records) > 60:
        dot["marker"] = ""

    def curve(ax: Any, name: str, label: str, colour: str, **how: Any) -> list[float]:
        y = [getattr(r, name) for r in records]
        ax.plot(x, y, color=colour, label=label, **{**dot, **how})
        return y

    def panel(ax: Any, title: str, *curves: tuple[str, str, str], legend: bool = True) -> None:
        ax.set_title(title, loc="left", fontweight="bold", pad=20 if legend else 8)
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(color=_FAINT, lw=0.6)
        ax.spines[["top", "right"]].set_visible(False)
        for name, label, colour in curves:
            curve(ax, name, label, colour)
        if legend:
            above = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "ncol": 3}
            ax.legend(frameon=False, borderaxespad=0.1, columnspacing=1.2, **above)

    def own_axis(ax: Any, label: str, colour: str) -> Any:
        ax.set_ylabel(label, color=colour)
        ax.tick_params(axis="y", colors=colour)
        return ax

    reward = axes[0, 0]
    y = curve(reward, "reward", "of the step's answers", _BLUE, alpha=0.5 if many else 1)
    if many:
        smooth = [fmean(y[max(0, i - 9) : i + 1]) for i in range(len(y))]
        reward.plot(x, smooth, color=_BLUE, lw=1.8, label="mean of 10 steps")
    if held_out:
        at, mean = [e.step for e in held_out], [e.mean for e in held_out]
        two_errors = {"yerr": [2 * e.error for e in held_out], "capsize": 3}
        reward.errorbar(
            at, mean, **two_errors, color=_RED, marker="s", ms=5, label="held out, 2 se"
        )
    panel(reward, "Reward")

    loss = own_axis(axes[0, 1], "loss", _BLUE)
    panel(loss, "Loss and gradient norm", ("loss", "", _BLUE), legend=False)
    curve(own_axis(loss.twinx(), "gradient norm", _RED), "grad_norm", "", _RED)

    entropy = own_axis(axes[0, 2], "entropy, nats", _GREEN)
    has_kl = any(r.kl_reference for r in records)
    name = "Entropy and KL to the reference" if has_kl else "Entropy"
    panel(entropy, name, ("entropy", "", _GREEN), legend=False)
    if has_kl:
        curve(own_axis(entropy.twinx(), "KL (k3)", _VIOLET), "kl_reference", "", _VIOLET)

    rank = [("target_rank_mean", "mean", _BLUE), ("target_rank_p95", "95th percentile", _RED)]
    panel(axes[1, 0], "Rank of the sampled token (0: the argmax)", *rank)
    top = 1.2 * max(r.target_rank_p95 for r in records) + 1
    axes[1, 0].set_yscale("symlog", linthresh=1)
    ticks = [t for t in (0, 1, *(d * 10**e for e in range(7) for d in (2, 5, 10))) if t <= top]
    axes[1, 0].set_yticks(ticks, labels=map(str, ticks))
    axes[1, 0].set_ylim(-0.05, top)
    diff = [("rollout_diff_max", "largest", _RED), ("rollout_diff_mean", "mean", _BLUE)]
    panel(axes[1, 1], "Trainer - rollout engine, nats", *diff)
    axes[1, 1].set_yscale("log")
    speed = [("rollout_tokens_per_s", "rollout", _GREEN), ("train_tokens_per_s", "training", _BLUE)]
    panel(axes[1, 2], "Tokens per second, and memory", *speed)
    axes[1, 2].set_yscale("log")
    memory = own_axis(axes[1, 2].twinx(), "peak memory of a rank, GiB", _VIOLET)
    curve(memory, "peak_memory_gib", "", _VIOLET, ls="--", marker="")
    memory.set_ylim(0, 1.25 * records[-1].peak_memory_gib)
    for twin in figure.axes[6:]:
        twin.spines[["top", "left", "bottom"]].set_visible(False)

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
