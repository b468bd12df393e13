"""slime, miles, SkyRL, AReaL, verl and ROLL over TP and CP, against float64; ms-swift's chunks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_logprobs.dropin import areal, miles, ms_swift, roll, skyrl, slime, verl
from mcore_logprobs.kernels import budgets
from tests.dropin.common import LAYOUTS, VOCAB, assert_near, columns_of, spread, zigzag
from tests.engine.truths import entropy_of, take
from tests.megatron.common import megatron

TOTALS, RESPONSES = [13, 6, 9], [8, 3, 9 - 1]


def normal(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def place(state: Any) -> tuple[int, slice]:
    """(CP rank, own columns)."""
    return state.get_context_parallel_rank(), slice(*columns_of(state)[:2])


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


# ---- SkyRL and AReaL: packed sequences -----------------------------------------------------------

BOUNDS = (0, 8, 20, 24)
LENGTHS = (7, 10, 4)


def run_packed(tp: int, cp: int, d: dict[str, Tensor]) -> dict[str, Any]:
    with megatron(tp=tp, cp=cp) as state:
        rank, mine = place(state)
        start, end, group = columns_of(state)
        cp_group = state.get_context_parallel_group()
        cu = torch.tensor(BOUNDS, dtype=torch.int32)
        weight = d["weight"][mine].clone().requires_grad_()
        hidden = zigzag(d["hidden"], rank, cp, BOUNDS).clone().requires_grad_()
        mask = torch.arange(13) < torch.tensor(LENGTHS)[:, None]
        layout = {"cp_group": cp_group, "attention_mask": mask}
        arguments = (d["target"], cu, 13, start, end, group)
        found = {}
        found["logprobs"] = skyrl.from_parallel_hidden_to_logprobs_packed_sequences(
            hidden, weight, *arguments, **layout, chunk_size=3, temperature=0.7
        )
        (found["logprobs"] * d["upstream"]).sum().backward()
        grads = {"hidden": hidden.grad, "weight": weight.grad}
        logits = (hidden.detach() @ weight.detach().T) / 0.7
        found["from logits"] = skyrl.from_parallel_logits_to_logprobs_packed_sequences(
            logits, *arguments, **layout
        )
        rows = {"cp_group": cp_group, "sub_seq_lengths": [[7, 10], [4]]}
        found["rows"] = skyrl.from_parallel_logits_to_logprobs_packed_sequences(
            logits, d["target"], cu, 20, start, end, group, **rows
        )
        actions = (cu, 13, 5, mask, d["loss_mask"])
        leaf = logits.clone().requires_grad_()
        mean, term = skyrl.vocab_parallel_entropy_packed_sequences(leaf, *actions, cp_group)
        term.backward()
        grads["entropy"] = leaf.grad
        found["mean"] = mean
        found["mean from hidden"] = skyrl.from_parallel_hidden_to_entropy_packed_sequences(
            hidden.detach(), weight.detach(), *actions, cp_group, group, temperature=0.7
        )[0]
        part = areal.split_packed_seqs_for_context_parallel(d["target"][0], cu)
        assert torch.equal(part, zigzag(d["target"], rank, cp, BOUNDS)[0])
        leaf = part.float().requires_grad_()
        whole = areal.reassemble_cp_packed_logprobs(leaf, cu)
        assert torch.equal(whole, d["target"][0].float())
        whole.sum().backward()
        assert torch.equal(leaf.grad, torch.full_like(leaf, cp))
        return {"found": found, "grads": grads}


def test_skyrl_s_mean_entropy_leaves_padding_out() -> None:
    logits = normal(1, 6, VOCAB).requires_grad_()
    bounds, mask = torch.tensor([0, 4, 6]), torch.tensor([[0, 1, 1, 1, 0], [0, 0, 0, 1, 1]])
    padding = torch.arange(6)[None, :, None] == 3
    found = []
    for fill in (0.0, torch.nan):
        leaf = logits.detach().masked_fill(padding, fill).requires_grad_()
        mean, term = skyrl.vocab_parallel_entropy_packed_sequences(
            leaf, bounds, 5, 2, mask, torch.ones(2, 2), None
        )
        term.backward()
        found.append((mean, leaf.grad))
    assert torch.equal(*(mean for mean, _ in found))
    assert torch.equal(*(grad for _, grad in found))


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (2, 2)])
def test_packed_sequences(ranks, tp: int, cp: int) -> None:
    total = BOUNDS[-1]
    d = {
        "hidden": normal(1, total, 6) * 0.5,
        "weight": normal(VOCAB, 6, seed=6) * 0.5,
        "target": torch.randint(0, VOCAB, (1, total), generator=torch.Generator().manual_seed(2)),
        "upstream": normal(3, 12, seed=7),
        "loss_mask": (normal(3, 5, seed=8) > 0).float(),
    }
    d["loss_mask"][1, :2] = torch.tensor([1.0, 0.25])  # the only actions that are tokens
    results = ranks(tp * cp).run(run_packed, tp, cp, d)
    hidden, weight = (d[n].double().requires_grad_() for n in ("hidden", "weight"))
    logits = hidden[0] @ weight.T / 0.7
    log_p = logits.log_softmax(-1)
    entropy = entropy_of(log_p)
    want = torch.zeros(3, 12, dtype=torch.float64)
    kept = torch.zeros(3, 12, dtype=torch.float64)
    place_of = torch.full((3, 12), -1)
    for row, (start, length) in enumerate(zip(BOUNDS, LENGTHS, strict=False)):
        at = torch.arange(start, start + length - 1)
        want[row, : length - 1] = log_p[at, d["target"][0, at + 1]]
        kept[row, : length - 1] = 1.0
        place_of[row, : length - 1] = at
    (want * d["upstream"].double()).sum().backward(retain_graph=True)
    action = torch.zeros(3, 12, dtype=torch.float64)
    action[:, -5:] = d["loss_mask"].double()
    chosen = entropy[place_of.clamp(min=0)] * action * kept
    mean = chosen.sum() / (action * kept).sum()
    leaf_grad = torch.autograd.grad(mean, logits)[0]
    rows = torch.zeros(2, 19, dtype=torch.float64)
    rows[0, :6], rows[0, 8:17], rows[1, :3] = want[0, :6], want[1, :9], want[2, :3]
    for result in results:
        found = result["found"]
        assert_near(found["logprobs"], want.detach())
        assert_near(found["from logits"], want.detach(), 1e-5)
        assert_near(found["rows"], rows.detach(), 1e-5)
        assert_near(found["mean"], mean.detach(), 1e-5)
        assert_near(found["mean from hidden"], mean.detach(), 1e-5)
    # A rank's share of hidden's gradient: the TP ranks' add up to all of it.
    grads = [result["grads"] for result in results]
    by_column = [[g["hidden"] for g in grads[i::tp]] for i in range(tp)]
    found = sum(spread(parts, 1, cp, hidden.shape, BOUNDS) for parts in by_column)
    assert_near(found, hidden.grad, 1e-5)
    found = torch.cat([sum(g["weight"].double() for g in grads[i::tp]) for i in range(tp)])
    assert_near(found, weight.grad, 1e-5)
    shards = [g["entropy"] for g in grads]
    assert_near(spread(shards, tp, cp, (1, total, VOCAB), BOUNDS)[0], leaf_grad, 1e-5)


# ---- verl ----------------------------------------------------------------------------------------


def run_verl(d: dict[str, Tensor]) -> dict[str, Tensor]:
    with megatron(tp=2) as state:
        _, mine = place(state)
        group = state.get_tensor_model_parallel_group()
        hidden = d["hidden"].clone().requires_grad_()
        weight = d["weight"][mine].clone().requires_grad_()
        call = (hidden, weight, d["labels"])
        logprobs, entropy = verl.linear_cross_entropy(*call, 0.7, "none", group)
        ((logprobs + 0.5 * entropy) * d["upstream"].reshape(-1)).sum().backward()
        mean, _ = verl.LinearCrossEntropy.apply(*call, 0.7, "mean", group)
        varied, _ = verl.linear_cross_entropy(*call, d["temperature"], "none", group)
        student = (d["hidden"] @ d["weight"].T)[..., mine].clone().requires_grad_()
        config = {"distillation_loss": {"log_prob_min_clamp": -4.0}}
        kl = verl.compute_forward_kl_topk(student, d["teacher"], d["ids"], config, "bshd")
        losses, mass, teacher_mass = kl
        (losses * d["upstream"]).sum().backward()
        rmpad = verl.vocab_parallel_log_probs_from_logits_response_rmpad(
            d["labels"], d["mask"], student.detach()[d["mask"].bool()], 2
        )
        return {
            "logprobs": logprobs,
            "entropy": entropy,
            "mean": mean,
            "varied": varied,
            "hidden": hidden.grad,
            "weight": weight.grad,
            "kl": losses,
            "mass": mass,
            "teacher mass": teacher_mass,
            "overlap": kl["overlap_count"],
            "advantage": kl["overlap_token_advantage"],
            "d student": student.grad,
            "rmpad": rmpad,
        }


def test_verl(ranks) -> None:
    generator = torch.Generator().manual_seed(4)
    teacher, ids = normal(2, 3, VOCAB, seed=2).log_softmax(-1).topk(4, dim=-1)
    d = {
        "hidden": normal(2, 3, 6) * 0.5,
        "weight": normal(VOCAB, 6, seed=6) * 0.5,
        "labels": torch.randint(0, VOCAB, (2, 3), generator=generator),
        "mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "upstream": normal(2, 3, seed=3),
        "teacher": teacher,
        "ids": ids,
        "temperature": normal(2, 3, seed=12).abs() + 0.5,
    }
    results = ranks(2).run(run_verl, d)
    hidden, weight = (d[n].double().requires_grad_() for n in ("hidden", "weight"))
    log_p = (hidden @ weight.T / 0.7).log_softmax(-1)
    logprobs, entropy = take(log_p, d["labels"]), entropy_of(log_p)
    ((logprobs + 0.5 * entropy) * d["upstream"].double()).sum().backward()
    student = (d["hidden"] @ d["weight"].T).double().requires_grad_()
    q = d["teacher"].double().clamp_min(-4.0)
    p = take(student.log_softmax(-1), ids).clamp_min(-4.0)
    per_id = q.exp() * (q - p)
    (per_id.sum(-1) * d["upstream"].double()).sum().backward()
    best = student.detach().topk(4, dim=-1).indices
    overlap = (ids[..., None] == best[..., None, :]).any(-1)
    advantage = (-per_id.detach() * overlap).sum(-1) / overlap.sum(-1).clamp(min=1)
    plain = student.detach().log_softmax(-1)
    varied = (student.detach() / d["temperature"].double()[..., None]).log_softmax(-1)
    varied = take(varied, d["labels"])
    want = {
        "logprobs": logprobs.reshape(-1),
        "entropy": entropy.reshape(-1),
        "mean": logprobs.mean(),
        "kl": per_id.sum(-1),
        "mass": p.exp().sum(-1),
        "teacher mass": q.exp().sum(-1),
        "advantage": advantage,
    }
    for result in results:
        for name, value in want.items():
            assert_near(result[name], value.detach())
        assert_near(result["varied"], varied.reshape(-1), 1e-5)
        assert torch.equal(result["overlap"], overlap.sum(-1))
        assert_near(result["rmpad"][1], take(plain[1, :2], d["labels"][1, 1:]))
        assert_near(result["rmpad"][0, 1], plain[0, 1, d["labels"][0, 2]])
        assert result["rmpad"][0, 0] == 0
    assert_near(sum(r["hidden"].double() for r in results), hidden.grad)
    assert_near(torch.cat([r["weight"] for r in results]), weight.grad)
    assert_near(torch.cat([r["d student"] for r in results], dim=-1), student.grad)


# ---- ROLL ----------------------------------------------------------------------------------------


def run_roll(tp: int, cp: int, d: dict[str, Tensor]) -> dict[str, Tensor]:
    with megatron(tp=tp, cp=cp) as state:
        rank, mine = place(state)
        leaf = zigzag(d["logits"][..., mine], rank, cp).clone().requires_grad_()
        target = zigzag(d["target"], rank, cp)
        logprobs = roll.vocab_parallel_logprobs(leaf, target)
        entropy = roll.vocab_parallel_entropy(leaf)
        found = {
            "logprobs": roll.context_parallel_gather(logprobs),
            "entropy": roll.context_parallel_gather(entropy, parallel_dim=1),
            "rank": roll.context_parallel_gather(roll.vocab_parallel_target_rank(leaf, target)),
        }
        ((found["logprobs"] + 0.5 * found["entropy"]) * d["upstream"]).sum().backward()
        found["grad"], leaf.grad = leaf.grad, None
        strategy = roll.MegatronInferStrategy()
        # More than a rank has columns, at TP 2.
        found["values"], found["ids"] = strategy.op_compute_topk_logits(leaf, 14)
        (found["values"] * d["upstream"].unsqueeze(-1)).sum().backward()
        found["topk grad"], leaf.grad = leaf.grad, None
        found["whole"], none = strategy.op_compute_topk_logits(leaf)
        assert none is None
        (found["whole"] * d["upstream"].unsqueeze(-1)).sum().backward()
        found["whole grad"] = leaf.grad
        half = strategy.op_compute_topk_logits(leaf.detach().bfloat16(), 2)[0]
        assert half.dtype is torch.bfloat16
        return found


@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_roll(ranks, tp: int, cp: int) -> None:
    d = {"logits": normal(2, 8, VOCAB), "upstream": normal(2, 8, seed=3)}
    d["target"] = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(2))
    leaf = d["logits"].double().requires_grad_()
    logp = leaf.log_softmax(-1)
    picked, entropy = take(logp, d["target"]), entropy_of(logp)
    ((picked + 0.5 * entropy) * d["upstream"].double()).sum().backward()
    results = ranks(tp * cp).run(run_roll, tp, cp, d)
    for result in results:
        assert_near(result["logprobs"], picked.detach())
        assert_near(result["entropy"], entropy.detach())
        assert result["rank"].dtype == torch.int64
        assert torch.equal(result["rank"], (logp > picked[..., None]).sum(-1))
        best = leaf.detach().topk(14)
        assert_near(result["values"], best.values)
        assert torch.equal(result["ids"], best.indices)
        assert torch.equal(result["whole"], d["logits"])
    # Each rank takes its own part of the gradient of one and the same loss.
    assert_near(spread([r["grad"] for r in results], tp, cp, leaf.shape), leaf.grad)
    ones = d["upstream"].double().unsqueeze(-1).expand(leaf.shape)
    chosen = torch.zeros_like(ones).scatter(-1, best.indices, ones)
    assert_near(spread([r["topk grad"] for r in results], tp, cp, leaf.shape), chosen)
    assert_near(spread([r["whole grad"] for r in results], tp, cp, leaf.shape), ones)


@pytest.mark.parametrize("parts", [None, 6, 9])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_roll_cross_entropy(reduction: str, parts: int | None) -> None:
    """With 9 parts there are columns that x lacks: the normalizer is the parts'."""
    x = normal(7, VOCAB).requires_grad_()
    target = torch.tensor([3, 23, -100, 0, 7, 7, 11])
    columns = torch.cat([x.detach(), normal(7, VOCAB // 2, seed=5)], -1).double()
    columns = columns[:, : 4 * (parts or 0)]
    partial = None if parts is None else columns.unflatten(-1, (parts, 4)).logsumexp(-1)
    given = partial if partial is None else partial.float()
    z = x.detach().double().requires_grad_()
    # Their backward: exp(x - normalizer) - 1[target], whatever the normalizer was made of.
    normalizer = z.logsumexp(-1)
    if partial is not None:
        total = partial.logsumexp(-1)
        normalizer = total + (normalizer.detach() - total).exp() * (
            normalizer - normalizer.detach()
        )
    want = (normalizer - take(z, target)).where(target >= 0, 0.0)
    upstream = torch.linspace(-1, 2, 7)
    if reduction != "none":
        want = want.sum() / (6 if reduction == "mean" else 1)
        upstream = torch.tensor(1.5)
    (want * upstream).sum().backward()
    found = roll.cross_entropy(x, target, given, reduction=reduction)
    (found * upstream).sum().backward()
    assert_near(found.detach(), want.detach())
    assert_near(x.grad, z.grad)


def test_roll_cross_entropy_in_place() -> None:
    leaf = normal(3, VOCAB).requires_grad_()
    x = leaf * 1
    target = torch.tensor([3, -100, 5])
    roll.cross_entropy(x, target, inplace_backward=True).backward()
    want = torch.autograd.grad(torch.nn.functional.cross_entropy(leaf, target), leaf)[0]
    assert_near(leaf.grad, want)
    assert torch.equal(x, leaf.grad)
    with pytest.raises(ValueError, match=r"inplace_backward: expected False with lse_partial"):
        roll.cross_entropy(leaf * 1, target, torch.zeros(3, 1), inplace_backward=True)
    with pytest.raises(ValueError, match=r"lse_partial: expected the shape \(3, 'parts'\)"):
        roll.cross_entropy(leaf, target, torch.zeros(4, 1))
    with pytest.raises(ValueError, match="reduction: expected"):
        roll.cross_entropy(leaf, target, reduction="median")


def run_encoders(items: list[Tensor], upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with megatron(tp=2, cp=1) as state:
        rank = state.get_tensor_model_parallel_rank()
        plan = [[("a", 2), ("b", 0)], [("c", 1)]]
        leaf = torch.cat([items[i] for _, i in plan[rank]]).requires_grad_()
        whole = roll.encoder_sequence_parallel_gather(leaf, plan, [len(i) for i in items])
        (whole * upstream).sum().backward()
        same = torch.ones(3, requires_grad=True)
        roll.encoder_small_batch_size_gather(same).sum().backward()
        return whole, leaf.grad, same.grad


def test_roll_encoders(ranks) -> None:
    items = [normal(n, 2, seed=n) for n in (3, 5, 1)]
    upstream = normal(9, 2)
    parts = upstream.split([3, 5, 1])
    for (whole, grad, same), mine in zip(
        ranks(2).run(run_encoders, items, upstream), ([2, 0], [1]), strict=True
    ):
        assert torch.equal(whole, torch.cat(items))
        assert torch.equal(grad, torch.cat([parts[i] for i in mine]))
        assert torch.equal(same, torch.full((3,), 0.5))


# ---- ms-swift ------------------------------------------------------------------------------------


class _Rows(TorchDispatchMode):
    """The most rows that a new float32 tensor as wide as the vocabulary has."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        wide = isinstance(out, Tensor) and out.dim() == 2 and out.shape[-1] == VOCAB
        if wide and out.dtype == torch.float32:
            self.most = max(self.most, len(out))
        return out


@pytest.mark.parametrize(("asked", "expected"), [(512, 3), (64, 64)])
def test_ms_swift_s_default_chunk_comes_from_the_memory_budget(asked: int, expected: int) -> None:
    """ms-swift has no setting for its 512 rows, which at V 131072 are 256 MiB of float32."""
    logits, labels = normal(1, 600, VOCAB).bfloat16(), torch.zeros(1, 600, dtype=torch.int64)
    small = dataclasses.replace(budgets.CPU, copy_bytes=3 * 4 * VOCAB)
    with budgets.use(small), _Rows() as seen:
        ms_swift.compute_logps_and_entropy_from_logits(
            logits, labels, compute_entropy=True, entropy_chunk_size=asked
        )
    assert seen.most == expected
