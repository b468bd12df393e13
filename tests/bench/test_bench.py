"""The benchmark runs end to end at tiny sizes, and what it counts follows docs/costs.md."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from benchmarks import cases as authors
from benchmarks.launches import one_of_ranks
from mcore_logprobs.bench import machine, main, progress, report, runner
from mcore_logprobs.bench.cases import CASES, Shape, linear_case, logits_case, rows_case
from mcore_logprobs.bench.cli import DEFAULT, SIZES
from mcore_logprobs.bench.peers import stop_megatron
from mcore_logprobs.bench.runner import Contender, Measurement, Workload, measure

TINY = ["--rows", "8", "--vocab", "512", "--hidden", "16", "--rounds", "2", "--warmup", "1"]
TINY.append("--busy-ok")  # nothing is compared here
# They compile much; of "linear" there is a table below.
BY_NIGHT = ("invariant", "keep", "linear", "linear_ops", "logits", "policy")


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=pytest.mark.night) if what in BY_NIGHT else what
        for what in sorted(CASES)
    ],
)
def test_each_subcommand_prints_a_table(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([what, *TINY, "--dtype", "fp32"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("CPU: ")
    assert "device CPU" in printed
    assert "least both" in printed
    plain = [line for line in printed.splitlines() if "torch.compile" in line]
    assert plain
    assert not any("unavailable" in line for line in plain), plain
    assert not torch.distributed.is_initialized()  # what Megatron's peers need is undone
    assert f"torch {torch.__version__}" in printed


def test_json_and_plot(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    data, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["linear", *TINY[2:], "--rows", "4,8", "--dtype", "bf16"]
    assert main([*arguments, "--json", str(data), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    workloads = json.loads(data.read_text())["workloads"]
    assert [load["shape"]["rows"] for load in workloads] == [4, 8]
    for load in workloads:
        results = {result["name"]: result for result in load["results"]}
        fused = results["fused"]
        assert 0.0 < fused["forward"] < fused["both"]
        assert fused["floor"]["both"] > 0.0
        # The fused path's float32 logits against a head that rounds them to bf16.
        assert fused["error"][0] < 1e-5 < results["unfused (holds the logits)"]["error"][0]


def drawn(points: list[report.Point], tmp_path, monkeypatch) -> list[list[str]]:
    """The names of what each picture shows."""
    from matplotlib import pyplot

    figures: list = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    report.plot(points, str(tmp_path / "plot.png"), "a machine")
    (figure,) = figures
    names = []
    for axis in figure.axes:
        bars = [label.get_text() for label in axis.get_yticklabels()] if axis.containers else []
        names.append(bars or axis.get_legend_handles_labels()[1] or [])
    return names


@pytest.mark.parametrize("rows", [[4], [4, 8]], ids=["bars", "lines"])
def test_a_picture_shows_every_dtype(rows: list[int], tmp_path, monkeypatch) -> None:
    times = (1.0, 1.0, 2.0)
    points = [
        (
            Workload("logits", {"rows": n, "vocab": 16, "dtype": dtype}, []),
            [Measurement("ours", *times, spread=0.1, least=times, peak=2**20)],
        )
        for dtype in ("bf16", "fp32")
        for n in rows
    ]
    both = ["ours, bf16", "ours, fp32"]
    assert drawn(points, tmp_path, monkeypatch)[0] == both


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["logits", "--rows", "0"],
        ["logits", "--dtype", "int8"],
        ["--model", "gpt-1"],
        ["topk"],
        ["logits", "--sweep", "rows", "--rows", "7"],
        ["logits", "--sweep", "vocab", "--vocab", "512"],
        ["rows", "--device", "cuda"],
        ["rows", "--json", "nowhere/results.json"],
        *(["rows", "--memory-gib", size] for size in ("nan", "0", "-1", "inf", "much")),
        ["logits", "--rows", "8", "--vocab", "64", "--memory-gib", "1e-9", "--busy-ok"],
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(arguments)


def test_the_ways_to_choose_rows_do_the_same() -> None:
    shape = Shape(24, 64, 8, torch.float32, torch.device("cpu"), None)
    _, first, *others = (c for c in rows_case(shape).contenders if not c.is_peer)
    assert len(others) == 3

    def of(contender: Contender) -> list[torch.Tensor]:
        total = contender.forward(*contender.inputs).sum()
        return [total, *torch.autograd.grad(total, list(contender.inputs))]

    for contender in others:
        for got, want in zip(of(contender), of(first), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("what", sorted(authors.CASES))
def test_the_authors_own_cases_run(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert authors.main([what, *TINY, "--dtype", "float32"]) == 0
    assert "least both" in capsys.readouterr().out


def test_each_case_has_its_sizes() -> None:
    for cases, sizes in ((CASES, SIZES), (authors.CASES, authors.SIZES)):
        assert {device: set(of) for device, of in sizes.items()} == {
            "cpu": set(cases),
            "cuda": set(cases),
        }


def test_without_a_case_three_are_measured_at_shapes_that_tell_them_apart(monkeypatch) -> None:
    """Logits that are larger than the weight's gradient in float32, or memory decides nothing."""
    measured = []
    monkeypatch.setattr(runner, "measure", lambda work, **_: measured.append(work.title) or [])
    monkeypatch.setattr(report, "print_table", lambda work, results: None)
    assert main(TINY) == 0
    assert measured == [
        "log-probabilities from logits",
        "log-probabilities from hidden states",
        "a policy loss from hidden states",
    ]
    for case in DEFAULT:
        rows, vocab, hidden = SIZES["cpu"][case]
        assert min(rows) * vocab * 2 > vocab * hidden * 4


