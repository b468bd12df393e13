"""One group of cases in a process of its own: its time, its records, and how a call is timed."""

from __future__ import annotations

import ctypes
import json
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.bench.machine import Peak

Call = Callable[[], object]

_WARM_SECONDS = 0.2  # an idle clock takes that long to rise
_COLD_BYTES = 256 << 20  # more than a GPU's cache
_CYCLES_PER_SECOND = 2.0e9  # at most: a sleep must not be shorter than what it is to cover


def die_with_parent() -> None:
    """End this process when the one that forked it ends: nothing is left on the GPU."""
    with suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


Key = tuple[Any, ...]
_SHAPE = ("rows", "vocab", "valid", "columns", "hidden", "tp", "backend", "k")


def key_of(record: dict[str, Any]) -> Key:
    """What tells one case from another: group, name and shape."""
    return (record["group"], record["case"], *(record.get(name) for name in _SHAPE))


@dataclass
class GroupRun:
    """What a group's process is given.

    Attributes:
        results: the file of JSON lines that all groups append to.
        until: end of the group's time, of `time.monotonic`.
        started: of the session, on the same clock.
        small: sizes for trying the script out.
        cuda: whether there is a GPU; without one everything runs interpreted on the CPU.
        share: (i, n): run each n-th call once, untimed and unrecorded, from the i-th on. None: all.
        absent: what the session could not import, and why.
        done: cases that an earlier call of the session has recorded, which are not run again.
    """

    group: str
    out: Path
    results: Path
    until: float
    started: float
    small: bool
    cuda: bool
    share: tuple[int, int] | None = None
    absent: dict[str, str] = field(default_factory=dict)
    done: frozenset[Key] = frozenset()
    _count: int = field(default=0, init=False)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.cuda else "cpu")

    @property
    def left(self) -> float:
        """Seconds of the group's time."""
        return self.until - time.monotonic()

    def record(self, case: str, status: str = "ok", **fields: Any) -> None:
        """Append one line: group, case, status ("ok", "failed", "left out") and the fields."""
        if self.share is not None:
            return
        at = round(time.monotonic() - self.started, 3)
        line = {"group": self.group, "case": case, "status": status, "at": at, **fields}
        with open(self.results, "a") as file:
            file.write(json.dumps(line) + "\n")

    def case(
        self, name: str, run: Callable[[], dict[str, Any]], *, foreign: bool = False, **fields: Any
    ) -> dict[str, Any]:
        """Run one case and record what it gives; its failure is recorded and the group goes on.

        A foreign case that raises is left out, with the reason. A case that no time is left for is
        left out; one that an earlier call has recorded is passed over.

        Returns: the fields, {} where there are none.

        Raises:
            RuntimeError: the device answers no more, as after an illegal access.
        """
        if self.share is not None:
            self._count += 1
            if self._count % self.share[1] != self.share[0]:
                return {}
        known = key_of({"group": self.group, "case": name, **fields}) in self.done
        if known and not name.startswith("floor"):  # others are divided by floors
            return {}
        if self.left <= 0.0:
            self.record(name, "left out", reason="no time left in this group", **fields)
            return {}
        begin = time.monotonic()
        try:
            found = run()
        except Exception as error:
            traceback.print_exc()
            first = str(error).strip().splitlines()[:1]
            reason = f"{type(error).__name__}: {first[0] if first else ''}"[:300]
            self.record(name, "left out" if foreign else "failed", reason=reason, **fields)
            if torch.cuda.is_initialized():  # or processes forked from this one could not use it
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            return {}
        self.record(name, took=round(time.monotonic() - begin, 3), **fields, **found)
        return found

    def time(
        self,
        name: str,
        call: Call,
        *,
        floor: Call | None = None,
        floor_ms: float | None = None,
        bytes_moved: int | None = None,
        operations: int | None = None,
        small_input: bool = False,
        peak: bool = False,
        foreign: bool = False,
        **fields: Any,
    ) -> float | None:
        """Time one call as a case; its smallest kernel time in ms, None where it did not run.

        Args:
            floor: the machine's limit for the same, timed in turn with the call; gives `floor_ms`
                and `share`.
            floor_ms: that limit, if it was timed before.
            bytes_moved, operations: give `tb_per_s` and `tflops`.
            small_input: the input fits the GPU's cache, which is emptied before each call.
            peak: also record the memory beyond what was there before, in MiB.
            foreign: somebody else's: if it raises, it is left out with the reason.
        """

        def run() -> dict[str, Any]:
            if self.share is not None:
                call()
                return {}
            found = self.timed(call, floor=floor, small_input=small_input)
            least = found["kernel_ms"]
            if floor_ms is not None:
                found["share"] = round(floor_ms / least, 4)
            if bytes_moved is not None:
                found["tb_per_s"] = round(bytes_moved / least / 1e9, 4)
            if operations is not None:
                found["tflops"] = round(operations / least / 1e9, 2)
            if peak:
                with Peak(self.device) as found_peak:
                    call()
                found["peak_mib"] = round((found_peak.nbytes or 0) / 2**20, 1)
            return found

        return self.case(name, run, foreign=foreign, **fields).get("kernel_ms")

    def timed(
        self, call: Call, *, floor: Call | None = None, small_input: bool = False
    ) -> dict[str, Any]:
        """`timed` for this group's share of seconds; a floor gives `floor_ms` and `share` too."""
        found = timed(call, cuda=self.cuda, seconds=self._seconds(), cold=small_input, floor=floor)
        if floor is not None:
            found["share"] = round(found["floor_ms"] / found["kernel_ms"], 4)
        return found

    def _seconds(self) -> float:
        """A case's share of what is left, so that one slow case does not take it all."""
        return max(0.0, min(1.5, self.left / 4)) if not self.small else 0.02

    def randn(self, *size: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> Tensor:
        """Random operands: products of zeros draw less power and run faster than real ones."""
        generator = torch.Generator(self.device).manual_seed(len(size) + size[0])
        return torch.randn(*size, device=self.device, dtype=dtype, generator=generator).mul_(std)

    def targets(self, rows: int, vocab: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(rows)
        return torch.randint(vocab, (rows,), device=self.device, generator=generator)


def timed(
    call: Call, *, cuda: bool, seconds: float, cold: bool = False, floor: Call | None = None
) -> dict[str, Any]:
    """Smallest and median time of a call on the device, apart from the host's.

    The device is kept busy while the host issues the call, so that what is between the two events
    is the device's work alone.

    Args:
        seconds: to spend, at least three calls all the same; one on a CPU, where a call is slow.
        cold: empty the GPU's cache before each.
        floor: another call, timed in turn with the first: both see the same clock and heat.

    Returns: `kernel_ms`, `kernel_ms_median`, `host_us` (issuing the call) and `calls`, on a CPU
        `kernel_ms` is all of it; `floor_ms` of a floor; on a GPU `clock_mhz` and `watt` while the
        last call ran, where the driver tells.
    """
    calls = [call] if floor is None else [call, floor]
    if not cuda:
        times = _repeat([partial(_host_seconds, each) for each in calls], seconds, least=1)
        return _summary([[1e3 * t for t in own] for own in times], min(times[0]))
    for each in calls:
        each()  # compiles, and fills the allocator's pools
    torch.cuda.synchronize()
    _warm_clock()
    host = [min(_issue(each) for _ in range(3)) for each in calls]
    scratch = torch.empty(_COLD_BYTES if cold else 0, dtype=torch.uint8, device="cuda")

    def once(each: Call, issued: float) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        scratch.zero_()
        torch.cuda._sleep(int(_CYCLES_PER_SECOND * min(2.0 * issued + 50e-6, 0.1)))
        start.record()
        each()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    ways = [partial(once, each, issued) for each, issued in zip(calls, host, strict=True)]
    found = _summary(_repeat(ways, seconds), host[0])
    for _ in range(3):
        call()
    found |= _state()  # while they run
    torch.cuda.synchronize()
    return found


def _state() -> dict[str, Any]:
    """The GPU's clock in MHz and its power in watts, now; nothing where the driver does not say."""
    try:
        return {
            "clock_mhz": torch.cuda.clock_rate(),
            "watt": round(torch.cuda.power_draw() / 1000),
        }
    except Exception:  # no NVML, or no bindings for it
        return {}


def graph_timed(call: Call, *, seconds: float) -> float:
    """Smallest time in ms of a CUDA graph of the call: its kernels without the host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    found = timed(graph.replay, cuda=True, seconds=seconds, cold=True)
    return float(found["kernel_ms"])


def _summary(times_ms: list[list[float]], host: float) -> dict[str, Any]:
    own, *floor = times_ms
    found = {
        "kernel_ms": round(min(own), 5),
        "kernel_ms_median": round(statistics.median(own), 5),
        "host_us": round(1e6 * host, 1),
        "calls": len(own),
    }
    return found | ({"floor_ms": round(min(floor[0]), 5)} if floor else {})


def _repeat(
    ways: Sequence[Callable[[], float]], seconds: float, *, least: int = 3
) -> list[list[float]]:
    """Times of each way, in turns."""
    end = time.monotonic() + seconds
    found: list[list[float]] = [[] for _ in ways]
    while len(found[0]) < least or (time.monotonic() < end and len(found[0]) < 100):
        for times, way in zip(found, ways, strict=True):
            times.append(way())
    return found


def _host_seconds(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _issue(call: Call) -> float:
    seconds = _host_seconds(call)
    torch.cuda.synchronize()
    return seconds


_warmed_at: list[float] = []


def _warm_clock() -> None:
    """Work for a while, unless there was some within the last second."""
    now = time.monotonic()
    if not _warmed_at or now - _warmed_at[0] > 1.0:
        a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        while time.monotonic() < now + _WARM_SECONDS:
            for _ in range(8):
                a @ a
            torch.cuda.synchronize()
    _warmed_at[:] = [time.monotonic()]


@dataclass(frozen=True)
class Sizes:
    """Attributes: `shards`: (V/TP, true vocabulary) of single ranks, of `shard_rows` rows."""

    rows: tuple[int, ...]
    vocab: int
    hidden: int
    launch_bound: tuple[int, int]
    shard_rows: int
    shards: tuple[tuple[int, int], ...]


def sizes(run: GroupRun) -> Sizes:
    if run.small:
        return Sizes((4,), 512, 32, (4, 256), 4, ((544, 537),))
    shards = ((16032, 16032), (16160, 16160), (19008, 18950), (37984, 37984))
    # To compile fewer rows do: several processes share the memory.
    few = run.share is not None
    rows, shard_rows = ((4096,), 4096) if few else ((8192, 32768), 65536)
    return Sizes(rows, 152064, 4096, (1024, 19008), shard_rows, shards)


def let_one_element_be_a_number() -> None:
    """Have Triton's interpreter take a loop's bounds from arrays of one element.

    Before 3.7 it asked `int` of them, which NumPy 2.4 refuses.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched
