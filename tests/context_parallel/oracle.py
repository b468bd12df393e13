"""Plain loops over sequences and chunks, written apart from the library's index arithmetic."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def local_indices(layout: str, cp: int, rank: int, cu: list[int]) -> list[int]:
    """Global indices of a rank's tokens. For zigzag this is what Transformer Engine documents for
    `thd_get_partitioned_indices`: of each sequence chunk r, then chunk 2*CP-1-r."""
    out: list[int] = []
    if layout == "contiguous_buffer":
        width = cu[-1] // cp
        return list(range(rank * width, (rank + 1) * width))
    for start, end in itertools.pairwise(cu):
        if layout == "zigzag" and cp > 1:
            width = (end - start) // (2 * cp)
            for chunk in (rank, 2 * cp - 1 - rank):
                out.extend(range(start + chunk * width, start + (chunk + 1) * width))
        else:
            width = (end - start) // cp
            out.extend(range(start + rank * width, start + (rank + 1) * width))
    return out


def shift(
    x: Tensor, cu: list[int], dim: int, fill: float, lengths: list[int] | None = None
) -> Tensor:
    """The whole sequence shifted left by one, sequence by sequence."""
    parts = []
    for i, (start, end) in enumerate(itertools.pairwise(cu)):
        if end > start:
            part = x.narrow(dim, start, end - start).roll(-1, dim).clone()
            last = end - start - 1 if lengths is None else max(lengths[i] - 1, 0)
            part.narrow(dim, last, end - start - last).fill_(fill)
            parts.append(part)
    return torch.cat(parts, dim)


def bounds(length: int, cu: list[int] | None) -> list[int]:
    return [0, length] if cu is None else cu
