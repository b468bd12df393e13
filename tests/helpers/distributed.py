"""A pool of gloo ranks for tests: started once for each world size, reused by every test.

    pool = get_pool(2)
    results = pool.run(rank_fn, tensor, option=3)    # rank_fn at module level; one result a rank
    for answer in pool.run_many(rank_fn, cases):     # one dispatch; the results or a RankError each

The ranks are processes forked from a server that has imported torch, so that a pool starts, and
after a failure restarts, in a fraction of a second. They run one thread each and with fresh
memory poisoned (see `poison.py`), and die with the process that started them.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from mcore_logprobs.cpu_megatron.models import all_groups
from tests.helpers.poison import poisoned_memory
from tests.helpers.sizes import put_in_force

if TYPE_CHECKING:
    from mcore_logprobs.groups import ParallelGroups

_REPO_ROOT = str(Path(__file__).resolve().parents[2])
_START_TIMEOUT = 120.0
_GRACE = 20.0  # how long the others may take once one rank has raised
_GOODBYE = 1.0 if "coverage" not in sys.modules else 10.0  # for a rank to end by itself
# When Python looks for cycles: at its own thresholds that takes a twentieth of a test's time.
SELDOM = (20_000, 20, 20)
_pools: dict[int, RankPool] = {}
# What the ranks import sooner or later, seconds each for Megatron: done once, in the server.
preloaded: list[str] = []


class RankError(RuntimeError):
    """One or more ranks raised; the message has each one's traceback.

    Attributes: `errors`, a list with each rank's exception or None.
    """

    def __init__(self, message: str, errors: list[BaseException | None]) -> None:
        super().__init__(message)
        self.errors = errors

    def __reduce__(self) -> tuple[object, ...]:
        """From a worker process; the ranks' own exceptions may not be pickled."""
        return type(self), (str(self), [None] * len(self.errors))


class RankTimeout(RankError):
    """One or more ranks gave no answer in time; the message has each one's Python stack."""


def get_pool(world_size: int) -> RankPool:
    """The pool of `world_size` gloo ranks of this process, started at its first use."""
    if world_size < 1:
        raise ValueError(f"expected a world size of at least 1, got {world_size}")
    if world_size not in _pools:
        _pools[world_size] = RankPool(world_size)
    return _pools[world_size]


