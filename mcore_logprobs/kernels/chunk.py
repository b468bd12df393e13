"""Raw logits of some rows and columns, and how they become processed logits.

From raw logits y come the processed logits

    z = (softcap * tanh(logit_scale * y / softcap) + bias) / temperature      (no softcap: no tanh)

with every column at or past `valid` left out, that is -inf: the mask comes last, so that no later
step revives a masked column.

A softmax is of differences, and z near 1e4 has been rounded by up to 5e-4. So kernels compare and
subtract the *unscaled logits* x, and multiply the difference:

    z - max z = multiplier * (x - max x)

Without softcap and bias x is y itself, exact, and the multiplier is logit_scale / temperature; with
either x is what stands in the brackets, and the multiplier is 1 / temperature.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Processing:
    """How raw logits of some rows and columns are processed; make it with `Processing.of`.

    Attributes:
        logit_scale, softcap: as in the module's formula.
        temperature: a number, or `[n]`, one per row.
        bias: `[v]` or None.
        multiplier: z / x; float64 `[n]` where rows differ.
        slope: dz / dy without the softcap's own slope; likewise.
        valid_width: how many columns are true vocabulary, of a whole source's processing; None:
            all.
    """

    logit_scale: float
    softcap: float | None
    temperature: float | Tensor
    bias: Tensor | None
    multiplier: float | Tensor
    slope: float | Tensor
    valid_width: int | None

    @classmethod
    def of(
        cls,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        temperature: float | Tensor = 1.0,
        bias: Tensor | None = None,
        valid_width: int | None = None,
    ) -> Processing:
        divisor = temperature.double() if isinstance(temperature, Tensor) else temperature
        slope = logit_scale / divisor
        multiplier = slope if softcap is None and bias is None else 1.0 / divisor
        return cls(logit_scale, softcap, temperature, bias, multiplier, slope, valid_width)

    def chunk(self, logits: Tensor, rows: slice, columns: slice) -> Chunk:
        """The chunk of raw logits `[rows, columns]`, of a source's rows and columns."""
        processing = self.rows(rows) if isinstance(self.temperature, Tensor) else self
        if self.bias is not None:
            processing = replace(processing, bias=self.bias[columns])
        stop = columns.stop if self.valid_width is None else min(columns.stop, self.valid_width)
        valid = max(0, stop - columns.start)
        return Chunk(logits, valid, processing)

    def rows(self, part: slice | Tensor) -> Processing:
        """That of some rows."""
        if not isinstance(self.temperature, Tensor):
            return self
        return replace(
            self,
            temperature=self.temperature[part],
            multiplier=per_row(self.multiplier, part),
            slope=per_row(self.slope, part),
        )

    def unscaled_entries(self, raw: Tensor, column: Tensor) -> Tensor:
        """x of raw logits `[e]` in the accumulation dtype; 0 where a column is -1."""
        x = unscaled_logits(
            raw,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            bias=None if self.bias is None else self.bias[column.clamp(min=0)].to(raw.dtype),
        )
        return torch.where(column >= 0, x, 0.0)


RAW = Processing.of()  # z is y itself


