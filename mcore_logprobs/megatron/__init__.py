"""The adapter for Megatron-Core: patch a model's head, or hand Megatron an output processor.

Importing it does not import Megatron; the first patch does.
"""

from mcore_logprobs.megatron.entry import logprob_model_hook, patched_model_provider
from mcore_logprobs.megatron.handle import PatchHandle
from mcore_logprobs.megatron.heads import HeadReport, find_language_models, head_report
from mcore_logprobs.megatron.output_processor import logprob_output_processor
from mcore_logprobs.megatron.patch import (
    patch_gpt_model,
    patch_model,
    unpatch_gpt_model,
    unpatch_model,
)
from mcore_logprobs.megatron.versions import has_output_processor, megatron_features

__all__ = [
    "HeadReport",
    "PatchHandle",
    "find_language_models",
    "has_output_processor",
    "head_report",
    "logprob_model_hook",
    "logprob_output_processor",
    "megatron_features",
    "patch_gpt_model",
    "patch_model",
    "patched_model_provider",
    "unpatch_gpt_model",
    "unpatch_model",
]
