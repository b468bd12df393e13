"""Divergences and top-k distillation against float64, at TP 1, 2 and 3."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    vocab_parallel_kl_div,
    vocab_parallel_soft_cross_entropy,
    vocab_parallel_topk_distill,
)
from mcore_logprobs.bench.counting import CollectivesMade
from tests.helpers.distributed import grid_groups
from tests.helpers.memory import TensorsMade
from tests.helpers.oracles import assert_no_worse

KINDS = ("forward", "reverse", "jsd", "cross_entropy")


def test_against_plain_torch_in_float64() -> None:
    """KL(teacher || student) on one process, line by line."""
    # 5 rows in chunks of 2 leave a ragged chunk; 9 columns, of which the last is padding.
    student = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, 9, dtype=torch.float64)
    upstream = torch.randn(5, dtype=torch.float64)
    value = vocab_parallel_kl_div(
        student,
        teacher,
        kind="forward",
        temperature=0.7,
        teacher_temperature=1.2,
        vocab_size=8,
        chunk_size=2,
    )
    (grad,) = torch.autograd.grad(value, student, upstream)

    logp, logq = (student[:, :8] / 0.7).log_softmax(-1), (teacher[:, :8] / 1.2).log_softmax(-1)
    expected = (logq.exp() * (logq - logp)).sum(-1)
    (expected_grad,) = torch.autograd.grad(expected, student, upstream)

    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


# ---- the reference: whole logits, one process, float64 ----


def reference(
    student: Tensor,
    teacher: Tensor,
    upstream: Tensor,
    kind: str,
    *,
    beta: float = 0.5,
    temperatures: tuple[float, float] = (1.0, 1.0),
    vocab_size: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """(value, gradient of the student's logits) by autograd, computed in `dtype`."""
    leaf = student.double() if dtype == torch.float64 else student.clone()
    leaf.requires_grad_()
    s = leaf.to(dtype)[..., :vocab_size] / temperatures[0]
    t = teacher.to(dtype)[..., :vocab_size] / temperatures[1]
    logp, logq = s.log_softmax(-1), t.log_softmax(-1)
    p, q = logp.exp(), logq.exp()
    # Rows compared with this have the same support on either side.
    logp, logq = logp.masked_fill(p == 0, 0.0), logq.masked_fill(q == 0, 0.0)
    if kind == "forward":
        value = (q * (logq - logp)).sum(-1)
    elif kind == "reverse":
        value = (p * (logp - logq)).sum(-1)
    elif kind == "cross_entropy":
        value = -(q * logp).sum(-1)
    else:
        log_mixture = (beta * q + (1 - beta) * p + (p + q == 0)).log()
        value = (beta * q * (logq - log_mixture)).sum(-1)
        value = value + ((1 - beta) * p * (logp - log_mixture)).sum(-1)
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
        options.pop("beta", None)
        return vocab_parallel_soft_cross_entropy(student, teacher, **options)
    return vocab_parallel_kl_div(student, teacher, kind=kind, **options)


def check(value: Tensor | None, grad: Tensor | None, *arguments: object, **options: object) -> None:
    """Against float64, no worse than plain float32 torch; `arguments` are `reference`'s."""
    exact, exact_grad = reference(*arguments, **options)
    plain, plain_grad = reference(*arguments, dtype=torch.float32, **options)
    if value is not None:
        assert_no_worse(value, plain, exact, name="value", ulps=8)
    if grad is not None:
        assert_no_worse(grad, plain_grad, exact_grad, name="gradient", ulps=4)


def run_shard(student: Tensor, teacher: Tensor, upstream: Tensor, options: dict) -> dict:
    """One rank's share of a call, with its gradient."""
    groups = grid_groups(tp=torch.distributed.get_world_size())
    width = student.shape[-1] // groups.tp.size()
    columns = slice(groups.tp.rank() * width, (groups.tp.rank() + 1) * width)
    local = student[..., columns].clone().requires_grad_()
    before = local.detach().clone()
    other = teacher[..., columns].clone().requires_grad_()
    with CollectivesMade() as made:
        value = divergence(local, other, tp_group=groups.tp, **options)
    with CollectivesMade() as made_backward:
        value.backward(upstream)
    assert torch.equal(local.detach(), before)
    assert other.grad is None
    if groups.tp.size() > 1:
        second = ["all_reduce"] if options["kind"] == "jsd" else []
        assert made.names == ["all_gather", *second]
    assert made_backward.names == []
    return {"value": value, "grad": local.grad}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_matches_float64(ranks, world: int, kind: str) -> None:
    for dtype, shape in ((torch.float32, (3, 5)), (torch.bfloat16, (7,))):
        student, teacher, upstream = sample(shape, 66, dtype)
        options = {"kind": kind, "chunk_size": 4, "vocab_size": 61, "temperature": 0.7}
        if kind == "jsd":
            options |= {"beta": 0.3, "teacher_temperature": 1.3}
        results = ranks(world).run(run_shard, student, teacher, upstream, options)
        for result in results:
            assert result["value"].dtype == torch.float32
            assert result["grad"].dtype == dtype
            assert torch.equal(result["value"], results[0]["value"])
        whole = torch.cat([result["grad"] for result in results], -1)
        assert (whole[..., 61:] == 0).all()
        check(
            results[0]["value"],
            whole,
            student,
            teacher,
            upstream,
            kind,
            beta=0.3,
            temperatures=(0.7, options.get("teacher_temperature", 0.7)),
            vocab_size=61,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_without_true_vocabulary(ranks, kind: str) -> None:
    student, teacher, upstream = sample((4,), 30, torch.float32)
    results = ranks(3).run(run_shard, student, teacher, upstream, {"kind": kind, "vocab_size": 9})
    whole = torch.cat([result["grad"] for result in results], -1)
    check(results[2]["value"], whole, student, teacher, upstream, kind, vocab_size=9)


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
    results = ranks(world).run(run_shard, student, teacher, upstream, {"kind": kind})
    value = results[0]["value"]
    grad = torch.cat([r["grad"] for r in results], -1)
    assert value.isfinite().all()
    assert grad.isfinite().all()
    # Rows in which the two have the same support have an exact answer.
    exact = [0, 1, 5]
    check(value[exact], grad[exact], student[exact], teacher[exact], upstream[exact], kind)
    assert value[4] == 0
    assert (grad[4] == 0).all()


def test_equal_distributions_differ_by_exactly_nothing() -> None:
    logits = torch.randn(5, 200) * 10
    for kind in ("forward", "reverse", "jsd"):
        student = logits.clone().requires_grad_()
        value = vocab_parallel_kl_div(student, logits + 0.0, kind=kind)
        value.sum().backward()
        assert (value == 0).all()
        assert (student.grad == 0).all()


def test_close_distributions_keep_their_digits() -> None:
    """KL around 5e-5 of distributions with an entropy around 7."""
    student = torch.randn(8, 2000)
    teacher = student + torch.randn(8, 2000) * 1e-2
    for kind in ("forward", "reverse", "jsd"):
        want, _ = reference(student, teacher, torch.ones(8), kind)
        got = vocab_parallel_kl_div(student, teacher, kind=kind)
        assert (got - want).abs().max() < 1e-6


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


def test_masked_rows_give_nothing_whatever_they_hold() -> None:
    student, teacher, upstream = sample((2, 4), 20, torch.float32)
    mask = torch.tensor([[True, False, True, True], [False, True, True, False]])
    arguments = (student.clone(), teacher.clone(), upstream * mask, "reverse")
    student[~mask], teacher[~mask] = torch.nan, torch.inf
    leaf = student.clone().requires_grad_()
    value = vocab_parallel_kl_div(leaf, teacher, kind="reverse", mask=mask)
    value.backward(upstream)
    assert (value[~mask] == 0).all()
    assert (leaf.grad[~mask] == 0).all()
    want, _ = reference(*arguments)
    assert (value[mask] - want[mask]).abs().max() < 1e-5
    check(None, leaf.grad, *arguments)


def test_layouts_and_sizes() -> None:
    student, teacher, upstream = sample((4, 6), 20, torch.float32)
    leaf = student.transpose(0, 1).contiguous().requires_grad_()
    got = vocab_parallel_kl_div(leaf.transpose(0, 1), teacher)
    got.backward(upstream)
    check(got, leaf.grad.transpose(0, 1), student, teacher, upstream, "forward")

    sliced = vocab_parallel_kl_div(student[:, :-1], teacher[:, 1:], chunk_size=3)
    check(sliced, None, student[:, :-1], teacher[:, 1:], upstream[:, 1:], "forward")

    empty = torch.empty(0, 20, requires_grad=True)
    vocab_parallel_kl_div(empty, torch.empty(0, 20), kind="jsd").sum().backward()
    assert empty.grad.shape == (0, 20)

    # The two sides may differ in dtype.
    mixed = vocab_parallel_kl_div(student.bfloat16(), teacher.double())
    want, _ = reference(student.bfloat16(), teacher, upstream, "forward")
    assert mixed.dtype == torch.float64
    assert (mixed - want).abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_no_large_tensor_but_the_gradient(kind: str) -> None:
    student, teacher, upstream = sample((64,), 1000, torch.bfloat16)
    leaf = student.requires_grad_()
    size = leaf.numel() * 2
    with TensorsMade() as made:
        divergence(leaf, teacher, kind, chunk_size=4).backward(upstream)
    assert [tensor.nbytes for tensor in made.larger_than(size // 4)] == [size]


def test_refuses_what_it_cannot_do() -> None:
    logits = torch.randn(3, 8)
    cases = [
        ({"kind": "sideways"}, "kind: expected one of"),
        ({"kind": "jsd", "beta": 1.0}, "beta: expected a number in (0, 1), got 1.0"),
        ({"kind": "jsd", "beta": 0.0}, "beta: expected a number in (0, 1), got 0.0"),
        ({"teacher_temperature": 0.0}, "teacher_temperature: expected a finite number > 0"),
        ({"mask": torch.ones(3)}, "mask: expected a bool tensor or None, got torch.float32"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, "mask: expected shape (3,), got (2,)"),
        ({"backend": "inductor"}, "backend: expected one of ('auto', 'torch', 'triton')"),
        ({"vocab_size": 9}, "vocab_size: expected 1 to 8"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            vocab_parallel_kl_div(logits, logits, **options)
    with pytest.raises(ValueError, match=r"teacher_logits: expected shape \(3, 8\), got \(3, 7\)"):
        vocab_parallel_kl_div(logits, logits[:, :7])


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd", "cross_entropy"])
def test_rows_in_several_blocks(kind: str) -> None:
    """[b, s, V] without a position: no one stride leads from row to row."""
    student, teacher, upstream = sample((3, 5), 30, torch.float64)
    upstream = upstream[:, 1:].double()
    leaf = student.clone().requires_grad_()
    value = divergence(leaf[:, :-1], teacher[:, 1:], kind, beta=0.3)
    value.backward(upstream)
    expected, grad = reference(student[:, :-1], teacher[:, 1:], upstream, kind, beta=0.3)
    torch.testing.assert_close(value.detach(), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(leaf.grad[:, :-1], grad, rtol=1e-10, atol=1e-12)
    assert not leaf.grad[:, -1].any()


def run_dtensor(student: Tensor, teacher: Tensor, mask: Tensor, upstream: Tensor) -> dict:
    """On a mesh (dp, tp): rows over dp, columns over tp; the groups come from the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    placements = [Shard(0), Shard(student.dim() - 1)]
    leaf = distribute_tensor(student, mesh, placements).detach().requires_grad_()
    value = vocab_parallel_kl_div(
        leaf,
        distribute_tensor(teacher, mesh, placements),
        mask=distribute_tensor(mask, mesh, [Shard(0), Replicate()]),
    )
    value.backward(upstream)
    return {"value": value, "grad": leaf.grad.full_tensor()}


def test_dtensors(ranks) -> None:
    student, teacher, upstream = sample((4, 3), 20, torch.float32)
    mask = torch.rand(4, 3) < 0.6
    want, _ = reference(student, teacher, upstream, "forward")
    for result in ranks(2).run(run_dtensor, student, teacher, mask, upstream):
        assert (result["value"] - want * mask).abs().max() < 1e-5
        check(None, result["grad"], student, teacher, upstream * mask, "forward")


# ---- top-k ----


def run_topk(student: Tensor, values: Tensor, ids: Tensor, upstream: dict, options: dict) -> dict:
    groups = grid_groups(tp=torch.distributed.get_world_size())
    width = student.shape[-1] // groups.tp.size()
    columns = slice(groups.tp.rank() * width, (groups.tp.rank() + 1) * width)
    local = student[..., columns].clone().requires_grad_()
    with CollectivesMade() as made:
        got, teacher, entropy = vocab_parallel_topk_distill(
            local, values, ids, tp_group=groups.tp, **options
        )
    # Over the k ids alone nothing of the whole rows is needed but the k logits.
    alone = options.get("normalize") == "topk" and not options.get("entropy")
    one = ["all_reduce" if alone else "all_gather"]
    assert made.names == (one if groups.tp.size() > 1 else [])
    loss = (got * upstream["picked"]).sum()
    if entropy is not None:
        loss = loss + (entropy * upstream["entropy"]).sum()
    loss.backward()
    return {"student": got, "teacher": teacher, "entropy": entropy, "grad": local.grad}


def topk_reference(
    student: Tensor,
    ids: Tensor,
    upstream: dict,
    normalize: str,
    entropy: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities, entropy, gradient) at temperature 0.8 and vocab_size 61."""
    leaf = student.double() if dtype == torch.float64 else student.clone()
    leaf.requires_grad_()
    z = leaf.to(dtype)[..., :61] / 0.8
    logp = z.log_softmax(-1)
    picked = logp.gather(-1, ids)
    if normalize == "topk":
        picked = z.gather(-1, ids).log_softmax(-1)
    spread = -(logp.exp() * logp).sum(-1)
    loss = (picked * upstream["picked"]).sum()
    if entropy:
        loss = loss + (spread * upstream["entropy"]).sum()
    loss.backward()
    return picked.detach(), spread.detach(), leaf.grad


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("normalize", ["vocab", "topk"])
@pytest.mark.parametrize("entropy", [False, True])
def test_topk_matches_float64(ranks, world: int, normalize: str, entropy: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    for dtype, shape in ((torch.float32, (2, 3)), (torch.bfloat16, (5,))):
        student, teacher, on_entropy = sample(shape, 66, dtype)
        values, ids = teacher[..., :61].topk(7, dim=-1)
        ids[..., -1] = ids[..., 0]  # repeated
        upstream = {
            "picked": torch.randn(*shape, 7, generator=generator),
            "entropy": on_entropy,
        }
        options = {
            "normalize": normalize,
            "entropy": entropy,
            "temperature": 0.8,
            "teacher_temperature": 1.25,
            "vocab_size": 61,
            "chunk_size": 2,
        }
        arguments = (student, ids, upstream, normalize, entropy)
        exact = topk_reference(*arguments, torch.float64)
        plain = topk_reference(*arguments, torch.float32)
        exact_teacher = (values.double() / 1.25).log_softmax(-1)
        plain_teacher = (values.float() / 1.25).log_softmax(-1)
        results = ranks(world).run(run_topk, student, values, ids, upstream, options)
        for result in results:
            assert result["student"].dtype == result["teacher"].dtype == torch.float32
            assert_no_worse(result["student"], plain[0], exact[0], name="student")
            assert_no_worse(result["teacher"], plain_teacher, exact_teacher, name="teacher")
            if entropy:
                assert_no_worse(result["entropy"], plain[1], exact[1], name="entropy")
            else:
                assert result["entropy"] is None
        grad = torch.cat([result["grad"] for result in results], -1)
        assert_no_worse(grad, plain[2], exact[2], name="gradient")


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


def test_topk_refuses_what_it_cannot_do() -> None:
    student, values = torch.randn(2, 8), torch.randn(2, 3)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    cases = [
        ((student, values, ids), {"normalize": "k"}, "normalize: expected one of"),
        ((student, values, ids + 8), {}, "teacher_topk_ids: expected ids in [0, 8)"),
        ((student, values[:, :0], ids[:, :0]), {}, "expected [..., k] with k >= 1"),
        ((student, values[:1], ids), {}, "teacher_topk_logits: expected shape (2, 3)"),
        ((student, values, ids[:, :2]), {}, "teacher_topk_ids: expected shape (2, 3)"),
        ((student, values, ids.float()), {}, "teacher_topk_ids: expected an integer dtype"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            vocab_parallel_topk_distill(*arguments, **options)


@pytest.mark.parametrize("kind", ["forward", "jsd"])
def test_a_divergence_is_one_graph_under_a_caller_s_torch_compile(kind) -> None:
    student, teacher = torch.randn(2, 3, 17)
    found = []
    for wrap in (lambda f: f, partial(torch.compile, fullgraph=True, backend="aot_eager")):
        leaf = student.clone().requires_grad_()
        value = wrap(partial(vocab_parallel_kl_div, kind=kind, temperature=0.7))(leaf, teacher)
        (grad,) = torch.autograd.grad(value, leaf, torch.tensor([1.0, -2.0, 0.5]))
        found.append((value.detach(), grad))
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)
