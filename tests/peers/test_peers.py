"""What turns the table of `python -m tests.peers` red. Its night is that command."""

from __future__ import annotations

import dataclasses

import pytest

from tests.peers.process import reason
from tests.peers.run import PAGES, Run, Suite, compare, run, unavailable
from tests.peers.suites import SUITES

FILE = "tests/test_a.py"
TEST = f"{FILE}::test_one[a-2]"
SAID = "An id outside the vocabulary is an error, where SkyRL returns 0 for it."
SUITE = Suite("skyrl", files={FILE: {"test_left": "reason"}})
CALLS = {"theirs": {TEST: {("theirs", "f")}}, "ours": {TEST: {("ours", "f")}}}


def ended(who: str, *, passed: bool = True, calls: object = None) -> Run:
    return Run(
        found=[TEST, f"{FILE}::test_left"],
        passed={TEST} if passed else set(),
        failed={} if passed else {TEST: "why"},
        calls=CALLS[who] if calls is None else calls,  # type: ignore[arg-type]
        output="",
        seconds=1.0,
    )


def wrong(theirs: Run, ours: Run, suite: Suite = SUITE) -> str:
    (line,) = compare(suite, theirs, ours)
    assert (line.found, line.applicable) == (2, 1)
    return "\n".join(line.wrong)


def test_a_test_that_passes_twice_is_green() -> None:
    assert not wrong(ended("theirs"), ended("ours"))


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        ({}, {"passed": False}, "passes with theirs and fails with ours: why"),
        ({"passed": False}, {}, "fails with theirs, and is not named: why"),
        ({"calls": {}}, {}, "calls no function that is replaced, and is not named"),
        ({}, {"calls": {}}, "none of ours was called"),
        ({}, {"calls": {TEST: {("ours", "f"), ("theirs", "g")}}}, "theirs are called .*: g"),
    ],
)
def test_what_is_red(theirs: dict, ours: dict, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        assert not wrong(ended("theirs", **theirs), ended("ours", **ours))


def test_a_difference_by_design_is_on_the_page() -> None:
    design = dataclasses.replace(SUITE, by_design={FILE: {"test_one[*-2]": SAID}})
    fails = ended("ours", passed=False)
    assert not wrong(ended("theirs"), fails, design)
    assert "passes with ours" in wrong(ended("theirs"), ended("ours"), design)
    unsaid = dataclasses.replace(SUITE, by_design={FILE: {"test_one": "Nowhere said."}})
    assert "the page does not say 'Nowhere said.'" in wrong(ended("theirs"), fails, unsaid)


def test_no_tests_is_red() -> None:
    (line,) = compare(SUITE, Run([], set(), {}, {}, "error", 1.0), ended("ours"))
    assert "no tests found: error" in line.wrong[0]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("test_a", ["test_a", "test_a[1]", "test_a[1-2]"]),
        ("Test", ["Test::test_a", "Test::test_a[1]"]),
        ("test_a[*-1]", ["test_a[2-1]"]),
        ("test_a*", ["test_a", "test_ab"]),
        ("*", ["test_a", "Test::test_b[1]"]),
    ],
)
def test_names(pattern: str, names: list[str]) -> None:
    for name in names:
        assert reason({FILE: {pattern: "why"}}, f"{FILE}::{name}") == "why"
    for name in ("other", "test_b[1]"):
        expected = "why" if pattern == "*" else ""
        assert reason({FILE: {pattern: "why"}}, f"{FILE}::{name}") == expected


def test_differences_by_design_are_given_on_the_pages() -> None:
    for suite in SUITES:
        said = " ".join((PAGES / f"{suite.framework}.md").read_text(encoding="utf-8").split())
        for sentences in suite.by_design.values():
            for sentence in sentences.values():
                assert sentence in said


@pytest.mark.night
@pytest.mark.parametrize(
    ("framework", "file", "fault", "told_by"),
    [
        ("areal", "run_vocab_parallel", "temperature ignored", "with_temperature"),
        ("areal", "run_vocab_parallel", "gradient scaled", "gradient_correctness"),
        ("nemo_rl", "test_distributed_logprob", "gradient scaled", "forward_and_backward"),
        ("slime", "test_ppo_logprob_entropy.py", "gradient scaled", "vocab_parallel"),
    ],
)
def test_a_fault_turns_tests_red(framework: str, file: str, fault: str, told_by: str) -> None:
    whole = next(s for s in SUITES if s.framework == framework and any(file in f for f in s.files))
    suite = dataclasses.replace(
        whole, files={name: tests for name, tests in whole.files.items() if file in name}
    )
    if why := unavailable(suite):
        pytest.skip(why)
    faulty = run(suite, switched=True, fault=fault)
    assert any(told_by in test for test in faulty.failed), faulty.output[-3000:]
    (line,) = compare(suite, run(suite, switched=False), faulty)
    assert any(told_by in text for text in line.wrong)
    assert line.ours < line.theirs
