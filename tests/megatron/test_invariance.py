"""A patched model under `invariant_segments`: its head gives the same bits for any chunk."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron import patch_gpt_model
from tests.helpers.invariance import assert_same_bits
from tests.megatron.common import VOCAB, make_batch, megatron, tiny_config
from tests.megatron.test_mtp import logged_metrics
from tests.ops import EVERY_STATISTIC, PER_TOKEN


def bits_of_a_model(tp: int, fused: bool, mtp: bool) -> dict[str, Any]:
    """One rank's statistics, the same bits for each chunk size; with MTP its heads' losses too."""
    with megatron(tp=tp) as parallel_state:
        config = tiny_config(tp, **({"mtp_num_layers": 2} if mtp else {}))
        model = mm.build_gpt_model(config, vocab_size=VOCAB, mtp=mtp)
        batch = make_batch(parallel_state)
        found: list[dict[str, Any]] = []

        def call() -> None:
            stats = model(**batch["inputs"], labels=batch["labels"])
            found.append({name: getattr(stats, name).detach() for name in PER_TOKEN})

        for chunk_size in (None, 1, 7):
            config = LogprobConfig(
                fused=fused, **EVERY_STATISTIC, invariant_segments=2, chunk_size=chunk_size,
                label_smoothing=0.1 if mtp else 0.0, softcap=4.0 if mtp else None,
            )  # fmt: skip
            with patch_gpt_model(model, config):
                if mtp:
                    logged = logged_metrics(call)
                    found[-1] |= logged
                else:
                    call()
        for other in found[1:]:
            assert_same_bits(other, found[0], "chunk_size")
        config = LogprobConfig(fused=fused, invariant_segments=5)
        with pytest.raises(ValueError, match="invariant_segments: expected"):
            patch_gpt_model(model, config)
        for fields in ({"vocab_size": VOCAB + 999}, {"invariant_segments": 5}):
            with patch_gpt_model(model, LogprobConfig(fused=True)) as handle:
                with pytest.raises(ValueError, match=next(iter(fields))), handle.options(**fields):
                    pass
                with handle.options(temperature=0.5):
                    model(**batch["inputs"], labels=batch["labels"])
        return found[0]


@pytest.mark.parametrize("mtp", [False, True], ids=["plain", "MTP"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "logits"])
def test_a_patched_model_honours_it(ranks, fused, mtp):
    first, second = ranks(2).run(bits_of_a_model, 2, fused, mtp)
    assert_same_bits(second, first, "ranks")
