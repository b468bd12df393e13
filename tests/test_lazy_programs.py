"""Programs on lazy logits, drawn at random: each gives what real logits of float64 give.

A program has variables, all of one head's logits. A statement makes a variable of another, changes
one in place, or reads one, with gradients or without. MCORE_LOGPROBS_DEEP says how many are run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mcore_logprobs as ours
from tests.helpers.lazy import lazy_logits

DEEP = int(os.environ.get("MCORE_LOGPROBS_DEEP", "100"))
V, CUT = 11, 9
LARGEST = 200  # rows of a variable

_REENTRANT: Any = {"use_reentrant": True}

Function = Callable[[Tensor], Tensor]


def _numbers(draw: Random, shape: tuple[int, ...]) -> Tensor:
    """Each its own, in (0.4, 1.9)."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 1.5 + 0.4


# ---- statements that make a variable, drawn for logits of a shape --------------------------------


def _slice(draw: Random, lead: torch.Size) -> Function:
    dim = draw.randrange(len(lead))
    start = draw.randrange(lead[dim])
    stop, step = draw.randint(start + 1, lead[dim]), draw.choice([1, 1, 2])
    return lambda x: x[(slice(None),) * dim + (slice(start, stop, step),)]


def _select(draw: Random, lead: torch.Size) -> Function:
    dim = draw.randrange(len(lead))
    place = draw.randrange(lead[dim])
    return lambda x: x.select(dim, place)


def _mask(draw: Random, lead: torch.Size) -> Function:
    masked = lead[: draw.randint(1, len(lead))]
    mask = _numbers(draw, masked) < 1.3
    mask.view(-1)[0] = True
    return lambda x: x[mask]


def _index(draw: Random, lead: torch.Size) -> Function:
    shape = draw.choice([(3,), (2, 2)])
    index = (_numbers(draw, shape) * 10).long() % lead[0]
    return lambda x: x[index]


def _index_select(draw: Random, lead: torch.Size) -> Function:
    dim = draw.randrange(len(lead))
    index = (_numbers(draw, (4,)) * 10).long() % lead[dim]
    return lambda x: x.index_select(dim, index)


def _permute(draw: Random, lead: torch.Size) -> Function:
    dims = draw.sample(range(len(lead)), len(lead))
    return lambda x: x.permute(*dims, len(lead))


def _flip(draw: Random, lead: torch.Size) -> Function:
    dims = draw.sample(range(-1, len(lead)), draw.choice([1, 1, 2]))
    return lambda x: x.flip(dims)


def _roll(draw: Random, lead: torch.Size) -> Function:
    shift, dim = draw.randrange(1, 4), draw.choice([None, *range(-1, len(lead))])
    return lambda x: torch.roll(x, shift, dim)


def _chunk(draw: Random, lead: torch.Size) -> Function:
    dim = draw.randrange(len(lead))
    return lambda x: x.chunk(2, dim)[-1]


def _join(draw: Random, lead: torch.Size) -> Function:
    dim, divisor = draw.randrange(len(lead)), draw.uniform(0.5, 2.0)
    join = draw.choice([torch.cat, torch.stack])
    return lambda x: join([x, x.flip(0) / divisor], dim)


def _scale(draw: Random, lead: torch.Size) -> Function:
    return _scaled_by(draw, lead, (Tensor.mul, Tensor.div))


def _scale_in_place(draw: Random, lead: torch.Size) -> Function:
    return _scaled_by(draw, lead, (Tensor.mul_, Tensor.div_))


def _scaled_by(draw: Random, lead: torch.Size, scales: tuple[Function, Function]) -> Function:
    scale: Callable[..., Tensor] = draw.choice(scales)
    if draw.random() < 0.5:
        number = draw.uniform(0.4, 2.0)
        return lambda x: scale(x, number)
    shape = [size if draw.random() < 0.6 else 1 for size in lead]
    each = _numbers(draw, (*shape[draw.randrange(len(shape)) :], 1))
    return lambda x: scale(x, each.to(x.dtype))


def _fill_columns(draw: Random, lead: torch.Size) -> Function:
    """Through a view that is not of whole rows, so that lazy logits have no part in it."""
    first = draw.randrange(1, CUT - 2)

    def fill(x: Tensor) -> Tensor:
        x[..., first : first + 2].fill_(-2.0)
        return x

    return fill


def _fill_in_place(draw: Random, lead: torch.Size) -> Function:
    mask = _numbers(draw, lead) < 0.6
    return lambda x: x.masked_fill_(mask.unsqueeze(-1), -3.0)


