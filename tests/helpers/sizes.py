"""The budgets that all tests of a run are under: the package's own, or others of `engine/cases.py`.

MCORE_LOGPROBS_TEST_BUDGETS names them. Under "narrow" every model and every call walks through many
tiles and blocks, the last of either shorter, whatever its test is about.
"""

from __future__ import annotations

import os
from dataclasses import replace

from mcore_logprobs.kernels import budgets

VARIABLE = "MCORE_LOGPROBS_TEST_BUDGETS"


def put_in_force() -> None:
    """For this process, from now on; called in the main process and in each rank."""
    name = os.environ.get(VARIABLE)
    if name:
        from tests.engine.cases import BUDGETS

        numel = budgets.CPU.compiled_numel  # compiling each small call would take hours
        budgets._in_force.append(replace(BUDGETS[name], compiled_numel=numel))
