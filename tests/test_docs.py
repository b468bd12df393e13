"""Pages and docstrings hold: links, names, flags, figures and every block of Python in them."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mcore_logprobs
from mcore_logprobs import diagnostics, losses
from mcore_logprobs.config import add_logprob_args
from tests.helpers.documents import (
    PAGES,
    ROOT,
    Source,
    docstrings,
    fenced,
    headings,
    indented,
    is_python,
    links,
    page_name,
    run_sources,
    without_code,
)

MEGATRON_NAMES = {"vocab_parallel_cross_entropy"}  # of its own, which a page compares with
API = sorted((ROOT / "docs" / "api").glob("*.md"))
PUBLIC = [name for name in mcore_logprobs.__all__ if name != "__version__"]
by_page = pytest.mark.parametrize("page", PAGES, ids=page_name)

# ---- code ----------------------------------------------------------------------------------------

# Blocks that do not run here: (where, number) -> the test that runs the same calls. Their own
# imports, attributes and calls into this package are still resolved.
ELSEWHERE = {
    ("docs/megatron-flags.md", 0): "tests/megatron/pretrain_checks.py",
    ("docs/megatron-flags.md", 1): "tests/megatron/pretrain_checks.py",
    ("docs/cuda-graphs.md", 0): "tests/test_no_sync.py",
    ("docs/frameworks/verl.md", 0): "tests/dropin/test_models.py",
    ("docs/frameworks/megatron_rl.md", 0): "tests/dropin/test_models.py",
    ("docs/frameworks/megatron_bridge.md", 0): "tests/megatron/newer_checks.py",
    ("mcore_logprobs/cpu_megatron/training.py", 0): "tests/megatron/pretrain_checks.py",
    ("mcore_logprobs/dropin/verl.py", 0): "tests/dropin/test_models.py",
    ("mcore_logprobs/dropin/megatron_rl.py", 0): "tests/dropin/test_models.py",
    ("mcore_logprobs/megatron/entry.py", 0): "tests/megatron/pretrain_checks.py",
    # Needs Megatron-Core 0.18 or later.
    (
        "mcore_logprobs/megatron/output_processor.py:logprob_output_processor",
        0,
    ): "tests/megatron/test_output_processor.py",
}
# Blocks of several ranks: their number. They start from a process group that is there already.
SEVERAL_RANKS = {"mcore_logprobs/cpu_megatron/runtime.py": 4}
# Blocks that start processes of their own: they run in this process, which may have children.
STARTS_PROCESSES = ["docs/audit.md"]


def packed_stats() -> mcore_logprobs.TokenStats:
    target = torch.randint(16, (1, 8))
    return mcore_logprobs.vocab_parallel_token_stats(torch.randn(1, 8, 16), target)


def own_names() -> dict[str, dict[str, Any]]:
    """What stands for a reader's names where `reader_names` has another meaning for them."""
    from mcore_logprobs.bench.counting import CollectivesMade
    from mcore_logprobs.diagnostics import compare_logprobs, report

    # vLLM's outputs for four sequences: answers of three tokens, two, one and none.
    masks = ([[number, 63] for number in range(3 - place)] for place in range(4))
    sampled = [SimpleNamespace(sampling_mask=SimpleNamespace(token_ids=ids)) for ids in masks]
    return {
        "mcore_logprobs/bench/counting.py:CollectivesMade": {"CollectivesMade": CollectivesMade},
        "mcore_logprobs/ops/reshard.py:reshard_vocabulary": {
            "teacher_weight": torch.randn(64, 16),
            "draft_to_target": torch.arange(0, 64, 2),
            "draft_head": torch.randn(32, 16),
            "h": torch.randn(4, 4, 16),
        },
        "docs/api/hidden.md": {
            "a": torch.randn(8, 16),
            "b": torch.randn(64, 8),
            "teacher_hidden": torch.randn(4, 4, 16),
            "adapters": [(torch.randn(8, 16), torch.randn(64, 8), 0.5) for _ in range(2)],
            "rows_of_adapter": torch.arange(16).chunk(2),
        },
        "docs/objectives.md": {
            "packed_stats": packed_stats(),
            "ref_stats": packed_stats(),
            "packed_mask": torch.ones(1, 8, dtype=torch.bool),
        },
        "docs/mismatch.md": {
            "logits": torch.randn(4, 4, 49152),
            "outputs": sampled,
            "starts": [1, 2, 3, 4],
            "length": 4,
        },
        "mcore_logprobs/debug/compare.py": {
            "mask": torch.ones(4, 4, dtype=torch.bool),
            "compare_logprobs": compare_logprobs,
            "report": report,
        },
    }


