"""What the Triton kernels share: unscaled logits, an accurate tanh, and how work is laid out.

Every kernel walks a row in tiles of `groups x lanes` columns, `lanes` being what one thread reads
with one 16-byte load. A reduction over the lanes never leaves its thread, so that the loop over the
tiles has no barrier; threads are reduced once, after it.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels import stats
from mcore_logprobs.kernels.chunk import Chunk, Processing

LOG2E = tl.constexpr(1.4426950408889634)
LOG_ZERO = tl.constexpr(stats.LOG_ZERO)
# Columns by which a row is masked: 16-byte accesses need no fewer of them, in any dtype, and
# Triton asks whether numbers are multiples of 16.
UNIT = tl.constexpr(16)

# Programs for each multiprocessor when there are too few rows. A dozen are resident at a time, and
# with several rounds of them the last, part-filled round costs little.
_PROGRAMS_PER_PROCESSOR = 32
# A tile this large gives a warp four 16-byte loads to have in flight.
_TILE_BYTES = 8192
# Columns that one program writes: enough to spread the cost of reading the row's numbers first.
_SPAN = 16384
# Columns of a masked step: a 16-byte access of two bytes per column for each of 128 threads.
_TAIL = 1024


# ---- in a kernel -------------------------------------------------------------------------------


@triton.jit
def exp(x):
    """e to the x, by the instruction that gives powers of two."""
    return tl.exp2(x * LOG2E)


@triton.jit
def clamped(x):
    """x, at least LOG_ZERO: for what is multiplied by a probability that may be 0."""
    return tl.maximum(x, LOG_ZERO)


@triton.jit
def tanh(x):
    """tanh to 2 units in the last place."""
    # exp overflows to inf for large x, and 2 / inf is 0.
    large = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
    square = x * x
    series = -6.615748585e-03 * square + 2.131274034e-02
    series = series * square - 5.391006557e-02
    series = series * square + 1.333311761e-01
    series = series * square - 3.333333205e-01
    small = x + x * (square * series)
    return tl.where(tl.abs(x) < 0.55, small, large)


@triton.jit
def before_bias(y, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """`unscaled` up to the bias."""
    x = y
    capped = y
    if HAS_SOFTCAP:
        capped = tanh(y * scale)
        # Only a product, with a rounding of its own. As `capped * softcap` it would be fused with
        # the subtraction of a row's largest x, or of the other side's, which was rounded: equal
        # logits would differ by what the rounding took.
        x = tl.fma(capped, softcap, 0.0)
    elif HAS_BIAS:
        x = y * scale
    return x, capped


@triton.jit
def unscaled(y, bias_ptr, columns, mask, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """x of raw logits `y` in float32 (`kernels.chunk`); the caller masks afterwards.

    Args:
        bias_ptr: `[v]` or None.
        mask: of the columns, or None.
        scale, softcap: what `transform` gives.

    Returns:
        (x, tanh(logit_scale * y / softcap), or any number where there is no softcap).
    """
    x, capped = before_bias(y, scale, softcap, bias_ptr is not None, HAS_SOFTCAP)
    if bias_ptr is not None:
        if mask is None:
            bias = tl.load(bias_ptr + columns)
        else:
            bias = tl.load(bias_ptr + columns, mask=mask, other=0.0)
        x += bias.to(tl.float32)
    return x, capped


@triton.jit
def over_temperature(number, row, temperature_ptr):
    """A number of `transform`, for a row that may have its own temperature."""
    if temperature_ptr is not None:
        number = tl.div_rn(number, tl.load(temperature_ptr + row).to(tl.float32))
    return number


@triton.jit
def own_columns(splits, split_columns, valid):
    """(row, split, first column, the one behind the last) of a program, of `splits` a row."""
    program = tl.program_id(0)
    row = program // splits
    split = program % splits
    start = split * split_columns
    return row, split, start, tl.minimum(start + split_columns, valid)


@triton.jit
def whole_units(start, stop):
    """The end of the last UNIT columns that lie wholly in `[start, stop)`; start if there is none.

    The compiler knows that it is a multiple of UNIT columns from start: a mask up to there is one
    for all columns of a 16-byte access, where one up to stop would be one for each column.
    """
    return start + tl.maximum(stop - start, 0) // UNIT * UNIT


@triton.jit
def write_zeros(row_ptr, start, stop, TILE: tl.constexpr):
    """Zeros in columns `[start, stop)`; start is a multiple of UNIT."""
    end = whole_units(start, stop)
    for at in range(start, end, TILE):
        columns = at + tl.arange(0, TILE)
        tl.store(row_ptr + columns, tl.zeros([TILE], tl.float32), mask=columns < end)
    columns = end + tl.arange(0, UNIT)
    tl.store(row_ptr + columns, tl.zeros([UNIT], tl.float32), mask=columns < stop)


# ---- a kernel's arguments ----------------------------------------------------------------------


def transform(chunk: Chunk) -> tuple[float, float, float]:
    """(scale, softcap, multiplier), numbers for `unscaled` and `Processing.multiplier`.

    Where rows have temperatures of their own, the multiplier is still to be divided by them.
    """
    processing = _of_all_rows(chunk)
    scale, softcap = processing.logit_scale, 1.0
    if processing.softcap is not None:
        scale, softcap = scale / processing.softcap, processing.softcap
    return float(scale), float(softcap), float(processing.multiplier)


def raw_slope(chunk: Chunk) -> float:
    """`Processing.slope`, likewise."""
    return float(_of_all_rows(chunk).slope)


def _of_all_rows(chunk: Chunk) -> Processing:
    """The chunk's processing; without temperatures, if each row has its own."""
    has_rows = isinstance(chunk.processing.temperature, Tensor)
    return chunk.untempered.processing if has_rows else chunk.processing


