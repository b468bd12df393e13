"""Rows with NaN or +inf, and upstream gradients that are 0, NaN or inf, in every operation.

A diverged model must be seen, in its own row only, and a row whose upstream is 0 costs nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    linear_token_stats,
    vocab_parallel_sampling_logprobs,
    vocab_parallel_target_rank,
    vocab_parallel_token_stats,
)
from mcore_logprobs.ops.linear_map import map_logits
from mcore_logprobs.sources.given import given_logits
from mcore_logprobs.sources.head import head_logits
from tests.engine import run
from tests.engine.cases import Case, Problem, kept_rows, parse
from tests.helpers.shards import VOCAB, on_ranks, shard, world_group, world_rank, world_size
from tests.ops import FLAGS, OPERATIONS

TRUE = 19  # of VOCAB columns: the last shard of 3 holds masked ones
ROWS = 12
SPOILT = {0: (3, torch.nan), 2: (16, torch.nan), 5: (9, torch.inf), 9: (12, torch.inf)}
SILENT = [1, 2, 9]  # upstream 0

KINDS = ("forward", "reverse", "jsd", "skewed_forward", "skewed_reverse", "total_variation")
FILTERS = ("top_k=6", "top_p=0.8", "top_k=6 top_p=0.8", "replay=True")
EVERY = " ".join(f"{flag}=True" for flag in FLAGS)
# Cases of the engine. What is spoilt is `logits` or `hidden`, where no name is given.
LINES = [
    *(
        f"{name} logits"
        for name in (
            f"token_stats {EVERY} label_smoothing=0.1",
            "answers entropy=True",
            "logprobs",
            "entropy",
            "log_softmax",
            "gather log_softmax=True",
            "topk_distill entropy=True",
            "soft_cross_entropy",
            *(f"kl_div kind={kind}" for kind in KINDS),
            *(f"topk_kl_div kind={kind}" for kind in KINDS),
            *(f"topk_kl_div tail={tail}" for tail in ("ignore", "renormalize")),
            *(f"sampling_logprobs {how}" for how in FILTERS),
            "sampling_logprobs top_p=0.8 candidates=1 dtype=bfloat16",
        )
    ),
    *(f"kl_div logits kind={kind} spoilt=teacher_logits" for kind in KINDS),
    "soft_cross_entropy logits spoilt=teacher_logits",
    *(f"topk_kl_div logits kind={kind} spoilt=teacher_logprobs" for kind in KINDS),
    *(
        f"{name} hidden chunk_size=3 softcap=8.0 bias=True"
        for name in (
            f"token_stats {EVERY}",
            "gather log_softmax=True",
            "topk_distill",
            "topk_kl_div",
            *(f"kl_div kind={kind}" for kind in KINDS),
            *(f"sampling_logprobs {how}" for how in FILTERS[:3]),
            "linear_map",
            "linear_policy_loss entropy=True",
        )
    ),
    "kl_div hidden teacher=hidden spoilt=teacher_hidden",
]
# Of these a row may hold NaN that no value and no gradient is made of.
RAW = [
    *(
        f"{name} {source}"
        for name in ("gather", "topk")
        for source in ("logits", "hidden lora=True")
    ),
    "gather hidden softcap=8.0",
    "topk_distill logits normalize=topk",
    "topk_distill hidden normalize=topk",
    "answers logits topk=3 log_softmax=False",
    "argmax logits",
    "sample logits",
    "target_rank logits",
]


class Found(NamedTuple):
    values: dict[str, Tensor]
    grad: Tensor | None  # of logits or hidden


def case_of(line: str, tp: int) -> Case:
    name, *words = line.split()
    source = next(word for word in words if word in ("logits", "hidden"))
    words.remove(source)
    told = [f"tp={tp}", "lead=[n]", "ignored=True", f"vocab_size={TRUE}", "temperature=number"]
    return parse([name, source, *told, *words])


def spoil(case: Case, problem: Problem) -> Tensor:
    """bool `[rows, columns]`: what is NaN or +inf now; all of row 4, and columns past the last."""
    given = problem.head | problem.side
    x = given[case.setting.get("spoilt", case.source)]
    before = x.clone()
    for row, (column, value) in SPOILT.items():  # a softcap of inf would be finite
        x[row, column % x.shape[-1]] = value if x.shape[-1] == VOCAB else torch.nan
    x[4] = torch.nan
    if x.shape[-1] == VOCAB:
        x[10, TRUE:] = torch.nan
    return ~(x == before)


EMPTY = [6, 7, 11]
SIDES = ("logits", "teacher_logits")
# Of two sides either, or both, or each where the other is not.
EMPTIED = {
    "logits": {"logits": slice(None)},
    "teacher": {"teacher_logits": slice(None)},
    "both": dict.fromkeys(SIDES, slice(None)),
    "apart": {"logits": slice(9), "teacher_logits": slice(9, None)},
}


def on_rank(given: tuple[Case, str]) -> Found:
    """With nothing changed, with what `spoil` makes, or with the columns of `EMPTIED` at -inf."""
    case, change = given
    problem = Problem(case)
    if change == "spoilt":
        spoil(case, problem)
    elif change:
        for name, columns in EMPTIED[change].items():
            (problem.head | problem.side)[name][EMPTY, columns] = -torch.inf
    mine = run.place(case, problem)
    outputs = case.operation(case.source, mine.head, mine.side, mine.keywords)
    roots, incoming = [], []
    for x, g in run.upstreams(case, outputs, case.setting["tp"]):
        if g.dim():
            g[SILENT] = 0.0
        roots.append(x)
        incoming.append(g)
    if roots:
        torch.autograd.backward(roots, incoming)
    first = next(iter(mine.leaves.values()))
    return Found({name: x.detach() for name, x in outputs.items()}, first.grad)


def whole(case: Case, runs: list[Found]) -> Found:
    """Outputs and gradients of all ranks."""
    op, values = case.operation, {}
    for name, x in runs[0].values.items():
        parts = [one.values[name] for one in runs]
        if op.output_dim is None:
            assert all(torch.equal(part.nan_to_num(99), x.nan_to_num(99)) for part in parts)
        values[name] = x if op.output_dim is None else torch.cat(parts, op.output_dim)
    grads = [one.grad for one in runs if one.grad is not None]
    if grads and case.source == "logits":
        return Found(values, torch.cat(grads, -1))
    return Found(values, grads[0] if grads else None)


def per_row(x: Tensor) -> Tensor:
    return x.flatten(1).any(1) if x.dim() > 1 else x


def check(case: Case, sound: Found, found: Found, raw: bool) -> None:
    problem = Problem(case)
    keep, spoilt = kept_rows(problem.side), spoil(case, problem)
    reached = torch.ones_like(spoilt)
    if case.source == "logits":
        reached[:, TRUE:] = False
    if "kept_ids" in problem.side:  # nothing outside the record plays a part
        ids, bounds = problem.side["kept_ids"]
        recorded = torch.zeros_like(reached)
        recorded[torch.arange(ROWS).repeat_interleave(bounds.diff()), ids] = True
        reached &= recorded
    bad = (spoilt & reached).any(1)
    silent = torch.zeros(ROWS, dtype=torch.bool).index_fill_(0, torch.tensor(SILENT), True)
    if "loss" in found.values:  # whose upstream is that of all rows
        assert found.values["loss"].isnan()
        silent[:] = False
    ignored = torch.zeros_like(bad) if keep is None else ~keep
    bad &= ~ignored
    for name, x in found.values.items():
        if name != "loss":
            assert torch.equal(x[~bad], sound.values[name][~bad]), name
        if name not in ("loss", "teacher") and x.is_floating_point() and not raw:
            assert torch.equal(per_row(x.isnan() | x.isposinf()), bad), name
    if found.grad is None or sound.grad is None:
        return
    assert torch.equal(found.grad[~bad], sound.grad[~bad])
    assert not found.grad[silent | ignored].any()
    loud = bad & ~silent
    if not raw and case.source == "hidden":
        assert found.grad[loud].isnan().all()
    elif not raw and case.setting.get("spoilt") is None:
        assert torch.equal(found.grad[loud].isnan(), reached[loud])


def test_every_operation_is_tried() -> None:
    exchanges = {name for name in OPERATIONS if name.startswith("all_to_all")}
    assert {line.split()[0] for line in (*LINES, *RAW)} == OPERATIONS.keys() - exchanges


@pytest.mark.parametrize("tp", [1, 3])
def test_a_spoilt_row_is_nan_and_no_other(ranks: Any, tp: int) -> None:
    cases = [case_of(line, tp) for line in (*LINES, *RAW)]
    jobs = [(case, change) for case in cases for change in ("", "spoilt")]
    runs = [[on_rank(job)] for job in jobs] if tp == 1 else ranks(tp).run_many(on_rank, jobs)
    failed = []
    for i, case in enumerate(cases):
        try:
            sound, found = (whole(case, one) for one in runs[2 * i : 2 * i + 2])
            check(case, sound, found, raw=i >= len(LINES))
        except Exception as error:
            failed.append(f"{case}: {traceback.format_exc()} {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("tp", [1, 3])
def test_rows_of_minus_infinity_alone(ranks: Any, tp: int) -> None:
    """No NaN in any value, finite gradients, and every other row as it was."""
    jobs, failed = [], []
    for line in (*LINES, "gather logits", "topk logits", "answers logits topk=3 log_softmax=False"):
        case = case_of(line, tp)
        if case.source == "logits" and "spoilt" not in case.setting:
            two = "teacher_logits" in Problem(case).side
            jobs += [(case, change) for change in ("", "logits", *(tuple(EMPTIED)[1:] * two))]
    runs = [[on_rank(job)] for job in jobs] if tp == 1 else ranks(tp).run_many(on_rank, jobs)
    others = torch.ones(ROWS, dtype=torch.bool).index_fill_(0, torch.tensor(EMPTY), False)
    for (case, change), run_ in zip(jobs, runs, strict=True):
        found = whole(case, run_)
        if not change:
            sound = found
            continue
        good = [
            not x.isnan().any() and torch.equal(x[others], sound.values[name][others])
            for name, x in found.values.items()
        ]
        if found.grad is not None and sound.grad is not None:
            good.append(bool(found.grad.isfinite().all()))
            good.append(torch.equal(found.grad[others], sound.grad[others]))
        if not all(good):
            failed.append(f"{case}, {change}: {good}")
    assert not failed, "\n".join(failed)


# ---- filters: upstream gradients, and rows of nothing --------------------------------------------


def _sampling(
    whole: Tensor, target: Tensor, upstream: Tensor, options: dict
) -> tuple[Tensor, Tensor]:
    leaf, logits = shard(whole)
    out = vocab_parallel_sampling_logprobs(
        logits, target, tp_group=world_group(), vocab_size=TRUE, temperature=0.8, **options
    )
    (grad,) = torch.autograd.grad(out, leaf, upstream)
    return out.detach(), grad


def _plain(whole: Tensor, target: Tensor, upstream: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    leaf = whole.double().requires_grad_()
    z = (leaf / 0.8).masked_fill(~kept, -torch.inf)
    out = z.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return out.detach(), torch.autograd.grad(out, leaf, upstream.double())[0]


@pytest.mark.parametrize("how", ["filter", "replay"])
@pytest.mark.parametrize(("world", "dtype"), [(1, torch.bfloat16), (3, torch.float32)], ids=str)
def test_upstream_of_kept_and_filtered_targets_as_in_plain_torch(ranks, world, dtype, how):
    """-g p over the kept columns for a target that is filtered out; NaN and inf pass through."""
    whole = torch.randn(ROWS, VOCAB).to(dtype)
    order = whole[:, :TRUE].float().argsort(dim=-1, descending=True, stable=True)
    kept = torch.zeros(ROWS, VOCAB, dtype=torch.bool).scatter_(-1, order[:, :6], True)
    kept |= whole >= whole.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
    kept[:, TRUE:] = False
    target = order.gather(-1, torch.tensor([0, 4, 8, 12] * 3).unsqueeze(-1)).squeeze(-1)
    upstream = torch.randn(ROWS)
    upstream[[0, 2]] = torch.nan
    upstream[[1, 6]] = torch.inf
    upstream[[3, 4]] = 0.0
    options: dict[str, Any] = {"top_k": 6}
    if how == "replay":
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(-1).cumsum(0)])
        options = {"kept_ids": (kept.nonzero()[:, 1], offsets)}
    results = on_ranks(ranks, world, _sampling, whole, target, upstream, options)
    exact, exact_grad = _plain(whole, target, upstream, kept)
    exact_grad[upstream == 0] = 0.0
    assert exact.isneginf().any()
    assert exact.isfinite().any()
    torch.testing.assert_close(results[0][0].double(), exact, rtol=1e-5, atol=1e-5)
    grad = torch.cat([grad for _, grad in results], -1).double()
    assert torch.equal(grad.isfinite(), exact_grad.isfinite())
    finite = exact_grad.isfinite()
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(grad[finite], exact_grad[finite], rtol=8 * unit, atol=8 * unit)
    assert not grad[upstream == 0].any()
    assert not grad[~kept].any()


@pytest.mark.parametrize("world", [1, 3])
def test_filtered_rows_of_minus_infinity_alone(ranks, world):
    """No NaN anywhere: the value is -inf, as without filters, and the gradient is finite."""
    whole, upstream = torch.randn(ROWS, VOCAB), torch.randn(ROWS)
    whole[[3, 8]] = -torch.inf
    target, record = torch.randint(0, TRUE, (ROWS,)), torch.arange(ROWS * 5) % TRUE
    kept_ids = (record, torch.arange(ROWS + 1) * 5)
    for options in ({"top_k": 5}, {"top_p": 0.8}, {"kept_ids": kept_ids}):
        for value, grad in on_ranks(ranks, world, _sampling, whole, target, upstream, options):
            assert value[[3, 8]].isneginf().all()
            assert grad.isfinite().all()


# ---- ranks ---------------------------------------------------------------------------------------


def _ranks_of(whole: Tensor, target: Tensor) -> list[Tensor]:
    logits, options = shard(whole)[1].detach(), {"tp_group": world_group(), "vocab_size": TRUE}
    together = vocab_parallel_token_stats(logits, target, target_rank=True, **options)
    # Hidden states whose logits are the rows themselves, or NaN in every column.
    hidden = torch.eye(ROWS).masked_fill(whole.isnan().any(-1, keepdim=True), torch.nan)
    fused = linear_token_stats(
        hidden, logits.t().contiguous().nan_to_num(nan=0.0), target, target_rank=True, **options
    )
    alone = vocab_parallel_target_rank(logits, target, **options)
    return [alone, together.target_rank, fused.target_rank]


@pytest.mark.parametrize("world", [1, 3])
def test_the_rank_of_a_nan_is_minus_one(ranks, world):
    whole = torch.randn(ROWS, VOCAB)
    target = torch.randint(0, TRUE, (ROWS,))
    expected = (whole[:, :TRUE] > whole.gather(-1, target[:, None])).sum(-1)
    nan = torch.arange(ROWS) % 3 == 1
    whole[nan, target[nan]] = torch.nan
    for found in on_ranks(ranks, world, _ranks_of, whole, target):
        for rank in found:
            assert torch.equal(rank, torch.where(nan, -1, expected))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_record_with_nan_or_inf_whose_target_it_lacks(value: float, full: bool) -> None:
    logits = torch.randn(3, VOCAB)
    logits[0, 2] = value
    logits[1, 7] = value  # which the record leaves out
    logits.requires_grad_()
    kept = torch.tensor([1, 2, 3] * 3), torch.tensor([0, 3, 6, 9])
    found = vocab_parallel_sampling_logprobs(
        logits, torch.tensor([5, 5, 2]), kept_ids=kept, full=full
    )
    logprobs = found.logprobs if full else found
    (grad,) = torch.autograd.grad(logprobs, logits, torch.tensor([1.0, 2.0, 3.0]))
    assert logprobs[0].isnan()
    assert logprobs[1] == -torch.inf
    assert logprobs[2].isfinite()
    assert grad[0, 1:4].isnan().all()
    assert grad[1:].isfinite().all()
    assert not grad[:, 4:].any()


@pytest.mark.parametrize("compact", [False, True])
def test_nan_hidden_states_of_an_ignored_token(compact: bool) -> None:
    """As plain torch, where 0 times NaN is NaN; a token that is left out is in no product."""
    hidden, weight = torch.randn(5, 4), torch.randn(9, 4, requires_grad=True)
    hidden[2] = torch.nan
    hidden.requires_grad_()
    target = torch.tensor([1, 2, -100, 3, 4])
    stats = linear_token_stats(hidden, weight, target, compact=compact)
    stats.logprobs.sum().backward()
    assert stats.logprobs[2] == 0.0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad[2].any()
    assert weight.grad.isnan().any() != compact


@pytest.mark.parametrize("how", ["compact", "rows"])
def test_nan_hidden_states_that_are_left_out_on_a_rank_with_fewer_rows(ranks, how: str) -> None:
    """Under sequence parallelism such a rank's rows are padded, of nothing that was left out."""
    target = torch.tensor([-100, 2, 1, 3, -100, 4, -100, -100])
    for kept, weight_grad, hidden_grad in ranks(2).run(_left_out_of_a_part, target, how):
        assert kept.isfinite().all()
        assert weight_grad.isfinite().all()
        assert weight_grad.any()
        assert hidden_grad.isfinite().all()


