"""What the compiler makes of the kernels for a Hopper GPU; needs no GPU, only Triton's assembler.

A kernel that reads two bytes a thread, or that spills registers to memory, is right and slow: no
other test would notice.
"""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mcore_logprobs.kernels import triton_grad, triton_rank, triton_stats
from mcore_logprobs.kernels.stats import RowSpec
from mcore_logprobs.kernels.triton_common import field_constants, transform_args

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

HOPPER = GPUTarget("cuda", 90, 32)
FLOATS = ("scale", "softcap", "temperature", "slope")
POINTERS = {
    "target_ptr": "*i64",
    "shift_ptr": "*fp32",
    "coef_ptr": "*fp32",
    "threshold_ptr": "*fp32",
}
CAP = {"logit_scale": 0.5, "softcap": 3.0, "temperature": 0.7}
PLAIN, CAPPED = (
    {name: on for name, on in transform_args(spec, None, None).items() if name.startswith("HAS_")}
    for spec in (RowSpec(1), RowSpec(1, **CAP))
)


def _build(kernel: Any, logits: str, out: str, constants: dict[str, Any], directory: Any) -> str:
    """The PTX of a kernel for aligned rows that are not split; fails if it spills registers."""
    constants = {"splits": 1, "bias_ptr": None, "temperature_ptr": None, **constants}
    pointers = {"logits_ptr": "*" + logits, "out_ptr": "*" + out, **POINTERS}
    signature, values, attributes = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(at,)] = "constexpr", constants[name]
        elif name in FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = pointers.get(name, "i32")
            # A true vocabulary may be any number; memory is laid out in multiples of 16 columns.
            if name != "valid":
                attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    built = triton.compile(source, target=HOPPER, options={"num_warps": 4})
    path = directory / "kernel.cubin"
    path.write_bytes(built.asm["cubin"])
    registers, code = (
        subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, what, str(path)],
            capture_output=True, text=True, check=True,
        ).stdout
        for what in ("-res-usage", "-sass")
    )  # fmt: skip
    resources = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", registers))
    # Spills are loads and stores of local memory; a stack alone may be a division's slow path.
    assert not re.findall(r"\b(?:STL|LDL)\b", code), resources
    assert int(resources["REG"]) <= 128, resources  # 16 warps of a multiprocessor at the least
    return built.asm["ptx"]


def _wide(ptx: str, direction: str) -> int:
    """How many 16-byte loads ("ld") or stores ("st") of global memory there are."""
    return len(re.findall(rf"{direction}\.global\.v4\.b32", ptx))


@pytest.mark.parametrize("logits", ["bf16", "fp32"])
@pytest.mark.parametrize("transform", [PLAIN, CAPPED], ids=["plain", "softcap"])
def test_statistics_read_sixteen_bytes_at_a_time(logits, transform, tmp_path):
    lanes = 8 if logits == "bf16" else 4
    constants = {
        "LANES": lanes, "GROUPS": 512, "threshold_ptr": None,
        **field_constants(RowSpec(1, entropy=True), *triton_stats.STORED),
    }  # fmt: skip
    ptx = _build(triton_stats.stats_kernel, logits, "fp32", {**transform, **constants}, tmp_path)
    # One tile of whole columns; the masked last tile may read as it likes.
    assert _wide(ptx, "ld") == 512 // 128
    # Threads meet only after the loop: no barrier between one wide load and the next.
    loop = ptx[: ptx.rindex("ld.global.v4.b32")]
    assert "bar.sync" not in loop
    assert "shfl" not in loop


def test_rank_reads_sixteen_bytes_at_a_time(tmp_path):
    constants = {"LANES": 8, "GROUPS": 512}
    ptx = _build(triton_rank.rank_kernel, "bf16", "i64", constants, tmp_path)
    assert _wide(ptx, "ld") == 512 // 128


@pytest.mark.parametrize(("logits", "out"), [("bf16", "bf16"), ("fp32", "fp32"), ("fp32", "bf16")])
def test_the_gradient_reads_and_writes_sixteen_bytes_at_a_time(logits, out, tmp_path):
    constants = {"TILE": 4096, "TILES": 4, "ENTROPY": True, "SMOOTHING": False, "HAS_SLOPE": True}
    constants |= triton_grad.coefficient_constants(RowSpec(1, entropy=True))
    ptx = _build(triton_grad.grad_kernel, logits, out, {**PLAIN, **constants}, tmp_path)
    bytes_of = {"bf16": 2, "fp32": 4}
    assert _wide(ptx, "ld") == 4096 * bytes_of[logits] // 16 // 128
    # Twice: the tile, and the zeros of a row without coefficients.
    assert _wide(ptx, "st") >= 2 * 4096 * bytes_of[out] // 16 // 128
