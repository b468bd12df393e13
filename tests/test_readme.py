"""README.md, the table of quantities and the tables of costs: Python runs, tables follow."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import torch

import mcore_logprobs
from benchmarks import tables
from mcore_logprobs import LogprobConfig, PatchHandle
from tests.helpers.distributed import RankError
from tests.helpers.documents import ROOT, Source, cells, fenced, run_sources

README = (ROOT / "README.md").read_text()
COSTS = (ROOT / "docs" / "costs.md").read_text()
BLOCKS = fenced(README, "python")


def test_python_blocks_run(ranks, tmp_path) -> None:
    assert len(BLOCKS) == README.count("```python") >= 3
    # As a reader runs them: one after the other, with nothing imported beforehand.
    bare = dict.fromkeys(mcore_logprobs.__all__) | {"ClippedLoss": None}
    sources = [Source("README.md", BLOCKS, bare)]
    (seen,) = ranks(1).run(run_sources, sources, str(tmp_path))
    result = seen["README.md"]
    assert torch.isfinite(result["loss"])
    assert result["gradients"] == result["parameters"] > 0
    assert result["hidden_gradient"].abs().sum() > 0


def test_a_broken_block_would_be_noticed(ranks, tmp_path) -> None:
    broken = [BLOCKS[0].replace("LogprobConfig(", "LogprobConfig(tempo=1, ")]
    with pytest.raises(RankError, match=r"README\.md block 0"):
        ranks(1).run(run_sources, [Source("README.md", broken)], str(tmp_path))


# ---- the table of completeness -----------------------------------------------------------------

QUANTITIES = ROOT / "docs" / "api" / "index.md"
COMPLETENESS = re.search(
    r"<!-- completeness: begin -->\n.*?\n\|(?:---\|)+\n(.*?)<!-- completeness: end -->",
    QUANTITIES.read_text(),
    re.S,
)
CELL = re.compile(r"\[([^\]]+)\]\(([\w/.-]+)(?:#([\w-]+))?\)")


def completeness() -> list[list[str]]:
    assert COMPLETENESS is not None
    return [cells(line) for line in COMPLETENESS[1].splitlines()]


@pytest.mark.parametrize("row", completeness(), ids=lambda row: row[0])
def test_every_cell_of_the_completeness_table_is_documented(row) -> None:
    assert len(row) == 4
    config_fields = {field.name for field in fields(LogprobConfig)}
    for place, cell in enumerate(row[1:]):
        found = CELL.findall(cell)
        assert found, f"{row[0]}: a hole in column {place + 1}"
        for label, path, anchor in found:
            page = (QUANTITIES.parent / path).read_text()
            name = label.strip("`")
            if label.startswith("`"):
                assert name in config_fields
                assert f"| `{name}` |" in page
            elif name == "losses":
                assert "<!-- api: mcore_logprobs.losses -->" in page
            else:
                owner, _, member = name.partition(".")
                assert owner in mcore_logprobs.__all__, f"{name} is not in the package"
                assert not member or callable(getattr(PatchHandle, member))
                assert anchor == name.replace(".", "").lower()
                assert f"<!-- api: mcore_logprobs.{owner} -->" in page
    assert "vocab_parallel_" in row[1]
    assert "linear_" in row[2]


def test_every_operation_of_the_package_is_in_the_table() -> None:
    table = "\n".join(" ".join(row) for row in completeness())
    missing = [
        name
        for name in mcore_logprobs.__all__
        if (name.startswith(("vocab_parallel_", "linear_")) and f"[{name}]" not in table)
        or (
            name.startswith(("context_parallel_", "all_to_all_"))
            and f"[{name}]" not in QUANTITIES.read_text()
        )
    ]
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_number_of_objectives_is_how_many_there_are(page: str) -> None:
    (said,) = re.findall(r"one of (\d+) objectives", (ROOT / page).read_text())
    assert int(said) == len(mcore_logprobs.losses.OBJECTIVES)


# ---- figures -----------------------------------------------------------------------------------

LOGITS = "2026-11-intel-xeon-2-cores-logits.txt", "dtype bfloat16"
LINEAR = "2026-11-intel-xeon-2-cores-linear.txt", "dtype float32"
LINEAR_BF16 = LINEAR[0], "dtype bfloat16"
POLICY = "2026-11-intel-xeon-2-cores-policy.txt", "dtype float32"
MEASURED = {
    "`vocab_parallel_logprobs`": (*LOGITS, "logprobs"),
    "with entropy": (*LOGITS, "+ entropy"),
    "Megatron's cross entropy": (*LOGITS, "megatron"),
    "Megatron's fused cross entropy": (*LOGITS, "megatron fused"),
    "`torch.compile` of the plain formula, TP 1 only": (*LOGITS, "torch.compile"),
    "`linear_token_stats`": (*LINEAR, "fused"),
    "materialized logits": (*LINEAR, "unfused (holds the logits)"),
    "`linear_policy_loss`": (*POLICY, "linear_policy_loss"),
    "policy loss, materialized logits": (*POLICY, "unfused (holds the logits)"),
    "`linear_token_stats`, bf16 head": (*LINEAR_BF16, "fused"),
    "bf16 head, `logits_dtype=torch.bfloat16`": (*LINEAR_BF16, "fused, bf16 logits"),
    "bf16 head, materialized logits": (*LINEAR_BF16, "unfused (holds the logits)"),
}


def printed(file: str, table: str, row: str) -> tuple[float, float]:
    """(ms forward and backward, peak MiB) of one row of a result table."""
    (found,) = [x for x in tables.read(file) if table in x.title]
    return found.ms(row), found.number(row, "peak MiB")


def figure_rows() -> dict[str, list[str]]:
    section = COSTS.split("Time and extra memory of 1024 tokens")[1].split("\n## ")[0]
    rows = [cells(line) for line in section.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows if row[1] != "time"}


def test_figures_are_those_that_the_benchmark_printed() -> None:
    rows = figure_rows()
    assert rows.keys() == MEASURED.keys()
    for label, source in MEASURED.items():
        ms, mib = printed(*source)
        time = f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1e3:.2f} s"
        assert rows[label] == [time, f"{mib:.0f} MiB"], label


def test_releases_follow_their_page() -> None:
    page = (ROOT / "docs" / "releases.md").read_text().partition("<!-- matrix: end -->")[0]
    header, *body = [cells(line) for line in page.splitlines() if line.startswith("| ")]
    for verdict, title in (("passed", "features that pass"), ("not there", "not there in the")):
        counts = [sum(row[i] == verdict for row in body) for i in range(1, len(header))]
        (line,) = [x for x in README.splitlines() if x.startswith(f"| {title}")]
        assert cells(line)[1:] == [str(c) for c in counts]
    assert f"| Megatron-Core | {' | '.join(header[1:])} |" in README
    known = {cell for row in body for cell in row[1:]}
    assert known <= {"passed", "not there"}, "README has no row for other verdicts"


def test_memory_is_arithmetic_of_measured_factors() -> None:
    """The first table of costs: bytes of the logits, times factors that `bench` printed."""
    (head,) = [line for line in COSTS.splitlines() if line.startswith("| 32768 tokens")]
    assert "V 152064, bf16, TP 1" in head
    logits = 32768 * 152064 * 2
    rows = {
        "Megatron's fused cross entropy": "megatron fused",
        "Megatron's cross entropy": "megatron",
        "`vocab_parallel_logprobs`": "logprobs",
    }
    for label, series in rows.items():
        (line,) = [x for x in COSTS.splitlines() if x.startswith(f"| {label} | ") and "GiB" in x]
        given, factor, total = cells(line)[1:]
        measured = printed(*LOGITS, series)[1] / (1024 * 131072 * 2 / 2**20)
        assert factor.startswith(f"{measured:.0f} x")
        assert given.endswith(f"{logits / 2**30:.1f} GiB")
        assert total == f"{logits * (1 + round(measured)) / 2**30:.1f} GiB"


def test_every_framework_is_named() -> None:
    pages = sorted((ROOT / "docs" / "frameworks").glob("*.md"))
    missing = [page.name for page in pages if f"(docs/frameworks/{page.name})" not in README]
    assert missing == []
