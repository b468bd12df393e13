"""A `LogprobConfig` from the settings that users of a framework have already.

actor = cfg.actor_rollout_ref.actor
temperature = cfg.actor_rollout_ref.rollout.temperature
config = logprob_config(cfg.actor_rollout_ref.model, actor, temperature=temperature)
"""

from __future__ import annotations

import logging
from typing import Any

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.dropin._common import setting, size_or_none

__all__ = ["SETTINGS", "logprob_config"]

logger = logging.getLogger("mcore_logprobs")

# Their name -> (our field, which frameworks spell it so).
SETTINGS = {
    "use_fused_kernels": ("fused", "verl"),
    "use_fused_linear_logprobs": ("fused", "NeMo-RL"),
    "fused_lm_head_logprob": ("fused", "SkyRL"),
    "fused_linear_logprobs_chunk_size": ("chunk_size", "NeMo-RL, fused path"),
    "logprob_chunk_size": ("chunk_size", "NeMo-RL, logits path"),
    "logprobs_chunk_size": ("chunk_size", "SkyRL"),
    "log_probs_chunk_size": ("chunk_size", "slime; -1 is off"),
    "temperature": ("temperature", "verl, AReaL, SkyRL"),
    "rollout_temperature": ("temperature", "slime"),
    "calculate_entropy": ("entropy", "verl"),
    "calculate_sum_pi_squared": ("sum_pi_squared", "verl"),
    "top_k": ("top_k", "NeMo-RL, verl; -1 is off"),
    "top_p": ("top_p", "NeMo-RL, verl"),
    "min_p": ("min_p", "ms-swift, TRL"),
}


def logprob_config(*nodes: object, **fields: Any) -> LogprobConfig:
    """Reads the names of `SETTINGS` from configuration nodes: the first node that has one decides.

    Frameworks may have a temperature only among the sampler's settings. If there is none, it is
    1.0, and a log line says so.

    Args:
        nodes: mappings, OmegaConf nodes, dataclasses or parsed arguments. None in a node counts as
            not there, as does -1 for a size.
        fields: `LogprobConfig` fields, which go before the nodes'.

    Raises:
        ValueError: a value that its field does not take; a node that is text or a sequence.
        TypeError: a name among `fields` that no field has, with the nearest one.
    """
    for node in nodes:
        if isinstance(node, (str, bytes, list, tuple)):
            raise ValueError(
                "logprob_config: expected configuration nodes with names, got "
                f"{type(node).__name__} {node!r}"
            )
    found = dict(fields)
    for node in nodes:
        for theirs, (field, _) in SETTINGS.items():
            value = setting(node, theirs)
            if field in ("chunk_size", "top_k") and isinstance(value, int):
                value = size_or_none(value)
            if value is not None:
                found.setdefault(field, value)
    if "temperature" not in found:
        logger.warning(
            "logprob_config: expected the sampler's temperature in a node or as temperature=, got "
            "none: it is 1.0"
        )
    return LogprobConfig(**found)
