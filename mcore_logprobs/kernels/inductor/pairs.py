"""Two distributions over the same columns, compiled: the formulas of `kernels.pairs`.

Compiled are any kind, temperature and scale of either side. A softcap, a bias, one row, under two
blocks of columns and the columns past the last whole block go to the reference, and on a CPU
without vectors everything.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from mcore_logprobs.kernels import pairs as reference
from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.inductor.common import (
    MIN_BLOCKS,
    NotCompiled,
    assert_compiled,
    call_compiled,
    is_common,
    row_multipliers,
    vector_bits,
    write_gradient,
)
from mcore_logprobs.kernels.pairs import PAIR_STATS, PairSpec, Weights

logger = logging.getLogger("mcore_logprobs")

# Columns per block. A vector has 8 or 16 running totals: sums of many columns in so few would round
# more than eager torch's.
_BLOCK = 512


def pair_stats(student: Chunk, teacher: Chunk, spec: PairSpec, *, chunk_size: int) -> Tensor:
    """As `kernels.pairs.pair_stats`."""
    try:
        heads, tails = _cut(student, teacher)
        multipliers = row_multipliers(student), row_multipliers(teacher)
        alike = multipliers[0] == multipliers[1]
        kind = spec.kind if not spec.two_pass else ""
        found = call_compiled(_pair_stats_kernel, *heads, *multipliers, alike, kind)
    except NotCompiled:
        return reference.pair_stats(student, teacher, spec, chunk_size=chunk_size)
    blocks, rows = heads[0].shape[1] // _BLOCK, heads[0].shape[0]
    parts = found[0].new_zeros((blocks + len(tails), PAIR_STATS, rows))
    for number, values in enumerate(found):
        parts[:blocks, number] = values.t()
    for tail in tails:
        size = _rows(tail, chunk_size, student)
        (parts[-1],) = reference.pair_stats(*tail, spec, chunk_size=size)
    return parts


def pair_sums(
    student: Chunk, teacher: Chunk, softmax: Tensor, spec: PairSpec, *, chunk_size: int
) -> Tensor:
    """As `kernels.pairs.pair_sums`."""
    try:
        heads, tails = _cut(student, teacher)
        multipliers = row_multipliers(student), row_multipliers(teacher)
        # One for each block: a loop in which nothing tells the blocks of a row apart goes over all
        # of its columns, and is not fused with the sums of blocks.
        of_blocks = softmax.unsqueeze(-1).expand(-1, -1, heads[0].shape[1] // _BLOCK)
        operands = (*multipliers, *_normalizers(of_blocks), *_weights(softmax, spec))
        how = spec.weights.uneven, spec.kind
        sums = torch.stack(call_compiled(_pair_sums_kernel, *heads, *operands, *how)).sum(-1)
    except NotCompiled:
        return reference.pair_sums(student, teacher, softmax, spec, chunk_size=chunk_size)
    for tail in tails:
        size = _rows(tail, chunk_size, student)
        sums += reference.pair_sums(*tail, softmax, spec, chunk_size=size)
    return sums


def pair_grad(
    student: Chunk,
    teacher: Chunk,
    softmax: Tensor,
    inner: Tensor,
    upstream: Tensor,
    spec: PairSpec,
    *,
    out: Tensor,
    chunk_size: int,
) -> None:
    """As `kernels.pairs.pair_grad`."""
    if _are_common(student, teacher) and out.stride(-1) == 1:
        valid = student.valid
        factors = (
            teacher.logits[:, :valid],
            row_multipliers(student),
            row_multipliers(teacher),
            *_normalizers(softmax),
            inner.contiguous(),
            upstream.to(softmax.dtype).contiguous(),
            *_weights(softmax, spec),
        )
        how = spec.weights.uneven, spec.kind
        try:
            logits, written = student.logits[:, :valid], out[:, :valid]
            write_gradient(call_compiled, _pair_grad_values, logits, written, *factors, *how)
            out[:, valid:] = 0
            return
        except NotCompiled:
            pass
    reference.pair_grad(
        student, teacher, softmax, inner, upstream, spec, out=out, chunk_size=chunk_size
    )


def _are_common(student: Chunk, teacher: Chunk) -> bool:
    """Whether there are kernels for both."""
    return (
        student.logits.shape[0] > 1
        and student.valid >= MIN_BLOCKS * _BLOCK
        and all(is_common(side) and side.logits.stride(-1) == 1 for side in (student, teacher))
        and _has_vectors()
    )


@cache
def _has_vectors() -> bool:
    """Whether kernels here have vectors: without them sums of a block round too much."""
    try:
        bits = vector_bits()
    except Exception as error:  # as in `call_compiled`
        logger.warning("inductor backend: divergences: %s; the torch backend takes over", error)
        return False
    if bits == 0:
        logger.info("inductor backend: divergences: no vectors here; the torch backend takes over")
    return bits > 0


def _normalizers(softmax: Tensor) -> tuple[Tensor, ...]:
    """The four of them apart: to the compiler a size of 4 is the number of rows where that is 4."""
    return tuple(each.contiguous() for each in softmax)


def _weights(softmax: Tensor, spec: PairSpec) -> tuple[Tensor, Tensor]:
    """Those of the mixture: torch.compile would make a kernel for each float."""
    of_teacher, of_student, _ = spec.weights
    return softmax.new_tensor(of_teacher), softmax.new_tensor(of_student)


def _cut(student: Chunk, teacher: Chunk) -> tuple[tuple[Tensor, Tensor], list[tuple[Chunk, Chunk]]]:
    """(logits of both in whole blocks of columns, the chunks of what is left: one, or none).

    Raises:
        NotCompiled: there is no kernel for both.
    """
    if not _are_common(student, teacher):
        raise NotCompiled
    valid = student.valid
    whole = valid - valid % _BLOCK
    rest = slice(whole, valid)
    tails = [(student.columns(rest), teacher.columns(rest))] if whole < valid else []
    return (student.logits[:, :whole], teacher.logits[:, :whole]), tails


def _rows(tail: tuple[Chunk, Chunk], chunk_size: int, whole: Chunk) -> int:
    """Rows of a tail at a time, of which there are as many numbers as of whole rows."""
    return chunk_size * whole.valid // tail[0].valid


# ---- kernels: what torch.compile sees -----------------------------------------------------------


def _in_blocks(x: Tensor) -> Tensor:
    """`[n, v]` -> float32 `[n, blocks, _BLOCK]`."""
    return x.unflatten(1, (x.shape[1] // _BLOCK, _BLOCK)).float()


def _pair_stats_kernel(
    student: Tensor,
    teacher: Tensor,
    of_student: Tensor,
    of_teacher: Tensor,
    alike: Tensor,
    kind: str,
) -> tuple[Tensor, ...]:
    """Pair statistics of each block, `[n, blocks]`."""
    assert_compiled()
    s, t, alike = _in_blocks(student), _in_blocks(teacher), alike.unsqueeze(1)
    return reference.statistics_of(lambda: s, lambda: t, of_student, of_teacher, alike, kind)


def _pair_sums_kernel(
    student: Tensor,
    teacher: Tensor,
    of_student: Tensor,
    of_teacher: Tensor,
    max_s: Tensor,  # [n, blocks], as the next three
    log_s: Tensor,
    max_t: Tensor,
    log_t: Tensor,
    teacher_weight: Tensor,
    student_weight: Tensor,
    uneven: bool,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """`pair_sums` of each block, `[n, blocks]`."""
    assert_compiled()
    logp = reference.log_probs(_in_blocks(student), of_student, max_s, log_s)
    logq = reference.log_probs(_in_blocks(teacher), of_teacher, max_t, log_t)
    weights = Weights(teacher_weight, student_weight, uneven)
    return reference.sums_of(lambda: logp, lambda: logq, kind, weights)


def _pair_grad_values(
    student: Tensor,
    teacher: Tensor,
    of_student: Tensor,
    of_teacher: Tensor,
    max_s: Tensor,
    log_s: Tensor,
    max_t: Tensor,
    log_t: Tensor,
    inner: Tensor,
    upstream: Tensor,
    teacher_weight: Tensor,
    student_weight: Tensor,
    uneven: bool,
    kind: str,
) -> Tensor:
    """The gradient of the student's raw logits, `[n, v]`."""
    logp = reference.log_probs(student.float(), of_student, max_s, log_s)
    logq = reference.log_probs(teacher.float(), of_teacher, max_t, log_t)
    weights = Weights(teacher_weight, student_weight, uneven)
    ds = reference.distribution_gradient(logp, logq, inner, kind, weights)
    factor = (upstream * of_student).unsqueeze(1)
    return torch.where((upstream == 0).unsqueeze(1), 0.0, ds * factor)
