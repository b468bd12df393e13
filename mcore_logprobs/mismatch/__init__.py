"""Why the trainer's log-probabilities differ from the rollout engine's (see explain.py)."""

from mcore_logprobs.mismatch.explain import explain_mismatch, load_mismatch_dump
from mcore_logprobs.mismatch.result import MismatchCause, MismatchExplanation
from mcore_logprobs.mismatch.settings import Settings

__all__ = [
    "MismatchCause",
    "MismatchExplanation",
    "Settings",
    "explain_mismatch",
    "load_mismatch_dump",
]
