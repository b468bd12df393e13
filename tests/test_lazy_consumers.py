"""Several consumers of the same lazy logits: one pass over the head, one gradient each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mcore_logprobs as ours
from mcore_logprobs.kernels import budgets
from tests.engine.cases import BUDGETS
from tests.helpers.lazy import Seen, lazy_logits
from tests.helpers.shards import on_ranks, world_group, world_rank, world_size
from tests.ops import EVERY_STATISTIC, FLAGS

S, B, H, V = 6, 2, 7, 18  # 6 tokens: sequence parallelism over 1, 2 and 3 ranks
N = S * B


class Consumer(NamedTuple):
    """A function of logits `[..., V/TP]`, and the same in plain torch of `[..., V]`."""

    ours: Callable[..., Tensor]
    torch: Callable[[Tensor], Tensor]

    def of(self, cut: Callable[[Tensor], Tensor]) -> Consumer:
        """Of logits that were cut or scaled before."""
        return Consumer(lambda x, **k: self.ours(cut(x), **k), lambda x: self.torch(cut(x)))


def _entropy(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


ENTROPY = Consumer(ours.vocab_parallel_entropy, _entropy)


def labels(seed: int, shape: torch.Size, ignored: bool = False) -> Tensor:
    found = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(seed))
    return (found.masked_fill(torch.arange(N) % 4 == 1, -100) if ignored else found).view(shape)


def logprobs(seed: int, ignored: bool = False) -> Consumer:
    def real(x: Tensor) -> Tensor:
        target = labels(seed, x.shape[:-1], ignored)
        of_target = x.log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return torch.where(target >= 0, of_target, 0.0)

    return Consumer(
        lambda x, **k: ours.vocab_parallel_logprobs(x, labels(seed, x.shape[:-1], ignored), **k),
        real,
    )


def _squares(x: Tensor, **k: Any) -> Tensor:
    stats = ours.vocab_parallel_token_stats(x, labels(5, x.shape[:-1]), sum_pi_squared=True, **k)
    assert stats.sum_pi_squared is not None
    assert stats.entropy is None
    return stats.sum_pi_squared + stats.lse


SQUARES = Consumer(_squares, lambda x: x.softmax(-1).square().sum(-1) + x.logsumexp(-1))


def rank(seed: int) -> Consumer:
    def real(x: Tensor) -> Tensor:
        own = x.gather(-1, labels(seed, x.shape[:-1]).unsqueeze(-1))
        return (x > own).sum(-1)

    return Consumer(
        lambda x, **k: ours.vocab_parallel_target_rank(x, labels(seed, x.shape[:-1]), **k), real
    )


# Consumers in this order, and how many passes over the head they take.
ORDERS: dict[str, tuple[list[Consumer], int]] = {
    "entropy, then log-probabilities": ([ENTROPY, logprobs(1)], 1),
    "log-probabilities, then entropy": ([logprobs(1), ENTROPY], 1),
    "ignored targets": ([logprobs(1, ignored=True), ENTROPY, logprobs(2, ignored=True)], 1),
    "entropy of a copy": ([ENTROPY.of(Tensor.clone), logprobs(1)], 1),
    "the same rows in another shape": ([ENTROPY.of(lambda x: x.flatten(0, 1)), logprobs(1)], 1),
    "a part that both take": (
        [ENTROPY.of(lambda x: x.flatten(0, 1)[:N]), logprobs(1).of(lambda x: x.view(N, -1)[:N])],
        1,
    ),
    "more statistics first": ([SQUARES, ENTROPY, logprobs(1)], 1),
    "more statistics later": ([ENTROPY, SQUARES, logprobs(1)], 2),
    "more targets than a pass takes": ([logprobs(seed) for seed in range(7)], 2),
    "another temperature": ([ENTROPY, ENTROPY.of(lambda x: x / 0.5)], 2),
    "other rows": ([ENTROPY, ENTROPY.of(lambda x: x[1:])], 2),
    "the same rows in another order": ([logprobs(1), ENTROPY.of(lambda x: x.flip(0))], 2),
    "the rank of a target": ([ENTROPY, rank(1)], 2),
}
CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as they are": lambda x: x,
    "a temperature": lambda x: x / 0.7,
    "temperatures": lambda x: x / torch.linspace(0.5, 2.0, N).view(S, B, 1),
}


def whole_tensors() -> dict[str, Tensor]:
    """In float64: hidden `[s, b, h]`, weight `[V, h]`, bias `[V]`, A and B of a LoRA."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"hidden": (S, B, H), "weight": (V, H), "bias": (V,), "a": (2, H), "b": (V, 2)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def mine(name: str, x: Tensor, sequence_parallel: bool = False) -> Tensor:
    """This rank's part."""
    split = name in ("weight", "bias", "b") or (name == "hidden" and sequence_parallel)
    return x.chunk(world_size())[world_rank()] if split else x


