"""A new way that logits come about is one class: CONTRIBUTING's recipe, tried.

Two models' logits joined as `first - weight * second` (contrastive decoding) with a learnt weight,
formed a tile of two rows by a block of four columns at a time and never whole. Operations take the
source as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import mcore_logprobs as ml
from mcore_logprobs.collectives import all_reduce_sum
from mcore_logprobs.groups import VocabShard
from mcore_logprobs.kernels import reference
from mcore_logprobs.kernels.backend import Backend
from mcore_logprobs.kernels.chunk import Chunk, ChunkAt, Processing, acc_dtype, row_chunks
from mcore_logprobs.ops.divergence import kl_div
from mcore_logprobs.ops.gather import gather, topk_distill
from mcore_logprobs.ops.linear_map import map_logits
from mcore_logprobs.ops.policy_loss import policy_loss
from mcore_logprobs.ops.record import ReplayRequest
from mcore_logprobs.ops.replay import replay
from mcore_logprobs.ops.row_statistics import Statistics
from mcore_logprobs.ops.sample import sample
from mcore_logprobs.ops.sampling import sampling_logprobs
from mcore_logprobs.ops.token_stats import token_stats
from mcore_logprobs.ops.topk import topk
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.head import head_logits
from mcore_logprobs.sources.source import LogitIndices, Source, Write, entry_gradients
from tests.helpers.shards import world_group, world_rank, world_size
from tests.ops import EVERY_STATISTIC

ROWS, TILE, BLOCK = 5, 2, 4
WIDTH, VOCAB = 12, 8  # of all ranks: four columns are padding, of three ranks all of the last's
WEIGHT = torch.tensor(0.3, dtype=torch.float64)


@dataclass(frozen=True)
class ContrastOptions:
    shard: VocabShard
    temperature: float = 1.0
    segments, selection, disallowed, main_grad = None, None, None, None

    def bind(
        self, first: Tensor, second: Tensor, weight: Tensor, temperature: Tensor | None = None
    ) -> ContrastLogits:
        return ContrastLogits(self, first, second, weight, temperature)


class ContrastLogits:
    """`first - weight * second`, of logits `[n, V/TP]` and a weight `[]`, as a `Source`."""

    recomputed, linear = True, False  # a product of two of its tensors is not linear
    order_may_change, may_keep, heads = False, False, ()
    backend: Backend = reference
    latest_pass = None

    def __init__(
        self,
        options: ContrastOptions,
        first: Tensor,
        second: Tensor,
        weight: Tensor,
        temperature: Tensor | None = None,
    ) -> None:
        self.options, self.shard = options, options.shard
        self.tensors = first, second, weight, temperature
        self.batch_shape, self.num_rows, self.device = first.shape[:1], first.shape[0], first.device
        self.acc_dtype = acc_dtype(first.dtype)
        of_rows = options.temperature if temperature is None else self.to_row_order(temperature)
        self.processing = Processing.of(temperature=of_rows, valid_width=self.shard.valid_width)

    def logits(self, where: Any) -> Tensor:
        first, second, weight, _ = self.tensors
        return (first[where] - weight * second[where]).to(self.acc_dtype)

    def tiles(self) -> Iterator[ContrastTile]:
        return (ContrastTile(self, rows) for rows in row_chunks(self.num_rows, TILE))

    def tile_ends(self) -> list[int]:
        return [tile.rows.stop for tile in self.tiles()]

    def gradient(
        self, needs: Sequence[bool], *, sparse: bool = False, in_acc_dtype: bool = False
    ) -> ContrastGradient:
        return ContrastGradient(self, needs, in_acc_dtype)

    def rows_at_a_time(self, width: int, copies: int = 1) -> int:
        return TILE

    def to_row_order(self, per_token: Tensor, fill: float | None = None) -> Tensor:
        return per_token

    def to_token_order(self, per_row: Tensor, fill: float = 0) -> Tensor:
        return per_row

    def compacted(self, valid_mask: Tensor | None) -> ContrastLogits:
        return self

    def in_whole_rows(self, **_: Any) -> ContrastLogits:
        return self

    def in_token_order(self) -> ContrastLogits:
        return self


class ContrastTile:
    def __init__(self, source: ContrastLogits, rows: slice) -> None:
        self.rows, self._source, self._valid = rows, source, source.shard.valid_width

    def block(self, columns: slice) -> Chunk:
        logits = self._source.logits((self.rows, columns))
        return self._source.processing.chunk(logits, self.rows, columns)

    def chunks(self) -> Iterator[ChunkAt]:
        for columns in row_chunks(self._valid, BLOCK):
            yield ChunkAt(self.rows, columns, self.block(columns))

    def whole_rows(self) -> Iterator[ChunkAt]:
        columns = slice(0, self._valid)
        yield ChunkAt(self.rows, columns, self.block(columns))

    def held_chunks(self) -> list[ChunkAt]:
        return list(self.chunks())

    def raw_logits(self) -> Tensor:
        raw = self._source.logits(self.rows)
        raw[:, self._valid :] = -torch.inf
        return raw

    def blocks_of(self, raw_logits: Tensor) -> Iterator[ChunkAt]:
        for columns in row_chunks(self._valid, BLOCK):
            chunk = self._source.processing.chunk(raw_logits[:, columns], self.rows, columns)
            yield ChunkAt(self.rows, columns, chunk)

    def target_logits(self, local_target: Tensor) -> Tensor:
        rows = torch.arange(self.rows.start, self.rows.stop, device=local_target.device)
        raw = self.raw_at(LogitIndices(rows, local_target))
        return torch.where(local_target >= 0, raw, 0.0)

    def unscaled_logits(self, entries: LogitIndices) -> Tensor:
        return self._source.processing.unscaled_entries(self.raw_at(entries), entries.column)

    def raw_at(self, entries: LogitIndices) -> Tensor:
        """`[e]`, any value where the column is -1."""
        return self._source.logits((entries.row, entries.column.clamp(min=0)))


class ContrastGradient:
    def __init__(self, source: ContrastLogits, needs: Sequence[bool], in_acc_dtype: bool) -> None:
        self._source, self._in_acc_dtype = source, in_acc_dtype
        self._scale: Tensor | float = 1.0
        self._grads = [
            torch.zeros_like(x, dtype=source.acc_dtype) if needed and x is not None else None
            for x, needed in zip(source.tensors[:3], needs, strict=False)
        ]

    def collect(self, tile: ContrastTile, placed: ChunkAt, write: Write) -> None:
        on_raw = torch.empty_like(placed.chunk.logits)
        write(placed, on_raw)
        self._add((tile.rows, placed.columns), on_raw / self._scale)

    def scaled_by(self, scale: Tensor) -> None:
        self._scale = scale  # sums are float32, which needs none

    def collect_entries(self, tile: ContrastTile, entries: LogitIndices, upstream: Tensor) -> None:
        raw, processing = partial(tile.raw_at, entries), self._source.processing
        _, on_raw = entry_gradients(upstream, entries, raw, processing)
        self._add((entries.row, entries.column.clamp(min=0)), on_raw)

    def _add(self, where: Any, on_raw: Tensor) -> None:
        first, second, weight = self._grads
        _, of_second, of_weight, _ = self._source.tensors
        for grad, share in ((first, on_raw), (second, -of_weight * on_raw)):
            if grad is not None and isinstance(where[0], Tensor):
                grad.index_put_(where, share, accumulate=True)
            elif grad is not None:
                grad[where] += share
        if weight is not None:  # a row of which nothing is asked may hold NaN
            weight -= (on_raw * of_second[where].masked_fill(on_raw == 0, 0.0)).sum()

    def end_tile(self, tile: ContrastTile) -> None: ...

    def finish(self) -> tuple[Tensor | None, ...]:
        first, second, weight = self._grads
        if weight is not None:
            weight = all_reduce_sum(weight, self._source.shard.group)
        return tuple(
            x if x is None or tensor is None or self._in_acc_dtype else x.to(tensor.dtype)
            for x, tensor in zip((first, second, weight), self._source.tensors, strict=False)
        )


def weighted(x: Tensor) -> Tensor:
    """A sum whose grad_output differs from place to place; nothing of what is filtered out."""
    x = torch.where(x.isneginf(), 0.0, x) if x.is_floating_point() else x
    return (x * torch.linspace(-1.0, 2.0, x.numel(), dtype=x.dtype).view_as(x)).sum()


def operations(source: Source, target: Tensor, ids: Tensor) -> dict[str, Tensor]:
    wanted = Statistics.of(**EVERY_STATISTIC)
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
    both = replay(
        source, target, ReplayRequest(record, "error", False, True), full_spec=wanted.spec
    )
    for name in ("logprobs", "full_logprobs", "entropy", "sum_pi_squared"):
        found[f"replay and full: {name}"] = getattr(both, name)
    found["sampled ids"], found["sampled"] = sample(source, seed=5, top_p=0.9)
    found["policy loss"], _ = policy_loss(
        source, target, wanted, by_token, ids[:, 0], denominator=3.0, ignore_index=-100
    )
    return found


def by_token(logprobs: Tensor, entropy: Tensor | None, weight: Tensor) -> Tensor:
    assert entropy is not None
    return weight * logprobs.exp() - 0.5 * entropy


def contrast_of(first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
    return (first - weight * second)[:, :VOCAB]


def expected(
    logits: Tensor, target: Tensor, ids: Tensor, temperature: Tensor | None
) -> dict[str, Tensor]:
    log_p = logits.log_softmax(-1)
    divisor = 1.0 if temperature is None else temperature.unsqueeze(1)
    at = logits.gather(1, target.unsqueeze(1))
    top, entropy = logits.topk(3), -(log_p.exp() * log_p).sum(-1)
    drawn, _ = ml.vocab_parallel_sample(logits.detach(), seed=5, top_p=0.9)
    replayed = torch.cat([at, logits.gather(1, (target.unsqueeze(1) + 1) % VOCAB)], 1)
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
        "teacher": (ids.double() / divisor).log_softmax(-1),
        "top-k": kept_alone(logits, logits >= logits.topk(4).values[:, -1:], target),
        "top-p": kept_alone(logits, within(log_p.exp(), 0.9), target),
        "replay": replayed.log_softmax(-1)[:, 0],
        "replay and full: logprobs": replayed.log_softmax(-1)[:, 0],
        "replay and full: full_logprobs": log_p.gather(1, target.unsqueeze(1)).squeeze(1),
        "replay and full: entropy": entropy,
        "replay and full: sum_pi_squared": (2 * log_p).exp().sum(-1),
        "sampled ids": drawn,
        "sampled": kept_alone(logits, within(log_p.exp(), 0.9), drawn).detach(),
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


def on_a_rank(
    first: Tensor, second: Tensor, target: Tensor, ids: Tensor, temperature: Tensor | None
) -> dict[str, Any]:
    """Each result of the operations, and its gradients of this rank's columns."""
    parts = inputs_of_a_rank(first, second)
    source = ContrastOptions(shard_of_a_rank()).bind(*parts, temperature)
    return with_gradients(operations(source, target, ids), parts)


