"""Any operation on logits, from hidden states: a tile of rows at a time, recomputed in backward.

for each tile of rows:
    forward    z = finished(tile @ weight^T)    -> fn(z)
    backward   z again -> fn(z) -> autograd's dz -> block by block dWeight, dHidden[tile]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from mcore_logprobs.autograd import once_differentiable
from mcore_logprobs.fused.gradients import HeadGradients
from mcore_logprobs.fused.head import Chunk, Head, HeadOptions, HeadTensors, open_head
from mcore_logprobs.fused.learnt import name_of, walk_graph
from mcore_logprobs.fused.lora import LoRAInput
from mcore_logprobs.fused.tokens import (
    NO_TARGET,
    HiddenTiles,
    Tiling,
    check_per_token,
    open_tokens,
    whole_lead,
    whole_row_tiling,
)
from mcore_logprobs.kernels.products import operand_dtype
from mcore_logprobs.kernels.reference import finished_logits, to_raw_gradient

__all__ = ["MapFn", "flat_results", "linear_map"]

MapFn = Callable[..., Any]


@dataclass
class _Structure:
    """How fn's result is built; known once fn has been called.

    Attributes:
        spec: of the flat results.
        dtypes: of each flat result, None for a None.
        differentiable: which flat results depend on the logits.
    """

    spec: Any = None
    dtypes: list[torch.dtype | None] = field(default_factory=list)
    differentiable: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class _Mapped:
    """fn and what it takes.

    Attributes:
        tensors: per-token tensors, `[n, ...]`, in tile order.
        masked: whether some rows do not count.
        grad_enabled: whether autograd was on where the operation was called.
    """

    fn: MapFn
    tensors: tuple[Tensor, ...]
    head: HeadOptions
    tiling: Tiling
    masked: bool
    grad_enabled: bool
    structure: _Structure

    def results(self, z: Tensor, rows: slice) -> list[Tensor | None]:
        """fn of one tile, flat and checked; the first call settles the structure."""
        flat, spec = flat_results(self.fn(z, *(t[rows] for t in self.tensors)), z.shape[0])
        known, dtypes = self.structure, [None if x is None else x.dtype for x in flat]
        if known.spec is None:
            known.spec, known.dtypes = spec, dtypes
        if (known.spec, known.dtypes) != (spec, dtypes):
            raise ValueError(
                f"fn: expected the structure and dtypes that its first call gave, {known.spec} of "
                f"{known.dtypes}, got {spec} of {dtypes}"
            )
        return flat


def flat_results(found: Any, rows: int) -> tuple[list[Tensor | None], Any]:
    """What a function of `rows` logits gave, flat, and its structure.

    Raises:
        ValueError: something else than tensors `[rows, ...]` and None.
    """
    flat, spec = pytree.tree_flatten(found)
    for place, x in enumerate(flat):
        if x is not None and (not isinstance(x, Tensor) or x.shape[:1] != (rows,)):
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                "fn: expected a tensor or a tuple of tensors of shape "
                f"[{rows}, ...], got {got} as result {place}"
            )
    return flat, spec


class _LinearMap(torch.autograd.Function):
    """fn's flat results, `[n, ...]` each."""

    @staticmethod
    def forward(ctx: Any, keep: Tensor, call: _Mapped, *inputs: Any) -> Any:
        tensors = HeadTensors(*inputs)
        tiles = HiddenTiles(tensors.hidden, call.tiling)
        call = replace(call, tensors=tuple(tiles.walk(t) for t in call.tensors))
        head = Head(tensors, call.head, call.tiling.block_columns)
        parts: list[list[Tensor | None]] = []
        for rows, tile in _tiles(tiles, tensors.hidden):
            z = _finished_tile(head, tile)[1]
            # Once with autograd, to see what depends on the logits, and on what else.
            tried = call.grad_enabled and not parts
            with torch.set_grad_enabled(tried):
                found = call.results(z.requires_grad_(tried), rows)
            if tried:
                _refuse_learnt(found, z, call.fn)
                call.structure.differentiable = [_learns(x) for x in found]
            parts.append([None if x is None else x.detach() for x in found])
            del z, found
        results: list[Tensor | None] = []
        for pieces in zip(*parts, strict=True):
            whole = None if pieces[0] is None else tiles.restore(torch.cat(pieces))
            if whole is not None and call.masked:
                whole = torch.where(_beside(keep, whole), whole, torch.zeros_like(whole[:1]))
            results.append(whole)
        ctx.call = call
        tensors.save(ctx, keep)
        ctx.set_materialize_grads(False)
        flags = call.structure.differentiable or [False] * len(results)
        ctx.mark_non_differentiable(
            *(x for x, flag in zip(results, flags, strict=True) if x is not None and not flag)
        )
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        tensors, (keep,) = HeadTensors.saved(ctx)
        call: _Mapped = ctx.call
        tiles = HiddenTiles(tensors.hidden, call.tiling)
        asked = torch.zeros(tiles.count, dtype=torch.bool, device=keep.device)
        upstream: list[Tensor | None] = []
        for g in grads:
            if g is not None:
                g = tiles.walk(torch.where(_beside(keep, g), g, 0.0) if call.masked else g)
                asked |= (g != 0).flatten(1).any(1) if g.dim() > 1 else g != 0
            upstream.append(g)
        gradients = HeadGradients(tensors, tiles, call.head, needs=ctx.needs_input_grad[2:])
        head = Head(tensors, call.head, call.tiling.block_columns)
        for tile in tiles:
            raw, z = _finished_tile(head, tile.hidden)
            with torch.enable_grad():
                found = call.results(z.requires_grad_(), tile.rows)
            pairs = [
                (x, g[tile.rows])
                for x, g in zip(found, upstream, strict=True)
                if x is not None and g is not None and x.requires_grad
            ]
            dz = None
            if pairs:
                outputs, incoming = zip(*pairs, strict=True)
                (dz,) = torch.autograd.grad(outputs, z, incoming, allow_unused=True)
                del outputs, incoming
            del found, pairs
            dz = torch.zeros_like(raw) if dz is None else dz
            dlogits_of = functools.partial(
                _raw_gradient, dz=dz, asked=asked[tile.rows], dtype=tile.hidden.dtype
            )
            for chunk in head.tile_chunks(raw):
                gradients.add_chunk(head, tile, chunk, dlogits_of)
                del chunk  # a view of raw
            gradients.end_tile(tile)
            del raw, z, dz, dlogits_of
        return (None, None, *gradients.finish())