def leaves_and_logits(sequence_parallel: bool = False, **settings: Any) -> tuple[dict, Tensor]:
    leaves = {
        name: mine(name, x, sequence_parallel).float().clone().requires_grad_()
        for name, x in whole_tensors().items()
    }
    logits = lazy_logits(
        leaves["hidden"],
        leaves["weight"],
        bias=leaves["bias"],
        lora=(leaves["a"], leaves["b"], 0.5),
        tp_group=world_group(),
        sequence_parallel=sequence_parallel,
        require=True,
        **settings,
    )
    return leaves, logits


def weighted(values: list[Tensor]) -> Tensor:
    """A loss whose upstream gradients differ by token and by consumer."""
    loss = torch.zeros((), dtype=torch.float64)
    for i, value in enumerate(values):
        if value.requires_grad:
            weights = torch.linspace(-1.0, 2.0 + i, value.numel(), dtype=torch.float64)
            loss = loss + (value.double().flatten() * weights).sum()
    return loss


def compare(order: str, cut: str, sequence_parallel: bool) -> None:
    consumers, _ = ORDERS[order]
    leaves = {name: x.requires_grad_() for name, x in whole_tensors().items()}
    real = leaves["hidden"] @ (leaves["weight"] + 0.5 * leaves["b"] @ leaves["a"]).t()
    real = CUTS[cut](real + leaves["bias"])
    expected = [consumer.torch(real) for consumer in consumers]
    weighted(expected).backward()
    own, lazy = leaves_and_logits(sequence_parallel, chunk_size=5)
    lazy = CUTS[cut](lazy)
    got = [consumer.ours(lazy, tp_group=world_group()) for consumer in consumers]
    weighted(got).backward()
    pairs = {str(i): pair for i, pair in enumerate(zip(got, expected, strict=True))}
    for name, x in leaves.items():
        assert x.grad is not None
        pairs[name] = own[name].grad, mine(name, x.grad, sequence_parallel)
    for name, (a, b) in pairs.items():
        allowed = 1e-5 * max(1.0, float(b.detach().abs().max()))
        assert float((a.double() - b.double()).detach().abs().max()) < allowed, (order, cut, name)


def compare_all(cuts: list[str], sequence_parallel: bool) -> None:
    for order in ORDERS:
        for cut in cuts:
            compare(order, cut, sequence_parallel)


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "cuts"),
    [
        (1, False, list(CUTS)),
        (2, False, ["temperatures"]),
        (3, False, ["as they are"]),
        (2, True, ["a temperature"]),
        (3, True, ["temperatures"]),
    ],
)
def test_equal_to_real_logits(
    ranks: Any, tp: int, sequence_parallel: bool, cuts: list[str]
) -> None:
    """Values and all gradients against float64, whoever comes first."""
    on_ranks(ranks, tp, compare_all, cuts, sequence_parallel)


