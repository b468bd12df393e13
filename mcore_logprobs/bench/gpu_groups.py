"""The groups of `gpu_session`, the most valuable first.

A group's cases stand in order of value too, since its time may end. Shares are of a limit that was
measured in the same process: a copy, or the vendor's products.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.bench import gpu_ranks
from mcore_logprobs.bench.gpu_session import Group
from mcore_logprobs.bench.gpu_timing import GroupRun, graph_timed

__all__ = ["CANDIDATES", "Candidate", "groups"]


@dataclass(frozen=True)
class Candidate:
    """Another way to run the statistics and gradient kernels, measured against the default.

    Attributes:
        env: environment variables, set before a kernel is imported.
        stats: fields of the statistics' launch plan that differ.
        grad: keywords of `triton_grad.grad_logits`.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    stats: Mapping[str, int] = field(default_factory=dict)
    grad: Mapping[str, int] = field(default_factory=dict)


CANDIDATES: dict[str, Candidate] = {
    "default": Candidate(),
    "tile 4K, 8 warps": Candidate(stats={"groups": 512, "num_warps": 8}, grad={"num_warps": 8}),
    "tile 8K": Candidate(
        stats={"groups": 1024, "num_warps": 4}, grad={"tile": 8192, "tiles": 2, "num_warps": 8}
    ),
    "tile 8K, 8 warps": Candidate(
        stats={"groups": 1024, "num_warps": 8}, grad={"tile": 2048, "tiles": 8}
    ),
    "tile 2K": Candidate(stats={"groups": 256, "num_warps": 4}, grad={"tile": 4096, "tiles": 1}),
    "tile 16K, 8 warps": Candidate(
        stats={"groups": 2048, "num_warps": 8}, grad={"tile": 8192, "tiles": 1, "num_warps": 8}
    ),
}


def groups() -> list[Group]:
    """All groups in order; a candidate with an environment of its own has its own process."""
    apart: dict[tuple[tuple[str, str], ...], dict[str, Candidate]] = {}
    for name, candidate in CANDIDATES.items():
        apart.setdefault(tuple(sorted(candidate.env.items())), {})[name] = candidate
    return [
        Group("environment", environment, 2.0),
        Group("compile", compile_all, 6.0),
        Group("kernels", kernels, 5.0),
        Group("fused", fused, 6.0),
        Group("policy", policy, 4.0),
        Group("tests", kernel_tests, 10.0),
        Group("peers-linear", peers_linear, 6.0),
        Group("peers-logits", peers_logits, 5.0),
        *(
            Group(f"candidates{place or ''}", partial(candidates, some=some), 4.0, dict(env))
            for place, (env, some) in enumerate(apart.items())
        ),
        Group("launches", launches, 2.0),
        Group("ranks", gpu_ranks.ranks, 5.0),
        Group("ceilings", ceilings, 2.0),
        Group("profile", profile, 2.0),
    ]


# ---- sizes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    rows: tuple[int, ...]
    vocab: int
    hidden: int
    launch_bound: tuple[int, int]


def sizes(run: GroupRun) -> Sizes:
    if run.small:
        return Sizes((4, 6), 512, 32, (4, 256))
    rows = (8192,) if run.share is not None else (8192, 32768)
    return Sizes(rows, 152064, 4096, (1024, 19008))


# ---- environment, tests ------------------------------------------------------------------------


def environment(run: GroupRun) -> None:
    """The machine and its software, then `doctor`'s self-test."""

    def machine() -> dict[str, Any]:
        found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
        found["date"] = time.strftime("%Y-%m-%d %H:%M")
        found["cores"] = os.cpu_count()
        if run.cuda:
            card = torch.cuda.get_device_properties(0)
            found |= {"gpu": card.name, "memory_gib": round(card.total_memory / 2**30, 1)}
            found |= {"processors": card.multi_processor_count, "cuda": torch.version.cuda}
            found["capability"] = list(torch.cuda.get_device_capability())
            print(subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True).stdout)
        else:
            found["gpu"] = None
        return found

    run.case("machine", machine)

    def doctor() -> dict[str, Any]:
        from mcore_logprobs.doctor import report

        found = report()
        if not found["ok"]:
            raise RuntimeError(f"doctor's self-test failed: {found.get('self_test')}")
        return {"packages": found.get("packages"), "backends": found.get("backends")}

    run.case("doctor", doctor)


def kernel_tests(run: GroupRun) -> None:
    """tests/kernels, where the folder is there: a process a file, several at once."""
    root = Path(__file__).resolve().parents[2]
    folder = root / "tests" / "kernels"
    files = sorted(folder.glob("test_*.py"))
    if not files:
        run.record("tests", "left out", reason=f"{folder} is not there")
        return
    if run.small:
        files = [folder / "test_products.py"]
    workers = max(1, min(8, (os.cpu_count() or 2) // 2, len(files)))
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def one(file: Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "--tb=short", str(file)]
        done = subprocess.run(
            command,
            cwd=root,
            env=env,
            capture_output=True,
            text=True,
            timeout=max(1.0, run.left),
        )
        print(f"== {file.name}\n{done.stdout}{done.stderr}", flush=True)
        last = done.stdout.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        if done.returncode:
            raise RuntimeError(f"{last[0]}; see logs/tests.txt")
        return {"summary": last[0].strip("= ")}

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda file: run.case(file.name, partial(one, file)), files))