class RankPool:
    """Persistent gloo ranks. Get one by `get_pool`.

    Attributes:
        used: whether a job was sent since this was last set to False.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.used = False
        self._workers: list[Any] = []
        self._conns: list[Connection] = []
        self._dir: str | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> list:
        """Run `fn(*args, **kwargs)` on every rank and return the results in rank order.

        `fn` is a module-level function that the ranks can import. Arguments and results are
        pickled; tensors in the results come back detached. Every job starts from seed 0.

        Raises: RankError where a rank raised, RankTimeout where one did not answer within
        `timeout` seconds (the ranks are killed then, and started afresh by the next call).
        """
        (answers,) = self._answers(fn, [(args, kwargs)], timeout)
        error = _error_of(answers)
        if error is not None:
            raise error
        return [a.value for a in answers]

    def run_many(
        self, fn: Callable[[Any], Any], cases: Iterable[Any], timeout: float = 120
    ) -> list[list | RankError]:
        """`fn(case)` for each case on every rank, in one dispatch; `timeout` is a case's.

        Returns, in the order of the cases, what `run` returns or raises. After a case that fails
        the ranks go on with the next one: as they are where all of them raised alike, else afresh.
        """
        jobs: list[tuple[tuple, dict]] = [((case,), {}) for case in cases]
        found: list[list | RankError] = []
        while len(found) < len(jobs):
            for answers in self._answers(fn, jobs[len(found) :], timeout):
                found.append(_error_of(answers) or [a.value for a in answers])
        return found

    def run_expecting_errors(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any
    ) -> list:
        """As `run`, but give each rank's exception in place of its result.

        Raises: RankTimeout where a rank hung, for instance because another one raised alone.
        """
        (answers,) = self._answers(fn, [(args, kwargs)], timeout)
        if any(a.hung for a in answers):
            raise RankTimeout(_describe(answers), [a.error for a in answers])
        return [a.value if a.error is None else a.error for a in answers]

    def close(self) -> None:
        """End the ranks, or kill them where they hang. The next `run` starts new ones."""
        for conn in self._conns:
            conn.close()
        # A rank that finds its pipe closed ends by itself, and writes down what coverage measured.
        deadline = time.monotonic() + _GOODBYE
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
            worker.kill()
        for worker in self._workers:
            worker.join(5)
        self._workers, self._conns = [], []
        if self._dir is not None:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir = None

    def _start(self) -> None:
        context = _context()
        self._dir = tempfile.mkdtemp(prefix="gloo-ranks-")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=_work, args=(theirs, rank, self.world_size, self._dir), daemon=True
            )
            with _worker_environment():
                worker.start()
            theirs.close()
            self._workers.append(worker)
            self._conns.append(ours)
        ready = self._collect(_START_TIMEOUT)
        if any(a.error is not None for a in ready):
            self.close()
            raise RankError(_describe(ready), [a.error for a in ready])

    def _answers(
        self, fn: Callable[..., Any], jobs: list[tuple[tuple, dict]], timeout: float
    ) -> list[list[_Answer]]:
        """The ranks' answers to each job, up to and with the first one that any rank fails."""
        if "<locals>" in fn.__qualname__ or fn.__module__ == "__main__":
            raise ValueError(
                "expected a function at the top level of an importable module, got "
                f"{fn.__module__}.{fn.__qualname__}"
            )
        packed = pickle.dumps([pickle.dumps((fn, *job)) for job in jobs])
        self.used = True
        if not all(worker.is_alive() for worker in self._workers):
            self.close()
        if not self._workers:
            self._start()
        found: list[list[_Answer]] = []
        try:
            for conn in self._conns:
                conn.send_bytes(packed)
            while len(found) < len(jobs):
                answers = self._collect(timeout)
                found.append(answers)
                kinds = {type(a.error) for a in answers}
                # Where only some raised, or in different ways, the ranks' collectives may be out
                # of step.
                if len(kinds) > 1 or any(a.hung for a in answers):
                    self.close()
                if kinds != {type(None)}:
                    break
        except BaseException:  # an interrupted job's answers must not meet the next job
            self.close()
            raise
        return found

    def _collect(self, timeout: float) -> list[_Answer]:
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world_size:
            waiting = [c for rank, c in enumerate(self._conns) if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for conn in ready:
                rank = self._conns.index(conn)  # type: ignore[arg-type]
                answers[rank] = _receive(self._conns[rank])
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        for rank in range(self.world_size):
            if rank not in answers:
                stack = self._stack(rank)
                error = TimeoutError(f"no answer within {timeout:g} s")
                answers[rank] = _Answer(error=error, text=f"{error}; it was at\n{stack}", hung=True)
        return [answers[rank] for rank in range(self.world_size)]

    def _stack(self, rank: int) -> str:
        assert self._dir is not None
        with contextlib.suppress(OSError):
            os.kill(self._workers[rank].pid, signal.SIGUSR1)
            time.sleep(0.3)
            return Path(self._dir, f"stack{rank}").read_text()
        return "(no stack)"


@dataclass
class _Answer:
    value: Any = None
    error: BaseException | None = None
    text: str = ""
    hung: bool = False


def _describe(answers: list[_Answer]) -> str:
    parts = [f"--- rank {r} ---\n{a.text}" for r, a in enumerate(answers) if a.error is not None]
    fine = [str(r) for r, a in enumerate(answers) if a.error is None]
    if fine:
        parts.append(f"(no error on rank {', '.join(fine)})")
    return "\n".join(["a rank failed", *parts])


def _error_of(answers: list[_Answer]) -> RankError | None:
    errors = [a.error for a in answers]
    if all(e is None for e in errors):
        return None
    raised = any(a.error is not None and not a.hung for a in answers)
    return (RankError if raised else RankTimeout)(_describe(answers), errors)


def _receive(conn: Connection) -> _Answer:
    try:
        value, error, text = pickle.loads(conn.recv_bytes())
    except EOFError:
        error = RuntimeError("the process died")
        return _Answer(error=error, text=str(error), hung=True)
    return _Answer(value, error, text)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    # What this process has imported anyway the ranks are going to need: import it once for all.
    heavy = ("tests.gpu.simulated", "torch", "torch.distributed", "numpy", "pytest")
    heavy += ("tests.conftest", "megatron.core", "transformers.models.llama.modeling_llama")
    heavy += ("transformers.generation.utils",)
    context.set_forkserver_preload([*(name for name in heavy if name in sys.modules), *preloaded])
    return context


@contextlib.contextmanager
def _worker_environment() -> Any:
    """The environment that the fork server keeps from its start."""
    changed = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if sys.platform == "linux":
        changed["GLOO_SOCKET_IFNAME"] = "lo"
    with mock.patch.dict(os.environ, changed):
        yield


@atexit.register
def _close_all() -> None:
    for pool in _pools.values():
        pool.close()


def seed() -> None:
    """`torch.manual_seed(0)`, without the calls that it keeps for each device that is not there.

    Each of those formats the whole stack: three of them take milliseconds within pytest.
    """
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


# ---- what runs inside a rank ----

_grids: dict[tuple[int, int], ParallelGroups] = {}


def grid_groups(*, tp: int = 1, cp: int = 1) -> ParallelGroups:
    """Inside a rank: this rank's TP and CP groups, TP ranks adjacent, then CP, then data
    parallel over what is left. Made once for each (tp, cp); every rank must ask for it.

    Raises: ValueError where tp * cp does not divide the world size.
    """
    from mcore_logprobs.groups import ParallelGroups

    world, rank = dist.get_world_size(), dist.get_rank()
    if tp < 1 or cp < 1 or world % (tp * cp):
        raise ValueError(f"expected tp * cp to divide the world size {world}, got {tp} * {cp}")
    if (tp, cp) not in _grids:
        grid = torch.arange(world).view(-1, cp, tp)
        tp_rows = grid.reshape(-1, tp).tolist()
        cp_rows = grid.transpose(1, 2).reshape(-1, cp).tolist()
        mine = []
        for rows in (tp_rows, cp_rows):
            made = [dist.new_group(row) for row in rows]
            mine.append(next(g for g, row in zip(made, rows, strict=True) if rank in row))
        _grids[tp, cp] = ParallelGroups(tp=mine[0], cp=mine[1])
    return _grids[tp, cp]


def live_groups() -> list[dist.ProcessGroup]:
    """This rank's process groups, but for the world and those of `grid_groups`."""
    kept = {dist.group.WORLD, *(g for grid in _grids.values() for g in (grid.tp, grid.cp))}
    return [g for g in all_groups() if g not in kept]


class _ResultPickler(pickle.Pickler):
    """Sends tensors detached, on the CPU and without the storage they are a view of."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        x = obj.detach().cpu().clone()
        if type(x) is torch.Tensor and x.layout is torch.strided and x.is_contiguous():
            # Torch's own way takes ten times as long.
            numbers = x.flatten().view(torch.uint8).numpy()
            return _tensor_of, (numbers.tobytes(), x.dtype, x.shape)
        return x.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _tensor_of(numbers: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    if not numbers:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(numbers), dtype=dtype).view(shape)


def _pack(answer: tuple) -> bytes:
    buffer = io.BytesIO()
    _ResultPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(answer)
    if answer[1] is not None:
        pickle.loads(buffer.getvalue())  # some exceptions pickle but cannot be read back
    return buffer.getvalue()


def _answer_of(do: Callable[[], Any]) -> tuple[bytes, bool]:
    """(what is sent, whether it went well)."""
    try:
        return _pack((do(), None, "")), True
    except BaseException as error:
        text = traceback.format_exc()
        try:
            return _pack((None, error, text)), False
        except Exception:
            return _pack((None, RuntimeError(f"{type(error).__name__}: {error}"), text)), False


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


class _Gloo(dist.ProcessGroupGloo):
    """Gloo with one device for all of a rank's groups.

    By default each group has a device of its own, whose thread wakes up a hundred times a second
    also while nothing is sent: 15 ranks that wait, of 18 groups each, took a quarter of a core.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **others: Any
    ) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [_gloo_device()], timeout
        for name, value in others.items():  # torch 2.15 has enable_reconfigure
            setattr(options, name, value)
        super().__init__(store, rank, size, options)


@functools.cache
def _gloo_device() -> Any:
    return dist.ProcessGroupGloo.create_default_device()


def _work(conn: Connection, rank: int, world_size: int, directory: str) -> None:
    gc.freeze()  # the server's modules: a collection need not walk over them
    gc.set_threshold(*SELDOM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    stack = open(Path(directory, f"stack{rank}"), "w")  # noqa: SIM115 (open for life)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    if _REPO_ROOT not in sys.path:
        sys.path.insert(0, _REPO_ROOT)
    put_in_force()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))

    def join() -> None:
        dist.distributed_c10d.ProcessGroupGloo = _Gloo
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=10),
        )

    conn.send_bytes(_answer_of(join)[0])
    with poisoned_memory():
        while True:
            try:
                jobs = pickle.loads(conn.recv_bytes())
            except EOFError:
                os._exit(0)
            for job in jobs:

                def do(job: bytes = job) -> Any:
                    fn, args, kwargs = pickle.loads(job)
                    seed()
                    return fn(*args, **kwargs)

                answer, fine = _answer_of(do)
                conn.send_bytes(answer)
                if not fine:
                    break
