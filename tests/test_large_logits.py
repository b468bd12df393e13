"""Logits far from 0 over a temperature: only differences from the maximum are divided by it.

Near 1e4 a float32 is 1e-3 from the next, so that z = x / T has an error of 5e-4 before the maximum
is subtracted, where (x - max x) / T has none to speak of. Hidden states are unit vectors: their
products are the weights themselves, exact in any dtype.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_logprobs as m
from tests.helpers.shards import on_ranks, shard, world_group, world_rank, world_size

ROWS, VOCAB, TRUE = 6, 96, 91
TOLERANCE = 4e-6  # of differences of up to 20, and of the gradient
ELSEWHERE = 1.0  # no log-probability: that of a target on another rank
DTYPES = (torch.float32, torch.bfloat16)


def make_case(dtype: torch.dtype, per_row: bool) -> tuple[Tensor, Tensor, Tensor, Any]:
    """(student's and teacher's logits `[ROWS, VOCAB]`, targets, temperature)."""
    step = 64.0 if dtype == torch.bfloat16 else 1.0  # from one number near 1e4 to the next
    student, teacher = (1e4 + 3.0 * step * torch.randn(2, ROWS, VOCAB)).to(dtype)
    target = student[:, :TRUE].topk(2).indices[:, 1]
    scale = torch.linspace(0.6, 1.7, ROWS) if per_row else 0.7
    return student, teacher, target, scale * step


def weighted(x: Tensor) -> Tensor:
    return (x * torch.linspace(-1.0, 2.0, len(x), dtype=x.dtype)).sum()


def on_a_rank(
    student: Tensor, teacher: Tensor, target: Tensor, temperature: Any
) -> dict[str, Tensor]:
    """What the operations make of them, and the gradients of this rank's columns."""
    group = world_group() if world_size() > 1 else None
    logits, other = shard(student)[0], shard(teacher)[0].detach()
    eye = torch.eye(ROWS, dtype=student.dtype)
    head = logits.detach().t().contiguous().requires_grad_()
    common: Any = {"tp_group": group, "vocab_size": TRUE, "temperature": temperature}
    wanted: Any = {"entropy": True, "sum_pi_squared": True, **common}
    stats = m.vocab_parallel_token_stats(logits, target, **wanted)
    fused = m.linear_token_stats(eye, head, target, **wanted)
    ids = target.unsqueeze(1)
    kept = (target, torch.arange(ROWS + 1))
    found = {
        "logprobs": stats.logprobs,
        "entropy": stats.entropy,
        "squares": stats.sum_pi_squared,
        "fused logprobs": fused.logprobs,
        "fused entropy": fused.entropy,
        "smoothed": m.vocab_parallel_logprobs(logits, target, label_smoothing=0.1, **common),
        "gather": m.vocab_parallel_gather(logits, ids, log_softmax=True, **common)[:, 0],
        "fused gather": m.linear_gather(eye, head, ids, log_softmax=True, **common)[:, 0],
        "top-p": m.vocab_parallel_sampling_logprobs(logits, target, top_p=0.9, **common),
        "replay": m.vocab_parallel_sampling_logprobs(logits, target, kept_ids=kept, **common),
        "greedy": m.vocab_parallel_sample(logits, seed=1, **common)[1] * 0.0,
    }
    # The target is the second largest.
    of_logits = m.vocab_parallel_token_stats(logits, target, candidate_ids=ids, topk=2, **common)
    of_hidden = m.linear_token_stats(eye, head, target, candidate_ids=ids, topk=2, **common)
    for path, of_path in (("", of_logits), ("fused ", of_hidden)):
        assert of_path.candidates is not None
        assert of_path.topk is not None
        found[f"{path}candidate"] = of_path.candidates[:, 0]
        found[f"{path}second"] = of_path.topk[0][:, 1]
    every = m.vocab_parallel_log_softmax(logits, **common)
    own = target - world_rank() * every.shape[1]
    inside = (own >= 0) & (own < every.shape[1])
    at = every.gather(1, own.clamp(0, every.shape[1] - 1).unsqueeze(1))[:, 0]
    found["log-softmax"] = torch.where(inside, at, ELSEWHERE)
    for kind in ("forward", "reverse", "jsd"):
        found[kind] = m.vocab_parallel_kl_div(logits, other, kind=kind, **common)
    for name in ("logprobs", "entropy", "top-p", "forward", "reverse"):
        (grad,) = torch.autograd.grad(weighted(found[name]), logits, retain_graph=True)
        found[f"d {name}"] = grad
    (grad,) = torch.autograd.grad(weighted(fused.logprobs), head)
    found["d fused"] = grad.t()
    return {name: x.detach() for name, x in found.items()}


