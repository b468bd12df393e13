"""Operations on logits against float64, over shapes, dtypes, layouts and options; invariances.

Hundreds of cases here, thousands with `--hypothesis-profile nightly`.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcore_logprobs import (
    vocab_parallel_gather,
    vocab_parallel_log_softmax,
    vocab_parallel_token_stats,
    vocab_parallel_topk,
)
from tests.helpers.distributed import get_pool
from tests.logits.common import world_group, world_rank, world_size
from tests.properties.cases import (
    OUTPUTS,
    Call,
    calls,
    finished,
    gradient_tolerance,
    tolerance,
    truth,
    weighted,
)

ALL = {"entropy": True, "target_rank": True, "sum_pi_squared": True}


def stats_of(logits: Tensor, target: Tensor, **options: Any) -> dict[str, Tensor]:
    stats = vocab_parallel_token_stats(logits, target, **ALL, **options)
    return {name: getattr(stats, name) for name in (*OUTPUTS, "target_rank")}


def on_rank(call: Call) -> tuple[dict[str, Tensor], Tensor]:
    """(outputs, this rank's part of the gradient)."""
    logits, target, upstream = call.tensors()
    width = call.vocab // world_size()
    own = logits.detach().requires_grad_()
    part = own.narrow(-1, world_rank() * width, width)
    outputs = stats_of(part, target, tp_group=world_group(), **call.options())
    weighted(outputs, upstream).backward()
    assert torch.equal(own.detach(), logits), "the logits were modified"
    gradient = own.grad.narrow(-1, world_rank() * width, width)
    return {name: value.detach() for name, value in outputs.items()}, gradient


def check(call: Call, found: list[tuple[dict[str, Tensor], Tensor]]) -> None:
    logits, target, upstream = call.tensors()
    exact = logits.double().requires_grad_()
    want = truth(finished(exact, call.own_temperature(), call.vocab_size), target)
    weighted(want, upstream).backward()
    for outputs, _ in found:
        for name in OUTPUTS:
            got = outputs[name].double()
            torch.testing.assert_close(got, want[name].detach(), **tolerance(call))
        assert torch.equal(outputs["target_rank"], want["target_rank"])
    gradient = torch.cat([part for _, part in found], -1)
    assert gradient.dtype == call.dtype
    torch.testing.assert_close(gradient.double(), exact.grad, **gradient_tolerance(call, upstream))


@given(calls())
def test_token_stats(call):
    check(call, [on_rank(call)])


@given(calls(chunk_size=None))
def test_token_stats_over_tp(call):
    check(call, get_pool(2).run(on_rank, call))


@given(calls())
def test_log_softmax(call):
    logits, _, _ = call.tensors()
    options = {"temperature": call.own_temperature(), "vocab_size": call.vocab_size}
    got = vocab_parallel_log_softmax(logits, **options)
    want = finished(logits, call.own_temperature(), call.vocab_size).log_softmax(-1)
    torch.testing.assert_close(got.double(), want, **tolerance(call))


@given(calls(blocked=False), st.integers(1, 5))
def test_topk_and_gather(call, k):
    """Values are the sorted true columns', ids point at them, and gather reads them back."""
    logits, _, _ = call.tensors()
    k = min(k, call.vocab_size or call.vocab)
    options = {"temperature": call.own_temperature(), "vocab_size": call.vocab_size}
    values, ids = vocab_parallel_topk(logits, k, **options)
    z = finished(logits, call.own_temperature(), call.vocab_size)
    want = z.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, want.indices[..., :k])
    torch.testing.assert_close(values.double(), want.values[..., :k], **tolerance(call))
    again = vocab_parallel_gather(logits, ids, **options)
    torch.testing.assert_close(again, values, rtol=1e-6, atol=0.0)


# ---- invariances -------------------------------------------------------------------------------

WIDE = calls(dtype=torch.float64, offset=0.0)


def assert_same(
    got: dict[str, Tensor], want: dict[str, Tensor], atol: float = 1e-9, rtol: float = 1e-9
) -> None:
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=rtol, atol=atol)


@given(WIDE, st.floats(-1e4, 1e4))
def test_a_constant_added_to_the_logits_changes_nothing(call, constant):
    logits, target, _ = call.tensors()
    # Ranks may change where rounding makes ties: logits on a grid have none.
    logits, constant = (logits * 1024).round() / 1024, round(constant)
    want = stats_of(logits, target, **call.options())
    assert_same(stats_of(logits + constant, target, **call.options()), want)


@given(WIDE, st.randoms(use_true_random=False))
def test_rows_may_come_in_any_order(call, random):
    logits, target, _ = call.tensors()
    order = list(range(call.lead[0]))
    random.shuffle(order)
    options = call.options()
    temperature = options.pop("temperature")
    want = stats_of(logits, target, temperature=temperature, **options)
    if isinstance(temperature, Tensor):
        temperature = temperature[order]
    got = stats_of(logits[order], target[order], temperature=temperature, **options)
    assert_same(got, {name: value[order] for name, value in want.items()})


@given(WIDE, st.integers(0, 4))
def test_rows_may_be_split_over_calls(call, cut):
    logits, target, _ = call.tensors()
    options = call.options() | {"temperature": call.temperature or 1.3}
    want = stats_of(logits, target, **options)
    parts = [stats_of(logits[s], target[s], **options) for s in (slice(cut), slice(cut, None))]
    assert_same({name: torch.cat([p[name] for p in parts]) for name in want}, want)


@given(calls(), st.integers(1, 9))
def test_chunk_size_changes_nothing(call, chunk_size):
    logits, target, _ = call.tensors()
    options = call.options()
    want = stats_of(logits, target, **options)
    got = stats_of(logits, target, **(options | {"chunk_size": chunk_size}))
    assert_same(got, want, atol=0.0, rtol=1e-6)
