"""Functions for the audit's tests: mistakes that were shipped somewhere, and published ones."""

from __future__ import annotations

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


def twice_the_gradient(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    value = right(logits, labels, group)
    return 2 * value - value.detach()


def overwrites(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    copy = logits.clone()
    logits.data.mul_(0.5)
    return mcore_logprobs.vocab_parallel_entropy(copy, tp_group=group)


def needs_more(logits: Tensor, labels: Tensor, recipe: str) -> Tensor:
    return logits[..., 0]


def half_by_keyword(logits: Tensor, labels: Tensor, **options: float) -> Tensor:
    """Half of the right values, unless the keyword `scale` arrives."""
    return 0.5 * options.get("scale", 1.0) * mcore_logprobs.vocab_parallel_logprobs(logits, labels)


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
