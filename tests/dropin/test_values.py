"""SkyRL, AReaL and verl over TP and CP, against float64; ms-swift's chunks."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_logprobs.dropin import _common, areal, ms_swift, nemo_rl, skyrl, verl
from mcore_logprobs.kernels import budgets
from tests.dropin.common import (
    VOCAB,
    assert_near,
    columns_of,
    normal,
    place,
    spread,
    zigzag,
)
from tests.engine.truths import entropy_of, take
from tests.megatron.common import megatron

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
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
        found["mean from hidden"], term = skyrl.from_parallel_hidden_to_entropy_packed_sequences(
            *leaves, *actions, cp_group, group, temperature=0.7
        )
        term.backward()
        grads["entropy to hidden"], grads["entropy to weight"] = (leaf.grad for leaf in leaves)
        part = areal.split_packed_seqs_for_context_parallel(d["target"][0], cu)
        assert torch.equal(part, zigzag(d["target"], rank, cp, BOUNDS)[0])
        leaf = part.float().requires_grad_()
        whole = areal.reassemble_cp_packed_logprobs(leaf, cu)
        assert torch.equal(whole, d["target"][0].float())
        upstream = [100.0 * r + torch.arange(BOUNDS[-1]) for r in range(cp)]  # whole numbers: exact
        whole.backward(upstream[rank])
        assert torch.equal(leaf.grad, zigzag(sum(upstream)[None], rank, cp, BOUNDS)[0])
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
    leaf_grad, *entropy_grads = torch.autograd.grad(mean, (logits, hidden, weight))
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
    wanted = {"": (hidden.grad, weight.grad), "entropy to ": entropy_grads}
    for kind, (want_hidden, want_weight) in wanted.items():
        by_column = [[g[kind + "hidden"] for g in grads[i::tp]] for i in range(tp)]
        whole = sum(spread(parts, 1, cp, hidden.shape, BOUNDS) for parts in by_column)
        assert_near(whole, want_hidden, 1e-5)
        whole = [sum(g[kind + "weight"].double() for g in grads[i::tp]) for i in range(tp)]
        assert_near(torch.cat(whole), want_weight, 1e-5)
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


def test_padded_lengths_are_where_sequences_stand() -> None:
    lengths, padded = torch.tensor([0, 3, 5]), torch.tensor([0, 4, 8])
    packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_q_padded=padded)
    assert _common.padded_bounds(packed) is padded
    packed.cu_seqlens_q_padded = None
    assert _common.padded_bounds(packed) is lengths
    packed.qkv_format = "sbhd"  # nothing is packed
    assert _common.padded_bounds(packed) is None


def test_a_chunk_of_positions_is_of_every_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(*args: Any, **options: Any) -> None:
        seen.append(options["chunk_size"])

    monkeypatch.setattr(_common.ours, "vocab_parallel_logprobs", spy)
    target = torch.zeros(3, 4, dtype=torch.int64)
    _common.token_logprobs(torch.randn(3, 4, 8), target, None, chunk_size=2)
    assert seen == [6]


# ---- inference_only ------------------------------------------------------------------------------

LEARNING = ("vocab_parallel_logits", "student_logits", "hidden", "tensor_parallel_hidden_states")
LEARNING += ("weight", "lm_head_weight", "output_weight_layer")


def _for_inference() -> dict[str, Any]:
    """Every function of NeMo-RL's and SkyRL's names that has the flag."""
    found = {}
    for module in (nemo_rl, skyrl):
        for name in module.__all__:
            function = getattr(getattr(module, name), "apply", getattr(module, name))
            if callable(function) and "inference_only" in inspect.signature(function).parameters:
                found[f"{module.__name__.rpartition('.')[2]} {name}"] = function
    return found


@pytest.mark.parametrize("name", _for_inference())
def test_no_gradient_where_it_is_for_inference_only(name: str) -> None:
    function = _for_inference()[name]
    logits, hidden = normal(1, 6, VOCAB), normal(1, 6, 4)
    weight, ids = normal(VOCAB, 4, seed=2), torch.arange(6)[None]
    one = _common.ONE_PROCESS
    values = {"vocab_parallel_logits": logits, "student_logits": logits, "target_logits": logits}
    values |= {"hidden": hidden, "tensor_parallel_hidden_states": hidden.transpose(0, 1)}
    values |= dict.fromkeys(("weight", "lm_head_weight", "output_weight_layer"), weight)
    values |= {"target": ids, "global_indices": ids[..., None], "runtime_gather_output": None}
    values |= {"vocab_start_index": 0, "vocab_end_index": VOCAB, "chunk_size": 3}
    values |= {"tp_group": one, "group": one, "top_k": None, "top_p": 0.9}
    values |= {"cu_seqlens_padded": torch.tensor([0, 6]), "unpacked_seqlen": 6}
    parameters = inspect.signature(function).parameters.values()
    call = {p.name: values[p.name] for p in parameters if p.default is p.empty}
    call = {k: x.clone().requires_grad_() if k in LEARNING else x for k, x in call.items()}
    learning, quiet = (function(**call, inference_only=flag) for flag in (False, True))
    assert learning.requires_grad
    assert not quiet.requires_grad
    assert torch.equal(learning.detach(), quiet)


@pytest.mark.parametrize("others", [{}, {"top_p": 0.99}, {"top_k": 20}], ids=str)
def test_min_p_is_a_filter_alone_and_beside_others(others: dict[str, Any]) -> None:
    logits = normal(1, 4, VOCAB)
    p = logits.double().softmax(-1)
    kept = p.where(p >= 0.5 * p.amax(-1, keepdim=True), 0.0)
    best = p.argmax(-1)
    want = take((kept / kept.sum(-1, keepdim=True)).log(), best)
    assert_near(_common.token_logprobs(logits, best, None, min_p=0.5, **others), want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_next_tokens_of_any_integers(dtype: torch.dtype) -> None:
    assert _common.next_tokens(torch.tensor([[1, 2]], dtype=dtype)).tolist() == [[2, -100]]


def test_a_batch_of_no_sequences() -> None:
    ids = torch.zeros(0, 4, dtype=torch.int64)
    got = _common.token_logprobs(torch.zeros(0, 4, VOCAB), ids, None, chunk_size=2)
    assert got.shape == (0, 4)


def test_padding_of_targets_asks_for_nothing() -> None:
    target = torch.tensor([[1, 2, 3]])
    assert _common.shard_padded(target, 5, None).tolist() == [[1, 2, 3, -100, -100]]


def test_ms_swift_s_masked_labels_in_log_probabilities() -> None:
    """Its call of before 4.6: labels of -100 give 0 there as well, and no gradient."""
    log_probs = normal(2, 3, VOCAB).log_softmax(-1).requires_grad_()
    labels = torch.tensor([[3, -100, 0], [-100, 23, 7]])
    got = ms_swift.vocab_parallel_gather_logps(log_probs, labels, log_probs)
    want = take(log_probs.detach(), labels.clamp(min=0)).where(labels >= 0, 0.0)
    assert_near(got, want)
    got.sum().backward()
    assert torch.equal(log_probs.grad.sum(-1), (labels >= 0).float())


@pytest.mark.parametrize(("asked", "expected"), [(512, None), (64, 64)])
def test_ms_swift_s_rows_of_an_entropy(monkeypatch: Any, asked: int, expected: int | None) -> None:
    seen = []
    monkeypatch.setattr(
        ms_swift.ours,
        "vocab_parallel_entropy",
        lambda x, chunk_size=None: seen.append(chunk_size),
    )
    ms_swift.vocab_parallel_entropy(normal(1, 3, VOCAB), asked)
    assert seen == [expected]
