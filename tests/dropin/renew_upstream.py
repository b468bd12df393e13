"""Renews `upstream.json`: what the frameworks' main branches, and releases that are not on PyPI,
define and call.

    python -m tests.dropin.renew_upstream nemo_rl=/path/to/checkout@v0.7.0,main ...

A checkout is a git work tree or a bare repository; each revision is recorded with its commit and
date. Frameworks that are not named stay as they are.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcore_logprobs.dropin.installed import FRAMEWORKS, signatures
from tests.dropin.upstream import calls

TABLE = Path(__file__).with_name("upstream.json")


def record(framework: str, checkout: str, revision: str) -> dict[str, Any]:
    """Signatures and calls of one revision."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", checkout, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    described = FRAMEWORKS[framework]
    found: dict[str, str] = {}
    listed = git("ls-tree", "-r", "--name-only", revision).splitlines()
    names = described.names()
    for file in set(described.files) & set(listed):
        found |= signatures(git("show", f"{revision}:{file}"), names)
    roots = {part for name in names for part in name.split(".")}
    pattern = [part for root in sorted(roots) for part in ("-e", root)]
    users = git("grep", "-l", *pattern, revision, "--", "*.py").splitlines()
    made = set()
    for user in users:
        path = user.removeprefix(f"{revision}:")
        if "test" not in path:
            made |= set(calls(git("show", user), path, described))
    commit, date = git("log", "-1", "--format=%H %cs", revision).split()
    return {
        "repository": described.repository,
        "revision": git("rev-parse", "--abbrev-ref", revision).strip() or revision,
        "commit": commit,
        "date": date,
        "signatures": dict(sorted(found.items())),
        "calls": sorted((asdict(call) for call in made), key=lambda c: (c["name"], c["where"])),
    }


def main(arguments: list[str]) -> None:
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for argument in arguments:
        framework, _, rest = argument.partition("=")
        checkout, _, revisions = rest.rpartition("@")
        table[framework] = [record(framework, checkout, r) for r in revisions.split(",")]
    text = json.dumps(dict(sorted(table.items())), indent=1)
    # A call on a line.
    text = re.sub(r'\{\s+("name":[^{}]+?)\s+\}', lambda m: "{" + " ".join(m[1].split()) + "}", text)
    TABLE.write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
