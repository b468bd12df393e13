"""A sharded head and what goes through it, for tests of operations from hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs.ops.result import TokenStats
from mcore_logprobs.ops.row_statistics import Statistics
from mcore_logprobs.ops.sampling import Filters, filtered_stats
from mcore_logprobs.sources.head import head_logits
from tests.helpers.shards import make_target, world_rank, world_size
from tests.ops import FLAGS


def products_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of low precision are multiplied as they are, with float32 results."""

    def their_own(dtype: torch.dtype, device: torch.device, **options: bool) -> torch.dtype:
        return dtype

    monkeypatch.setattr("mcore_logprobs.sources.head.matmul_dtype", their_own)


@dataclass
class Problem:
    """A whole head and what goes through it. Shapes `[s, b, h]` or `[n, h]`, `[V, h]`, `[V]`.

    Attributes:
        upstream: a gradient for each token and output, `[s, b]` or `[n]` each.
        lora: (A `[r, h]`, B `[V, r]`, scale), or None.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    upstream: dict[str, Tensor]
    lora: tuple[Tensor, Tensor, float] | None = None


def linear_filtered_stats(
    hidden: Tensor, weight: Tensor, target: Tensor, **options: Any
) -> TokenStats:
    """What a patched model with filters computes, of a head given by keywords."""
    wanted = Statistics.of(**{name: options.pop(name) for name in FLAGS if name in options})
    off = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
    given = {name: options.pop(name, value) for name, value in off.items()}
    ignore_index = options.pop("ignore_index", -100)
    source = head_logits(hidden, weight, **options)
    filters = Filters.of(**given, shard=source.shard)
    return filtered_stats(source, target, filters, wanted, ignore_index)


def make_problem(
    lead: tuple[int, ...] = (6, 2),
    *,
    width: int = 8,
    vocab: int = 24,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    true_vocab: int | None = None,
    ignored: float = 0.2,
    names: tuple[str, ...] = ("logprobs", "entropy", "lse"),
    lora: bool = False,
) -> Problem:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    problem = Problem(
        hidden=torch.randn(*lead, width).to(dtype),
        weight=torch.randn(vocab, width).to(dtype),
        bias=torch.randn(vocab).to(dtype) if bias else None,
        target=make_target(lead, true_vocab or vocab, ignored),
        upstream={name: torch.randn(lead, dtype=wide) for name in names},
    )
    if lora:  # of rank 3, unlike every other size
        problem.lora = (torch.randn(3, width).to(dtype), torch.randn(vocab, 3).to(dtype), 1.7)
    return problem


def shard_problem(problem: Problem, sequence_parallel: bool) -> tuple[Tensor, Tensor, Any]:
    """This rank's (hidden, weight, bias or None) as leaves that require gradients."""
    world, rank = world_size(), world_rank()
    hidden = problem.hidden.tensor_split(world)[rank] if sequence_parallel else problem.hidden
    weight = problem.weight.tensor_split(world)[rank]
    bias = None
    if problem.bias is not None:
        bias = problem.bias.tensor_split(world)[rank].clone().requires_grad_()
    return hidden.clone().requires_grad_(), weight.clone().requires_grad_(), bias


def plain_loss(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """The simplest loss for `linear_policy_loss`."""
    return -logprobs
