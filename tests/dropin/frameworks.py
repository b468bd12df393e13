"""The frameworks' source: wheels that `tests/run.sh` unpacks, checkouts of the main branches where
there are any, and modules of single files.

MCORE_LOGPROBS_PEERS, which `tests/run.sh --all --peers DIR` sets, names a folder of checkouts (`git
clone` of the repositories in `mcore_logprobs.dropin.installed`, each under its own name: AReaL,
verl, RL, ...). What is compared with a published release is then compared with its main branch too.
"""

from __future__ import annotations

import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch

from mcore_logprobs.debug.audit_rank import module_of_file
from mcore_logprobs.dropin.installed import FRAMEWORKS

_PINS = [
    line for line in Path(__file__).with_name("frameworks.txt").read_text().split() if "==" in line
]
MAIN = "main"
REPO = Path(__file__).parents[2]
_REPOSITORIES = {d: f.repository for f in FRAMEWORKS.values() for d in f.distributions}
_REPOSITORIES["megatron-bridge"] = "NVIDIA-NeMo/Megatron-Bridge"


def checkout(distribution: str) -> Path | None:
    """Where the main branch of a framework is checked out; None where it is not."""
    folder = os.environ.get("MCORE_LOGPROBS_PEERS")
    found = Path(folder or "") / _REPOSITORIES[distribution].partition("/")[2]
    return found if folder and found.is_dir() else None


def versions(*distributions: str) -> list[tuple[str, str]]:
    """(distribution, version) of all there is to compare with: "" is the release listed first."""
    releases = [(d, "") for d in distributions if any(pin.startswith(f"{d}==") for pin in _PINS)]
    return releases + [(d, MAIN) for d in distributions if checkout(d)]


def source_root(distribution: str, version: str = "") -> Path:
    """Folder of a framework's source: as unpacked, the first release listed unless told; MAIN."""
    if version == MAIN:
        found = checkout(distribution)
        assert found, f"MCORE_LOGPROBS_PEERS has no checkout of {distribution}"
        return found
    pin = next(p for p in _PINS if p.startswith(f"{distribution}=={version}"))
    default = Path(sys.prefix) / "frameworks"
    root = Path(os.environ.get("MCORE_LOGPROBS_FRAMEWORKS", default)) / pin
    assert root.is_dir(), f"{root} is not there: run tests/run.sh once"
    return root


class _Eager:
    """torch, but for compiling: that takes a minute and changes nothing that is compared."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def compile(function: Any = None, **_: Any) -> Any:
        return function or (lambda f: f)


def load(
    distribution: str, file: str, version: str = "", *, name: str = "", **stand_ins: dict[str, Any]
) -> Any:
    """A module made of one file, none of its package's other modules run.

    stand_ins: what it imports from modules that are not here, `{"a__b": {"name": value}}` for
    `from a.b import name`. name: the module's own, where something asks for it.
    """
    for dotted, names in stand_ins.items():
        parts = dotted.split("__")
        for end in range(1, len(parts) + 1):
            module = sys.modules.setdefault(
                ".".join(parts[:end]), types.ModuleType(".".join(parts[:end]))
            )
            module.__dict__.setdefault("__path__", [])
        vars(module).update(names)
    path = source_root(distribution, version) / file
    own = re.sub(r"\W", "_", f"_framework_{distribution}_{version}_{path.stem}")
    name = name or own
    if name not in sys.modules:
        module = module_of_file(name, path)
        if "torch" in vars(module):
            vars(module)["torch"] = _Eager()
    return sys.modules[name]
