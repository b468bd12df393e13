"""Groups of `gpu_session` that run the users' cases, and those that start from hidden states.

Shares are of the bare products or of the copy that the case itself measures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import GroupRun, Sizes, graph_timed, sizes
from mcore_logprobs.bench.cases import CASES, Shape
from mcore_logprobs.bench.peers import stop_megatron
from mcore_logprobs.bench.runner import Contender, run_backward

# In the interpreter these take longer to compile than all the rest.
_SLOW_TO_COMPILE = ("torch.compile", "megatron fused")


def _case(run: GroupRun, case: str, *, peers: bool, ours: bool = True) -> None:
    """The contenders of a case of `bench`: forward and backward together, and peak memory."""
    size = sizes(run)
    for rows in size.rows:
        shape = Shape(rows, size.vocab, size.hidden, torch.bfloat16, run.device, None)
        work = CASES[case](shape)
        fields: dict[str, Any] = {"rows": rows, "vocab": size.vocab}
        fields |= {"hidden": size.hidden} if "hidden" in work.shape else {}
        chosen = [c for c in work.contenders if c.is_floor or (peers if c.is_peer else ours)]
        if run.small:
            chosen = [c for c in chosen if not c.name.startswith(_SLOW_TO_COMPILE)]
            chosen = chosen if peers else chosen[:2]
        floor = None
        for contender in chosen:
            name = contender.name if contender.is_floor else f"{contender.name}, both"
            more: dict[str, Any] = {} if contender.is_floor else {"floor_ms": floor, "peak": True}
            took = run.time(name, partial(_step, contender), **more, **fields)
            if contender.is_floor:
                floor = took
        for name, reason in work.absent.items() if peers else ():
            run.record(name, "left out", reason=reason, **fields)
        work.contenders.clear()
    stop_megatron()


def _step(contender: Contender) -> None:
    run_backward(contender, contender.forward(*contender.inputs))


def fused(run: GroupRun) -> None:
    """`linear_token_stats` against its four products."""
    _case(run, "linear", peers=False)


def policy(run: GroupRun) -> None:
    """`linear_policy_loss` against its three products."""
    _case(run, "policy", peers=False)


def peers_linear(run: GroupRun) -> None:
    """Other libraries' fused heads, on the same shapes."""
    _case(run, "linear", peers=True, ours=False)


def peers_logits(run: GroupRun) -> None:
    """Other libraries' cross entropies, and ours, on the same logits."""
    _case(run, "logits", peers=True)


# ---- a candidate ---------------------------------------------------------------------------------


def _head(run: GroupRun, rows: int, size: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    hidden = run.randn(rows, size.hidden).requires_grad_()
    weight = run.randn(size.vocab, size.hidden, std=2.0 * size.hidden**-0.5).requires_grad_()
    return hidden, weight, run.targets(rows, size.vocab)


def tiles(run: GroupRun) -> None:
    """The fused forward, and one that never writes logits, against one product of the vendor's."""
    import mcore_logprobs as m
    from benchmarks.tiled_forward import CONFIGS, TileConfig, tiled_row_stats

    size = sizes(run)
    hidden, weight, target = _head(run, size.rows[0], size)
    hidden, weight = hidden.detach(), weight.detach()
    shape: dict[str, Any] = {"rows": len(hidden), "vocab": size.vocab, "hidden": size.hidden}
    product = partial(torch.mm, hidden, weight.t())  # the vendor's, with a low-precision result
    operations = 2 * hidden.shape[0] * weight.numel()
    one = run.time("floor: one product", product, operations=operations, **shape)
    with torch.no_grad():
        forward = partial(m.linear_token_stats, hidden, weight, target, entropy=True)
        run.time("fused, forward", forward, floor_ms=one, **shape)
    configs: tuple[TileConfig, ...] = CONFIGS
    if not run.cuda:  # the interpreter multiplies no bfloat16
        hidden, weight, configs = hidden.float(), weight.float(), (TileConfig(32, 32, 32, 4, 2),)
    for config in configs:
        run.time(
            f"forward by tiles of {config.rows} x {config.columns}, {config.num_stages} stages",
            partial(tiled_row_stats, hidden, weight, target, size.vocab, config),
            floor_ms=one,
            **shape,
        )


# ---- launches, profile -------------------------------------------------------------------------


def _launched(call: Callable[[], object]) -> dict[str, Any]:
    """Kernels that one call launches."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    call()
    with record(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    kernels = (event.device_type == torch.autograd.DeviceType.CUDA for event in found.events())
    return {"kernels": sum(kernels)}


def launches(run: GroupRun) -> None:
    """A call so small that the host's time counts: host, kernels, and both as a CUDA graph."""
    import mcore_logprobs as m

    rows, width = sizes(run).launch_bound
    logits = run.randn(rows, width, std=4.0).requires_grad_()
    target = run.targets(rows, width)
    upstream = torch.linspace(0.5, 1.5, rows, device=run.device)

    def forward(entropy: bool = False) -> Tensor:
        found = m.vocab_parallel_token_stats(logits, target, entropy=entropy)
        return found.logprobs if found.entropy is None else found.logprobs + found.entropy

    def both(entropy: bool = False) -> None:
        torch.autograd.grad(forward(entropy), logits, upstream)

    for entropy in (False, True):
        suffix = ", entropy" if entropy else ""
        shape: dict[str, Any] = {"rows": rows, "vocab": width}
        for name, call in (("forward", forward), ("both", both)):
            way = partial(call, entropy)
            run.time(name + suffix, way, small_input=True, **shape)
            if run.cuda and run.share is None:
                run.case(f"{name}{suffix}, launches", partial(_launched, way), **shape)
        if not run.cuda:
            run.record(f"graph{suffix}", "left out", reason="CUDA graphs need a GPU")
            continue
        run.case(
            f"graph{suffix}",
            lambda e=entropy: {"kernel_ms": graph_timed(partial(both, e), seconds=0.5)},  # type: ignore[misc]
            **shape,
        )


def profile(run: GroupRun) -> None:
    """One fused forward and backward under torch's profiler: logs/profile.txt."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    import mcore_logprobs as m

    size = sizes(run)
    hidden, weight, target = _head(run, size.rows[0], size)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if run.cuda else [])

    def profiled() -> dict[str, Any]:
        def step() -> None:
            stats = m.linear_token_stats(hidden, weight, target, entropy=True)
            torch.autograd.grad((stats.logprobs + stats.entropy).sum(), (hidden, weight))  # type: ignore[operator]
            if run.cuda:
                torch.cuda.synchronize()

        step()
        with record(activities=activities) as found:
            step()
        table = found.key_averages()
        attribute = "self_device_time_total" if run.cuda else "self_cpu_time_total"
        print(table.table(sort_by=attribute, row_limit=40, max_name_column_width=90))
        top = sorted(table, key=lambda event: -getattr(event, attribute))[:8]
        return {"top_us": {event.key[:80]: round(getattr(event, attribute), 1) for event in top}}

    run.case("fused, both", profiled, rows=size.rows[0], vocab=size.vocab, hidden=size.hidden)
