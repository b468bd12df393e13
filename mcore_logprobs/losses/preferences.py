"""Losses of pairs and of single answers with a label, from sequences' log-probabilities.

`preference_advantages` makes of each the second of two passes, in the head. The losses of a reward
model (Bradley-Terry) and of a critic (clipped values) have no log-probability in them and are not
here; docs/objectives.md says where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import check_choice, check_fraction, check_not_negative, check_positive
from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.consistency import check_call, comparing
from mcore_logprobs.losses.per_token import check_shape, check_tensor, times
from mcore_logprobs.spelling import suggesting

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


@suggesting
def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
) -> Tensor:
    """Direct preference optimization (Rafailov et al., 2023) for each pair, and its variants.

        c = beta (chosen - ref_chosen),   r = beta (rejected - ref_rejected),   m = c - r

        loss_type   loss; a is label_smoothing
        sigmoid     -(1 - a) log sigmoid(m) - a log sigmoid(-m)
        robust      (-(1 - a) log sigmoid(m) + a log sigmoid(-m)) / (1 - 2a), a < 1/2 (2403.00409)
        exo         sigmoid(m) (log sigmoid(m) - log(1 - a))
                    + sigmoid(-m) (log sigmoid(-m) - log a), a > 0 (2402.00856)
        hinge       max(0, 1 - m) (SLiC, 2305.10425)
        ipo         (m / beta - 1 / (2 beta))^2 (2310.12036)
        nca         -log sigmoid(c) - log sigmoid(-c) / 2 - log sigmoid(-r) / 2 (2402.05369)
        sppo        (c / beta - 1 / (2 beta))^2 + (r / beta + 1 / (2 beta))^2 (2405.00675)
        apo_zero    sigmoid(-c) + sigmoid(r) (2408.06266)
        apo_down    sigmoid(c) + sigmoid(-m) (2408.06266)
        discopop    (1 - g) -log sigmoid(m) + g e^-m, g = sigmoid(m / 0.05) (2406.08414)

    Shape:
        sequences' log-probabilities (see `sequence_sum`), `[...]` each -> `[...]`. Differentiable.
        A reference may be a scalar tensor; `torch.tensor(0.0)` means none. TRL takes means
        (`sequence_mean`) for ipo.

    Raises:
        ValueError: an unknown loss_type, a label_smoothing that it does not take, shapes that
            differ.
    """
    check_choice("loss_type", loss_type, tuple(_PAIRS))
    check_fraction("label_smoothing", label_smoothing)
    low, high = _SMOOTHED.get(loss_type, (0.0, 0.0))
    if not low <= label_smoothing <= high:
        raise ValueError(
            f"label_smoothing: expected {low!r} to {high!r} with loss_type={loss_type!r}, got "
            f"{label_smoothing!r}"
        )
    for name, reference, policy in (
        ("ref_chosen", ref_chosen, chosen),
        ("ref_rejected", ref_rejected, rejected),
    ):
        if not isinstance(reference, Tensor) or reference.dim():
            check_shape(name, reference, policy)
    on_chosen, on_rejected = chosen - ref_chosen, rejected - ref_rejected
    margin = _margin(on_chosen, on_rejected, beta)
    return _PAIRS[loss_type](margin, beta * on_chosen, beta * on_rejected, beta, label_smoothing)


def _smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    loss = -(1.0 - label_smoothing) * F.logsigmoid(margin)
    if label_smoothing != 0.0:
        loss = loss - label_smoothing * F.logsigmoid(-margin)
    return loss


def _robust(m: Tensor, c: Tensor, r: Tensor, beta: float, a: float) -> Tensor:
    return _smoothed(m, -a / (1.0 - 2.0 * a))  # 1 + a / (1 - 2a) = (1 - a) / (1 - 2a)


def _exo(m: Tensor, c: Tensor, r: Tensor, beta: float, a: float) -> Tensor:
    # A side whose probability is 0 has no part, though its logarithm may be -inf.
    toward = times(m.sigmoid(), F.logsigmoid(m) - math.log1p(-a))
    return toward + times((-m).sigmoid(), F.logsigmoid(-m) - math.log(a))


def _nca(m: Tensor, c: Tensor, r: Tensor, beta: float, a: float) -> Tensor:
    return -F.logsigmoid(c) - 0.5 * F.logsigmoid(-c) - 0.5 * F.logsigmoid(-r)


def _discopop(m: Tensor, c: Tensor, r: Tensor, beta: float, a: float) -> Tensor:
    # One exponent: e^-m overflows where g is 0. Of m = -inf the gate is 0, not inf - inf.
    gate = m.clamp(min=-1e3)
    exponential = (F.logsigmoid(gate / 0.05) - gate).exp()
    return exponential - (-gate / 0.05).sigmoid() * F.logsigmoid(m)


_PAIRS: dict[str, Callable[..., Tensor]] = {
    "sigmoid": lambda m, c, r, beta, a: _smoothed(m, a),
    "robust": _robust,
    "exo": _exo,
    "hinge": lambda m, c, r, beta, a: F.relu(1.0 - m),
    "ipo": lambda m, c, r, beta, a: ((m - 0.5) / beta).square(),
    "nca": _nca,
    "sppo": lambda m, c, r, beta, a: ((c - 0.5) / beta).square() + ((r + 0.5) / beta).square(),
    "apo_zero": lambda m, c, r, beta, a: (-c).sigmoid() + r.sigmoid(),
    "apo_down": lambda m, c, r, beta, a: c.sigmoid() + (-m).sigmoid(),
    "discopop": _discopop,
}
# Bounds of label_smoothing; 0 elsewhere.
_SMOOTHED = {"sigmoid": (0.0, 1.0), "robust": (0.0, 0.499), "exo": (1e-9, 0.999)}


@suggesting
def dpo_advantages(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
) -> tuple[Tensor, Tensor]:
    """Advantages with which `ReinforceLoss` has the gradient of `dpo_loss`, for the second pass.

    The gradient of `dpo_loss` by a token's log-probability is the same for all tokens of a
    sequence. With these numbers as every token's advantage, `ReinforceLoss` in `linear_policy_loss`
    has exactly that gradient (its value is not the loss: take that from the first pass).

    Shape:
        as `dpo_loss` -> (for the chosen, for the rejected), `[...]` each, without gradient.
    """
    settings = {"beta": beta, "label_smoothing": label_smoothing, "loss_type": loss_type}
    for name, reference in (("ref_chosen", ref_chosen), ("ref_rejected", ref_rejected)):
        check_tensor(name, reference)
    refs = {"ref_chosen": ref_chosen.detach(), "ref_rejected": ref_rejected.detach()}
    on_chosen, on_rejected = preference_advantages(dpo_loss, chosen, rejected, **refs, **settings)
    return on_chosen, on_rejected


def preference_advantages(
    loss: Callable[..., Tensor], *sequences: Tensor, **settings: object
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
        # Autograd saves no tensor that was made under inference_mode.
        constants = {
            name: x.clone() if isinstance(x, Tensor) and x.is_inference() else x
            for name, x in settings.items()
        }
        gradients = torch.autograd.grad(loss(*leaves, **constants).sum(), leaves)
    return tuple(-grad for grad in gradients)


@suggesting
def cpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, nll_coef: float = 1.0
) -> Tensor:
    """Contrastive preference optimization (Xu et al., 2401.08417) for each pair, no reference.

        -log sigmoid(beta (chosen - rejected)) - nll_coef chosen

    Shape:
        sequences' log-probabilities (`sequence_sum`), `[...]` each -> `[...]`. Differentiable.
    """
    check_not_negative("nll_coef", nll_coef)
    loss = -F.logsigmoid(_margin(chosen, rejected, beta))
    return loss - nll_coef * chosen if nll_coef > 0.0 else loss


@suggesting
def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Simple preference optimization (Meng et al., 2405.14734) for each pair, no reference.

        -(1 - a) log sigmoid(m) - a log sigmoid(-m),   m = beta (chosen - rejected) - gamma

    Shape:
        means of sequences' log-probabilities (`sequence_mean`), `[...]` each -> `[...]`.

    Args:
        gamma: the margin; the paper tunes beta in [2, 10] and gamma / beta in [0.3, 1.6].
        label_smoothing: a; 0 in the paper.
    """
    check_not_negative("gamma", gamma)
    check_fraction("label_smoothing", label_smoothing)
    return _smoothed(_margin(chosen, rejected, beta) - gamma, label_smoothing)


