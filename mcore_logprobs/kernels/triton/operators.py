"""The backend's functions as operators of torch, so that torch.compile and profilers see them.

They know no gradient: they are called within autograd functions. A `Chunk` and a `StatsSpec` pass
as their tensors and numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, fields, replace
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.kernels.chunk import Chunk, Processing
from mcore_logprobs.kernels.stats import StatsSpec

_CHUNK = 7  # arguments of one chunk
# The declaration of a StatsSpec's arguments.
SPEC = ", ".join(f"bool {field.name}" for field in fields(StatsSpec))


def chunk_schema(prefix: str = "") -> str:
    """The declaration of a chunk's arguments."""
    return (
        f"Tensor {prefix}logits, int {prefix}valid, float {prefix}logit_scale, "
        f"float? {prefix}softcap, float {prefix}temperature, Tensor? {prefix}row_temperature, "
        f"Tensor? {prefix}bias"
    )


def arguments(*values: object) -> tuple[Any, ...]:
    """Chunks and specs as the arguments that are declared for them; others as they are."""
    flat: list[object] = []
    for value in values:
        if isinstance(value, Chunk):
            how = value.processing
            number, per_row = how.temperature, None
            if isinstance(number, Tensor):
                number, per_row = 1.0, number
            flat += [value.logits, value.valid, float(how.logit_scale)]
            flat += [None if how.softcap is None else float(how.softcap)]
            flat += [float(number), per_row, how.bias]
        else:
            flat += astuple(value) if isinstance(value, StatsSpec) else [value]
    return tuple(flat)


def chunks_of(count: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first arguments as `count` chunks, then the others."""
    chunks = []
    for start in range(0, count * _CHUNK, _CHUNK):
        logits, valid, scale, softcap, number, per_row, bias = values[start : start + _CHUNK]
        processing = Processing.of(scale, softcap, number, bias)
        if per_row is not None:  # no launches for multipliers of rows: `common.row_multiplier`
            processing = replace(processing, temperature=per_row)
        chunks.append(Chunk(logits, valid, processing))
    return (*chunks, *values[count * _CHUNK :])


def operator(schema: str, run: Callable[..., object], fake: Callable[..., object]) -> Any:
    """The operator `mcore_logprobs::NAME` of a schema `NAME(...) -> ...`.

    Args:
        schema: an argument that is written to is called out.
        run: takes the arguments one by one.
        fake: takes the same, gives empty tensors of the results' shapes and dtypes.
    """
    name, bracket, declared = schema.partition("(")
    writes = ["out"] if "Tensor(a!) out" in declared else []
    made = torch.library.custom_op(
        f"mcore_logprobs::{name}", run, mutates_args=writes, schema=bracket + declared
    )
    made.register_fake(fake)
    return made


def writes_out(*_: Tensor) -> None:
    """The fake of an operator that writes to `out` and returns nothing."""
