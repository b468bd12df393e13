"""slime and miles over TP and CP, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs.dropin import miles, slime
from tests.dropin.common import (
    VOCAB,
    assert_near,
    normal,
    place,
)
from tests.engine.truths import entropy_of, take
from tests.megatron.common import megatron

TOTALS, RESPONSES = [13, 6, 9], [8, 3, 9 - 1]


# ---- slime ---------------------------------------------------------------------------------------


def rollout() -> dict[str, Any]:
    """Samples' logits `[total, V]`, tokens, and the ids that the rollout kept for each response."""
    generator = torch.Generator().manual_seed(1)
    logits = [normal(total, VOCAB, seed=total) for total in TOTALS]
    tokens = [torch.randint(0, VOCAB, (total,), generator=generator) for total in TOTALS]
    ids, offsets = [], []
    for response in RESPONSES:
        kept = [torch.randperm(VOCAB, generator=generator)[: 3 + r % 4] for r in range(response)]
        ids.append(torch.cat(kept).tolist())
        offsets.append([0, *torch.tensor([len(k) for k in kept]).cumsum(0).tolist()])
    offsets[1] = offsets[1][:2]  # a record that ends early: the rest is not filtered
    ids[1] = ids[1][: offsets[1][-1]]
    return {"logits": logits, "tokens": tokens, "ids": ids, "offsets": offsets}


def expected_responses(d: dict[str, Any], temperature: float, replay: bool) -> dict[str, list]:
    found: dict[str, list] = {"log_probs": [], "entropy": []}
    for i, (total, response) in enumerate(zip(TOTALS, RESPONSES, strict=True)):
        z = d["leaves"][i][total - response - 1 : total - 1] / temperature
        target = d["tokens"][i][total - response :]
        log_p = z.log_softmax(-1)
        found["entropy"].append(entropy_of(log_p))
        if replay:
            keep = torch.ones_like(z, dtype=torch.bool)
            bounds = d["offsets"][i]
            for r in range(len(bounds) - 1):
                keep[r] = False
                keep[r, d["ids"][i][bounds[r] : bounds[r + 1]]] = True
                keep[r, target[r]] = True
            log_p = z.masked_fill(~keep, -torch.inf).log_softmax(-1)
        found["log_probs"].append(take(log_p, target))
    return found


def responses(
    module: Any,
    d: dict[str, Any],
    local: Tensor,
    weights: dict[str, float],
    layout: Any,
    **given: Any,
) -> tuple[Any, dict[str, list[Tensor]]]:
    """(what slime's or miles' function returned, each whole response's numbers); a backward too."""
    returned = module.get_log_probs_and_entropy(
        local,
        unconcat_tokens=d["tokens"],
        total_lengths=TOTALS,
        response_lengths=RESPONSES,
        with_entropy=True,
        **given,
    )
    found = returned[1] if module is slime else returned
    loss, values = torch.zeros(()), {part: [] for part in weights}
    for part, weight in weights.items():
        for x, *lengths, how in zip(found[part], TOTALS, RESPONSES, layout, strict=True):
            if weight:
                upstream = normal(lengths[1], seed=lengths[1]) * weight
                loss = loss + (x * module.slice_log_prob_with_cp(upstream, *lengths, *how)).sum()
            values[part].append(module.all_gather_with_cp(x.detach(), *lengths, *how))
    loss.backward()
    return returned, values


def check_responses(
    results: list[dict[str, Any]], d: dict[str, Any], weights: dict[str, float], replay: bool
) -> None:
    d["leaves"] = [logits.double().requires_grad_() for logits in d["logits"]]
    want = expected_responses(d, 0.7, replay)
    torch.stack(
        [
            (x * normal(len(x), seed=len(x)).double() * weight).sum()
            for part, weight in weights.items()
            for x in want[part]
        ]
    ).sum().backward()
    for result in results:
        for part, values in want.items():
            for got, value in zip(result["values"][part], values, strict=True):
                assert_near(got, value.detach())
    for i, leaf in enumerate(d["leaves"]):  # each rank's columns of its tokens
        assert_near(sum(result["grads"][i].double() for result in results), leaf.grad)


