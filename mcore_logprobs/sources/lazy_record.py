"""What `LazyLogits` does with a torch function: record it, or compute real logits for it.

Recorded functions run twice and cost nothing: on a meta tensor, for the shape or the error that
torch gives, and on the places of the rows, of which the last dimension stands for the vocabulary.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.groups import group_size
from mcore_logprobs.sources.lazy import LazyLogits
from mcore_logprobs.sources.lazy_head import RowSummary
from mcore_logprobs.sources.lazy_rows import Rows, View

# As an attribute: in torch 2.4 it is no module to import from.
set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Not recorded, so that real logits are needed.
_NOT: object = object()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Answered by the handle itself.
_METADATA = _words(
    """
    size dim ndimension numel nelement stride storage_offset is_contiguous element_size
    is_floating_point is_complex is_signed is_conj is_neg is_inference is_shared get_device
    has_names __len__ __hash__ is_same_size
    """
)
_PROPERTIES = _words(
    """
    shape dtype device requires_grad ndim is_leaf grad_fn layout is_cuda is_cpu is_meta
    is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_xpu is_mps is_xla is_mtia
    is_ipu is_vulkan is_maia itemsize nbytes _version names name output_nr retains_grad
    _backward_hooks
    """
)
# Give other tensors of its kind, without its values.
_MAKERS = _words(
    """
    new_empty new_zeros new_ones new_full new_tensor zeros_like ones_like empty_like full_like
    rand_like randn_like
    """
)
_REARRANGED = _words(
    """
    transpose swapaxes swapdims permute movedim moveaxis squeeze unsqueeze select narrow split
    split_with_sizes chunk unbind tensor_split flatten unflatten
    """
)
_TURNED = _words("flip roll")  # keep the shape: which dimensions they are of says what they do
_RESHAPED: dict[str, Callable[..., Tensor]] = {
    "view": Tensor.view,
    "view_as": Tensor.view,
    "reshape": Tensor.reshape,
    "reshape_as": Tensor.reshape,
    "expand": Tensor.expand,
    "expand_as": Tensor.expand,
    "broadcast_to": Tensor.expand,
}
_PRODUCTS = _words("mul __mul__ __rmul__ multiply mul_ __imul__ multiply_")
_QUOTIENTS = _words(
    """
    div __truediv__ true_divide divide div_ __itruediv__ true_divide_ divide_ __div__ __idiv__
    """
)
_HARMLESS_HOOKS = ("torch.distributed.fsdp.", "megatron.core.distributed.fsdp.", "megatron_fsdp.")


def _not_traced(function: Callable[..., object]) -> Callable[..., object]:
    """A graph break for torch.compile, which compiles nothing within: `torch.compiler.disable`
    without the import of the compiler.
    """

    @functools.wraps(function)
    def call(*args: object) -> object:
        before = set_eval_frame(None)
        try:
            return function(*args)
        finally:
            set_eval_frame(before)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


@_not_traced
def torch_function(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return _property(name, func, args)
    self = args[0] if args else kwargs.get("input")
    rest, options = args[1:], {k: v for k, v in kwargs.items() if args or k != "input"}
    handle = self if isinstance(self, LazyLogits) else None
    if handle is not None:
        if name in _METADATA or (name == "type" and len(args) == 1 and not kwargs):
            return _itself(func, args, kwargs)
        if name == "requires_grad_" and args[1:] in ((), (True,)):
            if not handle.requires_grad:
                handle.make_leaf(name)
            return handle
        if name == "register_hook" and is_harmless(args[1]):
            return _itself(func, args, kwargs)
        if name in _MAKERS:
            like = torch.empty((), dtype=handle.dtype, device=handle.device).expand(handle.shape)
            return func(like, *rest, **options)
        if handle.written() is None:
            recorded = _recorded(name, func, handle, rest, options)
            if recorded is not _NOT:
                return recorded
    elif name in ("cat", "concat", "concatenate", "stack"):
        recorded = _joined(func, args, kwargs)
        if recorded is not _NOT:
            return recorded
    elif func is torch.autograd.backward and args:
        return _backward_from(args, kwargs)
    elif func is torch.autograd.grad:
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
        for x in _lazy_in(inputs):
            x.check_unused("torch.autograd.grad")
    return _with_real(name, func, args, kwargs)


def _backward_from(args: Any, kwargs: Any) -> None:
    """`torch.autograd.backward` from handles: with the gradient of logits that somebody has, as a
    reentrant checkpoint does within its backward, where real ones would be computed without a
    graph.
    """
    tensors = (args[0],) if isinstance(args[0], Tensor) else args[0]

    def joined(x: object) -> object:
        real = x.written() if isinstance(x, LazyLogits) else None
        return x if real is None else real

    rest = _real(args[1:], "backward"), _real(kwargs, "backward")
    _itself(torch.autograd.backward, (tuple(joined(x) for x in tensors), *rest[0]), rest[1])


def _itself(func: Any, args: Any, kwargs: Any) -> object:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _property(kind: str, func: Any, args: tuple[Any, ...]) -> object:
    handle, name = args[0], getattr(func.__self__, "__name__", "")
    owned = handle.owned
    if owned is not None:
        return func(owned, *args[1:])
    if kind == "__get__" and name in _PROPERTIES:
        return _itself(func, args, {})
    if kind == "__get__" and name == "data":
        return LazyLogits.of(handle.view_of_head, gradient=False)
    if kind == "__get__" and name in ("grad", "_grad", "_base") and handle.written() is None:
        return None
    if kind == "__set__":
        if name == "requires_grad" and args[1] in (True, handle.requires_grad):
            if args[1] and not handle.requires_grad:
                handle.make_leaf(name)
            return None
        return func(handle.materialize_to_write(name), *args[1:])
    return func(handle.materialize(name), *args[1:])


def is_harmless(hook: object) -> bool:
    """Whether it is FSDP's, which leaves logits and their gradient as they are."""
    hook = getattr(hook, "func", hook)  # functools.partial
    return (getattr(hook, "__module__", "") or "").startswith(_HARMLESS_HOOKS)


