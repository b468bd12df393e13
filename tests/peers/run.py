"""One suite under pytest, with their functions or with ours, and the two runs compared."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from mcore_logprobs.dropin.installed import FRAMEWORKS
from tests.peers.process import reason
from tests.trainers import requirements
from tests.trainers.frame import REPO, checkout, free_port, installed, megatron_path

PAGES = REPO / "docs" / "frameworks"


@dataclasses.dataclass(frozen=True)
class Suite:
    """Test files of one framework that share what their processes need.

    Attributes:
        framework: a key of `mcore_logprobs.dropin.installed.FRAMEWORKS`.
        files: path in the checkout -> the tests of it that are not applicable, each with its
            reason: `name`, `Class`, `Class::name`, a name with its parameters; a "*" is any text,
            and an empty reason takes its tests out of a later pattern.
        by_design: the same for tests that pass with theirs and fail with ours, each with the
            sentence that the framework's page has about the difference.
        rounding: what `torch.testing.assert_close` allows at least with ours, where the tests ask
            for the last bits of their own order of summation.
        script: the files are no tests of pytest: each rank runs them by Python, and they count as
            one test each.
        release: a Megatron-Core other than the installed one.
        needs: lists of `tests.trainers.requirements` that the framework imports.
        absent: packages that are imported and not used.
        prepare: functions of `tests.peers.prepare` that each process calls first.
        adapters: "module:private function" -> a function of `tests.peers.prepare` that calls the
            drop-in. For tests of a helper that the switch does not replace.
        megatron: "core" if the tests build parts of Megatron-Core, "training" if they also import
            `megatron.training`.
        ranks: how many processes run the files, as torchrun would start them.
        start: a function of each file that they call before the tests.
        devices: how many GPUs the tests are told of.
        arguments: for pytest.
        timeout: seconds for one run.
    """

    framework: str
    files: Mapping[str, Mapping[str, str]]
    by_design: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    rounding: float = 0.0
    script: bool = False
    release: str = ""
    needs: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    prepare: tuple[str, ...] = ()
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    megatron: str = ""
    ranks: int = 1
    start: str = ""
    devices: int = 2
    arguments: tuple[str, ...] = ()
    timeout: float = 600

    @property
    def repository(self) -> str:
        return FRAMEWORKS[self.framework].repository.partition("/")[2]

    def reason(self, test: str) -> str:
        """Why a test is not applicable; "" where it is."""
        return reason(self.files, test)


@dataclasses.dataclass
class Run:
    """How the tests of one run ended."""

    found: list[str]
    passed: set[str]
    failed: dict[str, str]  # test -> the end of its traceback, or why it was skipped
    calls: dict[str, set[tuple[str, str]]]  # test -> ("ours" or "theirs", function)
    output: str
    seconds: float

    def called(self, test: str, who: str) -> set[str]:
        return {name for kind, name in self.calls.get(test, ()) if kind == who}


def unavailable(suite: Suite) -> str:
    """Why a suite cannot run here; "" where it can."""
    if checkout(suite.repository) is None:
        return f"no checkout of {suite.repository}: tests/run.sh --all --peers DIR"
    missing = [name for name in suite.needs if not installed(name).is_dir()]
    return requirements.missing(installed(missing[0])) if missing else ""


def run(suite: Suite, *, switched: bool, fault: str = "", named: bool = False) -> Run:
    """All files of a suite, in one process for each rank.

    fault: one of `tests.trainers.faults.FAULTS`, put into the drop-in.
    named: with the tests that the suite leaves out.
    """
    root = checkout(suite.repository)
    assert root is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        copy_tests(root, folder / "own", suite)
        job = {"switched": switched, "fault": fault, "named": named}
        return _run(suite, folder, root, job)


def copy_tests(root: Path, target: Path, suite: Suite) -> None:
    """The checkout's `tests` as it is, so that nothing is written into the checkout."""
    for top in {file.partition("/")[0] for file in suite.files}:
        shutil.copytree(
            root / top,
            target / top,
            ignore=shutil.ignore_patterns("__pycache__", "*.json", "*.jsonl", "*.png", "*.npz"),
            dirs_exist_ok=True,
        )


