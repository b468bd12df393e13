"""Heads whose products have operands of low precision and float32 results, as a GPU makes them.

A CPU casts such operands to float32 first. Here they stay as they are, so that what is rounded on
the way to a product is rounded here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mcore_logprobs as ml
from mcore_logprobs.kernels import budgets
from tests.engine.cases import BUDGETS
from tests.helpers.heads import products_as_on_a_gpu

ROWS, WIDTH, VOCAB, RANK = 70, 64, 250, 5
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    products_as_on_a_gpu(monkeypatch)


class Head:
    """Operands that a dtype has exactly, and the logits and gradients of float64.

    Attributes:
        tensors: hidden `[70, 64]`, weight `[250, 64]`, A `[5, 64]`, B `[250, 5]`.
    """

    def __init__(self, dtype: torch.dtype, *, lora: bool, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int, by: float) -> Tensor:
            x = torch.randn(shape, generator=generator) * by
            return x.to(dtype).requires_grad_()

        self.tensors = [drawn(ROWS, WIDTH, by=1.0), drawn(VOCAB, WIDTH, by=0.25)]
        if lora:
            self.tensors += [drawn(RANK, WIDTH, by=0.25), drawn(VOCAB, RANK, by=0.5)]
        self.target = torch.randint(VOCAB, (ROWS,), generator=generator)

    def keywords(self) -> dict[str, Any]:
        a_and_b = self.tensors[2:]
        return {"lora": (*a_and_b, 0.7)} if a_and_b else {}

    def exact(self) -> tuple[list[Tensor], Tensor]:
        """(the tensors, their logits)."""
        wide = [x.detach().double().requires_grad_() for x in self.tensors]
        logits = wide[0] @ wide[1].T
        if len(wide) > 2:
            logits = logits + 0.7 * (wide[0] @ wide[2].T) @ wide[3].T
        return wide, logits


def weighted(per_token: Tensor) -> Tensor:
    return (per_token.double() * torch.linspace(-1.0, 2.0, ROWS, dtype=torch.float64)).sum()


def assert_gradients(found: Tensor, expected: Tensor, head: Head, wide: list[Tensor]) -> None:
    """To what operands of the dtype and gradients of it have."""
    digits = torch.finfo(head.tensors[0].dtype).eps
    pairs = zip(
        torch.autograd.grad(found, head.tensors), torch.autograd.grad(expected, wide), strict=True
    )
    for mine, exact in pairs:
        assert (mine.double() - exact).norm() <= digits * exact.norm()


@HALF
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("sizes", ["steps", "gpu"])
def test_statistics_are_of_exact_products(dtype: torch.dtype, lora: bool, sizes: str) -> None:
    head = Head(dtype, lora=lora)
    wide, logits = head.exact()
    log_probs = logits.log_softmax(-1)
    own = log_probs.gather(-1, head.target[:, None])
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    with budgets.use(BUDGETS[sizes]):
        stats = ml.linear_token_stats(
            *head.tensors[:2], head.target, entropy=True, target_rank=True, **head.keywords()
        )
        found = weighted(stats.logprobs) + weighted(stats.entropy)
        assert_gradients(found, weighted(own[:, 0]) + weighted(entropy), head, wide)
    torch.testing.assert_close(stats.logprobs.double(), own[:, 0], rtol=0.0, atol=1e-4)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=0.0, atol=1e-4)
    assert torch.equal(stats.target_rank, (log_probs > own).sum(-1))


@HALF
@pytest.mark.parametrize("lora", [False, True])
def test_single_logits_are_those_of_a_block(dtype: torch.dtype, lora: bool) -> None:
    head = Head(dtype, lora=lora)
    operands = *head.tensors[:2], head.target[:, None]
    logits = ml.linear_gather(*operands, **head.keywords())
    log_probs = ml.linear_gather(*operands, log_softmax=True, **head.keywords())
    lse = ml.linear_token_stats(*head.tensors[:2], head.target, **head.keywords()).lse
    torch.testing.assert_close(logits - lse[:, None], log_probs, rtol=0.0, atol=5e-5)


@HALF
def test_a_divergence_from_an_adapted_teacher(dtype: torch.dtype) -> None:
    """Whose adapter is all that it has before the student."""
    head = Head(dtype, lora=True)
    wide, of_teacher = head.exact()
    log_q, log_p = (z.log_softmax(-1) for z in (of_teacher, wide[0] @ wide[1].T))
    hidden, weight, a, b = (x.detach() for x in head.tensors)
    divergence = ml.linear_kl_div(
        hidden, weight, teacher_hidden=hidden, teacher_weight=weight, teacher_lora=(a, b, 0.7)
    )
    exact = (log_q.exp() * (log_q - log_p)).sum(-1)
    torch.testing.assert_close(divergence.double(), exact, rtol=1e-4, atol=0.0)


@HALF
@pytest.mark.parametrize("lora", [False, True])
def test_a_policy_loss(dtype: torch.dtype, lora: bool) -> None:
    head = Head(dtype, lora=lora)
    wide, logits = head.exact()
    own = logits.log_softmax(-1).gather(-1, head.target[:, None])[:, 0]
    factor = torch.linspace(-1.0, 2.0, ROWS)
    with budgets.use(BUDGETS["gpu"]):
        loss, stats = ml.linear_policy_loss(
            *head.tensors[:2], head.target, lambda x, _, f: x * f, factor, **head.keywords()
        )
        assert_gradients(loss, weighted(own), head, wide)
    torch.testing.assert_close(stats.logprobs.double(), own, rtol=0.0, atol=1e-4)


# ---- what float16 does not have ------------------------------------------------------------------


def _adapted(hidden: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return hidden @ weight.T + scale * (hidden @ a.T) @ b.T


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize(
    ("of_a", "of_b", "scale", "upstream"),
    [
        (1.0, 3e-4, 65536.0, 1e-4),  # U is beyond float16, dB near its end
        (1.0 / 256.0, 4.0, 64.0, 1.0),  # dU is, once a policy loss has lifted dLogits
        (2.0**-9, 1.0, 2.0**-9, 1e3),  # U is below what float16 has digits for
    ],
)
def test_low_rank_products_outside_float16(
    of_a: float, of_b: float, scale: float, upstream: float, policy: bool
) -> None:
    head = Head(torch.float16, lora=True)
    hidden, weight, a, b = head.tensors
    a, b = ((x.detach() * by).requires_grad_() for x, by in ((a, of_a), (b, of_b)))
    head.tensors = [hidden, weight, a, b]
    wide = [x.detach().double().requires_grad_() for x in head.tensors]
    own = _adapted(*wide, scale).log_softmax(-1).gather(-1, head.target[:, None])[:, 0]
    keywords = {"lora": (a, b, scale), "chunk_size": 32}
    factor = torch.linspace(-1.0, 2.0, ROWS) * upstream
    if policy:
        found, stats = ml.linear_policy_loss(
            hidden, weight, head.target, lambda x, _, f: x * f, factor, **keywords
        )
    else:
        stats = ml.linear_token_stats(hidden, weight, head.target, **keywords)
        found = (stats.logprobs * factor).sum()
    torch.testing.assert_close(stats.logprobs.double(), own, rtol=1e-5, atol=1e-3)
    assert_gradients(found, (own * factor.double()).sum(), head, wide)


@HALF
@pytest.mark.parametrize("logit_scale", [0.01, 1.0, 100.0])
def test_a_softcap_before_a_learning_bias(dtype: torch.dtype, logit_scale: float) -> None:
    """dz is rounded once the slope and the scale are on it."""
    head = Head(dtype, lora=False)
    bias = torch.linspace(-1.0, 1.0, VOCAB).to(dtype).requires_grad_()
    hidden, weight = ((x.detach() * logit_scale**-0.5).requires_grad_() for x in head.tensors)
    head.tensors = [hidden, weight, bias]
    wide = [x.detach().double().requires_grad_() for x in head.tensors]
    logits = 30.0 * torch.tanh((wide[0] @ wide[1].T) * logit_scale / 30.0) + wide[2]
    own = logits.log_softmax(-1).gather(-1, head.target[:, None])[:, 0]
    loss, _ = ml.linear_policy_loss(
        *(hidden, weight, head.target, lambda x, _, f: x * f, torch.linspace(-1.0, 2.0, ROWS)),
        bias=bias,
        softcap=30.0,
        logit_scale=logit_scale,
    )
    assert_gradients(loss, weighted(own), head, wide)


def test_a_cold_row_that_does_not_count_costs_the_others_nothing() -> None:
    """The scale of a float16 tile is of what its rows ask for, each at its temperature."""
    head = Head(torch.float16, lora=False)
    wide, logits = head.exact()
    target, temperature = head.target.clone(), torch.ones(ROWS)
    target[7], temperature[7] = -100, 1e-6
    own = logits.log_softmax(-1).gather(-1, head.target[:, None])[:, 0]
    factor = torch.linspace(-1.0, 2.0, ROWS) * (target >= 0)
    loss, _ = ml.linear_policy_loss(
        *(*head.tensors, target, lambda x, _, f: x * f, factor), temperature=temperature
    )
    assert_gradients(loss, (own * factor.double()).sum(), head, wide)


@HALF
def test_a_wider_low_rank_is_rounded_alike_everywhere(dtype: torch.dtype) -> None:
    """Under autocast the blocks' B is rounded; that of single logits is too."""
    head = Head(dtype, lora=True)
    hidden, weight = (x.detach() for x in head.tensors[:2])
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(*size, generator=generator) * 0.25 for size in ((RANK, WIDTH), (VOCAB, 5)))
    options = {"lora": (a, b, 2.0)}
    with torch.autocast("cpu", dtype=dtype):
        logits = ml.linear_map(hidden, weight, lambda z: z, **options)
        stats = ml.linear_token_stats(
            hidden, weight, logits.argmax(-1), target_rank=True, **options
        )
        single = ml.linear_gather(hidden, weight, head.target[:, None], **options)
    assert not stats.target_rank.any()
    torch.testing.assert_close(single, logits.gather(-1, head.target[:, None]), rtol=0, atol=1e-4)