@dataclass(frozen=True)
class Chunk:
    """What every kernel takes.

    Attributes:
        logits: `[n, v]`, raw, any float dtype, any row stride; not modified.
        valid: columns that are true vocabulary; they come first. May be 0.
        processing: of these rows and columns.
        lasting: the logits are read again later: no gradient is written over them.
    """

    logits: Tensor
    valid: int
    processing: Processing = RAW
    lasting: bool = False

    def rows(self, part: slice) -> Chunk:
        """Some of its rows; itself if they are all."""
        if part.start == 0 and part.stop == self.logits.shape[0]:
            return self
        processing = self.processing.rows(part)
        return Chunk(self.logits[part], self.valid, processing, self.lasting)

    def columns(self, part: slice) -> Chunk:
        """Some of its columns, `[part.start, part.stop)`."""
        processing, valid = self.processing, max(0, min(self.valid, part.stop) - part.start)
        if processing.bias is not None:
            processing = replace(processing, bias=processing.bias[part])
        return Chunk(self.logits[:, part], valid, processing, self.lasting)

    @property
    def untempered(self) -> Chunk:
        """The same at a temperature of 1."""
        p = self.processing
        processing = Processing.of(p.logit_scale, p.softcap, 1.0, p.bias, p.valid_width)
        return replace(self, processing=processing)

    @property
    def is_raw(self) -> bool:
        """Whether x is y."""
        return self.processing.softcap is None and self.processing.bias is None

    @property
    def is_unprocessed(self) -> bool:
        """Whether z is y itself."""
        multiplier = self.processing.multiplier
        return self.is_raw and not isinstance(multiplier, Tensor) and multiplier == 1.0

    def unscaled(self, dtype: torch.dtype | None = None, *, in_place: bool = False) -> Tensor:
        """x, `[n, valid]`, in a dtype (None: the logits' `acc_dtype`); maybe the logits' memory.

        Args:
            in_place: as in `unscaled_logits`.
        """
        processing = self.processing
        x = unscaled_logits(
            self.logits[:, : self.valid],
            logit_scale=processing.logit_scale,
            softcap=processing.softcap,
            bias=None if processing.bias is None else processing.bias[: self.valid],
            in_place=in_place,
        )
        return x if dtype is None else x.to(dtype)

    def unscaled_at(self, columns: Tensor) -> Tensor:
        """x at columns `[n, j]`, 0 where a column is negative (another shard's or ignored)."""
        dtype = acc_dtype(self.logits.dtype)
        if self.logits.shape[1] == 0:  # a rank, or a block of it, without true vocabulary
            return torch.zeros(columns.shape, dtype=dtype, device=columns.device)
        raw = gather_columns(self.logits, columns).to(dtype)
        return self.processing.unscaled_entries(raw, columns)

    def unscaled_entries(self, row: Tensor, column: Tensor) -> Tensor:
        """x of single logits `[e]`; 0 where a column is negative."""
        dtype = acc_dtype(self.logits.dtype)
        if self.logits.numel() == 0:
            return torch.zeros(row.shape, dtype=dtype, device=row.device)
        raw = self.logits[row, column.clamp(min=0)].to(dtype)
        return self.processing.unscaled_entries(raw, column)

    def raw_gradient_at(self, row: Tensor, column: Tensor, dz: Tensor) -> Tensor:
        """The gradient of processed logits at entries `[e]` to that of raw ones, new; exactly 0
        where dz is.
        """
        processing = self.processing
        dy = times_multiplier(dz, per_row(processing.slope, row))
        if processing.softcap is None or self.logits.numel() == 0:
            return dy
        raw = self.logits[row, column.clamp(min=0)]
        slope = softcap_slope(raw, processing.logit_scale, processing.softcap, dy.dtype)
        return torch.where(dy != 0, dy * slope, 0.0)

    def processed(self, *, in_place: bool = False) -> Tensor:
        """z, as `unscaled` gives x."""
        x, multiplier = self.unscaled(in_place=in_place), self.processing.multiplier
        return x if self.is_unprocessed else times_multiplier(x, multiplier, in_place=in_place)

    def to_raw_gradient(self, dz: Tensor) -> None:
        """The gradient of processed logits `[n, valid]` to that of raw ones, in place."""
        processing = self.processing
        if processing.softcap is not None:
            raw = self.logits[:, : self.valid]
            slope = softcap_slope(raw, processing.logit_scale, processing.softcap, dz.dtype)
            # A row with NaN that asks for nothing gets nothing: 0 times a NaN slope would be NaN.
            dz.mul_(slope.masked_fill_(dz == 0, 0.0))
        times_multiplier(dz, processing.slope, in_place=True)


class ChunkAt(NamedTuple):
    """A chunk and its place: rows in the source's order, columns of this rank's shard.

    Attributes:
        other: the chunk of the same rows and columns of a second source, where two are compared.
    """

    rows: slice
    columns: slice
    chunk: Chunk
    other: Chunk | None = None

    def steps(self, size: int) -> Iterator[tuple[slice, slice, Chunk]]:
        """(rows in the source's order, rows in the chunk, these rows) `size` at a time."""
        for part in row_chunks(self.chunk.logits.shape[0], max(1, size)):
            start = self.rows.start
            yield slice(start + part.start, start + part.stop), part, self.chunk.rows(part)

    def local(self, column: Tensor, width: int) -> Tensor:
        """Columns of a shard of this width, or -1, as the chunk's own; -1 where not in it."""
        if self.columns.stop - self.columns.start == width:
            return column
        own_column = column - self.columns.start
        return torch.where((own_column >= 0) & (column < self.columns.stop), own_column, -1)


