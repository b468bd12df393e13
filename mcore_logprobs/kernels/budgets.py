"""How a call is cut into tiles, blocks and steps, by sizes that are one object: `Budgets`.

They change speed, memory and the order in which numbers are added, never what is computed. All
ranks of a call must have the same ones: they cut alike, and exchange what they cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class Budgets:
    """How a call is cut on one type of device. Every field is an int of at least 1.

    Attributes:
        tile_rows: rows per tile where only a block of a head's logits exists: enough that a GEMM
            runs at full speed, and that reading and writing a block of the weight's gradient once
            per tile costs little against it.
        chunk_bytes: of one float32 chunk of a head's logits.
        min_block, max_block: columns per block at least (whatever `chunk_bytes` says) and, where
            the caller gives no chunk_size, at most.
        block_step: blocks are multiples of this many columns: whole tiles of a GEMM on a GPU; on a
            CPU whole blocks of the compiled kernels, even if the last block of a head is narrow.
        held_bytes: of one float32 tile that spans all of a rank's columns. Each such tile reads and
            writes the whole float32 dWeight once.
        held_rows, max_held_bytes: where an operation adds to dWeight once per tile, `held_bytes`
            may grow up to `max_held_bytes` until this many rows fit.
        row_step: such tiles are multiples of this many rows.
        gathered_bytes: of the two operands of dot products of single logits.
        fixed_columns, fixed_rows: columns at most, and rows, of a product under
            invariant_segments, whatever the tile: the shape decides the bits.
        segment_block, min_segment_block: columns per block of a segment's statistics at most, and
            at least where blocks are to divide it.
        copy_bytes: of one float32 copy of a chunk within a kernel. On a CPU it should stay in the
            cache; on a GPU it must fill the chip. The torch backend holds at most two; of two
            sides of logits up to eight, of half the rows.
        compiled_numel: logits that exist at a time from which on the compiled CPU backend is taken.
    """

    tile_rows: int
    chunk_bytes: int
    min_block: int
    max_block: int
    block_step: int
    held_bytes: int
    held_rows: int
    max_held_bytes: int
    row_step: int
    gathered_bytes: int
    fixed_columns: int
    fixed_rows: int
    segment_block: int
    min_segment_block: int
    copy_bytes: int
    compiled_numel: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"Budgets.{field.name}: expected an int of at least 1, got {value!r}"
                )
        for low, high in (
            ("min_block", "max_block"),
            ("held_bytes", "max_held_bytes"),
            ("min_segment_block", "segment_block"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(
                    f"Budgets.{low}: expected at most {high}={getattr(self, high)}, "
                    f"got {getattr(self, low)}"
                )

    def copied_rows(self, width: int) -> int:
        """Rows of which a float32 copy of `width` columns is made at a time."""
        return max(1, self.copy_bytes // (4 * max(1, width)))


CPU = Budgets(
    tile_rows=2048,
    chunk_bytes=32 << 20,
    min_block=256,
    max_block=4096,
    block_step=2048,
    held_bytes=128 << 20,
    held_rows=1,
    max_held_bytes=128 << 20,
    row_step=1,
    gathered_bytes=8 << 20,
    fixed_columns=4096,
    fixed_rows=128,
    segment_block=2048,
    min_segment_block=512,
    copy_bytes=2 << 20,
    compiled_numel=1 << 20,
)
# 2.5 GiB for 4096 rows of a policy loss: their three GEMMs take 20 times as long as reading and
# writing dWeight in float32. The same on every rank, whatever memory is free there.
GPU = Budgets(
    tile_rows=8192,
    chunk_bytes=256 << 20,
    min_block=256,
    max_block=1 << 20,
    block_step=128,
    held_bytes=1 << 30,
    held_rows=4096,
    max_held_bytes=5 << 29,
    row_step=256,
    gathered_bytes=64 << 20,
    fixed_columns=8192,
    fixed_rows=256,
    segment_block=2048,
    min_segment_block=2048,  # kernels read whole powers of two: no search for a divisor
    copy_bytes=64 << 20,
    compiled_numel=1 << 20,
)

_in_force: list[Budgets] = []  # a list, for backward runs in threads of autograd's own


def of(device_type: str) -> Budgets:
    """The budgets of a type of device, or those that `use` has put in their place."""
    if _in_force:
        return _in_force[-1]
    return CPU if device_type == "cpu" else GPU


@contextmanager
def use(budgets: Budgets) -> Iterator[Budgets]:
    """Cut by these within the block, on every device; a test's way to many tiles of few rows."""
    _in_force.append(budgets)
    try:
        yield budgets
    finally:
        _in_force.pop()


# ---- tiles and blocks of a head ---------------------------------------------------------------


@dataclass(frozen=True)
class Tiling:
    """Rows per tile and columns per block."""

    rows: int
    columns: int

    @classmethod
    def of(
        cls,
        rows: int,
        columns: int,
        chunk_size: int | None,
        device: torch.device,
        *,
        held_width: int | None = None,
        adds_per_tile: bool = False,
    ) -> Tiling:
        """For `rows` rows and `columns` columns on a rank.

        Args:
            held_width: numbers held per row, where a tile's logits are held over all of a rank's
                columns; None: only a block of them exists.
            adds_per_tile: dWeight is read and written once per tile, so that a tile that is held
                should have `Budgets.held_rows`.
        """
        sizes = of(device.type)
        most = sizes.tile_rows
        if held_width is not None:
            row_bytes = 4 * max(1, held_width)
            most = sizes.held_bytes // row_bytes
            if adds_per_tile:
                most = max(most, min(sizes.held_rows, sizes.max_held_bytes // row_bytes))
            most = even_parts(rows, max(1, most), sizes.row_step)
        tile = max(1, min(rows, chunk_size or most))
        widest = max(sizes.chunk_bytes // (4 * tile), sizes.min_block)
        if chunk_size is None:
            widest = min(widest, sizes.max_block)
        return cls(tile, even_parts(columns, widest, sizes.block_step))


def even_parts(total: int, most: int, step: int) -> int:
    """Return the size of parts of at most `most` that are as even as whole steps allow.

    A GEMM of a small last part would run far below the speed of the others. One part is `total`.
    Otherwise the size is a multiple of `step`, or of the half, quarter and so on of it of which two
    are at most `most`. The last part is what is left: still a small one if `total` is just above a
    multiple of the size.
    """
    if total <= most:
        return max(1, total)
    while step > 1 and 2 * step > most:
        step //= 2
    parts = -(-total // (most - most % step))
    return -(-total // (parts * step)) * step
