"""What a step reports: computed, printed as a table, written as a line of JSON, drawn."""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mcore_logprobs.diagnostics import compare_logprobs
from mcore_logprobs.losses import kl_k3, truncated_importance_weights

from . import checkpoint
from .config import RunConfig
from .data import Batch
from .evaluate import Evaluation, Evaluator
from .layout import Layout, on_main
from .rollout import Sample


@dataclass
class StepRecord:
    """One step. Log-probability figures are over the sampled tokens, in nats, and before the
    step's first update; `rollout_*` holds the trainer against the rollout engine, under the same
    temperature and top-p. `engine_kept_diff_max` is the largest difference under exactly the tokens
    that the engine kept; `weight_*` the mean truncated importance weight by either filter;
    `outside_filter` the share of tokens that the trainer's filter excludes."""

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
    engine_kept_diff_max: float
    weight_trainer_filter: float
    weight_engine_filter: float
    outside_filter: float
    rollout_tokens_per_s: float
    train_tokens_per_s: float
    peak_memory_gib: float
    seconds: float


def token_metrics(
    batch: Batch, scores: Any, outside: torch.Tensor, config: RunConfig
) -> dict[str, float]:
    """From the old policy's statistics, its reference and the rollout engine's figures."""
    stats, mask = scores.stats, batch.mask
    finite = mask & scores.trainer.isfinite()
    mismatch = compare_logprobs(
        scores.trainer, batch.rollout_logprobs, finite, target_rank=stats.target_rank, seq_dim=1
    )
    cap = config.rollout.importance_cap or 2.0
    weight_trainer, weight_engine = (
        truncated_importance_weights(lp[finite], batch.rollout_logprobs[finite], cap=cap)
        for lp in (scores.trainer, scores.engine)
    )
    replayed = (scores.engine - batch.rollout_logprobs)[mask & scores.engine.isfinite()].abs()
    has_reference = config.grpo.kl_coef > 0
    kl = kl_k3(stats.logprobs, batch.ref_logprobs)[mask].mean().item() if has_reference else 0.0
    return {
        "kl_reference": kl,
        "entropy": stats.entropy[mask].mean().item(),
        "target_rank_mean": mismatch.target_ranks.mean,
        "target_rank_p95": mismatch.target_ranks.p95,
        "rollout_diff_mean": mismatch.abs_diff_mean,
        "rollout_diff_max": mismatch.abs_diff_max,
        "rollout_kl_k3": mismatch.k3,
        "engine_kept_diff_max": replayed.max().item(),
        "weight_trainer_filter": weight_trainer.mean().item(),
        "weight_engine_filter": weight_engine.mean().item(),
        "outside_filter": outside.sum().item() / (mask | outside).sum().item(),
    }


def sample_metrics(samples: list[Sample]) -> dict[str, float]:
    rewards = torch.tensor([s.reward for s in samples])
    return {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
        "answer_tokens": fmean(len(s.logprobs) for s in samples),
    }


