"""The autograd functions over a source of logits, and the only loops over tiles and chunks.

    recompute   forward: the operation looks at each chunk and reduces what it saw over the ranks
                backward: each chunk is formed again, or read where it was kept (`sources.kept`),
                and its gradient written over it or next to it
    eager       the gradient of a tile is formed in the forward, while its logits exist

An operation says what it takes of a chunk (`Forward`) and what the gradient of a chunk is
(`Backward`); it does not know how rows are cut, nor where logits come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from mcore_logprobs.checks import autocast_enabled, not_traced
from mcore_logprobs.collectives import once_differentiable
from mcore_logprobs.kernels.backend import Backend
from mcore_logprobs.sources.head_operands import HeadTensors
from mcore_logprobs.sources.kept import KeptPlan, Rereads, keep, plan_kept, restore
from mcore_logprobs.sources.main_grad import MainGrad
from mcore_logprobs.sources.source import (
    ChunkAt,
    Gradient,
    LogitIndices,
    Options,
    Source,
    Tile,
    Walked,
)

Tensors = tuple[Tensor, ...]
Results = tuple[Tensor | None, ...]  # of some rows, or gradients; None where nothing is wanted
Saved = tuple[Any, ...]  # likewise; each operation knows which are there
SourceT = TypeVar("SourceT", bound=Walked)


class Forward:
    """An operation's forward over one source: the driver shows it tile by tile, chunk by chunk.

    Attributes:
        reads: what `see` is given of a tile: "blocks", one at a time in memory that the next
            overwrites; "rows", all columns at once in memory that lasts as long as it is held;
            "nothing", where `begin_tile` takes what it needs.
        passes: how often the tiles are gone through, once or twice.
    """

    reads = "blocks"
    passes = 1

    def begin_tile(self, tile: Any, rows: slice) -> None:
        """Take what concerns a whole tile; `rows` are its rows of the operation's tensors."""

    def see(self, placed: ChunkAt) -> None:
        """Take what is needed of a chunk of logits."""

    def end_tile(self, tile: Tile, rows: slice) -> None:
        """All of the tile's chunks were seen."""

    def finalize(self) -> None:
        """Whole rows, of what the first of two passes saw."""

    def results(self) -> tuple[Results, Saved]:
        """(results, what the backward needs besides source and tensors), `[n, ...]` each."""
        raise NotImplementedError


class Backward:
    """The gradient of an operation's logits.

    Attributes:
        takes: what the driver calls for a tile: "blocks", `write` for each chunk; "rows", likewise
            for chunks that are columns of the raw logits which `begin_tile` gives; "entries", `at`,
            as the gradient is of single logits.
    """

    takes = "blocks"

    def begin_tile(self, tile: Any) -> Tensor:
        """The tile's raw logits `[rows, V/TP]`."""
        raise NotImplementedError

    def write(self, placed: ChunkAt, out: Tensor) -> None:
        """Write the gradient of a chunk's raw logits into out; out may be the logits' memory."""
        raise NotImplementedError

    def at(self, tile: Tile) -> tuple[LogitIndices, Tensor]:
        """(single logits of a tile, the gradient of their processed values `[e]`)."""
        raise NotImplementedError


class Operation(Generic[SourceT]):
    """An operation on a source; a frozen dataclass of its options, without tensors.

    Per-row tensors are `[n, ...]` in the order of the source's rows.

    Attributes:
        linear: results are linear in processed logits.
        ignored_values: what a token gets in each result that the source leaves out; None: 0.
        differentiable: which results carry a gradient, once there are any; None: all of floating
            point.
        rereads: what the backward does with the logits of the forward (`sources.kept`).
    """

    linear = False
    ignored_values: Sequence[float] | None = None
    differentiable: Sequence[bool] | None = None
    rereads: Rereads = "nothing"

    def forward(self, source: SourceT, tensors: Tensors) -> Forward:
        raise NotImplementedError

    def backward(
        self, source: SourceT, upstream: Results, tensors: Tensors, saved: Saved
    ) -> Backward:
        """The gradient; an upstream of None stands for 0."""
        raise NotImplementedError


# ---- the loops ----------------------------------------------------------------------------------