# ---- what is recorded ---------------------------------------------------------------------------


def _recorded(name: str, func: Any, handle: LazyLogits, args: Any, kwargs: Any) -> object:
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
        return handle if _probe(view).is_contiguous() else _like(handle, view.copy())
    if name == "clone":
        return _like(handle, view.copy())
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
    """Columns in place of the vocabulary's: neither 1, which is squeezed, nor as many as those."""
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
        return _NOT
    several = not isinstance(expected, Tensor)
    expected, arranged = (expected, arranged) if several else ((expected,), (arranged,))
    if len(expected) != len(arranged):
        return _NOT
    places = [_tokens_of(e, f, view.width, pad) for e, f in zip(expected, arranged, strict=True)]
    handles = tuple(_like(handle, view.at(x)) for x in places if x is not None)
    if len(handles) < len(places):
        return _NOT
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
        return _NOT
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
            return _NOT
        elif k is not None and k is not Ellipsis:
            if isinstance(k, list) and (not k or isinstance(k[0], (bool, list, Tensor))):
                return _NOT
            if not isinstance(k, (slice, list, Tensor, numbers.Integral)):
                return _NOT
            taken += 1
    if taken > dims:
        return _NOT
    has_rest = any(k is Ellipsis for k in keys)
    if taken == dims or (has_rest and keys[-1] is not Ellipsis):
        last = keys.pop()
        if last is None or not isinstance(last, slice):
            return _NOT
        kept = range(view.width)[last]
        if kept != range(len(kept)) or not kept:
            return _NOT
        if len(kept) < view.width:
            if group_size(view.rows.head.tp_group) > 1:  # the ids of a rank's columns would change
                return _NOT
            view = replace(view, columns=len(kept))
    keys = [k.cpu() if isinstance(k, Tensor) else k for k in keys]
    places = view.places[tuple(keys)]  # torch's errors are the caller's
    return _like(handle, view.at(places))


def _selected(handle: LazyLogits, dim: int, index: Tensor) -> object:
    view = handle.view_of_head
    lead = view.places.dim()
    if not -lead - 1 <= dim < lead or dim == -1:
        return _NOT
    places = view.places.index_select(dim if dim >= 0 else dim + 1, index.cpu())
    return _like(handle, view.at(places))


_SUMMARIZED = ("max", "min", "argmax", "argmin", "mean", "linalg_vector_norm")