def step_metrics(
    updates: list[dict[str, float]],
    samples: list[Sample],
    batch: Batch,
    layout: Layout,
    started: float,
    rollout_seconds: float,
) -> dict[str, float]:
    """Means over the step's updates, and its speed."""
    seconds = time.perf_counter() - started
    answer_tokens = sum(len(s.logprobs) for s in samples)
    return {
        **{key: sum(u[key] for u in updates) / len(updates) for key in updates[0]},
        "rollout_tokens_per_s": answer_tokens / rollout_seconds,
        # Every token of the batch, padding included, once for each update.
        "train_tokens_per_s": batch.tokens.numel() * len(updates) / (seconds - rollout_seconds),
        "peak_memory_gib": peak_memory_gib(layout),
        "seconds": seconds,
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
            # A run that was killed may have left half a line behind: a whole one ends in a newline.
            lines = self._path.read_text().split("\n")[:-1]
            records = [StepRecord(**json.loads(line)) for line in lines]
            self.records = [r for r in records if r.step <= resume_step]
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


def run_steps(trainer: Any) -> list[StepRecord]:
    """Steps up to `config.steps`, with table, JSON lines, checkpoints and the plot. What ends a run
    early (the engine, Ctrl-C, a signal) leaves the lines and the plot of the steps that it made."""
    config, layout, p = trainer.config, trainer.layout, trainer.config.parallel
    out = config.run_dir
    reporter = Reporter(out, layout, trainer.console, resume_step=trainer.step)
    evaluator = Evaluator(trainer, out / "eval.jsonl", trainer.say)
    until = time.monotonic() + 60 * config.minutes
    columns = (TextColumn("GRPO"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=trainer.console, disable=not layout.is_main)
    try:
        with bar:
            shown = bar.add_task("steps", total=config.steps, completed=trainer.step)
            evaluator.after_step()
            while trainer.step < config.steps:
                if config.minutes and not on_main(lambda: time.monotonic() < until):
                    break  # by one clock for all ranks
                reporter.add(*trainer.train_step())
                bar.update(shown, completed=trainer.step)
                evaluator.after_step()
                if config.save_every and trainer.step % config.save_every == 0:
                    checkpoint.save(out / "checkpoints" / f"step_{trainer.step}", trainer)
            evaluator.after_step(last=True)
    finally:
        if layout.is_main and reporter.records:
            title = f"{config.name}: {config.task.name}, {config.rollout.engine}, "
            title += f"TP {p.tp} x CP {p.cp} x PP {p.pp}"
            plot_run(reporter.records, out / "run.png", title=title, held_out=evaluator.done)
            trainer.say(f"wrote {out / 'metrics.jsonl'} and {out / 'run.png'}")
    dist.barrier()
    return reporter.records


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
        ("max |d|, engine's kept tokens", f"{r.engine_kept_diff_max:.2e}"),
        (
            "importance weight, own / engine's filter",
            f"{r.weight_trainer_filter:.4f} / {r.weight_engine_filter:.4f}",
        ),
        ("outside the trainer's filter", f"{r.outside_filter:.2%}"),
        ("peak memory of a rank", f"{r.peak_memory_gib:.2f} GiB"),
        ("rollout", f"{r.rollout_tokens_per_s:.0f} tokens/s"),
        ("training", f"{r.train_tokens_per_s:.0f} tokens/s"),
    ]
    table = Table(title=f"step {r.step}   ({r.seconds:.1f} s)", title_justify="left")
    for justify in ("left", "right", "left", "right"):
        table.add_column(justify=justify)
    table.show_header = False
    pairs += [("", "")] * (len(pairs) % 2)
    for left, right in zip(pairs[::2], pairs[1::2], strict=True):
        table.add_row(*left, *right)
    return table


# ---- the run as one picture ----------------------------------------------------------------------

_INK, _FAINT = "#1f2933", "#d5dbe1"
_LEGEND = {"framealpha": 0.8, "edgecolor": "none"}
_BLUE, _RED, _GREEN, _VIOLET = "#2563eb", "#dc2626", "#059669", "#7c3aed"


def plot_run(
    records: list[StepRecord],
    path: Path,
    *,
    title: str,
    held_out: Sequence[Evaluation] = (),
) -> None:
    """Writes a PNG of six panels. Needs at least one record."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update(
        {"font.size": 9, "axes.edgecolor": _FAINT, "text.color": _INK, "axes.labelcolor": _INK}
    )
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), constrained_layout=True)
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    x = [r.step for r in records]
    few = len(records) <= 30

    def line(ax: Any, name: str, label: str, color: str) -> list[float]:
        y = [getattr(r, name) for r in records]
        ax.plot(x, y, color=color, lw=1.8, marker="o" if few else None, ms=4, label=label)
        return y

    ax = axes[0, 0]
    if held_out:
        _dress(ax, "Reward", "of the step's answers; of held-out questions with 2 standard errors")
    else:
        _dress(ax, "Reward", "mean of the step's answers, band: one standard deviation")
    y = line(ax, "reward", "training", _BLUE)
    if held_out:
        ax.errorbar(
            [e.step for e in held_out],
            [e.mean for e in held_out],
            [2 * e.error for e in held_out],
            color=_RED,
            lw=1.8,
            marker="s",
            ms=5,
            capsize=3,
            label="held out",
        )
        ax.legend(**_LEGEND)
    else:
        spread = [r.reward_std for r in records]
        low = [a - b for a, b in zip(y, spread, strict=True)]
        high = [a + b for a, b in zip(y, spread, strict=True)]
        ax.fill_between(x, low, high, color=_BLUE, alpha=0.12, lw=0)
    if not few:
        smooth = [
            sum(y[max(0, i - 9) : i + 1]) / len(y[max(0, i - 9) : i + 1]) for i in range(len(y))
        ]
        ax.plot(x, smooth, color=_INK, lw=1.2, ls="--", label="mean of 10 steps")
        ax.legend(**_LEGEND)

    ax = axes[0, 1]
    _dress(ax, "Loss and gradient norm", "over the step's updates")
    line(ax, "loss", "loss", _BLUE)
    twin = ax.twinx()
    twin.spines[["top", "left", "bottom"]].set_visible(False)
    line(twin, "grad_norm", "gradient norm", _RED)
    _joint_legend(ax, twin)

    ax = axes[0, 2]
    _dress(ax, "Policy", "entropy in nats; KL to the reference (k3)")
    line(ax, "entropy", "entropy", _GREEN)
    twin = ax.twinx()
    twin.spines[["top", "left", "bottom"]].set_visible(False)
    line(twin, "kl_reference", "KL to reference", _VIOLET)
    _joint_legend(ax, twin)

    ax = axes[1, 0]
    _dress(ax, "Rank of the sampled token", "0: the argmax")
    line(ax, "target_rank_mean", "mean", _BLUE)
    line(ax, "target_rank_p95", "95th percentile", _RED)
    ax.set_yscale("symlog", linthresh=1)
    ax.legend(**_LEGEND)

    ax = axes[1, 1]
    _dress(ax, "Trainer against rollout engine", "|difference of log-probabilities| in nats")
    line(ax, "rollout_diff_max", "largest", _RED)
    line(ax, "rollout_diff_mean", "mean", _BLUE)
    ax.set_yscale("log")
    ax.legend(**_LEGEND)

    ax = axes[1, 2]
    _dress(ax, "Throughput", "tokens per second; peak memory of a rank in GiB")
    line(ax, "rollout_tokens_per_s", "rollout", _GREEN)
    line(ax, "train_tokens_per_s", "training", _BLUE)
    ax.set_ylim(bottom=0)
    twin = ax.twinx()
    twin.spines[["top", "left", "bottom"]].set_visible(False)
    line(twin, "peak_memory_gib", "peak memory", _VIOLET)
    twin.set_ylim(bottom=0)
    _joint_legend(ax, twin)

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _dress(ax: Any, title: str, note: str) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_title(title, loc="left", fontweight="bold", pad=18)
    ax.text(0, 1.03, note, transform=ax.transAxes, fontsize=8, color="#66727f")
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(color=_FAINT, lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _joint_legend(ax: Any, twin: Any) -> None:
    handles, labels = ax.get_legend_handles_labels()
    more, more_labels = twin.get_legend_handles_labels()
    ax.legend(handles + more, labels + more_labels, **_LEGEND)
