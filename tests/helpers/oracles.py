"""What the operations should give: plain torch autograd on the whole vocabulary in one process.

In float64 this is the truth. In float32 the same lines are what a user would have written, and
their distance from the truth is the yardstick: an operation may be no worse (`assert_no_worse`).
No line is shared with the package.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "ExactStats",
    "assert_no_worse",
    "finished_logits",
    "statistics",
    "token_stats",
]


@dataclass(frozen=True)
class ExactStats:
    """Per-token truth, each `[...]`; rank int64, the others in the dtype asked for."""

    logprobs: Tensor
    entropy: Tensor
    target_rank: Tensor
    lse: Tensor


def finished_logits(
    raw: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Raw logits `[..., V]` after scale, softcap, bias, temperature and mask, in this order."""
    z = raw.to(dtype) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if bias is not None:
        z = z + bias.to(dtype)
    z = z / temperature
    if vocab_size is not None:
        past = torch.arange(z.shape[-1], device=z.device) >= vocab_size
        z = z.masked_fill(past, -torch.inf)
    return z


def token_stats(
    raw: Tensor,
    target: Tensor,
    *,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> ExactStats:
    """Statistics of each target under the whole vocabulary's raw logits; differentiable.

    Label smoothing is Megatron's: 1 - a on the target, a / (K - 1) on each of the K - 1 others,
    where K counts the columns that are not -inf.

    Args:
        raw: `[..., V]`, any float dtype. Ignored rows may hold anything, NaN included.
        target: `[...]`, global ids or ignore_index.
        options: `finished_logits`'s.
    """
    keep = torch.ones_like(target, dtype=torch.bool)
    if ignore_index is not None:
        keep = target != ignore_index
    column = torch.where(keep, target.long(), 0)
    raw = torch.where(keep.unsqueeze(-1), raw, 0.0)
    z = finished_logits(raw, dtype=dtype, **options)  # type: ignore[arg-type]
    # Scale and temperature keep the order, and a softcap does where it does not saturate, of which
    # float64's makes more of than float32's: without a bias the raw logits decide.
    ordered = None if options.get("bias") is not None else raw.masked_fill(z.isneginf(), -torch.inf)
    found = statistics(z, column, label_smoothing=label_smoothing, ordered=ordered)
    return ExactStats(
        logprobs=torch.where(keep, found["logprobs"], 0.0),
        entropy=torch.where(keep, found["entropy"], 0.0),
        target_rank=torch.where(keep, found["target_rank"], -1),
        lse=torch.where(keep, found["lse"], 0.0),
    )


def statistics(
    z: Tensor, target: Tensor, *, label_smoothing: float = 0.0, ordered: Tensor | None = None
) -> dict[str, Tensor]:
    """Every statistic of finished logits `[..., V]` and targets `[...]`, by its name in TokenStats.

    Args:
        ordered: what the rank is counted in; None: z.
    """
    column, logp, possible = target.unsqueeze(-1), z.log_softmax(-1), ~z.isneginf()
    on_target = logp.gather(-1, column).squeeze(-1)
    # torch.logsumexp's own gradient is exp(z - lse), which is off by lse's rounding.
    top = z.argmax(-1, keepdim=True)
    lse = (z.gather(-1, top) - logp.gather(-1, top)).squeeze(-1)
    logp = torch.where(possible, logp, 0.0)
    if label_smoothing:
        others = possible.scatter(-1, column, False)
        mean = torch.where(others, logp, 0.0).sum(-1) / others.sum(-1).clamp(min=1)
        on_target = (1.0 - label_smoothing) * on_target + label_smoothing * mean
    p = torch.where(possible, logp.exp(), 0.0)
    with torch.no_grad():
        ordered = z if ordered is None else ordered
        higher = ordered > ordered.gather(-1, column)
    return {
        "logprobs": on_target,
        "entropy": -(p * logp).sum(-1),
        "target_rank": higher.scatter(-1, column, False).sum(-1),
        "lse": lse,
        "sum_pi_squared": p.square().sum(-1),
    }


def assert_no_worse(
    candidate: Tensor,
    plain: Tensor,
    exact: Tensor,
    *,
    ulps: float = 4.0,
    factor: float = 1.0,
    name: str = "",
) -> None:
    """The candidate's largest error may exceed plain torch's by a few roundings of float32.

    Infinite entries of the truth must be matched exactly; NaN passes nowhere.

    Args:
        candidate: what the package gave.
        plain: what float32 (float64 for float64 logits) torch gives, in the candidate's dtype.
        exact: float64.
        ulps: roundings, of the largest finite magnitude in `exact` (at least 1).
        factor: what plain torch's error is multiplied by.

    Raises:
        AssertionError: says the errors and where the largest one is.
    """
    assert candidate.shape == exact.shape, f"{name}: shape {candidate.shape} != {exact.shape}"
    finite = exact.isfinite()
    wrong = (candidate.double() != exact) & ~finite
    assert not wrong.any(), f"{name}: {candidate[wrong][:4]} where {exact[wrong][:4]} is expected"
    if not finite.any():
        return
    assert candidate[finite].isfinite().all(), f"{name}: not finite where the truth is"
    error = torch.where(finite, (candidate.double() - exact).abs(), 0.0)
    allowed = factor * torch.where(finite, (plain.double() - exact).abs(), 0.0).max()
    unit = torch.finfo(torch.float32).eps
    if candidate.dtype == torch.float64:  # plain torch is the truth there, and has no error
        unit = 16 * torch.finfo(torch.float64).eps
    slack = ulps * unit * exact[finite].abs().max().clamp(min=1.0)
    if error.max() > allowed + slack:
        at = int(error.argmax())
        raise AssertionError(
            f"{name}: error {error.max():.3e}, plain torch {allowed:.3e} + {slack:.1e}; at flat "
            f"index {at}: {candidate.flatten()[at]!r} for {exact.flatten()[at]!r}"
        )
