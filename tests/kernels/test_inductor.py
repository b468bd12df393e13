"""The compiled CPU kernels against the reference and float64, and what happens where they fail.

Every kind of tensor (dtype, contiguous or not) and of statistics compiles a kernel of its own, in
about a second: the cases here share a few.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.cpu_vec_isa import valid_vec_isa_list
from torch.profiler import ProfilerActivity, profile

from mcore_logprobs import (
    vocab_parallel_entropy,
    vocab_parallel_logprobs,
    vocab_parallel_target_rank,
    vocab_parallel_token_stats,
)
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels import budgets, inductor, reference
from mcore_logprobs.kernels.chunk import Chunk, Processing, prefer_huge_pages
from mcore_logprobs.kernels.inductor import common, statistics
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec, finalize
from tests.helpers.lazy import lazy_logits
from tests.helpers.memory import TensorsMade
from tests.kernels.common import EVERYTHING, row_stats

BLOCK = 2048
# rows, width, valid: the last block is not whole, and columns past it are masked.
ROWS, WIDTH, VALID = 9, 3 * BLOCK + 100, 3 * BLOCK + 37
PLAIN, FULL = StatsSpec(), replace(EVERYTHING, smoothing=False)  # smoothing goes to torch


@pytest.fixture(autouse=True)
def _must_compile() -> Iterator[None]:
    """No case may pass because the reference computed it."""
    assert inductor.obstacle() is None
    yield
    assert inductor.obstacle() is None
    assert not common._failures


def make_rows(dtype: torch.dtype, *, strided: bool) -> tuple[Tensor, Tensor]:
    """Logits `[ROWS, WIDTH]` with -inf blocks and a NaN row (3), and targets, two of them -1."""
    y = 3.0 * torch.randn(ROWS, WIDTH + 5 if strided else WIDTH)
    y[:, 7] = -torch.inf
    y[1, : 2 * BLOCK] = -torch.inf
    y[2] = -torch.inf
    y[2, 9] = 1.0
    y[3] = torch.nan
    target = torch.randint(0, VALID, (ROWS,))
    target[2], target[5] = 9, VALID - 1
    target[4] = target[7] = -1
    return y.to(dtype)[:, :WIDTH], target


def thresholds(logits: Tensor, target: Tensor, spec: StatsSpec = FULL) -> Tensor | None:
    return reference.gather_target(logits, target, 0.0).float() if spec.rank else None


def chunk_of(logits: Tensor, spec: StatsSpec = FULL) -> Chunk:
    return Chunk(logits, VALID, Processing.of(temperature=0.7 if spec == PLAIN else 1.0))


def make_terms(logits: Tensor, target: Tensor, spec: StatsSpec) -> GradientTerms:
    """Of one entry per row; nothing is asked of the NaN row and one more."""
    shift = logits.float().nan_to_num(neginf=-1e4).amax(-1)
    coef, upstream = torch.randn(len(spec.coefficients), ROWS), torch.randn(ROWS, 1)
    coef[:, [3, 6]] = upstream[[3, 6]] = 0.0
    kept = len(coef) - 1  # in a row with nothing else, the last one too is something
    coef[:kept, 8] = upstream[8] = 0.0
    return GradientTerms(target.unsqueeze(1), upstream, shift, coef, spec)


@pytest.mark.parametrize(
    ("dtype", "strided", "spec"),
    [
        (torch.bfloat16, True, FULL),
        (torch.float32, False, PLAIN),
        (torch.float32, True, FULL),
        (torch.float16, False, PLAIN),
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
    spec = replace(FULL, rank=False)
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
    logits = 3.0 * torch.randn(16, 32 * BLOCK)
    target = torch.randint(0, 32 * BLOCK, (16,))
    spec = StatsSpec(entropy=True)
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
        logits, target = torch.randn(rows, width), torch.zeros(rows, 1, dtype=torch.int64)
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
    logits, target = torch.randn(rows, width).bfloat16(), torch.zeros(rows, 1, dtype=torch.int64)
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
            leaf[:, :-1], target[:, :-1], entropy=True, vocab_size=2 * BLOCK + 3, backend=backend
        )
        (stats.logprobs.square().sum() + stats.entropy.sum()).backward()
        rank = vocab_parallel_target_rank(leaf, target, backend=backend)
        return [stats.logprobs, stats.entropy, rank, leaf.grad.float()]

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


def run_both() -> tuple[Tensor, Tensor]:
    logits, target = make_rows(torch.float32, strided=False)
    chunk = chunk_of(logits, PLAIN)
    a, b = (row_stats(module, chunk, target, PLAIN) for module in (inductor, reference))
    return a, b


@pytest.fixture
def compile_anew(monkeypatch) -> Callable[[Callable[..., Any]], None]:
    """A process that has compiled nothing yet, with another `_compile`; undone after the test."""

    def start(compile_: Callable[..., Any]) -> None:
        for name, empty in (("_kernels", {}), ("_warm", set()), ("_failures", {})):
            monkeypatch.setattr(common, name, empty)
        monkeypatch.setattr(common, "_compile", compile_)

    yield start
    monkeypatch.undo()  # before _must_compile looks


def test_a_failed_compilation_is_said_once_and_leaves_other_kinds_compiled(compile_anew, caplog):
    real = common._compile

    def broken_statistics(function: Callable[..., Any]) -> Callable[..., Any]:
        if function is statistics._stats_kernel(BLOCK):
            raise RuntimeError("no such header\nand much more")
        return real(function)

    compile_anew(broken_statistics)
    with caplog.at_level(logging.WARNING, logger="mcore_logprobs"):
        for _ in range(2):
            torch.testing.assert_close(*run_both(), rtol=0.0, atol=0.0, equal_nan=True)
    (record,) = caplog.records
    assert "stats_kernel" in record.getMessage()
    assert "RuntimeError: no such header; the torch backend" in record.getMessage()
    assert inductor.obstacle() is None
    large = torch.zeros(budgets.CPU.compiled_numel // BLOCK, BLOCK)
    assert backends.select("auto", large) is inductor
    # Another kernel is compiled after it.
    logits, target = make_rows(torch.float32, strided=False)
    given = (target.unsqueeze(1), torch.ones(ROWS, 1), torch.zeros(ROWS), torch.ones(1, ROWS))
    out = torch.empty_like(logits)
    inductor.grad(chunk_of(logits), GradientTerms(*given, PLAIN), out=out, chunk_size=4)
    assert [key[0] for key in common._kernels] == [common._writers(statistics._grad_values)[0]]


def test_a_failed_search_for_vectors_is_a_failed_compilation(compile_anew, monkeypatch, caplog):
    """torch tries its vectors in a process of its own, which a system may refuse to start."""

    def refused() -> int:
        raise PermissionError("no process may be started")

    for module in (common, statistics):
        monkeypatch.setattr(module, "vector_bits", refused)
    compile_anew(common._compile)
    statistics._stats_kernel.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="mcore_logprobs"):
            torch.testing.assert_close(*run_both(), rtol=0.0, atol=0.0, equal_nan=True)
        logits, target = make_rows(torch.float32, strided=False)
        with pytest.raises(RuntimeError, match=r"invariant_segments: .* no process may be started"):
            inductor.stats(chunk_of(logits), target, PLAIN, block=BLOCK, chunk_size=4)
    finally:
        statistics._stats_kernel.cache_clear()
    (record,) = caplog.records
    assert "PermissionError: no process may be started; the torch backend" in record.getMessage()


def test_a_compiler_that_never_works_is_given_up(compile_anew, caplog):
    def broken(function: Callable[..., Any]) -> Callable[..., Any]:
        raise RuntimeError("no such header")

    compile_anew(broken)
    with caplog.at_level(logging.WARNING, logger="mcore_logprobs"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert inductor.obstacle() is None
            logits, target = make_rows(dtype, strided=False)
            inductor.stats(chunk_of(logits), target, PLAIN, chunk_size=4)
    assert len(caplog.records) == 3
    assert "no such header" in str(inductor.obstacle())
    large = torch.zeros(budgets.CPU.compiled_numel // BLOCK, BLOCK)
    assert backends.select("auto", large) is reference
    with pytest.raises(ValueError, match=r"'inductor' is unavailable: .*no such header"):
        backends.select("inductor", large)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_defaults_for_new_tensors_change_nothing(monkeypatch):
    logits, target = make_rows(torch.float32, strided=False)
    logits = logits.nan_to_num(nan=0.5)
    threshold, chunk = thresholds(logits, target), chunk_of(logits)
    terms = make_terms(logits, target, FULL)

    def passes() -> list[Tensor]:
        out = torch.empty_like(logits)
        inductor.grad(chunk, terms, out=out, chunk_size=4)
        return [out, inductor.stats(chunk, target, FULL, threshold=threshold, chunk_size=4)]

    compiled = []
    real = common.call_compiled

    def spy(*args: Any) -> Any:
        result = real(*args)
        compiled.append(args[0])
        return result

    monkeypatch.setattr(statistics, "call_compiled", spy)
    want = passes()
    try:
        torch.set_default_device("meta")
        found = [passes()]
    finally:
        torch.set_default_device(None)
    dtypes = (torch.float64, torch.bfloat16)
    for default in (torch.device("meta"), *map(default_dtype, dtypes)):
        with default:
            found.append(passes())
    assert len(compiled) == 5 * 3  # none went to the reference
    for got in found:
        for one, other in zip(got, want, strict=True):
            assert one.device.type == "cpu"
            assert torch.equal(one, other)


def test_where_torch_compiles_nothing_the_reference_takes_over():
    with TensorsMade() as made:
        torch.testing.assert_close(*run_both(), rtol=0.0, atol=0.0, equal_nan=True)
    assert made.made
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(*run_both(), rtol=0.0, atol=0.0, equal_nan=True)


def test_auto_takes_it_for_large_logits_of_a_cpu(monkeypatch):
    large = torch.zeros(budgets.CPU.compiled_numel // BLOCK, BLOCK)
    assert backends.select("auto", large) is inductor
    assert backends.select("auto", large[1:]) is reference
    assert backends.select("auto", large.double()) is reference
    assert backends.select("inductor", large[:2]) is inductor
    with pytest.raises(ValueError, match="'inductor' is unavailable: expected logits of float32"):
        backends.select("inductor", large.double())
    monkeypatch.setattr(common, "compiler", lambda: None)
    assert backends.select("auto", large) is reference
    (choice,) = (c for c in backends.explain("cpu") if c.name == "inductor")
    assert not choice.available
    assert "no C++ compiler" in choice.reason
    (choice,) = (c for c in backends.explain("cuda") if c.name == "inductor")
    assert not choice.available
    monkeypatch.undo()


def test_it_looks_for_the_compiler_that_torch_looks_for(monkeypatch):
    """Not for any other that is there, by which torch would not compile."""
    assert torch._inductor.config.cpp.cxx[-1] == common.compiler()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setattr(common, "compiler", common.compiler.__wrapped__)  # without its cache
    assert common.compiler() is None
    assert "torch looks for '/no/such/compiler'" in common.obstacle()
    monkeypatch.undo()


def test_huge_pages_are_a_hint():
    for size in (3, 1 << 22):
        fresh = torch.empty(size)
        assert prefer_huge_pages(fresh) is fresh
        assert torch.equal(fresh.fill_(1.0), torch.ones(size))


def test_cache_on_disk_tells_instruction_sets_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made = []
    for capability in ("default", "avx2", "default"):  # the last as a later process
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        counters.clear()
        kernel = common._compile(statistics._count_kernel(BLOCK))
        kernel(torch.randn(3, 2 * BLOCK), torch.zeros(3))
        made.append(counters["inductor"]["fxgraph_cache_miss"])
    # A CPU without AVX2 has one set of instructions, and one kernel.
    one = not valid_vec_isa_list()
    assert made == [1, 0 if one else 1, 0]


def test_more_of_torch_s_global_settings_than_a_code_object_has_variants_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each number of threads takes one; a kernel that has no room begins again."""
    logits, target = torch.randn(ROWS, WIDTH), torch.arange(ROWS)
    name = (
        "recompile_limit"
        if hasattr(torch._dynamo.config, "recompile_limit")
        else "cache_size_limit"
    )
    threads = torch.get_num_threads()
    expected = vocab_parallel_logprobs(logits, target, backend="torch")
    try:
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            with torch._dynamo.config.patch({name: 2}):
                got = vocab_parallel_logprobs(logits, target, backend="inductor")
            assert torch.allclose(got, expected, atol=1e-5), count
            assert not common._failures
            if count == 3:  # it began again, and is compiled for no other setting
                key = next(reversed(common._kernels))
                assert {state[1] for state in common._warm if state[0] == key} == {3}
                assert "stats_kernel: compiled once more" in caplog.text
    finally:
        torch.set_num_threads(threads)


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
