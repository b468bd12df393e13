"""Checks of settings (numbers, flags, choices) and of tensors, before any collective.

A check of a setting is called as `check_positive("temperature", value)` and raises a ValueError
that names the setting, what was expected and what was given. `check.expected` is the middle part,
for help texts. Groups are checked by `groups`.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.groups import VocabShard

P = ParamSpec("P")
R = TypeVar("R")


def is_traced(x: Tensor) -> bool:
    """Whether code may not branch on x's values: torch.compile, export or make_fx is tracing it."""
    if torch.compiler.is_compiling():
        return True
    # Nothing is fake or traced by proxies before these modules have been imported.
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if fake is not None and isinstance(x, fake.FakeTensor):
        return True
    if proxies is None:
        return False
    current = getattr(proxies, "get_proxy_mode", None) or proxies.get_innermost_proxy_mode  # 2.4
    return current() is not None


# As an attribute: in torch 2.4 it is no module to import from.
_set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame


def not_traced(function: Callable[P, R]) -> Callable[P, R]:
    """A graph break for torch.compile, which compiles nothing within: `torch.compiler.disable`
    without the import of the compiler.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _set_eval_frame(before)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for this type of device, which may know none."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def check_called(
    name: str, fn: object, first: tuple[str, ...], tensors: int, named: Sequence[str] = ()
) -> None:
    """A function that takes the named arguments and then that many per-token tensors.

    Args:
        named: arguments that it is given by name besides.

    Raises:
        ValueError: no callable; or its signature takes another number, with how it is called.
    """
    if not callable(fn):
        raise ValueError(f"{name}: expected a callable, got {type(fn).__name__}")
    if isinstance(fn, type):
        raise ValueError(
            f"{name}: expected a function or an objective, got the class {fn.__name__}; call it "
            f"first: {fn.__name__}()"
        )
    if torch.compiler.is_compiling():
        return
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind(*first, *range(tensors), **dict.fromkeys(named))
    except TypeError as error:
        more = f", {tensors} per-token tensors" if tensors else ""
        raise ValueError(
            f"{name}: expected a function called as {name}({', '.join(first)}{more}), "
            f"got one that takes {signature}"
        ) from error


@dataclass(frozen=True)
class Check:
    """Raises a ValueError for every value that it refuses.

    Attributes:
        expected: what is accepted, in words.
        accepts: which values of the kind.
        kind: the type of what is accepted; True and False are no numbers.
        or_none: whether None is accepted too.
        hint: what else a refusal says of the value, or "".
    """

    expected: str
    accepts: Callable[[Any], bool] = lambda value: True
    kind: type = object
    or_none: bool = False
    hint: Callable[[object], str] = lambda value: ""

    def __call__(self, name: str, value: object) -> None:
        if value is None and self.or_none:
            return
        is_kind = isinstance(value, self.kind)
        if isinstance(value, bool) and self.kind in (int, Real):
            is_kind = False
        number = value
        # A float may be a symbol to torch.compile, which breaks its graph at a symbol's hasattr.
        plain = type(value) in (int, float)
        if self.kind is Real and not plain and isinstance(value, Real) and hasattr(value, "dtype"):
            number = float(value)  # NumPy compares in its own dtype, in which _LARGEST is inf
        if not (is_kind and self.accepts(number)):
            raise ValueError(f"{name}: expected {self.expected}, got {value!r}{self.hint(value)}")

    @property
    def optional(self) -> Check:
        """The check that accepts None too."""
        return replace(self, expected=f"None or {self.expected}", or_none=True)


def one_of(choices: Collection[str]) -> Check:
    """A check for one of these strings."""
    known = tuple(choices)
    return Check(f"one of {known}", lambda v: v in known, str)


# What a kernel multiplies or divides logits by, in float32. A number between these and its inverse
# are normal float32 numbers: neither overflows, and no device takes one for 0.
_SMALLEST_SCALE, _LARGEST_SCALE = 1.2e-38, 8.5e37
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def index_of(value: object) -> int | None:
    """The int of anything with `__index__` but a bool, such as NumPy's integers, or None."""
    if type(value) is int:  # of lists that may be long
        return value
    # NumPy's bools have an index before 2.3.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # no integer, or a tensor of several elements
        return None


