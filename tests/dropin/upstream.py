"""The calls that a framework's own code makes to the names that a drop-in carries."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_logprobs.dropin.installed import Framework, signatures


@dataclass(frozen=True)
class Call:
    """One call in a framework's own code.

    Attributes:
        positional: how many arguments come by position; keywords: which come by name.
        open: *args or **kwargs come too, so that not all of it is known.
    """

    name: str
    positional: int
    keywords: tuple[str, ...] = ()
    open: bool = False
    where: str = field(default="", compare=False)


def calls(source: str, path: str, framework: Framework) -> Iterator[Call]:
    """The calls in one file to names that it imports from the framework's files, or defines."""
    methods = {}
    names = {}
    for name in framework.names():
        owner, _, method = name.partition(".")
        # Their own class is made and called as before; only calls of the method are ours.
        group, key = (methods, method) if owner in framework.methods_of else (names, owner)
        group[key] = name
    defined = signatures(source, framework.names()) if path in framework.files else {}
    wanted = {owner: name for owner, name in names.items() if name in defined}
    modules = [
        Path(framework.installed_path(file)).with_suffix("").parts for file in framework.files
    ]
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        tail = tuple((node.module or "").split(".")) if node.module else ()
        if not any(tail in ((), m[-len(tail) :], m[:-1][-len(tail) :]) for m in modules):
            continue
        for alias in node.names:
            if alias.name in names:
                wanted[alias.asname or alias.name] = names[alias.name]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        target = node.func
        if isinstance(target, ast.Attribute) and target.attr == "apply":
            target = target.value
        is_method = isinstance(target, ast.Attribute) and target.attr in methods
        if is_method or (isinstance(target, ast.Name) and target.id in wanted):
            yield Call(
                methods[target.attr] if is_method else wanted[target.id],
                sum(not isinstance(a, ast.Starred) for a in node.args) + is_method,
                tuple(k.arg for k in node.keywords if k.arg),
                any(isinstance(a, ast.Starred) for a in node.args)
                or any(k.arg is None for k in node.keywords),
                f"{path}:{node.lineno}",
            )


def refused(ours: Callable[..., Any], call: Call) -> str:
    """Why ours does not take a call; "" if it does."""
    try:
        signature = inspect.signature(ours)
        bind = signature.bind_partial if call.open else signature.bind
        bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        return f"{call.where}: {error}"
    return ""
