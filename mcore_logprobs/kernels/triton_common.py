"""What the Triton kernels share: finished logits, an accurate tanh, and how work is laid out.

Every kernel walks a row in tiles of `groups x lanes` columns, `lanes` being what one thread reads
with one 16-byte load. A reduction over the lanes never leaves its thread, so that the loop over the
tiles has no barrier; threads are reduced once, after it.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels import stats

__all__ = [
    "INTERPRETED",
    "LOG2E",
    "LOG_ZERO",
    "Plan",
    "block_plan",
    "device_of",
    "field_constants",
    "finished",
    "launch_plan",
    "row_transform",
    "tanh",
    "transform_args",
    "with_unit_stride",
]

LOG2E = tl.constexpr(1.4426950408889634)
LOG_ZERO = tl.constexpr(stats.LOG_ZERO)

# Programs for each multiprocessor when rows alone are too few. A dozen are resident at a time, and
# with several rounds of them the last, part-filled round costs little.
_PROGRAMS_PER_PROCESSOR = 32
# A tile this large gives a warp four 16-byte loads to have in flight.
_TILE_BYTES = 8192
_NUM_WARPS = 4


@triton.jit
def tanh(x):
    """tanh to 2 units in the last place; the usual 1 - 2 / (exp(2x) + 1) loses small x."""
    square = x * x
    series = -6.615748585e-03 * square + 2.131274034e-02
    series = series * square - 5.391006557e-02
    series = series * square + 1.333311761e-01
    series = series * square - 3.333333205e-01
    small = x + x * (square * series)
    # exp overflows to inf for large x, and 2 / inf is 0.
    large = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    large = tl.where(x < 0.0, -large, large)
    return tl.where(tl.abs(x) < 0.55, small, large)


@triton.jit
def finished(
    y,
    bias_ptr,
    columns,
    mask,
    scale,
    softcap,
    temperature,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """z of raw logits `y` in float32 (`kernels.stats`); the caller masks afterwards.

    Returns (z, tanh(logit_scale * y / softcap), or y where there is no softcap).
    """
    z = y
    if HAS_SCALE:
        z = z * scale
    capped = z
    if HAS_SOFTCAP:
        capped = tanh(z)
        z = capped * softcap
    if HAS_BIAS:
        if mask is None:
            bias = tl.load(bias_ptr + columns)
        else:
            bias = tl.load(bias_ptr + columns, mask=mask, other=0.0)
        z = z + bias.to(tl.float32)
    if HAS_TEMPERATURE:
        # Rounded as torch rounds it: with a bias, ranks compare z of two origins.
        z = tl.div_rn(z, temperature)
    return z, capped


@triton.jit
def row_transform(
    temperature_ptr, row, scale, softcap, temperature,
    HAS_ROW_TEMPERATURE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """(scale, softcap, temperature) of `finished` for a row that may have its own temperature."""
    if HAS_ROW_TEMPERATURE:
        own = tl.load(temperature_ptr + row).to(tl.float32)
        if HAS_TEMPERATURE:
            temperature = own
        elif HAS_SOFTCAP:
            softcap = softcap / own
        else:
            scale = scale / own
    return scale, softcap, temperature


def transform_args(
    spec: stats.RowSpec, bias: Tensor | None, temperature: Tensor | None
) -> dict[str, Any]:
    """The arguments of `finished`, by name, save for its tensors.

    Without a bias the temperature goes into the scale or the softcap; a bias comes between, and a
    division a column is left.
    """
    own, capped = temperature is not None, spec.softcap is not None
    scale = spec.logit_scale if bias is not None else spec.multiplier
    softcap = 1.0
    if spec.softcap is not None:
        scale = spec.logit_scale / spec.softcap
        softcap = spec.softcap if bias is not None else spec.softcap / spec.temperature
    return {
        "scale": scale,
        "softcap": softcap,
        "temperature": spec.temperature,
        "HAS_SCALE": scale != 1.0 or (own and bias is None and not capped),
        "HAS_SOFTCAP": capped,
        "HAS_BIAS": bias is not None,
        "HAS_TEMPERATURE": bias is not None and (own or spec.temperature != 1.0),
        "HAS_ROW_TEMPERATURE": own,
    }


def field_constants(spec: stats.RowSpec, *names: str) -> dict[str, int]:
    """The places of statistics in their tensor as a kernel's constants: MAX=0, ENTROPY=-1, ..."""
    return {"FIELDS": len(spec.fields)} | {name.upper(): spec.position(name) for name in names}


# Whether the kernels run in Triton's interpreter: decided when Triton was first imported. Its own
# functions and ours are decorated at different moments, and both must agree.
INTERPRETED = not any(isinstance(function, triton.JITFunction) for function in (tl.sum, finished))


@dataclass(frozen=True)
class Plan:
    """How one launch covers its rows.

    Attributes:
        splits: programs that share a row.
        columns: columns of a row that one program walks; a multiple of the tile.
        lanes, groups: the shape of a tile, `groups x lanes` columns.
        num_warps: warps of a program.
    """

    splits: int
    columns: int
    lanes: int
    groups: int
    num_warps: int

    @property
    def tile(self) -> int:
        return self.lanes * self.groups


def launch_plan(rows: int, width: int, logits: Tensor) -> Plan:
    """Split each row over as many programs as it takes to fill the chip, and no more."""
    size = logits.element_size()
    lanes = 16 // size
    tile = min(_TILE_BYTES // size, max(32 * lanes, triton.next_power_of_2(max(1, width))))
    tiles = triton.cdiv(max(1, width), tile)
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * _processors(logits.device), max(1, rows))
    per_program = triton.cdiv(tiles, min(tiles, wanted))
    splits = triton.cdiv(tiles, per_program)
    return Plan(splits, per_program * tile, lanes, tile // lanes, _NUM_WARPS)


def block_plan(width: int, block: int, logits: Tensor) -> Plan:
    """One program for each block of columns, whatever the rows or the chip.

    Args:
        block: columns a block, a multiple of 64.
    """
    size = logits.element_size()
    lanes = 16 // size
    tile = min(_TILE_BYTES // size, block & -block)  # the largest power of two that divides it
    return Plan(max(1, triton.cdiv(width, block)), block, lanes, tile // lanes, _NUM_WARPS)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter: one program after another
    return torch.cuda.get_device_properties(device).multi_processor_count


def device_of(tensor: Tensor) -> Any:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def with_unit_stride(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy where its last dimension is strided (small tensors only)."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
