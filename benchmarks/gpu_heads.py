"""Groups of `gpu_session`: cross entropies of logits, a candidate, launches, a profile.

Shares are of the copy or of the product that is timed in turn with the case.
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


def peers_logits(run: GroupRun) -> None:
    """Other libraries' cross entropies, and ours, on the same logits: `bench logits`."""
    size = sizes(run)
    for rows in size.rows:
        shape = Shape(rows, size.vocab, size.hidden, torch.bfloat16, run.device, None)
        work = CASES["logits"](shape)
        fields: dict[str, Any] = {"rows": rows, "vocab": size.vocab}
        floor, *others = work.contenders
        for contender in others:
            if run.small and contender.name.startswith(_SLOW_TO_COMPILE):
                continue
            run.time(
                f"{contender.name}, both",
                partial(_step, contender),
                floor=partial(_step, floor),
                peak=True,
                foreign=contender.is_peer,
                **fields,
            )
        for name, reason in work.absent.items():
            run.record(name, "left out", reason=reason, **fields)
        work.contenders.clear()
    stop_megatron()


def _step(contender: Contender) -> None:
    run_backward(contender, contender.inputs, contender.forward(*contender.inputs))


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
    """One fused forward and backward under torch's profiler: in log.txt."""
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
