"""Docstrings to Markdown for the site: sections become titles, their entries lists.

Used by mkdocstrings (.mkdocs.yml). The docstrings describe arguments in groups ("entropy,
target_rank: ..."), which parsers of Google's style drop; here nothing is dropped.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTION = re.compile(
    r"(Args|Attributes|Collectives|Cost|Fields|Gradients|Memory|Raises|Returns|Shape):"
)
# "name: text", "a, b: text", "`[s, b]` ..."; a deeper line goes on with the entry above it.
ENTRY = re.compile(r"([\w*., ]+?):(?= |$)")


def to_markdown(doc: str) -> str:
    """Sections of a docstring as bold titles and lists; everything else as it is."""
    lines: list[str] = []
    inside = False  # an indented section, whose title stands on a line of its own
    for line in doc.splitlines():
        if match := SECTION.match(line):
            rest = line[match.end() :].strip()
            inside = not rest
            lines += (
                ["", f"**{match[1]}** {rest}".rstrip(), ""]
                if inside
                else [f"**{match[1]}**: {rest}"]
            )
        elif inside and re.match(r" {4}\S", line):
            text = line.strip()
            # A list of names may go on in the next line before its colon.
            lines.append("- " + ENTRY.sub(lambda m: f"`{m[1]}`:", text, count=1))
        elif inside and line.startswith("     "):
            lines.append("  " + line.strip())
        else:
            if line.strip():
                inside = False
            lines.append(line)
    return "\n".join(lines)


class Sections(griffe.Extension):
    """Rewrites every docstring as it is loaded."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
