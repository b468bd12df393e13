"""The audit: finds planted and published mistakes, passes what is right."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from mcore_logprobs.__main__ import main
from mcore_logprobs.audit import KINDS, audit
from mcore_logprobs.debug.audit_rank import _inputs
from mcore_logprobs.debug.commands import EXAMPLE
from tests.dropin import audited
from tests.dropin.frameworks import source_root

SWIFT = "swift/megatron/trainers/vocab_parallel_utils.py"


def verdicts(report) -> dict[tuple[int, str], str]:
    return {(row.tp, row.tensor): row.verdict for row in report.rows}


def test_right_function() -> None:
    report = audit(audited.right, tp=(1, 3))
    assert report.ok, str(report)
    assert len(report.rows) == 4
    assert max(row.error for row in report.rows) < 1e-5


def test_a_border_of_any_shard_that_two_ranks_claim() -> None:
    """At TP 3 no border is in the middle of the vocabulary."""
    report = audit(audited.both_sides_of_a_border, tp=(1, 3))
    assert verdicts(report)[1, "logprobs"] == "ok"
    assert verdicts(report)[3, "logprobs"] == "WRONG"


def test_the_package_s_own_result_by_its_parts() -> None:
    call = {"entropy": True}
    spec = "mcore_logprobs:vocab_parallel_token_stats"
    report = audit(spec, kind="logprobs_entropy", tp=(1,), call=call)
    assert report.ok, str(report)
    assert "expected 2 tensors, got TokenStats" in str(
        audit(spec, kind="logprobs_entropy", tp=(1,))
    )


def test_as_many_ids_as_the_vocabulary_has() -> None:
    """The ids' values are whole on every rank, whatever their number."""
    spec, call = "mcore_logprobs:vocab_parallel_gather", {"log_softmax": True}
    report = audit(spec, kind="gather", vocab=3, tp=(3,), call=call)
    assert report.ok, str(report)


def test_an_all_reduce_that_autograd_does_not_know(capsys) -> None:
    status = main(["audit", "tests.dropin.audited:plain_all_reduce", "--tp", "1,2"])
    printed = capsys.readouterr().out
    assert status == 1
    wrong = [line for line in printed.splitlines() if "WRONG (" in line]
    assert len(wrong) == 1
    assert wrong[0].split()[:3] == ["2", "d", "logits"]


def test_ms_swift_up_to_4_5_2_is_wrong() -> None:
    """Values right, gradients not, as soon as the vocabulary is sharded."""
    spec = f"{source_root('ms-swift', '4.5.2') / SWIFT}:compute_logps_and_entropy_from_logits"
    report = audit(spec, kind="logprobs_entropy", tp=(1, 2), call={"compute_entropy": True})
    assert not report.ok
    wrong = {key for key, verdict in verdicts(report).items() if verdict == "WRONG"}
    assert wrong == {(2, "d logits")}
    assert next(r.error for r in report.rows if r.verdict == "WRONG") > 0.3


def test_nemo_rl_passes() -> None:
    report = audit(audited.nemo_of_contiguous, tp=(1, 2))
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["NemoDistributedLogprob", "NemoDistributedLogprob.apply"])
def test_an_autograd_function(name: str) -> None:
    """Its forward takes strided logits, its backward views their gradient and raises."""
    report = audit(f"tests.dropin.audited:{name}", tp=(1,))
    (row,) = report.rows
    assert (row.verdict, row.where) == ("raises", "rank 0, [b, s, V/TP] of [s, b], plain")
    assert "view size is not compatible" in row.note


def test_a_class_that_stands_in_for_an_autograd_function() -> None:
    assert audit("mcore_logprobs.dropin.nemo_rl:DistributedLogprob", tp=(1,)).ok


def test_a_function_without_named_parameters() -> None:
    report = audit(audited.hidden_by_a_decorator, tp=(1,))
    assert "expected named parameters, got (*args, **options)" in report.rows[0].note


def test_what_an_error_looks_like() -> None:
    report = audit(audited.twice_the_gradient, tp=(2,))
    (row,) = [row for row in report.rows if row.verdict != "ok"]
    assert (row.tensor, row.note) == ("d logits", "2 times the right one")
    report = audit(audited.overwrites, kind="entropy", tp=(1,))
    assert report.ok
    assert report.remarks == ("overwrites its logits",)
    report = audit(audited.overwrites_its_ids, kind="target_rank", tp=(1,))
    assert report.ok
    assert report.remarks == ("overwrites its target",)


