"""Every message of the package, read from its source."""

from __future__ import annotations

import ast
import functools
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


@functools.cache
def _trees() -> dict[str, ast.Module]:
    """The package's source by file."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in files}


@functools.cache
def messages() -> tuple[Message, ...]:
    """In the order of the source; each text once."""
    found = {}
    for where, tree in _trees().items():
        for node in ast.walk(tree):
            kind, value = _message_of(node)
            pieces = tuple(_pieces(value)) if value is not None else ()
            if any(len(piece.strip(" :,;")) > 3 for piece in pieces[::2]):
                text = " ".join("".join(pieces).replace("......", "...").split())
                found.setdefault(text, Message(where, kind, text, pieces[::2]))
    return tuple(found.values())


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


# ---- the other way: whether the package can print what a page quotes ----------------------------

# What a placeholder may be: a name, a number, a repr or something in brackets; several of them.
_ONE = r"(?:'[^']*'|\([^()]*\)|\[[^\[\]]*\]|[^\s,;:'()\[\]]+(?:\([^()]*\)|\[[^\[\]]*\])?)"
_VALUE = rf"{_ONE}(?:(?:, | or | and |:| (?=[\[(])|(?<=[\])]) ){_ONE})*"
_WORD = re.compile(r"[A-Za-z]{2,}")
Pieces = tuple[str, ...]


def can_be_printed(quote: str) -> bool:
    """Whether a text of the package has the quoted words, in their order, from any word on.

    `...` in the quote stands for anything. A text's placeholder may be values in the quote, or
    other texts of the package. Words of prose that no text has are neither.
    """
    # Brackets with something left out are one value.
    quote = re.sub(r"([(\[])[^()\[\]]*\.\.\.[^()\[\]]*([)\]])", r"\1X\2", quote)
    parts = [part.strip(" ,;:") for part in quote.split("...") if _WORD.search(part)]
    words = set(_WORD.findall(" ".join(parts)))
    return any(
        literal > 3
        for text, known in _texts().items()
        if not known.isdisjoint(words)
        for literal in _found(parts, text)
    )


def _found(parts: list[str], text: Pieces) -> set[int]:
    """For each way to find the parts in the text, one after the other: its literal letters."""
    ends = {(0, 0, 0)}
    for part in parts:
        ends = {
            (piece, place, literal + more)
            for first, least, literal in ends
            for start in range(first, len(text))
            for at in _word_starts(text[start], least if start == first else 0)
            for piece, place, more in _follow(part, text, start, at)
        }
    return {literal for _, _, literal in ends}


def _word_starts(piece: str, first: int) -> list[int]:
    inside = {match.start() + 1 for match in re.finditer(r"(?=\w\w)", piece)}
    return [place for place in range(first, len(piece) + 1) if place not in inside]


def _follow(part: str, text: Pieces, piece: int, place: int) -> list[tuple[int, int, int]]:
    """(piece, place, literal letters) wherever a part that begins here may end in the text."""
    rest = text[piece][place:]
    if rest.startswith(part):
        in_a_word = part and re.match(r"\w\w", part[-1] + rest[len(part) :])
        return [] if in_a_word else [(piece, place + len(part), _letters(part))]
    if not part.startswith(rest) or piece + 1 == len(text):
        return []
    part, following = part[len(rest) :], text[piece + 1]
    ends = [(piece + 1, 0, 0)] if _fills(part) or _begins(part) else []
    for size in range(len(part)):
        behind = part[size:]
        meets = behind.startswith(following) or following.startswith(behind)
        if meets and _fills(part[:size]):
            ends += _follow(behind, text, piece + 1, 0)
    return [(piece, place, _letters(rest) + literal) for piece, place, literal in ends]


@functools.cache
def _fills(part: str) -> bool:
    """Whether it may stand between two pieces of a text: values, or other texts with values."""
    words = set(_WORD.findall(part))
    return (
        not part
        or _is_value(part)
        or any(
            _is_of(text, part)
            for word in words
            for text, known in _by_longest_word().get(word, ())
            if known <= words
        )
        or any(
            _fills(part[: cut.start()]) and _fills(part[cut.end() :])
            for cut in re.finditer("[,;:] ", part)
        )
    )


def _is_of(text: Pieces, part: str) -> bool:
    match = re.fullmatch("(.*?)".join(map(re.escape, text)), part)
    return match is not None and all(map(_fills, match.groups()))


def _is_value(part: str) -> bool:
    """Values whose names are in the package, as is that of a parameter of a function."""
    names = re.findall(r"(?<![\w'.])[a-z_]+(?![\w'.])", part)
    return re.fullmatch(_VALUE, part) is not None and _known_names().issuperset(names)


@functools.cache
def _begins(part: str) -> bool:
    """Whether another text begins with it."""
    return any(text[0].startswith(part) for text in _texts())


def _letters(text: str) -> int:
    return sum(map(len, _WORD.findall(text)))


@functools.cache
def _texts() -> dict[Pieces, frozenset[str]]:
    """The literal pieces of every text in the package's source but docstrings, and their words."""
    found = {}
    for tree in _trees().values():
        constants = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        parts: set[ast.expr] = set()  # docstrings, and parts of what is one text
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr):
                parts.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts.update(node.values)
            if node in parts or not isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                continue
            if isinstance(node, ast.JoinedStr):
                node = ast.JoinedStr([x for part in node.values for x in _inside(part, constants)])
            text = tuple(" ".join(f"|{piece}|".split())[1:-1] for piece in _pieces(node)[::2])
            if words := frozenset(_WORD.findall(" ".join(text))):
                found[text] = words
    return found


@functools.cache
def _by_longest_word() -> dict[str, list[tuple[Pieces, frozenset[str]]]]:
    found: dict[str, list[tuple[Pieces, frozenset[str]]]] = {}
    for text, known in _texts().items():
        found.setdefault(max(known, key=lambda word: (len(word), word)), []).append((text, known))
    return found


def _inside(value: ast.expr, constants: dict[str, ast.expr]) -> list[ast.expr]:
    """A part of an f-string; for a text that has a name in the module, that text's parts."""
    if isinstance(value, ast.FormattedValue) and isinstance(value.value, ast.Name):
        text = constants.get(value.value.id)
        if isinstance(text, ast.JoinedStr):
            return [part for value in text.values for part in _inside(value, constants)]
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            return [text]
    return [value]


@functools.cache
def _known_names() -> set[str]:
    """Names in the package's source, and texts that are one word, such as a kind or a backend."""
    names = set()
    for tree in _trees().values():
        for node in ast.walk(tree):
            fields = ("id", "arg", "attr", "name", "value")
            names |= {x for x in (getattr(node, f, None) for f in fields) if isinstance(x, str)}
    return names