def show(run: Forward, source: Walked) -> None:
    """Show it all tiles of a source."""
    for number in range(run.passes):
        if number == 1:
            run.finalize()
        for tile in source.tiles():
            run.begin_tile(tile, tile.rows)
            chunks: Iterable[ChunkAt] = ()
            if run.reads != "nothing":
                chunks = tile.whole_rows() if run.reads == "rows" else tile.chunks()
            for placed in chunks:
                run.see(placed)
                del placed  # a tile's logits may be the only large memory: gone before the next
            run.end_tile(tile, tile.rows)


def form_gradient(backward: Backward, source: Walked, gradient: Gradient) -> Results:
    """The gradients of a source's tensors, formed in all of its tiles.

    Args:
        gradient: of `source.gradient`.
    """
    for tile in source.tiles():
        if backward.takes == "entries":
            gradient.collect_entries(tile, *backward.at(tile))
        else:
            raw = backward.begin_tile(tile) if backward.takes == "rows" else None
            for placed in tile.chunks() if raw is None else tile.blocks_of(raw):
                gradient.collect(tile, placed, backward.write)
                del placed
            del raw
        gradient.end_tile(tile)
    return gradient.finish()


# ---- what both modes are ------------------------------------------------------------------------


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Products within it have the dtypes that they are told, in a backward as in its forward."""
    if not autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


# ---- recompute mode -----------------------------------------------------------------------------


def apply(
    operation: Operation[SourceT],
    source: SourceT,
    *per_token: Tensor,
    constants: Tensors = (),
) -> Tensors:
    """The operation's results, `[*lead, ...]` each; differentiable by the source's tensors.

    Args:
        per_token: tensors `[*lead, ...]` that the operation takes as `[n, ...]`.
        constants: other tensors, or None; they follow.

    No gradient flows to either. They are saved for the backward as they are, so that autograd sees
    it if they change before, and so that it does not matter how the logits lie in memory then.
    """
    plans: tuple[KeptPlan, ...] = ()
    if source.may_keep and torch.is_grad_enabled():  # not within another function
        learns = any(x is not None and x.requires_grad for x in source.tensors)
        plans = plan_kept(source.heads, operation.rereads) if learns else ()
    call = _Call(operation, len(source.tensors), len(per_token), plans)
    return _run(_Recompute, source, call, *source.tensors, *per_token, *constants)


@dataclass(frozen=True)
class _Call:
    """An operation, and how many of an autograd function's tensors are what, in this order."""

    operation: Operation[Any]
    of_source: int
    per_token: int
    plans: tuple[KeptPlan, ...] = ()  # of what is kept for the backward
    objective: Objective | None = None  # in eager mode


_LEADING = 3  # arguments of either autograd function before its tensors


def _run(function: type[torch.autograd.Function], source: Walked, *arguments: Any) -> Any:
    """Run the autograd function over a source, whose buffers are let go of afterwards.

    The forward takes the source as it is; the backward makes it again of its tensors. So does the
    forward under torch.compile, which lets no function change the buffers of what was made outside.
    """
    if torch.compiler.is_compiling():
        shard = source.shard
        padding = shard.vocab_size <= shard.width * (shard.tp_size - 1)
        if padding and torch.compiler.is_dynamo_compiling():  # not torch.export
            # The last rank has only padding, and sends constants. AOTAutograd (2.13) sends those
            # in the backward once more, where no other rank takes part.
            return _run_untraced(function, source, *arguments)
        return function.apply(source.options, None, *arguments)
    try:
        return function.apply(source.options, source, *arguments)
    finally:
        for head in source.heads:  # the caller may go on with the source
            head.release()


_run_untraced = not_traced(_run)


