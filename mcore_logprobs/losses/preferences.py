"""Losses of pairs and of single answers with a label, from sequences' log-probabilities.

`preference_advantages` makes of each the second of two passes, in the head. The losses of a reward
model (Bradley-Terry) and of a critic (clipped values) have no log-probability in them and are not
here; docs/objectives.md says where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_fraction, check_not_negative, check_positive
from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.losses.base import check_shape

__all__ = [
    "cpo_loss",
    "dpo_advantages",
    "dpo_loss",
    "kto_loss",
    "kto_reference",
    "orpo_loss",
    "preference_advantages",
    "simpo_loss",
]


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Direct preference optimisation (Rafailov et al., 2023) for each pair.

        -(1 - a) log sigmoid(margin) - a log sigmoid(-margin)
        margin = beta ((chosen - ref_chosen) - (rejected - ref_rejected))

    Shape:
        sequences' log-probabilities (see `sequence_sum`), `[...]` each -> `[...]`. Differentiable.
    """
    check_fraction("label_smoothing", label_smoothing)
    margin = _margin(chosen - ref_chosen, rejected - ref_rejected, beta)
    loss = -(1.0 - label_smoothing) * F.logsigmoid(margin)
    if label_smoothing > 0.0:
        loss = loss - label_smoothing * F.logsigmoid(-margin)
    return loss


def dpo_advantages(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Advantages with which `ReinforceLoss` has the gradient of `dpo_loss`, for the second pass.

    The gradient of `dpo_loss` by a token's log-probability is the same for all tokens of a
    sequence. With these numbers as every token's advantage, `ReinforceLoss` in `linear_policy_loss`
    has exactly that gradient (its value is not the loss: take that from the first pass).

    Shape:
        as `dpo_loss` -> (for the chosen, for the rejected), `[...]` each, without gradient.
    """
    settings = {"beta": beta, "label_smoothing": label_smoothing}
    refs = {"ref_chosen": ref_chosen.detach(), "ref_rejected": ref_rejected.detach()}
    on_chosen, on_rejected = preference_advantages(dpo_loss, chosen, rejected, **refs, **settings)
    return on_chosen, on_rejected


def preference_advantages(
    loss: Callable[..., Tensor], *sequences: Tensor, **settings: Any
) -> tuple[Tensor, ...]:
    """Advantages with which `ReinforceLoss` has the gradient of a loss of sequences.

    As `dpo_advantages`: minus the loss's gradient by each of the sequences' numbers. Where those
    are means (`simpo_loss`, `orpo_loss`), divide by the sequence's tokens:

        chosen, rejected = torch.randn(2, 8)
        on_chosen, on_rejected = preference_advantages(simpo_loss, chosen, rejected, beta=2.5)

    Shape:
        as the loss's policy arguments, those in front -> as many, without gradient. Others go by
        keyword (`ref_chosen=`, `desirable=`).
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in sequences]
        found = torch.autograd.grad(loss(*leaves, **settings).sum(), leaves)
    return tuple(-grad for grad in found)


def cpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, nll_coef: float = 1.0
) -> Tensor:
    """Contrastive preference optimisation (Xu et al., 2401.08417) for each pair, no reference.

        -log sigmoid(beta (chosen - rejected)) - nll_coef chosen

    Shape:
        sequences' log-probabilities (`sequence_sum`), `[...]` each -> `[...]`. Differentiable.
    """
    check_not_negative("nll_coef", nll_coef)
    return -F.logsigmoid(_margin(chosen, rejected, beta)) - nll_coef * chosen


def simpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, gamma: float = 1.0
) -> Tensor:
    """Simple preference optimisation (Meng et al., 2405.14734) for each pair, no reference.

        -log sigmoid(beta (chosen - rejected) - gamma)

    Shape:
        means of sequences' log-probabilities (`sequence_mean`), `[...]` each -> `[...]`.

    Args:
        gamma: the margin; the paper tunes beta in [2, 10] and gamma / beta in [0.3, 1.6].
    """
    check_not_negative("gamma", gamma)
    return -F.logsigmoid(_margin(chosen, rejected, beta) - gamma)


def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """Odds ratio preference optimisation (Hong et al., 2403.07691) for each pair, no reference.

        -chosen - beta log sigmoid(log odds(chosen) - log odds(rejected))
        odds(x) = e^x / (1 - e^x)

    Shape:
        means of sequences' log-probabilities (`sequence_mean`), `[...]` each -> `[...]`.

    Args:
        beta: the paper's lambda.
    """
    check_positive("beta", beta)
    check_shape("rejected", rejected, chosen)
    return -chosen - beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(mean: Tensor) -> Tensor:
    """x - log(1 - e^x), x <= 0; x of 0 counts as just below it, as certain as the dtype can say."""
    mean = mean.clamp(max=-torch.finfo(mean.dtype).tiny)
    return mean - (-torch.expm1(mean)).log()


def kto_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    reference: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimisation (Ethayarajh et al., 2402.01306) for each answer, unpaired.

        w (1 - sigmoid(gain)) where desirable, else w sigmoid(gain),   gain = beta (log p/q - z)

    Shape:
        logprobs, ref_logprobs: sequences' log-probabilities (`sequence_sum`), `[...]`; desirable
        bool `[...]`; reference z, a scalar of `kto_reference` -> `[...]`. Differentiable by
        logprobs.
    """
    check_positive("beta", beta)
    check_not_negative("desirable_weight", desirable_weight)
    check_not_negative("undesirable_weight", undesirable_weight)
    check_shape("ref_logprobs", ref_logprobs, logprobs)
    check_shape("desirable", desirable, logprobs)
    gain = beta * (logprobs - ref_logprobs.detach() - reference)
    return torch.where(
        desirable,
        desirable_weight * (-gain).sigmoid(),
        undesirable_weight * gain.sigmoid(),
    )


def kto_reference(
    logprobs: Tensor, ref_logprobs: Tensor, *, group: ProcessGroup | None = None
) -> Tensor:
    """z of `kto_loss`: the mean of log p/q over unrelated answers of the batch, at least 0.

    The answers are those of other prompts (the batch's, moved on by one), so that z estimates
    KL(p, q).

    Shape:
        `[...]`, `[...]`, sequences' log-probabilities -> a scalar without gradient, the same on
        every rank.

    Collectives: one all-reduce of `[2]` over the group (data parallel; None: this process alone).
    """
    check_shape("ref_logprobs", ref_logprobs, logprobs)
    drift = (logprobs - ref_logprobs).detach().double()
    total = torch.stack([drift.sum(), torch.full_like(drift.sum(), drift.numel())])
    total, count = all_reduce_sum(total, group).unbind()
    return (total / count.clamp(min=1.0)).clamp(min=0.0).to(logprobs.dtype)


def _margin(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    check_positive("beta", beta)
    check_shape("rejected", rejected, chosen)
    return beta * (chosen - rejected)
