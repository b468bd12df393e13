"""What `LazyLogits` record of a torch function, so that no real logits are computed for it.

Recorded functions run twice and cost nothing: on a meta tensor, for the shape or the error that
torch gives, and on the places of the rows, of which the last dimension stands for the vocabulary.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.checks import autocast_enabled, check_scale
from mcore_logprobs.groups import group_size
from mcore_logprobs.sources.lazy import LazyLogits
from mcore_logprobs.sources.lazy_head import RowSummary
from mcore_logprobs.sources.lazy_rows import Rows, View

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Not recorded, so that real logits are needed.
NOT: object = object()


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def is_in_place(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    return name.endswith("_") and (not name.startswith("__") or name.startswith("__i"))


_REARRANGED = words(
    """
    transpose swapaxes swapdims permute movedim moveaxis squeeze unsqueeze select narrow split
    split_with_sizes chunk unbind tensor_split flatten unflatten
    """
)
_TURNED = words("flip roll")  # keep the shape: which dimensions they are of says what they do
_RESHAPED: dict[str, Callable[..., Tensor]] = {
    "view": Tensor.view,
    "view_as": Tensor.view,
    "reshape": Tensor.reshape,
    "reshape_as": Tensor.reshape,
    "expand": Tensor.expand,
    "expand_as": Tensor.expand,
    "broadcast_to": Tensor.expand,
}
_PRODUCTS = words("mul __mul__ __rmul__ multiply mul_ __imul__ multiply_")
_QUOTIENTS = words(
    """
    div __truediv__ true_divide divide div_ __itruediv__ true_divide_ divide_ __div__ __idiv__
    """
)


def recorded(name: str, func: Any, handle: LazyLogits, args: Any, kwargs: Any) -> object:
    view = handle.view_of_head
    if name in _REARRANGED or (name in _TURNED and _leaves_columns(name, handle, args, kwargs)):
        return _rearranged(func, handle, args, kwargs)
    if name in _RESHAPED:
        return _reshaped(name, func, handle, args, kwargs)
    if name == "__getitem__":
        return _indexed(handle, args[0])
    if name == "__iter__":
        return iter(_rearranged(Tensor.unbind, handle, (), {}))
    if name in _SUMMARIZED:
        return _summarized(name, handle, args, kwargs)
    if name == "index_select":
        return _selected(handle, *args, **kwargs)
    if name == "contiguous":
        return handle if _probe(view).is_contiguous() else _like(handle, view.copy(contiguous=True))
    if name == "clone":
        return _like(handle, view.copy(contiguous=_asks_for_contiguous(kwargs)))
    if name == "detach":
        return LazyLogits.of(view, gradient=False)
    if name == "alias":
        return _like(handle, view)
    if name in _PRODUCTS or name in _QUOTIENTS:
        return _scaled(name, handle, args, kwargs)
    return _cast(name, handle, args, kwargs)


def _like(handle: LazyLogits, view: View) -> LazyLogits:
    handle.used()
    return LazyLogits.of(view, gradient=handle.requires_grad)


def _probe(view: View) -> Tensor:
    return torch.empty_strided(view.shape, view.strides, dtype=view.dtype, device="meta")


def _pad(view: View) -> int:
    """Columns instead of the vocabulary's: neither 1, which is squeezed, nor as many as those."""
    return 3 if view.width == 2 else 2


def _padded(x: Tensor, pad: int) -> Tensor:
    return x.unsqueeze(-1).expand(*x.shape, pad)


def _tokens_of(expected: Any, found: Any, width: int, pad: int) -> Tensor | None:
    """Of a result's places `[*lead, pad]` the `[*lead]`, where its last dimension is still the
    vocabulary's; else None.
    """
    lead = found.shape[:-1]
    if found.dim() == 0 or found.shape[-1] != pad or expected.shape != (*lead, width):
        return None
    return found[..., 0]


