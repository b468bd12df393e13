"""Statistics of logits: odd rows and arguments, a caller's autograd, `inplace_backward=True`."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import numpy as np
import pytest
import torch
from torch import Tensor

import mcore_logprobs as ml
from mcore_logprobs import (
    linear_token_stats,
    vocab_parallel_entropy,
    vocab_parallel_log_softmax,
    vocab_parallel_logprobs,
    vocab_parallel_target_rank,
    vocab_parallel_token_stats,
    vocab_parallel_topk,
)
from mcore_logprobs.checks import check_temperature
from mcore_logprobs.sources.given import given_logits
from tests.helpers import oracles
from tests.helpers.memory import TensorsMade
from tests.helpers.shards import VOCAB, make_target, on_ranks, shard, world_group

FIELDS = ("logprobs", "entropy", "lse")

# ---- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"label_smoothing": 0.1}], ids=str)
def test_logits_of_every_size_in_one_row(options):
    sizes = torch.tensor([-120.0, 80.0, 1e4, -1e4, 0.0, 1e-3])
    whole = sizes[torch.randint(0, 6, (12, VOCAB))] + torch.randn(12, VOCAB)
    target = make_target((12,), VOCAB)
    upstream = torch.randn(3, 12)

    def run(logits: Tensor, stats: object) -> list[Tensor]:
        found = [getattr(stats, name) for name in FIELDS]
        grad = torch.autograd.grad(found, logits, list(upstream.to(found[0].dtype)))[0]
        return [*(x.detach() for x in found), grad]

    leaves = [x.requires_grad_() for x in (whole.clone(), whole.clone(), whole.double())]
    got = run(leaves[0], vocab_parallel_token_stats(leaves[0], target, entropy=True, **options))
    plain = run(leaves[1], oracles.token_stats(leaves[1], target, dtype=torch.float32, **options))
    exact = run(leaves[2], oracles.token_stats(leaves[2], target, **options))
    for name, *values in zip((*FIELDS, "gradient"), got, plain, exact, strict=True):
        oracles.assert_no_worse(*values, name=name)


def _ranks_under(softcap: float, whole: Tensor, target: Tensor) -> list[Tensor]:
    """From logits, from hidden states without and with a bias of 0; and the largest ids."""
    own, group = shard(whole)[0].detach(), world_group()
    options: Any = {"softcap": softcap, "temperature": 1.7, "tp_group": group}
    ids = vocab_parallel_topk(own, whole.shape[1], **options)[1]
    eye, head = torch.eye(len(whole)), own.t().contiguous()
    found = [vocab_parallel_target_rank(own, target, **options)]
    for bias in (None, torch.zeros(own.shape[1])):
        fused = linear_token_stats(eye, head, target, target_rank=True, bias=bias, **options)
        found.append(fused.target_rank)
    return [*found, ids]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_columns_that_the_softcap_makes_equal_are_ties(ranks, world):
    """Which those are is float32's affair; of others the order is the raw logits'."""
    whole = torch.randn(16, VOCAB) * 100
    whole[0] = 0.0
    whole[0, :3] = torch.tensor([100.0, 200.0, 300.0])
    target = torch.randint(0, VOCAB, (16,))
    target[0] = 0
    for softcap in (3.0, 30.0):
        z = torch.tanh(whole / softcap) * softcap
        exact = (z > z.gather(1, target.unsqueeze(1))).sum(-1)
        assert exact[0] == (0 if softcap == 3.0 else 2)
        raw = (whole > whole.gather(1, target.unsqueeze(1))).sum(-1)
        assert softcap == 30.0 or not torch.equal(exact, raw)
        for *found, ids in on_ranks(ranks, world, _ranks_under, softcap, whole, target):
            for rank in found:
                assert torch.equal(rank, exact)
            # In the list a target stands behind all that are higher, among its equals.
            place = (ids == target.unsqueeze(1)).int().argmax(-1)
            ties = (z == z.gather(1, target.unsqueeze(1))).sum(-1)
            assert ((exact <= place) & (place < exact + ties)).all()


def _only_rank(whole: Tensor, target: Tensor) -> Tensor:
    return vocab_parallel_target_rank(shard(whole)[1], target, tp_group=world_group())


@pytest.mark.parametrize("world", [1, 3])
def test_the_rank_of_infinities(ranks, world):
    whole = torch.randn(VOCAB, VOCAB)
    whole[:, 7], whole[:, 3] = -torch.inf, torch.inf
    found = on_ranks(ranks, world, _only_rank, whole, torch.arange(VOCAB))[0]
    assert (found[3], found[7]) == (0, VOCAB - 1)
    order = whole.argsort(-1, descending=True)
    assert torch.equal(found, (order == torch.arange(VOCAB)[:, None]).nonzero()[:, 1])
    whole[:, 5] = torch.nan
    found = on_ranks(ranks, world, _only_rank, whole, torch.full((VOCAB,), 5))[0]
    assert (found == -1).all()


@pytest.mark.parametrize("log_softmax", [False, True])
def test_no_id_is_asked_for(log_softmax):
    hidden, weight = torch.randn(3, 2, 4), torch.randn(11, 4).requires_grad_()
    ids = torch.zeros(3, 2, 0, dtype=torch.int64)
    for values in (
        ml.vocab_parallel_gather(hidden @ weight.t(), ids, log_softmax=log_softmax),
        ml.linear_gather(hidden, weight, ids, log_softmax=log_softmax),
    ):
        assert values.shape == (3, 2, 0)
        (gradient,) = torch.autograd.grad(values.sum(), weight)
        assert not gradient.any()


def test_rows_of_infinities_and_nan() -> None:
    logits = torch.randn(4, 6)
    logits[0], logits[1, 1:], logits[2, 3] = -torch.inf, -torch.inf, torch.nan
    logits.requires_grad_()
    stats = vocab_parallel_token_stats(logits, torch.zeros(4).long(), sum_pi_squared=True)
    assert stats.sum_pi_squared[:2].tolist() == [0.0, 1.0]
    assert stats.sum_pi_squared[2].isnan()
    torch.testing.assert_close(stats.sum_pi_squared[3], logits[3].softmax(-1).square().sum())
    stats.sum_pi_squared.sum().backward()
    assert logits.grad[2].isnan().all()
    assert logits.grad[[0, 1, 3]].isfinite().all()


def _upstream_in_masked_columns() -> Tensor:
    logits, columns = torch.randn(5, VOCAB), torch.arange(VOCAB)
    logits[:, 11:] = torch.nan
    logits.requires_grad_()
    out = vocab_parallel_log_softmax(logits, vocab_size=11)
    assert out[:, 11:].isneginf().all()
    upstream = torch.randn(5, VOCAB)
    grads = [
        torch.autograd.grad(out, logits, g, retain_graph=True)[0]
        for g in (upstream, upstream * (columns < 11))
    ]
    assert torch.equal(*grads)
    return grads[0]


def test_a_gradient_into_masked_columns_of_the_log_softmax_goes_nowhere():
    grad = _upstream_in_masked_columns()
    assert grad.isfinite().all()
    assert not grad[:, 11:].any()


# ---- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_integer_targets_of_other_widths(dtype):
    whole, target = torch.randn(4, VOCAB), torch.tensor([0, 5, 12, 23])
    assert torch.equal(
        vocab_parallel_logprobs(whole, target.to(dtype)), vocab_parallel_logprobs(whole, target)
    )


def test_a_cpu_scalar_is_a_number() -> None:
    logits, target, half = torch.randn(4, 6), torch.zeros(4).long(), torch.tensor(0.5)
    for call in (
        lambda t: vocab_parallel_logprobs(logits, target, temperature=t),
        lambda t: vocab_parallel_entropy(logits, temperature=t),
        lambda t: ml.linear_token_stats(logits, logits, target, temperature=t).logprobs,
    ):
        assert torch.equal(call(half), call(0.5))
    # Of no device, so that it goes with logits of any.
    assert check_temperature(half, torch.Size((4,)), torch.device("meta")) == 0.5


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_temperatures_at_the_limits(per_token: bool, backend: str) -> None:
    """The smallest gives each argmax, the largest all ids alike; NaN neither, nor its gradient."""
    logits = torch.randn(5, VOCAB)
    target = logits.argmax(-1)
    for temperature, logprob in ((1.2e-38, 0.0), (8.5e37, -math.log(VOCAB))):
        leaf = logits.clone().requires_grad_()
        given = torch.full((5,), temperature) if per_token else temperature
        stats = vocab_parallel_token_stats(
            leaf, target, temperature=given, entropy=True, sum_pi_squared=True, backend=backend
        )
        expected = torch.full((5,), logprob)
        torch.testing.assert_close(stats.logprobs, expected)
        torch.testing.assert_close(stats.entropy, -expected)
        torch.testing.assert_close(stats.sum_pi_squared, expected.exp())
        (stats.logprobs + stats.entropy + stats.sum_pi_squared).sum().backward()
        assert leaf.grad is not None
        assert bool(leaf.grad.isfinite().all())


def test_float64_logits_keep_their_digits_over_float32_temperatures() -> None:
    logits = (5.0 * torch.randn(7, 31, dtype=torch.float64)).requires_grad_()
    target, temperature = torch.randint(31, (7,)), torch.linspace(0.3, 2.9, 7)
    found = vocab_parallel_logprobs(logits, target, temperature=temperature)
    exact = (logits / temperature.double().unsqueeze(1)).log_softmax(-1)
    exact = exact.gather(1, target.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=1e-13)
    upstream = torch.linspace(-1.0, 2.0, 7, dtype=torch.float64)
    got, want = (torch.autograd.grad((x * upstream).sum(), logits) for x in (found, exact))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_softcaps_and_scales_at_the_limits() -> None:
    """A head whose logits are those numbers: hidden states of a unit matrix."""
    logits, target = torch.randn(5, VOCAB), torch.arange(5)
    alike = torch.full((5,), -math.log(VOCAB))
    plain = logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    for option, expected in (
        ({"softcap": 1.2e-38}, alike),
        ({"softcap": 8.5e37}, plain),
        ({"logit_scale": 1.2e-38}, alike),
    ):
        found = ml.linear_token_stats(torch.eye(5), logits.T.contiguous(), target, **option)
        torch.testing.assert_close(found.logprobs, expected)


def test_ids_and_biases_of_other_types() -> None:
    """From NumPy, and one-element tensors: what has an `__index__`, but no bool."""
    logits, target = torch.randn(4, 6), torch.zeros(4).long()

    def of(**keywords: Any) -> Tensor:
        return vocab_parallel_logprobs(logits, target, **keywords)

    bias = {np.int64(2): np.float32(1.5), torch.tensor(3): Fraction(-1, 2)}
    assert torch.equal(of(logit_bias=bias), of(logit_bias={2: 1.5, 3: -0.5}))
    ids = [np.int32(4), torch.tensor(5)]
    assert torch.equal(of(disallowed_ids=ids), of(disallowed_ids=[4, 5]))
    for wrong in ({"logit_bias": {True: 1.0}}, {"logit_bias": {1: True}}):
        with pytest.raises(ValueError, match=r"logit_bias: expected .*True"):
            of(**wrong)
    for flag in (True, np.bool_(True), torch.tensor(True)):
        with pytest.raises(ValueError, match="disallowed_ids: expected integers"):
            of(disallowed_ids=[flag])


# ---- groups -------------------------------------------------------------------------------------


# ---- autograd -----------------------------------------------------------------------------------


def _twice(whole: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _, logits = shard(whole)
    out = vocab_parallel_token_stats(logits, target, tp_group=world_group(), entropy=True)
    loss = (out.logprobs * out.logprobs.detach()).sum() + out.entropy.sum()
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits, retain_graph=True)
    loss.backward()
    assert logits.grad is not None
    return first, second, logits.grad


@pytest.mark.parametrize("world", [1, 2])
def test_the_graph_can_be_walked_again(ranks, world):
    whole, target = torch.randn(6, VOCAB), make_target((6,), VOCAB)
    for first, second, third in on_ranks(ranks, world, _twice, whole, target):
        assert first.any()
        assert torch.equal(first, second)
        assert torch.equal(first, third)


def test_no_grad_makes_no_graph():
    logits, target = torch.randn(6, VOCAB, requires_grad=True), make_target((6,), VOCAB)
    options = {"entropy": True, "target_rank": True}
    with torch.no_grad():
        out = vocab_parallel_token_stats(logits, target, **options)
    detached = vocab_parallel_token_stats(logits.detach(), target, **options)
    attached = vocab_parallel_token_stats(logits, target, **options)
    for name in (*FIELDS, "target_rank"):
        assert not getattr(out, name).requires_grad
        assert not getattr(detached, name).requires_grad
        assert getattr(attached, name).requires_grad == (name != "target_rank")
    assert torch.equal(out.logprobs, attached.logprobs)


# ---- inplace_backward=True -----------------------------------------------------------------------


def _both(whole: Tensor, target: Tensor, upstream: Tensor, options: dict) -> tuple:
    def grad(inplace: bool) -> tuple[Tensor, Tensor]:
        leaf, _ = shard(whole)
        logits = leaf * 1.5
        out = vocab_parallel_token_stats(
            logits,
            target,
            entropy=True,
            tp_group=world_group(),
            chunk_size=2,
            inplace_backward=inplace,
            **options,
        )
        loss = (out.logprobs * upstream).sum() + (out.entropy * upstream.flip(0)).sum()
        (found,) = torch.autograd.grad(loss, leaf)
        return out.logprobs, found

    return *grad(False), *grad(True)


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "softcap": 5.0, "vocab_size": 13}], ids=str
)
@pytest.mark.parametrize(("world", "dtype"), [(1, torch.bfloat16), (2, torch.float32)], ids=str)
def test_same_gradient(ranks, world, dtype, options):
    whole = torch.randn(3, 5, VOCAB).to(dtype)
    target = make_target((3, 5), options.get("vocab_size", VOCAB))
    upstream = torch.randn(3, 5)
    results = on_ranks(ranks, world, _both, whole, target, upstream, options)
    assert any(grad.any() for *_, grad in results)
    for plain, plain_grad, inplace, grad in results:
        assert torch.equal(plain, inplace)
        assert torch.equal(plain_grad, grad)


def test_no_tensor_of_the_logits_size_is_made():
    hidden = torch.randn(128, 8, requires_grad=True)
    logits = hidden @ torch.randn(8, 4096)
    target = make_target((128,), 4096)
    logprobs = vocab_parallel_logprobs(logits, target, chunk_size=2, inplace_backward=True)
    upstream = torch.randn(128)
    chunk = 2 * 4096 * 4
    with TensorsMade() as made:
        # The gradient with respect to the logits is what the matrix product's backward gets.
        torch.autograd.grad(logprobs, hidden, upstream)
    assert made.larger_than(2 * chunk) == []
    assert made.peak <= 5 * chunk


def _logits() -> Tensor:
    return torch.randn(4, VOCAB, requires_grad=True) * 2


def _retained() -> Tensor:
    logits = _logits()
    logits.retain_grad()
    return logits


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, VOCAB, requires_grad=True),
        lambda: torch.randn(2, 2, VOCAB, requires_grad=True).view(4, VOCAB),
        _retained,
        lambda: (torch.randn(1, VOCAB, requires_grad=True) * 2).expand(4, VOCAB),
        lambda: (torch.randn(1, VOCAB, requires_grad=True) * 2).expand(2, VOCAB),
        lambda: (torch.randn(4 * VOCAB, requires_grad=True) * 2).unfold(0, VOCAB, 5),
        lambda: torch.tanh(_logits()),
        lambda: torch.exp(_logits()),
        lambda: torch.softmax(_logits(), -1),
        lambda: torch.sigmoid(_logits()),
    ],
    ids=[
        *("leaf", "view of a leaf", "retained", "expanded", "expanded to 2", "overlapping"),
        *("tanh", "exp", "softmax", "sigmoid"),
    ],
)
def test_refused_where_the_logits_are_needed(make):
    logits = make()
    kept = logits.detach().clone()
    with pytest.raises(ValueError, match="inplace_backward"):
        vocab_parallel_logprobs(
            logits, make_target(logits.shape[:-1], VOCAB), inplace_backward=True
        )
    assert torch.equal(logits.detach(), kept)


class _Head(torch.autograd.Function):
    """A product whose view is given, as fused layers and DTensor's local part are."""

    @staticmethod
    def forward(ctx, x):
        return (x * 2.0).view(4, VOCAB)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0].view(2, 2, VOCAB) * 2.0


