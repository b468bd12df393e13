"""Every message of the package, read from its source."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from tests.helpers.documents import PACKAGE

_LOGS = ("logger.info", "logger.warning", "warnings.warn")
# Python's own protocol, whose text nobody reads, and what a method is not made for.
_INNER = ("AttributeError", "NotImplementedError")


@dataclass(frozen=True)
class Message:
    """A message's literal pieces; between two of them stands a name in capitals, or `...`."""

    where: str
    kind: str
    text: str
    pieces: tuple[str, ...]

    def words(self) -> list[str]:
        """Literal words that a search for the message can begin with."""
        cut = [" ".join(piece.split()).strip(" :;,.()=") for piece in self.pieces]
        return [piece[:40].strip() for piece in cut if len(piece) >= 7]


def messages() -> list[Message]:
    """In the order of the source; each text once."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        where = str(file.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(file.read_text())):
            kind, value = _message_of(node)
            pieces = tuple(_pieces(value)) if value is not None else ()
            if any(len(piece.strip(" :,;")) > 3 for piece in pieces[::2]):
                text = " ".join("".join(pieces).replace("......", "...").split())
                found.setdefault(text, Message(where, kind, text, pieces[::2]))
    return list(found.values())


def _message_of(node: ast.AST) -> tuple[str, ast.expr | None]:
    if isinstance(node, ast.Call) and node.args:
        name = ast.unparse(node.func)
        if name.endswith(("Error", "NotCompiled")) and name not in _INNER:
            return name, node.args[0]
        if name == "check_values":
            return "device-side assert", node.args[1]
        if name in _LOGS:
            return "log", node.args[0]
    return "", None


def _pieces(node: ast.expr) -> list[str]:
    """Literal text and placeholders by turns, from text to text."""
    if isinstance(node, ast.Constant):
        text = re.sub(r"%[sdr]", "...", str(node.value))
        parts = re.split(r"(\.\.\.)", text)
    elif isinstance(node, ast.JoinedStr):
        parts = [""]
        for value in node.values:
            if isinstance(value, ast.Constant):
                parts[-1] += str(value.value)
            else:
                assert isinstance(value, ast.FormattedValue)
                parts += [_placeholder(value.value), ""]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _pieces(node.left), _pieces(node.right)
        parts = [*left[:-1], left[-1] + right[0], *right[1:]]
    else:
        parts = ["", "...", ""]
    return parts


def _placeholder(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id.strip("_").upper()
    return "..."