def _rearranged(func: Any, handle: LazyLogits, args: Any, kwargs: Any) -> Any:
    view = handle.view_of_head
    pad = _pad(view)
    expected = func(_probe(view), *args, **kwargs)  # torch's errors are the caller's
    try:
        arranged = func(_padded(view.places, pad), *args, **kwargs)
    except (RuntimeError, IndexError):
        return NOT
    several = not isinstance(expected, Tensor)
    expected, arranged = (expected, arranged) if several else ((expected,), (arranged,))
    if len(expected) != len(arranged):
        return NOT
    places = [_tokens_of(e, f, view.width, pad) for e, f in zip(expected, arranged, strict=True)]
    handles = tuple(_like(handle, view.at(x)) for x in places if x is not None)
    if len(handles) < len(places):
        return NOT
    return handles if several else handles[0]


def _leaves_columns(name: str, handle: LazyLogits, args: Any, kwargs: Any) -> bool:
    """Whether `flip` or `roll` is of named dimensions, and not of the vocabulary's."""
    dims = kwargs.get("dims", args if name == "flip" else args[1:])
    if isinstance(dims, int):
        dims = (dims,)
    if len(dims) == 1 and isinstance(dims[0], tuple | list):
        dims = dims[0]
    last = handle.dim() - 1
    return len(dims) > 0 and all(isinstance(x, int) and x not in (-1, last) for x in dims)


def _reshaped(name: str, func: Any, handle: LazyLogits, args: Any, kwargs: Any) -> Any:
    view = handle.view_of_head
    if name.endswith("_as") and args:
        args = (torch.empty(args[0].shape, dtype=view.dtype, device="meta"),)
    expected = func(_probe(view), *args, **kwargs)  # torch's errors are the caller's
    if expected.dtype != view.dtype or expected.dim() == 0 or expected.shape[-1] != view.width:
        return NOT
    pad = _pad(view)
    shaped = _RESHAPED[name](_padded(view.places, pad), (*expected.shape[:-1], pad))
    return _like(handle, view.at(shaped[..., 0]))


def _indexed(handle: LazyLogits, key: Any) -> object:
    """`handle[key]`: the vocabulary's dimension must be taken whole."""
    view = handle.view_of_head
    keys = list(key) if isinstance(key, tuple) else [key]
    dims = len(view.places.shape) + 1
    taken = 0
    for k in keys:
        if isinstance(k, Tensor) and k.dtype in (torch.bool, torch.uint8):
            taken += k.dim()
        elif isinstance(k, bool):
            return NOT
        elif k is not None and k is not Ellipsis:
            if isinstance(k, list) and (not k or isinstance(k[0], (bool, list, Tensor))):
                return NOT
            if not isinstance(k, (slice, list, Tensor, numbers.Integral)):
                return NOT
            taken += 1
    if taken > dims:
        return NOT
    has_rest = any(k is Ellipsis for k in keys)
    if taken == dims or (has_rest and keys[-1] is not Ellipsis):
        last = keys.pop()
        if last is None or not isinstance(last, slice):
            return NOT
        kept = range(view.width)[last]
        if kept != range(len(kept)) or not kept:
            return NOT
        if len(kept) < view.width:
            if group_size(view.rows.head.tp_group) > 1:  # the ids of a rank's columns would change
                return NOT
            view = replace(view, columns=len(kept))
    keys = [k.cpu() if isinstance(k, Tensor) else k for k in keys]
    places = view.places[tuple(keys)]  # torch's errors are the caller's
    return _like(handle, view.at(places))


def _selected(handle: LazyLogits, dim: int, index: Tensor, **rest: object) -> object:
    view = handle.view_of_head
    lead = view.places.dim()
    if rest or not -lead - 1 <= dim < lead or dim == -1:
        return NOT
    places = view.places.index_select(dim if dim >= 0 else dim + 1, index.cpu())
    return _like(handle, view.at(places))


_AVERAGED = ("mean", "sum")
_SUMMARIZED = ("max", "min", "argmax", "argmin", "linalg_vector_norm", *_AVERAGED)
# What autocast on CUDA computes, and gives, in float32.
_IN_FLOAT32 = ("sum", "linalg_vector_norm")


