"""The largest logits of a sharded vocabulary, in an order that does not depend on the sharding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from mcore_logprobs.checks import check_mask
from mcore_logprobs.collectives import all_gather_stack
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels.chunk import ChunkAt, times_multiplier
from mcore_logprobs.kernels.largest import copied_numbers, largest_columns
from mcore_logprobs.ops.driver import Backward, Forward, Operation, Results, Saved, Tensors, apply
from mcore_logprobs.ops.keywords import HeadKeywords, LogitsKeywords, shared_keywords
from mcore_logprobs.ops.row_statistics import EntryGradient
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.head import head_logits
from mcore_logprobs.sources.source import Source


@dataclass(frozen=True)
class TopK(Operation[Source]):
    """(values, global ids), each `[n, k]`."""

    k: int
    linear = True

    def forward(self, source: Source, tensors: Tensors) -> TopKForward:
        return TopKForward(self.k, source)

    def backward(
        self, source: Source, upstream: Results, tensors: Tensors, saved: Saved
    ) -> Backward:
        (columns,), on_values = saved, upstream[0]
        assert on_values is not None
        return EntryGradient(source, columns, on_values)


class TopKForward(Forward):
    reads = "rows"

    def __init__(self, k: int, source: Source) -> None:
        shard, device = source.shard, source.device
        self._k, self._source = k, source
        # A rank with less true vocabulary than that pads with -inf. Such ranks come last, so that
        # in the stable sort below the padding comes after every true column.
        width = min(k, shard.width)
        self._own = min(width, shard.valid_width)
        shape = (source.num_rows, width)
        self._x = torch.full(shape, -torch.inf, dtype=source.acc_dtype, device=device)
        self._columns = torch.zeros(shape, dtype=torch.int64, device=device)

    def see(self, placed: ChunkAt) -> None:
        width, top, columns = self._own, self._x, self._columns
        if width == 0:
            return
        valid, is_raw = placed.chunk.valid, placed.chunk.is_raw
        copied = copied_numbers(valid, width, self._source.device) + (not is_raw) * valid
        for rows, _, step in placed.steps(self._source.rows_at_a_time(copied)):
            x = step.logits[:, :valid] if is_raw else step.unscaled()
            # By column, hence by global id after the gather: the sort by value is stable.
            columns[rows, :width] = largest_columns(x, width).sort(-1).values
            top[rows, :width] = x.gather(-1, columns[rows, :width]).to(top.dtype)
            del step, x

    def largest(self) -> tuple[Tensor, Tensor, Tensor]:
        """(unscaled logits, global ids, this rank's columns or -1), `[n, k]` each, in order."""
        shard = self._source.shard
        x, ids = gather_pairs(self._x, self._columns + shard.start, shard.group)
        order = x.sort(dim=-1, descending=True, stable=True).indices[:, : self._k]
        x, ids = x.gather(-1, order), ids.gather(-1, order)
        local = (ids >= shard.start) & (ids < shard.end)
        return x, ids, torch.where(local, ids - shard.start, -1)

    def results(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor]]:
        x, ids, columns = self.largest()
        return (times_multiplier(x, self._source.processing.multiplier), ids), (columns,)


