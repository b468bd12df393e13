"""A session's records as one table with a picture, and as a table for each group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_timing import Key, key_of

Record = dict[str, Any]

# In the order of the columns of details.md; others stand in the records alone.
_SHAPE = ("rows", "vocab", "columns", "hidden", "tp", "backend")
_FIGURES = {
    "kernel_ms": "ms",
    "kernel_ms_median": "median ms",
    "forward_ms": "forward ms",
    "floor_ms": "limit ms",
    "share": "of the limit",
    "forward_share": "forward, of the limit",
    "predicted_ms": "predicted ms",
    "host_us": "host us",
    "kernels": "kernels",
    "tb_per_s": "TB/s",
    "tflops": "TFLOP/s",
    "peak_mib": "peak MiB",
    "error": "error",
    "grad_error": "gradient error",
    "overlap": "overlap",
    "clock_mhz": "MHz",
    "watt": "W",
    "summary": "summary",
}
_SHARES = ("share", "forward_share", "overlap")
_ERRORS = ("error", "grad_error")

# The one table of summary.md.
_COLUMNS = {
    "case": "",
    "forward_ms": "forward ms",
    "kernel_ms": "both ms",
    "predicted_ms": "predicted",
    "published_ms": "published",
    "share": "its matmuls",
    "peak_mib": "peak MiB",
    "error": "value error",
    "grad_error": "gradient error",
}


# ---- records -------------------------------------------------------------------------------------


def read(path: Path) -> list[Record]:
    """The records of a session, the latest of each case; a line that was cut off is left out."""
    if not path.exists():
        return []
    found: dict[Key, Record] = {}
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
            key = key_of(record)
        except (json.JSONDecodeError, KeyError):
            continue
        found.pop(key, None)  # in the order in which the latest came
        found[key] = record
    return list(found.values())


def done(records: Sequence[Record]) -> frozenset[Key]:
    """The cases that a later call of a session need not run."""
    return frozenset(key_of(r) for r in records if r["status"] == "ok" and r["case"] != "group")


def ended(records: Sequence[Record]) -> set[str]:
    """The groups that a later call need not run: ended, none failed, none left out for time."""
    missing = {r["group"] for r in records if _is_missing(r)}
    ok = {r["group"] for r in records if r["case"] == "group" and r["status"] == "ok"}
    return ok - missing


def _is_missing(record: Record) -> bool:
    late = "no time left" in str(record.get("reason", ""))
    return record["status"] in ("failed", "killed") or (record["status"] == "left out" and late)


def all_well(records: Sequence[Record]) -> bool:
    """Whether every group ended in its time and no case failed."""
    return all(record["status"] in ("ok", "left out") for record in records)


# ---- summary.md ----------------------------------------------------------------------------------


def as_markdown(records: Sequence[Record]) -> str:
    """The machine, what went wrong, one table of the head's ways, the picture, the predictions."""
    lines = ["# GPU session", "", *_machine(records), *_wrong(records)]
    table = head_table(records)
    if table:
        lines += ["", *table, "", "![Time against memory](frontier.png)", "", *_legend(records)]
    return "\n".join(lines) + "\n"


def _machine(records: Sequence[Record]) -> list[str]:
    machine = next((r for r in records if r["case"] == "machine"), None)
    if machine is None:
        return []
    shown = ("gpu", "cuda", "driver_version", "power_limit", "torch", "triton", "python", "date")
    gpu = "none: interpreted on the CPU, times mean nothing"
    values = {key: machine.get(key) for key in shown} | {"gpu": machine.get("gpu") or gpu}
    text = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items() if value)
    return [text, ""]


def _wrong(records: Sequence[Record]) -> list[str]:
    wrong = [r for r in records if r["status"] in ("failed", "killed")]
    lines = [f"{len(wrong)} groups or cases failed or were killed:" if wrong else "None failed."]
    lines += [f"- {r['group']}: {r['case']}: {_why(r)}" for r in wrong]
    ends = [r["group"] for r in records if r["case"] == "group"]
    cut = [group for group in dict.fromkeys(r["group"] for r in records) if group not in ends]
    if cut:
        lines += ["", f"The session was cut off in: {', '.join(cut)}."]
    return lines


def _why(record: Record) -> str:
    if record["status"] == "killed":
        return f"killed after its {record['limit']} s"
    return str(record.get("reason", ""))


def _is_head(record: Record) -> bool:
    of_table = record["group"].startswith(("head ", "peers: "))
    return of_table and record["case"] != "group" and "hidden" in record