def _tiles(tiles: HiddenTiles, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Each tile's rows and hidden states; an empty one where there are none, to know the shapes."""
    for tile in tiles:
        yield tile.rows, tile.hidden
    if not tiles.local:
        dtype = operand_dtype(hidden.dtype, hidden.device)
        yield slice(None), hidden.detach().to(dtype)


def _finished_tile(head: Head, tile: Tensor) -> tuple[Tensor, Tensor]:
    """(raw, finished) logits of a tile, `[rows, V/TP]`; the same memory without a softcap."""
    spec = head.opts.spec
    raw = head.tile_logits(tile)
    if spec.softcap is not None:
        return raw, finished_logits(raw, spec, head.bias)
    if spec.logit_scale != 1.0:
        raw.mul_(spec.logit_scale)
    if head.bias is not None:
        raw.add_(head.bias)
    return raw.detach(), raw


def _raw_gradient(chunk: Chunk, *, dz: Tensor, asked: Tensor, dtype: torch.dtype) -> Tensor:
    """dLogits of a chunk; rows that ask for nothing get exactly 0, whatever fn made of them."""
    grad = torch.where(asked.unsqueeze(-1), dz[:, chunk.columns], 0.0)
    to_raw_gradient(grad, chunk.logits, chunk.spec)
    return grad.to(dtype)


def _beside(keep: Tensor, x: Tensor) -> Tensor:
    """`[n]` as `[n, 1, ...]` of x's dimensions."""
    return keep.view(-1, *(1,) * (x.dim() - 1))


def _learns(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad


def _refuse_learnt(found: list[Tensor | None], z: Tensor, fn: MapFn) -> None:
    """A ValueError if a result depends on a leaf that requires a gradient, other than z."""
    roots = [get_gradient_edge(z).node]
    for x in found:
        if x is None or x is z or not x.requires_grad:
            continue
        _, strangers = walk_graph(x, roots)
        if strangers:
            raise ValueError(
                f"fn: uses {name_of(strangers, fn)}, which requires a gradient, but gradients flow "
                "to hidden, weight, bias and lora alone; detach it"
            )


def linear_map(
    hidden: Tensor,
    weight: Tensor,
    fn: MapFn,
    *per_token_tensors: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    lora: LoRAInput | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    compact: bool = False,
    gradient_accumulation_fusion: bool = False,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> Any:
    """Any operation on a head's logits, without ever holding more than a tile of them.

        linear_map(hidden, weight, lambda z, t: vocab_parallel_logprobs(z, t, tp_group=tp), target)

    `fn(logits, *rows of per_token_tensors)` is called for some rows at a time with the finished
    logits `[rows, V/TP]` of this rank, and once more a tile in the backward. It is given no
    temperature and no true vocabulary: what fn calls applies them.

    Shape:
        hidden, weight, bias, lora: as in `linear_token_stats`.
        per_token_tensors: `[s, b, ...]` or `[n, ...]`, the whole sequence on every TP rank also
            under sequence parallelism. No gradient flows to them.
        logits: what fn gets, `[rows, V/TP]` float32 (float64 for float64 operands); fn must not
            modify it. Rows come in no particular order.
        fn returns a tensor `[rows, ...]`, or a (named) tuple, list, dict or TokenStats of such;
            None stays None. The same structure and dtypes at every call.
        mask: bool `[s, b]` or `[n]`, the whole sequence; False rows give 0 and no gradient.
        Returns what fn returns, each tensor `[s, b, ...]` or `[n, ...]`.

    Args:
        fn: deterministic, for the backward differentiates its second call. Its side effects happen
            once a tile in the forward and once in the backward. A row's result depends on that row
            alone. Collectives in it are fine where every rank of tp_group makes the same ones, as
            the operations of this package do. For rows without any it is called on none.
        compact: call fn on rows that the mask keeps alone; the same results. One host sync.
        chunk_size: rows a tile. A tile spans all of a rank's columns; None: as many rows as fit
            128 MiB on a CPU, 1 GiB on a GPU, in float32.
        the others: as in `linear_token_stats`.

    A result has a gradient if fn's depends on the logits; a result that fn detached has none. On
    a rank, a gradient of a result is the gradient of fn's result on that rank: as with the
    operations on logits, each rank differentiates its own, equal or not.

    Cost: four matrix products with a backward, and twice the forward of fn. Each tile reads and
    writes dWeight in float32 once.

    Collectives: those of fn a tile, forward and backward; backward one all-reduce of dHidden a
    tile, or a reduce-scatter under sequence parallelism, which also gathers each tile of hidden.

    Memory: a tile of logits, in the backward another of their gradient, with a softcap one more;
    and what fn makes of one tile. Saved for backward: the inputs.

    Raises:
        ValueError: before any collective for arguments, see `linear_token_stats`; per-token tensors
            that require a gradient; compact without a mask; a learnt tensor in fn (in its closure
            or its module), by name, as its gradient would be lost; a result of another shape.
    """
    if not callable(fn):
        raise ValueError(f"fn: expected a callable, got {type(fn).__name__}")
    head = open_head(
        hidden,
        weight,
        bias,
        logit_scale=logit_scale,
        softcap=softcap,
        logits_dtype=logits_dtype,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        tp_group=tp_group,
        lora=lora,
        temperature=1.0,
        vocab_size=None,
        backend="auto",
    )
    lead = whole_lead(hidden, head.group, sequence_parallel=sequence_parallel)
    tensors = [check_per_token(i, t, lead, hidden.device) for i, t in enumerate(per_token_tensors)]
    tokens = open_tokens(
        hidden,
        NO_TARGET,
        head.shard,
        sequence_parallel=sequence_parallel,
        chunk_size=chunk_size,
        mask=mask,
        compact=compact,
    )
    call = _Mapped(
        fn=fn,
        tensors=tuple(tokens.per_row(t) for t in tensors),
        head=head,
        tiling=whole_row_tiling(tokens, head.shard, chunk_size),
        masked=mask is not None,
        grad_enabled=torch.is_grad_enabled(),
        structure=_Structure(),
    )
    inputs = HeadTensors.of(tokens.hidden, weight, bias, lora)
    flat = _LinearMap.apply(tokens.target.keep, call, *inputs)
    restored = [None if x is None else tokens.restore(x, 0) for x in flat]
    return pytree.tree_unflatten(restored, call.structure.spec)