def test_a_view_that_an_autograd_function_gives_is_no_view_of_a_leaf():
    x, target = torch.randn(2, 2, VOCAB, requires_grad=True), make_target((4,), VOCAB)
    upstream, gradients = torch.randn(4), []
    for inplace in (False, True):
        logprobs = vocab_parallel_logprobs(_Head.apply(x), target, inplace_backward=inplace)
        gradients += torch.autograd.grad(logprobs, x, upstream)
    assert torch.equal(*gradients)


def test_a_leaf_is_fine_where_no_gradient_is_asked_for():
    logits = torch.randn(4, VOCAB, requires_grad=True)
    target = make_target((4,), VOCAB)
    expected = vocab_parallel_logprobs(logits, target)
    with torch.no_grad():
        found = vocab_parallel_logprobs(logits, target, inplace_backward=True)
    assert torch.equal(found, expected)
    found = vocab_parallel_logprobs(logits.detach(), target, inplace_backward=True)
    assert torch.equal(found, expected)


def test_one_row_may_have_any_stride():
    whole = torch.randn(1, VOCAB, requires_grad=True)
    target = torch.tensor([3])
    upstream = torch.tensor([0.7])
    logits = (whole * 2).as_strided((1, VOCAB), (0, 1))
    values = vocab_parallel_logprobs(logits, target, inplace_backward=True)
    (grad,) = torch.autograd.grad(values, whole, upstream)
    expected = (whole * 2).log_softmax(-1)[:, 3]
    torch.testing.assert_close(grad, torch.autograd.grad(expected, whole, upstream)[0])


