"""The gradient of one side of logits, of any backend, against the reference in float64."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels.backend import Backend
from mcore_logprobs.kernels.chunk import Chunk, times_multiplier
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec, by_name
from tests.helpers.oracles import assert_no_worse
from tests.kernels.common import DEVICE, doubled, make_target


def make_terms(chunk: Chunk, spec: StatsSpec, entries: int | None = None) -> GradientTerms:
    """Of one entry per row, the target, or of several, some twice and some that are none.

    Nothing is asked of every fifth row from the third on.
    """
    rows = len(chunk.logits)
    column = make_target(rows, chunk.valid, chunk.logits).unsqueeze(1)
    if entries is not None:
        column = torch.randint(chunk.valid, (rows, entries), device=DEVICE)
        column[:, 1::3] = column[:, :1]
        column[:, 2::5] = -1
    upstream = torch.randn(column.shape, device=DEVICE)
    coef = torch.randn(len(spec.coefficients), rows, device=DEVICE)
    coef[:, 2::5] = upstream[2::5] = 0.0
    column, upstream = (x.t().contiguous().t() for x in (column, upstream))  # strided
    x = doubled(chunk).unscaled()
    shift = x.amax(-1) if rows else torch.zeros(0, device=DEVICE)
    shift = torch.where(shift.isneginf(), 0.0, shift).float()
    below = times_multiplier(x - shift.unsqueeze(-1), chunk.processing.multiplier)
    total = below.exp().sum(-1).clamp(min=1.0)
    for name, row in by_name(spec.coefficients, coef).items():
        row /= {"finite": 1.0, "squares": total**2}.get(name, total)
    shift, coef = torch.stack([shift, shift + 1.0], 1)[:, 0], coef.t().contiguous().t()
    return GradientTerms(column, upstream, shift, coef, spec)


def check_gradient(
    backend: Backend, chunk: Chunk, terms: GradientTerms, out: Tensor, *, inplace: bool = False
) -> Tensor:
    """A backend's, written into out; inplace: and over the logits, too."""
    rows = None if terms.row_max is None else terms.row_max.double()
    coef = None if terms.coef is None else terms.coef.double()
    wide = terms._replace(upstream=terms.upstream.double(), row_max=rows, coef=coef)
    exact = torch.full(out.shape, torch.nan, dtype=torch.float64, device=DEVICE)
    reference.grad(doubled(chunk), wide, out=exact, chunk_size=16)
    plain = torch.full_like(out, torch.nan)
    reference.grad(chunk, terms, out=plain, chunk_size=16)
    copy = chunk.logits.clone()
    for source, written in ((chunk.logits, out), *([(copy, copy)] if inplace else ())):
        backend.grad(replace(chunk, logits=source), terms, out=written, chunk_size=16)
        assert_no_worse(written, plain, exact, name="gradient")
        assert (written[:, chunk.valid :] == 0).all()
        assert (written[2::5] == 0).all()
    return out
