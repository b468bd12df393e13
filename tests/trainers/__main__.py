"""Runs rows and prints one table:  python -m tests.trainers [FRAMEWORK] [-k WORDS] [-j JOBS]"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.trainers.compare import check, check_alike
from tests.trainers.frame import FRAMEWORKS, Row, Trace, rows, run, unavailable
from tests.trainers.requirements import install


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trainers", description=__doc__)
    parser.add_argument("framework", nargs="?", default="", choices=("", *FRAMEWORKS))
    parser.add_argument("-k", default="", help="only rows whose name has these words")
    # A row imports its framework on one core for half of its time.
    jobs = max(2, (os.cpu_count() or 1) // 2)
    parser.add_argument("-j", "--jobs", type=int, default=jobs, help="rows at a time (%(default)s)")
    options = parser.parse_args()
    print("| framework | layout | option | log-probabilities | entropy | metrics | gradient norm "
          "| parameters | calls: ours, theirs | s |\n|" + "---|" * 10)  # fmt: skip
    for name in (options.framework,) if options.framework else FRAMEWORKS:
        if why := install(name):
            print(why, file=sys.stderr)
    words = options.k.split()
    chosen = [row for row in rows(options.framework) if all(word in row.name for word in words)]
    begun, failed = time.monotonic(), 0
    norms: dict[str, list[float]] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [None if unavailable(row) else pool.submit(_timed, row) for row in chosen]
        for row, future in zip(chosen, running, strict=True):
            head = f"| {row.framework} | {row.layout} | {row.option} |"
            if future is None:
                print(f"{head} skipped: {unavailable(row)} |", flush=True)
                continue
            try:
                traces, seconds = future.result()
                found = check(row, traces)
                check_alike(row, traces[0], norms)
            except (AssertionError, RuntimeError) as error:
                failed += 1
                print(f"{head} FAILED |\n{error}", flush=True)
                continue
            cells = " | ".join(f"{value:.1e}" for value in found.agreement.values())
            print(f"{head} {cells} | {found.ours}, {found.theirs} | {seconds:.0f} |", flush=True)
    minutes, ran = (time.monotonic() - begun) / 60, sum(future is not None for future in running)
    print(f"{ran} of {len(chosen)} rows ran, {failed} failed, {minutes:.1f} minutes")
    return 1 if failed else 0


def _timed(row: Row) -> tuple[list[list[Trace]], float]:
    """A row's traces, and the seconds that its runs took."""
    begun = time.monotonic()
    return run(row), time.monotonic() - begun


if __name__ == "__main__":
    sys.exit(main())