def sources() -> list[Source]:
    pages = [page for page in PAGES if page_name(page) != "README.md"]  # tests/test_readme.py
    found = [Source(page_name(page), fenced(page.read_text(), "python")) for page in pages]
    found += [
        Source(where, [b for b in indented(doc) if is_python(b)]) for where, doc in docstrings()
    ]
    return [source for source in found if source.blocks]


def is_elsewhere(source: Source) -> bool:
    return any((source.where, number) in ELSEWHERE for number in range(len(source.blocks)))


def test_every_block_of_python_runs(ranks, tmp_path) -> None:
    names = own_names()
    others = {*SEVERAL_RANKS, *STARTS_PROCESSES}
    here = [s for s in sources() if not is_elsewhere(s) and s.where not in others]
    for source in here:
        source.names = names.get(source.where, {})
    assert {"docs/index.md", "docs/how-it-works.md", "docs/mismatch.md"} <= {s.where for s in here}
    (seen,) = ranks(1).run(run_sources, here, str(tmp_path), timeout=300)
    assert seen.keys() == {source.where for source in here}


@pytest.mark.parametrize("where", STARTS_PROCESSES)
def test_blocks_that_start_processes_run(where) -> None:
    from mcore_logprobs.dropin.slime import calculate_log_probs_and_entropy

    (source,) = [s for s in sources() if s.where == where]
    for block in source.blocks:
        names = {"my_function": calculate_log_probs_and_entropy, "__name__": "__main__"}
        exec(compile(block, where, "exec"), names)
        assert names["report"].ok


@pytest.mark.parametrize("where", SEVERAL_RANKS)
def test_blocks_of_several_ranks_run(ranks, where) -> None:
    (source,) = [s for s in sources() if s.where == where]
    assert 'dist.init_process_group("gloo")' in source.blocks[0]
    results = ranks(SEVERAL_RANKS[where]).run(_run_on_a_rank, source)
    assert all(torch.isfinite(loss).all() for loss in results)


def _run_on_a_rank(source: Source) -> torch.Tensor:
    ids = torch.arange(8).view(1, 8)  # this rank's part of a sequence of 16
    names: dict[str, Any] = {"input_ids": ids, "labels": ids, "position_ids": ids}
    for block in source.blocks:
        lines = [x for x in block.splitlines() if not x.startswith("dist.init_process_group")]
        exec(compile("\n".join(lines), source.where, "exec"), names)
    return names["loss"].detach()


def test_blocks_that_run_elsewhere_name_what_is_there() -> None:
    found = {source.where: source for source in sources()}
    assert {where for where, _ in ELSEWHERE} <= found.keys(), "an entry of a block that is gone"
    for (where, number), test in ELSEWHERE.items():
        tree = ast.parse(found[where].blocks[number].replace(", ...)", ")").replace("(...)", "()"))
        modules: dict[str, Any] = {}
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        for text in map(ast.unparse, imports):
            if text.startswith(("from mcore_logprobs", "import mcore_logprobs")):
                exec(text, modules)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = modules.get(node.value.id)
                assert owner is None or hasattr(owner, node.attr), f"{where}: {node.attr}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                function = getattr(mcore_logprobs, node.func.id, None)
                if function is not None:
                    keywords = {k.arg: None for k in node.keywords if k.arg}
                    inspect.signature(function).bind(*node.args, **keywords)
        called = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} & set(PUBLIC)
        text = (ROOT / test).read_text() + (ROOT / "tests/megatron/pretrain_script.py").read_text()
        assert all(name in text for name in called), f"{where}: {test} runs something else"


