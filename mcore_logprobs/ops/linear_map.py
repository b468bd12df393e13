"""Any operation on logits, from hidden states: a tile of rows at a time, recomputed in backward.

for each tile of rows:
    forward    z = processed(tile @ weight^T)    -> fn(z)
    backward   z again -> fn(z) -> autograd's dz -> block by block dWeight, dHidden[tile]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree
from typing_extensions import Unpack

from mcore_logprobs.checks import autocast_enabled, check_called, check_mask, check_per_token
from mcore_logprobs.kernels.chunk import Chunk, ChunkAt, Processing
from mcore_logprobs.ops.driver import Backward, Forward, Operation, Results, Saved, Tensors, apply
from mcore_logprobs.ops.keywords import LayerKeywords, shared_keywords
from mcore_logprobs.ops.user_function import (
    call_without_writes,
    graph_of_its_own,
    name_of,
    walk_graph,
)
from mcore_logprobs.sources.head import head_logits
from mcore_logprobs.sources.source import RecomputedTile, Source

MapFn = Callable[..., Any]


@dataclass
class _Structure:
    """How fn's result is built; known once fn has been called.

    Attributes:
        spec: of the flat results.
        dtypes: of each flat result, None for a None.
        differentiable: which flat results depend on the logits, in some tile.
    """

    spec: Any = None
    dtypes: list[torch.dtype | None] = field(default_factory=list)
    differentiable: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Map(Operation[Source]):
    """fn's flat results, `[n, ...]` each. Tensors: the valid mask `[n]`, per-token tensors.

    Attributes:
        masked: whether some rows do not count.
        grad_enabled: whether autograd was on where the operation was called.
        autocast: the caller's, only for fn.
    """

    fn: MapFn
    masked: bool
    grad_enabled: bool
    autocast: tuple[Any, ...] | None
    structure: _Structure
    rereads = "exact"

    def call(self, z: Tensor, per_token: Sequence[Tensor], rows: slice) -> list[Tensor | None]:
        """fn of one tile, flat and checked; the first call settles the structure."""
        with _autocast(self.autocast):
            result = call_without_writes(self.fn, z, [t[rows] for t in per_token])
            flat, spec = flat_results(result, z.shape[0])
        known, dtypes = self.structure, [None if x is None else x.dtype for x in flat]
        if known.spec is None:
            known.spec, known.dtypes = spec, dtypes
        if (known.spec, known.dtypes) != (spec, dtypes):
            raise ValueError(
                f"fn: expected the structure and dtypes that its first call gave, {known.spec} of "
                f"{known.dtypes}, got {spec} of {dtypes}"
            )
        return flat

    def forward(self, source: Source, tensors: Tensors) -> Forward:
        return _MapForward(self, source, tensors)

    @property
    def differentiable(self) -> list[bool] | None:  # type: ignore[override]
        return self.structure.differentiable

    def backward(
        self, source: Source, upstream: Results, tensors: Tensors, saved: Saved
    ) -> Backward:
        return _MapGradient(self, source, upstream, tensors)


class _MapForward(Forward):
    reads = "nothing"

    def __init__(self, operation: Map, source: Source, tensors: Tensors) -> None:
        self._operation, self._source = operation, source
        self._valid_mask, *self._per_token = tensors
        self._parts: list[list[Tensor | None]] = []

    def begin_tile(self, tile: RecomputedTile, rows: slice) -> None:
        self._call(_processed(tile, tile.raw_logits(), self._source.processing), rows)

    def _call(self, z: Tensor, rows: slice) -> None:
        operation, structure = self._operation, self._operation.structure
        # With autograd, to see what depends on the logits, and on what else: in each tile, since a
        # function may have nothing to do in one, as where no row of it counts.
        with torch.set_grad_enabled(operation.grad_enabled), graph_of_its_own():
            z = z.requires_grad_(operation.grad_enabled)
            results = operation.call(z, self._per_token, rows)
        if operation.grad_enabled:
            _refuse_captured(results, z, operation.fn)
            learns = [x is not None and x.requires_grad for x in results]
            before = structure.differentiable or [False] * len(learns)
            structure.differentiable = [a or b for a, b in zip(before, learns, strict=True)]
        self._parts.append([None if x is None else x.detach() for x in results])

    def results(self) -> tuple[Results, Saved]:
        source = self._source
        if not self._parts:  # no rows: fn says what the shapes are
            none = torch.empty(0, source.shard.width, dtype=source.acc_dtype, device=source.device)
            self._call(none, slice(None))
        joined = [None if x[0] is None else torch.cat(x) for x in zip(*self._parts, strict=True)]
        if self._operation.masked:
            joined = [None if x is None else _masked_rows(x, self._valid_mask) for x in joined]
        return tuple(joined), ()


class _MapGradient(Backward):
    takes = "rows"

    def __init__(self, operation: Map, source: Source, upstream: Results, tensors: Tensors) -> None:
        valid_mask, *self._per_token = tensors
        self._operation, self._processing = operation, source.processing
        self._asked = torch.zeros_like(valid_mask)
        self._upstream: list[Tensor | None] = []
        for g in upstream:
            if g is not None:
                g = torch.where(_like(valid_mask, g), g, 0.0) if operation.masked else g
                self._asked |= (g != 0).flatten(1).any(1) if g.dim() > 1 else g != 0
            self._upstream.append(g)
        self._dz = torch.empty(0)  # the tile's

    def begin_tile(self, tile: RecomputedTile) -> Tensor:
        self._dz = torch.empty(0)  # the last tile's is gone before this one's logits are made
        raw = tile.raw_logits()
        # Without a softcap `write` needs no raw logits, and both may be one memory.
        kept = raw.detach() if self._processing.softcap is None else raw.clone()
        z = _processed(tile, raw, self._processing)
        with torch.enable_grad():
            results = self._operation.call(z.requires_grad_(), self._per_token, tile.rows)
        pairs = [
            (x, g[tile.rows])
            for x, g in zip(results, self._upstream, strict=True)
            if x is not None and g is not None and x.requires_grad
        ]
        dz = None
        if pairs:
            outputs, incoming = zip(*pairs, strict=True)
            (dz,) = torch.autograd.grad(outputs, z, incoming, allow_unused=True)
        self._dz = torch.zeros_like(kept) if dz is None else dz
        return kept

    def write(self, placed: ChunkAt, out: Tensor) -> None:
        asked = self._asked[placed.rows].unsqueeze(-1)
        grad = torch.where(asked, self._dz[:, placed.columns], 0.0)
        placed.chunk.to_raw_gradient(grad)
        out.copy_(grad)


def _processed(tile: RecomputedTile, raw: Tensor, processing: Processing) -> Tensor:
    """A tile's raw logits `[rows, V/TP]` as processed ones, in their memory."""
    z = processing.chunk(raw, tile.rows, slice(0, raw.shape[1])).processed(in_place=True)
    # Those of a weight of a subclass would be of it too: autograd does not know such a leaf again.
    return z if type(z) is Tensor else z.as_subclass(Tensor)