def _summarized(name: str, handle: LazyLogits, args: Any, kwargs: Any) -> Any:
    """Over the vocabulary and without gradients: what metrics and acceptance counts are made of.

    A mean has its gradient: of all logits times 0 it is a loss that joins the graph and asks for
    nothing.
    """
    options = dict(kwargs)
    dtype = options.pop("dtype", None) or handle.dtype
    wants = torch.is_grad_enabled() and handle.requires_grad
    view, dims = handle.view_of_head, (*args, *options.values())
    if name == "mean":
        handle.used()
    if name == "mean" and not dims and not view.is_cut:
        rows = view.mean() if wants else view.summary().mean
        return rows.mean().to(dtype)
    if name == "linalg_vector_norm" and args:  # its order, not its dimension
        return _NOT
    if view.is_cut or len(dims) != 1 or not set(options) <= {"dim"} or isinstance(dims[0], Tensor):
        return _NOT
    if dims[0] not in (-1, handle.dim() - 1):
        return _NOT
    if wants and not name.startswith("arg"):
        return view.mean().to(dtype) if name == "mean" else _NOT
    summary = RowSummary(*(x.clone() for x in view.summary()))  # the caller may write into it
    if name.startswith("arg"):
        return summary.largest_column if name == "argmax" else summary.smallest_column
    if name == "max":
        return torch.return_types.max((summary.largest.to(dtype), summary.largest_column))
    if name == "min":
        return torch.return_types.min((summary.smallest.to(dtype), summary.smallest_column))
    return (summary.mean if name == "mean" else summary.norm).to(dtype)