@by_page
def test_imports_that_a_diff_adds_exist(page) -> None:
    for block in fenced(page.read_text(), "diff"):
        added = "\n".join(line[1:] for line in block.splitlines() if line.startswith("+"))
        for text in re.findall(
            r"^from mcore_logprobs.*?import (?:[^(\n]+|\(.*?\))$", added, re.M | re.S
        ):
            exec(text, {})


SHOWN = [page for page in PAGES if page.name not in ("CHANGELOG.md", "CONTRIBUTING.md")]
COLUMNS = 76  # what the site shows of a line beside its navigation


@pytest.mark.parametrize("page", SHOWN, ids=page_name)
def test_code_fits_the_column_of_the_site(page) -> None:
    """Blocks of a page, and signatures. A docstring's own blocks scroll in themselves."""
    text = page.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S)
    if page not in API:
        blocks += [indented.group(1) for indented in re.finditer(r"^ {4}(.*)", text, flags=re.M)]
    assert [x for block in blocks for x in block.splitlines() if len(x) > COLUMNS] == []


# ---- links and names -----------------------------------------------------------------------------


@by_page
def test_links_lead_somewhere(page) -> None:
    dead = []
    for target in links(page.read_text()):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        if not file.is_file() or (anchor and anchor not in headings(file.read_text())):
            dead.append(target)
        elif ROOT / "docs" in page.parents and ROOT / "docs" not in file.parents:
            dead.append(f"{target} (leaves docs/, which the site cannot)")
    assert dead == []


