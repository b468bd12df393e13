"""Markdown pages and docstrings as tests see them: code blocks, links, headings and names."""

from __future__ import annotations

import ast
import os
import re
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "mcore_logprobs"
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [ROOT / name for name in TOP_PAGES] + sorted((ROOT / "docs").rglob("*.md"))


@dataclass
class Source:
    """Blocks of Python that run one after the other, as one program.

    Attributes:
        where: the page or docstring, for errors.
        names: what stands for names of the reader's own, over those of `reader_names`.
    """

    where: str
    blocks: list[str]
    names: dict[str, Any] = field(default_factory=dict)


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def without_code(text: str) -> str:
    """Prose and tables: fenced and indented blocks are left out."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.sub(r"(?:^|\n)\n((?: {4}.*\n)+)", "\n\n", text)


def headings(text: str) -> set[str]:
    """Anchors of a page, as GitHub and Python-Markdown make them."""
    titles = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def links(text: str) -> list[str]:
    """Targets of a page's links and pictures, of references too, without code."""
    prose = re.sub(r"`[^`\n]*`", "`code`", without_code(text))
    inline = re.findall(r"\]\(([^)\s]+)\)", prose)
    return inline + re.findall(r"^\[[^\]]+\]: *(\S+)", prose, flags=re.M)


_COMMANDS = ("bash", "cmd:", "from", "pip", "python", "torchrun", "uv")
_LOG = r"(?:INFO|WARNING):\w+:"
_THREE_WORDS = re.compile(r"(?:^|[ (])[A-Za-z']{2,}:? [a-z']{2,} [a-z']{2,}(?![\w(.=/])")


def quoted_messages(text: str) -> list[str]:
    """Errors and log lines that a page quotes, without the exception's class.

    They are code in the first column of a table of messages or lines, code of three words or of an
    exception in prose, and blocks that begin as a message does ("name: text").
    """
    found = []
    for table in re.findall(r"^\| (?:message|line) \|.*\n(?:\|.*\n)*", text, flags=re.M):
        found += [code for row in table.splitlines()[2:] for code in _codes(cells(row)[0])]
    prose = without_code(text)
    for code in _codes(prose):
        says = re.match(r"\w*Error: ", code) or _THREE_WORDS.search(code)
        if says and code.split()[0] not in _COMMANDS and code not in found:
            found.append(code)
    for block in fenced(text, "text") + re.findall(r"(?:^|\n)\n((?: {4}.*\n)+)", text):
        lines = re.split(rf"\n\s*(?={_LOG})", block.strip())
        found += [line for line in lines if re.match(rf"{_LOG}|[\w.]+(?: \w+)?: ", line)]
    found = [re.sub(rf"^(?:\w*Error: |{_LOG})", "", " ".join(message.split())) for message in found]
    return list(dict.fromkeys(found))


def _codes(text: str) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def cells(line: str) -> list[str]:
    """A row of a table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def docstrings() -> Iterator[tuple[str, str]]:
    """(module path, or path and name, docstring) of everything in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            if doc := ast.get_docstring(node):
                yield f"{page_name(path)}:{getattr(node, 'name', '')}".rstrip(":"), doc


def indented(doc: str) -> list[str]:
    """A docstring's indented paragraphs, dedented; a gap of one blank line does not end one."""
    found, current, after_blank = [], [], True
    for line in [*doc.splitlines(), "", "end"]:
        if line.startswith("    ") and (current or after_blank):
            current.append(line)
        elif not line.strip() and current:
            current.append("")
        else:
            if current:
                found.append(textwrap.dedent("\n".join(current)).strip())
            current = []
        after_blank = not line.strip()
    return found


def is_python(block: str) -> bool:
    """Whether a paragraph is code and not a formula: it parses, imports or assigns, and calls."""
    try:
        tree = ast.parse(block)
    except SyntaxError:
        return False
    calls = any(
        isinstance(x, ast.Call | ast.Import | ast.ImportFrom) for x in ast.walk(tree)
    ) and not all(isinstance(x, ast.Expr) and not isinstance(x.value, ast.Call) for x in tree.body)
    return calls