MAKE: dict[str, Callable[[Random, torch.Size], Function]] = {
    "slice": _slice,
    "select": _select,
    "mask": _mask,
    "index": _index,
    "index_select": _index_select,
    "permute": _permute,
    "chunk": _chunk,
    "join": _join,
    "scale": _scale,
    "scale_": _scale_in_place,
    "scale_again_": _scale_in_place,
    "fill_": _fill_in_place,
    "fill columns_": _fill_columns,
    "flatten": lambda draw, lead: lambda x: x.flatten(0, -2),
    "expand": lambda draw, lead: lambda x: x.unsqueeze(0).expand(2, *x.shape),
    "flip": _flip,
    "roll": _roll,
    "contiguous": lambda draw, lead: lambda x: x.contiguous(),
    "clone": lambda draw, lead: lambda x: x.clone(),
    "detach": lambda draw, lead: lambda x: x.detach(),
    "cut": lambda draw, lead: lambda x: x[..., :CUT],
}


# ---- statements that read one --------------------------------------------------------------------


def _target(lead: torch.Size) -> Tensor:
    return torch.arange(lead.numel()).mul(5).remainder(CUT).view(lead)


def _logprobs(x: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, _target(x.shape[:-1]).unsqueeze(-1)).squeeze(-1)


def _entropy(x: Tensor) -> Tensor:
    logprobs = x.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def _teacher(x: Tensor) -> Tensor:
    return torch.linspace(-1.0, 2.0, x.numel(), dtype=torch.float64).sin().view(x.shape)


def _kl(x: Tensor) -> Tensor:
    teacher = _teacher(x).log_softmax(-1)
    return (teacher.exp() * (teacher - x.log_softmax(-1))).sum(-1)


def _both(x: Tensor) -> Tensor:
    stats = ours.vocab_parallel_token_stats(x, _target(x.shape[:-1]), entropy=True)
    assert stats.entropy is not None
    return stats.logprobs + 0.3 * stats.entropy


