"""The command line of `python -m mcore_logprobs bench`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_logprobs.bench.cases import CASES, Shape
from mcore_logprobs.bench.peers import stop_megatron
from mcore_logprobs.bench.report import LEGEND, Point, as_json, machine, plot, print_table
from mcore_logprobs.bench.runner import measure

__all__ = ["main"]

# Commands with arguments of their own: modules beside this one.
_APART = ("launches", "ahead")
# Hidden size and vocabulary, padded to a multiple of 128 x 8 as Megatron pads for TP 8.
MODELS = {
    "smollm2": (576, 49152),
    "llama3-8b": (4096, 129024),
    "llama3-70b": (8192, 129024),
    "qwen2.5-7b": (3584, 152576),
    "deepseek-v3": (7168, 129024),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Defaults: (rows, vocab, hidden), small enough that all seven take minutes on two cores.
_CPU = {
    "logits": ([128, 256, 512], [65536], 0),
    "linear": ([128, 256, 512], [32768], 512),
    "linear_ops": ([256], [32768], 512),
    "policy": ([128, 256, 512], [32768], 512),
    "cp": ([16384], [0], 0),
    "sampling": ([64], [65536], 0),
    "topk": ([128], [65536], 0),
    "invariant": ([256], [32768], 512),
}
_CUDA = {
    "logits": ([8192, 32768], [152064], 0),
    "linear": ([8192, 32768], [152064], 4096),
    "linear_ops": ([8192], [152064], 4096),
    "policy": ([8192, 32768], [152064], 4096),
    "cp": ([131072], [0], 0),
    "sampling": ([1024], [152064], 0),
    "topk": ([4096], [152064], 0),
    "invariant": ([8192], [152064], 4096),
}
_SWEEP = {
    "rows": [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072],
    "vocab": [32768, 65536, 131072, 262144],
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mcore_logprobs bench",
        description="Time, memory, traffic and error of this library and its peers, on this "
        "machine. Under torchrun every rank is a tensor-parallel (cp: context-parallel) rank. "
        "Without a GPU, of what one would run: `bench launches --help`, `bench ahead --help`.",
    )
    parser.add_argument("what", nargs="?", default="all", choices=["all", *CASES])
    parser.add_argument("--rows", type=_numbers, help="one or more, separated by commas")
    parser.add_argument("--vocab", type=_numbers, help="whole vocabulary; one or more")
    parser.add_argument("--hidden", type=_positive)
    parser.add_argument("--model", choices=sorted(MODELS), help="hidden size and vocabulary of it")
    parser.add_argument("--dtype", type=_dtypes, default=None, help="bf16, fp16, fp32; one or more")
    parser.add_argument("--sweep", choices=sorted(_SWEEP), help="how cost grows")
    parser.add_argument("--memory-gib", type=float, help="leave out shapes whose logits are larger")
    parser.add_argument("--rounds", type=_positive, default=5)
    parser.add_argument("--warmup", type=_positive, default=2)
    parser.add_argument("--threads", type=_positive, help="CPU threads a rank")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE.png")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; an operation of this library that fails ends the run with its error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] and arguments[0] in _APART:
        module = importlib.import_module(f"mcore_logprobs.bench.{arguments[0]}")
        return int(module.main(arguments[1:]))
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    for file in (args.json, args.plot):
        if file and not Path(file).absolute().parent.is_dir():
            parser.error(f"{file}: no such directory")  # now, not after the measurements
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.threads:
        torch.set_num_threads(args.threads)
    started = _start_ranks(device)
    several = dist.is_initialized() and dist.get_world_size() > 1
    group = dist.group.WORLD if several else None
    first = not several or dist.get_rank() == 0
    if first:
        print(f"{machine()}\n{LEGEND}")
    points: list[Point] = []
    try:
        for what in CASES if args.what == "all" else [args.what]:
            for shape in _shapes(what, args, device, group):
                load = CASES[what](shape)
                results = measure(load, rounds=args.rounds, warmup=args.warmup)
                if first:
                    print_table(load, results)
                # The contenders hold the inputs: let them go before the next shape.
                load.contenders.clear()
                points.append((load, results))
    finally:
        stop_megatron()
        if started:
            dist.destroy_process_group()
    if first and args.json:
        with open(args.json, "w") as file:
            file.write(as_json(points))
    if first and args.plot:
        plot(points, args.plot)
        print(f"\nplot: {args.plot}")
    return 0


def _start_ranks(device: torch.device) -> bool:
    """Join the other ranks if torchrun started this one; whether a group was made here."""
    shared = False
    if device.type == "cuda":
        own = int(os.environ.get("LOCAL_RANK", 0))
        # More ranks than GPUs share them, and NCCL refuses two ranks on one: gloo takes CUDA
        # tensors. Values and bytes hold then, times do not.
        shared = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count()
        torch.cuda.set_device(own % torch.cuda.device_count())
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return False
    dist.init_process_group("nccl" if device.type == "cuda" and not shared else "gloo")
    return True


def _shapes(what: str, args: Any, device: torch.device, group: Any) -> list[Shape]:
    """The shapes that the flags ask for; those that do not fit are left out, and said to be."""
    rows, vocab, hidden = (_CPU if device.type == "cpu" else _CUDA)[what]
    if args.model:
        hidden, padded = MODELS[args.model]
        vocab = [padded]
    if args.sweep == "rows":
        rows = _SWEEP[args.sweep]
    elif args.sweep == "vocab":
        rows, vocab = rows[:1], _SWEEP[args.sweep]
    rows, vocab = args.rows or rows, args.vocab or vocab
    size = 1 if group is None else group.size()
    shapes = []
    for dtype in args.dtype or [torch.bfloat16]:
        for v in vocab:
            for n in rows:
                if v % size:
                    raise SystemExit(f"--vocab: {v} is not divisible by {size} ranks")
                shape = Shape(n, v, args.hidden or hidden, dtype, device, group)
                needed = n * shape.width * dtype.itemsize / 2**30
                if args.memory_gib and needed > args.memory_gib:
                    print(f"left out: {n} x {v}: {needed:.1f} GiB of logits")
                    continue
                shapes.append(shape)
    return shapes


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number > 0, got {text!r}")
    return value


def _dtypes(text: str) -> list[torch.dtype]:
    unknown = [part for part in text.split(",") if part not in DTYPES]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"expected some of {', '.join(DTYPES)}, got {unknown[0]!r}"
        )
    return [DTYPES[part] for part in text.split(",")]
