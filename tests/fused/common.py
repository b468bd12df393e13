"""What the tests of the fused path share: a head sharded over ranks, its float64 truth, its run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs import linear_token_stats
from tests.helpers import oracles
from tests.logits.common import make_target, world_group, world_rank, world_size

# (ranks, sequence parallel)
LAYOUTS = [(1, False), (2, False), (2, True), (3, False), (3, True)]


@dataclass
class Problem:
    """A whole head and what goes through it. Shapes `[s, b, h]` or `[n, h]`, `[V, h]`, `[V]`.

    Attributes:
        upstream: a gradient for each token and output, `[s, b]` or `[n]` each.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    upstream: dict[str, Tensor]


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
) -> Problem:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Problem(
        hidden=torch.randn(*lead, width).to(dtype),
        weight=torch.randn(vocab, width).to(dtype),
        bias=torch.randn(vocab).to(dtype) if bias else None,
        target=make_target(lead, true_vocab or vocab, ignored),
        upstream={name: torch.randn(lead, dtype=wide) for name in names},
    )


def shard_problem(problem: Problem, sequence_parallel: bool) -> tuple[Tensor, Tensor, Any]:
    """This rank's (hidden, weight, bias or None) as leaves that require gradients."""
    world, rank = world_size(), world_rank()
    hidden = problem.hidden.tensor_split(world)[rank] if sequence_parallel else problem.hidden
    weight = problem.weight.tensor_split(world)[rank]
    bias = None
    if problem.bias is not None:
        bias = problem.bias.tensor_split(world)[rank].clone().requires_grad_()
    return hidden.clone().requires_grad_(), weight.clone().requires_grad_(), bias


@dataclass
class Truth:
    """Statistics and gradients of the whole head, all in one dtype; and its finished logits."""

    stats: oracles.ExactStats
    grads: dict[str, Tensor]
    finished: Tensor


def truth(problem: Problem, options: dict[str, Any], dtype: torch.dtype = torch.float64) -> Truth:
    """The problem in plain torch on one process; gradients come in the inputs' dtypes."""
    leaves = {"hidden": problem.hidden, "weight": problem.weight}
    if problem.bias is not None:
        leaves["bias"] = problem.bias
    exact = dtype == torch.float64
    leaves = {
        name: (x.double() if exact else x.clone()).requires_grad_() for name, x in leaves.items()
    }
    options = {
        name: value
        for name, value in options.items()
        if name not in ("chunk_size", "compact", "backend")
    }
    raw = leaves["hidden"].to(dtype) @ leaves["weight"].to(dtype).t()
    stats = oracles.token_stats(
        raw, problem.target, bias=leaves.get("bias"), dtype=dtype, **options
    )
    total = sum(
        (getattr(stats, name) * value.to(dtype)).sum() for name, value in problem.upstream.items()
    )
    assert isinstance(total, Tensor)
    grads = torch.autograd.grad(total, list(leaves.values()))
    finishing = {k: v for k, v in options.items() if k not in ("label_smoothing", "ignore_index")}
    finished = oracles.finished_logits(raw.detach(), bias=leaves.get("bias"), **finishing)
    return Truth(stats, dict(zip(leaves, grads, strict=True)), finished.detach())


def whole_gradients(runs: list[dict[str, Tensor]], sequence_parallel: bool) -> dict[str, Tensor]:
    """The ranks' gradients put together; hidden's must agree on all ranks if it is not split."""
    split = [name for name in runs[0] if name != "hidden"]
    whole = {name: torch.cat([run[name] for run in runs]) for name in split}
    hidden = [run["hidden"] for run in runs]
    if sequence_parallel:
        whole["hidden"] = torch.cat(hidden)
    else:
        assert all(torch.equal(other, hidden[0]) for other in hidden), "dHidden differs over ranks"
        whole["hidden"] = hidden[0]
    return whole


def check_stats(
    found: Any, exact: Truth, plain: Truth, problem: Problem, ulps: float = 8.0
) -> None:
    """A rank's TokenStats against the truth; ranks up to the rounding of a dot product."""
    for name in ("logprobs", "entropy", "lse"):
        value = getattr(found, name)
        if value is None:
            assert name == "entropy"
            continue
        oracles.assert_no_worse(
            value, getattr(plain.stats, name), getattr(exact.stats, name), name=name, ulps=ulps
        )
    if found.target_rank is not None:
        keep = exact.stats.target_rank >= 0
        assert torch.equal(found.target_rank < 0, ~keep)
        target = torch.where(keep, problem.target, 0)
        low, high = oracles.rank_bounds(exact.finished, target, 1e-5)
        inside = (found.target_rank >= low) & (found.target_rank <= high)
        assert (inside | ~keep).all()
        assert (low == high).sum() > 0.8 * low.numel(), "the bounds hardly bind"


def check_gradients(
    found: dict[str, Tensor], exact: Truth, plain: Truth, ulps: float = 8.0
) -> None:
    assert set(found) == set(exact.grads)
    for name, grad in found.items():
        assert grad.dtype == plain.grads[name].dtype
        oracles.assert_no_worse(
            grad, plain.grads[name], exact.grads[name], name=f"d{name}", ulps=ulps
        )


def run_linear(problem: Problem, options: dict[str, Any], sequence_parallel: bool) -> tuple:
    """(TokenStats, gradients by name) of this rank; inputs must come out untouched."""
    hidden, weight, bias = shard_problem(problem, sequence_parallel)
    leaves = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    kept = {name: (x.detach().clone(), x._version) for name, x in leaves.items()}
    out = linear_token_stats(
        hidden,
        weight,
        problem.target,
        bias=bias,
        tp_group=world_group(),
        sequence_parallel=sequence_parallel,
        **options,
    )
    outputs = [getattr(out, name) for name in problem.upstream]
    incoming = [value.clone() for value in problem.upstream.values()]
    grads = torch.autograd.grad(outputs, list(leaves.values()), incoming)
    assert all(map(torch.equal, incoming, problem.upstream.values()))
    for name, leaf in leaves.items():
        assert torch.equal(leaf.detach(), kept[name][0])
        assert leaf._version == kept[name][1]
    return out, dict(zip(leaves, grads, strict=True))


def plain_loss(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """The simplest loss for `linear_policy_loss`."""
    return -logprobs
