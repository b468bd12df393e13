"""Block statistics: each backend's bits depend on a row's own numbers alone."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from mcore_logprobs import vocab_parallel_token_stats
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels import inductor, reference
from mcore_logprobs.kernels.chunk import Chunk, Processing
from mcore_logprobs.kernels.segments import Segments, merge_segments
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec, by_name, merge
from tests.engine.truths import take
from tests.helpers.invariance import assert_same_bits, same_bits
from tests.helpers.memory import TensorsMade
from tests.kernels.common import (
    DEVICE,
    EVERYTHING,
    lay_out,
    make_chunk,
    make_logits,
    make_target,
    make_threshold,
    row_stats,
    segment_stats,
)
from tests.kernels.interpreter import interpreted
from tests.ops import EVERY_STATISTIC, PER_TOKEN

INVARIANT = inductor.INVARIANT
ROWS, SEGMENTS = 3, 4
WIDTH = 2048 + 71  # of a segment: one whole block, and an odd one
HOW = {"softcap": 9.0, "logit_scale": 0.5}


def shards(chunk: Chunk, target: Tensor, tp: int) -> list[tuple[Chunk, Tensor]]:
    """Each rank's part, in memory of its own, and the targets' columns in it."""
    width, found = chunk.logits.shape[1] // tp, []
    for start in range(0, tp * width, width):
        part, own = chunk.columns(slice(start, start + width)), target - start
        found.append(
            (
                replace(part, logits=part.logits.contiguous()),
                torch.where((own >= 0) & (own < width), own, -1),
            )
        )
    return found


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.night), torch.bfloat16], ids=str
)
@interpreted
def test_triton_gives_the_same_bits_however_columns_and_rows_are_spread(dtype):
    from mcore_logprobs.kernels import triton as triton_backend

    width, valid = SEGMENTS * WIDTH, SEGMENTS * WIDTH - 100
    logits = make_logits(ROWS, width, dtype)
    target = make_target(ROWS, valid, logits)
    whole = make_chunk(logits, valid, rows=True, **HOW)
    threshold = make_threshold(whole, target)

    def stats_on(tp: int, rows: Tensor, module) -> Tensor:
        some = replace(whole, logits=logits[rows], processing=whole.processing.rows(rows))
        parts = [
            segment_stats(
                module, shard, own, EVERYTHING, Segments.of(SEGMENTS, width, tp),
                threshold=threshold[..., rows], chunk_size=ROWS,
            )
            for shard, own in shards(some, target[rows], tp)
        ]  # fmt: skip
        multiplier = some.processing.multiplier
        return merge(torch.cat(parts), EVERYTHING, multiplier=multiplier, ordered=True)

    everything = torch.arange(ROWS, device=DEVICE)
    alone = stats_on(1, everything, triton_backend)
    assert_same_bits(stats_on(4, everything, triton_backend), alone, "TP 4")
    some = torch.tensor([2, 0], device=DEVICE)
    assert_same_bits(stats_on(2, some, triton_backend), alone[:, some], "rows, TP 2")
    eager = stats_on(1, everything, reference)
    torch.testing.assert_close(alone, eager, rtol=2e-5, atol=2e-4)
    # Split as launches are elsewhere, the order of the sums is another.
    plain = row_stats(triton_backend, whole, target, EVERYTHING, threshold)
    assert not same_bits(plain, alone)

    def gradient_on(tp: int) -> Tensor:
        parts = []
        for shard, own in shards(whole, target, tp):
            parts.append(torch.empty_like(shard.logits))
            given = (own.unsqueeze(1), upstream, row_max, coef, EVERYTHING)
            triton_backend.grad(shard, GradientTerms(*given), out=parts[-1])
        return torch.cat(parts, -1)

    row_max = by_name(EVERYTHING.fields, alone)["max"].contiguous()
    coef = torch.randn(len(EVERYTHING.coefficients), ROWS, device=DEVICE)
    upstream = torch.randn(ROWS, 1, device=DEVICE)
    assert_same_bits(gradient_on(4), gradient_on(1), "gradient, TP 4")


@interpreted
def test_triton_by_name_through_the_public_operation():
    logits, target = make_logits(4, 4 * 80, torch.float32), torch.arange(4, device=DEVICE)

    def found(rows: slice, backend: str = "triton", segments: int | None = 4) -> dict[str, Tensor]:
        stats = vocab_parallel_token_stats(
            logits[rows], target[rows], backend=backend, invariant_segments=segments,
            vocab_size=300, **EVERY_STATISTIC,
        )  # fmt: skip
        return {name: getattr(stats, name) for name in PER_TOKEN}

    whole = found(slice(0, 4))
    for name, exact in found(slice(0, 4), "torch", None).items():
        torch.testing.assert_close(whole[name], exact, msg=name)
    for rows in (slice(0, 1), slice(2, 4)):
        assert_same_bits(found(rows), {n: value[rows] for n, value in whole.items()}, str(rows))


# ---- compiled for a CPU -------------------------------------------------------------------------

COUNT, BLOCK = 200, 1030  # a block that is no multiple of a vector
COLUMNS = SEGMENTS * BLOCK


class Compiled:
    """Statistics and gradients of random logits by the compiled backend, however they are spread.

    Every shard is worked on in turn, since kernels never communicate.
    """

    def __init__(self, dtype: torch.dtype, valid: int, spec: StatsSpec) -> None:
        self.spec = spec
        self.logits = (3.0 * torch.randn(COUNT, COLUMNS)).to(dtype)
        self.logits[1, 5:900] = self.logits[2, : 2 * BLOCK + 9] = -torch.inf
        self.target = torch.randint(valid, (COUNT,))
        self.temperature = 0.5 + torch.rand(COUNT)
        self.threshold = reference.gather_target(self.logits, self.target, 0.0).float()
        self.coef = torch.randn(len(self.spec.coefficients), COUNT)
        self.upstream = torch.randn(COUNT, 1)
        self.coef[:, 4] = self.upstream[4] = 0.0
        self.whole = Chunk(self.logits, valid, Processing.of(temperature=self.temperature))
        self.every = torch.arange(COUNT)
        self.row_max = by_name(self.spec.fields, self.stats(1, self.every))["max"].contiguous()

    def shards(self, tp: int, rows: Tensor) -> list[tuple[Chunk, Tensor]]:
        processing = self.whole.processing.rows(rows)
        some = replace(self.whole, logits=self.logits[rows], processing=processing)
        return shards(some, self.target[rows], tp)

    def stats(self, tp: int, rows: Tensor, chunk_size: int = 64, module=INVARIANT) -> Tensor:
        parts = [
            segment_stats(
                module, shard, own, self.spec, Segments.of(SEGMENTS, COLUMNS, tp),
                threshold=self.threshold[rows] if self.spec.rank else None, chunk_size=chunk_size,
            )
            for shard, own in self.shards(tp, rows)
        ]  # fmt: skip
        multiplier = 1.0 / self.temperature[rows].double()
        return merge(torch.cat(parts), self.spec, multiplier=multiplier, ordered=True)

    def gradient(self, tp: int, rows: Tensor, *, inplace: bool = False) -> Tensor:
        parts = []
        for shard, own in self.shards(tp, rows):
            out = shard.logits if inplace else torch.empty_like(shard.logits)
            per_row = self.upstream[rows], self.row_max[rows], self.coef[:, rows]
            terms = GradientTerms(own.unsqueeze(1), *per_row, self.spec)
            INVARIANT.grad(shard, terms, out=out, chunk_size=64)
            parts.append(out)
        return torch.cat(parts, -1)


@pytest.mark.parametrize(
    ("dtype", "valid", "spec"),
    [
        (torch.float32, COLUMNS - 300, replace(EVERYTHING, smoothing=False)),
        pytest.param(torch.bfloat16, COLUMNS, StatsSpec(), marks=pytest.mark.night),
    ],
    ids=["float32", "bfloat16"],
)
def test_compiled_kernels_give_the_same_bits_at_any_tp_and_number_of_rows(dtype, valid, spec):
    call = Compiled(dtype, valid, spec)
    stats, gradient = call.stats(1, call.every), call.gradient(1, call.every)
    eager = call.stats(1, call.every, module=reference)
    torch.testing.assert_close(stats, eager, rtol=2e-6, atol=0.0)
    for tp in (2, 4):
        assert_same_bits(call.stats(tp, call.every), stats, f"TP {tp}")
        assert_same_bits(call.gradient(tp, call.every), gradient, f"gradient, TP {tp}")
    for chunk_size in (1, 7):
        assert_same_bits(call.stats(1, call.every, chunk_size), stats, f"chunk {chunk_size}")
    assert_same_bits(call.gradient(1, call.every, inplace=True), gradient, "in place")
    orders = [torch.arange(count) for count in (*range(1, 18), *range(18, COUNT, 45))]
    for some in (*orders, torch.randperm(COUNT), torch.tensor([COUNT - 1])):
        assert_same_bits(call.stats(1, some), stats[:, some], f"{len(some)} rows")
        assert_same_bits(call.gradient(1, some), gradient[some], f"gradient, {len(some)} rows")
    with TensorsMade():  # a mode, in which torch compiles nothing
        assert_same_bits(call.stats(2, call.every), stats, "in a mode")
    # In blocks of another width, as without segments, the order of the sums is another.
    threshold = call.threshold if spec.rank else None
    plain = row_stats(inductor, call.whole, call.target, call.spec, threshold)
    assert not same_bits(plain, stats)
    assert not inductor.common._failures


def test_compiled_columns_that_do_not_lie_side_by_side():
    logits, target = torch.randn(9, COLUMNS), torch.arange(9)

    def found(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        stats = vocab_parallel_token_stats(
            leaf, target, backend="inductor", invariant_segments=SEGMENTS
        )
        (grad,) = torch.autograd.grad(stats.logprobs, leaf, torch.linspace(-1, 1, 9))
        return torch.cat([stats.logprobs.detach(), grad.flatten()])

    whole = found(logits)
    assert_same_bits(found(logits.t().contiguous().t()), whole, "strided")
    assert_same_bits(found(torch.cat([target[:, None], logits], 1)[:, 1:]), whole, "offset by one")


def test_what_is_rare_is_the_references():
    logits, target = torch.randn(3, COLUMNS), torch.arange(3)
    plain, smooth = StatsSpec(), StatsSpec(smoothing=True)
    for how, spec, block in (
        ({"softcap": 5.0}, plain, BLOCK),
        ({}, smooth, BLOCK),
        ({"bias": True}, plain, BLOCK),
        ({}, plain, 511),  # narrow
    ):
        chunk = make_chunk(logits, **how)
        results = [
            module.stats(chunk, target, spec, block=block, chunk_size=2)
            for module in (INVARIANT, reference)
        ]
        assert_same_bits(*results, f"{how} {spec} {block}")


def test_auto_chooses_by_dtype_and_a_kernel_that_fails_raises():
    for rows in (1, 300):
        logits = torch.zeros(rows, COLUMNS)
        for tp in (1, 2, 4):
            shard = logits[:, : COLUMNS // tp]
            assert backends.select("auto", shard, invariant=True) is INVARIANT
            assert backends.select("auto", shard.double(), invariant=True) is reference
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(RuntimeError, match=r"invariant_segments: .*backend='torch'"),
    ):
        vocab_parallel_token_stats(
            logits, torch.zeros(300).long(), backend="inductor", invariant_segments=SEGMENTS
        )


@pytest.mark.parametrize("bias", [False, True])
@interpreted
def test_a_row_is_split_by_its_width_alone_where_it_must_not_vary(bias):
    # Elsewhere a launch splits few rows over more programs than many, and adds in another order.
    from mcore_logprobs.kernels import triton as triton_backend
    from mcore_logprobs.kernels.triton import common

    width, segments = 2 * 4500, Segments(2, 4500)
    logits = make_logits(3, width, torch.bfloat16)
    target, spec = make_target(3, width, logits), StatsSpec(entropy=True, rank=True)
    chunk = make_chunk(logits, width - 50, bias=bias)
    threshold = make_threshold(chunk, target)

    def found(rows: Tensor, given: Tensor) -> Tensor:
        return segment_stats(
            triton_backend, replace(chunk, logits=given), target[rows], spec, segments,
            threshold=threshold[..., rows], chunk_size=16,
        )  # fmt: skip

    everything = torch.arange(3, device=DEVICE)
    with mock.patch.object(common, "_PROGRAMS_PER_PROCESSOR", 4):  # so that three rows are many
        whole = found(everything, logits)
        for rows in (everything[:1], everything[[2, 0]]):
            assert_same_bits(found(rows, logits[rows]), whole[..., rows], f"{len(rows)} rows")
        assert_same_bits(found(everything, lay_out(logits, "wide")), whole, "other memory")
        # Here the launch without blocks does depend on the rows.
        plans = [common.launch_plan(rows, width, logits) for rows in (1, 3)]
        assert DEVICE == "cuda" or plans[0].splits != plans[1].splits
    # Blocks that a fused chunk has, merged alike, are the same numbers.
    first = chunk.columns(slice(0, 4500))
    fused = replace(first, logits=first.logits.contiguous())
    own = torch.where(target < 4500, target, -1)
    block = segments.block(DEVICE)
    blocks = triton_backend.stats(fused, own, spec, threshold=threshold, block=block)
    merged = by_name(spec.fields, merge(blocks, spec, ordered=True))
    for name in ("max", "sum", "entropy"):  # the others may stand in any part
        assert_same_bits(merged[name], by_name(spec.fields, whole[0])[name], f"fused {name}")


def test_a_merge_of_many_blocks_has_the_same_bits_for_one_row_as_for_forty() -> None:
    spec, logits, target = StatsSpec(entropy=True), torch.randn(40, 16 * 64), torch.full((40,), -1)

    def merged(rows: slice) -> Tensor:
        chunk = Chunk(logits[rows], logits.shape[1], Processing.of())
        blocks = reference.stats(chunk, target[rows], spec, block=64, chunk_size=40)
        return merge_segments([[blocks]], spec, 1.0)

    whole = merged(slice(None))
    for row in range(40):
        assert_same_bits(merged(slice(row, row + 1))[..., 0], whole[..., row], f"row {row}")


def test_a_segment_whose_last_columns_are_less_than_a_block() -> None:
    logits, target = torch.randn(3, 8192), torch.tensor([5, 4100, 6700])
    found = vocab_parallel_token_stats(
        logits, target, vocab_size=6744, invariant_segments=2, backend="inductor"
    )
    exact = take(logits[:, :6744].double().log_softmax(-1), target)
    torch.testing.assert_close(found.logprobs.double(), exact, rtol=1e-5, atol=1e-5)
