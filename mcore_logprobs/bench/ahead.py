"""What the compiler makes of the kernels for a Hopper GPU: `python -m mcore_logprobs bench ahead`.

Compiled ahead, on any machine with Triton, and read from the machine code: instructions an element
in the loop over whole tiles, registers, spills, how many loads are under way at once, and in what
share of the loop one is. A read of two bytes leaves a multiprocessor of an H200 time for 15.6
instructions (a read and a write for 31.2): a kernel below that is bound by memory, provided that
its loads are under way early enough or other warps fill the time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_logprobs.kernels.stats import RowSpec

__all__ = ["Built", "build", "kernel_arguments", "main"]

_FLOATS = ("scale", "softcap", "temperature", "slope", "label_smoothing", "beta")
_POINTERS = {
    "target_ptr": "*i64",
    "keep_ptr": "*i1",
    "rank_ptr": "*i64",
    "column_ptr": "*i64",
}
_UNALIGNED = ("valid", "rows", "count")  # any number; the others are multiples of 16
_THREADS = 32


@dataclass(frozen=True)
class Built:
    """A kernel's machine code for sm_90.

    Attributes:
        ptx: Triton's assembly.
        code: the machine's instructions in order, without addresses.
        registers: a thread's.
    """

    ptx: str
    code: tuple[str, ...]
    loop: tuple[str, ...]
    registers: int

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return sum(bool(re.match(r"(@!?U?P\d+ )?(STL|LDL)\b", line)) for line in self.code)

    def wide(self, direction: str) -> int:
        """How many 16-byte accesses ("LDG" or "STG") of global memory there are in the loop."""
        return sum(f"{direction}.E.128" in line for line in self.loop)

    @property
    def loads_in_flight(self) -> int:
        """The most loads of the loop that are under way at once; copies to shared memory are all.

        Those (`LDGSTS`) are waited for by the stage, not by their registers.
        """
        copies = sum("LDGSTS" in line for line in self.loop)
        return copies or max(self._under_way(), default=0)

    @property
    def covered(self) -> float:
        """The share of the loop's instructions during which a load is under way."""
        if any("LDGSTS" in line for line in self.loop):
            return 1.0
        under_way = self._under_way()
        return sum(count > 0 for count in under_way) / max(1, len(under_way))

    def _under_way(self) -> list[int]:
        """At each instruction of the loop, how many loads have been issued and not waited for."""
        waiting: list[set[str]] = []
        counts = []
        # Twice, since a load may be for the next round.
        for line in self.loop * 2:
            found = re.search(r"\bLDG\S* (R\d+)", line)
            operands = set(re.findall(r"\bR\d+\b", line))
            if found:
                first = int(found[1][1:])
                size = 4 if ".128" in line else 2 if ".64" in line else 1
                waiting.append({f"R{first + i}" for i in range(size)})
            else:
                waiting = [registers for registers in waiting if not registers & operands]
            counts.append(len(waiting))
        return counts[len(self.loop) :]


