"""What a call on a GPU costs its host: `python -m benchmarks.launches`.

Small calls are bound by launches, and those can be counted and timed without a GPU. The calls run
on CPU tensors through the code that CUDA tensors take: Triton compiles its kernels for a Hopper
GPU (or a Blackwell or AMD one), binds their arguments and looks them up as always, and a dry driver
stands where it would hand a launch to the GPU's own. Nothing is computed. Triton 3.3 to 3.9 can be
read.
What a GPU would run is

    Triton launches + torch's own kernels + collectives

where torch's kernels are its dispatched operators save views and allocations. Host time is the wall
time of such a call on this CPU: Python, torch's dispatcher and Triton's launcher, without what the
CUDA driver takes for each launch (2 to 4 us).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_logprobs import checks, consistency
from mcore_logprobs.bench import machine
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.ops.divergence import vocab_parallel_kl_div
from mcore_logprobs.ops.token_stats import (
    vocab_parallel_entropy,
    vocab_parallel_logprobs,
    vocab_parallel_target_rank,
    vocab_parallel_token_stats,
)

# Multiprocessors of a GPU of each target: H200, B200, and AMD's MI300X and MI350X.
_PROCESSORS = {"sm_90": 132, "sm_100": 148, "gfx942": 304, "gfx950": 256}
TARGETS = tuple(_PROCESSORS)
AMD_TARGETS = tuple(target for target in TARGETS if target.startswith("gfx"))
NVIDIA_TARGETS = tuple(target for target in TARGETS if target not in AMD_TARGETS)
_SHARED = {"gfx942": 64 << 10, "gfx950": 160 << 10}  # bytes of a block, at most; others: NVIDIA's


@dataclass
class Launched:
    """What was launched: how often each kernel, by name; of each launch the name, the machine code
    (AMD's: its assembly) and the bytes of shared memory; of each kernel the latest's assembly."""

    counts: Counter[str] = field(default_factory=Counter)
    binaries: list[tuple[str, bytes, int]] = field(default_factory=list)
    assembly: dict[str, str] = field(default_factory=dict)

    def clear(self) -> None:
        self.counts.clear()
        self.binaries.clear()
        self.assembly.clear()


# ---- launches that go nowhere ------------------------------------------------------------------


@dataclass
class _DryUtils:
    processors: int
    shared: int
    binaries: list[bytes] = field(default_factory=list)

    def load_binary(self, name: str, binary: bytes, *_: Any) -> tuple[int, ...]:
        from triton.compiler.compiler import CompiledKernel

        self.binaries.append(binary)
        # module, function, registers, spills; from Triton 3.4 on, threads at most
        loaded = (1, len(self.binaries) - 1, 0, 0)
        takes_threads = "n_max_threads" in CompiledKernel._init_handles.__code__.co_names
        return (*loaded, 1024) if takes_threads else loaded

    def unload_module(self, _: Any) -> None: ...

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared, "multiprocessor_count": self.processors}


@dataclass
class _DryDriver:
    """What Triton asks of a driver; its launches are recorded by kernel name, and do nothing."""

    target: str
    launched: Launched = field(default_factory=lambda: Launched())
    utils: _DryUtils = field(init=False)

    def __post_init__(self) -> None:
        self.utils = _DryUtils(_PROCESSORS[self.target], _SHARED.get(self.target, 232448))

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        name, launched, binaries = src.fn.__name__, self.launched, self.utils.binaries
        amd = self.target in AMD_TARGETS
        assembly = _cached_text(metadata, "amdgcn" if amd else "ptx")

        def launch(x: int, y: int, z: int, stream: int, function: int, *_: Any) -> None:
            launched.counts[name] += 1
            code = assembly if amd else binaries[function]
            launched.binaries.append((name, code, metadata.shared))
            launched.assembly[name] = assembly.decode()

        return launch

    def get_current_device(self) -> int:
        return TARGETS.index(self.target)  # a kernel keeps what was compiled for each device

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        if self.target in AMD_TARGETS:
            return GPUTarget("hip", self.target, 64)
        return GPUTarget("cuda", int(self.target.removeprefix("sm_")), 32)


def _cached_text(metadata: Any, extension: str) -> bytes:
    """What Triton has written of a compiled kernel besides its machine code."""
    from triton.runtime.cache import get_cache_manager

    path = get_cache_manager(metadata.hash).get_file(f"{metadata.name}.{extension}")
    assert path is not None, (metadata.name, extension)
    return Path(path).read_bytes()


# One of each: a compiled kernel keeps the launcher it was given first.
_DRIVERS = {target: _DryDriver(target) for target in TARGETS}


@contextmanager
def dry_launches(target: str = "sm_90") -> Iterator[Launched]:
    """CPU tensors take the Triton path of a GPU of the target, up to the launch itself.

    Args:
        target: one of `TARGETS`, Hopper unless said otherwise.

    Yields:
        What is launched within.
    """
    import triton

    from mcore_logprobs.kernels.triton import common

    if common.INTERPRETED:
        raise ValueError("TRITON_INTERPRET: expected it unset, as kernels are compiled here")
    driver = _DRIVERS[target]
    chosen = backends.Choice("triton", True, "dry launches")
    candidates = tuple(
        replace(c, availability=lambda _: chosen) if c.name == "triton" else c
        for c in backends._CANDIDATES
    )
    with ExitStack() as stack:
        # Not set_active: what is active would be asked for first, and there is no GPU.
        slot = "_active" if "_active" in vars(triton.runtime.driver) else "active"  # 3.3 has that
        stack.enter_context(mock.patch.object(triton.runtime.driver, slot, driver))
        stack.enter_context(mock.patch.object(backends, "_CANDIDATES", candidates))
        # Plain functions: a Mock takes 4 us per call, which would count as the host's.
        processors = lambda device: _PROCESSORS[target]  # noqa: E731
        stack.enter_context(mock.patch.object(common, "_processors", processors))
        # CUDA tensors are asserted on by the kernel; what CPU ones get is no part of the count.
        unchecked = lambda *_: None  # noqa: E731
        stack.enter_context(mock.patch.object(checks, "check_values", unchecked))
        driver.launched.clear()
        yield driver.launched


# ---- counting ----------------------------------------------------------------------------------


class DispatchesMade(TorchDispatchMode):
    """Within it, torch's operators that would run a kernel on a GPU are counted by name.

    Views, allocations and what happens on the host alone run none. This library's own operators
    are looked into: what counts is what they call.

    Attributes:
        kernels: how often each was called, `{"aten::sum": 2}`.
        collectives: likewise.
    """

    _NO_KERNEL = (
        "aten::empty",
        "aten::new_empty",
        "aten::detach",
        "aten::lift",
        "aten::promote_types",
        "aten::scalar_tensor",  # a number on its way to a kernel
        "prim::",
    )

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if func.namespace == "mcore_logprobs":
            with self:
                here = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
                return func.redispatch(here, *args, **kwargs)
        if func.namespace == "c10d" or func.namespace.startswith("_c10d_functional"):
            if name != "_c10d_functional::wait_tensor":
                self.collectives[name] += 1
        elif not _is_view(func) and not name.startswith(self._NO_KERNEL):
            self.kernels[name] += 1
        return func(*args, **kwargs)


def _is_view(func: Any) -> bool:
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@dataclass(frozen=True)
class Counted:
    """One direction of a call.

    Attributes:
        triton: launches of each Triton kernel.
        torch: dispatches of each torch operator that runs a kernel.
        collectives: of each collective.
        host_us: the host's time of each timed call, in microseconds, least first.
    """

    triton: Counter[str]
    torch: Counter[str]
    collectives: Counter[str]
    host_us: list[float]

    @property
    def launches(self) -> int:
        return self.triton.total() + self.torch.total()


def _logprobs(logits: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    return [vocab_parallel_logprobs(logits, target, **options)]


def _stats(logits: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    found = vocab_parallel_token_stats(logits, target, entropy=True, **options)
    named = (found.logprobs, found.entropy, found.sum_pi_squared, found.lse)
    return [x for x in named if x is not None and x.requires_grad]


def _entropy(logits: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    return [vocab_parallel_entropy(logits, **options)]


def _rank(logits: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    vocab_parallel_target_rank(logits, target, **options)
    return []


def _divergence(logits: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    return [vocab_parallel_kl_div(logits, logits.detach(), **options)]


CALLS: dict[str, Callable[..., list[Tensor]]] = {
    "logprobs": _logprobs,
    "logprobs, softcap 30, T 0.7": partial(_logprobs, softcap=30.0, temperature=0.7),
    "logprobs, label smoothing": partial(_logprobs, label_smoothing=0.1),
    "logprobs, 4 segments": partial(_logprobs, invariant_segments=4),
    "token_stats, entropy": _stats,
    "token_stats, everything": partial(_stats, target_rank=True, sum_pi_squared=True),
    "entropy": _entropy,
    "target_rank": _rank,
    "kl_div": _divergence,
    "kl_div, jsd": partial(_divergence, kind="jsd"),
}


def count(
    call: Callable[..., list[Tensor]],
    *,
    rows: int = 64,
    width: int = 19008,
    group: ProcessGroup | None = None,
    dtype: torch.dtype = torch.bfloat16,
    timed: int = 0,
    target: str = "sm_90",
) -> tuple[Counted, Counted | None]:
    """Forward and backward (None where there is none) of a call on `[rows, width]` logits.

    Args:
        group: the TP group, whose ranks need not be there.
        timed: calls to take the host's time of.
        target: one of `TARGETS`.
    """
    logits = torch.zeros(rows, width, dtype=dtype, requires_grad=True)
    ids = torch.zeros(rows, dtype=torch.int64)
    forward = partial(call, logits, ids, tp_group=group, backend="triton")
    with dry_launches(target) as launched:

        def counted(run: Callable[[], object], host_us: list[float]) -> Counted:
            launched.clear()
            with DispatchesMade() as made:
                run()
            return Counted(Counter(launched.counts), made.kernels, made.collectives, host_us)

        outputs = forward()  # compiles
        upstream = [torch.ones_like(output) for output in outputs]

        def backward() -> None:
            torch.autograd.grad(outputs, logits, upstream, retain_graph=True)

        if outputs:
            backward()
        times: list[list[float]] = [[], []]
        for _ in range(timed):
            start = time.perf_counter()
            outputs = forward()
            times[0].append(time.perf_counter() - start)
            if outputs:
                start = time.perf_counter()
                backward()
                times[1].append(time.perf_counter() - start)
        there, back = (sorted(1e6 * seconds for seconds in found) for found in times)
        return counted(forward, there), counted(backward, back) if outputs else None


# ---- the command -------------------------------------------------------------------------------


@contextmanager
def one_of_ranks(size: int) -> Iterator[ProcessGroup | None]:
    """A group of `size` ranks of which only this one exists: its collectives do nothing."""
    if size == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        # The other ranks' widths are not there to be compared.
        with mock.patch.object(consistency, "_posted_by_all", lambda own, *_: [own]):
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launches",
        description="Launches and host time of the calls on logits as on a GPU; needs none.",
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--width", type=int, default=19008, help="columns per rank, V/TP")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--calls", type=int, default=300, help="to take the median time of")
    parser.add_argument("--kernels", action="store_true", help="name what is launched")
    parser.add_argument("--target", choices=TARGETS, default="sm_90", help="what to compile for")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(machine.describe(torch.device("cpu")))
    print(f"[{args.rows}, {args.width}] bf16; host time without the CUDA driver's share")
    for tp in args.tp:
        title = f"TP {tp}"
        print(
            f"\n{title:30} {'direction':>9} {'Triton':>7} {'torch':>6} {'wire':>5} {'host us':>8}"
            f" {'least':>6}"
        )
        with one_of_ranks(tp) as group:
            for name, call in CALLS.items():
                shape = {"rows": args.rows, "width": args.width}
                both = count(call, **shape, group=group, timed=args.calls, target=args.target)
                for way, found in zip(("forward", "backward"), both, strict=True):
                    if found is not None:
                        _print_line(name if way == "forward" else "", way, found, args.kernels)
    return 0


def _print_line(name: str, way: str, found: Counted, kernels: bool) -> None:
    counts = (found.triton.total(), found.torch.total(), found.collectives.total())
    host = found.host_us
    print(
        "{:30} {:>9} {:7} {:6} {:5} {:8.0f} {:6.0f}".format(
            name, way, *counts, statistics.median(host), host[0]
        ),
        flush=True,
    )
    if kernels:
        for counter in (found.triton, found.torch, found.collectives):
            for what, times in counter.most_common():
                print(f"{'':33}{times:3} {what}")


if __name__ == "__main__":
    raise SystemExit(main())
