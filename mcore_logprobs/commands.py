"""What the command lines share. Imports no torch, so that `--help` comes at once."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import mcore_logprobs
from mcore_logprobs.spelling import nearest

# Names of a dtype that a command line takes: torch's.
DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "half", "float16"), "float16"),
    **dict.fromkeys(("fp32", "float", "float32"), "float32"),
}


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, []):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Shows defaults, has `--version`, takes no abbreviation, and names the nearest flag."""

    def __init__(self, command: str = "", **options: Any) -> None:
        options.setdefault("prog", f"python -m mcore_logprobs {command}".rstrip())
        options.setdefault("formatter_class", _Defaults)
        super().__init__(allow_abbrev=False, **options)
        self.add_argument(
            "--version", action="version", version=f"mcore-logprobs {mcore_logprobs.__version__}"
        )

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """`parse_args`, after a look at the flags: an unknown one's value is no positional's."""
        arguments = list(sys.argv[1:] if argv is None else argv)
        for flag in (word.partition("=")[0] for word in arguments):
            if flag.startswith("--") and flag not in self._option_string_actions:
                known = list(self._option_string_actions)
                self.error(f"unrecognized argument {flag}{nearest(flag, known)}")
        return self.parse_args(arguments)

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2, the usage and the message."""
        choice = re.search(r"invalid choice: '(\S+?)' \(choose from (.*)\)", message)
        if choice:
            message += nearest(choice[1], re.findall(r"[\w.-]+", choice[2]))
        super().error(message)


def positive(text: str) -> int:
    """A whole number above 0."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number > 0, got {text!r}")
    return value


def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number > 0, got {text!r}")
    return value


def dtype_name(text: str) -> str:
    """torch's name of a dtype, for any that `DTYPES` has."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(DTYPES)}, got {text!r}")
    return DTYPES[text]


def why_not_written(file: str) -> str:
    """What will stop a file from being written after the work; "" where nothing is known to."""
    path = Path(file)
    if not path.absolute().parent.is_dir():
        return f"expected a file in a folder that exists, got {file}"
    if not file or path.is_dir():
        return f"expected a file, got the folder {file!r}" if file else "expected a file, got ''"
    is_new = not path.exists()
    if is_new or path.is_file():  # opening a pipe would wait for its reader
        try:
            path.open("ab").close()
        except OSError as error:
            return f"expected a file that can be written, got {file} ({error.strerror})"
    if is_new:
        path.unlink(missing_ok=True)  # another rank's, too
    return ""


def why_not_drawn(file: str) -> str:
    """Likewise of a figure."""
    if importlib.util.find_spec("matplotlib") is None:
        return "expected matplotlib to be installed: pip install matplotlib"
    from matplotlib.backend_bases import FigureCanvasBase

    known, suffix = FigureCanvasBase.get_supported_filetypes(), Path(file).suffix[1:]
    if suffix and suffix.lower() not in known:
        return f"expected a suffix of {', '.join(sorted(known))}, got {file}"
    return why_not_written(file)


def check_script(script: str, as_module: bool) -> None:
    """Check that a script, or (`-m`) the package of a module, is there.

    Nothing is imported: of a module in a package only the outermost one is looked up.

    Raises:
        ValueError: it is not there.
    """
    if as_module:
        if importlib.util.find_spec(script.partition(".")[0]) is None:
            raise ValueError(f"expected a module, got {script}: not found on sys.path")
    elif not (Path(script).is_file() or Path(script, "__main__.py").is_file()):
        raise ValueError(f"expected a script, got {script}: no such file")


def leave_out_cwd() -> None:
    """Take the working directory, which `python -m` puts there, from `sys.path`."""
    if sys.path[:1] == [os.getcwd()] and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]


def or_closed_pipe(command: Callable[[], int | None]) -> int:
    """A command's exit status; 141 where the reader of stdout has gone (`| head -1`)."""
    try:
        status = command() or 0
        if sys.stdout is not None:  # closed
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, as a shell reports it
    return status


def comma_separated(one: Callable[[str], object]) -> Callable[[str], list[Any]]:
    """A parser of one or more, separated by commas."""
    return lambda text: [one(part) for part in text.split(",")]
