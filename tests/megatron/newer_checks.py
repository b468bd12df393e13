"""Checks that need Megatron-Core 0.18 or later; `test_newer_megatron.py` runs them on one.

Not collected by its name: the version that pip installs on Python 3.11 has none of these hooks.
"""

from __future__ import annotations

import math
import sys
import typing
from typing import Any

import pytest
import torch

from mcore_logprobs.config import LogprobConfig, add_logprob_args
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.cpu_megatron.training import cpu_training
from mcore_logprobs.megatron import (
    has_output_processor,
    logprob_output_processor,
    megatron_features,
    patch_gpt_model,
)
from mcore_logprobs.ops.token_stats import TokenStats
from tests.dropin.frameworks import MAIN, source_root, versions
from tests.dropin.switching import fresh
from tests.megatron import test_hybrid as hybrid
from tests.megatron import test_lazy, test_mtp, test_patch
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
from tests.megatron.test_pipeline import furthest, train_step, weighted, wrapped_chunks


def build(parallel_state: Any, tp: int, sp: bool, tied: bool, **config: Any) -> Any:
    mtp = "mtp_num_layers" in config
    made = tiny_config(tp, sequence_parallel=sp, **config)
    return mm.build_gpt_model(made, vocab_size=VOCAB, tied=tied, mtp=mtp)


MUP = {"use_mup": True, "mup_output_mult": 0.25}


def through_the_hook(
    tp: int, sp: bool, tied: bool, settings: dict[str, Any], config: dict[str, Any]
) -> dict[str, float]:
    """GPTModel.forward(output_processor=...) against the unpatched model."""
    with megatron(tp=tp) as parallel_state:
        model = build(parallel_state, tp, sp, tied, **config)
        assert has_output_processor(type(model))
        batch = make_batch(parallel_state)
        hook = {
            "output_processor": logprob_output_processor,
            "output_processor_context": LogprobConfig(**settings),
        }
        expected, expected_grads = step(model, batch)
        got, grads = step(model, batch, **hook)
        assert isinstance(got, TokenStats) == (settings.get("output", "stats") == "stats")
        assert torch.equal(model(**batch["inputs"], **hook), model(**batch["inputs"]))
        with patch_gpt_model(model, hook["output_processor_context"]):
            patched, patched_grads = step(model, batch)
            both, both_grads = step(model, batch, **hook)
            assert torch.equal(loss_of(both), loss_of(patched))
            assert worst(both_grads, patched_grads) == 0.0
        return {
            "loss": relative(loss_of(got), expected),
            "grad": worst(grads, expected_grads),
            "patched loss": relative(loss_of(patched), expected),
            "patched grad": worst(patched_grads, expected_grads),
        }


LOSS, LOGITS, MTP = {"output": "loss"}, {"fused": False}, {"mtp_num_layers": 1}


@pytest.mark.parametrize(
    ("layout", "settings", "config"),  # every pair of them once
    [
        ((1, False, True), {}, {}),
        ((1, False, True), LOSS, MUP),
        ((1, False, True), LOGITS, MTP),
        ((2, True, True), {}, MTP),
        ((2, True, True), LOSS, {}),
        ((2, True, True), LOGITS, MUP),
        ((2, False, False), {}, MUP),
        ((2, False, False), LOSS, MTP),
        ((2, False, False), LOGITS, {}),
    ],
    ids=str,
)
def test_output_processor(ranks, layout, settings, config):
    for errors in ranks(layout[0]).run(through_the_hook, *layout, settings, config):
        assert max(errors.values()) < 1e-5


