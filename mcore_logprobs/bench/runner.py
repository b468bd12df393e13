"""Measuring: contenders take turns, a fixed number of rounds, medians and the least.

The number of rounds never depends on what was measured: under torchrun all ranks make the same
calls. Every round runs every contender once, so that a slow minute of the machine hits all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.bench.machine import Peak, prefault, release


@dataclass
class Contender:
    """One way to do the work.

    Attributes:
        forward: takes the workload's inputs, gives a differentiable tensor, or any tensor if
            `differentiable` is False.
        inputs: what forward gets, and by what the backward differentiates.
        is_floor: a bare machine limit that others are divided by, not a way to do the work.
        is_peer: somebody else's: if it raises, on any rank, that is noted and the run goes on.
        overwrites: it may write over its inputs: each run gets copies, made before it is timed.
        check: the result's and gradients' error against float64, or None.
        backward: a floor's own backward; None: autograd's.
    """

    name: str
    forward: Callable[..., Any]
    inputs: Sequence[Tensor] = ()
    differentiable: bool = True
    is_floor: bool = False
    is_peer: bool = False
    overwrites: bool = False
    check: Callable[[Tensor, Sequence[Tensor]], tuple[float, float]] | None = None
    backward: Callable[[], object] | None = None

    def own_inputs(self) -> Sequence[Tensor]:
        """What one run gets."""
        if not self.overwrites:
            return self.inputs
        return [x.detach().clone().requires_grad_(x.requires_grad) for x in self.inputs]


@dataclass
class Workload:
    """Contenders at one shape.

    Attributes:
        shape: what identifies the point, such as {"rows": 1024, "vocab": 131072, "dtype": "bf16"}.
        absent: peers that could not be had, with the reason.
        curve: contenders whose names begin so lie on a curve of time against memory, and the others
            are points next to it; "": time and memory have pictures of their own.
    """

    title: str
    shape: dict[str, Any]
    contenders: list[Contender]
    absent: dict[str, str] = field(default_factory=dict)
    curve: str = ""


@dataclass
class Measurement:
    """One contender at one shape: seconds and bytes; spreads are interquartile ranges.

    Attributes:
        least: the fastest round of forward, of backward and of both. Whatever else a host does
            slows single rounds, and so the median: compare code by the least.
        peak: bytes beyond what was there before, at the highest point of forward and backward.
        collectives: names, forward and backward, and the bytes this rank puts into them.
        error: (result, gradients) against float64: largest absolute error of the result, largest
            error of a gradient relative to its largest entry.
        floor: the machine's limit, measured in this run, over the least forward, backward and both.
    """

    name: str
    forward: float
    backward: float | None
    both: float
    spread: float
    least: tuple[float, float | None, float] = (0.0, None, 0.0)
    peak: int | None = None
    collectives: list[str] = field(default_factory=list)
    sent: int = 0
    error: tuple[float, float] | None = None
    floor: dict[str, float] = field(default_factory=dict)


def measure(load: Workload, *, rounds: int, warmup: int) -> list[Measurement]:
    """Measure all contenders of a workload; a peer that raises is noted in `load.absent`."""
    results, alive = {}, []
    for contender in load.contenders:
        reason = ""
        try:
            inputs = contender.own_inputs()
            run_backward(contender, inputs, contender.forward(*inputs))  # compiles
            results[contender.name] = _inspect(contender)
        except Exception as error:
            if not contender.is_peer:
                raise
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if _on_all_ranks(not reason, _device(contender)):
            alive.append(contender)
        else:
            results.pop(contender.name, None)
            load.absent[contender.name] = reason[:200] or "raised on another rank"
        release()
    if all(_device(contender).type == "cpu" for contender in alive):
        prefault(2 * max((result.peak or 0 for result in results.values()), default=0))
    times: dict[str, list[tuple[float, float]]] = {c.name: [] for c in alive}
    for number in range(warmup + rounds):
        for contender in alive:
            found = _timed(contender)
            if number >= warmup:
                times[contender.name].append(found)
    for contender in alive:
        forward, backward = zip(*times[contender.name], strict=True)
        both = [sum(t) for t in times[contender.name]]
        result = results[contender.name]
        there = contender.differentiable
        result.forward, result.both = statistics.median(forward), statistics.median(both)
        result.backward = statistics.median(backward) if there else None
        result.spread = _quartile_range(both)
        result.least = min(forward), min(backward) if there else None, min(both)
    _floors(load, results)
    return [results[c.name] for c in alive]


def _floors(load: Workload, results: dict[str, Measurement]) -> None:
    floors = [c.name for c in load.contenders if c.is_floor and c.name in results]
    if not floors:
        return
    forward, backward, both = results[floors[0]].least
    for name, result in results.items():
        if name == floors[0]:
            continue
        result.floor["forward"] = forward / result.least[0]
        if result.least[1] is None:  # no backward: held to the forward's limit only
            result.floor["both"] = result.floor["forward"]
            continue
        result.floor["both"] = both / result.least[2]
        if backward:
            result.floor["backward"] = backward / result.least[1]


def _on_all_ranks(here: bool, device: torch.device) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return here
    agreed = torch.tensor(int(here), device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed)


def _timed(contender: Contender) -> tuple[float, float]:
    inputs = contender.own_inputs()
    mark = _Clock(_device(contender))
    out = contender.forward(*inputs)
    middle = mark.lap()
    run_backward(contender, inputs, out)
    return middle, mark.lap()


def run_backward(contender: Contender, inputs: Sequence[Tensor], out: Any) -> Sequence[Tensor]:
    """A contender's backward, its own or autograd's; the gradients of the latter."""
    if contender.backward is not None:
        contender.backward()
    elif contender.differentiable:
        return torch.autograd.grad(out, list(inputs), upstream(out))
    return ()


def _device(contender: Contender) -> torch.device:
    return contender.inputs[0].device if contender.inputs else torch.device("cpu")


class _Clock:
    """Seconds between laps, of the slowest rank; CUDA events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
        if self._cuda:
            torch.cuda.synchronize()
        self._start = self._now()

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self) -> float:
        now = self._now()
        if self._cuda:
            torch.cuda.synchronize()
            seconds = self._start.elapsed_time(now) / 1000.0
        else:
            seconds = now - self._start
        if dist.is_initialized() and dist.get_world_size() > 1:
            slowest = torch.tensor(seconds, device="cuda" if self._cuda else "cpu")
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            seconds = float(slowest)
        self._start = self._now()
        return seconds


def upstream(out: Tensor) -> Tensor:
    """A gradient that differs from row to row, so that no contender may assume one for all."""
    if out.dim() == 0:
        return torch.ones_like(out)
    ramp = torch.linspace(0.5, 1.5, out.numel(), device=out.device)
    return ramp.view(out.shape).to(out.dtype)


def _inspect(contender: Contender) -> Measurement:
    """One untimed run: peak memory, collectives, error."""
    result, inputs = Measurement(contender.name, 0.0, None, 0.0, 0.0), contender.own_inputs()
    with Peak(_device(contender)) as peak:
        out = contender.forward(*inputs)
        grads = run_backward(contender, inputs, out)
    if contender.is_floor:
        return result
    result.peak = peak.nbytes
    if contender.check is not None:
        result.error = contender.check(out.detach(), grads)
    if dist.is_initialized() and dist.get_world_size() > 1:
        inputs = contender.own_inputs()
        with CollectivesMade() as made:
            run_backward(contender, inputs, contender.forward(*inputs))
        result.collectives, result.sent = made.names, made.nbytes
    return result


def _quartile_range(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low
