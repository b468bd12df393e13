"""Block statistics: each backend's bits depend on a row's own numbers alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_logprobs import vocab_parallel_token_stats
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels import inductor, inductor_blocks, reference
from mcore_logprobs.kernels.segments import Segments, segment_stats
from mcore_logprobs.kernels.stats import RowSpec, merge
from tests.helpers.invariance import FIELDS, assert_same_bits, same_bits
from tests.helpers.memory import TensorsMade
from tests.kernels.common import (
    DEVICE,
    EVERYTHING,
    lay_out,
    make_logits,
    make_target,
    make_threshold,
)
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

    def found(rows: slice, backend: str = "triton", segments: int | None = 4) -> dict[str, Tensor]:
        stats = vocab_parallel_token_stats(
            logits[rows], target[rows], entropy=True, target_rank=True, sum_pi_squared=True,
            backend=backend, invariant_segments=segments, vocab_size=300,
        )  # fmt: skip
        return {name: getattr(stats, name) for name in FIELDS}

    whole = found(slice(0, 9))
    for name, exact in found(slice(0, 9), "torch", None).items():
        torch.testing.assert_close(whole[name], exact, msg=name)
    for rows in (slice(0, 1), slice(4, 9)):
        assert_same_bits(found(rows), {n: value[rows] for n, value in whole.items()}, str(rows))


# ---- compiled for a CPU -------------------------------------------------------------------------

COUNT, BLOCK = 200, 1030  # a block that is no multiple of a vector
COLUMNS = SEGMENTS * BLOCK


class Compiled:
    """Statistics and gradients of random logits by the compiled backend, however they are spread.

    Every shard is worked on in turn, since kernels never communicate.
    """

    def __init__(self, dtype: torch.dtype, valid: int, **wanted: bool) -> None:
        self.spec = RowSpec(valid, **wanted)
        self.logits = (3.0 * torch.randn(COUNT, COLUMNS)).to(dtype)
        self.logits[1, 5:900] = self.logits[2, : 2 * BLOCK + 9] = -torch.inf
        self.target = torch.randint(valid, (COUNT,))
        self.temperature = 0.5 + torch.rand(COUNT)
        self.threshold = reference.gather_target(self.logits, self.target, 0.0).float()
        self.coef = torch.randn(len(self.spec.coefficients), COUNT)
        self.coef[:, 4] = 0.0
        self.every = torch.arange(COUNT)
        self.top = self.spec.named(self.stats(1, self.every))["max"].contiguous()

    def shards(self, tp: int, rows: Tensor) -> list[tuple[Tensor, Tensor, RowSpec]]:
        width, found = COLUMNS // tp, []
        for start in range(0, COLUMNS, width):
            own = self.target[rows] - start
            own = torch.where((own >= 0) & (own < width), own, -1)
            valid = max(0, min(width, self.spec.valid - start))
            shard = self.logits[rows, start : start + width].contiguous()
            found.append((shard, own, replace(self.spec, valid=valid)))
        return found

    def stats(self, tp: int, rows: Tensor, chunk_size: int = 64, module=inductor_blocks) -> Tensor:
        parts = [
            segment_stats(
                module, shard, own, spec, Segments.of(SEGMENTS, COLUMNS, tp),
                threshold=self.threshold[rows] if spec.rank else None,
                temperature=self.temperature[rows], chunk_size=chunk_size,
            )
            for shard, own, spec in self.shards(tp, rows)
        ]  # fmt: skip
        return merge(torch.cat(parts), self.spec, ordered=True)

    def gradient(self, tp: int, rows: Tensor, *, inplace: bool = False) -> Tensor:
        parts = []
        for shard, own, spec in self.shards(tp, rows):
            out = shard if inplace else torch.empty_like(shard)
            inductor_blocks.grad_logits(
                shard, own, self.top[rows], self.coef[:, rows], spec,
                temperature=self.temperature[rows], out=out, chunk_size=64,
            )  # fmt: skip
            parts.append(out)
        return torch.cat(parts, -1)


@pytest.mark.parametrize(
    ("dtype", "valid", "wanted"),
    [
        (torch.float32, COLUMNS - 300, {"entropy": True, "sum_pi_squared": True, "rank": True}),
        (torch.bfloat16, COLUMNS, {}),
    ],
    ids=["float32", "bfloat16"],
)
def test_compiled_kernels_give_the_same_bits_at_any_tp_and_number_of_rows(dtype, valid, wanted):
    call = Compiled(dtype, valid, **wanted)
    stats, gradient = call.stats(1, call.every), call.gradient(1, call.every)
    eager = call.stats(1, call.every, module=reference)
    torch.testing.assert_close(stats, eager, rtol=2e-6, atol=0.0)
    for tp in (2, 4):
        assert_same_bits(call.stats(tp, call.every), stats, f"TP {tp}")
        assert_same_bits(call.gradient(tp, call.every), gradient, f"gradient, TP {tp}")
    for chunk_size in (1, 7):
        assert_same_bits(call.stats(1, call.every, chunk_size), stats, f"chunk {chunk_size}")
    assert_same_bits(call.gradient(1, call.every, inplace=True), gradient, "in place")
    step = 3 if dtype == torch.float32 else 17
    orders = [torch.arange(count) for count in range(1, COUNT, step)]
    for some in (*orders, torch.randperm(COUNT), torch.tensor([COUNT - 1])):
        assert_same_bits(call.stats(1, some), stats[:, some], f"{len(some)} rows")
        assert_same_bits(call.gradient(1, some), gradient[some], f"gradient, {len(some)} rows")
    with TensorsMade():  # a mode, in which torch compiles nothing
        assert_same_bits(call.stats(2, call.every), stats, "in a mode")
    # In blocks of another width, as without segments, the order of the sums is another.
    plain = inductor.row_stats(
        call.logits, call.target, call.spec, threshold=call.threshold if wanted else None,
        temperature=call.temperature, chunk_size=64,
    )  # fmt: skip
    assert not same_bits(plain, stats)
    assert not inductor._failures


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
    for options in ({"softcap": 5.0}, {"smoothing": True}, {"bias": torch.randn(COLUMNS)}):
        bias = options.pop("bias", None)
        spec = RowSpec(COLUMNS, **options)
        results = [
            module.block_stats(logits, target, spec, block=BLOCK, bias=bias, chunk_size=2)
            for module in (inductor_blocks, reference)
        ]
        assert_same_bits(*results, str(options))


def test_auto_chooses_by_width_and_a_kernel_that_fails_raises():
    for rows in (1, 300):
        logits = torch.zeros(rows, COLUMNS)
        for tp in (1, 2, 4):
            segments = Segments.of(SEGMENTS, COLUMNS, tp)
            chosen = backends.select("auto", logits[:, : COLUMNS // tp], segments=segments)
            assert chosen is inductor_blocks
            assert backends.select("auto", logits.double(), segments=segments) is reference
        narrow = Segments.of(SEGMENTS, SEGMENTS * 1023, 1)
        assert backends.select("auto", logits, segments=narrow) is reference
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
    from mcore_logprobs.kernels import triton_backend, triton_common

    width = 2 * 4500  # of segments that do not start at multiples of 16 columns
    logits = make_logits(16, width, torch.bfloat16)
    target = make_target(16, width, logits)
    spec, segments = RowSpec(width - 50, entropy=True, rank=True), Segments(2, 4500)
    offsets = torch.randn(width, device=DEVICE) if bias else None
    threshold = make_threshold(logits, spec, offsets, target)

    def found(rows: Tensor, given: Tensor) -> Tensor:
        options = {"bias": offsets, "threshold": threshold[rows]}
        return triton_backend.segment_stats(given, target[rows], spec, segments, **options)

    everything = torch.arange(16, device=DEVICE)
    whole = found(everything, logits)
    for rows in (everything[:1], everything[[15, 3]]):
        assert_same_bits(found(rows, logits[rows]), whole[..., rows], f"{len(rows)} rows")
    assert_same_bits(found(everything, lay_out(logits, "wide")), whole, "other memory")
    # Blocks that a fused chunk has, merged alike, are the same numbers.
    first = replace(spec, valid=4500)
    own = torch.where(target < 4500, target, -1)
    blocks = triton_backend.block_stats(
        logits[:, :4500], own, first, block=segments.block("cuda"), threshold=threshold,
        bias=None if offsets is None else offsets[:4500],
    )  # fmt: skip
    merged = merge(blocks, first, ordered=True)
    torch.testing.assert_close(merged, whole[0], rtol=2e-6, atol=2e-5)
    # Here the launch of `row_stats` does depend on the rows.
    plans = [triton_common.launch_plan(rows, width, logits) for rows in (1, 16)]
    assert DEVICE == "cuda" or plans[0].splits != plans[1].splits
