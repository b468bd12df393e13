"""Draws docs/img/*.svg:  python docs/img/pictures.py [--png FOLDER]

fused-path.svg is the fused path, one-way.svg how the code is cut; costs.svg, keep.svg and
trainer.svg are tables of benchmarks/results, as they were printed. Each file has two palettes and a
background of its own, and follows the reader's light or dark setting. --png writes them as PNG, to
look at.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch, Rectangle

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from benchmarks import tables  # noqa: E402

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
Pair = tuple[float, float]


def colors(theme: int) -> dict[str, str]:
    return {role: pair[theme] for role, pair in PALETTE.items()}


def _canvas(c: dict[str, str], height: float) -> tuple[Any, Any]:
    figure = pyplot.figure(figsize=(11, height), facecolor=c["paper"])
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, 11), ylim=(0, height))
    axis.axis("off")
    return figure, axis


def _say(axis: Any, x: float, y: float, text: str, color: str, **style: Any) -> None:
    given = {"ha": "center", "va": "center", "fontsize": FONT} | style
    axis.text(x, y, text, color=color, **given)


def _box(axis: Any, c: dict[str, str], corner: Pair, size: Pair, role: str, *lines: str) -> None:
    """A rounded box; the first line in bold, the last one faint where there are three."""
    (left, low), (width, height) = corner, size
    shape = FancyBboxPatch(
        corner,
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.1",
        facecolor=c["box"],
        edgecolor=c[role],
        linewidth=2,
    )
    axis.add_patch(shape)
    for number, line in enumerate(lines):
        y = low + height * (len(lines) - number - 0.5) / len(lines)
        faint = number == 2
        weight = "bold" if number == 0 else "normal"
        size_of = FONT - 1.5 if faint else FONT
        color = c["faint" if faint else "ink"]
        _say(axis, left + width / 2, y, line, color, weight=weight, fontsize=size_of)


def _arrow(axis: Any, color: str, start: Pair, end: Pair, style: str = "-|>") -> None:
    axis.annotate(
        "", end, start, arrowprops={"arrowstyle": style, "color": color, "linewidth": 1.8}
    )


def fused_path(c: dict[str, str]) -> Any:
    figure, axis = _canvas(c, 5.8)

    def matrix(corner: Pair, size: Pair, part: Pair, part_size: Pair, *, held: bool) -> None:
        edge = {"edgecolor": c["ink"] if held else c["faint"], "linewidth": 1.5}
        fill = {"facecolor": c["box"]} if held else {"fill": False, "linestyle": (0, (4, 3))}
        axis.add_patch(Rectangle(corner, *size, **edge, **fill))
        axis.add_patch(Rectangle(part, *part_size, facecolor=c["ours"], linewidth=0))

    low, tall, left, wide = 1.25, 2.6, 1.9, 3.7
    tile, tile_height, block, block_width = 2.75, 0.6, 3.0, 1.0
    matrix((0.55, low), (0.8, tall), (0.55, tile), (0.8, tile_height), held=True)
    matrix((left, 4.2), (wide, 0.8), (block, 4.2), (block_width, 0.8), held=True)
    matrix((left, low), (wide, tall), (block, tile), (block_width, tile_height), held=False)
    ink, faint = c["ink"], c["faint"]
    _say(axis, 0.95, low - 0.25, "hidden\n[tokens, h]", ink, va="top")
    _say(axis, left + wide / 2, 5.3, "weight of the LM head, transposed  [h, V/TP]", ink)
    _say(axis, left + wide / 2, low + 0.75, "logits [tokens, V/TP]", faint)
    _say(axis, left + wide / 2, low + 0.4, "are never materialized", faint)
    _say(axis, left + wide / 2, low - 0.25, "one chunk at a time", c["ours"], va="top")
    _say(axis, 0.95, tile + tile_height / 2, "tile", c["paper"], weight="bold")
    _say(axis, block + block_width / 2, 4.6, "block", c["paper"], weight="bold")
    _say(
        axis,
        block + block_width / 2,
        tile + tile_height / 2,
        "chunk",
        c["paper"],
        weight="bold",
    )

    size, right = (4.3, 0.95), 6.3
    middle = right + size[0] / 2
    _say(axis, middle, 5.55, "forward, 1 GEMM", c["ours"], weight="bold")
    _box(axis, c, (right, 4.35), size, "ours", "row statistics", "3 to 8 float32 numbers per token")
    _box(axis, c, (right, 2.75), size, "ours", "logprob, entropy, rank", "the same on every rank")
    _box(axis, c, (right, 0.75), size, "peer1", "the chunk again", "dLogits written over it")
    _arrow(axis, c["ours"], (block + block_width, tile + 0.45), (right, 4.5))
    _arrow(axis, c["ours"], (middle, 4.35), (middle, 3.7))
    _say(axis, middle + 0.12, 4.03, "one all-gather over TP", ink, ha="left")
    _arrow(axis, c["peer1"], (middle, 2.75), (middle, 1.7))
    _say(axis, middle + 0.12, 2.4, "your loss", ink, ha="left")
    _say(axis, middle + 0.12, 2.05, "backward, 3 GEMMs", c["peer1"], ha="left", weight="bold")
    _arrow(axis, c["peer1"], (right, 1.2), (block + block_width, tile + 0.1))
    _say(axis, middle, 0.35, "into dHidden of the tile and dWeight of the block", c["peer1"])
    return figure


def one_way(c: dict[str, str]) -> Any:
    """Source, operation, backend: what each call passes."""
    figure, axis = _canvas(c, 5.6)
    ink, faint = c["ink"], c["faint"]
    _box(axis, c, (0.3, 3.75), (2.5, 1.1), "ours2", "GivenLogits", "a tensor", "sources/")
    _box(axis, c, (0.3, 1.15), (2.5, 1.1), "ours2", "HeadLogits", "hidden, weight", "sources/")
    _box(
        axis, c, (4.2, 2.05), (2.6, 1.9), "ours", "apply", "one autograd function", "ops/driver.py"
    )
    _box(
        axis, c, (4.2, 4.35), (2.6, 1.0), "ours", "an operation", "its mathematics", "ops/gather.py"
    )
    _box(
        axis,
        c,
        (4.2, 0.3),
        (2.6, 1.0),
        "peer2",
        "all-gather over TP",
        "a few numbers per row",
        "collectives.py",
    )
    _box(axis, c, (8.2, 2.05), (2.5, 1.9), "peer1", "a backend", "statistics, gradient", "kernels/")
    _say(axis, 1.55, 3.2, "Source", ink, weight="bold")
    _say(axis, 1.55, 2.75, "where logits come from", faint)
    _arrow(axis, ink, (2.8, 4.1), (4.2, 3.4), "<|-|>")
    _arrow(axis, ink, (2.8, 1.9), (4.2, 2.6), "<|-|>")
    _say(axis, 3.5, 3.0, "chunks\nand their\ngradients", ink, fontsize=FONT - 1.5)
    _arrow(axis, ink, (5.5, 4.35), (5.5, 3.95), "<|-|>")
    _say(axis, 5.6, 4.15, "forward, backward", ink, ha="left", fontsize=FONT - 1.5)
    _arrow(axis, ink, (5.5, 2.05), (5.5, 1.3), "<|-|>")
    _say(axis, 5.6, 1.68, "row statistics [k, n]", ink, ha="left", fontsize=FONT - 1.5)
    _arrow(axis, ink, (6.8, 3.0), (8.2, 3.0), "<|-|>")
    _say(axis, 7.5, 3.25, "a chunk", ink, fontsize=FONT - 1.5)
    _say(axis, 9.45, 1.7, "torch, inductor (CPU), Triton", faint)
    return figure


def lazy(c: dict[str, str]) -> Any:
    """A training script's three lines, and what each costs with real and with lazy logits."""
    figure, axis = _canvas(c, 4.6)
    ink, faint = c["ink"], c["faint"]
    _say(axis, 5.1, 4.25, 'logits="real"', c["peer1"], weight="bold")
    _say(axis, 8.8, 4.25, 'logits="lazy"', c["ours"], weight="bold")
    rows = (
        (
            "logits = model(ids)",
            ("one GEMM", "one [b, s, V/TP]"),
            ("no GEMM", "remembers its rows"),
        ),
        (
            "x = logits[:, 5:].float() / 0.7",
            ("no GEMM", "two more [b, s, V/TP]"),
            ("no GEMM", "remembers fewer rows"),
        ),
        (
            "logprobs(x, target).backward()",
            ("two GEMMs", "one more [b, s, V/TP]"),
            ("four GEMMs", "one chunk"),
        ),
    )
    for number, (line, plain, without) in enumerate(rows):
        low = 2.75 - 1.25 * number
        axis.text(
            0.1, low + 0.5, line, color=ink, fontsize=FONT - 1, va="center", family="monospace"
        )
        _box(axis, c, (3.9, low), (2.4, 1.0), "peer1", *plain)
        _box(axis, c, (7.6, low), (2.4, 1.0), "ours", *without)
        if number:
            _arrow(axis, faint, (5.1, low + 1.25), (5.1, low + 1.0))
            _arrow(axis, faint, (8.8, low + 1.25), (8.8, low + 1.0))
    return figure


