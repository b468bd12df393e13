"""The release matrix: its features on this Megatron, its verdicts, and the table in docs/."""

from __future__ import annotations

import re

import pytest

from mcore_logprobs.megatron.versions import megatron_features
from tests.megatron import release_matrix as matrix
from tests.megatron.release_features import FEATURES, Feature

PAGE = matrix.PAGE.read_text()
TABLES = [  # of the releases, of main
    PAGE.partition(matrix.BEGIN.format(which) + "\n")[2].partition(matrix.END.format(which))[0]
    for which in ("matrix", "main")
]


@pytest.mark.night
@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_feature(feature):
    """What the page says of this release is so: the same verdict, and a pass is a pass."""
    version = megatron_features()["megatron-core"].partition("+")[0]
    shown = _column(version if version in TABLES[0] else "main")[feature.name]
    status, why = matrix.run_feature(feature)
    assert status != matrix.FAILED, why
    assert status == shown
    if status == matrix.NOT_THERE:
        assert f"{feature.name}: {why}" in PAGE


def _column(version: str) -> dict[str, str]:
    """Of a release, or of main."""
    lines = TABLES[version == "main"].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    at = [cell.split()[:1] for cell in cells[0]].index([version])
    return {row[0]: row[at] for row in cells[2:]}


def test_page_shows_five_releases_and_main_and_no_failure():
    versions = re.findall(r"\d+\.\d+\.\d+", TABLES[0].partition("\n")[0])
    assert [v.rsplit(".", 1)[0] for v in versions] == ["0.15", "0.16", "0.17", "0.18", "0.19"]
    for version in [*versions, "main"]:
        column = _column(version)
        assert column.keys() == {f.name for f in FEATURES}
        assert set(column.values()) <= {matrix.PASSED, matrix.NOT_THERE}
    assert re.match(r"\| \| main [0-9a-f]{7,} of \d{4}-\d\d-\d\d \|\n", TABLES[1])
    assert re.search(r"\nRun on \d{4}-\d\d-\d\d\.\n$", TABLES[1])


def broken() -> None:
    raise AssertionError("rank 0: loss is off by 0.5")


def never() -> None:
    raise KeyError("looked at what is not there")


def test_a_failing_check_fails(tmp_path):
    features = [
        Feature("good", lambda: None, lambda: ""),
        Feature("bad", broken, lambda: ""),
        Feature("lacking", broken, lambda: "Model has no head"),
        Feature("confused", lambda: None, never),
    ]
    column = matrix.run_features(features)
    assert {name: status for name, (status, _) in column.items()} == {
        "good": matrix.PASSED,
        "bad": matrix.FAILED,
        "lacking": matrix.NOT_THERE,
        "confused": matrix.FAILED,
    }
    assert "off by 0.5" in column["bad"][1]
    text = matrix.table({"1.0": column, "2.0": {"good": (matrix.PASSED, "")}})
    assert "| good | passed | passed |" in text
    assert "| bad | FAILED | FAILED |" in text  # in 2.0 it did not run
    assert "- 1.0: lacking: Model has no head" in text
    page = tmp_path / "page.md"
    page.write_text(f"before\n{marked('matrix', 'old')}{marked('main', 'kept')}after\n")
    matrix.write_table(text, page, "matrix")
    assert page.read_text() == f"before\n{marked('matrix', text)}{marked('main', 'kept')}after\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="expected <!-- matrix: begin"):
        matrix.write_table(text, page, "matrix")


def marked(which: str, text: str) -> str:
    return f"{matrix.BEGIN.format(which)}\n{text}\n{matrix.END.format(which)}\n"


def test_the_command_fails_where_a_release_does(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(marked("matrix", "") + marked("main", "made before"))
    monkeypatch.setattr(matrix, "PAGE", page)
    column = {"a": (matrix.FAILED, "Traceback\nwhy")}
    monkeypatch.setattr(matrix, "run_release", lambda folder: ("1.0", column))
    assert matrix.main([str(tmp_path)]) == 1
    assert "1.0: a: why" in capsys.readouterr().out
    column["a"] = (matrix.PASSED, "")
    assert matrix.main([str(tmp_path)]) == 0
    assert matrix.main([str(tmp_path), str(tmp_path)]) == 1  # the same release twice
    assert "made before" in page.read_text()
    monkeypatch.setattr(matrix, "name_of_checkout", lambda folder: "main 1234567 of 2026-01-02")
    assert matrix.main(["--main", str(tmp_path)]) == 0
    assert "| | 1.0 |" in page.read_text()
    assert "| | main 1234567 of 2026-01-02 |" in page.read_text()
    assert "made before" not in page.read_text()
