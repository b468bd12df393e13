"""`python -m benchmarks.trace` counts what a call enters."""

from __future__ import annotations

from benchmarks import trace


def test_every_call_is_counted() -> None:
    for name, call in trace.calls().items():
        functions, files, changes = trace.traced(call)
        assert functions > files > 1, name
        assert changes >= files - 1, name
