"""What the drop-in tests share: shards cut by hand, and a float64 reference of everything."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.engine.truths import kept_logits, take
from tests.helpers.distributed import grid_groups
from tests.megatron.common import zigzag

VOCAB = 24  # divides by 1, 2 and 3
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # (TP, CP)


class Rank:
    """This rank's place in a TP x CP grid, and its shard of whole logits.

    TP 0 is a caller that gives no group: all columns are here, whatever the world is.
    """

    def __init__(self, tp: int, cp: int) -> None:
        self.tp = self.column = self.cp_group = None
        self.range, self.place, self.size = (0, VOCAB), 0, cp
        if tp:
            groups = grid_groups(tp=tp, cp=cp)
            self.tp, self.cp = groups.tp, groups.cp
            self.column, self.place = groups.tp.rank(), groups.cp.rank()
            # As NeMo-RL says "no context parallelism".
            self.cp_group = groups.cp if cp > 1 else None
            width = VOCAB // tp
            self.range = (self.column * width, (self.column + 1) * width)

    def columns(self, logits: Tensor) -> Tensor:
        return logits[..., self.range[0] : self.range[1]]

    def shard(self, logits: Tensor, bounds: tuple[int, ...] | None = None) -> Tensor:
        """A leaf: this rank's tokens and columns of `[b, s, V]`."""
        mine = zigzag(self.columns(logits), self.place, self.size, bounds)
        return mine.clone().requires_grad_()


def columns_of(state: Any, vocab: int = VOCAB) -> tuple[int, int, Any]:
    """(first column, end, TP group) of a rank in Megatron's parallel state."""
    group = state.get_tensor_model_parallel_group()
    width = vocab // group.size()
    return group.rank() * width, (group.rank() + 1) * width, group


def spread(grads: list[Tensor], tp: int, cp: int, shape: Any, bounds: Any = None) -> Tensor:
    """Every rank's gradient put back to its place in the whole `[b, s, V]`."""
    whole = torch.zeros(shape, dtype=torch.float64)
    place = torch.arange(shape[1]).expand(1, -1)
    for rank, grad in enumerate(grads):
        column, sequence = rank % tp, rank // tp
        width = shape[-1] // tp
        where = zigzag(place, sequence, cp, bounds)[0]
        block = whole[..., column * width : (column + 1) * width]
        block[:, where] += grad.double()
    return whole


def filtered(logits: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Logits with everything that a sampler drops at -inf."""
    return kept_logits(logits, {"top_k": top_k, "top_p": top_p, "min_p": 0.0})


def next_token_logprobs(
    logits: Tensor, ids: Tensor, top_k: int | None = None, top_p: float = 1.0
) -> Tensor:
    """`[b, s, V]`, unshifted `[b, s]` -> float64 `[b, s - 1]`."""
    logp = filtered(logits.double(), top_k, top_p).log_softmax(-1)[:, : ids.shape[1] - 1]
    return take(logp, ids[:, 1:])


def assert_near(got: Tensor, want: Tensor, tolerance: float = 2e-6) -> None:
    """Same shape, same infinities, float32 rounding."""
    assert got.shape == want.shape, (got.shape, want.shape)
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    scale = want[finite].abs().max().clamp(min=1.0) if finite.any() else 1.0
    assert ((got - want)[finite].abs() <= tolerance * scale).all(), (got - want).abs().max()


def normal(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def place(state: Any) -> tuple[int, slice]:
    """(CP rank, own columns)."""
    return state.get_context_parallel_rank(), slice(*columns_of(state)[:2])
