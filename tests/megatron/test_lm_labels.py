"""Patched T5Models and BertModels, whose forward calls its labels `lm_labels`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mcore_logprobs as ours
from mcore_logprobs import LogprobConfig, TokenStats, patch_model
from mcore_logprobs.cpu_megatron.layers import CpuNorm
from mcore_logprobs.megatron.fsdp import attach_backward_hooks
from mcore_logprobs.sources.lazy import LazyLogits
from tests.helpers.distributed import preloaded
from tests.megatron.common import VOCAB, megatron, relative, tiny_config, worst

preloaded += ["megatron.core.models.T5", "megatron.core.models.bert.bert_model"]
BATCH, SOURCE, LENGTH = 2, 10, 8
KINDS = ["t5", "bert"]


def build(kind: str, *, tied: bool = True, base: Any = None, **config: Any) -> Any:
    """A tiny T5Model or BertModel of this rank's layout, or of a class made of it."""
    made = tiny_config(normalization="LayerNorm", num_query_groups=4, **config)
    head = {
        "vocab_size": VOCAB,
        "max_sequence_length": SOURCE,
        "share_embeddings_and_output_weights": tied,
    }
    torch.manual_seed(3)
    if kind == "bert":
        from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
        from megatron.core.models.bert.bert_model import BertModel

        model = (base or BertModel)(made, 0, bert_layer_local_spec, **head)
    else:
        from megatron.core.models.T5 import t5_spec
        from megatron.core.models.T5.t5_model import T5Model

        encoder = t5_spec.get_t5_encoder_with_local_block_spec(made.num_layers)
        decoder = t5_spec.get_t5_decoder_with_local_block_spec(made.num_layers)
        for block in (encoder, decoder):
            block.layer_norm = CpuNorm  # Megatron's refuse sequence parallelism
            for layer in block.layer_specs:
                for name in vars(layer.submodules):
                    if name.endswith("layernorm") and name != "pre_cross_attn_layernorm":
                        setattr(layer.submodules, name, CpuNorm)
                if block is decoder:
                    layer.submodules.pre_cross_attn_layernorm = CpuNorm
        model = (base or T5Model)(made, made, encoder, decoder, **head)
    if model.output_layer.bias is not None:
        torch.nn.init.normal_(model.output_layer.bias)
    return model


def make_batch(kind: str) -> dict[str, Any]:
    """What the model wants but labels, the labels, and a weight for each of them."""
    generator = torch.Generator().manual_seed(7)

    def draw(length: int) -> Tensor:
        return torch.randint(0, VOCAB, (BATCH, length), generator=generator)

    weights = torch.rand(BATCH, LENGTH, generator=generator) + 0.5
    if kind == "bert":
        ids = draw(LENGTH)
        inputs = {"input_ids": draw(LENGTH), "attention_mask": torch.ones_like(ids)}
        labels = ids.where(weights < 1.0, -100)
        return {"inputs": inputs, "labels": labels, "weights": weights}
    target = draw(LENGTH + 1)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).expand(BATCH, 1, LENGTH, LENGTH)
    inputs = {
        "encoder_input_ids": draw(SOURCE),
        "decoder_input_ids": target[:, :-1].contiguous(),
        "encoder_attn_mask": torch.zeros(BATCH, 1, SOURCE, SOURCE, dtype=torch.bool),
        "decoder_attn_mask": causal,
        "encoder_decoder_attn_mask": torch.zeros(BATCH, 1, LENGTH, SOURCE, dtype=torch.bool),
    }
    return {"inputs": inputs, "labels": target[:, 1:].contiguous(), "weights": weights}


def main_of(output: Any) -> Any:
    """A BertModel also returns the logits of its binary head."""
    is_pair = isinstance(output, tuple) and getattr(output[1], "shape", None) == (BATCH, 2)
    return output[0] if is_pair else output


