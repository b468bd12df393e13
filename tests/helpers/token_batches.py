"""A batch of tokens with all that objectives take."""

from __future__ import annotations

import torch
from torch import Tensor

F64 = torch.float64


def token_batch(rows: int = 6, length: int = 8) -> dict[str, Tensor]:
    """Float64 old and new log-probabilities, advantages `a`, entropy, and a mask whose last row is
    empty: `[rows, length]` each.
    """
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(rows, length, generator=generator, dtype=F64)
    old = -torch.rand(rows, length, generator=generator, dtype=F64) * 3 - 0.05
    spread = torch.linspace(0.02, 0.8, rows, dtype=F64).unsqueeze(1)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[0], lengths[-1] = length, 0
    return {
        "old": old,
        "new": torch.minimum(old + noise * spread, torch.tensor(-1e-3, dtype=F64)),
        "a": torch.randn(rows, 1, generator=generator, dtype=F64).expand(rows, length),
        "entropy": torch.rand(rows, length, generator=generator, dtype=F64) * 3,
        "mask": torch.arange(length) < lengths.unsqueeze(1),
    }
