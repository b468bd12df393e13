"""What wants no gradient gets none, and changes nobody else's; what is not asked for costs nothing.

Sizes: rows do not divide the chunk, and ids repeat, so that entries of one row add up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
    linear_topk_distill,
    vocab_parallel_entropy,
    vocab_parallel_gather,
    vocab_parallel_topk_distill,
)
from tests.helpers.heads import linear_filtered_stats

ROWS, HIDDEN, VOCAB, K = 7, 5, 11, 3


def _inputs() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        "hidden": torch.randn(ROWS, HIDDEN),
        "weight": torch.randn(VOCAB, HIDDEN),
        "bias": torch.randn(VOCAB),
    }


TARGET = torch.arange(ROWS) % VOCAB
IDS = torch.tensor([[1, 4, 1], [0, 10, 2], [5, 5, 5], [3, 2, 1], [9, 8, 7], [6, 0, 6], [2, 4, 10]])
TEACHER = torch.linspace(-2.0, 2.0, ROWS * K).reshape(ROWS, K)

# From (hidden, weight, bias) to one tensor.
OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token_stats": lambda h, w, b: linear_token_stats(h, w, TARGET, bias=b, chunk_size=3).logprobs,
    "gather": lambda h, w, b: linear_gather(h, w, IDS, bias=b, chunk_size=3),
    "gather_log_softmax": lambda h, w, b: linear_gather(
        h, w, IDS, log_softmax=True, bias=b, chunk_size=3
    ),
    "topk_distill": lambda h, w, b: linear_topk_distill(
        h, w, TEACHER, IDS, bias=b, chunk_size=3, entropy=True
    )[0],
    "topk": lambda h, w, b: linear_topk(h, w, K, bias=b, chunk_size=3)[0],
    "sampling": lambda h, w, b: linear_sampling_logprobs(
        h, w, TARGET, top_k=8, bias=b, chunk_size=3
    ),
    "kl_div": lambda h, w, b: linear_kl_div(
        h, w, torch.linspace(-2.0, 2.0, ROWS * VOCAB).view(ROWS, VOCAB), bias=b, chunk_size=3
    ),
    "map": lambda h, w, b: linear_map(h, w, lambda z: z.square().sum(-1), bias=b, chunk_size=3),
    "policy_loss": lambda h, w, b: linear_policy_loss(
        h, w, TARGET, lambda logprobs, _: logprobs.square(), bias=b, chunk_size=3
    )[0],
}


def _gradients(operation: str, wanted: tuple[str, ...]) -> dict[str, Tensor | None]:
    inputs = _inputs()
    for name in wanted:
        inputs[name].requires_grad_()
    out = OPERATIONS[operation](*inputs.values())
    out.backward(torch.linspace(0.5, 2.0, out.numel()).reshape(out.shape))
    return {name: x.grad for name, x in inputs.items()}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_gradient_alone_is_the_same(operation):
    together = _gradients(operation, ("hidden", "weight", "bias"))
    for name, expected in together.items():
        alone = _gradients(operation, (name,))
        assert [n for n, grad in alone.items() if grad is not None] == [name]
        torch.testing.assert_close(alone[name], expected, rtol=1e-6, atol=1e-6)
        assert expected.any()


def test_statistics_are_none_unless_asked_for():
    hidden, weight, _ = _inputs().values()

    def loss_fn(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        assert entropy is None
        return -logprobs

    for stats in (
        linear_token_stats(hidden, weight, TARGET),
        linear_filtered_stats(hidden, weight, TARGET, top_k=3, top_p=1.0),
        linear_policy_loss(hidden, weight, TARGET, loss_fn)[1],
    ):
        fields = [field.name for field in dataclasses.fields(stats)]
        assert {name for name in fields if getattr(stats, name) is not None} == {"logprobs", "lse"}


class _Lost(torch.autograd.Function):
    """Identity whose backward has no gradient for its input: the operation before gets None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_output_that_gets_no_gradient_gives_none(operation):
    inputs = {name: x.requires_grad_() for name, x in _inputs().items()}
    _Lost.apply(OPERATIONS[operation](*inputs.values())).sum().backward()
    for x in inputs.values():
        assert x.grad is None


def test_gathered_logits_that_get_no_gradient_give_none():
    logits = torch.randn(ROWS, VOCAB, requires_grad=True)
    _Lost.apply(vocab_parallel_gather(logits, IDS, log_softmax=True)).sum().backward()
    assert logits.grad is None


