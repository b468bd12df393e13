"""Divergences and distillation at k ids per row: impossible and distant ids, tails, teacher_lse."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    vocab_parallel_kl_div,
    vocab_parallel_topk_distill,
    vocab_parallel_topk_kl_div,
)
from tests.engine import truths

KINDS = ("forward", "reverse", "jsd", "skewed_forward", "skewed_reverse")


def test_topk_on_infinite_logits() -> None:
    student = torch.randn(3, 12)
    student[0, :11] = -torch.inf
    ids = torch.tensor([[11, 0], [3, 4], [5, 5]])
    for normalize in ("vocab", "topk"):
        leaf = student.clone().requires_grad_()
        got, _, entropy = vocab_parallel_topk_distill(
            leaf, torch.zeros(3, 2), ids, normalize=normalize, entropy=True
        )
        assert got[0].tolist() == [0.0, -torch.inf]
        (torch.where(got.isfinite(), got, 0.0).sum() + entropy.sum()).backward()
        assert leaf.grad.isfinite().all()


def _teacher(lead: tuple[int, ...], vocab: int, k: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, log-probabilities of the k ids, ids)."""
    logits = torch.randn(*lead, vocab)
    ids = torch.rand(*lead, vocab).argsort(-1)[..., :k]  # each at most once per row
    return logits, logits.log_softmax(-1).gather(-1, ids), ids


def test_a_bin_is_a_lower_bound_and_certain_rows_stay_finite():
    student = torch.randn(50, 30, requires_grad=True)
    logits, teacher, ids = _teacher((50,), 30)
    binned = vocab_parallel_topk_kl_div(student, teacher, ids)
    assert (binned <= vocab_parallel_kl_div(student, logits) + 1e-6).all()
    assert (binned >= -1e-6).all()
    # All of the teacher's probability, and the student's, on one of the ids; and none.
    certain = torch.full((2, 30), -torch.inf)
    certain[0, 3], certain[1, 5] = 0.0, 0.0
    ids = torch.tensor([[3, 4]]).expand(2, 2)
    certain.requires_grad_()
    for kind in KINDS[:3]:
        value = vocab_parallel_topk_kl_div(
            certain, torch.tensor([[0.0, -torch.inf]]).expand(2, 2), ids, kind=kind
        )
        (grad,) = torch.autograd.grad(value.sum(), certain)
        assert value.isfinite().all()
        assert grad.isfinite().all()
        assert abs(value[0]) < 1e-6 < value[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_generalized_divergence_keeps_its_digits_where_both_sides_are_nearly_equal(kind: str):
    """It is never negative, which a log(a / b) - a + b is where it is less than their rounding."""
    logits, teacher, ids = _teacher((200,), 16, k=16)
    student = (logits + 1e-3 * torch.randn(logits.shape)).requires_grad_()
    found = vocab_parallel_topk_kl_div(student, teacher, ids, kind=kind, generalized=True)
    own = student.detach().double().log_softmax(-1).gather(-1, ids)
    truth = truths.divergence(own, teacher.double(), kind, 0.5, generalized=True)
    assert (found >= 0).all()
    assert ((found - truth).abs() / truth.median()).max() < 1e-2
    certain = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]], requires_grad=True)
    values = vocab_parallel_topk_kl_div(
        certain,
        torch.tensor([[0.0, -torch.inf]]).expand(2, 2),
        torch.tensor([[0, 1]]).expand(2, 2),
        kind=kind,
        generalized=True,
    )
    assert torch.autograd.grad(values.sum(), certain)[0].isfinite().all()
    assert values[0] == 0.0 < values[1]


@pytest.mark.parametrize("generalized", [False, True], ids=["kl", "generalized"])
@pytest.mark.parametrize("kind", ["reverse", "jsd", "skewed_reverse"])
def test_ids_that_are_masked_with_the_least_number_get_no_gradient(kind, generalized):
    """Not NaN either: what a probability of 0 multiplies may overflow in the backward."""
    least = torch.finfo(torch.float32).min
    logits, upstream = torch.randn(3, 9), torch.tensor([2.0, -1e4, 0.5])
    logits[0, [2, 3]] = logits[1, :8] = least
    ids = torch.tensor([[1, 2, 3], [8, 0, 4], [5, 6, 7]])
    teacher = torch.randn(3, 9).log_softmax(-1).gather(-1, ids)
    for tail in ("ignore",) if generalized else ("ignore", "bin", "renormalize"):
        found = []
        for masked in (least, -1e9):
            leaf = logits.clamp(min=masked).requires_grad_()
            options = {"kind": kind, "tail": tail, "generalized": generalized}
            value = vocab_parallel_topk_kl_div(leaf, teacher, ids, **options)
            found.append([value.detach(), *torch.autograd.grad((value * upstream).sum(), leaf)])
        for least_number, large_number in zip(*found, strict=True):
            assert large_number.isfinite().all()
            torch.testing.assert_close(least_number, large_number)


