"""A script in a process of its own, in a twentieth of a second: forked from the ranks' server.

torch, and what stands in `preloaded`, is imported there; nothing else is.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import types
import warnings
from pathlib import Path

from tests.helpers.distributed import _context, _worker_environment


def fresh(script: str, *paths: Path | str, timeout: float = 240, **environment: str) -> str:
    """What a script prints, standard error included, with `paths` first on `sys.path`.

    Raises: AssertionError with its output where it raises, exits with a status, or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        given = (script, [str(path) for path in paths], environment, str(output))
        process = _context().Process(target=_run, args=given, daemon=True)
        with _worker_environment():
            process.start()
        process.join(timeout)
        process.kill()
        process.join()
        printed = output.read_text()
        assert process.exitcode == 0, f"status {process.exitcode}: {printed[-4000:]}"
        return printed


def _run(script: str, paths: list[str], environment: dict[str, str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    warnings.simplefilter("ignore")
    sys.path[:0] = paths
    os.environ.update(environment)
    status = 0
    try:
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(script, "<script>", "exec"), vars(main))
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
