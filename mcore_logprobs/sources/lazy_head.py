"""An output layer's call that was not made: what `LazyLogits` and `DeferredLogits` stand for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from mcore_logprobs.groups import group_size
from mcore_logprobs.sources.head import HeadLogits, head_logits
from mcore_logprobs.sources.latest_pass import Passes
from mcore_logprobs.sources.lora import LoRAInput


@dataclass(eq=False)
class LazyHead:
    """One call of an output layer that was not made.

    Attributes:
        hidden: `[s, b, h]` (`[s/TP, b, h]` under sequence parallelism); weight `[V/TP, h]`, bias
            `[V/TP]` or None.
        lora_tensors: what of a LoRA may get a gradient.
        dtype: of the layer's logits.
        operands: (hidden, weight, LoRA or None) as they are multiplied, of hidden and weight.
        product: the layer's own logits `[s, b, V/TP]`, of hidden and weight.
        mapped: a function of tiles of a source's logits `[rows, V/TP]`, the results joined.
        summary: what the logits of a source's tokens are like.
        output_dtype: what the layer rounds its product to, where it has one of its own.
        as_in_call: whether the layer's own product still is what it was in the call, as its
            adapters may have been switched since.
        into_main_grad: whether the gradient of this weight goes into its main_grad.
        call_layer: runs a function of (hidden, weight) while the whole weight of this rank is
            there, now and in its backward; None: it always is.
        logits_dtype, chunk_size, backend, saved_bytes: the settings of a patched model; the last
            is of each operation.
        require: whether computing the logits whole is an error.
        latest_passes: what was computed of some of the rows, by whether it has a gradient.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    sequence_parallel: bool
    tp_group: ProcessGroup | None
    operands: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, LoRAInput | None]]
    product: Callable[[Tensor, Tensor], Tensor]
    mapped: Callable[[HeadLogits, Callable[[Tensor], Tensor]], Tensor]
    summary: Callable[[HeadLogits], RowSummary]
    into_main_grad: Callable[[Tensor], bool]
    as_in_call: Callable[[], bool] = lambda: True
    lora_tensors: tuple[Tensor, ...] = ()
    call_layer: Callable[[Callable[[Tensor, Tensor], Any]], Any] | None = None
    output_dtype: torch.dtype | None = None
    logits_dtype: torch.dtype = torch.float32
    chunk_size: int | None = None
    backend: str = "auto"
    saved_bytes: int = 0
    require: bool = False
    latest_passes: Passes = field(init=False, default_factory=dict)
    _versions: list[tuple[str, int]] = field(init=False)
    _frozen: list[Tensor] = field(init=False)
    _open: list[tuple[Tensor, Tensor]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._versions = self._current_versions()
        self._frozen = [x for x in self.inputs if not x.requires_grad]

    @property
    def tokens(self) -> torch.Size:
        """`[s, b]`, of the whole sequence."""
        ranks = group_size(self.tp_group) if self.sequence_parallel else 1
        return torch.Size((self.hidden.shape[0] * ranks, *self.hidden.shape[1:-1]))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What may get a gradient."""
        bias = () if self.bias is None else (self.bias,)
        return (self.hidden, self.weight, *bias, *self.lora_tensors)

    def _current_versions(self) -> list[tuple[str, int]]:
        watched = [("hidden states", self.hidden), ("weight", self.weight)]
        watched += [] if self.bias is None else [("bias", self.bias)]
        watched += [("LoRA", x) for x in self.lora_tensors]
        return [(name, writes_to(x)) for name, x in watched]

    def check_unchanged(self) -> None:
        """Raises:
        RuntimeError: an input of the model's output layer was changed since its call, by a write
            that torch counts; one to `.data` it does not.
        """
        if not self.weight.untyped_storage().nbytes():
            raise RuntimeError(
                "lazy logits: expected the weight of the model's call, got one whose memory FSDP "
                "has freed: patch with logits='real'"
            )
        for (name, then), (_, now) in zip(self._versions, self._current_versions(), strict=True):
            if then != now:
                raise RuntimeError(
                    f"lazy logits: expected the {name} of the model's call (version {then}), got "
                    f"version {now}: they were changed since, by an optimizer step or in place, so "
                    "that these logits cannot be computed any more; consume them before, or call "
                    "the model again"
                )

    def run(self, fn: Callable[[], object]) -> Any:
        """`fn()`, a pytree of tensors, while the whole weight of this rank is there."""
        if self.call_layer is None or self._open:
            return fn()
        structure: list[pytree.TreeSpec] = []

        def inside(hidden: Tensor, weight: Tensor) -> tuple[object, ...]:
            with self.opened(hidden, weight):
                flat, spec = pytree.tree_flatten(fn())
            structure.append(spec)
            return tuple(flat)

        return pytree.tree_unflatten(list(self.call_layer(inside)), structure[-1])

    @contextlib.contextmanager
    def opened(self, hidden: Tensor, weight: Tensor) -> Iterator[None]:
        """While open, these are multiplied."""
        self._open.append((hidden, weight))
        try:
            yield
        finally:
            self._open.pop()

    def present(self, *, gradient: bool) -> tuple[Tensor, Tensor]:
        """(hidden, weight) as they are now."""
        hidden, weight = self._open[-1] if self._open else (self.hidden, self.weight)
        return self._of_call(hidden, gradient), self._of_call(weight, gradient)

    def _of_call(self, x: Tensor, gradient: bool, *, made_of: Tensor | None = None) -> Tensor:
        """x with a gradient where one is wanted, and what it is made of wanted one in the call."""
        thawed = self._thawed(x if made_of is None else made_of)
        return x if gradient and not thawed else x.detach()

    @property
    def product_is_as_in_call(self) -> bool:
        """Whether the layer's own product has the values and gradients of the call."""
        return self.as_in_call() and not any(self._thawed(x) for x in self.lora_tensors)

    def _thawed(self, x: Tensor) -> bool:
        """Whether x wants a gradient and did not in the call."""
        return x.requires_grad and any(x is frozen for frozen in self._frozen)

    def real(self, *, gradient: bool) -> Tensor:
        """The layer's own logits `[s, b, V/TP]`. Collectives: those of the layer."""
        return self.product(*self.present(gradient=gradient))

    def source(
        self,
        *,
        gradient: bool = True,
        logit_scale: float = 1.0,
        logits_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> HeadLogits:
        """Its logits as a source, where the whole weight is there.

        Args:
            gradient: whether one may be wanted of them.
            logits_dtype: what logits are rounded to; None: as the layer or the settings say.
            options: of `head_logits`, by their names.
        """
        hidden, weight, lora = self.operands(*self.present(gradient=gradient))
        if lora is not None:
            parts = zip(lora[:2], self.lora_tensors, strict=True)
            a, b = (self._of_call(x, gradient, made_of=own) for x, own in parts)
            lora = a, b, lora[2]
        bias = None if self.bias is None else self._of_call(self.bias, gradient)
        if bias is not None:
            # The layer's logits have it before the scale; the operation adds it after that.
            bias = (bias if logit_scale == 1.0 else bias * logit_scale).to(hidden.dtype)
        if hidden.dtype == torch.float64:
            logits_dtype = torch.float32  # of no meaning there
        return head_logits(
            hidden,
            weight,
            bias=bias,
            lora=lora,
            logit_scale=logit_scale,
            sequence_parallel=self.sequence_parallel,
            logits_dtype=logits_dtype or self.output_dtype or self.logits_dtype,
            gradient_accumulation_fusion=gradient and self.into_main_grad(weight),
            tp_group=self.tp_group,
            **options,
        )


def writes_to(x: Tensor) -> int:
    """How many writes torch has counted; it counts none of an inference tensor."""
    return 0 if x.is_inference() else x._version


class RowSummary(NamedTuple):
    """Of each row's logits among this rank's columns, `[*lead]` each; the columns are local.

    Attributes:
        mean, norm: the mean, and the root of the sum of squares.
    """

    largest: Tensor
    largest_column: Tensor
    smallest: Tensor
    smallest_column: Tensor
    mean: Tensor
    norm: Tensor