def flat_results(result: object, rows: int) -> tuple[list[Tensor | None], Any]:
    """(tensors of a function's result as a flat list, its pytree structure).

    Raises:
        ValueError: something else than tensors `[rows, ...]` and None.
    """
    flat, spec = pytree.tree_flatten(result)
    for place, x in enumerate(flat):
        if x is not None and (not isinstance(x, Tensor) or x.shape[:1] != (rows,)):
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                "fn: expected a tensor or a tuple of tensors of shape "
                f"[{rows}, ...], got {got} as result {place}"
            )
    return flat, spec


def _masked_rows(x: Tensor, valid_mask: Tensor) -> Tensor:
    # Not 0, with which a bool would become an integer.
    return torch.where(_like(valid_mask, x), x, torch.zeros_like(x[:1]))


def _like(valid_mask: Tensor, x: Tensor) -> Tensor:
    """`[n]` as `[n, 1, ...]` of x's dimensions."""
    return valid_mask.view(-1, *(1,) * (x.dim() - 1))


def _autocast_state(device_type: str) -> tuple[Any, ...] | None:
    """(device type, dtype, whether casts are kept) of the caller's autocast; None: it is off."""
    if not autocast_enabled(device_type):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return device_type, dtype, torch.is_autocast_cache_enabled()


def _autocast(state: tuple[Any, ...] | None) -> AbstractContextManager[object]:
    if state is None:
        return nullcontext()
    device_type, dtype, cache_enabled = state
    return torch.autocast(device_type, dtype=dtype, cache_enabled=cache_enabled)


def _refuse_captured(results: list[Tensor | None], z: Tensor, fn: MapFn) -> None:
    """A ValueError if a result depends on a leaf that requires a gradient, other than z."""
    roots = [get_gradient_edge(z).node]
    for x in results:
        if x is None or x is z or not x.requires_grad:
            continue
        _, captured = walk_graph(x, roots)
        if captured:
            raise ValueError(
                f"fn: uses {name_of(captured, fn)}, which requires a gradient, but gradients flow "
                "only to hidden, weight, bias and lora; detach it"
            )