def reader_names() -> dict[str, Any]:
    """What stands for a reader's own variables: a real GPTModel on a CPU, its batch, a head.

    b = s = 4, so that [b, s] and [s, b] are one shape.
    """
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    import mcore_logprobs
    from mcore_logprobs import TokenStats, losses, vocab_parallel_token_stats
    from mcore_logprobs.cpu_megatron import models as mm

    generator = torch.Generator().manual_seed(0)
    model = mm.build_gpt_model(mm.transformer_config(), vocab_size=64)
    tokens = torch.randint(64, (4, 5), generator=generator)
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    hidden = torch.randn(4, 4, 16, generator=generator, requires_grad=True)
    weight = torch.randn(64, 16, generator=generator, requires_grad=True)
    logits = (hidden @ weight.t()).detach()
    stats: TokenStats = vocab_parallel_token_stats(logits, labels, target_rank=True)
    noise = torch.randn(4, 4, generator=generator)
    cu_seqlens = torch.tensor([0, 4, 8], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=4,
        max_seqlen_kv=4,
    )
    names = {name: getattr(mcore_logprobs, name) for name in mcore_logprobs.__all__}
    names |= {name: getattr(losses, name) for name in losses.__all__}
    return names | {
        "model": model,
        "input_ids": ids,
        "ids": ids,
        "labels": labels,
        "target": labels,
        "position_ids": torch.arange(4).expand(4, 4),
        "positions": torch.arange(4).expand(4, 4),
        "attention_mask": None,
        "mask": None,
        "model_provider": lambda pre_process, post_process: model,
        "cu_seqlens": cu_seqlens,
        "packed_seq_params": packed,
        "whole_tokens": tokens[:2, :4].reshape(1, 8),
        "whole_positions": torch.arange(4).repeat(1, 2),
        "whole_routes": torch.zeros(1, 8, 2, 2, dtype=torch.int16),
        "hidden": hidden,
        "weight": weight,
        "logits": logits,
        "stats": stats,
        "hf_config": types.SimpleNamespace(vocab_size=64),
        "tp": None,
        "old_logprobs": stats.logprobs,
        "train_logprobs": stats.logprobs,
        "rollout_logprobs": stats.logprobs + noise * 1e-3,
        "advantages": noise,
        "loss_fn": losses.ReinforceLoss(),
        "answer_mask": torch.ones(4, 4, dtype=torch.bool),
        "answer_tokens": 16,
        # What a sampler kept of each token's distribution: the token and another id.
        "kept_ids": torch.stack([labels.flatten(), (labels.flatten() + 1) % 64], dim=1).flatten(),
        "offsets": torch.arange(0, 33, 2),
        "torch": torch,
    }


def run_sources(sources: list[Source], folder: str) -> dict[str, dict[str, Any]]:
    """Runs each source in names of its own, around a real GPTModel; files go to `folder`.

    Returns, by source, what was seen: the parameters of the model that got a gradient, and the
    names `loss` and `hidden`'s gradient where they are there.
    """
    from mcore_logprobs import patch_model
    from mcore_logprobs.cpu_megatron import models as mm
    from mcore_logprobs.cpu_megatron.runtime import cpu_runtime

    seen = {}
    here = os.getcwd()
    os.chdir(folder)
    try:
        with cpu_runtime():
            mm.init_model_parallel()
            try:
                for source in sources:
                    names = {**reader_names(), **source.names}
                    model = names["model"]
                    before = set(vars(model))
                    code = "\n".join(source.blocks)
                    given = "handle." in code and "handle =" not in code
                    if given:
                        names["handle"] = patch_model(model)
                    for number, block in enumerate(source.blocks):
                        exec(compile(block, f"{source.where} block {number}", "exec"), names)
                    if given:
                        names["handle"].remove()
                    assert set(vars(model)) == before, f"{source.where} left its patch behind"
                    grads = [p.grad for p in model.parameters()]
                    seen[source.where] = {
                        "parameters": len(grads),
                        "gradients": sum(g is not None and bool(g.abs().sum() > 0) for g in grads),
                        "loss": names["loss"].detach() if "loss" in names else None,
                        "hidden_gradient": names["hidden"].grad,
                    }
            finally:
                mm.destroy_model_parallel()
    finally:
        os.chdir(here)
    return seen
