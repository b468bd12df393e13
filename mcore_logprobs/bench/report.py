"""Tables, JSON and pictures of what was measured."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from mcore_logprobs.bench.runner import Measurement, Workload

LEGEND = (
    "medians of the rounds with their interquartile range, and the least: compare code by the least"
)

Point = tuple[Workload, list[Measurement]]


_COLUMNS = (
    "",
    "forward ms",
    "backward ms",
    "both ms",
    "IQR",
    "least fwd",
    "least bwd",
    "least both",
    "of the floor",
    "peak MiB",
    "error",
    "grad error",
    "collectives",
    "sent KiB",
)


def _cells(result: Measurement) -> list[str]:
    share = result.floor.get("both")
    share_text = "" if share is None else f"{share:.0%}"
    # A gradient formed in the forward leaves a backward that says nothing by itself.
    if result.floor.get("backward", 100.0) < 10.0:
        parts = (result.floor["forward"], result.floor["backward"])
        share_text += " ({:.0%}, {:.0%})".format(*parts)
    error = ("", "") if result.error is None else (f"{e:.1e}" for e in result.error)
    return [
        result.name,
        f"{result.forward * 1e3:.2f}",
        "" if result.backward is None else f"{result.backward * 1e3:.2f}",
        f"{result.both * 1e3:.2f}",
        f"{result.spread * 1e3:.2f}",
        *("" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in result.least),
        share_text,
        "" if result.peak is None else f"{result.peak / 2**20:.1f}",
        *error,
        _count(result.collectives),
        f"{result.sent / 1024:.1f}" if result.collectives else "",
    ]


def _count(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def print_table(load: Workload, results: list[Measurement]) -> None:
    """One workload's table on standard output."""
    title = f"{load.title}: " + ", ".join(f"{k} {v}" for k, v in load.shape.items())
    rows = [_cells(result) for result in results]
    used = [i for i in range(len(_COLUMNS)) if i == 0 or any(row[i] for row in rows)]
    print(f"\n{title}")
    lines = [[_COLUMNS[i] for i in used], *([row[i] for i in used] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(used))]
    for number, line in enumerate(lines):
        cells = [
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))
    for name, reason in load.absent.items():
        print(f"  unavailable: {name}: {reason}")


def as_json(points: list[Point], machine: str) -> str:
    """Everything, with the machine: {"machine": ..., "workloads": [...]}."""
    return json.dumps(
        {
            "machine": machine,
            "workloads": [
                {
                    "title": load.title,
                    "shape": load.shape,
                    "absent": load.absent,
                    "results": [dataclasses.asdict(result) for result in results],
                }
                for load, results in points
            ],
        },
        indent=1,
    )


def plot(points: list[Point], path: str, machine: str) -> None:
    """Time and memory against whatever varies, a row of pictures for each kind of workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    together: dict[tuple[str, str], list[Point]] = {}
    for load, results in points:
        own = str(load.shape) if load.curve else ""  # time against memory is of one shape
        together.setdefault((load.title, own), []).append((load, results))
    figure, axes = pyplot.subplots(
        len(together), 2, figsize=(12, 3.6 * len(together)), squeeze=False, layout="constrained"
    )
    for (time_axis, memory_axis), ((title, own), here) in zip(axes, together.items(), strict=True):
        if own:
            _against_memory(time_axis, *here[0])
            memory_axis.axis("off")
            continue
        varied, others = _varied(here)
        draw = _bars if varied is None else functools.partial(_lines, varied)
        for axis, label, value in (
            (time_axis, "forward + backward, least, ms", lambda r: r.least[-1] * 1e3),
            (
                memory_axis,
                "peak extra memory, MiB",
                lambda r: None if r.peak is None else r.peak / 2**20,
            ),
        ):
            draw(axis, here, others, value)
            axis.set_ylabel(label)
            axis.set_title(title, loc="left", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
        if varied:
            time_axis.legend(fontsize=7, frameon=False)
    figure.suptitle(machine, fontsize=8, color="gray")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _varied(points: list[Point]) -> tuple[str | None, list[str]]:
    """The number of the shape that differs between points, if there is one; all else that does."""
    first = points[0][0].shape
    names = [name for name in first if len({str(load.shape[name]) for load, _ in points}) > 1]
    numeric = next((name for name in names if isinstance(first[name], int)), None)
    return numeric, [name for name in names if name != numeric]


def _label(load: Workload, result: Measurement, others: list[str]) -> str:
    return ", ".join([result.name, *(str(load.shape[name]) for name in others)])


def _same(points: list[Point], varying: list[str]) -> str:
    """The part of the shape that all points share."""
    return ", ".join(f"{k} {v}" for k, v in points[0][0].shape.items() if k not in varying)


def _style(name: str, place: int) -> dict[str, object]:
    if name.startswith("floor"):
        return {"color": "black", "linestyle": ":", "linewidth": 1.5}
    return {"color": f"C{place % 10}", "marker": "o", "markersize": 4}


def _lines(varied: str, axis: Any, points: list[Point], others: list[str], value: Any) -> None:
    curves: dict[str, list[tuple[int, float]]] = {}
    for load, results in points:
        for r in results:
            if height := value(r):
                curve = curves.setdefault(_label(load, r, others), [])
                curve.append((load.shape[varied], height))
    for place, (name, curve) in enumerate(curves.items()):
        axis.plot(*zip(*sorted(curve), strict=True), label=name, **_style(name, place))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel(f"{varied}  ({_same(points, [varied, *others])})", fontsize=8)
    axis.grid(alpha=0.25)


def _against_memory(axis: Any, load: Workload, results: list[Measurement]) -> None:
    """Time against memory of one shape: a curve, and points."""
    curve = []
    for place, result in enumerate(results):
        if result.peak is None:  # the floor
            axis.axhline(result.least[-1] * 1e3, label=result.name, color="black", linestyle=":")
            continue
        at = result.peak / 2**20, result.least[-1] * 1e3
        if result.name.startswith(load.curve):
            curve.append(at)
        else:
            axis.plot(*at, label=result.name, **_style(result.name, place))
    axis.plot(*zip(*curve, strict=True), label=load.curve, color="C0", marker="o")
    axis.set_xlabel(
        "peak extra memory, MiB  (" + ", ".join(f"{k} {v}" for k, v in load.shape.items()) + ")",
        fontsize=8,
    )
    axis.set_ylabel("forward + backward, least, ms")
    axis.set_title(load.title, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7, frameon=False)


def _bars(axis: Any, points: list[Point], others: list[str], value: Any) -> None:
    heights = {
        _label(load, r, others): value(r)
        for load, results in points
        for r in results
        if value(r) is not None
    }
    colors = [
        "lightgray" if name.startswith("floor") else f"C{i % 10}" for i, name in enumerate(heights)
    ]
    bars = axis.barh([*heights], [*heights.values()], color=colors)
    axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlabel(_same(points, others), fontsize=8)
