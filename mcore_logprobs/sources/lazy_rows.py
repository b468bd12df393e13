"""What lazy logits are made of: rows of an output layer's call that was not made (`lazy_head`).

`LazyLogits` is the tensor in front of them. The int64 places of a `View` are a view of one arange
as the tensor is a view of another, so that torch itself says what shares memory with what.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mcore_logprobs.collectives import saved_tensors_hooks
from mcore_logprobs.groups import VocabShard, group_size
from mcore_logprobs.sources.head import HeadLogits
from mcore_logprobs.sources.latest_pass import LatestPass, PassKey
from mcore_logprobs.sources.lazy_head import LazyHead, RowSummary, writes_to
from mcore_logprobs.sources.rows import RowSelection
from mcore_logprobs.sources.vocab_bias import LogitBias, scaled_bias


class Rows:
    """Memory that is not there: rows of a head, each over its temperature, that handles share.

    Handles that are views of one tensor have one `Rows`, so that what is done in place to one of
    them is seen by all.

    Attributes:
        rows: int64 `[m]` on the host, flat indices into the head's tokens; None: all in order.
        temperature: what they are divided by, a number or `[m]`.
        width: how many of the head's columns, the first ones, this memory has.
        real: the logits `[m, width]` where they were computed, by whether they have a gradient.
        written: whether those were changed in place.
        scaled_without_gradient: whether the temperature was changed by a handle without a gradient.
        read_by_function: whether an autograd function may have read them, whose gradient is that of
            the logits as they were.
        version: how often the temperature was changed.
        summary: of the places of a view, at a version.
        written_past_handles: whether somebody wrote into real logits through a view of their
            columns, which is no handle.
        overwritten: whether those were logits that only some of the views have.
        hooks: those on a view of real logits, as torch keeps them, and how often the logits had
            been written to by then.
    """

    def __init__(
        self,
        head: LazyHead,
        rows: Tensor | None,
        temperature: float | Tensor = 1.0,
        width: int | None = None,
    ) -> None:
        self.head, self.rows, self.temperature = head, rows, temperature
        self.width = head.weight.shape[0] if width is None else width
        self.num_rows = head.tokens.numel() if rows is None else rows.numel()
        self.real: dict[bool, Tensor] = {}
        self.written = self.read_by_function = self.scaled_without_gradient = False
        self.version = 0
        self.summary: tuple[int, Tensor, RowSummary] | None = None
        self.written_past_handles = self.overwritten = False
        self.hooks: list[tuple[weakref.ref[OrderedDict[int, object]], int]] = []
        self._handles: list[weakref.ref[Tensor]] = []
        self._given_out: list[_GivenOut] = []

    @property
    def dtype(self) -> torch.dtype:
        """Of temperatures per row."""
        return torch.promote_types(self.head.dtype, torch.float32)

    def shown_by(self, handle: Tensor) -> None:
        """A handle that stands for some of these rows."""
        self._handles.append(weakref.ref(handle))

    def handles(self) -> list[Tensor]:
        """Those that are alive."""
        self._handles = [x for x in self._handles if x() is not None]
        return [x for reference in self._handles if (x := reference()) is not None]

    def give_out(self, real: Tensor) -> None:
        """Real logits that a caller may keep a view of, and write into later."""
        if not real.is_inference():
            self._given_out.append(_GivenOut.of(real))

    def take_back(self, real: Tensor) -> None:
        """Real logits that all views share from now on, so that a write needs no looking for."""
        self._given_out = [x for x in self._given_out if not x.is_of(real)]

    def look_for_writes(self) -> bool:
        """Whether somebody has written past the handles since the last look."""
        if not any(x.is_written for x in self._given_out):
            self._given_out = [x for x in self._given_out if not x.is_gone]
            return False
        # What all views share is written to as if through a handle.
        latest = self.real.get(True, self.real.get(False))
        shared = all(x.is_of(latest) for x in self._given_out if x.is_written)
        self.written, self.overwritten = self.written or shared, not shared
        self.written_past_handles, self._given_out = True, []
        self.changed()
        return True

    def changed(self) -> None:
        """To autograd the handles have changed in place, all of them: who saved one is told."""
        for handle in self.handles():
            if not handle.is_inference():
                torch.autograd.graph.increment_version(handle)

    @property
    def shared(self) -> Tensor:
        """The real logits that all views share.

        Raises:
            RuntimeError: a hook is on a view of them that a write has taken out of the graph.
        """
        real = self.real[True] if True in self.real else self.real[False]
        if any(then != writes_to(real) and hooks() for hooks, then in self.hooks):
            raise RuntimeError(
                "lazy logits: expected hooks after the last write, got a write after register_hook "
                "on them or a view of them: the hook would not be called"
            )
        return real

    def divide_(self, places: Tensor, by: float | Tensor) -> None:
        """Divide the rows at places (int64, any shape) by a number or a tensor of that shape."""
        self.version += 1
        self.real.clear()  # those who read the logits before have what they need
        if places.numel() == self.num_rows and not isinstance(by, Tensor):
            self.temperature = self.temperature * by
            return
        device = self.head.hidden.device
        temperature = torch.as_tensor(self.temperature, dtype=self.dtype, device=device)
        temperature = temperature.expand(self.num_rows).clone()
        at = places.reshape(-1).to(device)
        by = by.reshape(-1).to(temperature.dtype) if isinstance(by, Tensor) else by
        temperature[at] = temperature[at] * by
        self.temperature = temperature


@dataclass(frozen=True)
class _GivenOut:
    """Real logits, of which this holds no memory.

    Attributes:
        counter: an empty tensor that has their version counter.
        version: theirs when they were given out.
    """

    counter: Tensor
    version: int
    storage: StorageWeakRef

    @classmethod
    def of(cls, real: Tensor) -> _GivenOut:
        counter = real.detach()
        counter.data = torch.empty(0, dtype=real.dtype, device=real.device)
        return cls(counter, counter._version, StorageWeakRef(real.untyped_storage()))

    @property
    def is_written(self) -> bool:
        return self.counter._version != self.version

    @property
    def is_gone(self) -> bool:
        """Whether no caller has them any more."""
        return bool(self.storage.expired())

    def is_of(self, real: Tensor | None) -> bool:
        """Whether they are those."""
        if real is None or self.is_gone:
            return False
        return bool(self.storage.cdata == StorageWeakRef(real.untyped_storage()).cdata)


@dataclass(frozen=True)
class View:
    """What a handle is: rows at places, `[*lead]`, in a dtype.

    Attributes:
        places: int64 on the host, indices into `rows`; a view of one arange as the handle is a
            view of its tensor.
        columns: how many of the columns of `rows`, the first ones; None: all.
    """

    rows: Rows
    places: Tensor
    dtype: torch.dtype
    columns: int | None = None

    @classmethod
    def all_of(cls, rows: Rows, lead: Sequence[int], dtype: torch.dtype) -> View:
        return cls(rows, torch.arange(rows.num_rows, device="cpu").view(torch.Size(lead)), dtype)

    @property
    def width(self) -> int:
        return self.rows.width if self.columns is None else self.columns

    @property
    def is_cut(self) -> bool:
        """Whether the end of the vocabulary is cut off."""
        return self.width < self.rows.head.weight.shape[0]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.places.shape, self.width))

    @property
    def strides(self) -> tuple[int, ...]:
        return (*(self.rows.width * stride for stride in self.places.stride()), 1)

    @property
    def is_whole(self) -> bool:
        """Whether these are all of the rows, in their order, and all of their columns."""
        if self.columns is not None:
            return False
        return self.places.numel() == self.rows.num_rows and self.places.is_contiguous()

    def at(self, places: Tensor) -> View:
        """Other places: a view where they are one of these, else a copy."""
        mine, theirs = (x.untyped_storage().data_ptr() for x in (self.places, places))
        if mine == theirs:
            return replace(self, places=places)
        flat = places.reshape(-1)
        return self._copied(self.head_rows(flat), self._temperature_at(flat), places.shape)

    def copy(self, dtype: torch.dtype | None = None, *, contiguous: bool = False) -> View:
        """The same in other memory, dimensions in the order that they have here, as torch does."""
        strides, order = self.places.stride(), list(range(self.places.dim()))
        if not (contiguous or 0 in strides):
            order.sort(key=lambda dim: -strides[dim])
        arranged = self.places.permute(order)
        flat = arranged.reshape(-1)
        # The same tensor for the same temperatures, which says that these are the same logits.
        is_all = flat.numel() == self.rows.num_rows and arranged.is_contiguous()
        temperature = self.rows.temperature if is_all else self._temperature_at(flat)
        copied = self._copied(self.head_rows(flat), temperature, arranged.shape)
        back = [order.index(dim) for dim in range(len(order))]
        copied = replace(copied, places=copied.places.permute(back))
        return copied if dtype is None else replace(copied, dtype=dtype)

    def _copied(self, rows: Tensor, temperature: float | Tensor, lead: Sequence[int]) -> View:
        return View.all_of(Rows(self.rows.head, rows, temperature, self.width), lead, self.dtype)

    def head_rows(self, places: Tensor | None = None) -> Tensor:
        """int64, flat indices into the head's tokens, of places' shape."""
        places = self.places if places is None else places
        return places if self.rows.rows is None else self.rows.rows[places]

    def _temperature_at(self, places: Tensor) -> float | Tensor:
        temperature = self.rows.temperature
        if not isinstance(temperature, Tensor):
            return temperature
        return temperature[places.to(temperature.device)]

    @property
    def temperature(self) -> float | Tensor:
        """A number, or `[*lead]`."""
        return self._temperature_at(self.places)

    def named_rows(self) -> Tensor | None:
        """int64 `[m]`, the head's tokens; None: all in order."""
        rows, count = self.head_rows().reshape(-1), self.rows.head.tokens.numel()
        every = rows.numel() == count and torch.equal(rows, torch.arange(count, device="cpu"))
        return None if every else rows

    def selection(self) -> RowSelection | None:
        """What a source of these has."""
        rows, head = self.named_rows(), self.rows.head
        if rows is None:
            return None
        group = head.tp_group if head.sequence_parallel and group_size(head.tp_group) > 1 else None
        count = head.tokens.numel()
        return RowSelection(rows, count, group, head.hidden.device, tokens=False)

    # ---- real logits ----

    def compute(self, *, gradient: bool) -> Tensor:
        """The real logits `[*lead, V/TP]`.

        All tokens of a head are multiplied by the layer itself, while it is as it was in the call;
        some of them cost only their own products. Collectives: those of the layer.
        """
        head = self.rows.head
        head.check_unchanged()
        with torch.set_grad_enabled(gradient):
            return self._compute(gradient)

    def _compute(self, gradient: bool) -> Tensor:
        head, rows = self.rows.head, self.named_rows()
        count, columns = head.tokens.numel(), head.weight.shape[0]
        is_all = rows is None or (rows.numel() == count and rows.unique().numel() == count)
        if is_all and head.product_is_as_in_call:
            flat = head.real(gradient=gradient).reshape(count, columns)
            flat = flat if rows is None else flat.index_select(0, rows.to(flat.device))
        else:
            source = self._head_source(gradient=gradient, logits_dtype=head.dtype)
            # A copy: what a tile's function gives may be the tile's own memory.
            flat = head.mapped(source, partial(torch.Tensor.to, dtype=head.dtype, copy=True))
            flat = flat.view(-1, columns)
        if self.is_cut:
            flat = flat[:, : self.width].contiguous()
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            flat = flat / temperature.reshape(-1, 1)
        elif temperature != 1.0:
            flat = flat / temperature
        return flat.to(self.dtype).view(self.shape)

    def summary(self) -> RowSummary:
        """What the logits of each row are like, without gradients; computed once.

        Of logits rounded as the layer rounds them.
        """
        head, rows = self.rows.head, self.rows
        if rows.summary is not None:
            version, places, summary = rows.summary
            if version == rows.version and torch.equal(places, self.places):
                return summary

        with torch.no_grad():
            source = self._head_source(
                gradient=False, temperature=self.temperature, logits_dtype=head.dtype
            )
            summary = head.summary(source)
        rows.summary = rows.version, self.places, summary
        return summary

    def mean(self, *, gradient: bool) -> Tensor:
        """The mean of each row; with its gradient in a pass of its own, tile by tile."""
        if not gradient:
            return self.summary().mean.clone()  # the caller may write into it
        head = self.rows.head
        source = self._head_source(gradient=True, logits_dtype=head.dtype)
        # A map's function gets logits that are not divided by the temperature.
        return head.mapped(source, _mean) / self.temperature

    # ---- a source ----

    def source(
        self,
        *,
        gradient: bool,
        temperature: float | Tensor,
        softcap: float | None,
        logit_scale: float,
        chunk_size: int | None,
        backend: str,
        logit_bias: LogitBias | None,
        vocab_size: int | None,
        **options: Any,
    ) -> HeadLogits | None:
        """These logits as a source from hidden states; None where they cannot be one.

        Columns that are cut off are no vocabulary.
        """
        head, divided_by = self.rows.head, self.temperature
        if self.is_cut:
            if isinstance(logit_bias, Tensor) or options["invariant_segments"] is not None:
                return None  # with as many columns as the logits
            vocab_size = VocabShard.of(self.width, head.tp_group, vocab_size).vocab_size
        options["vocab_size"] = vocab_size
        latest = self._latest_pass(
            gradient, (temperature, softcap, logit_scale), logit_bias, **options
        )
        if softcap is not None:
            # Ours come before it: only numbers, and no bias, which comes after it.
            if isinstance(divided_by, Tensor) or head.bias is not None:
                return None
            logit_scale, divided_by = logit_scale / divided_by, 1.0
        elif logit_bias is not None:
            # Ours come before it, and are divided by after it.
            if isinstance(divided_by, Tensor):
                return None
            logit_bias = scaled_bias(logit_bias, divided_by)
        lead = self.places.shape
        if isinstance(temperature, Tensor):
            try:
                temperature = temperature.expand(lead)
            except RuntimeError as error:
                raise ValueError(
                    f"temperature: expected a number or a tensor that broadcasts to {tuple(lead)}, "
                    f"got shape {tuple(temperature.shape)}"
                ) from error
        if isinstance(divided_by, Tensor) or divided_by != 1.0:
            # As kernels take it, with all digits of float64 logits.
            ours, theirs = (
                x.double() if isinstance(x, Tensor) else x for x in (divided_by, temperature)
            )
            temperature = theirs * ours
        source = self._head_source(
            gradient=gradient,
            temperature=temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            chunk_size=head.chunk_size if chunk_size is None else chunk_size,
            backend=head.backend if backend == "auto" else backend,
            logit_bias=logit_bias,
            **options,
        )
        source.latest_pass = latest
        return source

    def _latest_pass(
        self,
        gradient: bool,
        processing: tuple[object, ...],
        logit_bias: LogitBias | None,
        *,
        vocab_size: int | None,
        disallowed_ids: object,
        invariant_segments: int | None,
        **options: object,
    ) -> LatestPass | None:
        """None: every consumer has a pass of its own.

        So where what it is of cannot be compared without a sync, and where what is saved must be
        saved again: a checkpoint's recomputation has to go the same way as its forward.
        """
        of_this_call = (logit_bias, disallowed_ids, invariant_segments)
        alone = (
            any(x is not None for x in of_this_call)
            or any(isinstance(x, Tensor) for x in processing)
            or (gradient and saved_tensors_hooks() is not None)
            or torch.is_inference_mode_enabled()
            or torch.compiler.is_compiling()
        )
        if alone:
            return None
        key = PassKey(
            self.named_rows(), self.rows.temperature, self.places, (*processing, vocab_size)
        )
        return LatestPass(self.rows.head.latest_passes, gradient, key)

    def _head_source(
        self, *, gradient: bool, temperature: float | Tensor = 1.0, **options: Any
    ) -> HeadLogits:
        head, lead, rows = self.rows.head, self.places.shape, self.named_rows()
        head.check_unchanged()
        if isinstance(temperature, Tensor):
            temperature = temperature.reshape(head.tokens if rows is None else (-1,))
        source = head.source(
            gradient=gradient,
            rows=rows,
            temperature=temperature,
            saved_bytes=head.saved_bytes if gradient else 0,
            **options,
        )
        tensors = source.tensors
        if tensors.temperature is not None:
            tensors = tensors._replace(temperature=tensors.temperature.reshape(lead))
        return replace(source.options, batch_shape=lead).bind(*tensors)


def _mean(logits: Tensor) -> Tensor:
    return logits.mean(-1)