# name in the tables: (name in the picture, role, line, width); of two that take the same memory the
# first is wide, so that it shows on both sides of the second
SERIES = {
    "logprobs": ("this library", "ours", "-", 4.5),
    "+ entropy": ("this library, with entropy", "ours2", "-", 1.6),
    "megatron": ("Megatron", "peer1", "--", 4.5),
    "megatron fused": ("Megatron, fused", "peer2", "--", 2.2),
    "torch cross_entropy": ("torch cross entropy", "peer3", "--", 2.2),
    "torch.compile": ("torch.compile of the plain formula", "ink", "--", 1.6),
    "floor: copy": ("copy (lower bound)", "faint", ":", 2.2),
}


def points(name: str, varied: str) -> dict[str, list[tuple[int, float, float | None]]]:
    """(rows or vocab, ms of both passes, peak MiB or None) of each series, from a result table."""
    found: dict[str, list[tuple[int, float, float | None]]] = {}
    for table in tables.read(name):
        at = int(re.findall(rf"{varied} (\d+)", table.title)[0])
        for series in SERIES.keys() & table.rows.keys():
            peak = table.rows[series]["peak MiB"]
            point = at, table.ms(series), float(peak) if peak else None
            found.setdefault(series, []).append(point)
    return {series: found[series] for series in SERIES if series in found}


