"""What the command lines share. Imports no torch, so that `--help` comes at once."""

from __future__ import annotations

import argparse
import importlib.util
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


def dtype_name(text: str) -> str:
    """torch's name of a dtype, for any that `DTYPES` has."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(DTYPES)}, got {text!r}")
    return DTYPES[text]


def why_not_written(file: str) -> str:
    """What will stop a file from being written after the work; "" where nothing is known to."""
    if Path(file).absolute().parent.is_dir():
        return ""
    return f"expected a file in a folder that exists, got {file}"


def why_not_drawn(file: str) -> str:
    """Likewise of a figure."""
    if importlib.util.find_spec("matplotlib") is None:
        return "expected matplotlib to be installed: pip install matplotlib"
    return why_not_written(file)


def comma_separated(one: Callable[[str], object]) -> Callable[[str], list[Any]]:
    """A parser of one or more, separated by commas."""
    return lambda text: [one(part) for part in text.split(",")]
