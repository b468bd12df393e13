"""Operations from hidden states against float64 and against themselves."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcore_logprobs import linear_policy_loss, linear_token_stats
from tests.helpers.distributed import get_pool
from tests.logits.common import world_group, world_rank, world_size
from tests.properties.cases import OUTPUTS, truth, weighted


@st.composite
def heads(draw: st.DrawFn) -> dict[str, Any]:
    """A head, the rows that go through it, and how."""
    ranks = 2
    return {
        "seed": draw(st.integers(0, 2**31)),
        "rows": ranks * draw(st.integers(0, 5)),
        "width": draw(st.integers(1, 5)),
        "vocab": ranks * draw(st.integers(1, 10)),
        "bias": draw(st.booleans()),
        "compact": draw(st.booleans()),
        "sequence_parallel": draw(st.booleans()),
        "logit_scale": draw(st.sampled_from([1.0, 0.3])),
        "softcap": draw(st.sampled_from([None, 2.0])),
        "temperature": draw(st.sampled_from([1.0, 0.7])),
        "chunk_size": draw(st.sampled_from([None, 1, 3, 100])),
    }


def tensors(head: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None, Tensor, dict]:
    made = torch.Generator().manual_seed(head["seed"])

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    rows, width, vocab = head["rows"], head["width"], head["vocab"]
    target = torch.randint(0, vocab, (rows,), generator=made)
    target[torch.rand(rows, generator=made) < 0.3] = -100
    upstream = {name: randn(rows) for name in OUTPUTS}
    bias = randn(vocab) if head["bias"] else None
    return randn(rows, width), randn(vocab, width), bias, target, upstream


def loss_fn(logprobs: Tensor, entropy: Tensor, *upstream: Tensor) -> Tensor:
    return logprobs.exp() * upstream[0] + entropy * upstream[1]


def on_rank(head: dict[str, Any], policy: bool) -> list[Tensor]:
    """[outputs..., gradients of hidden, weight and bias]."""
    hidden, weight, bias, target, upstream = tensors(head)
    ranks, rank = world_size(), world_rank()
    leaves = [x.tensor_split(ranks)[rank] for x in (weight, bias) if x is not None]
    split = head["sequence_parallel"] and ranks > 1
    leaves = [hidden.tensor_split(ranks)[rank] if split else hidden, *leaves]
    leaves = [x.clone().requires_grad_() for x in leaves]
    names = ("compact", "logit_scale", "softcap", "temperature", "chunk_size")
    options = {name: head[name] for name in names} | {"sequence_parallel": split}
    options |= {"bias": leaves[2] if bias is not None else None, "tp_group": world_group()}
    if policy:
        per_token = (upstream["logprobs"], upstream["entropy"])
        loss, stats = linear_policy_loss(
            *leaves[:2], target, loss_fn, *per_token, entropy=True, denominator=7, **options
        )
        loss.backward()
        return [loss.detach(), stats.logprobs, *(x.grad for x in leaves)]
    stats = linear_token_stats(*leaves[:2], target, entropy=True, sum_pi_squared=True, **options)
    outputs = {name: getattr(stats, name) for name in OUTPUTS}
    weighted(outputs, upstream).backward()
    return [*(x.detach() for x in outputs.values()), *(x.grad for x in leaves)]


def check(head: dict[str, Any], found: list[list[Tensor]], policy: bool) -> None:
    hidden, weight, bias, target, upstream = tensors(head)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias) if x is not None]
    z = hidden @ weight.t() * head["logit_scale"]
    if head["softcap"] is not None:
        z = head["softcap"] * (z / head["softcap"]).tanh()
    if bias is not None:
        z = z + bias
    want = truth(z / head["temperature"], target)
    if policy:
        keep = (target != -100).double()
        per_token = loss_fn(
            want["logprobs"], want["entropy"], upstream["logprobs"], upstream["entropy"]
        )
        total = (per_token * keep).sum() / 7
        outputs = [total, want["logprobs"]]
    else:
        total, outputs = weighted(want, upstream), [want[name] for name in OUTPUTS]
    expected = [x.detach() for x in outputs] + list(torch.autograd.grad(total, leaves))
    count = len(outputs)
    for place, value in enumerate(expected):
        parts = [rank[place] for rank in found]
        sharded = place > count or (place == count and head["sequence_parallel"] and len(found) > 1)
        got = torch.cat(parts) if sharded else parts[0]
        torch.testing.assert_close(got, value, rtol=1e-9, atol=1e-10)


@given(heads(), st.booleans())
def test_on_one_process(head, policy):
    check(head, [on_rank(head, policy)], policy)


@given(heads(), st.booleans())
def test_over_tp(head, policy):
    check(head, get_pool(2).run(on_rank, head, policy), policy)
