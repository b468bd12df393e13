"""Block statistics: each backend's bits depend on a row's own numbers alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_logprobs import vocab_parallel_token_stats
from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels.segments import Segments, segment_stats
from mcore_logprobs.kernels.stats import RowSpec, merge
from tests.helpers.invariance import FIELDS, assert_same_bits, same_bits
from tests.kernels.common import DEVICE, EVERYTHING, make_logits, make_target, make_threshold
from tests.kernels.interpreter import interpreted

ROWS, SEGMENTS = 5, 4
WIDTH = 2048 + 71  # of a segment: one whole block, and an odd one
OPTIONS = {"softcap": 9.0, "logit_scale": 0.5, **EVERYTHING}


def shards(x: Tensor, tp: int) -> list[Tensor]:
    return [part.contiguous() for part in x.chunk(tp, dim=-1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@interpreted
def test_triton_gives_the_same_bits_however_columns_and_rows_are_spread(dtype):
    from mcore_logprobs.kernels import triton_backend

    width, valid = SEGMENTS * WIDTH, SEGMENTS * WIDTH - 100
    logits = make_logits(ROWS, width, dtype)
    target = make_target(ROWS, valid, logits)
    whole = RowSpec(valid, **OPTIONS)
    threshold = make_threshold(logits, whole, None, target)
    temperature = torch.linspace(0.5, 2.0, ROWS, device=DEVICE)
    bias = None

    def stats_on(tp: int, rows: Tensor, module) -> Tensor:
        parts, columns = [], width // tp
        for rank, shard in enumerate(shards(logits[rows], tp)):
            own = target[rows] - rank * columns
            spec = RowSpec(max(0, min(columns, valid - rank * columns)), **OPTIONS)
            parts.append(
                segment_stats(
                    module, shard, torch.where((own >= 0) & (own < columns), own, -1), spec,
                    Segments.of(SEGMENTS, width, tp), bias=bias, threshold=threshold[rows],
                    temperature=temperature[rows], chunk_size=ROWS,
                )
            )  # fmt: skip
        return merge(torch.cat(parts), whole, ordered=True)

    everything = torch.arange(ROWS, device=DEVICE)
    alone = stats_on(1, everything, triton_backend)
    for tp in (2, 4):
        assert_same_bits(stats_on(tp, everything, triton_backend), alone, f"TP {tp}")
    some = torch.tensor([3, 0], device=DEVICE)
    assert_same_bits(stats_on(1, some, triton_backend), alone[:, some], "rows")
    eager = stats_on(1, everything, reference)
    torch.testing.assert_close(alone, eager, rtol=2e-5, atol=2e-4)
    # Split as launches are elsewhere, the order of the sums is another.
    plain = triton_backend.row_stats(
        logits, target, whole, threshold=threshold, temperature=temperature
    )
    assert not same_bits(plain, alone)

    def gradient_on(tp: int) -> Tensor:
        parts, columns = [], width // tp
        for rank, shard in enumerate(shards(logits, tp)):
            own = target - rank * columns
            spec = RowSpec(max(0, min(columns, valid - rank * columns)), **OPTIONS)
            parts.append(torch.empty_like(shard))
            triton_backend.grad_logits(
                shard, torch.where((own >= 0) & (own < columns), own, -1), top, coef, spec,
                temperature=temperature, out=parts[-1],
            )  # fmt: skip
        return torch.cat(parts, -1)

    top = whole.named(alone)["max"].contiguous()
    coef = torch.randn(len(whole.coefficients), ROWS, device=DEVICE)
    for tp in (2, 4):
        assert_same_bits(gradient_on(tp), gradient_on(1), f"gradient, TP {tp}")


@interpreted
def test_triton_by_name_through_the_public_operation():
    logits, target = make_logits(9, 4 * 80, torch.float32), torch.arange(9, device=DEVICE)

    def found(rows: slice) -> dict[str, Tensor]:
        stats = vocab_parallel_token_stats(
            logits[rows], target[rows], entropy=True, target_rank=True, sum_pi_squared=True,
            backend="triton", invariant_segments=4, vocab_size=300,
        )  # fmt: skip
        return {name: getattr(stats, name) for name in FIELDS}

    whole = found(slice(0, 9))
    for rows in (slice(0, 1), slice(4, 9)):
        assert_same_bits(found(rows), {n: value[rows] for n, value in whole.items()}, str(rows))