class _RecomputeContext(FunctionCtx):
    call: _Call
    options: Options
    saved: int  # tensors of the operation
    linear: bool
    needs_input_grad: tuple[bool, ...]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _RecomputeContext,
        options: Options,
        made: Any,
        call: _Call,
        *tensors: Tensor,
    ) -> Results:
        operation = call.operation
        with without_autocast(tensors[0].device):
            source, rows = _call_context(options, call, tensors, made)
            kept = keep(source.heads, call.plans) if call.plans else []
            run = operation.forward(source, rows)
            show(run, source)
            results, saved = run.results()
            del run  # what it has of each tile may be as large as the results
            if source.order_may_change:
                saved = tuple(None if x is None else source.to_token_order(x) for x in saved)
            ignored_values = operation.ignored_values or (0.0,) * len(results)
            results = tuple(
                None if x is None else source.to_token_order(x, fill)
                for x, fill in zip(results, ignored_values, strict=True)
            )
            results = tuple(None if x is None else _owned(x) for x in results)
        ctx.call, ctx.options, ctx.saved = call, options, len(saved)
        ctx.linear = operation.linear and source.linear
        everything: Results = (*tensors, *saved, *(x for of_head in kept for x in of_head.tensors))
        ctx.save_for_backward(*everything)  # type: ignore[arg-type]  # None may be saved too
        ctx.set_materialize_grads(False)
        # Integers have no gradient as it is, and to name one may cut off another's: where a result
        # before it is None, torch.compile (2.13) takes the next one for it.
        flags = operation.differentiable or (True,) * len(results)
        ctx.mark_non_differentiable(
            *(
                x
                for x, flag in zip(results, flags, strict=True)
                if x is not None and x.is_floating_point() and not flag
            )
        )
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: _RecomputeContext, unpacked: Tensors, *grads: Tensor | None) -> Results:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        call, given = ctx.call, len(ctx.needs_input_grad) - _LEADING
        tensors, others = unpacked[:given], unpacked[given:]
        saved, kept = others[: ctx.saved], others[ctx.saved :]
        with without_autocast(tensors[0].device):
            source, rows = _call_context(ctx.options, call, tensors)
            if call.plans:
                restore(source.heads, call.plans, kept)
            upstream = tuple(
                None if grad is None else source.to_row_order(grad, fill=0.0) for grad in grads
            )
            if source.order_may_change:
                saved = tuple(None if x is None else source.to_row_order(x) for x in saved)
            needs = ctx.needs_input_grad[_LEADING : _LEADING + call.of_source]
            backward = call.operation.backward(source, upstream, rows, saved)
            gradient = source.gradient(needs, sparse=backward.takes == "entries")
            gradients = form_gradient(backward, source, gradient)
        return (*(None,) * _LEADING, *gradients, *(None,) * (given - len(gradients)))


def _owned(result: Tensor) -> Tensor:
    """The result, contiguous and no view: torch lets no one change a function's view in place."""
    base = None if torch.compiler.is_compiling() else result._base
    if base is None:
        return result.contiguous()
    if base.shape == result.shape and base.is_contiguous() and result.is_contiguous():
        return base  # the same but for its name
    return result.clone(memory_format=torch.contiguous_format)


def _call_context(
    options: Options, call: _Call, tensors: Tensors, made: Any = None
) -> tuple[Any, Tensors]:
    """The source, made of its tensors unless it is there, and what the operation takes besides."""
    source = options.bind(*tensors[: call.of_source]) if made is None else made
    others = tensors[call.of_source :]
    rows = (source.to_row_order(x) for x in others[: call.per_token])
    return source, (*rows, *others[call.per_token :])


# ---- eager mode ---------------------------------------------------------------------------------


class Objective(Protocol):
    """What makes one number of an operation's results, tile by tile.

    Attributes:
        backward: whether a gradient is wanted.
    """

    @property
    def backward(self) -> bool: ...

    def value_and_upstream(
        self, results: Any, tensors: Tensors, own: Tensors, rows: slice
    ) -> tuple[Tensor, Results, Tensor | None]:
        """(a scalar, its gradient by each result or None, a scale) of some rows.

        The gradients are times the scale, a power of two `[]` by which those of logits are within
        their dtype's range; None: 1.

        Args:
            results, tensors: the operation's, of these rows.
            own: the objective's own tensors.
            rows: which of the source's rows they are.
        """


def apply_eagerly(
    operation: Operation[Source],
    source: Source,
    objective: Objective,
    *per_token: Tensor,
    own: Sequence[Tensor] = (),
) -> Tensors:
    """(the sum of the tiles' values, the operation's results without gradient).

    The gradient is formed in the forward; the first backward multiplies it by its upstream and
    takes it.

    Args:
        source: whose tiles hold all of their chunks at one time.
        per_token: as in `apply`.
        own: tensors `[*lead, ...]` of the objective.
    """
    # No number, with a graph that reaches all tensors which require a gradient, and holds none:
    # gradients that are differentiated again must raise for them (`once_differentiable`).
    learning = [x for x in source.tensors if x is not None and x.requires_grad]
    # float32: autocast joins no float16 tensors on a CPU.
    parts = [x.unsqueeze(0)[..., :0].flatten().float() for x in learning]
    anchor = torch.cat(parts) if parts else torch.empty(0)
    call = _Call(operation, len(source.tensors), len(per_token), objective=objective)
    return _run(_Eager, source, call, *source.tensors, *per_token, *own, anchor)


