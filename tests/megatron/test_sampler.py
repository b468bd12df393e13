"""What the sampler did, on patched models against float64: records, min_p, biases, candidates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs import LogprobConfig, patch_model
from tests.engine.truths import entropy_of, take
from tests.megatron.block_steps import IGNORED, LIMIT, Step, kept_of, picked, tokens_of
from tests.megatron.common import VOCAB, megatron, relative, worst
from tests.megatron.test_policy_loss import gradients

BIAS, GONE = {3: 1.5, 11: -2.0}, (5, 8)


def shifted(z: Tensor) -> Tensor:
    bias = torch.zeros(VOCAB, dtype=z.dtype)
    bias[list(BIAS)] = torch.tensor(list(BIAS.values()), dtype=z.dtype)
    bias[list(GONE)] = -torch.inf
    return z + bias


def loss_fn(
    logprobs: Tensor,
    entropy: Tensor | None,
    weights: Tensor,
    *,
    full_logprobs: Tensor,
    kept_entropy: Tensor,
) -> Tensor:
    assert entropy is None or entropy.shape == kept_entropy.shape
    seen = logprobs.isfinite()
    ratio = (torch.where(seen, logprobs, 0.0) - full_logprobs).exp()
    return weights * (ratio + 0.3 * kept_entropy.square())


def of_record(step: Step, with_rows: bool, missing: str) -> dict[str, float]:
    """A record of some tokens, beside the whole distribution and a policy loss of both."""
    rows, target, weights = tokens_of(step, with_rows)
    _, mask = kept_of(step, target)
    empty = torch.arange(target.numel()) % 6 == 2
    flat = mask.view(-1, VOCAB) & ~empty.unsqueeze(-1)
    lengths = flat.sum(-1)
    kept = flat.nonzero()[:, 1], torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    keep, none = target != IGNORED, empty.view(target.shape)
    logp = (picked(step.logits(), rows) / 0.8).log_softmax(-1)
    own = logp.masked_fill(~(flat.view(mask.shape) | none.unsqueeze(-1)), -torch.inf)
    own = own.log_softmax(-1)
    full = torch.where(keep, take(logp, target), 0.0)
    counted = keep & (~none if missing == "ignore" else True)
    exact = torch.where(counted, take(own, target), 0.0)
    entropy = torch.where(counted, entropy_of(own), 0.0)
    with (
        patch_model(step.model, LogprobConfig(temperature=0.8)) as handle,
        handle.targets(target, rows=rows),
        handle.replay(kept, missing=missing, full=True, entropy=True),
    ):
        stats = step.model(**step.inputs)
        seen = torch.where(exact.isfinite(), stats.logprobs, 0.0)
        total = seen + 0.5 * stats.full_logprobs + 0.2 * stats.kept_entropy + 0.1 * stats.lse
        grads = gradients(step.model, (total * weights).sum(), 1.0)
        with handle.policy_loss(loss_fn, weights, denominator=3.0):
            policy = step.model(**step.inputs)
            on_policy = gradients(step.model, policy.policy_loss, 1.0)
    z = picked(step.logits(), rows) / 0.8
    lse = torch.where(keep, z.logsumexp(-1), 0.0)
    values = torch.where(exact.isfinite(), exact, 0.0)
    wanted = ((values + 0.5 * full + 0.2 * entropy + 0.1 * lse) * weights).sum()
    named = {"full_logprobs": full, "kept_entropy": entropy}
    # A policy loss leaves out what has no record; its other statistics are still given.
    loss = (loss_fn(exact, None, weights, **named) * counted).sum() / 3.0
    step.model.zero_grad(set_to_none=True)
    wanted.backward(retain_graph=True)
    found = {n: p.grad.clone() for n, p in step.model.named_parameters() if p.grad is not None}
    assert torch.equal(stats.logprobs.isneginf(), exact.isneginf())
    assert stats.entropy is None
    return {
        "logprobs": relative(seen, values),
        "full": relative(stats.full_logprobs, full),
        "entropy": relative(stats.kept_entropy, entropy),
        "grad": worst(grads, found),
        "loss": relative(policy.policy_loss, loss),
        "policy": worst(on_policy, gradients(step.model, loss, 1.0)),
    }


def of_answers(step: Step, with_rows: bool, shared: bool, settings: dict) -> dict[str, float]:
    """Candidates and the top k beside log-probabilities, with a bias, ids left out and filters."""
    rows, target, weights = tokens_of(step, with_rows)
    target = torch.where(torch.isin(target, torch.tensor(GONE)), 0, target)
    keep = (target != IGNORED).unsqueeze(-1)
    shape = (4,) if shared else (*target.shape, 4)
    ids = torch.randint(9, VOCAB, shape, generator=step.generator)
    z = shifted(picked(step.logits(), rows)) / 0.8
    logp = z.log_softmax(-1)
    least = z.amax(-1, keepdim=True) + torch.tensor(settings.get("min_p", 1e-300)).double().log()
    short = z.masked_fill(z < least, -torch.inf).log_softmax(-1)
    exact = torch.where(keep[..., 0], take(short, target), 0.0)
    candidates = logp.gather(-1, ids.expand(*target.shape, 4)) * keep
    top, top_ids = logp.topk(3, -1)
    config = LogprobConfig(temperature=0.8, logit_bias=BIAS, disallowed_ids=GONE, **settings)
    with (
        patch_model(step.model, config) as handle,
        handle.targets(target, rows=rows),
        handle.also(ids=ids, topk=3),
    ):
        stats = step.model(**step.inputs)
        seen = torch.where(exact.isfinite(), stats.logprobs, 0.0)
        values, found_ids = stats.topk
        total = seen + stats.candidates.square().sum(-1) - 0.3 * values[..., 1]
        grads = gradients(step.model, (total * weights).sum(), 1.0)
    assert torch.equal(found_ids, top_ids * keep)
    assert torch.equal(stats.logprobs.isneginf(), exact.isneginf())
    shown = torch.where(exact.isfinite(), exact, 0.0)
    total = shown + candidates.square().sum(-1) - 0.3 * (top * keep)[..., 1]
    return {
        "logprobs": relative(seen, shown),
        "candidates": relative(stats.candidates, candidates),
        "top": relative(values, top * keep),
        "grad": worst(grads, gradients(step.model, (total * weights).sum(), 1.0)),
    }


def every_case(layout: dict[str, Any], change: str) -> list[str]:
    wrong = []
    with megatron(**layout) as parallel_state:
        step = Step(parallel_state, layout, "gpt", change)
        for with_rows, missing in ((False, "full"), (True, "full"), (False, "ignore")):
            errors = of_record(step, with_rows, missing)
            if not max(errors.values()) < LIMIT:
                wrong.append(f"record rows={with_rows} {missing}: {errors}")
        for with_rows, shared, settings in (
            (False, True, {}),
            (True, False, {}),
            (False, False, {"min_p": 0.3}),
        ):
            errors = of_answers(step, with_rows, shared, settings)
            if not max(errors.values()) < LIMIT:
                wrong.append(f"also rows={with_rows} shared={shared} {settings}: {errors}")
    return wrong


@pytest.mark.parametrize(
    ("layout", "change"), [({}, ""), ({}, "hook"), ({"tp": 2}, ""), ({"tp": 3}, "")], ids=str
)
def test_against_float64(ranks, layout, change):
    for wrong in ranks(layout.get("tp", 1)).run(every_case, layout, change):
        assert not wrong


def a_record_under_a_loss() -> None:
    """What is asked for beside the loss is given, as other blocks give it."""
    with megatron() as parallel_state:
        step = Step(parallel_state, {}, "gpt", "")
        count = step.labels.numel()
        labels = step.labels.clamp(min=0)
        ids = torch.stack([labels, (labels + 1) % VOCAB], -1)
        record = ids.flatten(), torch.arange(0, 2 * count + 1, 2)
        found = {}
        for output in ("stats", "loss"):
            with patch_model(step.model, LogprobConfig(output=output)) as handle:
                for asked in ("", "full", "entropy"):
                    flags = {asked: True} if asked else {}
                    with handle.replay(record, **flags):
                        found[output, asked] = step.model(**step.inputs, labels=step.labels)
        assert torch.equal(found["loss", ""], found["stats", ""].loss)
        for asked, name in (("full", "full_logprobs"), ("entropy", "kept_entropy")):
            got, want = (getattr(found[output, asked], name) for output in ("loss", "stats"))
            assert torch.equal(got, want)
            assert want.any()


def test_a_record_under_a_loss(ranks):
    ranks(1).run(a_record_under_a_loss)


def mistakes() -> None:
    with megatron() as parallel_state:
        step = Step(parallel_state, {}, "gpt", "")
        count = step.labels.numel()
        ids, offsets = torch.full((count - 1,), 2), torch.arange(count + 1).clamp(max=count - 1)
        with patch_model(step.model) as handle:
            with handle.replay((ids, offsets)), pytest.raises(ValueError, match=r"row \[\d+\]"):
                step.model(**step.inputs, labels=step.labels)
            with (
                handle.options(disallowed_ids=[9, 2, 5]),
                handle.replay((ids, offsets), missing="full"),
                pytest.raises(ValueError, match="no disallowed id in a record, got id 2 in row 0"),
            ):
                step.model(**step.inputs, labels=step.labels)
            with pytest.raises(ValueError, match="missing: expected one of"):
                handle.replay((ids, offsets), missing="none").__enter__()
            with pytest.raises(ValueError, match="disallowed_ids: expected ids in"):
                handle.options(disallowed_ids=[VOCAB]).__enter__()
            with pytest.raises(ValueError, match="also: expected ids or topk"):
                handle.also().__enter__()
            with (
                handle.options(invariant_segments=2),
                pytest.raises(ValueError, match="also: expected invariant_segments=None"),
            ):
                handle.also(topk=2).__enter__()
            with (
                handle.options(invariant_segments=2),
                pytest.raises(ValueError, match="sample: expected invariant_segments=None"),
            ):
                handle.sample(3).__enter__()
            for name, bad in (("top_k", -2), ("top_p", 0.0), ("min_p", 1.5)):
                with pytest.raises(ValueError, match=f"{name}: expected None or .*, got {bad}"):
                    handle.sample(3, **{name: bad}).__enter__()


def test_mistakes(ranks):
    ranks(1).run(mistakes)


# A value of each filter, and those that switch it off. At this temperature each of the three drops
# what the other two keep.
SHARP = 0.25
FILTERS = {"top_k": (5, (0, -1)), "top_p": (0.7, (1.0,)), "min_p": (0.2, (0.0,))}


def filters_of_a_draw(layout: dict[str, Any]) -> None:
    """`sample`'s filters beside the settings': not given, switched off, and other ones."""
    with megatron(**layout) as parallel_state:
        step = Step(parallel_state, layout, "gpt", "")

        def drawn(settings: dict[str, Any], **given: Any) -> tuple[Tensor, Tensor]:
            with (
                torch.no_grad(),
                patch_model(step.model, LogprobConfig(temperature=SHARP, **settings)) as handle,
                handle.sample(3, **given),
            ):
                return step.model(**step.inputs)

        def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
            return all(map(torch.equal, found, expected))

        plain = drawn({})
        exact = take((step.logits().detach() / SHARP).log_softmax(-1), plain[0])
        assert relative(plain[1], exact) < LIMIT
        every = {name: value for name, (value, _) in FILTERS.items()}
        narrow = drawn(every)
        for name, (value, off) in FILTERS.items():
            alone = drawn({name: value})
            assert not same(alone, plain), name
            assert same(drawn({}, **{name: value}), alone), name
            assert same(drawn({name: value}, **{name: None}), alone), name
            others = {n: v for n, v in every.items() if n != name}
            assert not same(drawn(others), narrow), name
            for number in off:
                assert same(drawn({name: value}, **{name: number}), plain), (name, number)
                assert same(drawn(every, **{name: number}), drawn(others)), (name, number)
        assert same(drawn(every, top_k=-1, top_p=1.0, min_p=0.0), plain)
        # The other way to change them for some calls.
        config = LogprobConfig(temperature=SHARP, **every)
        with patch_model(step.model, config) as handle, torch.no_grad():
            with handle.options(top_k=None, top_p=1.0, min_p=0.0), handle.sample(3):
                assert same(step.model(**step.inputs), plain)
            with handle.options(top_k=None, top_p=1.0, min_p=0.0), handle.sample(3, **every):
                assert same(step.model(**step.inputs), narrow)


@pytest.mark.parametrize("tp", [1, 2])
def test_filters_of_a_draw(ranks, tp):
    ranks(tp).run(filters_of_a_draw, {"tp": tp})
