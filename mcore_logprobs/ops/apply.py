"""The one autograd function of operations on a source of logits, and their common steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.collectives import all_gather_dim0, all_gather_stack
from mcore_logprobs.kernels.segments import Segments, merge_segments
from mcore_logprobs.kernels.stats import (
    FinalStats,
    GradientTerms,
    StatsSpec,
    finalize,
    merge,
    no_columns,
)
from mcore_logprobs.ops.source import Entries, Gradient, Placed, Source, Tile

Tensors = tuple[Any, ...]
Backward = Callable[..., tuple[Any, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """For an autograd.Function's backward whose result depends on what the forward saved.

    torch's own looks at the upstream gradient alone: under create_graph=True it gives out gradients
    without a graph where that is a constant, so that a penalty on them would train nothing, in
    silence. Here such gradients raise a RuntimeError once they are differentiated.

    Args:
        backward: called as `backward(ctx, saved tensors, *grads)`. Those are unpacked once, as
            hooks may bring them from far away. With `ctx.linear` set the result depends on grads
            alone, up to constants: torch's own rule holds.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            found = backward(ctx, saved, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return found
        # Those alone are reached by a backward for some inputs only, as autograd.grad's.
        held = grads if getattr(ctx, "linear", False) else (*grads, *saved)
        on = [x for x in held if isinstance(x, Tensor) and x.requires_grad]
        return tuple(_Last.apply(x, *on) if isinstance(x, Tensor) else x for x in found)

    return once


class _Last(torch.autograd.Function):
    """A gradient, of what it depends on, that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *on: Tensor) -> Tensor:
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RuntimeError(
            "mcore_logprobs' operations have no double backward (gradient of a gradient): expected "
            "create_graph=False, or gradients that no loss depends on"
        )


class Operation:
    """An operation on a source; a frozen dataclass of its options, without tensors.

    Per-row tensors are `[n, ...]` as the source walks its rows.

    Attributes:
        linear: results are linear in processed logits.
        fills: what a token gets in each result that the source leaves out; None: 0.
        differentiable: which results carry a gradient, once there are any; None: all of floating
            point.
    """

    linear = False
    fills: Sequence[float] | None = None
    differentiable: Sequence[bool] | None = None

    def forward(self, source: Any, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """(results, what the backward needs besides source and tensors), `[n, ...]` each."""
        raise NotImplementedError

    def write_dlogits(
        self, source: Any, upstream: Tensors, tensors: Tensors, saved: Tensors
    ) -> Any:
        """`write(placed, out)`, which writes the gradient of a chunk's raw logits into out."""
        raise NotImplementedError

    def backward(self, source: Any, needs: Sequence[bool], *given: Tensors) -> Tensors:
        """Gradients of the source's tensors; None: 0.

        Args:
            given: the results' gradients, None for 0; what forward was given; what it saved.
        """
        write = self.write_dlogits(source, *given)
        gradient: Gradient = source.gradient(needs)
        for tile in source.tiles():
            for placed in tile.chunks():
                gradient.collect(tile, placed, write)
            gradient.end_tile(tile)
        return gradient.finish()


