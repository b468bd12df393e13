"""What objectives share: their call, their checks and terms, masks, sums of sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import (
    check_broadcasts,
    check_flag,
    check_fraction,
    check_integer,
    check_not_negative,
    check_positive,
    check_values,
    one_of,
)
from mcore_logprobs.consistency import check_call, comparing
from mcore_logprobs.kernels.chunk import acc_dtype
from mcore_logprobs.losses.per_token import (
    KL,
    check_shape,
    check_tensor,
    kl_unbiased,
    masked_product,
)
from mcore_logprobs.spelling import SuggestsFields, suggesting

__all__ = [
    "RegularizedLoss",
    "TokenLoss",
    "WeightedLoss",
    "sequence_mean",
    "sequence_sum",
]


def check_advantages(advantages: Tensor, logprobs: Tensor, seq_dim: int) -> None:
    """Advantages that broadcast to the log-probabilities, and say along which dimension.

    Raises:
        ValueError: another shape or device, or several values in fewer dimensions or for each
            position: of a square batch nothing else tells `[b]` from `[s]`.
    """
    check_broadcasts("advantages", advantages, logprobs.shape, logprobs.device)
    several = advantages.numel() != 1
    sequences = list(logprobs.shape)
    if advantages.dim() == logprobs.dim() and -logprobs.dim() <= seq_dim < logprobs.dim():
        sequences[seq_dim] = advantages.shape[seq_dim]
    if several and list(advantages.shape) != sequences:
        per_sequence = "[b, 1]" if seq_dim % max(1, logprobs.dim()) else "[1, b]"
        raise ValueError(
            f"advantages: expected a scalar, shape {tuple(logprobs.shape)}, or {per_sequence} for "
            f"one value per sequence, got shape {tuple(advantages.shape)}"
        )


# A call's per-token tensors, by name.
Given = dict[str, Any]
# Which check each setting has to pass.
Checks = tuple[tuple[str, Callable[[str, object], None]], ...]


def each(check: Callable[[str, object], None], *names: str) -> Checks:
    return tuple((name, check) for name in names)


CLIP: Checks = (("clip_low", check_fraction), ("clip_high", check_not_negative))
TERMS: Checks = (("kl", one_of(KL)), *each(check_not_negative, "kl_coef", "entropy_coef"))


class TokenLoss(SuggestsFields):
    """A loss of each token; every objective is a frozen dataclass of its settings.

    `loss(logprobs, entropy or None, *per-token tensors)`, all `[...]` of one shape, gives a loss
    for each token, `[...]`. Only logprobs and entropy carry a gradient. A token whose advantage is
    exactly 0 has a policy term of 0 and no gradient of it, whatever its log-probability is.

    Attributes:
        tensors: names of the per-token tensors, in the order of the call: old_logprobs and
            advantages where an objective does not say otherwise.
        passes: 1; or 2, where a sequence's or a batch's numbers are needed: `second_pass` makes
            them from the log-probabilities of a pass without gradient.
    """

    _tensors: ClassVar[tuple[str, ...]] = ("old_logprobs", "advantages")
    _passes: ClassVar[int] = 1
    _of_batch: ClassVar[bool] = False  # second_pass makes collectives over its group
    _checks: ClassVar[Checks] = ()

    def __post_init__(self) -> None:
        for name, check in self._checks:
            check(name, getattr(self, name))

    @property
    def tensors(self) -> tuple[str, ...]:
        return self._tensors

    @property
    def passes(self) -> int:
        return self._passes

    @suggesting
    def second_pass(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        seq_dim: int = 1,
        group: ProcessGroup | None = None,
    ) -> dict[str, Tensor]:
        """Tensors of the second call by name, from a first pass without gradient.

        Those that are not made here (ref_logprobs, weights) the caller adds. A token outside the
        mask has 0 in all of them, whatever it holds, and no part in the objective. KL and entropy
        terms know no mask: give such tokens the label ignore_index, or a weight of 0.

        Shape:
            logprobs, old_logprobs, mask (bool or 0/1): whole sequences `[b, s]` (`[s, b]` with
                seq_dim=0), gathered under context parallelism (`context_parallel_gather`; shard
                what comes back); advantages the same, `[b, 1]` (`[1, b]`) or a scalar -> `[b, s]`
                each.

        Args:
            group: for objectives of a batch (`M2POLoss`, `ClipCovLoss`, `KLCovLoss`) the ranks
                whose tokens make up the batch; None: this process's. Two collectives over it, see
                `top_entropy_mask`; the others make none.

        Raises:
            ValueError: another shape, a mask of anything but 0 and 1 (on a GPU a device-side
                assert), an objective of one pass; before any collective. At the first call over a
                group on every rank, if one rank refuses its arguments or has other settings or
                dtypes.
        """

        def same() -> dict[str, object]:
            dtypes = [logprobs.dtype, old_logprobs.dtype, acc_dtype(advantages.dtype)]
            return {"objective": type(self).__name__, "settings": self, "dtypes": dtypes}

        waited_for = self._of_batch or self.passes == 1  # the others do not know that it is wrong
        with comparing("second_pass", same, group if waited_for else None):
            if self.passes == 1:
                raise ValueError(f"second_pass: expected an objective of two passes, got {self}")
            check_tensor("logprobs", logprobs)
            check_tensor("advantages", advantages)
            check_advantages(advantages, logprobs, seq_dim)
            check_shape("old_logprobs", old_logprobs, logprobs)
            valid_mask = counted(mask, logprobs, seq_dim)
            if self._of_batch:
                check_call(None, group, logprobs.device)
        # Sums over a sequence or a batch leave float16's range.
        wide = logprobs.detach().to(torch.promote_types(logprobs.dtype, torch.float32))
        old = _widened(old_logprobs, wide)
        first_pass: Given = {
            "logprobs": wide,
            "old_logprobs": old,
            "log_ratio": wide - old,
            "advantages": _widened(advantages, wide).expand_as(wide),
            "mask": valid_mask,
            "seq_dim": seq_dim,
            "group": group,
        }
        tensors = first_pass | self.numbers(first_pass)
        names = (name for name in self.tensors if name in tensors)
        # 0 times the gradient of a masked token's NaN would be one.
        return {name: torch.where(valid_mask, tensors[name], 0.0) for name in names}

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, *tensors: Tensor) -> Tensor:
        names = list(self.tensors)
        if len(names) != len(tensors):
            hint = "; second_pass makes them from a first pass" if self.passes == 2 else ""
            raise ValueError(
                f"loss: expected the per-token tensors {names}, got {len(tensors)}{hint}"
            )
        for name, tensor in zip(names, tensors, strict=True):
            check_shape(name, tensor, logprobs)
        given = {
            name: _widened(tensor, logprobs) for name, tensor in zip(names, tensors, strict=True)
        }
        return self.of_token(logprobs, entropy, given)

    def of_token(self, logprobs: Tensor, entropy: Tensor | None, given: Given) -> Tensor:
        """The checked call: the policy term where the advantage is not 0, and the penalty."""
        advantages = self.weighted_advantages(given)
        used = {**given, "advantages": advantages}
        loss = _zero_where(advantages == 0.0, logprobs, lambda x: self.policy(x, used))
        penalty = self.penalty(logprobs, entropy, given)
        return loss if penalty is None else loss + penalty

    def numbers(self, given: Given) -> dict[str, Tensor]:
        """Tensors that `second_pass` adds to its given arguments or changes, by name."""
        raise NotImplementedError

    def weighted_advantages(self, given: Given) -> Tensor:
        """The advantages, times importance weights at least 0 where the objective takes some."""
        if "importance_weights" not in self.tensors:
            return given["advantages"]
        return masked_product(given["advantages"], given["importance_weights"])

    def policy(self, logprobs: Tensor, given: Given) -> Tensor:
        """The term that an advantage of 0 masks; those given are the weighted ones."""
        raise NotImplementedError

    def penalty(self, logprobs: Tensor, entropy: Tensor | None, given: Given) -> Tensor | None:
        """The term that it does not mask."""
        return None


def _widened(tensor: Tensor, logprobs: Tensor) -> Tensor:
    """Without gradient; in bfloat16 e^log p would have fewer digits than the new policy's, and
    minus a uint8 is none.
    """
    dtype = tensor.dtype if tensor.is_floating_point() else torch.float32
    return tensor.detach().to(torch.promote_types(dtype, logprobs.dtype))


class _Wrapped(TokenLoss):
    """An objective around another, `loss`."""

    loss: TokenLoss

    def __post_init__(self) -> None:
        if not isinstance(self.loss, TokenLoss):
            got = type(self.loss).__name__
            raise ValueError(f"loss: expected an objective (a TokenLoss), got {got}")
        super().__post_init__()
        twice = [name for name in self.tensors if self.tensors.count(name) > 1]
        if twice:
            raise ValueError(f"loss: expected an objective without {twice[0]}, got {self.loss}")

    @property
    def passes(self) -> int:
        return self.loss.passes

    def second_pass(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The second pass's tensors of the wrapped objective."""
        return self.loss.second_pass(*args, **kwargs)


