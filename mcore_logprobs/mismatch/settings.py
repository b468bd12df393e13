"""What one side may have computed, and what cures it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Alignment = Literal["right", "labels late", "labels early", "values late", "values early"]


@dataclass(frozen=True)
class Settings:
    """What one side computed. The defaults are the right ones; see explain.py."""

    alignment: Alignment = "right"
    stale_weights: bool = False
    trainer_layers: bool = False
    engine_layers: bool = False
    padding_counted: bool = False
    bf16_logits: bool = False
    temperature_applied: bool = True
    filter_applied: bool = True

    def departures(self) -> list[str]:
        """Names of the settings that are not the right ones."""
        return [name for name in SETTINGS if getattr(self, name) != getattr(RIGHT, name)]


RIGHT = Settings()
SETTINGS = tuple(Settings.__dataclass_fields__)
# A cause's name, and the cure where the trainer and where the engine departs from the right setting
CAUSES: dict[str, tuple[str, str, str]] = {
    "alignment": (
        "shifted by one",
        "Megatron's labels are already shifted: label t is token t + 1, and the value at t is that "
        "token's. Shift once, before the split over CP (context_parallel_shift)",
        "the engine's value of token t + 1 belongs at position t: drop or add one at the start",
    ),
    "stale_weights": (
        "stale weights",
        "score with the weights that rolled out (before the update), as old_logprobs",
        "send the weights to the engine after every update and drop its prefix cache; or correct "
        "with truncated_importance_weights",
    ),
    "trainer_layers": (
        "rounding in the trainer's layers",
        "float32 layers, or correct with truncated_importance_weights",
        "none: the engine computes the trainer's hidden states, rounding and all",
    ),
    "engine_layers": (
        "rounding in the engine's layers",
        "none: the trainer computes the engine's hidden states, rounding and all",
        "correct with truncated_importance_weights; a float32 engine shows whether it is rounding",
    ),
    "padding_counted": (
        "padded vocabulary counted",
        "LogprobConfig(vocab_size=the true size), or vocab_size= of the function",
        "cut the padded rows off the weights that the engine loads",
    ),
    "bf16_logits": (
        "rounding of the head",
        "logits_dtype=torch.float32: float32 logits from bfloat16 weights, a chunk at a time",
        'a float32 head in the engine (vLLM: --hf-overrides \'{"head_dtype": "float32"}\'), or '
        "correct with truncated_importance_weights",
    ),
    "temperature_applied": (
        "temperature not applied",
        "LogprobConfig(temperature=the sampler's), or temperature= of the function",
        'log-probabilities after the temperature (vLLM: logprobs_mode="processed_logprobs")',
    ),
    "filter_applied": (
        "truncation mass",
        "the sampler's top_k and top_p in vocab_parallel_sampling_logprobs",
        'log-probabilities after the filters (vLLM: logprobs_mode="processed_logprobs")',
    ),
}
