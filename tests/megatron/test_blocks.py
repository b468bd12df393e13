"""`.targets(rows=)`, `.replay`, `.divergence` and `.sample` of a `PatchHandle`, against float64."""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs import LogprobConfig, TokenStats, patch_model
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.groups import group_rank, group_size, resolve_tp_group
from mcore_logprobs.ops.sample import gumbel_noise, streams
from tests.helpers.memory import TensorsMade
from tests.helpers.oracles import finished_logits
from tests.megatron.block_steps import IGNORED, LIMIT, Step, kept_of, picked, tokens_of
from tests.megatron.common import VOCAB, make_batch, megatron, relative, tiny_config, worst
from tests.megatron.test_policy_loss import gradients


def objective(logprobs: Tensor, entropy: Tensor | None, weights: Tensor) -> Tensor:
    """A loss of each token, curved in both."""
    loss = weights * (1.5 * logprobs).exp()
    return loss if entropy is None else loss + 0.3 * weights * entropy.square()


def of_rows(step: Step, with_rows: bool, output: str) -> dict[str, float]:
    """A policy loss, or the model's own, over targets."""
    rows, target, weights = tokens_of(step, with_rows)
    temperature = torch.linspace(0.5, 1.5, target.shape[-1]).expand(target.shape)
    stats_wanted = output == "stats"
    config = LogprobConfig(output=output, entropy=stats_wanted, target_rank=stats_wanted)
    keep = target != IGNORED
    z = picked(step.logits(), rows) / temperature.unsqueeze(-1)
    logp = z.log_softmax(-1)
    index = target.masked_fill(~keep, 0).unsqueeze(-1)
    exact = logp.gather(-1, index)[..., 0] * keep
    entropy = -(logp.exp() * logp).sum(-1) * keep
    with (
        patch_model(step.model, config) as handle,
        handle.options(temperature=temperature),
        handle.targets(target, rows=rows),
    ):
        if not stats_wanted:
            loss = step.model(**step.inputs)
            assert isinstance(loss, Tensor)
            assert loss.shape == target.shape
            grads = gradients(step.model, (loss * weights).sum(), 1.0)
            found = gradients(step.model, (-exact * weights).sum(), 1.0)
            return {"loss": relative(loss, -exact), "grad": worst(grads, found)}
        with handle.policy_loss(objective, weights, denominator=7.0):
            stats = step.model(**step.inputs)
            grads = gradients(step.model, stats.policy_loss, 1.0)
    rank = torch.where(keep, (z > z.gather(-1, index)).sum(-1), -1)
    assert torch.equal(stats.target_rank, rank)
    total = (objective(exact, entropy, weights) * keep).sum() / 7.0
    return {
        "logprobs": relative(stats.logprobs, exact),
        "entropy": relative(stats.entropy, entropy),
        "loss": relative(stats.policy_loss, total),
        "grad": worst(grads, gradients(step.model, total, 1.0)),
    }


def of_replay(step: Step, with_rows: bool, entropy: bool, gaps: bool) -> dict[str, float]:
    """Tokens without a record are left out, as if their labels were ignored."""
    rows, target, weights = tokens_of(step, with_rows)
    kept, mask = kept_of(step, target, gaps)
    counted = target != IGNORED
    keep = counted & mask.any(-1)
    z = picked(step.logits(), rows) / 0.8
    logp = z.log_softmax(-1)
    index = target.masked_fill(~counted, 0).unsqueeze(-1)
    of_mask = z.masked_fill(~mask & mask.any(-1, keepdim=True), -torch.inf)
    within = of_mask.log_softmax(-1).gather(-1, index)[..., 0]
    exact = torch.where(keep, within, 0.0)
    seen = exact.isfinite()
    whole = -(logp.exp() * logp).sum(-1) * keep if entropy else None

    def loss_fn(logprobs: Tensor, entropy: Tensor | None, weights: Tensor, seen: Tensor) -> Tensor:
        logprobs = torch.where(seen, logprobs, 0.0)
        return torch.where(seen, objective(logprobs, entropy, weights), 0.0)

    config = LogprobConfig(temperature=0.8, entropy=entropy)
    with (
        patch_model(step.model, config) as handle,
        handle.targets(target, rows=rows),
        handle.replay(kept, missing="ignore" if gaps else "error"),
    ):
        plain = step.model(**step.inputs)
        assert (plain.lse is None) == (not entropy)
        shown = torch.where(seen, plain.logprobs, 0.0)
        grads = gradients(step.model, (shown * weights).sum(), 1.0)
        with handle.policy_loss(loss_fn, weights, seen, denominator=3.0):
            stats = step.model(**step.inputs)
            policy = gradients(step.model, stats.policy_loss, 1.0)
    assert torch.equal(plain.logprobs.isneginf(), exact.isneginf())
    assert torch.equal(plain.logprobs, stats.logprobs)
    total = (loss_fn(exact, whole, weights, seen) * keep).sum() / 3.0
    values = torch.where(seen, exact, 0.0)
    step.model.zero_grad(set_to_none=True)
    (values * weights).sum().backward(retain_graph=True)
    found = {n: p.grad.clone() for n, p in step.model.named_parameters() if p.grad is not None}
    return {
        "logprobs": relative(shown, values),
        "grad": worst(grads, found),
        "loss": relative(stats.policy_loss, total),
        "policy": worst(policy, gradients(step.model, total, 1.0)),
    }


