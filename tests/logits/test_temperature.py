"""A temperature a token: the same as float64 on logits divided beforehand, in every operation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mcore_logprobs as ml
from mcore_logprobs.ops.arguments import check_temperature
from tests.helpers.distributed import grid_groups

# Odd sizes; 2 and 3 divide the vocabulary, whose last column is padding.
SHAPE, VOCAB, TRUE, HIDDEN, K, CAP = (5, 2), 18, 17, 6, 3, 4.0
TEMPERATURES = {
    "token": torch.tensor([[0.5, 1.0], [2.0, 0.7], [1.3, 0.9], [0.6, 3.0], [1.0, 1.1]]),
    "sequence": torch.tensor([[0.5], [2.0], [1.3], [0.9], [1.0]]),
    "batch": torch.tensor([0.7]),
}
TARGET = torch.arange(10).view(SHAPE)
IDS = (torch.arange(30) * 7 % TRUE).view(*SHAPE, K)


def test_plain_float64() -> None:
    """One process; five rows, each with its own temperature."""
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 6, 2, 3, 3])
    temperature = torch.linspace(0.5, 2.0, 5, dtype=torch.float64)
    got = ml.vocab_parallel_logprobs(logits, target, temperature=temperature)
    want = (logits / temperature[:, None]).log_softmax(-1).gather(-1, target[:, None])[:, 0]
    torch.testing.assert_close(got, want)
    upstream = torch.linspace(-1.0, 2.0, 5, dtype=torch.float64)
    (a,) = torch.autograd.grad((got * upstream).sum(), logits)
    (b,) = torch.autograd.grad((want * upstream).sum(), logits)
    torch.testing.assert_close(a, b)


def _shard(whole: Tensor, dim: int, group: object) -> Tensor:
    return whole if group is None else whole.chunk(group.size(), dim)[group.rank()].clone()


def _stacked(stats: ml.TokenStats) -> Tensor:
    return torch.stack([stats.logprobs, stats.entropy, stats.sum_pi_squared, stats.lse])


def apply(name: str, x: Tensor, teacher: Tensor, group: object, temperature: object) -> Tensor:
    """The operation of that name on (a shard of) logits; differentiable."""
    options = {"temperature": temperature, "vocab_size": TRUE, "tp_group": group}
    if name in ("stats", "softcap"):
        softcap = {"softcap": CAP} if name == "softcap" else {}
        wanted = {"entropy": True, "sum_pi_squared": True} | softcap
        return _stacked(ml.vocab_parallel_token_stats(x, TARGET, **wanted, **options))
    if name.startswith("gather"):
        return ml.vocab_parallel_gather(x, IDS, log_softmax=name == "gather log p", **options)
    if name == "log_softmax":
        # Finite where padding is -inf, so that shards can be compared.
        return ml.vocab_parallel_log_softmax(x, **options).clamp(min=-1e4)
    if name == "topk":
        return ml.vocab_parallel_topk(x, K, **options)[0]
    if name == "topk distill":
        values = torch.linspace(0.0, 1.0, K).expand(IDS.shape)
        found = ml.vocab_parallel_topk_distill(
            x, values, IDS, entropy=True, teacher_temperature=1.0, **options
        )
        return torch.cat([found[0], found[2].unsqueeze(-1)], -1)
    return ml.vocab_parallel_kl_div(
        x, _shard(teacher, -1, group), kind=name, teacher_temperature=1.0, **options
    )


NAMES = (
    *("stats", "softcap", "gather", "gather log p", "log_softmax", "topk", "topk distill"),
    *("forward", "reverse", "jsd"),
)


def _run(name: str, whole: Tensor, teacher: Tensor, temperature: Tensor, seed: int) -> tuple:
    group = grid_groups(tp=torch.distributed.get_world_size()).tp
    logits = _shard(whole, -1, group).requires_grad_()
    value = apply(name, logits, teacher, group, temperature)
    upstream = _shard(_upstream(name, seed), -1, group if name == "log_softmax" else None)
    (value * upstream).sum().backward()
    return value.detach(), logits.grad


def _upstream(name: str, seed: int) -> Tensor:
    shapes = {"stats": (4, *SHAPE), "softcap": (4, *SHAPE), "log_softmax": (*SHAPE, VOCAB)}
    shapes |= {"gather": (*SHAPE, K), "gather log p": (*SHAPE, K), "topk": (*SHAPE, K)}
    shapes |= {"topk distill": (*SHAPE, K + 1)}
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shapes.get(name, SHAPE), generator=generator)


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("which", TEMPERATURES)
@pytest.mark.parametrize("name", NAMES)
def test_from_logits(ranks, tp, which, name) -> None:
    whole, teacher = 2 * torch.randn(*SHAPE, VOCAB), torch.randn(*SHAPE, VOCAB)
    temperature = TEMPERATURES[which]
    leaf = whole.double().requires_grad_()
    capped = torch.tanh(leaf / CAP) * CAP if name == "softcap" else leaf
    divided = capped / temperature.expand(SHAPE).unsqueeze(-1)
    exact = apply("stats" if name == "softcap" else name, divided, teacher.double(), None, 1.0)
    upstream = _upstream(name, 3)
    (grad,) = torch.autograd.grad((exact * upstream).sum(), leaf)
    results = ranks(tp).run(_run, name, whole, teacher, temperature, 3)
    values = [value for value, _ in results]
    if name == "log_softmax":
        values = [torch.cat(values, -1)]
    for value in values:
        torch.testing.assert_close(value.double(), exact.detach(), rtol=2e-5, atol=3e-6)
    found = torch.cat([g for _, g in results], -1)
    torch.testing.assert_close(found.double(), grad, rtol=2e-4, atol=5e-6)


def _fused(hidden: Tensor, weight: Tensor, bias: Tensor, temperature: Tensor, upstream: Tensor):
    group = grid_groups(tp=torch.distributed.get_world_size()).tp
    leaves = [hidden.clone(), _shard(weight, 0, group), _shard(bias, 0, group)]
    x, w, b = (leaf.requires_grad_() for leaf in leaves)
    options = {"tp_group": group, "temperature": temperature, "vocab_size": TRUE, "bias": b}
    wanted = {"entropy": True, "sum_pi_squared": True, "softcap": CAP, "chunk_size": 4}
    target = TARGET.masked_fill(TARGET == 3, -100)
    stats = ml.linear_token_stats(x, w, target, target_rank=True, compact=True, **wanted, **options)
    (_stacked(stats) * upstream).sum().backward()
    loss, _ = ml.linear_policy_loss(
        x.detach(), w.detach(), target, lambda p, h, u: p * u, upstream[0], **options
    )
    return _stacked(stats).detach(), stats.target_rank, loss, x.grad, w.grad, b.grad


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("which", TEMPERATURES)
def test_from_hidden_states(ranks, tp, which) -> None:
    hidden, weight, bias = (
        torch.randn(*SHAPE, HIDDEN),
        torch.randn(VOCAB, HIDDEN),
        torch.randn(VOCAB),
    )
    temperature, upstream = TEMPERATURES[which], torch.randn(4, *SHAPE)
    x, w, b = (t.double().requires_grad_() for t in (hidden, weight, bias))
    raw = (x @ w.t())[..., :TRUE]
    own = temperature.expand(SHAPE).unsqueeze(-1)
    keep = TARGET != 3
    z = (torch.tanh(raw / CAP) * CAP + b[:TRUE]) / own
    logp = z.log_softmax(-1)
    p = logp.exp()
    picked = logp.gather(-1, TARGET.unsqueeze(-1))[..., 0]
    rank = (z > z.gather(-1, TARGET.unsqueeze(-1))).sum(-1)
    exact = torch.stack([picked, -(p * logp).sum(-1), (p * p).sum(-1), z.logsumexp(-1)]) * keep
    (exact * upstream).sum().backward()
    plain = ((raw + b[:TRUE]) / own).log_softmax(-1).gather(-1, TARGET.unsqueeze(-1))[..., 0]
    loss = (plain * upstream[0] * keep).sum()
    results = ranks(tp).run(_fused, hidden, weight, bias, temperature, upstream)
    for stats, ranked, policy, dx, _, _ in results:
        torch.testing.assert_close(stats.double(), exact.detach(), rtol=2e-5, atol=5e-6)
        assert torch.equal(ranked, torch.where(keep, rank, -1))
        torch.testing.assert_close(policy.double(), loss.detach(), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(dx.double(), x.grad, rtol=2e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.cat([r[4] for r in results]).double(), w.grad, rtol=2e-4, atol=1e-5
    )
    torch.testing.assert_close(
        torch.cat([r[5] for r in results]).double(), b.grad, rtol=2e-4, atol=1e-5
    )


def _linear_kl(hidden: Tensor, weight: Tensor, teacher: Tensor, temperature: Tensor) -> tuple:
    group = grid_groups(tp=torch.distributed.get_world_size()).tp
    x, w = hidden.clone().requires_grad_(), _shard(weight, 0, group).requires_grad_()
    mask = TARGET != 3
    value = ml.linear_kl_div(
        x,
        w,
        _shard(teacher, -1, group),
        kind="reverse",
        mask=mask,
        compact=True,
        temperature=temperature,
        teacher_temperature=2.0 * temperature,
        tp_group=group,
    )
    (value * torch.cos(TARGET)).sum().backward()
    return value.detach(), x.grad, w.grad


@pytest.mark.parametrize("tp", [1, 2])
def test_divergence_from_hidden_states(ranks, tp) -> None:
    hidden, weight = torch.randn(*SHAPE, HIDDEN), torch.randn(VOCAB, HIDDEN)
    teacher, temperature = torch.randn(*SHAPE, VOCAB), TEMPERATURES["token"]
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    own = temperature.unsqueeze(-1).double()
    logp, logq = ((x @ w.t()) / own).log_softmax(-1), (teacher / (2 * own)).log_softmax(-1)
    exact = (logp.exp() * (logp - logq)).sum(-1) * (TARGET != 3)
    (exact * torch.cos(TARGET)).sum().backward()
    results = ranks(tp).run(_linear_kl, hidden, weight, teacher, temperature)
    for value, dx, _ in results:
        torch.testing.assert_close(value.double(), exact.detach(), rtol=2e-5, atol=5e-6)
        torch.testing.assert_close(dx.double(), x.grad, rtol=2e-4, atol=1e-5)
    dw = torch.cat([r[2] for r in results])
    torch.testing.assert_close(dw.double(), w.grad, rtol=2e-4, atol=1e-5)


def test_compiled_backend() -> None:
    logits, target = 3 * torch.randn(6, 4500), torch.randint(4500, (6,))
    temperature, upstream = torch.linspace(0.5, 2.0, 6), torch.randn(6)
    found = []
    for backend in ("torch", "inductor"):
        leaf = logits.clone().requires_grad_()
        stats = ml.vocab_parallel_token_stats(
            leaf, target, entropy=True, temperature=temperature, backend=backend
        )
        ((stats.logprobs + stats.entropy) * upstream).sum().backward()
        found.append((stats.logprobs.detach(), leaf.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_no_number_above_zero_is_refused() -> None:
    logits, target = torch.randn(4, 3, 6), torch.zeros(4, 3).long()
    for bad, word in (
        (torch.tensor([1.0, 0.0, 1.0]), "> 0"),
        (torch.tensor([1.0, torch.nan, 1.0]), "> 0"),
        (torch.ones(4), "broadcasts"),
        (torch.ones(2, 4, 3), "broadcasts"),
        (torch.ones(3, dtype=torch.bool), "real numbers"),
        (torch.ones(3, requires_grad=True), "detach"),
        (torch.ones(3, device="meta"), "device"),
    ):
        with pytest.raises(ValueError, match=word):
            ml.vocab_parallel_logprobs(logits, target, temperature=bad)


def test_a_cpu_scalar_is_a_number() -> None:
    logits, target = torch.randn(4, 6), torch.zeros(4).long()
    weight = torch.randn(6, 6)
    for call in (ml.vocab_parallel_logprobs, ml.vocab_parallel_entropy):
        arguments = (logits, target)[: 1 + (call is ml.vocab_parallel_logprobs)]
        assert torch.equal(
            call(*arguments, temperature=torch.tensor(0.5)), call(*arguments, temperature=0.5)
        )
    one, other = (
        ml.linear_token_stats(logits, weight, target, temperature=t).logprobs
        for t in (torch.tensor(0.5), 0.5)
    )
    assert torch.equal(one, other)
    # Of no device, so that it goes with logits of any.
    found = check_temperature(torch.tensor(0.5), torch.Size((4,)), torch.device("meta"))
    assert found == 0.5
