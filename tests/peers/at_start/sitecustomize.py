"""For PYTHONPATH: readies every Python process of a framework's tests (`tests.peers.process`).

The framework's tests are a package `tests` too. Ours is imported under that name, and the name is
given back, before anything of theirs is.
"""

from __future__ import annotations

import os
import sys
import traceback


def _ready(repository: str) -> None:
    sys.path.insert(0, repository)
    try:
        from tests.peers import process

        process.ready()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # Python would print the error and go on, without what was asked for
    sys.path.remove(repository)
    for name in [n for n in sys.modules if n == "tests" or n.startswith("tests.")]:
        sys.modules[f"mcore_logprobs_{name}"] = sys.modules.pop(name)


_HELPERS = ("resource_tracker", "forkserver")  # of multiprocessing: they import nothing else
if os.environ.get("MCORE_LOGPROBS_PEER") and not any(
    helper in word for word in sys.orig_argv[:3] for helper in _HELPERS
):
    _ready(os.environ["MCORE_LOGPROBS_REPOSITORY"])
