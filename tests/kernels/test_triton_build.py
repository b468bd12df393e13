"""What the compiler makes of the kernels for a Hopper GPU, read from the launches; needs no GPU.

A kernel that reads two bytes a thread, or that spills registers to memory, is right and slow: no
other test would notice.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch

from benchmarks.ahead import Case, cases, launched_code
from mcore_logprobs.kernels import triton as triton_backend
from mcore_logprobs.kernels.pairs import PairSpec
from mcore_logprobs.kernels.stats import StatsSpec
from tests.kernels.common import EVERYTHING, make_chunk

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

CASES = {f"{case.name}, {case.what}, {case.dtypes}": case for case in cases(1 << 14)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_whole_tiles_are_read_and_written_sixteen_bytes_at_a_time(case: Case) -> None:
    built = case.built
    assert built.spills == 0
    assert built.registers <= 128  # 16 warps of a multiprocessor at the least
    assert built.wide("LD") >= case.sides
    assert not built.narrow("LD")
    assert not built.narrow("ST")
    if "gradient" in case.name:
        assert built.wide("ST") >= 1
    elif case.sides == 1:
        assert built.covered == 1.0
        # Below what a read of two bytes an element leaves time for, but for a tanh.
        assert case.what == "softcap" or case.instructions(built) < 15.6


def test_what_is_rare_is_built_without_spills() -> None:
    logits = torch.zeros(16, 4096, dtype=torch.bfloat16)
    out, row = torch.zeros_like(logits), torch.zeros(16)
    columns, norm = torch.zeros(16, 3, dtype=torch.int64), torch.zeros(2, 16)
    how = {"bias": True, "rows": True, "softcap": 3.0, "logit_scale": 0.5}
    chunk, exact = make_chunk(logits, 4000, **how), make_chunk(logits.float(), 4000, **how)
    coef = torch.zeros(len(EVERYTHING.coefficients), 16)
    entries = (columns, columns.float(), row, coef, EVERYTHING)
    both = (chunk, exact, norm, norm, row, row)
    calls = {
        "stats_kernel": lambda: triton_backend.stats(
            chunk, columns[:, 0], EVERYTHING, threshold=row
        ),
        "grad_kernel entries_kernel": lambda: triton_backend.grad(chunk, *entries, out=out),
        "entries_kernel": lambda: triton_backend.grad(
            chunk, *entries[:2], None, None, StatsSpec(), out=out
        ),
        "pair_grad_kernel": lambda: triton_backend.pair_grad(*both, PairSpec("jsd"), out=out),
    }
    for names, call in calls.items():
        built = launched_code(call)
        assert " ".join(name for name, _ in built) == names
        assert all(code.spills == 0 for _, code in built)


def test_every_launch_asks_for_fused_multiply_adds() -> None:
    launches = [
        (file.name, [keyword.arg for keyword in call.keywords])
        for file in Path(triton_backend.__file__).parent.glob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
        if ast.unparse(call.func.value) == "kernel"
    ]
    ((name, keywords),) = launches  # the one that all others go through
    assert name == "common.py"
    assert "enable_fp_fusion" in keywords
