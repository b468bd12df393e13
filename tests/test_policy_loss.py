"""linear_policy_loss: what its function may do, what is refused, the denominator, main_grad.

Cut graphs and learnt tensors raise; copies stay ours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import linear_policy_loss, linear_token_stats
from mcore_logprobs.bench.counting import CollectivesMade
from mcore_logprobs.losses import ClippedLoss, SFTLoss
from tests.helpers.heads import (
    make_problem,
    plain_loss,
    products_as_on_a_gpu,
    shard_problem,
)
from tests.helpers.shards import world_group


def _nan_in_ignored(logprobs: Tensor, entropy: Tensor | None, old: Tensor) -> Tensor:
    return (logprobs - old).square()


def test_a_loss_that_is_nan_on_ignored_rows_hurts_nobody():
    problem = make_problem((24,))
    ignored = problem.target == -100
    assert ignored.any()
    hidden, weight, _ = shard_problem(problem, False)
    old = torch.where(ignored, float("nan"), 0.5)
    for compact in (False, True):
        loss, _ = linear_policy_loss(
            hidden, weight, problem.target, _nan_in_ignored, old, compact=compact
        )
        assert loss.isfinite()
        for grad in torch.autograd.grad(loss, [hidden, weight]):
            assert grad.isfinite().all()
            assert grad.any()


def wide_loss(logprobs: Tensor, entropy: Tensor | None, features: Tensor) -> Tensor:
    """Per-token tensors may have dimensions of their own."""
    return (features * logprobs.unsqueeze(-1)).sigmoid().sum(-1)


def only_entropy(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    assert entropy is not None
    return -entropy


@pytest.mark.parametrize(
    ("loss_fn", "tensors"),
    [(wide_loss, (torch.linspace(-2.0, 2.0, 60).view(6, 2, 5),)), (only_entropy, ())],
)
def test_equals_the_unfused_loss(loss_fn, tensors):
    problem = make_problem((6, 2), true_vocab=20)
    hidden, weight, _ = shard_problem(problem, False)
    common = {"entropy": True, "vocab_size": 20, "chunk_size": 5}
    loss, _ = linear_policy_loss(
        hidden, weight, problem.target, loss_fn, *tensors, denominator=9.0, **common
    )
    stats = linear_token_stats(hidden, weight, problem.target, **common)
    per_token = loss_fn(stats.logprobs, stats.entropy, *tensors)
    unfused = torch.where(problem.target != -100, per_token, 0.0).sum() / 9.0
    torch.testing.assert_close(loss, unfused, rtol=1e-5, atol=1e-6)
    grads = (torch.autograd.grad(x, [hidden, weight]) for x in (loss, unfused))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# ---- mistakes -----------------------------------------------------------------------------------


def test_a_loss_that_is_no_function_is_refused():
    hidden, weight = torch.zeros(4, 3), torch.zeros(5, 3)
    with pytest.raises(ValueError, match=r"loss_fn: expected a callable.*str"):
        linear_policy_loss(hidden, weight, torch.arange(4), "mean")
    with pytest.raises(ValueError, match=r"loss_fn: .* got the class SFTLoss; call it first: SFTL"):
        linear_policy_loss(hidden, weight, torch.arange(4), SFTLoss)


def sum_loss(logprobs: Tensor, entropy: Tensor | None, *_: Tensor) -> Tensor:
    return -logprobs.sum()


def float_loss(logprobs: Tensor, entropy: Tensor | None, *_: Tensor) -> float:
    return 1.0


def _refused(loss_fn: Any, tensors: tuple, options: dict) -> tuple[str, list[str]]:
    problem = make_problem((6, 2))
    hidden, weight, _ = shard_problem(problem, False)
    options = {"tp_group": dist.group.WORLD} | options
    with CollectivesMade() as made:
        try:
            linear_policy_loss(hidden, weight, problem.target, loss_fn, *tensors, **options)
        except ValueError as error:
            return str(error), made.names
    return "", made.names


@pytest.mark.own_sizes
@pytest.mark.parametrize("loss_fn", [sum_loss, float_loss])
def test_a_loss_of_another_shape_is_refused_on_every_rank(ranks, loss_fn):
    for message, _ in ranks(2).run(_refused, loss_fn, (), {}):
        assert "loss_fn" in message
        assert "(12,)" in message


# ---- main_grad, autograd ------------------------------------------------------------------------


def test_forward_alone_leaves_main_grad_alone():
    problem = make_problem((12,))
    weight = torch.nn.Parameter(problem.weight)
    weight.main_grad = torch.zeros_like(weight)
    weight.grad_added_to_main_grad = False
    linear_policy_loss(
        problem.hidden.requires_grad_(),
        weight,
        problem.target,
        plain_loss,
        gradient_accumulation_fusion=True,
    )
    assert not weight.main_grad.any()
    assert weight.grad_added_to_main_grad is False


def test_a_second_backward_is_refused_and_not_silently_wrong():
    problem = make_problem((12,))
    hidden, weight, _ = shard_problem(problem, False)
    loss, _ = linear_policy_loss(hidden, weight, problem.target, plain_loss)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        loss.backward()


# ---- what a function may do ----------------------------------------------------------------------


def detached(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    return -logprobs.detach()


def under_no_grad(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    with torch.no_grad():
        return -logprobs.exp()


def integer(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    return (logprobs < -1.0).long()


def constant(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    return torch.ones_like(logprobs)


def of_item(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    return torch.tensor(logprobs.tolist())


class _Forgetful(torch.autograd.Function):
    """A backward that gives its input nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return -x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def complex_numbers(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    return logprobs * (1 + 2j)


CUT = (detached, under_no_grad, integer, constant, of_item)


def _message(fn: Callable[..., Tensor], learns: str = "both") -> str:
    problem = make_problem((6, 2))
    hidden, weight, _ = shard_problem(problem, False)
    if learns == "weight":
        hidden = hidden.detach()
    elif learns == "nothing":
        hidden, weight = hidden.detach(), weight.detach()
    options = {"tp_group": world_group(), "entropy": True, "chunk_size": 5}
    try:
        linear_policy_loss(hidden, weight, problem.target, fn, **options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fn", CUT)
def test_a_loss_that_is_cut_off_raises(fn):
    for learns in ("both", "weight"):
        assert "cut off from the log-probabilities" in _message(fn, learns)
    # Where nothing is to learn, any loss is a number to log.
    assert _message(fn, "nothing") == ""
    with torch.no_grad():
        assert _message(fn) == ""


def test_a_loss_that_is_cut_off_raises_on_every_rank(ranks):
    for message in ranks(2).run(_message, detached):
        assert "cut off" in message


SCALE = torch.full((), 2.0, requires_grad=True)
FACTOR = torch.full((), 3.0, requires_grad=True)


def by_global(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    return logprobs * SCALE


def by_default(logprobs: Tensor, entropy: Tensor | None, *, factor: Tensor = FACTOR) -> Tensor:
    return logprobs * factor


class Critic(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(1, 1)

    def forward(self, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        return self.inner(logprobs.unsqueeze(-1)).squeeze(-1)


class Plain:
    def __init__(self) -> None:
        self.beta = torch.ones((), requires_grad=True)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        return logprobs * self.beta

    def method(self, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        return logprobs - self.beta


def strangers() -> dict[str, Callable[..., Tensor]]:
    """By the name under which the function holds a tensor that should learn."""
    temperature = torch.ones((), requires_grad=True)
    another, values = (temperature * 2.0).exp(), (temperature * 3.0).exp()
    held: dict[str, Any] = {"scale": torch.ones((), requires_grad=True)}
    betas = [torch.ones(()), torch.ones((), requires_grad=True)]
    critic, other = Critic(), Critic()

    def leaf(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        return logprobs * temperature

    def computed(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        return logprobs * values + another.detach()

    def from_dict(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        return logprobs * held["scale"]

    def from_list(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        return logprobs * betas[0] * betas[1]

    def by_module(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        return critic(other(logprobs, entropy).detach() + logprobs, entropy)

    def with_an_empty_cell(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        return logprobs * (temperature if logprobs.numel() else later)

    def out_of_reach(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        return leaf(logprobs, entropy)

    if not CUT:
        later = None  # never: the closure's cell stays empty, as of a name that is assigned later

    def alone(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        return temperature.expand_as(logprobs)

    return {
        "'temperature'": leaf,
        "'values'": computed,
        "\"held['scale']\"": from_dict,
        "'critic.inner.": by_module,
        "'betas[1]'": from_list,
        "'temperature' (shape ()), which": with_an_empty_cell,
        "a tensor of shape () other than its arguments": out_of_reach,
        "'temperature' (shape ())": alone,
        "'SCALE'": by_global,
        "'factor'": by_default,
        "'Critic.inner.": Critic(),
        "'Plain.beta'": Plain(),
        "'self.beta'": Plain().method,
        "'SCALE' (shape ()), which": functools.partial(by_global),
        "'argument 0'": functools.partial(lambda beta, x, e: x * beta, values),
        "'beta'": functools.partial(lambda x, e, beta: x * beta, beta=temperature),
    }


@pytest.mark.parametrize("name", strangers())
def test_a_learnt_tensor_in_the_closure_is_named(name):
    for learns in ("both", "nothing"):
        message = _message(strangers()[name], learns)
        assert f"depends on {name}" in message, message
        assert "gets none here" in message
    with torch.no_grad():
        assert _message(strangers()[name]) == ""


def test_frozen_tensors_in_the_closure_are_fine():
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)

    def fn(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        return frozen(logprobs.unsqueeze(-1)).squeeze(-1) * SCALE.detach()

    assert _message(fn) == ""


# ---- in place ----------------------------------------------------------------------------------


def spoils(logprobs: Tensor, entropy: Tensor, old: Tensor) -> Tensor:
    loss = logprobs.sub_(old.mul_(0.5)).exp_() * entropy.neg_()
    old.zero_()
    return loss.neg_()


def spares(logprobs: Tensor, entropy: Tensor, old: Tensor) -> Tensor:
    return (logprobs - 0.5 * old).exp() * entropy


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("trains", [True, False])
def test_a_function_in_place_changes_nothing_of_the_callers(trains, compact):
    problem = make_problem((6, 2))
    old = torch.randn(6, 2)
    kept = old.clone()

    def run(fn: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        hidden, weight, _ = shard_problem(problem, False)
        if not trains:
            hidden, weight = hidden.detach(), weight.detach()
        loss, stats = linear_policy_loss(
            hidden, weight, problem.target, fn, old, entropy=True, compact=compact, chunk_size=5
        )
        grads = torch.autograd.grad(loss, [hidden, weight]) if trains else ()
        return loss.detach(), stats.logprobs, stats.entropy, *grads

    assert all(map(torch.equal, run(spoils), run(spares)))
    assert torch.equal(old, kept)


# ---- the denominator ---------------------------------------------------------------------------

EXACT = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16)


def test_losses_without_a_gradient_of_their_own_or_with_imaginary_parts_raise():
    forgetful = lambda lp, _: _Forgetful.apply(lp)  # noqa: E731
    assert "gives no gradient to the log-probabilities" in _message(forgetful)
    assert _message(forgetful, "nothing") == ""
    for learns in ("both", "nothing"):
        expected = "expected real numbers, got a loss of torch.complex64"
        assert expected in _message(complex_numbers, learns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fusion", [False, True])
def test_a_factor_of_zero_leaves_nothing_of_a_spoilt_row(dtype, fusion):
    problem = make_problem((6, 2), dtype=dtype)
    hidden, weight, _ = shard_problem(problem, False)
    with torch.no_grad():
        hidden[2] = torch.nan
    target = problem.target.clamp(min=0)
    weight.main_grad = torch.ones(weight.shape)
    for factor in (0.0, 1.0):
        loss, _ = linear_policy_loss(
            hidden,
            weight,
            target,
            lambda lp, _: -lp,
            tp_group=world_group(),
            gradient_accumulation_fusion=fusion,
        )
        assert loss.isnan()
        d_hidden, d_weight = torch.autograd.grad(
            factor * loss, (hidden, weight), allow_unused=fusion
        )
        d_weight = weight.main_grad - 1.0 if fusion else d_weight
        if factor:
            assert d_hidden[2].isnan().all()
            assert d_weight.isnan().all()
        else:
            assert torch.equal(d_hidden, torch.zeros_like(d_hidden))
            assert torch.equal(d_weight, torch.zeros_like(d_weight))


@pytest.mark.parametrize("dtype", [*EXACT, torch.float32, torch.float64], ids=str)
def test_a_denominator_of_any_dtype_is_the_same_number(dtype):
    problem = make_problem((6, 2))

    def run(denominator: Any) -> tuple[Tensor, ...]:
        hidden, weight, _ = shard_problem(problem, False)
        loss, _ = linear_policy_loss(
            hidden, weight, problem.target, lambda x, e: -x.exp(), denominator=denominator
        )
        return loss.detach(), *torch.autograd.grad(loss, [hidden, weight])

    # Both are exact in every dtype; 1 / 249 and 1 / 3 are rounded in each.
    for number in (249, 3):
        expected = run(float(number))
        for given in (torch.tensor(number, dtype=dtype), torch.tensor([[number]], dtype=dtype)):
            assert all(map(torch.equal, run(given), expected))


ROWS = torch.arange(96)
# What a token's gradient is times, by the token; over which denominator.
SHARES = {
    "plain": (torch.linspace(0.5, 2.0, 96), 1.0),
    "large batch": (torch.linspace(0.5, 2.0, 96), 3.0 * 2**15),
    "small weights": (torch.linspace(0.5, 2.0, 96) / 32768.0, 1.0),
    "one large ratio": (torch.where(ROWS == 7, math.exp(12.0), 1.0), 1e6),
    "tiles far apart": (4.0 ** (9.0 - 24.0 * (ROWS // 24)), 1.0),
    "none in the first tiles": ((ROWS >= 48) * 1e-5, 1.0),
}


@pytest.mark.parametrize("kind", ["plain", "lora and bias", "segments"])
@pytest.mark.parametrize("chunk_size", [None, 24], ids=["one tile", "tiles"])
@pytest.mark.parametrize("shares", SHARES)
def test_gradients_of_float16_are_formed_before_the_loss_scale(
    monkeypatch, shares, chunk_size, kind
):
    """Products of float16 as a GPU makes them: whatever a token's share, none is lost, none inf."""
    products_as_on_a_gpu(monkeypatch)
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(0, 512, (96,), generator=generator)
    sizes = [(96, 16), (512, 16)] + [(512,), (3, 16), (512, 3)] * (kind == "lora and bias")
    operands = [torch.randn(size, generator=generator) for size in sizes]
    of_token, denominator = SHARES[shares]
    found = []
    for dtype in (torch.float16, torch.float64):
        leaves = [x.half().to(dtype).requires_grad_() for x in operands]
        hidden, weight, *others = leaves
        options = {"lora": (*others[1:], 0.5), "bias": others[0]} if others else {}
        if kind == "segments" and dtype == torch.float16:
            options["invariant_segments"] = 2
        if kind == "plain" and dtype == torch.float16:
            weight.main_grad = torch.zeros(512, 16)
        loss, _ = linear_policy_loss(
            hidden,
            weight,
            target,
            lambda logprobs, entropy, share: -(logprobs + 0.01 * entropy) * share,
            of_token.to(torch.float64 if dtype == torch.float64 else torch.float32),
            entropy=True,
            denominator=denominator,
            chunk_size=chunk_size,
            gradient_accumulation_fusion=hasattr(weight, "main_grad"),
            **options,
        )
        # The trainer's scale: the largest gradient of a row is near 1.
        (loss * (denominator / of_token.max())).backward()
        grads = [x.grad for x in leaves]
        grads[1] = getattr(weight, "main_grad", weight.grad)
        found.append(grads)
    for got, expected in zip(*found, strict=True):
        error = (got.double() - expected).norm() / expected.norm()
        assert error < 1e-3
    # Of a row: what the gradients' own dtype has of so small ones is lost only there.
    got, expected = (grads[0].double() for grads in found)
    rows = (got - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=2.0**-12)
    assert rows.max() < (1e-2 if shares == "one large ratio" else 2e-3)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_row_of_float16_without_a_finite_gradient_spoils_no_other(monkeypatch, value):
    """It has no part in the tile's scale."""
    products_as_on_a_gpu(monkeypatch)
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(0, 512, (24,), generator=generator)
    operands = [torch.randn(n, 16, generator=generator) for n in (24, 512)]
    share = torch.full((24,), 1e-5)
    grads = []
    for of_row in (value, 1e-5):
        hidden, weight = (x.half().requires_grad_(i == 0) for i, x in enumerate(operands))
        share[5] = of_row
        loss, _ = linear_policy_loss(hidden, weight, target, lambda x, _, f: x * f, share)
        grads += torch.autograd.grad(loss * 1e5, hidden)
    others = torch.arange(24) != 5
    assert not grads[0][5].isfinite().all()
    assert torch.equal(grads[0][others], grads[1][others])


def test_a_loss_in_low_precision_is_summed_in_float64():
    """2047 different numbers, whose sum bf16 does not have."""
    count = 2047
    problem = make_problem((count,), width=2, vocab=4, ignored=0.0)
    hidden, weight, _ = shard_problem(problem, False)
    values = torch.linspace(0.1, 0.9, count)

    def fn(logprobs: Tensor, entropy: Tensor | None, values: Tensor) -> Tensor:
        return (0.0 * logprobs + values).bfloat16()

    loss, _ = linear_policy_loss(hidden, weight, problem.target, fn, values, denominator=count)
    exact = values.bfloat16().double().mean()
    assert values.bfloat16().sum().double() / count != exact
    torch.testing.assert_close(loss.double(), exact, rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("compact", [False, True])
def test_no_token_that_counts(compact):
    """Also where the loss itself is NaN there: a micro-batch of padding alone."""
    problem = make_problem((6, 2), ignored=2.0)
    assert (problem.target == -100).all()
    hidden, weight, _ = shard_problem(problem, False)
    loss, _ = linear_policy_loss(
        hidden, weight, problem.target, lambda x, e: (x - 1.0).log(), compact=compact
    )
    assert loss.item() == 0.0
    for grad in torch.autograd.grad(loss, [hidden, weight]):
        assert not grad.any()


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.night)])
def test_under_a_caller_s_torch_compile(backend: str) -> None:
    hidden, weight = torch.randn(6, 8), torch.randn(24, 8)
    target, old, advantages = torch.arange(6), torch.randn(6), torch.randn(6)

    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_policy_loss(hidden, weight, target, ClippedLoss(), old, advantages)[0]

    def gradients(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in (hidden, weight)]
        return torch.autograd.grad(run(*inputs), inputs)

    got = gradients(torch.compile(run, backend=backend))
    torch.testing.assert_close(got, gradients(run))
