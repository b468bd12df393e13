"""torch's tracers on a CPU: make_fx, torch.compile and export do not stop at a check of values.

A graph has the number of rows that it was traced with: the loops over chunks are unrolled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import mcore_logprobs as ours
from mcore_logprobs.kernels import budgets

ROWS, HIDDEN, VOCAB = 6, 8, 24
NARROW = replace(
    budgets.CPU,
    tile_rows=4,
    chunk_bytes=1,
    min_block=10,
    max_block=10,
    block_step=1,
    held_bytes=400,
)


def on_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    stats = ours.vocab_parallel_token_stats(hidden @ weight.T, target, entropy=True)
    return stats.logprobs - 0.1 * stats.entropy


def on_hidden(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    stats = ours.linear_token_stats(hidden, weight, target, entropy=True)
    return stats.logprobs - 0.1 * stats.entropy


def sliced(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Rows without a common stride."""
    logits = (hidden @ weight.T).view(2, ROWS // 2, VOCAB)[:, :-1]
    target = target.view(2, ROWS // 2)[:, :-1]
    return ours.vocab_parallel_logprobs(logits, target).reshape(-1)


def entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return ours.vocab_parallel_entropy(hidden @ weight.T)


def lse_beside_a_rank(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Of the results before the rank, which has no gradient, one is None."""
    stats = ours.linear_token_stats(hidden, weight, target, target_rank=True)
    assert stats.target_rank is not None
    assert stats.lse is not None
    return stats.lse * (stats.target_rank + 2)


def per_token_temperature(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    temperature = 0.5 + target.clamp(min=0) / VOCAB
    return ours.vocab_parallel_logprobs(hidden @ weight.T, target, temperature=temperature)


def largest(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return ours.vocab_parallel_topk(hidden @ weight.T, 3)[0].sum(-1)


def biased(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return ours.linear_token_stats(
        hidden, weight, target, logit_bias={3: 0.5, 7: -1.0}, disallowed_ids=[9, 23]
    ).lse


def of_kept_ids(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    ids = torch.stack([(target.clamp(min=0) + i) % VOCAB for i in range(3)], -1)
    kept = ids.reshape(-1), torch.arange(0, 3 * ROWS + 1, 3)
    return ours.vocab_parallel_sampling_logprobs(hidden @ weight.T, target, kept_ids=kept)


def log_softmax_of_ids(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    ids = target.unsqueeze(-1)
    return ours.linear_gather(hidden, weight, ids, log_softmax=True).squeeze(-1)


def largest_of_hidden(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return ours.linear_topk(hidden, weight, 3)[0].sum(-1)


def kl(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    adapter = weight[:2, :].detach() / 4.0, weight[:, :2].detach(), 0.5
    teacher = {"teacher_hidden": hidden.detach(), "teacher_weight": weight.detach() / 2.0}
    return ours.linear_kl_div(hidden, weight, lora=adapter, **teacher)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_()
    target = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    target[1] = -100
    return hidden, weight, target


def step(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Value and gradients, of an upstream gradient that differs per token."""

    def run(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        value = function(hidden, weight, target)
        upstream = torch.arange(1, value.shape[0] + 1, dtype=value.dtype)
        return (value.detach(), *torch.autograd.grad((value * upstream).sum(), [hidden, weight]))

    return run


@pytest.mark.parametrize(
    "function", [on_logits, on_hidden, per_token_temperature, largest, biased, of_kept_ids]
)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(function: Callable[..., Tensor], mode: str) -> None:
    run = step(function)
    graph = make_fx(run, tracing_mode=mode)(*inputs())
    others = inputs()
    want = run(*others)
    hidden, weight, target = (x.detach() for x in others)  # the gradients are in the graph
    for got, expected in zip(graph(hidden, weight, target), want, strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)
    # What the tracer could not branch on is an assertion in its graph.
    if function is on_logits:
        with pytest.raises(RuntimeError, match=r"id outside \[0, \w+\)"):
            graph(hidden, weight, target + VOCAB)


@pytest.mark.parametrize(
    "function",
    [
        *(on_logits, on_hidden),
        *(pytest.param(f, marks=pytest.mark.night) for f in (per_token_temperature, largest)),
    ],
)
def test_torch_compile(function: Callable[..., Tensor]) -> None:
    """With breaks of the graph where dynamo does not follow."""
    given = inputs()
    want = step(function)(*given)
    compiled = torch.compile(function, backend="aot_eager")
    for got, expected in zip(step(compiled)(*given), want, strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        *(on_logits, on_hidden, log_softmax_of_ids),
        *(
            pytest.param(x, marks=pytest.mark.night)
            for x in (kl, sliced, entropy, largest, largest_of_hidden, biased, lse_beside_a_rank)
        ),
    ],
)
def test_torch_compile_without_a_break(function: Callable[..., Tensor]) -> None:
    """Also where a head has two tiles and three blocks, none of them as wide as its memory."""
    given = inputs()
    with budgets.use(NARROW):
        want = step(function)(*given)
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        for got, expected in zip(step(compiled)(*given), want, strict=True):
            assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_temperature_of_each_sequence_where_sizes_are_symbols() -> None:
    """Its own size is a number, which dynamo finds in no tuple of symbols."""

    def call(logits: Tensor, target: Tensor, temperature: Tensor) -> Tensor:
        return ours.vocab_parallel_logprobs(logits, target, temperature=temperature)

    given = torch.randn(2, 3, VOCAB), torch.randint(0, VOCAB, (2, 3)), torch.rand(3) + 0.5
    for x in given[:2]:
        torch._dynamo.maybe_mark_dynamic(x, [0, 1])
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), call(*given))


def rounded(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return ours.linear_token_stats(hidden, weight, target, logits_dtype=torch.bfloat16).logprobs


def rounded_entries(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    ids = target.clamp(min=0).unsqueeze(-1)
    return ours.linear_gather(hidden, weight, ids, logits_dtype=torch.bfloat16).squeeze(-1)


@pytest.mark.parametrize(
    "function", [rounded, pytest.param(rounded_entries, marks=pytest.mark.night)]
)
def test_inductor_rounds_logits_too(function: Callable[..., Tensor]) -> None:
    """It leaves out a cast to 16 bits and back where it can."""
    given = inputs()
    want = step(function)(*given)
    compiled = torch.compile(function, fullgraph=True)
    for got, expected in zip(step(compiled)(*given), want, strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_bfloat16_head_without_a_break() -> None:
    """What this CPU multiplies is asked while the graph is made: it cannot be traced."""
    hidden, weight, target = inputs()
    given = (*(x.detach().bfloat16().requires_grad_() for x in (hidden, weight)), target)
    compiled = torch.compile(rounded, fullgraph=True, backend="eager")
    with budgets.use(NARROW):
        got, want = step(compiled)(*given), step(rounded)(*given)
    torch.testing.assert_close(got, want)


def with_filter(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return ours.linear_sampling_logprobs(hidden, weight, target, top_k=3)


def with_kept_blocks(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return ours.linear_token_stats(hidden, weight, target, saved_bytes=1 << 20).logprobs


def over_an_output(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return ours.vocab_parallel_logprobs(hidden @ weight.T, target, inplace_backward=True)


def into_main_grad(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return ours.linear_token_stats(
        hidden, weight, target, gradient_accumulation_fusion=True
    ).logprobs


@pytest.mark.night  # the page's list, which says no more than what torch itself says
@pytest.mark.parametrize(
    "function", [with_filter, with_kept_blocks, over_an_output, into_main_grad]
)
def test_what_raises_without_a_break(function: Callable[..., Tensor]) -> None:
    """As docs/troubleshooting.md says; with breaks all of them run."""
    given = inputs()
    given[1].main_grad = torch.zeros(VOCAB, HIDDEN)  # type: ignore[attr-defined]
    given[1].grad_added_to_main_grad = False  # type: ignore[attr-defined]
    with budgets.use(NARROW):
        with pytest.raises(RuntimeError):
            step(torch.compile(function, fullgraph=True, backend="aot_eager"))(*given)
        torch._dynamo.reset()
        got = torch.compile(function, backend="aot_eager")(*given)
        torch.testing.assert_close(got, function(*given))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_torch_func_are_refused(
    transform: Callable[..., Callable[..., Tensor]],
) -> None:
    def transformed(logits: Tensor, target: Tensor) -> Tensor:
        return ours.vocab_parallel_logprobs(logits, target).sum()

    with pytest.raises(RuntimeError, match=r"vocab_parallel_logprobs: expected torch\.autograd"):
        transform(transformed)(torch.randn(3, 8), torch.arange(3))


@pytest.mark.parametrize("function", [on_logits, on_hidden])
def test_export(function: Callable[..., Tensor]) -> None:
    class Module(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return function(*given)

    given = inputs()
    with torch.no_grad():
        exported = torch.export.export(Module(), given, strict=False).module()
        assert torch.allclose(exported(*given), function(*given), rtol=1e-5, atol=1e-6)