def test_a_busy_machine_is_not_compared_on(monkeypatch, capsys) -> None:
    monkeypatch.setattr(machine, "_idle_cpus", lambda seconds: 0.2)
    with pytest.raises(SystemExit) as stopped:
        main(["logits", *TINY[:-1]])
    assert stopped.value.code == 2
    assert "the machine is busy: 0.2 CPUs are idle" in capsys.readouterr().err
    monkeypatch.setattr(runner, "measure", lambda work, **_: [])
    monkeypatch.setattr(report, "print_table", lambda work, results: None)
    assert main(["rows", *TINY]) == 0
    assert "the machine is busy: 0.2 CPUs are idle" in capsys.readouterr().out.splitlines()[0]
    monkeypatch.setattr(machine, "_idle_cpus", lambda seconds: 64.0)
    assert machine.busy() == ""


def test_idle_cpus_are_counted() -> None:
    """One process that works leaves at most the others."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as worker:
        time.sleep(0.3)
        idle = machine._idle_cpus(0.3)
        worker.kill()
    assert 0.0 <= idle < (os.cpu_count() or 1) - 0.5


def test_the_heap_is_kept() -> None:
    """A large tensor that is freed and made again does not fault its pages in again."""
    script = """
import resource, torch
from mcore_logprobs.bench import machine
assert machine.keep_heap()
machine.prefault(1 << 28)
for _ in range(8):
    torch.zeros(1 << 24).add_(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.zeros(1 << 24).add_(1)  # 64 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16384  # the pages of one tensor; afresh it is those of four


def test_our_own_failure_ends_the_run_and_a_peers_is_noted() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of order")

    x = torch.ones(3, requires_grad=True)
    load = Workload("t", {}, [Contender("peer", fail, [x], is_peer=True)])
    assert measure(load, rounds=1, warmup=1) == []
    assert load.absent == {"peer": "RuntimeError: out of order"}
    with pytest.raises(RuntimeError, match="out of order"):
        measure(Workload("t", {}, [Contender("ours", fail, [x])]), rounds=1, warmup=1)


@pytest.mark.parametrize("case", [logits_case, pytest.param(linear_case, marks=pytest.mark.night)])
def test_no_contender_changes_what_the_others_get(case: Callable[[Shape], Workload]) -> None:
    load = case(Shape(6, 64, 8, torch.float32, torch.device("cpu"), None))
    before = [x.detach().clone() for x in load.contenders[-1].inputs]
    for contender in load.contenders:
        inputs = contender.own_inputs()
        runner.run_backward(contender, inputs, contender.forward(*inputs))
        for x, y in zip(load.contenders[-1].inputs, before, strict=True):
            assert torch.equal(x, y), contender.name
    stop_megatron()


def test_what_is_sent_follows_the_formulas() -> None:
    rows, vocab, hidden = 6, 64, 8
    # Collectives, and bytes that a rank puts in: k float32 statistics a row, and dHidden.
    expected = {
        "logprobs": (1, 4 * 3 * rows),
        "+ entropy": (1, 4 * 4 * rows),
        "+ entropy + rank": (2, 4 * 5 * rows + 4 * rows),
        "fused": (2, 4 * 3 * rows + 4 * rows * hidden),
        "fused + entropy": (2, 4 * 4 * rows + 4 * rows * hidden),
    }
    found = {}
    with one_of_ranks(2) as group:
        shape = Shape(rows, vocab, hidden, torch.float32, torch.device("cpu"), group)
        for case in (logits_case, linear_case):
            load = case(shape)
            load.contenders = [c for c in load.contenders if c.name in expected]
            for result in measure(load, rounds=1, warmup=0):
                found[result.name] = (len(result.collectives), result.sent)
        stop_megatron()
    assert found == expected


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_says_how_long_the_rest_will_take(monkeypatch):
    now = iter([0.0, 60.0, 60.0, 200.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    log = io.StringIO()
    shown = progress.Progress([1.0, 1.0, 2.0], log)
    shown.show()
    shown.step()
    assert log.getvalue() == "bench: 1 of 3 tables, about 3 min left\n"
    terminal = _Terminal()
    shown = progress.Progress([1.0, 3.0], terminal)
    shown.step()
    shown.show()
    assert "[########......................] table 2 of 2, about 7 min left" in terminal.getvalue()
    shown.clear()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_rounds_that_warm_up_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(100.0, 100.0)] * 2 + [(1.0, 2.0), (3.0, 4.0), (2.0, 3.0)])
    monkeypatch.setattr(runner, "_timed", lambda contender: next(times))
    contender = Contender("doubles", lambda x: x * 2.0, [torch.ones(2, requires_grad=True)])
    (found,) = measure(Workload("a case", {}, [contender]), rounds=3, warmup=2)
    assert (found.forward, found.backward, found.both) == (2.0, 3.0, 5.0)
    assert found.least == (1.0, 2.0, 3.0)


def peers_that_raise() -> tuple[list[str], dict[str, str]]:
    """A peer that raises on one rank alone, between two that do not."""
    x = torch.ones(3, requires_grad=True)

    def on_one_rank(x: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("out of memory")
        return 2.0 * x

    functions = {"first": lambda x: x + 1.0, "raises": on_one_rank, "last": lambda x: x - 1.0}
    peers = [Contender(name, fn, [x], is_peer=True) for name, fn in functions.items()]
    load = Workload("t", {}, peers)
    return [found.name for found in measure(load, rounds=1, warmup=0)], load.absent


def test_a_peer_that_raises_on_one_rank_is_left_out_on_all(ranks) -> None:
    reasons = "raised on another rank", "RuntimeError: out of memory"
    for reason, found in zip(reasons, ranks(2).run(peers_that_raise), strict=True):
        assert found == (["first", "last"], {"raises": reason})


def test_one_that_overwrites_its_input_gets_a_copy_before_the_clock_starts(monkeypatch) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    given = x.detach().clone()
    seen: list[torch.Tensor] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, z: torch.Tensor) -> torch.Tensor:
            seen.append(z.detach())
            return z.mul_(2.0).sum(-1)

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad.unsqueeze(-1).expand(4, 8).clone()

    calls: list[str] = []
    own, clock = Contender.own_inputs, runner._Clock
    monkeypatch.setattr(Contender, "own_inputs", lambda c: calls.append("copy") or own(c))
    monkeypatch.setattr(runner, "_Clock", lambda device: calls.append("clock") or clock(device))
    contender = Contender("doubles", Doubled.apply, [x], overwrites=True)
    measure(Workload("t", {}, [contender]), rounds=2, warmup=1)
    assert torch.equal(x, given)
    assert all(torch.equal(z, 2.0 * given) for z in seen)
    assert calls[-6:] == ["copy", "clock"] * 3


def lap_of_a_late_rank() -> float:
    clock = runner._Clock(torch.device("cpu"))
    if torch.distributed.get_rank() == 1:
        time.sleep(0.3)
    return clock.lap()


def test_a_round_takes_as_long_as_its_slowest_rank(ranks) -> None:
    assert min(ranks(2).run(lap_of_a_late_rank)) >= 0.29