def is_bias(value: object) -> bool:
    """Whether it may be added to a logit: a number that is finite in float32, or -inf."""
    if type(value) is float:  # of lists that may be long
        return -_LARGEST_FLOAT32 <= value <= _LARGEST_FLOAT32 or value == -math.inf
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    number = float(value) if hasattr(value, "dtype") else value  # NumPy's, in their dtype
    fits = -_LARGEST_FLOAT32 <= number <= _LARGEST_FLOAT32  # type: ignore[operator]
    return fits or number == -math.inf


def all_ids(values: Iterable[object]) -> bool:
    """Whether all are ids of at least 0, of any type that `index_of` knows."""
    indices = [index_of(x) for x in values]
    return all(x is not None and x >= 0 for x in indices)


def all_pairs(values: Any) -> bool:
    """Whether all are pairs of an id, each another, and a bias."""
    return (
        _are_pairs(values)
        and all_ids(number for number, _ in values)
        and _repeated(values) is None
        and all(is_bias(x) for _, x in values)
    )


def _are_pairs(values: Sequence[object]) -> bool:
    return all(isinstance(x, tuple | list) and len(x) == 2 for x in values)


def _repeated(pairs: Iterable[tuple[object, object]]) -> int | None:
    """The first id that is in several of the pairs."""
    counts = Counter(index_of(number) for number, _ in pairs)
    return next((x for x, count in counts.items() if x is not None and count > 1), None)


def _hint_of_pairs(value: object) -> str:
    pairs: Any = tuple(value.items()) if isinstance(value, Mapping) else value
    is_pairs = isinstance(pairs, tuple | list) and _are_pairs(pairs)
    if isinstance(pairs, Real) or (is_pairs and any(isinstance(x, float) for x, _ in pairs)):
        return '; YAML reads 5:1.5 as a base-60 number: write {5: 1.5} or "5:1.5"'
    repeated = _repeated(pairs) if is_pairs else None
    return "" if repeated is None else f"; id {repeated} is given twice"


_LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST = sys.float_info.max

check_flag = Check("True or False", kind=bool)
check_integer = Check("an int", kind=int)
check_optional_integer = check_integer.optional
check_count = Check("an int >= 1", lambda v: v >= 1, int)
check_optional_count = check_count.optional
check_bytes = Check("an int >= 0, in bytes", lambda v: v >= 0, int)
check_positive = Check("a finite number > 0", lambda v: 0.0 < v <= _LARGEST, Real)
check_optional_positive = check_positive.optional
_SCALES = f"> 0, from {_SMALLEST_SCALE} to {_LARGEST_SCALE}"
check_scale = Check(
    f"a finite number {_SCALES}", lambda v: _SMALLEST_SCALE <= v <= _LARGEST_SCALE, Real
)
check_optional_scale = check_scale.optional
check_scale_or_zero = Check(
    f"0 or {check_scale.expected}", lambda v: v == 0 or check_scale.accepts(v), Real
)
check_number = Check("a number", lambda v: not math.isnan(v), Real)
check_not_negative = Check("a finite number >= 0", lambda v: 0.0 <= v <= _LARGEST, Real)
check_above_minus_one = Check("a finite number > -1", lambda v: -1.0 < v <= _LARGEST, Real)
check_optional_above_one = Check("a number > 1", lambda v: v > 1.0, Real).optional
check_fraction = Check("a number in [0, 1)", lambda v: 0.0 <= v < 1.0, Real)
check_top_k = Check("an int >= -1", lambda v: v >= -1, int).optional
check_min_p = Check("a number in [0, 1]", lambda v: 0.0 <= v <= 1.0, Real)
check_top_p = Check("a number in (0, 1]", lambda v: 0.0 < v <= 1.0, Real)
check_optional_ids = Check("ints >= 0", lambda v: len(v) > 0 and all_ids(v), tuple).optional
check_optional_pairs = Check(
    "{id: x} with ints >= 0 and finite numbers in float32 or -inf",
    lambda v: len(v) > 0 and all_pairs(v),
    tuple,
    hint=_hint_of_pairs,
).optional
check_logits_dtype = Check(
    "torch.float32, torch.bfloat16 or torch.float16", lambda v: v in _LOGITS_DTYPES, torch.dtype
)


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """One of these strings, or a ValueError."""
    one_of(choices)(name, value)


