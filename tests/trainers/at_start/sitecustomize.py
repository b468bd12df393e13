"""For PYTHONPATH: readies every process that a framework starts (`tests.trainers.workers`).

Python imports a module of this name when it starts. Nothing else is imported until the framework
is.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from typing import Any


class _FirstImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: has a module prepare the process, then steps back."""

    def __init__(self, package: str, module: str) -> None:
        self.package, self.module = package, module

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != self.package:
            return None
        sys.meta_path.remove(self)
        importlib.import_module(self.module).ready()
        return importlib.util.find_spec(name)


if os.environ.get("MCORE_LOGPROBS_RUN_READY"):
    sys.meta_path.insert(0, _FirstImport(*os.environ["MCORE_LOGPROBS_RUN_READY"].split()))