@pytest.mark.own_sizes
@pytest.mark.parametrize("order", ORDERS)
def test_passes(order: str) -> None:
    """A pass is a product of the head's size forward and three backward, however many consume."""
    consumers, passes = ORDERS[order]
    hidden = torch.randn(S, B, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    logits = lazy_logits(hidden, weight)
    with Seen() as seen:
        loss = weighted([consumer.ours(logits) for consumer in consumers])
    assert seen.products == passes
    with Seen() as seen:
        loss.backward()
    without = any("rank" in order for _ in consumers)  # a rank has no gradient
    assert seen.products == 3 * (passes - without)


def test_a_pass_of_tokens_in_another_shape() -> None:
    """The second consumer has as many tokens, and targets that lie transposed."""
    hidden, weight = torch.randn(S, B, H), torch.randn(V, H)
    target, found = labels(1, torch.Size((B, S))).t(), []
    for ours_too in (True, False):
        operands = [x.detach().requires_grad_() for x in (hidden, weight)]
        logits = lazy_logits(*operands) if ours_too else operands[0] @ operands[1].t()
        entropy = (ours.vocab_parallel_entropy if ours_too else _entropy)(logits.view(-1, V))
        if ours_too:
            logprobs = ours.vocab_parallel_logprobs(logits, target)
        else:
            logprobs = logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
        weighted([entropy, logprobs]).backward()
        found.append([x.grad for x in operands])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.own_sizes
def test_a_pass_is_not_taken_for_another() -> None:
    """Of a spent graph, of another gradient mode, within a checkpoint or by other processing."""
    hidden = torch.randn(S, B, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)

    def products(*consume: Callable[[], object]) -> int:
        with Seen() as seen:
            for one in consume:
                one()
        return seen.products

    logits = lazy_logits(hidden, weight)
    once = lambda: ours.vocab_parallel_entropy(logits).sum().backward()  # noqa: E731
    assert products(once, once) == 8
    target = labels(1, logits.shape[:-1])

    def without_gradient() -> None:
        with torch.no_grad():
            ours.vocab_parallel_entropy(logits)

    assert products(without_gradient, without_gradient) == 1
    logits = lazy_logits(hidden, weight)
    assert products(without_gradient, lambda: ours.vocab_parallel_logprobs(logits, target)) == 2


@pytest.mark.own_sizes
@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"vocab_size": V - 1}, {"temperature": 0.5}])
def test_other_processing_is_another_pass(options: dict[str, Any]) -> None:
    logits = lazy_logits(torch.randn(S, B, H, requires_grad=True), torch.randn(V, H))
    with Seen() as seen:
        values = [ours.vocab_parallel_entropy(logits, **o) for o in ({}, options, options)]
    assert seen.products == 2
    assert not torch.allclose(values[0], values[1])
    assert torch.equal(values[1], values[2])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_within_a_checkpoint(use_reentrant: bool) -> None:
    """The recomputation goes the way of the forward."""
    leaves, logits = leaves_and_logits()
    target = labels(1, logits.shape[:-1])
    scale = torch.ones((), requires_grad=True)

    def loss(scale: Tensor) -> Tensor:
        entropy = ours.vocab_parallel_entropy(logits)
        return scale * weighted([entropy, ours.vocab_parallel_logprobs(logits, target)])

    ours.vocab_parallel_entropy(logits)  # before it
    checkpoint(loss, scale, use_reentrant=use_reentrant).backward()
    expected, others = leaves_and_logits()
    weighted(
        [ours.vocab_parallel_entropy(others), ours.vocab_parallel_logprobs(others, target)]
    ).backward()
    for name, x in leaves.items():
        torch.testing.assert_close(x.grad, expected[name].grad)


def test_one_of_two_gradients() -> None:
    """An upstream of 0 is none, also in a row that holds a NaN; a NaN reaches its row alone."""
    hidden = torch.randn(S, B, H)
    hidden[2, 1] = torch.nan
    hidden.requires_grad_()
    weight = torch.randn(V, H, requires_grad=True)
    logits = lazy_logits(hidden, weight)
    entropy = ours.vocab_parallel_entropy(logits)
    joined = ours.vocab_parallel_logprobs(logits, labels(1, logits.shape[:-1]))
    assert joined.isnan().nonzero().tolist() == [[2, 1]]
    finite = torch.ones(S, B)
    finite[2, 1] = 0.0
    for upstream in (finite, torch.ones(S, B)):
        hidden.grad = weight.grad = None
        (on_hidden,) = torch.autograd.grad(joined, hidden, upstream, retain_graph=True)
        rows = on_hidden.isnan().any(-1)
        assert rows.nonzero().tolist() == ([] if upstream is finite else [[2, 1]])
        assert bool((on_hidden[2, 1] == 0).all()) is (upstream is finite)
    assert entropy.requires_grad


@pytest.mark.own_sizes
def test_kept_logits_serve_all_consumers() -> None:
    """`saved_bytes` spares the backward its fourth product once, for both."""
    hidden = torch.randn(S, B, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    logits = lazy_logits(hidden, weight, saved_bytes=1 << 20)
    with Seen() as seen:
        entropy = ours.vocab_parallel_entropy(logits)
        joined = ours.vocab_parallel_logprobs(logits, labels(1, logits.shape[:-1]))
        weighted([entropy, joined]).backward()
    assert seen.products == 3


# What AReaL's metrics are made of.
METRICS: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda x: x.min(-1).values,
    "max": lambda x: x.max(dim=-1)[0],
    "mean": lambda x: x.mean(-1, dtype=torch.float32),
    "sum": lambda x: x.sum(dim=-1),
    "sum of all": torch.sum,
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32),
    "argmin": lambda x: x.argmin(dim=-1),
    "argmax": lambda x: x.argmax(-1),
    "column": lambda x: x.min(dim=-1).indices,
}


