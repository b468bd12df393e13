"""A bfloat16 head with logits rounded to it, on a CPU that multiplies bfloat16 numbers natively.

A CPU without the instructions multiplies them all the same, slowly, so that the tests run anywhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_logprobs import (
    linear_gather,
    linear_kl_div,
    linear_policy_loss,
    linear_token_stats,
)
from mcore_logprobs.kernels import products
from tests.helpers import oracles
from tests.helpers.heads import make_problem, shard_problem
from tests.helpers.shards import on_ranks, world_group

ROUNDED = {"logits_dtype": torch.bfloat16}


class _ProductDtypes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm"):
            self.found.append(args[-1].dtype)
        return func(*args, **(kwargs or {}))


def _loss(logprobs: Tensor, entropy: Tensor | None, factor: Tensor) -> Tensor:
    assert entropy is not None
    return (logprobs + 0.1 * entropy) * factor


def _run(problem: Any, options: dict, sequence_parallel: bool, policy: bool, native: bool) -> Any:
    before = products._cpu_multiplies_bfloat16
    products._cpu_multiplies_bfloat16 = lambda: native
    try:
        hidden, weight, bias = shard_problem(problem, sequence_parallel)
        keywords = {
            "entropy": True,
            "bias": bias,
            "tp_group": world_group(),
            "sequence_parallel": sequence_parallel,
            **options,
        }
        with _ProductDtypes() as dtypes:
            if policy:
                factor = problem.upstream["logprobs"]
                total, stats = linear_policy_loss(
                    hidden, weight, problem.target, _loss, factor, **keywords
                )
            else:
                stats = linear_token_stats(hidden, weight, problem.target, **keywords)
                own, spread = stats.logprobs, stats.entropy
                total = ((own + 0.1 * spread) * problem.upstream["logprobs"]).sum()
            grads = torch.autograd.grad(total, [hidden, weight] + ([] if bias is None else [bias]))
        return stats.logprobs.detach(), stats.entropy.detach(), *grads, dtypes.found
    finally:
        products._cpu_multiplies_bfloat16 = before


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 20])
@pytest.mark.parametrize("vocab", [256, 264])  # AMX reads rows up to a multiple of 32 numbers
@pytest.mark.parametrize("layout", [(1, False), (2, True)], ids=str)
def test_all_products_are_bfloat16_and_no_worse_than_a_bfloat16_heads(
    ranks, layout, vocab, chunk_size, policy
):
    world, sequence_parallel = layout
    problem = make_problem((48,), width=64, vocab=vocab, dtype=torch.bfloat16, bias=True)
    options = ROUNDED | {"chunk_size": chunk_size, "softcap": None}
    runs = on_ranks(ranks, world, _run, problem, options, sequence_parallel, policy, True)
    for run in runs:
        assert set(run[-1]) == {torch.bfloat16}

    def truth(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (problem.hidden, problem.weight)]
        bias = problem.bias.to(dtype).requires_grad_()
        z = leaves[0] @ leaves[1].t()
        wide = torch.promote_types(dtype, torch.float32)
        logp = (z.to(wide) + bias.to(wide)).log_softmax(-1)
        keep = problem.target != -100
        own = logp.gather(-1, problem.target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        own, entropy = own * keep, entropy * keep
        total = ((own + 0.1 * entropy) * problem.upstream["logprobs"]).sum()
        return [own.detach(), entropy.detach(), *torch.autograd.grad(total, [*leaves, bias])]

    exact, plain = truth(torch.float64), truth(torch.bfloat16)
    own, entropy = runs[0][:2]
    d_hidden = torch.cat([run[2] for run in runs]) if sequence_parallel else runs[0][2]
    d_weight, d_bias = (torch.cat([run[i] for run in runs]) for i in (3, 4))
    names = ("logprobs", "entropy", "dhidden", "dweight", "dbias")
    found = (own, entropy, d_hidden, d_weight, d_bias)
    for name, x, p, e in zip(names, found, plain, exact, strict=True):
        oracles.assert_no_worse(x, p, e, name=name, ulps=8.0)


@pytest.mark.parametrize(
    ("options", "native", "dtypes"),
    [
        ({}, True, {torch.float32}),  # float32 logits: float32 operands
        (ROUNDED, False, {torch.float32}),  # no instructions for it
        (ROUNDED | {"invariant_segments": 2}, True, {torch.float32}),  # bits that are promised
        (ROUNDED, True, {torch.bfloat16}),
    ],
    ids=str,
)
def test_operands_stay_bfloat16_only_where_that_loses_nothing_more(options, native, dtypes):
    problem = make_problem((8,), width=16, vocab=128, dtype=torch.bfloat16)
    assert set(_run(problem, options, False, False, native)[-1]) == dtypes


def test_what_torch_says_of_this_cpu():
    found = products._cpu_multiplies_bfloat16()
    with open("/proc/cpuinfo") as info:
        flags = next((line for line in info if line.startswith("flags")), "").split()
    assert found == bool({"avx512_bf16", "amx_bf16"} & set(flags))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_single_logits_are_rounded_as_those_of_a_head_of_that_dtype(dtype) -> None:
    hidden, weight = torch.randn(9, 16), torch.randn(1000, 16)
    z = (hidden.double() @ weight.double().t()).to(dtype).double()
    ids = torch.randint(0, 1000, (9, 20))
    found = linear_gather(hidden, weight, ids, logits_dtype=dtype).double()
    assert torch.equal(found, found.to(dtype).double())
    # A product on the edge between two numbers may go to either.
    assert (found == z.gather(-1, ids)).float().mean() > 0.95


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_a_teacher_s_head_rounds_its_logits_as_the_student_s(kind: str) -> None:
    hidden, other = torch.randn(2, 7, 16)
    weight, head = torch.randn(2, 33, 16)
    teacher = {"teacher_hidden": other, "teacher_weight": head}
    found = linear_kl_div(hidden, weight, kind=kind, **teacher, **ROUNDED)
    log_p, log_q = (
        (x.double() @ w.double().t()).to(torch.bfloat16).double().log_softmax(-1)
        for x, w in ((hidden, weight), (other, head))
    )
    a, b = (log_q, log_p) if kind == "forward" else (log_p, log_q)
    torch.testing.assert_close(found.double(), (a.exp() * (a - b)).sum(-1), rtol=1e-5, atol=1e-5)
