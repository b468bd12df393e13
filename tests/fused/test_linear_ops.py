"""linear_topk, _gather, _sampling_logprobs and _topk_distill against plain torch in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import megatron.core  # noqa: F401  (the ranks' fork server imports it once for all of them)
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from mcore_logprobs import (
    linear_gather,
    linear_map,
    linear_sampling_logprobs,
    linear_topk,
    linear_topk_distill,
    vocab_parallel_topk,
)
from mcore_logprobs.ops.head import HeadLogits, HeadTile
from tests.fused.common import LAYOUTS, Case, Truth, make_problem, shard_problem
from tests.helpers import oracles
from tests.helpers.memory import TensorsMade
from tests.logits.common import make_target, on_ranks, world_group

FINISH = ("logit_scale", "softcap", "temperature", "vocab_size")
DTYPES = [torch.float32, torch.bfloat16]
OPTIONS = {
    "plain": {},
    "all": {
        "logit_scale": 0.7,
        "softcap": 5.0,
        "temperature": 1.4,
        "vocab_size": 17,
        "chunk_size": 5,
    },
}


@dataclass
class OpCase(Case):
    """A call whose result is a tuple of tensors; `expected` is the same in plain torch."""

    args: tuple[Any, ...] = ()

    def roots(self, result: Any) -> dict[str, tuple[Tensor, Tensor]]:
        results = enumerate(_tuple(result))
        return {str(i): (x, _upstream(x)) for i, x in results if x is not None and x.requires_grad}

    def expected(self, z: Tensor) -> tuple[Tensor, ...]:
        """Of finished logits `[..., V]`."""
        raise NotImplementedError

    def truth(self, dtype: torch.dtype = torch.float64) -> Truth:
        problem, exact = self.problem, dtype == torch.float64
        leaves = {
            name: (x.double() if exact else x.clone()).requires_grad_()
            for name, x in problem.leaves().items()
        }
        raw = problem.raw(leaves, dtype)
        finish = {name: x for name, x in self.options.items() if name in FINISH}
        own = finish.get("temperature")
        if isinstance(own, Tensor):
            finish["temperature"] = own.unsqueeze(-1)
        z = oracles.finished_logits(raw, bias=leaves.get("bias"), dtype=dtype, **finish)
        results = self.expected(z)
        roots = list(self.roots(results).values())
        total = sum((torch.where(x.isfinite(), x, 0.0) * g.to(dtype)).sum() for x, g in roots)
        grads = torch.autograd.grad(total, list(leaves.values()))
        values = tuple(x.detach() for x in results)
        return Truth(values, dict(zip(leaves, grads, strict=True)), z.detach())

    def check_result(self, result: Any, exact: Truth, plain: Truth, ulps: float) -> None:
        first = _tuple(self.runs[0][0])
        for i, (x, y, z) in enumerate(zip(_tuple(result), exact.stats, plain.stats, strict=True)):
            assert torch.equal(x, first[i]), "ranks differ"
            oracles.assert_no_worse(x, z, y, name=str(i), ulps=ulps)


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _upstream(x: Tensor) -> Tensor:
    """The same for every dtype and rank, and no two entries alike; 0 where x is infinite."""
    values = torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(x.dtype)
    return torch.where(x.isfinite(), values, 0.0)


# ---- gather -------------------------------------------------------------------------------------


class GatherCase(OpCase):
    def call(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, **parallel: Any) -> Any:
        return linear_gather(hidden, weight, *self.args, bias=bias, **parallel, **self.options)

    def expected(self, z: Tensor) -> tuple[Tensor, ...]:
        ids = self.args[0]
        z = z.log_softmax(-1) if self.options.get("log_softmax") else z
        return (torch.where(ids >= 0, z.gather(-1, ids.clamp(min=0)), 0.0),)


@pytest.mark.parametrize("log_softmax", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gather(layout, dtype, options, log_softmax):
    lead = (6, 2)
    problem = make_problem(lead, dtype=dtype, bias=bool(options))
    ids = make_target((*lead, 4), options.get("vocab_size", 24), 0.3)
    ids[0, 0] = ids[0, 0, 0]  # repeated ids add up
    ids[1], ids[4, 1] = -100, -100
    for compact in (False, True):
        case = GatherCase(problem, {**options, "log_softmax": log_softmax, "compact": compact})
        case.args = (ids,)
        case.run(layout).check()


@pytest.mark.parametrize("log_softmax", [False, True])
@pytest.mark.parametrize("layout", [(1, False), (2, True)], ids=str)
def test_gather_from_several_blocks_with_a_temperature_a_row(layout, log_softmax):
    problem = make_problem((6, 2), width=4, vocab=9_002, bias=True)
    options = {"temperature": torch.rand(6, 2) + 0.5, "softcap": 4.0, "logit_scale": 0.7}
    options["log_softmax"] = log_softmax
    case = GatherCase(problem, options)
    case.args = (torch.randint(0, 9_002, (6, 2, 5)),)
    case.run(layout).check(ulps=16.0)


def test_a_gather_of_logits_needs_no_product():
    problem = make_problem((12,))
    hidden, weight, _ = shard_problem(problem, False)
    with FlopCounterMode(display=False) as counter:
        linear_gather(hidden, weight, torch.zeros(12, 3, dtype=torch.int64)).sum().backward()
    assert counter.get_total_flops() == 0
    a, b = torch.randn(3, 8, requires_grad=True), torch.randn(24, 3, requires_grad=True)
    ids = torch.zeros(12, 5, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:  # U twice, dA, dHidden; however many the ids
        linear_gather(hidden, weight, ids, lora=(a, b, 0.5)).sum().backward()
    assert counter.get_total_flops() == 4 * 2 * 12 * a.numel()
    with FlopCounterMode(display=False) as counter:
        out = linear_gather(hidden, weight, torch.zeros(12, 3, dtype=torch.int64), log_softmax=True)
        out.sum().backward()
    assert counter.get_total_flops() == 4 * 2 * 12 * weight.numel()


# ---- top-k --------------------------------------------------------------------------------------


class TopKCase(OpCase):
    def call(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, **parallel: Any) -> Any:
        return linear_topk(hidden, weight, *self.args, bias=bias, **parallel, **self.options)

    def expected(self, z: Tensor) -> tuple[Tensor, ...]:
        values, ids = z.topk(self.args[0], -1)
        mask = self.options.get("mask")
        if mask is not None:
            values, ids = values * mask.unsqueeze(-1), ids * mask.unsqueeze(-1)
        return values, ids


@pytest.mark.parametrize("k", [1, 9])  # 9: more than a shard of three
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_topk(layout, dtype, options, k):
    case = TopKCase(make_problem(dtype=dtype, bias=bool(options)), dict(options))
    case.args = (k,)
    case.run(layout).check()


@pytest.mark.parametrize("compact", [False, True])
def test_topk_of_masked_rows(compact):
    mask = torch.arange(12).view(6, 2) % 3 != 0
    case = TopKCase(make_problem(), {"mask": mask, "compact": compact, "chunk_size": 4})
    case.args = (3,)
    for vocab_size in (24, 12):  # 12: nothing is left for the second rank
        case.options["vocab_size"] = vocab_size
        case.run((2, True)).check()


def _ties(world_vocab: int) -> tuple:
    """Products of small integers, exact on every path and full of ties."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randint(-1, 2, (8, 4), generator=generator).float()
    whole = torch.randint(-1, 2, (world_vocab, 4), generator=generator).float()
    group = world_group()
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    weight = whole.tensor_split(world)[rank]
    found = linear_topk(hidden, weight, 300, tp_group=group)
    expected = vocab_parallel_topk(hidden @ weight.t(), 300, tp_group=group)
    return found, expected


