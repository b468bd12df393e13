"""Reads the tables that `bench` printed, for the pages and pictures that show their figures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Table:
    """One workload: its title with the shape, and its cells by row and column, "" where empty."""

    title: str
    rows: dict[str, dict[str, str]]

    def number(self, row: str, column: str) -> float:
        return float(self.rows[row][column])

    def ms(self, row: str) -> float:
        """Forward and backward: the least of the rounds; the median in older tables."""
        cells = self.rows[row]
        return float(cells["least both" if "least bwd" in cells else "both ms"])


def read(name: str) -> list[Table]:
    """The tables of a file of `benchmarks/results`, in order."""
    found = []
    lines = (RESULTS / name).read_text().splitlines()
    for at, line in enumerate(lines):
        if not re.fullmatch(r"  -+(  -+)+", line):
            continue
        spans = [match.span() for match in re.finditer("-+", line)]
        columns, *body = (
            [text[start:end].strip() for start, end in spans]
            for text in [lines[at - 1], *_until_blank(lines[at + 1 :])]
        )
        rows = {cells[0]: dict(zip(columns, cells, strict=True)) for cells in body}
        found.append(Table(lines[at - 2], rows))
    return found


def read_markdown(name: str) -> dict[str, dict[str, str]]:
    """The cells of a file's one Markdown table by row and column, both as printed."""
    lines = [line for line in (RESULTS / name).read_text().splitlines() if line.startswith("|")]
    header, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    names = [f"{name} {at}" if header.count(name) > 1 else name for at, name in enumerate(header)]
    return {cells[0]: dict(zip(names[1:], cells[1:], strict=True)) for cells in body}


def _until_blank(lines: list[str]) -> list[str]:
    ends = (i for i, line in enumerate(lines) if re.match("$|  (not here|unavailable): ", line))
    return lines[: next(ends, len(lines))]
