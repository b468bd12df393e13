"""Megatron-LM's RL: what its model is given, and whose settings it takes."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import torch

from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.dropin import megatron_rl
from tests.engine.truths import take
from tests.megatron.common import VOCAB, megatron, relative, tiny_config, zigzag


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
    @dataclasses.dataclass
    class Params:
        cu_seqlens_q: str = "q"
        cu_seqlens_kv: str = "kv"
        cu_seqlens_q_padded: Any = "padded"
        cu_seqlens_kv_padded: Any = None
        cp_group: Any = None
        local_cp_size: int | None = None

    group = types.SimpleNamespace(size=lambda: 2)
    got = megatron_rl._for_ranks(Params(), group)
    assert got == Params("q", "kv", "padded", "kv", group, 2)


def test_packed_bins_take_the_parameters_of_packing(monkeypatch) -> None:
    """Upstream's own function, with Megatron's argument for the sequences of a bin."""
    packing = types.ModuleType("megatron.rl.sequence_packing_utils")
    packing.get_default_packed_seq_params = lambda *given: given  # type: ignore[attr-defined]
    training = types.ModuleType("megatron.training")
    args = types.SimpleNamespace(rl_sequence_packing_max_sequences_per_bin=5)
    training.get_args = lambda: args  # type: ignore[attr-defined]
    for module in (packing, training):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    assert megatron_rl._upstream_s_own(tokens, True) == (8, 5, tokens.device)


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


def test_megatron_s_rl_takes_every_setting_of_the_head(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(megatron_rl, "whole_logprobs", lambda *given, **_: seen.append(given[2]))
    monkeypatch.setattr(megatron_rl, "_returns_logits", lambda model: False)
    own = {"chunk_size": 3, "backend": "torch", "logits_dtype": torch.bfloat16, "saved_bytes": 5}
    config = types.SimpleNamespace(**{f"logprob_{name}": x for name, x in own.items()})
    model = types.SimpleNamespace(config=config)
    megatron_rl.get_logprobs(model, torch.zeros(2, 4, dtype=torch.int64), None)
    assert {name: getattr(seen[0], name) for name in own} == own


def test_a_model_of_logits_gives_the_asserted_dtype(monkeypatch) -> None:
    logits, tokens = torch.randn(2, 6, 8), torch.arange(12).view(2, 6) % 8
    monkeypatch.setattr(megatron_rl, "_returns_logits", lambda model: True)
    monkeypatch.setattr(megatron_rl, "_collected_in", lambda: torch.bfloat16)
    got = megatron_rl.get_logprobs(lambda *_, **__: logits, tokens, None)
    assert got.dtype is torch.bfloat16
    want = take(logits.double().log_softmax(-1)[:, :-1], tokens[:, 1:])
    assert relative(got, want) < 1e-2
