"""A patched model under `invariant_segments`: its head gives the same bits for any chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron import patch_gpt_model
from tests.helpers.invariance import FIELDS, assert_same_bits
from tests.megatron.common import VOCAB, make_batch, megatron, tiny_config


def bits_of_a_model(tp: int, fused: bool) -> dict[str, Any]:
    with megatron(tp=tp) as parallel_state:
        model = mm.build_gpt_model(tiny_config(tp), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        found = []
        for chunk_size in (None, 1, 7):
            config = LogprobConfig(
                fused=fused, entropy=True, target_rank=True, sum_pi_squared=True,
                invariant_segments=2, chunk_size=chunk_size,
            )  # fmt: skip
            with patch_gpt_model(model, config), torch.no_grad():
                stats = model(**batch["inputs"], labels=batch["labels"])
            found.append({name: getattr(stats, name) for name in FIELDS})
        for other in found[1:]:
            assert_same_bits(other, found[0], "chunk_size")
        with (
            patch_gpt_model(model, LogprobConfig(fused=fused, invariant_segments=5)),
            pytest.raises(ValueError, match="invariant_segments: expected"),
        ):
            model(**batch["inputs"], labels=batch["labels"])
        return found[0]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "logits"])
def test_a_patched_model_honours_it(ranks, fused):
    first, second = ranks(2).run(bits_of_a_model, 2, fused)
    assert_same_bits(second, first, "ranks")
