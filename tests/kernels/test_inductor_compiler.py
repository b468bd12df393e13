"""When the compiled CPU kernels are taken, and what a compiler that fails or other settings do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

from mcore_logprobs import (
    vocab_parallel_logprobs,
)
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels import budgets, inductor, reference
from mcore_logprobs.kernels.chunk import Chunk, prefer_huge_pages
from mcore_logprobs.kernels.inductor import common, statistics
from mcore_logprobs.kernels.stats import GradientTerms
from tests.helpers.memory import TensorsMade
from tests.kernels.common import row_stats
from tests.kernels.compiled import (
    BLOCK,
    FULL,
    PLAIN,
    ROWS,
    WIDTH,
    chunk_of,
    make_rows,
    make_terms,
    thresholds,
)
from tests.kernels.two_sides import run_pair

pytestmark = pytest.mark.usefixtures("must_compile")


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
    monkeypatch.undo()  # before must_compile looks


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


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.night)]
)
def test_defaults_for_new_tensors_change_nothing(dtype, monkeypatch):
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
    for default in (torch.device("meta"), default_dtype(dtype)):
        with default:
            found.append(passes())
    assert len(compiled) == 4 * 3  # none went to the reference
    for got in found:
        for one, other in zip(got, want, strict=True):
            assert one.device.type == "cpu"
            assert torch.equal(one, other)


def test_numbers_of_the_formulas_are_constants_to_the_compiler(compile_anew):
    """A number that is a symbol has every kernel traced twice."""
    numbers: list[Any] = []

    def as_it_is(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        numbers.extend(x for x in inputs if getattr(x, "dtype", None) is torch.float64)
        return graph.forward

    compile_anew(lambda f: torch.compile(f, backend=as_it_is, dynamic=True, fullgraph=True))
    logits, target = make_rows(torch.float32, strided=False)
    inductor.stats(chunk_of(logits), target, FULL, threshold=torch.zeros(ROWS), chunk_size=4)
    both, ones = [Chunk(torch.randn(3, WIDTH), WIDTH) for _ in range(2)], torch.ones(3)
    for kind in ("forward", "jsd"):
        run_pair(inductor, *both, kind, ones, torch.empty(3, WIDTH))
    assert len(common._kernels) == 2 + 2 + 3
    assert not numbers


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


@pytest.mark.night  # three kernels of its own
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