# ---- tensors -----------------------------------------------------------------------------------

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def check_values(fits: Tensor, on_device: str, error: Callable[[], ValueError]) -> None:
    """Raise an error where some value does not fit, without a host sync.

    Args:
        fits: bool of any shape.
        on_device: the text of the device-side assert, on CUDA and under a tracer.
        error: makes the error on a CPU; called where it is raised.
    """
    if fits.device.type != "cpu" or is_traced(fits):
        torch._assert_async(fits.all(), on_device)
    elif not bool(fits.all()):
        raise error()


def check_float_tensor(name: str, tensor: Tensor, *, min_dim: int) -> None:
    """A floating-point tensor of at least `min_dim` dimensions and no DTensor, or a ValueError."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if hasattr(tensor, "placements"):
        raise ValueError(
            f"{name}: expected a plain tensor, got a DTensor; pass this rank's part (to_local()) "
            "and, where that is a part of the vocabulary, tp_group"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "a nested one" if tensor.is_nested else str(tensor.layout)
        raise ValueError(f"{name}: expected a dense tensor, got {kind}")
    if tensor.dtype not in _FLOATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
        raise ValueError(f"{name}: expected dtype in {names}, got {tensor.dtype}")
    if tensor.dim() < min_dim:
        raise ValueError(
            f"{name}: expected at least {min_dim} dimension(s), got shape {tuple(tensor.shape)}"
        )


def check_plain(name: str, tensor: Tensor) -> None:
    """No DTensor, or a ValueError: for tensors of any dtype."""
    if hasattr(tensor, "placements"):
        raise ValueError(
            f"{name}: expected a plain tensor, got a DTensor; pass this rank's part (to_local())"
        )


def check_shape(name: str, got: Tensor, shape: torch.Size, device: torch.device) -> None:
    """Exactly this shape and device, or a ValueError."""
    if got.shape != shape:
        hint = ""
        if got.dim() == len(shape) >= 2 and got.transpose(0, 1).shape == shape:
            hint = "; hidden is [s, b, h] and takes [s, b], logits [b, s, V/TP] take [b, s]"
        elif got.dim() == len(shape) >= 1 and got.shape[1:] == shape[1:]:
            hint = _sequence_hint(got.shape[0], shape[0])
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(got.shape)}{hint}")
    if got.device != device:
        raise ValueError(f"{name}: expected device {device}, got {got.device}")


def _sequence_hint(got: int, expected: int) -> str:
    """What to do where one of two lengths is of a rank's part of the sequence."""
    if expected and got > expected and got % expected == 0:
        return "; if hidden is one TP rank's part of the sequence, pass sequence_parallel=True"
    if got and expected > got and expected % got == 0:
        return "; under sequence_parallel=True it is of the whole sequence, on every TP rank"
    return ""


def check_target(
    target: Tensor, shape: torch.Size, device: torch.device, *, name: str = "target"
) -> Tensor:
    """Integer ids of exactly this shape and device, as int64; a DTensor gives its local part.

    Raises:
        ValueError: no tensor, no integers, another shape or device.
    """
    target = unwrap_rows(target, name)
    if not isinstance(target, Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(target).__name__}")
    if target.dtype not in INTEGERS:
        raise ValueError(f"{name}: expected an integer dtype, got {target.dtype}")
    check_shape(name, target, shape, device)
    return target.long()


