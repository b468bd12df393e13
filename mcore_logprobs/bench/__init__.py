"""Benchmarks for one's own machine: `python -m mcore_logprobs bench`, alone or under torchrun."""

from mcore_logprobs.bench.cli import main

__all__ = ["main"]
