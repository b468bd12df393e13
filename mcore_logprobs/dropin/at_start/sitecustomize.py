"""Switch a framework's drop-in on in every Python process that inherits two variables.

    PYTHONPATH               begins with this file's folder
    MCORE_LOGPROBS_DROPIN    the framework, for example areal

Python imports a module of this name when it starts. `python -m mcore_logprobs.dropin areal --env`
prints both variables, and `python -m mcore_logprobs.dropin areal SCRIPT` sets them for the script's
own child processes.

Nothing but the standard library is imported until the framework imports one of its files that the
drop-in replaces. A process that imports none of them pays about 20 ms.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from typing import Any

VARIABLE = "MCORE_LOGPROBS_DROPIN"
HERE = os.path.dirname(os.path.abspath(__file__))


class _FirstImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: switches the drop-in on before the first of its files is found."""

    def __init__(self, framework: str, modules: set[str]) -> None:
        self._framework, self._modules = framework, modules

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name not in self._modules:
            return None
        from mcore_logprobs.dropin.switch import switch_on

        switch_on(self._framework)  # where it raises, so does the next import
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        return importlib.util.find_spec(name)


def _wait_for(framework: str) -> None:
    # By its path: importing the package would import torch into every process.
    known = runpy.run_path(os.path.join(HERE, "..", "installed.py"))["FRAMEWORKS"]
    if framework not in known:
        # Python would print any other exception and go on.
        sys.exit(f"{VARIABLE}: expected one of {', '.join(known)}, got {framework!r}")
    modules = {known[framework].module_name(file) for file in known[framework].files}
    sys.meta_path.insert(0, _FirstImport(framework, modules))


def _run_the_hidden_one() -> None:
    """The sitecustomize that would have been found without this one."""
    others = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        if __name__ == "sitecustomize":  # what an import of it finds from now on
            sys.modules[__name__] = module
        spec.loader.exec_module(module)


if os.environ.get(VARIABLE):
    _wait_for(os.environ[VARIABLE])
_run_the_hidden_one()
