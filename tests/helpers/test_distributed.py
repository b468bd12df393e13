"""The pool of ranks: results, errors, hangs, restarts, and no orphans."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import RankError, RankTimeout, get_pool, grid_groups
from tests.helpers.documents import ROOT


def _sum_of_ranks(x: torch.Tensor, *, scale: int = 1) -> dict:
    y = x * dist.get_rank() * scale
    dist.all_reduce(y)
    return {"sum": y.requires_grad_(), "pid": os.getpid(), "threads": torch.get_num_threads()}


def _fail_on(ranks: tuple[int, ...]) -> int:
    if dist.get_rank() in ranks:
        raise ValueError(f"rank {dist.get_rank()} refuses")
    return dist.get_rank()


def _one_raises_others_wait() -> None:
    if dist.get_rank() == 0:
        raise ValueError("alone")
    dist.barrier()


def _case(case: str) -> tuple[str, int]:
    """What each of these does alone must not reach the next one's all-reduce."""
    if case == "alike" or (case == "one" and dist.get_rank() == 1):
        raise ValueError(case)
    total = torch.ones(())
    dist.all_reduce(total)
    return case, int(total)


def _sleep_forever() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def _raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


def _fresh() -> tuple:
    x = torch.zeros(2, 2)
    return (
        torch.empty(3),
        torch.empty_like(x),
        x.new_empty(4),
        torch.empty(2, dtype=torch.int64),
        torch.nn.Parameter(torch.empty(2, requires_grad=True)),
    )


def _grid(tp: int, cp: int) -> tuple[list[int], list[int], bool]:
    groups = grid_groups(tp=tp, cp=cp)
    return (
        dist.get_process_group_ranks(groups.tp),
        dist.get_process_group_ranks(groups.cp),
        grid_groups(tp=tp, cp=cp) is groups,
    )


def test_runs_on_every_rank_and_keeps_the_processes(ranks):
    pool = ranks(2)
    first = pool.run(_sum_of_ranks, torch.ones(3), scale=5)
    second = pool.run(_sum_of_ranks, torch.ones(3))
    assert [r["sum"].tolist() for r in first] == [[5.0] * 3] * 2
    assert [r["sum"].tolist() for r in second] == [[1.0] * 3] * 2
    assert not first[0]["sum"].requires_grad
    assert [r["pid"] for r in first] == [r["pid"] for r in second]
    assert {r["threads"] for r in first} == {1}
    assert os.getpid() not in {r["pid"] for r in first}
    assert get_pool(2) is pool


def test_an_error_carries_every_traceback_and_the_pool_recovers(ranks):
    with pytest.raises(RankError, match="rank 1 refuses") as caught:
        ranks(2).run(_fail_on, (1,))
    assert "_fail_on" in str(caught.value)
    assert caught.value.errors[0] is None
    assert isinstance(caught.value.errors[1], ValueError)
    sent = pickle.loads(pickle.dumps(caught.value))  # as a worker process gives it back
    assert str(sent) == str(caught.value)
    assert ranks(2).run(_fail_on, ()) == [0, 1]


def test_expected_errors_come_back_in_rank_order(ranks):
    before = ranks(2).run(os.getpid)
    got = ranks(2).run_expecting_errors(_fail_on, (0, 1))
    assert [str(e) for e in got] == ["rank 0 refuses", "rank 1 refuses"]
    assert ranks(2).run(os.getpid) == before  # all raised alike: nothing to restart
    mixed = ranks(2).run_expecting_errors(_fail_on, (0,))
    assert isinstance(mixed[0], ValueError)
    assert mixed[1] == 1
    assert ranks(2).run(os.getpid) != before


def test_an_exception_that_does_not_pickle_still_says_what_it_was(ranks):
    got = ranks(2).run_expecting_errors(_raise_unpicklable)
    assert [str(e) for e in got] == ["Unpicklable: 1 and 2"] * 2


def test_a_hang_is_killed_and_says_where_it_was(ranks):
    with pytest.raises(RankTimeout, match="_sleep_forever"):
        ranks(2).run(_sleep_forever, timeout=1)
    assert ranks(2).run(_fail_on, ()) == [0, 1]


def test_a_rank_left_waiting_by_another_s_error_is_a_failure(ranks, monkeypatch):
    monkeypatch.setattr("tests.helpers.distributed._GRACE", 0.5)
    with pytest.raises(RankTimeout, match="_one_raises_others_wait"):
        ranks(2).run_expecting_errors(_one_raises_others_wait)
    with pytest.raises(RankError, match="alone"):
        ranks(2).run(_one_raises_others_wait)
    assert ranks(2).run(_fail_on, ()) == [0, 1]


def test_many_cases_in_one_dispatch_each_with_its_answer(ranks, monkeypatch):
    monkeypatch.setattr("tests.helpers.distributed._GRACE", 0.5)
    names = ["a", "alike", "b", "one", "c"]
    found = ranks(2).run_many(_case, names)
    for name, answer in zip(names, found, strict=True):
        if name in ("alike", "one"):
            assert isinstance(answer, RankError)
            assert f"ValueError: {name}" in str(answer)
        else:
            assert answer == [(name, 2)] * 2
    assert ranks(2).run_many(_case, []) == []


def test_a_local_function_is_refused(ranks):
    with pytest.raises(ValueError, match="top level"):
        ranks(2).run(lambda: None)


def test_fresh_memory_is_poisoned_here_and_on_the_ranks(ranks):
    for fresh in (_fresh(), *ranks(2).run(_fresh)):
        for x in fresh:
            if x.is_floating_point():
                assert x.isnan().all()
            else:
                assert (x == torch.iinfo(x.dtype).max).all()


def test_poisoned_memory_leaves_compiled_code_alone():
    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x).copy_(x * 2)

    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(3)).tolist() == [2.0] * 3


def test_grid_groups_have_tp_fastest(ranks):
    got = ranks(4).run(_grid, tp=2, cp=2)
    assert [g[0] for g in got] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [g[1] for g in got] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(g[2] for g in got)
    got = ranks(4).run(_grid, tp=1, cp=2)
    assert [g[0] for g in got] == [[0], [1], [2], [3]]
    assert [g[1] for g in got] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    errors = ranks(4).run_expecting_errors(_grid, tp=3, cp=1)
    assert all("divide the world size 4" in str(e) for e in errors)


_PARENT = """
import os
from tests.helpers.distributed import get_pool
from tests.helpers.test_distributed import _sleep_forever
if __name__ == "__main__":
    print(*get_pool(2).run(os.getpid), flush=True)
    get_pool(2).run(_sleep_forever)
"""


@pytest.mark.night
def test_ranks_die_with_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "the ranks outlived their parent"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
