"""Kernels for two sides, run as an operation runs them and compared with the reference."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.kernels import pairs
from mcore_logprobs.kernels.chunk import Chunk, Processing
from mcore_logprobs.kernels.pairs import PairSpec, finalize_pair, merge_pairs
from tests.helpers.oracles import assert_no_worse
from tests.kernels.common import DEVICE, doubled

BETA = 0.3


def run_pair(
    kernels: Any,
    student: Chunk,
    teacher: Chunk,
    kind: str,
    upstream: Tensor,
    out: Tensor,
    beta: float = BETA,
) -> tuple[Tensor, Tensor, Tensor]:
    """(value, KL from the mixture, gradient) of whole rows, by these kernels."""
    spec, size = PairSpec(kind, beta), {"chunk_size": 16}
    stats = kernels.pair_stats(student, teacher, spec, **size)
    multipliers = student.processing.multiplier, teacher.processing.multiplier
    done = finalize_pair(merge_pairs(stats, spec, multipliers), spec)
    value, inner = done.value, done.value
    norms = (done.softmax.t().contiguous().t(),)  # strided, as the next two
    if spec.two_pass:
        from_teacher, inner = kernels.pair_sums(student, teacher, *norms, spec, **size)
        value = beta * from_teacher + (1.0 - beta) * inner
    upstream = torch.where(done.usable, upstream, 0.0)
    inner, upstream = (torch.stack([x, x + 1.0], 1)[:, 0] for x in (inner, upstream))
    kernels.pair_grad(student, teacher, *norms, inner, upstream, spec, out=out, **size)
    return torch.where(done.usable, value, 0.0), inner, out


def check_pair(
    kernels: Any, student: Chunk, teacher: Chunk, kind: str, *, out: Tensor, ulps: float
) -> None:
    """Values and gradients against float64; out may be the student's own logits."""
    before = student.logits.clone(), teacher.logits.clone()
    rows, width = student.logits.shape
    upstream = torch.randn(rows, device=DEVICE)
    upstream[2::5] = 0.0
    exact = run_pair(
        pairs, doubled(student), doubled(teacher), kind, upstream.double(),
        torch.empty(rows, width, dtype=torch.float64, device=DEVICE),
    )  # fmt: skip
    plain = run_pair(pairs, student, teacher, kind, upstream, torch.full_like(out, torch.nan))
    got = run_pair(kernels, student, teacher, kind, upstream, out)
    assert got[0].dtype == torch.float32
    for name, *three in zip(("value", "inner", "gradient"), got, plain, exact, strict=True):
        assert_no_worse(*three, name=f"{kind} {name}", ulps=ulps)
    assert (out[:, student.valid :] == 0).all()
    assert (out[2::5] == 0).all()
    for side, copy in zip((student, teacher), before, strict=True):
        if side.logits is not out:
            assert torch.equal(side.logits.nan_to_num(7.0), copy.nan_to_num(7.0)), "modified"


def far_apart(kind: str, width: int, padding: int = 0) -> tuple[Chunk, Chunk]:
    """(student, teacher) of which one has finite logits far below -1e4, maxima apart."""
    near, far = torch.randn(2, 3, width + padding, device=DEVICE)
    far[:, 1] = torch.tensor([-12_000.0, -30_000.0, -2e6], device=DEVICE)
    far[:, 5] += 9.0
    student, teacher = (near, far) if kind == "reverse" else (far, near)
    return Chunk(student, width), Chunk(teacher, width)


LEAST = torch.finfo(torch.float32).min


def masked_with_numbers(kind: str, width: int, padding: int = 0) -> tuple[Chunk, Chunk]:
    """(student, teacher) of which one or both have columns that large negative numbers mask.

    What weighs has probability 0 there, so that the divergence is moderate. Rows differ in which
    columns these are, and in the numbers.
    """
    student, teacher = torch.randn(2, 16, width + padding, device=DEVICE)
    by_teacher = kind in ("forward", "cross_entropy")
    weighs, other = (teacher, student) if by_teacher else (student, teacher)
    for row, (own, others) in enumerate(
        itertools.product((LEAST, -1e9), (None, LEAST, -1e9, -torch.inf))
    ):
        for masked, columns in ((row, slice(0, width // 2)), (row + 8, slice(width // 3, None))):
            weighs[masked, columns] = own
            if others is not None:
                other[masked, columns] = others
    # At half the temperature the least number is -inf.
    temperature = torch.where(torch.arange(16, device=DEVICE) < 8, 1.0, 0.5)
    processing = Processing.of(temperature=temperature)
    return Chunk(student, width, processing), Chunk(teacher, width, processing)


def divergence_of(
    kernels: Any, student: Chunk, teacher: Chunk, kind: str, beta: float = BETA
) -> Tensor:
    """The divergence of whole rows, by these kernels."""
    spec, size = PairSpec(kind, beta), {"chunk_size": 16}
    stats = kernels.pair_stats(student, teacher, spec, **size)
    multipliers = student.processing.multiplier, teacher.processing.multiplier
    done = finalize_pair(merge_pairs(stats, spec, multipliers), spec)
    if spec.two_pass:
        return kernels.pair_sums(student, teacher, done.softmax, spec, **size)[0]
    return done.value
