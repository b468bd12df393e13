"""A second derivative raises; the first one is the same under create_graph=True."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    linear_gather,
    linear_kl_div,
    linear_map,
    linear_policy_loss,
    linear_sampling_logprobs,
    linear_token_stats,
    linear_topk,
    vocab_parallel_entropy,
    vocab_parallel_gather,
    vocab_parallel_kl_div,
    vocab_parallel_log_softmax,
    vocab_parallel_logprobs,
    vocab_parallel_sampling_logprobs,
    vocab_parallel_topk,
)

TARGET = torch.tensor([3, 0, 6])
IDS = torch.tensor([[0, 3], [1, 0], [6, 5]])
KEPT = (torch.arange(7).repeat(3), torch.arange(0, 22, 7))

FROM_LOGITS = {
    "logprobs": lambda z: vocab_parallel_logprobs(z, TARGET),
    "entropy": vocab_parallel_entropy,
    "log_softmax": vocab_parallel_log_softmax,
    "gather": lambda z: vocab_parallel_gather(z, IDS, log_softmax=True),
    "kl_div": lambda z: vocab_parallel_kl_div(z, z.detach().flip(1)),
    "top_k": lambda z: vocab_parallel_sampling_logprobs(z, TARGET, top_k=7, top_p=0.99),
    "kept_ids": lambda z: vocab_parallel_sampling_logprobs(z, TARGET, kept_ids=KEPT),
}
FROM_HIDDEN = {
    "stats": lambda h, w: linear_token_stats(h, w, TARGET).logprobs,
    "policy_loss": lambda h, w: linear_policy_loss(h, w, TARGET, lambda lp, e: -lp * lp)[0],
    "map": lambda h, w: linear_map(h, w, lambda z: z.logsumexp(-1)),
    "topk": lambda h, w: linear_topk(h, w, 2)[0],
    "gather": lambda h, w: linear_gather(h, w, IDS, log_softmax=True),
    "entries": lambda h, w: linear_gather(h, w, IDS),
    "kl_div": lambda h, w: linear_kl_div(h, w, h.detach() @ w.detach().flip(0).t()),
    "top_k": lambda h, w: linear_sampling_logprobs(h, w, TARGET, top_k=7, top_p=0.99),
}
CASES = [*((f, 1) for f in FROM_LOGITS.values()), *((f, 2) for f in FROM_HIDDEN.values())]


@pytest.mark.parametrize(
    ("operation", "inputs"), CASES, ids=[*FROM_LOGITS, *(f"linear-{n}" for n in FROM_HIDDEN)]
)
def test_a_penalty_on_gradients_raises(operation: Any, inputs: int) -> None:
    scale = torch.ones((), requires_grad=True)
    leaves = [x * scale for x in (torch.randn(3, 7), torch.randn(7, 7))][:inputs]

    def gradients(**options: bool) -> tuple[Tensor, ...]:
        out = operation(*leaves)
        upstream = torch.linspace(0.5, 1.5, out.numel()).view(out.shape)
        return torch.autograd.grad(out, leaves, upstream, **options)

    grads = gradients(create_graph=True)
    for got, expected in zip(grads, gradients(), strict=True):
        assert torch.equal(got, expected)
    loss = sum((g * g).sum() for g in grads) + leaves[0].sum()
    for last in (
        lambda: torch.autograd.grad(loss, [scale], retain_graph=True),
        lambda: torch.autograd.grad(grads[0], [scale], grads[0].detach(), retain_graph=True),
        lambda: loss.backward(inputs=[scale], retain_graph=True),
        loss.backward,
    ):
        with pytest.raises(RuntimeError, match="gradient of a gradient"):
            last()
    grads[0].mul_(0.5)  # as clipping does


def test_a_linear_operation_has_no_second_derivative_to_lose() -> None:
    logits = torch.randn(3, 7, requires_grad=True)
    values, _ = vocab_parallel_topk(logits, 2)
    (grad,) = torch.autograd.grad(values.sum(), logits, create_graph=True)
    assert not grad.requires_grad
