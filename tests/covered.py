"""Line and branch coverage of the package, by part, from what `coverage run` has recorded.

    bash tests/run.sh --coverage                # the whole suite, then this
    bash tests/run.sh --coverage tests/test_operations.py   # arguments go to pytest
    python -m tests.covered --missing ops/   # again, with the lines and branches not taken

Every process is measured: gloo ranks, forked workers and scripts that tests start. Kernels that
Triton or torch.compile translate run outside Python and count as not covered.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from coverage import Coverage

# Parts that are held to a goal: (lines, branches) in percent.
GOAL = (95.0, 90.0)
HELD = ("ops/", "sources/", "context_parallel/", "collectives.py", "losses/")


def part_of(file: str) -> str:
    """`sources/` for mcore_logprobs/sources/rows.py, `config.py` for mcore_logprobs/config.py."""
    inside = file.rpartition("mcore_logprobs/")[2]
    return inside.partition("/")[0] + "/" if "/" in inside else inside


def measured() -> dict[str, dict]:
    """What coverage knows of each file, as its JSON report says it."""
    data = Coverage()
    data.load()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "coverage.json")
        data.json_report(outfile=str(report))
        return json.loads(report.read_text())["files"]


def percentages(summaries: list[dict]) -> tuple[float, float]:
    """(lines, branches) over several files."""

    def share(covered: str, total: str) -> float:
        return 100.0 * sum(s[covered] for s in summaries) / (sum(s[total] for s in summaries) or 1)

    lines = share("covered_lines", "num_statements")
    has_branches = any(s["num_branches"] for s in summaries)
    return lines, share("covered_branches", "num_branches") if has_branches else 100.0


def main() -> int:
    """Prints a line a part and the whole; exit status 1 where a held part is below its goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--missing", metavar="PART", default="", help="what is not taken in it")
    args = parser.parse_args()
    files = measured()
    below = []
    print(f"{'part':24} {'lines':>7} {'branches':>9}")
    for part in sorted({part_of(file) for file in files}):
        inside = {file: found for file, found in files.items() if part_of(file) == part}
        lines, branches = percentages([found["summary"] for found in inside.values()])
        mark = ""
        if part in HELD and (lines < GOAL[0] or branches < GOAL[1]):
            mark = f"  below {GOAL[0]:g} and {GOAL[1]:g}"
            below.append(part)
        print(f"{part:24} {lines:6.1f}% {branches:8.1f}%{mark}")
        for file, found in inside.items() if part == args.missing else ():
            ways = [f"{a}->{b}" for a, b in found["missing_branches"]]
            if found["missing_lines"] or ways:
                print(f"    {file}: {found['missing_lines']} {' '.join(ways)}")
    lines, branches = percentages([found["summary"] for found in files.values()])
    print(f"{'the whole package':24} {lines:6.1f}% {branches:8.1f}%")
    return int(bool(below))


if __name__ == "__main__":
    sys.exit(main())
