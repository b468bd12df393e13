"""SkyRL's and ROLL's names at their edges: masks, places, ranges, other settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs.dropin import roll, skyrl
from tests.dropin.common import (
    VOCAB,
    assert_near,
    normal,
    zigzag,
)
from tests.engine.truths import entropy_of, take
from tests.megatron.common import megatron


def skyrl_call(name: str, *place: Any, inference_only: bool = False) -> Tensor:
    hidden, weight = normal(1, 4, 6).requires_grad_(), normal(8, 6)
    ids, cu = torch.zeros(1, 4, dtype=torch.int64), torch.tensor([0, 4])
    if name == "apply":
        own = (*place, None, None, inference_only)
        return skyrl.FusedLinearChunkedDistributedLogprob.apply(hidden, weight, ids, *own)
    if name == "hidden":
        own = (*place, None, inference_only)
        return skyrl.from_parallel_hidden_to_logprobs(hidden, weight, ids, *own)
    own = (cu, 4, *place, None, inference_only)
    if name == "packed hidden":
        return skyrl.from_parallel_hidden_to_logprobs_packed_sequences(hidden, weight, ids, *own)
    return skyrl.from_parallel_logits_to_logprobs_packed_sequences(hidden @ weight.T, ids, *own)


@pytest.mark.parametrize("name", ["apply", "hidden", "packed hidden", "packed logits"])
def test_skyrl_s_range_and_inference(name: str) -> None:
    """A range that is not the rank's is refused; gradients only where they are asked for."""
    assert skyrl_call(name, 0, 8).requires_grad
    assert not skyrl_call(name, 0, 8, inference_only=True).requires_grad
    with pytest.raises(ValueError, match="vocab_start_index, vocab_end_index: expected"):
        skyrl_call(name, 8, 16)


@pytest.mark.parametrize("chunk_size", [None, 0, -1, 2])
def test_skyrl_s_head_takes_hidden_states_of_another_dtype(chunk_size: int | None) -> None:
    hidden, weight = normal(1, 4, 6), normal(8, 6).bfloat16()
    ids = torch.zeros(1, 4, dtype=torch.int64)
    rest = (weight, ids, 0, 8, chunk_size, None)
    got = skyrl.FusedLinearChunkedDistributedLogprob.apply(hidden, *rest)
    want = skyrl.FusedLinearChunkedDistributedLogprob.apply(hidden.bfloat16(), *rest)
    assert torch.equal(got, want)


def test_skyrl_s_places_of_packed_tokens() -> None:
    """Without a mask from column 0 on; with one at its ones; of rows that are cut off."""
    logits, ids = normal(1, 8, VOCAB), torch.arange(8)[None]
    log_p = take(logits.double().log_softmax(-1), ids.roll(-1, 1))[0]
    a, b, c, d, e, f = log_p[[0, 1, 2, 4, 5, 6]].tolist()

    def places(length: int, **layout: Any) -> Tensor:
        cu = torch.tensor([0, 4, 8])
        call = (logits, ids, cu, length, 0, VOCAB, None)
        return skyrl.from_parallel_logits_to_logprobs_packed_sequences(*call, **layout)

    assert_near(places(4), torch.tensor([[a, b, c], [d, e, f]]))
    assert_near(places(6), torch.tensor([[a, b, c, 0, 0], [d, e, f, 0, 0]]))
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 1, 1]])
    got = places(5, attention_mask=mask)
    assert_near(got, torch.tensor([[a, 0, b, 0], [0, 0, d, e]]))
    assert_near(places(6, sub_seq_lengths=[[4, 4]]), torch.tensor([[a, b, c, 0, d]]))
    with pytest.raises(ValueError, match="sub_seq_lengths: expected 2 lengths, got 1"):
        places(6, sub_seq_lengths=[[4]])


def test_skyrl_s_mean_entropy_of_all_or_no_actions() -> None:
    """loss_mask None: every action; a micro-batch without actions has a mean of 0."""
    logits = normal(1, 6, VOCAB)
    bounds, mask = torch.tensor([0, 4, 6]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])

    def call(weights: Tensor | None) -> tuple[Tensor, Tensor]:
        return skyrl.vocab_parallel_entropy_packed_sequences(
            logits, bounds, 4, 2, mask, weights, None
        )

    entropy = entropy_of(logits.double().log_softmax(-1))[0, [1, 2, 4]].mean()
    for found in (call(None), call(torch.ones(2, 2))):
        for got in found:
            assert_near(got, entropy)
    assert [x.item() for x in call(torch.zeros(2, 2))] == [0.0, 0.0]


