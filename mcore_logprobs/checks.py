"""Checks of plain settings (numbers, flags, choices), shared by `LogprobConfig` and the operations.

A check is called as `check_positive("temperature", value)` and raises a ValueError that names the
setting, what was expected and what was given. `check.expected` is the middle part, for help texts.
Tensors are checked by `arguments`, groups by `groups`.
"""

from __future__ import annotations

import inspect
import math
import numbers
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def is_traced(x: torch.Tensor) -> bool:
    """Whether code may not branch on x's values: torch.compile, export or make_fx is tracing it."""
    if torch.compiler.is_compiling():
        return True
    # Nothing is fake or traced by proxies before these modules have been imported.
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if fake is not None and isinstance(x, fake.FakeTensor):
        return True
    return proxies is not None and proxies.get_proxy_mode() is not None


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
    """Raises a ValueError for every value that `accepts` refuses.

    Attributes:
        expected: what is accepted, in words.
    """

    expected: str
    accepts: Callable[[Any], bool]

    def __call__(self, name: str, value: object) -> None:
        if not self.accepts(value):
            raise ValueError(f"{name}: expected {self.expected}, got {value!r}")

    @property
    def optional(self) -> Check:
        """The check that accepts None too."""
        return Check(f"None or {self.expected}", lambda v: v is None or self.accepts(v))


def one_of(choices: Collection[str]) -> Check:
    """A check for one of these strings."""
    known = tuple(choices)
    return Check(f"one of {known}", lambda v: isinstance(v, str) and v in known)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


_LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

check_flag = Check("True or False", lambda v: isinstance(v, bool))
check_integer = Check("an int", _is_int)
check_optional_integer = check_integer.optional
check_count = Check("an int >= 1", lambda v: _is_int(v) and v >= 1)
check_optional_count = check_count.optional
check_bytes = Check("an int >= 0, in bytes", lambda v: _is_int(v) and v >= 0)
check_positive = Check(
    "a finite number > 0", lambda v: _is_real(v) and math.isfinite(v) and v > 0.0
)
check_optional_positive = check_positive.optional
check_not_negative = Check(
    "a finite number >= 0", lambda v: _is_real(v) and math.isfinite(v) and v >= 0.0
)
check_above_minus_one = Check(
    "a finite number > -1", lambda v: _is_real(v) and math.isfinite(v) and v > -1.0
)
check_optional_above_one = Check("a number > 1", lambda v: _is_real(v) and v > 1.0).optional
check_fraction = Check("a number in [0, 1)", lambda v: _is_real(v) and 0.0 <= v < 1.0)
check_top_k = Check("an int >= -1", lambda v: _is_int(v) and v >= -1).optional
check_min_p = Check("a number in [0, 1]", lambda v: _is_real(v) and 0.0 <= v <= 1.0)
check_top_p = Check("a number in (0, 1]", lambda v: _is_real(v) and 0.0 < v <= 1.0)


def all_ids(values: Any) -> bool:
    """Whether all are ints of at least 0."""
    return all(_is_int(x) and x >= 0 for x in values)


def all_pairs(values: Any) -> bool:
    """Whether all are pairs of an id and a number that is finite or -inf."""
    pairs = [x for x in values if isinstance(x, tuple | list) and len(x) == 2]
    return len(pairs) == len(values) and all(
        all_ids([number]) and _is_real(x) and x < math.inf for number, x in pairs
    )


check_optional_ids = Check(
    "ints >= 0", lambda v: isinstance(v, tuple) and len(v) > 0 and all_ids(v)
).optional
check_optional_pairs = Check(
    "{id: x} with ints >= 0 and finite numbers or -inf",
    lambda v: isinstance(v, tuple) and len(v) > 0 and all_pairs(v),
).optional
check_logits_dtype = Check(
    "torch.float32, torch.bfloat16 or torch.float16",
    lambda v: isinstance(v, torch.dtype) and v in _LOGITS_DTYPES,
)

check_floating = Check(
    "a floating torch.dtype", lambda v: isinstance(v, torch.dtype) and v.is_floating_point
)


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """One of these strings, or a ValueError."""
    one_of(choices)(name, value)