def _summarized(name: str, handle: LazyLogits, args: Any, kwargs: Any) -> Any:
    """Over the vocabulary and without gradients: what metrics and acceptance counts are made of.

    A mean and a sum have their gradient: of all logits times 0 they are a loss that joins the graph
    and asks for nothing.
    """
    options = dict(kwargs)
    dtype = options.pop("dtype", None)
    if dtype is not None and not dtype.is_floating_point:
        return NOT  # each logit is cast
    if dtype is None:
        on_cuda = handle.device.type == "cuda" and handle.dtype in _FLOATS
        in_float32 = on_cuda and name in _IN_FLOAT32 and autocast_enabled("cuda")
        dtype = torch.float32 if in_float32 else handle.dtype
    wants = torch.is_grad_enabled() and handle.requires_grad
    view, dims = handle.view_of_head, (*args, *options.values())
    last = len(dims) == 1 and set(options) <= {"dim"} and not isinstance(dims[0], Tensor)
    last = last and dims[0] in (-1, handle.dim() - 1)
    if name in _AVERAGED:
        handle.used()
        if view.is_cut or not (last or not dims):
            return NOT
        rows = view.mean(gradient=wants)
        if name == "sum":
            rows = rows * view.width
        return (rows if last else getattr(rows, name)()).to(dtype)
    if name == "linalg_vector_norm" and args:  # its order, not its dimension
        return NOT
    if view.is_cut or not last or (wants and not name.startswith("arg")):
        return NOT
    summary = RowSummary(*(x.clone() for x in view.summary()))  # the caller may write into it
    if name.startswith("arg"):
        return summary.largest_column if name == "argmax" else summary.smallest_column
    if name == "max":
        return torch.return_types.max((summary.largest.to(dtype), summary.largest_column))
    if name == "min":
        return torch.return_types.min((summary.smallest.to(dtype), summary.smallest_column))
    return summary.norm.to(dtype)


