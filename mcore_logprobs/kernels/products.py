"""Matrix products with float32 results, whatever the operands' dtype.

On CUDA, bfloat16 and float16 operands go to the tensor cores as they are and come out in float32.
On a CPU without instructions for them such products take four times as long as float32 ones, so a
block of the operand is cast first: the products of bf16 numbers are exact in float32 either way. A
CPU with avx512_bf16 or AMX multiplies bfloat16 at two or more times the rate of float32, but torch
gives the result in bfloat16 only: that is used where the logits are rounded to it anyway.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mcore_logprobs.kernels import budgets

logger = logging.getLogger("mcore_logprobs")

_ALIGNMENT = 64  # bytes; as torch allocates
_UNIT = 16  # numbers, of which the inner dimension of an invariant product is a multiple

_HALF = (torch.bfloat16, torch.float16)


def matmul_dtype(
    dtype: torch.dtype, device: torch.device, *, low_precision: bool = False
) -> torch.dtype:
    """The dtype in which operands of this dtype are multiplied on this device.

    Args:
        low_precision: the caller's results are rounded to `dtype`, or may be.
    """
    if dtype in _HALF and device.type == "cuda":
        return dtype
    native = low_precision and device.type == "cpu" and dtype == torch.bfloat16
    if native and _cpu_multiplies_bfloat16():
        return dtype
    return torch.promote_types(dtype, torch.float32)


def _cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16 numbers, and torch uses them."""
    if not torch.backends.mkldnn.is_available():
        return False
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is not None:
        capabilities = ask()
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


# `torch.compiler.assume_constant_result` without the import of the compiler, which traces nothing
# of the above.
_cpu_multiplies_bfloat16._dynamo_marked_constant = True  # type: ignore[attr-defined]


def product(a: Tensor, b: Tensor, out: Tensor, *, low_precision: bool = False) -> Tensor:
    """`out = a @ b`; a and b of one dtype, out of at least float32.

    Args:
        low_precision: bfloat16 operands on a CPU are multiplied as they are, and the result is
            rounded to their dtype once before it goes into out. No matter on a GPU.
    """
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if low_precision and a.device.type == "cpu":
        return out.copy_(torch.mm(left_operand(a), b))
    if _has_wide_mm(a.dtype, a.device):
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(a: Tensor, b: Tensor, out: Tensor, *, low_precision: bool = False) -> Tensor:
    """`out += a @ b`, added in out's dtype; `low_precision` as in `product`."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, out=out)
    if low_precision and a.device.type == "cpu":
        return out.add_(torch.mm(left_operand(a), b))
    if _has_wide_addmm(a.dtype, a.device):
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return out.add_(product(a, b, torch.empty_like(out)))


def left_operand(a: Tensor) -> Tensor:
    """a as torch can multiply it in its own dtype: on a CPU zeros lie behind the rows of 16 bits.

    With AMX, oneDNN reads a row up to a multiple of 32 numbers, and multiplies what lies behind its
    end by 0. Of NaN or inf there the product is NaN (uxlfoundation/oneDNN 5717; torch 2.15 has the
    mended one).
    """
    missing = -a.shape[1] % 32
    if missing == 0 or a.device.type != "cpu" or a.dtype not in _HALF:
        return a
    # torch.compile tells no strides in a backward.
    if not torch.compiler.is_compiling() and a.stride(1) != 1:
        return a  # not read row by row
    return torch.nn.functional.pad(a, (0, missing))[:, : a.shape[1]]


def rounded_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype; x itself where it has that."""
    rounded = x.to(dtype)
    if torch.compiler.is_compiling() and dtype in _HALF:
        # Inductor leaves out a cast to 16 bits and back, unless it cannot see that what is done to
        # the bits changes nothing (from torch 2.15 it sees that of adding 0).
        bits = rounded.view(torch.int16)
        rounded = (bits | (bits & 1)).view(dtype)
    return rounded


