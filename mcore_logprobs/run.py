"""`python -m mcore_logprobs run SCRIPT ARGS...`: a Megatron training script, unchanged, patched.

    torchrun --nproc_per_node 8 -m mcore_logprobs run pretrain_gpt.py ... --logprob-fused require

Megatron's parser takes the `--logprob-*` flags, and the models that Megatron builds are patched as
they are built. Under `run` the default of `--logprob-output` is loss, which is what an unchanged
loss function takes; the true size of a padded vocabulary is Megatron's own.

Ends with an error where a flag was given and no model was patched, or where the script's parser
never saw the flags; before training starts wherever Megatron's own set-up is used.
"""

from __future__ import annotations

import os
import runpy
import sys
import zipfile
from collections.abc import Sequence

import mcore_logprobs
from mcore_logprobs.commands import check_script, leave_out_cwd

USAGE = "usage: python -m mcore_logprobs run [-m] SCRIPT ARGS..."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script as `__main__`, with its directory first on `sys.path`, as Python does.

    Returns: 0, or 1 where the flags had no effect. The script's own exceptions and `sys.exit` pass.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{__doc__}", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"mcore-logprobs {mcore_logprobs.__version__}")
        return 0
    as_module = arguments[0] == "-m"
    if as_module:
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith("-"):
        print(f"{USAGE}\nexpected a script, got {arguments[:1]}", file=sys.stderr)
        return 2
    script = arguments[0]
    try:
        check_script(script, as_module)
    except ValueError as error:
        print(f"{USAGE}\n{error}", file=sys.stderr)
        return 2
    from mcore_logprobs.megatron.launcher import Launcher, LaunchError  # with torch

    launcher = Launcher(arguments[1:])
    argv_before, path_before = sys.argv, list(sys.path)
    try:
        with launcher.installed():
            _run(script, arguments, as_module)
        launcher.check()
    except LaunchError as error:
        print(f"mcore_logprobs run: error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        sys.argv, sys.path[:] = argv_before, path_before
    if not launcher.patched:
        print("mcore_logprobs run: no flag was given and no model was patched", file=sys.stderr)
    return 0


def _run(script: str, arguments: list[str], as_module: bool) -> None:
    sys.argv = arguments
    try:
        if as_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            leave_out_cwd()
            if os.path.isfile(script) and not zipfile.is_zipfile(script):  # those runpy puts there
                sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
            runpy.run_path(os.path.abspath(script), run_name="__main__")  # as `__file__` is
    except SystemExit as stop:
        # A script that ends well by sys.exit still has to have used its flags; --help need not.
        if stop.code not in (None, 0) or {"-h", "--help"} & set(arguments):
            raise


if __name__ == "__main__":
    sys.exit(main())
