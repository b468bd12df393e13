"""What a row of the table says of an operation, and the random tensors that it draws."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import mcore_logprobs as ml
from mcore_logprobs.kernels.stats import RowResults

VOCAB = 24  # padded; divides into 1, 2 and 3 shards
SEGMENTS = 6  # of any vocabulary here; divide over 1, 2 and 3 ranks
Outputs = dict[str, Tensor]
Side = dict[str, Any]


@dataclass
class Draw:
    """Random tensors of one case. `[...]` is the leading shape of targets and results.

    Attributes:
        hidden_lead: that of hidden states, another where the call names rows.
    """

    lead: tuple[int, ...]
    hidden_lead: tuple[int, ...]
    columns: int  # the padded vocabulary
    vocab: int  # the true one
    dtype: torch.dtype
    ignored: bool | str  # whether some rows are left out, or "all"
    source: str  # "logits" or "hidden"
    setting: dict[str, Any]  # of every axis of the case
    generator: torch.Generator

    def randn(self, *shape: int) -> Tensor:
        return torch.randn((*self.lead, *shape), generator=self.generator).to(self.dtype)

    def spread(self, *shape: int, step: float = 1 / 16) -> Tensor:
        """Numbers within +-2. Where products are rounded to a lower precision, or the case says
        `exact`, multiples of `step`: then products are exact, and so is which one is larger."""
        x = 4.0 * torch.rand(shape, generator=self.generator, dtype=torch.float64) - 2.0
        if self.setting.get("logits_dtype", "float32") != "float32" or self.setting.get("exact"):
            x = (x / step).round() * step
        return x.to(self.dtype)

    def keep(self) -> Tensor:
        """bool `[...]`: about two rows of three, or all of them, or none."""
        kept = torch.rand(self.lead, generator=self.generator) < 0.67
        return (kept | (not self.ignored)) & (self.ignored != "all")

    def logits(self) -> Tensor:
        """`[..., V]` of the kind that the axis `values` says."""
        z, kind = 3.0 * torch.randn((*self.lead, self.columns), generator=self.generator), "values"
        if self.setting[kind] == "ties":
            z = (z / 2.0).round() + 0.0 * z.sign()  # both zeros
        elif self.setting[kind] == "far":
            z += 1e4
        elif self.setting[kind] == "minus infinity":
            gone = torch.rand(z.shape, generator=self.generator) < 0.4
            gone[..., 0] = False
            z = z.masked_fill(gone, -torch.inf)
        elif self.setting[kind] == "flat to peaked":
            rows = max(self.lead[0], 2) if self.lead else 2
            scale = torch.logspace(-2, 1, rows)[: self.lead[0] if self.lead else 1]
            z *= scale.view(-1, *[1] * (z.dim() - 1)) if self.lead else scale
        return z.to(self.dtype)

    def ids(self, *k: int) -> Tensor:
        """int64 `[..., *k]`, global ids."""
        return torch.randint(0, self.vocab, (*self.lead, *k), generator=self.generator)

    def distinct_ids(self, k: int) -> Tensor:
        """int64 `[..., k]`, each id at most once per row."""
        noise = torch.rand(*self.lead, self.vocab, generator=self.generator)
        return noise.topk(k, largest=False).indices

    def target(self) -> Tensor:
        """int64 `[...]`, ignore_index in the rows that are left out."""
        return self.ids().masked_fill(~self.keep(), self.ignore_index)

    @property
    def ignore_index(self) -> int:
        given = self.setting.get("ignore_index", -100)
        return -100 if given is None else given

    def mask(self, *sources: str) -> Side:
        """The keyword `mask`, where rows are left out and the call from this source takes it."""
        return {"mask": self.keep()} if self.ignored and self.source in sources else {}


@dataclass(frozen=True)
class Subject:
    """An operation as the engine tests it: one row of the table.

    Attributes:
        truth: (z, side, options) -> outputs by name. What it gives in a row that is left out is
            not looked at.
        outputs: what the call's results are called, in their order; empty: a TokenStats' fields.
        differentiable: the outputs that have a gradient.
        side: draws the arguments that are not options: targets, ids, masks, teachers.
        positional: the names in `side` that are passed by position, in this order.
        options: keywords of the operation alone, and the values they are tried with: first the
            default, which is not passed.
        axes: other settings of the case: for `side` to look at, or the engine's own.
        allowed: whether settings, some of which may be missing, go together.
        without: common settings that the operation does not take.
        call: makes the call where passing side and keywords is not enough.
        passed_on: arguments that a function of the caller checks, not the operation.
        left_out: outputs that are not 0 in a row that is left out: their value, or None where they
            are computed all the same.
        output_dim: the dimension in which outputs are sharded over ranks; None: the same on each.
        input_dim: the dimension in which the logits are.
        factor: how many times plain torch's error the error may be; more where sums cancel.
        same_dtype: whether outputs come in the logits' dtype rather than in float32 or better.
        infinite: whether an output of -inf gets an upstream gradient.
        support: whether every column must have some probability.
        argument: what the logits are called in `mistakes`.
        mistakes: (bad values by argument, words of the message); `MISTAKES` has those that several
            operations share.
    """

    name: str
    truth: Callable[[Tensor, Side, dict[str, Any]], Outputs]
    from_logits: Callable[..., Any] | None = None
    from_hidden: Callable[..., Any] | None = None
    outputs: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    side: Callable[[Draw], Side] = lambda draw: {}
    positional: tuple[str, ...] = ()
    options: dict[str, Sequence[Any]] = field(default_factory=dict)
    axes: dict[str, Sequence[Any]] = field(default_factory=dict)
    allowed: Callable[[dict[str, Any]], bool] = lambda setting: True
    without: tuple[str, ...] = ()
    call: Callable[..., Any] | None = None
    passed_on: tuple[str, ...] = ()
    left_out: dict[str, int | None] = field(default_factory=dict)
    output_dim: int | None = None
    input_dim: int = -1
    infinite: bool = False
    support: bool = False
    factor: float = 2.0
    same_dtype: bool = False
    argument: str = "logits"
    mistakes: Sequence[tuple[dict[str, Any], str]] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(s for s in ("logits", "hidden") if self.function(s) is not None)

    def function(self, source: str) -> Callable[..., Any] | None:
        return self.from_logits if source == "logits" else self.from_hidden

    def flags(self, source: str) -> list[str]:
        """The keywords of the public call that are True or False."""
        function = self.function(source)
        assert function is not None
        parameters = inspect.signature(function).parameters
        return [name for name, p in parameters.items() if isinstance(p.default, bool)]

    def __call__(
        self, source: str, head: tuple[Tensor, ...], side: Side, keywords: dict[str, Any]
    ) -> Outputs:
        """The public call. `head`: (logits,) or (hidden, weight), this rank's."""
        fn = self.function(source)
        if self.call is not None:
            result = self.call(fn, head, side, keywords)
        else:
            by_name = {name: x for name, x in side.items() if name not in self.positional}
            assert fn is not None
            result = fn(*head, *(side[n] for n in self.positional), **by_name, **keywords)
        if isinstance(result, ml.TokenStats):
            found = {name: getattr(result, name) for name in RowResults._fields}
        else:
            results = result if isinstance(result, tuple) else (result,)
            found = dict(zip(self.outputs, results, strict=True))
        return {name: x for name, x in found.items() if x is not None}


# How tensors of `side` are cut over TP ranks: columns of the vocabulary, its rows, or the sequence.
SHARDED = {
    "teacher_logits": "columns",
    "teacher_weight": "rows",
    "teacher_bias": "rows",
    "teacher_hidden": "sequence",
}
