"""ROLL's functions on Megatron's own groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_logprobs.dropin import roll
from tests.dropin.common import VOCAB, assert_near, spread, zigzag
from tests.megatron.common import megatron


def run(tp: int, cp: int, logits: Tensor, target: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    with megatron(tp=tp, cp=cp) as parallel_state:
        column = parallel_state.get_tensor_model_parallel_rank()
        place = parallel_state.get_context_parallel_rank()
        start, end = roll.VocabUtility.vocab_range_from_global_vocab_size(VOCAB, column, tp)
        leaf = zigzag(logits[..., start:end], place, cp).clone().requires_grad_()
        mine = zigzag(target, place, cp)
        logprobs = roll.vocab_parallel_logprobs(leaf, mine)
        entropy = roll.vocab_parallel_entropy(leaf)
        rank = roll.vocab_parallel_target_rank(leaf, mine)
        found = {
            "logprobs": roll.context_parallel_gather(logprobs),
            "entropy": roll.context_parallel_gather(entropy, parallel_dim=1),
            "rank": roll.context_parallel_gather(rank),
        }
        ((found["logprobs"] + 0.5 * found["entropy"]) * upstream).sum().backward()
        return found | {"grad": leaf.grad}


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_values_and_gradients(ranks, tp: int, cp: int) -> None:
    logits = torch.randn(2, 8, VOCAB) * 2
    target = torch.randint(0, VOCAB, (2, 8))
    upstream = torch.randn(2, 8)
    leaf = logits.double().requires_grad_()
    logp = leaf.log_softmax(-1)
    picked = logp.gather(-1, target[..., None])
    entropy = -(logp.exp() * logp).sum(-1)
    ((picked[..., 0] + 0.5 * entropy) * upstream.double()).sum().backward()
    results = ranks(tp * cp).run(run, tp, cp, logits, target, upstream)
    for result in results:
        assert_near(result["logprobs"], picked[..., 0].detach())
        assert_near(result["entropy"], entropy.detach())
        assert result["rank"].dtype == torch.int64
        assert torch.equal(result["rank"], (logp > picked).sum(-1))
    # Each rank takes its own part of the gradient of one and the same loss.
    grad = spread([result["grad"] for result in results], tp, cp, logits.shape)
    assert_near(grad, leaf.grad)
