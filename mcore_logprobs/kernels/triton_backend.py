"""The Triton backend: every function a custom operator, for torch.compile and CUDA graphs.

`kernels.reference` documents the three functions. The chunk size is of no use here, as nothing but
the results is ever written.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from mcore_logprobs.kernels import triton_entries, triton_grad, triton_rank, triton_stats
from mcore_logprobs.kernels.operators import SPEC_SCHEMA, flatten, operator, unflatten
from mcore_logprobs.kernels.stats import RowSpec

__all__ = ["block_stats", "count_higher", "entries_grad", "grad_logits", "row_stats"]


def row_stats(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    *,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
    chunk_size: int = 0,
) -> Tensor:
    """As `kernels.reference.row_stats`; float16, bfloat16 or float32 with a last stride of 1."""
    return _row_stats(logits, target, bias, threshold, temperature, *_flatten(spec))


def block_stats(
    logits: Tensor,
    target: Tensor,
    spec: RowSpec,
    *,
    block: int,
    bias: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
    chunk_size: int = 0,
) -> Tensor:
    """As `kernels.reference.block_stats`; dtypes and strides as in `row_stats`."""
    return _block_stats(logits, target, block, bias, threshold, temperature, *_flatten(spec))


def count_higher(
    logits: Tensor, target: Tensor, threshold: Tensor, *, valid: int, chunk_size: int = 0
) -> Tensor:
    """As `kernels.reference.count_higher`; dtypes and strides as in `row_stats`."""
    return _count_higher(logits, target, threshold, valid)


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
    chunk_size: int = 0,
) -> None:
    """As `kernels.reference.grad_logits`; dtypes and strides as in `row_stats`, for out too."""
    _grad_logits(logits, target, shift, coef, bias, temperature, out, *_flatten(spec))


# ---- operators: a RowSpec travels as its fields ------------------------------------------------

_SCHEMA_TYPES = {"int": "int", "float": "float", "float | None": "float?", "bool": "bool"}
_SPEC_SCHEMA = ", ".join(
    f"{_SCHEMA_TYPES[str(field.type)]} {field.name}" for field in dataclasses.fields(RowSpec)
)


def _flatten(spec: RowSpec) -> tuple[Any, ...]:
    # An operator's schema takes no int for a float.
    return tuple(
        float(value) if "float" in str(field.type) and value is not None else value
        for field, value in zip(dataclasses.fields(spec), dataclasses.astuple(spec), strict=True)
    )


@custom_op(
    "mcore_logprobs::row_stats",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, Tensor? bias, Tensor? threshold, "
    f"Tensor? row_temperature, {_SPEC_SCHEMA}) -> Tensor",
)
def _row_stats(
    logits: Tensor,
    target: Tensor,
    bias: Tensor | None,
    threshold: Tensor | None,
    row_temperature: Tensor | None,
    *spec: Any,
) -> Tensor:
    return triton_stats.row_stats(
        logits,
        target,
        RowSpec(*spec),
        bias=bias,
        threshold=threshold,
        temperature=row_temperature,
    )


@_row_stats.register_fake
def _(
    logits: Tensor,
    target: Tensor,
    bias: Tensor | None,
    threshold: Tensor | None,
    row_temperature: Tensor | None,
    *spec: Any,
) -> Tensor:
    return logits.new_empty(len(RowSpec(*spec).fields), logits.shape[0], dtype=torch.float32)


@custom_op(
    "mcore_logprobs::block_stats",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, int block, Tensor? bias, Tensor? threshold, "
    f"Tensor? row_temperature, {_SPEC_SCHEMA}) -> Tensor",
)
def _block_stats(
    logits: Tensor,
    target: Tensor,
    block: int,
    bias: Tensor | None,
    threshold: Tensor | None,
    row_temperature: Tensor | None,
    *spec: Any,
) -> Tensor:
    return triton_stats.block_stats(
        logits,
        target,
        RowSpec(*spec),
        block=block,
        bias=bias,
        threshold=threshold,
        temperature=row_temperature,
    )


@_block_stats.register_fake
def _(
    logits: Tensor,
    target: Tensor,
    block: int,
    bias: Tensor | None,
    threshold: Tensor | None,
    row_temperature: Tensor | None,
    *spec: Any,
) -> Tensor:
    given = RowSpec(*spec)
    shape = (max(1, -(-given.valid // block)), len(given.fields), logits.shape[0])
    return logits.new_empty(shape, dtype=torch.float32)


@custom_op(
    "mcore_logprobs::count_higher",
    mutates_args=(),
    schema="(Tensor logits, Tensor target, Tensor threshold, int valid) -> Tensor",
)
def _count_higher(logits: Tensor, target: Tensor, threshold: Tensor, valid: int) -> Tensor:
    return triton_rank.count_higher(logits, target, threshold, valid=valid)


@_count_higher.register_fake
def _(logits: Tensor, target: Tensor, threshold: Tensor, valid: int) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@custom_op(
    "mcore_logprobs::grad_logits",
    mutates_args=("out",),
    schema="(Tensor logits, Tensor target, Tensor shift, Tensor coef, Tensor? bias, "
    f"Tensor? row_temperature, Tensor(a!) out, {_SPEC_SCHEMA}) -> ()",
)
def _grad_logits(
    logits: Tensor,
    target: Tensor,
    shift: Tensor,
    coef: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    out: Tensor,
    *spec: Any,
) -> None:
    triton_grad.grad_logits(
        logits,
        target,
        shift,
        coef,
        RowSpec(*spec),
        bias=bias,
        temperature=row_temperature,
        out=out,
    )


@_grad_logits.register_fake
def _(*_: Any) -> None:
    return None


# ---- entries -----------------------------------------------------------------------------------


def entries_grad(
    logits: Tensor,
    column: Tensor,
    upstream: Tensor,
    shift: Tensor | None,
    coef: Tensor | None,
    spec: RowSpec,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    out: Tensor,
    chunk_size: int = 0,
) -> None:
    """As `kernels.reference.entries_grad`; dtypes and strides as in `row_stats`, for out too."""
    _entries_grad(logits, column, upstream, shift, coef, bias, temperature, out, *flatten(spec))


def _run_entries_grad(
    logits: Tensor, column: Tensor, upstream: Tensor, shift: Any, coef: Any, bias: Any,
    temperature: Any, out: Tensor, *spec: Any,
) -> None:  # fmt: skip
    triton_entries.entries_grad(
        logits, column, upstream, shift, coef, unflatten(*spec),
        bias=bias, temperature=temperature, out=out,
    )  # fmt: skip


_entries_grad = operator(
    "entries_grad(Tensor logits, Tensor column, Tensor upstream, Tensor? shift, Tensor? coef, "
    f"Tensor? bias, Tensor? row_temperature, Tensor(a!) out, {SPEC_SCHEMA}) -> ()",
    _run_entries_grad,
    lambda *_: None,
)
