"""`DeferredLogits`: what a patched output layer returns instead of logits."""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mcore_logprobs.megatron.adapters import base_layer, is_adapter
from mcore_logprobs.megatron.ddp import wait_for_parameters
from mcore_logprobs.megatron.heads import call_reason
from mcore_logprobs.megatron.lazy import call_of
from mcore_logprobs.sources.head import HeadLogits
from mcore_logprobs.sources.lazy_head import LazyHead, writes_to

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

HeadCall = Callable[[Tensor, Tensor], object]  # of hidden and weight


class DeferredLogits:
    """Stands for `hidden @ weight.T`, not computed yet.

    The patched loss reads the fields and never forms the logits. Everything else (a method or
    attribute of a tensor, an operator, a torch function, indexing, pickling) gets the real logits
    `[s, b, V/TP]`, computed at that moment by the layer's own forward, so that whoever looks at
    them sees what an unpatched model has. Only `repr` does not compute: a debugger must not start
    collectives.

    Attributes:
        head: the call of the output layer that was not made.
        scale: number that the product is multiplied by (MuP).
    """

    def __init__(
        self,
        head: LazyHead,
        *,
        scale: float = 1.0,
        unscaled: DeferredLogits | None = None,
        apply_scale: Callable[[Tensor], Tensor] = lambda logits: logits,
    ) -> None:
        """What `head` and `apply_scale` call must not hold this handle, which only Python's
        collector would free then.
        """
        self.head, self.scale = head, scale
        self._unscaled = unscaled
        self._apply_scale = apply_scale
        self._computed: dict[bool, Tensor] = {}
        self._versions: dict[bool, int] = {}
        self._largest: torch.return_types.max | None = None
        self._functions = len(_functions_around()) if self.wants_gradient else None

    @property
    def wants_gradient(self) -> bool:
        """Whether gradients are on, and something that the logits are computed from wants one."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.head.inputs)

    @property
    def hidden(self) -> Tensor:
        """[s, b, h]; [s/TP, b, h] under sequence parallelism."""
        return self.head.hidden

    def materialize(self) -> Tensor:
        """The real logits [s, b, V/TP]; computed at the first call and kept with the handle.

        Those computed with gradients are everybody's; those without are not given to a caller who
        wants gradients. Collectives: those of the output layer's forward (an all-gather under
        sequence parallelism).

        Raises:
            RuntimeError: within an autograd function that was given the handle. It took it for no
                tensor, and its results have no gradient. Or as `computed`.
        """
        if not torch.is_grad_enabled():
            self._refuse_functions()
        logits = self._kept()
        if logits is None:
            with self._outside_inference_mode():
                if self._unscaled is None:
                    logits = self.head.run(partial(self.head.real, gradient=True))
                else:
                    logits = self._apply_scale(self._unscaled.materialize())
            mode = self.wants_gradient
            self._computed[mode], self._versions[mode] = logits, writes_to(logits)
        return logits

    def _kept(self) -> Tensor | None:
        """Logits of this handle that the caller may have, or None. Raises: as `computed`."""
        mode = True in self._computed or self.wants_gradient
        for other, x in self._computed.items():
            if other is not mode and writes_to(x) != self._versions[other]:
                raise RuntimeError(
                    "the patched output layer's logits were changed in place under no_grad, which "
                    "the loss's gradient cannot follow; change them with gradients on, or patch "
                    "with fused=False"
                )
        return self._computed.get(mode)

    def _refuse_functions(self) -> None:
        """Raise within an autograd function that was given the handle, as `materialize` says."""
        if self._functions is None:
            return
        for name in _functions_around()[self._functions :]:
            raise RuntimeError(
                f"{name} was given the deferred logits of a patched output layer, in which "
                "an autograd.Function sees no gradient: pass it logits.clone(), or patch "
                "with LogprobConfig(fused=False)"
            )

    @contextlib.contextmanager
    def _outside_inference_mode(self) -> Iterator[None]:
        """For logits of a call that was made outside of it, so that torch counts writes to them."""
        if self.hidden.is_inference() or not torch.is_inference_mode_enabled():
            yield
            return
        with torch.inference_mode(False), torch.no_grad():
            yield

    def computed(self) -> Tensor | None:
        """The real logits where there are some that the caller may have, else None.

        Who has them may have changed them in place or hooked onto them, so that they, and not
        the product, are what the loss is about.

        Raises:
            RuntimeError: logits computed without gradients were changed in place, and the caller
                wants them with gradients, which cannot follow.
        """
        below = None if self._unscaled is None else self._unscaled.computed()
        if self._kept() is None and below is None:
            return None
        return self.materialize()

    def is_ancestor_of(self, logits: Tensor) -> bool:
        """Whether the gradient of `logits` reaches the logits computed here."""
        mine = self._computed.get(True)
        if mine is None or mine.grad_fn is None:
            return False
        frontier, seen = [logits.grad_fn], set()
        while frontier:
            reached = []
            for node in frontier:
                if node is mine.grad_fn:
                    return True
                if node is not None and node not in seen:
                    seen.add(node)
                    reached += [parent for parent, _ in node.next_functions]
            frontier = reached
        return False

    def scaled(self, factor: float, apply: Callable[[Tensor], Tensor]) -> DeferredLogits:
        """These logits times `factor`; `apply` scales real ones."""
        scale = self.scale * factor
        return DeferredLogits(self.head, scale=scale, unscaled=self, apply_scale=apply)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The logits' size, without computing them."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.head.tokens, self.head.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        """The real logits', without computing them."""
        return self.head.dtype

    def max(self, *args: object, **kwargs: object) -> object:
        """`Tensor.max`; over the vocabulary and without gradients, a few rows at a time.

        Megatron counts accepted multi-token predictions so, from 0.19 on.
        """
        if self._over_vocabulary(args, kwargs):
            # Copies: the caller may write into what it gets.
            values, indices = self.largest()
            return torch.return_types.max((values.clone(), indices.clone()))
        return self.materialize().max(*_materialized(args), **_materialized(kwargs))

    def argmax(self, *args: Any, **kwargs: Any) -> Tensor:
        """`Tensor.argmax`, by the same means."""
        if self._over_vocabulary(args, kwargs):
            return self.largest().indices.clone()
        return self.materialize().argmax(*args, **kwargs)

    def _over_vocabulary(self, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """Whether the vocabulary's dimension is asked for, of logits that do not exist: real ones
        may have been written to.
        """
        if torch.is_grad_enabled() or not set(kwargs) <= {"dim"}:
            return False
        dims = [x for x in (*args, *kwargs.values()) if isinstance(x, int)]
        over = len(args) + len(kwargs) == 1 and dims in ([-1], [len(self.shape) - 1])
        return over and self.computed() is None

    def largest(self) -> torch.return_types.max:
        """(largest logit, its local column) of each token, [s, b] each, never holding the logits.

        Without gradients. Computed once: Megatron's acceptance counts and the loss share it.
        Collectives: under sequence parallelism an all-gather of hidden.
        """
        head = self.head

        def best() -> tuple[Tensor, Tensor]:
            source = self.source(gradient=False, logits_dtype=head.dtype)
            summary = head.summary(source)
            return summary.largest.to(head.dtype), summary.largest_column

        if self._largest is None:
            with torch.no_grad():
                self._largest = torch.return_types.max(head.run(best))
        return self._largest

    def source(self, **options: Any) -> HeadLogits:
        """These logits as a source, within a function that `head.run` runs.

        Args:
            options: of `LazyHead.source`.
        """
        return self.head.source(logit_scale=self.scale, **options)

    def __repr__(self) -> str:
        return (
            f"DeferredLogits(hidden={list(self.hidden.shape)}, "
            f"weight={list(self.head.weight.shape)}, scale={self.scale}, "
            f"sequence_parallel={self.head.sequence_parallel})"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_Deferred") or "head" not in self.__dict__:
            raise AttributeError(name)  # half built: copy and pickle look around
        return getattr(self.materialize(), name)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return self.materialize().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return self.materialize().__deepcopy__(memo)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in (torch.max, torch.argmax) and args and isinstance(args[0], cls):
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        return func(*_materialized(args), **_materialized(kwargs))


def _functions_around() -> list[str]:
    """The autograd functions in whose forward or backward this is called, outermost first.

    A forward by its own code: torch 2.14 calls it from C. A backward by torch's `apply` above it.
    A frame's variables are not read, which would keep them alive as long as the frame.
    """
    names: list[str] = []
    frame = None if torch.compiler.is_compiling() else sys._getframe(1)
    forwards, called = _forwards(), None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "apply" and code.co_filename == _FUNCTION_FILE and called is not None:
            names.append(_name_of(called))
        elif id(code) in forwards:
            names.append(_name_of(code))
        called, frame = code, frame.f_back
    return names[::-1]


_FUNCTION_FILE = torch.autograd.function.BackwardCFunction.apply.__code__.co_filename


def _forwards() -> set[int]:
    """The ids of the code of every autograd function's forward.

    Within its decorators, whose own code others share: of `torch.no_grad`, or the compiler's.
    """
    found, classes = set(), [torch.autograd.Function]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        code = getattr(inspect.unwrap(cls.forward), "__code__", None)  # a partial has none
        if code is not None:
            found.add(id(code))
    return found


def _name_of(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified one


class Weak:
    """A module that this does not keep alive; call it for the module, or None once that is gone.

    What is put on a model may not hold it: only Python's collector would free such a model. A copy
    refers to the module's own copy.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = None if module is None else weakref.ref(module)

    def __call__(self) -> nn.Module | None:
        return None if self._module is None else self._module()

    def __reduce__(self) -> tuple[object, ...]:
        return Weak, (self(),)


@contextlib.contextmanager
def in_place(layer: object, forward: Callable[..., object]) -> Iterator[None]:
    """While open, calling the layer as a module runs its hooks around `forward`."""
    before = vars(layer).get("forward")
    vars(layer)["forward"] = forward
    try:
        yield
    finally:
        del vars(layer)["forward"]
        if before is not None:
            vars(layer)["forward"] = before


class DeferringHead:
    """In place of `output_layer.forward` of a ColumnParallelLinear: returns (handle, bias).

    Or of a LoRA around one.

    Attributes:
        reason: why the latest call computed real logits; empty where it deferred them.
        latest: the latest handle.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = Weak(layer)
        self.reason = ""
        self.latest: DeferredLogits | None = None

    @property
    def layer(self) -> ColumnParallelLinear:
        return self._layer()

    @property
    def base(self) -> ColumnParallelLinear:
        """The ColumnParallelLinear itself."""
        return base_layer(self.layer)

    def refusal(self) -> str:
        """The caller's own reason against deferring this call, or ""."""
        return ""

    def why_real(self) -> str:
        """Why the loss was given real logits."""
        return self.reason or (
            "the logits changed between the output layer and the loss (an adapter around the "
            "layer, or the model's own code)"
        )

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **other: object,
    ) -> tuple[object, Tensor | None]:
        """Calls that cannot be deferred, or that the layer refuses, are left to the layer."""
        layer, base = self.layer, self.base
        original = type(layer).forward
        whose = base.weight if weight is None else weight
        self.latest = None
        self.reason = self._reason_against(whose, runtime_gather_output, other)
        if self.reason:
            return original(layer, input_, weight, runtime_gather_output, **other)
        sequence_parallel = base.sequence_parallel
        if is_adapter(layer):
            wait_for_parameters(layer)

        def real(hidden: Tensor, present: Tensor) -> Tensor:
            # Inference switches the flag around the call, which may be over by now.
            now, base.sequence_parallel = base.sequence_parallel, sequence_parallel
            # Nor may the layer still have the weight of the call, or that its gradient then.
            given = weight if base.weight is whose is present else present
            try:
                return original(layer, hidden, given, runtime_gather_output)[0]
            finally:
                base.sequence_parallel = now

        def call_again(fn: HeadCall) -> object:
            def instead(hidden: Tensor, weight: Tensor | None = None, *_: object) -> object:
                return fn(hidden, base.weight if weight is None else weight)

            with in_place(layer, instead):
                return layer(input_, weight, runtime_gather_output)

        # Neither function holds the handle or this object, which holds the handle.
        self.latest = DeferredLogits(call_of(layer, input_, whose, real, call_again))
        return self._given_out(self.latest), base.bias if base.skip_bias_add else None

    def _given_out(self, deferred: DeferredLogits) -> object:
        """What the layer's caller gets for a deferred call."""
        return deferred

    def _reason_against(self, weight: Tensor, gather: bool | None, other: dict[str, object]) -> str:
        reason = self.refusal() or call_reason(self.layer, weight, gather=bool(gather))
        if reason:
            return reason
        expected = (self.base.output_size_per_partition, self.base.input_size)
        if other or tuple(weight.shape) != expected:
            return f"the output layer was called with {sorted(other) or tuple(weight.shape)}"
        return ""


def scale_deferred(
    logits: DeferredLogits | Tensor,
    config: TransformerConfig | None,
    original: Callable[[Tensor], Tensor],
) -> DeferredLogits | Tensor:
    """`original`, Megatron's `_scale_logits` bound to its model, for handles and for logits."""
    if not isinstance(logits, DeferredLogits):
        return original(logits)
    if config is None or not getattr(config, "use_mup", False) or config.mup_output_mult == 1.0:
        return logits
    return logits.scaled(config.mup_output_mult, original)


def _materialized(value: Any) -> Any:
    """`value` with every handle in it replaced by its logits."""
    return pytree.tree_map_only(DeferredLogits, DeferredLogits.materialize, value)


def _forwarded(name: str) -> Callable[..., object]:
    def method(self: DeferredLogits, *args: object, **kwargs: object) -> object:
        return getattr(self.materialize(), name)(*_materialized(args), **_materialized(kwargs))

    method.__name__ = name
    return method


# Python looks operators up on the class, past __getattr__.
_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "matmul rmatmul and rand or ror xor rxor lshift rlshift rshift rrshift "
    "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift "
    "neg pos abs invert lt le gt ge eq ne len iter getitem setitem contains "
    "bool int float index array format"
)
for _name in (f"__{operator}__" for operator in _OPERATORS.split()):
    if hasattr(torch.Tensor, _name):
        setattr(DeferredLogits, _name, _forwarded(_name))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]
