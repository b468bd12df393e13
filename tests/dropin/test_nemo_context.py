"""NeMo-RL's context-parallel helpers and reductions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_logprobs.dropin import nemo_rl
from tests.dropin.common import Rank, assert_near, zigzag

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


def run(cp: int, upstream: Tensor) -> dict[str, Tensor]:
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
    for rank, found in enumerate(ranks(cp).run(run, cp, upstream)):
        assert torch.equal(found["whole"], X)
        assert_near(found["whole_grad"], zigzag(upstream, rank, cp) * cp)
        assert torch.equal(found["contiguous"], X.chunk(cp, dim=1)[rank])
        assert torch.equal(found["contiguous_grad"], zigzag(upstream, rank, cp))
        assert torch.equal(found["next"], shifted.chunk(cp, dim=1)[rank])
        assert torch.equal(found["next_alone"], shifted)
        assert torch.equal(found["total"], X[0] * cp + sum(range(cp)))
        assert torch.equal(found["total_grad"], upstream[0])