SLIME = {"log_probs": 1.0, "entropy": 0.3}
MILES = {"log_probs": 1.0, "entropy": 0.0}
ARGS = {"rollout_temperature": 0.7, "log_probs_chunk_size": 4}


def run_slime(tp: int, cp: int, d: dict[str, Any], replay: bool, contiguous: bool) -> dict:
    with megatron(tp=tp, cp=cp) as state:
        rank, mine = place(state)
        args = SimpleNamespace(**ARGS, allgather_cp=contiguous, entropy_coef=0.1)
        wholes = [logits.clone().requires_grad_() for logits in d["logits"]]
        if contiguous and cp > 1:
            packed = torch.cat(wholes)
            packed = torch.cat([packed, packed.new_zeros(-len(packed) % cp, VOCAB)])
            local = packed.chunk(cp)[rank]
        else:
            local = torch.cat([slime.slice_with_cp(z, 0.0) for z in wholes])
        local = local[None, :, mine]
        extra = {"top_p_token_ids": d["ids"], "top_p_token_offsets": d["offsets"]} if replay else {}
        layout = [()] * len(TOTALS)
        (empty, _), values = responses(slime, d, local, SLIME, layout, args=args, **extra)
        assert empty.shape == (0,)
        with pytest.raises(ValueError, match="logits: expected at least "):
            responses(slime, d, local[:, : sum(TOTALS) // cp - 1], SLIME, layout, args=args)
        return {"values": values, "grads": [z.grad for z in wholes]}


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize(("tp", "cp", "contiguous"), [(2, 1, False), (2, 2, False), (2, 2, True)])
def test_slime(ranks, tp: int, cp: int, contiguous: bool, replay: bool) -> None:
    d = rollout()
    results = ranks(tp * cp).run(run_slime, tp, cp, d, replay, contiguous)
    check_responses(results, d, SLIME, replay)


def test_slime_functions_by_themselves() -> None:
    logits, tokens = normal(5, VOCAB), torch.tensor([3, 0, 9, 23, 7])
    keep = normal(5, VOCAB, seed=9) > 0.5
    ids = [row.nonzero()[:, 0] for row in keep]
    offsets = torch.tensor([0, *[len(i) for i in ids]]).cumsum(0)
    call = slime.calculate_log_probs_and_entropy
    dense, entropy = call(logits, tokens, None, True, 2, keep, with_entropy_grad=False)
    ragged, _ = call(logits, tokens, None, log_prob_keep_mask=(torch.cat(ids), offsets))
    keep[torch.arange(5), tokens] = True
    z = logits.double()
    want = z.masked_fill(~keep, -torch.inf).log_softmax(-1).gather(-1, tokens[:, None])
    assert_near(dense, want)
    assert_near(ragged, want)
    assert entropy is not None
    assert_near(entropy, entropy_of(z.log_softmax(-1)))
    nothing, none = call(logits[:0], tokens[:0], None)
    assert nothing.shape == (0,)
    assert none is None


@pytest.mark.parametrize(
    ("tokens", "response", "said"),
    [
        (5, 5, "response_lengths: expected less than the total length 5, got 5"),
        (5, -1, "response_lengths: expected less than the total length 5, got -1"),
        (4, 2, "unconcat_tokens: expected 5 tokens, a sample's total length, got 4"),
    ],
)
def test_slime_lengths_that_do_not_fit(tokens: int, response: int, said: str) -> None:
    with megatron(), pytest.raises(ValueError, match=said):
        slime.get_log_probs_and_entropy(
            normal(1, 9, VOCAB),
            args=ARGS,
            unconcat_tokens=[torch.arange(tokens), torch.arange(4)],
            total_lengths=[5, 4],
            response_lengths=[response, 2],
        )


def run_labels(logits: Tensor, labels: Tensor) -> Tensor:
    with megatron(tp=2) as state:
        _, mine = place(state)
        return slime.get_label_token_log_probs_from_vocab_parallel_logits(
            logits[:, mine].clone().requires_grad_(), labels, reduction_chunk_size=2
        )


@pytest.mark.parametrize(("rows", "labels"), [(5, 3), (5, 0), (0, 3)])
def test_slime_s_several_labels_a_row(ranks, rows: int, labels: int) -> None:
    logits = normal(rows, VOCAB)
    ids = torch.randint(0, VOCAB, (rows, labels), generator=torch.Generator().manual_seed(3))
    for found in ranks(2).run(run_labels, logits, ids):
        assert_near(found, logits.double().log_softmax(-1).gather(-1, ids))
        assert not found.requires_grad


# ---- miles ---------------------------------------------------------------------------------------


def run_miles(cp: int, qkv_format: str, d: dict[str, Any]) -> dict[str, Any]:
    with megatron(tp=2, cp=cp) as state:
        _, mine = place(state)
        rows = qkv_format == "bshd"
        args = SimpleNamespace(
            **ARGS, allgather_cp=False, qkv_format=qkv_format, true_on_policy_mode=False
        )
        layout = [(qkv_format, 16 if rows else None)] * len(TOTALS)
        wholes = [logits.clone().requires_grad_() for logits in d["logits"]]
        local = [miles.slice_with_cp(z, 0.0, *how) for z, how in zip(wholes, layout, strict=True)]
        local = torch.stack(local) if rows else torch.cat(local)[None]
        given = {"args": args, "max_seq_lens": [16] * len(TOTALS) if rows else None}
        found, values = responses(
            miles, d, local[..., mine], MILES, layout, entropy_requires_grad=False, **given
        )
        assert not any(x.requires_grad for x in found["entropy"])
        return {"values": values, "grads": [z.grad for z in wholes]}


@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
@pytest.mark.parametrize("cp", [1, 2])
def test_miles(ranks, cp: int, qkv_format: str) -> None:
    d = rollout()
    check_responses(ranks(2 * cp).run(run_miles, cp, qkv_format, d), d, MILES, replay=False)


def test_what_miles_alone_asks_for() -> None:
    logits, tokens = normal(5, VOCAB), torch.tensor([3, 0, 9, 23, 7])
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = miles.calculate_log_probs_and_entropy(leaf, tokens, None, True, False, 2)
    assert logprobs.shape == (5, 1)
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    with pytest.raises(ValueError, match="true_on_policy: expected False"):
        miles.calculate_log_probs_and_entropy(logits, tokens, None, true_on_policy=True)
    with pytest.raises(ValueError, match="max_seq_len: expected a length with qkv_format='bshd'"):
        miles.slice_with_cp(tokens, 0, "bshd")
    arguments = {"unconcat_tokens": [], "total_lengths": [], "response_lengths": []}
    with pytest.raises(ValueError, match="max_seq_lens: expected the padded lengths"):
        miles.get_log_probs_and_entropy(logits[None], args={"qkv_format": "bshd"}, **arguments)


def test_miles_refuses_true_on_policy_and_keeps_its_chunks(monkeypatch: Any) -> None:
    arguments = {"unconcat_tokens": [], "total_lengths": [], "response_lengths": []}
    logits = normal(1, 5, VOCAB)
    with pytest.raises(ValueError, match="true_on_policy: expected False"):
        miles.get_log_probs_and_entropy(logits, args={"true_on_policy_mode": True}, **arguments)
    seen = []
    monkeypatch.setattr(
        miles.slime, "calculate_log_probs_and_entropy", lambda *given, **_: seen.append(given[4])
    )
    miles.calculate_log_probs_and_entropy(logits[0], torch.zeros(5), None, chunk_size=3)
    assert seen == [3]
