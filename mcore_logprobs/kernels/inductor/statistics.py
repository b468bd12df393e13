"""Statistics of one source, compiled, and their gradient.

Compiled are any temperature, scale, row stride, entropy and rank. What is rare (softcap, bias,
label smoothing, many entries per row, one row, under two blocks of columns) goes to the reference,
and so do a few columns past the last whole block.

Where a row's bits must depend only on its own numbers, a block's sums run over a static number of
columns in one vectorised order, whatever the rows and however they are divided among threads; the
gradient is elementwise. What could change the order is avoided: a call of one row (torch.compile
makes a kernel of its own for a size of 1, which may divide a block among threads) runs as two, and
columns past the last whole vector are copied into one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels.chunk import Chunk, Processing, row_chunks
from mcore_logprobs.kernels.inductor.common import (
    BLOCK,
    MIN_BLOCKS,
    NotCompiled,
    assert_compiled,
    call_compiled,
    is_common,
    row_multipliers,
    vector_bits,
    write_gradient,
)
from mcore_logprobs.kernels.reference import gather_target
from mcore_logprobs.kernels.stats import LOG_ZERO, GradientTerms, StatsSpec, by_name

# Of the columns past the last whole block: for 576 of them eager torch takes as long as a kernel
# for 18432.
_NARROW_BLOCK = 256
_MIN_INVARIANT = 512  # columns per block for which a kernel is compiled
_VECTOR = 64
_MAX_COLUMNS = 8  # of a row's single entries: each is compared with the others


def stats(
    chunk: Chunk,
    target: Tensor,
    spec: StatsSpec,
    *,
    threshold: Tensor | None = None,
    block: int | None = None,
    chunk_size: int,
) -> Tensor:
    """As `reference.stats`.

    Raises:
        RuntimeError: torch.compile failed, or is switched off here, and `block` is given.
    """
    size = BLOCK if block is None else block
    count, rows = chunk.valid // size, chunk.logits.shape[0]
    if block is None:
        common = rows > 1 and count >= MIN_BLOCKS and chunk.logits.stride(-1) == 1
    else:
        common = rows > 0 and count > 0 and block >= _MIN_INVARIANT
    if common and not spec.smoothing and is_common(chunk):
        call = call_compiled if block is None else _call_or_raise
        try:
            return _stats(chunk, target, spec, threshold, size, chunk_size, call)
        except NotCompiled:
            pass
    return reference.stats(
        chunk, target, spec, threshold=threshold, block=block, chunk_size=chunk_size
    )


def grad(chunk: Chunk, terms: GradientTerms, *, out: Tensor, chunk_size: int) -> None:
    """As `reference.grad`."""
    if (
        _has_few_columns(chunk, terms)
        and chunk.logits.shape[0] > 1
        and chunk.valid >= MIN_BLOCKS * BLOCK
        and chunk.logits.stride(-1) == out.stride(-1) == 1
    ):
        try:
            _grad(chunk, terms, out, call_compiled)
            return
        except NotCompiled:
            pass
    reference.grad(chunk, terms, out=out, chunk_size=chunk_size)


def invariant_grad(chunk: Chunk, terms: GradientTerms, *, out: Tensor, chunk_size: int) -> None:
    """As `reference.grad`; a row's bits depend only on its own numbers.

    Raises:
        RuntimeError: torch.compile failed, or is switched off here.
    """
    if not _has_few_columns(chunk, terms):
        reference.grad(chunk, terms, out=out, chunk_size=chunk_size)
        return
    rows, valid = chunk.logits.shape[0], chunk.valid
    vector_end = valid - valid % _VECTOR
    strided = chunk.logits.stride(-1) != 1 or out.stride(-1) != 1
    head, tail = slice(0, vector_end), slice(vector_end, valid)
    if rows and vector_end and (strided or rows == 1):
        for part in row_chunks(rows, chunk_size):
            _grad_of_copy(chunk, head, part, terms, out)
    elif rows and vector_end:
        columns = torch.where(terms.columns < vector_end, terms.columns, -1)
        _grad(chunk.columns(head), terms._replace(columns=columns), out[:, head], _call_or_raise)
    if rows and vector_end < valid:
        _grad_of_copy(chunk, tail, slice(0, rows), terms, out)
    out[:, valid:] = 0


def _has_few_columns(chunk: Chunk, terms: GradientTerms) -> bool:
    few = terms.coef is not None and 1 <= terms.columns.shape[1] <= _MAX_COLUMNS
    return few and not terms.spec.smoothing and is_common(chunk)


def _stats(
    chunk: Chunk,
    target: Tensor,
    spec: StatsSpec,
    threshold: Tensor | None,
    block: int,
    chunk_size: int,
    call: Callable[..., Any],
) -> Tensor:
    rows, count = chunk.logits.shape[0], chunk.valid // block
    full_columns = count * block
    raw = chunk.logits if chunk.logits.stride(-1) == 1 else chunk.logits.contiguous()
    head, multiplier = raw[:, :full_columns], row_multipliers(chunk)
    head_target = torch.where(target < full_columns, target, -1)
    operands = _two_rows(head), _two_rows(multiplier)
    block_stats = call(_stats_kernel(block), *operands, spec.entropy, spec.sum_pi_squared)
    parts = raw.new_zeros((count, len(spec.fields), rows), dtype=torch.float32)
    part = by_name(spec.fields, parts, dim=1)
    for name, values in block_stats.items():
        part[name].copy_(values[:rows].t())
    part["target"][0] = gather_target(head, head_target, 0.0).float()
    if spec.rank:
        assert threshold is not None
        limit = threshold.to(raw.dtype)
        higher = call(_count_kernel(block), operands[0], _two_rows(limit))
        part["higher"].copy_(higher[:rows].t())
        part["higher"][0] -= (gather_target(head, head_target, -torch.inf) > limit).float()
    if full_columns == chunk.valid:
        return parts
    rest = chunk.columns(slice(full_columns, chunk.valid))
    rest_target = torch.where(target >= full_columns, target - full_columns, -1)
    if block == BLOCK and call is call_compiled and rest.valid >= MIN_BLOCKS * _NARROW_BLOCK:
        last = _stats(rest, rest_target, spec, threshold, _NARROW_BLOCK, chunk_size, call)
    else:
        last = reference.stats(
            rest,
            rest_target,
            spec,
            threshold=threshold,
            block=block,
            chunk_size=chunk_size * chunk.valid // rest.valid,  # as many numbers at a time
        )
    return torch.cat([parts, last])


def _grad(chunk: Chunk, terms: GradientTerms, out: Tensor, call: Callable[..., object]) -> None:
    """`grad` of two rows or more with few columns, without bias, softcap or label smoothing."""
    columns, upstream, row_max, coef, spec = terms
    assert row_max is not None
    assert coef is not None
    logits, multiplier = chunk.logits, row_multipliers(chunk)
    scaled = coef * multiplier
    row = by_name(spec.coefficients, scaled)
    asked = coef.any(0) | upstream.any(1)
    # The columns' entries are computed apart, from logits before anything is written over them, and
    # rounded once: near p = 1 one is the difference of two nearly equal numbers.
    columns, upstream = _with_repeats(columns, upstream)
    has_columns = columns[:, :1] >= 0
    columns = columns.clamp(min=0)
    at = torch.arange(columns.shape[0], device=logits.device).unsqueeze(1), columns
    difference = logits[at].float() - row_max.unsqueeze(1)
    entries = reference.distribution_gradient(difference, multiplier, scaled.unsqueeze(-1), spec)
    entries += upstream * multiplier.unsqueeze(1)
    entries = torch.where(asked.unsqueeze(1), entries, 0.0).to(out.dtype)

    source, result = logits[:, : chunk.valid], out[:, : chunk.valid]
    # A missing coefficient is never read: pass any other tensor for it.
    coefficients = [row.get(name, row["weight"]) for name in ("weight", "moment", "squares")]
    factors = multiplier, row_max, *coefficients, asked
    flags = spec.entropy, spec.sum_pi_squared
    write_gradient(call, _grad_values, source, result, *factors, *flags)
    out[:, chunk.valid :] = 0
    # Where no column is here the kernel's own value stays: an eager exp may round otherwise.
    out[at] = torch.where(has_columns, entries, out[at])


def _with_repeats(columns: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """(columns `[n, j]`, what each one's entry gets in all): entries that can be written as one.

    Of a column that is named several times each has the sum. One that is elsewhere (-1) is another
    of its row's instead of it, and -1 if there is none.
    """
    if columns.shape[1] == 1:
        return columns, upstream
    upstream = torch.where(columns >= 0, upstream, 0.0)
    columns = torch.where(columns >= 0, columns, columns.amax(1, keepdim=True))
    total = torch.zeros_like(upstream)
    for column, of_column in zip(columns.split(1, 1), upstream.split(1, 1), strict=True):
        total += torch.where(columns == column, of_column, 0.0)
    return columns, total


def _grad_of_copy(
    chunk: Chunk, columns: slice, rows: slice, terms: GradientTerms, out: Tensor
) -> None:
    """The gradient of some rows and columns, by a copy of at least two rows of whole vectors."""
    entries, upstream, row_max, coef, spec = terms.rows(rows)
    assert row_max is not None
    assert coef is not None
    piece = chunk.rows(rows).columns(columns)
    count, width = piece.logits.shape
    copy = piece.logits.new_zeros((max(2, count), -(-width // _VECTOR) * _VECTOR))
    copy[:count, :width] = piece.logits
    written = torch.empty_like(copy, dtype=out.dtype)
    local = entries - columns.start
    local = torch.where((local >= 0) & (local < width), local, -1)
    scale, temperature = piece.processing.logit_scale, piece.processing.temperature
    if isinstance(temperature, Tensor):
        temperature = _two_rows(temperature)
    _grad(
        Chunk(copy, copy.shape[1], Processing.of(scale, temperature=temperature)),
        GradientTerms(
            _two_rows(local),
            _two_rows(upstream),
            _two_rows(row_max),
            _two_rows(coef.t()).t(),
            spec,
        ),
        written,
        _call_or_raise,
    )
    out[rows, columns] = written[:count, :width]


def _two_rows(per_row: Tensor) -> Tensor:
    """Itself, or its only row twice."""
    return per_row if per_row.shape[0] > 1 else torch.cat([per_row, per_row])


def _call_or_raise(function: Callable[..., object], *args: Tensor | bool) -> object:
    """As `call_compiled`, also within a mode that counts or logs: it must not change the bits.

    Raises:
        RuntimeError: compilation failed, or torch.compile is switched off.
    """
    try:
        with _disable_current_modes():
            return call_compiled(function, *args)
    except NotCompiled as failure:
        raise RuntimeError(
            f"invariant_segments: {failure}; backend='torch' gives such results without a compiler"
        ) from failure


# ---- kernels: what torch.compile sees -----------------------------------------------------------


# To the compiler a number in a closure is symbolic, as sizes are, and a text is not: so a block has
# a static width, by which loops over it are vectorised.


@cache
def _stats_kernel(width: int) -> Callable[..., object]:
    """`[n, blocks * width]` -> each block's statistics by name, `[n, blocks]`."""
    static, run = str(width), str(_run_length(width))

    def stats_kernel(
        logits: Tensor, multiplier: Tensor, entropy: bool, squares: bool
    ) -> dict[str, Tensor]:
        assert_compiled()
        block, columns = int(static), int(run)

        def total(x: Tensor) -> Tensor:
            if columns == block:
                return x.sum(-1)
            return x.unflatten(-1, (block // columns, columns)).sum(-1).sum(-1)

        blocks = logits.unflatten(1, (logits.shape[1] // block, block))
        x = blocks.float()
        block_max = x.amax(-1)
        # Apart: stacked, the maximum's loop and the sum's would not be fused.
        shifted = x - torch.where(block_max == -torch.inf, 0.0, block_max).unsqueeze(-1)
        shifted = shifted * multiplier[:, None, None]
        if entropy:
            shifted = shifted.clamp(min=LOG_ZERO)
        weight = shifted.exp()
        fields = {"max": block_max, "sum": total(weight)}
        if entropy:
            fields["entropy"] = total(weight * shifted)
        if squares:
            fields["squares"] = total(weight * weight)
        return fields

    return stats_kernel


def _run_length(width: int) -> int:
    """Columns of a block that are summed one after the other, a divisor of the block's width.

    A vector has 8 or 16 running totals, each of a few of the columns. Without vectors there is one,
    which over 2048 columns rounds ten times as much: there, sums of short runs are summed.
    """
    try:
        has_vectors = vector_bits() > 0
    except Exception:  # whatever it is, compiling meets it too, and says so (`call_compiled`)
        return width
    if has_vectors:
        return width
    divisors = [run for run in range(1, width + 1) if width % run == 0]
    return min(divisors, key=lambda run: run + width // run)


@cache
def _count_kernel(width: int) -> Callable[..., object]:
    """`[n, blocks * width]`, `[n]` -> how many of each block are higher, `[n, blocks]` float32."""
    static = str(width)

    def count_kernel(logits: Tensor, limit: Tensor) -> Tensor:
        assert_compiled()
        block = int(static)
        blocks = logits.unflatten(1, (logits.shape[1] // block, block))
        # float32 holds every count of a block, and is summed faster than int64.
        return (blocks > limit[:, None, None]).float().sum(-1)

    return count_kernel


def _grad_values(
    logits: Tensor,
    multiplier: Tensor,
    shift: Tensor,
    weight: Tensor,
    moment: Tensor,
    squares: Tensor,
    asked: Tensor,
    with_entropy: bool,
    with_squares: bool,
) -> Tensor:
    shifted = (logits.float() - shift[:, None]) * multiplier[:, None]
    factor = weight[:, None]
    if with_entropy:
        shifted = shifted.clamp(min=LOG_ZERO)
        factor = factor + moment[:, None] * shifted
    w = shifted.exp()
    if with_squares:
        factor = factor + squares[:, None] * w
    return torch.where(asked[:, None], w * factor, 0.0)
