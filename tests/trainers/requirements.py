"""Installs what frameworks import beside the environment.

    python -m tests.trainers.requirements NAME...

Each NAME-requirements.txt goes into a folder of its own (`MCORE_LOGPROBS_TRAINERS`), once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def folder(name: str) -> Path:
    """Where a framework's list is installed, apart from the environment."""
    return Path(os.environ.get("MCORE_LOGPROBS_TRAINERS", Path(sys.prefix) / "trainers"), name)


def missing(folder: Path) -> str:
    """Why a row cannot run without it."""
    return f"{folder} is not there: python -m tests.trainers.requirements {folder.name}"


def install(name: str) -> str:
    """Installs a list unless this very one is there; "" or why it could not be."""
    wanted, target = HERE / f"{name}-requirements.txt", folder(name)
    marker = target / "installed"
    if not wanted.is_file() or (marker.is_file() and marker.read_text() == wanted.read_text()):
        return ""
    print(f"installing {wanted.name} (once)", file=sys.stderr, flush=True)
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    command += ["--no-deps", "--no-compile", "--no-build-isolation", "--use-pep517"]
    command += ["--target", str(target), "-r", str(wanted)]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
        return f"{wanted.name} could not be installed"
    marker.write_text(wanted.read_text())
    return ""


def main() -> int:
    failed = [why for name in sys.argv[1:] if (why := install(name))]
    for why in failed:
        print(why, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
