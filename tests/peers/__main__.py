"""Runs frameworks' own unit tests:  python -m tests.peers [FRAMEWORK] [-k WORDS] [--named]"""

from __future__ import annotations

import argparse
import sys
import time

from tests.peers.run import Run, Suite, compare, run, unavailable
from tests.peers.suites import suites
from tests.trainers.requirements import install


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("framework", nargs="?", default="")
    parser.add_argument("-k", default="", help="only suites with a file that has these words")
    parser.add_argument(
        "--named", action="store_true", help="instead: run what is left out too, say how it ends"
    )
    options = parser.parse_args()
    chosen = [
        suite
        for suite in suites(options.framework)
        if any(all(word in file for word in options.k.split()) for file in suite.files)
    ]
    for name in dict.fromkeys(name for suite in chosen for name in suite.needs):
        if why := install(name):
            print(why, file=sys.stderr)
    failed = 0
    print("| framework | test file | found | applicable | passed with theirs | with ours | s |\n|"
          + "---|" * 7, flush=True)  # fmt: skip
    for suite in chosen:
        if why := unavailable(suite):
            for file in suite.files:
                print(f"| {suite.framework} | {file} | skipped: {why} |", flush=True)
            continue
        begun = time.monotonic()
        theirs, ours = (run(suite, switched=s, named=options.named) for s in (False, True))
        seconds = time.monotonic() - begun
        if options.named:
            _tell(suite, theirs, ours)
            continue
        wrong = []
        for line in compare(suite, theirs, ours):
            print(f"| {suite.framework} | {line} | {seconds:.0f} |", flush=True)
            wrong += line.wrong
        for text in wrong:
            print(f"FAILED {text}\n", flush=True)
        failed += bool(wrong)
    return 1 if failed else 0


def _tell(suite: Suite, theirs: Run, ours: Run) -> None:
    """Every test: whether it is left out, how it ends, and what it calls."""
    for test in theirs.found:
        ends = ", ".join(
            "passed" if test in one.passed else "failed" if test in one.failed else "not run"
            for one in (theirs, ours)
        )
        calls = sorted(theirs.called(test, "theirs") | ours.called(test, "ours"))
        print(f"{test}: {suite.reason(test) or 'applicable'}; {ends}; calls {calls}")
        whys = [" ".join(one.failed.get(test, "").split())[-300:] for one in (theirs, ours)]
        for name, why in zip(("theirs", "ours"), dict.fromkeys(whys), strict=False):
            if why:
                print(f"    {name}: {why}")
    if not theirs.found:
        print(theirs.output[-6000:])


if __name__ == "__main__":
    sys.exit(main())
