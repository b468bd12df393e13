"""The groups of `gpu_session`, the most valuable first.

A group's cases stand in order of value too, since its time may end. Shares are of a limit that was
measured in the same process: a copy, or the vendor's products.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_peers, gpu_ranks, gpu_table
from benchmarks.gpu_heads import launches, peers_logits, profile, tiles
from benchmarks.gpu_ranks import ALONE
from benchmarks.gpu_session import Group
from benchmarks.gpu_timing import GroupRun, die_with_parent, sizes
from benchmarks.time_model import SHAPES


def groups() -> list[Group]:
    """All groups, in the order in which they run: by part, and in a part by worth."""
    return [
        Group("environment", environment, 1.0, least=30.0, always=True),
        Group("compile", compile_all, 3.0, least=60.0, always=True, foreign=True),
        *(
            Group(f"head {rows} x {columns} x {hidden}", partial(gpu_table.own, number=n), 3.0)
            for n, (rows, columns, hidden) in enumerate(SHAPES)
        ),
        *(
            Group(
                f"peers: {name}",
                partial(gpu_table.peers, family=name),
                2.0,
                ALONE,
                part=2,
                foreign=True,
            )
            for name in gpu_peers.FAMILIES
        ),
        Group("kernels", kernels, 3.0, part=2),
        Group("peers-logits", peers_logits, 3.0, ALONE, part=2, foreign=True),
        Group("tests", kernel_tests, 6.0, least=40.0, part=3),
        Group("pairs", pairs, 3.0, least=30.0, part=3),
        Group("ranks", gpu_ranks.ranks, 4.0, ALONE, part=3),
        Group("launches", launches, 2.0, part=3),
        Group("ceilings", ceilings, 1.0, part=3),
        Group("tiles", tiles, 1.0, part=3),
        Group("profile", profile, 1.0, part=3),
    ]


# ---- environment, tests ------------------------------------------------------------------------


def environment(run: GroupRun) -> None:
    """The machine and its software, then `doctor`'s self-test on it."""

    def machine() -> dict[str, Any]:
        found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
        found["date"] = time.strftime("%Y-%m-%d %H:%M")
        import triton  # not before the session has chosen whether kernels are interpreted

        found |= {"cores": os.cpu_count(), "triton": triton.__version__}
        if run.cuda:
            card = torch.cuda.get_device_properties(0)
            found |= {"gpu": card.name, "memory_gib": round(card.total_memory / 2**30, 1)}
            found |= {"processors": card.multi_processor_count, "cuda": torch.version.cuda}
            found["capability"] = list(torch.cuda.get_device_capability())
            found |= _driver()
        else:
            found["gpu"] = None
        return found

    run.case("machine", machine)
    for name, why in run.absent.items():
        run.record(f"import {name}", "left out", reason=why)

    def self_tests() -> dict[str, Any]:
        """`doctor`'s of this device alone: its other checks compile for the CPU, for minutes."""
        from mcore_logprobs.doctor import self_test
        from mcore_logprobs.kernels.backend import explain

        found = self_test(run.device.type)
        wrong = [f"{test.name}: {test.error:.1e}" for test in found if not test.ok]
        if wrong:
            raise RuntimeError(f"doctor's self-test failed: {wrong}")
        return {"checks": len(found), "backends": [vars(c) for c in explain(run.device.type)]}

    run.case("self-test", self_tests)


def _driver() -> dict[str, Any]:
    """What nvidia-smi says of the card; all of it goes to the log."""
    if not shutil.which("nvidia-smi"):
        return {}
    print(subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True).stdout, flush=True)
    names = ("driver_version", "power.limit", "power.draw", "clocks.sm", "clocks.max.sm")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    values = done.stdout.strip().splitlines()[0].split(", ") if done.stdout.strip() else []
    return {name.replace(".", "_"): value for name, value in zip(names, values, strict=False)}


# Tests that are compiled for real where there is a GPU, beside tests/kernels/test_triton_*.
_GPU_TESTS = ("kernels/test_invariance.py", "test_no_sync.py")
_AHEAD_TESTS = ("test_triton_build.py",)  # need none, and take long


