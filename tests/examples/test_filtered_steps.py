"""Steps of the example under filters: replayed records, and the trainer's own filter that moves."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rl.data import IGNORE, Batch
from rl_step import GrpoTrainer

from tests.examples.common import Ranks, trainer_of, without_filter


def _filtered_steps(
    kept_tokens: str, kl_coef: float, steps: int, ignore: bool = False, **filters: float
) -> list[dict[str, Any]]:
    """Steps under a filter with transformers, whose record of kept ids is replayed or not."""
    sections = {
        "rollout": {
            "prompts": 4,
            "group_size": 4,
            "temperature": 0.8,
            **filters,
            "kept_tokens": kept_tokens,
            "importance_cap": 2.0,
        },
        # One update: after it the trainer's own filter moves with the weights, the record does not.
        "grpo": {"micro_batch": 8, "updates": 1, "kl_coef": kl_coef},
    }
    with trainer_of(sections=sections, tp=2, cp=2) as trainer, without_filter(ignore):
        records = [trainer.train_step()[0] for _ in range(steps)]
    return [dataclasses.asdict(r) for r in records]


def _moving_filter() -> list[dict[str, Any]]:
    sections = {
        "rollout": {"prompts": 8, "group_size": 4, "temperature": 0.7, "top_p": 0.6},
        "grpo": {"micro_batch": 4, "updates": 3, "objective": "DROLoss"},
        "optimizer": {"lr": 0.01},
    }
    with trainer_of(sections=sections, tp=1, cp=1) as trainer:
        return [dataclasses.asdict(trainer.train_step()[0]) for _ in range(3)]


def test_tokens_that_an_update_makes_impossible(ranks: Ranks) -> None:
    """The trainer's own filter moves with its weights, and the later updates leave them out."""
    for record in ranks(1).run(_moving_filter)[0]:
        assert math.isfinite(record["loss"])
        assert math.isfinite(record["grad_norm"])


@pytest.mark.parametrize("impossible", [True, False])
def test_a_token_outside_of_the_filter_is_not_clipped(impossible: bool) -> None:
    """It has the label IGNORE and the log-probability 0, whatever the old policy gave it."""
    z = torch.zeros(1, 4)
    old = torch.tensor([[-1.0, -1.0, -1.0, -torch.inf if impossible else -1.0]])
    labels = torch.tensor([[3, 4, 5, IGNORE]])
    micro = Batch(
        tokens=z.long(),
        labels=labels,
        advantages=z + 0.5,
        rollout_logprobs=z - 1,
        old_logprobs=old,
        ref_logprobs=z - 1,
        weights=z + 1,
    )
    new = torch.tensor([[-1.0, -1.0, -0.5, 0.0]])  # one ratio is e^0.5
    stats = SimpleNamespace(logprobs=new, policy_loss=torch.tensor(0.0))
    grpo = SimpleNamespace(clip_low=0.2, clip_high=0.28)
    own = SimpleNamespace(config=SimpleNamespace(grpo=grpo))
    _, _, sums = GrpoTrainer.loss_of_micro_batch(own, micro, stats)  # type: ignore[arg-type]
    assert sums.tolist() == [0.0, 1.0, 3.0]


def test_steps_under_top_p(ranks: Ranks) -> None:
    """The trainer's filter is the sampler's; with the sampler's own record nothing changes."""
    pool = ranks(4)
    own, replayed, with_kl = (
        pool.run(_filtered_steps, *given, top_p=0.8, timeout=280)[0]
        for given in (("trainer", 0.0, 1), ("engine", 0.0, 1), ("engine", 0.05, 2))
    )
    # The reference is replayed too: its distribution is over the same tokens.
    assert [record["kl_reference"] > 1e-6 for record in with_kl] == [False, True]
    for record in (*own, *replayed, *with_kl):
        assert record["rollout_diff_max"] < 1e-4
        assert record["outside_filter"] == 0
        assert record["importance_weight"] == pytest.approx(1, abs=1e-4)
    for a, b in zip(own, replayed, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4, abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["grad_norm"] > 1e-3


@pytest.mark.night
def test_steps_under_min_p(ranks: Ranks) -> None:
    """The trainer's min-p is transformers', and with its top-p the record has both."""
    pool = ranks(4)
    for kept_tokens, filters in (("trainer", {}), ("engine", {"top_p": 0.8})):
        given = (kept_tokens, 0.0, 1)
        (record,) = pool.run(_filtered_steps, *given, min_p=0.3, **filters, timeout=280)[0]
        assert record["rollout_diff_max"] < 1e-4
        assert record["outside_filter"] == 0
        assert record["grad_norm"] > 1e-3
    # And it does take tokens away: a trainer without it is far off.
    (record,) = pool.run(_filtered_steps, "trainer", 0.0, 1, True, min_p=0.3, timeout=280)[0]
    assert record["rollout_diff_max"] > 0.05