def settings_of_a_patch() -> None:
    """What the hook cannot honor is an error, and labels are checked as a patch does."""
    with megatron() as parallel_state:
        model, batch = build(parallel_state, 1, False, True, **MTP), make_batch(parallel_state)

        def call(labels: Any, **settings: Any) -> Any:
            return model(
                **batch["inputs"],
                labels=labels,
                output_processor=logprob_output_processor,
                output_processor_context=LogprobConfig(**settings),
            )

        for message, labels, settings in (
            ("mtp: expected 'keep'", batch["labels"], {"mtp": "off"}),
            ("logits: expected 'real'", None, {"logits": "lazy"}),
            ("labels: expected the token after", batch["inputs"]["input_ids"], {}),
        ):
            with pytest.raises(ValueError, match=message):
                call(labels, check_labels=True, **settings)
        call(batch["labels"], logits="lazy")
        layer = model.output_layer
        layer.output_dtype = torch.bfloat16
        with pytest.raises(ValueError, match="logits_dtype: expected float32 or the output"):
            call(batch["labels"], logits_dtype=torch.float16)
        del layer.output_dtype
        with patch_gpt_model(model, LogprobConfig(temperature=0.5)) as handle:
            call(batch["labels"])  # with the context's settings
            with handle.options(temperature=0.5):  # which changes nothing
                call(batch["labels"])
            for block in (
                handle.also(topk=3),
                handle.options(temperature=2.0),
                handle.options(temperature=torch.full((1, 1), 2.0)),
                handle.options(logit_bias=torch.ones(VOCAB)),
            ):
                with block, pytest.raises(ValueError, match="one that goes around the patch"):
                    call(batch["labels"])

            def around(*, hidden_states: Any, **given: Any) -> Any:
                return hidden_states.sum()

            with (
                handle.policy_loss(lambda logprobs, entropy: -logprobs),
                pytest.raises(ValueError, match="policy_loss: expected no output_processor"),
            ):
                model(**batch["inputs"], labels=batch["labels"], output_processor=around)


def test_settings_of_a_patch(ranks):
    ranks(1).run(settings_of_a_patch)


def another_processor(tp: int) -> None:
    """Somebody else's processor gets real logits; the main head's MTP losses stay fused."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    seen = []

    def processor(
        *, hidden_states: Any, output_layer: Any, output_weight: Any, labels: Any, **given: Any
    ) -> Any:
        logits = given["scale_logits"](output_layer(hidden_states, weight=output_weight)[0])
        seen.append(type(logits))
        if given["context"] == "callback":
            return given["compute_language_model_loss"](labels, logits)
        return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t()

    with megatron(tp=tp) as parallel_state:
        model = build(parallel_state, tp, tp > 1, True, **MTP)
        batch = make_batch(parallel_state)
        for how in ("by itself", "callback"):
            hook = {"output_processor": processor, "output_processor_context": how}
            expected, expected_grads = step(model, batch, **hook)
            for settings in ({"output": "loss"}, {"logits": "lazy"}, {"output": "stats"}):
                with patch_gpt_model(model, LogprobConfig(**settings)):
                    got, grads = step(model, batch, **hook)
                    assert relative(loss_of(got), expected) < 1e-5
                    assert worst(grads, expected_grads) < 1e-5
                with (
                    patch_gpt_model(model, LogprobConfig(**settings, fused="require")),
                    pytest.raises(ValueError, match="an output_processor takes the logits"),
                ):
                    step(model, batch, **hook)
        assert set(seen) == {torch.Tensor}


@pytest.mark.parametrize("tp", [1, 2])
def test_another_output_processor(ranks, tp):
    ranks(tp).run(another_processor, tp)


@pytest.mark.parametrize("tp", [1, 2])
def test_lazy_logits_with_multi_token_prediction(ranks, tp):
    """Whose losses and acceptance a call without labels computes from its input ids."""
    config = {"sequence_parallel": tp > 1, "mtp_num_layers": 2, **MUP}
    for errors in ranks(tp).run(test_lazy.compare, {"tp": tp}, config, {"mtp": True}):
        assert max(errors.values()) < 1e-4, errors


def test_a_scaled_head_with_a_bias(ranks):
    """Megatron scales the product with its bias."""
    assert ranks(1).run(test_patch.biased_head, MUP)[0] < 1e-5


def general_gemm(
    weight: torch.Tensor, x: torch.Tensor, *, out_dtype: torch.dtype, layout: str, bias: Any = None
) -> tuple[torch.Tensor]:
    """What the layer asks of Transformer Engine's kernel: one product, rounded once."""
    assert (layout, bias) == ("TN", None)
    return ((x.float() @ weight.float().t()).to(out_dtype),)


