"""top_k, top_p, a temperature a token, and `PatchHandle.map`, on patched models against float64."""

from __future__ import annotations

import re
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mcore_logprobs import LogprobConfig, patch_model, vocab_parallel_topk
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.groups import resolve_tp_group
from tests.megatron.common import VOCAB, make_batch, megatron, relative, tiny_config, worst
from tests.megatron.test_policy_loss import gradients

IGNORED = -100


def model_and_batch(parallel_state: Any, tp: int, change: str = "") -> tuple[Any, dict, Tensor]:
    model = mm.build_gpt_model(tiny_config(tp, sequence_parallel=tp > 1), vocab_size=VOCAB)
    if change == "hook":
        model.output_layer.register_forward_hook(lambda m, args, out: (out[0] * 1.5, out[1]))
    batch = make_batch(parallel_state)
    labels = batch["labels"] % VOCAB
    labels[:, 1::5] = IGNORED
    return model, batch, labels


def filtered(z: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """float64 logits with what top-k, then top-p leave out at -inf; by sorting whole rows."""
    if top_k is not None:
        z = z.masked_fill(z < z.topk(top_k, -1).values[..., -1:], -torch.inf)
    if top_p == 1.0:
        return z
    order = z.sort(dim=-1, descending=True, stable=True).indices
    p = z.softmax(-1).gather(-1, order)
    late = p.cumsum(-1) - p >= top_p
    return z.masked_fill(torch.zeros_like(late).scatter(-1, order, late), -torch.inf)


def filters(layout: dict[str, Any], settings: dict[str, Any], own: bool, change: str) -> dict:
    with megatron(**layout) as parallel_state:
        model, batch, labels = model_and_batch(parallel_state, layout.get("tp", 1), change)
        weights = batch["weights"]
        temperature: Any = 0.7
        if own:
            temperature = torch.linspace(0.5, 1.5, labels.shape[1]).expand(labels.shape)
        config = LogprobConfig(entropy=True, target_rank=True, temperature=0.7, **settings)
        with patch_model(model, config) as handle, handle.options(temperature=temperature):
            stats = model(**batch["inputs"], labels=labels)
            # A filtered target is -inf; what trains on it is masked, as users must.
            kept = stats.logprobs.detach().isfinite()
            picked = torch.where(kept, stats.logprobs, 0.0)
            grads = gradients(model, ((picked + 0.3 * stats.entropy) * weights).sum(), 1.0)
        z = model(**batch["inputs"], runtime_gather_output=True).double()
        z = z / (temperature if isinstance(temperature, float) else temperature.unsqueeze(-1))
        keep = labels != IGNORED
        target = labels.masked_fill(~keep, 0).unsqueeze(-1)
        logp = z.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1) * keep
        top_k = settings.get("top_k") or None
        short = filtered(z, top_k, settings.get("top_p", 1.0)).log_softmax(-1)
        exact = torch.where(keep, short.gather(-1, target)[..., 0], 0.0)
        assert torch.equal(exact.isfinite(), kept)
        rank = torch.where(keep, (z > z.gather(-1, target)).sum(-1), -1)
        assert torch.equal(rank, stats.target_rank)
        loss = ((torch.where(kept, exact, 0.0) + 0.3 * entropy) * weights).sum()
        return {
            "filtered": int((~kept).sum()),
            "logprobs": relative(picked, torch.where(kept, exact, 0.0)),
            "entropy": relative(stats.entropy, entropy),
            "grad": worst(grads, gradients(model, loss, 1.0)),
        }


