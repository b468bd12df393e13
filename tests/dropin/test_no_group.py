"""What None as a group means in each drop-in: what it means in that framework.

A required group is handed to `torch.distributed` there, for which None is every rank; a group that
may be left out is asked for first, and None is this process alone. A shard taken for the whole
vocabulary is the error that this guards against.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs.dropin import areal, megatron_rl, miles, nemo_rl, skyrl, slime, verl
from tests.dropin.common import VOCAB, assert_near
from tests.engine.truths import entropy_of
from tests.megatron.common import megatron

N = 4  # tokens: divides by 2
HALF = VOCAB // 2
CU_SEQLENS = torch.tensor([0, N])


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Shard:
    """This rank's columns of logits and head, and what else the calls below take."""

    def __init__(self, rank: int, *, own: bool) -> None:
        """own: the ids and the range are those of a caller whose columns are all there is."""
        mine = slice(rank * HALF, (rank + 1) * HALF)
        self.range = (0, HALF) if own else (mine.start, mine.stop)
        self.logits, self.teacher = (normal(1, N, VOCAB, seed=s)[..., mine] * 2 for s in (1, 2))
        self.hidden, self.weight = normal(1, N, 6, seed=3), normal(VOCAB, 6, seed=4)[mine]
        self.part = normal(N // 2, 1, 6, seed=5 + rank)  # of a sequence
        self.local = normal(1, N // 2, seed=7 + rank)
        generator = torch.Generator().manual_seed(9)
        self.ids = torch.randint(0, HALF if own else VOCAB, (1, N), generator=generator)
        self.several = self.ids[..., None].expand(1, N, 3).contiguous()
        self.keep = normal(N, HALF, seed=11 + rank) > -0.5
        others = (self.ids + 1) % (HALF if own else VOCAB)
        self.kept = (torch.stack([self.ids[0], others[0]], 1).flatten(), torch.arange(N + 1) * 2)


Call = Callable[[Shard, Any], Any]

EVERY_RANK: dict[str, Call] = {
    "slime": lambda s, g: slime.calculate_log_probs_and_entropy(s.logits[0], s.ids[0], g, True),
    "slime, mask": lambda s, g: slime.calculate_log_probs_and_entropy(
        s.logits[0], s.ids[0], g, True, log_prob_keep_mask=s.keep
    ),
    "slime, ids": lambda s, g: slime.calculate_log_probs_and_entropy(
        s.logits[0], s.ids[0], g, True, log_prob_keep_mask=s.kept
    ),
    "miles": lambda s, g: miles.calculate_log_probs_and_entropy(s.logits[0], s.ids[0], g, True),
    "DistributedLogprob": lambda s, g: nemo_rl.DistributedLogprob.apply(
        s.logits, s.ids, *s.range, g
    ),
    "ChunkedDistributedLogprob": lambda s, g: nemo_rl.ChunkedDistributedLogprob.apply(
        s.logits, s.ids, *s.range, 3, g
    ),
    "DistributedCrossEntropy": lambda s, g: nemo_rl.DistributedCrossEntropy.apply(
        s.logits, s.teacher, g
    ),
    "DistributedLogprobWithSampling": lambda s, g: nemo_rl.DistributedLogprobWithSampling.apply(
        s.logits, s.ids, g, None, 0.9
    ),
    "ChunkedDistributedLogprobWithSampling": lambda s, g: (
        nemo_rl.ChunkedDistributedLogprobWithSampling.apply(s.logits, s.ids, g, 5, 1.0, 3)
    ),
    "ChunkedDistributedGatherLogprob": lambda s, g: nemo_rl.ChunkedDistributedGatherLogprob.apply(
        s.logits, s.several, *s.range, 3, g
    ),
    "ChunkedDistributedEntropy": lambda s, g: nemo_rl.ChunkedDistributedEntropy.apply(
        s.logits, 3, g
    ),
    "ChunkedDistributedHiddenStatesToLogprobs": lambda s, g: (
        nemo_rl.ChunkedDistributedHiddenStatesToLogprobs.apply(
            s.part, s.ids, s.weight, *s.range, 3, g
        )
    ),
    "AllGatherCPTensor": lambda s, g: nemo_rl.AllGatherCPTensor.apply(s.local, g),
    "all_to_all_vp2sq": lambda s, g: nemo_rl.all_to_all_vp2sq(s.logits[0], g),
    "all_to_all_sq2vp": lambda s, g: nemo_rl.all_to_all_sq2vp(s.logits[0], g),
    "log_softmax_with_grad": lambda s, g: nemo_rl._compute_distributed_log_softmax_with_grad(
        s.logits, g
    ),
    "log_softmax": lambda s, g: nemo_rl._compute_distributed_log_softmax(s.logits, g),
    "softmax": lambda s, g: nemo_rl._compute_distributed_softmax(s.logits, g),
    "distributed_vocab_topk": lambda s, g: nemo_rl.distributed_vocab_topk(
        s.logits, 3, g, vocab_start_index=s.range[0], vocab_end_index=s.range[1]
    ),
    "from_parallel_logits": lambda s, g: nemo_rl.from_parallel_logits_to_logprobs(
        s.logits, s.ids, *s.range, g
    ),
    "from_parallel_logits, packed": lambda s, g: (
        nemo_rl.from_parallel_logits_to_logprobs_packed_sequences(
            s.logits, s.ids, CU_SEQLENS, N, *s.range, g
        )
    ),
    "dtensor_from_parallel_logits": lambda s, g: nemo_rl.dtensor_from_parallel_logits_to_logprobs(
        s.logits, s.ids, *s.range, g
    ),
    "from_parallel_hidden_states": lambda s, g: nemo_rl.from_parallel_hidden_states_to_logprobs(
        s.part, s.weight, None, s.ids, *s.range, g
    ),
    "skyrl AllGatherPackedCPTensor": lambda s, g: skyrl.AllGatherPackedCPTensor.apply(
        s.local[0], CU_SEQLENS, g
    ),
    "skyrl FusedLinearChunkedDistributedLogprob": lambda s, g: (
        skyrl.FusedLinearChunkedDistributedLogprob.apply(s.hidden, s.weight, s.ids, *s.range, 3, g)
    ),
    "skyrl from_parallel_hidden": lambda s, g: skyrl.from_parallel_hidden_to_logprobs(
        s.hidden, s.weight, s.ids, *s.range, g
    ),
    "skyrl entropy from hidden": lambda s, g: skyrl._fused_vocab_parallel_entropy_from_hidden(
        s.hidden, s.weight, g
    ),
}

THIS_PROCESS: dict[str, Call] = {
    "areal gather_logprobs": lambda s, g: areal.gather_logprobs(s.logits, s.ids, 0.7, g),
    "areal gather_logprobs_entropy": lambda s, g: areal.gather_logprobs_entropy(
        s.logits, s.ids, 0.7, g
    ),
    "verl linear_cross_entropy": lambda s, g: verl.linear_cross_entropy(
        s.hidden, s.weight, s.ids, 0.7, "none", g
    ),
    "nemo_rl vocab_parallel_log_softmax": lambda s, g: nemo_rl.vocab_parallel_log_softmax(
        s.logits, 0.7, tp_group=g
    ),
    "nemo_rl vocab_parallel_full_log_softmax": lambda s, g: nemo_rl.vocab_parallel_full_log_softmax(
        s.logits, 0.7, tp_group=g
    ),
    "nemo_rl vocab_parallel_gather_columns": lambda s, g: nemo_rl.vocab_parallel_gather_columns(
        s.logits, torch.tensor([1, HALF - 1]), tp_group=g
    ),
    "nemo_rl vocab_parallel_argmax": lambda s, g: nemo_rl.vocab_parallel_argmax(
        s.logits, tp_group=g
    ),
    "nemo_rl gather_logits_at_global_indices": lambda s, g: nemo_rl.gather_logits_at_global_indices(
        s.logits, s.several, g, vocab_start_index=0, vocab_end_index=HALF
    ),
    "nemo_rl group_all_reduce_sum": lambda s, g: nemo_rl.group_all_reduce_sum(s.local, g),
    "nemo_rl cp_shift_next": lambda s, g: nemo_rl.cp_shift_next(s.local, g, fill=0.0),
    "nemo_rl cp_load_balanced_to_contiguous": lambda s, g: nemo_rl.cp_load_balanced_to_contiguous(
        s.local, cp_group=g
    ),
    "nemo_rl from_parallel_logits, CP": lambda s, g: nemo_rl.from_parallel_logits_to_logprobs(
        s.logits,
        s.ids,
        0,
        HALF,
        dist.new_group([dist.get_rank()], use_local_synchronization=True),
        cp_group=g,
    ),
    "skyrl draft_soft_ce": lambda s, g: skyrl.draft_soft_ce(
        s.logits, s.teacher, torch.ones(1, N), vocab_parallel_group=g
    ),
    "megatron_rl selective_log_softmax": lambda s, g: megatron_rl.selective_log_softmax(
        s.logits, s.ids
    ),
}


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [x for part in result or () for x in tensors(part)]


def both(tp: int) -> dict[str, list[list[Tensor]]]:
    """Each call with None, and with the group that None stands for. tp 0: without Megatron."""
    with megatron(tp=tp) if tp else contextlib.nullcontext():
        rank = dist.get_rank()
        alone = dist.new_group([rank], use_local_synchronization=True)
        found = {}
        for table, meant, own in (
            (EVERY_RANK, dist.group.WORLD, False),
            (THIS_PROCESS, alone, True),
        ):
            shard = Shard(rank, own=own)
            for name, call in table.items():
                found[name] = [tensors(call(shard, group)) for group in (None, meant)]
        return found


@pytest.mark.parametrize("tp", [0, 1, 2])
def test_none_is_what_it_is_upstream(ranks, tp: int) -> None:
    for rank, found in enumerate(ranks(2).run(both, tp)):
        for name, (by_none, by_group) in found.items():
            assert by_none, name
            for got, want in zip(by_none, by_group, strict=True):
                assert torch.equal(got, want), (rank, name, got, want)


def test_none_in_one_process() -> None:
    """Where there are no other ranks, every rank is this process."""
    assert not dist.is_initialized() or dist.get_world_size() == 1
    shard = Shard(0, own=True)
    logp = shard.logits[0].double().log_softmax(-1)
    want = logp.gather(-1, shard.ids[0][:, None])
    for name in ("slime", "miles", "DistributedLogprob"):
        found = tensors(EVERY_RANK[name](shard, None))
        assert_near(found[0].reshape(-1, 1), want)
    (entropy,) = tensors(EVERY_RANK["ChunkedDistributedEntropy"](shard, None))
    assert_near(-entropy[0], entropy_of(logp))


class _Mock(torch.nn.Module):
    """As in Megatron RL's own tests: it never called the constructor of Module."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.config = logits, SimpleNamespace(flash_decode=True)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> None: ...

    def __call__(self, *args: object, **options: object) -> Tensor:
        assert not self.config.flash_decode
        return self.logits


def test_megatron_rl_takes_a_mock_of_a_model() -> None:
    logits, tokens = normal(2, N, VOCAB, seed=1), torch.arange(2 * N).reshape(2, N)
    model = _Mock(logits)
    got = megatron_rl.get_logprobs(model, tokens, None)
    expected = logits[:, :-1].double().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    assert_near(got, expected)
    assert model.config.flash_decode