def test_skyrl_s_draft_loss_by_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = normal(2, 4, VOCAB), normal(2, 4, VOCAB, seed=1)
    mask = torch.tensor([[0.25, 1.0, 0.0, 2.0], [0.0, 1.0, 1.0, 0.0]])
    cost = -(teacher.double().softmax(-1) * student.double().log_softmax(-1)).sum(-1)
    whole = (cost * mask).sum()
    assert_near(skyrl.draft_soft_ce(student, teacher, mask), whole / mask.sum())
    for factor, divisor in ((7.0, 7.0), (0.5, 1.0)):
        got = skyrl.draft_soft_ce(student, teacher, mask, torch.tensor(factor))
        assert_near(got, whole / divisor)
    assert skyrl.draft_soft_ce(student, teacher, mask * 0) == 0
    with pytest.raises(ValueError, match="teacher_logits: expected detached logits"):
        skyrl.draft_soft_ce(student, teacher.requires_grad_(), mask)
    seen = []

    def spy(*args: Any, **options: Any) -> Tensor:
        seen.append(options["chunk_size"])
        return mask

    monkeypatch.setattr(skyrl.ours, "vocab_parallel_soft_cross_entropy", spy)
    skyrl.draft_soft_ce(student, teacher.detach(), mask, chunk_size=3)
    assert seen == [6]  # of each of two sequences


def run_wider() -> None:
    with megatron(tp=2) as state:
        group = state.get_tensor_model_parallel_group()
        narrow, mask = normal(1, 3, 4), torch.ones(1, 3)
        skyrl.draft_soft_ce(narrow, narrow, mask, vocab_parallel_group=group)
        with pytest.raises(ValueError, match="logits: expected at most 4 columns, got 6"):
            skyrl.draft_soft_ce(normal(1, 3, 6), normal(1, 3, 6), mask, vocab_parallel_group=group)


def test_skyrl_s_draft_logits_that_grow(ranks) -> None:
    ranks(2).run(run_wider)


def test_skyrl_s_hidden_states_may_be_padded() -> None:
    """More positions than tokens, as sequence parallelism pads: `[b, s - 1]` of the tokens."""
    hidden, weight = normal(2, 6, 5), normal(VOCAB, 5, seed=1)
    ids = torch.arange(8).view(2, 4)
    got = skyrl.from_parallel_hidden_to_logprobs(hidden, weight, ids, 0, VOCAB, None)
    log_p = (hidden @ weight.T).double().log_softmax(-1)
    assert_near(got, take(log_p[:, :3], ids[:, 1:]), 1e-5)


@pytest.mark.parametrize("in_parts", [False, True])
def test_roll_cross_entropy_ignores_another_index(in_parts: bool) -> None:
    x, target = normal(4, VOCAB), torch.tensor([3, 7, 5, 7])
    partial = x.logsumexp(-1, keepdim=True) if in_parts else None
    got = roll.cross_entropy(x, target, partial, ignore_index=7)
    assert_near(got, torch.nn.functional.cross_entropy(x.double(), target, ignore_index=7))
    each = roll.cross_entropy(x, target, partial, ignore_index=7, reduction="none")
    assert each[target == 7].tolist() == [0.0, 0.0]


def run_first_choice() -> tuple[Tensor, Tensor, Tensor]:
    with megatron(tp=1, cp=2) as state:
        whole = normal(2, 8, VOCAB)
        local = zigzag(whole, state.get_context_parallel_rank(), 2)
        first = roll.context_parallel_gather(local.transpose(0, 1).contiguous(), parallel_dim=0)
        assert torch.equal(first, whole.transpose(0, 1))
        return whole, *roll.MegatronInferStrategy().op_compute_topk_logits(local, 1)


def test_roll_s_first_choice_and_another_dimension(ranks) -> None:
    for whole, values, ids in ranks(2).run(run_first_choice):
        assert torch.equal(values, whole.amax(-1, keepdim=True))
        assert torch.equal(ids, whole.argmax(-1, keepdim=True))
