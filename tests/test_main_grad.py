"""linear_token_stats with gradient_accumulation_fusion: main_grad as Megatron fills it."""

from __future__ import annotations

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
from torch import Tensor

from mcore_logprobs import linear_token_stats
from tests.helpers.heads import (
    Problem,
    make_problem,
    shard_problem,
)
from tests.helpers.shards import on_ranks, world_group, world_size


def _main_grad(
    problems: list[Problem], main_dtype: torch.dtype, zero_out: bool, options: dict
) -> tuple[Tensor, Tensor]:
    """(main_grad, the sum of plain gradients) over the microbatches."""
    _, weight, _ = shard_problem(problems[0], False)
    weight = torch.nn.Parameter(weight.detach())
    weight.main_grad = torch.zeros_like(weight, dtype=main_dtype)
    weight.grad_added_to_main_grad = False
    if zero_out:
        weight.zero_out_wgrad = True
    expected = torch.zeros_like(weight, dtype=torch.float64)
    for problem in problems:
        hidden, plain, _ = shard_problem(problem, False)
        common = {"tp_group": world_group(), **options}
        upstream = problem.upstream["logprobs"]
        out = linear_token_stats(
            hidden, weight, problem.target, gradient_accumulation_fusion=True, **common
        )
        (out.logprobs * upstream).sum().backward()
        assert weight.grad_added_to_main_grad is True
        # The hooks of data parallelism fire on a gradient of the right shape, which nobody adds.
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape
        if zero_out:
            assert not weight.grad.any()
        weight.grad, weight.grad_added_to_main_grad = None, False
        unfused, same = hidden.detach().float().requires_grad_(), plain.detach().float()
        same.requires_grad_()
        out = linear_token_stats(unfused, same, problem.target, **common)
        (out.logprobs * upstream).sum().backward()
        expected += same.grad
        torch.testing.assert_close(hidden.grad.float(), unfused.grad, rtol=8e-3, atol=8e-3)
    assert weight.main_grad.dtype == main_dtype
    return weight.main_grad, expected


@pytest.mark.parametrize(
    ("world", "dtype", "chunk_size"), [(1, torch.bfloat16, None), (2, torch.float32, 5)], ids=str
)
def test_main_grad_accumulates_in_float32(ranks, world, dtype, chunk_size):
    problems = [make_problem((12,), dtype=dtype, names=("logprobs",)) for _ in range(4)]
    options = {"chunk_size": chunk_size, "vocab_size": 20}
    for problem in problems:
        problem.weight = problems[0].weight
        problem.target.clamp_(max=19)
    for zero_out in (False, True):
        for found, expected in on_ranks(
            ranks, world, _main_grad, problems, torch.float32, zero_out, options
        ):
            scale = expected.abs().max()
            assert (found.double() - expected).abs().max() <= 2e-6 * scale


def _against_megatron(problems: list[Problem]) -> tuple[Tensor, Tensor]:
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size())
    try:
        vocab, width = problems[0].weight.shape
        config = ModelParallelConfig(
            tensor_model_parallel_size=world_size(), use_cpu_initialization=True
        )
        layer = ColumnParallelLinear(
            width, vocab, config=config, init_method=torch.nn.init.normal_, bias=False
        )
        _, shard, _ = shard_problem(problems[0], False)
        with torch.no_grad():
            layer.weight.copy_(shard)
        theirs = torch.zeros_like(layer.weight, dtype=torch.float32)
        ours = torch.nn.Parameter(shard.detach())
        ours.main_grad = torch.zeros_like(ours, dtype=torch.float32)
        for problem in problems:
            upstream = problem.upstream["logprobs"]
            hidden = problem.hidden.clone().requires_grad_()
            logits, _ = layer(hidden)
            loss = vocab_parallel_cross_entropy(logits.clone(), problem.target)
            (loss * upstream).sum().backward()
            theirs += layer.weight.grad  # what Megatron's data parallelism does after each
            layer.weight.grad = None
            same = problem.hidden.clone().requires_grad_()
            out = linear_token_stats(
                same, ours, problem.target, gradient_accumulation_fusion=True, chunk_size=5
            )
            (out.loss * upstream).sum().backward()
            torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(same.grad, hidden.grad, rtol=1e-5, atol=1e-5)
        return ours.main_grad, theirs
    finally:
        parallel_state.destroy_model_parallel()


def test_main_grad_is_what_megatrons_own_layer_accumulates(ranks):
    problems = [make_problem((6, 2), ignored=0.0, names=("logprobs",)) for _ in range(4)]
    for ours, theirs in ranks(2).run(_against_megatron, problems):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_a_low_precision_main_grad_is_rounded_once_a_tile(chunk_size):
    """float32 products are added to a bf16 main_grad, as Megatron's own kernel does."""
    problem = make_problem((7,), dtype=torch.bfloat16, ignored=0.0, names=("logprobs",))
    upstream, before = problem.upstream["logprobs"], torch.randn(24, 8).bfloat16()
    plain = problem.weight.float().requires_grad_()
    weight = torch.nn.Parameter(problem.weight)
    weight.main_grad, weight.grad_added_to_main_grad = before.clone(), False
    expected = before.clone()
    for rows in torch.arange(7).split(chunk_size or 7):
        stats = linear_token_stats(problem.hidden[rows].float(), plain, problem.target[rows])
        expected += torch.autograd.grad(stats.logprobs, plain, upstream[rows])[0]
    stats = linear_token_stats(
        problem.hidden.requires_grad_(),
        weight,
        problem.target,
        gradient_accumulation_fusion=True,
        chunk_size=chunk_size,
    )
    stats.logprobs.backward(upstream)
    assert weight.main_grad.dtype == torch.bfloat16
    # dLogits are rounded to bf16 before the product: an ulp or two of the sum.
    torch.testing.assert_close(weight.main_grad, expected, rtol=2**-7, atol=2**-7)
