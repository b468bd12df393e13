"""Single logits of each row, from hidden states: a dot product an entry, no matrix product.

An *entry* is one (row, column) of the logits. Forward takes `hidden[row] . weight[column]`;
backward adds `g hidden[row]` to dWeight[column] and `g weight[column]` to dHidden[row]. A few
entries are worked on at a time, so that their gathered operands stay as small as a chunk of logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_logprobs.autograd import once_differentiable
from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.fused.gradients import HeadGradients
from mcore_logprobs.fused.head import Head, HeadOptions, HeadTensors
from mcore_logprobs.fused.tokens import HiddenTiles, Tile, Tiling, Tokens
from mcore_logprobs.kernels.reference import finished_logits, row_chunks, softcap_slope

__all__ = ["Entries", "entry_gradients", "entry_logits", "grid_entries", "ragged_entries"]

# Bytes of the two operands gathered at a time.
_GATHERED_BYTES = {"cpu": 8 << 20, "other": 64 << 20}


@dataclass(frozen=True)
class Entries:
    """Entries in the order in which tiles are walked.

    Attributes:
        row: `[e]` int64, ascending, the walked row.
        column: `[e]` int64, this rank's column, or -1 for another rank's and for none.
        bounds: where each tile's entries begin, and the end.
    """

    row: Tensor
    column: Tensor
    bounds: tuple[int, ...]

    def chunks(self, tile: Tile, width: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(slice of the entries, rows within the tile, columns) of one tile, some at a time."""
        start, stop = self.bounds[tile.number : tile.number + 2]
        budget = _GATHERED_BYTES["cpu" if self.row.device.type == "cpu" else "other"]
        for part in row_chunks(stop - start, max(1, budget // (8 * width))):
            where = slice(start + part.start, start + part.stop)
            yield where, self.row[where] - tile.rows.start, self.column[where]


def grid_entries(column: Tensor, tiles: HiddenTiles) -> Entries:
    """Of columns `[n, k]` in walking order: k entries a row."""
    rows, k = column.shape
    row = torch.arange(rows, device=column.device).unsqueeze(-1).expand(rows, k)
    bounds = (0, *(part.stop * tiles.ranks * k for part in tiles.local))
    return Entries(row.reshape(-1), column.reshape(-1), bounds)


def ragged_entries(
    offsets: Tensor, column: Tensor, tokens: Tokens, tiles: HiddenTiles
) -> tuple[Entries, Tensor]:
    """Of any number of entries a row, `column[offsets[i]:offsets[i+1]]` in the caller's order.

    A host sync where rows are left out, and one where there are several tiles.

    Returns:
        The entries as they are walked, and `[e]` where each stood.
    """
    place = torch.arange(offsets.shape[0] - 1, device=offsets.device).view(tokens.lead)
    order = tiles.walk(tokens.per_row(place))
    lengths = offsets.diff()[order]
    ends = lengths.cumsum(0)
    count = column.shape[0]
    if tokens.compaction is not None:
        count = int(lengths.sum())  # a host sync
    shift = offsets[:-1][order] - (ends - lengths)
    index = shift.repeat_interleave(lengths, output_size=count)
    index = index + torch.arange(count, device=offsets.device)
    row = torch.arange(order.shape[0], device=offsets.device)
    row = row.repeat_interleave(lengths, output_size=count)
    bounds = (0, count)
    if len(tiles.local) > 1:
        last = [part.stop * tiles.ranks - 1 for part in tiles.local]
        bounds = (0, *ends[last].tolist())  # a host sync
    return Entries(row, column[index], bounds), index


@dataclass(frozen=True)
class _Options:
    head: HeadOptions
    tiling: Tiling


class _EntryLogits(torch.autograd.Function):
    """Finished logits `[e]`, 0 at entries that no rank owns; entries and temperature as walked."""

    @staticmethod
    def forward(
        ctx: Any,
        entries: Entries,
        temperature: Tensor | None,
        opts: _Options,
        *inputs: Any,
    ) -> Tensor:
        tensors = HeadTensors(*inputs)
        hidden = tensors.hidden
        head = Head(tensors, opts.head, opts.tiling.block_columns)
        values = torch.zeros(entries.row.shape, dtype=head.wide, device=hidden.device)
        for tile in HiddenTiles(hidden, opts.tiling):
            for where, rows, columns in entries.chunks(tile, hidden.shape[1]):
                raw = head.entry_logits(tile.hidden, columns, rows)
                values[where] = _finished(raw, columns, entries.row[where], temperature, head)
        ctx.opts, ctx.bounds = opts, entries.bounds
        tensors.save(ctx, entries.row, entries.column, temperature)
        return all_reduce_sum(values, opts.head.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, (row, column, temperature) = HeadTensors.saved(ctx)
        gradients = entry_gradients(
            tensors,
            Entries(row, column, ctx.bounds),
            grads[0],
            temperature,
            ctx.opts.head,
            HiddenTiles(tensors.hidden, ctx.opts.tiling),
            needs=ctx.needs_input_grad[3:],
        )
        return (None, None, None, *gradients)


def _finished(
    raw: Tensor, columns: Tensor, row: Tensor, temperature: Tensor | None, head: Head
) -> Tensor:
    bias = None if head.bias is None else head.bias[columns.clamp(min=0)].to(raw.dtype)
    own = None if temperature is None else temperature[row]
    return torch.where(columns >= 0, finished_logits(raw, head.opts.spec, bias, own), 0.0)


def entry_logits(
    tensors: HeadTensors,
    entries: Entries,
    temperature: Tensor | None,
    head: HeadOptions,
    tiles: HiddenTiles,
) -> Tensor:
    """Finished logits of entries, `[e]`, the same on every TP rank; differentiable.

    Args:
        temperature: `[n]`, each row's own in place of the head's, or None.

    Collectives: one all-reduce of `[e]` over TP; backward those of dHidden.
    """
    temperature = tiles.walk_optional(temperature)
    return _EntryLogits.apply(entries, temperature, _Options(head, tiles.tiling), *tensors)


def entry_gradients(
    tensors: HeadTensors,
    entries: Entries,
    upstream: Tensor,
    temperature: Tensor | None,
    opts: HeadOptions,
    tiles: HiddenTiles,
    *,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of a head's tensors, where finished logits have those of entries alone.

    Args:
        upstream: `[e]`, with respect to z.
        temperature: `[n]` as walked, or None.
    """
    spec = opts.spec
    gradients = HeadGradients(tensors, tiles, opts, needs=needs, sparse=True)
    head = Head(tensors, opts, tiles.tiling.block_columns)
    for tile in tiles:
        for where, rows, columns in entries.chunks(tile, tile.hidden.shape[1]):
            dz = torch.where(columns >= 0, upstream[where].to(head.wide), 0.0)
            own = spec.temperature if temperature is None else temperature[entries.row[where]]
            dz = (dz / own).to(dz.dtype)
            dy = dz * spec.logit_scale
            if spec.softcap is not None:
                raw = head.entry_logits(tile.hidden, columns, rows)
                dy = torch.where(dy != 0, dy * softcap_slope(raw, spec, dy.dtype), 0.0)
            gradients.add_entries(head, tile, rows, columns.clamp(min=0), dz, dy)
        gradients.end_tile(tile)
    return gradients.finish()