def unscaled_logits(
    logits: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    in_place: bool = False,
) -> Tensor:
    """x of the module's formula, float32 or float64; logits itself where nothing is to be done.

    Args:
        logits: of any shape; not modified but with `in_place`.
        bias: what broadcasts to it.
        in_place: over the logits, which are of the accumulation dtype.
    """
    x = logits.to(acc_dtype(logits.dtype))
    if softcap is None and bias is None:
        return x
    if softcap is not None:
        factor = logit_scale / softcap
        x = (x.mul_(factor) if in_place else x * factor).tanh_()
        # Where autograd records it, for a function of the caller's, it keeps the tanh.
        x = x * softcap if x.requires_grad else x.mul_(softcap)
    elif logit_scale != 1.0:
        x = x.mul_(logit_scale) if in_place else x * logit_scale
    if bias is None:
        return x
    return x.add_(bias) if in_place else x + bias


def times_multiplier(
    x: Tensor, multiplier: float | Tensor, *, rows_last: bool = False, in_place: bool = False
) -> Tensor:
    """x `[n, ...]` times a number, or one for each row; x itself where that is 1.

    Args:
        rows_last: x is `[..., n]`.
    """
    if isinstance(multiplier, Tensor):
        multiplier = multiplier.to(x.dtype) if rows_last else row_numbers(multiplier, x)
    elif multiplier == 1.0:
        return x
    return x.mul_(multiplier) if in_place else x * multiplier


def row_numbers(per_row: Tensor, like: Tensor) -> Tensor:
    """Numbers `[n]` in the dtype of `[n, ...]`, to be combined with it."""
    return per_row.to(like.dtype).view(-1, *(1,) * (like.dim() - 1))


def softcap_slope(logits: Tensor, logit_scale: float, softcap: float, dtype: torch.dtype) -> Tensor:
    """The derivative of softcap * tanh(x / softcap) at x = logit_scale * logits; new, in dtype."""
    scaled = logits.to(dtype, copy=True).mul_(logit_scale / softcap)
    return scaled.tanh_().square_().neg_().add_(1.0)


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """What tensors of this dtype are summed in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def per_row(value: float | Tensor, rows: slice | Tensor) -> float | Tensor:
    """Some rows of what may be one number for all."""
    return value[rows] if isinstance(value, Tensor) else value


def gather_columns(values: Tensor, columns: Tensor) -> Tensor:
    """`values[i, columns[i, j]]`, `[n, j]`; of a negative column any value; v may be 0."""
    if values.shape[-1] == 0:
        return values.new_zeros(columns.shape)
    return values.gather(-1, columns.clamp(min=0))


def row_chunks(rows: int, chunk_size: int) -> Iterator[slice]:
    """Slices of at most `chunk_size` rows that cover `rows` rows; none for zero rows."""
    for start in range(0, rows, chunk_size):
        yield slice(start, min(start + chunk_size, rows))


# ---- the memory of chunks ----------------------------------------------------------------------

# Elements of which a row's stride is a multiple where a kernel reads and writes 16 bytes at a time.
_UNIT = 16
# Bytes. Each way of a first-level cache has 4 KiB: rows that start a multiple of 1 KiB apart share
# four of its 64 lines at most.
_CACHE_LINE, _ALIASING = 64, 1024


def row_stride(columns: int, dtype: torch.dtype, device_type: str) -> int:
    """Numbers from a row of so many columns to the next, in memory made for a chunk's logits."""
    stride = -(-columns // _UNIT) * _UNIT
    # A product on a CPU writes many rows at once, and waits where they share lines of a cache: one
    # line more per row spreads them.
    if device_type == "cpu" and stride * dtype.itemsize % _ALIASING == 0:
        stride += _CACHE_LINE // dtype.itemsize
    return stride


# The C library hands a large tensor out as untouched pages, and the first write of each 4 KiB costs
# a page fault: six times what writing it costs, and more than computing a gradient. Linux backs
# memory with 2 MiB pages where a program says so (`madvise`), and then faults hardly show. With
# THP_MEM_ALLOC_ENABLE=1 a process gets the same from torch for all of its tensors.
_MIN_BYTES = 8 << 20
_MADV_HUGEPAGE = 14  # Linux


def prefer_huge_pages(fresh: Tensor) -> Tensor:
    """The same tensor, its memory marked for huge pages if it is large and on a Linux CPU.

    Args:
        fresh: just made and not yet written to; every byte of it is going to be written, so that
            whole pages cost no memory.
    """
    # Only plain tensors have memory: fake ones, for one, have not.
    if type(fresh) is not Tensor or fresh.device.type != "cpu" or torch.compiler.is_compiling():
        return fresh
    storage = fresh.untyped_storage()
    advise = _madvise()
    if advise is not None and storage.nbytes() >= _MIN_BYTES:
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(start, stop - start, _MADV_HUGEPAGE)  # a hint: nothing is lost if it is refused
    return fresh


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
