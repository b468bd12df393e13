"""The Triton backend for two sides: every function an operator of torch, as in `triton_backend`.

`kernels.distill` documents the functions. The chunk size is of no use here, as nothing but the
results is ever written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.kernels import (
    triton_distill,
    triton_distill_finish,
    triton_distill_grad,
)
from mcore_logprobs.kernels.distill import PAIR_STATS, PairSpec, Side
from mcore_logprobs.kernels.operators import operator
from mcore_logprobs.kernels.stats import RowSpec

__all__ = [
    "finish_jsd",
    "finish_pairs",
    "finished_jsd",
    "finished_pair",
    "jsd_sums",
    "pair_grad",
    "pair_stats",
]

# A side travels as its tensors and the numbers of its transformation; a `PairSpec` as its fields.
_SIDES = ", ".join(
    f"Tensor {side}, Tensor? {side}_bias, Tensor? {side}_row_temperature, int {side}_valid, "
    f"float {side}_scale, float? {side}_softcap, float {side}_temperature"
    for side in ("student", "teacher")
)
_SIDE = 7  # arguments of one


def _flatten(*sides: Side) -> tuple[Any, ...]:
    return tuple(
        argument
        for side in sides
        for argument in (
            side.logits,
            side.bias,
            side.temperature,
            side.spec.valid,
            float(side.spec.logit_scale),
            None if side.spec.softcap is None else float(side.spec.softcap),
            float(side.spec.temperature),
        )
    )


def _sides(arguments: tuple[Any, ...]) -> tuple[Side, Side]:
    student, teacher = (
        Side(logits, RowSpec(*numbers), bias, temperature)
        for logits, bias, temperature, *numbers in (arguments[:_SIDE], arguments[_SIDE:])
    )
    return student, teacher


def pair_stats(student: Side, teacher: Side, spec: PairSpec, *, chunk_size: int = 0) -> Tensor:
    """As `kernels.distill.pair_stats`, for float16, bfloat16 or float32 with a last stride of 1."""
    return _pair_stats(spec.kind, spec.beta, *_flatten(student, teacher))


_pair_stats = operator(
    f"pair_stats(str kind, float beta, {_SIDES}) -> Tensor",
    lambda kind, beta, *sides: triton_distill.pair_stats(*_sides(sides), PairSpec(kind, beta)),
    lambda kind, beta, student, *_: student.new_empty(
        (PAIR_STATS, student.shape[0]), dtype=torch.float32
    ),
)


def jsd_sums(
    student: Side,
    teacher: Side,
    norm_s: Tensor,
    norm_t: Tensor,
    spec: PairSpec,
    *,
    chunk_size: int = 0,
) -> Tensor:
    """As `kernels.distill.jsd_sums`; dtypes and strides as in `pair_stats`."""
    return _jsd_sums(norm_s, norm_t, spec.beta, *_flatten(student, teacher))


_jsd_sums = operator(
    f"jsd_sums(Tensor norm_s, Tensor norm_t, float beta, {_SIDES}) -> Tensor",
    lambda norm_s, norm_t, beta, *sides: triton_distill.jsd_sums(
        *_sides(sides), norm_s, norm_t, PairSpec("jsd", beta)
    ),
    lambda norm_s, norm_t, beta, student, *_: student.new_empty(
        (2, student.shape[0]), dtype=torch.float32
    ),
)


# ---- one launch a step -------------------------------------------------------------------------


def finish_pairs(parts: Tensor, mask: Tensor | None, spec: PairSpec) -> tuple[Tensor, Tensor]:
    """As `triton_distill_finish.finish_pairs`."""
    value, norms = _finish_pairs(parts, mask, spec.kind, spec.beta)
    return value, norms


def _two(like: Tensor, *shape: int) -> tuple[Tensor, Tensor]:
    rows = like.shape[-1]
    return (
        like.new_empty(rows, dtype=torch.float32),
        like.new_empty((*shape, rows), dtype=torch.float32),
    )


_finish_pairs = operator(
    "finish_pairs(Tensor parts, Tensor? mask, str kind, float beta) -> (Tensor, Tensor)",
    lambda parts, mask, *spec: triton_distill_finish.finish_pairs(parts, mask, PairSpec(*spec)),
    lambda parts, *_: _two(parts, 6),
)


def finished_pair(
    student: Side, teacher: Side, mask: Tensor | None, spec: PairSpec
) -> tuple[Tensor, Tensor]:
    """`pair_stats` and `finish_pairs` where all of the vocabulary is here, in two launches."""
    value, norms = _finished_pair(mask, spec.kind, spec.beta, *_flatten(student, teacher))
    return value, norms


def _run_finished_pair(mask: Any, kind: str, beta: float, *sides: Any) -> tuple[Tensor, Tensor]:
    spec = PairSpec(kind, beta)
    parts = triton_distill.split_pair_stats(*_sides(sides), spec)
    return triton_distill_finish.finish_pairs(parts, mask, spec)


_finished_pair = operator(
    f"finished_pair(Tensor? mask, str kind, float beta, {_SIDES}) -> (Tensor, Tensor)",
    _run_finished_pair,
    lambda mask, kind, beta, student, *_: _two(student[:, 0], 6),
)


def finish_jsd(parts: Tensor, norms: Tensor, spec: PairSpec) -> tuple[Tensor, Tensor]:
    """As `triton_distill_finish.finish_jsd`."""
    value, inner = _finish_jsd(parts, norms, spec.beta)
    return value, inner


_finish_jsd = operator(
    "finish_jsd(Tensor parts, Tensor norms, float beta) -> (Tensor, Tensor)",
    lambda parts, norms, beta: triton_distill_finish.finish_jsd(
        parts, norms, PairSpec("jsd", beta)
    ),
    lambda parts, *_: _two(parts),
)


def finished_jsd(
    student: Side, teacher: Side, norms: Tensor, spec: PairSpec
) -> tuple[Tensor, Tensor]:
    """`jsd_sums` and `finish_jsd` where all of the vocabulary is here, in two launches."""
    value, inner = _finished_jsd(norms, spec.beta, *_flatten(student, teacher))
    return value, inner


def _run_finished_jsd(norms: Tensor, beta: float, *sides: Any) -> tuple[Tensor, Tensor]:
    spec = PairSpec("jsd", beta)
    parts = triton_distill.split_jsd_sums(*_sides(sides), norms[:2], norms[2:4], spec)
    return triton_distill_finish.finish_jsd(parts, norms, spec)


_finished_jsd = operator(
    f"finished_jsd(Tensor norms, float beta, {_SIDES}) -> (Tensor, Tensor)",
    _run_finished_jsd,
    lambda norms, *_: _two(norms),
)


# ---- gradients ---------------------------------------------------------------------------------


def pair_grad(
    student: Side,
    teacher: Side,
    norm_s: Tensor,
    norm_t: Tensor,
    inner: Tensor,
    upstream: Tensor,
    spec: PairSpec,
    *,
    kept: Tensor | None = None,
    out: Tensor,
    chunk_size: int = 0,
) -> None:
    """As `kernels.distill.pair_grad`; dtypes and strides as in `pair_stats`, for out too.

    `kept` is float32.
    """
    sides = _flatten(student, teacher)
    _pair_grad(out, norm_s, norm_t, inner, upstream, kept, spec.kind, spec.beta, *sides)


def _run_pair_grad(
    out: Tensor, norm_s: Tensor, norm_t: Tensor, inner: Tensor, upstream: Tensor, kept: Any,
    kind: str, beta: float, *sides: Any,
) -> None:  # fmt: skip
    triton_distill_grad.pair_grad(
        *_sides(sides), norm_s, norm_t, inner, upstream, PairSpec(kind, beta), kept=kept, out=out
    )


_pair_grad = operator(
    "pair_grad(Tensor(a!) out, Tensor norm_s, Tensor norm_t, Tensor inner, Tensor upstream, "
    f"Tensor? kept, str kind, float beta, {_SIDES}) -> ()",
    _run_pair_grad,
    lambda *_: None,
)