LAYOUTS = [{}, {"tp": 2}, {"cp": 2}]
SETTINGS: list[dict[str, Any]] = [
    {"top_p": 0.6},
    {"top_k": 9, "top_p": 0.9, "compact": True},
    {},
    {"top_k": 0},  # off, as samplers write it
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_filters_and_a_temperature_a_token(ranks, layout, settings):
    world = layout.get("tp", 1) * layout.get("cp", 1)
    for result in ranks(world).run(filters, layout, settings, True, ""):
        assert result["filtered"] > 0 or not (settings.get("top_k") or settings.get("top_p"))
        assert max(result["logprobs"], result["entropy"], result["grad"]) < 2e-5, result


def test_filters_on_a_head_that_is_not_fused(ranks):
    for result in ranks(1).run(filters, {}, {"top_p": 0.6}, False, "hook"):
        assert max(result["logprobs"], result["entropy"], result["grad"]) < 2e-5, result


class Found(NamedTuple):
    values: Tensor
    ids: Tensor
    total: Tensor
    sure: Tensor  # bool


def mapped(layout: dict[str, Any], change: str, softcap: float | None = None) -> dict[str, Any]:
    with megatron(**layout) as parallel_state:
        model, batch, labels = model_and_batch(parallel_state, layout.get("tp", 1), change)
        weights = batch["weights"]
        keep = labels != IGNORED

        def fn(z: Tensor, weight: Tensor) -> Found:
            values, ids = vocab_parallel_topk(z, 4, tp_group=resolve_tp_group(None))
            return Found(values, ids, values.sum(-1) * weight, values[:, 0] > 0.5)

        config = LogprobConfig(softcap=softcap)
        with patch_model(model, config) as handle, handle.map(fn, weights):
            found = model(**batch["inputs"], labels=labels)
            grads = gradients(model, found.total.sum(), 1.0)
        assert isinstance(found, Found)
        z = model(**batch["inputs"], runtime_gather_output=True)
        z = z if softcap is None else softcap * (z / softcap).tanh()
        values, ids = z.topk(4, -1)
        assert torch.equal(found.ids, torch.where(keep.unsqueeze(-1), ids, 0))
        assert found.sure.dtype == torch.bool
        assert torch.equal(found.sure, (values[..., 0] > 0.5) & keep)
        loss = (values.sum(-1) * weights * keep).sum()
        return {
            "values": relative(found.values, values * keep.unsqueeze(-1)),
            "grad": worst(grads, gradients(model, loss, 1.0)),
        }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_map(ranks, layout):
    world = layout.get("tp", 1) * layout.get("cp", 1)
    for result in ranks(world).run(mapped, layout, ""):
        assert max(result.values()) < 2e-5, result


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_map_on_a_head_that_is_not_fused(ranks, softcap):
    for result in ranks(1).run(mapped, {}, "hook", softcap):
        assert max(result.values()) < 2e-5, result


def mistakes() -> None:
    with megatron() as parallel_state, warnings.catch_warnings():
        model, batch, labels = model_and_batch(parallel_state, 1)
        with patch_model(model) as handle:
            with pytest.raises(ValueError, match="callable"), handle.map("topk"):
                pass
            learnt = batch["weights"].clone().requires_grad_()
            with (
                pytest.raises(ValueError, match="requires a gradient"),
                handle.map(lambda z, w: z, learnt),
            ):
                pass
            with (
                pytest.raises(ValueError, match="broadcasts"),
                handle.options(temperature=torch.ones(labels.shape[1] + 1)),
            ):
                model(**batch["inputs"], labels=labels)
            for wrong in (labels.t(), labels[:, 1:], labels[0]):
                with pytest.raises(
                    ValueError,
                    match=re.escape(
                        f"labels: expected shape {tuple(labels.shape)}, got {tuple(wrong.shape)}"
                    ),
                ):
                    model(**batch["inputs"], labels=wrong)
            for fused in (True, False):
                for result in (1.0, torch.ones(()), torch.ones(3), object()):
                    with (
                        pytest.raises(ValueError, match="fn: expected a tensor or a tuple"),
                        handle.options(fused=fused),
                        handle.map(lambda z, result=result: result),
                    ):
                        model(**batch["inputs"], labels=labels)


def test_mistakes(ranks):
    ranks(1).run(mistakes)


def beside_a_policy_loss() -> list[bool]:
    """Whether filtered statistics beside a policy loss ask for a gradient, and the loss."""
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        with (
            patch_model(model, LogprobConfig(top_k=5, entropy=True)) as handle,
            handle.policy_loss(lambda logprobs, _: -logprobs.clamp(min=-9.0), denominator=1.0),
        ):
            stats = model(**batch["inputs"], labels=batch["labels"] % 9)
        found = stats.logprobs, stats.entropy, stats.policy_loss
        return [x.requires_grad for x in found]


def test_filtered_statistics_beside_a_policy_loss_have_no_gradient(ranks) -> None:
    assert ranks(1).run(beside_a_policy_loss) == [[False, False, True]]


def test_label_smoothing_goes_with_no_filter() -> None:
    with pytest.raises(ValueError, match="label_smoothing: expected 0"):
        LogprobConfig(label_smoothing=0.1, top_p=0.9)


def teacher_beside_settings(options: dict[str, Any]) -> list[float]:
    """Errors of the divergence, fused and not, of the columns that the settings leave."""
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        logits = model(**batch["inputs"]).double()
        teacher = torch.randn(logits.shape)
        left_out = torch.arange(VOCAB) >= options.get("vocab_size", VOCAB)
        left_out[list(options.get("disallowed_ids", ()))] = True
        bias = torch.zeros(VOCAB, dtype=torch.float64)
        for number, x in options.get("logit_bias", {}).items():
            bias[number] = x
        log_p, log_q = (
            (x + bias).masked_fill(left_out, -torch.inf).log_softmax(-1)
            for x in (logits, teacher.double())
        )
        expected = (log_q.exp() * (log_q - log_p)).masked_fill(left_out, 0.0).sum(-1)
        errors = []
        for fused in (True, False):
            config = LogprobConfig(fused=fused, **options)
            with (
                patch_model(model, config) as handle,
                handle.divergence("forward", teacher_logits=teacher),
            ):
                found = model(**batch["inputs"], labels=batch["labels"] % 9).divergence
            errors.append(float((found - expected).abs().max()))
        return errors


@pytest.mark.parametrize(
    "options",
    [{"vocab_size": VOCAB - 3}, {"disallowed_ids": (10, 12)}, {"logit_bias": {4: 1.5, 20: -2.0}}],
    ids=str,
)
def test_a_teacher_has_the_settings_of_the_patch(ranks, options):
    (errors,) = ranks(1).run(teacher_beside_settings, options)
    assert all(error < 1e-4 for error in errors)
