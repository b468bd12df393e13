"""The gradient of divergences between two sides of logits, as a Triton kernel.

`kernels.pairs` has the formulas. One pass reads both sides and writes the student's gradient in its
dtype: nothing else of the logits' size is made.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.kernels.pairs import KINDS, ONE_PASS, TWO_PASS, PairSpec
from mcore_logprobs.kernels.triton.common import (
    UNIT,
    exp,
    launch,
    over_temperature,
    raw_slope,
    rounded,
    span_plan,
    whole_units,
    with_unit_stride,
    write_zeros,
)
from mcore_logprobs.kernels.triton.operators import (
    arguments,
    chunk_schema,
    chunks_of,
    operator,
    writes_out,
)
from mcore_logprobs.kernels.triton.sides import (
    CROSS_ENTROPY,
    FORWARD,
    REVERSE,
    SIDE_POINTERS,
    load_side,
    load_softmax,
    log_probs,
    multiplier_of,
    shares,
    side_rows,
    sides_arguments,
    sides_constants,
)

# Columns of a tile at most, fewer where a column takes more registers.
_TILE = dict.fromkeys(ONE_PASS, 2048) | dict.fromkeys(TWO_PASS, 1024)


@triton.jit
def _write_tile(
    student, teacher, student_bias_ptr, teacher_bias_ptr, softmax, inner, factor,
    mixture, out_row_ptr, start, valid, width,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """`kernels.pairs.pair_grad` of one tile; `factor` is all of it that the row shares."""
    columns = start + tl.arange(0, TILE)
    s, capped = load_side(student, student_bias_ptr, columns, valid, MASKED, STUDENT_SOFTCAP)
    t, _ = load_side(teacher, teacher_bias_ptr, columns, valid, MASKED, TEACHER_SOFTCAP)
    max_s, log_s, max_t, log_t = softmax
    if KIND == FORWARD or KIND == CROSS_ENTROPY:  # noqa: SIM109
        p = exp((s - max_s) * multiplier_of(student) - log_s)
        q = exp((t - max_t) * multiplier_of(teacher) - log_t)
        ds = p - q
    else:
        logp = log_probs(s, student, max_s, log_s)
        logq = log_probs(t, teacher, max_t, log_t)
        if KIND == REVERSE:
            p, derivative = exp(logp), logp - logq
        else:
            p, _, derivative = shares(logp, logq, mixture, KIND)
        ds = p * (derivative - inner)  # inner is NaN where either side is
    grad = ds * factor
    if STUDENT_SOFTCAP:
        grad = grad * (1.0 - capped * capped)
    grad = grad.to(out_row_ptr.dtype.element_ty)
    if MASKED:
        tl.store(out_row_ptr + columns, tl.where(columns < valid, grad, 0.0), mask=columns < width)
    else:
        tl.store(out_row_ptr + columns, grad)


@triton.jit(
    do_not_specialize=[
        "valid", "width", "splits", "upstream_stride", "softmax_stride"
    ],
    do_not_specialize_on_alignment=[
        *SIDE_POINTERS, "softmax_ptr", "inner_ptr", "upstream_ptr"
    ],
)  # fmt: skip
def pair_grad_kernel(
    student_ptr, teacher_ptr,  # [n, v]
    student_bias_ptr, student_temperature_ptr,  # [v], [n], or None
    teacher_bias_ptr, teacher_temperature_ptr,
    student_scale, student_softcap, student_multiplier,
    teacher_scale, teacher_softcap, teacher_multiplier,
    student_stride, teacher_stride,
    softmax_ptr,  # [4, n]
    inner_ptr,  # [n]
    upstream_ptr,  # [n], any stride
    out_ptr,  # [n, v]; may be student_ptr
    valid,
    width,
    softmax_stride,
    upstream_stride,
    out_stride,
    splits,
    slope,
    beta,
    kept,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    TAIL: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """The gradient of one row's columns `[split * TILES * TILE, ...)`."""
    program = tl.program_id(0)
    row = program // splits
    start = (program % splits) * (TILES * TILE)
    stop = tl.minimum(start + TILES * TILE, width)
    out_row_ptr = out_ptr + row.to(tl.int64) * out_stride
    upstream = tl.load(upstream_ptr + row.to(tl.int64) * upstream_stride)
    if upstream != 0.0:
        student, teacher = side_rows(
            row, student_ptr, student_temperature_ptr, student_stride,
            student_scale, student_softcap, student_multiplier,
            teacher_ptr, teacher_temperature_ptr, teacher_stride,
            teacher_scale, teacher_softcap, teacher_multiplier,
        )  # fmt: skip
        softmax = load_softmax(softmax_ptr, softmax_stride, row)
        inner = tl.load(inner_ptr + row)
        mixture = beta, kept
        factor = upstream * over_temperature(slope, row, student_temperature_ptr)
        end = whole_units(start, tl.minimum(stop, valid))
        whole = start + (end - start) // TILE * TILE
        for at in range(start, whole, TILE):
            _write_tile(
                student, teacher, student_bias_ptr, teacher_bias_ptr, softmax, inner, factor,
                mixture, out_row_ptr, at, valid, width,
                False, TILE, STUDENT_SOFTCAP, TEACHER_SOFTCAP, KIND,
            )  # fmt: skip
        for at in range(whole, end, TAIL):
            _write_tile(
                student, teacher, student_bias_ptr, teacher_bias_ptr, softmax, inner, factor,
                mixture, out_row_ptr, at, end, end,
                True, TAIL, STUDENT_SOFTCAP, TEACHER_SOFTCAP, KIND,
            )  # fmt: skip
        if end < stop:
            _write_tile(
                student, teacher, student_bias_ptr, teacher_bias_ptr, softmax, inner, factor,
                mixture, out_row_ptr, end, valid, stop,
                True, UNIT, STUDENT_SOFTCAP, TEACHER_SOFTCAP, KIND,
            )  # fmt: skip
            write_zeros(out_row_ptr, end + UNIT, stop, TAIL)
    else:
        # Nothing is asked of the row: exactly 0, whatever its logits hold.
        write_zeros(out_row_ptr, start, stop, TAIL)


def pair_grad(
    student: Chunk,
    teacher: Chunk,
    softmax: Tensor,
    inner: Tensor,
    upstream: Tensor,
    spec: PairSpec,
    *,
    out: Tensor,
    chunk_size: int = 0,
) -> None:
    """As `kernels.pairs.pair_grad`; dtypes and strides as in `stats`, for out too."""
    operands = student, teacher, softmax, inner, upstream, spec.kind, float(spec.beta), out
    _pair_grad(*arguments(*operands))


def _run(*given: object) -> None:
    student, teacher, softmax, inner, upstream, kind, beta, out = chunks_of(2, given)
    if out.numel() == 0:
        return
    rows, width = out.shape
    splits, shape = span_plan(width, _TILE[kind])
    softmax = with_unit_stride(softmax)
    with rounded(out) as written:
        launch(
            pair_grad_kernel, rows * splits,
            *sides_arguments(student, teacher), softmax, with_unit_stride(inner), upstream, written,
            student.valid, width, softmax.stride(0), upstream.stride(0),
            written.stride(0), splits, raw_slope(student), beta, 1.0 - beta,
            KIND=KINDS.index(kind), **shape, **sides_constants(student, teacher),
        )  # fmt: skip


_pair_grad = operator(
    f"pair_grad({chunk_schema('student_')}, {chunk_schema('teacher_')}, Tensor softmax, "
    "Tensor inner, Tensor upstream, str kind, float beta, Tensor(a!) out) -> ()",
    _run,
    writes_out,
)
