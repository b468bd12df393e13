"""Logits that are never there: a tensor of them that is computed by whoever consumes it.

    logits = model(ids, positions, mask)          a LazyLogits [b, s, V/TP]; no product yet
    logits = logits[0, 5:].float().div_(0.7)      rows 5.. of the first sequence, temperature 0.7
    vocab_parallel_logprobs(logits, target)       the products of these rows, a chunk at a time

A `LazyLogits` is a subclass of torch.Tensor without memory, so that `isinstance`, wrappers around a
model and autograd functions take it for the tensor that it stands for. All that it records is an
int64 tensor in the logits' place: which row of the head each of its rows is. Whatever rearranges
tokens is done to that tensor (`lazy_record`); whatever scales goes into a temperature.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typing_extensions
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.collectives import saved_tensors_hooks
from mcore_logprobs.groups import group_size, resolve_tp_group
from mcore_logprobs.sources.head import HeadLogits
from mcore_logprobs.sources.lazy_head import LazyHead
from mcore_logprobs.sources.lazy_rows import Rows, View

logger = logging.getLogger("mcore_logprobs")
_said: set[str] = set()
# Whose lines are not the caller's.
_INSIDE = (
    *(str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), copy.__file__, "<"),
    *(typing_extensions.__file__, warnings.__file__),  # what is `deprecated` has a frame there
)

# What to use instead of a torch function, for the error of fused="require".
INSTEAD = {
    "argmax": "vocab_parallel_argmax",
    "max": "vocab_parallel_topk(logits, 1)",
    "topk": "vocab_parallel_topk",
    "gather": "vocab_parallel_gather",
    "log_softmax": "vocab_parallel_logprobs, or vocab_parallel_log_softmax for all columns",
    "softmax": "vocab_parallel_log_softmax",
    "logsumexp": "vocab_parallel_token_stats(...).lse",
    "cross_entropy": "vocab_parallel_logprobs",
    "multinomial": "vocab_parallel_sample",
    "masked_fill": "top_k, top_p or kept_ids of vocab_parallel_sampling_logprobs",
    "masked_fill_": "top_k, top_p or kept_ids of vocab_parallel_sampling_logprobs",
    "__setitem__": "top_k, top_p or kept_ids of vocab_parallel_sampling_logprobs",
}


class LazyLogits(Tensor):
    """Logits `[..., V/TP]` of a patched model that have not been computed.

    Every `vocab_parallel_*` function takes it and computes from hidden states. Shape, dtype,
    device, `requires_grad` and the like cost nothing, nor does what rearranges tokens or scales
    them. Anything else gets the real logits of the rows that are left: computed once, with one log
    line that names the caller's line, or refused under fused="require".
    """

    _view: View
    _real: dict[bool, tuple[int, Tensor]]
    _part: tuple[Tensor, Tensor] | None
    _leaf: Tensor | None
    _is_used: bool

    @staticmethod
    def __new__(cls, view: View) -> LazyLogits:
        head = view.rows.head
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, view.shape, strides=view.strides, dtype=view.dtype, device=head.hidden.device
        )
        made._view, made._real, made._part, made._leaf = view, {}, None, None
        made._is_used = False
        view.rows.shown_by(made)
        return made

    @classmethod
    def of(cls, view: View, *, gradient: bool = True) -> LazyLogits:
        """A handle, with a gradient where `gradient`, autograd's mode and the head say so."""
        return _Handle.apply(view, *view.rows.head.inputs) if gradient else cls(view)

    @classmethod
    def of_head(cls, head: LazyHead) -> LazyLogits:
        """All logits `[s, b, V/TP]` of an output layer's call."""
        return cls.of(View.all_of(Rows(head, None), head.tokens, head.dtype))

    @property
    def owned(self) -> Tensor | None:
        """The real logits that this handle is: since its `requires_grad` was set, or since it was
        used behind an autograd function."""
        return self._leaf

    @property
    def view_of_head(self) -> View:
        return self._view

    def used(self) -> None:
        """Something with a gradient was made of this handle, which goes past it to its head."""
        self._is_used |= self._wants_gradient

    def check_unused(self, what: str) -> None:
        """Raises: RuntimeError: no gradient of these logits will come by for `what`."""
        if self._is_used and self.written() is None:
            raise RuntimeError(
                f"{what}: lazy logits have no gradient of their own once something was computed "
                "or derived from them: call retain_grad() or register_hook(...) before that, which "
                "makes them real"
            )

    @property
    def _wants_gradient(self) -> bool:
        return torch.is_grad_enabled() and self.requires_grad

    def source(self, name: str, tp_group: ProcessGroup | None, **options: Any) -> Any:
        """A source from hidden states for an operation, or real logits where it has to be.

        Args:
            options: of `given_logits`, by their names.

        Raises:
            ValueError: another tp_group than the head's; under fused="require" real logits.
            RuntimeError: hidden states or weight have changed since, by a write that torch counts:
                an optimizer that writes to `.data`, as Megatron's do, is not seen.
        """
        head = self._view.rows.head
        head_ranks, group = group_size(head.tp_group), resolve_tp_group(tp_group)
        if tp_group is not None and group_size(group) != head_ranks:
            raise ValueError(
                f"tp_group: expected the output layer's, of {head_ranks} ranks, for {name}, got "
                f"one of {group_size(group)}"
            )
        real = self.written()
        if real is None:
            source = self._view.source(gradient=self._wants_gradient, **options)
            if source is not None:
                self.used()
                return source
            real = self.materialize(
                "a softcap behind a bias, or one or a logit_bias behind a temperature per token; a "
                "bias per column or segments of logits that were cut"
            )
        return real

    def beside(self, student: HeadLogits | None) -> Tensor:
        """These as a teacher of a student's head, or of given logits.

        Returns: real logits where the rows of the two do not lie in the same way.
        """
        view = self._view
        parallel = view.rows.head.sequence_parallel and group_size(view.rows.head.tp_group) > 1
        if student is None:
            alike = not parallel
        else:
            options = student.options
            selection = view.selection()
            alike = parallel == (options.sequence_parallel and student.hidden.ranks > 1) and (
                options.selection is None
                if selection is None
                else selection.same_as(options.selection)
            )
        return self if alike else self.materialize("a teacher of other rows than the student's")

    def written(self) -> Tensor | None:
        """The real logits where somebody holds them, to write into or for a gradient of their own,
        or where an autograd function gave them on.

        Then they, and not the product, are what an operation is about. Logits that were only read
        do not change what is consumed: a checkpoint's recomputation must take the same way.
        """
        if self._leaf is not None:
            return self._leaf
        if torch.is_grad_enabled() and (function := _function_before(self)):
            # Its backward must be called, with the gradient of real logits.
            _say_or_refuse(self._view, f"{function}.backward")
            self._leaf = _Through.apply(self)
            return self._leaf
        rows = self._view.rows
        found = rows.look_for_writes()
        if rows.overwritten:
            raise RuntimeError(
                "lazy logits: expected columns to be written by logits[..., columns] = value, got "
                "a write into real logits of some of their rows, which the others do not see"
            )
        if found:
            self.rejoin()
        lost = rows.scaled_without_gradient or (rows.written and True not in rows.real)
        if lost and self._wants_gradient:
            raise _not_followed()
        return self._shared() if rows.written else None

    def _shared(self) -> Tensor:
        """This handle's part of the real logits that all views share."""
        real = self._part_of(self._view.rows.shared)
        return real if self.requires_grad or not real.requires_grad else real.detach()

    def _part_of(self, flat: Tensor) -> Tensor:
        """The same tensor for the same logits, so that a hook on it is a hook on them."""
        if self._part is None or self._part[0] is not flat:
            view = self._view
            # Who reads first may be without gradients: a view that is made so is a leaf, which
            # says that it requires a gradient, and gives those who come later none.
            with torch.inference_mode(False), torch.enable_grad():
                if view.is_whole:
                    part = flat.view(view.shape)
                else:
                    start = view.places.storage_offset() * view.rows.width + flat.storage_offset()
                    part = flat.as_strided(view.shape, view.strides, start)
            self._part = flat, part
        return self._part[1]

    def materialize(self, what: str) -> Tensor:
        """The real logits, computed at the first call and kept.

        Args:
            what: reads them, for the log line.
        """
        written = self.written()
        if written is not None:
            return written
        view, wants, rows = self._view, self._wants_gradient, self._view.rows
        self.used()
        rows.read_by_function |= self.requires_grad and not wants
        # What is computed within a checkpoint is computed again in its backward.
        keeps = not wants or saved_tensors_hooks() is None
        if keeps:
            if wants in rows.real or True in rows.real:
                return self._shared()
            for kind in (wants, True):
                if kind in self._real and self._real[kind][0] == rows.version:
                    return self._real[kind][1]
        _say_or_refuse(view, what)
        with torch.inference_mode(False):  # inference tensors do not count their versions
            real = view.compute(gradient=wants)
        rows.give_out(real)
        if keeps and view.is_whole:
            rows.real[wants] = real.view(-1, view.width)
        elif keeps:
            self._real[wants] = rows.version, real
        return real

    def make_leaf(self, what: str) -> Tensor:
        """Real logits that are a leaf with a gradient, which this handle is from now on."""
        self._leaf = self.materialize(what).detach().requires_grad_()
        self.join(self._leaf)
        return self._leaf

    def materialize_to_write(self, what: str) -> Tensor:
        """The real logits, shared with all views of the same tensor from now on."""
        written = self.written()
        if written is not None:
            return written
        view, wants = self._view, self._wants_gradient
        rows = view.rows
        if wants not in rows.real:
            all_rows = View.all_of(rows, (rows.num_rows,), view.dtype)
            _say_or_refuse(all_rows, what)
            rows.real[wants] = all_rows.compute(gradient=wants)
        real = rows.real[wants]
        rows.real, rows.written = {wants: real}, True
        rows.take_back(real)
        self._real.clear()
        return self._part_of(real)

    def join(self, real: Tensor) -> None:
        """Whatever takes this handle for a tensor has a gradient of `real` from now on."""
        with torch.enable_grad(), torch.autograd._unsafe_preserve_version_counter(self):
            _Written.apply(real, self)

    def rejoin(self) -> None:
        """After a write: whatever takes this handle or another view of it for a tensor has the
        gradient of the real logits as they are now.
        """
        rows = self._view.rows
        for handle in rows.handles() if rows.written and torch.is_grad_enabled() else ():
            assert isinstance(handle, LazyLogits)
            if handle.requires_grad and handle.owned is None:
                real = handle._shared()
                if real.requires_grad:
                    handle.join(real)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"requires_grad={self.requires_grad})"
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.materialize("pickle").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: object) -> Any:
        return self.materialize("copy.deepcopy").__deepcopy__(memo)

    @classmethod
    def __torch_function__(
        cls,
        func: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        from mcore_logprobs.sources.lazy_dispatch import torch_function

        return torch_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: Any = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        from mcore_logprobs.sources.lazy_dispatch import torch_dispatch

        return torch_dispatch(func, args, kwargs or {})


class _Handle(torch.autograd.Function):
    """Joins a handle to the graph of its head, for those who pass it through a function of their
    own (`autograd.Function.apply`), which sees a tensor and gives back a gradient of its size.
    """

    @staticmethod
    def forward(ctx: Any, view: View, *inputs: Tensor) -> LazyLogits:
        ctx.view = view  # no tensors are saved: the head holds them, and checks their versions
        ctx.set_materialize_grads(False)
        return LazyLogits(view)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        view, needs = ctx.view, ctx.needs_input_grad[1:]
        if grads[0] is None:  # the handle has been joined to real logits since
            return None, *(None for _ in needs)
        hidden, *others = view.rows.head.inputs
        view.rows.look_for_writes()
        if view.rows.written_past_handles:
            raise RuntimeError(
                "lazy logits: expected columns to be written by logits[..., columns] = value, got "
                "a write into a view of them and an autograd function that was given the lazy "
                "logits, whose gradient would be of those before the write"
            )
        if view.rows.scaled_without_gradient:
            raise _not_followed()
        # A leaf: a tied weight would be reached through the whole model as well.
        hidden = hidden.detach().requires_grad_(needs[0])
        differentiated = [x for x, need in zip((hidden, *others), needs, strict=True) if need]
        with view.rows.head.opened(hidden, others[0]):
            real = view.compute(gradient=True)
        gradients = iter(torch.autograd.grad(real, differentiated, grads[0], allow_unused=True))
        return None, *(next(gradients) if need else None for need in needs)


def _not_followed() -> RuntimeError:
    return RuntimeError(
        "lazy logits were changed in place under no_grad or behind a detach, which their "
        "gradient cannot follow; change them with gradients on, or detach a clone"
    )


class _Through(torch.autograd.Function):
    """The real logits of a handle, whose gradient goes back to whatever gave the handle."""

    @staticmethod
    def forward(ctx: Any, handle: LazyLogits) -> Tensor:
        if handle.view_of_head.rows.written:
            return handle._shared().detach()
        return handle.view_of_head.compute(gradient=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Written(torch.autograd.Function):
    """Puts a handle behind the real logits that it has become by a write."""

    @staticmethod
    def forward(ctx: Any, real: Tensor, handle: LazyLogits) -> LazyLogits:
        ctx.mark_dirty(handle)
        return handle

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


# Where a handle has not passed through a function of a caller's.
_HEADS = (_Handle, _Written)
# torch's own nodes that hand a gradient on as it is, and functions that were found to.
_SAME = ("AliasBackward0", "ViewBackward0")
_identities: set[type] = set()


def gives_on(function: Callable[[Tensor], Tensor]) -> bool:
    """Whether a function gives a tensor and its gradient on as they are, as far as an example says.

    Its autograd function, if it has one, then leaves lazy logits what they are.
    """
    with torch.inference_mode(False), torch.enable_grad():
        for batch in (1, 2):  # a batch of one is a case of its own where strides are compared
            x = torch.linspace(-2.0, 3.0, 12 * batch).view(batch, 3, 4).transpose(0, 1)
            x = x.clone(memory_format=torch.preserve_format).requires_grad_()
            result, upstream = function(x), torch.linspace(1.0, 7.0, 12 * batch).view(4, 3, batch)
            upstream = upstream.permute(1, 2, 0)
            (grad,) = torch.autograd.grad(result, x, upstream)
            if not (torch.equal(result, x) and torch.equal(grad, upstream)):
                return False
    if (made := _function_of(result.grad_fn)) is not None:
        _identities.add(made)
    return True


def _function_of(node: object) -> type | None:
    """The autograd function that a node of the graph is of."""
    return getattr(type(node), "_forward_cls", None)


def _function_before(handle: LazyLogits) -> str:
    """The autograd function that a handle has passed through since its head, or ""."""
    with torch._C.DisableTorchFunctionSubclass():  # at each operation: without the detour
        node = handle.grad_fn
    while node is not None and (function := _function_of(node)) not in _HEADS:
        if function not in _identities and node.name() not in _SAME:
            return str(node.name()).removesuffix("Backward")
        node = node.next_functions[0][0]
    return ""


def uncut(logits: Tensor) -> Tensor:
    """The logits; real ones where their vocabulary was cut, since two sides must have as many
    columns.
    """
    if isinstance(logits, LazyLogits) and logits.view_of_head.is_cut:
        return logits.materialize("a divergence of logits that were cut")
    return logits


def _say_or_refuse(view: View, what: str) -> None:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if view.rows.head.require:
        instead = INSTEAD.get(what, "a vocab_parallel_* function")
        raise ValueError(
            f"fused='require', but {where} needs real logits ({what}): expected {instead}, which "
            "takes lazy ones"
        )
    if where not in _said:
        _said.add(where)
        logger.warning(
            "lazy logits: %s needs real ones (%s): %d rows are materialized",
            where,
            what,
            view.places.numel(),
        )
