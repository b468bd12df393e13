"""Exact answers: what doctor, the audit and the benchmarks hold a call to.

Formulas of whole rows of logits, as a textbook has them, in the dtype of the logits: in float64
they are the truth, in float32 and compiled the benchmarks' plain formula. They know no padding, no
shards and no ignored targets. Imports no torch: the command lines read `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def logprobs(z: Tensor, target: Tensor) -> Tensor:
    """`[..., V]`, `[...]` -> `[...]`, of the target."""
    return gather(z, target.unsqueeze(-1)).squeeze(-1)


def gather(z: Tensor, ids: Tensor) -> Tensor:
    """`[..., V]`, `[..., k]` -> `[..., k]`, the ids' log-probabilities."""
    return z.log_softmax(-1).gather(-1, ids)


def entropy(z: Tensor) -> Tensor:
    """`[..., V]` -> `[...]`, in nats."""
    return cross_entropy(z, z)


def sum_pi_squared(z: Tensor) -> Tensor:
    """`[..., V]` -> `[...]`, the sum of the squared probabilities."""
    return z.softmax(-1).square().sum(-1)


def target_rank(z: Tensor, target: Tensor) -> Tensor:
    """`[..., V]`, `[...]` -> `[...]` int64: how many logits are above the target's."""
    return (z > z.gather(-1, target.unsqueeze(-1))).sum(-1)


def cross_entropy(p: Tensor, q: Tensor) -> Tensor:
    """-sum p log q of two tensors of logits, `[..., V]` -> `[...]`."""
    return -(p.softmax(-1) * q.log_softmax(-1)).sum(-1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of two tensors of logits, `[..., V]` -> `[...]`."""
    return cross_entropy(p, q) - entropy(p)


def jsd(p: Tensor, q: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of two tensors of logits, `[..., V]` -> `[...]`."""
    between = ((p.softmax(-1) + q.softmax(-1)) / 2).log()
    return (kl(p, between) + kl(q, between)) / 2


BOUND = 1e-4  # of float32, relative; a wrong formula is off by 1e-2 and more


@dataclass(frozen=True)
class Kind:
    """A quantity that can be asked of an audited function.

    Attributes:
        parts: names of the tensors that the function returns, in order.
        exact: (logits, the inputs by name) -> those tensors.
        inputs: the second argument's meaning: "target", "teacher" or "ids"; "" is none.
        differentiable: whether gradients are compared.
        sharded: they are `[..., V]`, sharded like the logits.
    """

    parts: tuple[str, ...]
    exact: Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, ...]]
    inputs: str = ""
    differentiable: bool = True
    sharded: bool = False


def _kind(
    part: str, formula: Callable[..., Tensor], inputs: str = "", *, sharded: bool = False
) -> Kind:
    """A kind with one part; the formula takes the logits, then the inputs that it asks for."""

    def exact(z: Tensor, x: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (formula(z, *([x[inputs]] if inputs else [])),)

    return Kind((part,), exact, inputs, sharded=sharded)


KINDS: dict[str, Kind] = {
    "logprobs": _kind("logprobs", logprobs, "target"),
    "loss": _kind("loss", lambda z, target: -logprobs(z, target), "target"),
    "entropy": _kind("entropy", entropy),
    "negative_entropy": _kind("sum p log p", lambda z: -entropy(z)),
    "logprobs_entropy": Kind(
        ("logprobs", "entropy"), lambda z, x: (logprobs(z, x["target"]), entropy(z)), "target"
    ),
    "sum_pi_squared": _kind("sum p^2", sum_pi_squared),
    "log_softmax": _kind("log-softmax", lambda z: z.log_softmax(-1), sharded=True),
    "kl": _kind("KL(teacher || student)", lambda z, teacher: kl(teacher, z), "teacher"),
    "reverse_kl": _kind("KL(student || teacher)", kl, "teacher"),
    "cross_entropy": _kind("cross entropy", lambda z, t: cross_entropy(t, z), "teacher"),
    "gather": _kind("logprobs", gather, "ids"),
    "target_rank": Kind(
        ("rank",), lambda z, x: (target_rank(z, x["target"]),), "target", differentiable=False
    ),
}


def error(got: Tensor, want: Tensor) -> float:
    """The largest difference of two tensors of one shape; inf where `got` is not finite."""
    difference = (got.detach().double() - want.detach().double()).abs().max().item()
    return difference if difference == difference else float("inf")


def relative_error(got: Tensor, want: Tensor) -> float:
    """Likewise, over the largest magnitude in `want`: for gradients."""
    return error(got, want) / max(want.detach().abs().max().item(), 1e-30)