def apply(
    operation: Operation, source: Source, *per_token: Tensor, constants: Tensors = ()
) -> Tensors:
    """The operation's results, `[*lead, ...]` each; differentiable by the source's tensors.

    Args:
        per_token: tensors `[*lead, ...]` that the operation takes as `[n, ...]`.
        constants: other tensors, or None; they follow.

    No gradient flows to either. They are saved for the backward as they are, so that autograd sees
    it if they change before, and so that it does not matter how the logits lie in memory then.
    """
    counts = len(source.tensors), len(per_token)
    return _Apply.apply(operation, source.options, counts, *source.tensors, *per_token, *constants)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, operation: Operation, options: Any, counts: tuple[int, int], *tensors: Any
    ) -> Tensors:
        with without_autocast(tensors[0]):
            source, given = _call_context(options, counts, tensors)
            results, saved = operation.forward(source, given)
            saved = tuple(None if x is None else source.pack(x) for x in saved)
            fills = operation.fills or (0.0,) * len(results)
            results = tuple(
                None if x is None else source.unflatten(x, fill).contiguous()
                for x, fill in zip(results, fills, strict=True)
            )
        ctx.operation, ctx.options, ctx.counts = operation, options, (*counts, len(tensors))
        ctx.linear = operation.linear and source.linear
        ctx.save_for_backward(*tensors, *saved)
        ctx.set_materialize_grads(False)
        flags = operation.differentiable or (True,) * len(results)
        ctx.mark_non_differentiable(
            *(
                x
                for x, flag in zip(results, flags, strict=True)
                if x is not None and not (flag and x.is_floating_point())
            )
        )
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, unpacked: Tensors, *grads: Tensor | None) -> Tensors:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        *counts, end = ctx.counts
        tensors, saved = unpacked[:end], unpacked[end:]
        with without_autocast(tensors[0]):
            source, given = _call_context(ctx.options, counts, tensors)
            upstream = tuple(
                None if grad is None else source.flatten_rows(grad, fill=0.0) for grad in grads
            )
            saved = tuple(None if x is None else source.unpack(x) for x in saved)
            needs = ctx.needs_input_grad[3 : 3 + counts[0]]
            found = ctx.operation.backward(source, needs, upstream, given, saved)
        return (None, None, None, *found, *(None for _ in tensors[len(found) :]))


def _call_context(options: Any, counts: Sequence[int], tensors: Tensors) -> tuple[Any, Tensors]:
    """The source, and what the operation takes besides."""
    own, per_token = counts
    source = options.open(*tensors[:own])
    rows = (source.flatten_rows(x) for x in tensors[own : own + per_token])
    return source, (*rows, *tensors[own + per_token :])


# ---- single entries ----------------------------------------------------------------------------


def grid_entries(local_ids: Tensor, tile: Tile) -> Entries:
    """The entries of one tile, from `[n, k]` columns: k a row."""
    own = local_ids[tile.rows]
    row = torch.arange(tile.rows.start, tile.rows.stop, device=own.device)
    return Entries(row.repeat_interleave(own.shape[1]), own.reshape(-1))


class EntryOperation(Operation):
    """One whose first result, `[n, k]`, is of single entries; no other is differentiable."""

    linear = True

    def local_ids(self, tensors: Tensors, saved: Tensors) -> Tensor:
        """Their columns, `[n, k]`; -1 for another rank's."""
        raise NotImplementedError

    def backward(self, source: Any, needs: Sequence[bool], *given: Tensors) -> Tensors:
        (upstream, *_), tensors, saved = given
        local_ids = self.local_ids(tensors, saved)
        gradient: Gradient = source.gradient(needs, sparse=source.recomputed)
        write = write_entries(source, local_ids, upstream)
        for tile in source.tiles():
            if source.recomputed:
                own = upstream[tile.rows].reshape(-1)
                gradient.collect_entries(tile, grid_entries(local_ids, tile), own)
            else:
                for placed in tile.chunks():
                    gradient.collect(tile, placed, write)
            gradient.end_tile(tile)
        return gradient.finish()


def write_entries(
    source: Source,
    local_ids: Tensor,
    upstream: Tensor,
    row_max: Tensor | None = None,
    coef: Tensor | None = None,
    spec: StatsSpec | None = None,
) -> Any:
    """`Operation.write_dlogits` of entries `[n, k]`, and of statistics with these coefficients."""
    terms = GradientTerms(local_ids, upstream, row_max, coef, spec or StatsSpec())

    def write(placed: Placed, out: Tensor) -> None:
        own, chunk = terms.rows(placed.rows), placed.chunk
        source.backend(chunk).grad(
            chunk,
            own._replace(columns=placed.local(own.columns)),
            out=out,
            chunk_size=source.rows_at_a_time(chunk.logits.shape[1]),
        )

    return write


def without_autocast(like: Tensor | None) -> AbstractContextManager[Any]:
    """Products within it have the dtypes that they are told, in a backward as in its forward."""
    assert like is not None
    device_type = like.device.type
    if not autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for this type of device, which may know none."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


# ---- statistics --------------------------------------------------------------------------------


