"""What the Triton kernels share: finished logits, an accurate tanh, and how work is laid out.

Every kernel walks a row in tiles of `groups x lanes` columns, `lanes` being what one thread reads
with one 16-byte load. A reduction over the lanes never leaves its thread, so that the loop over the
tiles has no barrier; threads are reduced once, after it.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels import stats

__all__ = [
    "CANDIDATES",
    "INTERPRETED",
    "LOG2E",
    "LOG_ZERO",
    "VARIABLE",
    "Candidate",
    "Plan",
    "block_plan",
    "candidate",
    "ceil_div",
    "clamped",
    "device_of",
    "exp",
    "field_constants",
    "finished",
    "launch_plan",
    "positional",
    "power_of_2",
    "row_transform",
    "tanh",
    "transform_constants",
    "use_candidate",
    "with_unit_stride",
]

# Which tanh HAS_SOFTCAP stands for.
_ACCURATE, _RATIO = 1, 2
LOG2E = tl.constexpr(1.4426950408889634)
LOG_ZERO = tl.constexpr(stats.LOG_ZERO)
assert stats.LOG_ZERO == -1e4  # a literal in `clamped`

# Programs for each multiprocessor when rows alone are too few. A dozen are resident at a time, and
# with several rounds of them the last, part-filled round costs little.
_PROGRAMS_PER_PROCESSOR = 32
# A tile this large gives a warp four 16-byte loads to have in flight.
_TILE_BYTES = 8192
_NUM_WARPS = 4


# Triton compares a kernel's global constants at every launch, 0.7 us each: literals are free.
@triton.jit
def exp(x):
    """e to the x, by the instruction that gives powers of two."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def clamped(x):
    """x, at least LOG_ZERO: for what is multiplied by a probability that may be 0."""
    return tl.maximum(x, -1e4)


@triton.jit
def tanh(x, SERIES: tl.constexpr = True):
    """tanh to 2 units in the last place; without the series to 1e-7 absolute, losing small x."""
    # exp overflows to inf for large x, and 2 / inf is 0.
    large = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
    if not SERIES:
        return large
    square = x * x
    series = -6.615748585e-03 * square + 2.131274034e-02
    series = series * square - 5.391006557e-02
    series = series * square + 1.333311761e-01
    series = series * square - 3.333333205e-01
    small = x + x * (square * series)
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
    HAS_SOFTCAP: tl.constexpr,  # False, or which tanh (`transform_constants`)
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
        capped = tanh(z, HAS_SOFTCAP != 2)
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


@lru_cache(1024)
def transform_constants(
    spec: stats.RowSpec, has_bias: bool, own_temperature: bool, series: bool
) -> dict[str, Any]:
    """The arguments of `finished`, by name, save for its tensors.

    Without a bias the temperature goes into the scale or the softcap; a bias comes between, and a
    division a column is left.

    Args:
        series: the candidate's.
    """
    capped = spec.softcap is not None
    scale = spec.logit_scale if has_bias else spec.multiplier
    softcap = 1.0
    if spec.softcap is not None:
        scale = spec.logit_scale / spec.softcap
        softcap = spec.softcap if has_bias else spec.softcap / spec.temperature
    return {
        "scale": float(scale),
        "softcap": float(softcap),
        "temperature": float(spec.temperature),
        "HAS_SCALE": scale != 1.0 or (own_temperature and not has_bias and not capped),
        "HAS_SOFTCAP": capped and (_ACCURATE if series else _RATIO),
        "HAS_BIAS": has_bias,
        "HAS_TEMPERATURE": has_bias and (own_temperature or spec.temperature != 1.0),
        "HAS_ROW_TEMPERATURE": own_temperature,
    }


def positional(kernel: Any, named: dict[str, Any]) -> tuple[Any, ...]:
    """The values of a kernel's last parameters, in its order.

    For whoever launches often: a name takes Triton's launcher 0.25 us, a position 0.1.
    """
    names = kernel.arg_names[-len(named) :]
    assert set(names) == set(named), (kernel.arg_names, sorted(named))
    return tuple(named[name] for name in names)


def field_constants(spec: stats.RowSpec, *names: str) -> dict[str, int]:
    """The places of statistics in their tensor as a kernel's constants: MAX=0, ENTROPY=-1, ..."""
    return {"FIELDS": len(spec.fields)} | {name.upper(): spec.position(name) for name in names}


# Whether the kernels run in Triton's interpreter: decided when Triton was first imported. Its own
# functions and ours are decorated at different moments, and both must agree.
INTERPRETED = not any(isinstance(function, triton.JITFunction) for function in (tl.sum, finished))


# ---- candidates --------------------------------------------------------------------------------

VARIABLE = "MCORE_LOGPROBS_TRITON"