def range_scale(magnitudes: Tensor) -> Tensor:
    """A power of two, float32 `[]`, by which the largest finite magnitude is about 2^10.

    For float16, which ends at 2^16 and has full precision from 2^-14. From 2^-40 to 2^40, so that
    a factor between two of them leaves float32 sums finite.
    """
    largest = magnitudes.nan_to_num(nan=0.0, posinf=0.0).max().double()
    exponent = 10 - torch.frexp(largest).exponent
    bits = (exponent.clamp(-40, 40) + 127) << 23  # exact, which exp2 need not be
    return bits.to(torch.int32).view(torch.float32)


def rounded_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """`out = a @ b`, all of one dtype: added in float32 or better, and rounded once."""
    if a.device.type != "cuda" or a.dtype not in _HALF:
        return torch.mm(left_operand(a), b, out=out)
    # The compiler traces no lock, and no flag of the process.
    if torch.compiler.is_compiling() or _adds_in_float16(a.dtype, a.device):
        return out.copy_(product(a, b, torch.empty_like(out, dtype=torch.float32)))
    with _whole_sums(a.dtype):
        return torch.mm(a, b, out=out)


# Of each dtype: how many threads are within `_whole_sums`, and the flag as the first found it.
_within: dict[torch.dtype, tuple[int, object]] = {}
_lock = threading.Lock()


@contextmanager
def _whole_sums(dtype: torch.dtype) -> Iterator[None]:
    """Within it cuBLAS does not add parts of a low-precision product in low precision.

    torch lets it, by default, where it splits the inner dimension over several programs. The flag
    is the process's: the first thread in sets it, and the last one out puts it back.
    """
    flags = torch.backends.cuda.matmul
    name = f"allow_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_reduced_precision_reduction"
    with _lock:
        threads, before = _within.get(dtype, (0, None))
        if threads == 0:
            before = getattr(flags, name)
            splits = getattr(flags, f"{name}_split_k", None)  # set with the other
            before = before if splits is None else (before, splits)
            setattr(flags, name, False if splits is None else (False, splits))
        _within[dtype] = threads + 1, before
    try:
        yield
    finally:
        with _lock:
            threads, before = _within[dtype]
            if threads == 1:
                setattr(flags, name, before)
            _within[dtype] = threads - 1, before


