"""NeMo-RL's autograd functions, softmaxes and vocabulary helpers at TP 1, 2 and 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs.dropin import nemo_rl
from tests.dropin.common import VOCAB, Rank, assert_near, filtered

B, S, K = 2, 5, 4


def data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(B, S, VOCAB, generator=generator) * 3
    return {
        "logits": logits,
        "teacher": torch.randn(B, S, VOCAB, generator=generator) * 2,
        "target": torch.randint(0, VOCAB, (B, S), generator=generator),
        "ids": torch.randint(0, VOCAB, (B, S, K), generator=generator),
        "columns": torch.tensor([3, 17, 3, 23]),
        "upstream": torch.randn(B, S, generator=generator),
        "upstream_k": torch.randn(B, S, K, generator=generator),
        "upstream_v": torch.randn(B, S, VOCAB, generator=generator),
    }


def call(name: str, r: Rank, logits: Tensor, d: dict[str, Tensor], inference: bool) -> Tensor:
    """One function on this rank's shard, by its positional arguments."""
    start, end = r.range
    target, teacher = d["target"], r.columns(d["teacher"])
    arguments: dict[str, tuple] = {
        "DistributedLogprob": (target, start, end, r.tp),
        "ChunkedDistributedLogprob": (target, start, end, 2, r.tp),
        "DistributedCrossEntropy": (teacher, r.tp),
        "DistributedLogprobWithSampling": (target, r.tp, 12, 0.9),
        "ChunkedDistributedLogprobWithSampling": (target, r.tp, None, 0.9, 2),
        "ChunkedDistributedGatherLogprob": (d["ids"], start, end, 2, r.tp),
        "ChunkedDistributedEntropy": (2, r.tp),
    }
    if name in arguments:
        return getattr(nemo_rl, name).apply(logits, *arguments[name], inference)
    if name == "vocab_parallel_log_softmax":
        return nemo_rl.vocab_parallel_log_softmax(logits, 0.7, tp_group=r.tp)
    if name == "vocab_parallel_full_log_softmax":
        return nemo_rl.vocab_parallel_full_log_softmax(logits, 0.7, tp_group=r.tp)
    assert name == "vocab_parallel_gather_columns"
    return nemo_rl.vocab_parallel_gather_columns(logits, d["columns"], tp_group=r.tp)


def reference(name: str, logits: Tensor, d: dict[str, Tensor]) -> Tensor:
    target = d["target"][..., None]
    logp = logits.log_softmax(-1)
    if name in ("DistributedLogprob", "ChunkedDistributedLogprob"):
        return logp.gather(-1, target)[..., 0]
    if name == "DistributedCrossEntropy":
        return -(d["teacher"].double().softmax(-1) * logp).sum(-1)
    if "WithSampling" in name:
        top_k = None if "Chunked" in name else 12
        return filtered(logits, top_k, 0.9).log_softmax(-1).gather(-1, target)[..., 0]
    if name == "ChunkedDistributedGatherLogprob":
        return logp.gather(-1, d["ids"])
    if name == "ChunkedDistributedEntropy":
        return (logp.exp() * logp).sum(-1)
    if name == "vocab_parallel_gather_columns":
        return logits[..., d["columns"]]
    return (logits / 0.7).log_softmax(-1)


NAMES = [
    "DistributedLogprob",
    "ChunkedDistributedLogprob",
    "DistributedCrossEntropy",
    "DistributedLogprobWithSampling",
    "ChunkedDistributedLogprobWithSampling",
    "ChunkedDistributedGatherLogprob",
    "ChunkedDistributedEntropy",
    "vocab_parallel_log_softmax",
    "vocab_parallel_full_log_softmax",
    "vocab_parallel_gather_columns",
]


def upstream_of(name: str, d: dict[str, Tensor]) -> Tensor:
    if "softmax" in name:
        return d["upstream_v"]
    return d["upstream_k" if name.endswith(("GatherLogprob", "columns")) else "upstream"]


