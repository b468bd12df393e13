"""What compiled kernels share: which chunks have one, and how and when one is compiled.

A kernel is a plain function of tensors and flags whose first line is `assert_compiled`. Sizes stay
symbolic, so that one compilation (seconds; more in the first one of a process) serves every
number of rows and columns, and inductor's cache on disk gives later processes most of it back.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mcore_logprobs.kernels.chunk import Chunk

logger = logging.getLogger("mcore_logprobs")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Columns per block: 8 KiB of float32, well within a first-level cache.
BLOCK = 2048
MIN_BLOCKS = 2  # torch.compile makes a kernel of its own for a size of 1


def is_common(chunk: Chunk) -> bool:
    """Whether there are kernels for a chunk that is processed so."""
    # A fake tensor has no bits, and nothing to compile for.
    return (
        chunk.logits.dtype in DTYPES
        and chunk.processing.softcap is None
        and chunk.processing.bias is None
        and not isinstance(chunk.logits, FakeTensor)
    )


def row_multipliers(chunk: Chunk) -> Tensor:
    """Each row's multiplier, `[n]`: torch.compile would make a kernel for each float."""
    multiplier, shape = chunk.processing.multiplier, chunk.logits.shape[:1]
    if isinstance(multiplier, Tensor):
        return multiplier.float()
    return torch.full(shape, multiplier, dtype=torch.float32, device=chunk.logits.device)


# ---- compilation: when, once, and what to do where it fails ------------------------------------


class NotCompiled(Exception):
    """This call cannot go through a compiled kernel; nothing has been written yet."""


def assert_compiled() -> None:
    """First line of every kernel: refuse to run eagerly, which would make float32 copies of all.

    torch.compile runs the plain function where it is switched off (TORCHDYNAMO_DISABLE, a stance,
    an enclosing `torch.compiler.disable`), without any warning.
    """
    if not torch.compiler.is_dynamo_compiling():
        raise NotCompiled("torch.compile is switched off")


_lock = threading.RLock()
_kernels: dict[tuple[object, ...], Callable[..., object]] = {}
_warm: set[tuple[object, ...]] = set()
# What failed, by kind; a kind that failed is not tried again, the others are.
_failures: dict[tuple[object, ...], str] = {}
# As many kinds failed and none compiled: the compiler itself is at fault.
_HOPELESS = 3


def call_compiled(function: Callable[..., object], *args: Tensor | bool | str) -> Any:
    """`function(*args)`, compiled at the first call with tensors and flags of this kind.

    Raises:
        NotCompiled: compilation failed, here or earlier (logged once a kind), or a dispatch mode is
            active, within which torch compiles nothing.
    """
    if _get_current_dispatch_mode() is not None:
        raise NotCompiled("a TorchDispatchMode is active")
    key = (function, *(_kind(arg) for arg in args))
    if key in _failures:
        raise NotCompiled(_failures[key])
    # A view's kernel is compiled for the shape of its base, and another for what is no view.
    args = tuple(arg.data if isinstance(arg, Tensor) else arg for arg in args)
    try:
        return _call(key, function, args)
    except NotCompiled:
        raise
    except Exception as error:  # whatever a compiler, a full disk or a missing header brings about
        failure = f"compilation failed: {type(error).__name__}: {_first_line(error)}"
        _failures[key] = failure
        name = function.__name__.strip("_")
        logger.warning("inductor backend: %s: %s; the torch backend takes over", name, failure)
        raise NotCompiled(failure) from error


def _call(
    key: tuple[object, ...], function: Callable[..., object], args: tuple[object, ...]
) -> object:
    state = (key, torch.get_num_threads(), torch.is_inference_mode_enabled())
    kernel = _kernels.get(key)
    # A default device is a mode that sees every operation, which torch.compile cannot trace.
    try:
        if kernel is not None and state in _warm:
            with torch._C.DisableTorchFunction():
                return kernel(*args)
        # torch's compiler configuration is not all thread-safe
        with _lock, torch._C.DisableTorchFunction(), _floats_as_constants():
            result = _kernels.setdefault(key, _compile(function))(*args)
            _warm.add(state)
            return result
    except _no_room():
        logger.warning(
            "inductor backend: %s: compiled once more, as torch keeps few variants for its global "
            "settings (number of threads, determinism, precision of matmuls)",
            function.__name__.strip("_"),
        )
        with _lock:
            _kernels.pop(key, None)
            _warm.difference_update([other for other in _warm if other[0] == key])
        return _call(key, function, args)


