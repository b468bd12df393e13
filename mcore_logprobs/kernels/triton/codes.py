"""`kernels.codes` as Triton kernels: a program per row."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels import codes
from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.triton.common import (
    launch,
    over_temperature,
    raw_slope,
    row_temperature,
)
from mcore_logprobs.kernels.triton.operators import (
    arguments,
    chunk_schema,
    chunks_of,
    operator,
    writes_out,
)

LEVELS = tl.constexpr(codes.LEVELS)
RANGE = tl.constexpr(codes.RANGE)
LEAST = tl.constexpr(codes._LEAST)
OFFSET = tl.constexpr(codes.OFFSET)
_TILE = 2048  # columns at a time: four 16-byte loads of float32 a thread


@triton.jit
def _code(y, top, step):
    below = tl.minimum(tl.floor((top - y) / step + 0.5), LEVELS)
    below = tl.where(y == float("-inf"), LEVELS + 1.0, below)
    return (below.to(tl.int32) - OFFSET).to(tl.int16)


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["temperature_ptr", "scale_ptr"],
)
def encode_kernel(
    logits_ptr,  # [n, v] float32
    codes_ptr,  # [n, v] int16
    scale_ptr,  # [2, n] float32
    temperature_ptr,  # [n], or None
    rows,
    width,
    row_stride,
    codes_stride,
    slope,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    out_ptr = codes_ptr + row.to(tl.int64) * codes_stride
    slope = over_temperature(slope, row, temperature_ptr)
    offsets = tl.arange(0, TILE)
    whole = width // TILE * TILE
    rest = whole + offsets
    inside = rest < width
    last = tl.load(row_ptr + rest, mask=inside, other=float("-inf"))
    largest = last
    least = tl.where(inside, last, float("inf"))
    for at in range(0, whole, TILE):
        y = tl.load(row_ptr + at + offsets)
        largest = tl.maximum(largest, y)
        least = tl.minimum(least, y)
    top = tl.max(largest, 0)
    span = (top - tl.min(least, 0)) * slope
    step = tl.maximum(tl.where(span < RANGE, span, RANGE), LEAST) / LEVELS / slope
    tl.store(scale_ptr + row, top)
    tl.store(scale_ptr + rows + row, step)
    for at in range(0, whole, TILE):
        y = tl.load(row_ptr + at + offsets)
        tl.store(out_ptr + at + offsets, _code(y, top, step))
    tl.store(out_ptr + rest, _code(last, top, step), mask=inside)


@triton.jit
def _logit(code, top, step):
    below = (code.to(tl.int32) + OFFSET).to(tl.float32)
    return tl.where(below > LEVELS, float("-inf"), top - below * step)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["scale_ptr"])
def decode_kernel(
    codes_ptr,  # [n, v] int16
    out_ptr,  # [n, v] float32
    scale_ptr,  # [2, n] float32
    rows,
    width,
    codes_stride,
    row_stride,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = codes_ptr + row.to(tl.int64) * codes_stride
    to_ptr = out_ptr + row.to(tl.int64) * row_stride
    top = tl.load(scale_ptr + row)
    step = tl.load(scale_ptr + rows + row)
    offsets = tl.arange(0, TILE)
    whole = width // TILE * TILE
    for at in range(0, whole, TILE):
        tl.store(to_ptr + at + offsets, _logit(tl.load(row_ptr + at + offsets), top, step))
    rest = whole + offsets
    inside = rest < width
    code = tl.load(row_ptr + rest, mask=inside, other=0)
    tl.store(to_ptr + rest, _logit(code, top, step), mask=inside)


def encode(chunk: Chunk, *, out: Tensor, chunk_size: int = 0) -> Tensor:
    """As `kernels.codes.encode`; last strides of 1."""
    return _encode(*arguments(chunk, out))


def _run_encode(*given: object) -> Tensor:
    chunk, out = chunks_of(1, given)
    logits, (rows, width) = chunk.logits, out.shape
    scale = logits.new_empty(2, rows)
    if out.numel():
        launch(
            encode_kernel, rows,
            logits, out, scale, row_temperature(chunk),
            rows, width, logits.stride(0), out.stride(0), raw_slope(chunk), TILE=_TILE,
        )  # fmt: skip
    return scale


def _fake_encode(*given: object) -> Tensor:
    chunk, out = chunks_of(1, given)
    return chunk.logits.new_empty(2, out.shape[0], dtype=torch.float32)


_encode = operator(f"encode({chunk_schema()}, Tensor(a!) out) -> Tensor", _run_encode, _fake_encode)


def decode(codes: Tensor, scale: Tensor, *, out: Tensor, chunk_size: int = 0) -> None:
    """As `kernels.codes.decode`; last strides of 1."""
    _decode(codes, scale, out)


def _run_decode(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    rows, width = out.shape
    if out.numel():
        launch(
            decode_kernel, rows,
            codes, out, scale.contiguous(),
            rows, width, codes.stride(0), out.stride(0), TILE=_TILE,
        )  # fmt: skip


_decode = operator(
    "decode(Tensor codes, Tensor scale, Tensor(a!) out) -> ()", _run_decode, writes_out
)
