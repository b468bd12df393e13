"""What the compiler makes of the kernels for an AMD GPU: `python -m benchmarks.amd`.

Triton's own compiler for AMD comes in its wheels, so that this runs on any machine. What is read
are the launches themselves (`launches.dry_launches`): registers of a thread, what spills, and how
wide its accesses of global memory are. A kernel here is bound by memory, so that these decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.ahead import asked_cases
from benchmarks.launches import AMD_TARGETS, dry_launches


@dataclass(frozen=True)
class Assembly:
    """A kernel's assembly."""

    text: str

    @property
    def registers(self) -> int:
        """Vector registers of a thread: up to 128 of them, a processor holds 16 warps of 64."""
        return self._number("vgpr_count")

    @property
    def spills(self) -> int:
        """Vector registers that are kept in memory, and bytes of a thread's own memory."""
        return self._number("vgpr_spill_count") + self._number("private_segment_fixed_size")

    def accesses(self, direction: str) -> dict[int, int]:
        """How many accesses of global memory there are, by their bytes: "load" or "store"."""
        found: dict[int, int] = {}
        sizes = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "byte": 1}
        for width in re.findall(rf"\b(?:global|buffer)_{direction}_(\w+)", self.text):
            size = next(size for name, size in sizes.items() if name in width)
            found[size] = found.get(size, 0) + 1
        return found

    def _number(self, name: str) -> int:
        found = re.findall(rf"^\s*-?\s*\.{name}:\s*(\d+)", self.text, re.M)
        (number,) = found  # one kernel in each assembly
        return int(number)


def assembled(call: Callable[[], object], target: str) -> list[tuple[str, Assembly]]:
    """(name, assembly) of each kernel that a call on CPU tensors would launch on an AMD GPU."""
    with dry_launches(target) as launched:
        call()
        found = list(launched.binaries)
    return [(name, Assembly(code.decode())) for name, code, _ in found]


def main(argv: Sequence[str] | None = None) -> int:
    what = "Registers, spills and widths of memory accesses, on an AMD GPU,"
    found, target = asked_cases(argv, name="amd", what=what, targets=AMD_TARGETS)
    print(f"{'kernel':29} {'what':16} {'dtypes':10} {'regs':>4} {'spills':>6}  loads; stores")
    for case in found:
        ((_, built),) = assembled(case.call, target)
        words = (
            ", ".join(f"{count} of {size}" for size, count in sorted(widths.items(), reverse=True))
            for widths in map(built.accesses, ("load", "store"))
        )
        print(
            f"{case.name:29} {case.what:16} {case.dtypes:10} {built.registers:4} {built.spills:6}"
            f"  {'; '.join(words)}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
