"""One pass over a head for several consumers of the same lazy logits.

Training code asks for the entropy in one call and for log-probabilities in another. What the first
call computed of whole rows is kept with the head, and the second finds it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PassKey:
    """Of which rows a pass was, and how their logits were processed.

    Attributes:
        rows: int64 `[m]` on the host, the head's tokens; None: all in order.
        temperature: what was recorded, and of which of its places.
        processing: the consumer's temperature, softcap, logit_scale and vocab_size.
    """

    rows: Tensor | None
    temperature: float | Tensor
    places: Tensor
    processing: tuple[object, ...]

    def matches(self, other: PassKey) -> bool:
        """Whether the two are of the same logits; costs no sync of a device."""
        if self.processing != other.processing:
            return False
        mine, theirs = self.temperature, other.temperature
        if isinstance(mine, Tensor) or isinstance(theirs, Tensor):
            if mine is not theirs or not torch.equal(
                self.places.reshape(-1), other.places.reshape(-1)
            ):
                return False
        elif mine != theirs:
            return False
        if self.rows is None or other.rows is None:
            return self.rows is other.rows
        return torch.equal(self.rows, other.rows)


# By whether it has a gradient: of which logits, and the result.
Passes = dict[bool, tuple[PassKey, Any]]


@dataclass(frozen=True)
class LatestPass:
    """Where a head has the result of its latest pass, for consumers of the same logits.

    One per head, so that a loop over sequences keeps nothing of those that it has done.
    """

    passes: Passes
    gradient: bool
    key: PassKey

    def get(self) -> Any:
        """What was put for the same logits; None: nothing."""
        key, kept_pass = self.passes.get(self.gradient, (None, None))
        return kept_pass if key is not None and key.matches(self.key) else None

    def put(self, made_pass: object) -> None:
        self.passes[self.gradient] = self.key, made_pass
