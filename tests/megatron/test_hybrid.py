"""Patched HybridModels (MambaModels before 0.18): attention, MLP, Mamba mixers, experts."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron import patch_gpt_model
from tests.megatron.common import (
    MAMBA,
    MOE,
    VOCAB,
    loss_of,
    make_batch,
    megatron,
    patched_errors,
    relative,
    step,
    tiny_config,
    worst,
)
from tests.megatron.test_mtp import logged_metrics
from tests.megatron.test_pipeline import against_unpatched


def hybrid_config(layout: dict[str, int], pattern: str, **overrides: Any) -> Any:
    main, *heads = pattern.split("/")
    fields = {
        "num_layers": sum(letter != "|" for letter in main),
        "sequence_parallel": layout.get("tp", 1) > 1,
        "mtp_num_layers": len(heads) or None,
        **(MAMBA if "M" in pattern else {}),
        **(MOE if "E" in pattern else {}),
    }
    return tiny_config(**{**fields, **overrides})


def compare(
    layout: dict[str, int],
    pattern: str,
    *,
    settings: dict[str, Any] | None = None,
    tied: bool = True,
    packed: bool = False,
    **config: Any,
) -> dict[str, float]:
    with megatron(**layout) as parallel_state:
        model = mm.build_hybrid_model(
            hybrid_config(layout, pattern, **config),
            vocab_size=VOCAB,
            pattern=pattern,
            tied=tied,
            position_embedding_type="rope",
        )
        seed = 7 + parallel_state.get_data_parallel_rank()
        batch = make_batch(parallel_state, packed=packed, seed=seed)
        return patched_errors(model, batch, settings)


def world_of(layout: dict[str, int]) -> int:
    return layout.get("tp", 1) * layout.get("cp", 1) * layout.get("pp", 1)


@pytest.mark.parametrize("fused", ["require", False], ids=["fused", "logits"])
@pytest.mark.parametrize(
    ("layout", "tied"),
    [({}, True), ({"tp": 2}, True), ({"tp": 2}, False), ({"cp": 2}, True), ({"tp": 2, "cp": 2}, 0)],
    ids=["one", "tp2-sp", "tp2-sp-untied", "cp2", "tp2-cp2-untied"],
)
def test_same_loss_and_gradients(ranks, layout, tied, fused):
    run = ranks(world_of(layout)).run
    for errors in run(compare, layout, "M*-M", settings={"fused": fused}, tied=bool(tied)):
        assert max(errors.values()) < 1e-5


def test_without_sequence_parallelism(ranks):
    for errors in ranks(2).run(compare, {"tp": 2}, "M*-M", sequence_parallel=False):
        assert max(errors.values()) < 1e-5


def test_without_mamba_mixers(ranks):
    for errors in ranks(2).run(compare, {"tp": 2}, "*-*-"):
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}], ids=["tp2-sp", "cp2"])
def test_packed_sequences(ranks, layout):
    for errors in ranks(2).run(compare, layout, "M*-M", packed=True):
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize(
    "layout", [{"ep": 2}, {"tp": 2, "ep": 2, "etp": 1}], ids=["ep2", "tp2-ep2"]
)
def test_experts(ranks, layout):
    for errors in ranks(2).run(compare, layout, "M*E"):
        assert max(errors.values()) < 1e-5


def wrapped_chunks(config: Any, pattern: str, *, tied: bool, **ddp: Any) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp)
    chunks = mm.build_hybrid_chunks(config, vocab_size=VOCAB, pattern=pattern, tied=tied)
    return [DistributedDataParallel(config, settings, chunk) for chunk in chunks]


def schedule(
    layout: dict[str, int], pattern: str, *, tied: bool = True, output: str = "stats"
) -> dict[str, float]:
    """One step by Megatron's schedule, wrapped in its DDP, patched against unpatched."""
    with megatron(**layout) as parallel_state:
        config = hybrid_config(
            layout, pattern, microbatch_group_size_per_vp_stage=layout.get("pp", 1)
        )
        chunks = wrapped_chunks(config, pattern, tied=tied)
        batches = [make_batch(parallel_state, seed=i) for i in range(2 * layout.get("pp", 1))]
        return against_unpatched(parallel_state, config, chunks, batches, {"output": output})


@pytest.mark.parametrize(
    ("tied", "output"), [(True, "stats"), (True, "loss"), (False, "stats")], ids=str
)
def test_pipeline(ranks, tied, output):
    for errors in ranks(2).run(schedule, {"pp": 2}, "M*M-", tied=tied, output=output):
        assert max(errors.values()) < 1e-5


def multi_token(layout: dict[str, int], *, packed: bool = False) -> dict[str, float]:
    """For releases whose pattern names the layers of MTP heads (newer_checks.py)."""
    with megatron(**layout) as parallel_state:
        pattern = "M*-M/*-/*-"
        config = hybrid_config(layout, pattern)
        model = mm.build_hybrid_model(config, vocab_size=VOCAB, pattern=pattern)
        batch = make_batch(parallel_state, packed=packed)
        results: dict[str, Any] = {}
        logged = {"plain": logged_metrics(lambda: results.update(plain=step(model, batch)))}
        with patch_gpt_model(model, LogprobConfig(fused="require")):
            logged["ours"] = logged_metrics(lambda: results.update(ours=step(model, batch)))
        (expected, expected_grads), (got, grads) = results["plain"], results["ours"]
        assert any("mtp" in name for name in grads)
        return {
            "loss": relative(loss_of(got), expected),
            "grad": worst(grads, expected_grads),
            "logged": worst(logged["ours"], logged["plain"]),
        }
