"""A launch by itself takes the compiled kernel that Triton's own launcher would take."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel

from mcore_logprobs import (
    vocab_parallel_kl_div,
    vocab_parallel_token_stats,
)
from mcore_logprobs.bench.launches import dry_launches
from mcore_logprobs.kernels import triton_backend
from mcore_logprobs.kernels.stats import RowSpec
from mcore_logprobs.kernels.triton_launch import Launcher
from tests.helpers import poison

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)


@triton.jit(do_not_specialize=["count"])
def _kernel(x_ptr, y_ptr, count, stride, scale, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    y = tl.load(x_ptr + stride + columns, mask=columns < count).to(tl.float32)
    if y_ptr is not None:
        y += tl.load(y_ptr + columns).to(tl.float32)
    tl.store(x_ptr + columns, (y * scale).to(x_ptr.dtype.element_ty))


@pytest.fixture
def directly(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels launched by themselves, each compared with Triton's own choice."""
    for owner, name in poison._FACTORIES:
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    taken: list[Any] = []
    compared: list[str] = []
    subscript, launch = CompiledKernel.__getitem__, Launcher.__call__

    def recorded(self: Any, grid: Any) -> Any:
        taken.append(self)
        return subscript(self, grid)

    def checked(self: Launcher, grid: Any, *groups: Any, num_warps: int = 4) -> None:
        taken.clear()
        launch(self, grid, *groups, num_warps=num_warps)
        own = self._looked_up(grid, tuple(itertools.chain(*groups)), num_warps)
        if taken:
            assert taken == [own]
            compared.append(own.src.fn.__name__)

    monkeypatch.setattr(CompiledKernel, "__getitem__", recorded)
    monkeypatch.setattr(Launcher, "__call__", checked)
    with dry_launches():
        yield compared


def test_every_kind_of_argument(directly: list[str]) -> None:
    launch = Launcher(_kernel)
    memory = torch.zeros(64)
    aligned, at_4 = memory[:32], memory[1:33]
    kinds = itertools.product(
        (aligned, at_4, aligned.bfloat16()),
        (None, at_4),
        (0, 1, 16, 17, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1),
        (0, 1, 16, 17, -16, 2**31 - 1, 2**31, 2**31 + 1, -(2**31)),
    )
    given = [(*kind, 16, 4) for kind in kinds]
    given += [(aligned, None, 7, 7, 32, 4), (aligned, None, 7, 7, 16, 8)]
    arguments = [(*each, scale) for each in given for scale in (1.0, 0.5)]
    for number in torch.randperm(len(arguments)).tolist():
        x, y, count, stride, width, num_warps, scale = arguments[number]
        launch((1, 1, 1), (x, y), (count, stride), (scale, width), num_warps=num_warps)
    # Most kinds had been met before, in another call: those are the ones compared.
    assert len(directly) > len(arguments) // 2
    # And no more are told apart than decide, but for the scale, which is a constant here.
    assert len({id(kernel) for kernel in launch._compiled.values()}) * 2 == len(launch._compiled)


def _calls(dtype: torch.dtype, rows: int, width: int, offset: int) -> None:
    """Both directions of operations on logits, at their own memory and an offset."""
    memory = torch.zeros(offset + 2 * rows * width, dtype=dtype)
    logits = memory[offset:].view(rows, 2 * width)[:, :width].requires_grad_()
    target = torch.zeros(2 * rows + offset, dtype=torch.int64)[offset : offset + rows]
    temperature = torch.ones(rows + offset)[offset:]
    for options in ({}, {"temperature": temperature, "entropy": True}, {"vocab_size": width - 3}):
        stats = vocab_parallel_token_stats(logits, target, backend="triton", **options)
        upstream = torch.ones(2 * rows + offset)[offset::2][:rows]
        torch.autograd.grad(stats.logprobs, logits, upstream)
    # Columns that a dry kernel finds are no numbers to pick logits by.
    given, coef = torch.zeros(2, rows, 4)[:, :, 0], torch.zeros(2, rows + offset)[:, offset:]
    triton_backend.entries_grad(
        logits.detach(), target[:, None].expand(rows, 2), given.t(), temperature, coef,
        RowSpec(width), out=torch.empty(rows, width, dtype=dtype),
    )  # fmt: skip
    vocab_parallel_kl_div(
        logits, memory[offset:].view(rows, -1)[:, :width], kind="reverse", backend="triton"
    ).sum().backward()


def test_operations_at_any_alignment(directly: list[str]) -> None:
    for rows, width, offset in (
        (16, 256, 0),
        (17, 256, 0),
        (16, 256, 8),
        (16, 250, 1),
        (1, 256, 0),
    ):
        for _ in range(2):
            _calls(torch.bfloat16, rows, width, offset)
    assert set(directly) == {
        "stats_kernel", "finish_kernel", "results_grad_kernel", "grad_kernel", "entries_kernel",
        "pair_stats_kernel", "pair_finish_kernel", "pair_grad_kernel",
    }  # fmt: skip
    assert len(directly) > 60


def test_a_hook_of_triton_s_sees_every_launch(directly: list[str]) -> None:
    launch, x, seen = Launcher(_kernel), torch.zeros(32), []
    hook = lambda *args, **_: seen.append(args[2])  # noqa: E731
    launch((1, 1, 1), (x, None), (4, 1), (1.0, 16))
    launch((1, 1, 1), (x, None), (5, 1), (1.0, 16))
    assert directly == ["_kernel"]
    _kernel.add_pre_run_hook(hook)
    try:
        launch((1, 1, 1), (x, None), (6, 1), (1.0, 16))
    finally:
        _kernel.pre_run_hooks.remove(hook)
    assert 6 in seen
    assert directly == ["_kernel"]


def test_what_triton_compiles_on_the_side_is_not_kept(directly: list[str]) -> None:
    asynchronous = pytest.importorskip("triton.runtime._async_compile").AsyncCompileMode
    launch, x = Launcher(_kernel), torch.zeros(32)
    with ThreadPoolExecutor(1) as executor, asynchronous(executor):
        launch((1, 1, 1), (x, None), (4, 3), (0.25, 128))
    for _ in range(2):
        launch((1, 1, 1), (x, None), (4, 3), (0.25, 128))
    assert directly
    assert all(isinstance(kernel, CompiledKernel) for kernel in launch._compiled.values())


def test_a_profiler_s_kernels_are_not_kept(
    directly: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, x = Launcher(_kernel), torch.zeros(32)
    monkeypatch.setattr(triton.knobs.compilation, "instrumentation_mode", "none but a name")
    for _ in range(2):
        launch((1, 1, 1), (x, None), (4, 5), (0.25, 16))
    assert not launch._compiled
    monkeypatch.undo()
