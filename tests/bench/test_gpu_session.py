"""The measuring script runs whole at tiny sizes, keeps its deadline, and outlives its groups."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

import mcore_logprobs
from benchmarks import (
    ahead,
    gpu_groups,
    gpu_peers,
    gpu_summary,
    gpu_table,
    time_model,
)
from benchmarks.gpu_session import main
from benchmarks.gpu_timing import GroupRun
from benchmarks.time_model import Head

ROOT = Path(__file__).resolve().parents[2]


# As a session has it: whether kernels are interpreted is chosen when they are imported.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}


def _python(arguments: list[str], seconds: float) -> tuple[subprocess.CompletedProcess, float]:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=seconds,
    )  # fmt: skip
    return done, time.monotonic() - begin


# A busy machine takes several times the minutes of an idle one: nothing here is a time limit.
@pytest.mark.timeout(1860)
@pytest.mark.night
def test_every_group_runs_at_tiny_sizes_in_one_call(tmp_path: Path) -> None:
    arguments = ["--deadline", "1800", "--out", str(tmp_path), "--small"]
    done, took = _python(["-m", "benchmarks.gpu_session", *arguments], 1830)
    records = gpu_summary.read(tmp_path / "results.jsonl")
    wrong = [r for r in records if r["status"] not in ("ok", "left out")]
    assert done.returncode == 0, f"{wrong}\n{done.stdout}{done.stderr}"
    ended = [r["group"] for r in records if r["case"] == "group"]
    assert ended == [group.name for group in gpu_groups.groups()]
    for record in records:
        assert {"group", "case", "status", "at"} <= set(record)
        assert 0.0 <= record["at"] <= took
        if record["status"] == "left out":
            assert record["reason"]
            assert "no time left" not in record["reason"]
        if "kernel_ms" in record:
            assert 0.0 < record["kernel_ms"] <= record["kernel_ms_median"]
            assert record["host_us"] > 0.0
    assert [r["at"] for r in records] == sorted(r["at"] for r in records)
    by_case = {(r["group"], r["case"]): r for r in records}
    assert by_case["tests", "test_products.py"]["summary"].endswith("s")
    assert by_case["ranks", "values, sequence parallel"]["error"] < 2e-5
    assert by_case["ranks", "values, ranks"]["error"] == 0.0
    assert by_case["ranks", "values, divergences"]["error"] < 2e-5
    pairs = {r["case"] for r in records if r["group"] == "pairs"}
    assert pairs >= {"jsd: sums", "cross_entropy: gradient", "reverse, both", "top-k, both"}
    head = gpu_groups.groups()[2].name
    ways = {case: r for (group, case), r in by_case.items() if group == head}
    expected = {"token_stats", "token_stats, entropy", "policy loss", "logits held"}
    expected |= {"token_stats, entropy, main_grad", "policy loss, main_grad"}
    assert set(ways) >= expected
    for case in expected:
        assert ways[case]["error"] < 2e-3
        assert ways[case]["grad_error"] < 2e-2
        assert ways[case]["share"] > 0.0
    assert all(ways[case]["predicted_ms"] > 0.0 for case in expected if "policy" not in case)
    # A peer is measured, or says why not.
    families = [f"peers: {name}" for name in gpu_peers.FAMILIES]
    found = {case for group, case in by_case if group in families}
    assert found >= {name for names in gpu_peers.FAMILIES.values() for name in names}
    timed = {r["group"] for r in records if "kernel_ms" in r}
    assert timed >= {"kernels", "pairs", "peers-logits", "launches", "tiles", head}
    summary = (tmp_path / "summary.md").read_text()
    assert "None failed." in summary
    assert "cut off" not in summary
    assert summary.strip() in done.stdout
    assert "| token_stats, entropy, main_grad |" in summary
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert " passed" in (tmp_path / "log.txt").read_text()


def test_a_machine_without_pytest_names_its_reason(tmp_path: Path, monkeypatch) -> None:
    run = GroupRun("tests", tmp_path, tmp_path / "results.jsonl", 1.0, 0.0, True, False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    gpu_groups.kernel_tests(run)
    (record,) = map(json.loads, run.results.read_text().splitlines())
    assert (record["status"], record["reason"]) == ("left out", "pytest is not installed here")


def test_the_tests_that_a_gpu_compiles_are_there() -> None:
    assert all((ROOT / "tests" / name).is_file() for name in gpu_groups._GPU_TESTS)


_SCRIPT = """
import os, pathlib, signal, subprocess, sys, time
from benchmarks import gpu_timing  # with torch, once for all groups
from benchmarks.gpu_session import Group, Session, run_groups