def kl(kind: str, student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """Of log-probabilities `[..., V]`, by definition."""
    p, q = student.exp(), teacher.exp()
    middle = (beta * q + (1 - beta) * p).log()
    return {
        "forward": lambda: q * (teacher - student),
        "reverse": lambda: p * (student - teacher),
        "jsd": lambda: beta * q * (teacher - middle) + (1 - beta) * p * (student - middle),
        "skewed_forward": lambda: q * (teacher - middle),
        "skewed_reverse": lambda: p * (student - middle),
        "total_variation": lambda: 0.5 * (p - q).abs(),
    }[kind]().sum(-1)


def of_divergence(step: Step, with_rows: bool, kind: str, teacher: str) -> dict[str, float]:
    """From each kind of teacher, beside a policy loss in the same call."""
    rows, target, weights = tokens_of(step, with_rows)
    keep = target != IGNORED
    b, s = step.shape
    hidden, weight = step.random(s, b, 10), 0.5 * step.random(VOCAB, 10)
    raw: Tensor = hidden @ weight.t()
    given: dict[str, Any] = {"teacher_temperature": 0.9}
    if teacher == "hidden":
        bias, a, up = step.random(VOCAB), step.random(3, 10), step.random(VOCAB, 3)
        raw = finished_logits(
            raw + 0.5 * (hidden @ a.t()) @ up.t(), bias=bias, logit_scale=0.7, softcap=4.0
        )
        given |= {"teacher_logit_scale": 0.7, "teacher_softcap": 4.0}
    other = raw.double().transpose(0, 1)  # [b, s, V]
    z = picked(step.logits(), rows) / 0.8
    logp, teacher_logp = z.log_softmax(-1), (picked(other, rows) / 0.9).log_softmax(-1)
    beta = 0.3
    if teacher == "hidden":
        group = resolve_tp_group(None)
        if step.sequence_parallel:
            hidden = hidden.chunk(group_size(group))[group_rank(group)]
        shard, bias, up = (
            x.chunk(group_size(group))[group_rank(group)] for x in (weight, bias, up)
        )
        given |= {"teacher_hidden": hidden, "teacher_weight": shard}
        given |= {"teacher_bias": bias, "teacher_lora": (a, up, 0.5)}
    elif teacher == "logits":
        given |= {"teacher_logits": picked(step.own_columns(other), rows)}
    else:
        top = teacher_logp.topk(6, -1)
        given = {"teacher_topk": (top.values, top.indices), "generalized": True}
        short, values = logp.gather(-1, top.indices), top.values
        exact = (values.exp() * (values - short) - values.exp() + short.exp()).sum(-1)
    if teacher != "topk":
        exact = kl(kind, logp, teacher_logp, beta)
    exact = exact * keep
    config = LogprobConfig(temperature=0.8, compact=not with_rows and kind == "reverse")
    with (
        patch_model(step.model, config) as handle,
        handle.targets(target, rows=rows),
        handle.policy_loss(objective, weights, denominator=5.0),
        handle.divergence(kind, beta=beta, **given),
    ):
        stats = step.model(**step.inputs)
        total = stats.policy_loss + (stats.divergence * weights).sum()
        grads = gradients(step.model, total, 1.0)
    index = target.masked_fill(~keep, 0).unsqueeze(-1)
    logprobs = logp.gather(-1, index)[..., 0]
    expected = (objective(logprobs, None, weights) * keep).sum() / 5.0 + (exact * weights).sum()
    return {
        "divergence": relative(stats.divergence, exact),
        "total": relative(total, expected),
        "grad": worst(grads, gradients(step.model, expected, 1.0)),
    }


def of_samples(step: Step, with_rows: bool, filters: dict[str, Any]) -> dict[str, float]:
    rows = step.rows if with_rows else None
    with torch.no_grad():
        z = picked(step.logits(), rows) / 0.8
        # compact is of labels, which there are none of.
        config = LogprobConfig(temperature=0.8, compact=True, **filters)
        with patch_model(step.model, config) as handle:
            with handle.sample(5, rows=rows):
                ids, logprobs = step.model(**step.inputs)
            with handle.sample(5, rows=rows, temperature=0.0):
                largest, certain = step.model(**step.inputs)
    if "top_k" in filters:
        z = z.masked_fill(z < z.topk(filters["top_k"], -1).values[..., -1:], -torch.inf)
    flat = z.reshape(-1, VOCAB)
    stream = streams(torch.tensor(5), torch.arange(flat.shape[0]))
    score = flat + gumbel_noise(stream, 0, VOCAB)
    best = score.topk(2, -1)
    expected = best.indices[:, 0].view(ids.shape)
    # Where the two best scores are as near as float32 products round, either may win.
    sure = (best.values[:, 0] - best.values[:, 1] > 1e-4).view(ids.shape)
    assert sure.float().mean() > 0.9
    assert torch.equal(ids[sure], expected[sure])
    assert torch.equal(largest, z.argmax(-1))
    assert bool((certain == 0).all())
    exact = z.log_softmax(-1).gather(-1, ids.unsqueeze(-1))[..., 0]
    return {"logprobs": relative(logprobs, exact)}


def cases(short: bool) -> Iterator[tuple[str, Callable[[Step], dict[str, float]]]]:
    for rows in (False, True):
        for output in ("stats", "loss"):
            yield f"rows={rows} {output}", lambda s, r=rows, o=output: of_rows(s, r, o)
        yield f"replay rows={rows}", lambda s, r=rows: of_replay(s, r, r, False)
        yield f"replay rows={rows} gaps", lambda s, r=rows: of_replay(s, r, not r, True)
        for filters in ({}, {"top_k": 9}):
            yield f"sample rows={rows} {filters}", lambda s, r=rows, f=filters: of_samples(s, r, f)
        kinds = ("reverse",) if short else ("forward", "reverse", "jsd", "total_variation")
        for kind in kinds:
            for teacher in ("hidden", "logits"):
                yield (
                    f"{kind} {teacher} rows={rows}",
                    lambda s, r=rows, k=kind, t=teacher: of_divergence(s, r, k, t),
                )
        yield f"top-k rows={rows}", lambda s, r=rows: of_divergence(s, r, "forward", "topk")


def every_block(layout: dict[str, Any], kind: str, change: str, short: bool) -> list[str]:
    """The cases that are further from float64 than LIMIT."""
    wrong = []
    with megatron(**layout) as parallel_state:
        step = Step(parallel_state, layout, kind, change)
        for name, case in cases(short):
            errors = case(step)
            if not max(errors.values()) < LIMIT:
                wrong.append(f"{name}: {errors}")
    return wrong


@pytest.mark.parametrize(
    ("layout", "kind", "change"),
    [
        ({}, "gpt", ""),
        ({}, "gpt", "packed"),
        ({}, "gpt", "hook"),
        ({}, "gpt", "recompute"),
        ({}, "hybrid", ""),
        ({"tp": 2}, "gpt", ""),
        ({"tp": 2}, "gpt", "no SP"),
        pytest.param({"tp": 2}, "gpt", "hook", marks=pytest.mark.night),
        pytest.param({"tp": 2}, "hybrid", "", marks=pytest.mark.night),
        ({"tp": 3}, "gpt", ""),
        pytest.param({"cp": 2}, "gpt", "", marks=pytest.mark.night),
        ({"cp": 2}, "gpt", "packed"),
        ({"tp": 2, "cp": 2}, "gpt", ""),
    ],
    ids=str,
)
def test_against_float64(ranks, layout, kind, change):
    world = layout.get("tp", 1) * layout.get("cp", 1)
    short = bool(layout) or kind != "gpt" or bool(change)  # the kinds of divergence once
    for wrong in ranks(world).run(every_block, layout, kind, change, short):
        assert not wrong


def mistakes() -> None:
    with megatron() as parallel_state, warnings.catch_warnings():
        step = Step(parallel_state, {}, "gpt", "")
        model, labels = step.model, step.labels
        rows = torch.tensor([3, 1])
        ids, offsets = torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)

        def refused(match: str, *blocks: Any, **call: Any) -> None:
            def run() -> None:
                with contextlib.ExitStack() as stack:
                    for block in blocks:
                        stack.enter_context(block())
                    model(**step.inputs, **call)

            with pytest.raises(ValueError, match=re.escape(match)):
                run()

        with patch_model(model) as handle:
            count = labels.numel()
            refused("rows: expected int64", lambda: handle.targets(rows, rows=rows.int()))
            refused("target: expected rows' shape", lambda: handle.targets(rows[:1], rows=rows))
            refused(
                "target: expected a tensor of integers [m]", lambda: handle.targets(labels, rows)
            )
            for wrong, got in ([1], "list"), (labels.float(), tuple(labels.shape)):
                refused(
                    f"target: expected a tensor of integers [b, s], got {got}",
                    lambda t=wrong: handle.targets(t),
                )
                refused(
                    f"ids: expected a tensor of integers [k] or [b, s, k], got {got}",
                    lambda t=wrong: handle.also(t),
                )
            refused(
                f"rows: expected indices in [0, {count})",
                lambda: handle.targets(rows, rows=torch.tensor([0, count])),
            )
            refused(
                "compact=False",
                lambda: handle.options(compact=True),
                lambda: handle.targets(rows, rows=rows),
            )
            refused("kept_ids: expected (flat_ids, offsets)", lambda: handle.replay(ids))
            refused(
                "PatchHandle.replay",
                lambda: handle.replay((ids, offsets)),
                lambda: handle.options(top_p=0.9),
            )
            refused(
                "PatchHandle.map: cannot be combined with PatchHandle.replay",
                lambda: handle.replay((ids, offsets)),
                lambda: handle.map(lambda z: z),
            )
            refused(
                "PatchHandle.sample: cannot be combined with PatchHandle.targets",
                lambda: handle.targets(labels),
                lambda: handle.sample(1),
            )
            refused("seed: expected an int", lambda: handle.sample("1"))
            for bad in (-1, 1e-40):
                refused("expected 0 or a finite", lambda t=bad: handle.sample(1, temperature=t))
            refused("inside PatchHandle.sample", lambda: handle.sample(1), labels=labels)
            refused("teacher: expected one of", lambda: handle.divergence("forward"))
            logits = torch.zeros(*labels.shape, VOCAB)
            refused("kind: expected", lambda: handle.divergence("kl", teacher_logits=logits))
            refused(
                "teacher: expected one of",
                lambda: handle.divergence(teacher_logits=logits, teacher_hidden=logits),
            )
            refused(
                "tail: expected the default without teacher_topk",
                lambda: handle.divergence(teacher_logits=logits, tail="ignore"),
            )
            refused(
                "teacher_logits: expected a shape that starts with labels'",
                lambda: handle.divergence(teacher_logits=logits[:, 1:]),
                labels=labels,
            )
            refused(
                "temperature: expected a tensor that broadcasts to rows' (2,)",
                lambda: handle.targets(rows, rows=rows),
                lambda: handle.options(temperature=torch.ones(3)),
            )


