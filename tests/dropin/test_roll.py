"""ROLL's names over TP and CP, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_logprobs.dropin import roll
from tests.dropin.common import LAYOUTS, VOCAB, assert_near, normal, place, spread, zigzag
from tests.engine.truths import entropy_of, take
from tests.megatron.common import megatron


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
        leaf.grad = None
        return found | distilled(leaf, rank, cp, d)


def distilled(leaf: Tensor, rank: int, cp: int, d: dict[str, Tensor]) -> dict[str, Tensor]:
    """What ROLL's student takes of its logits; of the class that the switch puts the methods in."""

    class Strategy(roll.MegatronInferStrategy):
        def _get_feature_on_this_cp_rank(self, feature: Tensor, name: str = "input_ids") -> Tensor:
            return zigzag(feature, rank, cp)

    strategy, found = Strategy(), {}
    ids, upstream = zigzag(d["teacher ids"], rank, cp), zigzag(d["upstream"], rank, cp)
    found["at ids"] = strategy.op_compute_gather_by_teacher_indices(leaf, ids.int())
    (found["at ids"] * upstream.unsqueeze(-1)).sum().backward()
    found["ids grad"], leaf.grad = leaf.grad, None
    half = strategy.op_compute_gather_by_teacher_indices(leaf.detach().bfloat16(), ids[..., 0])
    assert half.dtype is torch.bfloat16
    assert torch.equal(half, found["at ids"][..., 0].detach().bfloat16())
    assert strategy.op_compute_gather_by_teacher_indices(leaf, None) is leaf
    found["loss"], found["tokens"] = strategy.op_compute_language_loss_from_logits(
        leaf, d["labels"], reduction="sum"
    )
    found["loss"].backward()
    found["loss grad"], leaf.grad = leaf.grad, None
    mean, _ = strategy.op_compute_language_loss_from_logits(leaf, d["labels"])
    mean.backward()
    assert_near(mean.detach() * found["tokens"], found["loss"].detach())
    assert_near(leaf.grad * found["tokens"], found["loss grad"])
    nothing = torch.full_like(d["labels"], -100)
    assert strategy.op_compute_language_loss_from_logits(leaf, nothing)[0] == 0
    with pytest.raises(ValueError, match="reduction"):
        strategy.op_compute_language_loss_from_logits(leaf, nothing, reduction="none")
    return found


@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_roll(ranks, tp: int, cp: int) -> None:
    d = {"logits": normal(2, 8, VOCAB), "upstream": normal(2, 8, seed=3)}
    d["target"] = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(2))
    d["labels"] = d["target"].masked_fill(torch.arange(16).view(2, 8) % 5 == 3, -100)
    d["teacher ids"] = torch.stack([d["target"], d["target"], d["target"].flip(1)], dim=-1)
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
    # A student's: an id may be repeated, and a piece's last token predicts nothing.
    at_ids = torch.zeros_like(ones).scatter_add(-1, d["teacher ids"], ones[..., :3].contiguous())
    assert_near(spread([r["ids grad"] for r in results], tp, cp, leaf.shape), at_ids)
    chosen_logits = leaf.detach().gather(-1, d["teacher ids"])
    following, piece = d["labels"].roll(-1, dims=1), 8 // (2 * cp if cp > 1 else 1)
    following[:, piece - 1 :: piece] = -100
    counted = following != -100
    loss = -(take(leaf.log_softmax(-1), following.clamp(min=0)) * counted).sum()
    (wanted,) = torch.autograd.grad(loss, leaf)
    for rank, result in enumerate(results):
        assert_near(result["at ids"], zigzag(chosen_logits, rank // tp, cp))
        assert_near(result["loss"], loss.detach())
        assert result["tokens"] == counted.sum()
        assert result["tokens"].dtype == torch.int64
    assert_near(spread([r["loss grad"] for r in results], tp, cp, leaf.shape), wanted)


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


Plan = list[list[tuple[str, int]]]


def run_encoders(
    tp: int, plan: Plan, items: list[Tensor], upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    with megatron(tp=tp, cp=2 // tp) as state:
        rank = state.get_tensor_and_context_parallel_group().rank()
        mine = [items[i] for _, i in plan[rank]]
        leaf = torch.cat([upstream[:0], *mine]).requires_grad_()
        whole = roll.encoder_sequence_parallel_gather(leaf, plan, [len(i) for i in items])
        (whole * upstream).sum().backward()
        same = torch.ones(3, requires_grad=True)
        roll.encoder_small_batch_size_gather(same).sum().backward()
        return whole, leaf.grad, same.grad


@pytest.mark.parametrize(
    ("tp", "plan"), [(2, [[("a", 2), ("b", 0)], [("c", 1)]]), (1, [[("a", 1), ("b", 0)], []])]
)
def test_roll_encoders(ranks, tp: int, plan: Plan) -> None:
    """Items are split over TP x CP, of which a rank may have none; the share is of TP alone."""
    items = [normal(n, 2, seed=n) for n in (3, 5, 1)][: sum(map(len, plan))]
    upstream = normal(sum(map(len, items)), 2)
    parts = upstream.split([len(item) for item in items])
    results = ranks(2).run(run_encoders, tp, plan, items, upstream)
    for (whole, grad, same), mine in zip(results, plan, strict=True):
        assert torch.equal(whole, torch.cat(items))
        assert torch.equal(grad, torch.cat([upstream[:0], *(parts[i] for _, i in mine)]))
        assert torch.equal(same, torch.full((3,), 1.0 / tp))