out = pathlib.Path(sys.argv[1])

def hangs(run):
    run.case("first", lambda: {"value": 1})
    (out / "pid").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)

def crashes(run):
    run.case("before", lambda: {"value": 2})
    os.kill(os.getpid(), signal.SIGSEGV)

def raises(run):
    run.case("fails", lambda: 1 / 0)
    run.case("goes on", lambda: {"value": os.environ["HERE"]})
    raise RuntimeError("out of order")

def late(run):
    run.until = time.monotonic()  # waiting for it races with the end of the group's process
    run.case("too late", lambda: {"value": 3})

def good(run):
    run.time("call", lambda: None)

now = time.monotonic()
session = Session(out, now, now + 12.0, True, False)
run_groups(
    [
        Group("hangs", hangs, 1.0, least=1.5),
        Group("crashes", crashes, 3.0, least=1.0),
        Group("raises", raises, 3.0, {"HERE": "yes"}, least=1.0),
        Group("late", late, 0.1, least=1.5),
        Group("good", good, 3.0, least=1.0),
        Group("last", lambda run: time.sleep(60), 3.0, least=60.0),
    ],
    session,
)
print(time.monotonic() - now)
run_groups([Group("after", good, 1.0)], session)
"""


@pytest.mark.night
def test_a_group_that_hangs_or_crashes_takes_no_other_with_it(tmp_path: Path) -> None:
    done, _ = _python(["-c", _SCRIPT, str(tmp_path)], 60)
    assert done.returncode == 0, done.stderr
    assert 11.9 < float(done.stdout.splitlines()[-1]) < 14.0  # the deadline is kept
    records = gpu_summary.read(tmp_path / "results.jsonl")
    found = {(r["group"], r["case"]): r for r in records}
    ends = {name: r["status"] for (name, case), r in found.items() if case == "group"}
    expected = {"hangs": "killed", "crashes": "failed", "raises": "failed", "late": "ok"}
    assert ends == expected | {"good": "ok", "last": "killed", "after": "left out"}
    # What was found before the end is there.
    assert found["hangs", "first"]["value"] == 1
    assert found["crashes", "before"]["value"] == 2
    assert found["crashes", "group"]["reason"] == "signal 11"
    assert "ZeroDivisionError" in found["raises", "fails"]["reason"]
    assert found["raises", "goes on"]["value"] == "yes"
    assert found["late", "too late"]["status"] == "left out"
    assert found["good", "call"]["calls"] >= 3
    assert not gpu_summary.all_well(records)
    assert "killed after its" in gpu_summary.as_markdown(records)
    assert "ZeroDivisionError" in (tmp_path / "log.txt").read_text()
    status = Path("/proc") / (tmp_path / "pid").read_text() / "status"
    assert not status.exists() or "zombie" in status.read_text()  # what a group started, too


def _mentioning(path: Path) -> list[Path]:
    """Processes on whose command line it stands; groups are forked and keep the session's."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(path).encode() in line.read_bytes():
                found.append(line)
    return found


