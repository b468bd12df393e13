"""What the compiler makes of the kernels for a Hopper GPU: `python -m benchmarks.ahead`.

`--target sm_100` reads them for a Blackwell GPU. Taken from the launches themselves, on any machine
with Triton 3.3 to 3.9 (`launches.dry_launches`), and read
from the machine code: instructions an element in the loop over whole tiles, registers, spills, how
many loads are under way at once, in what share of the loop one is, and how many accesses of under
16 bytes there are in all (a row's own numbers, and its last columns). A read of two bytes leaves a
multiprocessor of an H200 time for 15.6 instructions (a read and a write for 31.2): a kernel below
that is bound by memory, provided that its loads are under way early enough or other warps fill the
time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.launches import NVIDIA_TARGETS, dry_launches
from mcore_logprobs.kernels.chunk import Chunk, Processing
from mcore_logprobs.kernels.pairs import KINDS, PairSpec
from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec

_THREADS, _WARPS = 32, 4
_SHARED = 228 * 1024  # bytes of shared memory of a multiprocessor
_WIDE = r"\.(128|256)\b"  # bits of an access of 16 bytes or more


@dataclass(frozen=True)
class Built:
    """A kernel's machine code for one target.

    Attributes:
        code: the machine's instructions in order, without addresses.
        loop: those of the loop over whole tiles.
        registers: a thread's.
        shared: bytes of shared memory, a block's.
    """

    code: tuple[str, ...]
    loop: tuple[str, ...]
    registers: int
    shared: int = 0

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return sum(bool(re.match(r"(@!?U?P\d+ )?(STL|LDL)\b", line)) for line in self.code)

    @property
    def blocks(self) -> int:
        """Blocks of `_WARPS` warps that a multiprocessor holds: by registers, shared memory."""
        of_a_warp = -(-self.registers // 8) * 8 * _THREADS
        by_shared = _SHARED // (self.shared + 1024)  # 1 KiB of each block is the system's
        return min(64 // _WARPS, 65536 // (of_a_warp * _WARPS), by_shared)

    def wide(self, direction: str) -> int:
        """16-byte accesses of global memory in the loop: "LD" (or copies to shared), "ST"."""
        names = {"LD": r"\b(?:LDG|LDGSTS)\.E\.\S*(128|256)", "ST": r"\bSTG\.E\.\S*(128|256)"}
        found = (re.search(names[direction], line) for line in self.loop)
        return sum(int(f[1]) // 128 for f in found if f)  # sm_100 has some of 32 bytes: two

    def narrow(self, direction: str) -> int:
        """Likewise, how many there are of under 16 bytes."""
        operations = {"LD": r"\bLDG(STS)?\b", "ST": r"\bSTG\b"}[direction]
        lines = (line for line in self.loop if re.search(operations, line))
        return sum(not re.search(_WIDE, line) for line in lines)

    @property
    def narrow_anywhere(self) -> tuple[int, int]:
        """(loads, stores) of under 16 bytes in all of the code, a row's own numbers among them."""
        found = [re.search(r"\b(LDG|LDGSTS|STG)\.\S+", line) for line in self.code]
        names = [f[1] for f in found if f and not re.search(_WIDE, f[0])]
        return len(names) - names.count("STG"), names.count("STG")

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
                sizes = {".256": 8, ".128": 4, ".64": 2}
                size = next((n for bits, n in sizes.items() if bits in line), 1)
                waiting.append({f"R{first + i}" for i in range(size)})
            else:
                waiting = [registers for registers in waiting if not registers & operands]
            counts.append(len(waiting))
        return counts[len(self.loop) :]


def launched_code(call: Callable[[], object], target: str = "sm_90") -> list[tuple[str, Built]]:
    """(name, machine code) of each kernel that a call on CPU tensors would launch on a GPU."""
    with dry_launches(target) as launched:
        call()
        found = list(launched.binaries)
    return [(name, replace(read_code(binary), shared=shared)) for name, binary, shared in found]


@cache
def _cuobjdump() -> str:
    import triton

    if hasattr(triton, "knobs"):
        return str(triton.knobs.nvidia.cuobjdump.path)
    from triton.tools.disasm import path_to_cuobjdump  # Triton 3.3

    return str(path_to_cuobjdump()[0])


@cache
def read_code(binary: bytes) -> Built:
    """What a cubin holds."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "kernel.cubin")
        path.write_bytes(binary)
        resources, text = (
            subprocess.run(
                [_cuobjdump(), what, str(path)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for what in ("-res-usage", "-sass")
        )
    registers = int(re.findall(r"REG:(\d+)", resources)[-1])
    addressed = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)
    code = [(int(address, 16), line) for address, line in addressed]
    return Built(tuple(line for _, line in code), _hot_loop(code), registers)


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


@dataclass(frozen=True)
class Case:
    """A call that launches one kernel.

    Attributes:
        name: of what the kernel makes; of which quantities; of which dtypes.
        sides: sides of logits that it reads.
        size: bytes of a logit.
    """

    name: str
    what: str
    dtypes: str
    call: Callable[[], object]
    sides: int = 1
    size: int = 2

    @property
    def built(self) -> Built:
        return self.built_for("sm_90")

    def built_for(self, target: str) -> Built:
        ((_, built),) = launched_code(self.call, target)
        return built

    def instructions(self, built: Built) -> float:
        """An element's; one is a column, of both sides where there are two."""
        elements = built.wide("LD") * 16 // self.size * _THREADS * _WARPS / self.sides
        return len(built.loop) * _THREADS * _WARPS / elements if elements else float("inf")


