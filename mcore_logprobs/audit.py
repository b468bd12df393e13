"""Any vocab-parallel function against float64: `audit`, and what it returns."""

from mcore_logprobs.debug.audit import AuditReport, AuditRow, audit
from mcore_logprobs.debug.oracle import KINDS

__all__ = ["KINDS", "AuditReport", "AuditRow", "audit"]
