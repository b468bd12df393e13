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
from tests.engine.cases import Case, Problem, parse
from tests.engine.operation import SHARDED
from tests.helpers.distributed import preloaded
from tests.ops import OPERATIONS

preloaded.append("torch.distributed.tensor")
LINES = [
    *(f"{name} logits" for name, op in OPERATIONS.items() if op.from_logits and not op.same_dtype),
    "gather logits log_softmax=True",
    "sampling_logprobs logits top_k=6 top_p=0.8",
    "sampling_logprobs logits replay=True",
    "kl_div hidden",
]
BATCH, SEQ, VOCAB = 2, 6, 24


@functools.lru_cache  # a mesh makes new groups each time
def _mesh(cp: int, tp: int) -> DeviceMesh:
    if cp == 1:
        return init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    return init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))


def _distributed(x: Tensor, columns: bool, cp: int) -> DTensor:
    """Rows `[s, ...]` over CP, and the last dimension over TP."""
    rows = [Shard(0)] if cp > 1 else []
    placements = [*rows, Shard(x.dim() - 1) if columns else Replicate()]
    return distribute_tensor(x, _mesh(cp, 2), placements, src_data_rank=None)


def _compare(given: tuple[Case, int]) -> None:
    """DTensors against the same rank's local shard and group: values and gradients."""
    case, cp = given
    mesh, op, problem = _mesh(cp, 2), case.operation, Problem(case)
    group, at = mesh.get_group("tp"), mesh.get_local_rank("cp") if cp > 1 else 0
    rank = mesh.get_local_rank("tp")
    rows = slice(at * 6 // cp, (at + 1) * 6 // cp)
    whole = {name: x for name, x in problem.side.items() if isinstance(x, Tensor)}
    side = {name: _distributed(x, name in SHARDED, cp) for name, x in whole.items()}
    mine = {name: x.to_local().contiguous() for name, x in side.items()}
    others = {name: x for name, x in problem.side.items() if name not in whole}
    if case.source == "hidden":  # a teacher's DTensor alone brings the group
        weight = problem.head["weight"].chunk(2)[rank]
        leaves = [
            x.clone().requires_grad_() for _ in "ab" for x in (problem.head["hidden"], weight)
        ]
        head, local = tuple(leaves[:2]), tuple(leaves[2:])
        others["mask"] = whole["mask"]
        side, mine = ({"teacher_logits": x["teacher_logits"]} for x in (side, mine))
    else:
        logits = _distributed(problem.head["logits"], True, cp).detach().requires_grad_()
        leaf = problem.head["logits"][rows].chunk(2, -1)[rank].clone().requires_grad_()
        head, local, leaves = (logits,), (leaf,), [logits, leaf]
    keywords = {name: case.setting[name] for name in op.options if case.setting[name] is not None}
    found = op(case.source, head, others | side, keywords)
    expected = op(case.source, local, others | mine, keywords | {"tp_group": group})
    # Local targets beside DTensor logits, and the mesh's own group named.
    again = op(case.source, head, others | mine, keywords | {"tp_group": group})
    for name, x in expected.items():
        assert not isinstance(found[name], DTensor)
        assert torch.equal(found[name], x), name
        assert torch.equal(again[name], x), name
    roots = [name for name in op.differentiable if name in expected]
    if not roots:
        return
    upstream = [torch.randn(expected[name].shape) for name in roots]
    for outputs in (found, expected):
        torch.autograd.backward([outputs[name] for name in roots], upstream)
    half = len(leaves) // 2
    for x, y in zip(leaves[:half], leaves[half:], strict=True):
        grad = x.grad
        if isinstance(x, DTensor):
            assert isinstance(grad, DTensor)
            assert grad.placements == x.placements
            assert grad.shape == x.shape
            grad = grad.to_local()
        assert torch.equal(grad, y.grad)


@pytest.mark.parametrize("cp", [1, 2])
def test_values_and_gradients(ranks, cp):
    lines = [line for line in LINES if cp == 1 or not ("replay" in line or "hidden" in line)]
    cases = [(parse([*line.split(), "tp=2", "ignored=True"]), cp) for line in lines]
    for line, found in zip(lines, ranks(cp * 2).run_many(_compare, cases), strict=True):
        assert isinstance(found, list), f"{line}: {found}"


def _data() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, SEQ, VOCAB) * 2, torch.randint(0, VOCAB, (BATCH, SEQ))


