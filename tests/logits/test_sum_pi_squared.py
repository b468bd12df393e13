"""sum_pi_squared, the sum of squared probabilities: values and gradients against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    linear_policy_loss,
    linear_token_stats,
    vocab_parallel_logprobs,
    vocab_parallel_token_stats,
)
from tests.helpers.distributed import grid_groups

# 3 and 2 divide the vocabulary; the last column of the last shard is padding.
SHAPE, VOCAB, HIDDEN = (5, 2), 18, 7
TRUE = 17


def test_plain_float64() -> None:
    """One process, five rows of seven columns: small enough to check by eye."""
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 6, 2, 3, 3])
    stats = vocab_parallel_token_stats(logits, target, sum_pi_squared=True)
    want = (logits.softmax(-1) ** 2).sum(-1)
    torch.testing.assert_close(stats.sum_pi_squared, want)
    upstream = torch.linspace(-1.0, 2.0, 5, dtype=torch.float64)
    (got,) = torch.autograd.grad((stats.sum_pi_squared * upstream).sum(), logits)
    (exact,) = torch.autograd.grad((want * upstream).sum(), logits)
    torch.testing.assert_close(got, exact)


def _exact(z: Tensor, target: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Loss over the three quantities, and the squares; z is float64 `[..., TRUE]`."""
    logp = z.log_softmax(-1)
    p = logp.exp()
    keep = target != -100
    squares = torch.where(keep, (p * p).sum(-1), 0.0)
    entropy = torch.where(keep, -(p * logp).sum(-1), 0.0)
    own = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    own = torch.where(keep, own, 0.0)
    return (torch.stack([own, entropy, squares]) * upstream).sum(), squares


def _stacked(stats) -> Tensor:
    return torch.stack([stats.logprobs, stats.entropy, stats.sum_pi_squared])


def _target() -> Tensor:
    target = torch.randint(TRUE, SHAPE)
    target[1, 1] = -100
    return target


def _from_logits(whole: Tensor, target: Tensor, upstream: Tensor, options: dict) -> tuple:
    groups = grid_groups(tp=torch.distributed.get_world_size())
    width = VOCAB // groups.tp.size()
    shard = slice(groups.tp.rank() * width, (groups.tp.rank() + 1) * width)
    logits = whole[..., shard].clone().requires_grad_()
    stats = vocab_parallel_token_stats(
        logits,
        target,
        entropy=True,
        sum_pi_squared=True,
        vocab_size=TRUE,
        tp_group=groups.tp,
        **options,
    )
    (_stacked(stats) * upstream).sum().backward()
    return stats.sum_pi_squared.detach(), logits.grad


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "softcap": 5.0, "chunk_size": 3}])
def test_from_logits(ranks, tp, dtype, options) -> None:
    whole, target, upstream = 4 * torch.randn(*SHAPE, VOCAB), _target(), torch.randn(3, *SHAPE)
    whole = whole.to(dtype)
    raw = whole.double().requires_grad_()
    z = raw
    if "softcap" in options:
        z = torch.tanh(z / options["softcap"]) * options["softcap"]
    z = z[..., :TRUE] / options.get("temperature", 1.0)
    loss, squares = _exact(z, target, upstream)
    (exact,) = torch.autograd.grad(loss, raw)
    results = ranks(tp).run(_from_logits, whole, target, upstream, options)
    grad = torch.cat([grad for _, grad in results], dim=-1)
    for got, _ in results:
        torch.testing.assert_close(got.double(), squares, rtol=1e-5, atol=1e-7)
    tolerance = (
        {"rtol": 1e-4, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 0.01, "atol": 1e-3}
    )
    torch.testing.assert_close(grad.double(), exact, **tolerance)


def _from_hidden(hidden: Tensor, weight: Tensor, target: Tensor, upstream: Tensor) -> tuple:
    groups = grid_groups(tp=torch.distributed.get_world_size())
    width = VOCAB // groups.tp.size()
    shard = slice(groups.tp.rank() * width, (groups.tp.rank() + 1) * width)
    x, w = hidden.clone().requires_grad_(), weight[shard].clone().requires_grad_()
    options = {"entropy": True, "sum_pi_squared": True, "vocab_size": TRUE, "chunk_size": 4}
    stats = linear_token_stats(x, w, target, tp_group=groups.tp, **options)
    (_stacked(stats) * upstream).sum().backward()
    _, info = linear_policy_loss(
        x.detach(), w.detach(), target, lambda logp, _: -logp, tp_group=groups.tp, **options
    )
    return stats.sum_pi_squared.detach(), info.sum_pi_squared, x.grad, w.grad


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_from_hidden_states(ranks, tp) -> None:
    hidden, weight = torch.randn(*SHAPE, HIDDEN), torch.randn(VOCAB, HIDDEN)
    target, upstream = _target(), torch.randn(3, *SHAPE)
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss, squares = _exact((x @ w.t())[..., :TRUE], target, upstream)
    loss.backward()
    results = ranks(tp).run(_from_hidden, hidden, weight, target, upstream)
    for got, info, dx, _ in results:
        torch.testing.assert_close(got.double(), squares, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(info.double(), squares, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(dx.double(), x.grad, rtol=1e-4, atol=1e-5)
    dw = torch.cat([dw for *_, dw in results])
    torch.testing.assert_close(dw.double(), w.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_backend(dtype) -> None:
    """Two whole blocks of 2048 columns and a rest, which goes to the reference."""
    logits = (3 * torch.randn(6, 4500)).to(dtype)
    target, upstream = torch.randint(4500, (6,)), torch.randn(6)
    found = []
    for backend in ("torch", "inductor"):
        leaf = logits.clone().requires_grad_()
        stats = vocab_parallel_token_stats(leaf, target, sum_pi_squared=True, backend=backend)
        (stats.sum_pi_squared * upstream * 100).sum().backward()
        found.append((stats.sum_pi_squared.detach(), leaf.grad))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(
        found[1][1], found[0][1], rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=1e-7
    )


def test_rows_of_infinities_and_nan() -> None:
    logits = torch.randn(4, 6)
    logits[0] = -torch.inf
    logits[1, 1:] = -torch.inf
    logits[2, 3] = torch.nan
    logits.requires_grad_()
    stats = vocab_parallel_token_stats(logits, torch.zeros(4).long(), sum_pi_squared=True)
    assert stats.sum_pi_squared[0] == 0.0
    assert stats.sum_pi_squared[1] == 1.0
    assert stats.sum_pi_squared[2].isnan()
    stats.sum_pi_squared.sum().backward()
    assert logits.grad[2].isnan().all()
    assert logits.grad[[0, 1, 3]].isfinite().all()


def test_a_row_without_upstream_gets_exactly_nothing() -> None:
    logits = torch.full((2, 6), torch.nan, requires_grad=True)
    target = torch.zeros(2).long()
    upstream = torch.tensor([0.0, 1.0])
    (vocab_parallel_logprobs(logits, target) * upstream).sum().backward()
    assert not logits.grad[0].any()
    assert logits.grad[1].isnan().all()
