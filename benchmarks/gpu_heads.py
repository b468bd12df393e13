"""Groups of `gpu_session` that start from hidden states, and those beside other libraries.

Shares are of the vendor's products, measured in the same process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import GroupRun, Sizes, graph_timed, sizes

__all__ = ["fused", "launches", "peers_linear", "peers_logits", "policy", "profile", "tiles"]

Function = Callable[[Tensor, Tensor], Tensor]


def _head(run: GroupRun, rows: int, size: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    hidden = run.randn(rows, size.hidden).requires_grad_()
    weight = run.randn(size.vocab, size.hidden, std=2.0 * size.hidden**-0.5).requires_grad_()
    return hidden, weight, run.targets(rows, size.vocab)


def _one_product(run: GroupRun, x: Tensor, weight: Tensor, /, **shape: Any) -> float | None:
    """The vendor's product of the whole head, in row pieces, with a low-precision result."""
    rows = x.shape[0]
    piece = min(rows, 8192)
    out = torch.empty(piece, weight.shape[0], device=run.device, dtype=x.dtype)
    x, w = x.detach(), weight.detach().t()

    def product() -> None:
        for part in x.split(piece):
            torch.mm(part, w, out=out[: part.shape[0]])

    return run.time("floor: one product", product, operations=2 * rows * weight.numel(), **shape)


def _both(
    run: GroupRun, name: str, function: Function, leaves: tuple[Tensor, Tensor], **more: Any
) -> None:
    """Forward and backward of a function of (hidden, weight), with its peak memory."""
    upstream: list[Tensor] = []

    def step() -> None:
        value = function(*leaves)
        if not upstream or upstream[0].shape != value.shape:
            ramp = torch.linspace(0.5, 1.5, max(1, value.numel()), device=value.device)
            upstream[:] = [ramp.view(value.shape).to(value.dtype)]
        torch.autograd.grad(value, leaves, upstream[0])

    run.time(f"{name}, both", step, peak=True, **more)


def fused(run: GroupRun) -> None:
    """`linear_token_stats` against four of the vendor's products."""
    import mcore_logprobs as m

    size = sizes(run)
    for rows in size.rows:
        hidden, weight, target = _head(run, rows, size)
        shape: dict[str, Any] = {"rows": rows, "vocab": size.vocab, "hidden": size.hidden}
        one = _one_product(run, hidden, weight, **shape)
        four = None if one is None else 4 * one

        def stats(
            h: Tensor, w: Tensor, *, target: Tensor = target, entropy: bool = False
        ) -> Tensor:
            found = m.linear_token_stats(h, w, target, entropy=entropy)
            return found.logprobs if found.entropy is None else found.logprobs + found.entropy

        _both(run, "fused", stats, (hidden, weight), floor_ms=four, **shape)
        with torch.no_grad():
            run.time("fused, forward", partial(stats, hidden, weight), floor_ms=one, **shape)
        _both(
            run, "fused, entropy", partial(stats, entropy=True), (hidden, weight),
            floor_ms=four, **shape,
        )  # fmt: skip
        del hidden, weight


def policy(run: GroupRun) -> None:
    """`linear_policy_loss` against three of the vendor's products."""
    import mcore_logprobs as m
    from mcore_logprobs.losses import ClippedLoss

    size = sizes(run)
    for rows in size.rows:
        hidden, weight, target = _head(run, rows, size)
        old = torch.full((rows,), -11.0, device=run.device)
        advantages = run.randn(rows, dtype=torch.float32)
        shape: dict[str, Any] = {"rows": rows, "vocab": size.vocab, "hidden": size.hidden}
        one = _one_product(run, hidden, weight, **shape)

        def loss(
            h: Tensor,
            w: Tensor,
            *,
            target: Tensor = target,
            tensors: tuple[Tensor, Tensor] = (old, advantages),
        ) -> Tensor:
            fn = ClippedLoss(entropy_coef=0.01)
            value, _ = m.linear_policy_loss(
                h, w, target, fn, *tensors, denominator=target.numel(), entropy=True
            )
            return value

        three = None if one is None else 3 * one
        _both(run, "policy loss", loss, (hidden, weight), floor_ms=three, **shape)
        del hidden, weight


def tiles(run: GroupRun) -> None:
    """A forward that never writes logits, against the product that "fused, forward" stands by."""
    from benchmarks.tiled_forward import CONFIGS, TileConfig, tiled_row_stats

    size = sizes(run)
    hidden, weight, target = _head(run, size.rows[0], size)
    hidden, weight = hidden.detach(), weight.detach()
    shape: dict[str, Any] = {"rows": len(hidden), "vocab": size.vocab, "hidden": size.hidden}
    one = _one_product(run, hidden, weight, **shape)
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


# ---- peers -------------------------------------------------------------------------------------


def peers_linear(run: GroupRun) -> None:
    """Other libraries' fused heads, and holding the logits, on the same shapes."""
    import mcore_logprobs as m
    from mcore_logprobs.bench.peers import linear_peers

    size = sizes(run)
    for rows in size.rows:
        hidden, weight, target = _head(run, rows, size)
        shape: dict[str, Any] = {"rows": rows, "vocab": size.vocab, "hidden": size.hidden}

        def fused(h: Tensor, w: Tensor, *, target: Tensor = target) -> Tensor:
            return m.linear_token_stats(h, w, target).logprobs

        def held(h: Tensor, w: Tensor, *, target: Tensor = target) -> Tensor:
            return m.vocab_parallel_logprobs(h @ w.t(), target)

        found, absent = linear_peers(target)
        ways: dict[str, Function] = {"fused": fused, "logits held": held, **found}
        for name, function in ways.items():
            _both(run, name, function, (hidden, weight), **shape)
        for name, reason in absent.items():
            run.record(name, "left out", reason=reason, **shape)
        del hidden, weight


def peers_logits(run: GroupRun) -> None:
    """Other libraries' cross entropies on the same logits."""
    import mcore_logprobs as m
    from mcore_logprobs.bench.peers import logits_peers, stop_megatron

    size = sizes(run)
    for rows in size.rows:
        logits = run.randn(rows, size.vocab, std=4.0).requires_grad_()
        target = run.targets(rows, size.vocab)
        shape: dict[str, Any] = {"rows": rows, "vocab": size.vocab}
        found, absent = logits_peers(target)
        if run.small:  # compiling these takes longer than all the rest
            found = {k: v for k, v in found.items() if k not in ("torch.compile", "megatron fused")}

        def ours(z: Tensor, *, target: Tensor = target) -> Tensor:
            return m.vocab_parallel_logprobs(z, target)

        for name, function in {"logprobs": ours, **found}.items():
            _both(run, name, lambda z, _, f=function: f(z), (logits, logits), **shape)  # type: ignore[misc]
        for name, reason in absent.items():
            run.record(name, "left out", reason=reason, **shape)
        del logits
    stop_megatron()


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