def inputs_of_a_rank(*logits: Tensor) -> list[Tensor]:
    """This rank's columns, and the weight."""
    own = [x.chunk(world_size(), 1)[world_rank()].clone() for x in logits]
    return [x.requires_grad_() for x in (*own, WEIGHT.clone())]


def shard_of_a_rank() -> VocabShard:
    group: ProcessGroup | None = world_group() if world_size() > 1 else None
    return VocabShard.of(WIDTH // world_size(), group, VOCAB)


def divergences_on_a_rank(first: Tensor, second: Tensor, other: Tensor) -> dict[str, Any]:
    """Divergences of the new source as the student, as the teacher and as both."""
    first, second, other, weight = parts = inputs_of_a_rank(first, second, other)
    shard = shard_of_a_rank()
    contrast = ContrastOptions(shard).bind
    given = given_logits(other, tp_group=shard.group, vocab_size=VOCAB)
    sides = {
        "student": (contrast(first, second, weight), given),
        "teacher": (given, contrast(first, second, weight)),
        "both": (contrast(first, second, weight), contrast(second, other, weight)),
    }
    found = {
        f"{name} {kind}": kl_div(*both, kind=kind)
        for name, both in sides.items()
        for kind in ("forward", "jsd")
    }
    return with_gradients(found, parts)


def divergences(first: Tensor, second: Tensor, other: Tensor, weight: Tensor) -> dict[str, Tensor]:
    new, shifted = contrast_of(first, second, weight), contrast_of(second, other, weight)
    other = other[:, :VOCAB]
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


@pytest.mark.parametrize("temperature", [None, torch.linspace(0.5, 1.5, ROWS)], ids=["1", "token"])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_operations_take_a_new_source_as_it_is(ranks: Any, tp: int, temperature: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator)
    target = torch.randint(VOCAB, (ROWS,), generator=generator)
    ids = torch.randint(VOCAB, (ROWS, 2), generator=generator)
    inputs = [x.clone().requires_grad_() for x in (first, second, WEIGHT)]
    logits = contrast_of(*inputs)
    if temperature is not None:
        logits = logits / temperature.unsqueeze(1)
    wanted = with_gradients(expected(logits, target, ids, temperature), inputs)
    assert_found(ranks(tp).run(on_a_rank, first, second, target, ids, temperature), wanted, tp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_new_source_in_lower_precision(dtype: torch.dtype) -> None:
    first, second = torch.randn(2, ROWS, WIDTH).to(dtype)
    inputs = [x.clone().requires_grad_() for x in (first, second, WEIGHT.to(dtype))]
    source = ContrastOptions(VocabShard.of(WIDTH, None, VOCAB)).bind(*inputs)
    target = torch.arange(ROWS)
    found = token_stats(source, target, Statistics.of(), None).logprobs
    logits = contrast_of(*inputs).float()  # the sum is rounded as the source's
    wanted = logits.log_softmax(-1).gather(1, target.unsqueeze(1)).squeeze(1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted)
    in_head, _ = policy_loss(  # float16's is multiplied by a power of two, another in each tile
        source,
        target,
        Statistics.of(),
        lambda logprobs, entropy, weight: weight * logprobs,
        torch.linspace(-1.0, 2.0, ROWS),
        denominator=1.0,
        ignore_index=None,
    )
    for value in (weighted(found), in_head):
        wanted_grads = torch.autograd.grad(weighted(wanted), inputs, retain_graph=True)
        for x, y in zip(torch.autograd.grad(value, inputs), wanted_grads, strict=True):
            assert x.dtype == dtype
            torch.testing.assert_close(x, y, rtol=4 * torch.finfo(dtype).eps, atol=2e-6)


def test_a_row_of_nan_of_which_nothing_is_asked_leaves_the_others_alone() -> None:
    first, second = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    spoilt, asked = second.clone(), torch.ones(ROWS)
    spoilt[2], asked[2] = torch.nan, 0.0
    target, ids = torch.arange(ROWS), torch.arange(2 * ROWS).view(ROWS, 2) % VOCAB

    def gradients(of_second: Tensor) -> list[tuple[Tensor, ...]]:
        inputs = [x.clone().requires_grad_() for x in (first, of_second, WEIGHT)]
        source = ContrastOptions(VocabShard.of(WIDTH, None, VOCAB)).bind(*inputs)
        results = (
            token_stats(source, target, Statistics.of(), None).logprobs.unsqueeze(1),  # by chunks
            gather(source, ids),  # by single logits
        )
        return [torch.autograd.grad((x * asked.unsqueeze(1)).sum(), inputs) for x in results]

    torch.testing.assert_close(gradients(spoilt), gradients(second), rtol=0, atol=0)


def test_a_source_that_is_not_linear_has_no_second_derivative_in_silence() -> None:
    inputs = [torch.randn(ROWS, WIDTH, dtype=torch.float64).requires_grad_() for _ in range(2)]
    inputs.append(WEIGHT.clone().requires_grad_())
    source = ContrastOptions(VocabShard.of(WIDTH, None, VOCAB)).bind(*inputs)
    entries = gather(source, torch.zeros(ROWS, 1, dtype=torch.int64))
    (of_second,) = torch.autograd.grad(entries.sum(), inputs[1:2], create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        of_second.sum().backward()  # minus the weight, once for each row


def test_a_function_of_logits_takes_a_new_source() -> None:
    inputs = [torch.randn(ROWS, WIDTH, dtype=torch.float64).requires_grad_() for _ in range(2)]
    inputs.append(WEIGHT.clone().requires_grad_())
    row = torch.arange(1.0, ROWS + 1)
    source = ContrastOptions(VocabShard.of(WIDTH, None, None)).bind(*inputs)
    found = map_logits(source, lambda z, of_row: z.square() * of_row.unsqueeze(1), row)
    wanted = (inputs[0] - inputs[2] * inputs[1]).square() * row.unsqueeze(1)
    each = (with_gradients({"map": x}, inputs) for x in (found, wanted))
    torch.testing.assert_close(*each)


def test_a_function_of_logits_refuses_a_temperature_that_it_is_to_apply() -> None:
    inputs = [torch.randn(ROWS, WIDTH, dtype=torch.float64) for _ in range(2)]
    options = ContrastOptions(VocabShard.of(WIDTH, None, None), temperature=2.0)
    with pytest.raises(ValueError, match=r"^temperature: expected 1\.0 of a source"):
        map_logits(options.bind(*inputs, WEIGHT), torch.Tensor.square)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_divergence_takes_a_new_source_on_either_side(ranks: Any, tp: int) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = torch.randn(3, ROWS, WIDTH, dtype=torch.float64, generator=generator)
    inputs = [x.clone().requires_grad_() for x in (*tensors, WEIGHT)]
    wanted = with_gradients(divergences(*inputs), inputs)
    assert_found(ranks(tp).run(divergences_on_a_rank, *tensors), wanted, tp)


def test_sources_that_are_cut_in_other_ways_are_no_pair() -> None:
    tensor = torch.randn(ROWS, WIDTH)
    student = ContrastOptions(VocabShard.of(WIDTH, None, None)).bind(tensor, tensor, WEIGHT)
    teacher = head_logits(tensor, torch.randn(WIDTH, WIDTH), chunk_size=TILE - 1)
    with pytest.raises(ValueError, match="teacher: expected tiles that end at rows"):
        kl_div(student, teacher)


class Backwards(ContrastLogits):
    """Its rows are the tokens from the last to the first."""

    def to_row_order(self, per_token: Tensor, fill: float | None = None) -> Tensor:
        return per_token.flip(0)

    def to_token_order(self, per_row: Tensor, fill: float = 0) -> Tensor:
        return per_row.flip(0)


def test_the_rows_of_a_pair_are_of_the_same_tokens() -> None:
    first, second, other = torch.randn(3, ROWS, WIDTH, dtype=torch.float64)
    options = ContrastOptions(VocabShard.of(WIDTH, None, VOCAB))
    student = Backwards(options, first.flip(0), second.flip(0), WEIGHT)
    given = given_logits(other, vocab_size=VOCAB)
    found = kl_div(student, given)
    torch.testing.assert_close(found, divergences(first, second, other, WEIGHT)["student forward"])
    for pair in ((given, student), (options.bind(first, second, WEIGHT), student)):
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
            own = tuple(x.chunk(tp, 1)[rank] if x.dim() else x for x in grads)
            torch.testing.assert_close(found["grads"][name], own, msg=name)
