"""The inductor backend under `invariant_segments`: a row's bits depend on its own numbers alone.

The kernels are those of `inductor`. A block's sums run over a static number of columns in one
vectorised order, whatever the rows and however they are divided among threads; the gradient is
elementwise. What could change the order is avoided here: a call of one row (torch.compile makes a
kernel of its own for a size of 1, which may divide a block among threads) runs as two, and columns
past the last whole vector are copied into one.

Which call is compiled follows from its dtype, its block and its spec, never from its layout. So
nothing falls back where a kernel fails: results of two calls would not have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from mcore_logprobs.kernels import inductor, reference
from mcore_logprobs.kernels.inductor import count_higher, row_stats
from mcore_logprobs.kernels.stats import RowSpec

__all__ = ["MIN_WIDTH", "block_stats", "count_higher", "grad_logits", "row_stats"]

# Columns a segment from which on `auto` takes this backend.
MIN_WIDTH = 1024
_VECTOR = 64


def block_stats(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    *,
    block: int,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
    chunk_size: int,
) -> Tensor:
    """As `reference.block_stats`; the columns past the last whole block are the reference's.

    Raises:
        RuntimeError: torch.compile failed, or is switched off here.
    """
    rows, count = logits.shape[0], spec.valid // block
    if rows == 0 or count == 0 or not _is_common(logits, spec, bias):
        return reference.block_stats(
            logits,
            target,
            spec,
            block=block,
            bias=bias,
            threshold=threshold,
            temperature=temperature,
            chunk_size=chunk_size,
        )
    whole = count * block
    blocks = count + (whole < spec.valid)
    out = torch.zeros(blocks, len(spec.fields), rows, dtype=torch.float32, device=logits.device)
    multiplier = inductor.row_multipliers(logits, spec, temperature)
    head = _two_rows(_side_by_side(logits[:, :whole]))
    found = _call(
        _stats_kernel(block), head, _two_rows(multiplier), spec.entropy, spec.sum_pi_squared
    )
    for name, values in found.items():
        out[:count, spec.position(name)] = values[:rows].t()
    if whole < spec.valid:
        rest = replace(spec, valid=spec.valid - whole, rank=False)
        (part,) = reference.block_stats(
            logits[:, whole : spec.valid],
            torch.full_like(target, -1),
            rest,
            block=block,
            temperature=temperature,
            chunk_size=chunk_size,
        )
        for name, values in rest.named(part).items():
            out[count, spec.position(name)] = values
    own = reference.gather_target(logits[:, : spec.valid], target, 0.0)
    out[0, spec.position("target")] = own.float() * multiplier
    if spec.rank:
        assert threshold is not None
        out[0, spec.position("higher")] = count_higher(
            logits, target, threshold, valid=spec.valid, chunk_size=chunk_size
        ).float()
    return out


def grad_logits(
    logits: Tensor,
    target: Tensor,
    shift: Tensor,
    coef: Tensor,
    spec: RowSpec,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    out: Tensor,
    chunk_size: int,
) -> None:
    """As `reference.grad_logits`.

    Raises:
        RuntimeError: torch.compile failed, or is switched off here.
    """
    if not _is_common(logits, spec, bias):
        reference.grad_logits(
            logits,
            target,
            shift,
            coef,
            spec,
            bias=bias,
            temperature=temperature,
            out=out,
            chunk_size=chunk_size,
        )
        return
    whole = spec.valid - spec.valid % _VECTOR
    per_row = target, shift, coef, temperature
    strided = logits.stride(-1) != 1 or out.stride(-1) != 1
    if logits.shape[0] and whole and (strided or logits.shape[0] == 1):
        for rows in reference.row_chunks(logits.shape[0], chunk_size):
            _grad_of_copy(logits, slice(0, whole), rows, spec, *per_row, out)
    elif logits.shape[0] and whole:
        _grad_of_vectors(logits[:, :whole], *per_row, replace(spec, valid=whole), out[:, :whole])
    if logits.shape[0] and whole < spec.valid:
        _grad_of_copy(
            logits, slice(whole, spec.valid), slice(0, logits.shape[0]), spec, *per_row, out
        )
    out[:, spec.valid :] = 0


def _grad_of_copy(
    logits: Tensor,
    columns: slice,
    rows: slice,
    spec: RowSpec,
    target: Tensor,
    shift: Tensor,
    coef: Tensor,
    temperature: Tensor | None,
    out: Tensor,
) -> None:
    """The gradient of some rows and columns, by a copy of at least two rows of whole vectors."""
    count, width = rows.stop - rows.start, columns.stop - columns.start
    shape = (max(2, count), -(-width // _VECTOR) * _VECTOR)
    copy = logits.new_zeros(shape)
    copy[:count, :width] = logits[rows, columns]
    grad = torch.empty_like(copy, dtype=out.dtype)
    own = target[rows] - columns.start
    _grad_of_vectors(
        copy,
        _two_rows(torch.where((own >= 0) & (own < width), own, -1)),
        _two_rows(shift[rows]),
        _two_rows(coef[:, rows], 1),
        None if temperature is None else _two_rows(temperature[rows]),
        replace(spec, valid=shape[1]),
        grad,
    )
    out[rows, columns] = grad[:count, :width]


def _grad_of_vectors(
    logits: Tensor,
    target: Tensor,
    shift: Tensor,
    coef: Tensor,
    temperature: Tensor | None,
    spec: RowSpec,
    out: Tensor,
) -> None:
    own = torch.where(target < spec.valid, target, -1)
    inductor.compiled_gradient(logits, own, shift, coef, spec, temperature, out, call=_call)


def _is_common(logits: Tensor, spec: RowSpec, bias: Tensor | None) -> bool:
    # A fake tensor has no bits, and nothing to compile for.
    return (
        not isinstance(logits, FakeTensor)
        and logits.dtype in inductor.DTYPES
        and bias is None
        and spec.softcap is None
        and not spec.smoothing
    )


def _side_by_side(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _two_rows(per_row: Tensor, dim: int = 0) -> Tensor:
    """Itself, or its only row twice; rows are dimension `dim`."""
    return per_row if per_row.shape[dim] > 1 else torch.cat([per_row, per_row], dim)


@cache
def _stats_kernel(block: int) -> Callable[..., Any]:
    """`inductor.stats_kernel` of blocks of this width, which is static to the compiler."""
    if block == inductor.BLOCK:
        return inductor.stats_kernel

    def block_stats_kernel(
        logits: Tensor, multiplier: Tensor, entropy: bool, squares: bool
    ) -> dict[str, Tensor]:
        inductor.assert_compiled()
        blocks = logits.unflatten(1, (logits.shape[1] // block, block))
        return inductor.block_values(blocks, multiplier, entropy, squares)

    return block_stats_kernel


def _call(function: Callable[..., Any], *args: Tensor | bool) -> Any:
    # A mode that counts or logs operations must not change the bits.
    try:
        with _disable_current_modes():
            return inductor.call_compiled(function, *args)
    except inductor.NotCompiled as failure:
        raise RuntimeError(
            f"invariant_segments: {failure}; backend='torch' gives such results without a compiler"
        ) from failure