# ---- memory -------------------------------------------------------------------------------------


class _LargestOf(TorchDispatchMode):
    """The most bytes that an operator made for a tensor of a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.bytes = dtype, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype is self.dtype:
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


def of_policy_loss(hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
    target = torch.arange(len(hidden))
    return ml.linear_policy_loss(hidden, weight, target, lambda x, _: -x, **options)[0]


def of_map(hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return ml.linear_map(hidden, weight, lambda z: z.square().sum(-1), **options).sum()


@pytest.mark.parametrize("call", [of_policy_loss, of_map], ids=["policy_loss", "map"])
@pytest.mark.parametrize("softcap", [None, 8.0])
def test_dlogits_take_a_chunk_where_a_tile_is_held(
    call: Callable[..., Tensor], softcap: float | None
) -> None:
    """And not a tile, of whose columns the chunk is a part."""
    rows, width, vocab, block = 64, 2, 4096, 256
    hidden, weight = (torch.randn(n, width).bfloat16().requires_grad_() for n in (rows, vocab))
    options = {} if softcap is None else {"softcap": softcap, "bias": torch.zeros(vocab).bfloat16()}
    sizes = budgets.CPU.__dict__ | {"max_block": block, "chunk_bytes": 1, "block_step": 16}
    with budgets.use(budgets.Budgets(**sizes)), _LargestOf(torch.bfloat16) as largest:
        call(hidden, weight, **options).backward()
    assert weight.grad is not None
    chunk = 2 * rows * (block + 64)  # rows may lie a line of a cache further apart
    assert 2 * vocab * width < 2 * rows * block <= largest.bytes <= chunk
