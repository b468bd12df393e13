"""For PYTHONPATH: readies every Python process of a run of slime's `train.py`, Ray's included.

Python imports a module of this name when it starts. Nothing else is imported until slime is.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import Any


class _FirstImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: has `tests.trainers.slime_ray` prepare the process, then steps back."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != "slime":
            return None
        sys.meta_path.remove(self)
        from tests.trainers import slime_ray

        slime_ray.ready()
        return importlib.util.find_spec(name)


if os.environ.get("MCORE_LOGPROBS_RAY_RUN"):
    sys.meta_path.insert(0, _FirstImport())
