"""Writes the API's pages from signatures and docstrings:  python docs/docstrings.py

A page of docs/api has `<!-- api: dotted.name -->` where an entry begins and `<!-- end -->` where it
ends; what is between them is made here, so that it reads the same on the site, in an editor and on
any viewer of Markdown. tests/test_docs.py compares the pages with the code.

    function   signature and docstring
    class      constructor, docstring, and each public method under a heading `### Class.method`
    module     docstring, and each name of its `__all__` under a heading `## name`

Keywords that many operations share (mcore_logprobs.ops.keywords) are described at the two functions
in HOMES; every other entry refers to them. `help` has the whole text.

The docstrings describe arguments in groups ("entropy, target_rank: ..."), which parsers of Google's
style drop; here nothing is dropped: sections become titles, their entries lists.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
PAGES = sorted((HERE / "api").glob("*.md"))
ENTRIES = re.compile(r"(<!-- api: (\S+) -->\n).*?(<!-- end -->)", re.S)
SECTION = re.compile(
    r"(Args|Attributes|Collectives|Cost|Fields|Gradients|Memory|Raises|Returns|Shape):"
)
# "name: text", "a, b: text", "`[s, b]` ..."; a deeper line goes on with the entry above it.
NAMES = re.compile(r"([\w*., ]+?):(?= |$)")
# An entry on a line of its own; a sentence that ends in front of the colon is none.
STARTS = re.compile(r"Returns |`\w|(?![^:]*\. )([\w*., ]+|[\w*][^:]{0,60}): ")
HOMES = {
    "vocab_parallel_token_stats": "logits.md#vocab_parallel_token_stats",
    "linear_token_stats": "hidden.md#linear_token_stats",
}
LINE = 76  # what fits beside the site's navigation


def page(text: str) -> str:
    """A page with every entry written anew."""
    return ENTRIES.sub(lambda match: f"{match[1]}\n{entry(match[2])}\n{match[3]}", text)


def entry(dotted: str) -> str:
    """Markdown of a function, class or module, without a heading of its own."""
    thing, name = pkgutil.resolve_name(dotted), dotted.rpartition(".")[2]
    text = "\n".join(_entry(thing, name)).strip() + "\n"
    return re.sub(r"\n{3,}", "\n\n", text)


def _entry(thing: Any, name: str) -> Iterator[str]:
    if isinstance(thing, ModuleType):
        yield to_markdown(inspect.getdoc(thing) or "")
        for member in thing.__all__:
            yield f"\n## {member}\n"
            yield from _entry(getattr(thing, member), member)
        return
    if isinstance(thing, dict):
        yield f"A dict with the keys {', '.join(f'`{key!r}`' for key in thing)}."
        return
    own_name = getattr(thing, "__name__", name)
    if own_name != name.rpartition(".")[2]:
        yield f"`{own_name}` under another name."
        return
    if _has_settings(thing):
        yield from _settings(thing)
    else:
        yield _fenced(signature(thing, name))
        yield to_markdown(_without_shared(_docstring(thing), name))
    if inspect.isclass(thing):
        for member in _members(thing):
            yield f"\n### {name}.{member}\n"
            value = inspect.getattr_static(thing, member)
            if isinstance(value, property):
                returns = inspect.signature(value.fget).return_annotation  # type: ignore[arg-type]
                yield _fenced(f"{name}.{member}: {_annotation(returns)}  # a property")
                yield to_markdown(inspect.getdoc(value) or "")
            else:
                yield from _entry(getattr(thing, member), f"{name}.{member}")


def _docstring(thing: Any) -> str:
    doc = inspect.getdoc(thing) or ""
    # A dataclass without a docstring has one made of its signature, which stands above already.
    return "" if doc.startswith(f"{getattr(thing, '__name__', '')}(") else doc


def _without_shared(doc: str, name: str) -> str:
    """A docstring whose shared keywords are one line that names where they are described."""
    if name in HOMES:
        return doc
    from mcore_logprobs.ops.keywords import DOCS

    texts = {
        keyword: textwrap.fill(
            f"{keyword}: {text}", 92, initial_indent=" " * 4, subsequent_indent=" " * 8
        )
        for keyword, text in DOCS.items()
    }
    found = sorted(
        (each for each in texts if texts[each] in doc), key=lambda k: doc.index(texts[k])
    )
    if len(found) < 3:
        return doc
    home = list(HOMES)[1 if name.startswith("linear_") else 0]
    for keyword in found[1:]:
        doc = doc.replace(texts[keyword] + "\n", "", 1)
    reference = textwrap.fill(
        f"{', '.join(f'`{keyword}`' for keyword in found)}: as in [{home}]({HOMES[home]}).",
        96,
        initial_indent=" " * 4,
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return doc.replace(texts[found[0]], reference, 1)


def _members(cls: type) -> list[str]:
    """Public methods and properties that no public base documents, in their order."""
    found: dict[str, None] = {}
    private = [base for base in cls.__mro__ if base is cls or base.__name__.startswith("_")]
    elsewhere = {name for base in cls.__mro__ if base not in private for name in vars(base)}
    for base in private:
        for member, value in vars(base).items():
            is_method = isinstance(value, property | classmethod | staticmethod)
            is_method = is_method or inspect.isfunction(value)
            if is_method and member not in elsewhere and inspect.getdoc(value):
                found.setdefault(member)
    return [member for member in found if not member.startswith("_")]


# ---- signatures ----------------------------------------------------------------------------------


def signature(thing: Any, name: str) -> str:
    """`name(...) -> ...` in one line, or a line for each parameter."""
    if inspect.isclass(thing) and not dataclasses.is_dataclass(thing):
        return f"class {name}"
    given = inspect.signature(thing)
    parameters = [p for p in given.parameters.values() if p.name != "self"]
    parts: list[str] = []
    kinds = inspect.Parameter
    star = False
    for parameter in parameters:
        star |= parameter.kind is kinds.VAR_POSITIONAL
        if parameter.kind is kinds.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        parts.append(_parameter(parameter))
    returns = _annotation(given.return_annotation)
    if inspect.isgeneratorfunction(inspect.unwrap(thing)):
        returns = "AbstractContextManager[None]"  # of @contextmanager
    end = (
        "" if inspect.isclass(thing) or given.return_annotation is given.empty else f" -> {returns}"
    )
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= LINE or not parts:
        return line
    return "\n".join([f"{name}(", *(_broken(f"    {part},") for part in parts), f"){end}"])


def _broken(line: str) -> str:
    """A parameter too long for a line, with the values of its default tuple on one of their own."""
    head, opened, values = line.partition(" = (")
    if len(line) <= LINE or not opened:
        return line
    return f"{head} = (\n        {values.removesuffix('),')},\n    ),"


def _parameter(parameter: inspect.Parameter) -> str:
    kinds = inspect.Parameter
    stars = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    annotated = parameter.annotation is not parameter.empty
    if annotated:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f"{' = ' if annotated else '='}{_value(parameter.default)}"
    return text


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _value(value: Any) -> str:
    # A field's default factory, and other values whose repr is of this process.
    return "..." if re.search(r"<.*>| at 0x", repr(value)) else repr(value)


def _fenced(code: str) -> str:
    # Not `python`: a signature is no program, and the pages' programs are run.
    return f"```py\n{code}\n```\n"


# ---- settings ------------------------------------------------------------------------------------


def _has_settings(thing: Any) -> bool:
    return hasattr(thing, "as_dict") and dataclasses.is_dataclass(thing)


def _settings(cls: Any) -> Iterator[str]:
    """A table of a dataclass whose fields carry their own description."""
    defaults = cls().as_dict()
    yield "| field | default | |"
    yield "|---|---|---|"
    for field in dataclasses.fields(cls):
        text = field.metadata["setting"].help.replace("|", "\\|")
        yield f"| `{field.name}` | `{defaults[field.name]!r}` | {text} |"


# ---- docstrings ----------------------------------------------------------------------------------


def to_markdown(doc: str) -> str:
    """Sections of a docstring as bold titles and lists; everything else as it is."""
    lines: list[str] = []
    inside = False  # an indented section, whose title stands on a line of its own
    titled = False  # a section that begins on the line of its title
    full = False  # whether the line before is as long as a wrapped one, so that its entry goes on
    for line in doc.splitlines():
        titled &= bool(line.strip())
        if match := SECTION.match(line):
            rest = line[match.end() :].strip()
            inside = not rest
            lines += (
                ["", f"**{match[1]}** {rest}".rstrip(), ""]
                if inside
                else [f"**{match[1]}**: {rest}"]
            )
            titled = bool(rest)
        elif titled and line.startswith("    "):
            lines.append(line.strip())
        elif inside and re.match(r" {4}\S", line):
            text = line.strip()
            goes_on = full and not STARTS.match(text)
            full = len(line) >= 80
            if goes_on:
                lines.append("  " + text)
                continue
            # A list of names may go on in the next line before its colon.
            lines.append("- " + NAMES.sub(lambda m: f"`{m[1]}`:", text, count=1))
        elif inside and line.startswith("     "):
            lines.append("  " + line.strip())
            full = False
        else:
            inside &= not line.strip()
            full = False
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    for file in PAGES:
        file.write_text(page(file.read_text()))
