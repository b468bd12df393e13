"""Launches of a kernel in half the host time of Triton's own launcher.

`kernel[grid](...)` looks at all of its arguments, forty of them for our kernels, by name: 12 us a
launch, ours 6. Which compiled kernel it takes depends on little of that, and that one can be
launched by itself. Where it is not known yet, Triton looks it up, or compiles it.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from mcore_logprobs.kernels.triton_common import INTERPRETED

__all__ = ["FUSE", "Launcher"]

# The compiler's `enable_fp_fusion` at every launch: a * b + c in one instruction and one rounding.
# Triton's default is on up to 3.9 and off from 3.10, and a process can set it either way.
FUSE = True

# The interpreter compiles nothing. On AMD's GPUs a tensor's size decides too.
_DIRECT = not INTERPRETED and torch.version.hip is None
# Compiled kernels that a launcher remembers; shapes decide little, so that a run needs a few.
_MOST = 1024
# What asks for other machine code of the same kernel, where Triton has it: a profiler.
_KNOBS = getattr(getattr(triton, "knobs", None), "compilation", None)


class Launcher:
    """Launches of one kernel.

    What decides is what Triton's documentation calls specialization: of a tensor its dtype and
    whether it starts at a multiple of 16 bytes, of a whole number whether it is 1, divisible by 16
    and within 32 bits (within 32 bits alone for those in the kernel's `do_not_specialize`), and the
    value of a constant. Kernels with a hook or instrumented ones are Triton's own affair; its other
    knobs (debug) are read at the first launch of a compiled kernel, and hold for the later ones.

    Args:
        kernel: of `triton.jit`; its parameters are tensors, then whole numbers, then others.
        options: of the compiler, for every launch.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel = kernel
        self._options = {**options, "enable_fp_fusion": FUSE}
        self._compiled: dict[Any, Any] = {}
        self._specialized = [not p.do_not_specialize for p in kernel.params] if _DIRECT else []

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[int | None, ...],
        constants: tuple[Any, ...],
        *,
        num_warps: int = 4,
    ) -> None:
        """Launch on the current device, which is that of the tensors.

        Args:
            tensors: the kernel's first arguments, the first of them no None.
            numbers: the next ones, whole numbers that change from call to call.
            constants: the others: `tl.constexpr` or not, one type in each place.
        """
        if not _DIRECT:
            self._looked_up(grid, (*tensors, *numbers, *constants), num_warps)
            return
        key = (
            tensors[0].get_device(),  # type: ignore[union-attr]
            tuple([x if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors]),
            self._kinds(len(tensors), numbers),
            constants,
            num_warps,
        )
        compiled = self._compiled.get(key)
        asked = self.kernel.pre_run_hooks or getattr(_KNOBS, "instrumentation_mode", "")
        if compiled is not None and not asked:
            compiled[grid](*tensors, *numbers, *constants)
            return
        compiled = self._looked_up(grid, (*tensors, *numbers, *constants), num_warps)
        # In Triton's asynchronous mode it is a promise of one.
        if isinstance(compiled, CompiledKernel) and not asked:
            if len(self._compiled) >= _MOST:
                self._compiled.clear()
            self._compiled[key] = compiled

    def _kinds(self, first: int, numbers: tuple[int | None, ...]) -> tuple[Any, ...]:
        return tuple(
            [
                n
                if n is None
                else (
                    (n == 1, n % 16 == 0, -(2**31) <= n < 2**31)
                    if special
                    else -(2**31) <= n < 2**31
                )
                for n, special in zip(numbers, self._specialized[first:], strict=False)
            ]
        )

    def _looked_up(self, grid: tuple[int, ...], arguments: tuple[Any, ...], num_warps: int) -> Any:
        """Launch by Triton's own launcher; the compiled kernel, or None of the interpreter."""
        return self.kernel[grid](*arguments, num_warps=num_warps, **self._options)
