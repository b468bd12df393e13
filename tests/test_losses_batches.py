"""Of whole sequences and batches: weights and masks, denominators."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import consistency, context_parallel_gather, context_parallel_shard, losses
from tests.helpers.shards import world_group, world_rank, world_size
from tests.helpers.token_batches import F64, token_batch

# ---- corrections ---------------------------------------------------------------------------------


def _bernoulli(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


ESTIMATORS = {
    "k1": lambda p, q: math.log(q / p),
    "k2": lambda p, q: math.log(q / p) ** 2 / 2,
    "k3": lambda p, q: p / q - 1 - math.log(p / q),
    "binary": lambda p, q: max(_bernoulli(p, q), _bernoulli(q, p)),
}
LEVELS = {"token": None, "sum": sum, "mean": lambda x: sum(x) / len(x), "max": max}


@pytest.mark.parametrize("seq_dim", [0, 1])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rejection(estimator, level, seq_dim):
    """p is the trainer's, q the rollout engine's."""
    x, reduce = token_batch(), LEVELS[level]
    low, high = (-0.2, 0.15) if estimator == "k1" else (-math.inf, 0.02)
    train, rollout, mask = x["new"], torch.where(x["mask"], x["old"], torch.nan), x["mask"]
    arguments = [t if seq_dim else t.t() for t in (train, rollout, mask)]
    found = losses.rejection_mask(
        *arguments, low=low, high=high, estimator=estimator, level=level, seq_dim=seq_dim
    )
    found = found if seq_dim else found.t()
    kept = 0.0
    for i in range(len(train)):
        values = [
            ESTIMATORS[estimator](train[i, t].exp().item(), rollout[i, t].exp().item())
            for t in range(8)
            if mask[i, t]
        ]
        if reduce and values:
            values = [reduce(values)] * len(values)
        assert not found[i, len(values) :].any()
        for t, value in enumerate(values):
            assert found[i, t] == float(low <= value <= high), (i, t)
            kept += found[i, t].item()
    assert 0 < kept < mask.sum()


def test_rejection_at_the_edge_of_certainty():
    """p of 1 and of 0 in the dtype: far where the other is not."""
    train = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf, torch.nan, -1e-9, 1e-8]])
    rollout = torch.tensor([[0.0, -0.5, -torch.inf, -0.5, -0.5, -1e-9, 0.0]])
    mask = torch.ones(1, 7)
    found = losses.rejection_mask(train, rollout, mask, estimator="binary", high=0.1)
    assert found.isnan().tolist() == [[False, False, False, False, True, False, False]]
    assert found.nan_to_num().tolist() == [[1, 0, 1, 0, 0, 1, 1]]
    for level in ("sum", "mean", "max"):
        found = losses.rejection_mask(
            train[:, 3:], rollout[:, 3:], mask[:, 3:], high=1, level=level
        )
        assert found.isnan().all()


def test_binary_rejection_takes_the_larger_divergence_of_both_ways():
    """0.143 and 0.045, either way round."""
    x, mask = torch.tensor([[-0.05, -0.001]]), torch.ones(1, 2)
    for high, kept in ((0.1, 0.0), (0.2, 1.0)):
        found = losses.rejection_mask(x.flip(1), x, mask, high=high, estimator="binary")
        assert found.tolist() == [[kept, kept]]


@pytest.mark.parametrize("level", ["token", "sum", "mean", "max"])
@pytest.mark.parametrize("certain", ["trainer", "rollout", "both"])
def test_a_token_whose_probability_rounds_to_one_drops_no_sequence(level, certain):
    """Logits of 24.5 against 20 above 999 others: 7e-6 apart, and one side is 0.0 in float32."""
    sure, nearly = (torch.tensor([gap, *[0.0] * 999]).log_softmax(0)[0] for gap in (24.5, 20.0))
    assert sure == 0.0
    assert nearly < 0.0
    train, rollout = torch.full((2, 1, 20), -0.5)
    train[0, 7] = sure if certain != "rollout" else nearly
    rollout[0, 7] = sure if certain != "trainer" else nearly
    mask = torch.ones(1, 20)
    found = losses.rejection_mask(train, rollout, mask, high=2e-5, level=level, estimator="binary")
    assert torch.equal(found, mask)
    leaf = train.clone().requires_grad_()
    loss = losses.DPPOLoss(divergence="kl", low=2e-5, high=2e-5)
    loss(leaf, None, rollout, torch.where(train > rollout, 1.0, -1.0)).sum().backward()
    assert (leaf.grad != 0.0).all()


@pytest.mark.parametrize("level", ["token", "sum", "mean", "max"])
def test_rejection_of_sequences_without_tokens(level: str) -> None:
    for shape in ((3, 0), (0, 4)):
        found = losses.rejection_mask(*[torch.zeros(shape)] * 3, high=1.0, level=level)
        assert found.shape == shape


@pytest.mark.parametrize("seq_dim", [0, 1])
@pytest.mark.parametrize("veto", [None, 0.6, 0.9])
@pytest.mark.parametrize("ratio", ["product", "mean"])
def test_sequence_weights(ratio, veto, seq_dim):
    x = token_batch()
    rollout = torch.where(x["mask"], x["old"], torch.nan)
    arguments = [t if seq_dim else t.t() for t in (x["new"], rollout, x["mask"])]
    found = losses.truncated_sequence_weights(
        *arguments, cap=1.05, ratio=ratio, veto=veto, seq_dim=seq_dim
    )
    by_token = losses.sequence_masked_importance_weights(
        *arguments, low=0.9, high=1.02, seq_dim=seq_dim
    )
    by_token = by_token if seq_dim else by_token.t()
    vetoed = 0
    for i in range(6):
        ratios = [
            (x["new"][i, t] - x["old"][i, t]).exp().item() for t in range(8) if x["mask"][i, t]
        ]
        product = math.prod(ratios)
        mean = product ** (1 / max(len(ratios), 1))
        expected = min(product if ratio == "product" else mean, 1.05)
        if veto is not None and ratios and min(ratios) < veto:
            expected, vetoed = 0.0, vetoed + 1
        assert found.flatten()[i].item() == pytest.approx(expected, abs=1e-12)
        assert not by_token[i, len(ratios) :].any()
        for t, r in enumerate(ratios):
            kept = r if 0.9 <= mean <= 1.02 else 0.0
            assert by_token[i, t].item() == pytest.approx(kept, abs=1e-12)
    assert (vetoed > 0) == (veto is not None)
    assert (by_token == 0).any()
    assert (by_token[x["mask"]] > 0).any()
    spoilt = x["new"].clone()
    spoilt[0, 0] = torch.nan
    weights = losses.truncated_sequence_weights(spoilt, x["old"], x["mask"], veto=0.9)
    assert weights.isnan().flatten().tolist() == [True] + [False] * 5


@pytest.mark.parametrize("seq_dim", [0, 1])
def test_sequence_sums_and_means(seq_dim):
    x = token_batch()
    values = torch.where(x["mask"], x["new"], torch.nan)
    values, mask = (values, x["mask"]) if seq_dim else (values.t(), x["mask"].t())
    sums = torch.stack([row[keep].sum() for row, keep in zip(x["new"], x["mask"], strict=True)])
    found = losses.sequence_sum(values, mask, seq_dim=seq_dim)
    assert found.shape == ((6, 1) if seq_dim else (1, 6))
    torch.testing.assert_close(found.flatten(), sums)
    for keep in (mask, mask.long(), mask.float()):
        found = losses.sequence_mean(values, keep, seq_dim=seq_dim)
        torch.testing.assert_close(found.flatten(), sums / x["mask"].sum(1).clamp(min=1))


@pytest.mark.parametrize("seq_dim", [0, 1])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("ratio", ["product", "mean"])
def test_masked_sequence_weights(ratio, weighted, seq_dim):
    x = token_batch()
    rollout = torch.where(x["mask"], x["old"], torch.nan)  # what is masked may be anything
    arguments = [t if seq_dim else t.t() for t in (x["new"], rollout, x["mask"])]
    arguments[0].requires_grad_()
    found = losses.masked_sequence_weights(
        *arguments, low=0.9, high=1.2, ratio=ratio, weighted=weighted, seq_dim=seq_dim
    )
    assert not found.requires_grad
    assert found.shape == ((6, 1) if seq_dim else (1, 6))
    for i, keep in enumerate(x["mask"]):
        log_ratio = (x["new"] - x["old"])[i, keep].sum().item()
        s = math.exp(log_ratio / (max(int(keep.sum()), 1) if ratio == "mean" else 1))
        expected = (s if weighted else 1.0) if 0.9 <= s <= 1.2 else 0.0
        assert found.flatten()[i].item() == pytest.approx(expected, abs=1e-12)
    assert 0 < found.count_nonzero() < 6


@pytest.mark.parametrize("seq_dim", [0, 1])
def test_off_policy_sequence_mask(seq_dim):
    x = token_batch()
    drift = torch.tensor([[0.3], [0.3], [0.05], [-2.0], [0.05], [0.3]], dtype=F64)
    rollout = torch.where(x["mask"], x["new"] + drift, torch.nan)
    advantages = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0], [1.0], [-1.0]], dtype=F64)
    logprobs = x["new"].requires_grad_()
    arguments = [t if seq_dim else t.t() for t in (logprobs, rollout, advantages, x["mask"])]
    found = losses.off_policy_sequence_mask(*arguments, delta=0.1, seq_dim=seq_dim)
    assert not found.requires_grad
    found = found if seq_dim else found.t()
    assert torch.equal(found, torch.tensor([0.0, 1, 1, 1, 1, 1]).double()[:, None].expand(6, 8))
    # As weights of the clipped loss the masked sequence has neither a value nor a gradient.
    loss = losses.ClippedLoss(weighted=True)
    value = loss(logprobs, None, x["old"], advantages.expand(6, 8), found)
    (grad,) = torch.autograd.grad(value.sum(), logprobs)
    assert not value[0].any()
    assert not grad[0].any()
    assert grad[1:].any(1).all()


# ---- denominators --------------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "token": {"mode": "token"},
    "sequence": {"mode": "sequence"},
    "Dr. GRPO": {"mode": "constant", "length": 8},
    "token sum": {"mode": "constant", "length": 1},
    "prompt": {"mode": "prompt", "answers": 2},
}


def _expected(name: str, loss: Tensor, mask: Tensor) -> Tensor:
    rows = [row[keep] for row, keep in zip(loss, mask, strict=True)]
    some = [row for row in rows if len(row)]
    if name == "token":
        return torch.cat(rows).mean()
    if name == "sequence":
        return torch.stack([row.mean() for row in some]).mean()
    if name == "prompt":
        prompts = [torch.cat(rows[i : i + 2]) for i in range(0, len(rows), 2)]
        return torch.stack([prompt.mean() for prompt in prompts if len(prompt)]).mean()
    return torch.stack([row.sum() for row in some]).mean() / MODES[name]["length"]


@pytest.mark.parametrize("seq_dim", [0, 1])
@pytest.mark.parametrize("name", MODES)
def test_an_aggregation(name, seq_dim):
    x = token_batch()
    x["mask"][2:4] = False  # a prompt without a token
    arguments = [t if seq_dim else t.t() for t in (x["new"], x["mask"])]
    for mask in (arguments[1], arguments[1].long(), arguments[1].float()):
        found = losses.aggregation(mask, seq_dim=seq_dim, dtype=F64, **MODES[name])
        weights = 1.0 if found.weights is None else found.weights
        total = torch.where(mask != 0, arguments[0] * weights, 0.0).sum() / found.denominator
        torch.testing.assert_close(total, _expected(name, x["new"], x["mask"]))
    assert losses.aggregation(arguments[1] & False, seq_dim=seq_dim, **MODES[name]).denominator > 0
    if name != "token":  # six sequences, half of them without a token; three prompts, one without
        every = losses.aggregation(
            arguments[1], seq_dim=seq_dim, dtype=F64, count_empty=True, **MODES[name]
        )
        share = 2 / 3 if name == "prompt" else 3 / 6
        torch.testing.assert_close(found.denominator, every.denominator * share)
    # By default nothing turns a float32 loss into a float64 one.
    single = losses.aggregation(arguments[1], seq_dim=seq_dim, **MODES[name])
    torch.testing.assert_close(single.denominator, found.denominator.float())
    loss = arguments[0].float() if found.weights is None else arguments[0].float() * single.weights
    assert (loss.sum() / single.denominator).dtype is torch.float32


def _megatron_step(
    name: str, x: dict[str, Tensor], dp: int, outputs: int, by_token: bool
) -> Tensor:
    """The gradient that Megatron makes of the ranks' losses, micro-batches of one sequence.

    Each micro-batch through its schedule's `forward_step_calc_loss`; gradients averaged over all
    ranks, or added up and divided by the tokens that the loss function gave.
    """
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    cp = world_size() // dp
    data, part = divmod(world_rank(), cp)
    groups = [dist.new_group(range(c, world_size(), cp)) for c in range(cp)]
    mine = slice(data * 12 // dp, (data + 1) * 12 // dp)
    new = x["new"].clone().requires_grad_()
    losses_, mask = new[mine], x["mask"][mine]
    found = losses.aggregation(
        mask,
        averaged_ranks=dp if outputs == 2 else dp * cp,
        micro_batches=len(mask),
        dtype=F64,
        group=groups[part],
        **MODES[name],
    )
    if found.weights is not None:
        losses_ = losses_ * found.weights
    config = SimpleNamespace(calculate_per_token_loss=by_token, timers=None)
    total, tokens = torch.zeros((), dtype=F64), 0
    for row, keep in zip(losses_, mask & (torch.arange(8) % cp == part), strict=True):
        report = [torch.where(keep, row, 0.0).sum() / found.denominator, {}]
        if outputs == 3:
            report.insert(1, torch.tensor(1, dtype=torch.int))
        loss, count = forward_step_calc_loss(
            SimpleNamespace(),
            None,
            lambda _, given=tuple(report): given,
            config,
            None,
            False,
            len(mask),
            [],
            cp_group_size=cp,
            is_last_stage=True,
        )
        total, tokens = total + loss, tokens + count.double()
    (grad,) = torch.autograd.grad(total, new)
    sums = torch.cat([grad.flatten(), torch.as_tensor(tokens, dtype=F64).reshape(1)])
    dist.all_reduce(sums)
    return sums[:-1].view_as(grad) / (sums[-1] if by_token else world_size())


@pytest.mark.parametrize(("dp", "cp"), [(2, 1), (1, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("name", MODES)
def test_denominators_in_megatron_s_schedule(ranks, name, dp, cp):
    """Data and context parallelism, micro-batches, and each way to give Megatron the loss."""
    x = token_batch(12)
    new = x["new"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(_expected(name, new, x["mask"]), new)
    for outputs, by_token in ((2, False), (3, False), (3, True)):
        for grad in ranks(dp * cp).run(_megatron_step, name, x, dp, outputs, by_token):
            torch.testing.assert_close(grad, expected)


# ---- two passes under context parallelism --------------------------------------------------------

OF_SEQUENCES = {
    "gspo": (losses.GSPOLoss(0.2, 0.3), {"mode": "sequence"}),
    "gmpo": (losses.GMPOLoss(), {"mode": "sequence"}),
    "vespo": (losses.VESPOLoss(), {"mode": "constant", "length": 1}),
    "fipo": (losses.FIPOLoss(), {"mode": "token"}),
    "m2po": (losses.M2POLoss(), {"mode": "token"}),
}


def _two_passes(name: str, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """As `second_pass` and `aggregation` say: gathered, numbers, sharded again."""
    loss, how = OF_SEQUENCES[name]
    options = {"cp_group": world_group()}
    shard = {key: context_parallel_shard(tensor, **options) for key, tensor in x.items()}
    new = shard["new"].clone().requires_grad_()
    whole = context_parallel_gather(new.detach(), **options)
    numbers = loss.second_pass(whole, x["old"], x["a"], x["mask"])
    tensors = [context_parallel_shard(numbers[key], **options) for key in loss.tensors]
    found = losses.aggregation(x["mask"], dtype=F64, **how)
    if found.weights is not None:
        loss = losses.WeightedLoss(loss)
        tensors.append(context_parallel_shard(found.weights, **options))
    total = torch.where(shard["mask"], loss(new, None, *tensors), 0.0).sum() / found.denominator
    (grad,) = torch.autograd.grad(total, new)
    return total.detach(), context_parallel_gather(grad, **options)


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_two_passes_under_context_parallelism(ranks, name):
    x = token_batch()
    total, grad = _two_passes(name, x)
    assert grad.any()
    found = ranks(2).run(_two_passes, name, x)
    torch.testing.assert_close(sum(part[0] for part in found), total)
    for _, part in found:
        torch.testing.assert_close(part, grad)


@pytest.mark.parametrize("spoilt", [-1.0, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name", [name for name, cls in losses.OBJECTIVES.items() if cls().passes == 2]
)
def test_a_token_outside_the_mask_has_no_part(name: str, spoilt: float) -> None:
    """Whatever it holds, and though it has a label."""
    batch, objective = token_batch(), losses.OBJECTIVES[name]()
    mask, found = batch["mask"], []
    for value in (-0.5, spoilt):
        new, old, advantages = (
            torch.where(mask, batch[key], value).contiguous() for key in ("new", "old", "a")
        )
        numbers = objective.second_pass(new, old, advantages, mask)
        logprobs = torch.where(mask, new, -0.5).requires_grad_()
        loss = objective(logprobs, None, *(numbers[key] for key in objective.tensors))
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert not loss[~mask].any()
        assert not gradient[~mask].any()
        found.append((loss, gradient))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_weights_are_of_the_mask_s_tokens() -> None:
    mask = token_batch()["mask"]
    weights = losses.aggregation(mask, mode="sequence", dtype=F64).weights
    assert weights is not None
    torch.testing.assert_close(weights.sum(1), mask.any(1).to(F64))
    assert not weights[~mask].any()


def test_a_share_that_rounding_moves_by_one() -> None:
    entropy = torch.arange(11.0)
    found = losses.top_entropy_mask(entropy, torch.ones(11, dtype=torch.bool), share=0.7)
    assert torch.equal(found, (entropy >= 3.0).float())


def entropies_with_a_nan() -> Tensor:
    entropy = torch.tensor([1.0, 2.0, 3.0]) + world_rank()
    if world_rank() == 1:
        entropy[0] = torch.nan
    mask = torch.ones(3, dtype=torch.bool)
    return losses.top_entropy_mask(entropy, mask, group=world_group())


def test_a_nan_of_another_rank_is_seen_on_every_rank(ranks) -> None:
    for mask in ranks(2).run(entropies_with_a_nan):
        assert mask.isnan().all()


def sequences_that_ranks_count_otherwise() -> None:
    consistency._agreed.clear()  # only a group's first call is compared
    mask, counts = torch.ones(2, 3, dtype=torch.bool), world_rank() == 0
    with pytest.raises(ValueError, match="count_empty"):
        losses.aggregation(mask, mode="sequence", count_empty=counts, group=world_group())


def test_ranks_that_count_other_sequences(ranks) -> None:
    ranks(2).run(sequences_that_ranks_count_otherwise)


@pytest.mark.parametrize(
    ("loss", "more"),
    [
        (losses.ClippedLoss(weighted=True), (torch.tensor([0.0, 1.0]),)),
        (losses.WeightedLoss(losses.ClippedLoss()), (torch.tensor([0.0, 1.0]),)),
    ],
    ids=["weighted", "WeightedLoss"],
)
@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_a_weight_of_zero_masks_any_advantage(loss: Any, more: Any, spoilt: float) -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    found = loss(logprobs, None, torch.tensor([-1.0, -1.0]), torch.tensor([spoilt, 1.0]), *more)
    assert found.tolist() == [0.0, -1.0]
    assert torch.autograd.grad(found.sum(), logprobs)[0].tolist() == [0.0, -1.0]


def test_a_token_that_icepop_drops_may_hold_any_advantage() -> None:
    logprobs, rollout = torch.tensor([-1.0, -1.0], requires_grad=True), torch.tensor([-9.0, -1.0])
    given = torch.tensor([-1.0, -1.0]), rollout, torch.tensor([math.nan, 1.0])
    found = losses.IcePopLoss()(logprobs, None, *given)
    assert found.tolist() == [0.0, -1.0]
    assert torch.autograd.grad(found.sum(), logprobs)[0].tolist() == [0.0, -1.0]


def test_sums_of_float16_leave_its_range() -> None:
    logprobs, mask = torch.full((1, 40_000), -2.0, dtype=torch.float16), torch.ones(1, 40_000)
    assert losses.sequence_sum(logprobs, mask).item() == -80_000.0
    assert losses.sequence_mean(logprobs, mask).item() == -2.0
    old, advantages = logprobs + 1.0, torch.full((1, 1), 1e-8)
    found = losses.GSPOLoss().second_pass(logprobs, old, advantages, mask)
    assert found["sequence_log_ratio"][0, 0] == -1.0
    assert found["advantages"][0, 0] == advantages[0, 0]
    weighted = losses.WeightedLoss(losses.SFTLoss())(logprobs[0, :1], None, advantages[0])
    torch.testing.assert_close(weighted, 2.0 * advantages[0])


def test_kl_cov_chooses_no_token_at_minus_infinity() -> None:
    logprobs = torch.full((1, 10), -math.inf)
    logprobs[0, :4] = -torch.rand(4)
    given = torch.full((1, 10), -1.0), torch.randn(1, 10), torch.ones(1, 10)
    found = losses.KLCovLoss(share=0.5).second_pass(logprobs, *given)
    assert found["chosen"].tolist() == [[1.0] * 4 + [0.0] * 6]
    rows = torch.tensor([-1.0, -1.0]), None, torch.tensor([-math.inf, -1.0])
    value = losses.KLCovLoss(kl_coef=0.0)(*rows, torch.zeros(2), torch.ones(2))
    assert value.tolist() == [0.0, 0.0]


def test_a_ratio_of_nan_is_not_vetoed_away() -> None:
    train, rollout = torch.tensor([[-1.0, torch.nan, -20.0]]), torch.full((1, 3), -1.0)
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert losses.truncated_sequence_weights(train, rollout, mask, veto=1e-4).isnan().all()


def test_a_mean_of_many_entropies_in_low_precision() -> None:
    entropy = torch.full((3001,), 0.2002, dtype=torch.bfloat16)
    control = losses.AdaptiveEntropy().after(entropy, torch.ones(3001, dtype=torch.bool))
    assert abs(control.entropy - float(entropy[0])) < 1e-6