@dataclass(frozen=True)
class Candidate:
    """How the statistics' and the gradient's kernels do what they do; results differ by rounding.

    Attributes:
        stages: of the statistics' loop as Triton pipelines it, through shared memory (1: not).
        prefetch: the statistics' loop reads the next tile before it computes this one.
        series: softcap's tanh is right to 2 units in the last place for small arguments too.
        grad_tile: columns that a program of the gradient takes in at a time.
    """

    stages: int = 1
    prefetch: bool = False
    series: bool = True
    grad_tile: int = 4096


CANDIDATES: dict[str, Candidate] = {
    "default": Candidate(),
    "stages2": Candidate(stages=2),
    "stages3": Candidate(stages=3),
    "prefetch": Candidate(prefetch=True),
    "ratio": Candidate(series=False),
    "tile2k": Candidate(grad_tile=2048),
    "tile8k": Candidate(grad_tile=8192),
}


def _named_candidate(names: str) -> Candidate:
    """What names of `CANDIDATES`, separated by commas, are together."""
    chosen = Candidate()
    for name in names.split(","):
        if name not in CANDIDATES:
            raise ValueError(f"{VARIABLE}: expected some of {tuple(CANDIDATES)}, got {name!r}")
        own = CANDIDATES[name]
        chosen = replace(
            chosen,
            **{f: v for f, v in vars(own).items() if v != getattr(CANDIDATES["default"], f)},
        )
    return chosen


_chosen = _named_candidate(os.environ.get(VARIABLE, "default"))


def candidate() -> Candidate:
    """The one in use: of the environment variable MCORE_LOGPROBS_TRITON, read at import."""
    return _chosen


@contextmanager
def use_candidate(names: str) -> Iterator[None]:
    """Within it, that of these names of `CANDIDATES`; for measuring."""
    global _chosen
    before, _chosen = _chosen, _named_candidate(names)
    try:
        yield
    finally:
        _chosen = before


# ---- launch plans ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How one launch covers its rows.

    Attributes:
        splits: programs that share a row.
        columns: columns of a row that one program walks; a multiple of the tile.
        lanes, groups: the shape of a tile, `groups x lanes` columns.
        num_warps: warps of a program.
        stages, prefetch: as in `Candidate`.
    """

    splits: int
    columns: int
    lanes: int
    groups: int
    num_warps: int
    stages: int = 1
    prefetch: int = False

    @property
    def tile(self) -> int:
        return self.lanes * self.groups


def launch_plan(rows: int, width: int, logits: Tensor) -> Plan:
    """Split each row over as many programs as it takes to fill the chip, and no more."""
    return _launch_plan(rows, width, logits.element_size(), _processors(logits.device), candidate())


@lru_cache(1024)
def _launch_plan(rows: int, width: int, size: int, processors: int, how: Candidate) -> Plan:
    lanes = 16 // size
    tile = min(_TILE_BYTES // size, max(32 * lanes, power_of_2(width)))
    tiles = ceil_div(max(1, width), tile)
    wanted = ceil_div(_PROGRAMS_PER_PROCESSOR * processors, max(1, rows))
    per_program = ceil_div(tiles, min(tiles, wanted))
    splits = ceil_div(tiles, per_program)
    columns = per_program * tile
    return Plan(splits, columns, lanes, tile // lanes, _NUM_WARPS, how.stages, how.prefetch)


def block_plan(width: int, block: int, size: int) -> Plan:
    """One program for each block of columns, whatever the rows or the chip.

    Args:
        block: columns a block, a multiple of 64.
        size: bytes a logit.
    """
    lanes = 16 // size
    tile = min(_TILE_BYTES // size, block & -block)  # the largest power of two that divides it
    splits, how = max(1, ceil_div(width, block)), candidate()
    return Plan(splits, block, lanes, tile // lanes, _NUM_WARPS, how.stages, how.prefetch)


def ceil_div(x: int, y: int) -> int:
    """`triton.cdiv` at a tenth of its time: that one also serves within kernels."""
    return -(-x // y)


def power_of_2(x: int) -> int:
    """The next power of two at or above x, at least 1."""
    return 1 << max(0, x - 1).bit_length()


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter: one program after another
    return torch.cuda.get_device_properties(device).multi_processor_count


_HERE = nullcontext()


def device_of(tensor: Tensor) -> Any:
    """Triton launches on the current device: make it the tensor's."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(tensor.device)


@overload
def with_unit_stride(tensor: Tensor) -> Tensor: ...
@overload
def with_unit_stride(tensor: Tensor | None) -> Tensor | None: ...
def with_unit_stride(tensor: Tensor | None) -> Tensor | None:
    """The tensor itself, or a copy where its last dimension is strided (small tensors only)."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()
