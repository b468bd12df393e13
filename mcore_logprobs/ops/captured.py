"""Captured parameters: tensors that require a gradient and reach a user's function otherwise than
by its arguments.

Gradients flow only to the arguments. A parameter in a closure would silently lose its gradient,
so it is found in the autograd graph, and refused by the name that the function has for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def walk_graph(result: Tensor, roots: list[Any]) -> tuple[bool, list[Any]]:
    """(whether the graph reaches a root, the nodes up to the first leaf that is none of ours).

    The list is empty without such a leaf; the leaf's own node is its last.
    """
    seen: list[object] = []
    known = set()
    connected = False
    stack: list[Any] = [
        result.grad_fn if result.grad_fn is not None or not result.requires_grad else result
    ]
    while stack:
        node = stack.pop()
        if node is None or node in known:
            continue
        if node in roots:
            connected = True
            continue
        known.add(node)
        seen.append(node)
        if node is result or type(node).__name__ == "AccumulateGrad":
            return connected, seen
        stack.extend(parent for parent, _ in node.next_functions)
    return connected, []


def name_of(nodes: list[Any], fn: Callable[..., object]) -> str:
    """The name under which the function holds a tensor of this part of the graph."""
    last = nodes[-1]
    leaf = last if isinstance(last, Tensor) else last.variable
    for name, tensor in _held_tensors(fn):
        if tensor is leaf or (tensor.grad_fn is not None and tensor.grad_fn in nodes):
            return f"{name!r} (shape {tuple(tensor.shape)})"
    return f"a tensor of shape {tuple(leaf.shape)} other than its arguments"


def _held_tensors(fn: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors that a function reaches: its closure, defaults, globals and object."""
    if isinstance(fn, functools.partial):
        held = {f"argument {place}": value for place, value in enumerate(fn.args)}
        yield from _tensors_in(held | fn.keywords)
        yield from _held_tensors(fn.func)
        return
    yield from _tensors_in({"self": getattr(fn, "__self__", None)})
    function = getattr(fn, "__func__", fn)
    code = getattr(function, "__code__", None)
    if code is None:  # an object that can be called
        yield from _tensors_in({type(fn).__name__: fn})
        return
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    held = {}
    for name, cell in cells.items():
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    defaults = enumerate(function.__defaults__ or ())
    held |= {f"default {place}": value for place, value in defaults}
    held |= function.__kwdefaults__ or {}
    held |= {name: function.__globals__.get(name) for name in code.co_names}
    yield from _tensors_in(held)


def _tensors_in(held: dict[str, object]) -> Iterator[tuple[str, Tensor]]:
    for name, value in held.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, torch.nn.Module):
            for inner_name, parameter in value.named_parameters():
                yield f"{name}.{inner_name}", parameter
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in({f"{name}[{i}]": x for i, x in enumerate(value)})
        elif isinstance(value, dict):
            yield from _tensors_in({f"{name}[{key!r}]": x for key, x in value.items()})
        else:
            inside = getattr(value, "__dict__", None)
            for inner_name, tensor in inside.items() if isinstance(inside, dict) else ():
                if isinstance(tensor, Tensor):
                    yield f"{name}.{inner_name}", tensor