def strides_of_gradients() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(of logits, of their gradient) for three orders of the leading dimensions in memory."""
    found = []
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
        seen: list[Tensor] = []
        logits = (torch.randn(2, 3, 5, 8, requires_grad=True) * 1.0).permute(*order, 3)
        logits.register_hook(seen.append)
        target = torch.zeros(logits.shape[:-1], dtype=torch.int64)
        vocab_parallel_logprobs(logits, target, tp_group=world_group()).sum().backward()
        found.append((logits.stride(), seen[0].stride()))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_the_gradient_lies_as_the_logits_do(ranks, world: int) -> None:
    """Else the operation that made the logits would copy it."""
    for found in ranks(world).run(strides_of_gradients):
        for logits, gradient in found:
            assert gradient == logits


def in_views(inplace: bool) -> list[int]:
    """How many chunks logits of several views have; values and gradients are those of a copy."""
    found = []
    transposed, shortened = (lambda x: x.transpose(0, 1)), (lambda x: x[:, :-1])
    for view_of, shape in (
        *((transposed, shape) for shape in ((2, 300, 8), (300, 2, 8), (3, 40, 8))),
        (shortened, (300, 3, 8)),
        (shortened, (2, 301, 4096)),
    ):
        memory = torch.randn(shape, requires_grad=True)
        view = view_of(memory * 1.0)
        target = make_target(view.shape[:-1], 8)
        group, upstream = world_group(), torch.randn(view.shape[:-1])
        laid_out = given_logits(view, tp_group=group, inplace_backward=inplace)
        found.append(len(list(laid_out.chunks())))
        how: Any = {"tp_group": group, "backend": "torch"}  # compiling kernels would take seconds
        got = vocab_parallel_logprobs(view, target, inplace_backward=inplace, **how)
        expected = vocab_parallel_logprobs(view_of(memory * 1.0).contiguous(), target, **how)
        torch.testing.assert_close(got, expected)
        both = [torch.autograd.grad(x, memory, upstream)[0] for x in (got, expected)]
        torch.testing.assert_close(*both)
    return found


@pytest.mark.own_sizes
@pytest.mark.parametrize("inplace", [False, True])
def test_views_of_few_rows_are_no_call_each(ranks, inplace: bool) -> None:
    """Of transposed logits, or of short sequences without their last tokens; long ones are read
    where they lie.
    """
    assert ranks(1).run(in_views, inplace) == [[1, 1, 1, 1, 2]]
    assert ranks(2).run(in_views, inplace) == [[1, 1, 1, 1, 2]] * 2


def test_a_record_of_logits_that_lie_with_the_sequence_first() -> None:
    real = torch.randn(3, 4, 18)
    target = torch.randint(0, 18, (3, 4))
    ids = torch.stack([target.flatten(), (target.flatten() + 1) % 18], 1)
    upstream, found = torch.linspace(0.5, 2.0, 12).view(3, 4), []
    plain = real.clone().requires_grad_()
    kept = plain.gather(-1, ids.view(3, 4, 2)).log_softmax(-1)[..., 0]
    lying = real.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    record = ids.flatten(), torch.arange(13) * 2
    got = ml.vocab_parallel_sampling_logprobs(lying, target, kept_ids=record, missing="full")
    for value, x in ((got, lying), (kept, plain)):
        found.append([value, *torch.autograd.grad(value, x, upstream)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_record_has_no_id_that_a_bias_forbids_beside_others() -> None:
    record = torch.tensor([1, 3, 4, 6]), torch.tensor([0, 2, 4])
    with pytest.raises(ValueError, match="no disallowed id in a record, got id 3 in row 0"):
        ml.vocab_parallel_sampling_logprobs(
            torch.randn(2, 11),
            torch.tensor([1, 4]),
            kept_ids=record,
            logit_bias={3: -math.inf},
            disallowed_ids=[5],
        )


def test_disallowed_ids_are_not_written_into_a_caller_s_bias() -> None:
    bias, target = torch.zeros(8), torch.tensor([0, 2, 1])
    given = {"logit_bias": bias, "disallowed_ids": [5]}
    vocab_parallel_token_stats(torch.randn(3, 8), target, **given)
    linear_token_stats(torch.randn(3, 4), torch.randn(8, 4), target, **given)
    assert torch.equal(bias, torch.zeros(8))
