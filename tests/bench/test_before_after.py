"""`python -m benchmarks.before_after` times this package at two commits."""

from __future__ import annotations

import pytest

import mcore_logprobs as ml
from benchmarks import before_after

# Each is a few lines on an operation that is timed.
SHORT_FORMS = {
    "linear_topk_distill",
    "vocab_parallel_argmax",
    "vocab_parallel_logprobs",
    "vocab_parallel_soft_cross_entropy",
    "vocab_parallel_target_rank",
    "vocab_parallel_topk_distill",
}


def test_every_call_runs() -> None:
    calls, _ = before_after.calls(rows=5, vocab=24)
    shown = {name.split()[0] for name in calls} | SHORT_FORMS
    assert shown == {name for name in ml.__all__ if name.startswith(("vocab_parallel", "linear"))}
    found = before_after.times(5, 24, [], 1)
    assert found.keys() == calls.keys()
    assert all(forward > 0.0 for forward, _ in found.values())
    assert sum(backward > 0.0 for _, backward in found.values()) == len(found) - 2  # samples


@pytest.mark.night
def test_the_table_has_both_commits(capsys: pytest.CaptureFixture[str]) -> None:
    before_after.main(["HEAD", "linear_gather", "--turns", "1", "--rows", "4", "--vocab", "24"])
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.startswith("| call | forward, ms at HEAD | here | ratio |")
    name, *numbers = row.strip("| ").split(" | ")
    assert name == "linear_gather"
    assert all(float(number) >= 0.0 for number in numbers)


def test_what_cannot_be_compared_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        before_after.main([])
    with pytest.raises(SystemExit, match=r"expected calls of .*, got \['linear_gathr'\]"):
        before_after.times(5, 24, ["linear_gathr"], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ml, "linear_gather", None)
        assert not before_after.times(5, 24, ["linear_gather"], 1)
    assert "before_after: linear_gather is left out" in capfd.readouterr().err
