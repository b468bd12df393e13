"""The k largest of each row of logits, in one read of them.

The columns of a row are taken in groups of neighbors. Its k largest lie in the k groups with the
largest maxima: of one that lay elsewhere, the maxima of k groups would come before it. So what is
sorted is v/g maxima and the k*g columns of those groups, instead of v columns, and the maxima are
read without a copy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcore_logprobs.checks import is_traced


def largest_columns(x: Tensor, k: int) -> Tensor:
    """Columns of the k largest in each row, smaller columns first among equals; in any order.

    NaN is the largest of all.

    Args:
        x: `[c, v]`, not modified; k is at most v.

    Returns:
        `[c, k]` int64.
    """
    width = x.shape[-1]
    group = _group(width, k, x.device)
    if k == width:
        return torch.arange(k, device=x.device).repeat(x.shape[0], 1)
    if group == 1:
        return _largest(x, k)
    grouped = width // group * group
    maxima = x[:, :grouped].unflatten(-1, (-1, group)).amax(-1)
    chosen = _largest(maxima, k).sort(-1).values.unsqueeze(-1)  # sorted: columns ascend below
    columns = (chosen * group + torch.arange(group, device=x.device)).flatten(1)
    rest = torch.arange(grouped, width, device=x.device).expand(x.shape[0], -1)
    columns = torch.cat([columns, rest], dim=1)
    return columns.gather(-1, _largest(x.gather(-1, columns), k))


def copied_numbers(width: int, k: int, device: torch.device) -> int:
    """Float32 numbers that `largest_columns` makes a row of `width`: int64 keys and columns of what
    it sorts.
    """
    group = _group(width, k, device)
    return 4 * max(width // group, k * group + width % group)


def _group(width: int, k: int, device: torch.device) -> int:
    """Columns per group, a power of two near the one that leaves least to sort; 1: no groups."""
    if width <= 8 * k:
        return 1
    group = 1 << round(math.log2(width / k) / 2)
    # On a CPU torch takes maxima of 32 neighbors in so much less time than of 16 that the larger
    # number of columns to sort costs less.
    return 32 if group == 16 and device.type == "cpu" else group


def _largest(x: Tensor, k: int) -> Tensor:
    """`largest_columns` of all columns at once.

    torch.topk takes any of the values that tie at the k-th place: on a CPU rows where some do are
    looked at again, elsewhere, without a host sync, all are.
    """
    if x.device.type != "cpu" or is_traced(x):
        return _largest_of_keys(x, k)
    best = x.topk(k + 1, dim=-1)
    columns = best.indices[:, :k]
    tied = ~(best.values[:, k - 1] > best.values[:, k])  # NaN too
    again = tied.nonzero().squeeze(-1)
    if again.numel():
        columns[again] = _largest_of_keys(x[again], k)
    return columns


def _largest_of_keys(x: Tensor, k: int) -> Tensor:
    """`_largest` by int64 keys that cannot tie: the value's bits, made to increase with the value,
    above the column's.
    """
    if x.dtype == torch.float64:  # no room for the column
        return x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    exact = x.to(torch.float32, copy=True).add_(0.0)  # + 0.0: no minus zero
    bits = exact.masked_fill_(exact.isnan(), torch.nan).view(torch.int32)  # nor a negative NaN
    key = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).long()
    del bits, exact
    last = x.shape[-1] - 1
    key.mul_(2**32).add_(torch.arange(last, -1, -1, device=x.device))
    return last - (key.topk(k, dim=-1, sorted=False).values & 0xFFFFFFFF)
