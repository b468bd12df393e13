"""Runs rows and prints one table:  python -m tests.trainers [FRAMEWORK] [-k WORDS]"""

from __future__ import annotations

import argparse
import sys
import time

from tests.trainers.frame import FRAMEWORKS, check, check_alike, rows, run, unavailable
from tests.trainers.requirements import install


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trainers", description=__doc__)
    parser.add_argument("framework", nargs="?", default="")
    parser.add_argument("-k", default="", help="only rows whose name has these words")
    options = parser.parse_args()
    failed = 0
    norms: dict[str, list[float]] = {}
    print("| framework | layout | option | log-probabilities | entropy | metrics | gradient norm "
          "| parameters | calls: ours, theirs | s |\n|" + "---|" * 10)  # fmt: skip
    for name in (options.framework,) if options.framework else FRAMEWORKS:
        if why := install(name):
            print(why, file=sys.stderr)
    for row in rows(options.framework):
        if not all(word in row.name for word in options.k.split()):
            continue
        head = f"| {row.framework} | {row.layout} | {row.option} |"
        if why := unavailable(row):
            print(f"{head} skipped: {why} |", flush=True)
            continue
        begun = time.monotonic()
        try:
            traces = run(row)
            found = check(row, traces)
            check_alike(row, traces[0], norms)
        except (AssertionError, RuntimeError) as error:
            failed += 1
            print(f"{head} FAILED |\n{error}", flush=True)
            continue
        cells = " | ".join(f"{value:.1e}" for value in found.agreement.values())
        seconds = time.monotonic() - begun
        print(f"{head} {cells} | {found.ours}, {found.theirs} | {seconds:.0f} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