def test_ranks_are_exact_in_a_large_vocabulary_too() -> None:
    """Off by one, as a tie counted on the wrong side is, a rank near 16000 is nearly right."""
    right = "mcore_logprobs:vocab_parallel_target_rank"
    assert audit(right, kind="target_rank", tp=(2,), vocab=16384).ok
    report = audit(audited.rank_off_by_one, kind="target_rank", tp=(2,), vocab=16384)
    (row,) = report.rows
    assert (row.verdict, row.note) == ("WRONG", "7 of 7 differ") or row.note.endswith(" differ")


def test_an_argument_that_has_no_meaning() -> None:
    report = audit(audited.needs_more, tp=(1,))
    assert not report.ok
    assert "give it with --call recipe=..." in report.rows[0].note


def test_a_function_of_any_keyword_gets_those_of_the_call() -> None:
    assert audit(audited.half_by_keyword, tp=(1,), call={"scale": 2.0}).ok
    assert not audit(audited.half_by_keyword, tp=(1,)).ok


def test_a_layout_that_every_rank_refuses_is_no_error() -> None:
    report = audit(audited.only_tokens, tp=(1, 2))
    assert report.ok, str(report)
    assert report.remarks == (
        "does not take [b, s, V/TP]: NotImplementedError: expected [n, V/TP]",
        "does not take [b, s, V/TP] of [s, b]: NotImplementedError: expected [n, V/TP]",
    )


@pytest.mark.parametrize(
    ("fn", "where", "note"),
    [
        (audited.small_logits, "[b, s, V/TP], offset 200", "OverflowError: "),
        pytest.param(
            audited.refuses_on_rank_1,
            "rank 1, [n, V/TP], plain",
            "RuntimeError: only on rank 1",
            marks=pytest.mark.night,  # it waits
        ),
        (audited.raises_in_backward, "[b, s, V/TP], plain", "RuntimeError: backward is broken"),
        (
            audited.raises_in_backward_on_rank_1,
            "rank 1, [b, s, V/TP], peaked",
            "RuntimeError: backward is broken",
        ),
    ],
)
def test_an_exception_that_is_no_refusal_of_a_layout(fn, where: str, note: str) -> None:
    report = audit(fn, tp=(2,), timeout=30.0)
    assert not report.ok
    (row,) = report.rows
    assert (row.tensor, row.verdict, row.note) == ("all", "raises", note)
    assert row.where.endswith(where)
    assert "as logprobs: raises" in str(report)


@pytest.mark.night
def test_a_size_runs_once_and_one_that_fails_spoils_no_other() -> None:
    started = time.monotonic()
    report = audit(audited.rank_1_of_2_dies, tp=(2, 2, 1), timeout=200.0)
    assert time.monotonic() - started < 60
    assert [(row.tp, row.verdict) for row in report.rows] == [(2, "raises"), (1, "ok"), (1, "ok")]
    assert report.rows[0].note == "rank 1 exited with 3 before its answer"


@pytest.mark.night  # it waits
def test_a_size_that_hangs_leaves_time_to_the_others() -> None:
    report = audit(audited.never_ends, tp=(2, 1), timeout=24.0)
    assert [(row.tp, row.verdict) for row in report.rows] == [(2, "raises"), (1, "ok"), (1, "ok")]
    assert report.rows[0].note == "ranks 0, 1 gave no answer within 16 s"


def test_a_report_is_strict_json(capsys) -> None:
    assert main(["audit", "tests.dropin.audited:needs_more", "--tp", "1", "--json"]) == 1
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert report["rows"][0]["error"] is None
    assert not report["ok"]


