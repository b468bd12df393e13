"""`python -m mcore_logprobs doctor|bench|run|audit`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Hands the arguments after the command's name to that command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m mcore_logprobs",
        description="Log-probabilities for Megatron-Core: checks, benchmarks, training scripts.",
    )
    parser.add_argument(
        "command",
        choices=["doctor", "bench", "run", "audit"],
        help="doctor: versions, backends, Megatron's hooks and a self-test; bench: time and "
        "memory; run: a Megatron training script, unchanged, with the flags and the patch; "
        "audit: any vocab-parallel function against float64",
    )
    # The commands parse the rest themselves, so that --help after one is its own.
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = parser.parse_args(arguments[:1]).command
    module = importlib.import_module(f"mcore_logprobs.{command}")
    return int(module.main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
