"""What one side may have computed and what cures it; what `explain_mismatch` gives."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

Alignment = Literal["right", "labels late", "labels early", "values late", "values early"]


@dataclass(frozen=True)
class Settings:
    """What one side computed. The defaults are the right ones.

    Attributes:
        alignment: how its values stand to the targets.
        stale_weights: whether it had the weights before the last update.
        trainer_layers, engine_layers: whether its hidden states have the rounding of the trainer's,
            or of the engine's, layers.
        padding_counted: whether the columns that pad the vocabulary have probability.
        bf16_logits: whether logits were rounded to bfloat16.
        temperature_applied, filter_applied: whether the sampler's temperature, and its filters,
            were.
    """

    alignment: Alignment = "right"
    stale_weights: bool = False
    trainer_layers: bool = False
    engine_layers: bool = False
    padding_counted: bool = False
    bf16_logits: bool = False
    temperature_applied: bool = True
    filter_applied: bool = True

    def departures(self) -> list[str]:
        """Names of the settings that are not the right ones."""
        return [name for name in SETTINGS if getattr(self, name) != getattr(RIGHT, name)]


RIGHT = Settings()
SETTINGS = tuple(Settings.__dataclass_fields__)
# A cause's name, and the cure where the trainer and where the engine departs from the right setting
CAUSES: dict[str, tuple[str, str, str]] = {
    "alignment": (
        "shifted by one",
        "Megatron's labels are already shifted: label t is token t + 1, and the value at t is that "
        "token's. Shift once, before the split over CP (context_parallel_shift)",
        "the engine's value of token t + 1 belongs at position t: drop or add one at the start",
    ),
    "stale_weights": (
        "stale weights",
        "score with the weights that rolled out (before the update), as old_logprobs",
        "send the weights to the engine after every update and drop its prefix cache; or correct "
        "with truncated_importance_weights",
    ),
    "trainer_layers": (
        "rounding in the trainer's layers",
        "float32 layers, or correct with truncated_importance_weights",
        "none: the engine computes the trainer's hidden states, rounding and all",
    ),
    "engine_layers": (
        "rounding in the engine's layers",
        "none: the trainer computes the engine's hidden states, rounding and all",
        "correct with truncated_importance_weights; a float32 engine shows whether it is rounding",
    ),
    "padding_counted": (
        "padded vocabulary counted",
        "LogprobConfig(vocab_size=the true size), or vocab_size= of the function",
        "cut the padded rows off the weights that the engine loads",
    ),
    "bf16_logits": (
        "rounding of the head",
        "logits_dtype=torch.float32: float32 logits from bfloat16 weights, a chunk at a time",
        'a float32 head in the engine (vLLM: --hf-overrides \'{"head_dtype": "float32"}\'), or '
        "correct with truncated_importance_weights",
    ),
    "temperature_applied": (
        "temperature not applied",
        "LogprobConfig(temperature=the sampler's), or temperature= of the function",
        'log-probabilities after the temperature (vLLM: logprobs_mode="processed_logprobs")',
    ),
    "filter_applied": (
        "truncation mass",
        "LogprobConfig(top_k=, top_p=, min_p=), the sampler's; or vocab_parallel_sampling_logprobs",
        'log-probabilities after the filters (vLLM: logprobs_mode="processed_logprobs")',
    ),
}


@dataclass(frozen=True)
class MismatchCause:
    """One part of `train - rollout`.

    Attributes:
        name: the cause, or "remainder".
        side: "train" or "rollout": who departs from the right setting; "" for the remainder.
        setting: the field of `Settings`; "" for the remainder.
        mean, mean_abs, max_abs: of its size per token, in nats.
        share: of the tokens, those that it moves by more than the threshold.
        cure: the setting to change; "" for the remainder.
        per_token: [tokens] its size, float64 on the CPU.
    """

    name: str
    side: str
    setting: str
    mean: float
    mean_abs: float
    max_abs: float
    share: float
    cure: str
    per_token: Tensor = field(repr=False)


@dataclass(frozen=True)
class MismatchExplanation:
    """What `explain_mismatch` found; `causes` and `remainder` add up to `total`, token by token.

    Attributes:
        tokens: how many were explained.
        left_out: tokens without a finite figure: impossible (-inf) under a filter of one side, or
            next to a label that is not known.
        threshold: nats, of `share`.
        train, rollout: what each side was found to compute.
        total: train - rollout; causes: its parts; remainder: what no setting explains.
        notes: what could not be checked and why, and mistakes that both sides share.
    """

    tokens: int
    left_out: int
    threshold: float
    train: Settings
    rollout: Settings
    total: MismatchCause
    causes: tuple[MismatchCause, ...]
    remainder: MismatchCause
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a line of JSON: no per-token values."""
        keys = ("name", "side", "mean", "mean_abs", "max_abs", "share", "cure")

        def plain(cause: MismatchCause) -> dict[str, object]:
            return {key: getattr(cause, key) for key in keys}

        return {
            "tokens": self.tokens,
            "left_out": self.left_out,
            "threshold": self.threshold,
            "train": {name: getattr(self.train, name) for name in SETTINGS},
            "rollout": {name: getattr(self.rollout, name) for name in SETTINGS},
            "total": plain(self.total),
            "causes": [plain(cause) for cause in self.causes],
            "remainder": plain(self.remainder),
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """A table: a line per cause, then the cures and the notes."""
        head = f"{'train - rollout, nats':<44}{'mean':>11}{'mean |.|':>11}{'max |.|':>11}"
        lines = [f"{head}{f'> {self.threshold:g}':>11}"]
        for part in (self.total, *self.causes, self.remainder):
            name = f"  {part.name} ({part.side})" if part.side else f"  {part.name}"
            lines.append(
                f"{name:<44}{part.mean:>+11.2e}{part.mean_abs:>11.2e}{part.max_abs:>11.2e}"
                f"{part.share:>11.1%}"
            )
        dropped = f", {self.left_out} left out (no finite figure)" if self.left_out else ""
        lines.append(f"{self.tokens} tokens{dropped}")
        lines += [f"cure of {c.name} ({c.side}): {c.cure}" for c in self.causes]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def figure(self) -> Any:
        """A matplotlib Figure: how large each part is over the tokens, and the two sides before and
        after the explained parts are taken away. Drawn without a display."""
        return draw(self)


def cause_of(
    setting: str, before: Settings, after: Settings, size: Tensor, threshold: float
) -> MismatchCause:
    """before, after: on the way from the trainer's settings to the engine's."""
    name, cure_train, cure_rollout = CAUSES[setting]
    train_departs = getattr(before, setting) != getattr(RIGHT, setting)
    # Where both depart (late against early), the trainer's cure is named first.
    side, cure = ("train", cure_train) if train_departs else ("rollout", cure_rollout)
    part = part_of(name, size, threshold)
    return replace(part, side=side, setting=setting, cure=cure)


def part_of(name: str, size: Tensor, threshold: float) -> MismatchCause:
    absolute = size.abs()
    return MismatchCause(
        name=name,
        side="",
        setting="",
        mean=size.mean().item(),
        mean_abs=absolute.mean().item(),
        max_abs=absolute.max().item(),
        share=(absolute > threshold).double().mean().item(),
        cure="",
        per_token=size,
    )


# ---- picture -----------------------------------------------------------------------------------

# As many as there can be causes: one per setting, and the rounding of the other side's head.
_COLORS = (
    *("#2563eb", "#d97706", "#059669", "#7c3aed", "#0891b2"),
    *("#be185d", "#65a30d", "#b45309", "#4338ca"),
)


def draw(found: MismatchExplanation) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'the figure needs matplotlib: pip install "mcore-logprobs[examples]"'
        ) from error
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    bars, tail, scatter = figure.subplots(1, 3, width_ratios=(1.05, 1, 1))
    parts = [
        (found.total, "#1f2933"),
        *zip(found.causes, _COLORS, strict=False),
        (found.remainder, "#9aa5b1"),
    ]
    names = [f"{p.name}\n({p.side})" if p.side else p.name for p, _ in parts]
    sizes = [p.mean_abs for p, _ in parts]
    bars.barh(names[::-1], sizes[::-1], color=[color for _, color in parts][::-1])
    for y, size in enumerate(sizes[::-1]):
        bars.text(size, y, f" {size:.1e}", va="center", fontsize=9)
    means = [p.mean for p, _ in parts]
    bars.plot(means[::-1], range(len(parts)), "D", color="white", mec="#1f2933", label="mean")
    bars.axvline(0, color="#1f2933", lw=0.8)
    bars.set_xlim(min(0.0, *means) * 1.2, max(max(sizes), 1e-12) * 1.25)
    bars.set_title("mean |d| per token, nats", loc="left", fontweight="bold")
    bars.legend(framealpha=0.8, edgecolor="none", fontsize=9, loc="lower right")

    for part, color in parts:
        ordered = part.per_token.abs().sort(descending=True).values.clamp(min=1e-9)
        share = (torch.arange(len(ordered)) + 1) / len(ordered)
        tail.plot(ordered.tolist(), share.tolist(), color=color, lw=1.8)
    tail.set(xscale="log", yscale="log", xlabel="nats")
    tail.set_xlim(left=max(1e-7, found.remainder.mean_abs / 300))
    tail.set_title("share of tokens larger than this", loc="left", fontweight="bold")
    tail.text(0.02, 0.02, "colors as on the left", transform=tail.transAxes, fontsize=9)

    explained = found.total.per_token - found.remainder.per_token
    keep = slice(None, None, -(-found.tokens // 5000))
    before, after = found.total.per_token[keep], found.remainder.per_token[keep]
    scatter.axhline(0, color="#d5dbe1", lw=1)
    scatter.scatter(
        explained[keep].tolist(), before.tolist(), s=7, alpha=0.5, color="#1f2933", label="before"
    )
    scatter.scatter(
        explained[keep].tolist(), after.tolist(), s=7, alpha=0.5, color="#d97706", label="after"
    )
    scatter.set(xlabel="explained part, nats", ylabel="train - rollout, nats")
    scatter.set_title("each token, before and after", loc="left", fontweight="bold")
    scatter.legend(framealpha=0.8, edgecolor="none", fontsize=9)
    for axes in (bars, tail, scatter):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e5e9ee", lw=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(
        f"train against rollout, {found.tokens} tokens: mean |d| {found.total.mean_abs:.1e}, "
        f"of which unexplained {found.remainder.mean_abs:.1e}",
        fontsize=12,
        x=0.01,
        ha="left",
    )
    return figure
