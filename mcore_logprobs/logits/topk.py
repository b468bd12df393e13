"""The largest logits of a sharded vocabulary, in an order that does not depend on the sharding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels.reference import finished_logits
from mcore_logprobs.kernels.stats import accumulator_dtype
from mcore_logprobs.logits.opening import CallOptions, open_logits
from mcore_logprobs.logits.rows import Rows

__all__ = ["vocab_parallel_argmax", "vocab_parallel_topk"]


class _TopK(torch.autograd.Function):
    """(values, ids), each `[..., k]`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, opts: CallOptions) -> tuple[Tensor, Tensor]:
        rows, shard = Rows(logits), opts.shard
        width = min(k, shard.width)
        dtype = accumulator_dtype(logits.dtype)
        # A rank with less true vocabulary than that pads with -inf. Such ranks come last, so that
        # in the stable sort below the padding comes after every true column.
        values = torch.full((rows.count, width), -torch.inf, dtype=dtype, device=logits.device)
        columns = torch.zeros(rows.count, width, dtype=torch.int64, device=logits.device)
        found = min(width, shard.valid_width)
        if found:
            for part, block in rows.chunks(opts.chunk_size, logits):
                picked = stable_topk(block[:, : shard.valid_width], found)
                # By column, hence by global id after the gather: the sort by value is stable.
                columns[part, :found] = picked.sort(-1).values
                values[part, :found] = block.gather(-1, columns[part, :found]).to(dtype)
        values, ids = gather_pairs(values, columns + shard.start, shard.group)
        order = values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        values, ids = values.gather(-1, order), ids.gather(-1, order)
        ctx.opts = opts
        column = ids - shard.start
        own = (column >= 0) & (column < shard.width)
        ctx.save_for_backward(logits, torch.where(own, column, -1))
        ids = rows.restore(ids)
        ctx.mark_non_differentiable(ids)
        temperature = rows.walk_optional(opts.temperature)
        temperature = None if temperature is None else temperature.unsqueeze(-1)
        return rows.restore(finished_logits(values, opts.spec, temperature=temperature)), ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, column = ctx.saved_tensors
        opts: CallOptions = ctx.opts
        rows = Rows(logits)
        grad = torch.empty_like(logits)
        upstream = rows.walk(grads[0])
        temperature = rows.walk_optional(opts.temperature)
        for part, block, out in rows.blocks(logits, grad):
            opts.backend.entries_grad(
                block,
                column[part],
                upstream[part],
                None,
                None,
                opts.spec,
                temperature=None if temperature is None else temperature[part],
                out=out,
                chunk_size=opts.chunk_size,
            )
        return grad, None, None


def stable_topk(x: Tensor, k: int) -> Tensor:
    """Columns of the k largest in each row, smaller columns first among equals; in any order.

    NaN is the largest of all. torch.topk takes any of the values that tie at the k-th place: on a
    CPU rows where some do are looked at again, elsewhere, without a host sync, all are.

    Args:
        x: `[c, v]`, not modified; k is at most v.

    Returns:
        `[c, k]` int64.
    """
    if k == x.shape[-1]:
        return torch.arange(k, device=x.device).repeat(x.shape[0], 1)
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return _topk_of_keys(x, k)
    best = x.topk(k + 1, dim=-1)
    columns = best.indices[:, :k]
    tied = ~(best.values[:, k - 1] > best.values[:, k])  # NaN too
    again = tied.nonzero().squeeze(-1)
    if again.numel():
        picked = x[again]
        columns[again] = _topk_of_keys(picked, k)
    return columns


def _topk_of_keys(x: Tensor, k: int) -> Tensor:
    """As `stable_topk`: each value's bits, made to increase with the value, and its column share
    one int64 that cannot tie.
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


def gather_pairs(values: Tensor, ids: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Each rank's `[n, k]` values and ids -> all of them, `[n, size*k]`, rank by rank.

    One all-gather: the ids, cut to the values' width in bits, travel beside the values' bits.
    """
    if group is None:
        return values, ids
    integer = torch.int64 if values.dtype == torch.float64 else torch.int32
    packed = torch.stack([values.view(integer), ids.to(integer)])
    everyone = all_gather_stack(packed, group)  # [size, 2, n, k]
    size, _, rows, k = everyone.shape
    both = everyone.permute(1, 2, 0, 3).reshape(2, rows, size * k)
    return both[0].view(values.dtype), both[1].long()


def check_k(k: int, shard: VocabShard) -> None:
    """An int from 1 to vocab_size, or a ValueError."""
    most = shard.vocab_size
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most:
        raise ValueError(f"k: expected an int from 1 to vocab_size {most}, got {k!r}")


def vocab_parallel_topk(
    vocab_parallel_logits: Tensor,
    k: int,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row over the whole vocabulary, and their global ids.

    The order is by value, descending, then by id, ascending, also where values tie at the k-th
    place: results do not depend on TP. NaN counts as larger than any number.

    Shape:
        vocab_parallel_logits `[..., V/TP]` -> values float32 `[..., k]` (float64 for float64
        logits), which are logits / temperature; ids int64 `[..., k]`, global. Both are the same on
        every TP rank. Values are differentiable: backward scatters into the logits' shard.

    Args:
        k: 1 to vocab_size; columns at or past vocab_size are never chosen.
        backend: checked, and no more: the work is torch's own top-k on every device.

    Collectives: one all-gather over TP of min(k, V/TP) pairs (value, id) a row; backward none.
    Ranks' contributions are found a chunk of rows at a time, without a host sync.

    Raises:
        ValueError: k out of range; else as in `vocab_parallel_token_stats`.
    """
    call = open_logits(
        vocab_parallel_logits,
        tp_group=tp_group,
        vocab_size=vocab_size,
        backend=backend,
        chunk_size=chunk_size,
        temperature=temperature,
        copies=2,  # an int64 key and its parts
    )
    check_k(k, call.shard)
    return _TopK.apply(call.logits, k, call.options)


@torch.no_grad()
def vocab_parallel_argmax(
    vocab_parallel_logits: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """The global id of each row's largest logit; the smallest id where several tie.

    Shape:
        vocab_parallel_logits `[..., V/TP]` -> int64 `[...]`, the same on every TP rank.

    Collectives: one all-gather over TP of one pair (value, id) a row.

    Raises:
        ValueError: as in `vocab_parallel_token_stats`.
    """
    opened = open_logits(vocab_parallel_logits, tp_group=tp_group, vocab_size=vocab_size)
    logits, shard = opened.logits, opened.shard
    dtype = accumulator_dtype(logits.dtype)
    lead = logits.shape[:-1]
    if shard.valid_width:
        best = logits[..., : shard.valid_width].max(dim=-1)  # the first of equals
        value, column = best.values.to(dtype), best.indices
    else:
        value = torch.full(lead, -torch.inf, dtype=dtype, device=logits.device)
        column = torch.zeros(lead, dtype=torch.int64, device=logits.device)
    values, ids = gather_pairs(
        value.reshape(-1, 1), (column + shard.start).reshape(-1, 1), shard.group
    )
    return ids.gather(-1, values.max(dim=-1, keepdim=True).indices).reshape(lead)