@dataclass(frozen=True)
class RegularizedLoss(_Wrapped):
    """Any objective with a KL and an entropy term: loss [+ kl_coef KL] [- entropy_coef H].

    Called as `loss`, then with ref_logprobs if kl_coef > 0, then with old_logprobs if kl_ratio and
    `loss` has none.

    Attributes:
        loss: the objective.
        kl: "k1", "k2" or "k3".
        kl_ratio: multiply KL by p / p_old, its gradient included: `kl_unbiased`.
    """

    loss: TokenLoss
    kl_coef: float = 0.0
    kl: str = "k3"
    kl_ratio: bool = False
    entropy_coef: float = 0.0

    _checks = (*TERMS, ("kl_ratio", check_flag))

    @property
    def tensors(self) -> tuple[str, ...]:
        names = self.loss.tensors + (("ref_logprobs",) if self.kl_coef > 0.0 else ())
        own = self.kl_coef > 0.0 and self.kl_ratio and "old_logprobs" not in names
        return names + (("old_logprobs",) if own else ())

    def of_token(self, logprobs: Tensor, entropy: Tensor | None, given: Given) -> Tensor:
        terms = kl_and_entropy(self, logprobs, entropy, given)
        loss = self.loss.of_token(logprobs, entropy, given)
        return loss if terms is None else loss + terms