def row_multiplier(chunk: Chunk) -> float | Tensor:
    """`Processing.multiplier` of a chunk within an operator, where that of rows is not made yet."""
    temperature, multiplier = chunk.processing.temperature, chunk.processing.multiplier
    if isinstance(temperature, Tensor) and not isinstance(multiplier, Tensor):
        return multiplier / temperature.double()
    return multiplier


def row_temperature(chunk: Chunk) -> Tensor | None:
    """`[n]` where each row has its own, else None; its last stride is 1."""
    temperature = chunk.processing.temperature
    return with_unit_stride(temperature) if isinstance(temperature, Tensor) else None


@overload
def with_unit_stride(tensor: Tensor) -> Tensor: ...
@overload
def with_unit_stride(tensor: Tensor | None) -> Tensor | None: ...
def with_unit_stride(tensor: Tensor | None) -> Tensor | None:
    """The tensor itself, or a copy where its last dimension is strided (small tensors only)."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


# Whether the kernels run in Triton's interpreter: decided when Triton was first imported. Its own
# functions and ours are decorated at different moments, and both must agree.
INTERPRETED = not any(isinstance(function, triton.JITFunction) for function in (tl.sum, unscaled))


def launch(kernel: Any, programs: int, *arguments: Any, num_warps: int = 4, **constants: object):
    """`programs` programs of a kernel on the device of its first argument, a tensor."""
    here: AbstractContextManager[object] = nullcontext()
    if arguments[0].is_cuda and arguments[0].get_device() != torch.cuda.current_device():
        here = torch.cuda.device(arguments[0].device)  # Triton launches on the current device
    with here:
        # a * b + c in one instruction and one rounding: Triton's default is on up to 3.9 and off
        # from 3.10, and a process can set it either way.
        kernel[(programs,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=True)


def rounded(out: Tensor) -> AbstractContextManager[Tensor]:
    """Where a kernel writes: out itself, but the interpreter truncates to bfloat16."""
    if INTERPRETED and out.dtype == torch.bfloat16:
        return _rounded_after(out)
    return nullcontext(out)


@contextmanager
def _rounded_after(out: Tensor) -> Iterator[Tensor]:
    exact = torch.empty_like(out, dtype=torch.float32)
    yield exact
    out.copy_(exact)


# ---- launch plans ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How one launch covers its rows.

    Attributes:
        splits: programs that share a row.
        columns: columns of a row that one program walks.
        lanes, groups: the shape of a tile, `groups x lanes` columns.
    """

    splits: int
    columns: int
    lanes: int
    groups: int

    @property
    def tile(self) -> int:
        return self.lanes * self.groups


def launch_plan(rows: int, width: int, logits: Tensor) -> Plan:
    """Split each row over as many programs as it takes to fill the chip, and no more."""
    lanes, tile = _tile(width, logits)
    tiles = triton.cdiv(max(1, width), tile)
    programs = triton.cdiv(_PROGRAMS_PER_PROCESSOR * _processors(logits.device), max(1, rows))
    per_program = triton.cdiv(tiles, min(tiles, programs))
    return Plan(triton.cdiv(tiles, per_program), per_program * tile, lanes, tile // lanes)


def block_plan(width: int, block: int, logits: Tensor) -> Plan:
    """One program for each block of columns, whatever the rows or the chip."""
    lanes, tile = _tile(block, logits)
    return Plan(max(1, triton.cdiv(width, block)), block, lanes, tile // lanes)


def _tile(width: int, logits: Tensor) -> tuple[int, int]:
    """(lanes, columns) of a tile."""
    size = logits.element_size()
    lanes = 16 // size
    return lanes, min(_TILE_BYTES // size, max(32 * lanes, triton.next_power_of_2(width)))


def span_plan(width: int, tile: int) -> tuple[int, dict[str, int]]:
    """How one launch writes its rows: programs per row; the columns of one as a kernel's constants.

    It writes TILES tiles of TILE columns, and what is masked, TAIL at a time: few enough to take
    no more registers than the others.
    """
    tiles = _SPAN // tile
    tile = min(tile, max(128, triton.next_power_of_2(width)))
    return triton.cdiv(width, tile * tiles), {
        "TILE": tile,
        "TILES": tiles,
        "TAIL": min(tile, _TAIL),
    }


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter: one program after another
    return torch.cuda.get_device_properties(device).multi_processor_count
