"""A candidate for the fused forward: row statistics of hidden @ weight^T, logits never written.

The library multiplies with the vendor's library into a chunk of logits and reads that back (see
`fused`). This kernel keeps each tile of logits in registers and writes four numbers per row and
tile instead. It saves the chunk's write and read, about a tenth of the product's time on a Hopper
GPU, and pays with the difference between a Triton product and the vendor's. `gpu_session` measures
the two beside each other.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mcore_logprobs.kernels.stats import StatsSpec, merge
from mcore_logprobs.kernels.triton.common import clamped, exp, launch


@dataclass(frozen=True)
class TileConfig:
    """Rows, columns and depth of a tile, and how the loop over the depth is pipelined."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


CONFIGS = (
    TileConfig(128, 256, 64, 8, 3),
    TileConfig(128, 256, 64, 8, 4),
    TileConfig(256, 128, 64, 8, 3),
    TileConfig(128, 128, 64, 4, 4),
)


@triton.jit
def _tiled_kernel(
    target_ptr,  # [n] int64
    hidden,  # descriptor of [n, h]
    weight,  # descriptor of [v, h]
    out_ptr,  # [column tiles, 4, n]
    rows,
    valid,
    depth,
    row_tiles,
    column_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs that run together share a few row tiles and a few column tiles in the cache.
    program = tl.program_id(0)
    group = program // (GROUP * column_tiles)
    first = group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    inside = program % (GROUP * column_tiles)
    row_tile = first + inside % height
    column_tile = inside // height

    logits = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, depth, DEPTH):
        a = hidden.load([row_tile * ROWS, at])
        b = weight.load([column_tile * COLUMNS, at])
        logits = tl.dot(a, b.T, logits)

    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    logits = tl.where((column < valid)[None, :], logits, float("-inf"))
    target = tl.load(target_ptr + row, mask=row < rows, other=-1)
    own = tl.sum(tl.where(column[None, :] == target[:, None], logits, 0.0), 1)
    top = tl.max(logits, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    shifted = logits - base[:, None]
    weights = exp(shifted)
    out = out_ptr + column_tile.to(tl.int64) * 4 * rows + row
    tl.store(out, top, mask=row < rows)
    tl.store(out + rows, tl.sum(weights, 1), mask=row < rows)
    tl.store(out + 2 * rows, own, mask=row < rows)
    weighted = tl.sum(weights * clamped(shifted), 1)
    tl.store(out + 3 * rows, weighted, mask=row < rows)


def tiled_row_stats(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    valid: int,
    config: TileConfig = CONFIGS[0],
) -> Tensor:
    """Row statistics, with entropy, of the logits of a plain head.

    Args:
        hidden: `[n, h]`, weight `[v, h]`, of one dtype, contiguous; h a multiple of 8.
        target: `[n]` int64, a column or -1.
        valid: columns that are true vocabulary.

    Returns:
        `[4, n]` float32: max, sum, target, entropy, as `kernels.stats` defines them.
    """
    rows, depth = hidden.shape
    row_tiles = triton.cdiv(rows, config.rows)
    column_tiles = triton.cdiv(weight.shape[0], config.columns)
    parts = torch.empty(column_tiles, 4, rows, device=hidden.device)
    launch(
        _tiled_kernel,
        row_tiles * column_tiles,
        target,
        TensorDescriptor.from_tensor(hidden, [config.rows, config.depth]),
        TensorDescriptor.from_tensor(weight, [config.columns, config.depth]),
        parts,
        rows,
        valid,
        depth,
        row_tiles,
        column_tiles,
        ROWS=config.rows,
        COLUMNS=config.columns,
        DEPTH=config.depth,
        GROUP=8,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return merge(parts, StatsSpec(entropy=True))
