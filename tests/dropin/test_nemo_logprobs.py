"""NeMo-RL's log-probabilities of packed sequences and of DTensors, its helpers of CP."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs.dropin import nemo_rl
from tests.dropin.common import (
    LAYOUTS,
    VOCAB,
    Rank,
    assert_near,
    filtered,
    next_token_logprobs,
    spread,
    zigzag,
)
from tests.dropin.test_nemo_values import SAMPLING, Data, exact, filters, loss_of
from tests.helpers.covering import every_pair


def rank_mismatch() -> None:
    r = Rank(2, 1)
    nemo_rl.get_next_token_logprobs_from_logits(
        torch.zeros(1, 4, dtype=torch.int64),
        torch.randn(1, 4, 12),
        vocab_parallel_rank=1 - r.tp.rank(),
        vocab_parallel_group=r.tp,
    )


def test_another_ranks_range_raises_everywhere(ranks) -> None:
    for error in ranks(2).run_expecting_errors(rank_mismatch):
        assert isinstance(error, ValueError)
        assert "vocab_start_index, vocab_end_index: expected" in str(error)


# ---- packed sequences ----

LENGTHS = (8, 4, 16, 4)  # padded to 2 * CP
BOUNDS = (0, 8, 12, 28, 32)


def run_packed(
    tp: int, cp: int, d: dict[str, Tensor], unpacked: int, sampling: str, rolled: bool
) -> dict[str, Tensor]:
    r = Rank(tp, cp)
    leaf = r.shard(d["logits"], BOUNDS)
    target = d["ids"].clone()
    if rolled:
        parts = [target[:, a:b].roll(-1, 1) for a, b in itertools.pairwise(BOUNDS)]
        target = zigzag(torch.cat(parts, 1), r.place, cp, BOUNDS)
    value = nemo_rl.from_parallel_logits_to_logprobs_packed_sequences(
        leaf,
        target,
        torch.tensor(BOUNDS, dtype=torch.int32),
        unpacked,
        *r.range,
        r.tp,
        False,
        r.cp_group,
        3,
        SAMPLING[sampling],
        rolled,
    )
    loss_of([value]).backward()
    return {"value": value, "grad": leaf.grad}


def expected_packed(d: dict[str, Tensor], unpacked: int, sampling: str) -> tuple[Tensor, Tensor]:
    leaf = d["logits"].double().requires_grad_()
    out = torch.zeros(len(LENGTHS), unpacked - 1, dtype=torch.float64)
    for i, (a, b) in enumerate(itertools.pairwise(BOUNDS)):
        one = next_token_logprobs(leaf[:, a:b], d["ids"][:, a:b], *filters(sampling))[0]
        kept = min(len(one), unpacked - 1)
        out[i, :kept] = one[:kept]
    loss_of([out]).backward()
    return out.detach(), leaf.grad


@every_pair(
    layout=LAYOUTS,
    record=((16, "none"), (20, "none"), (7, "top-k")),
    rolled=(False, True),
)
def test_packed(ranks, layout: tuple, record: tuple, rolled: bool) -> None:
    (tp, cp), (unpacked, sampling) = layout, record
    generator = torch.Generator().manual_seed(4)
    d = {
        "logits": torch.randn(1, BOUNDS[-1], VOCAB, generator=generator) * 2,
        "ids": torch.randint(0, VOCAB, (1, BOUNDS[-1]), generator=generator),
    }
    want, want_grad = expected_packed(d, unpacked, sampling)
    results = ranks(tp * cp).run(run_packed, tp, cp, d, unpacked, sampling, rolled)
    for result in results:
        assert result["value"].shape == (len(LENGTHS), unpacked - 1)
        assert_near(result["value"], want)
    shape = d["logits"].shape
    grad = spread([result["grad"] for result in results], tp, cp, shape, BOUNDS)
    assert_near(grad, want_grad * cp)


# ---- DTensors ----


@functools.cache
def device_mesh(tp: int, cp: int) -> Any:
    """Once for each layout and rank: a mesh makes groups."""
    from torch.distributed.device_mesh import init_device_mesh

    if cp == 1:
        return init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    return init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))


def run_dtensor(tp: int, cp: int, route: str, sampling: str) -> dict[str, Tensor]:
    """On a mesh (cp, tp), the sequence lying in an order of its own, as seq_index says."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = device_mesh(tp, cp)
    d, length, seq_index = Data(8, 8), 8, None
    logits, target = d.logits, d.ids
    if cp > 1:
        place = torch.arange(length)[None]
        seq_index = torch.cat([zigzag(place, rank, cp)[0] for rank in range(cp)])
        logits = logits[:, seq_index]
        target = distribute_tensor(target[:, seq_index], mesh["cp"], [Shard(1)])
    placements = [Shard(1), Shard(2)] if cp > 1 else [Shard(2)]
    leaf = distribute_tensor(logits, mesh, placements).detach().requires_grad_()
    group = mesh.get_group("tp")
    width, rank = VOCAB // tp, group.rank()
    parameters = SAMPLING[sampling]
    if route == "dtensor_from_parallel":
        value = nemo_rl.dtensor_from_parallel_logits_to_logprobs(
            leaf.to_local(),
            target,
            rank * width,
            (rank + 1) * width,
            group,
            seq_index=seq_index,
            chunk_size=2,
            sampling_params=parameters,
        )
    elif route == "from_vocab_parallel":
        lies = seq_index
        if lies is not None:  # NeMo-RL gives it as it gives the target
            lies = distribute_tensor(lies, mesh["cp"], [Shard(0)])
        value = nemo_rl.get_logprobs_from_vocab_parallel_logits(leaf, target, lies, 2, parameters)
    else:
        value = nemo_rl.get_next_token_logprobs_from_logits(
            target, leaf, seq_index, sampling_params=parameters
        )
    loss_of([value]).backward()
    grad = leaf.grad.full_tensor()
    if seq_index is not None:
        grad = grad[:, seq_index.argsort()]
    return {"value": value, "grad": grad}