def expected(student: Tensor, teacher: Tensor, target: Tensor, temperature: Any) -> Any:
    """The same of the whole vocabulary in float64."""
    own = temperature.double().unsqueeze(1) if isinstance(temperature, Tensor) else temperature
    logits = student.double().requires_grad_()
    log_p, log_q = (
        (x[:, :TRUE].double() / own).log_softmax(-1) for x in (logits, teacher.double())
    )
    p, q, ids = log_p.exp(), log_q.exp(), target.unsqueeze(1)
    at = log_p.gather(1, ids)[:, 0]
    order = p.detach().sort(dim=1, descending=True, stable=True)
    before = order.values.cumsum(1) - order.values
    kept = torch.zeros_like(p, dtype=torch.bool).scatter(1, order.indices, before < 0.9)
    others = (log_p.sum(-1) - at) / (TRUE - 1)
    middle = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).double().log()
    found = {
        "logprobs": at,
        "entropy": -(p * log_p).sum(-1),
        "squares": p.square().sum(-1),
        "smoothed": 0.9 * at + 0.1 * others,
        "top-p": log_p.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, ids)[:, 0],
        "replay": torch.zeros_like(at),
        "greedy": torch.zeros_like(at),
        "forward": (q * (log_q - log_p)).sum(-1),
        "reverse": (p * (log_p - log_q)).sum(-1),
        "jsd": 0.5 * ((q * (log_q - middle)).sum(-1) + (p * (log_p - middle)).sum(-1)),
    }
    for name in ("gather", "logprobs", "candidate", "second"):
        found[name] = found[f"fused {name}"] = at
    found["log-softmax"] = at
    found["fused entropy"] = found["entropy"]
    for name in ("logprobs", "entropy", "top-p", "forward", "reverse"):
        (found[f"d {name}"],) = torch.autograd.grad(
            weighted(found[name]), logits, retain_graph=True
        )
    found["d fused"] = found["d logprobs"]
    return {name: x.detach() for name, x in found.items()}


@pytest.mark.parametrize("per_row", [False, True], ids=["number", "rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_no_digit_of_a_difference_is_lost(
    ranks: Any, tp: int, dtype: torch.dtype, per_row: bool
) -> None:
    torch.manual_seed(3)
    case = make_case(dtype, per_row)
    exact = expected(*case)
    for rank, found in enumerate(on_ranks(ranks, tp, on_a_rank, *case)):
        assert found.keys() == exact.keys()
        for name, value in found.items():
            want = exact[name]
            if name.startswith("d "):
                want = want.chunk(tp, 1)[rank]
            there = value != ELSEWHERE  # NaN is no other value
            assert there.all() or name == "log-softmax"
            off = float((value.double() - want)[there].abs().max())
            # Of the value itself: two of its last bits.
            eps = 2.0**-8 if value.dtype == torch.bfloat16 else 2.0**-22
            rounding = eps * float(want[there].abs().max())
            assert off <= TOLERANCE + rounding, f"{name}: off by {off}"


def test_nor_by_the_compiled_kernels() -> None:
    torch.manual_seed(3)
    width = 2 * 2048 + 7
    logits = (1e4 + 3.0 * torch.randn(4, width)).requires_grad_()
    target = logits.topk(2).indices[:, 1]
    options: Any = {"entropy": True, "temperature": 0.7, "backend": "inductor"}
    stats = m.vocab_parallel_token_stats(logits, target, **options)
    wide = logits.detach().double().requires_grad_()
    log_p = (wide / 0.7).log_softmax(-1)
    exact = log_p.gather(1, target.unsqueeze(1))[:, 0], -(log_p.exp() * log_p).sum(-1)
    for value, want in zip((stats.logprobs, stats.entropy), exact, strict=True):
        (grad,) = torch.autograd.grad(weighted(value), logits, retain_graph=True)
        (slope,) = torch.autograd.grad(weighted(want), wide, retain_graph=True)
        for got, truth in ((value, want), (grad, slope)):
            assert float((got.detach().double() - truth.detach()).abs().max()) <= TOLERANCE
