"""A patched real GPTModel against the unpatched one: losses, gradients, settings."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron import patch_gpt_model
from mcore_logprobs.ops.token_stats import TokenStats, vocab_parallel_logprobs
from tests.helpers import oracles
from tests.helpers.covering import every_pair
from tests.helpers.flops import Flops
from tests.megatron.common import (
    VOCAB,
    loss_of,
    make_batch,
    megatron,
    relative,
    step,
    tiny_config,
    worst,
)

# (TP, CP, sequence parallel)
LAYOUTS = [(1, 1, False), (2, 1, False), (2, 1, True), (3, 1, True), (1, 2, False), (2, 2, True)]
# What a configuration may ask for per token.
STATISTICS = {field.name for field in fields(TokenStats)} & LogprobConfig().as_dict().keys()


def compare(
    tp: int,
    cp: int,
    sp: bool,
    settings: dict[str, Any],
    *,
    tied: bool = True,
    packed: bool = False,
    **config: Any,
) -> dict[str, float]:
    """On one rank: errors of the patched model's losses and gradients against the unpatched."""
    with megatron(tp=tp, cp=cp) as parallel_state:
        model = mm.build_gpt_model(
            tiny_config(tp, sequence_parallel=sp, **config), vocab_size=VOCAB, tied=tied
        )
        batch = make_batch(parallel_state, packed=packed)
        expected, expected_grads = step(model, batch)
        with patch_gpt_model(model, LogprobConfig(**settings)):
            got, grads = step(model, batch)
        assert isinstance(got, TokenStats) == (settings.get("output", "stats") == "stats")
        return {
            "loss": relative(loss_of(got), expected),
            "grad": worst(grads, expected_grads),
        }


@every_pair(layout=LAYOUTS, tied=(True, False), fused=(True, False))
def test_same_loss_and_gradients(ranks, layout, tied, fused):
    tp, cp, sp = layout
    settings = {"fused": fused, "entropy": True, "target_rank": True}
    for errors in ranks(tp * cp).run(compare, tp, cp, sp, settings, tied=tied):
        assert errors["loss"] < 1e-5
        assert errors["grad"] < 1e-5


@pytest.mark.parametrize(
    ("tp", "cp", "sp"), [(1, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)]
)
def test_packed_sequences(ranks, tp, cp, sp):
    for errors in ranks(tp * cp).run(compare, tp, cp, sp, {}, packed=True):
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ],
    ids=["full", "selective"],
)
@pytest.mark.parametrize("output", ["stats", "loss"])
def test_activation_recompute(ranks, recompute, output):
    for errors in ranks(2).run(compare, 2, 1, True, {"output": output}, **recompute):
        assert max(errors.values()) < 1e-5


def all_outputs(tp: int, sp: bool, settings: dict[str, Any]) -> dict[str, float]:
    """Errors of every field of the TokenStats against float64 from the model's own logits."""
    with megatron(tp=tp) as parallel_state:
        model = mm.build_gpt_model(tiny_config(tp, sequence_parallel=sp), vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        labels = batch["labels"] % settings["vocab_size"]
        labels[0, 3] = -100
        with patch_gpt_model(model, LogprobConfig(**settings)):
            stats = model(**batch["inputs"], labels=labels)
        for asked in STATISTICS:
            with patch_gpt_model(model, LogprobConfig(fused=settings["fused"], **{asked: True})):
                alone = model(**batch["inputs"], labels=labels)
                assert [n for n in STATISTICS if getattr(alone, n) is not None] == [asked]
        logits = model(**batch["inputs"], runtime_gather_output=True).double()  # [b, s, V]
    logits = settings["softcap"] * torch.tanh(logits / settings["softcap"])
    logits = logits / settings["temperature"]
    logits[..., settings["vocab_size"] :] = -torch.inf
    kept = labels != -100
    expected = oracles.statistics(logits, labels.masked_fill(~kept, 0))
    assert expected.keys() >= STATISTICS
    rank = expected.pop("target_rank").masked_fill(~kept, -1)
    errors = {n: relative(getattr(stats, n), e * kept) for n, e in expected.items()}
    errors["target_rank"] = (stats.target_rank != rank).double().mean().item()
    return errors


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "logits"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, True), (3, False)])
def test_every_field(ranks, tp, sp, fused):
    settings = {
        "fused": fused,
        **dict.fromkeys(STATISTICS, True),
        "compact": fused,
        "temperature": 0.7,
        "softcap": 5.0,
        "vocab_size": VOCAB - 5,
        "chunk_size": 7,
    }
    for errors in ranks(tp).run(all_outputs, tp, sp, settings):
        assert errors["target_rank"] == 0
        assert max(errors.values()) < 2e-6