@suggesting
def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """Odds ratio preference optimization (Hong et al., 2403.07691) for each pair, no reference.

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


@suggesting
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
    """Kahneman-Tversky optimization (Ethayarajh et al., 2402.01306) for each answer, unpaired.

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
    if desirable.dtype != torch.bool:
        raise ValueError(f"desirable: expected a bool tensor, got {desirable.dtype}")
    if isinstance(reference, Tensor) and reference.dim():
        raise ValueError(f"reference: expected a scalar, got shape {tuple(reference.shape)}")
    if isinstance(reference, Tensor):
        reference = reference.detach()
    gain = beta * (logprobs - ref_logprobs.detach() - reference)
    return torch.where(
        desirable,
        desirable_weight * (-gain).sigmoid(),
        undesirable_weight * gain.sigmoid(),
    )


@suggesting
def kto_reference(
    logprobs: Tensor, ref_logprobs: Tensor, *, group: ProcessGroup | None = None
) -> Tensor:
    """z of `kto_loss`: the mean of log p/q over unrelated answers of the batch, at least 0.

    The answers are those of other prompts (the batch's, moved on by one), so that z estimates
    KL(p, q).

    Shape:
        `[...]`, `[...]`, sequences' log-probabilities -> a scalar without gradient, the same on
        every rank.

    Collectives: one all-reduce of `[2]` over the group (data parallel; None: only this process).

    Raises:
        ValueError: shapes that differ, before the collective; at the first call over a group on
            every rank, if they differ on one.
    """
    with comparing("kto_reference", dict, group):
        check_tensor("logprobs", logprobs)
        check_shape("ref_logprobs", ref_logprobs, logprobs)
        check_call(None, group, logprobs.device)
    drift = (logprobs - ref_logprobs).detach().double()
    total = torch.stack([drift.sum(), torch.full_like(drift.sum(), drift.numel())])
    total, count = all_reduce_sum(total, group).unbind()
    return (total / count.clamp(min=1.0)).clamp(min=0.0).to(logprobs.dtype)


def _margin(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    check_positive("beta", beta)
    check_shape("rejected", rejected, chosen)
    return beta * (chosen - rejected)
