"""The run as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .metrics import StepRecord

_INK, _FAINT = "#1f2933", "#d5dbe1"
_LEGEND = {"framealpha": 0.8, "edgecolor": "none"}
_BLUE, _RED, _GREEN, _VIOLET = "#2563eb", "#dc2626", "#059669", "#7c3aed"


def plot_run(records: list[StepRecord], path: Path, *, title: str) -> None:
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
    _dress(ax, "Reward", "mean of the step's answers, band: one standard deviation")
    y = line(ax, "reward", "reward", _BLUE)
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