def joined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`cat` and `stack` of handles of one call."""
    parts = args[0] if args else kwargs.get("tensors", ())
    rest = {k: v for k, v in kwargs.items() if k != "tensors"}
    if "out" in rest or not parts or not all(isinstance(x, LazyLogits) for x in parts):
        return NOT
    views = [x.view_of_head for x in parts]
    first = views[0]
    head = first.rows.head
    alike = {
        (id(v.rows.head), v.width, v.dtype, x.requires_grad)
        for v, x in zip(views, parts, strict=True)
    }
    if len(alike) > 1 or any(x.written() is not None for x in parts):
        return NOT
    pad = _pad(first)
    expected = func([_probe(v) for v in views], *args[1:], **rest)

    def join(each: Callable[[View], Tensor]) -> Tensor | None:
        of_all = func([_padded(each(v), pad) for v in views], *args[1:], **rest)
        return _tokens_of(expected, of_all, first.width, pad)

    rows = join(View.head_rows)
    if rows is None:
        return NOT
    temperatures = [v.temperature for v in views]
    temperature: float | Tensor = temperatures[0]
    if any(isinstance(t, Tensor) or t != temperature for t in temperatures):
        device = head.hidden.device

        def temperature_of(view: View) -> Tensor:
            divisor = torch.as_tensor(view.temperature, dtype=first.rows.dtype, device=device)
            return divisor.expand(view.places.shape)

        of_each = join(temperature_of)
        assert of_each is not None
        temperature = of_each.reshape(-1)
    joint = Rows(head, rows.reshape(-1), temperature, first.width)
    made = View.all_of(joint, rows.shape, first.dtype)
    for part in parts:
        part.used()
    return _like(parts[0], made)


def _scaled(name: str, handle: LazyLogits, args: Any, kwargs: Any) -> object:
    """By numbers above 0, or tensors of such that broadcast with a last dimension of 1."""
    other = args[0] if args else kwargs.get("other")
    if len(args) + len(kwargs) != 1:
        return NOT
    view = handle.view_of_head
    divisor: float | Tensor
    if isinstance(other, numbers.Real) and not isinstance(other, bool):
        if not 0.0 < float(other) < math.inf:
            return NOT
        divisor = float(other) if name in _QUOTIENTS else 1.0 / float(other)
        if not _is_temperature(divisor, view.temperature):
            return NOT
    elif isinstance(other, Tensor) and not isinstance(other, LazyLogits):
        if other.requires_grad or other.is_complex() or other.dtype == torch.bool:
            return NOT
        if other.dim() > handle.dim() or (other.dim() and other.shape[-1] != 1):
            return NOT
        try:
            per_token = (other.squeeze(-1) if other.dim() else other).expand(view.places.shape)
        except RuntimeError:
            return NOT
        if not bool(((other > 0) & other.isfinite()).all()):  # a sync
            return NOT
        per_token = per_token.detach().to(handle.device, view.rows.dtype, copy=True)
        divisor = per_token if name in _QUOTIENTS else per_token.reciprocal()
    else:
        return NOT
    if is_in_place(name):
        if view.columns is not None:
            return NOT  # the other columns of the same memory are not scaled
        places = view.places
        if any(
            n > 1 and not stride for n, stride in zip(places.shape, places.stride(), strict=True)
        ):
            return NOT  # torch refuses to write to an expanded tensor, of real logits
        if view.rows.read_by_function or (handle.requires_grad and not torch.is_grad_enabled()):
            return NOT  # one gradient without the scale, another with it
        view.rows.divide_(view.places, divisor)
        view.rows.changed()
        view.rows.scaled_without_gradient |= not handle.requires_grad
        return handle
    dtype = (
        view.dtype if isinstance(other, numbers.Real) else torch.result_type(_probe(view), other)
    )
    if dtype != view.dtype and not {dtype, view.dtype} <= set(_FLOATS):
        return NOT
    made = view.copy(dtype)
    made.rows.divide_(made.places, divisor)
    return _like(handle, made)


def _is_temperature(divisor: float, temperature: float | Tensor) -> bool:
    """Whether logits divided by both have one temperature that operations take."""
    both = [divisor] if isinstance(temperature, Tensor) else [divisor, divisor * temperature]
    return all(check_scale.accepts(x) for x in both)


def _asks_for_contiguous(kwargs: dict[str, object]) -> bool:
    return kwargs.get("memory_format") is torch.contiguous_format


def _cast(name: str, handle: LazyLogits, args: Any, kwargs: Any) -> Any:
    """To another dtype among float32, bfloat16 and float16, or to what it is already."""
    dtypes = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    copy = False
    if name in dtypes and not args:
        dtype = dtypes[name]
    elif name == "double" and not args:
        dtype = torch.float64
    elif name == "type_as":
        other = args[0] if args else kwargs["other"]
        dtype, device = other.dtype, other.device
    elif name == "type" and args and isinstance(args[0], torch.dtype):
        dtype = args[0]
    elif name == "cpu":
        device = torch.device("cpu")
    elif name == "cuda" and not args and not kwargs:
        device = torch.device("cuda")
    elif name == "to":
        kwargs = dict(kwargs)
        # (other or dtype, non_blocking, copy), or (device, dtype, non_blocking, copy)
        place = 2 if args and isinstance(args[0], Tensor | torch.dtype) else 3
        copy = bool(kwargs.pop("copy", args[place] if len(args) > place else False))
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, Tensor):
            device, dtype = other.device, other.dtype
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*args[:place], **kwargs)
    else:
        return NOT
    if device == torch.device("cuda"):  # the current one, which may be another than the logits'
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in (None, handle.device):
        return NOT
    if dtype in (None, handle.dtype):
        if not copy:
            return handle
    elif dtype not in _FLOATS or handle.dtype not in _FLOATS:
        return NOT
    view = handle.view_of_head.copy(dtype, contiguous=_asks_for_contiguous(kwargs))
    return _like(handle, view)
