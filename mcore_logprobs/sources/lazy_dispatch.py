"""What `LazyLogits` does with a torch function: record it, or compute real logits for it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mcore_logprobs.checks import not_traced
from mcore_logprobs.sources.lazy import LazyLogits
from mcore_logprobs.sources.lazy_head import writes_to
from mcore_logprobs.sources.lazy_record import NOT, is_in_place, joined, recorded, words

# Answered by the handle itself.
_METADATA = words(
    """
    size dim ndimension numel nelement stride storage_offset is_contiguous element_size
    is_floating_point is_complex is_signed is_conj is_neg is_inference is_shared get_device
    has_names __len__ __hash__ is_same_size
    """
)
_PROPERTIES = words(
    """
    shape dtype device requires_grad ndim is_leaf grad_fn layout is_cuda is_cpu is_meta
    is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_xpu is_mps is_xla is_mtia
    is_ipu is_vulkan is_maia itemsize nbytes _version names name output_nr retains_grad
    _backward_hooks
    """
)
_SHAPED_IN_PLACE = words(
    "transpose_ swapaxes_ swapdims_ t_ squeeze_ unsqueeze_ as_strided_ resize_ resize_as_"
)
# Give other tensors of its kind, without its values.
_MAKERS = words(
    """
    new_empty new_zeros new_ones new_full new_tensor zeros_like ones_like empty_like full_like
    rand_like randn_like
    """
)
_HARMLESS_HOOKS = ("torch.distributed.fsdp.", "megatron.core.distributed.fsdp.", "megatron_fsdp.")


@not_traced
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
        if name == "requires_grad_":
            (asked,) = args[1:] or (kwargs.get("requires_grad", True),)
            if asked and not handle.requires_grad:
                handle.make_leaf(name)
            if asked or not handle.requires_grad:
                return handle
        if name in _SHAPED_IN_PLACE:
            raise RuntimeError(
                f"lazy logits: expected a function that gives a tensor, such as {name[:-1]}, got "
                f"{name}, which changes the shape in place"
            )
        if name == "register_hook" and is_harmless(args[1]):
            return _itself(func, args, kwargs)
        if name in _MAKERS:
            like = torch.empty((), dtype=handle.dtype, device=handle.device).expand(handle.shape)
            return func(like, *rest, **options)
        if handle.written() is None:
            result = recorded(name, func, handle, rest, options)
            if result is not NOT:
                return result
    elif name in ("cat", "concat", "concatenate", "stack"):
        result = joined(func, args, kwargs)
        if result is not NOT:
            return result
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

    def as_written(x: object) -> object:
        real = x.written() if isinstance(x, LazyLogits) else None
        return x if real is None else real

    rest = _real(args[1:], "backward"), _real(kwargs, "backward")
    _itself(torch.autograd.backward, (tuple(as_written(x) for x in tensors), *rest[0]), rest[1])


def _itself(
    func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _property(kind: str, func: Any, args: tuple[Any, ...]) -> object:
    handle, name = args[0], getattr(func.__self__, "__name__", "")
    args = (handle, *_real(args[1:], name))  # lazy logits have no memory for a tensor to take over
    owned = handle.owned
    if owned is not None:
        return func(owned, *args[1:])
    if kind == "__get__" and name in _PROPERTIES:
        return _itself(func, args, {})
    if kind == "__get__" and name == "data":
        return LazyLogits.of(handle.view_of_head, gradient=False)
    if kind == "__get__" and name in ("grad", "_grad", "_base") and handle.written() is None:
        return _itself(func, args, {}) if name == "grad" else None  # None, with torch's warning
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


def _real(value: Any, what: str) -> Any:
    """`value` with every handle in it replaced by its logits."""
    return pytree.tree_map_only(LazyLogits, lambda handle: handle.materialize(what), value)


def _with_real(name: str, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    out = kwargs.get("out")
    in_place = is_in_place(name) or name == "__setitem__"
    # A hook, a gradient of the logits' own: those must be the logits from now on.
    hooked = name in ("register_hook", "retain_grad")
    written = args[0] if (in_place or hooked) and args else out
    if not isinstance(written, LazyLogits):
        return func(*_real(args, name), **_real(kwargs, name))
    rows = written.view_of_head.rows
    if hooked:
        written.check_unused(name)
    real = written.materialize_to_write(name)
    if not hooked:
        rows.changed()
    if written is out:
        kwargs = {**_real({k: v for k, v in kwargs.items() if k != "out"}, name), "out": real}
        result = func(*_real(args, name), **kwargs)
    else:
        result = func(real, *_real(args[1:], name), **_real(kwargs, name))
    if not hooked:
        written.rejoin()
    elif name == "register_hook" and written.owned is None:
        rows.hooks.append((weakref.ref(_hooks_of(real)), writes_to(rows.shared)))
    return written if result is real else result


def _hooks_of(real: Tensor) -> OrderedDict[int, object]:
    """As torch keeps them, without those that were removed."""
    hooks = real._backward_hooks
    assert isinstance(hooks, OrderedDict)
    return hooks


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
