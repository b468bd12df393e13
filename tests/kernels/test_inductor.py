"""The compiled CPU kernels against the reference and float64, and what happens where they fail.

Every kind of tensor (dtype, contiguous or not) and of statistics compiles a kernel of its own, in
a few seconds. Most cases here share those of logits with padding, of which no chunk is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from mcore_logprobs import (
    vocab_parallel_entropy,
    vocab_parallel_logprobs,
    vocab_parallel_token_stats,
)
from mcore_logprobs.kernels import inductor, reference
from mcore_logprobs.kernels.chunk import Chunk, Processing
from mcore_logprobs.kernels.inductor import common, statistics
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec, finalize
from tests.engine.truths import take
from tests.helpers.lazy import lazy_logits
from tests.kernels.common import row_stats
from tests.kernels.compiled import (
    BLOCK,
    FULL,
    PLAIN,
    ROWS,
    VALID,
    WIDTH,
    chunk_of,
    make_rows,
    make_terms,
    thresholds,
)
from tests.ops import EVERY_STATISTIC, PER_TOKEN

pytestmark = pytest.mark.usefixtures("must_compile")


@pytest.mark.parametrize(
    ("dtype", "strided", "spec"),
    [
        (torch.bfloat16, True, FULL),
        (torch.float32, False, PLAIN),
        pytest.param(torch.float32, True, FULL, marks=pytest.mark.night),
        pytest.param(torch.float16, False, PLAIN, marks=pytest.mark.night),
    ],
    ids=["bf16 strided", "fp32", "fp32 strided", "fp16"],
)
def test_statistics_and_gradients_are_the_references(dtype, strided, spec):
    logits, target = make_rows(dtype, strided=strided)
    chunk = chunk_of(logits, spec)
    given = (chunk, target, spec, thresholds(logits, target, spec))
    want, got = (row_stats(module, *given) for module in (reference, inductor))
    assert got.dtype == torch.float32
    for name, expected, actual in zip(spec.fields, want, got, strict=True):
        exact = name in ("max", "target", "higher")
        rtol = 0.0 if exact else 2e-6
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=0.0, equal_nan=True)

    terms, want = make_terms(logits, target, spec), torch.empty_like(logits)
    reference.grad(chunk, terms, out=want, chunk_size=4)
    # A gradient in place is given as another view of the same memory, as operations do.
    for out in (torch.empty_like(logits), logits[:]):
        inductor.grad(chunk, terms, out=out, chunk_size=4)
        rtol = 4.0 * torch.finfo(dtype).eps
        torch.testing.assert_close(out, want, rtol=rtol, atol=1e-7)
        for zero in (out[3], out[6], out[:, VALID:]):
            assert torch.equal(zero, torch.zeros_like(zero))


@pytest.mark.parametrize("behind", [700, 512, 511])
def test_columns_behind_the_last_block(behind, monkeypatch):
    """Two blocks of a narrow kernel and what is left; two; and too few for one."""
    valid, kernels = 2 * BLOCK + behind, []

    def spy(function: Callable[..., Any], *args: Any) -> Any:
        kernels.append(function)
        return common.call_compiled(function, *args)

    monkeypatch.setattr(statistics, "call_compiled", spy)
    logits = 3.0 * torch.randn(ROWS, valid + 60)
    logits[:, 2 * BLOCK + 300] = logits[2, 2 * BLOCK :] = -torch.inf
    logits[:, valid:] = torch.nan  # masked
    target = torch.tensor([0, -1, 9, *range(2 * BLOCK + 3, valid, 100)][:ROWS])
    target[-1] = valid - 1
    chunk, threshold = Chunk(logits, valid), thresholds(logits, target)
    want, got = (
        row_stats(module, chunk, target, FULL, threshold) for module in (reference, inductor)
    )
    for name, expected, actual in zip(FULL.fields, want, got, strict=True):
        rtol = 0.0 if name in ("max", "target", "higher") else 2e-6
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=0.0)
    narrow = statistics._NARROW_BLOCK
    widths = [BLOCK, narrow] if behind >= 2 * narrow else [BLOCK]
    of = (statistics._stats_kernel, statistics._count_kernel)
    assert kernels == [kernel(width) for width in widths for kernel in of]


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_entries_of_a_row(dtype, count, monkeypatch):
    """Repeated ones, ones that are elsewhere, rows without any: one compiled pass writes them."""
    logits, target = make_rows(dtype, strided=False)
    spec = replace(FULL, rank=False) if dtype == torch.bfloat16 else PLAIN
    chunk, terms = chunk_of(logits), make_terms(logits, target, spec)
    columns = torch.randint(-1, 4, (ROWS, count))  # 4 of them named often, some of them -1
    columns[:, 0], columns[7] = target, -1
    columns[8] = int(target[8])
    upstream = torch.randn(ROWS, count)
    upstream[[3, 6]] = 0.0
    terms = terms._replace(columns=columns, upstream=upstream)
    want = torch.empty_like(logits)
    reference.grad(chunk, terms, out=want, chunk_size=4)
    monkeypatch.setattr(reference, "grad", None)
    for out in (torch.empty_like(logits), logits[:]):
        inductor.grad(chunk, terms, out=out, chunk_size=4)
        torch.testing.assert_close(out, want, rtol=4.0 * torch.finfo(dtype).eps, atol=1e-6)
        for zero in (out[3], out[6], out[:, VALID:]):
            assert torch.equal(zero, torch.zeros_like(zero))


def test_rounding_is_below_the_references():
    logits = 3.0 * torch.randn(16, 32 * BLOCK + 5)
    target = torch.randint(0, 32 * BLOCK, (16,))
    spec = replace(FULL, rank=False)
    wide = Chunk(logits.double(), 32 * BLOCK)
    exact = finalize(row_stats(reference, wide, target, spec), spec).results

    def error(module) -> tuple[float, float]:
        chunk = Chunk(logits, 32 * BLOCK)
        done = finalize(row_stats(module, chunk, target, spec), spec).results
        return (
            float((done.logprobs - exact.logprobs).abs().max()),
            float((done.entropy - exact.entropy).abs().max()),
        )

    logprobs, entropy = error(inductor)
    assert logprobs <= 2e-6  # an ulp or two of a log-probability near 15
    assert entropy <= 4e-6
    assert logprobs <= error(reference)[0] + 1e-6


def test_one_compilation_serves_every_size():
    def run(rows: int, width: int) -> None:
        logits, target = torch.randn(rows, width + 5), torch.zeros(rows, 1, dtype=torch.int64)
        chunk, ones = Chunk(logits, width), torch.ones(1, rows)
        inductor.stats(chunk, target[:, 0], PLAIN, chunk_size=1)
        given = (target, ones.t(), torch.zeros(rows), ones, PLAIN)
        inductor.grad(chunk, GradientTerms(*given), out=torch.empty_like(logits), chunk_size=1)

    run(5, 3 * BLOCK)
    graphs = counters["stats"]["unique_graphs"]
    for rows, blocks in ((2, 2), (3, 3), (33, 5), (6, 7)):
        run(rows, blocks * BLOCK)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize(
    ("kernel", "flags"),
    [(statistics._stats_kernel, (True, True)), (statistics._count_kernel, ())],
    ids=["stats", "count"],
)
def test_a_block_s_width_is_a_constant_to_the_compiler(kernel, flags):
    """A loop over a symbolic width takes a tenth longer: rows and columns alone may be symbols."""
    symbols: list[int] = []

    def as_it_is(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        symbols.extend(int(x) for x in inputs if isinstance(x, int | torch.SymInt))
        return graph.forward

    call = torch.compile(kernel(512), backend=as_it_is, dynamic=True, fullgraph=True)
    call(torch.randn(9, 5 * 512), torch.ones(9), *flags)
    assert sorted(symbols) == [9, 5 * 512]


def test_nothing_of_the_logits_size_is_made():
    rows, width = 64, 8 * BLOCK
    logits, target = torch.randn(rows, width + 8), torch.zeros(rows, 1, dtype=torch.int64)
    logits = logits.bfloat16()[:, :width]
    chunk, shift = Chunk(logits, width), torch.zeros(rows)
    ones = torch.ones(len(FULL.coefficients), rows)

    def passes() -> None:
        inductor.stats(chunk, target[:, 0], FULL, threshold=shift, chunk_size=1)
        given = (target, ones[:1].t(), shift, ones, FULL)
        inductor.grad(chunk, GradientTerms(*given), out=logits[:], chunk_size=1)

    passes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        passes()
    allocated = [event.cpu_memory_usage for event in profiled.events()]
    assert 0 < max(allocated) < logits.nbytes / 16


def test_public_operations_agree_with_torch():
    logits = torch.randn(2, 6, 2 * BLOCK + 8).bfloat16()
    target = torch.randint(0, 2 * BLOCK, (2, 6))
    target[0, 0] = -100

    def run(backend: str) -> list[Tensor]:
        leaf = logits.clone().requires_grad_()
        # A slice of rows: blocks of one row stride each.
        stats = vocab_parallel_token_stats(
            leaf[:, :-1], target[:, :-1], vocab_size=2 * BLOCK + 3, backend=backend,
            **EVERY_STATISTIC,
        )  # fmt: skip
        found = [getattr(stats, name) for name in PER_TOKEN]
        loss = stats.logprobs.square() + stats.entropy + stats.sum_pi_squared
        loss.sum().backward()
        return [*found, leaf.grad.float()]

    for got, want in zip(run("inductor"), run("torch"), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-5)


def test_consumers_that_share_a_pass_over_a_head_are_compiled(monkeypatch):
    """Their gradient has a column for each: the entropy's of none, and the labels'."""
    hidden, weight = torch.randn(6, 2, 16), torch.randn(2 * BLOCK, 16)
    target, given = torch.randint(0, 2 * BLOCK, (6, 2)), torch.randn(2, 6, 2)

    def run(logits_of: Callable[[Tensor, Tensor], Tensor], **options: str) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        logits = logits_of(*leaves)
        entropy = vocab_parallel_entropy(logits, **options)
        logprobs = vocab_parallel_logprobs(logits, target, **options)
        return [entropy, logprobs, *torch.autograd.grad((entropy, logprobs), leaves, [*given])]

    want = run(lambda h, w: h.double() @ w.double().t())
    monkeypatch.setattr(reference, "grad", None)
    for got, exact in zip(run(lazy_logits, backend="inductor"), want, strict=True):
        torch.testing.assert_close(got.double(), exact.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("valid", "softcap", "smoothing"),
    [(WIDTH, 5.0, False), (WIDTH, None, True), (BLOCK, None, False)],
    ids=["softcap", "smoothing", "one block"],
)
def test_what_is_rare_is_the_references(valid, softcap, smoothing):
    logits, target = make_rows(torch.float32, strided=False)
    chunk, spec = (
        Chunk(logits, valid, Processing.of(softcap=softcap)),
        StatsSpec(smoothing=smoothing),
    )
    target = target.clamp(max=BLOCK - 1)
    results = [row_stats(module, chunk, target, spec) for module in (inductor, reference)]
    torch.testing.assert_close(*results, rtol=0.0, atol=0.0, equal_nan=True)


def _terms_and_gradient(
    logits: Tensor, scale: float, temperature: Tensor
) -> tuple[GradientTerms, Tensor]:
    """Terms with the last row's target in the last column, and their gradient in float64."""
    rows, width = logits.shape
    columns = torch.randint(width, (rows, 1))
    columns[-1] = width - 1
    coef, upstream, row_max = torch.randn(1, rows), torch.randn(rows, 1), logits.amax(-1)
    over = (scale / temperature.double()).unsqueeze(1)
    dz = ((logits.double() - row_max.double().unsqueeze(1)) * over).exp() * coef.double().t()
    dz[torch.arange(rows), columns[:, 0]] += upstream[:, 0].double()
    return GradientTerms(columns, upstream, row_max, coef, PLAIN), dz * over


