"""The inductor backend: the reference's functions for a CPU, compiled.

The logits are read from memory once, forward and backward; nothing of their size is made, so that
`chunk_size` has no meaning here. Forward walks the vocabulary in blocks that stay in the
first-level cache while maximum and sums are taken, and merges them as shards are merged: sums of
2048 terms at a time also round less than the sum of a whole row.

Compiled are float32, bfloat16 and float16 logits with any temperature, scale, row stride, entropy
and rank. What is rare (softcap, bias, label smoothing, one row, under two blocks of columns) and
the columns past the last whole block go to the reference.

A kernel is a plain function of tensors and flags. Sizes stay symbolic, so that one compilation
(about a second; a few in the first one of a process) serves every number of rows and columns, and
inductor's cache on disk gives later processes most of it back.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels.reference import (
    block_stats,
    entries_grad,
    gather_target,
    row_multiplier,
)
from mcore_logprobs.kernels.stats import LOG_ZERO, RowSpec, merge

__all__ = [
    "BLOCK",
    "DTYPES",
    "MIN_NUMEL",
    "NotCompiled",
    "assert_compiled",
    "block_stats",
    "block_values",
    "call_compiled",
    "compiled_gradient",
    "compiler",
    "count_higher",
    "entries_grad",
    "grad_logits",
    "obstacle",
    "row_multipliers",
    "row_stats",
    "stats_kernel",
]

logger = logging.getLogger("mcore_logprobs")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Logits from which on `auto` takes this backend: eager passes over fewer take milliseconds.
MIN_NUMEL = 1 << 21

# Columns a block: 8 KiB of float32, well within a first-level cache.
BLOCK = 2048
_MIN_BLOCKS = 2  # torch.compile makes a kernel of its own for a size of 1


def row_stats(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    *,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
    chunk_size: int,
) -> Tensor:
    """As `reference.row_stats`."""
    blocks = spec.valid // BLOCK
    if blocks >= _MIN_BLOCKS and _is_common(logits, spec, bias):
        try:
            return _row_stats(logits, target, spec, threshold, temperature, chunk_size)
        except NotCompiled:
            pass
    return reference.row_stats(
        logits,
        target,
        spec,
        bias=bias,
        threshold=threshold,
        temperature=temperature,
        chunk_size=chunk_size,
    )


def count_higher(
    logits: Tensor, target: Tensor, threshold: Tensor, *, valid: int, chunk_size: int
) -> Tensor:
    """As `reference.count_higher`."""
    whole = valid - valid % BLOCK
    if whole >= _MIN_BLOCKS * BLOCK and _is_common(logits, None, None):
        limit = threshold.to(logits.dtype)
        try:
            higher = call_compiled(_count_kernel, logits[:, :whole], limit).sum(-1).long()
        except NotCompiled:
            pass
        else:
            higher -= (gather_target(logits, target, -torch.inf) > limit).long()
            if whole < valid:
                higher += (logits[:, whole:valid] > limit.unsqueeze(-1)).sum(-1)
            return higher
    return reference.count_higher(logits, target, threshold, valid=valid, chunk_size=chunk_size)


def grad_logits(
    logits: Tensor,
    target: Tensor,
    shift: Tensor,
    coef: Tensor,
    spec: RowSpec,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    out: Tensor,
    chunk_size: int,
) -> None:
    """As `reference.grad_logits`."""
    if spec.valid >= _MIN_BLOCKS * BLOCK and _is_common(logits, spec, bias):
        try:
            compiled_gradient(
                logits, target, shift, coef, spec, temperature, out, call=call_compiled
            )
            return
        except NotCompiled:
            pass
    reference.grad_logits(
        logits,
        target,
        shift,
        coef,
        spec,
        bias=bias,
        temperature=temperature,
        out=out,
        chunk_size=chunk_size,
    )


def _is_common(logits: Tensor, spec: RowSpec | None, bias: Tensor | None) -> bool:
    return (
        logits.shape[0] > 1
        and logits.dtype in DTYPES
        and logits.stride(-1) == 1
        and bias is None
        and (spec is None or (spec.softcap is None and not spec.smoothing))
    )


def _row_stats(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    threshold: Tensor | None,
    temperature: Tensor | None,
    chunk_size: int,
) -> Tensor:
    whole = spec.valid - spec.valid % BLOCK
    multiplier = row_multipliers(logits, spec, temperature)
    head = logits[:, :whole]
    block_stats = call_compiled(stats_kernel, head, multiplier, spec.entropy, spec.sum_pi_squared)
    count = whole // BLOCK
    parts = logits.new_zeros(
        count + (whole < spec.valid), len(spec.fields), logits.shape[0], dtype=torch.float32
    )
    head_parts = parts[:count]
    head_target = torch.where(target < whole, target, -1)
    for name, values in block_stats.items():
        head_parts[:, spec.position(name)] = values.t()
    own = gather_target(head, head_target, 0.0).float() * multiplier
    parts[0, spec.position("target")] = own
    if spec.rank:
        assert threshold is not None
        limit = threshold.to(logits.dtype)
        higher = spec.position("higher")
        head_parts[:, higher] = call_compiled(_count_kernel, head, limit).t()
        parts[0, higher] -= (gather_target(head, head_target, -torch.inf) > limit).float()
    if whole < spec.valid:
        parts[-1] = reference.row_stats(
            logits[:, whole : spec.valid],
            torch.where(target >= whole, target - whole, -1),
            replace(spec, valid=spec.valid - whole),
            threshold=threshold,
            temperature=temperature,
            chunk_size=chunk_size,
        )
    return merge(parts, spec)


def compiled_gradient(
    logits: Tensor,
    target: Tensor,
    shift: Tensor,
    coef: Tensor,
    spec: RowSpec,
    temperature: Tensor | None,
    out: Tensor,
    *,
    call: Callable[..., Any],
) -> None:
    """`grad_logits` of at least two rows without bias, softcap or label smoothing.

    Args:
        call: `call_compiled`, or what stands around it.
    """
    multiplier = row_multipliers(logits, spec, temperature)
    scaled = (coef * multiplier).unbind(0)
    row = dict(zip(spec.coefficients, scaled, strict=True))
    alive = (coef != 0).any(0)
    # The target's entry is computed apart, from the logit before anything is written over it, and
    # rounded once: near p = 1 it is the difference of two nearly equal numbers.
    column = target.clamp(min=0)
    rows = torch.arange(target.shape[0], device=logits.device)
    shifted = logits[rows, column].float() * multiplier - shift
    shifted.clamp_(min=LOG_ZERO)
    own = shifted.exp()
    factor = row["weight"]
    if spec.entropy:
        factor = factor + row["moment"] * shifted
    if spec.sum_pi_squared:
        factor = factor + row["squares"] * own
    own = own * factor
    own = torch.where(alive, own + row["target"], 0.0).to(out.dtype)

    source, result = logits[:, : spec.valid], out[:, : spec.valid]
    # A coefficient that is not there is not read: any other stands in its place.
    squares = row.get("squares", row["weight"])
    coefficients = (row["weight"], row["moment"], squares)
    flags = (spec.entropy, spec.sum_pi_squared)
    factors = (multiplier, shift, *coefficients, alive, *flags)
    if _same_memory(source, result):
        call(_grad_inplace_kernel, result, *factors)
    elif source.untyped_storage().data_ptr() == result.untyped_storage().data_ptr():
        raise NotCompiled("the gradient's layout differs from the logits' in the same memory")
    else:
        call(_grad_kernel, source, result, *factors)
    out[:, spec.valid :] = 0
    # Where the target is elsewhere the kernel's own value stays: an eager exp may round otherwise.
    out[rows, column] = torch.where(target >= 0, own, out[rows, column])


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def row_multipliers(logits: Tensor, spec: RowSpec, temperature: Tensor | None) -> Tensor:
    """z / y of each row, `[n]`: a tensor, for torch.compile would make a kernel for each float."""
    if temperature is None:
        return torch.full(
            (logits.shape[0],), spec.multiplier, dtype=torch.float32, device=logits.device
        )
    return row_multiplier(spec, temperature).float()


# ---- kernels: what torch.compile sees -----------------------------------------------------------


def stats_kernel(
    logits: Tensor, multiplier: Tensor, entropy: bool, squares: bool
) -> dict[str, Tensor]:
    """`[n, blocks * BLOCK]` -> each block's statistics by name, `[n, blocks]`."""
    assert_compiled()
    blocks = logits.unflatten(1, (logits.shape[1] // BLOCK, BLOCK))
    return block_values(blocks, multiplier, entropy, squares)


def block_values(
    logits: Tensor, multiplier: Tensor, entropy: bool, squares: bool
) -> dict[str, Tensor]:
    """Part of a kernel: `[n, blocks, block]` -> each block's statistics by name, `[n, blocks]`."""
    z = logits.float() * multiplier[:, None, None]
    top = z.amax(-1)
    # Apart: stacked, the maximum's loop and the sum's would not be fused.
    shifted = z - torch.where(top == -torch.inf, 0.0, top).unsqueeze(-1)
    if entropy:
        shifted = shifted.clamp(min=LOG_ZERO)
    weight = shifted.exp()
    found = {"max": top, "sum": weight.sum(-1)}
    if entropy:
        found["entropy"] = (weight * shifted).sum(-1)
    if squares:
        found["squares"] = (weight * weight).sum(-1)
    return found


def _count_kernel(logits: Tensor, limit: Tensor) -> Tensor:
    """`[n, blocks * BLOCK]`, `[n]` -> how many of each block are higher, `[n, blocks]` float32."""
    assert_compiled()
    blocks = logits.unflatten(1, (logits.shape[1] // BLOCK, BLOCK))
    # float32 holds every count of a block, and is summed faster than int64.
    return torch.where(blocks > limit[:, None, None], 1.0, 0.0).sum(-1)


def _grad_values(
    logits: Tensor,
    multiplier: Tensor,
    shift: Tensor,
    weight: Tensor,
    moment: Tensor,
    squares: Tensor,
    alive: Tensor,
    with_entropy: bool,
    with_squares: bool,
) -> Tensor:
    shifted = logits.float() * multiplier[:, None] - shift[:, None]
    factor = weight[:, None]
    if with_entropy:
        shifted = shifted.clamp(min=LOG_ZERO)
        factor = factor + moment[:, None] * shifted
    w = shifted.exp()
    if with_squares:
        factor = factor + squares[:, None] * w
    return torch.where(alive[:, None], w * factor, 0.0)


def _grad_kernel(
    logits: Tensor,
    out: Tensor,
    multiplier: Tensor,
    shift: Tensor,
    weight: Tensor,
    moment: Tensor,
    squares: Tensor,
    alive: Tensor,
    with_entropy: bool,
    with_squares: bool,
) -> None:
    """`[n, v]` -> the gradient without the target's own term, into out `[n, v]`."""
    assert_compiled()
    out.copy_(
        _grad_values(
            logits,
            multiplier,
            shift,
            weight,
            moment,
            squares,
            alive,
            with_entropy,
            with_squares,
        )
    )


def _grad_inplace_kernel(
    logits: Tensor,
    multiplier: Tensor,
    shift: Tensor,
    weight: Tensor,
    moment: Tensor,
    squares: Tensor,
    alive: Tensor,
    with_entropy: bool,
    with_squares: bool,
) -> None:
    """As `_grad_kernel`, over the logits."""
    assert_compiled()
    logits.copy_(
        _grad_values(
            logits,
            multiplier,
            shift,
            weight,
            moment,
            squares,
            alive,
            with_entropy,
            with_squares,
        )
    )


# ---- compilation: when, once, and what to do where it fails ------------------------------------


class NotCompiled(Exception):
    """This call cannot go through a compiled kernel; nothing has been written yet."""


def assert_compiled() -> None:
    """First line of every kernel: refuse to run eagerly, which would make float32 copies of all.

    torch.compile runs the plain function where it is switched off (TORCHDYNAMO_DISABLE, a stance,
    an enclosing `torch.compiler.disable`), without a word.
    """
    if not torch.compiler.is_dynamo_compiling():
        raise NotCompiled("torch.compile is switched off")


_lock = threading.RLock()
_kernels: dict[tuple[Any, ...], Callable[..., Any]] = {}
_warm: set[tuple[Any, ...]] = set()
# What failed, by kind; a kind that failed is not tried again, the others are.
_failures: dict[tuple[Any, ...], str] = {}
# As many kinds failed and none compiled: the compiler itself is at fault.
_HOPELESS = 3


def call_compiled(function: Callable[..., Any], *args: Tensor | bool) -> Any:
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
    state = (key, torch.get_num_threads(), torch.is_inference_mode_enabled())
    kernel = _kernels.get(key)
    # A view's kernel is compiled for the shape of its base, and another for what is no view.
    args = tuple(arg.data if isinstance(arg, Tensor) else arg for arg in args)
    try:
        # A default device is a mode that sees every operation, which torch.compile cannot trace.
        if kernel is not None and state in _warm:
            with torch._C.DisableTorchFunction():
                return kernel(*args)
        # torch's compiler configuration is not all thread-safe
        with _lock, torch._C.DisableTorchFunction():
            kernel = _kernels.setdefault(key, _compile(function))
            result = kernel(*args)
            _warm.add(state)
            return result
    except NotCompiled:
        raise
    except Exception as error:  # whatever a compiler, a full disk or a missing header brings about
        failure = f"compilation failed: {type(error).__name__}: {_first_line(error)}"
        _failures[key] = failure
        name = function.__name__.strip("_")
        logger.warning("inductor backend: %s: %s; the torch backend takes over", name, failure)
        raise NotCompiled(failure) from error


def _kind(arg: Tensor | bool) -> Any:
    return (arg.dtype, arg.is_contiguous()) if isinstance(arg, Tensor) else arg


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # torch counts recompilations by code object, up to a small limit: each kind gets its own.
    assert isinstance(function, FunctionType)
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return torch.compile(own, dynamic=True, fullgraph=True)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def obstacle() -> str | None:
    """Why nothing can be compiled here, or None."""
    if len(_failures) >= _HOPELESS and not _warm:
        return next(iter(_failures.values()))
    if compiler() is None:
        return "no C++ compiler found (CXX, g++, clang++)"
    if (
        os.environ.get("TORCHDYNAMO_DISABLE") == "1"
        or os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    ):
        return "torch.compile is switched off by the environment"
    return None


@cache
def compiler() -> str | None:
    """The C++ compiler that inductor will find, or None."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return None