def _run(suite: Suite, folder: Path, root: Path, job: Mapping[str, object]) -> Run:
    results = folder / "results"
    results.mkdir()
    script = next(iter(suite.files)) if suite.script else ""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mcore_logprobs_tests.peers.report",
               "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder / "own"),
               *suite.arguments, *suite.files]  # fmt: skip
    if script:
        command = [sys.executable, script]
        (results / "running").write_text(f"{script}::script")
    environment = _environment(suite, folder, root, results, job)
    begun = time.monotonic()
    processes: list[subprocess.Popen] = []
    late = False
    try:
        for rank in range(suite.ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if suite.ranks > 1 else {}
            with open(results / f"output{rank}", "w") as output:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment | own,
                        cwd=folder / "own",
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        for process in processes:
            process.wait(timeout=max(begun + suite.timeout - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        late = True
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            process.wait()
    if script:
        _report_script(results, f"{script}::script", processes)
    found = _read(results, suite.ranks)
    found.seconds = time.monotonic() - begun
    found.output = "".join((results / f"output{r}").read_text() for r in range(suite.ranks))
    if late:
        found.output += f"\nnot done in {suite.timeout:g} s"
    return found


def _environment(
    suite: Suite, folder: Path, root: Path, results: Path, job: Mapping[str, object]
) -> dict[str, str]:
    given = {
        "framework": suite.framework,
        "folder": str(results),
        "files": {file: dict(tests) for file, tests in suite.files.items()},
        "start": suite.start,
        "megatron": suite.megatron,
        "devices": suite.devices,
        "absent": suite.absent,
        "prepare": suite.prepare,
        "adapters": dict(suite.adapters),
        "rounding": suite.rounding,
        **job,
    }
    source = FRAMEWORKS[suite.framework].source_root
    paths = [Path(__file__).parent / "at_start", folder / "own", root, root / source]
    paths += megatron_path(suite.release)
    paths += [*(installed(name) for name in suite.needs), REPO]
    found = {
        **os.environ,
        "MCORE_LOGPROBS_PEER": json.dumps(given),
        "MCORE_LOGPROBS_REPOSITORY": str(REPO),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if suite.ranks > 1:
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(suite.ranks))
        found |= {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return found


def _report_script(results: Path, test: str, processes: list[subprocess.Popen]) -> None:
    for rank, process in enumerate(processes):
        ended = "failed" if process.returncode else "passed"
        why = (results / f"output{rank}").read_text()[-3000:]
        line = {"test": test, "outcome": ended, "when": "call", "reason": why}
        text = "\n".join(map(json.dumps, ({"found": test}, line)))
        (results / f"report{rank}").write_text(text)


def _read(results: Path, ranks: int) -> Run:
    found: dict[str, None] = {}
    passed: list[set[str]] = []
    failed: dict[str, str] = {}
    for rank in range(ranks):
        path = results / f"report{rank}"
        lines = [json.loads(x) for x in path.read_text().splitlines()] if path.is_file() else []
        found |= dict.fromkeys(line["found"] for line in lines if "found" in line)
        ended = [line for line in lines if "test" in line]
        passed.append({x["test"] for x in ended if x["outcome"] == "passed"})
        failed |= {x["test"]: x["reason"] for x in ended if x["outcome"] != "passed"}
    calls: dict[str, set[tuple[str, str]]] = {}
    for path in results.glob("calls*"):
        for line in path.read_text().splitlines():
            test, who, name = json.loads(line)
            calls.setdefault(test, set()).add((who, name))
    everywhere = set.intersection(*passed) - failed.keys()
    return Run(list(found), everywhere, failed, calls, "", 0.0)


# ---- comparing -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Line:
    """One line of the table, and what is wrong with it."""

    file: str
    found: int
    applicable: int
    theirs: int
    ours: int
    wrong: list[str]

    def __str__(self) -> str:
        return f"{self.file} | {self.found} | {self.applicable} | {self.theirs} | {self.ours}"


def compare(suite: Suite, theirs: Run, ours: Run) -> list[Line]:
    """A line for each file."""
    lines = []
    page = PAGES / f"{suite.framework}.md"
    said = " ".join(page.read_text(encoding="utf-8").split())
    for file in suite.files:
        tests = [test for test in theirs.found if test.partition("::")[0] == file]
        applicable = [test for test in tests if not suite.reason(test)]
        wrong = [f"{file}: no tests found: {theirs.output[-3000:]}"] if not tests else []
        for test in applicable:
            wrong += _wrong(suite, test, theirs, ours, said)
        lines.append(
            Line(
                file,
                len(tests),
                len(applicable),
                sum(test in theirs.passed for test in applicable),
                sum(test in ours.passed for test in applicable),
                wrong,
            )
        )
    return lines


def _wrong(suite: Suite, test: str, theirs: Run, ours: Run, said: str) -> list[str]:
    """What a test that the suite does not leave out shows, other than that it passes twice."""
    unknown = "not run: "
    if test not in theirs.passed:
        why = theirs.failed.get(test, unknown + theirs.output)[-1000:]
        return [f"{test}: fails with theirs, and is not named: {why}"]
    if not theirs.called(test, "theirs"):
        return [f"{test}: calls no function that is replaced, and is not named"]
    design = reason(suite.by_design, test)
    if test not in ours.passed:
        if design and design in said:
            return []
        why = ours.failed.get(test, unknown + ours.output)[-1000:]
        missing = f" (the page does not say {design!r})" if design else ""
        return [f"{test}: passes with theirs and fails with ours{missing}: {why}"]
    if design:
        return [f"{test}: named as a difference by design, and passes with ours"]
    if not ours.called(test, "ours"):
        return [f"{test}: passes, but none of ours was called"]
    if kept := ours.called(test, "theirs") - set(FRAMEWORKS[suite.framework].left_alone):
        return [f"{test}: theirs are called with the switch on: {', '.join(sorted(kept))}"]
    return []
