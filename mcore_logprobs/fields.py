"""Kinds of settings: what each accepts, how its text is read, and one spelling for equal values.

A setting is a field of a dataclass, made by one of the functions here, with a `Setting` as its
metadata. `mcore_logprobs/config.py` makes its docstring, its flags and its reader of YAML of these.
"""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import operator
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from mcore_logprobs import checks
from mcore_logprobs.checks import Check

_Class = TypeVar("_Class", bound=type)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a field knows besides its default.

    Attributes:
        help: one text for the class's docstring and for the flag.
        check: refuses what the field does not accept.
        parse: text of a flag or of a YAML string to a value; what it cannot read it returns
            unchanged, for `check` to refuse.
        parse_within: the same for text within a list or a mapping, such as a YAML file has.
        normal: one spelling for equal values, of any type; else as `parse`.
        words: for a switch, the texts that it takes.
    """

    help: str
    check: Check
    parse: Callable[[str], object]
    normal: Callable[[object], object] = lambda value: value
    words: tuple[str, ...] = ()
    parse_within: Callable[[object], object] = lambda value: value

    def read(self, value: object) -> Any:
        """Return a value that may be text, or have text in it, as a value."""
        return self.parse(value) if isinstance(value, str) else self.parse_within(value)


def _field(default: object, setting: Setting) -> object:
    return dataclasses.field(default=default, metadata={"setting": setting})


def choice(default: str, choices: tuple[str, ...], help: str) -> Any:
    """One of these texts."""

    def normal(value: object) -> object:
        return "off" if value is False and "off" in choices else value  # YAML's unquoted off

    return _field(default, Setting(help, checks.one_of(choices), parse=str, normal=normal))


def switch(default: bool, help: str, *, words: tuple[str, ...] = ()) -> Any:
    """True, False, or one of `words`."""
    check = Check(
        f"True, False or {' or '.join(map(repr, words))}" if words else "True or False",
        lambda v: isinstance(v, bool) or (isinstance(v, str) and v in words),
    )
    setting = Setting(help, check, parse=_parse_switch, words=("true", "false", *words))
    return _field(default, setting)


def integer(default: int | None, check: Check, help: str, *, off: tuple[int, ...] = ()) -> Any:
    """An int, or None where the check accepts it; the values `off` are other spellings of None."""

    def normal(value: object) -> object:
        if isinstance(value, numbers.Integral) and not isinstance(value, bool):
            return None if value in off else int(value)
        return value

    return _field(default, Setting(help, check, parse=_number_parser(int), normal=normal))


def real(default: float | None, check: Check, help: str) -> Any:
    """A float, or None where the check accepts it."""

    def normal(value: object) -> object:
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return value
        try:
            return float(value)
        except OverflowError:  # for the check to refuse
            return value

    return _field(default, Setting(help, check, parse=_number_parser(float), normal=normal))


def ids(default: None, check: Check, help: str) -> Any:
    """A tuple of ints, ascending, or None; one id too. In a text they stand between commas."""

    def parse_within(value: object) -> object:
        try:
            return [_parsed(int, x) for x in value] if isinstance(value, list | tuple) else value
        except ValueError:
            return value

    def parse(text: str) -> object:
        if text.lower() in ("none", "null", ""):
            return None
        parsed = [_number_parser(int)(part.strip()) for part in text.split(",")]
        return text if any(isinstance(x, str) for x in parsed) else tuple(parsed)

    def normal(value: object) -> object:
        ids = value.tolist() if hasattr(value, "tolist") else value  # of torch and of NumPy
        if checks.index_of(ids) is not None:
            ids = (ids,)
        if (
            isinstance(ids, Sequence)
            and not isinstance(ids, str | bytes)
            and ids
            and checks.all_ids(ids)
        ):
            return tuple(sorted({operator.index(x) for x in ids}))
        return value

    setting = Setting(help, check, parse=parse, normal=normal, parse_within=parse_within)
    return _field(default, setting)


def pairs(default: None, check: Check, help: str) -> Any:
    """A tuple of (id, number), by id, or None; in a text `id:number` between commas."""

    def parse(text: str) -> object:
        if text.lower() in ("none", "null", ""):
            return None
        parsed = parse_within([part.split(":") for part in text.split(",")])
        return parsed if isinstance(parsed, tuple) else text

    def parse_within(value: object) -> object:
        pairs = value.items() if isinstance(value, Mapping) else value
        if not isinstance(pairs, Iterable):
            return value
        try:
            return tuple((_parsed(int, x), _parsed(_bias_of, y)) for x, y in pairs)
        except (TypeError, ValueError):
            return value

    def normal(value: object) -> object:
        pairs = tuple(value.items()) if isinstance(value, Mapping) else value
        if isinstance(pairs, tuple | list) and pairs and checks.all_pairs(pairs):
            return tuple(sorted((operator.index(x), float(y)) for x, y in pairs))
        return value

    setting = Setting(help, check, parse=parse, normal=normal, parse_within=parse_within)
    return _field(default, setting)


def _parsed(parse: Callable[[str], object], value: object) -> object:
    return parse(value) if isinstance(value, str) else value


def _bias_of(text: str) -> float:
    """A number; infinity as YAML spells it, `-.inf`, too."""
    return float(text.strip().lower().replace(".inf", "inf"))


def size(help: str) -> Any:
    """A number of bytes, 0 by default; as text with a unit too: "1GiB", "500 MB"."""

    def normal(value: object) -> object:
        if isinstance(value, str):
            return _bytes_of(value)
        if isinstance(value, numbers.Integral) and not isinstance(value, bool):
            return int(value)
        return value

    expected = 'a number of bytes >= 0, as an int or as text like "1GiB"'
    check = dataclasses.replace(checks.check_bytes, expected=expected)
    return _field(0, Setting(help, check, parse=_bytes_of, normal=normal))


_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def _bytes_of(text: str) -> object:
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)\s*([kmg]i?b)", text.strip().lower())
    if match is None:
        return text
    plain, count, unit = match.groups()
    return int(plain) if plain else int(float(count) * _UNITS[unit])


def dtype(default: torch.dtype, check: Check, help: str) -> Any:
    """A `torch.dtype`, also by name."""

    def normal(value: object) -> object:
        if isinstance(value, str):
            return _DTYPES.get(value.lower().removeprefix("torch."), value)
        return value

    return _field(default, Setting(help, check, parse=normal, normal=normal))


_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
}


def _parse_switch(text: str) -> object:
    return {"true": True, "false": False}.get(text.lower(), text)


def _number_parser(number: type[int] | type[float]) -> Callable[[str], object]:
    def parse(text: str) -> object:
        if text.lower() in ("none", "null"):
            return None
        try:
            return number(text)
        except ValueError:
            return text

    return parse


def documented(cls: _Class) -> _Class:
    """Replace `{fields}` in the class's docstring by the fields' texts and defaults."""
    lines = []
    for name, setting in settings_of(cls).items():
        text = f"{name}: {setting.help} Default: {default_of(cls, name)!r}."
        lines += textwrap.wrap(text, 92, initial_indent=" " * 4, subsequent_indent=" " * 8)
    if cls.__doc__:  # None under python -OO
        doc = inspect.cleandoc(cls.__doc__)  # as Python 3.13 has it already
        cls.__doc__ = doc.replace("{fields}", "\n".join(lines).lstrip())
    return cls


def settings_of(cls: Any) -> dict[str, Setting]:
    """Return what each field of the class, or of an instance, knows."""
    return {f.name: f.metadata["setting"] for f in dataclasses.fields(cls)}


def default_of(cls: Any, name: str) -> object:
    """Return a field's default as a plain value."""
    return plain(cls.__dataclass_fields__[name].default)


def plain(value: object) -> object:
    """Return a setting's value as plain data: a dtype by name."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