def in_another_dtype(tp: int, own: torch.dtype, logit_dtype: torch.dtype) -> dict[str, float]:
    """The output layer of main takes an output_dtype: values, gradients and MTP's acceptance."""
    from megatron.core.extensions import transformer_engine

    with megatron(tp=tp) as parallel_state, pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_engine, "te_general_gemm", general_gemm)
        config = tiny_config(tp, sequence_parallel=tp > 1, dtype=own, mtp_num_layers=1)
        model = mm.build_gpt_model(
            config, vocab_size=4096, mtp=True, tied=False, logit_dtype=logit_dtype
        )
        batch = make_batch(parallel_state, batch=8)
        found: list[torch.Tensor] = []

        def copied(_: Any, args: Any, out: Any) -> Any:
            found.append(out[0])
            return out[0].clone(), out[1]  # Megatron's loss overwrites it, which autograd refuses

        hook = model.output_layer.register_forward_hook(copied)
        model(**batch["inputs"], labels=batch["labels"], runtime_gather_output=True)
        ahead, main = found  # [s, b, V]: the multi-token head, which comes first, and the model's
        assert main.dtype == logit_dtype
        # What it predicts. In low precision the largest logits tie, and the first one wins.
        assert not torch.equal(ahead.bfloat16().argmax(-1), ahead.argmax(-1))
        batch["labels"][:, 1:] = ahead.argmax(-1)[:-1].t()
        results: dict[str, Any] = {}
        plain = test_mtp.logged_metrics(lambda: results.update(plain=step(model, batch)))
        hook.remove()
        with patch_gpt_model(model, LogprobConfig(fused="require")):
            ours = test_mtp.logged_metrics(lambda: results.update(ours=step(model, batch)))
        (expected, expected_grads), (got, grads) = results["plain"], results["ours"]
        hits = [name for name in plain if "correct" in name]
        assert min(plain[name].sum() for name in hits) > 100
        # Megatron rounds the logits' gradient to the weight's dtype before its products.
        rounding = torch.finfo(own).eps + torch.finfo(torch.float32).eps
        return {
            "loss": relative(loss_of(got), expected),
            "logged": worst(ours, plain),
            "grad": max(0.0, worst(grads, expected_grads) - 4.0 * rounding),
        }


def mtp_without_labels(tp: int) -> None:
    """0.19 trains MTP heads on rolled inputs where labels are None, and counts acceptances."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    with megatron(tp=tp) as parallel_state:
        model = build(parallel_state, tp, tp > 1, True, mtp_num_layers=2)
        for labels in (None, "given"):
            batch = make_batch(parallel_state)
            labels = batch["labels"] if labels else None

            def logged(labels: Any = labels, batch: Any = batch) -> tuple[Any, dict[str, Any]]:
                MTPLossLoggingHelper.tracker.clear()
                output = model(**batch["inputs"], labels=labels)
                tracker = MTPLossLoggingHelper.tracker
                return output, {k: v.clone() for k, v in tracker.items() if torch.is_tensor(v)}

            expected, expected_log = logged()
            with patch_gpt_model(model):
                got, log = logged()
            if labels is None:
                assert torch.equal(got, expected)
            assert log.keys() == expected_log.keys()
            assert expected_log
            for name in expected_log:
                assert relative(log[name], expected_log[name]) < 1e-5, name


def test_mtp_behind_gathered_logits(ranks):
    """Megatron counts accepted predictions from the logits that its loss has been given."""
    for errors in ranks(2).run(test_mtp.compare_gathered, {}):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("tp", [1, 2])
def test_mtp_acceptance_counts(ranks, tp):
    ranks(tp).run(mtp_without_labels, tp)


def saved_logits() -> None:
    """Of `--logits-save-dir`: which calls its hook takes for the main head's."""
    with cpu_training():
        from megatron.training.distillation.logits_saver import LogitsSaverHooks
    with megatron() as parallel_state, pytest.MonkeyPatch.context() as replaced:
        taken: list[torch.Tensor] = []
        replaced.setattr(
            LogitsSaverHooks, "_process_single_microbatch", lambda _, x: taken.append(x)
        )
        saver = LogitsSaverHooks.__new__(LogitsSaverHooks)  # its __init__ reads the command line
        saver._mtp_num_layers, saver._curr_mtp_passes = 1, 0
        saver._hook_handles, saver._loss_overrides, saver._accumulated_results = [], [], []
        module = sys.modules[LogitsSaverHooks.__module__]
        replaced.setattr(module, "get_num_microbatches", lambda: 1)
        model = build(parallel_state, 1, False, False, mtp_num_layers=1)
        batch = make_batch(parallel_state)
        call = {**batch["inputs"], "labels": batch["labels"]}
        saver.attach_hooks(model)
        model(**call)
        (expected,) = taken
        with patch_gpt_model(model, LogprobConfig(output="loss")) as handle:
            model(**call)
            assert torch.equal(taken[1], expected)
            with handle.options(mtp="off"):
                with pytest.raises(ValueError, match="mtp: expected 'keep', and in training"):
                    model(**call)
                model.eval()  # in which it takes nothing
                model(**call)
                assert len(taken) == 2


