"""A tensor of logits as a `Source`: strided views of it, its gradient written in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.checks import (
    check_flag,
    check_float_tensor,
    check_optional_count,
    check_optional_scale,
    check_scale,
    check_temperature,
    unwrap_logits,
)
from mcore_logprobs.consistency import check_call
from mcore_logprobs.groups import VocabShard, resolve_tp_group
from mcore_logprobs.kernels import backend as backends
from mcore_logprobs.kernels import budgets, reference
from mcore_logprobs.kernels.chunk import (
    Chunk,
    ChunkAt,
    Processing,
    acc_dtype,
    prefer_huge_pages,
    row_chunks,
)
from mcore_logprobs.kernels.reference import gather_target
from mcore_logprobs.kernels.segments import Segments
from mcore_logprobs.sources.head import HeadLogits
from mcore_logprobs.sources.lazy import LazyLogits
from mcore_logprobs.sources.source import (
    LogitIndices,
    Write,
    check_segments,
    entry_gradients,
)
from mcore_logprobs.sources.vocab_bias import Ids, LogitBias, vocab_bias

# Views of which a copy has the rows costs less from here on than a call of the backend for each.
_MANY_VIEWS = 4


@dataclass(frozen=True)
class GivenOptions:
    """How a tensor of logits `[..., V/TP]` is read; holds no tensor, so that autograd can keep it.

    Attributes:
        order: the leading dimensions in the order of rows, outermost first: as they lie in memory,
            on several TP ranks as they come. What these exchange by rows is of the same tokens, and
            each may have its logits with other strides.
        layout, unjoined: for torch.compile, which knows no strides in a backward (a saved-tensor
            hook may give the logits back with others): the leading dimensions as they lie in
            memory, outermost first, and `_unjoined_dims` of the logits in the order of rows.
        logit_scale, softcap: how logits are processed.
        temperature: a number, where tokens do not have their own.
        chunk_size: rows at a time where a backend makes float32 copies; None: from a budget.
        segments: the segments that statistics are taken by, or None.
        inplace_backward: the gradient is written over the logits.
        disallowed: forbidden global ids, a constant; or None.
    """

    shard: VocabShard
    batch_shape: torch.Size
    order: tuple[int, ...]
    layout: tuple[int, ...]
    unjoined: int
    logit_scale: float
    softcap: float | None
    temperature: float
    chunk_size: int | None
    backend: backends.Backend
    segments: Segments | None
    inplace_backward: bool
    disallowed: Tensor | None = None
    selection, main_grad = None, None  # which only heads have
    sequence_parallel, logits_dtype = False, torch.float32  # of a teacher's head beside them

    def bind(
        self, logits: Tensor, bias: Tensor | None = None, temperature: Tensor | None = None
    ) -> GivenLogits:
        return GivenLogits(self, logits, bias, temperature)


class GivenLogits:
    """A tensor of logits as a `Source`, and as its only `Tile`.

    The caller's tensor is read in place, in the order of rows that `GivenOptions` has: `[b, s]` and
    `[s, b]`, transposed views and slices such as `logits[:, :-1]` become a few 2-D views with one
    row stride each. Copied are rows of which each view would hold few, some at a time, and for a
    compiled backend logits that come back from a saved-tensor hook with another layout.

    Attributes:
        copies_rows: chunks are such copies, where they would be views of few rows.

    Args:
        bias: `[V/TP]`, added before the temperature, a constant; or None.
    """

    recomputed, order_may_change = False, True
    may_keep, heads, latest_pass = False, (), None

    def __init__(
        self,
        options: GivenOptions,
        logits: Tensor,
        bias: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> None:
        self.options, self.tensors = options, (logits, bias, temperature)
        self.backend = options.backend
        self.shard, self.batch_shape = options.shard, options.batch_shape
        self.device, self.acc_dtype = logits.device, acc_dtype(logits.dtype)
        self.num_rows, self.linear = self.batch_shape.numel(), options.softcap is None
        self.rows = slice(0, self.num_rows)
        self._in_order = options.order == tuple(range(len(options.order)))
        of_rows = options.temperature if temperature is None else self.to_row_order(temperature)
        self.processing = Processing.of(
            options.logit_scale, options.softcap, of_rows, bias, self.shard.valid_width
        )
        # In this order: torch.compile knows no strides in a backward.
        if options.backend is not reference and logits.stride(-1) != 1:
            logits = logits.contiguous()  # as a saved-tensor hook gave it back
        self.logits = logits
        # 2-D views that cover the rows as they are walked.
        self._views = [logits]
        if len(self.batch_shape) != 1:
            self._views = self.views_of(logits, options.unjoined)
        # As of `[s, b]` that lies in memory as `[b, s]`, s views of b rows, or of short sequences
        # without their last tokens.
        views = len(self._views)
        self.copies_rows = views > 1 and (
            self.rows_at_a_time(self.shard.width) * views >= _MANY_VIEWS * self.num_rows
        )

    # ---- the order of rows ----

    def views_of(self, x: Tensor, unjoined: int) -> list[Tensor]:
        """2-D views of `[*batch_shape, v]` that cover the rows as they are walked.

        Args:
            unjoined: of it in the order of rows, for torch.compile.
        """
        ordered = self._ordered(x)
        if not torch.compiler.is_compiling():
            unjoined = _unjoined_dims(ordered)
        return _collapse(ordered, unjoined)

    def to_row_order(self, per_token: Tensor, fill: float | None = None) -> Tensor:
        dims = len(self.batch_shape)
        if dims == 1:
            return per_token
        return self._ordered(per_token).reshape((self.num_rows, *per_token.shape[dims:]))

    def _ordered(self, x: Tensor) -> Tensor:
        if self._in_order:
            return x
        return x.permute((*self.options.order, *range(len(self.batch_shape), x.dim())))

    def to_token_order(self, per_row: Tensor, fill: float = 0) -> Tensor:
        if len(self.batch_shape) == 1:
            return per_row
        order = self.options.order
        walked = per_row.reshape((*(self.batch_shape[dim] for dim in order), *per_row.shape[1:]))
        if self._in_order:
            return walked
        return walked.permute((*_inverse(order), *range(len(order), walked.dim())))

    def in_order(self, order: tuple[int, ...]) -> GivenLogits:
        """These logits with rows in another order, as `GivenOptions.order` has it."""
        if order == self.options.order:
            return self
        unjoined = _unjoined_dims(self.tensors[0].permute(*order, -1))
        return replace(self.options, order=order, unjoined=unjoined).bind(*self.tensors)

    def in_token_order(self) -> GivenLogits:
        """These logits with rows in the order of the tokens, not of the memory."""
        return self.in_order(tuple(range(len(self.batch_shape))))

    def compacted(self, valid_mask: Tensor | None) -> GivenLogits:
        return self

    def in_whole_rows(self, *, adds_per_tile: bool = False) -> GivenLogits:
        return self

    # ---- as a source and a tile ----

    def rows_at_a_time(self, width: int, copies: int = 1) -> int:
        sizes = budgets.of(self.device.type)
        return self.options.chunk_size or sizes.copied_rows(copies * width)

    def tiles(self) -> Iterator[GivenLogits]:
        return iter((self,) if self.num_rows else ())

    def tile_ends(self) -> list[int]:
        return [tile.num_rows for tile in self.tiles()]

    def chunks(self) -> Iterator[ChunkAt]:
        """All columns of as many rows as one stride covers, or as are copied at a time."""
        start, columns = 0, slice(0, self.shard.width)
        if self.copies_rows:
            for rows in row_chunks(self.num_rows, self.rows_at_a_time(self.shard.width)):
                yield ChunkAt(rows, columns, self.rectangle(rows, columns))
            return
        for view in self._views:
            rows = slice(start, start + view.shape[0])
            yield ChunkAt(rows, columns, self.processing.chunk(view, rows, columns))
            start = rows.stop

    whole_rows = chunks

    def parts(self, other: GivenLogits, step: int) -> Iterator[slice]:
        """Rows that one stride covers, here and in other logits of the same order; `step` at a time
        where either are copied.
        """
        # The views of one are parts of the other's: outer dimensions are unbound first.
        size = self.num_rows // max(len(self._views), len(other._views))
        if self.copies_rows or other.copies_rows:
            size = step
        return row_chunks(self.num_rows, max(1, size))

    def view_of(self, views: list[Tensor], rows: slice) -> Tensor | None:
        """These rows of the view that has all of them, or None where none has.

        Args:
            views: of `views_of`, of as many rows each.
        """
        size = self.num_rows // len(views)
        number = 0 if len(views) == 1 else rows.start // size
        first = number * size
        if rows.stop > first + size:
            return None
        return views[number][rows.start - first : rows.stop - first]

    def rectangle(self, rows: slice, columns: slice, index: Tensor | None = None) -> Chunk:
        """Any rows and columns; a copy where one stride does not cover them, or `copies_rows`.

        Args:
            index: `[n]`, the token of each row, of a source in the tokens' order; None: the
                source's own order.
        """
        processing = self.processing
        if index is None and not self.copies_rows:
            view = self.view_of(self._views, rows)
            if view is not None:
                return processing.chunk(view[:, columns], rows, columns)
        row = torch.arange(rows.start, rows.stop, device=self.device)
        base = self.logits if self.batch_shape else self.logits.unsqueeze(0)
        at = _coordinates(self._token(row) if index is None else index[rows], base.shape[:-1])
        where: Any = (*at, columns)
        copy = base[where]
        if index is not None:
            processing, rows = processing.rows(index[rows]), slice(0, copy.shape[0])
        return processing.chunk(copy, rows, columns)

    def target_logits(self, local_target: Tensor) -> Tensor:
        parts = [gather_target(p.chunk.logits, local_target[p.rows], 0.0) for p in self.chunks()]
        raw = torch.cat(parts).to(self.acc_dtype)
        bias = self.processing.bias
        if bias is None:
            return raw
        bias = torch.where(local_target >= 0, bias[local_target.clamp(min=0)], 0.0)
        return torch.stack([raw, bias.to(raw.dtype)])

    def unscaled_logits(self, entries: LogitIndices) -> Tensor:
        return self.processing.unscaled_entries(self._raw_logits(entries), entries.column)

    def _raw_logits(self, entries: LogitIndices) -> Tensor:
        """`[e]` in the accumulation dtype; any value where the column is -1."""
        where: Any = (*self.coordinates(entries.row), entries.column.clamp(min=0))
        return self.logits[where].to(self.acc_dtype)

    def coordinates(self, row: Tensor) -> tuple[Tensor, ...]:
        """An index for each leading dimension, of rows `[n]`."""
        return _coordinates(self._token(row), self.batch_shape)

    def _token(self, row: Tensor) -> Tensor:
        """The flat index of the token of each row."""
        if self._in_order or len(self.batch_shape) < 2:
            return row
        tokens = torch.arange(self.num_rows, device=self.device).view(self.batch_shape)
        return self.to_row_order(tokens)[row]

    def gradient(
        self, needs: Sequence[bool], *, sparse: bool = False, in_acc_dtype: bool = False
    ) -> GivenGradient:
        assert not in_acc_dtype
        return GivenGradient(self)


def given_logits(
    vocab_parallel_logits: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
    invariant_segments: int | None = None,
    inplace_backward: bool = False,
    logit_bias: LogitBias | None = None,
    disallowed_ids: Ids | None = None,
    name: str = "vocab_parallel_logits",
    prefix: str = "",
) -> GivenLogits | HeadLogits:
    """Check the arguments that operations on logits share, and resolve the group.

    A DTensor sharded on its last dimension brings its own group. `LazyLogits` are a source from
    hidden states, for which inplace_backward has nothing to write over.

    Args:
        name, prefix: of the logits, and before the names of options, in errors.

    Raises:
        ValueError: with the argument's name, what was expected and what was given.
    """
    if isinstance(vocab_parallel_logits, LazyLogits):
        source = vocab_parallel_logits.source(
            name,
            tp_group,
            temperature=temperature,
            vocab_size=vocab_size,
            logit_scale=logit_scale,
            softcap=softcap,
            chunk_size=chunk_size,
            backend=backend,
            invariant_segments=invariant_segments,
            logit_bias=logit_bias,
            disallowed_ids=disallowed_ids,
            prefix=prefix,
        )
        if not isinstance(source, Tensor):
            return source
        vocab_parallel_logits = source
    logits, tp_group = unwrap_logits(vocab_parallel_logits, tp_group, name)
    check_float_tensor(name, logits, min_dim=1)
    group = resolve_tp_group(tp_group)
    lead, width, device = logits.shape[:-1], logits.shape[-1], logits.device
    if group is not None:
        check_call(width, group, device)
    shard = VocabShard.of(width, group, vocab_size)
    check_optional_count("chunk_size", chunk_size)
    check_flag("inplace_backward", inplace_backward)
    check_scale(f"{prefix}logit_scale", logit_scale)
    check_optional_scale(f"{prefix}softcap", softcap)
    temperature = check_temperature(temperature, lead, device, name=f"{prefix}temperature")
    segments = added = None
    if invariant_segments is not None:
        segments = check_segments(shard, invariant_segments)
    if logit_bias is not None or disallowed_ids is not None:
        added = vocab_bias(logit_bias, disallowed_ids, shard, device, acc_dtype(logits.dtype))
    if inplace_backward:
        _check_inplace_backward(logits)
    many, as_they_come = len(lead) > 1, tuple(range(len(lead)))
    layout = _outermost_first(logits.stride()[:-1]) if many else as_they_come
    order = layout if shard.tp_size == 1 else as_they_come
    options = GivenOptions(
        shard=shard,
        batch_shape=lead,
        order=order,
        layout=layout,
        unjoined=_unjoined_dims(logits.permute(*order, -1)) if many else 0,
        logit_scale=float(logit_scale),
        softcap=softcap,
        temperature=1.0 if isinstance(temperature, Tensor) else float(temperature),
        chunk_size=chunk_size,
        backend=backends.select(backend, logits, invariant=segments is not None),
        segments=segments,
        inplace_backward=inplace_backward,
        disallowed=None if added is None else added.disallowed,
    )
    per_token = temperature if isinstance(temperature, Tensor) else None
    return options.bind(logits, None if added is None else added.values, per_token)


def _check_inplace_backward(logits: Tensor) -> None:
    """Refuse `inplace_backward=True` where the logits are needed elsewhere, as far as can be seen.

    Seen are: a leaf and its views, retained gradients, overlapping memory (as of `expand`), and
    an operation that saved its own output for its backward (softmax, tanh, exp, ...). Not seen are
    other consumers that come later.

    Raises:
        ValueError: says which.
    """
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return
    base = None if torch.compiler.is_compiling() else logits._base
    # A view that was made without gradients, as within an autograd function, has no graph below it.
    of_leaf = base is not None and base.is_leaf and base.requires_grad
    if logits.is_leaf or of_leaf:
        got = "a leaf" if logits.is_leaf else "a view of a leaf"
        raise ValueError(f"inplace_backward=True: expected the output of an operation, got {got}")
    if logits.retains_grad:
        raise ValueError("inplace_backward=True: the logits retain their gradient (retain_grad())")
    reached = 0  # by the dimensions within
    for dim in reversed(_outermost_first(logits.stride())):
        size, stride = logits.shape[dim], logits.stride()[dim]
        if size > 1 and stride <= reached:
            raise ValueError(
                "inplace_backward=True: the logits overlap themselves in memory, as of expand()"
            )
        reached += (size - 1) * stride
    node = logits.grad_fn
    if hasattr(node, "_saved_result") or hasattr(node, "_saved_output"):
        raise ValueError(
            f"inplace_backward=True: {type(node).__name__} needs the logits for its own backward"
        )


class GivenGradient:
    """The gradient of given logits, in their dtype; written once, over them if so asked."""

    def __init__(self, source: GivenLogits) -> None:
        self._source = source
        self._over, self._gradient = source.options.inplace_backward, source.logits
        self._views: list[Tensor] = []
        if self._over:
            return
        (*batch, width), many = source.logits.shape, len(source.batch_shape) != 1
        # As the logits lie: where they are a view, as of a transposed tensor, no copy is needed.
        layout = source.options.layout
        if many and not torch.compiler.is_compiling():
            layout = _outermost_first(source.logits.stride()[:-1])
        memory = source.logits.new_empty((*(batch[dim] for dim in layout), width))
        self._gradient = prefer_huge_pages(memory)
        self._views = [self._gradient]
        if many:
            self._gradient = memory.permute((*_inverse(layout), -1))
            self._views = source.views_of(self._gradient, source.options.unjoined)

    def collect(self, tile: GivenLogits, placed: ChunkAt, write: Write) -> None:
        if self._source.copies_rows:
            self._scatter(placed, placed.chunk.logits, write)
        elif self._over:
            write(placed, placed.chunk.logits)
        elif (view := self._source.view_of(self._views, placed.rows)) is not None:
            write(placed, view[:, placed.columns])
        else:
            self._scatter(placed, torch.empty_like(placed.chunk.logits), write)

    def _scatter(self, placed: ChunkAt, part: Tensor, write: Write) -> None:
        """By way of `part`, memory of the chunk's shape, which may be a copy of its logits."""
        write(placed, part)
        row = torch.arange(placed.rows.start, placed.rows.stop, device=part.device)
        where: Any = (*self._source.coordinates(row), placed.columns)
        self._gradient[where] = part

    def scaled_by(self, scale: Tensor) -> None:
        raise NotImplementedError  # the logits are no product: nothing is collected in the forward

    def collect_entries(self, tile: GivenLogits, entries: LogitIndices, upstream: Tensor) -> None:
        assert not self._over
        source, (row, column) = self._source, entries
        raw_logits = partial(source._raw_logits, entries)
        _, on_raw = entry_gradients(upstream, entries, raw_logits, source.processing)
        at = (*source.coordinates(row), column.clamp(min=0))
        self._gradient.zero_().index_put_(at, on_raw.to(self._gradient.dtype), accumulate=True)

    def end_tile(self, tile: GivenLogits) -> None:
        pass

    def finish(self) -> tuple[Tensor]:
        return (self._gradient,)


