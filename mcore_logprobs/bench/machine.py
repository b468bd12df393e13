"""The machine that is measured: its name, its load, its heap and the memory of a call."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import time
from pathlib import Path

import torch
import torch.distributed as dist

_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # of glibc's mallopt
_KEPT: list[int] = [0]  # whether it took each setting that keeps the heap


def describe(device: torch.device, load: str = "") -> str:
    """The machine, the software and the date, in a line; with what `busy` says of the load."""
    if device.type == "cuda":
        hardware, allocator = f"GPU: {torch.cuda.get_device_name()}", "caching allocator"
        if gpus_are_shared():
            hardware += ", shared by ranks: times do not hold"
    else:
        threads = torch.get_num_threads()
        hardware = f"CPU: {_cpu_name()}, {os.cpu_count()} cores, {threads} threads"
        allocator = _allocator()
    today = datetime.date.today().isoformat()
    parts = [hardware, f"torch {torch.__version__}", allocator, load, today]
    return "; ".join(part for part in parts if part)


def gpus_are_shared() -> bool:
    """Whether this host has fewer GPUs than ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":")[1].strip() for line in info if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _allocator() -> str:
    if "jemalloc" in os.environ.get("LD_PRELOAD", ""):
        return "jemalloc"
    return "malloc, heap kept" if all(_KEPT) else "malloc, fresh pages for each large tensor"


# ---- the heap ------------------------------------------------------------------------------------


def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libc.so.6")
    except OSError:
        return None


def keep_heap() -> bool:
    """Have glibc take large tensors from its heap and keep what is freed; whether it does.

    By default each tensor of 32 MiB or more is mapped again, and its page faults cost several times
    what a kernel takes to write it. No effect on other C libraries.
    """
    mallopt = getattr(_libc(), "mallopt", lambda option, value: 0)
    _KEPT[:] = [mallopt(option, value) for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))]
    return all(_KEPT)


def prefault(nbytes: int) -> None:
    """Write that much memory once, so that a kept heap has it for what comes.

    At most half of what is free: a system that runs out ends the process.
    """
    if "SC_AVPHYS_PAGES" in os.sysconf_names:  # not on every system
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        nbytes = min(nbytes, free // 2)
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)


def release() -> None:
    """Hand freed memory back to the system, where the C library can."""
    if trim := getattr(_libc(), "malloc_trim", None):
        trim(0)


class Peak:
    """Peak memory of a block, beyond what was there before.

    CUDA: the caching allocator's peak. CPU: the peak of the process's resident memory, which the
    kernel keeps (VmHWM); freed memory is handed back first, so that none of it is reused unseen.

    Attributes:
        nbytes: known once the block has ended; None where the system does not tell.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.nbytes: int | None = None

    def __enter__(self) -> Peak:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return self
        release()
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _resident("VmRSS")
        except OSError:
            self._before = -1
        return self

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            self.nbytes = torch.cuda.max_memory_allocated() - self._before
        elif self._before >= 0:
            self.nbytes = max(0, _resident("VmHWM") - self._before)


def _resident(key: str) -> int:
    return _field("/proc/self/status", f"{key}:")[0] * 1024


def _field(file: str, key: str) -> list[int]:
    """The numbers of a line of /proc that begins with the key."""
    lines = (line.split() for line in Path(file).read_text().splitlines())
    return next([int(x) for x in words[1:] if x.isdigit()] for words in lines if words[0] == key)


# ---- the load ------------------------------------------------------------------------------------


def busy(seconds: float = 0.3) -> str:
    """Why times would say little: fewer CPUs are idle than the ranks' threads take; else "".

    Looks while this process sleeps. Collectives: a broadcast over the world, where there is one.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1
    reason = [""]
    if several:
        dist.barrier()  # the others have started, and wait for the answer without working
    if not several or dist.get_rank() == 0:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if several else 1
        needed = min(ranks * torch.get_num_threads(), os.cpu_count() or 1)
        idle = _idle_cpus(seconds)
        if idle < needed - 0.5:
            reason = [
                f"the machine is busy: {idle:.1f} CPUs are idle, the benchmark takes {needed}"
            ]
    if several:
        dist.broadcast_object_list(reason)
    return reason[0]


def _idle_cpus(seconds: float) -> float:
    """CPUs that do nothing, on average over some seconds; without /proc from the load."""
    count = os.cpu_count() or 1
    try:
        before = _field("/proc/stat", "cpu")
        time.sleep(seconds)
        spent = [b - a for a, b in zip(before, _field("/proc/stat", "cpu"), strict=True)]
    except (OSError, StopIteration):
        return max(0.0, count - os.getloadavg()[0])
    # user, nice, system, idle, waiting for a disk, ...; guests' time is in user's.
    return count * sum(spent[3:5]) / max(1, sum(spent[:8]))