def test_calls_that_megatron_s_saver_of_logits_counts(ranks):
    ranks(1).run(saved_logits)


@pytest.mark.parametrize(
    ("layout", "packed"), [({}, False), ({"tp": 2}, False), ({"cp": 2}, False), ({"cp": 2}, True)]
)
def test_mtp_of_a_hybrid_model(ranks, layout, packed):
    for errors in ranks(hybrid.world_of(layout)).run(hybrid.multi_token, layout, packed=packed):
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize(
    ("layout", "pattern"),
    [({"pp": 2, "vp": 2}, "M|*-|M|*-"), ({"pp": 2}, "M*M-/*-")],
    ids=["interleaved", "mtp"],
)
def test_schedules_of_a_hybrid_model(ranks, layout, pattern):
    for errors in ranks(2).run(hybrid.schedule, layout, pattern):
        assert max(errors.values()) < 1e-5


def without_heads(layout: dict[str, int], tied: bool) -> float:
    """`mtp="off"` under DDP, whose overlapping reductions count every parameter's gradient."""
    with megatron(**layout) as parallel_state:
        pattern = "M*|M-/*-" if "pp" in layout else "M*M-/*-"
        config = hybrid.hybrid_config(layout, pattern)
        # Not of a tied head behind the first stage, where Megatron's own does not get this far.
        overlap = {"overlap_grad_reduce": not (tied and "pp" in layout)}
        chunks = hybrid.wrapped_chunks(config, pattern, tied=tied, **overlap)
        return test_mtp.trained_without_heads(parallel_state, config, chunks)


@pytest.mark.parametrize(("layout", "tied"), [({}, False), ({"pp": 2}, True)])
def test_mtp_of_a_hybrid_model_switched_off(ranks, layout, tied):
    assert max(ranks(hybrid.world_of(layout)).run(without_heads, layout, tied)) < 1e-5


def heads_before_the_last_stage(mtp: str, tied: bool) -> float:
    """`pipeline_model_parallel_layout` puts the MTP layers on a stage without the output layer."""
    with megatron(pp=2) as parallel_state:
        stages = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ettm|L"}
        config = tiny_config(num_layers=2, mtp_num_layers=1, **stages)
        chunks = wrapped_chunks(config, tied=tied, mtp=True)
        batches = [make_batch(parallel_state, seed=seed) for seed in range(2)]
        scale = config.mtp_loss_scaling_factor
        config.mtp_loss_scaling_factor = scale if mtp == "keep" else 0.0
        expected = train_step(config, chunks, batches, weighted)
        config.mtp_loss_scaling_factor = scale
        with patch_gpt_model(chunks, LogprobConfig(mtp=mtp, fused="require")):
            return furthest([train_step(config, chunks, batches, weighted)], expected)


@pytest.mark.parametrize(("mtp", "tied"), [("keep", False), ("off", True), ("off", False)])
def test_mtp_layers_on_an_earlier_stage(ranks, mtp, tied):
    assert max(ranks(2).run(heads_before_the_last_stage, mtp, tied)) < 1e-5


