"""What a call costs, as formulas: products, bytes of memory traffic, bytes over the wire.

n rows, V columns of the whole vocabulary, h the hidden size, P = TP ranks, d bytes a logit (2 for
bfloat16), on each rank:

    logits, forward    reads n V/P d;                      sends one all-gather of 4 k n bytes
    logits, backward   reads n V/P d, writes n V/P d;      sends nothing
    fused, forward     2 n h V/P operations;               the same all-gather
    fused, backward    6 n h V/P operations (one product again, and two);
                       sums dHidden over TP: n h 4 bytes in an all-reduce (sequence parallelism:
                       a reduce-scatter, and an all-gather of n h d bytes each way)
    policy loss        6 n h V/P operations in all; one all-gather of 4 k rows bytes a chunk

k is 3 statistics a row, 4 with the entropy, one more with the rank, which also all-reduces n
float32 numbers beforehand. Memory beyond inputs and outputs: the gradient of the logits (n V/P d),
or on the fused path the gradients of hidden and weight and at most two chunks. Nothing grows with
n V but the logits path, and nothing sent grows with V.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cost", "fused_cost", "logits_cost"]


@dataclass(frozen=True)
class Cost:
    """Of one rank, forward and backward together.

    Attributes:
        operations: floating-point operations in matrix products.
        traffic: bytes of logits and their gradient read and written in memory.
        collectives: how many are made.
        sent: bytes that the rank puts into collectives.
    """

    operations: int
    traffic: int
    collectives: int
    sent: int

    def seconds(self, *, operations_per_s: float, bytes_per_s: float) -> float:
        """The floor on a machine of these rates, communication aside."""
        return self.operations / operations_per_s + self.traffic / bytes_per_s


def logits_cost(
    rows: int, vocab: int, *, tp: int, itemsize: int, entropy: bool = False, rank: bool = False
) -> Cost:
    """Of `vocab_parallel_token_stats` with its backward."""
    statistics = 3 + entropy + rank
    return Cost(
        operations=0,
        traffic=3 * rows * (vocab // tp) * itemsize,
        collectives=(1 + rank) if tp > 1 else 0,
        sent=(4 * statistics * rows + 4 * rows * rank) if tp > 1 else 0,
    )


def fused_cost(
    rows: int, vocab: int, hidden: int, *, tp: int, entropy: bool = False, tiles: int = 1
) -> Cost:
    """Of `linear_token_stats` with its backward, without sequence parallelism."""
    return Cost(
        operations=8 * rows * hidden * (vocab // tp),
        traffic=0,
        collectives=(1 + tiles) if tp > 1 else 0,
        sent=(4 * (3 + entropy) * rows + 4 * rows * hidden) if tp > 1 else 0,
    )