# ---- compilation -------------------------------------------------------------------------------


def compile_all(run: GroupRun) -> None:
    """Each measuring group's calls once, spread over processes: Triton keeps what it compiles."""
    chosen: list[Callable[[GroupRun], None]] = [
        kernels,
        policy,
        fused,
        partial(candidates, some=CANDIDATES),
        launches,
    ]
    chosen += [] if run.small else [peers_linear, peers_logits]
    count = 2 if run.small else max(1, min(8, (os.cpu_count() or 2) // 2))
    context = multiprocessing.get_context("fork")

    def worker(number: int) -> None:
        mine = replace(run, share=(number, count))
        for group in chosen[:1] if run.small else chosen:
            try:
                group(mine)
            except Exception as error:
                print(f"worker {number}: {type(error).__name__}: {error}", flush=True)

    def compiled() -> dict[str, Any]:
        workers = [context.Process(target=worker, args=(n,)) for n in range(count)]
        for process in workers:
            process.start()
        for process in workers:
            process.join(max(0.1, run.left))
        late = [process for process in workers if process.is_alive()]
        for process in late:
            process.kill()
        return {"processes": count, "unfinished": len(late)}

    run.case("compile", compiled)


# ---- kernels -----------------------------------------------------------------------------------


def _copy_ms(run: GroupRun, source: Tensor, out: Tensor, **shape: Any) -> float | None:
    return run.time(
        "floor: copy", lambda: out.copy_(source), bytes_moved=2 * source.nbytes, **shape
    )


def ceilings(run: GroupRun) -> None:
    """What the machine can do: a copy's bandwidth, the vendor's products at the fused shapes."""
    size = sizes(run)
    for rows in size.rows:
        source = run.randn(rows, size.vocab)
        _copy_ms(run, source, torch.empty_like(source), rows=rows, vocab=size.vocab)
        del source
    rows, block = size.rows[0], max(128, size.vocab // 24 // 128 * 128)
    x, w = run.randn(rows, size.hidden), run.randn(block, size.hidden)
    dz = run.randn(rows, block)
    wide: dict[str, Any] = {"dtype": torch.float32, "device": run.device}
    shape: dict[str, Any] = {"rows": rows, "columns": block, "hidden": size.hidden}
    operations = 2 * rows * block * size.hidden
    from mcore_logprobs.kernels.products import add_product, product, rounded_product

    logits, d_hidden = torch.empty(rows, block, **wide), torch.zeros(rows, size.hidden, **wide)
    d_weight = torch.zeros(block, size.hidden, **wide)
    low = torch.empty(block, size.hidden, dtype=x.dtype, device=run.device)
    for name, call in {
        "product: logits, bfloat16": lambda: x @ w.t(),
        "product: logits, float32": lambda: product(x, w.t(), logits),
        "product: dHidden added": lambda: add_product(dz, w, d_hidden),
        "product: dWeight added": lambda: add_product(dz.t(), x, d_weight),
        "product: dWeight, float32": lambda: product(dz.t(), x, d_weight),
        "product: dWeight, bfloat16": lambda: rounded_product(dz.t(), x, low),
    }.items():
        run.time(name, call, operations=operations, **shape)


def kernels(run: GroupRun) -> None:
    """Statistics, rank and gradient of logits, against a copy's bandwidth."""
    from mcore_logprobs.kernels import triton_grad, triton_rank, triton_stats
    from mcore_logprobs.kernels.stats import RowSpec

    size = sizes(run)
    vocab = size.vocab
    specs = {
        "log-probability": RowSpec(vocab),
        "with entropy": RowSpec(vocab, entropy=True),
        "all": RowSpec(vocab, entropy=True, rank=True, sum_pi_squared=True),
        "softcap": RowSpec(vocab, softcap=30.0),
    }
    for rows in size.rows:
        shape: dict[str, Any] = {"rows": rows, "vocab": vocab}
        logits = run.randn(rows, vocab, std=4.0)
        out = torch.empty_like(logits)
        target, threshold = run.targets(rows, vocab), logits[:, 0].float()
        copy = _copy_ms(run, logits, out, **shape)
        read = None if copy is None else copy / 2
        shift = torch.full((rows,), 12.0, device=run.device)
        for name in ("log-probability", "with entropy"):
            spec = specs[name]
            run.time(
                f"statistics, {name}",
                partial(triton_stats.row_stats, logits, target, spec, threshold=threshold),
                floor_ms=read,
                **shape,
            )
            coef = run.randn(len(spec.coefficients), rows, dtype=torch.float32, std=0.1)
            run.time(
                f"gradient, {name}",
                partial(triton_grad.grad_logits, logits, target, shift, coef, spec, out=out),
                floor_ms=copy,
                **shape,
            )
        for name in ("all", "softcap"):
            run.time(
                f"statistics, {name}",
                partial(triton_stats.row_stats, logits, target, specs[name], threshold=threshold),
                floor_ms=read,
                **shape,
            )
        coef = run.randn(len(specs["softcap"].coefficients), rows, dtype=torch.float32, std=0.1)
        run.time(
            "gradient, softcap",
            partial(
                triton_grad.grad_logits, logits, target, shift, coef, specs["softcap"], out=out
            ),
            floor_ms=copy,
            **shape,
        )
        run.time(
            "rank alone",
            partial(triton_rank.count_higher, logits, target, threshold, valid=vocab),
            floor_ms=read,
            **shape,
        )
        del logits, out
    # A chunk of the fused path: float32 logits, a bfloat16 gradient.
    rows, block = size.rows[0], max(128, vocab // 24 // 128 * 128)
    chunk = run.randn(rows, block, dtype=torch.float32, std=4.0)
    low = torch.empty(rows, block, dtype=torch.bfloat16, device=run.device)
    shape = {"rows": rows, "vocab": block}
    cast = run.time("floor: cast", lambda: low.copy_(chunk), bytes_moved=6 * low.numel(), **shape)
    target, spec = run.targets(rows, block), RowSpec(block)
    shift = torch.full((rows,), 12.0, device=run.device)
    coef = run.randn(len(spec.coefficients), rows, dtype=torch.float32, std=0.1)
    run.time(
        "gradient, float32 to bfloat16",
        partial(triton_grad.grad_logits, chunk, target, shift, coef, spec, out=low),
        floor_ms=cast,
        **shape,
    )
    run.time(
        "statistics, float32",
        partial(triton_stats.row_stats, chunk, target, spec),
        floor_ms=None if cast is None else cast * 2 / 3,
        **shape,
    )


def candidates(run: GroupRun, some: Mapping[str, Candidate]) -> None:
    """The same kernels, launched otherwise."""
    from mcore_logprobs.kernels import triton_grad, triton_stats
    from mcore_logprobs.kernels.stats import RowSpec
    from mcore_logprobs.kernels.triton_common import launch_plan

    size = sizes(run)
    rows, vocab = size.rows[0], size.vocab
    logits = run.randn(rows, vocab, std=4.0)
    out, target = torch.empty_like(logits), run.targets(rows, vocab)
    shift = torch.full((rows,), 12.0, device=run.device)
    copy = _copy_ms(run, logits, out, rows=rows, vocab=vocab)
    base = launch_plan(rows, vocab, logits)
    chosen = dict(list(some.items())[:2]) if run.small else some
    for name, candidate in chosen.items():
        plan = base
        if candidate.stats:
            plan = replace(base, splits=1, columns=1 << 30, **candidate.stats)
        for what, entropy in (("log-probability", False), ("with entropy", True)):
            spec = RowSpec(vocab, entropy=entropy)
            coef = run.randn(len(spec.coefficients), rows, dtype=torch.float32, std=0.1)
            fields: dict[str, Any] = {
                "candidate": name,
                "rows": rows,
                "vocab": vocab,
                "env": dict(candidate.env),
            }
            run.time(
                f"statistics, {what}",
                partial(triton_stats.row_stats, logits, target, spec, plan=plan),
                floor_ms=None if copy is None else copy / 2,
                **fields,
            )
            run.time(
                f"gradient, {what}",
                partial(
                    triton_grad.grad_logits, logits, target, shift, coef, spec,
                    out=out, **dict[str, Any](candidate.grad),
                ),
                floor_ms=copy,
                **fields,
            )  # fmt: skip


# ---- from hidden states ------------------------------------------------------------------------

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


def _launched(call: Callable[[], object], run: GroupRun) -> int | None:
    """Kernels that one call launches; None without a GPU."""
    if not run.cuda:
        return None
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    call()
    with record(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in found.events())


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
            run.time(name + suffix, way, small_input=True, kernels=_launched(way, run), **shape)
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
    by = "self_cuda_time_total" if run.cuda else "self_cpu_time_total"

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
        print(table.table(sort_by=by, row_limit=40, max_name_column_width=90))
        attribute = "self_device_time_total" if run.cuda else "self_cpu_time_total"
        top = sorted(table, key=lambda event: -getattr(event, attribute))[:8]
        return {"top_us": {event.key[:80]: round(getattr(event, attribute), 1) for event in top}}

    run.case("fused, both", profiled, rows=size.rows[0], vocab=size.vocab, hidden=size.hidden)
