"""DTensor logits: every vocab-parallel operation gives what it gives for the local shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import mcore_logprobs as ml

VOCAB, BATCH, SEQ = 24, 2, 6


def _kept(target: Tensor) -> tuple[Tensor, Tensor]:
    """Each row kept its target and one other id."""
    ids = torch.stack([target, (target + 5) % VOCAB], -1).flatten()
    return ids, torch.arange(target.numel() + 1) * 2


# Each gives one float tensor `[b, s, *]` from logits, targets and keywords.
OPS: dict[str, Callable[..., Tensor]] = {
    "logprobs": lambda x, t, **kw: ml.vocab_parallel_logprobs(x, t, **kw),
    "entropy": lambda x, t, **kw: ml.vocab_parallel_entropy(x, **kw),
    "rank": lambda x, t, **kw: ml.vocab_parallel_target_rank(x, t, **kw).float(),
    "token_stats": lambda x, t, **kw: ml.vocab_parallel_token_stats(x, t, entropy=True, **kw).lse,
    "topk": lambda x, t, **kw: ml.vocab_parallel_topk(x, 3, **kw)[0],
    "argmax": lambda x, t, **kw: ml.vocab_parallel_argmax(x, **kw).float(),
    "gather": lambda x, t, **kw: ml.vocab_parallel_gather(
        x, t.unsqueeze(-1), log_softmax=True, **kw
    ),
    "sampling": lambda x, t, **kw: ml.vocab_parallel_sampling_logprobs(
        x, t, top_k=20, top_p=0.99, **kw
    ).nan_to_num(neginf=0.0),
    "replay": lambda x, t, **kw: ml.vocab_parallel_sampling_logprobs(
        x, t, kept_ids=_kept(t.to_local() if isinstance(t, DTensor) else t), **kw
    ),
    "log_softmax": lambda x, t, **kw: ml.vocab_parallel_log_softmax(x, **kw),
}
_NO_GRADIENT = ("rank", "argmax")


@functools.lru_cache  # a mesh makes new groups each time
def _mesh(cp: int, tp: int) -> DeviceMesh:
    if cp == 1:
        return init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    return init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))


def _compare(whole: Tensor, target: Tensor, name: str, cp: int, tp: int) -> None:
    """A DTensor against the same rank's local shard and group: values and gradients."""
    mesh = _mesh(cp, tp)
    rows = [Shard(1)] if cp > 1 else []
    logits = distribute_tensor(whole, mesh, [*rows, Shard(2)], src_data_rank=None)
    ids = distribute_tensor(target, mesh, [*rows, Replicate()], src_data_rank=None)
    logits.requires_grad_()
    op = OPS[name]
    out = op(logits, ids)
    assert not isinstance(out, DTensor)

    rank, at = mesh.get_local_rank("tp"), mesh.get_local_rank("cp") if cp > 1 else 0
    part = slice(at * SEQ // cp, (at + 1) * SEQ // cp)
    columns = slice(rank * VOCAB // tp, (rank + 1) * VOCAB // tp)
    leaf = whole[:, part, columns].clone().requires_grad_()
    mine = target[:, part].contiguous()
    expected = op(leaf, mine, tp_group=mesh.get_group("tp"))
    assert torch.equal(out, expected)
    # Local targets beside DTensor logits, and the mesh's own group named.
    assert torch.equal(op(logits, mine, tp_group=mesh.get_group("tp")), expected)
    if name in _NO_GRADIENT:
        return
    upstream = torch.randn(expected.shape)
    out.backward(upstream)
    (grad,) = torch.autograd.grad(expected, leaf, upstream)
    assert isinstance(logits.grad, DTensor)
    assert logits.grad.placements == logits.placements
    assert logits.grad.shape == whole.shape
    assert torch.equal(logits.grad.to_local(), grad)


def _data() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, SEQ, VOCAB) * 2, torch.randint(0, VOCAB, (BATCH, SEQ))


def _compare_all(whole: Tensor, target: Tensor, cp: int, tp: int) -> None:
    for name in OPS:
        _compare(whole, target, name, cp, tp)


@pytest.mark.parametrize(("cp", "tp"), [(1, 2), (2, 2)])
def test_values_and_gradients(ranks, cp, tp):
    ranks(cp * tp).run(_compare_all, *_data(), cp, tp)


def _whole_model(whole: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits that a product of DTensors made, over CP 2 x TP 2, down to the weight's gradient."""
    mesh = _mesh(2, 2)
    hidden = distribute_tensor(whole[..., :8], mesh, [Shard(1), Replicate()], src_data_rank=None)
    weight = torch.linspace(-1, 1, 8 * VOCAB).view(8, VOCAB).sin()
    head = distribute_tensor(weight, mesh, [Replicate(), Shard(1)], src_data_rank=None)
    head.requires_grad_()
    ids = distribute_tensor(target, mesh, [Shard(1), Replicate()], src_data_rank=None)
    logprobs = ml.vocab_parallel_logprobs(hidden @ head, ids)
    logprobs.sum().backward()
    return logprobs.detach(), head.grad.full_tensor()


def test_gradient_reaches_a_dtensor_weight(ranks):
    whole, target = _data()
    weight = torch.linspace(-1, 1, 8 * VOCAB).view(8, VOCAB).sin().requires_grad_()
    exact = (whole[..., :8] @ weight).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    exact.sum().backward()
    for rank, (logprobs, grad) in enumerate(ranks(4).run(_whole_model, whole, target)):
        at = rank // 2
        torch.testing.assert_close(logprobs, exact.detach()[:, at * 3 : at * 3 + 3])
        torch.testing.assert_close(grad, weight.grad)


def _refused(what: str) -> None:
    mesh = _mesh(1, 2)
    whole, target = _data()
    placements: dict[str, Any] = {"rows": Shard(1), "replicated": Replicate(), "partial": Partial()}
    logits = DTensor.from_local(whole, mesh, [placements.get(what, Shard(2))], run_check=False)
    if what == "uneven":
        logits = DTensor.from_local(
            whole,
            mesh,
            [Shard(2)],
            run_check=False,
            shape=torch.Size((*whole.shape[:2], 25)),
            stride=(whole.shape[1] * 25, 25, 1),
        )
    if what == "target":
        target = DTensor.from_local(target, mesh, [Partial()], run_check=False)
    group = None
    if what == "group":
        group = torch.distributed.new_group([0, 1])
    ml.vocab_parallel_logprobs(logits, target, tp_group=group)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rows", "last dimension is sharded"),
        ("replicated", "last dimension is sharded"),
        ("partial", "no partial placement"),
        ("uneven", "divisible by the mesh dimension's size 2, got 25"),
        ("target", "target: expected no partial placement"),
        ("group", "tp_group: expected None or the group"),
    ],
)
def test_bad_placements_raise_on_every_rank(ranks, what, message):
    for error in ranks(2).run_expecting_errors(_refused, what):
        assert isinstance(error, ValueError)
        assert message in str(error)
