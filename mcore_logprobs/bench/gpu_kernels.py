"""The Triton kernels against what the memory allows: `python -m mcore_logprobs.bench.gpu_kernels`.

Four tables, of which the last decides how `fused` goes forward:

1. row statistics and gradient on logits, for a few tile shapes, against a copy's bandwidth;
2. divergences between two sides of logits, likewise, and the eager ones;
3. the bare products of the fused path, and what the chunked forward costs beside them;
4. the chunked forward against `tiled_forward`, which never writes logits.

For tuning by hand; `python -m mcore_logprobs bench` compares with other libraries. Without a GPU it
runs in Triton's interpreter (TRITON_INTERPRET=1), for what its times are worth: nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mcore_logprobs.bench.tiled_forward import CONFIGS, TileConfig, tiled_row_stats
from mcore_logprobs.fused.token_stats import linear_token_stats
from mcore_logprobs.kernels import (
    triton_distill,
    triton_distill_grad,
    triton_grad,
    triton_rank,
    triton_stats,
)
from mcore_logprobs.kernels.distill import PairSpec, Side, finish_pair
from mcore_logprobs.kernels.products import add_product, product
from mcore_logprobs.kernels.stats import RowSpec
from mcore_logprobs.kernels.triton_common import Plan, launch_plan
from mcore_logprobs.logits.distill import KL_KINDS, vocab_parallel_kl_div

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def milliseconds(call: Callable[[], object], iterations: int) -> float:
    """Median time of a call, by events on a GPU; three calls first that do not count."""
    for _ in range(3 if DEVICE == "cuda" else 0):
        call()
    times = []
    for _ in range(iterations):
        if DEVICE == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def logits_table(rows: int, vocab: int, iterations: int) -> None:
    """Statistics, rank and gradient on bf16 logits."""
    logits = torch.randn(rows, vocab, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(logits)
    copy = milliseconds(lambda: out.copy_(logits), iterations)
    rate = 2 * logits.numel() * logits.element_size() / copy / 1e9
    print(f"\nlogits {rows} x {vocab} bfloat16: a copy takes {copy:.3f} ms, {rate:.2f} TB/s")
    print(f"{'kernel':44} {'ms':>9} {'of its floor':>13}")

    def line(name: str, floor: float, call: Callable[[], object]) -> None:
        spent = milliseconds(call, iterations)
        print(f"{name:44} {spent:9.3f} {floor / spent:13.1%}", flush=True)

    target = torch.randint(vocab, (rows,), device=DEVICE)
    threshold = logits[:, 0].float()
    plan = launch_plan(rows, vocab, logits)
    specs = {
        "logprob": RowSpec(vocab),
        "logprob, entropy": RowSpec(vocab, entropy=True),
        "logprob, entropy, rank": RowSpec(vocab, entropy=True, rank=True),
        "logprob, softcap": RowSpec(vocab, softcap=30.0),
    }
    for name, spec in specs.items():
        line(
            f"statistics: {name}",
            copy / 2,
            partial(triton_stats.row_stats, logits, target, spec, threshold=threshold),
        )
    line(
        "rank alone",
        copy / 2,
        lambda: triton_rank.count_higher(logits, target, threshold, valid=vocab),
    )
    for spec_name in ("logprob", "logprob, entropy"):
        for shape in _plans(plan):
            line(
                f"  {spec_name}: tile {shape.tile}, {shape.num_warps} warps",
                copy / 2,
                partial(triton_stats.row_stats, logits, target, specs[spec_name], plan=shape),
            )
    shift = torch.full((rows,), 12.0, device=DEVICE)
    coef = torch.randn(4, rows, device=DEVICE)
    for entropy in (False, True):
        spec = RowSpec(vocab, entropy=entropy)
        for tile, tiles, warps in ((4096, 4, 4), (4096, 1, 4), (2048, 8, 4), (8192, 2, 8)):
            line(
                f"gradient{', entropy' if entropy else ''}: {tiles} tiles of {tile}, {warps} warps",
                copy,
                partial(
                    triton_grad.grad_logits, logits, target, shift, coef, spec,
                    out=out, tile=tile, tiles=tiles, num_warps=warps,
                ),
            )  # fmt: skip
    line(
        "gradient in place",
        copy,
        lambda: triton_grad.grad_logits(logits, target, shift, coef, RowSpec(vocab), out=logits),
    )


def distill_table(rows: int, vocab: int, iterations: int) -> None:
    """Divergences of bf16 logits from a teacher's: each kernel, and both backends' whole calls."""
    student, teacher = (
        torch.randn(rows, vocab, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
    )
    out = torch.empty_like(student)
    copy = milliseconds(lambda: out.copy_(student), iterations)
    print(f"\ndistillation {rows} x {vocab} bfloat16: a copy takes {copy:.3f} ms")
    print(f"{'what':44} {'ms':>9} {'of its floor':>13}")
    # One read of both sides moves as many bytes as a copy; the gradient writes one side more.
    reads, gradient = copy, 1.5 * copy

    def line(name: str, floor: float, call: Callable[[], object]) -> None:
        spent = milliseconds(call, iterations)
        print(f"{name:44} {spent:9.3f} {floor / spent:13.1%}", flush=True)

    sides = Side(student, RowSpec(vocab)), Side(teacher, RowSpec(vocab))
    upstream = torch.randn(rows, device=DEVICE)
    leaf = student.detach().requires_grad_()

    def step(kind: str, backend: str) -> None:
        value = vocab_parallel_kl_div(leaf, teacher, kind=kind, backend=backend)
        torch.autograd.grad(value, leaf, upstream)

    for kind in KL_KINDS:
        spec = PairSpec(kind)
        done = finish_pair(triton_distill.pair_stats(*sides, spec), spec)
        norms = done.norm_s, done.norm_t
        line(f"{kind}: statistics", reads, partial(triton_distill.pair_stats, *sides, spec))
        floor = reads + gradient
        if kind == "jsd":
            floor += reads
            line("jsd: sums", reads, partial(triton_distill.jsd_sums, *sides, *norms, spec))
        write = partial(
            triton_distill_grad.pair_grad, *sides, *norms, done.value, upstream, spec, out=out
        )
        line(f"{kind}: gradient", gradient, write)
        for backend in ("triton", "torch"):
            line(f"{kind}: forward and backward, {backend}", floor, partial(step, kind, backend))


def _plans(plan: Plan) -> list[Plan]:
    """The plan with other tiles; one program a row, as for many rows."""
    shapes = [(256, 4), (512, 4), (512, 8), (1024, 4), (1024, 8), (2048, 8)]
    longest = 1 << 30
    return [
        replace(plan, splits=1, columns=longest, groups=groups, num_warps=warps)
        for groups, warps in shapes
    ]


def linear_table(rows: int, hidden: int, vocab: int, iterations: int) -> None:
    """Products of the fused path, chunk by chunk and whole, and the two ways forward."""
    x = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    weight = 0.02 * torch.randn(vocab, hidden, device=DEVICE, dtype=torch.bfloat16)
    target = torch.randint(vocab, (rows,), device=DEVICE)
    operations = 2 * rows * hidden * vocab
    print(f"\nfused {rows} x {hidden} x {vocab} bfloat16")
    print(f"{'what':56} {'ms':>9} {'TFLOP/s':>8} {'of bare product':>16}")
    bare = _bare_product(x, weight, iterations)

    def line(name: str, spent: float) -> None:
        rate = operations / spent / 1e9
        print(f"{name:56} {spent:9.3f} {rate:8.0f} {bare / spent:16.1%}", flush=True)

    line("bare product, bfloat16 result", bare)
    for tile, block in ((8192, 8192), (8192, 4096), (4096, 16384), (4096, 4096), (2048, 32768)):
        if tile <= rows and block <= vocab:
            for name, spent in _chunk_products(x, weight, tile, block, iterations).items():
                line(f"{name}, chunks of {tile} x {block}, float32", spent)
    spec = RowSpec(vocab, entropy=True)
    with torch.no_grad():
        for entropy in (False, True):
            line(
                f"forward by chunks{', entropy' if entropy else ''} (fused)",
                milliseconds(
                    partial(linear_token_stats, x, weight, target, entropy=entropy), iterations
                ),
            )
    # The interpreter knows no bfloat16 products, nor should it be asked for large tiles.
    configs = CONFIGS if DEVICE == "cuda" else (TileConfig(32, 32, 32, 4, 2),)
    operands = (x, weight) if DEVICE == "cuda" else (x.float(), weight.float())
    for config in configs:
        shape = f"{config.rows} x {config.columns} x {config.depth}"
        try:
            spent = milliseconds(
                partial(tiled_row_stats, *operands, target, spec, config), iterations
            )
        except Exception as error:  # a tile that does not fit this GPU's shared memory
            print(f"forward by tiles of {shape}: {type(error).__name__}: {error}")
            continue
        line(f"forward by tiles of {shape}, {config.num_stages} stages, entropy", spent)
    leaves = (x.requires_grad_(), weight.requires_grad_())

    def step() -> None:
        stats = linear_token_stats(*leaves, target)
        torch.autograd.grad(stats.logprobs.sum(), leaves)

    spent = milliseconds(step, max(1, iterations // 2))
    name, rate = "forward and backward (fused)", 4 * operations / spent / 1e9
    print(f"{name:56} {spent:9.3f} {rate:8.0f} {4 * bare / spent:16.1%} of four products")


def _bare_product(x: Tensor, weight: Tensor, iterations: int) -> float:
    """The whole product, in row pieces of a size that any GPU holds."""
    piece = min(x.shape[0], 8192)
    out = torch.empty(piece, weight.shape[0], device=DEVICE, dtype=x.dtype)
    with torch.no_grad():
        spent = milliseconds(lambda: torch.mm(x[:piece], weight.t(), out=out), iterations)
    return spent * x.shape[0] / piece


def _chunk_products(
    x: Tensor, weight: Tensor, tile: int, block: int, iterations: int
) -> dict[str, float]:
    """Each of the fused path's products at the chunk's shape, scaled to the whole."""
    scale = x.shape[0] / tile * weight.shape[0] / block
    rows, columns = x[:tile].detach(), weight[:block].detach()
    chunk = torch.empty(tile, block, device=DEVICE)
    grad = torch.randn(tile, block, device=DEVICE).to(x.dtype)
    hidden_grad = torch.zeros(tile, x.shape[1], device=DEVICE)
    weight_grad = torch.zeros(block, x.shape[1], device=DEVICE)
    calls: dict[str, Callable[[], object]] = {
        "logits": lambda: product(rows, columns.t(), chunk),
        "dHidden, added": lambda: add_product(grad, columns, hidden_grad),
        "dWeight, added": lambda: add_product(grad.t(), rows, weight_grad),
        "dWeight": lambda: product(grad.t(), rows, weight_grad),
    }
    return {name: scale * milliseconds(call, iterations) for name, call in calls.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--vocab", type=int, default=152064)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--iterations", type=int, default=10)
    args = parser.parse_args(argv)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU, interpreted"
    print(f"{time.strftime('%Y-%m-%d')}, {device}, torch {torch.__version__}")
    for rows in args.rows:
        logits_table(rows, args.vocab, args.iterations)
    for rows in args.rows:
        distill_table(rows, args.vocab, args.iterations)
    for rows in args.rows:
        linear_table(rows, args.hidden, args.vocab, args.iterations)
    return 0


if __name__ == "__main__":
    sys.exit(main())
