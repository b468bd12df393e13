"""Checks that need Megatron-Core 0.18 or later; `test_newer_megatron.py` runs them on one.

Not collected by its name: the version that pip installs on Python 3.11 has none of these hooks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.logits.token_stats import TokenStats
from mcore_logprobs.megatron import (
    has_output_processor,
    logprob_output_processor,
    megatron_features,
    patch_gpt_model,
)
from tests.megatron import test_hybrid as hybrid
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


def build(parallel_state: Any, tp: int, sp: bool, tied: bool, **config: Any) -> Any:
    mtp = "mtp_num_layers" in config
    made = tiny_config(tp, sequence_parallel=sp, **config)
    return mm.build_gpt_model(made, vocab_size=VOCAB, tied=tied, mtp=mtp)


MUP = {"use_mup": True, "mup_output_mult": 0.25}


def through_the_hook(
    tp: int, sp: bool, tied: bool, settings: dict[str, Any], config: dict[str, Any]
) -> dict[str, float]:
    """GPTModel.forward(output_processor=...) against the unpatched model."""
    with megatron(tp=tp) as parallel_state:
        model = build(parallel_state, tp, sp, tied, **config)
        assert has_output_processor(type(model))
        batch = make_batch(parallel_state)
        hook = {
            "output_processor": logprob_output_processor,
            "output_processor_context": LogprobConfig(**settings),
        }
        expected, expected_grads = step(model, batch)
        got, grads = step(model, batch, **hook)
        assert isinstance(got, TokenStats) == (settings.get("output", "stats") == "stats")
        assert torch.equal(model(**batch["inputs"], **hook), model(**batch["inputs"]))
        with patch_gpt_model(model, hook["output_processor_context"]):
            patched, patched_grads = step(model, batch)
            both, both_grads = step(model, batch, **hook)
            assert torch.equal(loss_of(both), loss_of(patched))
            assert worst(both_grads, patched_grads) == 0.0
        return {
            "loss": relative(loss_of(got), expected),
            "grad": worst(grads, expected_grads),
            "patched loss": relative(loss_of(patched), expected),
            "patched grad": worst(patched_grads, expected_grads),
        }


@pytest.mark.parametrize("config", [{}, MUP, {"mtp_num_layers": 1}], ids=["plain", "mup", "mtp"])
@pytest.mark.parametrize("settings", [{}, {"output": "loss"}, {"fused": False}], ids=str)
@pytest.mark.parametrize(
    ("tp", "sp", "tied"), [(1, False, True), (2, True, True), (2, False, False)]
)
def test_output_processor(ranks, tp, sp, tied, settings, config):
    for errors in ranks(tp).run(through_the_hook, tp, sp, tied, settings, config):
        assert max(errors.values()) < 1e-5


def mtp_without_labels(tp: int) -> None:
    """0.19 trains MTP heads on rolled inputs where labels are None, and counts acceptances."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    with megatron(tp=tp) as parallel_state:
        model = build(parallel_state, tp, tp > 1, True, mtp_num_layers=2)
        for labels in (None, "given"):
            batch = make_batch(parallel_state)
            labels = batch["labels"] if labels else None

            def logged(labels: Any = labels, batch: Any = batch) -> tuple[Any, dict[str, Any]]:
                MTPLossLoggingHelper.tracker.clear()
                output = model(**batch["inputs"], labels=labels)
                tracker = MTPLossLoggingHelper.tracker
                return output, {k: v.clone() for k, v in tracker.items() if torch.is_tensor(v)}

            expected, expected_log = logged()
            with patch_gpt_model(model):
                got, log = logged()
            if labels is None:
                assert torch.equal(got, expected)
            assert log.keys() == expected_log.keys()
            assert expected_log
            for name in expected_log:
                assert relative(log[name], expected_log[name]) < 1e-5, name


@pytest.mark.parametrize("tp", [1, 2])
def test_mtp_acceptance_counts(ranks, tp):
    ranks(tp).run(mtp_without_labels, tp)


@pytest.mark.parametrize(
    ("layout", "packed"), [({}, False), ({"tp": 2}, False), ({"cp": 2}, False), ({"cp": 2}, True)]
)
def test_mtp_of_a_hybrid_model(ranks, layout, packed):
    for errors in ranks(hybrid.world_of(layout)).run(hybrid.multi_token, layout, packed=packed):
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize(
    ("layout", "pattern"),
    [({"pp": 2, "vp": 2}, "M|*-|M|*-"), ({"pp": 2}, "M*M-/*-")],
    ids=["interleaved", "mtp"],
)
def test_schedules_of_a_hybrid_model(ranks, layout, pattern):
    for errors in ranks(2).run(hybrid.schedule, layout, pattern):
        assert max(errors.values()) < 1e-5


def test_doctor_names_the_hooks():
    found = megatron_features()
    assert "forward(output_processor=)" in found["GPTModel"]
    assert "_scale_logits" in found["GPTModel"]
    assert "compute_language_model_loss" in found["HybridModel"]
