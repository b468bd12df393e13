"""Tables, JSON and pictures of what was measured."""

from __future__ import annotations

import dataclasses
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
    "± IQR",
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

    titles = list(dict.fromkeys(load.title for load, _ in points))
    figure, axes = pyplot.subplots(
        len(titles), 2, figsize=(12, 3.6 * len(titles)), squeeze=False, layout="constrained"
    )
    for row, title in enumerate(titles):
        here = [point for point in points if point[0].title == title]
        time_axis, memory_axis = axes[row]
        if here[0][0].curve:
            _against_memory(time_axis, *here[0])
            memory_axis.axis("off")
            continue
        varied = _varied(here)
        for axis, label, value in (
            (time_axis, "forward + backward, least, ms", lambda r: r.least[-1] * 1e3),
            (
                memory_axis,
                "peak extra memory, MiB",
                lambda r: None if r.peak is None else r.peak / 2**20,
            ),
        ):
            (_lines if varied else _bars)(axis, here, varied, value)
            axis.set_ylabel(label)
            axis.set_title(title, loc="left", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
        if varied:
            time_axis.legend(fontsize=7, frameon=False)
    figure.suptitle(machine, fontsize=8, color="gray")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _varied(points: list[Point]) -> str | None:
    """The one part of the shape that differs between points, if there is one."""
    first = points[0][0].shape
    names = [name for name in first if len({str(p[0].shape[name]) for p in points}) > 1]
    numeric = [name for name in names if isinstance(first[name], int)]
    return numeric[0] if numeric else None


def _style(name: str, place: int) -> dict[str, object]:
    if name.startswith("floor"):
        return {"color": "black", "linestyle": ":", "linewidth": 1.5}
    return {"color": f"C{place % 10}", "marker": "o", "markersize": 4}


def _lines(axis: Any, points: list[Point], varied: str | None, value: Any) -> None:
    names = list(dict.fromkeys(r.name for _, results in points for r in results))
    assert varied is not None
    fixed = [k for k in points[0][0].shape if k != varied]
    same = {k: points[0][0].shape[k] for k in fixed}
    for place, name in enumerate(names):
        curve = [
            (load.shape[varied], value(r))
            for load, results in points
            for r in results
            if r.name == name and all(load.shape[k] == same[k] for k in fixed)
        ]
        curve = sorted((x, y) for x, y in curve if y)
        if curve:
            axis.plot(*zip(*curve, strict=True), label=name, **_style(name, place))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel(f"{varied}  ({', '.join(f'{k} {v}' for k, v in same.items())})", fontsize=8)
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


def _bars(axis: Any, points: list[Point], varied: str | None, value: Any) -> None:
    results = [r for r in points[0][1] if value(r) is not None]
    colors = [
        "lightgray" if r.name.startswith("floor") else f"C{i % 10}" for i, r in enumerate(results)
    ]
    bars = axis.barh([r.name for r in results], [value(r) for r in results], color=colors)
    axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlabel(", ".join(f"{k} {v}" for k, v in points[0][0].shape.items()), fontsize=8)