def check_mask(mask: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor | None:
    """None, or bool of exactly this shape and device, or a ValueError; a DTensor's local part."""
    if mask is None:
        return None
    mask = unwrap_rows(mask, "mask")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask: expected a bool tensor or None, got {got}")
    check_shape("mask", mask, shape, device)
    return mask


def check_per_token(place: int, tensor: Tensor, lead: torch.Size, device: torch.device) -> Tensor:
    """A tensor `[*lead, ...]` without gradient, detached, or a ValueError that says its place."""
    name = f"per_token_tensors[{place}]"
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    tensor = unwrap_rows(tensor, name)
    if tensor.shape[: len(lead)] != lead:
        raise ValueError(
            f"{name}: expected a shape that starts with target's {tuple(lead)}, got "
            f"{tuple(tensor.shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: requires a gradient, but none flows to it; detach it")
    return tensor.detach()


def check_broadcasts(name: str, tensor: Tensor, lead: torch.Size, device: torch.device) -> None:
    """A tensor on this device that broadcasts to the tokens' shape, or a ValueError."""
    shape = tensor.shape
    fits = len(shape) <= len(lead) and all(
        own == 1 or own == size for own, size in zip(reversed(shape), reversed(lead), strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name}: expected a number or a tensor that broadcasts to {tuple(lead)}, got shape "
            f"{tuple(shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")


def check_seed(seed: int | Tensor, lead: torch.Size, device: torch.device) -> Tensor:
    """A seed for each token, int64 `[*lead]`.

    Args:
        seed: an int of 64 bits, or a tensor of integers that broadcasts to `lead`.

    Raises:
        ValueError: another type, another shape or device, an int of more bits.
    """
    if not isinstance(seed, Tensor):
        check_integer("seed", seed)
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed: expected an int of 64 bits, got {seed}")
        return torch.full((), seed, dtype=torch.int64, device=device).expand(lead)
    seed = unwrap_rows(seed, "seed")
    if seed.dtype not in INTEGERS:
        raise ValueError(f"seed: expected an integer dtype, got {seed.dtype}")
    check_broadcasts("seed", seed, lead, device)
    return seed.long().expand(lead)


def check_temperature(
    temperature: float | Tensor,
    lead: torch.Size,
    device: torch.device,
    *,
    name: str = "temperature",
) -> float | Tensor:
    """A number, or one for each token, `[*lead]` float32 or float64: a copy.

    Args:
        temperature: a number, or a tensor that broadcasts to `lead`. A CPU tensor of no dimension
            is a number.

    Raises:
        ValueError: a number that `check_scale` refuses; a tensor of another shape or device, no
            numbers, one that requires a gradient, and on CPU values that it refuses (on CUDA a
            device-side assert).
    """
    temperature = unwrap_rows(temperature, name) if isinstance(temperature, Tensor) else temperature
    if not isinstance(temperature, Tensor):
        check_scale(name, temperature)
        return temperature
    if temperature.requires_grad:
        raise ValueError(f"{name}: requires a gradient, but none flows to it; detach it")
    if temperature.dtype not in (*_FLOATS, *INTEGERS):
        raise ValueError(f"{name}: expected real numbers, got {temperature.dtype}")
    if temperature.dim() == 0 and temperature.device.type == "cpu":
        check_scale(name, float(temperature))
        return float(temperature)
    check_broadcasts(name, temperature, lead, device)
    # A copy: the backward reads it, and autograd does not see changes of the caller's own.
    temperature = temperature.to(torch.promote_types(temperature.dtype, torch.float32), copy=True)
    fits = (temperature >= _SMALLEST_SCALE) & (temperature <= _LARGEST_SCALE)
    check_values(
        fits,
        f"{name}: not a finite number {_SCALES}",
        lambda: ValueError(
            f"{name}: expected finite numbers {_SCALES}, got {temperature[~fits][:8].tolist()}"
        ),
    )
    return temperature.expand(lead)


def global_to_local(
    target: Tensor, shard: VocabShard, ignore_index: int | None, *, name: str = "target"
) -> tuple[Tensor, Tensor]:
    """Global ids to this shard's columns.

    On CPU an id outside [0, vocab_size) is a ValueError; on CUDA it fails a device-side assert,
    without a sync.

    Args:
        target: int64 of any shape; global ids or ignore_index.

    Returns:
        (local targets, int64: -1 where another rank owns the column or it is ignored; valid mask,
        bool: False where the target is ignore_index), both of the target's shape.
    """
    check_optional_integer("ignore_index", ignore_index)
    if ignore_index is None:
        valid_mask = torch.ones_like(target, dtype=torch.bool)
    else:
        valid_mask = target != ignore_index
    inside = ((target >= 0) & (target < shard.vocab_size)) | ~valid_mask
    check_values(
        inside,
        f"{name}: id outside [0, {shard.vocab_size})",
        lambda: ValueError(
            f"{name}: expected ids in [0, {shard.vocab_size})"
            f"{'' if ignore_index is None else f' or ignore_index {ignore_index}'}, got "
            f"{target[~inside][:8].tolist()}{'...' if (~inside).sum() > 8 else ''}"
        ),
    )
    local = target - shard.start
    here = valid_mask & (local >= 0) & (local < shard.width)
    return torch.where(here, local, -1), valid_mask


def check_ids(ids: Any, lead: torch.Size, device: torch.device, *, name: str = "ids") -> Tensor:
    """Integer ids `[*lead, k]` for any k, as int64, or a ValueError."""
    ids = unwrap_rows(ids, name)
    k = ids.shape[-1] if isinstance(ids, Tensor) and ids.dim() else 1
    return check_target(ids, torch.Size((*lead, k)), device, name=name)


# ---- DTensors: logits sharded over one mesh dimension, targets over CP -------------------------


def unwrap_logits(
    logits: Any, tp_group: ProcessGroup | None, name: str
) -> tuple[Tensor, ProcessGroup | None]:
    """A DTensor `[..., V]` -> its local `[..., V/TP]` and the group of the mesh dimension that
    shards the last dimension; anything else as it came.

    The other mesh dimensions may shard leading dimensions (batch, sequence) or replicate: then the
    operation works on this rank's rows. Differentiable.

    Raises:
        ValueError: the vocabulary is not sharded evenly over exactly one mesh dimension, a
            placement is partial, or tp_group is another group.
    """
    placements = getattr(logits, "placements", None)
    if placements is None:  # no DTensor
        return logits, tp_group
    last, mesh = logits.dim() - 1, logits.device_mesh
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"{name}: expected no partial placement, got {placements}")
    sharding = [
        i for i, p in enumerate(placements) if p.is_shard() and p.dim % logits.dim() == last
    ]
    if len(sharding) != 1:
        raise ValueError(
            f"{name}: expected a DTensor whose last dimension is sharded over one mesh dimension, "
            f"got placements {placements} on mesh {mesh.mesh_dim_names}"
        )
    group = mesh.get_group(sharding[0])
    if logits.shape[-1] % group.size():
        raise ValueError(
            f"{name}: expected the vocabulary divisible by the mesh dimension's size "
            f"{group.size()}, got {logits.shape[-1]}"
        )
    if tp_group is not None and tp_group != group:
        raise ValueError(f"tp_group: expected None or the group of {name}'s mesh dimension")
    return logits.to_local(), group


def unwrap_rows(rows: Any, name: str) -> Tensor:
    """A per-row DTensor (targets, ids) -> its local part; anything else as it came.

    Raises:
        ValueError: a placement is partial.
    """
    placements = getattr(rows, "placements", None)
    if placements is None:  # no DTensor
        return rows
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"{name}: expected no partial placement, got {placements}")
    return rows.to_local()