def kernel_tests(run: GroupRun) -> None:
    """The tests that compile for a GPU, where they are: a process per file, several at once."""
    root = Path(__file__).resolve().parents[1]
    folder = root / "tests"
    if not folder.is_dir():
        run.record("tests", "left out", reason=f"{folder} is not there")
        return
    if importlib.util.find_spec("pytest") is None:
        run.record("tests", "left out", reason="pytest is not installed here")
        return
    files = [
        file for file in folder.glob("kernels/test_triton_*.py") if file.name not in _AHEAD_TESTS
    ]
    files += [folder / name for name in _GPU_TESTS]
    files.sort(key=lambda file: -file.stat().st_size)  # the longest first
    if run.small:
        files = [folder / "kernels" / "test_products.py"]
    workers = max(1, min(8, (os.cpu_count() or 2) // 2, len(files)))
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def one(file: Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "pytest", "-v", "-o", "addopts=", "--tb=short", str(file)]
        command += ["-k", "not compiled"]  # for a CPU, by inductor
        limit = max(1.0, run.left)
        try:
            done = subprocess.run(
                command, cwd=root, env=env, text=True, timeout=limit, preexec_fn=die_with_parent,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            shown = (late.stdout or b"").decode(errors="replace")  # bytes even of a text pipe
            print(f"== {file.name}\n{shown}", flush=True)
            counts = ", ".join(f"{shown.count(w)} {w}" for w in ("PASSED", "FAILED", "ERROR"))
            raise RuntimeError(f"unfinished after {limit:.0f} s: {counts}") from None
        print(f"== {file.name}\n{done.stdout}", flush=True)
        last = done.stdout.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        if done.returncode:
            raise RuntimeError(f"{last[0]}; see log.txt")
        return {"summary": last[0].strip("= ")}

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda file: run.case(file.name, partial(one, file)), files))


# ---- compilation -------------------------------------------------------------------------------


def compile_all(run: GroupRun) -> None:
    """Each measuring group's calls once, spread over processes: Triton keeps what it compiles."""
    chosen: list[Callable[[GroupRun], None]] = [kernels, pairs, launches, tiles]
    if not run.small:
        own = [partial(gpu_table.own, number=n) for n in range(len(SHAPES))]
        peers = [partial(gpu_table.peers, family=name) for name in gpu_peers.FAMILIES]
        chosen = [*own, *peers, peers_logits, *chosen]
    count = 2 if run.small else max(1, min(8, (os.cpu_count() or 2) // 2))
    context = multiprocessing.get_context("fork")

    def worker(number: int) -> None:
        die_with_parent()
        mine = replace(run, share=(number, count))
        for group in chosen[:1] if run.small else chosen:
            try:
                group(mine)
            except Exception as error:
                print(f"worker {number}: {type(error).__name__}: {error}", flush=True)
            if run.cuda:
                torch.cuda.empty_cache()

    def compiled() -> dict[str, Any]:
        workers = [context.Process(target=worker, args=(n,)) for n in range(count)]
        for process in workers:
            process.start()
        for process in workers:
            process.join(max(0.1, run.left))
        late = [process for process in workers if process.is_alive()]
        for process in late:
            process.kill()
            process.join()  # the next group wants its memory
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
    """Statistics and gradient of logits, against a copy's bandwidth."""
    from mcore_logprobs.kernels import triton
    from mcore_logprobs.kernels.chunk import Chunk, Processing
    from mcore_logprobs.kernels.stats import GradientTerms, StatsSpec

    def gradient(chunk: Chunk, target: Tensor, spec: StatsSpec, out: Tensor) -> partial[None]:
        rows = len(target)
        shift = torch.full((rows,), 12.0, device=run.device)
        coef = run.randn(len(spec.coefficients), rows, dtype=torch.float32, std=0.1)
        column = target.unsqueeze(1)
        terms = GradientTerms(column, shift.unsqueeze(1), shift, coef, spec)
        return partial(triton.grad, chunk, terms, out=out)

    size = sizes(run)
    specs: dict[str, tuple[StatsSpec, float | None]] = {
        "log-probability": (StatsSpec(), None),
        "with entropy": (StatsSpec(entropy=True), None),
        "softcap": (StatsSpec(), 30.0),
        "all": (StatsSpec(entropy=True, rank=True, sum_pi_squared=True), None),
    }
    # Whole vocabularies, then shards of TP 8 and 4: widths off the kernels' tiles, one of them with
    # a true vocabulary off 16.
    shapes = [(rows, size.vocab, size.vocab) for rows in size.rows]
    for rows, width, valid in shapes + [(size.shard_rows, *shard) for shard in size.shards]:
        shape: dict[str, Any] = {"rows": rows, "vocab": width, "valid": valid}
        logits = run.randn(rows, width, std=4.0)
        out = torch.empty_like(logits)
        target, threshold = run.targets(rows, valid), logits[:, 0].float()
        copy = _copy_ms(run, logits, out, **shape)
        read = None if copy is None else copy / 2
        for name, (spec, softcap) in specs.items():
            chunk = Chunk(logits, valid, Processing.of(softcap=softcap))
            run.time(
                f"statistics, {name}",
                partial(triton.stats, chunk, target, spec, threshold=threshold),
                floor_ms=read,
                **shape,
            )
            if not spec.rank:
                call = gradient(chunk, target, spec, out)
                run.time(f"gradient, {name}", call, floor_ms=copy, **shape)
        del logits, out, chunk
    # A chunk of the fused path: float32 logits, a bfloat16 gradient.
    rows, block = size.rows[0], max(128, size.vocab // 24 // 128 * 128)
    exact = run.randn(rows, block, dtype=torch.float32, std=4.0)
    low = torch.empty(rows, block, dtype=torch.bfloat16, device=run.device)
    shape = {"rows": rows, "vocab": block}
    cast = run.time("floor: cast", lambda: low.copy_(exact), bytes_moved=6 * low.numel(), **shape)
    target, spec, chunk = run.targets(rows, block), StatsSpec(), Chunk(exact, block)
    call = gradient(chunk, target, spec, low)
    run.time("gradient, float32 to bfloat16", call, floor_ms=cast, **shape)
    run.time(
        "statistics, float32",
        partial(triton.stats, chunk, target, spec),
        floor_ms=None if cast is None else cast * 2 / 3,
        **shape,
    )


def pairs(run: GroupRun) -> None:
    """Divergences between two sides of logits: each kernel, and the whole calls."""
    first, *others = sizes(run).rows
    _pairs(run, first, eager=True)
    for rows in others if run.cuda else ():
        _pairs(run, rows, eager=False)


def _pairs(run: GroupRun, rows: int, *, eager: bool) -> None:
    import mcore_logprobs as m
    from mcore_logprobs.kernels import triton
    from mcore_logprobs.kernels.chunk import Chunk
    from mcore_logprobs.kernels.pairs import KINDS, PairSpec

    vocab = sizes(run).vocab
    student, teacher = (run.randn(rows, vocab, std=std) for std in (4.0, 3.0))
    sides = Chunk(student, vocab), Chunk(teacher, vocab)
    leaf, out = student.detach().requires_grad_(), torch.empty_like(student)
    softmax = torch.full((4, rows), 12.0, device=run.device)  # maxima, and logs of the sums
    upstream = torch.linspace(0.5, 1.5, rows, device=run.device)
    copy = _copy_ms(run, student, out, rows=rows, vocab=vocab)

    def time(name: str, call: Callable[[], object], copies: float, **more: Any) -> None:
        """A copy moves as much as a read of both sides; the gradient writes one side more."""
        floor = None if copy is None else copies * copy
        run.time(name, call, floor_ms=floor, rows=rows, vocab=vocab, **more)

    def both(kind: str, backend: str) -> None:
        if kind == "cross_entropy":
            value = m.vocab_parallel_soft_cross_entropy(leaf, teacher, backend=backend)
        else:
            value = m.vocab_parallel_kl_div(leaf, teacher, kind=kind, backend=backend)
        torch.autograd.grad(value, leaf, upstream)

    for kind in KINDS:
        spec = PairSpec(kind)
        time(f"{kind}: statistics", partial(triton.pair_stats, *sides, spec), 1)
        if kind == "jsd":
            time("jsd: sums", partial(triton.pair_sums, *sides, softmax, spec), 1)
        given = (*sides, softmax, softmax[0], upstream, spec)
        time(f"{kind}: gradient", partial(triton.pair_grad, *given, out=out), 1.5)
    for kind in KINDS:
        time(f"{kind}, both", partial(both, kind, "triton"), 2.5 + (kind == "jsd"), peak=True)

    ids = torch.arange(min(64, vocab), device=run.device).expand(rows, -1)
    values = run.randn(*ids.shape, dtype=torch.float32)

    def topk() -> None:
        own, *_ = m.vocab_parallel_topk_distill(leaf, values, ids, backend="triton")
        torch.autograd.grad(own, leaf, values)

    time("top-k, both", topk, 1.5, peak=True, k=ids.shape[1])
    if eager:
        time("forward, both, eager", partial(both, "forward", "torch"), 2.5, peak=True)
