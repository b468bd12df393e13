"""Draws docs/img/*.svg:  python docs/img/pictures.py [--png FOLDER]

fused-path.svg is one row's way through the fused path; costs.svg is the tables of
benchmarks/results, as they were printed. Each file has two palettes and a background
of its own, and follows the reader's light or dark setting. --png writes both as PNG, to look at.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch, Rectangle

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks" / "results"

# role: (light, dark)
PALETTE = {
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1b1f24", "#e6edf3"),
    "faint": ("#6a737d", "#9aa4af"),
    "grid": ("#d5dae0", "#2d333b"),
    "box": ("#eef2f6", "#1c2530"),
    "ours": ("#0b62b8", "#6cb2ff"),
    "ours2": ("#0f8a7e", "#4fd1c1"),
    "peer1": ("#c2500a", "#ff9d5c"),
    "peer2": ("#8c2fb0", "#d78bf2"),
    "peer3": ("#7a6a00", "#d9c84a"),
}
FONT = 12.5


def colors(theme: int) -> dict[str, str]:
    return {role: pair[theme] for role, pair in PALETTE.items()}


def fused_path(c: dict[str, str]) -> Any:
    figure = pyplot.figure(figsize=(11, 5.6), facecolor=c["paper"])
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, 11), ylim=(0, 5.6))
    axis.axis("off")
    width, height, lefts = 2.2, 1.3, (0.3, 3.05, 5.8, 8.5)
    top, low = 3.45, 0.85

    def box(place: int, y: float, title: str, shape: str, file: str, role: str) -> None:
        left = lefts[place]
        axis.add_patch(
            FancyBboxPatch(
                (left, y),
                width,
                height,
                boxstyle="round,pad=0,rounding_size=0.12",
                facecolor=c["box"],
                edgecolor=c[role],
                linewidth=2,
            )
        )
        middle = left + width / 2
        say = {"ha": "center", "va": "center"}
        axis.text(middle, y + 1.0, title, color=c["ink"], fontsize=FONT, weight="bold", **say)
        axis.text(middle, y + 0.65, shape, color=c["ink"], fontsize=FONT, **say)
        axis.text(middle, y + 0.27, file, color=c["faint"], fontsize=FONT - 1.5, **say)

    def arrow(x0: float, y0: float, x1: float, y1: float, text: str = "") -> None:
        axis.annotate(
            "",
            (x1, y1),
            (x0, y0),
            arrowprops={"arrowstyle": "-|>", "color": c["ink"], "linewidth": 1.8},
        )
        if text:
            axis.text(
                (x0 + x1) / 2, y0 + 0.13, text, ha="center", color=c["ink"], fontsize=FONT - 1
            )

    def loop(y: float) -> None:
        axis.add_patch(
            Rectangle(
                (lefts[1] - 0.22, y - 0.22),
                lefts[2] + width - lefts[1] + 0.4,
                height + 0.44,
                fill=False,
                edgecolor=c["faint"],
                linestyle=(0, (4, 3)),
                linewidth=1.3,
            )
        )

    loop(top)
    loop(low)
    axis.text(
        (lefts[1] + lefts[2] + width) / 2,
        top + height + 0.32,
        "forward: for each block of columns",
        ha="center",
        color=c["ours"],
        fontsize=FONT,
    )
    axis.text(
        (lefts[1] + lefts[2] + width) / 2,
        low - 0.5,
        "backward: for each block of columns",
        ha="center",
        color=c["peer1"],
        fontsize=FONT,
    )
    box(0, top, "hidden tile", "[rows, h]", "ops/rows.py", "ours")
    box(1, top, "chunk of logits", "[rows, block]", "ops/head.py", "ours")
    box(2, top, "row statistics", "m, s, t, e   [k, rows]", "kernels/stats.py", "ours")
    box(3, top, "logprob, entropy", "merged over TP", "ops/apply.py", "ours")
    box(3, low, "upstream", "g, h for each row", "kernels/stats.py", "peer1")
    box(2, low, "chunk again", "[rows, block]", "ops/head.py", "peer1")
    box(1, low, "dLogits", "in the chunk's place", "kernels/reference.py", "peer1")
    box(0, low, "dWeight, dHidden", "sum over TP", "ops/head_gradients.py", "peer1")
    up, down = top + height / 2, low + height / 2
    arrow(lefts[0] + width, up, lefts[1], up)
    arrow(lefts[1] + width, up, lefts[2], up)
    arrow(lefts[2] + width, up, lefts[3], up)
    arrow(lefts[3] + width / 2, top, lefts[3] + width / 2, low + height)
    arrow(lefts[3], down, lefts[2] + width, down)
    arrow(lefts[2], down, lefts[1] + width, down)
    arrow(lefts[1], down, lefts[0] + width, down)
    between = (top + low + height) / 2
    note = {"color": c["ink"], "fontsize": FONT - 1, "va": "center"}
    axis.text(lefts[0], between, "1 product forward,\n3 backward", **note)
    axis.text(lefts[1] - 0.1, between, "a chunk is dropped before the next is made", **note)
    axis.text(lefts[3] + width / 2 - 0.15, between, "your loss", ha="right", **note)
    axis.text(
        lefts[3] + width / 2,
        top + height + 0.32,
        "one all-gather",
        ha="center",
        color=c["ours"],
        fontsize=FONT,
    )
    return figure


# name in the tables: (name in the picture, role, line)
SERIES = {
    "logprobs": ("this library", "ours", "-"),
    "+ entropy": ("this library, with entropy", "ours2", "-"),
    "megatron": ("Megatron", "peer1", "--"),
    "megatron fused": ("Megatron, fused", "peer2", "--"),
    "torch cross_entropy": ("torch cross entropy", "peer3", "--"),
    "floor: copy": ("copy (the floor)", "faint", ":"),
}


def points(name: str, varied: str) -> dict[str, list[tuple[int, float, float | None]]]:
    """(rows or vocab, ms of both passes, peak MiB or None) of each series, from a result table."""
    found: dict[str, list[tuple[int, float, float | None]]] = {}
    at = 0
    for line in (RESULTS / name).read_text().splitlines():
        if head := re.search(rf"^log-probabilities from logits:.* ?{varied} (\d+)", line):
            at = int(head[1])
        cells = re.split(r" {2,}", line.strip())
        if cells[0] in SERIES and len(cells) >= 5:
            is_floor = cells[0].startswith("floor")
            peak = None if is_floor else float(cells[6])
            found.setdefault(cells[0], []).append((at, float(cells[3]), peak))
    return found


def costs(c: dict[str, str]) -> Any:
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.6), facecolor=c["paper"])
    sweeps = (
        ("2026-11-amd-epyc-2-cores-sweep-rows.txt", "rows", "rows, V 32768"),
        ("2026-11-amd-epyc-2-cores-sweep-vocab.txt", "vocab", "vocabulary V, 256 rows"),
    )
    for column, (file, varied, label) in enumerate(sweeps):
        for name, curve in points(file, varied).items():
            title, role, line = SERIES[name]
            style = {"color": c[role], "linestyle": line, "linewidth": 2.2, "label": title}
            for row, value in ((0, 1), (1, 2)):
                known = [(p[0], p[value]) for p in curve if p[value]]
                if known:
                    axes[row, column].plot(
                        *zip(*known, strict=True), marker="o", markersize=5, **style
                    )
        for row, title in ((0, "time, ms"), (1, "extra memory, MiB")):
            axis = axes[row, column]
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            ticks = sorted({x for line in axis.lines for x in line.get_xdata()})
            axis.set_xticks(ticks, [f"{x:,}" for x in ticks])
            axis.minorticks_off()
            axis.yaxis.set_major_formatter("{x:,g}")
            axis.set_xlabel(label, color=c["ink"], fontsize=FONT)
            axis.set_title(title, loc="left", color=c["ink"], fontsize=FONT + 1, weight="bold")
            axis.set_facecolor(c["paper"])
            axis.grid(color=c["grid"], linewidth=0.8)
            axis.tick_params(colors=c["ink"], labelsize=FONT - 1.5)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
            for side in ("bottom", "left"):
                axis.spines[side].set_color(c["faint"])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="lower center",
        ncol=3,
        frameon=False,
        labelcolor=c["ink"],
        fontsize=FONT,
    )
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    return figure


def write(name: str, draw: Any, png: Path | None) -> None:
    figure = draw(colors(0))
    path = HERE / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None}, facecolor=figure.get_facecolor())
    pyplot.close(figure)
    # matplotlib writes colours as inline styles; these rules replace them in a dark setting.
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark} !important}}'
        for light, dark in PALETTE.values()
        for kind in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>\n <defs>"
    text = path.read_text()
    text = re.sub(r"[ \t]+$", "", text.replace("<defs>", style, 1), flags=re.M)
    path.write_text(text)
    if png is not None:
        for theme, suffix in enumerate(("light", "dark")):
            figure = draw(colors(theme))
            figure.savefig(png / f"{name}-{suffix}.png", dpi=45, facecolor=figure.get_facecolor())
            pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--png", type=Path, metavar="FOLDER")
    png = parser.parse_args().png
    matplotlib.rcParams |= {"svg.hashsalt": "mcore_logprobs", "font.family": "DejaVu Sans"}
    for name, draw in (("fused-path", fused_path), ("costs", costs)):
        write(name, draw, png)


if __name__ == "__main__":
    main()
