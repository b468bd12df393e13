"""The known word that a misspelled one is close to. Imports no torch."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" of the only known word that begins so, or of the closest one; or ""."""
    words = list(known)
    close = [name for name in words if name.startswith(word)]
    if len(close) != 1:
        close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def check_keywords(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise a TypeError, as Python does, that suggests the nearest keyword for an unknown one."""
    for name in given:
        if name not in known:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}{nearest(name, known)}"
            )


def suggesting(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose TypeError for an unknown keyword suggests the nearest one."""
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not known.issuperset(kwargs):
            check_keywords(function.__qualname__, kwargs, known)
        return function(*args, **kwargs)

    return call


class SuggestsFields:
    """Base of a dataclass whose constructor suggests the nearest field for an unknown keyword."""

    __dataclass_fields__: ClassVar[dict[str, object]]

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        fields: dict[str, object] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        check_keywords(cls.__name__, kwargs, fields)
        return super().__new__(cls)
