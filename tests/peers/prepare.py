"""What a framework's tests need beyond `process.py`, and adapters for its private helpers."""

from __future__ import annotations

from typing import Any

from mcore_logprobs.dropin import areal


def areal_logprobs(
    logits: Any, labels: Any, tp_group: Any, temperature: float = 1.0, chunk_size: int = 1024
) -> Any:
    return areal.gather_logprobs(logits, labels, temperature, tp_group, chunk_size)


def areal_logprobs_entropy(
    logits: Any, labels: Any, tp_group: Any, temperature: float = 1.0, chunk_size: int = 1024
) -> Any:
    return areal.gather_logprobs_entropy(logits, labels, temperature, tp_group, chunk_size)