@pytest.mark.own_sizes
def test_metrics_of_one_pass() -> None:
    """Without gradients: of one product, and no logits."""
    hidden, weight = torch.randn(S, B, H, requires_grad=True), torch.randn(V, H)
    real = ((hidden @ weight.t()) / 0.7).transpose(0, 1).detach()
    lazy = (lazy_logits(hidden, weight, require=True) / 0.7).transpose(0, 1).detach()
    with Seen() as seen:
        found = {name: metric(lazy) for name, metric in METRICS.items()}
    assert seen.products == 1
    for name, value in found.items():
        torch.testing.assert_close(value, METRICS[name](real))
    assert torch.equal(METRICS["max"](lazy[1:]), found["max"][1:])
    assert torch.equal(METRICS["min"](lazy.div_(2.0)), found["min"] / 2.0)
    hidden.data[2, 1] = torch.nan
    lazy = lazy_logits(hidden, weight, require=True).detach()
    for name in ("min", "max", "mean", "sum", "norm"):
        assert METRICS[name](lazy).isnan().nonzero().tolist() == [[2, 1]]


def test_metrics_under_autocast_are_of_logits_in_float32() -> None:
    """Autocast of a trainer that takes them has no part in how they are made."""
    hidden, weight = torch.randn(S, B, H), torch.randn(V, H)
    lazy = lazy_logits(hidden, weight, require=True)
    expected = {name: metric(lazy) for name, metric in METRICS.items()}
    with torch.autocast("cpu", torch.bfloat16):
        lazy = lazy_logits(hidden, weight, require=True)
        for name, metric in METRICS.items():
            assert torch.equal(metric(lazy), expected[name]), name


MEANS: list[Callable[[Tensor], Tensor]] = [
    torch.mean,
    lambda x: x.mean(-1).square().sum(),
    lambda x: x[1:].mean() * 0.0,
    lambda x: x.sum() / 7.0,
    lambda x: x.sum(-1).square().mean(),
    lambda x: 0 * x[:, :1].sum(),
]


