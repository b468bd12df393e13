"""`python -m mcore_logprobs doctor|bench|run|audit`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pkgutil import resolve_name

from mcore_logprobs.commands import Parser, or_closed_pipe

# What each does, and the function that does it with the arguments that come after its name.
COMMANDS = {
    "doctor": ("versions, backends, Megatron's hooks, a self-test", "debug.commands:doctor"),
    "bench": ("time and memory", "bench.cli:main"),
    "run": ("a Megatron training script, unchanged, with the flags and the patch", "run:main"),
    "audit": ("any vocab-parallel function against float64", "debug.commands:audit"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Hands the arguments after the command's name to that command; returns its exit status."""
    parser = Parser(
        description="Log-probabilities for Megatron-Core: checks, benchmarks, training scripts.",
        epilog="--help after a command is its own",
    )
    told = "; ".join(f"{name}: {text}" for name, (text, _) in COMMANDS.items())
    parser.add_argument("command", choices=list(COMMANDS), help=told)
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = parser.parse(arguments[:1]).command
    function = resolve_name(f"mcore_logprobs.{COMMANDS[command][1]}")
    if command == "run" and not {"-h", "--help"}.issuperset(arguments[1:2]):
        return int(function(arguments[1:]))  # the script's own exceptions pass through
    try:
        return or_closed_pipe(lambda: int(function(arguments[1:])))
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT


if __name__ == "__main__":
    sys.exit(main())
