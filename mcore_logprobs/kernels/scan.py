"""Running sums that are bitwise reproducible. `cumsum` of floating-point numbers on CUDA is not."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

_BLOCK = 128


def running_sum(x: Tensor) -> Tensor:
    """`x.cumsum(-1)` of finite floating-point numbers `[..., c]`, in blocks, by GEMMs."""
    length = x.shape[-1]
    if length == 0:
        return x
    blocks = F.pad(x, (0, -length % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    within = blocks @ x.new_ones(_BLOCK, _BLOCK).triu()
    before = within[..., :-1, -1]  # the totals of all blocks but the last
    if before.shape[-1]:
        within[..., 1:, :] += running_sum(before).unsqueeze(-1)
    return within.flatten(-2)[..., :length]
