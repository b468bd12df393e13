"""How far the trainer's log-probabilities are from the rollout engine's, and why."""

from mcore_logprobs.debug.compare import (
    MismatchStats,
    RankHistogram,
    compare_logprobs,
    report,
)
from mcore_logprobs.debug.mismatch import explain_mismatch, load_mismatch_dump
from mcore_logprobs.debug.mismatch_result import MismatchCause, MismatchExplanation, Settings

__all__ = [
    "MismatchCause",
    "MismatchExplanation",
    "MismatchStats",
    "RankHistogram",
    "Settings",
    "compare_logprobs",
    "explain_mismatch",
    "load_mismatch_dump",
    "report",
]
