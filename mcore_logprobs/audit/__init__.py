"""Any vocab-parallel function against float64 (see command.py)."""

from mcore_logprobs.audit.command import audit, main
from mcore_logprobs.audit.kinds import KINDS
from mcore_logprobs.audit.report import AuditReport, AuditRow

__all__ = ["KINDS", "AuditReport", "AuditRow", "audit", "main"]