def _in_logarithms(logp, logq, kind: str, generalized: bool):
    """Each id's share at beta = 0.5, also where a probability is 0 whose logarithm is finite."""

    def relative(log_a, log_b):
        kl = log_a.exp() * (log_a - log_b)
        return kl + log_b.exp() - log_a.exp() if generalized else kl

    mixture = torch.logaddexp(logp, logq) - math.log(2.0)
    return {
        "forward": lambda: relative(logq, logp),
        "reverse": lambda: relative(logp, logq),
        "jsd": lambda: 0.5 * (relative(logq, mixture) + relative(logp, mixture)),
        "skewed_forward": lambda: relative(logq, mixture),
        "skewed_reverse": lambda: relative(logp, mixture),
    }[kind]()


@pytest.mark.parametrize("generalized", [False, True], ids=["kl", "generalized"])
@pytest.mark.parametrize("kind", KINDS)
def test_finite_logits_at_a_few_ids_are_not_bounded_either(kind, generalized):
    """As of columns that a caller masks by a large negative number; an ignored id is none."""
    logits, teacher = torch.randn(2, 4, 9, dtype=torch.float64)
    upstream = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=torch.float64)
    logits[0, 1], logits[1, :8], logits[2] = -1e9, -12_000.0, -1e7  # equal ones in the last
    teacher = teacher.log_softmax(-1)
    teacher[1, 2], teacher[2, 3] = -2e5, -1e9
    ids = torch.tensor([[1, 0, 5], [2, 0, -100], [3, 4, 1], [6, -100, -100]])
    for tail in ("ignore",) if generalized else ("ignore", "bin", "renormalize"):
        found_of, exact_of = (logits.clone().requires_grad_() for _ in range(2))
        at = teacher.gather(-1, ids.clamp(min=0))
        found = vocab_parallel_topk_kl_div(
            found_of, at, ids, kind=kind, tail=tail, generalized=generalized
        )
        exact = []
        for row, known in enumerate(ids >= 0):
            logp, logq = exact_of[row].log_softmax(-1)[ids[row, known]], at[row, known]
            if tail == "renormalize":
                logp, logq = logp.log_softmax(-1), logq.log_softmax(-1)
            if tail == "bin":
                logp, logq = (
                    torch.cat([x, (1.0 - x.exp().sum()).clamp(min=1e-6).log()[None]])
                    for x in (logp, logq)
                )
            exact.append(_in_logarithms(logp, logq, kind, generalized).sum())
        exact = torch.stack(exact)
        got, want = (
            torch.autograd.grad((x * upstream).sum(), leaf)[0]
            for x, leaf in ((found, found_of), (exact, exact_of))
        )
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-7)


def test_an_ignored_id_of_a_top_k_may_be_a_true_one() -> None:
    student, log_q = torch.randn(2, 18), torch.tensor([[-1.0, -2.0, -3.0]] * 2)
    ids = torch.tensor([[3, 0, 0], [5, 6, 0]])
    got = vocab_parallel_topk_kl_div(student, log_q, ids, ignore_index=0)
    assert torch.equal(got, vocab_parallel_topk_kl_div(student, log_q, ids.where(ids != 0, -100)))


def test_a_teacher_s_log_sum_exp_may_be_rounded() -> None:
    """Nearly all of the probability is in its top k: rounded, the sum says more than all."""
    teacher = 2.0 * torch.randn(8, 12) + 301.0
    teacher[:, 0] += 40.0
    lse, (values, ids) = teacher.logsumexp(-1), teacher.topk(3)
    student = torch.randn(8, 12)
    exact, rounded = (
        vocab_parallel_topk_kl_div(student, values, ids, teacher_lse=x)
        for x in (lse, lse.bfloat16())
    )
    assert exact.isfinite().all()
    assert rounded.isfinite().all()


def test_a_teacher_at_ids_gets_no_gradient_nor_does_its_lse() -> None:
    student, teacher = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True).unbind()
    ids = teacher.detach().topk(3).indices
    values, lse = teacher.gather(-1, ids), teacher.logsumexp(-1)
    found = vocab_parallel_topk_kl_div(student, values, ids, teacher_lse=lse, tail="ignore")
    log_q = (values - lse.unsqueeze(-1)).detach()
    exact = (log_q.exp() * (log_q - student.log_softmax(-1).gather(-1, ids))).sum(-1)
    torch.testing.assert_close(found, exact)
    upstream, grads = torch.tensor([1.0, -2.0, 0.5]).double(), []
    for value in (found, exact):
        both = (value * upstream).sum()
        grads.append(torch.autograd.grad(both, (student, teacher), allow_unused=True))
    assert grads[0][1] is grads[1][1] is None
    torch.testing.assert_close(grads[0][0], grads[1][0])
