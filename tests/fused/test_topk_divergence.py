"""linear_ and vocab_parallel_topk_kl_div against plain torch in float64."""

from __future__ import annotations

from typing import Any

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    linear_topk_kl_div,
    vocab_parallel_kl_div,
    vocab_parallel_topk_kl_div,
)
from tests.fused.common import Problem, make_problem
from tests.fused.test_linear_ops import OpCase
from tests.logits.common import on_ranks, world_group, world_rank, world_size

KINDS = ("forward", "reverse", "jsd")
BETA = 0.3


def plain(logp: Tensor, logq: Tensor, kind: str, tail: str) -> Tensor:
    """The formulas of the docstring, `[..., k]` each."""
    p, q = logp.exp(), logq.exp()
    if tail == "renormalize":
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    elif tail == "bin":
        p = torch.cat([p, 1.0 - p.sum(-1, keepdim=True)], -1)
        q = torch.cat([q, 1.0 - q.sum(-1, keepdim=True)], -1)
    if kind == "forward":
        return (q * (q.log() - p.log())).sum(-1)
    if kind == "reverse":
        return (p * (p.log() - q.log())).sum(-1)
    m = BETA * q + (1 - BETA) * p
    from_teacher = (q * (q.log() - m.log())).sum(-1)
    return BETA * from_teacher + (1 - BETA) * (p * (p.log() - m.log())).sum(-1)


class DivergenceCase(OpCase):
    """args: teacher's log-probabilities, ids."""

    def call(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, **parallel: Any) -> Any:
        return linear_topk_kl_div(
            hidden, weight, *self.args, bias=bias, beta=BETA, **parallel, **self.options
        )

    def expected(self, z: Tensor) -> tuple[Tensor, ...]:
        teacher, ids = self.args
        keep = ids[..., 0] >= 0
        ids = torch.where(ids >= 0, ids, torch.arange(ids.shape[-1]))
        logp = z.log_softmax(-1).gather(-1, ids)
        value = plain(logp, teacher.to(z.dtype), self.options["kind"], self.options["tail"])
        return (torch.where(keep, value, 0.0),)


def _teacher(lead: tuple[int, ...], vocab: int, k: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, log-probabilities of the k ids, ids)."""
    logits = torch.randn(*lead, vocab)
    ids = torch.rand(*lead, vocab).argsort(-1)[..., :k]  # each at most once a row
    return logits, logits.log_softmax(-1).gather(-1, ids), ids


@pytest.mark.parametrize("tail", ["renormalize", "bin", "ignore"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [(1, False), (2, True), (3, False)], ids=str)
def test_from_hidden_states(layout, dtype, kind, tail):
    _, teacher, ids = _teacher((6, 2), 24)
    ids[2, 1] = -100
    options = {"kind": kind, "tail": tail, "softcap": 5.0, "temperature": 1.3, "compact": True}
    case = DivergenceCase(make_problem(dtype=dtype, bias=True), options)
    case.args = (teacher, ids)
    case.run(layout).check()


@pytest.mark.parametrize("kind", KINDS)
def test_of_every_id_it_is_the_whole_divergence(kind):
    student = torch.randn(7, 12, dtype=torch.float64, requires_grad=True)
    logits, teacher, ids = _teacher((7,), 12, k=12)
    whole = vocab_parallel_kl_div(student, logits.double(), kind=kind, beta=BETA)
    upstream = torch.randn(7, dtype=torch.float64)
    (expected,) = torch.autograd.grad(whole, student, upstream)
    for tail in ("renormalize", "bin", "ignore"):
        found = vocab_parallel_topk_kl_div(student, teacher, ids, kind=kind, beta=BETA, tail=tail)
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
        (grad,) = torch.autograd.grad(found, student, upstream)
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)
        same = vocab_parallel_topk_kl_div(
            student, teacher, ids, kind=kind, beta=BETA, tail=tail, ignore_index=None
        )
        assert torch.equal(same, found)


@pytest.mark.parametrize("tail", ["renormalize", "bin", "ignore"])
@pytest.mark.parametrize("k", [1, 3])
def test_of_few_ids_of_one_row(k, tail):
    student = torch.randn(12, dtype=torch.float64, requires_grad=True)
    _, teacher, ids = _teacher((), 12, k)
    for kind in KINDS:
        found = vocab_parallel_topk_kl_div(student, teacher, ids, kind=kind, beta=BETA, tail=tail)
        expected = plain(student.log_softmax(-1)[ids], teacher.double(), kind, tail)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        grads = [torch.autograd.grad(x, student, retain_graph=True)[0] for x in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)


def _by_default(problem: Problem, teacher: Tensor, ids: Tensor) -> None:
    weight = problem.weight.chunk(world_size())[world_rank()]
    for kind in ({}, {"kind": "jsd"}):
        given: dict[str, Any] = {"tp_group": world_group(), **kind}
        found = linear_topk_kl_div(problem.hidden, weight, teacher, ids, **given)
        logits = problem.hidden @ weight.t()
        expected = vocab_parallel_topk_kl_div(logits, teacher, ids, **given)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_defaults_are_those_of_the_operation_on_logits(ranks, world):
    _, teacher, ids = _teacher((8,), 24)
    ids[2, 1] = -100
    on_ranks(ranks, world, _by_default, make_problem((8,)), teacher, ids)


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
    for kind in KINDS:
        value = vocab_parallel_topk_kl_div(
            certain, torch.tensor([[0.0, -torch.inf]]).expand(2, 2), ids, kind=kind
        )
        (grad,) = torch.autograd.grad(value.sum(), certain)
        assert value.isfinite().all()
        assert grad.isfinite().all()
        assert abs(value[0]) < 1e-6 < value[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "both"}, "kind: expected one of"),
        ({"tail": "drop"}, "tail: expected one of"),
        ({"ids": torch.zeros(6, 3).long()}, r"ids: expected shape \(6, 4\)"),
        ({"teacher_logprobs": torch.zeros(5, 4)}, r"teacher_logprobs: expected shape \(6, 4\)"),
        ({"teacher_logprobs": torch.zeros(6, 0)}, "k >= 1"),
        ({"beta": 1.0}, "beta"),
    ],
    ids=range(6),
)
def test_mistakes(changes, message):
    problem = make_problem((6,))
    args = {"teacher_logprobs": torch.zeros(6, 4), "ids": torch.zeros(6, 4).long()} | changes
    with pytest.raises(ValueError, match=message):
        vocab_parallel_topk_kl_div(problem.hidden @ problem.weight.t(), **args)
    with pytest.raises(ValueError, match=message):
        linear_topk_kl_div(problem.hidden, problem.weight, **args)
