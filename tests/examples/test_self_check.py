"""The example's self-check: against transformers, and over TP ranks against one process."""

from __future__ import annotations

import math
import re
from typing import Any
from unittest import mock

import pytest
import torch
from rl import checks
from rl.config import SetupError
from rl.layout import on_main
from rl.rollout import Sample

from tests.examples.common import SMOLLM2, Ranks, trainer_of


def _real_weights(sections: dict) -> tuple[float, dict[str, float]]:
    with trainer_of(SMOLLM2, sections=sections) as trainer:

        def texts() -> list[Sample]:
            encode, shots = trainer.engine.tokenizer.encode_prompt, trainer.task.shots
            prompts = [encode(trainer.task.problem(i).question, shots) for i in range(2)]
            return [Sample(p, len(p), [], 0) for p in prompts]

        batch = trainer.batch(on_main(texts), all_tokens=True)
        return (
            checks.check_against_transformers(trainer, batch),
            checks.check_against_single_process(trainer, batch),
        )


@pytest.mark.night
def test_real_weights_against_transformers(ranks: Ranks) -> None:
    """SmolLM2-135M at TP 3: Megatron's log-probabilities are transformers' own."""
    sections = {"rollout": {"prompts": 1, "group_size": 2}, "grpo": {"micro_batch": 2}}
    for against_engine, against_one in ranks(3).run(_real_weights, sections, timeout=280):
        assert against_engine < 2e-4
        assert against_one["logprobs"] < 1e-5
        assert against_one["entropy"] < 1e-5
        assert against_one["target_rank"] == 0


def _wrong_weights() -> None:
    """A conversion mistake: gate and up exchanged in one layer of one rank."""
    with trainer_of(tp=2, cp=1) as trainer, torch.no_grad():
        if trainer.layout.rank == 1:
            fc1 = trainer.policy.gpt_model.decoder.layers[0].mlp.linear_fc1.weight
            fc1.copy_(torch.cat(fc1.chunk(2)[::-1]))
        checks.self_check(trainer)


def test_self_check_catches_a_conversion_mistake(ranks: Ranks) -> None:
    errors = ranks(2).run_expecting_errors(_wrong_weights, timeout=280)
    assert all("self-check failed" in str(error) for error in errors), errors


def _self_check_of(selfcheck: float, difference: float = 1e-6, **apart: float) -> None:
    """The self-check where the two comparisons measured this."""
    trainer = mock.MagicMock()
    trainer.config.selfcheck = selfcheck
    apart = {"logprobs": 1e-6, "entropy": 1e-6, "target_rank": 0.0, **apart}
    with (
        mock.patch.object(checks, "on_main"),
        mock.patch.object(checks, "check_against_transformers", return_value=difference),
        mock.patch.object(checks, "check_against_single_process", return_value=apart),
    ):
        checks.self_check(trainer)


@pytest.mark.parametrize("wrong", [float("nan"), 1.0])
@pytest.mark.parametrize("place", ["difference", "logprobs", "entropy", "target_rank"])
def test_self_check_holds_every_figure_to_a_bound(wrong: float, place: str) -> None:
    text = f"differ by {wrong:.3e} from" if place == "difference" else f"in {place} by {wrong:.3e}"
    _self_check_of(1e-3)
    with pytest.raises(SetupError, match=re.escape(text)):
        _self_check_of(1e-3, **{place: wrong})


@pytest.mark.parametrize("place", ["logprobs", "entropy", "target_rank"])
def test_a_half_precision_bound_is_for_transformers_alone(place: str) -> None:
    """TP and one process take the same bfloat16 logits, and both compute in float32."""
    _self_check_of(1.0, difference=0.9)
    with pytest.raises(SetupError, match=f"differs from one process in {place} by"):
        _self_check_of(1.0, difference=0.9, **{place: 1.0 if place == "target_rank" else 0.01})


def _apart_in_bfloat16() -> dict[str, float]:
    measured = checks.check_against_single_process
    found = []

    def keep(*given: Any) -> dict[str, float]:
        found.append(measured(*given))
        return found[-1]

    with (
        trainer_of(tp=2, cp=1, dtype="bfloat16") as trainer,
        mock.patch.object(checks, "check_against_single_process", keep),
    ):
        checks.self_check(trainer)
    return found[0]


def test_self_check_in_bfloat16(ranks: Ranks) -> None:
    """The half-precision model passes; what is measured leaves its bounds ample room."""
    for apart in ranks(2).run(_apart_in_bfloat16, timeout=280):
        assert apart["logprobs"] < 1e-5
        assert apart["entropy"] < 1e-5
        assert apart["target_rank"] == 0


def _with_a_nan_on_rank_1() -> dict[str, float]:
    rank = torch.distributed.get_rank()
    trainer = mock.MagicMock()
    trainer.layout.device, trainer.layout.world = torch.device("cpu"), 2
    trainer.run.return_value = [torch.tensor([0.0, torch.nan if rank == 1 else 0.0, 0.0])]
    with mock.patch.object(checks, "from_last_stage", lambda found, layout: found):
        return checks.check_against_single_process(trainer, mock.MagicMock())


def test_a_nan_of_another_rank_is_seen(ranks: Ranks) -> None:
    """gloo's maximum leaves it out."""
    for apart in ranks(2).run(_with_a_nan_on_rank_1):
        assert apart == {"logprobs": 0.0, "entropy": math.inf, "target_rank": 0.0}