def batch_invariant_matmul(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """`out = a @ b`, such that a row's bits do not depend on the other rows or how many there are.

    All products have the same number of rows, the last one filled up with zeros, and operands that
    lie in memory alike: a matrix library chooses how to add by shape and alignment. `b` must be
    `aligned`, or a transposed view of what is.
    """
    rows = budgets.of(a.device.type).fixed_rows
    missing = -a.shape[1] % _UNIT
    if missing and a.device.type == "cpu":
        # MKL 2024.0 adds the numbers that are left over from whole vectors in another order by the
        # row's place, where the columns are few. Where `b` is not transposed it does so in any
        # case, so that a transposed one must stay it.
        a = torch.nn.functional.pad(a, (0, missing))
        if b.stride(0) == 1:
            b = torch.nn.functional.pad(b.t(), (0, missing)).t()
        else:
            b = torch.nn.functional.pad(b, (0, 0, 0, missing))
    padded = fresh = None
    for start in range(0, a.shape[0], rows):
        left, result = a[start : start + rows], out[start : start + rows]
        count = left.shape[0]
        if count < rows or not _is_aligned(left):
            padded = a.new_zeros(rows, a.shape[1]) if padded is None else padded
            padded[:count] = left
            padded[count:] = 0
            left = padded
        if count < rows or not _is_aligned(result):
            fresh = out.new_empty(rows, out.shape[1]) if fresh is None else fresh
            result.copy_(product(left, b, fresh)[:count])
        else:
            product(left, b, result)
    return out


def aligned(x: Tensor) -> Tensor:
    """x, or a copy in fresh memory where its rows have gaps or its start is not aligned."""
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _is_aligned(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0


# ---- what torch can multiply -------------------------------------------------------------------

# Since when torch gives float32 results of low-precision operands, only on CUDA: `mm(out_dtype=)`,
# and `addmm(out_dtype=)` to a float32 tensor, which the first releases with it refused. On an AMD
# GPU, where torch calls its device CUDA too, both came with pytorch/pytorch#162600. Each is tried
# once.
_SINCE = {"mm": (2, 8), "addmm": (2, 10)}
_SINCE_ON_AMD = (2, 10)
# Since when torch.compile takes `mm(out_dtype=)` (pytorch/pytorch#163393). `addmm(out_dtype=)` is
# not lowered by torch 2.13 either (pytorch/pytorch#163880).
_COMPILED_MM_SINCE = (2, 10)
# What torch says to operands that it does not multiply so. Any other error is one of the moment,
# such as memory that is short, and no answer.
_REFUSAL = re.compile(r"dtype|not implemented|support|could not run|keyword argument", re.I)


def _has_wide_mm(dtype: torch.dtype, device: torch.device) -> bool:
    return _asked("mm", dtype, device)


def _has_wide_addmm(dtype: torch.dtype, device: torch.device) -> bool:
    return _asked("addmm", dtype, device)


# By what is multiplied, and `_adds_in_float16`.
_answers: dict[tuple[str, torch.dtype, torch.device, bool], bool] = {}


def _adds_in_float16(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a flag of torch's has cuBLAS add float16 products in float16: then torch refuses
    float32 results of them.
    """
    if dtype != torch.float16 or device.type != "cuda":
        return False
    return bool(getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False))


def _asked(name: str, dtype: torch.dtype, device: torch.device) -> bool:
    compiling = torch.compiler.is_compiling()
    key = name, dtype, device, not compiling and _adds_in_float16(dtype, device)
    if key in _answers:
        return _answers[key]
    if compiling:
        return _by_version(name, dtype, device)
    a = torch.zeros(16, 16, dtype=dtype, device=device)
    if type(a) is not Tensor:  # a fake tensor takes what its device refuses
        return _by_version(name, dtype, device)
    out = torch.zeros(16, 16, dtype=torch.float32, device=device)
    if name == "mm":
        answer = _works(lambda: torch.mm(a, a, out_dtype=out.dtype, out=out))
    else:
        answer = _works(lambda: torch.addmm(out, a, a, out_dtype=out.dtype, out=out))
    _answers[key] = answer
    if not answer and device.type == "cuda":
        logger.warning(_slow(name, dtype, device))
    return answer


def _by_version(name: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Under torch.compile and of fake tensors, which may be its own: nothing can be tried there."""
    if name != "mm" or device.type != "cuda" or dtype not in _HALF:
        return False
    return _version() >= _COMPILED_MM_SINCE


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _since(name: str) -> tuple[int, ...]:
    return _SINCE[name] if torch.version.hip is None else _SINCE_ON_AMD


def _works(call: Callable[[], Tensor]) -> bool:
    try:
        call()
    except (NotImplementedError, TypeError):
        return False
    except RuntimeError as error:
        if isinstance(error, torch.cuda.OutOfMemoryError) or not _REFUSAL.search(str(error)):
            raise
        return False
    return True


def _slow(name: str, dtype: torch.dtype, device: torch.device) -> str:
    since = _since(name)
    later = "; torch {}.{} or later has it".format(*since) if _version() < since else ""
    if _adds_in_float16(dtype, device):
        later = ", as torch.backends.cuda.matmul.allow_fp16_accumulation is on"
    cost = {
        "mm": "operands are cast to float32 and multiplied without tensor cores, ten times slower",
        "addmm": "each result is added in a pass of its own",
    }
    return (
        f"torch {torch.__version__} has no {name} of {dtype} operands with float32 results on this "
        f"device: {cost[name]}{later}"
    )


def explain(device: torch.device) -> list[str]:
    """How GEMMs of bfloat16 operands are made on this device, in words."""
    dtype = torch.bfloat16
    if device.type == "cuda":
        asked = {name: _asked(name, dtype, device) for name in _SINCE}
        slow = [_slow(name, dtype, device) for name, answer in asked.items() if not answer]
        return slow or ["bfloat16 operands, float32 results"]
    if _cpu_multiplies_bfloat16():
        return [
            "bfloat16 operands are multiplied in float32, with logits_dtype=torch.bfloat16 as they "
            "are"
        ]
    return ["bfloat16 operands are multiplied in float32: no instructions for them"]
