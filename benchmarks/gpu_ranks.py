"""Two ranks on one GPU: values under tensor and sequence parallelism, streams, overlap.

gloo takes CUDA tensors of ranks that share a GPU; NCCL does where each rank has an NCCL_HOSTID of
its own. Values and the lifetime of memory across streams hold as with a GPU each, times do not.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_timing import GroupRun, die_with_parent
from mcore_logprobs.debug import oracle
from mcore_logprobs.debug.oracle import relative_error

# One machine, which may have no network and no name: its ranks meet on the loopback device.
ALONE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

_WORLD = 2
_TOLERANCE = 2e-5  # of float32 sums against float64, relative to the largest value


def ranks(run: GroupRun) -> None:
    """gloo, then NCCL where there is a GPU: each in processes of its own."""
    for backend in ("gloo", "nccl"):
        if backend == "nccl" and not (run.cuda and dist.is_nccl_available()):
            run.record("ranks", "left out", reason="NCCL needs a GPU", backend=backend)
            continue
        if run.share is None:
            run.case("ranks", lambda b=backend: _spawn(run, b), backend=backend)  # type: ignore[misc]


def _spawn(run: GroupRun, backend: str) -> dict[str, Any]:
    """Both ranks' processes, forked before this one touches the GPU."""
    if backend == "gloo" and run.cuda:  # ranks that wait for each other leave NCCL its time
        run = replace(run, until=run.until - run.left / 2)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=_rank, args=(run, backend, rank, store))
            for rank in range(_WORLD)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.1, run.left))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
    if late:
        raise TimeoutError(f"ranks {late} did not end; see log.txt")
    failed = [process.exitcode for process in processes if process.exitcode]
    if failed:
        raise RuntimeError(f"exit statuses {failed}; see log.txt")
    return {"ranks": _WORLD}


def _rank(run: GroupRun, backend: str, rank: int, store: str) -> None:
    status = 1
    die_with_parent()
    try:
        os.environ["NCCL_HOSTID"] = f"rank{rank}"  # NCCL refuses two ranks on a host's one GPU
        if run.cuda:
            torch.cuda.set_device(0)
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, _WORLD),
            rank=rank,
            world_size=_WORLD,
            timeout=datetime.timedelta(seconds=max(5.0, run.left)),
        )
        # Only the first speaks: the other's records would be the same.
        _cases(run if rank == 0 else replace(run, results=Path(os.devnull)), backend)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def _cases(run: GroupRun, backend: str) -> None:
    """The same calls on every rank, whatever one of them finds."""
    for sequence_parallel in (False, True):
        way = ", sequence parallel" if sequence_parallel else ""
        run.case(
            f"values{way}",
            lambda sp=sequence_parallel: {"error": _fused_error(run, sp)},  # type: ignore[misc]
            backend=backend,
            tp=_WORLD,
        )
        run.case(
            f"memory across streams{way}",
            lambda sp=sequence_parallel: {"calls": _same_again(run, sp)},  # type: ignore[misc]
            backend=backend,
            tp=_WORLD,
        )
    for name, error in (
        ("values, from logits", _logits_error),
        ("values, ranks", _rank_error),
        ("values, divergences", _divergence_error),
    ):
        run.case(name, lambda error=error: {"error": error(run)}, backend=backend, tp=_WORLD)  # type: ignore[misc]
    if backend == "nccl":
        run.case("overlap of sums and products", lambda: _overlap(run), backend=backend, tp=2)
    else:
        run.record(
            "overlap of sums and products",
            "left out",
            reason="gloo runs no kernels",
            backend=backend,
        )