def code_of(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", without_code(page.read_text()))


@by_page
def test_files_exist(page) -> None:
    if page.name == "CHANGELOG.md":  # of files as they were
        return
    tops = ("mcore_logprobs/", "benchmarks/", "tests/", "docs/", "examples/", "configs/")
    named = {code.split()[0] for code in code_of(page) if code.startswith(tops)}
    commands = r"(?:^|`)(?:bash|python) ([\w/]+\.(?:sh|py))"
    named |= set(re.findall(commands, page.read_text(), re.M))
    assert [name for name in named if not (ROOT / name).exists()] == []


@by_page
def test_names_exist(page) -> None:
    if page.name == "CHANGELOG.md":  # of names as they were
        return
    known = set(PUBLIC) | set(losses.__all__) | MEGATRON_NAMES | {"vocab_parallel_logits"}
    missing = []
    for code in code_of(page):
        dotted = re.fullmatch(r"mcore_logprobs(?:\.\w+)+", code)
        if dotted:
            try:
                pkgutil.resolve_name(code)
            except (ImportError, AttributeError):
                missing.append(code)
        prefix = r"(vocab_parallel|linear|context_parallel|all_to_all|(?:un)?patch)_\w+"
        if "frameworks" not in page.parts and re.fullmatch(prefix, code) and code not in known:
            missing.append(code)
    # The audit's table has functions of other projects.
    assert [name for name in missing if page.name != "audit.md" or name in known] == []


@by_page
def test_calls_fit_their_signatures(page) -> None:
    """`name(keyword=value)` in a page's prose, for names of this package."""
    for code in code_of(page):
        match = re.match(r"(\w+)\(", code)
        if not match or match[1] not in {*PUBLIC, *losses.__all__} or "..." in code:
            continue
        call = ast.parse(code, mode="eval").body
        assert isinstance(call, ast.Call)
        function = getattr(mcore_logprobs if match[1] in PUBLIC else losses, match[1])
        parameters = inspect.signature(function).parameters
        assert {k.arg for k in call.keywords} <= parameters.keys(), code


@by_page
def test_flags_exist(page) -> None:
    known = add_logprob_args(argparse.ArgumentParser()).format_help()
    text = page.read_text()
    flags = set(re.findall(r"--logprob-[a-z-]+[a-z]", text))
    assert [flag for flag in flags if flag not in known] == []
    files = [ROOT / "mcore_logprobs" / name for name in ("bench/cli.py", "debug/commands.py")]
    parsers = "".join(file.read_text() for file in files)
    for line in re.findall(r"-m mcore_logprobs (?:bench|audit|doctor) [^`\n]*", text):
        for flag in re.findall(r"--[a-z][a-z-]*", line):
            assert f'"{flag}"' in parsers, f"{line}: {flag}"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_s_arguments_are_those_of_the_signature(name) -> None:
    """Args names only parameters: a docstring does not outlive a keyword."""
    thing = getattr(mcore_logprobs, name)
    if not inspect.isfunction(thing):
        return
    section = re.search(r"^Args:\n((?:(?: {4}.*)?\n)+)", f"{inspect.getdoc(thing)}\n", flags=re.M)
    if section is None:
        return
    entries = re.split(r"\n(?= {4}\S)", textwrap.dedent(section[1]).replace("\n    ", " "))
    for entry in "\n".join(entries).splitlines():
        described = re.split(r", | and ", entry.partition(":")[0].strip())
        own = [word for word in described if word.isidentifier()]
        unknown = set(own) - inspect.signature(thing).parameters.keys()
        assert not unknown, f"{name}: Args describes {unknown}"


# ---- the API's pages -----------------------------------------------------------------------------


def test_every_public_name_has_its_place_in_the_api() -> None:
    text = "".join(page.read_text() for page in API)
    entry = r"^## (\w+)\n\n(?:(?!## ).*\n)*?<!-- api: mcore_logprobs\.\1 -->$"
    assert set(PUBLIC) - set(re.findall(entry, text, flags=re.M)) == set()
    named = set(
        re.findall(
            entry.replace("mcore_logprobs", r"mcore_logprobs\.diagnostics"), text, flags=re.M
        )
    )
    assert set(diagnostics.__all__) == named


@pytest.mark.parametrize("page", API, ids=page_name)
def test_the_api_s_pages_are_those_of_this_code(page) -> None:
    made = docstrings_py().page(page.read_text())
    assert page.read_text() == made, "python docs/docstrings.py writes it"


def test_an_entry_has_signature_arguments_and_shapes() -> None:
    entry = docstrings_py().entry("mcore_logprobs.linear_gather")
    assert "    log_softmax: bool = False,\n" in entry
    assert "    logits_dtype: torch.dtype = torch.float32,\n" in entry  # a shared keyword
    assert "**Shape**" in entry
    assert "`temperature`: logits are divided by it" not in entry
    assert "`temperature`" in entry.split("as in [linear_token_stats]")[0]
    home = docstrings_py().entry("mcore_logprobs.linear_token_stats")
    assert "`temperature`: logits are divided by it" in home
    result = docstrings_py().entry("mcore_logprobs.TokenStats")
    assert "    sum_pi_squared: Tensor | None = None,\n" in result
    assert "### TokenStats.gather_cp\n" in result


def docstrings_py() -> Any:
    """docs/docstrings.py; docs is no package."""
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_by_task_names_every_operation() -> None:
    text = (ROOT / "docs/api/index.md").read_text()
    operations = ("vocab_parallel_", "linear_", "context_parallel_", "all_to_all_")
    assert [n for n in PUBLIC if n.startswith(operations) and f"[{n}](" not in text] == []


# ---- configurations ------------------------------------------------------------------------------


def test_configurations_are_all_listed() -> None:
    page = (ROOT / "docs/configs.md").read_text()
    files = [path.name for path in sorted((ROOT / "configs").iterdir())]
    assert [name for name in files if f"| `configs/{name}` |" not in page] == []
