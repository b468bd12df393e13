"""Rows with NaN or +inf, and upstream gradients that are 0, NaN or inf: sampling and divergences.

A diverged model must be seen, in its own row only, and a row whose upstream is 0 costs nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs import (
    linear_kl_div,
    linear_token_stats,
    vocab_parallel_entropy,
    vocab_parallel_gather,
    vocab_parallel_kl_div,
    vocab_parallel_log_softmax,
    vocab_parallel_logprobs,
    vocab_parallel_sampling_logprobs,
    vocab_parallel_soft_cross_entropy,
    vocab_parallel_target_rank,
    vocab_parallel_token_stats,
    vocab_parallel_topk_distill,
)
from mcore_logprobs.ops import sampling_cut
from tests.helpers.shards import VOCAB, on_ranks, shard, world_group

TRUE = 17  # of VOCAB columns: the last shard of 2 and of 3 holds masked ones
ROWS = 12
DTYPES = (torch.float32, torch.bfloat16)
BAD = {
    0: (3, torch.nan),
    2: (16, torch.nan),
    5: (9, torch.inf),
    7: (0, torch.nan),
    9: (12, torch.inf),
}
SILENT = [1, 2, 9]  # upstream 0
IGNORED = 7
CUTS = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "both": {"top_k": 9, "top_p": 0.7},
    "replay": None,
}


def _spoil(whole: Tensor) -> Tensor:
    """NaN or +inf in one column of some rows, in all of row 4, and in masked columns of row 10."""
    spoilt = whole.clone()
    for row, (column, value) in BAD.items():
        spoilt[row, column] = value
    spoilt[4] = torch.nan
    spoilt[10, TRUE:] = torch.nan
    return spoilt


def _kept_ids(n: int) -> tuple[Tensor, Tensor]:
    """Five ids a row, so that most spoilt columns are not among them."""
    ids = torch.stack([torch.randperm(TRUE)[:5] for _ in range(n)])
    return ids.flatten(), torch.arange(n + 1) * 5


def _sampling(
    whole: Tensor, target: Tensor, upstream: Tensor, candidates: int | None, options: dict
) -> tuple[Tensor, Tensor]:
    leaf, logits = shard(whole)
    saved = sampling_cut._TOP_P_CANDIDATES, sampling_cut._MAX_CANDIDATES
    if candidates is not None:
        sampling_cut._TOP_P_CANDIDATES = sampling_cut._MAX_CANDIDATES = candidates
    try:
        out = vocab_parallel_sampling_logprobs(
            logits, target, tp_group=world_group(), vocab_size=TRUE, temperature=0.8, **options
        )
    finally:
        sampling_cut._TOP_P_CANDIDATES, sampling_cut._MAX_CANDIDATES = saved
    (grad,) = torch.autograd.grad(out, leaf, upstream)
    return out.detach(), grad


def _options(name: str) -> dict[str, Any]:
    chosen = CUTS[name]
    return {"kept_ids": _kept_ids(ROWS)} if chosen is None else chosen


def _whole_gradient(results: list) -> Tensor:
    for out, _ in results[1:]:
        torch.testing.assert_close(out, results[0][0], rtol=0, atol=0, equal_nan=True)
    return torch.cat([grad for _, grad in results], -1)


@pytest.mark.parametrize(("dtype", "candidates"), [(torch.float32, None), (torch.bfloat16, 1)])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("world", [1, 3])
def test_a_spoilt_row_is_nan_and_no_other(ranks, world, dtype, cut, candidates):
    whole = (torch.randn(ROWS, VOCAB) * 2).to(dtype)
    target = torch.randint(0, TRUE, (ROWS,))
    target[IGNORED] = -100
    upstream = torch.randn(ROWS)
    upstream[SILENT] = 0.0
    options = _options(cut)
    sound = on_ranks(ranks, world, _sampling, whole, target, upstream, candidates, options)
    spoilt = on_ranks(ranks, world, _sampling, _spoil(whole), target, upstream, candidates, options)
    unusable = ~(_spoil(whole) < torch.inf)[:, :TRUE]
    reached = torch.ones_like(unusable)
    if "kept_ids" in options:  # nothing outside the record plays a part
        reached = torch.zeros_like(unusable)
        reached.scatter_(1, options["kept_ids"][0].view(ROWS, -1), True)
    bad = (unusable & reached).any(1)
    assert bad.any()
    bad[IGNORED] = False
    value, grad = spoilt[0][0], _whole_gradient(spoilt)
    assert torch.equal(value.isnan(), bad)
    assert torch.equal(value[~bad], sound[0][0][~bad])
    assert torch.equal(grad[~bad], _whole_gradient(sound)[~bad])
    loud = bad.clone()
    loud[SILENT] = False
    assert torch.equal(grad[loud][:, :TRUE].isnan(), reached[loud])
    assert not grad[:, TRUE:].any()
    assert not grad[SILENT].any()
    assert not grad[IGNORED].any()


def _plain(whole: Tensor, target: Tensor, upstream: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    leaf = whole.double().requires_grad_()
    z = (leaf / 0.8).masked_fill(~kept, -torch.inf)
    out = z.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return out.detach(), torch.autograd.grad(out, leaf, upstream.double())[0]


@pytest.mark.parametrize("how", ["filter", "replay"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [1, 3])
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
    results = on_ranks(ranks, world, _sampling, whole, target, upstream, None, options)
    exact, exact_grad = _plain(whole, target, upstream, kept)
    exact_grad[upstream == 0] = 0.0
    assert exact.isneginf().any()
    assert exact.isfinite().any()
    torch.testing.assert_close(results[0][0].double(), exact, rtol=1e-5, atol=1e-5)
    grad = _whole_gradient(results).double()
    assert torch.equal(grad.isfinite(), exact_grad.isfinite())
    finite = exact_grad.isfinite()
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(grad[finite], exact_grad[finite], rtol=8 * unit, atol=8 * unit)
    assert not grad[upstream == 0].any()
    assert not grad[~kept].any()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("world", [1, 3])
def test_rows_of_minus_infinity_alone(ranks, world, cut):
    """No NaN anywhere: the value is -inf, as without filters, and the gradient is finite."""
    whole = torch.randn(ROWS, VOCAB)
    whole[[3, 8]] = -torch.inf
    upstream = torch.randn(ROWS)
    target = torch.randint(0, TRUE, (ROWS,))
    args = (whole, target, upstream, None, _options(cut))
    results = on_ranks(ranks, world, _sampling, *args)
    assert results[0][0][[3, 8]].isneginf().all()
    assert _whole_gradient(results).isfinite().all()


# ---- divergences: zero upstream, by the caller or by the mask -----------------------------------

KINDS = ("forward", "reverse", "jsd", "cross_entropy")


def _divergence(student: Tensor, teacher: Tensor, kind: str, upstream: Tensor, mask: Tensor | None):
    leaf, logits = shard(student)
    _, other = shard(teacher)
    options: dict[str, Any] = {"tp_group": world_group(), "mask": mask, "vocab_size": TRUE}
    if kind == "cross_entropy":
        out = vocab_parallel_soft_cross_entropy(logits, other, **options)
    else:
        out = vocab_parallel_kl_div(logits, other, kind=kind, **options)
    return out.detach(), torch.autograd.grad(out, leaf, upstream)[0]


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 3])
def test_divergence_of_a_spoilt_row(ranks, world, kind, side):
    whole = {"student": torch.randn(ROWS, VOCAB), "teacher": torch.randn(ROWS, VOCAB)}
    upstream = torch.randn(ROWS)
    upstream[SILENT] = 0.0
    mask = torch.ones(ROWS, dtype=torch.bool)
    mask[IGNORED] = False
    sound = on_ranks(ranks, world, _divergence, *whole.values(), kind, upstream, mask)
    whole[side] = _spoil(whole[side])
    spoilt = on_ranks(ranks, world, _divergence, *whole.values(), kind, upstream, mask)
    bad = torch.zeros(ROWS, dtype=torch.bool)
    bad[[*BAD, 4]] = True
    bad[IGNORED] = False
    value, grad = spoilt[0][0], _whole_gradient(spoilt)
    assert torch.equal(value.isnan(), bad)
    assert torch.equal(value[~bad], sound[0][0][~bad])
    assert torch.equal(grad[~bad], _whole_gradient(sound)[~bad])
    loud = bad.clone()
    loud[SILENT] = False
    assert grad[loud][:, :TRUE].isnan().all()
    assert not grad[:, TRUE:].any()
    assert not grad[SILENT].any()
    assert not grad[IGNORED].any()


def _fused(hidden: Tensor, upstream: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    weight, teacher = torch.randn(VOCAB, 8), torch.randn(VOCAB, 8)
    leaf = hidden.clone().requires_grad_()
    mine, other = (shard(w.t())[1].detach().t() for w in (weight, teacher))
    out = linear_kl_div(
        leaf,
        mine,
        teacher_hidden=hidden.nan_to_num(),
        teacher_weight=other,
        kind=kind,
        tp_group=world_group(),
        vocab_size=TRUE,
    )
    return out.detach(), torch.autograd.grad(out, leaf, upstream)[0]


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("world", [1, 3])
def test_fused_divergence_of_a_spoilt_row(ranks, world, kind):
    hidden = torch.randn(ROWS, 8)
    hidden[[1, 4], 3] = torch.nan
    upstream = torch.randn(ROWS)
    upstream[1] = 0.0
    for out, grad in on_ranks(ranks, world, _fused, hidden, upstream, kind):
        assert torch.equal(out.isnan(), hidden.isnan().any(-1))
        assert not grad[1].any()
        assert grad[4].isnan().all()
        assert grad[[row for row in range(ROWS) if row != 4]].isfinite().all()


# ---- statistics, gather, log-softmax -------------------------------------------------------------

IDS = torch.arange(ROWS * 3).reshape(ROWS, 3) % TRUE
# From (logits, target, options) to `[rows, ...]`.
OPERATIONS: dict[str, Any] = {
    "logprobs": lambda x, t, options: vocab_parallel_logprobs(x, t, **options),
    "entropy": lambda x, t, options: vocab_parallel_entropy(x, **options),
    "gather": lambda x, t, options: vocab_parallel_gather(x, IDS, log_softmax=True, **options),
    "distill": lambda x, t, options: vocab_parallel_topk_distill(
        x, torch.ones(ROWS, 3), IDS, **options
    )[0],
    "log_softmax": lambda x, t, options: vocab_parallel_log_softmax(x, **options)[..., :3],
}


def _plain_operation(name: str, whole: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf, logits = shard(whole)
    options = {"tp_group": world_group(), "vocab_size": TRUE, "temperature": 0.8}
    out = OPERATIONS[name](logits, target, options)
    rows = torch.linspace(0.5, 1.5, ROWS)
    rows[SILENT] = 0.0
    upstream = rows if out.dim() == 1 else rows[:, None] * torch.tensor([1.0, -0.5, 2.0])
    (grad,) = torch.autograd.grad(out, leaf, upstream)
    return out.detach(), grad


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("world", [1, 3])
def test_a_spoilt_row_without_upstream_has_no_gradient(ranks, world, name):
    whole = torch.randn(ROWS, VOCAB) * 2
    target = torch.randint(0, TRUE, (ROWS,))
    sound = on_ranks(ranks, world, _plain_operation, name, whole, target)
    spoilt = on_ranks(ranks, world, _plain_operation, name, _spoil(whole), target)
    bad = torch.zeros(ROWS, dtype=torch.bool)
    bad[[*BAD, 4]] = True
    grad = torch.cat([found for _, found in spoilt], -1)
    assert torch.equal(grad[~bad], torch.cat([found for _, found in sound], -1)[~bad])
    loud = bad.clone()
    loud[SILENT] = False
    assert grad[loud][:, :TRUE].isnan().all()
    assert not grad[SILENT].any()
    for value, _ in spoilt:
        assert torch.equal(
            value.isnan().flatten(1).any(-1) if value.dim() > 1 else value.isnan(), bad
        )


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