def _whole_model(whole: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits that a product of DTensors made, over CP 2 x TP 2, down to the weight's gradient.

    Of matrices: for a batch of them torch tries several times as many placements, for seconds.
    """
    mesh = _mesh(2, 2)
    hidden = distribute_tensor(whole[..., :8], mesh, [Shard(0), Replicate()], src_data_rank=None)
    weight = torch.linspace(-1, 1, 8 * VOCAB).view(8, VOCAB).sin()
    head = distribute_tensor(weight, mesh, [Replicate(), Shard(1)], src_data_rank=None)
    head.requires_grad_()
    ids = distribute_tensor(target, mesh, [Shard(0), Replicate()], src_data_rank=None)
    logprobs = ml.vocab_parallel_logprobs(hidden @ head, ids)
    logprobs.sum().backward()
    return logprobs.detach(), head.grad.full_tensor()


def test_gradient_reaches_a_dtensor_weight(ranks):
    whole, target = (x.flatten(0, 1) for x in _data())
    weight = torch.linspace(-1, 1, 8 * VOCAB).view(8, VOCAB).sin().requires_grad_()
    exact = (whole[..., :8] @ weight).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    exact.sum().backward()
    for rank, (logprobs, grad) in enumerate(ranks(4).run(_whole_model, whole, target)):
        at = rank // 2
        torch.testing.assert_close(logprobs, exact.detach()[at * 6 : at * 6 + 6])
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


def _head_of_dtensors(which: str) -> None:
    mesh = _mesh(1, 2)
    plain = {
        "hidden": torch.randn(6, 8),
        "weight": torch.randn(12, 8),
        "bias": torch.randn(12),
        "lora's A": torch.randn(3, 8),
        "lora's B": torch.randn(12, 3),
    }
    placement = [Replicate() if which in ("hidden", "lora's A") else Shard(0)]
    head = plain | {which: DTensor.from_local(plain[which], mesh, placement, run_check=False)}
    ml.linear_token_stats(
        head["hidden"],
        head["weight"],
        torch.arange(6),
        bias=head["bias"],
        lora=(head["lora's A"], head["lora's B"], 2.0) if which.startswith("lora") else None,
        tp_group=mesh.get_group("tp"),
    )


@pytest.mark.parametrize("which", ["hidden", "weight", "bias", "lora's A", "lora's B"])
def test_an_output_layer_of_dtensors_is_refused_on_every_rank(ranks, which):
    for error in ranks(2).run_expecting_errors(_head_of_dtensors, which):
        assert isinstance(error, ValueError)
        assert str(error).startswith(f"{which}: expected a plain tensor, got a DTensor")


def _policy_loss_of_dtensors() -> None:
    mesh = _mesh(1, 2)
    hidden = torch.randn(6, 8, requires_grad=True)
    weight, target, old = torch.randn(12, 8), torch.arange(6), torch.randn(6)

    def loss(old: Tensor) -> Tensor:
        return ml.linear_policy_loss(
            hidden,
            weight,
            target,
            lambda new, _, old: -(new - old).exp(),
            old,
            tp_group=mesh.get_group("tp"),
        )[0]

    assert torch.equal(loss(DTensor.from_local(old, mesh, [Replicate()])), loss(old))


PLAIN: dict[str, Callable[[DTensor, DTensor, Any], object]] = {
    "all_to_all_vp2sp": lambda x, _, group: ml.all_to_all_vp2sp(x, tp_group=group),
    "all_to_all_sp2vp": lambda x, _, group: ml.all_to_all_sp2vp(x, tp_group=group),
    "shard": lambda x, _, group: ml.context_parallel_shard(x, cp_group=group),
    "gather": lambda x, _, group: ml.context_parallel_gather(x, cp_group=group),
    "shift": lambda x, _, group: ml.context_parallel_shift(x, cp_group=group),
    "rows": lambda _, rows, group: ml.linear_token_stats(
        torch.randn(4, 3), torch.randn(12, 3), torch.zeros(2).long(), rows=rows, tp_group=group
    ),
}


def _plain(name: str) -> None:
    mesh = _mesh(1, 2)
    x = _distributed(torch.randn(4, VOCAB), True, 1)
    rows = distribute_tensor(torch.arange(2), mesh, [Replicate()], src_data_rank=None)
    with pytest.raises(ValueError, match=r"(x|rows): expected a plain tensor, got a DTensor"):
        PLAIN[name](x, rows, mesh.get_group("tp"))


def test_what_takes_no_dtensor_says_so(ranks):
    """Before any collective."""
    for name, found in zip(PLAIN, ranks(2).run_many(_plain, PLAIN), strict=True):
        assert found == [None, None], (name, found)


def test_per_token_dtensors_are_taken_as_targets_are(ranks):
    ranks(2).run(_policy_loss_of_dtensors)