def _problem(run: GroupRun) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole head, the same on every rank, and a gradient per token."""
    rows, width, vocab = (12, 16, 128) if run.small else (512, 256, 8192)
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator)
    target = torch.randint(vocab, (rows,), generator=generator)
    upstream = torch.randn(rows, generator=generator)
    return tuple(x.to(run.device) for x in (hidden, weight, target, upstream))  # type: ignore[return-value]


def _shard(x: Tensor) -> Tensor:
    return x.tensor_split(_WORLD)[dist.get_rank()].clone().requires_grad_()


def _fused(run: GroupRun, sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities, dHidden of this rank or all, dWeight of this rank), in several tiles."""
    import mcore_logprobs as m

    hidden, weight, target, upstream = _problem(run)
    h = _shard(hidden) if sequence_parallel else hidden.clone().requires_grad_()
    w = _shard(weight)
    stats = m.linear_token_stats(
        h,
        w,
        target,
        entropy=True,
        tp_group=dist.group.WORLD,
        sequence_parallel=sequence_parallel,
        chunk_size=max(4, hidden.shape[0] // 3),
    )
    assert stats.entropy is not None
    grads = torch.autograd.grad(stats.logprobs + 0.1 * stats.entropy, (h, w), upstream)
    return stats.logprobs.detach(), grads[0], grads[1]


def _gradients(value: Tensor, leaves: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """[the value, a gradient of each leaf]."""
    return [value.detach(), *torch.autograd.grad(value, leaves, upstream.to(value.dtype))]


def _part(x: Tensor, dim: int = 0) -> Tensor:
    """This rank's."""
    return x.tensor_split(_WORLD, dim)[dist.get_rank()].contiguous()


def _worst(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    worst = max(relative_error(a, b) for a, b in zip(found, wanted, strict=True))
    # Every rank learns of any rank's error, so that none goes on alone.
    shared = torch.tensor([worst], device=found[0].device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    if not float(shared) <= _TOLERANCE:
        raise AssertionError(f"error {float(shared):.1e}, expected at most {_TOLERANCE}")
    return float(shared)


def _fused_error(run: GroupRun, sequence_parallel: bool) -> float:
    hidden, weight, target, upstream = _problem(run)
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    z = leaves[0] @ leaves[1].t()
    value = oracle.logprobs(z, target) + 0.1 * oracle.entropy(z)
    _, d_hidden, d_weight = _gradients(value, leaves, upstream)
    wanted = [oracle.logprobs(z, target), d_hidden, _part(d_weight)]
    if sequence_parallel:
        wanted[1] = _part(d_hidden)
    return _worst(_fused(run, sequence_parallel), wanted)


def _logits_error(run: GroupRun) -> float:
    import mcore_logprobs as m

    hidden, weight, target, upstream = _problem(run)
    whole = hidden @ weight.t()
    z, exact = _part(whole, 1).requires_grad_(), whole.double().requires_grad_()
    own = m.vocab_parallel_logprobs(z, target, tp_group=dist.group.WORLD)
    wanted = _gradients(oracle.logprobs(exact, target), [exact], upstream)
    return _worst(_gradients(own, [z], upstream), [wanted[0], _part(wanted[1], 1)])


def _rank_error(run: GroupRun) -> float:
    """The targets' logits are on one rank; every rank counts what is above them."""
    import mcore_logprobs as m

    hidden, weight, target, _ = _problem(run)
    whole = hidden @ weight.t()
    given: Any = (_part(whole, 1), target)
    stats = m.vocab_parallel_token_stats(*given, target_rank=True, tp_group=dist.group.WORLD)
    alone = m.vocab_parallel_target_rank(*given, tp_group=dist.group.WORLD)
    assert stats.target_rank is not None
    return _worst([stats.target_rank, alone], [oracle.target_rank(whole, target)] * 2)


def _divergence_error(run: GroupRun) -> float:
    import mcore_logprobs as m

    hidden, weight, _, upstream = _problem(run)
    student, teacher = hidden @ weight.t(), hidden.flip(0) @ weight.t()
    formulas = {
        "forward": lambda s, t: oracle.kl(t, s),
        "reverse": oracle.kl,
        "jsd": oracle.jsd,
    }
    found: list[Tensor] = []
    wanted: list[Tensor] = []
    for kind, formula in formulas.items():
        s, exact = _part(student, 1).requires_grad_(), student.double().requires_grad_()
        options: dict[str, Any] = {"kind": kind, "temperature": 2.0, "tp_group": dist.group.WORLD}
        own = m.vocab_parallel_kl_div(s, _part(teacher, 1), **options)
        found += _gradients(own, [s], upstream)
        value, grad = _gradients(formula(exact / 2, teacher.double() / 2), [exact], upstream)
        wanted += [value, _part(grad, 1)]
    return _worst(found, wanted)


def _same_again(run: GroupRun, sequence_parallel: bool) -> int:
    """Calls whose memory is taken up again at once by others' must all give the first's bits."""
    first = _fused(run, sequence_parallel)
    calls = 3 if run.small else 20
    same = True
    for _ in range(calls):
        found = _fused(run, sequence_parallel)
        noise = [torch.full_like(x, torch.nan) for x in first for _ in range(4)]
        # The order in which a reduction adds may differ from call to call, the values hardly.
        same &= all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(found, first))  # noqa: B905
        del noise
    told = torch.tensor([float(same)], device=run.device)
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    if not bool(told):
        raise AssertionError("a later call gave other values")
    return calls


def _overlap(run: GroupRun) -> dict[str, Any]:
    """Which share of the sums' time on the device passes while a product runs."""
    from torch.profiler import ProfilerActivity, profile

    _fused(run, True)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        _fused(run, True)
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["nccl" in event.name.lower()].append(
                (event.time_range.start, event.time_range.end)
            )
    sums, products = spans[True], spans[False]
    total = sum(end - start for start, end in sums)
    hidden = sum(
        max(0.0, min(end, stop) - max(start, begin))
        for start, end in sums
        for begin, stop in products
    )
    return {"overlap": round(hidden / total, 4) if total else None, "sums_us": round(total, 1)}
