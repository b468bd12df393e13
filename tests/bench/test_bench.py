"""The benchmark runs end to end at tiny sizes, and its cost model agrees with what is counted."""

from __future__ import annotations

import json

import pytest
import torch

from mcore_logprobs.bench import main
from mcore_logprobs.bench.cases import CASES, Shape, linear_case, logits_case
from mcore_logprobs.bench.model import fused_cost, logits_cost
from mcore_logprobs.bench.peers import stop_megatron
from mcore_logprobs.bench.runner import Contender, Workload, measure

TINY = ["--rows", "8", "--vocab", "512", "--hidden", "16", "--rounds", "2", "--warmup", "1"]


@pytest.mark.parametrize("what", sorted(CASES))
def test_each_subcommand_prints_a_table(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([what, *TINY, "--dtype", "fp32"]) == 0
    printed = capsys.readouterr().out
    assert "forward ms" in printed
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["logits", "--rows", "0"],
        ["logits", "--dtype", "int8"],
        ["--model", "gpt-1"],
        ["cp", "--device", "cuda"],
        ["cp", "--json", "nowhere/results.json"],
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(arguments)


def test_our_own_failure_ends_the_run_and_a_peers_is_noted() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of order")

    x = torch.ones(3, requires_grad=True)
    load = Workload("t", {}, [Contender("peer", fail, [x], is_peer=True)])
    assert measure(load, rounds=1, warmup=1) == []
    assert load.absent == {"peer": "RuntimeError: out of order"}
    with pytest.raises(RuntimeError, match="out of order"):
        measure(Workload("t", {}, [Contender("ours", fail, [x])]), rounds=1, warmup=1)


def _counted(rows: int, vocab: int, hidden: int) -> dict[str, tuple[int, int]]:
    group = torch.distributed.group.WORLD
    shape = Shape(rows, vocab, hidden, torch.float32, torch.device("cpu"), group)
    found = {}
    for case, names in (
        (logits_case, ("logprobs", "+ entropy", "+ entropy + rank")),
        (linear_case, ("fused", "fused + entropy")),
    ):
        load = case(shape)
        load.contenders = [c for c in load.contenders if c.name in names]
        for result in measure(load, rounds=1, warmup=1):
            found[result.name] = (len(result.collectives), result.sent)
    stop_megatron()
    return found


def test_cost_model_counts_what_is_sent(ranks) -> None:
    rows, vocab, hidden = 6, 64, 8
    expected = {
        "logprobs": logits_cost(rows, vocab, tp=2, itemsize=4),
        "+ entropy": logits_cost(rows, vocab, tp=2, itemsize=4, entropy=True),
        "+ entropy + rank": logits_cost(rows, vocab, tp=2, itemsize=4, entropy=True, rank=True),
        "fused": fused_cost(rows, vocab, hidden, tp=2),
        "fused + entropy": fused_cost(rows, vocab, hidden, tp=2, entropy=True),
    }
    for found in ranks(2).run(_counted, rows, vocab, hidden):
        assert found == {name: (c.collectives, c.sent) for name, c in expected.items()}
