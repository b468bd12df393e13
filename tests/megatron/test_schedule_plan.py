"""TokenStats through Megatron's combined 1F1B schedule (`--overlap-moe-expert-parallel-comm`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mcore_logprobs import LogprobConfig, TokenStats, patch_model
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron.schedule_plan import ScheduledStats
from tests.megatron.common import (
    MOE,
    SEQ,
    VOCAB,
    loss_of,
    make_batch,
    megatron,
    relative,
    tiny_config,
    worst,
)


@contextlib.contextmanager
def schedule_on_a_cpu() -> Iterator[None]:
    """The CUDA calls of the schedule's nodes that the CPU runtime has no stand-ins for."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("range_push", "range_pop"):
            patch.setattr(torch.cuda.nvtx, name, lambda *args: None)
        patch.setattr(torch.Tensor, "record_stream", lambda *args: None)
        yield


def train_step(
    config: Any, model: Any, batches: list[Any], loss_func: Any, block: Any = None
) -> tuple[list[Any], dict[str, Tensor]]:
    """By Megatron's schedule with the overlap on: (what loss_func reported, gradients)."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.zero_grad(set_to_none=True)

    def forward_step(iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        assert return_schedule_plan
        batch = next(iterator)
        make = model.build_schedule_plan
        if block is None:
            plan = make(**batch["inputs"], labels=batch["labels"])
        else:
            with block(batch):
                plan = make(**batch["inputs"], labels=batch["labels"])
        return plan, lambda out: loss_func(out, batch)

    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=SEQ,
        micro_batch_size=2,
        forward_only=False,
    )
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return reports, grads


def weighted(output: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    loss = (loss_of(output) * batch["weights"]).mean()
    return loss, loss.detach().clone()


def single_steps(model: Any, batches: list[Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same losses and gradients by the model's own forward, without a schedule."""
    model.zero_grad(set_to_none=True)
    losses = []
    for batch in batches:
        output = model(**batch["inputs"], labels=batch["labels"])
        loss, report = weighted(output, batch)
        (loss / len(batches)).backward()
        losses.append(report)
    return losses, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def errors(settings: dict[str, Any]) -> dict[str, float]:
    with megatron(ep=2) as parallel_state, schedule_on_a_cpu():
        config = tiny_config(**MOE)
        model = mm.build_gpt_model(config, vocab_size=VOCAB)
        config.overlap_moe_expert_parallel_comm = True  # a config made with it asks for 16 bits
        batches = [make_batch(parallel_state, seed=i) for i in range(3)]
        expected, expected_grads = train_step(config, model, batches, weighted)
        alone, grads_alone = single_steps(model, batches)
        before = [dict(vars(m)) for m in model.modules()]
        kinds = []

        def seen(output: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
            kinds.append(isinstance(output, TokenStats))
            return weighted(output, batch)

        def in_head(output: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
            assert not output.logprobs.requires_grad
            return output.policy_loss, output.policy_loss.detach().clone()

        with patch_model(model, LogprobConfig(**settings)) as handle:
            got, grads = train_step(config, model, batches, seen)

            def block(batch: dict[str, Any]) -> Any:
                size = batch["weights"].numel()
                return handle.policy_loss(
                    lambda lp, ent, w: -lp * w, batch["weights"], denominator=size
                )

            in_one, policy_grads = train_step(config, model, batches, in_head, block)

            teacher = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))

            @contextlib.contextmanager
            def with_teacher(batch: dict[str, Any]) -> Iterator[None]:
                logits = teacher.expand(*batch["weights"].shape, VOCAB)
                with block(batch), handle.divergence("reverse", teacher_logits=logits):
                    yield

            def both(output: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
                divergence = (output.divergence * batch["weights"]).mean()
                loss = output.policy_loss + divergence
                return loss, divergence.detach().clone()

            apart, divergence_grads = train_step(config, model, batches, both, with_teacher)

        def by_hand(logits: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
            logp = logits.log_softmax(-1)
            value = (logp.exp() * (logp - teacher.log_softmax(-1))).sum(-1)
            picked = logp.gather(-1, batch["target"].unsqueeze(-1))[..., 0]
            loss = ((value - picked) * batch["weights"]).mean()
            return loss, (value * batch["weights"]).mean().detach()

        plain = [batch | {"target": batch["labels"], "labels": None} for batch in batches]
        distilled, distilled_grads = train_step(config, model, plain, by_hand)
        assert set(kinds) == {settings.get("output", "stats") == "stats"}
        after = [dict(vars(m)) for m in model.modules()]
        assert [set(d) for d in after] == [set(d) for d in before]
        pairs = zip([*got, *in_one, *apart], [*expected, *expected, *distilled], strict=True)
        assert set(grads_alone) == set(expected_grads) == set(grads)
        return {
            "plain": max(relative(e, a) for e, a in zip(expected, alone, strict=True)),
            "plain grad": worst(expected_grads, grads_alone),
            "loss": max(relative(g, e) for g, e in pairs),
            "grad": worst(grads, expected_grads),
            "policy grad": worst(policy_grads, expected_grads),
            "divergence grad": worst(divergence_grads, distilled_grads),
        }


@pytest.mark.parametrize(
    "settings",
    [{"entropy": True, "target_rank": True}, {"output": "loss"}, {"fused": False}],
    ids=str,
)
def test_combined_1f1b(ranks, settings):
    assert max(ranks(2).run(errors, settings)[0].values()) < 1e-5


IDS = [3, 70, 5]


def beside(policy: bool, topk: bool) -> dict[str, float]:
    """A loss of what `PatchHandle.also` gives, and of a policy loss."""
    with megatron(ep=2) as parallel_state, schedule_on_a_cpu():
        config = tiny_config(**MOE)
        model = mm.build_gpt_model(config, vocab_size=VOCAB)
        config.overlap_moe_expert_parallel_comm = True
        batches = [make_batch(parallel_state, seed=i) for i in range(2)]

        def total(candidates: Tensor, top: Tensor, loss: Tensor, batch: dict[str, Any]) -> Any:
            value = (candidates[..., 0] * batch["weights"] + 0.5 * candidates[..., 2]).mean()
            value = value + policy * loss + topk * (top[..., 1] * batch["weights"]).mean()
            return value, value.detach().clone()

        def by_hand(logits: Tensor, batch: dict[str, Any]) -> Any:
            logp = logits.log_softmax(-1)
            picked = logp.gather(-1, batch["target"].unsqueeze(-1))[..., 0]
            loss = -(picked * batch["weights"]).mean()
            return total(logp[..., IDS], logp.topk(2).values, loss, batch)

        plain = [batch | {"target": batch["labels"], "labels": None} for batch in batches]
        expected, expected_grads = train_step(config, model, plain, by_hand)

        def of_stats(stats: TokenStats, batch: dict[str, Any]) -> Any:
            assert isinstance(stats, ScheduledStats)
            assert len(pytree.tree_leaves(stats)) > 10
            assert stats.candidates is not None
            top = stats.topk[0] if stats.topk else stats.logprobs[..., None].expand(-1, -1, 2)
            loss = torch.zeros(()) if stats.policy_loss is None else stats.policy_loss
            return total(stats.candidates, top, loss, batch)

        with patch_model(model, LogprobConfig(entropy=True)) as handle:

            @contextlib.contextmanager
            def blocks(batch: dict[str, Any]) -> Iterator[None]:
                with contextlib.ExitStack() as stack:
                    ids = torch.tensor(IDS)
                    stack.enter_context(handle.also(ids=ids, topk=2 if topk else None))
                    if policy:
                        weights, size = batch["weights"], batch["weights"].numel()
                        block = handle.policy_loss(
                            lambda lp, ent, w: -lp * w, weights, denominator=size
                        )
                        stack.enter_context(block)
                    yield

            got, grads = train_step(config, model, batches, of_stats, blocks)
        pairs = zip(got, expected, strict=True)
        return {
            "loss": max(relative(g, e) for g, e in pairs),
            "grad": worst(grads, expected_grads),
        }


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("topk", [False, True])
def test_candidates_and_the_top_k_learn(ranks, policy, topk):
    assert max(ranks(2).run(beside, policy, topk)[0].values()) < 1e-5


def labels_of_a_plan() -> None:
    """Multi-token prediction shifts the ids of a plan before its head's turn."""
    with megatron(ep=2) as parallel_state, schedule_on_a_cpu():
        config = tiny_config(mtp_num_layers=1, **MOE)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, mtp=True)
        config.overlap_moe_expert_parallel_comm = True
        batch = make_batch(parallel_state)
        ids = batch["inputs"]["input_ids"]
        right = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
        with patch_model(model, LogprobConfig(check_labels=True)) as handle:

            def run(labels: Tensor, block: Any = None) -> None:
                train_step(config, model, [batch | {"labels": labels}], weighted, block)

            run(right)
            with handle.options(mtp="off"):
                run(right)
            with pytest.raises(ValueError, match="expected the token after each input"):
                run(ids)
            with pytest.raises(ValueError, match="expected the token after each input"):
                run(None, lambda _: handle.targets(ids))
            rows = torch.arange(0, ids.numel(), 3)
            own = ids.flatten()[rows]
            with pytest.raises(ValueError, match="expected the token after each input"):
                run(None, lambda _: handle.targets(own, rows=rows))
            with handle.options(check_labels=False):
                run(ids)


def test_labels_are_compared_with_the_tokens_that_a_plan_is_given(ranks):
    ranks(2).run(labels_of_a_plan)


def mapped() -> None:
    with megatron(ep=2) as parallel_state, schedule_on_a_cpu():
        config = tiny_config(**MOE)
        model = mm.build_gpt_model(config, vocab_size=VOCAB)
        config.overlap_moe_expert_parallel_comm = True
        batches = [make_batch(parallel_state)]

        def loss(values: Tensor, batch: dict[str, Any]) -> Any:
            value = (values * batch["weights"]).mean()
            return value, value.detach().clone()

        plain = [batches[0] | {"labels": None}]
        expected, expected_grads = train_step(
            config, model, plain, lambda logits, batch: loss(logits.logsumexp(-1), batch)
        )
        with patch_model(model) as handle:
            got, grads = train_step(
                config, model, batches, loss, lambda _: handle.map(lambda x: x.logsumexp(-1))
            )
            assert relative(got[0], expected[0]) < 1e-5
            assert worst(grads, expected_grads) < 1e-5
            with pytest.raises(TypeError, match="expected fn to return one tensor, got dict"):
                train_step(
                    config, model, batches, loss, lambda _: handle.map(lambda x: {"a": x.sum(-1)})
                )


def test_a_function_of_the_logits_gives_one_tensor(ranks):
    ranks(2).run(mapped)