def _left_out_of_a_part(target: Tensor, how: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    whole, weight = torch.randn(8, 4), torch.randn(10, 4)
    whole[target < 0] = torch.nan
    hidden = whole.chunk(world_size())[world_rank()].clone().requires_grad_()
    weight = weight.chunk(world_size())[world_rank()].clone().requires_grad_()
    rows = (target >= 0).nonzero().squeeze(1)
    options = {"compact": True} if how == "compact" else {"rows": rows}
    stats = linear_token_stats(
        hidden,
        weight,
        target if how == "compact" else target[rows],
        sequence_parallel=True,
        tp_group=world_group(),
        chunk_size=2,
        **options,
    )
    stats.logprobs.sum().backward()
    assert weight.grad is not None
    assert hidden.grad is not None
    return stats.logprobs.detach(), weight.grad, hidden.grad


@pytest.mark.parametrize(
    "fn",
    [lambda z: z.square().sum(-1).sqrt(), lambda z: torch.log_softmax(z, -1)[:, 0]],
    ids=["infinite slope", "spoilt row"],
)
def test_a_row_that_a_map_leaves_out_gets_0(fn: Callable[[Tensor], Tensor]) -> None:
    """Also of logits that exist, as those of a head that is not fused do."""
    mask = torch.tensor([True, False, True])
    for left_out in (0.0, torch.nan):
        hidden = torch.randn(3, 4)
        hidden[1] = left_out
        weight = torch.randn(6, 4)
        logits, hidden = (hidden @ weight.T).requires_grad_(), hidden.requires_grad_()
        gradients = []
        for source, tensor in (
            (given_logits(logits), logits),
            (head_logits(hidden, weight), hidden),
        ):
            mapped = map_logits(source, fn, mask=mask)
            assert mapped[1] == 0
            (gradient,) = torch.autograd.grad(mapped.sum(), tensor)
            assert gradient.isfinite().all()
            assert (gradient[1] == 0).all()
            assert not tensor._backward_hooks
            gradients.append(gradient)
        torch.testing.assert_close(gradients[0] @ weight, gradients[1])