_WEIGHT = HeadTensors._fields.index("weight")


class _EagerContext(FunctionCtx):
    """Attributes:
    gradients: those of the source's tensors, until the first backward takes them.
    dtypes: those of the source's tensors.
    """

    gradients: tuple[Tensor | None, ...] | None
    dtypes: list[torch.dtype | None]
    main_grad: MainGrad | None
    backend: Backend
    needs_input_grad: tuple[bool, ...]


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _EagerContext,
        options: Options,
        made: Any,
        call: _Call,
        *tensors: Tensor,
    ) -> Results:
        operation, objective, per_token = call.operation, call.objective, call.per_token
        assert objective is not None
        *given, anchor = tensors
        inputs = given[: call.of_source]
        with without_autocast(inputs[0].device):
            source = options.bind(*inputs) if made is None else made
            rows = [source.to_row_order(x) for x in given[call.of_source :]]
            wants = ctx.needs_input_grad[_LEADING : _LEADING + call.of_source]
            needs = [flag and objective.backward for flag in wants]
            gradient = source.gradient(needs, in_acc_dtype=True)
            total = torch.zeros((), dtype=torch.float64, device=source.device)
            parts: list[Results] = []
            for tile in source.tiles():
                own_rows = slice(0, tile.rows.stop - tile.rows.start)
                chunks = [placed._replace(rows=own_rows) for placed in tile.held_chunks()]
                of_tile = tuple(x[tile.rows] for x in rows)
                taken, others = of_tile[:per_token], of_tile[per_token:]
                run = operation.forward(source, taken)
                run.begin_tile(tile, own_rows)
                for placed in chunks:
                    run.see(placed)
                run.end_tile(tile, own_rows)
                results, saved = run.results()
                value, upstream, scale = objective.value_and_upstream(
                    results, taken, others, tile.rows
                )
                total += value
                parts.append(results)
                if any(needs):
                    if scale is not None:
                        gradient.scaled_by(scale)
                    backward = operation.backward(source, upstream, taken, saved)
                    for placed in chunks:
                        gradient.collect(tile, placed, backward.write)
                    gradient.end_tile(tile)
            ctx.gradients = gradient.finish()
            if not parts:  # no rows
                run = operation.forward(source, tuple(rows[:per_token]))
                show(run, source)
                parts = [run.results()[0]]
            joined = [
                None if pieces[0] is None else torch.cat(pieces)
                for pieces in zip(*parts, strict=True)
            ]
            ignored_values = operation.ignored_values or (0.0,) * len(joined)
            results = tuple(
                None if x is None else source.to_token_order(x, fill)
                for x, fill in zip(joined, ignored_values, strict=True)
            )
        ctx.save_for_backward(anchor)
        ctx.main_grad = source.options.main_grad
        ctx.backend = source.backend
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in results if x is not None))
        return (total.to(source.acc_dtype), *results)

    @staticmethod
    @once_differentiable
    def backward(ctx: _EagerContext, _: Tensors, *grads: Tensor | None) -> Results:
        upstream, none = grads[0], len(ctx.needs_input_grad)
        if upstream is None:
            return (None,) * none
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_policy_loss: the gradients formed in the forward went to the first "
                "backward; a second one needs a second forward"
            )
        formed, ctx.gradients = ctx.gradients, None
        gradients: list[Tensor | None] = []
        for place, (grad, dtype) in enumerate(zip(formed, ctx.dtypes, strict=False)):
            if grad is not None and place == _WEIGHT and ctx.main_grad is not None:
                ctx.backend.scale(grad, upstream, out=ctx.main_grad.buffer, add=True)
                grad = ctx.main_grad.dummy_wgrad()
            elif grad is not None:
                # In place if possible: only we hold it, and it may be of the weight's size.
                out = grad if grad.dtype is dtype else torch.empty_like(grad, dtype=dtype)
                ctx.backend.scale(grad, upstream, out=out)
                grad = out
            gradients.append(grad)
        return (*(None,) * _LEADING, *gradients, *(None,) * (none - _LEADING - len(gradients)))
