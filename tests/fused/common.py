"""What the tests of the fused path share: a sharded head, a call on it, its float64 truth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from mcore_logprobs import linear_token_stats
from mcore_logprobs.ops.head import head_logits
from mcore_logprobs.ops.result import TokenStats
from mcore_logprobs.ops.sampling import filtered_stats
from tests.helpers import oracles
from tests.helpers.distributed import get_pool
from tests.logits.common import make_target, world_group, world_rank, world_size

# (ranks, sequence parallel)
LAYOUTS = [(1, False), (2, False), (2, True), (3, False), (3, True)]
# Options that change what is computed, rather than how.
_MATHEMATICAL = (
    "ignore_index",
    "label_smoothing",
    "logit_scale",
    "softcap",
    "temperature",
    "vocab_size",
)


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

    def leaves(self) -> dict[str, Tensor]:
        """What a gradient may be wanted of, by name."""
        found = {"hidden": self.hidden, "weight": self.weight}
        if self.bias is not None:
            found["bias"] = self.bias
        if self.lora is not None:
            found |= {"A": self.lora[0], "B": self.lora[1]}
        return found

    def raw(self, leaves: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The whole head's raw logits of these leaves, multiplied in the dtype."""
        x = {name: leaf.to(dtype) for name, leaf in leaves.items()}
        raw = x["hidden"] @ x["weight"].t()
        if self.lora is not None:
            raw = raw + self.lora[2] * (x["hidden"] @ x["A"].t()) @ x["B"].t()
        return raw


def linear_filtered_stats(
    hidden: Tensor, weight: Tensor, target: Tensor, **options: Any
) -> TokenStats:
    """What a patched model with filters computes, of a head given by keywords."""
    names = ("top_k", "top_p", "entropy", "target_rank", "sum_pi_squared", "ignore_index")
    filters = {name: options.pop(name) for name in names if name in options}
    return filtered_stats(head_logits(hidden, weight, **options), target, **filters)


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


@dataclass
class Truth:
    """Statistics and gradients of the whole head, all in one dtype; and its finished logits."""

    stats: oracles.ExactStats
    grads: dict[str, Tensor]
    finished: Tensor


