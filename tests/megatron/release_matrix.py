"""Every feature on every supported Megatron-Core release; writes the tables in docs/releases.md.

    python -m tests.megatron.release_matrix FOLDER...     each with a megatron-core wheel unpacked
    python -m tests.megatron.release_matrix --main CHECKOUT     Megatron-LM's main, a git checkout

`bash tests/run.sh --matrix` downloads the wheels and runs this, with what follows it. The table of
main is written where a checkout is given, and otherwise stays as it was made. The exit status is 0
only if every feature of every release passed or is not there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "releases.md"
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
PASSED, NOT_THERE, FAILED = "passed", "not there", "FAILED"
Outcome = tuple[str, str]  # one of the three, and why
Column = dict[str, Outcome]  # of one release, by feature


def run_features(features: Iterable[Any]) -> Column:
    """Run each on the Megatron that this process imports."""
    return {feature.name: run_feature(feature) for feature in features}


def run_feature(feature: Any) -> Outcome:
    try:
        why = feature.missing()
        if why:
            return NOT_THERE, why
        feature.check()
    except Exception:  # whatever it is, it is no pass
        return FAILED, traceback.format_exc()
    return PASSED, ""


def run_release(folder: Path) -> tuple[str, Column]:
    """(the release's version, its column), from a process that has `folder` first on its path."""
    env = dict(os.environ)
    rest = [str(ROOT), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, rest)])
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch, "column.json")
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--here", str(answer)]
        # Megatron remarks on much; that is shown where the process broke down.
        with open(Path(scratch, "output"), "w+") as remarks:
            status = subprocess.run(
                command, env=env, cwd=ROOT, stdout=remarks, stderr=subprocess.STDOUT
            ).returncode
            remarks.seek(0)
            said = remarks.read()
        if not answer.exists():
            print(said[-5000:])
            return folder.name, {"(its process)": (FAILED, f"ended with status {status}")}
        found = json.loads(answer.read_text())
    if Path(found["megatron"]).resolve().parents[1] != folder.resolve():
        why = f"expected the Megatron in {folder}, got {found['megatron']}"
        return found["version"], {"(its process)": (FAILED, why)}
    return found["version"], {name: tuple(cell) for name, cell in found["column"].items()}


def run_here(answer: Path) -> None:
    """In the process of one release."""
    import megatron.core

    from tests.megatron.release_features import FEATURES

    column = run_features(FEATURES)
    found = {
        # Of "0.19.2+706b538" the end is this repository's commit, which Megatron takes for its own.
        "version": megatron.core.__version__.partition("+")[0],
        "megatron": str(Path(megatron.core.__file__).parent),
        "column": column,
    }
    answer.write_text(json.dumps(found))


def table(columns: dict[str, Column]) -> str:
    """The Markdown: features by releases, then what is not there and why."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    reasons: dict[str, list[str]] = {}
    for name in names:
        cells = []
        for version, column in columns.items():
            status, why = column.get(name, (FAILED, "it did not run"))
            cells.append(status)
            if status == NOT_THERE:
                reasons.setdefault(f"{name}: {why}", []).append(version)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if reasons:
        lines += ["", "Not there:", ""]
        lines += [f"- {', '.join(versions)}: {why}" for why, versions in reasons.items()]
    return "\n".join(lines)


def write_table(markdown: str, page: Path, which: str) -> None:
    """Put it between the page's marks for `which`."""
    begin, end = BEGIN.format(which), END.format(which)
    text = page.read_text()
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"expected {begin} and {end} in {page}")
    page.write_text(f"{before}{begin}\n{markdown}\n{end}{after}")


def name_of_checkout(folder: Path) -> str:
    """A git checkout's commit and the commit's date."""
    ask = ["git", "-C", str(folder), "log", "-1", "--format=main %h of %cs"]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--main", type=Path, metavar="CHECKOUT")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.here:
        run_here(args.here)
        return 0
    folders = [*args.folders, *([args.main] if args.main else [])]
    if not folders:
        parser.error("expected at least one folder with a megatron-core wheel unpacked, or --main")
    columns: dict[str, Column] = {}
    for folder in folders:
        start = time.monotonic()
        version, column = run_release(folder)
        version = name_of_checkout(folder) if folder == args.main else version
        columns[version] = column
        print(f"== {version} ({time.monotonic() - start:.0f} s)")
        for name, (status, why) in column.items():
            print(f"  {status:9} {name}" + (f"\n{why}" if status == FAILED else ""), flush=True)
    failed = [
        f"{version}: {name}: {why.strip().splitlines()[-1]}"
        for version, column in columns.items()
        for name, (status, why) in column.items()
        if status == FAILED
    ]
    if len(columns) != len(folders):
        failed.append(f"expected {len(folders)} different releases, got {list(columns)}")
    print(f"\n{table(columns)}\n")
    if args.main:
        version, column = columns.popitem()
        run = f"\n\nRun on {datetime.date.today()}."
        write_table(table({version: column}) + run, PAGE, "main")
    if columns:
        write_table(table(columns), PAGE, "matrix")
    print("failed:", "none" if not failed else "\n  ".join(["", *failed]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
