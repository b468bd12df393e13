"""Functions that a user passes in: called for some rows, and their autograd graph checked.

The policy loss that is formed in the head and its counterpart on real logits share `sum_of_losses`,
so that both refuse the same mistakes.

Gradients flow only to a function's arguments. A *captured* parameter, one in a closure, would
silently lose its gradient, so it is found in the graph, and refused by the name that the function
has for it.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

from mcore_logprobs.checks import check_called
from mcore_logprobs.collectives import saved_tensors_hooks
from mcore_logprobs.sources.lazy_head import writes_to

LossFn = Callable[..., Tensor]


def check_loss_fn(
    loss_fn: object, per_token_tensors: Sequence[Tensor], named: Sequence[str] = ()
) -> None:
    """A callable that takes log-probabilities, entropy and these tensors, or a ValueError.

    Args:
        named: what it is given by name besides.
    """
    first = ("logprobs", "entropy or None")
    check_called("loss_fn", loss_fn, first, len(per_token_tensors), named)


def taken_by_name(loss_fn: Any, given: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Those of the tensors whose names are parameters of the function."""
    try:
        parameters = inspect.signature(loss_fn).parameters
    except (TypeError, ValueError):  # no function, or a builtin
        return {}
    return {name: x for name, x in given.items() if x is not None and name in parameters}


def check_denominator(denominator: float | Tensor) -> None:
    """A finite number above 0, or a tensor of one such element.

    The value of a tensor is seen on a CPU only: elsewhere it would take a sync.

    Raises:
        ValueError: says what was expected and what was given.
    """
    if isinstance(denominator, Tensor):
        if denominator.numel() != 1 or denominator.requires_grad or denominator.is_complex():
            raise ValueError(
                "denominator: expected a number or a tensor of one real element without gradient, "
                f"got shape {tuple(denominator.shape)}, {denominator.dtype}"
            )
        if denominator.device.type != "cpu":
            return  # pragma: no cover (CUDA)
        denominator = denominator.item()
    elif isinstance(denominator, bool) or not isinstance(denominator, numbers.Real):
        raise ValueError(f"denominator: expected a number, got {denominator!r}")
    if not (math.isfinite(denominator) and denominator > 0):
        raise ValueError(f"denominator: expected a finite number > 0, got {denominator!r}")


def float64_denominator(denominator: float | Tensor, device: torch.device) -> Tensor:
    """The checked denominator as a float64 scalar on the device; no sync."""
    check_denominator(denominator)
    if isinstance(denominator, Tensor):
        return denominator.detach().reshape(()).to(device, torch.float64)
    return torch.full((), float(denominator), dtype=torch.float64, device=device)


def sum_of_losses(
    fn: LossFn,
    logprobs: Tensor,
    entropy: Tensor | None,
    tensors: tuple[Tensor, ...],
    *,
    valid_mask: Tensor,
    denominator: Tensor,
    named: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The sum of `fn`'s losses over the denominator, a float64 scalar; 0 where no row counts.

    The function gets copies, so that it may change them in place. Where gradients are enabled and
    logprobs or entropy require one, the result is differentiable by them and by nothing else.

    Args:
        logprobs, entropy, tensors: `[n]` each, the tensors `[n, ...]`.
        valid_mask: bool `[n]`, the rows that count.
        denominator: of `float64_denominator`.
        named: more statistics `[n]`, given by name.

    Raises:
        ValueError: no loss per row; a loss cut off from logprobs and entropy where one of them
            requires a gradient; a loss that depends on another tensor that requires one.
    """
    copies = [None if x is None else x.clone() for x in (logprobs, entropy)]
    more = {name: x.clone() for name, x in (named or {}).items()}
    # The originals too: under a caller's torch.compile the copies are inside a compiled node.
    ours = (logprobs, entropy, *copies, *(named or {}).values(), *more.values())
    roots = [graph.get_gradient_edge(x).node for x in ours if x is not None and x.requires_grad]
    loss = fn(*copies, *(t.detach().clone() for t in tensors), **more)
    if not isinstance(loss, Tensor) or loss.shape != logprobs.shape:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn: expected a loss per row of shape {tuple(logprobs.shape)}, got {got}"
        )
    if loss.is_complex():
        raise ValueError(f"loss_fn: expected real numbers, got a loss of {loss.dtype}")
    if torch.is_grad_enabled():
        _check_graph(loss, roots, fn)
    total = torch.where(valid_mask, loss, 0.0).sum(dtype=torch.float64) / denominator
    return torch.where(valid_mask.any(), total, 0.0)


def _check_graph(loss: Tensor, roots: list[Any], fn: LossFn) -> None:
    connected, captured = walk_graph(loss, roots)
    if captured:
        raise ValueError(
            f"loss_fn: the loss depends on {name_of(captured, fn)}, which requires a gradient "
            "but gets none here: detach it, or take the loss of linear_token_stats's results"
        )
    if roots and not connected:
        raise ValueError(
            "loss_fn: the loss is cut off from the log-probabilities and the entropy, so that "
            "nothing would learn from it: expected a differentiable function of them, got a loss "
            f"of {loss.dtype} that was detached, formed under no_grad, made constant or rounded "
            "(where no row counts return 0 * logprobs: it is called for some rows at a time)"
        )


def graph_of_its_own() -> AbstractContextManager[object]:
    """Within it autograd saves tensors as they are, though the caller packs what it saves.

    For a graph that ends within the call: a checkpoint would run all of the call once more for each
    tile that is differentiated, offloading would copy what is needed at once.
    """
    if torch.compiler.is_compiling() or saved_tensors_hooks() is None:
        return nullcontext()
    return graph.saved_tensors_hooks(_with_version, _if_unchanged)


def _with_version(saved: Tensor) -> tuple[Tensor, int]:
    return saved, saved._version


def _if_unchanged(packed: tuple[Tensor, int]) -> Tensor:
    """As autograd itself does where no hook packs a tensor."""
    saved, version = packed
    if saved._version != version:
        raise RuntimeError(
            f"a function's tensor of shape {tuple(saved.shape)}, which its gradient needs, was "
            "modified by an inplace operation: expected a function that changes copies alone"
        )
    return saved


def call_without_writes(fn: Callable[..., object], z: Tensor, tensors: Sequence[Tensor]) -> object:
    """`fn(z, *tensors)`, of per-token tensors that the backward gives it again.

    Raises:
        ValueError: it wrote to one of them, and would read what it wrote.
    """
    if torch.compiler.is_compiling():
        return fn(z, *tensors)
    before = [writes_to(t) for t in tensors]
    result = fn(z, *tensors)
    for place, (t, then) in enumerate(zip(tensors, before, strict=True)):
        if writes_to(t) != then:
            raise ValueError(
                f"fn: wrote to per_token_tensors[{place}], which is the caller's and is read again "
                "in the backward: expected a function that changes copies alone"
            )
    return result


# ---- captured parameters -----------------------------------------------------------------------


def walk_graph(result: Tensor, roots: list[Any]) -> tuple[bool, list[Any]]:
    """Search the autograd graph of a result for our roots and for leaves of others.

    Returns:
        (whether the graph reaches a root; the nodes up to the first leaf that is not ours, whose
        own node is the last. Without such a leaf the list is empty.)
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
