"""The inductor backend: the reference's functions for a CPU, compiled.

Each pass reads the logits from memory once, and makes nothing of their size. Forward takes maximum
and sums of one block of columns at a time, which stays in the first-level cache, and gives each
block's statistics as a part: sums of few terms also round less than the sum of a whole row.
`chunk_size` matters where the reference takes over.

Compiled are float32, bfloat16 and float16 logits. What is rare goes to the reference, and so does
what does not compile.

`INVARIANT` has the same functions where a row's bits must depend only on its own numbers
(`statistics`; of two sides nothing of the kind is promised). No statistics fall back there where a
kernel fails, for results of two calls would not have the same bits.
"""

from types import SimpleNamespace

from mcore_logprobs.kernels.inductor.common import DTYPES, compiler, obstacle
from mcore_logprobs.kernels.inductor.pairs import pair_grad, pair_stats, pair_sums
from mcore_logprobs.kernels.inductor.statistics import grad, invariant_grad, stats
from mcore_logprobs.kernels.reference import decode, encode, scale

__all__ = [
    "DTYPES",
    "INVARIANT",
    "compiler",
    "decode",
    "encode",
    "grad",
    "obstacle",
    "pair_grad",
    "pair_stats",
    "pair_sums",
    "scale",
    "stats",
]

INVARIANT = SimpleNamespace(
    stats=stats,
    grad=invariant_grad,
    encode=encode,
    decode=decode,
    scale=scale,
    pair_stats=pair_stats,
    pair_sums=pair_sums,
    pair_grad=pair_grad,
)
