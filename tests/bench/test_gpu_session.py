"""The measuring script runs whole at tiny sizes, keeps its deadline, and outlives its groups."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_groups, gpu_summary
from benchmarks.gpu_session import main

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


@pytest.mark.timeout(330)
@pytest.mark.night
def test_every_group_runs_at_tiny_sizes(tmp_path: Path) -> None:
    arguments = ["--deadline", "270", "--out", str(tmp_path), "--small"]
    done, took = _python(["-m", "benchmarks.gpu_session", *arguments], 290)
    records = gpu_summary.read(tmp_path / "results.jsonl")
    wrong = [r for r in records if r["status"] not in ("ok", "left out")]
    assert done.returncode == 0, f"{wrong}\n{done.stdout}{done.stderr}"
    assert took < 270
    ended = [r["group"] for r in records if r["case"] == "group"]
    assert ended == [group.name for group in gpu_groups.groups()]
    for record in records:
        assert {"group", "case", "status", "at"} <= set(record)
        assert 0.0 <= record["at"] <= took
        if record["status"] == "left out":
            assert record["reason"]
        if "kernel_ms" in record:
            assert 0.0 < record["kernel_ms"] <= record["kernel_ms_median"]
            assert record["host_us"] > 0.0
    assert [r["at"] for r in records] == sorted(r["at"] for r in records)
    by_case = {(r["group"], r["case"]): r for r in records}
    assert by_case["tests", "test_products.py"]["summary"].endswith("s")
    assert by_case["fused", "fused, both"]["share"] > 0.0
    assert by_case["ranks", "values, sequence parallel"]["error"] < 2e-5
    assert by_case["ranks", "values, ranks"]["error"] == 0.0
    assert by_case["ranks", "values, divergences"]["error"] < 2e-5
    pairs = {r["case"] for r in records if r["group"] == "pairs"}
    assert pairs >= {"jsd: sums", "cross_entropy: gradient", "reverse, both", "top-k, both"}
    timed = {r["group"] for r in records if "kernel_ms" in r}
    expected = "kernels fused policy pairs peers-linear peers-logits launches tiles"
    assert timed >= set(expected.split())
    summary = (tmp_path / "summary.md").read_text()
    assert "None failed." in summary
    assert "cut off" not in summary
    assert summary.strip() in done.stdout
    assert "| fused, both | 4 | 512 | 32 |" in summary
    assert "10 passed" in summary or "passed" in (tmp_path / "logs" / "tests.txt").read_text()


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


def test_a_session_that_is_killed_leaves_what_it_has_found(tmp_path: Path) -> None:
    command = ["-m", "benchmarks.gpu_session", "--deadline", "100", "--out", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, *command, "--small", "--only", "environment", "launches"],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, start_new_session=True,
    ) as session:  # fmt: skip
        until = time.monotonic() + 90
        log = tmp_path / "logs" / "launches.txt"
        while not log.exists() and time.monotonic() < until:
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
    assert "| c | 2 | 90.0% |" in gpu_summary.as_markdown([whole])
    assert "cut off in: g." in gpu_summary.as_markdown([whole])
    assert gpu_summary.read(tmp_path / "none") == []


def test_time_and_memory_are_a_picture(tmp_path: Path) -> None:
    shape = {"rows": 8, "vocab": 64, "hidden": 16, "status": "ok", "at": 0.0}
    points = [
        {"group": "fused", "case": "fused, both", "kernel_ms": 9.0, "peak_mib": 1.0, **shape},
        {"group": "peers-linear", "case": "p, both", "kernel_ms": 8.0, "peak_mib": 9.0, **shape},
    ]
    picture = tmp_path / "frontier.png"
    assert gpu_summary.plot(points, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not gpu_summary.plot([points[0] | {"peak_mib": 0.0}], tmp_path / "none.png")


def test_mistakes_are_refused(tmp_path: Path) -> None:
    for arguments in (["--deadline", "60"], ["--deadline", "1", "--out", str(tmp_path)]):
        with pytest.raises(SystemExit):
            main(arguments)
    with pytest.raises(SystemExit):
        main(["--deadline", "60", "--out", str(tmp_path), "--only", "nothing"])