def local_row_stats(
    source: Source,
    chunks: Iterable[Placed],
    column: Tensor,
    spec: StatsSpec,
    threshold: Tensor | None = None,
) -> Tensor:
    """Row statistics over this rank's columns, `[k, n]`; with segments `[g/TP, k, n]`.

    Merged once for all chunks: a merge is a dozen small launches for a few numbers a row and chunk.

    Args:
        chunks: what covers n rows, whose first is the first of the n.
        column: `[n]`, the target's column in the shard or -1.
        threshold: with `spec.rank` only: as in `kernels.reference.stats`.
    """
    segments: Segments | None = source.options.segments
    block = of_a_segment = None
    if segments is not None:
        block = segments.block(source.device.type)
        of_a_segment = -(-segments.width // block)
    # Of rows that begin at the key, by segment, `[parts, k, rows]` each in the order of columns.
    found: dict[int, list[list[Tensor]]] = {}
    multipliers: dict[int, float | Tensor] = {}
    first = None
    for placed in chunks:
        rows = placed.rows
        first = rows.start if first is None else first
        own = slice(rows.start - first, rows.stop - first)
        parts = found.setdefault(rows.start, [[] for _ in range(segments.local if segments else 1)])
        multipliers[rows.start] = placed.chunk.multiplier
        calls: Iterable[tuple[int, Placed]] = ((0, placed),)
        if segments is not None and block is not None:
            calls = _by_segment(placed, segments, block)
        for number, some in calls:
            stats = source.backend(some.chunk).stats(
                some.chunk,
                some.local(column[own]),
                spec,
                threshold=None if threshold is None else threshold[..., own],
                block=block,
                chunk_size=source.rows_at_a_time(some.chunk.logits.shape[1]),
            )
            for place, blocks in enumerate(stats.split(of_a_segment or len(stats)), number):
                parts[place].append(blocks)
    if not found:  # no rows, or no true vocabulary on this rank
        like = column.new_empty(0, dtype=source.acc_dtype)
        none = no_columns(spec, column.shape[0], like=like)
        return none if segments is None else none.repeat(segments.local, 1, 1)
    if segments is not None:
        merged = [merge_segments(parts, spec, multipliers[at]) for at, parts in found.items()]
    else:
        merged = [
            merge(
                torch.cat(parts) if len(parts) > 1 else parts[0], spec, multiplier=multipliers[at]
            )
            for at, (parts,) in found.items()
        ]
    return merged[0] if len(merged) == 1 else torch.cat(merged, -1)


def _by_segment(placed: Placed, segments: Segments, block: int) -> Iterator[tuple[int, Placed]]:
    """(number of its first segment, the chunk's columns of one call)."""
    rows, columns, chunk = placed
    for number, some in segments.calls(columns, block):
        part = slice(some.start - columns.start, some.stop - columns.start)
        yield number, Placed(rows, some, chunk.columns(part))


def finalize_shards(
    stats: Tensor,
    spec: StatsSpec,
    group: ProcessGroup | None,
    multiplier: float | Tensor,
    *,
    valid_mask: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> FinalStats:
    """`finalize` of this rank's `local_row_stats`: one all-gather over TP."""
    ordered = stats.dim() == 3
    parts = all_gather_dim0(stats if ordered else stats.unsqueeze(0), group)
    whole = merge(parts, spec, multiplier=multiplier, ordered=ordered)
    return finalize(
        whole,
        spec,
        multiplier=multiplier,
        valid_mask=valid_mask,
        label_smoothing=label_smoothing,
    )


def finalize_shards_with(
    stats: Tensor,
    numbers: Tensor,
    spec: StatsSpec,
    group: ProcessGroup | None,
    multiplier: float | Tensor,
) -> tuple[FinalStats, Tensor]:
    """`finalize_shards`, and numbers `[n, j]` summed over the ranks in the same all-gather.

    j is small, and a second collective costs more than the bytes.
    """
    fields = stats.shape[0]
    shards = all_gather_stack(torch.cat([stats, numbers.t()]), group)
    whole = merge(shards[:, :fields].contiguous(), spec, multiplier=multiplier)
    return finalize(whole, spec, multiplier=multiplier), shards[:, fields:].sum(0).t()


def no_targets(source: Source, rows: int) -> Tensor:
    """-1 for each of some rows: none has a target."""
    return torch.full((rows,), -1, dtype=torch.int64, device=source.device)
