"""Large CPU tensors in huge pages.

The C library hands a large tensor out as untouched pages, and the first write of each 4 KiB costs a
page fault: six times what writing it costs, and more than computing a gradient. Linux backs memory
with 2 MiB pages where a program says so (`madvise`), and then faults hardly show. A process started
with THP_MEM_ALLOC_ENABLE=1 gets the same from torch for all of its tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_MIN_BYTES = 8 << 20
_MADV_HUGEPAGE = 14  # Linux


def prefer_huge_pages(fresh: Tensor) -> Tensor:
    """The same tensor, its memory marked for huge pages if it is large and on a Linux CPU.

    Args:
        fresh: just made and not yet written to; every byte of it is going to be written, so that
            whole pages cost no memory.
    """
    # Only plain tensors have memory: fake ones, for one, have not.
    if type(fresh) is not Tensor or fresh.device.type != "cpu" or torch.compiler.is_compiling():
        return fresh
    storage = fresh.untyped_storage()
    advise = _madvise()
    if advise is not None and storage.nbytes() >= _MIN_BYTES:
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(start, stop - start, _MADV_HUGEPAGE)  # a hint: nothing is lost if it is refused
    return fresh


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
