"""The frameworks' published source, which `tests/run.sh` unpacks, and modules of single files."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

_PINS = [
    line for line in Path(__file__).with_name("frameworks.txt").read_text().split() if "==" in line
]


def source_root(distribution: str, version: str = "") -> Path:
    """Folder of a distribution as unpacked; the first version listed unless told."""
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


def load(distribution: str, file: str, version: str = "", **stand_ins: dict[str, Any]) -> Any:
    """A module made of one file, none of its package's other modules run.

    stand_ins: what it imports from modules that are not here, `{"a__b": {"name": value}}` for
    `from a.b import name`.
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
    name = f"_framework_{distribution}_{version}_{path.stem}".replace("-", "_").replace(".", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        if "torch" in vars(module):
            vars(module)["torch"] = _Eager()
    return sys.modules[name]