@pytest.mark.parametrize(
    ("route", "sampling"),
    [
        ("dtensor_from_parallel", "none"),
        ("from_vocab_parallel", "top-k"),
        ("get_next_token", "none"),
    ],
)
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_dtensors(ranks, tp: int, cp: int, route: str, sampling: str) -> None:
    d = Data(8, 8)
    (want,), want_grad = exact(f"get_next_token {sampling}", d, d.logits)
    for result in ranks(tp * cp).run(run_dtensor, tp, cp, route, sampling):
        assert_near(result["value"], want)
        # DTensor's convention: every rank computes the same loss, once.
        assert_near(result["grad"], want_grad)


def run_distillation(tp: int, cp: int) -> dict[str, Any]:
    from torch.distributed.tensor import Shard, distribute_tensor

    d = Data(8, 8)
    placements = [Shard(1), Shard(2)] if cp > 1 else [Shard(2)]
    logits = torch.cat([zigzag(d.logits, rank, cp) for rank in range(cp)], 1)
    leaf = distribute_tensor(logits, device_mesh(tp, cp), placements).detach().requires_grad_()
    student, _, h_all = nemo_rl.get_distillation_topk_logprobs_from_logits(
        leaf, d.top.values, d.top.indices, True, True
    )
    loss_of([student, h_all]).backward()
    return {"values": [student, h_all], "grad": leaf.grad.to_local()}


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2)])
def test_distillation_of_a_dtensor(ranks, tp: int, cp: int) -> None:
    d = Data(8, 8)
    wanted, want_grad = exact("distillation whole=True entropy=True", d, d.logits)
    results = ranks(tp * cp).run(run_distillation, tp, cp)
    for result in results:
        for got, want in zip(result["values"], wanted, strict=True):
            assert_near(got, want)
    grad = spread([result["grad"] for result in results], tp, cp, d.logits.shape)
    assert_near(grad, want_grad * cp)


def missing_seq_index() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = device_mesh(1, 2)
    target = distribute_tensor(torch.zeros(1, 8, dtype=torch.int64), mesh["cp"], [Shard(1)])
    nemo_rl.dtensor_from_parallel_logits_to_logprobs(
        torch.randn(1, 4, VOCAB), target, 0, VOCAB, mesh.get_group("tp")
    )


def test_a_target_over_cp_needs_its_index(ranks) -> None:
    for error in ranks(2).run_expecting_errors(missing_seq_index):
        assert isinstance(error, ValueError)
        assert "seq_index: expected the global indices" in str(error)


def index_without_cp() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = device_mesh(2, 1)
    leaf = distribute_tensor(torch.randn(1, 8, VOCAB), mesh, [Shard(2)])
    ids = torch.zeros(1, 8, dtype=torch.int64)
    nemo_rl.get_logprobs_from_vocab_parallel_logits(leaf, ids, torch.arange(8))


def test_an_index_needs_a_mesh_with_cp(ranks) -> None:
    for error in ranks(2).run_expecting_errors(index_without_cp):
        assert isinstance(error, ValueError)
        assert "seq_index: expected a mesh with a dimension named 'cp', got ('tp',)" in str(error)