def _floats_as_constants() -> AbstractContextManager[object]:
    """As a symbol, torch's choice, a module's float makes it trace a kernel twice (2.13)."""
    # Here, not at the top: a second of imports that only compilation needs.
    from torch._dynamo import config

    return config.patch(specialize_float=True)


def _no_room() -> tuple[type[Exception], ...]:
    """What torch raises where a code object has no room for a further variant."""
    # Here, not at the top: a second of imports that only compilation needs.
    from torch._dynamo import exc

    names = ("FailOnRecompileLimitHit", "FailOnCacheLimitHit")  # now, and in older releases
    return tuple(getattr(exc, name) for name in names if hasattr(exc, name))


def _kind(arg: Tensor | bool | str) -> object:
    return (arg.dtype, arg.is_contiguous()) if isinstance(arg, Tensor) else arg


def _compile(function: Callable[..., object]) -> Callable[..., object]:
    # torch counts variants by code object, up to a small limit: each kind gets its own.
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return torch.compile(copy, dynamic=True, fullgraph=True, options=_options())


def _options() -> dict[str, Any]:
    """The width of the CPU's vectors, for the key of inductor's cache; and one pass.

    The cache on disk does not tell CPUs apart: what another wrote for wider vectors (a home that
    machines share, `ATEN_CPU_CAPABILITY`) is read, and does not compile or gives other numbers.

    By itself inductor writes a long expression, or one with several readers, to memory. Kernels
    here are written so that their loops are fused, and then nothing is computed twice.
    """
    return {
        "cpp.simdlen": vector_bits(),
        "realize_opcount_threshold": 1000,
        "realize_reads_threshold": 1000,
    }


def vector_bits() -> int:
    """Bits of the vectors that inductor makes code for here; 0: it makes none with vectors."""
    # Here, not at the top: a second of imports that only compilation needs.
    try:
        from torch._inductor.cpu_vec_isa import pick_vec_isa
    except ImportError:  # torch 2.4
        from torch._inductor.codecache import pick_vec_isa
    return int(pick_vec_isa().bit_width())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def obstacle() -> str | None:
    """Why nothing can be compiled here, or None."""
    if len(_failures) >= _HOPELESS and not _warm:
        return next(iter(_failures.values()))
    if compiler() is None:
        return f"no C++ compiler found: torch looks for {_compiler_name()!r}"
    if (
        os.environ.get("TORCHDYNAMO_DISABLE") == "1"
        or os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    ):
        return "torch.compile is switched off by the environment"
    return None


@cache
def compiler() -> str | None:
    """The C++ compiler that inductor will find, or None."""
    name = _compiler_name()
    return name if shutil.which(name) else None


def _compiler_name() -> str:
    """As `torch._inductor.config.cpp.cxx` has it, which takes seconds to import."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


# ---- a gradient over its logits, or next to them ------------------------------------------------


def write_gradient(
    call: Callable[..., object],
    values: Callable[..., Tensor],
    logits: Tensor,
    out: Tensor,
    *factors: Tensor | bool | str,
) -> None:
    """Write `values(logits, *factors)` into out, in one pass; both `[n, v]`.

    Args:
        call: `call_compiled`, or what stands for it.
        values: named `..._values`; elementwise in logits, which out may be.

    Raises:
        NotCompiled: out lies otherwise in the logits' own memory, or in a factor's.
    """
    kernel, in_place_kernel = _writers(values)
    if any(isinstance(x, Tensor) and _share_memory(x, out) for x in factors):
        raise NotCompiled("the gradient is written over what it is made of")
    if _same_memory(logits, out):
        call(in_place_kernel, out, *factors)
    elif _share_memory(logits, out):
        raise NotCompiled("the gradient's layout differs from the logits' in the same memory")
    else:
        call(kernel, logits, out, *factors)


@cache
def _writers(values: Callable[..., Tensor]) -> tuple[Callable[..., None], Callable[..., None]]:
    """(into out, over the logits)."""

    def kernel(logits: Tensor, out: Tensor, *factors: object) -> None:
        assert_compiled()
        out.copy_(values(logits, *factors))

    def in_place_kernel(logits: Tensor, *factors: object) -> None:
        assert_compiled()
        logits.copy_(values(logits, *factors))

    name = values.__name__.strip("_").removesuffix("values")  # a failure is logged by it
    kernel.__name__, in_place_kernel.__name__ = f"{name}kernel", f"{name}in_place_kernel"
    return kernel, in_place_kernel


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
