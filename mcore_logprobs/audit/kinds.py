"""What can be asked of an audited function, and the exact answers in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["KINDS", "Kind"]


@dataclass(frozen=True)
class Kind:
    """One quantity: its parts in float64, and which inputs go with the logits.

    Attributes:
        parts: names of the tensors that the function returns, in order.
        exact: (float64 logits, the other inputs) -> those tensors. A last dimension of V is
            sharded like the logits.
        inputs: the second argument's meaning: "target", "teacher" or "ids"; "" is none.
        differentiable: whether gradients are compared.
    """

    parts: tuple[str, ...]
    exact: Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, ...]]
    inputs: str = ""
    differentiable: bool = True


def _log_p(z: Tensor) -> Tensor:
    return z.log_softmax(-1)


def _picked(z: Tensor, x: dict[str, Tensor]) -> Tensor:
    return _log_p(z).gather(-1, x["target"].unsqueeze(-1)).squeeze(-1)


def _entropy(z: Tensor) -> Tensor:
    return -(_log_p(z).exp() * _log_p(z)).sum(-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of two tensors of logits."""
    return (_log_p(p).exp() * (_log_p(p) - _log_p(q))).sum(-1)


KINDS: dict[str, Kind] = {
    "logprobs": Kind(("logprobs",), lambda z, x: (_picked(z, x),), "target"),
    "loss": Kind(("loss",), lambda z, x: (-_picked(z, x),), "target"),
    "entropy": Kind(("entropy",), lambda z, x: (_entropy(z),)),
    "negative_entropy": Kind(("sum p log p",), lambda z, x: (-_entropy(z),)),
    "logprobs_entropy": Kind(
        ("logprobs", "entropy"), lambda z, x: (_picked(z, x), _entropy(z)), "target"
    ),
    "sum_pi_squared": Kind(("sum p^2",), lambda z, x: (_log_p(z).exp().square().sum(-1),)),
    "log_softmax": Kind(("log-softmax",), lambda z, x: (_log_p(z),)),
    "kl": Kind(("KL(teacher || student)",), lambda z, x: (_kl(x["teacher"], z),), "teacher"),
    "reverse_kl": Kind(
        ("KL(student || teacher)",), lambda z, x: (_kl(z, x["teacher"]),), "teacher"
    ),
    "cross_entropy": Kind(
        ("cross entropy",),
        lambda z, x: (-(_log_p(x["teacher"]).exp() * _log_p(z)).sum(-1),),
        "teacher",
    ),
    "gather": Kind(("logprobs",), lambda z, x: (_log_p(z).gather(-1, x["ids"]),), "ids"),
    "target_rank": Kind(
        ("rank",),
        lambda z, x: ((z > z.gather(-1, x["target"].unsqueeze(-1))).sum(-1),),
        "target",
        differentiable=False,
    ),
}