def test_mistakes(ranks):
    ranks(1).run(mistakes)


def rows_and_mtp() -> None:
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(mtp_num_layers=1), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        rows = torch.tensor([5, 2, 5])
        target = torch.tensor([1, 2, 3])
        with patch_model(model) as handle, handle.targets(target, rows=rows):
            with pytest.raises(ValueError, match="mtp='off'"):
                model(**batch["inputs"])
            with handle.options(mtp="off"):
                stats = model(**batch["inputs"])
            assert isinstance(stats, TokenStats)
            assert stats.shape == (3,)
        with patch_model(model) as handle, handle.sample(1, rows=rows), torch.no_grad():
            ids, logprobs = model(**batch["inputs"])
            assert ids.shape == logprobs.shape == (3,)


def test_rows_and_multi_token_prediction(ranks):
    ranks(1).run(rows_and_mtp)


def pipelined() -> dict[str, float]:
    """Two stages by Megatron's schedule; the first has no head, and no teacher to hand over."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with megatron(pp=2) as parallel_state:
        config = tiny_config(num_layers=2)
        (model,) = mm.build_gpt_chunks(config, vocab_size=VOCAB)
        last = parallel_state.is_pipeline_last_stage()
        batch = make_batch(parallel_state)
        step = Step.__new__(Step)
        step.generator = torch.Generator().manual_seed(3)
        rows = torch.randint(0, batch["labels"].numel(), (29,), generator=step.generator)
        target = picked(batch["labels"] % VOCAB, rows)
        weights = picked(batch["weights"], rows)
        kept, mask = kept_of(step, target)
        teacher = step.random(29, VOCAB)
        found: dict[str, Tensor] = {}

        def total(logprobs: Tensor, divergence: Tensor) -> Tensor:
            return (torch.where(logprobs.isfinite(), logprobs, 0.0) * weights).sum() + (
                divergence * weights
            ).sum()

        def run(forward: Callable[[Any], Any], name: str) -> dict[str, Tensor]:
            model.zero_grad(set_to_none=True)

            def report(output: Any) -> tuple[Tensor, Any]:
                if isinstance(output, TokenStats):
                    logprobs, divergence = output.logprobs, output.divergence
                else:
                    z = picked(output.double(), rows)
                    logp = z.log_softmax(-1)
                    within = z.masked_fill(~mask, -torch.inf).log_softmax(-1)
                    logprobs = within.gather(-1, target.unsqueeze(-1))[..., 0]
                    divergence = kl("reverse", logp, teacher.double().log_softmax(-1))
                found[name] = torch.where(logprobs.isfinite(), logprobs, 0.0).detach()
                loss = total(logprobs, divergence)
                return loss.float(), loss.detach()

            get_forward_backward_func()(
                forward_step_func=lambda iterator, model: (forward(model), report),
                data_iterator=iter([batch]),
                model=model,
                num_microbatches=1,
                seq_length=batch["labels"].shape[1],
                micro_batch_size=batch["labels"].shape[0],
                forward_only=False,
            )
            return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

        with patch_model(model) as handle:
            of_topk = {"tail": "ignore", "generalized": True, "teacher_lse": torch.zeros(29)}
            for options in ({"teacher_softcap": 5.0}, of_topk):
                if last:
                    with pytest.raises(ValueError, match="teacher: expected one of"):
                        handle.divergence(**options).__enter__()
                else:  # the same code runs on every stage
                    with handle.divergence(**options):
                        pass
        with (
            patch_model(model) as handle,
            handle.targets(target, rows=rows),
            handle.replay(kept),
            handle.divergence("reverse", teacher_logits=teacher if last else None),
        ):
            grads = run(lambda model: model(**batch["inputs"]), "patched")
        expected = run(lambda model: model(**batch["inputs"]), "plain")
        errors = {"grad": worst(grads, expected)}
        if last:
            errors["logprobs"] = relative(found["patched"], found["plain"])
        return errors


def test_in_a_pipeline(ranks):
    for errors in ranks(2).run(pipelined):
        assert max(errors.values()) < LIMIT


def largest_of_the_vocabulary() -> int:
    """Rows of the largest tensor over the vocabulary that a call with a teacher's logits makes."""
    with megatron() as parallel_state:
        step = Step(parallel_state, {}, "gpt", "")
        teacher = step.random(*step.shape, VOCAB)
        with (
            patch_model(step.model, LogprobConfig(chunk_size=4)) as handle,
            handle.divergence("reverse", teacher_logits=teacher),
            TensorsMade() as made,
        ):
            step.model(**step.inputs, labels=step.labels).divergence.sum().backward()
        weight = (VOCAB, step.model.config.hidden_size)
        return max(
            math.prod(x.shape[:-1])
            for x in made.made
            if x.shape[-1:] == (VOCAB,) and x.shape != weight
        )


@pytest.mark.own_sizes
def test_a_teacher_s_logits_are_not_copied(ranks):
    (rows,) = ranks(1).run(largest_of_the_vocabulary)
    assert rows == 4  # of 48