@pytest.mark.night
def test_a_session_that_is_killed_leaves_what_it_has_found(tmp_path: Path) -> None:
    command = ["-m", "benchmarks.gpu_session", "--deadline", "200", "--out", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, *command, "--small", "--only", "environment", "launches"],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, start_new_session=True,
    ) as session:  # fmt: skip
        until = time.monotonic() + 180
        log = tmp_path / "log.txt"
        while not (log.exists() and "== launches ==" in log.read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        session.kill()
    until = time.monotonic() + 10
    while (alive := _mentioning(tmp_path)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive, "a group outlives its session"
    assert "self-test" in (tmp_path / "results.jsonl").read_text()
    assert "None failed." in (tmp_path / "summary.md").read_text()


def test_records_of_a_session_that_was_cut_off_are_read(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    whole = {"group": "g", "case": "c", "status": "ok", "at": 1.0, "kernel_ms": 2.0, "share": 0.9}
    path.write_text(json.dumps(whole) + "\n" + json.dumps(whole)[:20])
    assert gpu_summary.read(path) == [whole]
    assert "| c | 2 | 90.0% |" in gpu_summary.details([whole])
    assert "cut off in: g." in gpu_summary.as_markdown([whole])
    assert gpu_summary.read(tmp_path / "none") == []


_AGAIN = """
import pathlib, sys, time
from benchmarks import gpu_timing
from benchmarks.gpu_session import Group, Session, run_groups

out = pathlib.Path(sys.argv[1])

def measured(run):
    run.case("floor", lambda: {"value": 0})
    run.case("good", lambda: {"value": 1})
    run.case("theirs", lambda: 1 / 0, foreign=True)

def mended(run):
    run.case("good", lambda: {"value": 1})
    run.case("bad", lambda: {"value": 2} if (out / "mended").exists() else 1 / 0)

for call in range(2):
    now = time.monotonic()
    groups = [Group("measured", measured, 1.0), Group("mended", mended, 1.0)]
    run_groups([*groups, Group("machine", measured, 1.0, always=True)],
               Session(out, now, now + 60.0, True, False, slices=False))
    (out / "mended").touch()
"""


@pytest.mark.night
def test_a_second_call_does_what_the_first_has_not(tmp_path: Path) -> None:
    done, _ = _python(["-c", _AGAIN, str(tmp_path)], 120)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    ran = [(r["group"], r["case"]) for r in lines if r["case"] != "group"]
    first = [("measured", "floor"), ("measured", "good"), ("measured", "theirs")]
    first += [("mended", "good"), ("mended", "bad")]
    machine = [("machine", "floor"), ("machine", "good"), ("machine", "theirs")]
    assert ran == [*first, *machine, ("mended", "bad"), *machine]
    records = gpu_summary.read(tmp_path / "results.jsonl")
    assert gpu_summary.all_well(records)
    assert {r["case"]: r.get("value") for r in records if r["group"] == "mended"} == {
        "good": 1, "bad": 2, "group": None,
    }  # fmt: skip


_SHAPE = {"rows": 8, "vocab": 64, "hidden": 16, "status": "ok", "at": 0.0}
_POINTS = [
    _SHAPE | {"group": "head 8", "case": f"kept {n}", "kernel_ms": 3.0 - n, "peak_mib": 2.0 + n}
    | {"saved_bytes": n, "predicted_ms": 2.0, "error": 1e-6, "grad_error": 2e-3, "share": 0.5}
    for n in range(2)
]  # fmt: skip
_POINTS += [
    _SHAPE | {"group": "peers: quack", "case": "quack", "kernel_ms": 1.0, "published_ms": 17.3},
    _SHAPE
    | {"group": "peers: x", "case": "x", "status": "left out", "reason": "ImportError: no x"},
]


def test_time_and_memory_are_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "frontier.png"
    assert gpu_summary.plot(_POINTS, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not gpu_summary.plot([_POINTS[0] | {"peak_mib": 0.0}], tmp_path / "none.png")


def test_the_summary_is_one_table_with_what_was_predicted() -> None:
    summary = gpu_summary.as_markdown(_POINTS)
    assert "| **8 rows, V/TP 64, h 16** |" in summary
    assert "| kept 0 |  | 3 | 2 |  | 50.0% | 2 | 1.0e-06 | 2.0e-03 |" in summary
    assert "| quack |  | 1 |  | 17.3 |" in summary
    assert "| x | left out: ImportError: no x |" in summary
    assert "Measured over predicted, 2 ways: 1.00 to 1.50" in summary
    assert "keeps nothing" not in summary
    plain = [{k: v for k, v in r.items() if k != "saved_bytes"} for r in _POINTS]
    assert "keeps nothing for the backward" in gpu_summary.as_markdown(plain)
    assert sum(line.startswith("| ---") for line in summary.splitlines()) == 1


def test_a_wrong_value_or_gradient_is_seen(tmp_path: Path) -> None:
    now = time.monotonic()
    run = GroupRun("g", tmp_path, tmp_path / "results.jsonl", now + 60.0, now, True, False)
    problem = gpu_table.Problem(run, Head(5, 40, 8))

    def plain(factor: float, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        z = h.float() @ w.float().t()
        scaled = z * factor + (z - z * factor).detach()  # the same value, another gradient
        return scaled.log_softmax(-1).gather(-1, problem.target.unsqueeze(-1)).squeeze(-1)

    found = {}
    for factor in (1.0, 1.1):
        way = gpu_table.Way("w", partial(plain, factor), gpu_table._logprobs, 4)
        run.case("w", partial(gpu_table._measure, problem, way), factor=factor)
    for record in map(json.loads, run.results.read_text().splitlines()):
        found[record["factor"]] = record
    assert found[1.0]["error"] < 1e-6
    assert found[1.0]["grad_error"] < 1e-2  # bf16 gradients
    assert found[1.1]["status"] == "failed"
    assert "gradients by" in found[1.1]["reason"]


def test_the_model_predicts_what_the_design_says() -> None:
    head = Head(8192, 19008, 4096)
    assert 0.90 < 1e3 * head.products(4) / time_model.token_stats(head) < 0.95
    assert 0.88 < 1e3 * head.products(3) / time_model.policy_loss(head) < 0.95
    kept = [time_model.token_stats(head, saved=share) for share in (0.0, 0.5, 1.0)]
    assert kept == sorted(kept, reverse=True)
    keywords = inspect.signature(mcore_logprobs.linear_token_stats).parameters
    assert gpu_table.keeps_exponentials() == ("saved_bytes" in keywords)


def _wheel(path: Path, files: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def test_wheels_of_a_folder_are_imported_and_a_broken_one_says_why(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(gpu_peers, "_UNPACKED", {})
    _wheel(tmp_path / "carried_peer-1.0-py3-none-any.whl", {"carried_peer/__init__.py": "a = 1"})
    _wheel(tmp_path / "transformer_engine-1-py3-none-any.whl", {"transformer_engine/x.py": ""})
    (tmp_path / "broken-1.0-py3-none-any.whl").write_text("no archive")
    failed = gpu_peers.unpack(tmp_path)
    assert list(failed) == ["broken-1.0-py3-none-any.whl"]
    assert "BadZipFile" in failed["broken-1.0-py3-none-any.whl"]
    started = "import torch; torch.cuda._lazy_init()"
    _wheel(tmp_path / "starts_cuda-1-py3-none-any.whl", {"starts_cuda/__init__.py": started})
    gpu_peers.unpack(tmp_path)
    failed = gpu_peers.preload(["carried_peer", "starts_cuda", "nowhere_to_be_found"])
    assert set(failed) == {"starts_cuda", "nowhere_to_be_found"}
    assert "CUDA must not be started" in failed["starts_cuda"]
    # Megatron looks for a whole Transformer Engine, which this is not.
    assert importlib.util.find_spec("transformer_engine") is None
    assert "transformer_engine" in gpu_peers._UNPACKED
    assert gpu_peers.unpack(tmp_path / "none") == {}


def test_every_peer_has_a_family_and_the_first_parts_come_first() -> None:
    names = [name for family in gpu_peers.FAMILIES.values() for name in family]
    assert sorted(names) == sorted(peer.name for peer in gpu_peers.PEERS)
    parts = [group.part for group in gpu_groups.groups()]
    assert parts == sorted(parts)


def test_a_kernel_is_read_for_blackwell_too() -> None:
    case = next(ahead.cases(1 << 14))
    built = case.built_for("sm_100")
    assert built.spills == 0
    assert built.wide("LD") >= 1
    assert not built.narrow("LD")
    assert 0 < case.instructions(built) < 15.6


def test_mistakes_are_refused(tmp_path: Path) -> None:
    for arguments in (["--deadline", "60"], ["--deadline", "1", "--out", str(tmp_path)]):
        with pytest.raises(SystemExit):
            main(arguments)
    with pytest.raises(SystemExit):
        main(["--deadline", "60", "--out", str(tmp_path), "--only", "nothing"])
