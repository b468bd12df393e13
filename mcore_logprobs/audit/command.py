"""`python -m mcore_logprobs audit MODULE:FUNCTION`: any vocab-parallel function against float64.

    python -m mcore_logprobs audit my_package.losses:token_logprobs --kind logprobs --tp 1,2,4

The function runs under gloo on CPU ranks, each with its columns of the same logits; values and
gradients (with an upstream that differs from token to token) are held to plain torch in float64 on
one process. The right forward value says nothing about the gradient: an all-reduce that autograd
does not know of leaves it wrong on some shards only.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcore_logprobs.audit.kinds import KINDS
from mcore_logprobs.audit.rank import BOUND, Job, find, run_rank
from mcore_logprobs.audit.report import AuditReport, judge

__all__ = ["audit", "main"]


def audit(
    fn: Callable[..., Any] | str,
    *,
    kind: str = "logprobs",
    tp: Sequence[int] = (1, 2, 4),
    call: Mapping[str, Any] | None = None,
    vocab: int = 48,
    bound: float = BOUND,
    timeout: float = 300.0,
) -> AuditReport:
    """Hold a vocab-parallel function to float64: values and gradients, on every shard.

    The function is called with this rank's logits first and the rest by its parameters' names
    (target or labels, teacher_logits, global_indices, group or tp_group, vocab_start_index and
    vocab_end_index, chunk_size); parameters with defaults keep them. Where Megatron imports, its
    parallel state is initialised, for functions that take the group from there. An autograd
    function is called by its `apply`.

    A layout that the function refuses on every rank is left out, if it takes another one.

    Args:
        fn: a function that other processes can import (at a module's top), or "module:function", or
            "file.py:function".
        kind: one of `KINDS`.
        tp: how many ranks share the vocabulary; each must divide `vocab`.
        call: more arguments by name, which go before those found by name.
        bound: largest relative error that counts as right, for float32.
        timeout: seconds for all of it; ranks that wait for each other longer are killed.

    Raises:
        ValueError: an unknown kind, a TP that does not divide the vocabulary, a function that
            cannot be found or imported by another process.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    sizes = tuple(tp)
    if not sizes or any(size < 1 or vocab % size for size in sizes):
        raise ValueError(f"tp: expected divisors of {vocab}, got {list(sizes)}")
    spec = fn if isinstance(fn, str) else _spec_of(fn)
    find(spec)  # here first: a name that is not there should not cost a launch
    job = Job(spec, kind, sizes, tuple((call or {}).items()), vocab, timeout)
    found = _launch(job)
    return judge(spec, kind, found, bound, sizes)


def _spec_of(fn: Any) -> str:
    name, module = getattr(fn, "__qualname__", ""), getattr(fn, "__module__", "")
    owner = getattr(fn, "__self__", None)
    if inspect.isclass(owner) and getattr(fn, "__name__", "") == "apply":
        name, module = owner.__qualname__, owner.__module__  # SomeFunction.apply
    if not name or "<" in name or module == "__main__":
        raise ValueError(
            f"fn: expected a function at the top of an importable module, got {module}.{name}"
        )
    return f"{module}:{name}"


def _has_megatron() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except Exception:
        return False


def _launch(job: Job) -> list[dict[str, Any]]:
    """Every rank's findings; a rank that died or hung is a finding too."""
    from torch import multiprocessing

    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:  # what every rank imports, the server imports once
        heavy = ["torch.distributed", "mcore_logprobs.audit.rank"]
        context.set_forkserver_preload([*heavy, *(["megatron.core"] if _has_megatron() else [])])
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        ranks = [
            context.Process(target=run_rank, args=(rank, job, folder, list(sys.path)), daemon=True)
            for rank in range(max(job.sizes))
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + job.timeout
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        found: list[dict[str, Any]] = []
        for rank, process in enumerate(ranks):
            answer = Path(folder, f"rank{rank}.json")
            if process.is_alive():
                process.kill()
                process.join()
            if answer.exists():
                found += json.loads(answer.read_text())
            else:
                error = f"rank {rank} gave no answer within {job.timeout:g} s"
                found.append({"tp": max(job.sizes), "raised": error, "rank": rank})
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; 0 if every tensor is right, 1 if one is not."""
    parser = argparse.ArgumentParser(
        prog="python -m mcore_logprobs audit",
        description="Hold a vocab-parallel function to float64: values and gradients, every shard.",
    )
    parser.add_argument("function", help="MODULE:FUNCTION or FILE.py:FUNCTION")
    parser.add_argument("--kind", choices=list(KINDS), default="logprobs")
    parser.add_argument("--tp", type=_sizes, default="1,2,4", help="tensor-parallel sizes")
    parser.add_argument(
        "--call",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a further argument",
    )
    parser.add_argument("--vocab", type=int, default=48, help="columns in all")
    parser.add_argument("--bound", type=float, default=BOUND, help="largest relative error")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for all of it")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(argv)
    try:
        report = audit(
            options.function,
            kind=options.kind,
            tp=options.tp,
            call=dict(options.call),
            vocab=options.vocab,
            bound=options.bound,
            timeout=options.timeout,
        )
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    print(json.dumps(asdict(report) | {"ok": report.ok}, indent=2) if options.json else report)
    return 0 if report.ok else 1


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,2,4, got {text!r}") from error


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