def costs(c: dict[str, str]) -> Any:
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.6), facecolor=c["paper"])
    sweeps = (
        ("2026-11-intel-xeon-2-cores-sweep-rows.txt", "rows", "rows, V 32768"),
        ("2026-11-intel-xeon-2-cores-sweep-vocab.txt", "vocab", "vocabulary V, 256 rows"),
    )
    for column, (file, varied, label) in enumerate(sweeps):
        for name, curve in points(file, varied).items():
            title, role, line, width = SERIES[name]
            style = {"color": c[role], "linestyle": line, "linewidth": width, "label": title}
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
            _plain(axis, c)
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


def _plain(axis: Any, c: dict[str, str]) -> None:
    """A grid, and axes on two sides."""
    axis.set_facecolor(c["paper"])
    axis.grid(color=c["grid"], linewidth=0.8)
    axis.tick_params(colors=c["ink"], labelsize=FONT - 1.5)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axis.spines[side].set_color(c["faint"])


KEEP = "2026-11-amd-epyc-2-cores-keep.txt"
# in the table: (in the picture, role, where the name goes from the point)
HELD = {
    "unfused (holds the logits)": ("materialized logits", "ink", "below"),
    "megatron, logits held": ("Megatron, logits held", "peer1", "left"),
    "megatron fused, logits held": ("Megatron fused,\nlogits held", "peer2", "above"),
    "torch linear_cross_entropy": ("torch linear cross entropy", "peer3", "left"),
}
# of a name: (move in memory, move in time, alignment)
PLACES = {
    "above": (0, 0.08, {"va": "bottom"}),
    "below": (0, -0.09, {"va": "top"}),
    "left": (-10, 0, {"ha": "right"}),
}


