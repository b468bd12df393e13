"""A session's records as tables, and time against memory as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

# In the order of the columns; others stand in the records alone.
_SHAPE = ("rows", "vocab", "columns", "hidden", "tp", "backend")
_FIGURES = {
    "kernel_ms": "ms",
    "kernel_ms_median": "median ms",
    "host_us": "host us",
    "kernels": "kernels",
    "share": "of the limit",
    "tb_per_s": "TB/s",
    "tflops": "TFLOP/s",
    "peak_mib": "peak MiB",
    "error": "error",
    "overlap": "overlap",
    "summary": "summary",
}


def read(path: Path) -> list[Record]:
    """The records of a session; a line that was cut off is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def all_well(records: Sequence[Record]) -> bool:
    """Whether every group ended in its time and no case failed."""
    return all(record["status"] in ("ok", "left out") for record in records)


def as_markdown(records: Sequence[Record]) -> str:
    """The machine, what went wrong, then one table a group."""
    lines = ["# GPU session", ""]
    machine = next((r for r in records if r["case"] == "machine"), None)
    if machine is not None:
        shown = ("gpu", "cuda", "torch", "python", "date")
        gpu = "none: interpreted on the CPU, times mean nothing"
        values = {key: machine.get(key) for key in shown} | {"gpu": machine.get("gpu") or gpu}
        lines += [", ".join(f"{key} {value}" for key, value in values.items() if value), ""]
    wrong = [r for r in records if r["status"] in ("failed", "killed")]
    lines += [f"{len(wrong)} groups or cases failed or were killed:" if wrong else "None failed."]
    lines += [f"- {r['group']}: {r['case']}: {_why(r)}" for r in wrong]
    out = [r for r in records if r["status"] == "left out"]
    if out:
        lines += ["", "Left out:"]
        lines += [f"- {r['group']}: {r['case']}: {r.get('reason', '')}" for r in out]
    ended = [r["group"] for r in records if r["case"] == "group"]
    cut = [group for group in dict.fromkeys(r["group"] for r in records) if group not in ended]
    if cut:
        lines += ["", f"The session was cut off in: {', '.join(cut)}."]
    for group in dict.fromkeys(r["group"] for r in records):
        rows = [r for r in records if r["group"] == group and r["status"] == "ok"]
        table = _table([r for r in rows if r["case"] != "group"])
        if table:
            lines += ["", f"## {group}", "", *table]
    return "\n".join(lines) + "\n"


def _why(record: Record) -> str:
    if record["status"] == "killed":
        return f"killed after its {record['limit']} s"
    return str(record.get("reason", ""))


def _table(records: Sequence[Record]) -> list[str]:
    keys = [key for key in (*_SHAPE, *_FIGURES) if any(r.get(key) is not None for r in records)]
    if not any(key in _FIGURES for key in keys):
        return []
    head = ["case", *(_FIGURES.get(key, key) for key in keys)]
    body = [[r["case"], *(_cell(key, r.get(key)) for key in keys)] for r in records]
    return [_line(head), _line(["---"] * len(head)), *map(_line, body)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key in ("share", "overlap"):
        return f"{value:.1%}"
    if key == "error":
        return f"{value:.1e}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def plot(records: Sequence[Record], path: Path) -> bool:
    """Forward and backward: time against peak memory, a picture a shape; False if none is made."""
    points = [r for r in records if r["case"].endswith(", both") and r.get("peak_mib")]
    points = [r for r in points if r.get("hidden") and r["status"] == "ok"]
    if not points:
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys((r["rows"], r["vocab"], r["hidden"]) for r in points))
    figure, axes = pyplot.subplots(
        1, len(shapes), figsize=(6 * len(shapes), 4.5), squeeze=False, layout="constrained"
    )
    for axis, shape in zip(axes[0], shapes, strict=True):
        here = [r for r in points if (r["rows"], r["vocab"], r["hidden"]) == shape]
        for r in here:
            ours = r["group"] in ("fused", "policy") or r["case"].startswith("fused")
            axis.scatter(r["kernel_ms"], r["peak_mib"], color="C0" if ours else "C1")
            axis.annotate(r["case"].removesuffix(", both"), (r["kernel_ms"], r["peak_mib"]))
        axis.set_title("{} rows, V {}, h {}".format(*shape), loc="left", fontsize=10)
        axis.set_xlabel("forward + backward, ms")
        axis.set_ylabel("peak extra memory, MiB")
        axis.set_yscale("log")
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True
