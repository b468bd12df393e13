"""Functions for the audit's tests: mistakes that were shipped somewhere, and published ones."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import Tensor

import mcore_logprobs
from tests.dropin.frameworks import load


def right(logits: Tensor, labels: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    return mcore_logprobs.vocab_parallel_logprobs(logits, labels, tp_group=tp_group)


def plain_all_reduce(logits: Tensor, labels: Tensor, *, tp_group: dist.ProcessGroup) -> Tensor:
    """Right values; ranks that do not own the target get no gradient of the normaliser."""
    top = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp_group)
    total = (logits - top).exp().sum(-1)
    dist.all_reduce(total, group=tp_group)
    width = logits.shape[-1]
    column = labels - tp_group.rank() * width
    own = (column >= 0) & (column < width)
    log_softmax = logits - top - total.log().unsqueeze(-1)
    picked = log_softmax.gather(-1, column.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
    picked = picked.where(own, 0.0)
    dist.all_reduce(picked, group=tp_group)
    return picked


def both_sides_of_a_border(logits: Tensor, labels: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """A shard's first column counts on the rank before, too: `<=` where `<` is meant."""
    width = logits.shape[-1]
    claimed = labels - tp_group.rank() * width == width
    again = torch.where(claimed, logits[..., -1].detach(), 0.0)
    dist.all_reduce(again, group=tp_group)
    return right(logits, labels, tp_group) + again


def rank_off_by_one(logits: Tensor, labels: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    return mcore_logprobs.vocab_parallel_target_rank(logits, labels, tp_group=tp_group) + 1


def twice_the_gradient(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    value = right(logits, labels, group)
    return 2 * value - value.detach()


def overwrites(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    copy = logits.clone()
    logits.data.mul_(0.5)
    return mcore_logprobs.vocab_parallel_entropy(copy, tp_group=group)


def overwrites_its_ids(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = mcore_logprobs.vocab_parallel_target_rank(logits, labels, tp_group=group)
    labels.clamp_(max=3)
    return ranks


def needs_more(logits: Tensor, labels: Tensor, recipe: str) -> Tensor:
    return logits[..., 0]


def hidden_by_a_decorator(*args, **options):
    return right(*args, **options)


def half_by_keyword(logits: Tensor, labels: Tensor, **options: float) -> Tensor:
    """Half of the right values, unless the keyword `scale` arrives."""
    return 0.5 * options.get("scale", 1.0) * mcore_logprobs.vocab_parallel_logprobs(logits, labels)


def only_tokens(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    if logits.dim() != 2:
        raise NotImplementedError("expected [n, V/TP]")
    return right(logits, labels, group)


def small_logits(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Refuses one spread of logits, of every layout."""
    if logits.max() > 100:
        raise OverflowError
    return right(logits, labels, group)


def refuses_on_rank_1(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Before its collectives, so that the others wait for it."""
    if logits.dim() == 2 and dist.get_rank() == 1:
        raise RuntimeError("only on rank 1")
    return right(logits, labels, group)


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, when: bool) -> Tensor:
        ctx.when = when
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        if ctx.when:
            raise RuntimeError("backward is broken")
        return grad, None


def raises_in_backward(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Of one layout only."""
    return right(_RaisesInBackward.apply(logits, logits.dim() == 3), labels, group)


def raises_in_backward_on_rank_1(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """For peaked logits only."""
    value = right(logits, labels, group)
    small = bool((value < -25).any())
    return _RaisesInBackward.apply(value, small and dist.get_rank() == 1)


def rank_1_of_2_dies(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    if dist.get_world_size() == 2 and dist.get_rank() == 1:
        os._exit(3)
    return right(logits, labels, group)


def never_ends(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Under TP 2."""
    if dist.get_world_size() == 2:
        print("a rank waits", flush=True)
        time.sleep(600)
    return right(logits, labels, group)


packed_tensor = load("skyrl", "skyrl/backends/skyrl_train/utils/packed_tensor.py")
skyrl = load(
    "skyrl",
    "skyrl/backends/skyrl_train/distributed/megatron/model_utils.py",
    skyrl__backends__skyrl_train__utils__packed_tensor={
        "lengths_from_offsets": packed_tensor.lengths_from_offsets
    },
)
# NeMo-RL's autograd function, as SkyRL ships it on PyPI.
NemoDistributedLogprob = skyrl.DistributedLogprob


def nemo_of_contiguous(
    logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    group: dist.ProcessGroup,
) -> Tensor:
    return NemoDistributedLogprob.apply(
        logits.contiguous(), target, vocab_start_index, vocab_end_index, group, False
    )