_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_WANTED: dict[str, tuple[StatsSpec, dict[str, Any]]] = {
    "logprob": (StatsSpec(), {}),
    "logprob, entropy": (StatsSpec(entropy=True), {}),
    "softcap": (StatsSpec(), {"softcap": 30.0}),
}
_ROWS = 16  # how many, and over how many programs they are spread, compiles nothing else


def cases(width: int, valid: int | None = None) -> Iterator[Case]:
    """The kernels on logits of `width` columns, of which `valid` (None: all) are vocabulary."""
    from mcore_logprobs.kernels import triton

    valid = width if valid is None else valid
    target = torch.zeros(_ROWS, 1, dtype=torch.int64)
    per_row = torch.zeros(4, _ROWS)
    row = per_row[0]
    call: Callable[[], object]

    def logits(dtype: str) -> torch.Tensor:
        return torch.empty(_ROWS, width, dtype=_DTYPES[dtype])

    for what, (spec, how) in _WANTED.items():
        for dtype in _DTYPES:
            chunk = Chunk(logits(dtype), valid, Processing.of(**how))
            call = partial(triton.stats, chunk, target[:, 0], spec)
            yield Case("statistics", what, dtype, call, size=_DTYPES[dtype].itemsize)
        for dtype, out in (("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32")):
            chunk = Chunk(logits(dtype), valid, Processing.of(**how))
            coef = per_row[: len(spec.coefficients)]
            terms = GradientTerms(target, row.unsqueeze(1), row, coef, spec)
            call = partial(triton.grad, chunk, terms, out=logits(out))
            yield Case("gradient", what, f"{dtype}>{out}", call, size=_DTYPES[dtype].itemsize)
    for kind in KINDS:
        pair = PairSpec(kind)
        for what in ("logprob", "softcap"):
            both = Processing.of(**_WANTED[what][1])
            s, t = (Chunk(logits("bf16"), valid, both) for _ in range(2))
            write: Any = (s, t, per_row, row, row, pair)
            steps: dict[str, Callable[[], object]] = {
                "statistics": partial(triton.pair_stats, s, t, pair),
                "sums": partial(triton.pair_sums, s, t, per_row, pair),
                "gradient": partial(triton.pair_grad, *write, out=logits("bf16")),
            }
            for step, call in steps.items():
                if step != "sums" or kind == "jsd":
                    yield Case(f"pair {step} {kind}", what, "bf16", call, sides=2)


def asked_cases(
    argv: Sequence[str] | None, *, name: str, what: str, targets: Sequence[str]
) -> tuple[list[Case], str]:
    """(the cases that a command line asks for, the target); prints what they are compiled with."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=f"{what} of the Triton kernels that calls launch, as compiled; needs no GPU.",
    )
    parser.add_argument("--kernel", default="", help="only those whose name contains this")
    parser.add_argument("--width", type=int, default=19008, help="columns, V/TP")
    parser.add_argument("--valid", type=int, help="columns that are true vocabulary")
    parser.add_argument("--target", choices=targets, default=targets[0], help="what to compile for")
    args = parser.parse_args(argv)
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("triton", "torch"))
    print(f"{time.strftime('%Y-%m-%d')}, {', '.join(versions)}, {args.target}")
    found = [case for case in cases(args.width, args.valid) if args.kernel in case.name]
    return found, args.target


def main(argv: Sequence[str] | None = None) -> int:
    found, target = asked_cases(
        argv,
        name="ahead",
        what="Instructions an element (a column, of both sides where there are two), registers, "
        "spills and loads in flight",
        targets=NVIDIA_TARGETS,
    )
    print(
        f"{'kernel':29} {'what':16} {'dtypes':10} {'instr/elem':>10} {'regs':>4} {'blocks':>6} "
        f"{'spills':>6} {'16-byte ld':>10} {'st':>2} {'in flight':>9} {'covered':>7} "
        f"{'narrow ld':>9} {'st':>2}"
    )
    for case in found:
        built = case.built_for(target)
        print(
            f"{case.name:29} {case.what:16} {case.dtypes:10} {case.instructions(built):10.1f} "
            f"{built.registers:4} {built.blocks:6} {built.spills:6} {built.wide('LD'):10} "
            f"{built.wide('ST'):2} {built.loads_in_flight:9} {built.covered:7.0%} "
            "{:9} {:2}".format(*built.narrow_anywhere),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