def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _coordinates(flat: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """Flat indices `[n]` into a shape, as one index per dimension.

    `torch.unravel_index` copies the shape to the device, and waits for it.
    """
    at: list[Tensor] = []
    for size in reversed(shape[1:]):
        at.insert(0, flat % max(1, size))
        flat = flat // max(1, size)
    return (flat, *at) if shape else ()


def _outermost_first(strides: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions with these strides, the largest first, equal ones as they come."""
    order: list[int] = []
    for dim, stride in enumerate(strides):
        place = dim
        # One by one: torch.compile sorts no symbolic numbers.
        while place > 0 and strides[order[place - 1]] < stride:
            place -= 1
        order.insert(place, dim)
    return tuple(order)


def _unjoined_dims(x: Tensor) -> int:
    """How many outermost dimensions `x[..., v]` must be unbound along for one view of each part."""
    shape, strides = x.shape[:-1], x.stride()
    unjoined, inner = 0, None
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] == 0:
            return 0
        if shape[dim] == 1:
            continue
        if inner is not None and strides[dim] != shape[inner] * strides[inner]:
            unjoined = max(unjoined, dim + 1)
        inner = dim
    return unjoined


def _collapse(x: Tensor, unjoined: int) -> list[Tensor]:
    """2-D views that cover `[..., v]` in its order; `unjoined` as `_unjoined_dims` has it."""
    if unjoined == 0:
        return [x if x.dim() == 2 else x.view(x.shape[:-1].numel(), x.shape[-1])]
    return [view for part in x.unbind(0) for view in _collapse(part, unjoined - 1)]