def keep(c: dict[str, str]) -> Any:
    """Time against memory of `saved_bytes`, from nothing to everything, and of others."""
    (table,) = tables.read(KEEP)
    figure, axis = pyplot.subplots(figsize=(11, 4.6), facecolor=c["paper"])

    def point(name: str) -> tuple[float, float]:
        return table.number(name, "peak MiB"), table.ms(name) / 1e3

    shares = [name for name in table.rows if name.startswith("saved_bytes")]
    curve = [point(name) for name in shares]
    axis.plot(*zip(*curve, strict=True), marker="o", color=c["ours"], linewidth=2.2)
    for (x, y), name in zip(curve, shares, strict=True):
        _say(axis, x + 8, y + 0.03, name.split()[1], c["ours"], ha="left", va="bottom")
    x, y = curve[0]
    _say(axis, x + 75, y, "linear_token_stats, share of the logits kept", c["ours"], ha="left")
    for name, (title, role, place) in HELD.items():
        x, y = point(name)
        axis.plot([x], [y], marker="s", color=c[role], markersize=8)
        right, up, alignment = PLACES[place]
        _say(axis, x + right, y + up, title, c[role], **alignment)
    floor = table.ms("floor: 3 products") / 1e3
    axis.axhline(floor, color=c["faint"], linestyle=":")
    _say(axis, 210, floor - 0.03, "three bare matmuls", c["faint"], ha="left", va="top")
    axis.set_xlim(200, 1300)
    axis.set_ylim(floor - 0.5, curve[0][1] + 0.3)
    axis.set_xlabel("extra memory, MiB", color=c["ink"], fontsize=FONT)
    axis.set_ylabel("forward and backward, s", color=c["ink"], fontsize=FONT)
    _plain(axis, c)
    figure.tight_layout()
    return figure


TRAINER = "2026-11-intel-xeon-2-cores-verl.txt"
WAYS = {  # in the table: (in the picture, role)
    "plain": ("verl", "peer1"),
    "switched, logits": ("switched on, lazy logits", "ours2"),
    "switched, fused": ("switched on, fused", "ours"),
}


def trainer(c: dict[str, str]) -> Any:
    """A framework's own step, plain and switched: time and memory, by phase."""
    rows = tables.read_markdown(TRAINER)
    phases = [
        name.removesuffix(", s") for name in next(iter(rows.values())) if name.endswith(", s")
    ]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.4), facecolor=c["paper"])
    for axis, column, title in zip(axes, (0, 1), ("time, s", "extra memory, MiB"), strict=True):
        for place, (way, (name, role)) in enumerate(WAYS.items()):
            cells = [float(x) for x in list(rows[way].values())[column::2]]
            at = [3.2 * phase + 0.9 * place for phase in range(len(phases))]
            axis.barh(at, cells, height=0.8, color=c[role], label=name)
            for y, value in zip(at, cells, strict=True):
                axis.text(
                    value, y, f" {value:,.3g}" if value < 100 else f" {value:,.0f}",
                    va="center", color=c["ink"], fontsize=FONT - 1.5,
                )  # fmt: skip
        middles = [3.2 * phase + 0.9 for phase in range(len(phases))]
        axis.set_yticks(middles, phases if column == 0 else ["" for _ in phases])
        axis.set_xlim(0, 1.18 * axis.get_xlim()[1])
        axis.invert_yaxis()
        axis.set_title(title, loc="left", color=c["ink"], fontsize=FONT + 1, weight="bold")
        axis.set_facecolor(c["paper"])
        axis.set_xticks([])
        axis.tick_params(colors=c["ink"], labelsize=FONT, length=0)
        for spine in axis.spines.values():
            spine.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    where = {"loc": "lower center", "ncol": 3, "frameon": False}
    figure.legend(handles, labels, labelcolor=c["ink"], fontsize=FONT, **where)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    return figure


def write(name: str, draw: Any, png: Path | None) -> None:
    figure = draw(colors(0))
    path = HERE / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None}, facecolor=figure.get_facecolor())
    pyplot.close(figure)
    # matplotlib writes colors as inline styles; these rules replace them in a dark setting.
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
            figure.savefig(png / f"{name}-{suffix}.png", dpi=70, facecolor=figure.get_facecolor())
            pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--png", type=Path, metavar="FOLDER")
    png = parser.parse_args().png
    matplotlib.rcParams |= {"svg.hashsalt": "mcore_logprobs", "font.family": "DejaVu Sans"}
    pictures = {"fused-path": fused_path, "one-way": one_way, "lazy": lazy, "costs": costs}
    pictures |= {"keep": keep, "trainer": trainer}
    for name, draw in pictures.items():
        write(name, draw, png)


if __name__ == "__main__":
    main()