@pytest.mark.parametrize("normalize", ["vocab", "topk"])
def test_distillation_whose_entropy_alone_is_used(normalize):
    """The gradient is the entropy's; the log-probabilities' own upstream is None, not zeros."""
    upstream = torch.linspace(-1.0, 2.0, ROWS)
    options = {"normalize": normalize, "entropy": True, "chunk_size": 3}

    logits = _inputs()["hidden"] @ _inputs()["weight"].t() + _inputs()["bias"]
    leaf, plain = (logits.clone().requires_grad_() for _ in range(2))
    (vocab_parallel_topk_distill(leaf, TEACHER, IDS, **options)[2] * upstream).sum().backward()
    (vocab_parallel_entropy(plain) * upstream).sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-5, atol=1e-6)

    fused, expected = (
        {name: x.requires_grad_() for name, x in _inputs().items()} for _ in range(2)
    )
    bias = {"bias": fused["bias"]}
    found = linear_topk_distill(fused["hidden"], fused["weight"], TEACHER, IDS, **bias, **options)
    (found[2] * upstream).sum().backward()
    whole = expected["hidden"] @ expected["weight"].t() + expected["bias"]
    (vocab_parallel_entropy(whole) * upstream).sum().backward()
    for name, x in fused.items():
        torch.testing.assert_close(x.grad, expected[name].grad, rtol=1e-5, atol=1e-6)


def test_distillation_of_one_id():
    hidden, weight, _ = _inputs().values()
    student, teacher, _ = linear_topk_distill(hidden, weight, TEACHER[:, :1], IDS[:, :1])
    assert torch.equal(student, linear_gather(hidden, weight, IDS[:, :1], log_softmax=True))
    assert not teacher.any()
    with pytest.raises(ValueError, match="k >= 1, got k = 0"):
        linear_topk_distill(hidden, weight, TEACHER[:, :0], IDS[:, :0])


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_a_low_precision_main_grad_is_rounded_once_a_tile(chunk_size):
    """float32 products are added to a bf16 main_grad, as Megatron's own kernel does."""
    inputs = {name: x.bfloat16() for name, x in _inputs().items()}
    before = torch.randn(VOCAB, HIDDEN).bfloat16()
    plain = torch.nn.Parameter(inputs["weight"].float())
    weight = torch.nn.Parameter(inputs["weight"])
    weight.main_grad, weight.grad_added_to_main_grad = before.clone(), False
    upstream = torch.linspace(0.5, 2.0, ROWS)
    tiles = [slice(0, ROWS)] if chunk_size is None else [slice(0, 3), slice(3, 6), slice(6, 7)]

    expected = before.clone()
    for rows in tiles:
        plain.grad = None
        stats = linear_token_stats(inputs["hidden"][rows].float(), plain, TARGET[rows])
        stats.logprobs.backward(upstream[rows])
        expected += plain.grad
    stats = linear_token_stats(
        inputs["hidden"].requires_grad_(),
        weight,
        TARGET,
        gradient_accumulation_fusion=True,
        chunk_size=chunk_size,
    )
    stats.logprobs.backward(upstream)
    assert weight.main_grad.dtype == torch.bfloat16
    # dLogits are rounded to bf16 before the product: an ulp or two of the sum.
    torch.testing.assert_close(weight.main_grad, expected, rtol=2**-7, atol=2**-7)


# As OPERATIONS, of a row each; row 1 of the target asks for nothing.
_IGNORED = TARGET.clone().index_fill_(0, torch.tensor([1]), -100)
_CAPPED: dict[str, Callable[..., Tensor]] = {
    "token_stats": lambda h, w, **o: linear_token_stats(h, w, _IGNORED, **o).logprobs,
    "sampling_top_k": lambda h, w, **o: linear_sampling_logprobs(h, w, _IGNORED, top_k=3, **o),
    "sampling_top_p": lambda h, w, **o: linear_sampling_logprobs(h, w, TARGET, top_p=0.8, **o),
    "gather": lambda h, w, **o: linear_gather(h, w, IDS, **o).sum(-1),
    "gather_log_softmax": lambda h, w, **o: linear_gather(h, w, IDS, log_softmax=True, **o).sum(-1),
    "topk": lambda h, w, **o: linear_topk(h, w, K, **o)[0].sum(-1),
    "map": lambda h, w, **o: linear_map(h, w, lambda z: z.square().sum(-1), **o),
    "kl_div": lambda h, w, **o: linear_kl_div(
        h, w, torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)), **o
    ),
    "policy_loss": lambda h, w, **o: linear_policy_loss(
        h, w, _IGNORED, lambda logprobs, _: logprobs.square(), **o
    )[0].expand(ROWS),
}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("operation", _CAPPED)
def test_a_nan_row_without_upstream_has_no_gradient_under_a_softcap(operation, with_bias):
    given = _inputs()
    hidden, bias = given["hidden"], given["bias"].requires_grad_() if with_bias else None
    clean = hidden.clone().requires_grad_()
    hidden[1] = torch.nan
    hidden.requires_grad_()
    upstream = torch.linspace(0.5, 2.0, ROWS)
    upstream[1] = 0.0
    found, expected = (
        torch.autograd.grad(
            _CAPPED[operation](h, given["weight"], bias=bias, softcap=5.0, chunk_size=3),
            h,
            upstream,
        )[0]
        for h in (hidden, clean)
    )
    assert torch.equal(found[1], torch.zeros(HIDDEN))
    others = torch.arange(ROWS) != 1
    assert expected[others].abs().sum(-1).gt(0).all()
    torch.testing.assert_close(found[others], expected[others])
