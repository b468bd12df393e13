"""The inductor backend: the reference's functions for a CPU, compiled.

The logits are read from memory once, forward and backward; nothing of their size is made, so that
`chunk_size` has no meaning here. Forward takes maximum and sums of one block of columns at a time,
which stays in the first-level cache, and gives each block's statistics as a part: sums of 2048
terms at a time also round less than the sum of a whole row.

Compiled are float32, bfloat16 and float16 logits with any temperature, scale, row stride, entropy
and rank. What is rare (softcap, bias, label smoothing, many entries per row, one row, under two
blocks of columns) and the columns past the last whole block go to the reference, and so does what
does not compile.

A kernel is a plain function of tensors and flags. Sizes stay symbolic, so that one compilation
(about a second; a few in the first one of a process) serves every number of rows and columns, and
inductor's cache on disk gives later processes most of it back.

`INVARIANT` has the same functions where a row's bits must depend on its own numbers alone. A
block's sums run over a static number of columns in one vectorised order, whatever the rows and
however they are divided among threads; the gradient is elementwise. What could change the order is
avoided: a call of one row (torch.compile makes a kernel of its own for a size of 1, which may
divide a block among threads) runs as two, and columns past the last whole vector are copied into
one. Nothing falls back where a kernel fails, for results of two calls would not have the same bits.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels.chunk import Chunk, Processing, row_chunks
from mcore_logprobs.kernels.reference import (
    decode,
    encode,
    gather_target,
    pair_grad,
    pair_stats,
    pair_sums,
    scale,
)
from mcore_logprobs.kernels.stats import LOG_ZERO, GradientTerms, StatsSpec, by_name

logger = logging.getLogger("mcore_logprobs")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Columns per block: 8 KiB of float32, well within a first-level cache.
BLOCK = 2048
_MIN_BLOCKS = 2  # torch.compile makes a kernel of its own for a size of 1
_MIN_INVARIANT = 512  # columns per block for which a kernel is compiled
_VECTOR = 64
_MAX_COLUMNS = 8  # of a row's single entries: each is compared with the others


def stats(
    chunk: Chunk,
    target: Tensor,
    spec: StatsSpec,
    *,
    threshold: Tensor | None = None,
    block: int | None = None,
    chunk_size: int,
) -> Tensor:
    """As `reference.stats`.

    Raises:
        RuntimeError: torch.compile failed, or is switched off here, and `block` is given.
    """
    size = BLOCK if block is None else block
    count, rows = chunk.valid // size, chunk.logits.shape[0]
    if block is None:
        common = rows > 1 and count >= _MIN_BLOCKS and chunk.logits.stride(-1) == 1
    else:
        common = rows > 0 and count > 0 and block >= _MIN_INVARIANT
    if common and not spec.smoothing and _is_common(chunk):
        call = call_compiled if block is None else _call_or_raise
        try:
            return _stats(chunk, target, spec, threshold, size, chunk_size, call)
        except NotCompiled:
            pass
    return reference.stats(
        chunk, target, spec, threshold=threshold, block=block, chunk_size=chunk_size
    )


def grad(chunk: Chunk, terms: GradientTerms, *, out: Tensor, chunk_size: int) -> None:
    """As `reference.grad`."""
    if (
        _has_few_columns(chunk, terms)
        and chunk.logits.shape[0] > 1
        and chunk.valid >= _MIN_BLOCKS * BLOCK
        and chunk.logits.stride(-1) == out.stride(-1) == 1
    ):
        try:
            _grad(chunk, terms, out, call_compiled)
            return
        except NotCompiled:
            pass
    reference.grad(chunk, terms, out=out, chunk_size=chunk_size)


def _invariant_grad(chunk: Chunk, terms: GradientTerms, *, out: Tensor, chunk_size: int) -> None:
    """As `reference.grad`; a row's bits depend on its own numbers alone.

    Raises:
        RuntimeError: torch.compile failed, or is switched off here.
    """
    if not _has_few_columns(chunk, terms):
        reference.grad(chunk, terms, out=out, chunk_size=chunk_size)
        return
    rows, valid = chunk.logits.shape[0], chunk.valid
    vector_end = valid - valid % _VECTOR
    strided = chunk.logits.stride(-1) != 1 or out.stride(-1) != 1
    head, tail = slice(0, vector_end), slice(vector_end, valid)
    if rows and vector_end and (strided or rows == 1):
        for part in row_chunks(rows, chunk_size):
            _grad_of_copy(chunk, head, part, terms, out)
    elif rows and vector_end:
        columns = torch.where(terms.columns < vector_end, terms.columns, -1)
        _grad(chunk.columns(head), terms._replace(columns=columns), out[:, head], _call_or_raise)
    if rows and vector_end < valid:
        _grad_of_copy(chunk, tail, slice(0, rows), terms, out)
    out[:, valid:] = 0


# The backend's functions where bits must depend on nothing else.
INVARIANT = SimpleNamespace(
    stats=stats,
    grad=_invariant_grad,
    encode=encode,
    decode=decode,
    scale=scale,
    pair_stats=pair_stats,
    pair_sums=pair_sums,
    pair_grad=pair_grad,
)


def _is_common(chunk: Chunk) -> bool:
    # A fake tensor has no bits, and nothing to compile for.
    return (
        chunk.logits.dtype in DTYPES
        and chunk.processing.softcap is None
        and chunk.processing.bias is None
        and not isinstance(chunk.logits, FakeTensor)
    )


def _has_few_columns(chunk: Chunk, terms: GradientTerms) -> bool:
    few = terms.coef is not None and 1 <= terms.columns.shape[1] <= _MAX_COLUMNS
    return few and not terms.spec.smoothing and _is_common(chunk)


def _stats(
    chunk: Chunk,
    target: Tensor,
    spec: StatsSpec,
    threshold: Tensor | None,
    block: int,
    chunk_size: int,
    call: Callable[..., Any],
) -> Tensor:
    rows, count = chunk.logits.shape[0], chunk.valid // block
    full_columns = count * block
    raw = chunk.logits if chunk.logits.stride(-1) == 1 else chunk.logits.contiguous()
    head, multiplier = raw[:, :full_columns], _multipliers(chunk)
    head_target = torch.where(target < full_columns, target, -1)
    operands = _two_rows(head), _two_rows(multiplier)
    block_stats = call(_stats_kernel(block), *operands, spec.entropy, spec.sum_pi_squared)
    parts = raw.new_zeros(
        (count + (full_columns < chunk.valid), len(spec.fields), rows), dtype=torch.float32
    )
    part = by_name(spec.fields, parts[:count], dim=1)
    for name, values in block_stats.items():
        part[name].copy_(values[:rows].t())
    part["target"][0] = gather_target(head, head_target, 0.0).float()
    if spec.rank:
        assert threshold is not None
        limit = threshold.to(raw.dtype)
        higher = call(_count_kernel(block), operands[0], _two_rows(limit))
        part["higher"].copy_(higher[:rows].t())
        part["higher"][0] -= (gather_target(head, head_target, -torch.inf) > limit).float()
    if full_columns < chunk.valid:
        (parts[-1],) = reference.stats(
            chunk.columns(slice(full_columns, chunk.valid)),
            torch.where(target >= full_columns, target - full_columns, -1),
            spec,
            threshold=threshold,
            block=block,
            chunk_size=chunk_size,
        )
    return parts


def _grad(chunk: Chunk, terms: GradientTerms, out: Tensor, call: Callable[..., object]) -> None:
    """`grad` of two rows or more with few columns, without bias, softcap or label smoothing."""
    columns, upstream, row_max, coef, spec = terms
    assert row_max is not None
    assert coef is not None
    logits, multiplier = chunk.logits, _multipliers(chunk)
    row = by_name(spec.coefficients, coef * multiplier)
    asked = (coef != 0).any(0) | (upstream != 0).any(1)
    # The columns' entries are computed apart, from logits before anything is written over them, and
    # rounded once: near p = 1 one is the difference of two nearly equal numbers.
    columns, upstream = _with_repeats(columns, upstream)
    has_columns = columns[:, :1] >= 0
    columns = columns.clamp(min=0)
    at = torch.arange(columns.shape[0], device=logits.device).unsqueeze(1), columns
    each = {name: values.unsqueeze(1) for name, values in row.items()}
    shifted = (logits[at].float() - row_max.unsqueeze(1)).mul_(multiplier.unsqueeze(1))
    shifted.clamp_(min=LOG_ZERO)
    entries = shifted.exp()
    factor = each["weight"]
    if spec.entropy:
        factor = factor + each["moment"] * shifted
    if spec.sum_pi_squared:
        factor = factor + each["squares"] * entries
    entries = entries * factor + upstream * multiplier.unsqueeze(1)
    entries = torch.where(asked.unsqueeze(1), entries, 0.0).to(out.dtype)

    source, result = logits[:, : chunk.valid], out[:, : chunk.valid]
    # A missing coefficient is never read: pass any other tensor for it.
    coefficients = [row.get(name, row["weight"]) for name in ("weight", "moment", "squares")]
    factors = multiplier, row_max, *coefficients, asked, spec.entropy, spec.sum_pi_squared
    if _same_memory(source, result):
        call(_grad_inplace_kernel, result, *factors)
    elif source.untyped_storage().data_ptr() == result.untyped_storage().data_ptr():
        raise NotCompiled("the gradient's layout differs from the logits' in the same memory")
    else:
        call(_grad_kernel, source, result, *factors)
    out[:, chunk.valid :] = 0
    # Where no column is here the kernel's own value stays: an eager exp may round otherwise.
    out[at] = torch.where(has_columns, entries, out[at])


def _with_repeats(columns: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """(columns `[n, j]`, what each one's entry gets in all): entries that can be written as one.

    Of a column that is named several times each has the sum. One that is elsewhere (-1) is another
    of its row's in place of it, and -1 where there is none.
    """
    if columns.shape[1] == 1:
        return columns, upstream
    upstream = torch.where(columns >= 0, upstream, 0.0)
    columns = torch.where(columns >= 0, columns, columns.amax(1, keepdim=True))
    total = torch.zeros_like(upstream)
    for column, of_column in zip(columns.split(1, 1), upstream.split(1, 1), strict=True):
        total += torch.where(columns == column, of_column, 0.0)
    return columns, total


def _grad_of_copy(
    chunk: Chunk, columns: slice, rows: slice, terms: GradientTerms, out: Tensor
) -> None:
    """The gradient of some rows and columns, by a copy of at least two rows of whole vectors."""
    entries, upstream, row_max, coef, spec = terms.rows(rows)
    assert row_max is not None
    assert coef is not None
    piece = chunk.rows(rows).columns(columns)
    count, width = piece.logits.shape
    copy = piece.logits.new_zeros((max(2, count), -(-width // _VECTOR) * _VECTOR))
    copy[:count, :width] = piece.logits
    written = torch.empty_like(copy, dtype=out.dtype)
    local = entries - columns.start
    local = torch.where((local >= 0) & (local < width), local, -1)
    scale, temperature = piece.processing.logit_scale, piece.processing.temperature
    if isinstance(temperature, Tensor):
        temperature = _two_rows(temperature)
    _grad(
        Chunk(copy, copy.shape[1], Processing.of(scale, temperature=temperature)),
        GradientTerms(
            _two_rows(local),
            _two_rows(upstream),
            _two_rows(row_max),
            _two_rows(coef.t()).t(),
            spec,
        ),
        written,
        _call_or_raise,
    )
    out[rows, columns] = written[:count, :width]


def _two_rows(per_row: Tensor) -> Tensor:
    """Itself, or its only row twice."""
    return per_row if per_row.shape[0] > 1 else torch.cat([per_row, per_row])


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def _multipliers(chunk: Chunk) -> Tensor:
    """Each row's multiplier, `[n]`: torch.compile would make a kernel for each float."""
    multiplier, shape = chunk.processing.multiplier, chunk.logits.shape[:1]
    if isinstance(multiplier, Tensor):
        return multiplier.float()
    return torch.full(shape, multiplier, dtype=torch.float32, device=chunk.logits.device)


# ---- kernels: what torch.compile sees -----------------------------------------------------------


# To the compiler a number in a closure is symbolic, as sizes are, and a text is not: so a block has
# a static width, by which loops over it are vectorised.


@cache
def _stats_kernel(width: int) -> Callable[..., object]:
    """`[n, blocks * width]` -> each block's statistics by name, `[n, blocks]`."""
    static, run = str(width), str(_run_length(width))

    def stats_kernel(
        logits: Tensor, multiplier: Tensor, entropy: bool, squares: bool
    ) -> dict[str, Tensor]:
        assert_compiled()
        block, columns = int(static), int(run)

        def total(x: Tensor) -> Tensor:
            if columns == block:
                return x.sum(-1)
            return x.unflatten(-1, (block // columns, columns)).sum(-1).sum(-1)

        blocks = logits.unflatten(1, (logits.shape[1] // block, block))
        x = blocks.float()
        block_max = x.amax(-1)
        # Apart: stacked, the maximum's loop and the sum's would not be fused.
        shifted = x - torch.where(block_max == -torch.inf, 0.0, block_max).unsqueeze(-1)
        shifted = shifted * multiplier[:, None, None]
        if entropy:
            shifted = shifted.clamp(min=LOG_ZERO)
        weight = shifted.exp()
        fields = {"max": block_max, "sum": total(weight)}
        if entropy:
            fields["entropy"] = total(weight * shifted)
        if squares:
            fields["squares"] = total(weight * weight)
        return fields

    return stats_kernel


def _run_length(width: int) -> int:
    """Columns of a block that are summed one after the other, a divisor of the block's width.

    A vector has 8 or 16 running totals, each of a few of the columns. Without vectors there is one,
    which over 2048 columns rounds ten times as much: there, sums of short runs are summed.
    """
    if _vector_bits() > 0:
        return width
    divisors = [run for run in range(1, width + 1) if width % run == 0]
    return min(divisors, key=lambda run: run + width // run)


@cache
def _count_kernel(width: int) -> Callable[..., object]:
    """`[n, blocks * width]`, `[n]` -> how many of each block are higher, `[n, blocks]` float32."""
    static = str(width)

    def count_kernel(logits: Tensor, limit: Tensor) -> Tensor:
        assert_compiled()
        block = int(static)
        blocks = logits.unflatten(1, (logits.shape[1] // block, block))
        # float32 holds every count of a block, and is summed faster than int64.
        return torch.where(blocks > limit[:, None, None], 1.0, 0.0).sum(-1)

    return count_kernel


def _grad_values(
    logits: Tensor,
    multiplier: Tensor,
    shift: Tensor,
    weight: Tensor,
    moment: Tensor,
    squares: Tensor,
    asked: Tensor,
    with_entropy: bool,
    with_squares: bool,
) -> Tensor:
    shifted = (logits.float() - shift[:, None]) * multiplier[:, None]
    factor = weight[:, None]
    if with_entropy:
        shifted = shifted.clamp(min=LOG_ZERO)
        factor = factor + moment[:, None] * shifted
    w = shifted.exp()
    if with_squares:
        factor = factor + squares[:, None] * w
    return torch.where(asked[:, None], w * factor, 0.0)


def _grad_kernel(logits: Tensor, out: Tensor, *factors: Any) -> None:
    """`[n, v]` -> the gradient without the target's own term, into out `[n, v]`."""
    assert_compiled()
    out.copy_(_grad_values(logits, *factors))


def _grad_inplace_kernel(logits: Tensor, *factors: Any) -> None:
    """As `_grad_kernel`, over the logits."""
    assert_compiled()
    logits.copy_(_grad_values(logits, *factors))


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


def _call_or_raise(function: Callable[..., object], *args: Tensor | bool) -> object:
    """As `call_compiled`, also within a mode that counts or logs: it must not change the bits.

    Raises:
        RuntimeError: compilation failed, or torch.compile is switched off.
    """
    try:
        with _disable_current_modes():
            return call_compiled(function, *args)
    except NotCompiled as failure:
        raise RuntimeError(
            f"invariant_segments: {failure}; backend='torch' gives such results without a compiler"
        ) from failure


_lock = threading.RLock()
_kernels: dict[tuple[object, ...], Callable[..., object]] = {}
_warm: set[tuple[object, ...]] = set()
# What failed, by kind; a kind that failed is not tried again, the others are.
_failures: dict[tuple[object, ...], str] = {}
# As many kinds failed and none compiled: the compiler itself is at fault.
_HOPELESS = 3


def call_compiled(function: Callable[..., object], *args: Tensor | bool) -> Any:
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


def _kind(arg: Tensor | bool) -> object:
    return (arg.dtype, arg.is_contiguous()) if isinstance(arg, Tensor) else arg


def _compile(function: Callable[..., object]) -> Callable[..., object]:
    # torch counts recompilations by code object, up to a small limit: each kind gets its own.
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return torch.compile(copy, dynamic=True, fullgraph=True, options=_instruction_set())


def _instruction_set() -> dict[str, Any]:
    """The width of the CPU's vectors, for the key of inductor's cache.

    The cache on disk does not tell CPUs apart: what another wrote for wider vectors (a home that
    machines share, `ATEN_CPU_CAPABILITY`) is read, and does not compile or gives other numbers.
    """
    return {"cpp.simdlen": _vector_bits()}


def _vector_bits() -> int:
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