def _shape_of(record: Record) -> tuple[int, int, int]:
    return record["rows"], record["vocab"], record["hidden"]


def head_table(records: Sequence[Record]) -> list[str]:
    """Ways through a head, a block of rows for each shape; a way that is missing says why."""
    rows = [r for r in records if _is_head(r)]
    lines = []
    for shape in dict.fromkeys(map(_shape_of, rows)):
        here = [r for r in rows if _shape_of(r) == shape]
        title = "**{} rows, V/TP {}, h {}**".format(*shape)
        lines.append(_line([title, *[""] * (len(_COLUMNS) - 1)]))
        for r in sorted(here, key=lambda r: not r["group"].startswith("head ")):
            cells = [_cell(key, r.get(key)) for key in _COLUMNS]
            if r["status"] != "ok":
                cells = [r["case"], f"{r['status']}: {_why(r)}", *[""] * (len(_COLUMNS) - 2)]
            lines.append(_line(cells))
    if not lines:
        return []
    return [_line(list(_COLUMNS.values())), _line(["---"] * len(_COLUMNS)), *lines]


def _legend(records: Sequence[Record]) -> list[str]:
    """What the columns are, and how far the model was off."""
    lines = [
        "*predicted*: by `benchmarks/time_model.py`, before anything had run on a GPU. "
        "*published*: the implementation's own figure for this shape on an H200. "
        "*its matmuls*: the share of the time that its own bare matmuls take, timed in turn. "
        "Errors are relative to the largest entry, against float64. "
        "Memory is beyond the operands'.",
    ]
    if not any("saved_bytes" in r for r in records):
        lines += ["", "This version keeps nothing for the backward: no rows for `saved_bytes`."]
    pairs = [(r["kernel_ms"], r["predicted_ms"]) for r in records if r.get("predicted_ms")]
    interpreted = any(r["case"] == "machine" and not r.get("gpu") for r in records)
    if pairs and not interpreted:
        ratios = sorted(measured / predicted for measured, predicted in pairs)
        middle = ratios[len(ratios) // 2]
        lines += [
            "",
            f"Measured over predicted, {len(ratios)} ways: {ratios[0]:.2f} to {ratios[-1]:.2f}, "
            f"median {middle:.2f}.",
        ]
    return lines


# ---- details.md ----------------------------------------------------------------------------------


def details(records: Sequence[Record]) -> str:
    """What was left out and why, then one table for each group."""
    lines = ["# GPU session: every figure", ""]
    left_out = [r for r in records if r["status"] == "left out"]
    if left_out:
        lines += ["Left out:"]
        lines += [f"- {r['group']}: {r['case']}: {r.get('reason', '')}" for r in left_out]
    for group in dict.fromkeys(r["group"] for r in records):
        rows = [r for r in records if r["group"] == group and r["status"] == "ok"]
        table = _table([r for r in rows if r["case"] != "group"])
        if table:
            lines += ["", f"## {group}", "", *table]
    return "\n".join(lines) + "\n"


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
    if key in _SHARES:
        return f"{value:.1%}"
    if key in _ERRORS:
        return f"{value:.1e}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- frontier.png --------------------------------------------------------------------------------


def plot(records: Sequence[Record], path: Path) -> bool:
    """Time against peak memory, a panel for each shape, kept exponentials as a line.

    Returns: False if there is nothing to draw, or no matplotlib.
    """
    points = [r for r in records if _is_head(r) and r["status"] == "ok" and r.get("peak_mib")]
    if not points:
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(map(_shape_of, points)))
    figure, axes = pyplot.subplots(
        1, len(shapes), figsize=(6 * len(shapes), 4.5), squeeze=False, layout="constrained"
    )
    for axis, shape in zip(axes[0], shapes, strict=True):
        here = [r for r in points if _shape_of(r) == shape]
        for r in here:
            color = "C0" if r["group"].startswith("head ") else "C1"
            axis.scatter(r["kernel_ms"], r["peak_mib"], color=color)
            axis.annotate(r["case"], (r["kernel_ms"], r["peak_mib"]), fontsize=7)
        kept = sorted((r for r in here if "saved_bytes" in r), key=lambda r: r["saved_bytes"])
        axis.plot([r["kernel_ms"] for r in kept], [r["peak_mib"] for r in kept], color="C0")
        axis.set_title("{} rows, V/TP {}, h {}".format(*shape), loc="left", fontsize=10)
        axis.set_xlabel("forward + backward, ms")
        axis.set_ylabel("peak extra memory, MiB")
        axis.set_yscale("log")
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True