def gather_pairs(values: Tensor, ids: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Each rank's `[n, k]` values and ids -> all of them, `[n, size*k]`, rank by rank.

    One all-gather: the ids, cut to the values' width in bits, travel with the values' bits.
    """
    if group is None:
        return values, ids
    integer = torch.int64 if values.dtype == torch.float64 else torch.int32
    packed = torch.stack([values.view(integer), ids.to(integer)])
    everyone = all_gather_stack(packed, group)  # [size, 2, n, k]
    size, _, rows, k = everyone.shape
    both = everyone.permute(1, 2, 0, 3).reshape(2, rows, size * k)
    return both[0].view(values.dtype), both[1].long()


def topk(source: Source, k: int, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`vocab_parallel_topk` of any source."""
    check_k(k, source.shard)
    mask = check_mask(mask, source.batch_shape, source.device)
    values, ids = apply(TopK(k), source.compacted(mask).in_whole_rows())
    if mask is not None:
        values = torch.where(mask.unsqueeze(-1), values, 0.0)
        ids = torch.where(mask.unsqueeze(-1), ids, 0)
    return values, ids


def check_k(k: int, shard: VocabShard, name: str = "k") -> None:
    """An int from 1 to vocab_size, or a ValueError."""
    most = shard.vocab_size
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most:
        raise ValueError(f"{name}: expected an int from 1 to vocab_size {most}, got {k!r}")


@shared_keywords(LogitsKeywords, given_logits)
def vocab_parallel_topk(
    vocab_parallel_logits: Tensor,
    k: int,
    *,
    mask: Tensor | None = None,
    **shared: Unpack[LogitsKeywords],
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each row over the whole vocabulary, and their global ids.

    They are ordered by value before the temperature (descending), equal ones by id (ascending).
    That also decides ties at the k-th place, so results do not depend on TP. NaN counts as larger
    than any number.

    Shape:
        vocab_parallel_logits `[..., V/TP]` -> values float32 `[..., k]` (float64 for float64
        logits), which are logits / temperature; ids int64 `[..., k]`, global. Both are the same on
        every TP rank. Values are differentiable: backward scatters into the logits' shard.

    Args:
        k: 1 to vocab_size; columns at or past vocab_size are never chosen.
        mask: bool `[...]`; False rows give value 0 and id 0, and no gradient.
        {shared}

    Collectives: one all-gather over TP of min(k, V/TP) pairs (value, id) per row; backward none.
    No host sync.

    Raises:
        ValueError: k out of range; else as in `vocab_parallel_token_stats`.
    """
    return topk(given_logits(vocab_parallel_logits, **shared), k, mask=mask)


@torch.no_grad()
@shared_keywords(LogitsKeywords, given_logits)
def vocab_parallel_argmax(
    vocab_parallel_logits: Tensor, **shared: Unpack[LogitsKeywords]
) -> Tensor:
    """Return the global id of each row's largest logit; of several equal ones the smallest id.

    Shape:
        vocab_parallel_logits `[..., V/TP]` -> int64 `[...]`, the same on every TP rank.

    Collectives: one all-gather over TP of one pair (value, id) per row.

    Keywords and errors are those of `vocab_parallel_token_stats`.
    """
    return topk(given_logits(vocab_parallel_logits, **shared), 1)[1].squeeze(-1)


@shared_keywords(HeadKeywords, head_logits)
def linear_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    mask: Tensor | None = None,
    **shared: Unpack[HeadKeywords],
) -> tuple[Tensor, Tensor]:
    """`vocab_parallel_topk` from hidden states, without materializing the logits.

    Shape:
        hidden, weight: as in `linear_token_stats`.
        mask: bool `[s, b]` or `[n]`, the whole sequence (`[m]` with rows); False rows give value 0
            and id 0, and no gradient.
        Returns values float32 `[s, b, k]` or `[n, k]` (float64 for float64 operands) and ids int64,
        global; the same on every TP rank. Values are differentiable.

    Args:
        k: 1 to vocab_size; columns at or past vocab_size are never chosen.
        {shared}

    chunk_size is rows per tile, which spans all of a rank's columns, as in `linear_map`.

    Cost: one GEMM, and a top-k of each tile; backward a dot product per entry, see
    `linear_gather`.

    Collectives: forward one all-gather over TP of min(k, V/TP) pairs (value, id) per row; backward,
    and under sequence parallelism, those of `linear_token_stats`.

    Memory: a tile of logits, and copies of some of its rows. Saved for backward: the inputs and the
    ids.

    Raises:
        ValueError: before any collective; k out of range, compact without a mask; else as in
            `linear_token_stats`.
    """
    return topk(head_logits(hidden, weight, **shared), k, mask=mask)