def map_logits(
    source: Any, fn: MapFn, *per_token_tensors: Tensor, mask: Tensor | None = None
) -> Any:
    """`linear_map` of any source; of given logits fn is called once, with all rows.

    Raises:
        ValueError: the source has a temperature, which fn is to apply; else as `linear_map`.
    """
    lead, device = source.batch_shape, source.device
    temperature = source.processing.temperature
    if isinstance(temperature, Tensor) or temperature != 1.0:
        raise ValueError(f"temperature: expected 1.0 of a source for fn, got {temperature}")
    tensors = [check_per_token(i, t, lead, device) for i, t in enumerate(per_token_tensors)]
    mask = check_mask(mask, lead, device)
    source = source.compacted(mask)
    check_called("fn", fn, ("logits",), len(tensors))
    if not source.recomputed:
        scale, softcap = source.options.logit_scale, source.options.softcap
        flat_logits = source.logits.reshape(-1, source.logits.shape[-1])
        processing = Processing.of(scale, softcap)
        z = Chunk(flat_logits, flat_logits.shape[1], processing).processed()
        if mask is not None and z.requires_grad:
            # 0 times fn's slope would be NaN where that is infinite, as of a norm at 0.
            left_out = ~mask.reshape(-1, 1)
            z = z.view_as(z)  # not the caller's own, on which a hook would stay
            z.register_hook(lambda gradient: gradient.masked_fill(left_out, 0.0))
        rows = [t.reshape(-1, *t.shape[len(lead) :]) for t in tensors]
        flat, spec = flat_results(call_without_writes(fn, z, rows), source.num_rows)
        if mask is not None:
            flat = [None if x is None else _masked_rows(x, mask.reshape(-1)) for x in flat]
        per_token = [None if x is None else x.reshape(*lead, *x.shape[1:]) for x in flat]
        return pytree.tree_unflatten(per_token, spec)
    source = source.in_whole_rows()
    operation = Map(
        fn=fn,
        masked=mask is not None,
        grad_enabled=torch.is_grad_enabled(),
        autocast=_autocast_state(device.type),
        structure=_Structure(),
    )
    if mask is None:
        mask = torch.ones(lead, dtype=torch.bool, device=device)
    results = apply(operation, source, mask, *tensors)
    return pytree.tree_unflatten(list(results), operation.structure.spec)


@shared_keywords(LayerKeywords, head_logits)
def linear_map(
    hidden: Tensor,
    weight: Tensor,
    fn: MapFn,
    *per_token_tensors: Tensor,
    mask: Tensor | None = None,
    **shared: Unpack[LayerKeywords],
) -> Any:
    """Apply any function of logits to hidden states, holding at most one tile of logits.

        linear_map(hidden, weight, lambda z, t: vocab_parallel_logprobs(z, t, tp_group=tp), target)

    `fn(logits, *rows of per_token_tensors)` gets this rank's logits `[rows, V/TP]` of some rows,
    after scale, softcap and bias. It is called once per tile in the forward and once in the
    backward. Temperature and vocab_size are not keywords here: pass them to what fn calls.

    Shape:
        hidden, weight: as in `linear_token_stats`.
        per_token_tensors: `[s, b, ...]` or `[n, ...]`, the whole sequence on every TP rank also
            under sequence parallelism; `[m, ...]` with rows. No gradient flows to them.
        logits: what fn gets, `[rows, V/TP]` float32 (float64 for float64 operands); fn must not
            modify it, nor its per-token tensors. Rows come in no particular order.
        fn returns a tensor `[rows, ...]`, or a (named) tuple, list, dict or TokenStats of such;
            None stays None. The same structure and dtypes at every call.
        mask: bool `[s, b]` or `[n]`, the whole sequence (`[m]` with rows); False rows give 0 and no
            gradient.
        Returns what fn returns, each tensor `[s, b, ...]` or `[n, ...]`.

    Args:
        fn: a deterministic function, because the backward differentiates its second call (under the
            autocast of the first). A row's result must depend only on that row. A variable of the
            enclosing scope is read at both calls: bind it as a default or by functools.partial if
            it changes in between. Side effects happen at both calls. Collectives are allowed if
            every rank of tp_group makes the same ones, as the operations of this package do. A call
            of zero rows calls fn once, on zero rows.
        {shared}

    chunk_size is rows per tile. A tile spans all of a rank's columns; None: as many rows as fit 128
    MiB on a CPU, 1 GiB on a GPU, in float32.

    A result has a gradient if fn's result depends on the logits, in one tile or more. As with the
    operations on logits, each rank differentiates its own result.

    Cost: four GEMMs with a backward, and twice the forward of fn. Each tile reads and
    writes dWeight in float32 once.

    Collectives: those of fn per tile, forward and backward; backward one all-reduce of dHidden per
    tile, or a reduce-scatter under sequence parallelism, which also gathers each tile of hidden.

    Memory: a tile of logits, in the backward another of their gradient and, with a softcap, a
    third; and fn's own tensors of one tile. Saved for backward: the inputs.

    Raises:
        ValueError: before any collective for arguments, see `linear_token_stats`; per-token tensors
            that require a gradient; compact without a mask; a parameter captured in fn (in its
            closure or its module), by name, as its gradient would be lost; a per-token tensor that
            fn wrote to; a result of another shape.
    """
    source = head_logits(hidden, weight, **shared)
    return map_logits(source, fn, *per_token_tensors, mask=mask)
