"""Multi-token prediction keeps its own losses; the main head alone follows the config."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.logits.token_stats import TokenStats
from mcore_logprobs.megatron import patch_gpt_model
from tests.megatron.common import (
    VOCAB,
    loss_of,
    make_batch,
    megatron,
    relative,
    step,
    tiny_config,
    worst,
)


def logged_metrics(run: Any) -> dict[str, torch.Tensor]:
    """What Megatron logged for each MTP head while `run` ran: losses, from 0.19 on also hits."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    run()
    tracker = MTPLossLoggingHelper.tracker
    return {k.replace("loss_", ""): v.clone() for k, v in tracker.items() if torch.is_tensor(v)}


def compare(
    tp: int,
    cp: int,
    sp: bool,
    settings: dict[str, Any],
    *,
    tied: bool = True,
    heads: int = 2,
    packed: bool = False,
) -> dict[str, float]:
    with megatron(tp=tp, cp=cp) as parallel_state:
        config = tiny_config(tp, sequence_parallel=sp, mtp_num_layers=heads)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=tied, mtp=True)
        batch = make_batch(parallel_state, packed=packed)
        results: dict[str, Any] = {}
        logged = {"plain": logged_metrics(lambda: results.update(plain=step(model, batch)))}
        with patch_gpt_model(model, LogprobConfig(**settings)):
            logged["ours"] = logged_metrics(lambda: results.update(ours=step(model, batch)))
        (expected, expected_grads), (got, grads) = results["plain"], results["ours"]
        assert isinstance(got, TokenStats) == (settings.get("output", "stats") == "stats")
        assert logged["plain"]["values"].min() > 1.0
        assert "_postprocess" not in vars(model)
        return {
            "loss": relative(loss_of(got), expected),
            "grad": worst(grads, expected_grads),
            "logged": worst(logged["ours"], logged["plain"]),
        }


@pytest.mark.parametrize("settings", [{}, {"output": "loss"}, {"fused": False}], ids=str)
@pytest.mark.parametrize(
    ("tp", "cp", "sp"), [(1, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)]
)
def test_same_losses_and_gradients(ranks, tp, cp, sp, settings):
    for errors in ranks(tp * cp).run(compare, tp, cp, sp, settings):
        assert max(errors.values()) < 1e-5


def test_untied(ranks):
    for errors in ranks(2).run(compare, 2, 1, True, {}, tied=False):
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize(("tp", "cp", "sp"), [(2, 1, True), (2, 2, True)])
def test_packed_sequences(ranks, tp, cp, sp):
    for errors in ranks(tp * cp).run(compare, tp, cp, sp, {}, packed=True):
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("output", ["stats", "loss"])
@pytest.mark.parametrize("fused", [True, False])
def test_main_heads_settings_stay_with_the_main_head(ranks, output, fused):
    settings = {"output": output, "fused": fused, "temperature": 0.5, "label_smoothing": 0.1}
    errors = ranks(1).run(compare, 1, 1, False, settings)[0]
    assert errors["loss"] > 0.01
    assert errors["logged"] < 1e-5
