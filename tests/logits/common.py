"""What the tests of operations on logits share: shards in every layout, and a call on ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs.bench.counting import Collective, CollectivesMade
from tests.helpers import oracles
from tests.helpers.distributed import get_pool

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
class Found:
    """What one rank found.

    Attributes:
        outputs: by name, `[...]` each.
        grad: of this rank's logits, `[..., V/TP]`; None where no gradient was asked for.
        forward, backward: the collectives of each, if the case counts them.
    """

    outputs: dict[str, Tensor]
    grad: Tensor | None
    forward: list[Collective]
    backward: list[Collective]


@dataclass
class Case:
    """One call of an operation on logits, and what it must give.

        StatsCase(whole, target, options={"softcap": 2.0}).run(world).check()

    A subclass says which operation (`call`) and what plain torch makes of the whole vocabulary
    (`truth`).

    Attributes:
        whole: `[..., V]`, every rank's columns together.
        options: keywords of the operation.
        upstream: a gradient for each of these outputs; empty: no gradient is asked for.
        layout: how a rank's shard lies in memory, see `shard`.
        runs: what each rank found, once `run` was called.
    """

    whole: Tensor
    options: dict[str, Any] = field(default_factory=dict, kw_only=True)
    upstream: dict[str, Tensor] = field(default_factory=dict, kw_only=True)
    layout: str = field(default="plain", kw_only=True)
    runs: list[Found] = field(default_factory=list, init=False, repr=False)
    # Whether each rank's outputs are its own columns, rather than the same on every rank.
    sharded_outputs: ClassVar[bool] = False
    # Whether collectives are recorded; compiled kernels stand aside for the recorder.
    counts_collectives: ClassVar[bool] = False

    def call(self, logits: Tensor) -> dict[str, Tensor]:
        """The operation on this rank's `[..., V/TP]`."""
        raise NotImplementedError

    def truth(self, whole: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The same outputs, in plain torch and `dtype`."""
        raise NotImplementedError

    def incoming(self) -> dict[str, Tensor]:
        """The upstream gradients that reach this rank."""
        return {name: value.clone() for name, value in self.upstream.items()}

    def true_upstream(self) -> dict[str, Tensor]:
        """The upstream gradients that count."""
        return self.upstream

    def run(self, world: int) -> Self:
        """Call it on `world` ranks; on one in this process, where nothing is initialised."""
        self.runs = [self.on_rank()] if world == 1 else get_pool(world).run(self.on_rank)
        return self

    def on_rank(self) -> Found:
        """The call and its gradient on this rank's shard; inputs must come out untouched."""
        leaf, logits = shard(self.whole, self.layout)
        kept, version = leaf.detach().clone(), leaf._version
        incoming, upstream = self.incoming(), self.incoming()
        forward, backward = CollectivesMade(), CollectivesMade()
        with forward if self.counts_collectives else nullcontext():
            outputs = self.call(logits)
        grad = None
        with backward if self.counts_collectives else nullcontext():
            if incoming:
                roots = [outputs[name] for name in incoming]
                (of_leaf,) = torch.autograd.grad(roots, leaf, list(incoming.values()))
                assert of_leaf.dtype == leaf.dtype
                grad = gradient_of_view(of_leaf, self.layout)
        for name, value in incoming.items():
            assert torch.equal(value, upstream[name]), f"the upstream of {name} was modified"
        assert torch.equal(leaf.detach().nan_to_num(99.0), kept.nan_to_num(99.0)), "logits modified"
        assert version == leaf._version, "the logits' version counter moved"
        return Found(outputs, grad, forward.made, backward.made)

    def check(self, ulps: float = 4.0) -> None:
        """Every rank's results, and the shards' gradients together, against float64."""
        exact, exact_grad = self._reference(torch.float64)
        plain, plain_grad = self._reference(accumulator(self.whole.dtype))
        found = self.outputs()
        assert found.keys() == exact.keys()
        for name, value in found.items():
            if not value.is_floating_point():
                assert value.dtype == exact[name].dtype
                assert torch.equal(value, exact[name]), name
                continue
            assert value.dtype == accumulator(self.whole.dtype)
            oracles.assert_no_worse(value, plain[name], exact[name], name=name, ulps=ulps)
        if self.upstream:
            grad = self.gradient()
            assert grad.dtype == self.whole.dtype
            oracles.assert_no_worse(grad, plain_grad, exact_grad, name="gradient", ulps=ulps)

    def outputs(self) -> dict[str, Tensor]:
        """The ranks' outputs put together; they must be the same everywhere if not sharded."""
        first = self.runs[0].outputs
        if self.sharded_outputs:
            return {name: torch.cat([run.outputs[name] for run in self.runs], -1) for name in first}
        for run in self.runs:
            assert run.outputs.keys() == first.keys()
            for name, value in run.outputs.items():
                assert torch.equal(value, first[name]), f"ranks differ in {name}"
        return first

    def gradient(self) -> Tensor:
        """`[..., V]`."""
        return torch.cat([run.grad for run in self.runs], -1)

    def assert_sent(self, forward: list[str], backward: list[str]) -> None:
        """What every rank sent; nothing where there is only one."""
        assert self.counts_collectives
        alone = len(self.runs) == 1
        for run in self.runs:
            assert [made.name for made in run.forward] == ([] if alone else forward)
            assert [made.name for made in run.backward] == ([] if alone else backward)

    def _reference(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor | None]:
        leaf = self.whole.detach().clone()
        if dtype == torch.float64:
            leaf = leaf.double()
        leaf.requires_grad_()
        outputs = self.truth(leaf, dtype)
        detached = {name: value.detach() for name, value in outputs.items()}
        if not self.upstream:
            return detached, None
        upstream = self.true_upstream()
        roots = [outputs[name] for name in upstream]
        incoming = [value.to(dtype) for value in upstream.values()]
        return detached, torch.autograd.grad(roots, leaf, incoming)[0]


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