def gradients(model: Any, total: Tensor, output: Any) -> dict[str, Tensor]:
    """By parameter name; a binary head takes part in the loss."""
    model.zero_grad(set_to_none=True)
    if main_of(output) is not output:
        total = total + output[1].square().sum()
    total.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def gathered(logits: Tensor) -> Tensor:
    """`[b, s, V]` of `[b, s, V/TP]`."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.detach().contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def compare(
    kind: str, tp: int, tied: bool, fused: bool | str, sequence_parallel: bool = False
) -> dict[str, float]:
    """Errors of what a patched model gives in each way, against the unpatched one."""
    with megatron(tp=tp):
        model = build(kind, tied=tied, sequence_parallel=sequence_parallel)
        batch = make_batch(kind)
        inputs, labels, weights = batch["inputs"], batch["labels"], batch["weights"]
        counted = labels != -100
        weights = weights * counted
        traces = [dict(vars(module)) for module in model.modules()]

        plain = model(**inputs, lm_labels=labels.clamp(min=0))
        expected = main_of(plain) * counted
        expected_grads = gradients(model, (expected * weights).sum(), plain)
        real = main_of(model(**inputs))
        logits = gathered(real).double()
        logp = logits.log_softmax(-1)
        picked = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * counted

        errors: dict[str, float] = {}

        def hold(name: str, output: Any, loss: Tensor) -> None:
            errors[name] = relative(loss, expected)
            errors[f"{name}: grad"] = worst(
                gradients(model, (loss * weights).sum(), output), expected_grads
            )

        with patch_model(model, LogprobConfig(output="loss", fused=fused)):
            output = model(**inputs, lm_labels=labels)
            hold("loss", output, main_of(output))
        with patch_model(model, LogprobConfig(entropy=True, fused=fused)) as handle:
            output = model(**inputs, lm_labels=labels)
            stats = main_of(output)
            assert isinstance(stats, TokenStats)
            hold("stats", output, stats.loss)
            errors["float64"] = relative(stats.logprobs, picked)
            entropy = -(logp.exp() * logp).sum(-1) * counted
            errors["entropy"] = relative(stats.entropy, entropy)
            with handle.targets(labels):
                output = model(**inputs)
            hold("targets", output, main_of(output).loss)
            rows = counted.flatten().nonzero()[:, 0]
            with handle.targets(labels.flatten()[rows], rows=rows):
                some = main_of(model(**inputs))
            errors["rows"] = relative(some.logprobs, picked.flatten()[rows])
            with handle.policy_loss(lambda logp, entropy, w: -logp * w, weights):
                output = model(**inputs, lm_labels=labels)
            total = main_of(output).policy_loss
            errors["policy"] = relative(total, (expected * weights).sum())
            errors["policy: grad"] = worst(gradients(model, total, output), expected_grads)
            with handle.also(topk=3):
                found = main_of(model(**inputs, lm_labels=labels)).topk[0]
            errors["also"] = relative(found, logp.topk(3)[0] * counted[..., None])
            kept = torch.stack([labels.clamp(min=0), (labels.clamp(min=0) + 1) % VOCAB], -1)
            offsets = 2 * torch.arange(labels.numel() + 1)
            with handle.replay((kept.flatten(), offsets)):
                found = main_of(model(**inputs, lm_labels=labels)).logprobs
            of_kept = logp.gather(-1, kept).log_softmax(-1)[..., 0] * counted
            errors["replay"] = relative(found, of_kept)
            teacher = torch.randn(real.shape, generator=torch.Generator().manual_seed(2))
            logq = gathered(teacher).double().log_softmax(-1)
            with handle.divergence("reverse", teacher_logits=teacher):
                found = main_of(model(**inputs, lm_labels=labels)).divergence
            errors["divergence"] = relative(found, (logp.exp() * (logp - logq)).sum(-1) * counted)
            with handle.map(lambda z, w: w * z.amax(-1), weights):
                found = main_of(model(**inputs, lm_labels=labels))
            errors["map"] = relative(found, weights * real.amax(-1))
            with handle.sample(seed=5, temperature=0.0):
                ids, _ = main_of(model(**inputs))
            assert torch.equal(ids, logits.argmax(-1))
            with handle.sample(seed=5):
                ids, logprobs = main_of(model(**inputs))
            errors["sample"] = relative(logprobs, logp.gather(-1, ids[..., None])[..., 0])
        with patch_model(model, LogprobConfig(logits="lazy" if fused else "real", fused=fused)):
            output = model(**inputs)
            logits = main_of(output)
            assert isinstance(logits, LazyLogits) == bool(fused)
            hold("without labels", output, -ours.vocab_parallel_logprobs(logits, labels))
        for module, before in zip(model.modules(), traces, strict=True):
            assert vars(module).keys() == before.keys(), type(module)
        return errors


@pytest.mark.parametrize("fused", ["require", False], ids=["fused", "logits"])
@pytest.mark.parametrize(("tp", "tied"), [(1, True), (2, True), (2, False)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(ranks, kind, tp, tied, fused):
    for errors in ranks(tp).run(compare, kind, tp, tied, fused):
        assert max(errors.values()) < 1e-5, errors


def test_sequence_parallelism(ranks):
    for errors in ranks(2).run(compare, "t5", 2, True, "require", sequence_parallel=True):
        assert max(errors.values()) < 1e-5, errors


def mistakes(kind: str) -> None:
    """Errors name the argument as the model does."""
    with megatron():
        model, batch = build(kind), make_batch(kind)
        inputs, labels = batch["inputs"], batch["labels"]
        policy = (lambda logp, entropy: -logp,)
        with patch_model(model) as handle:
            with (
                handle.policy_loss(*policy),
                pytest.raises(
                    ValueError, match=r"a call with lm_labels, got none; pass lm_labels="
                ),
            ):
                model(**inputs)
            with (
                handle.targets(labels),
                pytest.raises(ValueError, match=r"targets: expected a call without lm_labels"),
            ):
                model(**inputs, lm_labels=labels)
            with (
                handle.sample(seed=1),
                pytest.raises(ValueError, match=r"sample: expected a call without lm_labels"),
            ):
                model(*inputs.values(), lm_labels=labels)


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes(ranks, kind):
    ranks(1).run(mistakes, kind)


def unshifted_labels() -> None:
    with megatron():
        model, batch = build("t5"), make_batch("t5")
        inputs, labels = batch["inputs"], batch["labels"]
        with patch_model(model, LogprobConfig(check_labels=True)) as handle:
            wrong = inputs["decoder_input_ids"]
            told = r"lm_labels: expected the token after .* shift them: lm_labels\[:, t\] ="
            with pytest.raises(ValueError, match=told):
                model(**inputs, lm_labels=wrong)
            with handle.targets(wrong), pytest.raises(ValueError, match=told):
                model(**inputs)
            model(**inputs, lm_labels=labels)
        refused = "check_labels: expected False for BertModel, whose forward has no "
        bert = build("bert")
        with pytest.raises(ValueError, match=refused):
            patch_model(bert, LogprobConfig(check_labels=True))
        with (
            patch_model(bert) as handle,
            pytest.raises(ValueError, match=refused),
            handle.options(check_labels=True),
        ):
            pass


def test_labels_that_are_not_shifted(ranks):
    ranks(1).run(unshifted_labels)


def calls_without_a_head() -> None:
    """The encoder alone, which generation runs once, has no logits to be lazy about."""
    with megatron():
        model, batch = build("t5"), make_batch("t5")
        inputs, labels = batch["inputs"], batch["labels"]
        expected = model(**inputs, output_encoder_hidden_only=True)
        with patch_model(model, LogprobConfig(logits="lazy", fused="require")) as handle:
            assert torch.equal(model(**inputs, output_encoder_hidden_only=True), expected)
            with handle.targets(labels):
                encoded = model(**inputs, output_encoder_hidden_only=True)
                stats = model(**inputs, encoder_hidden_states=encoded)
            assert torch.equal(encoded, expected)
            assert torch.equal(stats.logprobs, model(**inputs, lm_labels=labels).logprobs)
        model.add_decoder = False  # a stage that ends in hidden states, whatever layers it has
        with patch_model(model, LogprobConfig(logits="lazy", fused="require")) as handle:
            assert not handle.reports
            assert torch.equal(model(**inputs), expected)


def test_an_encoder_alone(ranks):
    ranks(1).run(calls_without_a_head)


def other_signatures() -> None:
    """A subclass that hands its arguments on, and one that names its labels in its own way."""
    from megatron.core.models.T5.t5_model import T5Model

    class HandsOn(T5Model):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Renames(T5Model):
        def forward(
            self,
            encoder_input_ids: Tensor,
            decoder_input_ids: Tensor,
            encoder_attn_mask: Tensor,
            decoder_attn_mask: Tensor,
            encoder_decoder_attn_mask: Tensor,
            wanted: Tensor | None = None,
        ) -> Any:
            ids = encoder_input_ids, decoder_input_ids
            masks = encoder_attn_mask, decoder_attn_mask, encoder_decoder_attn_mask
            return T5Model.forward(self, *ids, *masks, lm_labels=wanted)

    with megatron():
        batch = make_batch("t5")
        inputs, labels = batch["inputs"], batch["labels"]
        model = build("t5", base=HandsOn)
        with patch_model(model, LogprobConfig(logits="lazy", fused="require")) as handle:
            expected = model(**inputs, lm_labels=labels)
            with handle.targets(labels):
                for stats in (model(**inputs), model(*inputs.values())):
                    assert torch.equal(stats.logprobs, expected.logprobs)
            with pytest.raises(ValueError, match="do not show whether there are lm_labels"):
                model(**inputs)
            with (
                handle.policy_loss(lambda logp, entropy: -logp),
                pytest.raises(ValueError, match=r"policy_loss: expected a call with lm_labels"),
            ):
                model(**inputs)
        wrong = [*inputs.values(), inputs["decoder_input_ids"]]
        told = "expected the token after|do not show whether there are lm_labels"
        with patch_model(model, LogprobConfig(check_labels=True)):
            for unnamed in (0, 2, 5, 6):
                names = [*inputs, "lm_labels"][unnamed:]
                named = dict(zip(names, wrong[unnamed:], strict=True))
                with pytest.raises(ValueError, match=told):
                    model(*wrong[:unnamed], **named)
            model(*inputs.values())
        model = build("t5", base=Renames)
        lazy = LogprobConfig(logits="lazy", fused="require")
        unknown = "Renames, whose forward has neither labels nor lm_labels"
        with patch_model(model, lazy), pytest.raises(ValueError, match=f"but {unknown}"):
            model(**inputs)
        with pytest.raises(ValueError, match=f"check_labels: expected False for {unknown}"):
            patch_model(model, LogprobConfig(check_labels=True))
        with patch_model(model) as handle:
            assert torch.equal(model(**inputs, wanted=labels).logprobs, expected.logprobs)
            for block in (handle.targets(labels), handle.sample(seed=1)):
                with block, pytest.raises(ValueError, match=unknown):
                    model(**inputs)
            with handle.policy_loss(lambda logp, entropy: -logp):
                stats = model(**inputs, wanted=labels)
                torch.testing.assert_close(stats.policy_loss, stats.loss.sum())
                with pytest.raises(ValueError, match=r"policy_loss: expected a call with labels"):
                    model(**inputs)


def test_other_signatures(ranks):
    ranks(1).run(other_signatures)


def test_fsdp_sees_no_statistics_in_a_tuple():
    """What a BertModel without a binary head returns."""
    model = nn.Linear(1, 1)
    model.weight.__fsdp_param__ = True  # type: ignore[attr-defined]
    loss = model.weight.sum().view(1, 1)
    attach_backward_hooks((loss, None), model, model)
    with pytest.raises(RuntimeError, match="output='loss'"):
        attach_backward_hooks((TokenStats(-loss, None, None, None), None), model, model)