@pytest.mark.night
def test_a_script_without_a_guard(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from mcore_logprobs.audit import audit\n"
        "print(audit('mcore_logprobs:vocab_parallel_logprobs', tp=(1,)))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert "as logprobs: raises" in done.stdout
    assert done.stdout.count('call audit under if __name__ == "__main__"') == 1


@pytest.mark.night
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_a_signal_ends_the_ranks_too(number: int, status: int) -> None:
    code = (
        "import signal, sys; from mcore_logprobs.__main__ import main;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "sys.exit(main(['audit', 'tests.dropin.audited:never_ends', '--tp', '2']))"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        while "a rank waits" not in (line := process.stdout.readline()):
            assert line, "ended before the call"
        process.send_signal(number)
        # The ranks write to this pipe: it ends once all of them are gone.
        rest, _ = process.communicate(timeout=30)
    assert process.returncode == status
    assert "Traceback" not in rest


def test_every_kind_is_exact_for_itself() -> None:
    """The float64 parts against one another, where one follows from others."""
    x = _inputs(24, 2, "[b, s, V/TP]", 2.0, 0.0)
    z, others = x["logits"].double(), {**x, "teacher": x["teacher"].double()}
    value = {name: kind.exact(z, others) for name, kind in KINDS.items()}
    p = value["log_softmax"][0].exp()
    assert (p.sum(-1) - 1).abs().max() < 1e-12
    assert (value["sum_pi_squared"][0] - (p * p).sum(-1)).abs().max() < 1e-12
    assert (value["entropy"][0] + value["negative_entropy"][0]).abs().max() == 0
    assert (value["loss"][0] + value["logprobs_entropy"][0]).abs().max() == 0
    q = others["teacher"].softmax(-1)
    crossed = value["kl"][0] - (q * q.log()).sum(-1)
    assert (crossed - value["cross_entropy"][0]).abs().max() < 1e-12
    assert (value["reverse_kl"][0] >= 0).all()
    best = z.argmax(-1)
    assert (KINDS["target_rank"].exact(z, {"target": best})[0] == 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": audited.right, "kind": "surprise"}, "kind: expected one of logprobs"),
        ({"fn": audited.right, "tp": (5,)}, "tp: expected divisors of 48"),
        ({"fn": lambda x: x}, "at the top of an importable module"),
        ({"fn": "tests.dropin.audited:nothing"}, "has no 'nothing'"),
        ({"fn": "nowhere.py:f"}, "no file nowhere.py"),
        ({"fn": audited.right, "bound": float("nan")}, "bound: expected a finite number > 0"),
        ({"fn": audited.right, "bound": float("inf")}, "bound: expected a finite number > 0"),
        ({"fn": audited.right, "timeout": 0.0}, "timeout: expected a number of seconds > 0"),
        ({"fn": audited.right, "timeout": float("inf")}, "a day at most, got inf"),
        ({"fn": audited.right, "timeout": 1e12}, "a day at most, got 1000000000000.0"),
        ({"fn": audited.right, "vocab": 1, "tp": (1,)}, "vocab: expected an int >= 2, got 1"),
        ({"fn": "../fns:good"}, "with a module's full name, or FILE.py:FUNCTION, got '../fns:good"),
        ({"fn": ".fns:good"}, "with a module's full name, or FILE.py:FUNCTION, got '.fns:good'"),
        (
            {"fn": audited.right, "call": {"lables": 1}},
            "call: expected one of logits, labels, tp_group, got 'lables'; did you mean labels?",
        ),
        (
            {"fn": "tests.dropin.audited:NemoDistributedLogprob", "call": {"ctx": None}},
            "call: expected one of vocab_parallel_logits, target, .*, got 'ctx'",
        ),
        ({"fn": "torch:float32", "call": {"x": 1}}, "expected a function, got torch:float32, of"),
        (
            {"fn": "torch:logsumexp", "call": {"x": 1}},
            "parameters Python knows, got torch:logsumexp",
        ),
    ],
)
def test_mistakes(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        audit(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], f"for example:\n  {EXAMPLE}"),
        (["nowhere:f"], "No module named 'nowhere'"),
        (["torch:nothing"], "torch has no 'nothing'"),
        (["torch"], "expected MODULE:FUNCTION, got 'torch'"),
        (["math:pi"], "expected a function, got math:pi, of type float"),
        (["json:dumps", "--tp", "two"], "expected numbers such as 1,2,4, got 'two'"),
        (["json:dumps", "--tp", "5"], "tp: expected divisors of 48"),
        (["json:dumps", "--call", "chunk_size"], "expected NAME=VALUE, got 'chunk_size'"),
        (["tests.dropin.audited:needs_more", "--call", "recepi=1"], "; did you mean recipe?"),
    ],
)
def test_the_command_s_mistakes(arguments, message: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["audit", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_that_raises_is_one_line(tmp_path, capsys) -> None:
    """At each call: a module that was not executed to its end is not kept."""
    file = tmp_path / "broken.py"
    file.write_text("def f(logits): ...\n1 / 0\n")
    for _ in range(2):
        with pytest.raises(SystemExit) as stopped:
            main(["audit", f"{file}:f"])
        assert stopped.value.code == 2
        said = f"error: {file} raises when imported: ZeroDivisionError('division by zero')\n"
        assert capsys.readouterr().err.endswith(said)