def test_doctor_names_the_hooks():
    found = megatron_features()
    assert tuple(int(n) for n in found["megatron-core"].split(".")[:2]) >= (0, 19)
    assert "forward(output_processor=)" in found["GPTModel"]
    assert "_scale_logits" in found["GPTModel"]
    assert "compute_language_model_loss" in found["HybridModel"]


def of_python_312(monkeypatch) -> None:
    """Megatron's training of 0.19 is written for it."""
    if sys.version_info < (3, 12):
        monkeypatch.setattr(typing, "override", lambda f: f, raising=False)


def test_settings_of_megatron_lm_s_yaml_file(monkeypatch, tmp_path):
    of_python_312(monkeypatch)
    from megatron.training.yaml_arguments import load_yaml

    file = tmp_path / "gpt.yaml"
    file.write_text(
        "seq_length: 8\nlogprob_temperature: 0.5\nlogprob_disallowed_ids: [7, 3]\n"
        "logprob_logit_bias: {5: 1.5, 2: -.inf}\nlogprob_logits_dtype: bfloat16\n"
    )
    monkeypatch.setattr(sys, "argv", ["train.py", "--yaml-cfg", str(file)])
    assert LogprobConfig.from_args(load_yaml(file)) == LogprobConfig(
        temperature=0.5,
        disallowed_ids=(3, 7),
        logit_bias=((2, -math.inf), (5, 1.5)),
        logits_dtype=torch.bfloat16,
    )


def test_megatron_lm_s_parser_takes_the_flags(monkeypatch):
    of_python_312(monkeypatch)
    from megatron.training.arguments import parse_args

    flags = "--num-layers 2 --logprob-entropy --logprob-fused require --logprob-ignore-index -1"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags.split()])
    found = LogprobConfig.from_args(parse_args(extra_args_provider=add_logprob_args))
    assert found == LogprobConfig(entropy=True, fused="require", ignore_index=-1)


@pytest.mark.parametrize(("distribution", "version"), versions("megatron-bridge"))
def test_megatron_bridge_s_pre_wrap_hook(distribution: str, version: str) -> None:
    """Bridge's own provider builds and wraps a real model; the hook has patched it."""
    source = source_root(distribution, version) / ("src" if version == MAIN else "")
    script = f"""
    import torch
    import mcore_logprobs as ml
    from mcore_logprobs.cpu_megatron import models as mm
    from mcore_logprobs.cpu_megatron.training import cpu_training
    from tests.megatron.common import VOCAB, make_batch, relative, tiny_config

    for name in ("megatron.bridge", "megatron.bridge.models", "megatron.bridge.training"):
        package(name, {str(source)!r} + "/" + name.replace(".", "/"))
    package("megatron.bridge.training.utils", {str(source)!r} + "/megatron/bridge/training/utils")
    vars(package("omegaconf")).update(OmegaConf=None, DictConfig=None)  # for configuration files
    with cpu_training():
        mm.init_model_parallel(tp=1)
        from megatron.bridge.models.model_provider import ModelProviderMixin
        from megatron.core import parallel_state

        class Provider(ModelProviderMixin):
            def __init__(self, config):
                vars(self).update(vars(config), config=config)

            def provide(self, pre_process=None, post_process=None, vp_stage=None):
                return mm.build_gpt_model(self.config, vocab_size=VOCAB)

            def finalize(self): ...

        def build(**settings):
            provider = Provider(tiny_config(dtype=torch.bfloat16))
            if settings:
                provider.register_pre_wrap_hook(ml.logprob_model_hook(ml.LogprobConfig(**settings)))
            torch.manual_seed(0)
            return provider.provide_distributed_model(
                wrap_with_ddp=False, use_cpu_initialization=True, bf16=True
            )[0]

        batch = make_batch(parallel_state)
        call = {{**batch["inputs"], "labels": batch["labels"]}}
        patched, plain = build(entropy=True, fused="require"), build()
        assert type(patched).__name__ == "Float16Module"
        patched.load_state_dict(plain.state_dict())
        stats = patched(**call)
        print(type(stats).__name__, stats.entropy.shape, relative(stats.loss, plain(**call)) < 1e-2)
    """
    assert "TokenStats torch.Size([2, 24]) True\n" in fresh(script)