class _Squares(torch.autograd.Function):
    """A trainer's own function of logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        values = x.tanh()
        ctx.save_for_backward(values)
        return values.square().sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        return 2.0 * values * (1.0 - values.square()) * grads[0].unsqueeze(-1)


def _overwritten(metric: Function) -> Function:
    """A metric whose result the caller writes into."""

    def read(x: Tensor) -> Tensor:
        with torch.no_grad():
            found = metric(x)
            copy = found.clone()
            found.zero_()
        return copy

    return read


# Of lazy logits, and of real ones.
READ: dict[str, tuple[Function, Function]] = {
    "logprobs": (lambda x: ours.vocab_parallel_logprobs(x, _target(x.shape[:-1])), _logprobs),
    "at a temperature": (
        lambda x: ours.vocab_parallel_logprobs(x, _target(x.shape[:-1]), temperature=0.7),
        lambda x: _logprobs(x / 0.7),
    ),
    "entropy": (ours.vocab_parallel_entropy, _entropy),
    "both": (_both, lambda x: _logprobs(x) + 0.3 * _entropy(x)),
    "top": (
        lambda x: ours.vocab_parallel_topk(x, 3)[0].sum(-1),
        lambda x: x.topk(3).values.sum(-1),
    ),
    "kl": (lambda x: ours.vocab_parallel_kl_div(x, _teacher(x).to(x.dtype)), _kl),
    "log_softmax": (
        lambda x: ours.vocab_parallel_log_softmax(x, vocab_size=4)[..., 3:5].exp().sum(-1),
        lambda x: x[..., :4].log_softmax(-1)[..., 3].exp(),
    ),
    **{
        name: (function, function)
        for name, function in {
            "softmax": lambda x: x.softmax(-1).square().sum(-1),
            "logsumexp": lambda x: x.logsumexp(-1),
            "sum": lambda x: x.sum(-1),
            "a column": lambda x: x[..., 2] * 1.0,
            "argmax": lambda x: x.argmax(-1),
            "max": lambda x: x.max(-1).values,
            "mean": lambda x: x.mean(-1),
            "mean of all": lambda x: x.mean().expand(x.shape[:-1]),
            "a function": _Squares.apply,
            "a function in a checkpoint": lambda x: checkpoint(_Squares.apply, x, **_REENTRANT),
            "argmax, overwritten": _overwritten(lambda x: x.argmax(-1)),
            "largest, overwritten": _overwritten(lambda x: x.max(-1).values),
            "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
        }.items()
    },
}


# ---- programs ------------------------------------------------------------------------------------


class _NotInTorch(Exception):
    """torch refuses the program for real logits: overlapping memory, a tensor that it has saved."""


# What lazy logits refuse besides: a change that their gradient cannot follow; and an operation on
# real logits has saved them, where torch's own function saves what it needs of them.
# Nor can a write into columns of some rows be seen by the others.
_REFUSED = ("under no_grad or behind a detach", "has been modified", "expected columns to be")

_TOLERANCES = {
    torch.float64: {"rtol": 1e-8, "atol": 1e-9},
    torch.float32: {"rtol": 1e-3, "atol": 1e-4},
}


class _Program:
    """Attributes:
    text: the statements so far.
    """

    def __init__(self, seed: int) -> None:
        draw = self._draw = Random(seed)
        self.text: list[str] = []
        self._dtype = draw.choice(list(_TOLERANCES))
        *tokens, width = draw.choice([(5, 2, 4), (6, 3, 3), (1, 3, 4)])
        shapes = {"hidden": (*tokens, width), "weight": (V, width)}
        if draw.random() < 0.4:
            shapes["bias"] = (V,)
        tensors = {name: _numbers(draw, shape) - 1.1 for name, shape in shapes.items()}
        self._of_real, self._of_lazy = (
            {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}
            for dtype in (torch.float64, self._dtype)
        )
        hidden, weight, *bias = self._of_real.values()
        lazy = lazy_logits(
            **self._of_lazy,
            chunk_size=draw.choice([None, 2]),
            saved_bytes=draw.choice([0, 300, 1 << 20]),
        )
        self._variables = [(sum(bias, hidden @ weight.t()), lazy)]
        self._sums: list[tuple[Tensor, Tensor]] = []  # of what was read with gradients

    def run(self) -> None:
        draw = self._draw
        for _ in range(draw.randint(2, 8)):
            place = draw.randrange(len(self._variables))
            is_token = self._variables[place][0].dim() == 1
            if is_token or draw.random() < 0.45:
                self._read(place)
            else:
                self._make(place)
        if self._sums:
            self._differentiate()

    def _make(self, place: int) -> None:
        real, lazy = self._variables[place]
        name = self._draw.choice(list(MAKE))
        statement = MAKE[name](self._draw, real.shape[:-1])
        gradient = not name.endswith("_") or self._draw.random() < 0.8
        self.text.append(f"x{len(self._variables)} = {name}(x{place}){_said(gradient)}")
        with torch.set_grad_enabled(gradient):
            expected = _of_torch(statement, real)
            if not 0 < expected.numel() <= LARGEST * V:
                raise _NotInTorch
            made = statement(lazy)
        assert (made.shape, made.requires_grad) == (expected.shape, expected.requires_grad)
        self._variables.append((expected, made))

    def _read(self, place: int) -> None:
        real, lazy = self._variables[place]
        name, gradient = self._draw.choice(list(READ)), self._draw.random() < 0.7
        of_lazy, of_real = READ[name]
        self.text.append(f"{name}(x{place}){_said(gradient)}")
        with torch.set_grad_enabled(gradient):
            expected, got = _of_torch(of_real, real), of_lazy(lazy)
        self._compare(got, expected)
        assert got.requires_grad == expected.requires_grad
        if expected.requires_grad:
            weights = _numbers(self._draw, tuple(expected.shape)) - 1.0
            self._sums.append(((got.double() * weights).sum(), (expected * weights).sum()))

    def _differentiate(self) -> None:
        """In one backward, or in two."""
        cut = self._draw.choice([0, 0, len(self._sums) // 2])
        for sums in (self._sums[:cut], self._sums[cut:]):
            if not sums:
                continue
            got, expected = (torch.stack(each).sum() for each in zip(*sums, strict=True))
            expected_gradients = _of_torch(lambda x: _gradients(x, self._of_real), expected)
            for a, b in zip(_gradients(got, self._of_lazy), expected_gradients, strict=True):
                self._compare(a, b)

    def _compare(self, got: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(got.double(), expected.double(), **_TOLERANCES[self._dtype])


def _said(gradient: bool) -> str:
    return "" if gradient else " without gradients"


def _gradients(value: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    inputs = list(tensors.values())
    return torch.autograd.grad(value, inputs, retain_graph=True, materialize_grads=True)


def _of_torch(function: Callable[..., Any], x: Tensor) -> Any:
    try:
        return function(x)
    except RuntimeError as error:
        raise _NotInTorch from error


@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("part", range(4))
def test_programs(part: int) -> None:
    ran = refused = 0
    for seed in range(part * DEEP, (part + 1) * DEEP):
        program = _Program(seed)
        try:
            program.run()
        except _NotInTorch:
            continue
        except Exception as error:
            if not any(text in str(error) for text in _REFUSED):
                raise AssertionError(f"seed {seed}: {program.text}") from error
            refused += 1
        ran += 1
    assert ran > 0.8 * DEEP
    assert refused < 0.2 * DEEP
