"""What the drop-in tests share: shards cut by hand, and a float64 reference of everything."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from tests.helpers.distributed import grid_groups

VOCAB = 24  # divides by 1, 2 and 3
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # (TP, CP)


def zigzag(x: Tensor, rank: int, size: int, bounds: tuple[int, ...] | None = None) -> Tensor:
    """What CP rank `rank` holds of `[b, s, ...]`: pieces rank and 2*size-1-rank of a sequence."""
    if size == 1:
        return x
    parts = []
    for start, end in itertools.pairwise(bounds or (0, x.shape[1])):
        pieces = x[:, start:end].chunk(2 * size, dim=1)
        parts += [pieces[rank], pieces[2 * size - 1 - rank]]
    return torch.cat(parts, dim=1)


class Rank:
    """This rank's place in a TP x CP grid, and its shard of whole logits."""

    def __init__(self, tp: int, cp: int) -> None:
        groups = grid_groups(tp=tp, cp=cp)
        assert groups.tp is not None
        assert groups.cp is not None
        self.tp, self.cp = groups.tp, groups.cp
        self.cp_group = groups.cp if cp > 1 else None  # as NeMo-RL says "no context parallelism"
        width = VOCAB // tp
        self.range = (self.tp.rank() * width, (self.tp.rank() + 1) * width)

    def columns(self, logits: Tensor) -> Tensor:
        return logits[..., self.range[0] : self.range[1]]

    def shard(self, logits: Tensor, bounds: tuple[int, ...] | None = None) -> Tensor:
        """A leaf: this rank's tokens and columns of `[b, s, V]`."""
        mine = zigzag(self.columns(logits), self.cp.rank(), self.cp.size(), bounds)
        return mine.clone().requires_grad_()


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
    """Logits with everything that a sampler drops at -inf; one process, a sort for each row."""
    z = logits.clone()
    if top_k is not None and top_k > 0:
        kth = z.detach().topk(min(top_k, z.shape[-1]), dim=-1).values[..., -1:]
        z = z.masked_fill(z.detach() < kth, -torch.inf)
    if top_p < 1.0:
        order = z.detach().sort(dim=-1, descending=True, stable=True)
        p = order.values.softmax(-1)
        drop = (p.cumsum(-1) - p) >= top_p
        z = z.masked_fill(torch.zeros_like(drop).scatter(-1, order.indices, drop), -torch.inf)
    return z


def next_token_logprobs(
    logits: Tensor, ids: Tensor, top_k: int | None = None, top_p: float = 1.0
) -> Tensor:
    """`[b, s, V]`, unshifted `[b, s]` -> float64 `[b, s - 1]`."""
    logp = filtered(logits.double(), top_k, top_p).log_softmax(-1)[:, : ids.shape[1] - 1]
    return logp.gather(-1, ids[:, 1:, None])[..., 0]


def assert_near(got: Tensor, want: Tensor, tolerance: float = 2e-6) -> None:
    """Same shape, same infinities, float32 rounding."""
    assert got.shape == want.shape, (got.shape, want.shape)
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    scale = want[finite].abs().max().clamp(min=1.0) if finite.any() else 1.0
    assert ((got - want)[finite].abs() <= tolerance * scale).all(), (got - want).abs().max()
