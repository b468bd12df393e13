"""NeMo-RL's top-k distillation and gathers over TP and CP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs.dropin import nemo_rl
from tests.dropin.common import LAYOUTS, VOCAB, Rank, assert_near, spread
from tests.dropin.test_nemo_logprobs import device_mesh

B, K = 2, 5


def make(length: int, padded: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    teacher = torch.randn(B, length, VOCAB, generator=generator) * 2
    values, ids = teacher.topk(K, dim=-1)
    return {
        "logits": torch.randn(B, padded, VOCAB, generator=generator) * 2,
        "values": values,
        "ids": ids,
        "upstream": torch.randn(B, length, K, generator=generator),
        "on_entropy": torch.randn(B, length - 1, generator=generator),
    }


def loss_of(student: Tensor, entropy: Tensor | None, d: dict[str, Tensor], dtype: Any) -> Tensor:
    loss = (student * d["upstream"][:, :-1].to(dtype)).sum()
    return loss if entropy is None else loss + (entropy * d["on_entropy"].to(dtype)).sum()


def expected(d: dict[str, Tensor], whole: bool, entropy: bool) -> dict[str, Tensor]:
    leaf = d["logits"].double().requires_grad_()
    z = leaf[:, : d["ids"].shape[1]]
    logp = z.log_softmax(-1)
    student = logp.gather(-1, d["ids"]) if whole else z.gather(-1, d["ids"]).log_softmax(-1)
    h_all = (logp.exp() * logp).sum(-1)[:, :-1] if entropy else None
    loss_of(student[:, :-1], h_all, d, torch.float64).backward()
    found = {
        "student": student[:, :-1].detach(),
        "teacher": d["values"].double().log_softmax(-1)[:, :-1],
        "grad": leaf.grad,
    }
    if h_all is not None:
        found["h_all"] = h_all.detach()
    return found


def run(tp: int, cp: int, d: dict[str, Tensor], whole: bool, entropy: bool, how: str) -> dict:
    places: dict[str, Any] = {}
    if how == "groups":
        r = Rank(tp, cp)
        leaf = r.shard(d["logits"])
        places = {
            "vocab_parallel_rank": r.tp.rank(),
            "vocab_parallel_group": r.tp,
            "context_parallel_group": r.cp_group,
        }
    elif how == "dtensor":
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = device_mesh(tp, cp)
        placements = [Shard(2)]
        logits = d["logits"]
        if cp > 1:
            placements = [Shard(1), Shard(2)]
            mine = torch.arange(logits.shape[1])[None]
            logits = torch.cat([_zigzag(logits, mine, rank, cp) for rank in range(cp)], dim=1)
        leaf = distribute_tensor(logits, mesh, placements).detach().requires_grad_()
    else:
        leaf = d["logits"].clone().requires_grad_()
    student, teacher, h_all = nemo_rl.get_distillation_topk_logprobs_from_logits(
        leaf, d["values"], d["ids"], whole, entropy, **places
    )
    assert (h_all is not None) == entropy
    loss_of(student, h_all, d, torch.float32).backward()
    assert not teacher.requires_grad
    grad = leaf.grad.to_local() if how == "dtensor" else leaf.grad
    return {"student": student, "teacher": teacher, "h_all": h_all, "grad": grad}


def _zigzag(x: Tensor, place: Tensor, rank: int, cp: int) -> Tensor:
    pieces = place.chunk(2 * cp, dim=1)
    return x[:, torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]], dim=1)[0]]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("length", "padded"), [(8, 8), (9, 12)])
@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_topk_distillation(
    ranks, tp: int, cp: int, length: int, padded: int, whole: bool, entropy: bool
) -> None:
    d = make(length, padded)
    want = expected(d, whole, entropy)
    results = ranks(tp * cp).run(run, tp, cp, d, whole, entropy, "groups")
    for result in results:
        for name in want.keys() - {"grad"}:
            assert result[name].dtype == torch.float32
            assert_near(result[name], want[name])
    grad = spread([result["grad"] for result in results], tp, cp, d["logits"].shape)
    assert_near(grad, want["grad"] * cp)


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2)])
def test_student_dtensor(ranks, tp: int, cp: int) -> None:
    d = make(8, 8)
    want = expected(d, True, True)
    results = ranks(tp * cp).run(run, tp, cp, d, True, True, "dtensor")
    for result in results:
        for name in want.keys() - {"grad"}:
            assert_near(result[name], want[name])
    grad = spread([result["grad"] for result in results], tp, cp, d["logits"].shape)
    assert_near(grad, want["grad"] * cp)


@pytest.mark.parametrize("whole", [False, True])
def test_whole_student_logits(ranks, whole: bool) -> None:
    d = make(6, 6)
    want = expected(d, whole, True)
    for result in ranks(2).run(run, 1, 1, d, whole, True, "plain"):
        for name in want:
            assert_near(result[name], want[name])


def run_gather(tp: int, cp: int, d: dict[str, Tensor]) -> dict[str, Tensor]:
    r = Rank(tp, cp)
    leaf = r.shard(d["logits"])
    start, end = r.range
    value = nemo_rl.gather_logits_at_global_indices(
        leaf,
        d["ids"],
        r.tp,
        r.cp_group,
        vocab_start_index=start,
        vocab_end_index=end,
        chunk_size=3,
    )
    (value * d["upstream"]).sum().backward()
    return {"value": value, "grad": leaf.grad}


@pytest.mark.parametrize(("length", "padded"), [(8, 8), (9, 12)])
@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_gather(ranks, tp: int, cp: int, length: int, padded: int) -> None:
    d = make(length, padded)
    leaf = d["logits"].double().requires_grad_()
    want = leaf[:, :length].gather(-1, d["ids"])
    (want * d["upstream"].double()).sum().backward()
    results = ranks(tp * cp).run(run_gather, tp, cp, d)
    for result in results:
        assert_near(result["value"], want.detach(), 0.0)
    grad = spread([result["grad"] for result in results], tp, cp, d["logits"].shape)
    assert_near(grad, leaf.grad * cp)


def test_refuses_what_it_cannot_do() -> None:
    d = make(6, 6)
    with pytest.raises(ValueError, match="k >= 1, got k = 0"):
        nemo_rl.get_distillation_topk_logprobs_from_logits(
            d["logits"], d["values"][..., :0], d["ids"][..., :0], True, False
        )
