"""What the site adds to the pages, which read as plain Markdown on a code host.  For MkDocs.

formulas     $...$ and ```math become MathML, which a browser draws without a script
signatures   on an API page, one of several lines folds under its first
tabs         a list below `<!-- tabs -->`, "- **verl**: ...", becomes a tab for each entry
cells        long code in a table may break after a dot or a slash; a measurement keeps its unit
"""

from __future__ import annotations

import html
import re
from typing import Any

SIGNATURE = re.compile(r"^```py\n(?P<head>[^\n]+\(\n)(?P<rest>.*?)^```\n", re.M | re.S)
TABS = re.compile(r"^<!-- tabs -->\n\n?(?P<list>(?:(?:- |  ).*\n|\n(?=- |  ))+)", re.M)
LONG_CODE = re.compile(r"<code>([^<]{31,})</code>")
MEASUREMENT = re.compile(r"<td>([\d.,]+) (ms|s|[KMG]iB|x|%)(?=<| \()")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite a page's Markdown: fold signatures, turn marked lists into tabs."""
    if page.file.src_uri.startswith("api/"):
        markdown = SIGNATURE.sub(_folded, markdown)
    return TABS.sub(_tabs, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Rewrite a rendered page: formulas as MathML, table cells that break where they may."""
    content = re.sub(r"<table>.*?</table>", _cells, content, flags=re.S)
    return FORMULA.sub(_mathml, content)


def _cells(table: re.Match[str]) -> str:
    """A table with places to break long code, and none between a number and its unit."""
    text = LONG_CODE.sub(_breakable, table[0])
    return MEASUREMENT.sub(r"<td>\1&nbsp;\2", text)


def _breakable(code: re.Match[str]) -> str:
    return f'<code class="long">{re.sub(r"(?<=[./=,_:(])", "<wbr>", code[1])}</code>'


def _folded(match: re.Match[str]) -> str:
    """The signature under a title of its required parameters and its result."""
    lines = match["rest"].splitlines()
    required = [re.split("[:,]", line.strip())[0] for line in lines if line.startswith("    ")]
    optional = [n for n, line in enumerate(lines) if "=" in line or line.strip() == "*,"]
    if optional:
        required = [*required[: optional[0]], "…"]
    title = match["head"].strip() + ", ".join(required) + lines[-1].strip()
    title = title.replace('"', "'")
    body = "".join(f"    {line}\n" for line in match[0].splitlines())
    return f'??? signature "`{title}`"\n\n{body}'


def _tabs(match: re.Match[str]) -> str:
    """`=== "verl"` and its text for every entry `- **verl**: text` of a list."""
    made = []
    for entry in re.split(r"^- ", match["list"], flags=re.M)[1:]:
        label, _, text = entry.partition(":")
        lines = [text.strip("\n").lstrip(), ""] if "\n" not in text.strip() else text.split("\n")
        body = "".join(f"    {line.strip()}\n" if line.strip() else "\n" for line in lines)
        made.append(f'=== "{label.strip("* ")}"\n\n{body}\n')
    return "".join(made)


def _mathml(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert  # of the site's environment alone

    tex = html.unescape(match[2]).strip()
    display = "inline" if match[1] == "span" else "block"
    formula = convert(tex, display=display)
    # As in print: no space between min and its bracket, a thin one on both sides of log.
    formula = re.sub(r"<mo>(min|max)</mo>", r"<mi>\1</mi>", formula)
    formula = formula.replace("<mi>log</mi>", '<mo lspace=".17em" rspace=".17em">log</mo>')
    return formula if display == "inline" else f'<div class="formula">{formula}</div>'