@dataclass(frozen=True)
class WeightedLoss(_Wrapped):
    """weight * loss of each token, KL and entropy terms included; a weight of 0 masks all of it.

    For `aggregation`'s weights, or for the weights and masks of a correction. Called as `loss`,
    then with the weights.
    """

    loss: TokenLoss

    @property
    def tensors(self) -> tuple[str, ...]:
        return (*self.loss.tensors, "weights")

    def of_token(self, logprobs: Tensor, entropy: Tensor | None, given: Given) -> Tensor:
        weights = given["weights"]
        return weights * _zero_where(
            weights == 0.0, logprobs, lambda x: self.loss.of_token(x, entropy, given)
        )


def _zero_where(silent: Tensor, logprobs: Tensor, formula: Callable[[Tensor], Tensor]) -> Tensor:
    """The formula, and exactly 0 with a gradient of 0 where silent.

    Masked on the way in and on the way out: what the formula does there, inf and NaN in value and
    gradient included, reaches nothing.
    """
    return formula(logprobs.masked_fill(silent, 0.0)).masked_fill(silent, 0.0)


def kl_and_entropy(
    settings: Any, logprobs: Tensor, entropy: Tensor | None, given: Given
) -> Tensor | None:
    """kl_coef KL - entropy_coef H by an objective's settings; None where it has neither."""
    terms = []
    if settings.kl_coef > 0.0:
        ref = given["ref_logprobs"]
        if getattr(settings, "kl_ratio", False):
            divergence = kl_unbiased(logprobs, ref, given["old_logprobs"], kl=settings.kl)
        else:
            divergence = KL[settings.kl](logprobs, ref)
        terms.append(settings.kl_coef * divergence)
    if settings.entropy_coef > 0.0:
        if entropy is None:
            raise ValueError("entropy_coef > 0: pass entropy=True, got no entropy")
        check_shape("entropy", entropy, logprobs)
        terms.append(-settings.entropy_coef * entropy)
    return sum(terms[1:], terms[0]) if terms else None


@suggesting
def sequence_sum(values: Tensor, mask: Tensor, *, seq_dim: int = 1) -> Tensor:
    """Each sequence's sum over its unmasked tokens, kept in shape to broadcast back.

    Under context parallelism gather the values first (`context_parallel_gather`).

    Shape:
        values, mask (bool or 0/1): `[b, s]` (or `[s, b]` with seq_dim=0) -> `[b, 1]` (`[1, b]`),
            in the values' dtype; of 16-bit values in float32.

    Raises:
        ValueError: a mask of another shape or (on a CPU; elsewhere a device-side assert) that holds
            anything but 0 and 1; a seq_dim that is no dimension.
    """
    return _sum_of(counted(mask, values, seq_dim), values, seq_dim)


@suggesting
def sequence_mean(values: Tensor, mask: Tensor, *, seq_dim: int = 1) -> Tensor:
    """Each sequence's mean over its unmasked tokens; 0 where there is none.

    Shape:
        values, mask: `[b, s]` (or `[s, b]` with seq_dim=0) -> `[b, 1]` (`[1, b]`).
    """
    valid_mask = counted(mask, values, seq_dim)
    tokens = valid_mask.sum(seq_dim, keepdim=True).clamp(min=1)
    return _sum_of(valid_mask, values, seq_dim) / tokens


def _sum_of(valid_mask: Tensor, values: Tensor, seq_dim: int) -> Tensor:
    # A sequence's log-probability may be outside float16's range.
    dtype = torch.promote_types(values.dtype, torch.float32)
    return torch.where(valid_mask, values, 0.0).sum(seq_dim, keepdim=True, dtype=dtype)


def counted(mask: Tensor, values: Tensor, seq_dim: int = 1) -> Tensor:
    """The mask as bool, of the values' shape."""
    check_shape("mask", mask, values)
    check_integer("seq_dim", seq_dim)
    if not -values.dim() <= seq_dim < values.dim():
        raise ValueError(f"seq_dim: out of range for shape {tuple(values.shape)}, got {seq_dim}")
    if mask.dtype is torch.bool:
        return mask
    check_values(
        (mask == 0) | (mask == 1),
        "mask: expected only 0 and 1",
        lambda: ValueError(
            "mask: expected only 0 (not counted) and 1 (counted), got other numbers"
        ),
    )
    return mask != 0


def check_bounds(low_name: str, low: float, high_name: str, high: float) -> None:
    check_positive(high_name, high)
    check_not_negative(low_name, low)
    if low > high:
        raise ValueError(
            f"{low_name}: expected a number >= 0 and at most {high_name} {high!r}, got {low!r}"
        )
