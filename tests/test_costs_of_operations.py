"""What every operation of the table `ops.py` costs: the tensors that it makes, and its products.

A row of that table is enough: each operation is tried from each source, with its defaults and with
every other value of its own options, of which memory by night.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mcore_logprobs.kernels import budgets
from tests.engine import run
from tests.engine.cases import Case, Problem, allowed, axes_of, kept_rows
from tests.engine.operation import VOCAB
from tests.helpers.flops import Flops
from tests.helpers.memory import TensorsMade
from tests.ops import OPERATIONS

ROWS, CHUNK, WIDE, HIDDEN = 64, 4, 4096, 4
COPY = CHUNK * WIDE * 4  # bytes of a chunk's logits in float32; all logits are 16 of them
CALLS = [
    (name, source)
    for name, op in OPERATIONS.items()
    for source in op.sources
    if not op.name.startswith("all_to_all")
]


def cases_of(name: str, source: str, **fixed: Any) -> list[Case]:
    """The defaults, and each other value of each of the operation's own options."""
    op = OPERATIONS[name]
    axes = axes_of(op, source)
    setting = {axis: values[0] for axis, values in axes.items()}
    setting |= {axis: x for axis, x in fixed.items() if axis != "chunk_size" or axis in axes}
    own = {axis: axes[axis] for axis in (op.axes | op.options).keys() & axes.keys() - fixed.keys()}
    others = [setting | {axis: x} for axis, values in own.items() for x in values[1:]]
    return [Case(name, one) for one in (setting, *others) if allowed(op, one)]


class Memory(NamedTuple):
    """Of a forward or a backward, in bytes; a chunk's logits in float32 are `COPY`.

    Attributes:
        large: shape and dtype of the tensors of more than two copies.
        peak: what lived at once.
        left: what lived when it was over.
        results: its results, or the gradients.
    """

    large: set[tuple[tuple[int, ...], torch.dtype]]
    peak: int
    left: int
    results: int


@contextmanager
def cut_small(by: str) -> Iterator[None]:
    """By the caller's chunk_size, or by what the budgets allow a tile, a block and a copy."""
    sizes = dict.fromkeys(("chunk_bytes", "held_bytes", "max_held_bytes", "copy_bytes"), COPY)
    small = replace(budgets.of("cpu"), tile_rows=ROWS, **sizes)
    with budgets.use(small) if by == "budgets" else nullcontext():
        yield


Counter = TypeVar("Counter", TensorsMade, Flops)


def counted(case: Case, counter: type[Counter]) -> Iterator[tuple[Counter, int]]:
    """Of the forward and of the backward on this rank: what was counted, bytes of the results."""
    mine = run.place(case, Problem(case))
    with counter() as forward:
        outputs = case.operation(case.source, mine.head, mine.side, mine.keywords)
    yield forward, sum(x.nbytes for x in outputs.values())
    roots = run.upstreams(case, outputs, case.setting["tp"])
    with counter() as backward:
        if roots:
            torch.autograd.backward(*map(list, zip(*roots, strict=True)))
    yield backward, sum(x.grad.nbytes for x in mine.leaves.values() if x.grad is not None)


def memory_of(case: Case, by: str) -> list[Memory]:
    """Of the forward and of the backward."""
    with cut_small(by):
        return [
            Memory(
                {(x.shape, x.dtype) for x in made.larger_than(2 * COPY)}, made.peak, made.live, n
            )
            for made, n in counted(case, TensorsMade)
        ]


# ---- memory -------------------------------------------------------------------------------------

# Float32 copies of a chunk that live at once, of 16 that all logits would be. A softcap's or a
# bias's are made besides a head's own.
COPIES = {"logits": 5, "hidden": 4, "hidden, changed": 7}
# The same under a caller's chunk_size, where no budget counts copies. Divergences have two sides
# and their mixture; a sampler's random numbers are int64, and mixed in several steps.
MORE_COPIES = {"kl_div": 7, "soft_cross_entropy": 6, "sample": 10}


@pytest.mark.parametrize(
    ("name", "source", "by"),
    [
        (*call, by)
        for call in CALLS
        for by in ("chunk_size", "budgets")
        if by not in OPERATIONS[call[0]].without
    ],
)
def test_memory_is_a_few_chunks(name: str, source: str, by: str) -> None:
    more = {"softcap": 8.0, "bias": True} if source == "hidden" else {"logit_bias": "pairs"}
    for changed in ({}, more):
        case = wide_cases_of(name, source, by, 1, **changed)[0]
        check_memory(case, memory_of(case, by))


@pytest.mark.night
@pytest.mark.parametrize(("name", "source"), CALLS)
def test_memory_is_a_few_chunks_with_every_option(name: str, source: str) -> None:
    for case in wide_cases_of(name, source, "budgets", 1):
        check_memory(case, memory_of(case, "budgets"))


@pytest.mark.parametrize(("name", "source"), CALLS)
def test_memory_of_two_ranks_is_too(ranks: Any, name: str, source: str) -> None:
    case = wide_cases_of(name, source, "budgets", tp=2)[0]
    for found in ranks(2).run(memory_of, case, "budgets"):
        check_memory(case, found)


def wide_cases_of(name: str, source: str, by: str, tp: int, **more: Any) -> list[Case]:
    fixed = {"tp": tp, "lead": f"[{ROWS}]", "vocab": tp * WIDE, "dtype": "bfloat16"}
    fixed |= {"chunk_size": CHUNK} if by == "chunk_size" else {}
    fixed |= {"h": HIDDEN} if source == "hidden" else {"values": "flat to peaked"}
    return cases_of(name, source, **fixed, **more)


