"""What the tests of operations on logits share: shards in every layout, and a run of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import vocab_parallel_token_stats
from tests.helpers import oracles

WORLDS = (1, 2, 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
VOCAB = 24  # divides into 1, 2 and 3 shards
LAYOUTS = ("plain", "transposed", "sliced", "reversed", "strided", "columns")
FIELDS = ("logprobs", "entropy", "lse")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def world_group() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def world_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def on_ranks(ranks: Any, world: int, fn: Any, *args: Any, **kwargs: Any) -> list:
    """fn on every rank of a pool; in this process, where nothing is initialised, for one rank."""
    return [fn(*args, **kwargs)] if world == 1 else ranks(world).run(fn, *args, **kwargs)


def shard(whole: Tensor, layout: str = "plain") -> tuple[Tensor, Tensor]:
    """This rank's columns of `[..., V]` as (leaf that requires grad, view `[..., V/TP]` of it).

    Layouts: "transposed" lies as [s, b] and reads as [b, s]; "sliced" is `[:, :-1]` and "reversed"
    `[:, 1:]` of one more row; "strided" is every other row; "columns" is a block of columns of a
    wider tensor, so that its rows do not touch.
    """
    width = whole.shape[-1] // world_size()
    mine = whole[..., world_rank() * width : (world_rank() + 1) * width].contiguous().clone()
    if layout == "plain":
        leaf = mine.requires_grad_()
        return leaf, leaf
    if layout == "columns":
        pad = torch.full_like(mine[..., :1], 7.0)
        leaf = torch.cat([pad, mine, pad], -1).requires_grad_()
        return leaf, leaf[..., 1:-1]
    assert whole.dim() == 3, f"the layout {layout!r} needs [b, s, V]"
    if layout == "transposed":
        leaf = mine.transpose(0, 1).contiguous().requires_grad_()
        return leaf, leaf.transpose(0, 1)
    extra = torch.full_like(mine[:, :1], 7.0)
    if layout == "sliced":
        leaf = torch.cat([mine, extra], 1).requires_grad_()
        return leaf, leaf[:, :-1]
    if layout == "reversed":
        leaf = torch.cat([extra, mine], 1).requires_grad_()
        return leaf, leaf[:, 1:]
    assert layout == "strided"
    leaf = torch.stack([mine, torch.full_like(mine, 7.0)], 2).flatten(1, 2).requires_grad_()
    return leaf, leaf[:, ::2]


@dataclass
class RankRun:
    """What one rank found. Tensors `[...]`, the gradient `[..., V/TP]`."""

    logprobs: Tensor
    entropy: Tensor | None
    target_rank: Tensor | None
    lse: Tensor
    grad: Tensor | None


def run_token_stats(
    whole: Tensor,
    target: Tensor,
    upstream: dict[str, Tensor],
    layout: str,
    options: dict[str, Any],
) -> RankRun:
    """token_stats and its gradient on this rank's shard; inputs must come out untouched."""
    leaf, logits = shard(whole, layout)
    kept = leaf.detach().clone()
    target = target.clone()
    versions = (leaf._version, target._version)
    out = vocab_parallel_token_stats(logits, target, tp_group=world_group(), **options)
    outputs = [getattr(out, name) for name in upstream]
    grad = None
    if outputs:
        incoming = [value.clone() for value in upstream.values()]
        (of_leaf,) = torch.autograd.grad(outputs, leaf, incoming)
        assert all(map(torch.equal, incoming, upstream.values())), "the upstream was modified"
        assert of_leaf.dtype == leaf.dtype
        grad = gradient_of_view(of_leaf, layout)
    assert torch.equal(leaf.detach().nan_to_num(99.0), kept.nan_to_num(99.0)), "logits modified"
    assert versions == (leaf._version, target._version), "an input's version counter moved"
    return RankRun(out.logprobs, out.entropy, out.target_rank, out.lse, grad)


def gradient_of_view(of_leaf: Tensor, layout: str) -> Tensor:
    """The gradient of the view that `shard` made; what lies outside it must have none."""
    inside, outside = of_leaf, None
    if layout == "columns":
        inside, outside = of_leaf[..., 1:-1], of_leaf[..., [0, -1]]
    elif layout == "transposed":
        inside = of_leaf.transpose(0, 1)
    elif layout == "sliced":
        inside, outside = of_leaf[:, :-1], of_leaf[:, -1]
    elif layout == "reversed":
        inside, outside = of_leaf[:, 1:], of_leaf[:, 0]
    elif layout == "strided":
        inside, outside = of_leaf[:, ::2], of_leaf[:, 1::2]
    assert outside is None or not outside.any()
    return inside


def make_target(lead: tuple[int, ...], vocab: int, ignored: float = 0.2) -> Tensor:
    target = torch.randint(0, vocab, lead)
    return torch.where(torch.rand(lead) < ignored, -100, target)


def make_upstream(
    lead: tuple[int, ...], dtype: torch.dtype, names: tuple[str, ...] = FIELDS
) -> dict:
    """A different gradient for each token and output."""
    return {name: torch.randn(lead, dtype=accumulator(dtype)) for name in names}


def check_against_oracle(
    runs: list[RankRun],
    whole: Tensor,
    target: Tensor,
    upstream: dict[str, Tensor],
    options: dict[str, Any],
    ulps: float = 4.0,
) -> None:
    """Every rank's results, and the shards' gradients together, against float64 and plain torch."""
    oracle_options = {
        name: value
        for name, value in options.items()
        if name not in ("entropy", "target_rank", "chunk_size", "backend")
    }

    def reference(dtype: torch.dtype) -> tuple[oracles.ExactStats, Tensor | None]:
        leaf = whole.detach().clone()
        if dtype == torch.float64:
            leaf = leaf.double()
        leaf.requires_grad_()
        stats = oracles.token_stats(leaf, target, dtype=dtype, **oracle_options)
        if not upstream:
            return stats, None
        outputs = [getattr(stats, name) for name in upstream]
        incoming = [value.to(dtype) for value in upstream.values()]
        return stats, torch.autograd.grad(outputs, leaf, incoming)[0]

    exact, exact_grad = reference(torch.float64)
    plain, plain_grad = reference(accumulator(whole.dtype))
    for run in runs:
        for name in FIELDS:
            value = getattr(run, name)
            if name == "entropy" and not options.get("entropy"):
                assert value is None
                continue
            assert value.dtype == accumulator(whole.dtype)
            assert torch.equal(value, getattr(runs[0], name)), f"ranks differ in {name}"
            truth = getattr(exact, name)
            oracles.assert_no_worse(value, getattr(plain, name), truth, name=name, ulps=ulps)
        if options.get("target_rank"):
            assert run.target_rank.dtype == torch.int64
            assert torch.equal(run.target_rank, exact.target_rank)
        else:
            assert run.target_rank is None
    if upstream:
        grad = torch.cat([run.grad for run in runs], -1)
        assert grad.dtype == whole.dtype
        oracles.assert_no_worse(grad, plain_grad, exact_grad, name="gradient", ulps=ulps)