@pytest.mark.parametrize("rows", [1, 5])
def test_an_invariant_gradient_of_scaled_logits(rows):
    """Of a width that is not whole vectors."""
    logits, temperature = 3.0 * torch.randn(rows, 4096 + 37), torch.linspace(0.6, 1.7, rows)
    terms, want = _terms_and_gradient(logits, 0.5, temperature)
    chunk, out = Chunk(logits, 4096 + 37, Processing.of(0.5, temperature=temperature)), logits + 1
    inductor.INVARIANT.grad(chunk, terms, out=out, chunk_size=2)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-7)


def test_a_gradient_of_another_stride_in_the_memory_of_the_logits():
    memory = torch.randn(4 * 4300)
    logits, out = (memory.as_strided((3, 4200), (stride, 1)) for stride in (4200, 4264))
    terms, want = _terms_and_gradient(logits.clone(), 1.0, torch.ones(3))
    inductor.grad(Chunk(logits, 4200), terms, out=out, chunk_size=3)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-7)


def test_a_gradient_under_label_smoothing():
    """By eager torch, as its statistics."""
    logits, target = torch.randn(4, 4200, requires_grad=True), torch.tensor([1, 4199, 7, -100])
    found = vocab_parallel_logprobs(logits, target, label_smoothing=0.3, backend="inductor")
    q = torch.full((4, 4200), 0.3 / 4199, dtype=torch.float64)
    q[torch.arange(3), target[:3]], q[3] = 0.7, 0.0
    exact, upstream = (q * logits.double().log_softmax(-1)).sum(-1), torch.linspace(0.5, 2.0, 4)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    got, want = (torch.autograd.grad((x * upstream).sum(), logits) for x in (found, exact))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("column", [1023, 1024, 1025])
def test_a_target_at_the_first_columns_past_whole_vectors(column: int) -> None:
    logits, target = torch.randn(3, 1040, requires_grad=True), torch.full((3,), column)
    found = vocab_parallel_logprobs(
        logits, target, vocab_size=1030, backend="inductor", invariant_segments=1
    )
    exact = take(logits[:, :1030].double().log_softmax(-1), target)
    upstream = torch.linspace(-1.0, 1.0, 3)
    got, want = (torch.autograd.grad((x * upstream).sum(), logits) for x in (found, exact))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
