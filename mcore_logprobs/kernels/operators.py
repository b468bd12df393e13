"""Functions as operators of torch, at no price where nobody looks.

`torch.library.custom_op` takes 14 to 41 us a call, more than a small call has to spare; a schema
and two functions given to a `Library` take 11, most of it for twenty arguments on their way to C++
and back. In eager mode on plain tensors, under no mode and no profiler, the function itself is
called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import Parameter

from mcore_logprobs.kernels.stats import RowSpec

__all__ = ["SPEC_SCHEMA", "flatten", "operator", "unflatten"]

_LIBRARY = Library("mcore_logprobs", "DEF")


def operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator `mcore_logprobs::NAME` of a schema `NAME(...) -> ...`, for torch.compile too.

    It knows no gradient: call it within an autograd function. `overload` is the operator itself.

    Args:
        run: takes the arguments one by one, on any device.
        fake: takes the same, gives empty tensors of the results' shapes and dtypes.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"mcore_logprobs::{name}", fake, lib=_LIBRARY)
    found = getattr(torch.ops.mcore_logprobs, name).default
    arguments = enumerate(found._schema.arguments)
    written = [i for i, each in arguments if each.alias_info and each.alias_info.is_write]

    def run_and_tell(*args: Any) -> Any:
        result = run(*args)
        # A kernel's writes are not seen by themselves: autograd must know that a tensor which
        # another operation has saved is not what it was.
        for place in written:
            if not args[place].is_inference():
                torch.autograd.graph.increment_version(args[place])
        return result

    here = run_and_tell if written else run
    _LIBRARY.impl(name, here, "CompositeExplicitAutograd")

    def call(*args: Any) -> Any:
        return found(*args) if _watched(args) else here(*args)

    call.overload = found  # type: ignore[attr-defined]
    return call


# Of what is no plain tensor or number, torch must ask the subclass, or the tracer.
_PLAIN = frozenset((Tensor, Parameter, int, float, bool, str, type(None)))


def _watched(args: tuple[Any, ...]) -> bool:
    """Whether a call must pass the dispatcher: someone traces, counts, profiles or wraps."""
    return (
        torch.compiler.is_compiling()  # first: torch.compile does not trace the others
        or not _PLAIN.issuperset(map(type, args))
        or torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0  # pre-dispatch tracing is one of these
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd._profiler_enabled()
        or torch._C._is_tracing()
    )


# A RowSpec travels as its fields: their declaration in a schema, and the way there and back.
_TYPES = {"int": "int", "float": "float", "float | None": "float?", "bool": "bool"}
_FIELDS = dataclasses.fields(RowSpec)
SPEC_SCHEMA = ", ".join(f"{_TYPES[str(field.type)]} {field.name}" for field in _FIELDS)
unflatten = lru_cache(1024)(RowSpec)


@lru_cache(1024)
def flatten(spec: RowSpec) -> tuple[Any, ...]:
    """The values of a spec's fields, as `SPEC_SCHEMA` declares them."""
    # A schema takes no int for a float.
    return tuple(
        float(value) if "float" in str(field.type) and value is not None else value
        for field, value in zip(_FIELDS, dataclasses.astuple(spec), strict=True)
    )
