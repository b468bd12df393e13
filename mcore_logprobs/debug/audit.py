"""`python -m mcore_logprobs audit MODULE:FUNCTION`: any vocab-parallel function against float64.

    python -m mcore_logprobs audit my_package.losses:token_logprobs --kind logprobs --tp 1,2,4

The function runs under gloo on CPU ranks, each with its columns of the same logits; values and
gradients (with an upstream that differs from token to token) are held to plain torch in float64 on
one process. The right forward value says nothing about the gradient: an all-reduce that autograd
does not know of leaves it wrong on some shards only.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_logprobs.checks import check_positive
from mcore_logprobs.debug.audit_rank import Job, check_call, find, run_rank
from mcore_logprobs.debug.oracle import BOUND, KINDS


@dataclass(frozen=True)
class AuditRow:
    """The worst of one tensor at one TP, over ranks, layouts and spreads of logits.

    Attributes:
        error: largest difference over the largest value; inf where it is not finite.
        where: rank, layout and spread of the worst.
        verdict: "ok", "WRONG", "raises" or "no gradient"; note: what the error looks like.
    """

    tp: int
    tensor: str
    error: float
    verdict: str
    where: str = ""
    note: str = ""


@dataclass(frozen=True)
class AuditReport:
    """What `audit` found. `ok` is whether every tensor is right; `str()` is the table."""

    name: str
    kind: str
    rows: tuple[AuditRow, ...]
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.verdict == "ok" for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{self.name} as {self.kind}: {'right' if self.ok else 'WRONG'}"]
        lines.append(f"  {'TP':>2}  {'tensor':26} {'worst error':>11}  verdict")
        for row in self.rows:
            more = "; ".join(part for part in (row.where, row.note) if part)
            lines.append(
                f"  {row.tp:>2}  {row.tensor:26} {row.error:>11.1e}  {row.verdict}"
                + (f" ({more})" if more and row.verdict != "ok" else "")
            )
        return "\n".join([*lines, *(f"  {remark}" for remark in self.remarks)])


def audit(
    fn: Callable[..., object] | str,
    *,
    kind: str = "logprobs",
    tp: Sequence[int] = (1, 2, 4),
    call: Mapping[str, object] | None = None,
    vocab: int = 48,
    bound: float = BOUND,
    timeout: float = 300.0,
) -> AuditReport:
    """Compare a vocab-parallel function with float64: values and gradients, on every shard.

    The function gets this rank's logits first, and everything else by its parameters' names:
    target or labels, teacher_logits, global_indices, group or tp_group, vocab_start_index and
    vocab_end_index, chunk_size. Parameters with defaults keep them. An autograd function is called
    by its `apply`. If Megatron can be imported, its parallel state is initialized.

    A layout that the function refuses on every rank is skipped, if it accepts another one.

    Args:
        fn: a function that other processes can import (at a module's top), or "module:function", or
            "file.py:function".
        kind: one of `KINDS`.
        tp: how many ranks share the vocabulary; each must divide `vocab`.
        call: more arguments by name, which go before those found by name. Each must be a parameter
            of the function, unless that takes any keyword (`**kwargs`).
        bound: largest relative error that counts as right, for float32.
        timeout: seconds for all of it; ranks that wait for each other longer are killed.

    Raises:
        ValueError: an unknown kind, a TP that does not divide the vocabulary, a function that
            cannot be found or imported by another process, a name in `call` that it does not take,
            a bound or timeout that is no finite number above 0.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    check_positive("bound", bound)
    check_positive("timeout", timeout)
    sizes = tuple(tp)
    if not sizes or any(size < 1 or vocab % size for size in sizes):
        raise ValueError(f"tp: expected divisors of {vocab}, got {list(sizes)}")
    spec = fn if isinstance(fn, str) else _spec_of(fn)
    find(spec)  # here first: a name that is not there should not cost a launch
    check_call(spec, call or {})
    job = Job(spec, kind, sizes, tuple((call or {}).items()), vocab, timeout)
    found = _launch(job)
    return _judge(spec, kind, found, bound, sizes)


def _spec_of(fn: object) -> str:
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


def _launch(job: Job) -> list[dict[str, object]]:
    """Every rank's findings; a rank that died or hung is a finding too."""
    from torch import multiprocessing

    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:  # what every rank imports, the server imports once
        heavy = ["torch.distributed", "mcore_logprobs.debug.audit_rank"]
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
        findings: list[dict[str, object]] = []
        for rank, process in enumerate(ranks):
            answer = Path(folder, f"rank{rank}.json")
            if process.is_alive():
                process.kill()
                process.join()
            if answer.exists():
                findings += json.loads(answer.read_text())
            else:
                error = f"rank {rank} gave no answer within {job.timeout:g} s"
                findings.append({"tp": max(job.sizes), "raised": error, "rank": rank})
        return findings


def _judge(
    spec: str, kind: str, found: list[dict[str, Any]], bound: float, sizes: Sequence[int]
) -> AuditReport:
    rows = []
    names = [*KINDS[kind].parts, *(["d logits"] if KINDS[kind].differentiable else [])]
    for size in sizes:
        here = [f for f in found if f["tp"] == size]
        raised = next((f for f in here if "raised" in f), None)
        measured = [f for f in here if "tensor" in f]
        if raised is not None or not measured:
            refusals = [f["refused"] for f in here if "refused" in f]
            why = raised["raised"].splitlines()[-1] if raised else refusals[0] if refusals else ""
            rows.append(AuditRow(size, "all", float("inf"), "raises", note=why))
            continue
        for name in names:
            worst = max((f for f in measured if f["tensor"] == name), key=lambda f: f["error"])
            fits = worst["error"] <= bound
            where = f"rank {worst['rank']}, {worst['layout']}, {worst['spread']}"
            verdict = "ok" if fits else "WRONG"
            rows.append(AuditRow(size, name, worst["error"], verdict, where, worst.get("note", "")))
    remarks = []
    refused = {f["layout"]: f["refused"] for f in found if "refused" in f}
    remarks += [f"does not take {layout}: {why}" for layout, why in refused.items()]
    if any(f.get("modified") for f in found):
        remarks.append("overwrites its logits")
    return AuditReport(spec, kind, tuple(rows), tuple(remarks))
