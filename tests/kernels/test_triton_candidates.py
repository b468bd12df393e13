"""The kernels of small calls and the candidates, as compiled for a Hopper GPU; needs no GPU."""

from __future__ import annotations

import os

import pytest

from mcore_logprobs.bench.ahead import Built, build, kernel_arguments
from mcore_logprobs.kernels import triton_finish
from mcore_logprobs.kernels.stats import RowSpec
from mcore_logprobs.kernels.triton_common import CANDIDATES, field_constants
from tests.kernels.common import EVERYTHING

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

BYTES = {"bf16": 2, "fp32": 4}


def _assert_sound(built: Built) -> None:
    # Spills are loads and stores of local memory; a stack alone may be a division's slow path.
    assert built.spills == 0
    assert built.registers <= 128  # 16 warps of a multiprocessor at the least


@pytest.mark.parametrize("names", sorted(CANDIDATES))
def test_every_candidate_compiles_without_spills(names):
    spec = RowSpec(1, entropy=True, softcap=30.0)
    kernel = "results gradient" if names.startswith("tile") else "statistics"
    *arguments, _ = kernel_arguments(kernel, spec, "bf16", "bf16", names)
    built = build(*arguments)
    assert built.loop
    assert built.spills == 0


@pytest.mark.parametrize(("logits", "out"), [("bf16", "bf16"), ("fp32", "fp32"), ("fp32", "bf16")])
def test_the_gradient_reads_and_writes_sixteen_bytes_at_a_time(logits, out):
    spec = RowSpec(1, entropy=True, temperature=0.7)
    *arguments, tile = kernel_arguments("results gradient", spec, logits, out, "default")
    built = build(*arguments)
    _assert_sound(built)
    assert built.wide("LDG") == tile * BYTES[logits] // 16 // 128
    assert built.wide("STG") == tile * BYTES[out] // 16 // 128


@pytest.mark.parametrize("parts", [1, 8, 64])
def test_the_finish_compiles_and_the_target_is_asserted_on(parts):
    spec = RowSpec(1, **EVERYTHING)
    constants = {
        "PARTS": parts, "ROWS": 8, **field_constants(spec, *triton_finish.FIELDS),
        **triton_finish.norm_constants(spec),
    }  # fmt: skip
    asserting = {"debug": True, "sanitize_overflow": False}
    finish = build(triton_finish.finish_kernel, constants, {}, **asserting)
    localize = build(
        triton_finish.localize_kernel, {"BLOCK": 1024, "logits_ptr": None, "own_ptr": None},
        {"target_ptr": "*i64", "keep_ptr": "*i1"}, **asserting,
    )  # fmt: skip
    for built in (finish, localize):
        _assert_sound(built)
        assert "__assertfail" in built.ptx