def _joined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`cat` and `stack` of handles of one call."""
    parts = args[0] if args else kwargs.get("tensors", ())
    rest = {k: v for k, v in kwargs.items() if k != "tensors"}
    if "out" in rest or not parts or not all(isinstance(x, LazyLogits) for x in parts):
        return _NOT
    views = [x.view_of_head for x in parts]
    first = views[0]
    head = first.rows.head
    alike = {
        (id(v.rows.head), v.width, v.dtype, x.requires_grad)
        for v, x in zip(views, parts, strict=True)
    }
    if len(alike) > 1 or any(x.written() is not None for x in parts):
        return _NOT
    pad = _pad(first)
    expected = func([_probe(v) for v in views], *args[1:], **rest)

    def join(each: Callable[[View], Tensor]) -> Tensor | None:
        of_all = func([_padded(each(v), pad) for v in views], *args[1:], **rest)
        return _tokens_of(expected, of_all, first.width, pad)

    rows = join(View.head_rows)
    if rows is None:
        return _NOT
    temperatures = [v.temperature for v in views]
    temperature: float | Tensor = temperatures[0]
    if any(isinstance(t, Tensor) or t != temperature for t in temperatures):
        device = head.hidden.device

        def temperature_of(view: View) -> Tensor:
            divisor = torch.as_tensor(view.temperature, dtype=first.rows.dtype, device=device)
            return divisor.expand(view.places.shape)

        joined = join(temperature_of)
        assert joined is not None
        temperature = joined.reshape(-1)
    joint = Rows(head, rows.reshape(-1), temperature, first.width)
    made = View.all_of(joint, rows.shape, first.dtype)
    return _like(parts[0], made)


def _scaled(name: str, handle: LazyLogits, args: Any, kwargs: Any) -> object:
    """By numbers above 0, or tensors of such that broadcast with a last dimension of 1."""
    other = args[0] if args else kwargs.get("other")
    if len(args) + len(kwargs) != 1:
        return _NOT
    view = handle.view_of_head
    divisor: float | Tensor
    if isinstance(other, numbers.Real) and not isinstance(other, bool):
        if not 0.0 < float(other) < math.inf:
            return _NOT
        divisor = float(other) if name in _QUOTIENTS else 1.0 / float(other)
    elif isinstance(other, Tensor) and not isinstance(other, LazyLogits):
        if other.requires_grad or other.is_complex() or other.dtype == torch.bool:
            return _NOT
        if other.dim() > handle.dim() or (other.dim() and other.shape[-1] != 1):
            return _NOT
        try:
            per_token = (other.squeeze(-1) if other.dim() else other).expand(view.places.shape)
        except RuntimeError:
            return _NOT
        if not bool(((other > 0) & other.isfinite()).all()):  # a sync
            return _NOT
        per_token = per_token.detach().to(handle.device, view.rows.dtype, copy=True)
        divisor = per_token if name in _QUOTIENTS else per_token.reciprocal()
    else:
        return _NOT
    if name.endswith("_") and (not name.startswith("__") or name.startswith("__i")):
        if view.columns is not None:
            return _NOT  # the other columns of the same memory are not scaled
        if view.rows.read_by_function or (handle.requires_grad and not torch.is_grad_enabled()):
            return _NOT  # one gradient without the scale, another with it
        view.rows.divide_(view.places, divisor)
        view.rows.changed()
        view.rows.scaled_without_gradient |= not handle.requires_grad
        return handle
    dtype = (
        view.dtype if isinstance(other, numbers.Real) else torch.result_type(_probe(view), other)
    )
    if dtype != view.dtype and not {dtype, view.dtype} <= set(_FLOATS):
        return _NOT
    made = view.copy(dtype)
    made.rows.divide_(made.places, divisor)
    return _like(handle, made)


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
        dtype, device = args[0].dtype, args[0].device
    elif name == "type" and args and isinstance(args[0], torch.dtype):
        dtype = args[0]
    elif name == "cpu":
        device = torch.device("cpu")
    elif name == "cuda" and not args and not kwargs:
        device = torch.device("cuda", torch.cuda.current_device())
    elif name == "to":
        kwargs = dict(kwargs)
        copy = bool(kwargs.pop("copy", False))
        if args and isinstance(args[0], Tensor):
            device, dtype = args[0].device, args[0].dtype
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    else:
        return _NOT
    if device is not None and device != handle.device:
        same = device.type == handle.device.type and device.index is None
        if not same:
            return _NOT
    if dtype in (None, handle.dtype):
        return _like(handle, handle.view_of_head.copy()) if copy else handle
    if dtype not in _FLOATS or handle.dtype not in _FLOATS:
        return _NOT
    return _like(handle, handle.view_of_head.copy(dtype))


# ---- what is not --------------------------------------------------------------------------------


def _real(value: Any, what: str) -> Any:
    """`value` with every handle in tuples, lists and dicts replaced by its logits."""
    if isinstance(value, LazyLogits):
        return value.materialize(what)
    if type(value) in (tuple, list):
        return type(value)(_real(x, what) for x in value)
    if type(value) is dict:
        return {k: _real(x, what) for k, x in value.items()}
    return value


def _with_real(name: str, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    out = kwargs.get("out")
    in_place = name.endswith("_") and (not name.startswith("__") or name.startswith("__i"))
    in_place |= name == "__setitem__"
    # A hook, a gradient of the logits' own: those must be the logits from now on.
    hooked = name in ("register_hook", "retain_grad")
    written = args[0] if (in_place or hooked) and args else out
    if not isinstance(written, LazyLogits):
        return func(*_real(args, name), **_real(kwargs, name))
    if hooked:
        written.check_unused(name)
    real = written.materialize_to_write(name)
    if not hooked:
        written.view_of_head.rows.changed()
    if written is out:
        kwargs = {**_real({k: v for k, v in kwargs.items() if k != "out"}, name), "out": real}
        result = func(*_real(args, name), **kwargs)
    else:
        result = func(real, *_real(args[1:], name), **_real(kwargs, name))
    if not hooked:
        written.rejoin()
    return written if result is real else result


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def torch_dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
    """What reaches a handle below autograd (collectives, functions written in C++)."""
    name = func._schema.name.removeprefix("aten::")
    if func in _ALIASES:
        return LazyLogits(args[0].view_of_head)
    if func is torch.ops.aten.view.default and tuple(args[1]) == tuple(args[0].shape):
        return LazyLogits(args[0].view_of_head)
    with torch.no_grad():
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for handle in _lazy_in(value):
                    handle.materialize_to_write(name)
                    handle.view_of_head.rows.changed()
        return func(*_real(args, name), **_real(kwargs, name))


def _lazy_in(value: object) -> list[LazyLogits]:
    """The handles in a value of an argument, in tuples and lists too."""
    if isinstance(value, LazyLogits):
        return [value]
    return (
        [handle for x in value for handle in _lazy_in(x)] if isinstance(value, tuple | list) else []
    )
