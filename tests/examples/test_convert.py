"""Weight conversion: a round trip through every TP, and the layout that Megatron reads."""

from __future__ import annotations

import pytest
import torch
from rl.weights import Sizes, Slot, slot_of, to_megatron, to_transformers

HEADS, GROUPS, HEAD_DIM, HIDDEN, FFN, VOCAB = 12, 6, 4, 48, 24, 11
LAYER = "decoder.layers.3."
NAMES = [
    "embedding.word_embeddings.weight",
    LAYER + "input_layernorm.weight",
    LAYER + "self_attention.linear_qkv.layer_norm_weight",
    LAYER + "self_attention.linear_qkv.weight",
    LAYER + "self_attention.linear_proj.weight",
    LAYER + "mlp.linear_fc1.weight",
    LAYER + "mlp.linear_fc2.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
]


def _sizes(tp: int) -> Sizes:
    return Sizes(HEADS, GROUPS, VOCAB, -(-VOCAB // tp) * tp)


def _transformers_tensors(slot: Slot) -> list[torch.Tensor]:
    shapes = {
        "vocab": [(VOCAB, HIDDEN)],
        "qkv": [(HEADS * HEAD_DIM, HIDDEN), *[(GROUPS * HEAD_DIM, HIDDEN)] * 2],
        "row": [(HIDDEN, FFN)],
        "gate_up": [(FFN, HIDDEN)] * 2,
        "replicated": [(HIDDEN,)],
    }
    return [torch.randn(shape) for shape in shapes[slot.kind]]


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, tp: int) -> None:
    slot = slot_of(name, layer_offset=2)
    tensors = _transformers_tensors(slot)
    shards = [to_megatron(slot, tensors, _sizes(tp), rank=r, tp=tp) for r in range(tp)]
    assert len({s.shape for s in shards}) == 1
    back = to_transformers(slot, shards, _sizes(tp))
    assert len(back) == len(tensors)
    for got, want in zip(back, tensors, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_layer_numbers_are_global() -> None:
    slot = slot_of(LAYER + "mlp.linear_fc2.weight", layer_offset=10)
    assert slot.names == ("model.layers.13.mlp.down_proj.weight",)
    assert slot.layer == 13


def test_unknown_parameter_is_refused() -> None:
    with pytest.raises(KeyError, match="linear_fc3"):
        slot_of(LAYER + "mlp.linear_fc3.weight", layer_offset=0)


def test_query_heads_stay_with_their_key() -> None:
    """Rows of a TP shard: for each of its groups the queries, then the key, then the value."""
    slot = slot_of(LAYER + "self_attention.linear_qkv.weight", layer_offset=0)
    q = torch.arange(HEADS).repeat_interleave(HEAD_DIM)[:, None].float()  # rows say their head
    k = 100 + torch.arange(GROUPS).repeat_interleave(HEAD_DIM)[:, None].float()
    shard = to_megatron(slot, [q, k, k + 100], _sizes(3), rank=1, tp=3)
    heads = shard[::HEAD_DIM, 0].tolist()
    assert heads == [4, 5, 102, 202, 6, 7, 103, 203]


def test_each_shard_has_its_gate_and_its_up() -> None:
    slot = slot_of(LAYER + "mlp.linear_fc1.weight", layer_offset=0)
    gate = torch.arange(FFN)[:, None].float()
    shard = to_megatron(slot, [gate, gate + 100], _sizes(2), rank=1, tp=2)
    half = FFN // 2
    assert shard[:, 0].tolist() == [*range(half, FFN), *range(100 + half, 100 + FFN)]


def test_padded_vocabulary_rows_are_zero_and_dropped_again() -> None:
    slot = slot_of("output_layer.weight", layer_offset=0)
    (whole,) = _transformers_tensors(slot)
    last = to_megatron(slot, [whole], _sizes(3), rank=2, tp=3)
    assert last.shape[0] == 4
    assert last[3].abs().sum() == 0