@pytest.mark.parametrize("world", [1, 2])
def test_ties_stand_by_id_over_blocks_and_ranks(ranks, world):
    for found, expected in on_ranks(ranks, world, _ties, 9_000):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


# ---- top-k distillation -------------------------------------------------------------------------


class DistillCase(OpCase):
    def call(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, **parallel: Any) -> Any:
        return linear_topk_distill(
            hidden, weight, *self.args, bias=bias, **parallel, **self.options
        )

    def expected(self, z: Tensor) -> tuple[Tensor, ...]:
        teacher, ids = self.args
        mask = self.options.get("mask", torch.ones(z.shape[:-1], dtype=torch.bool))
        logp = z.log_softmax(-1)
        if self.options["normalize"] == "vocab":
            student = logp.gather(-1, ids)
        else:
            student = z.gather(-1, ids).log_softmax(-1)
        finite = torch.where(logp.isneginf(), 0.0, logp)
        entropy = -(logp.exp() * finite).sum(-1)
        q = (teacher.to(z.dtype) / self.options.get("temperature", 1.0)).log_softmax(-1)
        results = (torch.where(mask.unsqueeze(-1), student, 0.0), q)
        if self.options["entropy"]:
            return (*results, torch.where(mask, entropy, 0.0))
        return results

    def check_result(self, result: Any, exact: Truth, plain: Truth, ulps: float) -> None:
        present = tuple(x for x in result if x is not None)
        super().check_result(present, exact, plain, ulps)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("normalize", ["vocab", "topk"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_topk_distill(layout, dtype, normalize, entropy):
    mask = torch.arange(12).view(6, 2) % 4 != 1
    options = {**OPTIONS["all"], "normalize": normalize, "entropy": entropy}
    options |= {"mask": mask, "compact": entropy}
    case = DistillCase(make_problem(dtype=dtype, bias=True), options)
    case.args = (torch.randn(6, 2, 5), torch.randint(0, 17, (6, 2, 5)))
    case.run(layout).check()


# ---- all four -----------------------------------------------------------------------------------

ROWS, VOCAB, CHUNK = 256, 8192, 16
CALLS = {
    "gather": lambda h, w: linear_gather(h, w, torch.zeros(ROWS, 4).long(), chunk_size=CHUNK),
    "log-softmax": lambda h, w: linear_gather(
        h, w, torch.zeros(ROWS, 4).long(), log_softmax=True, chunk_size=CHUNK
    ),
    "topk": lambda h, w: linear_topk(h, w, 8, chunk_size=CHUNK)[0],
    "sampling": lambda h, w: linear_sampling_logprobs(
        h, w, torch.zeros(ROWS).long(), top_p=0.9, chunk_size=CHUNK
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_memory_is_a_few_chunks(name):
    hidden = torch.randn(ROWS, 32, requires_grad=True)
    weight = torch.randn(VOCAB, 32, requires_grad=True)
    chunk = CHUNK * VOCAB * 4
    with TensorsMade() as forward:
        out = CALLS[name](hidden, weight)
    kept = forward.live
    with TensorsMade() as backward:
        out[out.isfinite()].sum().backward()
    # An int64 key of a chunk is twice its size; all logits would be 16.
    for one in (*forward.made, *backward.made):
        assert one.nbytes <= 2 * chunk or one.shape == weight.shape, one
    assert kept <= ROWS * 8 * 160
    assert forward.peak <= 6 * chunk
    assert backward.peak <= 3 * chunk + 2 * weight.nbytes


@pytest.mark.parametrize(
    "call",
    [
        lambda h, w: linear_topk(h, w, 3, chunk_size=4)[0],
        lambda h, w: linear_map(h, w, lambda z: z.logsumexp(-1), chunk_size=4),
    ],
    ids=["topk", "map"],
)
def test_a_tile_of_logits_is_gone_before_the_next_is_made(call, monkeypatch):
    made: list[StorageWeakRef] = []
    raw_logits, whole_rows = HeadTile.raw_logits, HeadTile.whole_rows

    def noted(logits: Tensor) -> None:
        assert all(ref.expired() for ref in made)
        made.append(StorageWeakRef(logits.untyped_storage()))

    def noted_raw_logits(self):
        assert all(ref.expired() for ref in made)
        logits = raw_logits(self)
        noted(logits)
        return logits

    def noted_whole_rows(self):
        for placed in whole_rows(self):
            noted(placed.chunk.logits)
            yield placed
            del placed

    monkeypatch.setattr(HeadTile, "raw_logits", noted_raw_logits)
    monkeypatch.setattr(HeadTile, "whole_rows", noted_whole_rows)
    hidden = torch.randn(12, 8, requires_grad=True)
    call(hidden, torch.randn(40, 8)).sum().backward()
    assert len(made) >= 3
    assert all(ref.expired() for ref in made)


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_of_single_entries(main_dtype):
    ids = torch.randint(0, 24, (12, 30))
    hidden, weight, _ = shard_problem(make_problem((12,)), False)
    linear_gather(hidden, weight, ids).sum().backward()
    fused = torch.nn.Parameter(weight.detach().clone())
    fused.main_grad = torch.ones_like(fused, dtype=main_dtype)
    linear_gather(hidden, fused, ids, gradient_accumulation_fusion=True).sum().backward()
    expected = (weight.grad + 1.0).to(main_dtype)
    torch.testing.assert_close(fused.main_grad, expected)


NAN_CALLS = {
    "gather": lambda h, w, t: linear_gather(h, w, t.unsqueeze(-1)),
    "log-softmax": lambda h, w, t: linear_gather(h, w, t.unsqueeze(-1), log_softmax=True),
    "topk": lambda h, w, t: linear_topk(h, w, 3, mask=t >= 0)[0],
    "top-p": lambda h, w, t: linear_sampling_logprobs(h, w, t, top_p=0.9),
    "replay": lambda h, w, t: linear_sampling_logprobs(
        h, w, t, kept_ids=(torch.arange(6).repeat(6), torch.arange(7) * 6)
    ),
    "distill": lambda h, w, t: linear_topk_distill(
        h, w, torch.zeros(6, 2), torch.arange(12).view(6, 2), normalize="topk", mask=t >= 0
    )[0],
}


@pytest.mark.parametrize("name", NAN_CALLS)
def test_rows_that_do_not_count_may_hold_nan(name):
    hidden = torch.randn(6, 4)
    hidden[2] = torch.nan
    target = torch.tensor([0, 1, -100, 3, 4, 5])
    weight = torch.randn(24, 4, requires_grad=True)
    hidden.requires_grad_()
    out = NAN_CALLS[name](hidden, weight, target)
    assert not out[2].any()
    out[out.isfinite()].sum().backward()
    assert not hidden.grad[2].any()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h, w: linear_gather(h, w, torch.zeros(6, 2)), "ids: expected an integer"),
        (lambda h, w: linear_gather(h, w, torch.zeros(5, 2).long()), "ids: expected shape"),
        (lambda h, w: linear_gather(h, w, torch.full((6, 2), 24)), "ids: expected ids in"),
        (lambda h, w: linear_topk(h, w, 0), "k: expected an int from 1 to vocab_size 24"),
        (lambda h, w: linear_topk(h, w, 2, compact=True), "compact=True: expected a mask"),
        (lambda h, w: linear_sampling_logprobs(h, w, torch.zeros(6).long(), top_p=0.0), "top_p"),
        (
            lambda h, w: linear_sampling_logprobs(
                h, w, torch.zeros(6).long(), top_k=3, kept_ids=(torch.zeros(6).long(),) * 2
            ),
            "kept_ids: expected top_k and top_p to be off",
        ),
        (
            lambda h, w: linear_topk_distill(h, w, torch.zeros(6, 2), torch.zeros(6, 3).long()),
            "teacher_topk_ids: expected shape",
        ),
        (
            lambda h, w: linear_topk_distill(
                h, w, torch.zeros(6, 2), torch.zeros(6, 2).long(), normalize="all"
            ),
            "normalize: expected one of",
        ),
        *(
            (
                lambda h, w, wrong=wrong: linear_topk_distill(
                    h, w, torch.zeros(6, 2), torch.zeros(6, 2).long(), teacher_temperature=wrong
                ),
                "teacher_temperature: expected a finite number > 0",
            )
            for wrong in (0.0, -1.0, torch.nan, True)
        ),
        (lambda h, w: linear_sampling_logprobs(h, w, None, top_k=3), "target: expected a torch.T"),
    ],
    ids=range(14),
)
def test_mistakes(call, message):
    hidden, weight, _ = shard_problem(make_problem((6,)), False)
    with pytest.raises(ValueError, match=message):
        call(hidden, weight)


@pytest.mark.parametrize("bias", [False, True])
def test_topk_of_a_tile_in_several_steps(monkeypatch, bias):
    monkeypatch.setattr(HeadLogits, "rows_at_a_time", lambda *_: 2)
    problem = make_problem((7, 1), bias=bias)
    hidden, weight, own = shard_problem(problem, False)
    leaves = [x for x in (hidden, weight, own) if x is not None]
    temperature = torch.rand(7, 1) + 0.5
    values, ids = linear_topk(
        hidden, weight, 5, bias=own, temperature=temperature, tp_group=world_group()
    )
    z = (hidden @ weight.t() if own is None else hidden @ weight.t() + own) / temperature[..., None]
    expected, order = z.topk(5, dim=-1)
    assert torch.equal(ids, order)
    torch.testing.assert_close(values, expected)
    upstream = torch.randn(values.shape)
    for grad, plain in zip(
        torch.autograd.grad(values, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(grad, plain)