def settings_that_reach_the_head() -> None:
    """Those of which the other tests see no more than that they are accepted."""
    with megatron() as parallel_state:
        config = tiny_config()
        model = mm.build_gpt_model(config, vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        inputs, labels = batch["inputs"], batch["labels"]
        logits = model(**inputs)

        def stats(labels: torch.Tensor = labels, **settings: Any) -> torch.Tensor:
            with patch_gpt_model(model, LogprobConfig(**settings)):
                return model(**inputs, labels=labels).logprobs.detach()

        def lazy(**settings: Any) -> torch.Tensor:
            with patch_gpt_model(model, LogprobConfig(logits="lazy", output="loss", **settings)):
                return vocab_parallel_logprobs(model(**inputs), labels).detach()

        logp = logits.detach().double().log_softmax(-1)
        on_target, everywhere = logp.gather(-1, labels[..., None])[..., 0], logp.sum(-1)
        expected = 0.9 * on_target + 0.1 / (VOCAB - 1) * (everywhere - on_target)
        for fused in ("require", False):
            assert relative(stats(label_smoothing=0.1, fused=fused), expected) < 1e-5
            with pytest.raises(ValueError, match="backend='triton' is unavailable"):
                stats(backend="triton", fused=fused)
        with pytest.raises(ValueError, match="backend='triton' is unavailable"):
            lazy(backend="triton")

        rounded = logits.detach().bfloat16().double().log_softmax(-1)
        rounded = rounded.gather(-1, labels[..., None])[..., 0]
        for low in (stats(logits_dtype=torch.bfloat16), lazy(logits_dtype=torch.bfloat16)):
            assert relative(low, rounded) < 1e-5 < relative(low, on_target)

        few = labels.clone()
        few[:, ::2] = -100
        with Flops() as every:
            stats(few)
        with Flops() as those_that_count:
            stats(few, compact=True)
        spared = 2 * int((few == -100).sum()) * config.hidden_size * VOCAB
        assert every.total - those_that_count.total == spared


def test_settings_reach_the_head(ranks):
    ranks(1).run(settings_that_reach_the_head)


def gradient_through_labels_none(tp: int) -> float:
    """A loss of the caller's own on the logits of a patched model."""
    with megatron(tp=tp) as parallel_state:
        model = mm.build_gpt_model(tiny_config(tp), vocab_size=VOCAB)
        batch = make_batch(parallel_state)

        def own_loss() -> dict[str, Tensor]:
            model.zero_grad(set_to_none=True)
            model(**batch["inputs"]).float().pow(2).mean().backward()
            return {n: p.grad.clone() for n, p in model.named_parameters()}

        expected = own_loss()
        with patch_gpt_model(model):
            return worst(own_loss(), expected)


def test_gradients_of_real_logits(ranks):
    assert ranks(2).run(gradient_through_labels_none, 2) == [0.0, 0.0]


def hooks_fire(tied: bool) -> None:
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=tied)
        batch = make_batch(parallel_state)
        seen: list[str] = []
        model.output_layer.register_forward_pre_hook(lambda m, args: seen.append("before"))
        model.output_layer.register_forward_hook(
            lambda m, args, out: seen.append(tuple(out[0].shape))
        )
        expected = model(**batch["inputs"], labels=batch["labels"])
        unpatched = list(seen)
        seen.clear()
        with patch_gpt_model(model):
            got = model(**batch["inputs"], labels=batch["labels"])
        assert seen == unpatched == ["before", (24, 2, VOCAB)]
        assert relative(got.loss, expected) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_output_layer_hooks_fire_once(ranks, tied):
    ranks(1).run(hooks_fire, tied)


def biased_head(settings: dict[str, Any]) -> float:
    """A head with a bias, which Megatron's own GPTModel never builds but wrappers do."""
    with megatron() as parallel_state:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        config = tiny_config(**settings)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=False)
        model.output_layer = ColumnParallelLinear(
            config.hidden_size, VOCAB, config=config, init_method=config.init_method, bias=True
        )
        torch.nn.init.normal_(model.output_layer.bias)
        batch = make_batch(parallel_state)
        expected, expected_grads = step(model, batch)
        with patch_gpt_model(model, LogprobConfig(fused="require")):
            got, grads = step(model, batch)
        assert "output_layer.bias" in grads
        return max(relative(got.loss, expected), worst(grads, expected_grads))


def test_head_with_a_bias(ranks):
    assert ranks(1).run(biased_head, {})[0] < 1e-5


def config_from_the_model() -> None:
    with megatron() as parallel_state:
        config = tiny_config()
        config.logprob_entropy = True
        config.logprob_temperature = 0.5
        model = mm.build_gpt_model(config, vocab_size=VOCAB)
        batch = make_batch(parallel_state)
        with patch_gpt_model(model):
            got = model(**batch["inputs"], labels=batch["labels"])
        logp = (model(**batch["inputs"]) / 0.5).log_softmax(-1)
        expected = logp.gather(-1, batch["labels"][..., None])[..., 0]
        assert got.entropy is not None
        assert relative(got.logprobs, expected) < 1e-5