def run(name: str, tp: int, dtype: torch.dtype) -> dict[str, Any]:
    r, d = Rank(tp, 1), data()
    leaf = r.columns(d["logits"]).to(dtype).clone().requires_grad_()
    before = leaf.detach().clone()
    value = call(name, r, leaf, d, False)
    upstream = upstream_of(name, d)
    if name == "vocab_parallel_log_softmax":
        upstream = r.columns(upstream)
    finite = value.isfinite()
    value.backward(torch.where(finite, upstream, 0.0))  # a filtered target is masked
    assert torch.equal(leaf.detach(), before)
    assert leaf.grad.dtype == dtype
    if name[0].isupper():
        assert not call(name, r, leaf, d, True).requires_grad
    return {"value": value, "grad": leaf.grad}


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(ranks, name: str, tp: int) -> None:
    d = data()
    leaf = d["logits"].double().requires_grad_()
    want = reference(name, leaf, d)
    finite = want.isfinite()
    torch.where(finite, want, 0.0).backward(upstream_of(name, d).double())
    results = ranks(tp).run(run, name, tp, torch.float32)
    if name == "vocab_parallel_log_softmax":
        assert_near(torch.cat([result["value"] for result in results], -1), want.detach())
    else:
        for result in results:
            assert result["value"].dtype == torch.float32
            assert_near(result["value"], want.detach())
    if "WithSampling" in name:
        assert not finite.all()
        assert finite.any()
    assert_near(torch.cat([result["grad"] for result in results], -1), leaf.grad)


def test_low_precision_logits_give_float32(ranks) -> None:
    rounded = data()["logits"].bfloat16().double()
    for name in ("ChunkedDistributedLogprob", "ChunkedDistributedEntropy"):
        for result in ranks(2).run(run, name, 2, torch.bfloat16):
            assert result["value"].dtype == torch.float32
            assert_near(result["value"], reference(name, rounded, data()))


def no_gradient(tp: int) -> dict[str, Any]:
    r, d = Rank(tp, 1), data()
    leaf = r.columns(d["logits"]).clone().requires_grad_()
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
    flat = leaf.detach().flatten(0, 1)[:6]
    whole = nemo_rl.all_to_all_vp2sq(flat, r.tp)
    assert torch.equal(nemo_rl.all_to_all_sq2vp(whole, r.tp), flat)
    assert torch.equal(leaf.detach(), before)
    assert not any(x.requires_grad for x in (logp, p, values, everything))
    with pytest.raises(ValueError):
        nemo_rl.all_to_all_vp2sq(flat[0], r.tp)
    return {
        "logp": logp,
        "p": p,
        "values": values,
        "ids": ids,
        "everything": everything,
        "best": best,
        "whole": whole,
    }


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_without_gradients(ranks, tp: int) -> None:
    logits = data()["logits"]
    results = ranks(tp).run(no_gradient, tp)
    logp = logits.double().log_softmax(-1)
    assert_near(torch.cat([result["logp"] for result in results], -1), logp)
    assert_near(torch.cat([result["p"] for result in results], -1), logp.exp())
    top = logits.topk(K, dim=-1)
    for result in results:
        assert torch.equal(result["values"], top.values)
        assert torch.equal(result["ids"], top.indices)
        assert result["everything"].shape == (B, S, VOCAB)
        assert torch.equal(result["best"], logits.argmax(-1))
    rows = torch.cat([result["whole"] for result in results])
    assert torch.equal(rows, logits.flatten(0, 1)[:6])


def uneven_rows() -> None:
    r = Rank(2, 1)
    nemo_rl.all_to_all_vp2sq(torch.randn(5, 4), r.tp)


def test_uneven_rows_raise(ranks) -> None:
    errors = ranks(2).run_expecting_errors(uneven_rows)
    assert [type(error) for error in errors] == [ValueError, ValueError]


def plain() -> dict[str, Tensor]:
    """In a world of two ranks, None as a TP group is this process alone."""
    d = data()
    return {
        "log_softmax": nemo_rl.vocab_parallel_log_softmax(d["logits"], 2.0),
        "full": nemo_rl.vocab_parallel_full_log_softmax(d["logits"], 2.0),
        "columns": nemo_rl.vocab_parallel_gather_columns(d["logits"], d["columns"]),
        "argmax": nemo_rl.vocab_parallel_argmax(d["logits"]),
        "gather": nemo_rl.gather_logits_at_global_indices(
            d["logits"], d["ids"], vocab_start_index=0, vocab_end_index=VOCAB
        ),
    }


def test_no_group_is_no_tensor_parallelism(ranks) -> None:
    d = data()
    logp = (d["logits"].double() / 2).log_softmax(-1)
    for result in ranks(2).run(plain):
        assert_near(result["log_softmax"], logp)
        assert_near(result["full"], logp)
        assert torch.equal(result["columns"], d["logits"][..., d["columns"]])
        assert torch.equal(result["argmax"], d["logits"].argmax(-1))
        assert torch.equal(result["gather"], d["logits"].gather(-1, d["ids"]))
