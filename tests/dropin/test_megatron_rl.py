"""Megatron-LM's RL: what its model is given, and whose settings it takes."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import torch

from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.dropin import megatron_rl
from mcore_logprobs.dropin._common import ONE_PROCESS
from tests.megatron.common import VOCAB, megatron, tiny_config, zigzag


def run_given(bounds: tuple[int, ...]) -> None:
    """What the model is called with on a CP rank: its own tokens' positions, annotated bounds."""
    with megatron(cp=2) as state:
        from megatron.core.packed_seq_params import PackedSeqParams

        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        seen: list[Any] = []
        model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
        )
        cu = torch.tensor(bounds, dtype=torch.int32)
        params = PackedSeqParams("thd", cu, cu, max_seqlen_q=8, max_seqlen_kv=8)
        position = torch.arange(16)[None]
        tokens = position % VOCAB
        megatron_rl.get_logprobs(model, tokens, position, packed_seq_params=params)
        (((ids, places, _), options),) = seen
        want = zigzag(position, state.get_context_parallel_rank(), 2, bounds)
        assert torch.equal(ids, want % VOCAB)
        assert torch.equal(places, want)
        given = options["packed_seq_params"]
        assert given is not params
        assert given.cu_seqlens_q_padded.tolist() == list(bounds)
        assert given.cu_seqlens_kv_padded.tolist() == list(bounds)
        assert getattr(given, "local_cp_size", 2) == 2


def test_what_a_cp_rank_s_model_is_given(ranks) -> None:
    ranks(2).run(run_given, (0, 8, 16))


def test_padded_bounds_of_the_caller_stay() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    cu, padded = torch.tensor([0, 3]), torch.tensor([0, 4])
    params = PackedSeqParams("thd", cu, cu, cu_seqlens_q_padded=padded)
    found = megatron_rl._for_ranks(params, ONE_PROCESS)
    assert found.cu_seqlens_q_padded is padded
    assert found.cu_seqlens_kv_padded is cu
    assert params.cu_seqlens_kv_padded is None
    for name, value in {"cp_group": ONE_PROCESS, "local_cp_size": 1}.items():
        assert getattr(found, name, value) == value  # what this release has of them


def test_flash_decode_is_off_in_every_config() -> None:
    outer, inner = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    outer.inner = inner
    for module in (outer, inner):
        module.config = types.SimpleNamespace(flash_decode=True)
    with megatron_rl._without_flash_decode(outer):
        assert not outer.config.flash_decode
        assert not inner.config.flash_decode
    assert outer.config.flash_decode
    assert inner.config.flash_decode


def settings_of_a_head() -> None:
    own = {"chunk_size": 3, "backend": "torch", "logits_dtype": torch.bfloat16, "saved_bytes": 5}
    with megatron(), mock.patch.object(megatron_rl, "whole_logprobs") as called:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        for name, value in own.items():
            setattr(model.config, f"logprob_{name}", value)
        megatron_rl.get_logprobs(model, torch.zeros(2, 4, dtype=torch.int64), None)
    (_, _, config, *_), _ = called.call_args
    assert {name: getattr(config, name) for name in own} == own


def test_every_setting_of_the_head_is_taken(ranks) -> None:
    ranks(1).run(settings_of_a_head)