@dataclass
class Case:
    """One call of `linear_token_stats` on a sharded head, and what it must give.

        Case(make_problem(bias=True), {"softcap": 3.0}).run((2, True)).check()

    A subclass may make another call (`call`), differentiate something else (`roots`,
    `true_total`), or check more (`check_result`).

    Attributes:
        problem: the whole head and what goes through it.
        options: keywords of the operation.
        layout: (ranks, sequence parallel) of the last `run`.
        runs: what each rank found: (result, gradients by name).
    """

    problem: Problem
    options: dict[str, Any] = field(default_factory=dict)
    layout: tuple[int, bool] = field(default=(1, False), init=False)
    runs: list[tuple[Any, dict[str, Tensor]]] = field(default_factory=list, init=False, repr=False)

    def call(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, **parallel: Any) -> Any:
        """The operation on one rank."""
        return linear_token_stats(
            hidden, weight, self.problem.target, bias=bias, **parallel, **self.options
        )

    def roots(self, result: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """What is differentiated: by name, (output, its upstream gradient)."""
        upstream = self.problem.upstream.items()
        return {name: (getattr(result, name), value.clone()) for name, value in upstream}

    def true_total(self, stats: oracles.ExactStats, dtype: torch.dtype) -> Tensor:
        """The same as one scalar, in plain torch."""
        upstream = self.problem.upstream.items()
        total = sum((getattr(stats, name) * value.to(dtype)).sum() for name, value in upstream)
        assert isinstance(total, Tensor)
        return total

    def run(self, layout: tuple[int, bool]) -> Self:
        """Call it on (ranks, sequence parallel); one rank is this process, uninitialised."""
        self.layout, self.runs = layout, []
        world, _ = layout
        self.runs = [self.on_rank()] if world == 1 else get_pool(world).run(self.on_rank)
        return self

    def on_rank(self) -> tuple[Any, dict[str, Tensor]]:
        """(result, gradients by name) of this rank; inputs must come out untouched."""
        _, sequence_parallel = self.layout
        hidden, weight, bias = shard_problem(self.problem, sequence_parallel)
        leaves = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
        head: dict[str, Any] = {}
        if self.problem.lora is not None:
            a, b, scale = self.problem.lora
            a, b = a.clone(), b.tensor_split(world_size())[world_rank()].clone()
            leaves |= {"A": a.requires_grad_(), "B": b.requires_grad_()}
            head["lora"] = (a, b, scale)
        kept = {name: (x.detach().clone(), x._version) for name, x in leaves.items()}
        head |= {"tp_group": world_group(), "sequence_parallel": sequence_parallel}
        result = self.call(hidden, weight, bias, **head)
        roots = self.roots(result)
        outputs = [output for output, _ in roots.values()]
        incoming = [upstream for _, upstream in roots.values()]
        before = [upstream.clone() for upstream in incoming]
        grads = torch.autograd.grad(outputs, list(leaves.values()), incoming)
        assert all(map(torch.equal, incoming, before)), "an upstream gradient was modified"
        for name, leaf in leaves.items():
            assert torch.equal(leaf.detach(), kept[name][0]), f"{name} was modified"
            assert leaf._version == kept[name][1], f"{name}'s version counter moved"
        return result, dict(zip(leaves, grads, strict=True))

    def truth(self, dtype: torch.dtype = torch.float64) -> Truth:
        """The problem in plain torch on one process; gradients come in the inputs' dtypes."""
        exact = dtype == torch.float64
        leaves = {
            name: (x.double() if exact else x.clone()).requires_grad_()
            for name, x in self.problem.leaves().items()
        }
        options = {name: self.options[name] for name in self.options if name in _MATHEMATICAL}
        raw = self.problem.raw(leaves, dtype)
        stats = oracles.token_stats(
            raw, self.problem.target, bias=leaves.get("bias"), dtype=dtype, **options
        )
        total = self.true_total(stats, dtype)
        if total.requires_grad:
            grads = torch.autograd.grad(total, list(leaves.values()))
        else:
            grads = tuple(map(torch.zeros_like, leaves.values()))
        finishing = {
            k: v for k, v in options.items() if k not in ("label_smoothing", "ignore_index")
        }
        finished = oracles.finished_logits(raw.detach(), bias=leaves.get("bias"), **finishing)
        return Truth(stats, dict(zip(leaves, grads, strict=True)), finished.detach())

    def check(self, ulps: float = 8.0) -> None:
        """Every rank's results, and the gradients put together, against float64."""
        wide = torch.float64 if self.problem.hidden.dtype == torch.float64 else torch.float32
        exact, plain = self.truth(), self.truth(wide)
        for result, _ in self.runs:
            self.check_result(result, exact, plain, ulps)
        found = self.gradients()
        assert set(found) == set(exact.grads)
        for name, grad in found.items():
            assert grad.dtype == plain.grads[name].dtype
            oracles.assert_no_worse(
                grad, plain.grads[name], exact.grads[name], name=f"d{name}", ulps=ulps
            )

    def check_result(self, result: Any, exact: Truth, plain: Truth, ulps: float) -> None:
        """One rank's result; ranks agree."""
        assert torch.equal(result.logprobs, self.runs[0][0].logprobs), "ranks differ"
        self.check_stats(result, exact, plain, ulps)

    def check_stats(self, found: Any, exact: Truth, plain: Truth, ulps: float) -> None:
        """A rank's TokenStats; target ranks up to the rounding of a dot product."""
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
            target = torch.where(keep, self.problem.target, 0)
            low, high = oracles.rank_bounds(exact.finished, target, 1e-5)
            inside = (found.target_rank >= low) & (found.target_rank <= high)
            assert (inside | ~keep).all()
            assert (low == high).sum() > 0.8 * low.numel(), "the bounds hardly bind"

    def gradients(self) -> dict[str, Tensor]:
        """The ranks' gradients together; of what is not split they must agree."""
        _, sequence_parallel = self.layout
        whole = {}
        for name in self.runs[0][1]:
            parts = [grads[name] for _, grads in self.runs]
            if name == "A" or (name == "hidden" and not sequence_parallel):
                assert all(torch.equal(part, parts[0]) for part in parts), f"d{name} differs"
                whole[name] = parts[0]
            else:
                whole[name] = torch.cat(parts)
        return whole


def plain_loss(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """The simplest loss for `linear_policy_loss`."""
    return -logprobs