def check_memory(case: Case, found: list[Memory]) -> None:
    forward, backward = found
    changed = case.source == "hidden" and bool(case.setting["softcap"])
    allowed_copies = COPIES["hidden, changed" if changed else case.source]
    if case.setting.get("chunk_size") is not None:
        allowed_copies = MORE_COPIES.get(case.op, allowed_copies)
    copies = allowed_copies * COPY
    bf16, float32, of_hidden = torch.bfloat16, torch.float32, case.source == "hidden"
    operand = {((WIDE, HIDDEN), float32)} if of_hidden else set()
    gradient = operand | {((WIDE, HIDDEN) if of_hidden else (ROWS, WIDE), bf16)}
    result = {((ROWS, WIDE), float32)} if case.op == "log_softmax" else set()
    # Of the head in float32: operands, and gradients before they are rounded.
    head = 2 * 4 * HIDDEN * (WIDE + ROWS) if of_hidden else 0
    held = head if case.op == "linear_policy_loss" else 0  # its gradients
    assert forward.large <= operand | result | (gradient if held else set()), case
    assert backward.large <= gradient, case
    assert forward.peak <= forward.results + copies + head, case
    assert backward.peak <= backward.results + copies + head, case
    assert forward.left <= forward.results + COPY + held, case


# ---- products -----------------------------------------------------------------------------------

COUNT, WIDTH = 40, 16
HOW: dict[str, dict[str, Any]] = {
    "all rows": {},
    "a tile's rows": {"chunk_size": 7},
    "some rows": {"rows": "some"},
    "rows twice": {"rows": "repeated"},
    "compact": {"compact": True, "ignored": True},
    "nothing counts": {"compact": True, "ignored": "all"},
    "everything kept": {"saved_bytes": 1 << 20},
    "a frozen weight": {"frozen": "weight"},
    "frozen hidden states": {"frozen": "hidden"},
}


def products_of(case: Case) -> tuple[float, float]:
    """Of the forward and the backward, in products of all hidden states and the weight.

    The logits, and in the backward the logits again, and one product for each of two gradients.
    """
    s = case.setting.get
    single_logits = case.op == "gather" and not s("log_softmax")
    single_logits |= s("normalize") == "topk" and not s("entropy")
    if single_logits or s("replay"):
        return 0.0, 0.0
    if case.op in ("topk", "sample"):
        return 1.0, 0.0
    gradients = 2.0 if s("frozen") == "nothing" else 1.0
    if case.op == "linear_policy_loss":
        return 1.0 + gradients, 0.0
    mixture_or_distance = case.op == "kl_div" and s("kind") not in ("forward", "reverse")
    # A teacher's hidden states have 5 columns, and its LoRA a rank of 2.
    own = {"hidden": 5 * VOCAB, "adapted": 5 * VOCAB + 2 * (5 + VOCAB)}.get(s("teacher"), 0)
    teacher = own / (WIDTH * VOCAB)
    passes = 2.0 if mixture_or_distance and not s("saved_bytes") else 1.0
    return passes * (1.0 + teacher), gradients + (0.0 if s("saved_bytes") else 1.0 + teacher)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", [name for name, source in CALLS if source == "hidden"])
def test_products_are_of_the_rows_that_count(name: str, how: str) -> None:
    check_products(cases_of(name, "hidden", lead=f"[{COUNT}]", h=WIDTH, **HOW[how]))


@pytest.mark.parametrize("saved_bytes", [0, 1 << 20])
def test_a_second_pass_makes_the_products_of_both_sides_again(saved_bytes: int) -> None:
    own = {"kind": "jsd", "teacher": "hidden", "saved_bytes": saved_bytes}
    check_products(cases_of("kl_div", "hidden", lead=f"[{COUNT}]", h=WIDTH, **own))


def check_products(cases: list[Case]) -> None:
    assert cases
    for case in cases:
        if case.setting.get("invariant_segments"):
            continue  # whose products are of fixed shapes
        problem = Problem(case)
        keep = kept_rows(problem.side) if case.setting["compact"] else None
        rows = int(keep.sum()) if keep is not None else problem.lead[0]
        one = 2 * rows * WIDTH * problem.columns
        expected = [round(one * products) for products in products_of(case)]
        assert [flops.total for flops, _ in counted(case, Flops)] == expected, case


@pytest.mark.parametrize("name", [name for name, source in CALLS if source == "hidden"])
def test_a_checkpoint_computes_the_forward_once_more(name: str) -> None:
    """However many tiles it has: what the forward differentiates itself is none of its concern."""
    (case, *_) = cases_of(name, "hidden", lead=f"[{COUNT}]", h=WIDTH, chunk_size=7)
    (forward, _), (backward, _) = counted(case, Flops)
    mine = run.place(case, Problem(case))

    def call(*head: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(case.operation("hidden", head, mine.side, mine.keywords).values())

    with Flops() as both:
        results = checkpoint(call, *mine.head, use_reentrant=False)
        learning = [x for x in results if x.requires_grad]
        if learning:
            torch.autograd.backward(learning, [torch.ones_like(x) for x in learning])
    again = forward.total if learning else 0
    assert both.total == forward.total + again + backward.total
