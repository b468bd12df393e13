"""Divergences over the whole vocabulary: infinite and close distributions, arguments, compile."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    linear_kl_div,
    vocab_parallel_kl_div,
    vocab_parallel_soft_cross_entropy,
)
from mcore_logprobs.kernels import budgets, pairs
from mcore_logprobs.kernels.chunk import Chunk
from mcore_logprobs.ops.divergence import kl_div
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.head import head_logits
from mcore_logprobs.sources.head_operands import HeadOperands
from tests.helpers.flops import Flops
from tests.helpers.memory import TensorsMade
from tests.helpers.oracles import assert_no_worse
from tests.helpers.shards import on_ranks, shard, world_group, world_rank, world_size

KINDS = ("forward", "reverse", "jsd", "cross_entropy")


def reference(
    student: Tensor,
    teacher: Tensor,
    upstream: Tensor,
    kind: str,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """(value, gradient of the student's logits) of rows with the same support on either side."""
    leaf = student.double() if dtype == torch.float64 else student.clone()
    leaf.requires_grad_()
    logp, logq = leaf.to(dtype).log_softmax(-1), teacher.to(dtype).log_softmax(-1)
    p, q = logp.exp(), logq.exp()
    logp, logq = logp.masked_fill(p == 0, 0.0), logq.masked_fill(q == 0, 0.0)
    if kind == "forward":
        value = (q * (logq - logp)).sum(-1)
    elif kind == "reverse":
        value = (p * (logp - logq)).sum(-1)
    elif kind == "cross_entropy":
        value = -(q * logp).sum(-1)
    else:
        log_mixture = (0.5 * q + 0.5 * p + (p + q == 0)).log()
        value = (0.5 * q * (logq - log_mixture)).sum(-1)
        value = value + (0.5 * p * (logp - log_mixture)).sum(-1)
    value.backward(upstream.to(dtype))
    return value.detach(), leaf.grad


def sample(shape: tuple[int, ...], vocab: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    student = torch.randn(*shape, vocab, generator=generator) * 3
    teacher = student + torch.randn(*shape, vocab, generator=generator) * 2
    upstream = torch.randn(*shape, generator=generator)
    return student.to(dtype), teacher.to(dtype), upstream


def divergence(student: Tensor, teacher: Tensor, kind: str, **options: object) -> Tensor:
    if kind == "cross_entropy":
        return vocab_parallel_soft_cross_entropy(student, teacher, **options)
    return vocab_parallel_kl_div(student, teacher, kind=kind, **options)


def check(value: Tensor, grad: Tensor, *arguments: Any) -> None:
    """Against float64, no worse than plain float32 torch; `arguments` are `reference`'s."""
    exact, exact_grad = reference(*arguments)
    plain, plain_grad = reference(*arguments, dtype=torch.float32)
    assert_no_worse(value, plain, exact, name="value", ulps=8)
    assert_no_worse(grad, plain_grad, exact_grad, name="gradient", ulps=4)


def of_shards(
    student: Tensor, teacher: Tensor, upstream: Tensor, kind: str, **options: Any
) -> tuple[Tensor, Tensor]:
    """(value, gradient) of this rank's columns."""
    leaf, mine = shard(student)
    other = shard(teacher)[1].detach()
    value = divergence(mine, other, kind, tp_group=world_group(), **options)
    value.backward(upstream)
    return value.detach(), leaf.grad


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_infinite_logits_stay_finite(ranks, world: int, kind: str) -> None:
    student, teacher, upstream = sample((6,), 12, torch.float32)
    both = slice(6, 12)  # a whole shard of the second rank
    student[0, both] = teacher[0, both] = -torch.inf
    student[1, :11] = -torch.inf
    teacher[1, :11] = -torch.inf
    student[2, 3] = -torch.inf
    teacher[3, 4] = -torch.inf
    student[4] = -torch.inf
    results = on_ranks(ranks, world, of_shards, student, teacher, upstream, kind)
    value, grad = results[0][0], torch.cat([grad for _, grad in results], -1)
    assert value.isfinite().all()
    assert grad.isfinite().all()
    # Rows in which the two have the same support have an exact answer.
    exact = [0, 1, 5]
    check(value[exact], grad[exact], student[exact], teacher[exact], upstream[exact], kind)
    assert value[4] == 0
    assert (grad[4] == 0).all()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", [*KINDS, "skewed_reverse"])
def test_a_shard_that_one_side_lacks_costs_what_its_columns_cost(
    ranks, world: int, kind: str
) -> None:
    """1e4 nats for each, once, but for the few by which a shard's maximum is below the row's."""
    student, teacher, upstream = sample((3,), 12, torch.float32)
    student[0, :7] = teacher[1, :7] = teacher[2, 6:] = -torch.inf
    whole = of_shards(student, teacher, upstream, kind)
    results = on_ranks(ranks, world, of_shards, student, teacher, upstream, kind)
    value, grad = results[0][0], torch.cat([grad for _, grad in results], -1)
    torch.testing.assert_close(value, whole[0], rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(grad, whole[1], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_are_masked_with_numbers_cost_nothing(ranks, world: int, kind: str) -> None:
    """As probabilities of 0 that weigh, whole shards of them too; as padding is often masked."""
    least = torch.finfo(torch.float32).min
    masks = itertools.product((least, -1e9), (None, least, -1e9, -torch.inf))
    student, teacher, upstream = sample((16,), 12, torch.float32)
    by_teacher = kind in ("forward", "cross_entropy")
    weighs, other = (teacher, student) if by_teacher else (student, teacher)
    for row, (own, others) in enumerate(masks):
        for masked, columns in ((row, slice(6, None)), (row + 8, slice(4))):
            weighs[masked, columns] = own
            if others is not None:
                other[masked, columns] = others
    results = on_ranks(ranks, world, of_shards, student, teacher, upstream, kind)
    value, grad = results[0][0], torch.cat([grad for _, grad in results], -1)
    as_masked = [x.clamp(min=-1e9) for x in (student, teacher)]
    check(value, grad, *as_masked, upstream, kind)


def test_equal_distributions_differ_by_exactly_nothing() -> None:
    logits = torch.randn(5, 200) * 10
    for kind in ("forward", "reverse", "jsd"):
        student = logits.clone().requires_grad_()
        value = vocab_parallel_kl_div(student, logits + 0.0, kind=kind)
        value.sum().backward()
        assert (value == 0).all()
        assert (student.grad == 0).all()


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd", "skewed_forward", "skewed_reverse"])
@pytest.mark.parametrize("apart", [1e-4, 1e-2, 1.0])
def test_close_distributions_keep_their_digits(kind: str, apart: float) -> None:
    """KL around 5e-9, 5e-5 and 0.5, relative to itself, over a real vocabulary."""
    generator = torch.Generator().manual_seed(5)
    student = torch.randn(12, 32000, generator=generator) * 2
    student[3:6, 31000:] = -torch.inf
    teacher = student + torch.randn(12, 32000, generator=generator) * apart
    teacher[7] = torch.nan
    want, want_grad = apart_in_float64(student, teacher, kind)
    leaf = student.clone().requires_grad_()
    got = vocab_parallel_kl_div(leaf, teacher, kind=kind, beta=0.3)
    got[torch.arange(12) != 7].sum().backward()
    assert got[7].isnan()
    clean = want.isfinite()
    assert clean.sum() == 11
    torch.testing.assert_close(got[clean].double(), want[clean], rtol=1e-3, atol=0.0)
    torch.testing.assert_close(leaf.grad[clean].double(), want_grad[clean], rtol=2e-2, atol=1e-8)


def apart_in_float64(student: Tensor, teacher: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """`reference`, and the skewed kinds with a beta of 0.3; -inf only where both have it."""
    leaf = student.double().requires_grad_()
    logp, logq = leaf.log_softmax(-1), teacher.double().log_softmax(-1)
    p, q = logp.exp(), logq.exp()
    logp, logq = logp.masked_fill(p == 0, 0.0), logq.masked_fill(q == 0, 0.0)
    mixture = (0.3 * q + 0.7 * p + (p + q == 0)).log()
    to_teacher, to_student = (q * (logq - mixture)).sum(-1), (p * (logp - mixture)).sum(-1)
    value = {
        "forward": (q * (logq - logp)).sum(-1),
        "reverse": (p * (logp - logq)).sum(-1),
        "jsd": 0.3 * to_teacher + 0.7 * to_student,
        "skewed_forward": to_teacher,
        "skewed_reverse": to_student,
    }[kind]
    value.nansum().backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed_reverse"])
@pytest.mark.parametrize("apart", [1e-4, 1.0])
def test_shards_of_close_distributions_keep_their_digits(
    ranks, world: int, kind: str, apart: float
) -> None:
    student = torch.randn(6, 6000) * 2
    teacher = student + torch.randn(6, 6000) * apart
    upstream = torch.rand(6) + 0.5
    # A whole shard of -inf; maxima of shards that are far apart, as is the constant of a row.
    student[1, 3000:] = teacher[1, 3000:] = -torch.inf
    student[2, :3000], teacher[2, :3000] = student[2, :3000] - 30, teacher[2, :3000] - 30
    step = 2.0**-16
    student[3], teacher[3] = ((x[3] / step).round() * step for x in (student, teacher))
    student[3] += 64.0
    want, _ = apart_in_float64(student.double() / 0.7, teacher.double() / 0.7, kind)
    options = {"temperature": 0.7, "beta": 0.3}
    for value, _ in on_ranks(ranks, world, of_shards, student, teacher, upstream, kind, **options):
        torch.testing.assert_close(value.double(), want, rtol=3e-3, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_large_logits_lose_no_digits(kind: str) -> None:
    """A row's constant says nothing; float32 has a step of 0.001 at 1e4."""
    step = 2.0**-7
    student, teacher, upstream = sample((5,), 40, torch.float32)
    student, teacher = (student / step).round() * step, (teacher / step).round() * step
    leaf = (student + 8192).requires_grad_()
    value = divergence(leaf, teacher - 8192, kind)
    value.backward(upstream)
    check(value, leaf.grad, student, teacher, upstream, kind)


@pytest.mark.parametrize("kind", ["jsd", "skewed_forward", "skewed_reverse"])
@pytest.mark.parametrize("share", [1e-5, 1e-3, 0.05])
@pytest.mark.parametrize("backend", ["torch", pytest.param("inductor", marks=pytest.mark.night)])
def test_a_small_share_of_the_mixture_keeps_its_digits(
    kind: str, share: float, backend: str
) -> None:
    """Where the other side all but lacks a column M is little more than that share of it."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (5 * torch.randn(8, 1100, generator=generator) for _ in range(2))
    upstream = torch.rand(8, generator=generator)
    for beta in (share, 1 - share):
        exact = student.double().requires_grad_()
        p, q = exact.log_softmax(-1), teacher.double().log_softmax(-1)
        mixture = torch.logaddexp(math.log(beta) + q, math.log1p(-beta) + p)
        to_teacher, to_student = ((x.exp() * (x - mixture)).sum(-1) for x in (q, p))
        jsd = beta * to_teacher + (1 - beta) * to_student
        want = {"skewed_forward": to_teacher, "skewed_reverse": to_student, "jsd": jsd}[kind]
        want.backward(upstream.double())
        leaf = student.clone().requires_grad_()
        value = vocab_parallel_kl_div(leaf, teacher, kind=kind, beta=beta, backend=backend)
        value.backward(upstream)
        torch.testing.assert_close(value.double(), want, rtol=3e-6, atol=0.0)
        assert (leaf.grad - exact.grad).abs().max() < 5e-5 * exact.grad.abs().max()


@pytest.mark.parametrize("beta", [1e-8, 1 - 1e-8, 9e-6, float("nan")])
def test_a_mixture_of_one_side_alone_is_refused(beta: float) -> None:
    logits = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"beta: expected a number in \(0, 1\), 1e-05 from either"):
        vocab_parallel_kl_div(logits, logits, kind="jsd", beta=beta)


def test_the_two_sides_may_differ_in_dtype() -> None:
    student, teacher, upstream = sample((4, 6), 20, torch.float32)
    mixed = vocab_parallel_kl_div(student.bfloat16(), teacher.double())
    want, _ = reference(student.bfloat16(), teacher, upstream, "forward")
    assert mixed.dtype == torch.float64
    assert (mixed - want).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("kind", "lies"),
    [
        pytest.param("forward", (0, 0), id="forward-none", marks=pytest.mark.night),
        pytest.param("forward", (0, 1), id="forward-teacher", marks=pytest.mark.night),
        pytest.param("jsd", (1, 0), id="jsd-student"),
    ],
)
def test_a_divergence_is_one_graph_under_a_caller_s_torch_compile(kind, lies) -> None:
    """Also where one side's leading dimensions lie transposed in memory."""
    sides = [
        torch.randn(*((5, 3) if turned else (3, 5)), 17).transpose(0, turned) for turned in lies
    ]
    upstream, found = torch.randn(3, 5), []
    for wrap in (lambda f: f, partial(torch.compile, fullgraph=True, backend="aot_eager")):
        student, teacher = sides[0].detach().requires_grad_(), sides[1]
        value = wrap(partial(vocab_parallel_kl_div, kind=kind, temperature=0.7))(student, teacher)
        (grad,) = torch.autograd.grad(value, student, upstream)
        found.append((value.detach(), grad))
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)


# ---- from hidden states -------------------------------------------------------------------------


def test_two_heads_with_another_number_of_rows_under_a_caller_s_torch_compile() -> None:
    """Rows are a symbol then, and with them how both heads are cut."""
    weight, of_teacher = (torch.randn(17, 4).requires_grad_(needed) for needed in (True, False))

    def step(hidden: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        return linear_kl_div(hidden, weight, teacher_hidden=teacher, teacher_weight=of_teacher)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="eager")
    for rows in (6, 7):
        hidden, teacher = torch.randn(2, rows, 4)
        upstream, inputs = torch.randn(rows), (hidden.requires_grad_(), weight)
        found = []
        for call in (step, compiled):
            value = call(hidden, teacher)
            found.append((value.detach(), *torch.autograd.grad(value, inputs, upstream)))
        torch.testing.assert_close(*found)


def test_the_layout_of_the_teachers_logits() -> None:
    """Given logits [b, s, V] seen as [s, b, V] are read in place, compact or not."""
    hidden, weight, other = torch.randn(6, 2, 4), torch.randn(10, 4), torch.randn(6, 2, 10)
    want, mask = linear_kl_div(hidden, weight, other), torch.rand(6, 2) < 0.7
    lying = other.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(linear_kl_div(hidden, weight, lying), want)
    flat = linear_kl_div(hidden.flatten(0, 1), weight, other.flatten(0, 1))
    assert torch.equal(flat, want.flatten())
    for logits in (other, lying):
        kept = linear_kl_div(hidden, weight, logits, mask=mask, compact=True, chunk_size=4)
        torch.testing.assert_close(kept, want * mask)


@pytest.mark.parametrize(
    ("options", "bound"),
    [({}, 4), ({"chunk_size": 2}, 5), ({"rows": [4, 0, 3, 4, 1]}, 5), ({"compact": True}, 6)],
    ids=["alike", "tiles", "rows", "compact"],
)
def test_a_teacher_s_head_is_cut_as_the_student_s(options, bound, monkeypatch) -> None:
    """And bound once more only where it was not, beside one of each side forward and backward."""
    made: list[HeadOperands] = []
    bind = HeadOperands.__init__

    def counted(head: HeadOperands, *arguments: Any) -> None:
        made.append(head)
        bind(head, *arguments)

    monkeypatch.setattr(HeadOperands, "__init__", counted)
    generator = torch.Generator().manual_seed(5)
    shapes = ((7, 3), (19, 3), (7, 4), (19, 4))
    hidden, weight, *teacher = (torch.randn(shape, generator=generator) for shape in shapes)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    mask = torch.tensor([True, False, True, True, False, True, True])
    if "rows" in options:
        options = {"rows": torch.tensor(options["rows"])}
        mask = mask[: options["rows"].numel()]
    side = {"teacher_hidden": teacher[0], "teacher_weight": teacher[1]}
    with budgets.use(replace(budgets.CPU, chunk_bytes=1, min_block=7, block_step=1)):
        value = linear_kl_div(hidden, weight, **side, mask=mask, **options)
        upstream = torch.linspace(-1.0, 2.0, value.numel())
        gradients = torch.autograd.grad(value @ upstream, leaves)
    assert len(made) == bound
    chosen = options.get("rows", torch.arange(7))
    logits = (hidden.double() @ weight.double().t())[chosen]
    of_teacher = (teacher[0].double() @ teacher[1].double().t())[chosen].log_softmax(-1)
    exact = (of_teacher.exp() * (of_teacher - logits.log_softmax(-1))).sum(-1) * mask
    torch.testing.assert_close(value, exact.float())
    torch.testing.assert_close(gradients, torch.autograd.grad(exact @ upstream.double(), leaves))


def test_a_teacher_that_is_not_one() -> None:
    hidden, weight, logits = torch.randn(4, 8), torch.randn(10, 8), torch.randn(4, 10)
    teacher = {"teacher_hidden": torch.randn(4, 6), "teacher_weight": torch.randn(10, 6)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "teacher: expected either teacher_logits or"),
        ({"teacher_logits": logits, **teacher}, "teacher: expected either teacher_logits or"),
        ({"teacher_logits": logits, "teacher_bias": torch.ones(10)}, "teacher_bias: expected None"),
        ({"teacher_logits": logits[:3]}, "teacher_logits: expected shape (4, 10)"),
        ({"teacher_hidden": hidden}, "teacher_weight: expected a torch.Tensor, got NoneType"),
        ({**teacher, "teacher_weight": torch.randn(9, 6)}, "teacher_weight: expected the student"),
        ({**teacher, "teacher_hidden": torch.randn(3, 6)}, "teacher_hidden: expected hidden's"),
        ({"teacher_logits": logits, "compact": True}, "compact=True: expected a mask"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            linear_kl_div(hidden, weight, **options)


# ---- of a few ids ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_finite_logits_are_not_bounded_however_far_apart(dtype):
    near, far = torch.tensor([[0.0, 0.0]], dtype=dtype), torch.tensor([[0.0, -300.0]], dtype=dtype)
    exact = 15000.0 - math.log(2.0)  # at a temperature of 0.01
    for kind, student, teacher in (("reverse", near, far), ("forward", far, near)):
        found = vocab_parallel_kl_div(student, teacher, kind=kind, temperature=0.01)
        assert abs(float(found) - exact) < 1e-6 * exact


@pytest.mark.parametrize("kind", ["forward", "reverse", "cross_entropy"])
def test_finite_logits_are_not_bounded_where_the_maxima_are_apart_too(kind):
    """Both sides' log-probabilities are taken then, not the difference of two raw logits."""
    near, far = torch.randn(2, 3, 37)
    far[:, 1], far[:, 5] = torch.tensor([-12_000.0, -30_000.0, -2e6]), far[:, 5] + 9.0
    student, teacher = (near, far) if kind == "reverse" else (far, near)
    logits, upstream = student.clone().requires_grad_(), torch.tensor([0.5, -1.0, 2.0])
    logp, logq = logits.double().log_softmax(-1), teacher.double().log_softmax(-1)
    if kind == "cross_entropy":
        exact = -(logq.exp() * logp).sum(-1)
        found = vocab_parallel_soft_cross_entropy(logits, teacher)
    else:
        a, b = (logq, logp) if kind == "forward" else (logp, logq)
        exact = (a.exp() * (a - b)).sum(-1)
        found = vocab_parallel_kl_div(logits, teacher, kind=kind)
    got, want = (torch.autograd.grad((x * upstream).sum(), logits) for x in (found, exact))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_plain_statistics_hold_four_copies_of_a_chunk(kind: str) -> None:
    rows, width = 16, 4096
    student, teacher = (Chunk(torch.randn(rows, width).bfloat16(), width) for _ in range(2))
    with TensorsMade() as made:
        pairs.pair_stats(student, teacher, pairs.PairSpec(kind), chunk_size=rows)
    assert made.peak < 5 * 4 * rows * width  # in float32, and masks of a byte


def test_a_teacher_s_head_beside_logits_multiplies_no_padding() -> None:
    """A rank of 10 true columns of 100."""
    rows, hidden, columns, width = 6, 8, 10, 100
    logits = torch.randn(rows, width, requires_grad=True)
    h, w = torch.randn(rows, hidden), torch.randn(width, hidden)
    w[columns:] = torch.nan
    teacher = head_logits(h, w, vocab_size=columns)
    with Flops() as flops:
        got = kl_div(given_logits(logits, vocab_size=columns), teacher)
        (gradient,) = torch.autograd.grad(got.sum(), logits)
    assert flops.total == 2 * (2 * rows * columns * hidden)
    true = logits.detach()[:, :columns].requires_grad_()
    expected = vocab_parallel_kl_div(true, h @ w[:columns].T)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradient[:, :columns], *torch.autograd.grad(expected.sum(), true))
    assert (gradient[:, columns:] == 0).all()


def split_beside_given_logits() -> float:
    """The error of a student whose sequence is split over the ranks, beside a teacher's logits."""
    count, rank, group = world_size(), world_rank(), world_group()
    hidden, weight = torch.randn(6, 2, 7), torch.randn(18, 7)
    teacher, temperature = torch.randn(6, 2, 18), torch.linspace(0.5, 2.0, 12).view(6, 2)
    with torch.no_grad():
        got = linear_kl_div(
            hidden.chunk(count)[rank],
            weight.chunk(count)[rank],
            teacher_logits=teacher.chunk(count, -1)[rank],
            temperature=temperature,
            sequence_parallel=True,
            chunk_size=2,
            tp_group=group,
        )
    log_p, log_q = (
        (z / temperature[..., None]).log_softmax(-1) for z in (hidden @ weight.t(), teacher)
    )
    return float((got - (log_q.exp() * (log_q - log_p)).sum(-1)).abs().max())


def test_a_given_teacher_beside_a_sequence_that_is_split(ranks) -> None:
    assert all(error < 1e-5 for error in ranks(2).run(split_beside_given_logits))


@pytest.mark.parametrize("kind", ["forward", "jsd"])
def test_a_divergence_is_no_part_of_its_teacher_s_graph(kind: str) -> None:
    """Which it would keep alive, with all that the teacher's model saved."""
    student, teacher = torch.randn(3, 8), torch.randn(3, 8, requires_grad=True)
    hidden, weight = torch.randn(3, 4), torch.randn(8, 4, requires_grad=True)
    assert not vocab_parallel_kl_div(student, teacher, kind=kind).requires_grad
    of_head = {"teacher_hidden": hidden, "teacher_weight": weight}
    assert not linear_kl_div(hidden, weight.detach(), **of_head, kind=kind).requires_grad


@pytest.mark.parametrize("of_head", [False, True])
def test_a_student_s_rows_that_lie_in_another_order_than_its_teacher_s(of_head: bool) -> None:
    student, hidden, weight = torch.randn(3, 2, 18), torch.randn(2, 3, 7), torch.randn(18, 7)
    exact, upstream = student.double().requires_grad_(), torch.linspace(-1.0, 2.0, 6).view(2, 3)
    student.requires_grad_()
    teacher = head_logits(hidden, weight) if of_head else given_logits(hidden @ weight.t())
    got = kl_div(given_logits(student.transpose(0, 1)), teacher)
    log_p = exact.transpose(0, 1).log_softmax(-1)
    log_q = (hidden.double() @ weight.double().t()).log_softmax(-1)
    want = (log_q.exp() * (log_q - log_p)).sum(-1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    (found,) = torch.autograd.grad(got, student, upstream)
    (wanted,) = torch.autograd.grad(want, exact, upstream.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_two_sides_copy_half_the_rows_of_one() -> None:
    rows, width = 64, 4096
    student, teacher = torch.randn(2, rows, width).bfloat16()
    of_16_rows = 16 * 4 * width
    with budgets.use(replace(budgets.CPU, copy_bytes=of_16_rows)), TensorsMade() as made:
        vocab_parallel_kl_div(student, teacher, backend="torch")
    assert made.peak < 5 * of_16_rows // 2  # as `pair_stats`, of 8 rows


def test_rows_of_a_teacher_that_lies_in_two_views_are_read_in_place() -> None:
    student, teacher = torch.randn(2, 32, 1024), torch.randn(2, 33, 1024)[:, :-1]
    with budgets.use(replace(budgets.CPU, copy_bytes=1 << 14)), TensorsMade() as made:
        got = vocab_parallel_kl_div(student, teacher, backend="torch")
    assert not made.larger_than(1 << 16)  # of 64 rows, two at a time
    log_p, log_q = (x.double().log_softmax(-1) for x in (student, teacher))
    want = (log_q.exp() * (log_q - log_p)).sum(-1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
