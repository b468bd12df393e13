"""What an H200 should take, from operations and bytes alone: `python -m benchmarks.time_model`.

A call takes the time of its matrix products, of what its row kernels and last passes move through
memory, and a share for the small kernels around each chunk. Made before anything ran on a GPU:
`gpu_session` prints it next to what it measures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOPS = 720e12  # bf16 products of random numbers with float32 results
BANDWIDTH = 4.2e12  # bytes per second, read and written
SMALL_KERNELS = 0.008  # of a call: torch's own around each chunk
FLOOR_COLUMNS = 8192  # of a block of the bare products

# V 152064 at TP 8, V 128256 at TP 8 and h 8192, one whole vocabulary, and the shape that others
# publish; in the order in which a session takes them.
SHAPES = ((8192, 19008, 4096), (8192, 16032, 8192), (4096, 128256, 4096), (32768, 152064, 4096))

# Others' own figures on an H200 at (4096, 128256, 4096), forward and backward, in ms.
PUBLISHED = {"quack": 17.3, "liger, SM90": 18.1, "liger": 141.0}

_TILE_ROWS = 8192  # rows per tile of linear_token_stats
_POLICY_CHUNK, _POLICY_MOST, _POLICY_ROWS = 1 << 30, 5 << 29, 4096  # bytes, bytes, rows


@dataclass(frozen=True)
class Head:
    """An LM head's shape: rows on this rank, columns V/TP, hidden size."""

    rows: int
    columns: int
    hidden: int

    @property
    def logits(self) -> int:
        return self.rows * self.columns

    @property
    def weight(self) -> int:
        return self.columns * self.hidden

    def products(self, count: float) -> float:
        """Seconds of that many matrix products of the head."""
        return count * 2 * self.logits * self.hidden / FLOPS


def _total(products: float, nbytes: float) -> float:
    return 1e3 * (products + nbytes / BANDWIDTH) * (1 + SMALL_KERNELS)


def forward(head: Head) -> float:
    """ms of the forward of `linear_token_stats`: one product, and float32 logits read once."""
    return _total(head.products(1), 4 * head.logits)


def token_stats(head: Head, *, saved: float = 0.0, main_grad: bool = False) -> float:
    """ms of `linear_token_stats` forward and backward; the entropy costs no pass more.

    Args:
        saved: the share of the logits that are kept (`saved_bytes`), in 16-bit codes.
        main_grad: dWeight is added to a float32 buffer.
    """
    # Float32 logits are read forward and backward, bf16 dLogits written; kept ones are read
    # and written as codes in the forward, and read and written as logits in the backward.
    nbytes = head.logits * (10 + (6 + 6) * saved)
    tiles = math.ceil(head.rows / _TILE_ROWS)
    nbytes += 6 * head.rows * head.hidden  # dHidden rounded
    if main_grad:
        nbytes += 4 * head.weight * tiles  # read again by each product that adds to it
    elif tiles > 1:
        nbytes += (4 * (tiles - 1) + 6) * head.weight  # and rounded
    return _total(head.products(4 - saved), nbytes)


def policy_loss(head: Head) -> float:
    """ms of `linear_policy_loss` forward and backward."""
    row = 4 * head.columns
    tile = min(max(_POLICY_CHUNK // row, min(_POLICY_ROWS, _POLICY_MOST // row)), _TILE_ROWS)
    tiles = math.ceil(head.rows / max(1, tile))
    nbytes = 10 * head.logits + 4 * (tiles - 1) * head.weight
    nbytes += 6 * (head.weight + head.rows * head.hidden)  # times upstream and rounded
    return _total(head.products(3), nbytes)


def held(head: Head) -> float:
    """ms of a head that holds its bf16 logits: three products, statistics and gradient."""
    return _total(head.products(3), (2 + 4) * head.logits)


def main() -> int:
    print("ms on an H200, predicted; share of the products' time in brackets")
    print(f"{'rows, V/TP, hidden':26}{'forward':>16}{'token_stats':>16}{'half kept':>16}"
          f"{'all kept':>16}{'main_grad':>16}{'policy loss':>16}{'logits held':>16}")  # fmt: skip
    for shape in SHAPES:
        head = Head(*shape)
        found = [
            (forward(head), 1),
            (token_stats(head), 4),
            (token_stats(head, saved=0.5), 3.5),
            (token_stats(head, saved=1.0), 3),
            (token_stats(head, main_grad=True), 4),
            (policy_loss(head), 3),
            (held(head), 3),
        ]
        cells = (f"{ms:.2f} ({1e3 * head.products(n) / ms:.0%})" for ms, n in found)
        print(f"{', '.join(map(str, shape)):26}" + "".join(f"{cell:>16}" for cell in cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
