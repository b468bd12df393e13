"""NeMo-RL's functions of logits: a table of calls and of what they are in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mcore_logprobs.dropin import nemo_rl
from tests.dropin.common import LAYOUTS, VOCAB, Rank, assert_near, filtered, spread
from tests.dropin.common import next_token_logprobs as next_tokens
from tests.engine.truths import entropy_of, take

B, K = 2, 5
SAMPLING = {
    "none": None,
    "off": SimpleNamespace(top_k=-1, top_p=1.0, temperature=0.5),
    "off by None": SimpleNamespace(top_k=None, top_p=None, temperature=0.5),
    "top-k": SimpleNamespace(top_k=9, top_p=1.0, temperature=1.0),
    "both": SimpleNamespace(top_k=14, top_p=0.8, temperature=1.0),
}


class Data:
    """Ids `[b, length]`; logits `[b, padded, V]`, as a model on padded ids gives them."""

    def __init__(self, length: int, padded: int) -> None:
        generator = torch.Generator().manual_seed(length)
        self.logits = torch.randn(B, padded, VOCAB, generator=generator) * 2
        self.ids = torch.randint(0, VOCAB, (B, length), generator=generator)
        self.ids[:, 1::2] = self.logits[:, : length - 1 : 2].argmax(-1)  # no sampler drops these
        self.teacher = torch.randn(B, length, VOCAB, generator=generator) * 2
        self.top = self.teacher.topk(K, dim=-1)
        self.several = torch.randint(0, VOCAB, (B, length, K), generator=generator)
        self.columns = torch.tensor([3, 17, 3, 23])


class Row(NamedTuple):
    """A call on a rank's logits, by the arguments that upstream's callers give; its truth.

    Attributes:
        call, truth: of (rank, logits, data) and (whole logits in float64, data); what they return
            has one tensor for each differentiable output.
        split: each rank has its own columns of the result.
        cp: context parallelism too, and padded logits.
    """

    call: Callable[[Rank, Tensor, Data], Any]
    truth: Callable[[Tensor, Data], Any]
    split: bool = False
    cp: bool = False


def filters(sampling: str) -> tuple[int | None, float]:
    given = SAMPLING[sampling]
    return (None, 1.0) if given is None else (given.top_k, given.top_p or 1.0)


def rows() -> Iterator[tuple[str, Row]]:
    functions: dict[str, tuple[Callable[[Rank, Data], tuple], Callable[[Tensor, Data], Tensor]]] = {
        "DistributedLogprob": (
            lambda r, d: (d.ids, *r.range, r.tp),
            lambda z, d: take(z.log_softmax(-1), d.ids),
        ),
        "ChunkedDistributedLogprob": (
            lambda r, d: (d.ids, *r.range, 2, r.tp),
            lambda z, d: take(z.log_softmax(-1), d.ids),
        ),
        "DistributedCrossEntropy": (
            lambda r, d: (r.columns(d.teacher), r.tp),
            lambda z, d: -(d.teacher.double().softmax(-1) * z.log_softmax(-1)).sum(-1),
        ),
        "DistributedLogprobWithSampling": (
            lambda r, d: (d.ids, r.tp, 12, 0.9),
            lambda z, d: take(filtered(z, 12, 0.9).log_softmax(-1), d.ids),
        ),
        "ChunkedDistributedLogprobWithSampling": (
            lambda r, d: (d.ids, r.tp, None, 0.9, 2),
            lambda z, d: take(filtered(z, None, 0.9).log_softmax(-1), d.ids),
        ),
        "ChunkedDistributedGatherLogprob": (
            lambda r, d: (d.several, *r.range, 2, r.tp),
            lambda z, d: take(z.log_softmax(-1), d.several),
        ),
        "ChunkedDistributedEntropy": (
            lambda r, d: (2, r.tp),
            lambda z, d: -entropy_of(z.log_softmax(-1)),
        ),
    }
    for name, (given, truth) in functions.items():

        def apply(r: Rank, z: Tensor, d: Data, name: str = name, given: Any = given) -> Tensor:
            function = getattr(nemo_rl, name)
            assert not function.apply(z, *given(r, d), True).requires_grad
            return function.apply(z, *given(r, d), False)

        yield name, Row(apply, truth)

    def tempered(z: Tensor, d: Data) -> Tensor:
        return (z / 0.7).log_softmax(-1)

    def gathered(r: Rank, z: Tensor, d: Data) -> Tensor:
        place = {"vocab_start_index": r.range[0], "vocab_end_index": r.range[1]}
        return nemo_rl.gather_logits_at_global_indices(
            z, d.several, r.tp, r.cp_group, **place, chunk_size=3
        )

    one, every = nemo_rl.vocab_parallel_log_softmax, nemo_rl.vocab_parallel_full_log_softmax
    columns = nemo_rl.vocab_parallel_gather_columns
    yield from {
        "vocab_parallel_log_softmax": Row(
            lambda r, z, d: one(z, 0.7, tp_group=r.tp), tempered, split=True
        ),
        "vocab_parallel_full_log_softmax": Row(
            lambda r, z, d: every(z, 0.7, tp_group=r.tp), tempered
        ),
        "vocab_parallel_gather_columns": Row(
            lambda r, z, d: columns(z, d.columns, tp_group=r.tp), lambda z, d: z[..., d.columns]
        ),
        "gather_logits_at_global_indices": Row(
            gathered, lambda z, d: take(z[:, : d.ids.shape[1]], d.several), cp=True
        ),
    }.items()
    for sampling, chunk_size in {
        "none": None,
        "off": 3,
        "off by None": 3,
        "top-k": 2,
        "both": 2,
    }.items():

        def by_position(
            r: Rank, z: Tensor, d: Data, sampling: str = sampling, chunk_size: Any = chunk_size
        ) -> Tensor:
            place = (d.ids, *r.range, r.tp)
            last = (r.cp_group, chunk_size, SAMPLING[sampling])
            function = nemo_rl.from_parallel_logits_to_logprobs
            value = function(z, *place, False, *last)
            quiet = function(z, *place, True, *last)
            assert not quiet.requires_grad
            assert torch.equal(quiet, value.detach())
            return value

        def by_name(r: Rank, z: Tensor, d: Data, sampling: str = sampling) -> Tensor:
            return nemo_rl.get_next_token_logprobs_from_logits(
                d.ids,
                z,
                vocab_parallel_rank=r.column,
                vocab_parallel_group=r.tp,
                context_parallel_group=r.cp_group,
                sampling_params=SAMPLING[sampling],
            )

        def truth(z: Tensor, d: Data, sampling: str = sampling) -> Tensor:
            return next_tokens(z, d.ids, *filters(sampling))

        yield f"from_parallel {sampling} {chunk_size}", Row(by_position, truth, cp=True)
        yield f"get_next_token {sampling}", Row(by_name, truth, cp=True)
    for whole in (True, False):
        for entropy in (True, False):

            def distill(
                r: Rank, z: Tensor, d: Data, whole: bool = whole, entropy: bool = entropy
            ) -> list:
                student, teacher, h_all = nemo_rl.get_distillation_topk_logprobs_from_logits(
                    z,
                    d.top.values,
                    d.top.indices,
                    whole,
                    entropy,
                    vocab_parallel_rank=r.column,
                    vocab_parallel_group=r.tp,
                    context_parallel_group=r.cp_group,
                )
                assert not teacher.requires_grad
                assert_near(teacher, d.top.values.double().log_softmax(-1)[:, :-1])
                assert (h_all is not None) == entropy
                return [student, h_all] if entropy else [student]

            yield (
                f"distillation whole={whole} entropy={entropy}",
                Row(
                    distill,
                    lambda z, d, whole=whole, entropy=entropy: distilled(z, d, whole, entropy),
                    cp=True,
                ),
            )


def distilled(z: Tensor, d: Data, whole: bool, entropy: bool) -> list[Tensor]:
    z = z[:, : d.ids.shape[1]]
    logp = z.log_softmax(-1)
    ids = d.top.indices
    student = take(logp, ids) if whole else take(z, ids).log_softmax(-1)
    found = [student[:, :-1]]
    return [*found, -entropy_of(logp)[:, :-1]] if entropy else found


ROWS = dict(rows())


def loss_of(values: list[Tensor]) -> Tensor:
    """Filtered targets are left out; every other number has a weight of its own."""
    total = torch.zeros((), dtype=values[0].dtype)
    for value in values:
        weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(3))
        total = total + (torch.where(value.isfinite(), value, 0.0) * weights.to(value)).sum()
    return total


def listed(result: Any) -> list[Tensor]:
    return result if isinstance(result, list) else [result]


def run(case: tuple[str, int, int, int, int, torch.dtype]) -> dict[str, Any]:
    name, tp, cp, length, padded, dtype = case
    r, d, row = Rank(tp, cp), Data(length, padded), ROWS[name]
    leaf = r.shard(d.logits.to(dtype)).detach().requires_grad_()
    before = leaf.detach().clone()
    values = listed(row.call(r, leaf, d))
    if row.split:  # the loss is of all columns: this rank's part of their weights
        weights = torch.randn(d.logits.shape, generator=torch.Generator().manual_seed(3))
        (values[0] * r.columns(weights)).sum().backward()
    else:
        loss_of(values).backward()
    assert torch.equal(leaf.detach(), before)
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype
    return {"values": values, "grad": leaf.grad}


def exact(name: str, d: Data, logits: Tensor) -> tuple[list[Tensor], Tensor]:
    leaf = logits.double().requires_grad_()
    values = listed(ROWS[name].truth(leaf, d))
    loss_of(values).backward()
    assert leaf.grad is not None
    return [value.detach() for value in values], leaf.grad


@pytest.mark.parametrize(("tp", "cp"), [*LAYOUTS, (3, 1)])
def test_every_function(ranks, tp: int, cp: int) -> None:
    cases = []
    for name, row in ROWS.items():
        if row.cp:
            cases += [(name, tp, cp, *lengths, torch.float32) for lengths in ((8, 8), (9, 12))]
        elif cp == 1:
            cases.append((name, tp, 1, 6, 6, torch.float32))
    for case, results in zip(cases, ranks(tp * cp).run_many(run, cases), strict=True):
        assert isinstance(results, list), (case, results)
        name, _, _, *lengths, _ = case
        d = Data(*lengths)
        wanted, grad = exact(name, d, d.logits)
        if any(word in name for word in ("WithSampling", "top-k", "both")):
            assert 0 < wanted[0].isfinite().sum() < wanted[0].numel()
        if ROWS[name].split:
            assert_near(torch.cat([result["values"][0] for result in results], -1), wanted[0])
        else:
            for result in results:
                for got, want in zip(result["values"], wanted, strict=True):
                    assert got.dtype == torch.float32
                    assert_near(got, want)
        # Every rank computes the whole loss, and the gather's backward sums over CP.
        found = spread([result["grad"] for result in results], tp, cp, d.logits.shape)
        assert_near(found, grad * cp)


# Functions whose group may be left out.
GROUPLESS = ("vocab_parallel", "gather_logits", "get_next_token", "distillation")


def alone(name: str) -> dict[str, Any]:
    """In a world of two ranks, too, None as a TP group is this process alone."""
    logits = Data(6, 6).logits
    assert torch.equal(nemo_rl.vocab_parallel_argmax(logits), logits.argmax(-1))
    return run((name, 0, 1, 6, 6, torch.float32))


@pytest.mark.parametrize("world", [1, 2])
def test_no_group_is_no_tensor_parallelism(ranks, world: int) -> None:
    names = [name for name in ROWS if name.startswith(GROUPLESS)]
    d = Data(6, 6)
    for name, results in zip(names, ranks(world).run_many(alone, names), strict=True):
        assert isinstance(results, list), (name, results)
        wanted, grad = exact(name, d, d.logits)
        for result in results:
            for got, want in zip(result["values"], wanted, strict=True):
                assert_near(got, want)
            assert_near(result["grad"], grad)


def test_low_precision_logits_give_float32(ranks) -> None:
    names = ("ChunkedDistributedLogprob", "ChunkedDistributedEntropy")
    cases = [(name, 2, 1, 6, 6, torch.bfloat16) for name in names]
    d = Data(6, 6)
    for name, results in zip(names, ranks(2).run_many(run, cases), strict=True):
        for result in results:
            assert result["values"][0].dtype == torch.float32
            assert_near(result["values"][0], exact(name, d, d.logits.bfloat16())[0][0])


def no_gradient(tp: int) -> dict[str, Any]:
    r, d = Rank(tp, 1), Data(6, 6)
    leaf = r.columns(d.logits).clone().requires_grad_()
    before = leaf.detach().clone()
    start, end = r.range
    logp = nemo_rl._compute_distributed_log_softmax(leaf, r.tp)
    p = nemo_rl._compute_distributed_softmax(leaf, r.tp)
    values, ids = nemo_rl.distributed_vocab_topk(
        leaf, K, r.tp, vocab_start_index=start, vocab_end_index=end, chunk_size=2
    )
    everything, _ = nemo_rl.distributed_vocab_topk(
        leaf, VOCAB + 9, r.tp, vocab_start_index=start, vocab_end_index=end
    )
    best = nemo_rl.vocab_parallel_argmax(leaf, tp_group=r.tp)
    flat = leaf.detach().flatten(0, 1)[:12]
    whole = nemo_rl.all_to_all_vp2sq(flat, r.tp)
    assert torch.equal(nemo_rl.all_to_all_sq2vp(whole, r.tp), flat)
    assert torch.equal(leaf.detach(), before)
    assert not any(x.requires_grad for x in (logp, p, values, everything))
    with pytest.raises(ValueError):
        nemo_rl.all_to_all_vp2sq(flat[0], r.tp)
    found = {"logp": logp, "p": p, "values": values, "ids": ids, "everything": everything}
    return found | {"best": best, "whole": whole}


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_without_gradients(ranks, tp: int) -> None:
    logits = Data(6, 6).logits
    results = ranks(tp).run(no_gradient, tp)
    whole = {n: torch.cat([r[n] for r in results], -1) for n in ("logp", "p")}
    assert_near(whole["logp"], logits.double().log_softmax(-1))
    assert_near(whole["p"], logits.double().softmax(-1))
    top = logits.topk(K, dim=-1)
    for result in results:
        assert torch.equal(result["values"], top.values)
        assert torch.equal(result["ids"], top.indices)
        assert result["everything"].shape == (B, 6, VOCAB)
        assert torch.equal(result["best"], logits.argmax(-1))
    rows = torch.cat([result["whole"] for result in results])
    assert torch.equal(rows, logits.flatten(0, 1)[:12])


def uneven_rows() -> None:
    r = Rank(2, 1)
    nemo_rl.all_to_all_vp2sq(torch.randn(5, 4), r.tp)


def test_uneven_rows_raise(ranks) -> None:
    errors = ranks(2).run_expecting_errors(uneven_rows)
    assert [type(error) for error in errors] == [ValueError, ValueError]


def test_a_top_k_of_nothing_is_refused() -> None:
    d = Data(6, 6)
    with pytest.raises(ValueError, match="k >= 1, got k = 0"):
        nemo_rl.get_distillation_topk_logprobs_from_logits(
            d.logits, d.top.values[..., :0], d.top.indices[..., :0], True, False
        )