def test_settings_from_the_transformer_config(ranks):
    ranks(1).run(config_from_the_model)


def never_materializes(mtp: bool) -> None:
    with megatron(tp=2) as parallel_state, pytest.MonkeyPatch.context() as patch:
        from megatron.core.tensor_parallel import layers

        extra = {"mtp_num_layers": 1} if mtp else {}
        config = tiny_config(sequence_parallel=True, **extra)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, mtp=mtp)
        batch = make_batch(parallel_state)
        product = layers.linear_with_grad_accumulation_and_async_allreduce
        head = model.shared_embedding_or_output_weight()
        calls: list[str] = []

        @functools.wraps(product)
        def counting(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if weight is head:
                calls.append("logits")
            return product(input, weight, *args, **kwargs)

        patch.setattr(layers, product.__name__, counting)
        with patch_gpt_model(model, LogprobConfig(entropy=True, target_rank=True)):
            step(model, batch)
            assert not calls
            model(**batch["inputs"], labels=None if not mtp else batch["labels"])
        assert calls == ([] if mtp else ["logits"])


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": VOCAB + 1}, "vocab_size: expected 1 to"),
    ({"invariant_segments": 7}, "invariant_segments: expected"),
    ({"disallowed_ids": (VOCAB,)}, "disallowed_ids: expected ids in"),
]
# Of tensors: whether every stage sees it.
IMPOSSIBLE_TENSORS: list[tuple[dict[str, Any], str, bool]] = [
    ({"temperature": torch.tensor(-1.0)}, "temperature: expected a finite number > 0", True),
    ({"temperature": torch.zeros(1, 1)}, "temperature: expected finite numbers > 0", True),
    ({"temperature": torch.ones(1, requires_grad=True)}, "requires a gradient", True),
    ({"logit_bias": torch.zeros(VOCAB).long()}, "logit_bias: expected .*floating-point", True),
    ({"logit_bias": torch.full((VOCAB,), torch.nan)}, "logit_bias: expected finite", True),
    ({"logit_bias": torch.zeros(5)}, "logit_bias: expected .*= .96.", False),
]


def impossible_settings(fused: Any, hooked: bool) -> None:
    """Refused where the head is not fused too: its stage alone would raise in the call."""
    with megatron(pp=2):
        (model,) = mm.build_gpt_chunks(tiny_config(num_layers=2), vocab_size=VOCAB)
        last = model.post_process
        if hooked and last:
            model.output_layer.register_forward_hook(lambda *_: None)

        def refused(message: str, wanted: bool) -> Any:
            return pytest.raises(ValueError, match=message) if wanted else nullcontext()

        for fields, message in IMPOSSIBLE:
            with (
                refused(message, last),
                patch_gpt_model(model, LogprobConfig(fused=fused, **fields)),
            ):
                pass
        with patch_gpt_model(model, LogprobConfig(fused=fused)) as handle:
            for fields, message in IMPOSSIBLE:
                with refused(message, last), handle.options(**fields):
                    pass
            for fields, message, everywhere in IMPOSSIBLE_TENSORS:
                with refused(message, everywhere or last), handle.options(**fields):
                    pass


@pytest.mark.parametrize(("fused", "hooked"), [(True, False), (False, False), (True, True)])
def test_settings_that_a_head_cannot_have(ranks, fused, hooked):
    ranks(2).run(impossible_settings, fused, hooked)


@pytest.mark.parametrize("mtp", [False, True])
def test_logits_are_never_computed(ranks, mtp):
    ranks(2).run(never_materializes, mtp)


def main_grad_fusion(tied: bool, mtp: bool) -> float:
    """gradient_accumulation_fusion of the head alone (the other layers' needs a CUDA extension)."""
    with megatron(tp=2) as parallel_state:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        extra = {"mtp_num_layers": 1} if mtp else {}
        config = tiny_config(sequence_parallel=True, **extra)
        model = mm.build_gpt_model(config, vocab_size=VOCAB, tied=tied, mtp=mtp)
        ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
        )
        batches = [make_batch(parallel_state, seed=seed) for seed in range(3)]

        def accumulate() -> dict[str, Tensor]:
            ddp.zero_grad_buffer()
            for batch in batches:
                output = ddp(**batch["inputs"], labels=batch["labels"])
                (loss_of(output) * batch["weights"]).sum().backward()
            finalize_model_grads([ddp])
            return {n: p.main_grad.clone() for n, p in model.named_parameters()}

        expected = accumulate()
        with patch_gpt_model(ddp, LogprobConfig(fused="require")):
            model.output_layer.gradient_accumulation_fusion = True
            return worst(accumulate(), expected)


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gradient_accumulation_fusion(ranks, tied, mtp):
    assert max(ranks(2).run(main_grad_fusion, tied, mtp)) < 1e-5
