"""Rows, chunks and gradients that the tests of the compiled CPU kernels share."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels.chunk import Chunk, Processing
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec
from tests.kernels.common import EVERYTHING

BLOCK = 2048
# rows, width, valid: the last block is not whole, and columns past it are masked.
ROWS, WIDTH, VALID = 9, 3 * BLOCK + 100, 3 * BLOCK + 37
PLAIN, FULL = StatsSpec(), replace(EVERYTHING, smoothing=False)  # smoothing goes to torch


def make_rows(dtype: torch.dtype, *, strided: bool) -> tuple[Tensor, Tensor]:
    """Logits `[ROWS, WIDTH]` with -inf blocks and a NaN row (3), and targets, two of them -1."""
    y = 3.0 * torch.randn(ROWS, WIDTH + 5 if strided else WIDTH)
    y[:, 7] = -torch.inf
    y[1, : 2 * BLOCK] = -torch.inf
    y[2] = -torch.inf
    y[2, 9] = 1.0
    y[3] = torch.nan
    target = torch.randint(0, VALID, (ROWS,))
    target[2], target[5] = 9, VALID - 1
    target[4] = target[7] = -1
    return y.to(dtype)[:, :WIDTH], target


def thresholds(logits: Tensor, target: Tensor, spec: StatsSpec = FULL) -> Tensor | None:
    return reference.gather_target(logits, target, 0.0).float() if spec.rank else None


def chunk_of(logits: Tensor, spec: StatsSpec = FULL) -> Chunk:
    return Chunk(logits, VALID, Processing.of(temperature=0.7 if spec == PLAIN else 1.0))


def make_terms(logits: Tensor, target: Tensor, spec: StatsSpec) -> GradientTerms:
    """Of one entry per row; nothing is asked of the NaN row and one more, of another the entry."""
    shift = logits.float().nan_to_num(neginf=-1e4).amax(-1)
    coef, upstream = torch.randn(len(spec.coefficients), ROWS), torch.randn(ROWS, 1)
    coef[:, [3, 6]] = upstream[[3, 6]] = 0.0
    coef[:, 5] = 0.0  # as of upstreams that cancel
    kept = len(coef) - 1  # in a row with nothing else, the last one too is something
    coef[:kept, 8] = upstream[8] = 0.0
    return GradientTerms(target.unsqueeze(1), upstream, shift, coef, spec)