def build(
    kernel: Any,
    constants: Mapping[str, Any],
    pointers: Mapping[str, str],
    *,
    num_warps: int = 4,
    **options: Any,
) -> Built:
    """Compile a kernel for aligned rows of a Hopper GPU.

    Args:
        constants: of the kernel's arguments by name.
        pointers: Triton's types ("*bf16") of those that point to anything but float32.
        options: of the compiler.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mcore_logprobs.kernels.triton_launch import FUSE

    types = _POINTERS | dict(pointers)
    signature, values, attributes = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(at,)] = "constexpr", constants[name]
            continue
        is_float = name.removeprefix("student_").removeprefix("teacher_") in _FLOATS
        default = "*fp32" if name.endswith("_ptr") else "fp32" if is_float else "i32"
        signature[name] = types.get(name, default)
        if not is_float and name not in _UNALIGNED:
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    target = GPUTarget("cuda", 90, _THREADS)
    options = {"num_warps": num_warps, "enable_fp_fusion": FUSE, **options}
    built = triton.compile(source, target=target, options=options)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "kernel.cubin")
        path.write_bytes(built.asm["cubin"])
        resources, text = (
            subprocess.run(
                [triton.knobs.nvidia.cuobjdump.path, what, str(path)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for what in ("-res-usage", "-sass")
        )
    registers = int(re.findall(r"REG:(\d+)", resources)[-1])
    addressed = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)
    code = [(int(address, 16), line) for address, line in addressed]
    return Built(built.asm["ptx"], tuple(line for _, line in code), _hot_loop(code), registers)


def _hot_loop(code: list[tuple[int, str]]) -> tuple[str, ...]:
    """The loop with the most 16-byte loads; of equals the shortest."""
    loops: list[tuple[int, int, list[str]]] = []
    for address, line in code:
        found = re.search(r"\bBRA\S* .*?0x([0-9a-f]+)", line)
        if found and int(found[1], 16) < address:
            body = [text for at, text in code if int(found[1], 16) <= at <= address]
            wide = sum("LDG" in text and ".128" in text for text in body)
            loops.append((-wide, len(body), body))
    return tuple(min(loops, key=lambda loop: loop[:2])[2]) if loops else ()


# ---- which kernels -----------------------------------------------------------------------------


def kernel_arguments(
    name: str, spec: RowSpec, logits: str, out: str, names: str
) -> tuple[Any, dict[str, Any], dict[str, str], int]:
    """What `build` takes for a candidate of a kernel, and how many columns its tile has.

    Args:
        name: "statistics", "gradient" (from coefficients), "results gradient"; for two sides
            "pair statistics", "pair sums" or "pair gradient", and of what ("pair sums jsd").
        logits, out: "bf16", "fp16" or "fp32"; the statistics are float32 always.
        names: of `triton_common.CANDIDATES`.
    """
    from mcore_logprobs.kernels import triton_common, triton_finish, triton_grad, triton_stats

    with triton_common.use_candidate(names):
        if name.startswith("pair "):
            return _pair_arguments(*name.split()[1:], spec=spec, logits=logits, out=out)
        transform = {
            flag: on
            for flag, on in triton_common.transform_constants(
                spec, False, False, triton_common.candidate().series
            ).items()
            if flag.startswith("HAS_")
        }
        constants: dict[str, Any] = {"bias_ptr": None, "temperature_ptr": None, **transform}
        if name == "statistics":
            plan = triton_common.launch_plan(*_LARGE, torch.empty(0, dtype=_DTYPES[logits]))
            constants |= {
                "threshold_ptr": None,
                "LANES": plan.lanes,
                "GROUPS": plan.groups,
                "STAGES": plan.stages,
                "PREFETCH": plan.prefetch,
                **triton_common.field_constants(spec, *triton_stats.STORED),
            }
            return triton_stats.stats_kernel, constants, {"logits_ptr": f"*{logits}"}, plan.tile
        constants |= triton_grad.tile_constants(_LARGE[1])
        constants |= {"HAS_SLOPE": spec.multiplier != 1.0}
        pointers = {"logits_ptr": f"*{logits}", "out_ptr": f"*{out}"}
        if name == "gradient":
            constants |= {"ENTROPY": spec.entropy, "SMOOTHING": spec.smoothing}
            constants |= triton_grad.coefficient_constants(spec)
            return triton_grad.grad_kernel, constants, pointers, constants["TILE"]
        constants |= triton_finish.norm_constants(spec)
        upstream = {"lse": False, "entropy": spec.entropy, "sum_pi_squared": spec.sum_pi_squared}
        constants |= {f"{field}_ptr": None for field, there in upstream.items() if not there}
        return triton_grad.results_grad_kernel, constants, pointers, constants["TILE"]


def _pair_arguments(
    step: str, kind: str, *, spec: RowSpec, logits: str, out: str
) -> tuple[Any, dict[str, Any], dict[str, str], int]:
    """`kernel_arguments` of the kernels for two sides, both of which are transformed by `spec`."""
    from mcore_logprobs.kernels import triton_distill, triton_distill_grad, triton_sides
    from mcore_logprobs.kernels.distill import KINDS, Side

    empty = torch.empty(1 << 20, 0, dtype=_DTYPES[logits])
    constants: dict[str, Any] = {"KIND": KINDS.index(kind)}
    pointers = {"out_ptr": f"*{out}"}
    both = dict(triton_sides.sides_constants(Side(empty, spec), Side(empty, spec)))
    for side in ("student", "teacher"):
        constants |= {f"{side}_bias_ptr": None, f"{side}_temperature_ptr": None}
        constants[side.upper()] = both[side.upper()]
        pointers[f"{side}_ptr"] = f"*{logits}"
    if step == "gradient":
        constants |= triton_distill_grad.tile_constants(kind, _LARGE[1])
        return triton_distill_grad.pair_grad_kernel, constants, pointers, constants["TILE"]
    plan = triton_sides.pair_plan(empty, empty, _LARGE[1])
    constants |= {"LANES": plan.lanes, "GROUPS": plan.groups}
    if step == "sums":
        del constants["KIND"]
        return triton_distill.jsd_kernel, constants, pointers, plan.tile
    return triton_distill.pair_stats_kernel, constants, pointers, plan.tile


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_LARGE = (1 << 20, 1 << 20)  # rows and columns beyond which plans are the same
_SPECS = {
    "logprob": RowSpec(1),
    "logprob, entropy": RowSpec(1, entropy=True),
    "softcap": RowSpec(1, softcap=30.0),
}
_STATISTICS = ("default", "stages2", "stages3", "prefetch")
_GRADIENT = ("default", "tile2k", "tile8k")
# (kernel, what of `_SPECS`, logits, what is written, candidates besides softcap's "ratio")
_CASES = [
    (kernel, what, logits, out, candidates)
    for kernel, logits, out, candidates in (
        ("statistics", "bf16", "fp32", _STATISTICS),
        ("statistics", "fp32", "fp32", _STATISTICS),
        ("gradient", "bf16", "bf16", _GRADIENT),
        ("gradient", "fp32", "bf16", _GRADIENT),
        ("results gradient", "bf16", "bf16", ("default",)),
    )
    for what in _SPECS
] + [
    (f"pair {step} {kind}", what, "bf16", out, ("default",))
    for kind in ("forward", "reverse", "cross_entropy", "jsd")
    for step, out in (("statistics", "fp32"), ("sums", "fp32"), ("gradient", "bf16"))
    if step != "sums" or kind == "jsd"
    for what in ("logprob", "softcap")
]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mcore_logprobs bench ahead",
        description="Instructions, registers, spills and loads in flight of the Triton kernels, "
        "compiled ahead for sm_90; needs no GPU. An element is a column, of both sides where there "
        "are two (pair).",
    )
    parser.add_argument("--kernel", default="", help="only those whose name contains this")
    args = parser.parse_args(argv)
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("triton", "torch"))
    print(f"{time.strftime('%Y-%m-%d')}, {', '.join(versions)}, sm_90")
    print(
        f"{'kernel':29} {'what':16} {'dtypes':10} {'candidate':9} {'instr/elem':>10} {'regs':>4} "
        f"{'spills':>6} {'16-byte ld':>10} {'st':>2} {'in flight':>9} {'covered':>7}"
    )
    for name, what, logits, out, candidates in _CASES:
        if args.kernel not in name:
            continue
        spec = _SPECS[what]
        for names in (*candidates, "ratio") if spec.softcap is not None else candidates:
            *arguments, tile = kernel_arguments(name, spec, logits, out, names)
            built = build(*arguments)
            share = len(built.loop) * 4 * _THREADS / tile
            dtypes = f"{logits}>{out}" if "gradient" in name else logits
            print(
                f"{name:29} {what:16} {dtypes:10} {names:9} {share:10.1f} {built.registers:4} "
                f"{built.spills:6} {built.wide('LDG'):10} {built.wide('STG'):2} "
                f"{built.loads_in_flight:9} {built.covered:7.0%}",
                flush=True,
            )
    return 0
