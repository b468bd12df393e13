"""The command line of `python -m mcore_logprobs bench`. torch is imported after it is parsed."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_logprobs.commands import (
    Parser,
    comma_separated,
    dtype_name,
    positive,
    positive_number,
    why_not_drawn,
    why_not_written,
)

if TYPE_CHECKING:
    import torch

    from mcore_logprobs.bench.cases import Shape

# Hidden size and vocabulary, padded to a multiple of 128 x 8 as Megatron pads for TP 8.
MODELS = {
    "smollm2": (576, 49152),
    "llama3-8b": (4096, 129024),
    "llama3-70b": (8192, 129024),
    "qwen2.5-7b": (3584, 152576),
    "deepseek-v3": (7168, 129024),
}
Sizes = Mapping[str, Mapping[str, tuple[list[int], int, int]]]
# Run if no case is named: the ways to a log-probability and to a policy loss, about two minutes on
# two cores.
DEFAULT = ("logits", "linear", "policy")
# Of each case on a device: rows, vocabulary, hidden size. Those of DEFAULT have logits that are
# larger than the weight's gradient, so that the ways differ in memory.
SIZES: Sizes = {
    "cpu": {
        "logits": ([2048], 32768, 0),
        "linear": ([2048], 32768, 256),
        "linear_ops": ([256], 32768, 512),
        "policy": ([2048], 32768, 256),
        "keep": ([1024], 32768, 512),
        "invariant": ([256], 32768, 512),
        "rows": ([8192], 16384, 512),
    },
    "cuda": {
        "logits": ([8192, 32768], 152064, 0),
        "linear": ([8192, 32768], 152064, 4096),
        "linear_ops": ([8192], 152064, 4096),
        "policy": ([8192, 32768], 152064, 4096),
        "keep": ([8192], 152064, 4096),
        "invariant": ([8192], 152064, 4096),
        "rows": ([32768], 152064, 4096),
    },
}
_SWEEP = {
    "rows": [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072],
    "vocab": [32768, 65536, 131072, 262144],
}


def _parser(sizes: Sizes, default: Sequence[str], command: str, **options: object) -> Parser:
    parser = Parser(
        command,
        description="Time, memory, traffic and error of this library and its peers, on this "
        "machine. Under torchrun every rank is a tensor-parallel rank.",
        **options,
    )
    add = parser.add_argument
    every = [*sizes["cpu"]]
    usual = "all" if list(default) == every else ", ".join(default)
    add("what", nargs="?", choices=["all", *every], help=f"the case (default: {usual})")
    numbers = comma_separated(positive)
    add("--rows", type=numbers, help="one or more, separated by commas (default: the case's)")
    add("--vocab", type=numbers, help="columns in all; one or more (default: the case's)")
    add("--hidden", type=positive, help="the hidden size (default: the case's)")
    add("--model", choices=sorted(MODELS), help="hidden size and vocabulary of a model")
    add(
        "--dtype",
        type=comma_separated(dtype_name),
        default="bf16",
        help="bf16, fp16, fp32, or torch's names of them; one or more",
    )
    add("--sweep", choices=sorted(_SWEEP), help="how cost grows")
    add("--memory-gib", type=positive_number, help="leave out shapes whose logits are larger")
    add("--rounds", type=positive, default=5, help="timed calls of each contender, in turns")
    add("--warmup", type=positive, default=2, help="calls beforehand, in turns")
    add("--threads", type=positive, help="CPU threads per rank")
    add("--device", choices=["cpu", "cuda"], help="where to run; a GPU if there is one")
    add("--busy-ok", action="store_true", help="measure though other processes use the CPUs")
    add("--json", metavar="FILE", help="write everything as JSON")
    add("--plot", metavar="FILE.png", help="draw time and memory (needs matplotlib)")
    return parser


def main(
    argv: Sequence[str] | None = None,
    *,
    cases: str = "mcore_logprobs.bench.cases",
    sizes: Sizes = SIZES,
    default: Sequence[str] = DEFAULT,
    command: str = "bench",
    **options: object,
) -> int:
    """Measure the cases that the arguments ask for; an operation of this library that fails ends
    the run with its error.

    Args:
        argv: the arguments; None: the process's.
        cases: a module whose `CASES` makes the workload of each case.
        sizes: of its cases.
        default: the cases that run if none is named.
        command, options: of the `Parser`.
    """
    parser = _parser(sizes, default, command, **options)
    args = parser.parse(argv)
    if args.sweep and getattr(args, args.sweep):
        parser.error(f"--{args.sweep}: expected to be left out with --sweep {args.sweep}")
    for flag, file, why_not in (
        ("--json", args.json, why_not_written),
        ("--plot", args.plot, why_not_drawn),
    ):
        if file is not None and (why := why_not(file)):
            parser.error(f"{flag}: {why}")  # now, not after the measurements
    import torch
    import torch.distributed as dist

    from mcore_logprobs.bench import machine, peers, report
    from mcore_logprobs.bench.progress import Progress
    from mcore_logprobs.bench.runner import measure

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.threads:
        try:
            torch.set_num_threads(args.threads)
        except (RuntimeError, TypeError, ValueError) as error:  # beyond what torch can count to
            parser.error(f"--threads: {str(error).splitlines()[0]}")
    machine.keep_heap()
    started = _start_ranks(device)
    several = dist.is_initialized() and dist.get_world_size() > 1
    group = dist.group.WORLD if several else None
    first = not several or dist.get_rank() == 0
    points: list[report.Point] = []
    try:
        load = machine.busy() if device.type == "cpu" else ""
        if load and not args.busy_ok:
            parser.exit(2, f"bench: {load}; --busy-ok measures all the same\n" if first else "")
        heading = machine.describe(device, load)
        if first:
            print(f"{heading}\n{report.LEGEND}")
        make = importlib.import_module(cases).CASES
        named = list(sizes["cpu"]) if args.what == "all" else [args.what]
        every = [
            (what, shape)
            for what in (named if args.what else default)
            for shape in _shapes(what, sizes[device.type][what], args, device, group)
        ]
        if not every:
            parser.exit(2, "bench: no shape is left to measure\n" if first else "")
        progress = Progress([shape.rows * shape.vocab * (shape.hidden + 64) for _, shape in every])
        for what, shape in every:
            if first:
                progress.show()
            work = make[what](shape)
            results = measure(work, rounds=args.rounds, warmup=args.warmup)
            if first:
                progress.clear()
                report.print_table(work, results)
                progress.step()
            # The contenders hold the inputs: let them go before the next shape.
            work.contenders.clear()
            torch.compiler.reset()  # it compiles a formula for eight shapes, and then no more
            points.append((work, results))
    finally:
        peers.stop_megatron()
        if started:
            dist.destroy_process_group()
    if first and args.json:
        Path(args.json).write_text(report.as_json(points, heading))
    if first and args.plot:
        report.plot(points, args.plot, heading)
        print(f"\nplot: {args.plot}")
    return 0


def _start_ranks(device: torch.device) -> bool:
    """Join the other ranks if torchrun started this one; whether a group was made here."""
    import torch
    import torch.distributed as dist

    from mcore_logprobs.bench.machine import gpus_are_shared

    shared = False
    if device.type == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        # More ranks than GPUs share them, and NCCL refuses two ranks on one: gloo takes CUDA
        # tensors. Values and bytes hold then, times do not.
        shared = gpus_are_shared()
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return False
    dist.init_process_group("nccl" if device.type == "cuda" and not shared else "gloo")
    return True


def _shapes(
    what: str, default: tuple[list[int], int, int], args: Any, device: torch.device, group: Any
) -> list[Shape]:
    """The shapes of a case that the flags ask for; those that do not fit are left out, and said to
    be.
    """
    import torch

    from mcore_logprobs.bench.cases import SEGMENTS, Shape

    rows, padded, hidden = default
    if args.model:
        hidden, padded = MODELS[args.model]
    vocab = [padded]
    if args.sweep == "rows":
        rows = _SWEEP["rows"]
    elif args.sweep == "vocab":
        rows, vocab = rows[:1], _SWEEP["vocab"]
    rows, vocab = args.rows or rows, args.vocab or vocab
    size = 1 if group is None else group.size()
    parts = math.lcm(SEGMENTS, size) if what == "invariant" else size
    shapes = []
    for dtype in (getattr(torch, name) for name in args.dtype):
        for v in vocab:
            for n in rows:
                if v % parts:
                    raise SystemExit(f"--vocab: expected a multiple of {parts} for {what}, got {v}")
                shape = Shape(n, v, args.hidden or hidden, dtype, device, group)
                needed = n * shape.width * dtype.itemsize / 2**30
                if args.memory_gib and needed > args.memory_gib:
                    if group is None or group.rank() == 0:
                        print(f"left out: {n} x {v}: {needed:.1f} GiB of logits")
                    continue
                shapes.append(shape)
    return shapes


if __name__ == "__main__":
    sys.exit(main())
