"""A new way that logits come about is one class: CONTRIBUTING's recipe, tried.

Two models' logits joined as `first - weight * second` (contrastive decoding), formed a tile of two
rows at a time and never whole. Operations take the source as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels.chunk import Chunk, ChunkAt, Processing
from mcore_logprobs.ops.divergence import kl_div
from mcore_logprobs.ops.gather import gather, topk_distill
from mcore_logprobs.ops.linear_map import map_logits
from mcore_logprobs.ops.policy_loss import policy_loss
from mcore_logprobs.ops.row_statistics import Statistics
from mcore_logprobs.ops.sampling import sampling_logprobs
from mcore_logprobs.ops.token_stats import token_stats
from mcore_logprobs.ops.topk import topk
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.head import head_logits
from mcore_logprobs.sources.source import LogitIndices, Source
from tests.helpers.shards import world_group, world_rank, world_size

ROWS, VOCAB, TILE, WEIGHT = 5, 12, 2, 0.3


@dataclass(frozen=True)
class ContrastOptions:
    shard: VocabShard
    weight: float
    temperature: float = 1.0
    segments: None = None

    def bind(self, first: Tensor, second: Tensor, per_token: None) -> ContrastLogits:
        return ContrastLogits(self, first, second)


class ContrastLogits:
    """`first - weight * second`, both `[n, V/TP]`, as a `Source`."""

    recomputed, linear = True, True
    order_may_change, may_keep, heads = False, False, ()

    def __init__(self, options: ContrastOptions, first: Tensor, second: Tensor) -> None:
        self.options, self.tensors, self.shard = options, (first, second, None), options.shard
        self.batch_shape, self.num_rows, self.device = first.shape[:1], first.shape[0], first.device
        self.acc_dtype = torch.float64
        self.processing = Processing.of(temperature=options.temperature)

    def tiles(self) -> Iterator[ContrastTile]:
        starts = range(0, self.num_rows, TILE)
        return (ContrastTile(self, slice(i, min(i + TILE, self.num_rows))) for i in starts)

    def tile_ends(self) -> list[int]:
        return [tile.rows.stop for tile in self.tiles()]

    def gradient(
        self, needs: Sequence[bool], *, sparse: bool = False, in_acc_dtype: bool = False
    ) -> ContrastGradient:
        return ContrastGradient(self)

    def backend(self, chunk: Chunk) -> Any:
        return reference

    def rows_at_a_time(self, width: int, copies: int = 1) -> int:
        return TILE

    def to_row_order(self, per_token: Tensor, fill: float | None = None) -> Tensor:
        return per_token

    def to_token_order(self, per_row: Tensor, fill: float = 0) -> Tensor:
        return per_row

    def compacted(self, valid_mask: Tensor) -> ContrastLogits:
        return self

    def in_whole_rows(self, **_: Any) -> ContrastLogits:
        return self

    def in_token_order(self) -> ContrastLogits:
        return self


class ContrastTile:
    def __init__(self, source: ContrastLogits, rows: slice) -> None:
        self.rows, self._shard, self.weight = rows, source.shard, source.options.weight
        first, second = (x[rows] for x in source.tensors[:2])
        self._logits = first - self.weight * second

    def block(self, columns: slice) -> Chunk:
        valid = max(0, min(columns.stop, self._shard.valid_width) - columns.start)
        return Chunk(self._logits[:, columns], valid)

    def chunks(self) -> Iterator[ChunkAt]:
        columns = slice(0, self._shard.width)
        yield ChunkAt(self.rows, columns, self.block(columns))

    whole_rows = chunks

    def held_chunks(self) -> list[ChunkAt]:
        return list(self.chunks())

    def raw_logits(self) -> Tensor:
        return self._logits.clone()

    def blocks_of(self, raw_logits: Tensor) -> Iterator[ChunkAt]:
        columns = slice(0, self._shard.width)
        yield ChunkAt(self.rows, columns, Chunk(raw_logits, self._shard.valid_width))

    def target_logits(self, local_target: Tensor) -> Tensor:
        found = self._logits.gather(1, local_target.clamp(min=0).unsqueeze(1)).squeeze(1)
        return torch.where(local_target >= 0, found, 0.0)

    def unscaled_logits(self, entries: LogitIndices) -> Tensor:
        found = self._logits[entries.row - self.rows.start, entries.column.clamp(min=0)]
        return torch.where(entries.column >= 0, found, 0.0)


class ContrastGradient:
    def __init__(self, source: ContrastLogits) -> None:
        self._grad, self._second = (torch.zeros_like(x) for x in source.tensors[:2])

    def collect(self, tile: ContrastTile, placed: ChunkAt, write: Callable[..., None]) -> None:
        write(placed, self._grad[tile.rows])

    def collect_entries(self, tile: ContrastTile, entries: LogitIndices, upstream: Tensor) -> None:
        own = torch.where(entries.column >= 0, upstream, 0.0)
        self._grad.index_put_((entries.row, entries.column.clamp(min=0)), own, accumulate=True)

    def end_tile(self, tile: ContrastTile) -> None:
        self._second[tile.rows] = -tile.weight * self._grad[tile.rows]

    def finish(self) -> tuple[Tensor, Tensor]:
        return self._grad, self._second


def weighted(x: Tensor) -> Tensor:
    """A sum whose grad_output differs from place to place; nothing of what is filtered out."""
    x = torch.where(x.isneginf(), 0.0, x) if x.is_floating_point() else x
    return (x * torch.linspace(-1.0, 2.0, x.numel(), dtype=x.dtype).view_as(x)).sum()


def operations(source: Source, target: Tensor, ids: Tensor) -> dict[str, Tensor]:
    wanted = Statistics.of(entropy=True, target_rank=True, sum_pi_squared=True)
    stats = token_stats(source, target, wanted, ignore_index=-100)
    found = {k: v for k, v in vars(stats).items() if isinstance(v, Tensor)}
    found["gather"] = gather(source, ids)
    found["log_softmax"] = gather(source, ids, log_softmax=True)
    found["values"], found["ids"] = topk(source, 3)
    student, found["teacher"], _ = topk_distill(
        source, ids.double(), ids, "vocab", entropy=False, mask=None, teacher_temperature=None
    )
    found["student"] = student
    found["top-k"] = sampling_logprobs(source, target, top_k=4)
    found["top-p"] = sampling_logprobs(source, target, top_p=0.9)
    kept = torch.cat([target.unsqueeze(1), (target.unsqueeze(1) + 1) % VOCAB], 1)
    record = kept.flatten(), torch.arange(ROWS + 1) * 2
    found["replay"] = sampling_logprobs(source, target, kept_ids=record)
    found["policy loss"], _ = policy_loss(
        source, target, wanted, by_token, ids[:, 0], denominator=3.0, ignore_index=-100
    )
    return found


def by_token(logprobs: Tensor, entropy: Tensor | None, weight: Tensor) -> Tensor:
    assert entropy is not None
    return weight * logprobs.exp() - 0.5 * entropy


def expected(logits: Tensor, target: Tensor, ids: Tensor) -> dict[str, Tensor]:
    log_p = logits.log_softmax(-1)
    at = logits.gather(1, target.unsqueeze(1))
    top, entropy = logits.topk(3), -(log_p.exp() * log_p).sum(-1)
    return {
        "logprobs": log_p.gather(1, target.unsqueeze(1)).squeeze(1),
        "entropy": entropy,
        "target_rank": (logits > at).sum(-1),
        "lse": logits.logsumexp(-1),
        "sum_pi_squared": (2 * log_p).exp().sum(-1),
        "gather": logits.gather(1, ids),
        "log_softmax": log_p.gather(1, ids),
        "values": top.values,
        "ids": top.indices,
        "student": log_p.gather(1, ids),
        "teacher": ids.double().log_softmax(-1),
        "top-k": kept_alone(logits, logits >= logits.topk(4).values[:, -1:], target),
        "top-p": kept_alone(logits, within(log_p.exp(), 0.9), target),
        "replay": torch.cat(
            [at, logits.gather(1, (target.unsqueeze(1) + 1) % VOCAB)], 1
        ).log_softmax(-1)[:, 0],
        "policy loss": by_token(log_p.gather(1, target.unsqueeze(1)).squeeze(1), entropy, ids[:, 0])
        .sum()
        .div(3.0),
    }


def kept_alone(logits: Tensor, kept: Tensor, target: Tensor) -> Tensor:
    log_p = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    return log_p.gather(1, target.unsqueeze(1)).squeeze(1)


def within(p: Tensor, top_p: float) -> Tensor:
    """The columns before which less than top_p of the probability lies."""
    ordered, order = p.sort(-1, descending=True)
    return (
        torch.zeros_like(p).scatter(1, order, (ordered.cumsum(-1) - ordered < top_p).double()) > 0
    )


def on_a_rank(first: Tensor, second: Tensor, target: Tensor, ids: Tensor) -> dict[str, Any]:
    """Each result of the operations, and its gradients of this rank's columns."""
    group: ProcessGroup | None = world_group() if world_size() > 1 else None
    shard = VocabShard.of(VOCAB // world_size(), group, None)
    parts = [
        x.chunk(world_size(), 1)[world_rank()].clone().requires_grad_() for x in (first, second)
    ]
    source = ContrastLogits(ContrastOptions(shard, WEIGHT), *parts)
    return with_gradients(operations(source, target, ids), parts)


def divergences_on_a_rank(first: Tensor, second: Tensor, other: Tensor) -> dict[str, Any]:
    """Divergences of the new source as the student, as the teacher and as both."""
    group: ProcessGroup | None = world_group() if world_size() > 1 else None
    shard = VocabShard.of(VOCAB // world_size(), group, None)
    parts = [
        x.chunk(world_size(), 1)[world_rank()].clone().requires_grad_()
        for x in (first, second, other)
    ]

    def contrast(*tensors: Tensor) -> ContrastLogits:
        return ContrastLogits(ContrastOptions(shard, WEIGHT), *tensors)

    given = given_logits(parts[2], tp_group=group)
    sides = {
        "student": (contrast(*parts[:2]), given),
        "teacher": (given, contrast(*parts[:2])),
        "both": (contrast(*parts[:2]), contrast(*parts[1:])),
    }
    found = {
        f"{name} {kind}": kl_div(*both, kind=kind)
        for name, both in sides.items()
        for kind in ("forward", "jsd")
    }
    return with_gradients(found, parts)


def divergences(first: Tensor, second: Tensor, other: Tensor) -> dict[str, Tensor]:
    new, shifted = first - WEIGHT * second, second - WEIGHT * other
    sides = {"student": (new, other), "teacher": (other, new), "both": (new, shifted)}
    found = {}
    for name, (student, teacher) in sides.items():
        log_p, log_q = student.log_softmax(-1), teacher.detach().log_softmax(-1)
        found[f"{name} forward"] = (log_q.exp() * (log_q - log_p)).sum(-1)
        log_m = (0.5 * (log_p.exp() + log_q.exp())).log()
        found[f"{name} jsd"] = 0.5 * (
            (log_q.exp() * (log_q - log_m)).sum(-1) + (log_p.exp() * (log_p - log_m)).sum(-1)
        )
    return found


def with_gradients(found: dict[str, Tensor], inputs: Sequence[Tensor]) -> dict[str, Any]:
    grads = {
        name: torch.autograd.grad(
            weighted(x), inputs, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for name, x in found.items()
        if x.requires_grad
    }
    return {"values": {name: x.detach() for name, x in found.items()}, "grads": grads}


@pytest.mark.parametrize("tp", [1, 2])
def test_operations_take_a_new_source_as_it_is(ranks: Any, tp: int) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, ROWS, VOCAB, dtype=torch.float64, generator=generator)
    target = torch.randint(VOCAB, (ROWS,), generator=generator)
    ids = torch.randint(VOCAB, (ROWS, 2), generator=generator)
    inputs = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    wanted = with_gradients(expected(inputs[0] - WEIGHT * inputs[1], target, ids), inputs)
    assert_found(ranks(tp).run(on_a_rank, first, second, target, ids), wanted, tp)


def test_a_function_of_logits_takes_a_new_source() -> None:
    inputs = [torch.randn(ROWS, VOCAB, dtype=torch.float64).requires_grad_() for _ in range(2)]
    row = torch.arange(1.0, ROWS + 1)
    shard = VocabShard.of(VOCAB, None, None)
    source = ContrastLogits(ContrastOptions(shard, WEIGHT), *inputs)
    found = map_logits(source, lambda z, of_row: z.square() * of_row.unsqueeze(1), row)
    wanted = (inputs[0] - WEIGHT * inputs[1]).square() * row.unsqueeze(1)
    each = (with_gradients({"map": x}, inputs) for x in (found, wanted))
    torch.testing.assert_close(*each)


def test_a_function_of_logits_refuses_a_temperature_that_it_is_to_apply() -> None:
    inputs = [torch.randn(ROWS, VOCAB, dtype=torch.float64) for _ in range(2)]
    options = ContrastOptions(VocabShard.of(VOCAB, None, None), WEIGHT, temperature=2.0)
    with pytest.raises(ValueError, match=r"^temperature: expected 1\.0 of a source"):
        map_logits(ContrastLogits(options, *inputs), torch.Tensor.square)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_divergence_takes_a_new_source_on_either_side(ranks: Any, tp: int) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = torch.randn(3, ROWS, VOCAB, dtype=torch.float64, generator=generator)
    inputs = [x.clone().requires_grad_() for x in tensors]
    wanted = with_gradients(divergences(*inputs), inputs)
    assert_found(ranks(tp).run(divergences_on_a_rank, *tensors), wanted, tp)


def test_sources_that_are_cut_in_other_ways_are_no_pair() -> None:
    shard, tensor = VocabShard.of(VOCAB, None, None), torch.randn(ROWS, VOCAB)
    student = ContrastLogits(ContrastOptions(shard, WEIGHT), tensor, tensor)
    teacher = head_logits(tensor, torch.randn(VOCAB, VOCAB), chunk_size=TILE - 1)
    with pytest.raises(ValueError, match="teacher: expected tiles that end at rows"):
        kl_div(student, teacher)


class Backwards(ContrastLogits):
    """Its rows are the tokens from the last to the first."""

    def to_row_order(self, per_token: Tensor, fill: float | None = None) -> Tensor:
        return per_token.flip(0)

    def to_token_order(self, per_row: Tensor, fill: float = 0) -> Tensor:
        return per_row.flip(0)


def test_the_rows_of_a_pair_are_of_the_same_tokens() -> None:
    first, second, other = torch.randn(3, ROWS, VOCAB, dtype=torch.float64)
    options = ContrastOptions(VocabShard.of(VOCAB, None, None), WEIGHT)
    student = Backwards(options, first.flip(0), second.flip(0))
    found = kl_div(student, given_logits(other))
    torch.testing.assert_close(found, divergences(first, second, other)["student forward"])
    for pair in (
        (given_logits(other), student),
        (ContrastLogits(options, first, second), student),
    ):
        with pytest.raises(ValueError, match="teacher: expected rows in the order"):
            kl_div(*pair)


def test_a_source_that_is_gone_on_with_holds_nothing_of_the_walk_before() -> None:
    weight = torch.randn(VOCAB, VOCAB, dtype=torch.bfloat16)
    source = head_logits(torch.randn(ROWS, VOCAB, dtype=torch.bfloat16), weight)
    target, statistics = torch.arange(ROWS), Statistics.of()
    before = token_stats(source, target, statistics, None).logprobs
    held = [x for x in vars(source).values() if isinstance(x, dict) and x]
    assert held == []
    weight.mul_(2)
    assert not torch.equal(token_stats(source, target, statistics, None).logprobs, before)


def assert_found(of_ranks: list[dict[str, Any]], wanted: dict[str, Any], tp: int) -> None:
    """Each rank's values, and its columns of the gradients."""
    for rank, found in enumerate(of_ranks):
        assert found["values"].keys() == wanted["values"].keys()
        for name, value in wanted["values"].items():
            torch.testing.assert_close(found["values"][name], value, msg=name)
        assert found["grads"].keys() == wanted["grads"].keys()
        for name, grads in wanted["grads"].items():
            own = tuple(x.chunk(tp, 1)[rank] for x in grads)
            torch.testing.assert_close(found["grads"][name], own, msg=name)