@pytest.mark.parametrize("reduce", MEANS)
def test_a_mean_and_a_sum_have_a_gradient(reduce: Callable[[Tensor], Tensor]) -> None:
    """`0 * logits.sum()` joins a rank without tokens to the graph, and forms no logits."""
    tensors = {name: x.requires_grad_() for name, x in whole_tensors().items()}
    real = tensors["hidden"] @ (tensors["weight"] + 0.5 * tensors["b"] @ tensors["a"]).t()
    real = (real + tensors["bias"]) / 0.7
    expected = torch.autograd.grad(reduce(real), list(tensors.values()), retain_graph=True)
    leaves, lazy = leaves_and_logits()
    loss = reduce(lazy / 0.7)
    torch.testing.assert_close(loss.double(), reduce(real), rtol=1e-5, atol=1e-6)
    got = torch.autograd.grad(loss, list(leaves.values()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_a_sum_of_integers_is_of_cast_logits() -> None:
    hidden, weight = torch.randn(S, B, H), torch.randn(V, H)
    lazy, real = lazy_logits(hidden, weight), hidden @ weight.t()
    for dims in ((), (-1,)):
        assert torch.equal(lazy.sum(*dims, dtype=torch.int64), real.sum(*dims, dtype=torch.int64))


def test_a_sum_of_no_tokens_is_0() -> None:
    lazy = lazy_logits(torch.randn(S, B, H, requires_grad=True), torch.randn(V, H))
    assert lazy[:0].sum() == 0.0


@pytest.mark.parametrize("gradient", [False, True])
def test_results_are_the_callers_own(gradient: bool) -> None:
    """What is written into one consumer's results is not what the next one gets."""
    with torch.set_grad_enabled(gradient):
        hidden, weight = torch.randn(S, B, H, requires_grad=True), torch.randn(V, H)
        real, lazy = hidden @ weight.t(), lazy_logits(hidden, weight)
        target = labels(1, lazy.shape[:-1])
        for _ in range(2):
            entropy = ours.vocab_parallel_entropy(lazy)
            torch.testing.assert_close(entropy, _entropy(real))
            entropy.mul_(-3.0)
            stats = ours.vocab_parallel_token_stats(lazy, target, entropy=True)
            assert stats.entropy is not None
            torch.testing.assert_close(stats.entropy, _entropy(real))
            torch.testing.assert_close(stats.logprobs, logprobs(1).torch(real))
            for x in (stats.entropy, stats.logprobs, stats.lse):
                assert x is not None
                x.zero_()


@torch.no_grad()
def test_metrics_are_the_callers_own() -> None:
    """What is written into a metric is not what the next one gets."""
    lazy = lazy_logits(torch.randn(S, B, H), torch.randn(V, H))
    for metric in METRICS.values():
        found = metric(lazy)
        expected = found.clone()
        found.zero_()
        assert torch.equal(metric(lazy), expected)


@torch.no_grad()
def test_a_rank_that_nobody_asked_for() -> None:
    """A consumer that joins a pass gets no ranks of the other's targets."""
    lazy = lazy_logits(torch.randn(S, B, H), torch.randn(V, H))
    first, second = (labels(seed, lazy.shape[:-1]) for seed in (1, 2))
    ours.vocab_parallel_target_rank(lazy, first)
    assert ours.vocab_parallel_token_stats(lazy, second).target_rank is None


@pytest.mark.parametrize("gradient", [False, True])
def test_statistics_that_another_consumer_asked_for(gradient: bool) -> None:
    lazy = lazy_logits(torch.randn(S, B, H, requires_grad=gradient), torch.randn(V, H))
    target = labels(1, lazy.shape[:-1])
    everything = ours.vocab_parallel_token_stats(lazy, target, **EVERY_STATISTIC)
    assert all(getattr(everything, name) is not None for name in FLAGS)
    nothing = ours.vocab_parallel_token_stats(lazy, target)
    assert all(getattr(nothing, name) is None for name in FLAGS)
    torch.testing.assert_close(nothing.logprobs, everything.logprobs)


@pytest.mark.parametrize("vocab_size", [V - 1, V // 2, 1])
def test_blocks_of_padding_alone(vocab_size: int) -> None:
    """log_softmax says -inf there, though no such block is multiplied."""
    operands = [torch.randn(S, B, H, requires_grad=True), torch.randn(V, H, requires_grad=True)]
    upstream, found = torch.randn(S, B, V), []
    upstream[..., vocab_size:] = 0.0
    for logits in (lazy_logits(*operands), operands[0] @ operands[1].t()):
        with budgets.use(BUDGETS["narrow"]):
            values = ours.vocab_parallel_log_softmax(logits, vocab_size=vocab_size)
            loss = (values.masked_fill(values.isinf(), 0.0) * upstream).sum()
            found.append((values, *torch.autograd.grad(loss, operands)))
    assert bool(found[0][0][..., vocab_size:].isneginf().all())
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_metrics_that_are_others() -> None:
    """Two tensors' maximum, a norm's order and a detached mean are not taken for those above."""
    hidden, weight = torch.randn(S, B, H, requires_grad=True), torch.randn(V, H)
    real, other = hidden @ weight.t(), torch.zeros(S, B, V)
    lazy = lazy_logits(hidden, weight)
    torch.testing.assert_close(lazy.max(other), real.max(other))
    torch.testing.assert_close(torch.max(lazy.detach(), other), real.max(other))
    for order in (-1, 1):
        norm = torch.linalg.vector_norm(lazy.detach(), order)
        torch.testing.assert_close(norm, torch.linalg.vector_norm(real, order))
    assert not lazy.detach().mean().requires_grad
    with torch.no_grad():
        assert not lazy.mean().requires_grad
    torch.testing.assert_close(lazy.detach().mean(), real.mean())


@pytest.mark.own_sizes
@pytest.mark.parametrize("per_token", [False, True])
def test_as_many_other_rows_are_another_pass(per_token: bool) -> None:
    """As of a packed batch's sequences, one call each."""
    hidden, weight = torch.randn(S, B, H), torch.randn(V, H)
    logits, real = lazy_logits(hidden, weight), (hidden.double() @ weight.double().t())
    if per_token:
        temperature = torch.linspace(0.5, 2.0, S * B).view(S, B, 1)
        logits, real = logits / temperature, real / temperature
    log_p = real.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    for rows in (slice(0, 2), slice(1, 3), slice(0, 2)):
        found = ours.vocab_parallel_entropy(logits[rows])
        torch.testing.assert_close(found.double(), entropy[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.own_sizes
def test_a_row_at_another_temperature_is_another_pass() -> None:
    hidden, weight = torch.randn(1, B, H), torch.randn(V, H)
    temperature = torch.tensor([0.5, 2.0]).view(2, 1, 1)
    twice = lazy_logits(hidden, weight)[[0, 0]] / temperature
    log_p = ((hidden.double() @ weight.double().t())[[0, 0]] / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    for rows in (slice(0, 1), slice(1, 2)):
        found = ours.vocab_parallel_entropy(twice[rows])
        torch.testing.assert_close(found.double(), entropy[rows], rtol=1e-5, atol=1e-5)
