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
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from numbers import Real
from pathlib import Path
from typing import Any

from mcore_logprobs.checks import Check, check_positive
from mcore_logprobs.debug.audit_rank import Finding, Job, Order, check_call, find, run_rank
from mcore_logprobs.debug.oracle import BOUND, KINDS

_check_vocab = Check("an int >= 2", lambda v: v >= 2, int)
_check_timeout = Check("a number of seconds > 0, a day at most", lambda v: 0.0 < v <= 86400.0, Real)


@dataclass(frozen=True)
class AuditRow:
    """The worst of one tensor at one TP, over ranks, layouts and spreads of logits.

    Attributes:
        error: largest difference over the largest value; inf where it is not finite.
        where: rank, layout and spread of the worst.
        verdict: "ok", "WRONG" or "raises"; a row that "raises" is of every tensor of its TP.
        note: what the error looks like, or the text of the exception.
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
        bad = "WRONG" if any(row.verdict == "WRONG" for row in self.rows) else "raises"
        lines = [f"{self.name} as {self.kind}: {'right' if self.ok else bad}"]
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

    A layout that the function refuses (the call raises, for all logits, on every rank) is skipped,
    if it accepts another one. Any other exception is an error.

    Args:
        fn: a function that other processes can import (at a module's top), or "module:function", or
            "file.py:function".
        kind: one of `KINDS`.
        tp: how many ranks share the vocabulary; each must divide `vocab`. Repeated sizes run once.
        call: more arguments by name, which go before those found by name. Each must be a parameter
            of the function, unless that takes any keyword (`**kwargs`).
        vocab: columns of the whole logits, at least 2.
        bound: largest relative error that counts as right, for float32.
        timeout: seconds for all of it, a day at most. One TP gets two thirds of what is left, so
            that the sizes after one that hangs run too; then its ranks are killed.

    Raises:
        ValueError: an unknown kind, a TP that does not divide the vocabulary, a function that
            cannot be found or imported by another process, a name in `call` that it does not take,
            a vocab below 2, a bound or timeout that is no finite number above 0, a timeout above a
            day.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    check_positive("bound", bound)
    _check_timeout("timeout", timeout)
    _check_vocab("vocab", vocab)
    sizes = tuple(dict.fromkeys(tp))
    if not sizes or any(size < 1 or vocab % size for size in sizes):
        raise ValueError(f"tp: expected divisors of {vocab}, got {list(sizes)}")
    spec = fn if isinstance(fn, str) else _spec_of(fn)
    find(spec)  # here first: a name that is not there should not cost a launch
    check_call(spec, call or {})
    job = Job(spec, kind, tuple((call or {}).items()), vocab)
    found = _launch(job, sizes, timeout)
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


def _launch(job: Job, sizes: Sequence[int], timeout: float) -> list[Finding]:
    """Every rank's findings at every size; a rank that died or hung is a finding too."""
    from torch import multiprocessing

    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:  # what every rank imports, the server imports once
        heavy = ["torch.distributed", "mcore_logprobs.debug.audit_rank"]
        context.set_forkserver_preload([*heavy, *(["megatron.core"] if _has_megatron() else [])])
    deadline = time.monotonic() + timeout
    findings: list[Finding] = []
    for size in sizes:
        left = max(1.0, deadline - time.monotonic())
        seconds = left if size == sizes[-1] else left * 2 / 3
        with tempfile.TemporaryDirectory(prefix="audit-") as folder:
            here = _run_size(context, replace(job, size=size, seconds=seconds, folder=folder))
            started = any(Path(folder).glob("started*"))
        if not started and "exited" in here[0]["raised"]:
            why = (
                "no rank started: each imports the script again, so call audit under "
                'if __name__ == "__main__":'
            )
            missing = {"rank": 0, "raised": why, "order": [Order.DIED, 0.0]}
            return [*findings, *({"tp": other, **missing} for other in sizes)]
        findings += here
    return findings


def _run_size(context: Any, job: Job) -> list[Finding]:
    """The findings of one world, whose ranks are gone when this returns or raises."""
    ranks: list[BaseProcess] = []
    deadline = time.monotonic() + job.seconds
    waits = True
    try:
        for rank in range(job.size):
            args = (job, rank, list(sys.path))
            process = context.Process(target=run_rank, args=args, daemon=True)
            process.start()
            ranks.append(process)
        while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
            if waits and any(process.exitcode for process in ranks):
                waits, deadline = False, min(deadline, time.monotonic() + job.grace)
            time.sleep(0.01)
    finally:
        exits = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
    findings: list[Finding] = []
    hung = []
    for rank, status in enumerate(exits):
        answer = Path(job.folder, f"rank{rank}.json")
        if answer.exists():
            findings += json.loads(answer.read_text())
        elif status is None:
            hung.append(rank)
        else:
            how = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
            why, order = f"rank {rank} {how} before its answer", [Order.DIED, 0.0]
            findings.insert(0, {"tp": job.size, "rank": rank, "raised": why, "order": order})
    if hung:
        who = f"rank{'s' * (len(hung) > 1)} {', '.join(map(str, hung))}"
        why = f"{who} gave no answer within {job.seconds:.3g} s"
        order = [Order.HUNG, 0.0]
        findings.append({"tp": job.size, "rank": hung[0], "raised": why, "order": order})
    return findings


def _judge(
    spec: str, kind: str, found: list[Finding], bound: float, sizes: Sequence[int]
) -> AuditReport:
    rows = []
    names = [*KINDS[kind].parts, *(["d logits"] if KINDS[kind].differentiable else [])]
    for size in sizes:
        here = [f for f in found if f["tp"] == size]
        raised = min((f for f in here if "raised" in f), key=lambda f: f["order"], default=None)
        measured = [f for f in here if "tensor" in f]
        if raised is not None or not measured:
            first = raised or next(f for f in here if "refused" in f)
            why = first["raised"] if raised else first["refused"]
            rows.append(AuditRow(size, "all", float("inf"), "raises", _where(first), why))
            continue
        for name in names:
            worst = max((f for f in measured if f["tensor"] == name), key=lambda f: f["error"])
            fits = worst["error"] <= bound
            verdict = "ok" if fits else "WRONG"
            note = worst.get("note", "")
            rows.append(AuditRow(size, name, worst["error"], verdict, _where(worst), note))
    remarks = []
    refused = {f["layout"]: f["refused"] for f in found if "refused" in f}
    remarks += [f"does not take {layout}: {why}" for layout, why in refused.items()]
    if modified := dict.fromkeys(name for f in found for name in f.get("modified", ())):
        remarks.append(f"overwrites its {', '.join(modified)}")
    return AuditReport(spec, kind, tuple(rows), tuple(remarks))


def _where(found: Finding) -> str:
    if "layout" not in found:
        return ""
    return f"rank {found['rank']}, {found['layout']}, {found['spread']}"
