"""An audit's rows and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcore_logprobs.audit.kinds import KINDS

__all__ = ["AuditReport", "AuditRow", "judge"]


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


def judge(
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