def test_wrong_kinds_of_logits_raise() -> None:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected a DTensor, got Tensor"):
        nemo_rl.get_logprobs_from_vocab_parallel_logits(torch.randn(1, 4, 8), ids)
    with pytest.raises(ValueError, match=r"sequence length: expected at most 3 .* got 4"):
        nemo_rl.from_parallel_logits_to_logprobs(torch.randn(1, 3, 8), ids, 0, 8, None)


def test_the_filter_of_these_tests_is_a_samplers() -> None:
    """By hand: p = 0.5, 0.25, 0.125, 0.125."""
    z = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert filtered(z, 3, 1.0).isfinite().tolist() == [True, True, True, True]
    assert filtered(z, 2, 1.0).isfinite().tolist() == [True, True, False, False]
    assert filtered(z, None, 0.6).isfinite().tolist() == [True, True, False, False]
    assert filtered(z, 2, 0.6).isfinite().tolist() == [True, False, False, False]


# ---- context parallelism ----

X = torch.arange(2 * 8 * 3, dtype=torch.float32).view(2, 8, 3)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tokens_on_a_rank(size: int) -> None:
    for rank in range(size):
        mine = nemo_rl._get_tokens_on_this_cp_rank(X, rank, size)
        assert torch.equal(mine, zigzag(X, rank, size))
        flat = nemo_rl._get_tokens_on_this_cp_rank(X[0, :, 0], rank, size, seq_dim=0)
        assert torch.equal(flat, zigzag(X, rank, size)[0, :, 0])
    with pytest.raises(ValueError, match="sequence length: expected a multiple of"):
        nemo_rl._get_tokens_on_this_cp_rank(X[:, :7], 0, 2)


def run_context(cp: int, upstream: Tensor) -> dict[str, Tensor]:
    r = Rank(1, cp)
    rank = r.place
    found = {}
    leaf = zigzag(X, rank, cp).clone().requires_grad_()
    whole = nemo_rl.allgather_cp_sharded_tensor(leaf, r.cp)
    assert torch.equal(whole, nemo_rl.AllGatherCPTensor.apply(leaf, r.cp))
    (whole * upstream).sum().backward()
    found["whole"], found["whole_grad"] = whole, leaf.grad
    assert torch.equal(nemo_rl.AllGatherCPTensor.apply(leaf[0, :, 0], r.cp, 0), whole[0, :, 0])

    leaf = zigzag(X, rank, cp).clone().requires_grad_()
    part = nemo_rl.cp_load_balanced_to_contiguous(leaf, cp_group=r.cp)
    (part * upstream.chunk(cp, dim=1)[rank]).sum().backward()
    found["contiguous"], found["contiguous_grad"] = part, leaf.grad

    found["next"] = nemo_rl.cp_shift_next(X.chunk(cp, dim=1)[rank], r.cp, fill=-1)
    found["next_alone"] = nemo_rl.cp_shift_next(X, fill=-1)

    leaf = (X[0] + rank).requires_grad_()
    total = nemo_rl.group_all_reduce_sum_with_grad(leaf, r.cp)
    (total * upstream[0]).sum().backward()
    found["total"], found["total_grad"] = total, leaf.grad
    assert torch.equal(leaf.detach(), X[0] + rank)
    quiet = nemo_rl.group_all_reduce_sum(leaf, r.cp)
    assert not quiet.requires_grad
    assert torch.equal(quiet, total.detach())
    assert torch.equal(nemo_rl.group_all_reduce_sum(leaf, None), leaf.detach())
    assert nemo_rl.group_all_reduce_sum_with_grad(leaf, None) is leaf
    return found


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_over_ranks(ranks, cp: int) -> None:
    upstream = torch.randn(X.shape)
    shifted = torch.cat([X[:, 1:], torch.full_like(X[:, :1], -1)], dim=1)
    for rank, found in enumerate(ranks(cp).run(run_context, cp, upstream)):
        assert torch.equal(found["whole"], X)
        assert_near(found["whole_grad"], zigzag(upstream, rank, cp) * cp)
        assert torch.equal(found["contiguous"], X.chunk(cp, dim=1)[rank])
        assert torch.equal(found["contiguous_grad"], zigzag(upstream, rank, cp))
        assert torch.equal(found["next"], shifted.chunk(cp, dim=1)[rank])
        assert torch.equal(found["next_alone"], shifted)
        assert torch.equal(found["total"], X[0] * cp + sum(range(cp)))
        assert torch.equal(found["total_grad"], upstream[0])
