"""Benchmarks for one's own machine: `python -m mcore_logprobs bench`, alone or under torchrun."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks that the arguments ask for; returns the exit status."""
    from mcore_logprobs.bench.cli import main as run

    return run(argv)
