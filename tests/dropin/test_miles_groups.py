"""miles' functions where miles keeps the groups: its FSDP backend has no Megatron."""

from __future__ import annotations

import sys
import types
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_logprobs.dropin import miles

STATE = "miles.backends.training_utils.parallel"
LENGTHS = (11, 6)  # a sample's tokens, and those of its response


def place(rank: int, size: int, group: Any = None) -> Namespace:
    return Namespace(rank=rank, size=size, group=group)


def state(cp: Namespace, tp: Namespace) -> Any:
    module: Any = types.ModuleType(STATE)
    module._parallel_state = Namespace(cp=cp, tp=tp)
    return module


@pytest.fixture
def miles_state(monkeypatch: pytest.MonkeyPatch) -> Callable[[Namespace, Namespace], None]:
    def use(cp: Namespace, tp: Namespace) -> None:
        monkeypatch.setitem(sys.modules, STATE, state(cp, tp))

    return use


def test_parts_need_no_group(miles_state) -> None:
    """Ranks of another process group than this one's are asked for, as miles' own tests do."""
    values, parts = list(range(LENGTHS[1])), []
    for rank in range(2):
        miles_state(place(rank, 2), place(0, 1))
        parts.append(miles.slice_log_prob_with_cp(values, *LENGTHS))
        offsets = miles.get_logits_and_tokens_offset_with_cp(*LENGTHS)
        assert offsets == miles.get_logits_and_tokens_offset_with_cp(
            *LENGTHS, cp_rank=rank, cp_size=2
        )
    assert sorted(parts[0] + parts[1]) == values
    assert all(parts)


def test_a_collective_needs_one(miles_state) -> None:
    miles_state(place(0, 2), place(0, 1))
    with pytest.raises(ValueError, match="cp: expected a group of 2 ranks in miles' parallel"):
        miles.all_gather_with_cp(torch.zeros(3), *LENGTHS)


@pytest.mark.parametrize(("temperature", "divisor"), [(1.0, 1.0), (0.5, 0.5), (0.0, 1.0)])
def test_one_process(miles_state, temperature: float, divisor: float) -> None:
    """miles divides by a temperature above 0 alone: greedy rollouts have 0."""
    miles_state(place(0, 1), place(0, 1))
    logits = torch.randn(1, LENGTHS[0], 13, generator=torch.Generator().manual_seed(1))
    check_responses(logits / divisor, miles_responses(logits, temperature)["log_probs"][0])


def miles_responses(logits: torch.Tensor, temperature: float = 1.0) -> Any:
    args = Namespace(rollout_temperature=temperature, log_probs_chunk_size=-1, qkv_format="thd")
    return miles.get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=[torch.arange(LENGTHS[0])],
        total_lengths=[LENGTHS[0]],
        response_lengths=[LENGTHS[1]],
    )


def check_responses(whole: torch.Tensor, got: torch.Tensor) -> None:
    expected = whole[0].double().log_softmax(-1)
    first = LENGTHS[0] - LENGTHS[1]
    expected = torch.stack([expected[t - 1, t] for t in range(first, LENGTHS[0])])
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-6)


def run_two_ranks(kind: str) -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    places = {"cp": place(0, 1), "tp": place(0, 1)} | {kind: place(rank, 2, world)}
    sys.modules[STATE] = state(**places)
    try:
        if kind == "cp":
            whole = torch.arange(float(LENGTHS[1]))
            part = miles.slice_log_prob_with_cp(whole, *LENGTHS)
            gathered = miles.all_gather_with_cp(part, *LENGTHS)
            assert gathered.tolist() == whole.tolist()
            return
        logits = torch.randn(1, LENGTHS[0], 14, generator=torch.Generator().manual_seed(1))
        shard = logits[..., 7 * rank : 7 * rank + 7].contiguous()
        check_responses(logits, miles_responses(shard)["log_probs"][0])
    finally:
        del sys.modules[STATE]


@pytest.mark.parametrize("kind", ["cp", "tp"])
def test_two_ranks_without_megatron(ranks, kind: str) -> None:
    ranks(2).run(run_two_ranks, kind)
