"""Which heads can be deferred: found at patch time, said once, refused under fused="require"."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)

from mcore_logprobs.config import LogprobConfig
from mcore_logprobs.cpu_megatron import models as mm
from mcore_logprobs.megatron import find_language_models, head_report, patch_gpt_model
from mcore_logprobs.megatron import heads as heads_module
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


class LoRAHead(nn.Module):
    """An adapter around the output layer, as PEFT libraries wrap it."""

    def __init__(self, inner: Any, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.input_size, rank, bias=False)
        self.up = nn.Linear(rank, inner.output_size_per_partition, bias=False)

    @property
    def weight(self) -> Any:
        return self.inner.weight

    def forward(self, x: Any, weight: Any = None, **kwargs: Any) -> Any:
        out, bias = self.inner(x, weight=weight, **kwargs)
        return out + self.up(self.down(x)), bias


def lora(model: Any) -> None:
    torch.manual_seed(3)
    model.output_layer = LoRAHead(model.output_layer)


def wrapped_forward(model: Any) -> None:
    layer, original = model.output_layer, model.output_layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs)


def subclass(model: Any) -> None:
    """A head that caps its own logits, as Gemma's does."""
    base = type(model.output_layer)

    class Capped(base):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, bias = super().forward(*args, **kwargs)
            return 3.0 * torch.tanh(out / 3.0), bias

    model.output_layer.__class__ = Capped


def gathered(model: Any) -> None:
    model.output_layer.gather_output = True


def skipped_bias(model: Any) -> None:
    layer = model.output_layer
    layer.bias = nn.Parameter(torch.zeros(layer.output_size_per_partition))
    layer.skip_bias_add = True


def backward_hook(model: Any) -> None:
    model.output_layer.register_full_backward_hook(lambda *args: None)


CASES = {
    "lora": (lora, "LoRAHead"),
    "wrapped": (wrapped_forward, "something else has replaced"),
    "subclass": (subclass, "Capped overrides"),
    "gathered": (gathered, "gather_output"),
    "skipped bias": (skipped_bias, "skip_bias_add"),
    "backward hook": (backward_hook, "backward hooks"),
}


def hooked_since() -> None:
    with megatron():
        model, config = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB), LogprobConfig()
        handle = patch_gpt_model(model, config)
        assert handle.reports == [(True, "")]
        model.output_layer.register_forward_hook(lambda module, args, output: None)
        (report,) = patch_gpt_model(model, config).reports
        assert "a forward hook" in report.reason


def test_a_second_patch_reports_the_head_as_it_is(ranks):
    ranks(1).run(hooked_since)


def refused_by_its_settings() -> list[str]:
    """What a stage says to settings that the head's stage alone refuses, and to others after it."""
    said = []
    with megatron(pp=2):
        model = mm.build_gpt_model(
            tiny_config(pipeline_dtype=torch.float32), vocab_size=VOCAB, tied=False
        )
        for settings in ({"vocab_size": 5000}, {}, {"entropy": True}):
            try:
                patch_gpt_model(model, LogprobConfig(**settings, fused="require"))
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said


def test_settings_that_a_stage_refuses_are_told_to_all(ranks):
    """Under fused="require" the other stages wait for what it reports."""
    first, last = ranks(2).run(refused_by_its_settings, timeout=30)
    assert last[0].startswith("vocab_size: expected 1 to 96")
    assert last[2].startswith("GPTModel is patched already: expected entropy=False")
    assert first == [f"fused='require', but {last[0]}", "", f"fused='require', but {last[2]}"]
    assert last[1] == ""


def fall_back(tp: int, case: str) -> dict[str, Any]:
    """Patched against Megatron's loss on the same odd head."""
    change, reason = CASES[case]
    with megatron(tp=tp) as parallel_state:
        model = mm.build_gpt_model(tiny_config(tp), vocab_size=VOCAB, tied=False)
        assert head_report(model) == (True, "")
        batch = make_batch(parallel_state)
        plain, plain_grads = step(model, batch)
        change(model)
        fusable, why = head_report(model)
        assert not fusable
        assert reason in why
        with pytest.raises(ValueError, match="fused='require'"):
            patch_gpt_model(model, LogprobConfig(fused="require"))
        assert "compute_language_model_loss" not in vars(model)

        # Megatron's own loss takes gathered logits for a shard, and overwrites logits that a
        # backward hook watches: there, what the head gave before the change is right.
        unchanged = case in ("gathered", "backward hook")
        expected, grads = (plain, plain_grads) if unchanged else step(model, batch)
        heads_module._said.clear()
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("mcore_logprobs").addHandler(handler)
        for _ in range(2):
            with patch_gpt_model(model, LogprobConfig(entropy=True)):
                got, got_grads = step(model, batch)
        logging.getLogger("mcore_logprobs").removeHandler(handler)
        return {
            "loss": relative(loss_of(got), expected),
            "grad": worst(got_grads, grads),
            "lines": lines,
        }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tp", [1, 2])
def test_takes_the_logits_path(ranks, tp, case):
    for rank, result in enumerate(ranks(tp).run(fall_back, tp, case)):
        assert result["loss"] < 1e-5
        assert result["grad"] < 1e-5
        assert len(result["lines"]) == (1 if rank == 0 else 0)
        assert all(CASES[case][1] in line for line in result["lines"])


def other_reasons() -> None:
    with megatron():
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=False)
        layer = model.output_layer
        layer.config.defer_embedding_wgrad_compute = True
        assert "deferred" in head_report(model).reason
        layer.config.defer_embedding_wgrad_compute = False
        layer.config.batch_invariant_mode = True
        assert "batch_invariant_mode" in head_report(model).reason
        assert head_report(model, LogprobConfig(invariant_segments=2)) == (True, "")
        layer.config.batch_invariant_mode = False
        flags = {
            "disable_grad_reduce": "disable_grad_reduce",
            "explicit_expert_comm": "expert layer",
        }
        for flag, words in flags.items():
            setattr(layer, flag, True)
            assert words in head_report(model).reason
            setattr(layer, flag, False)
        layer.gtp_remat_size = 2
        assert "gtp_remat" in head_report(model).reason
        del layer.gtp_remat_size
        for register, words in (
            (layer.register_full_backward_hook, "backward hooks on the output layer"),
            (layer.register_full_backward_pre_hook, "backward hooks on the output layer"),
            (register_module_full_backward_hook, "backward hooks on all modules"),
            (register_module_full_backward_pre_hook, "backward hooks on all modules"),
            (register_module_forward_hook, "may read or change the logits"),
        ):
            handle = register(lambda *_: None)
            assert words in head_report(model).reason
            handle.remove()
            assert head_report(model).reason == ""
        model._scale_logits = lambda logits: logits.tanh()
        assert "_scale_logits" in head_report(model).reason
        del model._scale_logits

        class Float8(nn.Parameter):
            """Stands in for a quantised weight class."""

        layer.weight = Float8(layer.weight.data)
        assert "Float8" in head_report(model).reason
        layer.weight = nn.Parameter(layer.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
        assert "float8" in head_report(model).reason


def replaced_on_the_class(method: str) -> None:
    """By a wrapper with the name and the module of what it wraps, before the patch and under it."""
    with megatron() as parallel_state, pytest.MonkeyPatch.context() as patch:
        from megatron.core.tensor_parallel import ColumnParallelLinear

        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=False)
        batch = make_batch(parallel_state)
        plain, _ = step(model, batch)
        original = getattr(ColumnParallelLinear, method)

        @functools.wraps(original)
        def halved(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(self, *args, **kwargs)
            if self is not model.output_layer:
                return found
            return (found[0] * 0.5, found[1]) if isinstance(found, tuple) else found * 0.5

        reason = f"something else has replaced ColumnParallelLinear.{method}"
        with patch_gpt_model(model, LogprobConfig(fused="require")):
            patch.setattr(ColumnParallelLinear, method, halved)
            with pytest.raises(ValueError, match=reason):
                step(model, batch)
        expected, expected_grads = step(model, batch)
        assert relative(expected, plain) > 1e-2
        assert reason in head_report(model).reason
        with pytest.raises(ValueError, match=reason):
            patch_gpt_model(model, LogprobConfig(fused="require"))
        with patch_gpt_model(model, LogprobConfig()):
            got, grads = step(model, batch)
        assert relative(loss_of(got), expected) < 1e-5
        assert worst(grads, expected_grads) < 1e-5


@pytest.mark.parametrize("method", ["forward", "_forward_impl"])
def test_a_method_that_is_replaced_on_megatrons_class(ranks, method):
    ranks(1).run(replaced_on_the_class, method)


def with_a_loss_of_its_own() -> None:
    """The output layer of Megatron's dev branch: its forward is the plain one unless asked."""
    with megatron() as parallel_state:
        from megatron.core.tensor_parallel import ColumnParallelLinear

        class LinearCrossEntropyModule(ColumnParallelLinear):
            def forward(
                self,
                input_: Any,
                weight: Any = None,
                runtime_gather_output: Any = None,
                output_cross_entropy_loss: bool = False,
                labels: Any = None,
            ) -> Any:
                assert not output_cross_entropy_loss
                return super().forward(input_, weight, runtime_gather_output)

        class Other(LinearCrossEntropyModule):
            pass

        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=False)
        batch = make_batch(parallel_state)
        expected, expected_grads = step(model, batch)
        model.output_layer.__class__ = LinearCrossEntropyModule
        model.fuse_linear_cross_entropy = True  # what dev's model looks at before it asks
        with patch_gpt_model(model, LogprobConfig(fused="require")):
            assert not model.fuse_linear_cross_entropy
            got, grads = step(model, batch)
            real = model.output_layer(torch.ones(3, 1, 32), output_cross_entropy_loss=False)
            assert real[0].shape == (3, 1, VOCAB)
        assert model.fuse_linear_cross_entropy
        assert relative(loss_of(got), expected) < 1e-5
        assert worst(grads, expected_grads) < 1e-5
        model.output_layer.__class__ = Other
        assert "Other overrides ColumnParallelLinear.forward" in head_report(model).reason


def test_an_output_layer_with_a_loss_of_its_own(ranks):
    ranks(1).run(with_a_loss_of_its_own)


def output_dtypes() -> None:
    """What the layer rounds its logits to. A release without the argument rounds nothing itself."""
    with megatron() as parallel_state:
        model = mm.build_gpt_model(tiny_config(), vocab_size=VOCAB, tied=False)
        batch = make_batch(parallel_state)
        layer, labels = model.output_layer, batch["labels"][..., None]
        logits = model(**batch["inputs"]).detach()
        layer.output_dtype = torch.float64
        assert "float64" in head_report(model).reason
        for dtype in (torch.bfloat16, torch.float32):
            layer.output_dtype = dtype
            logp = logits.to(dtype).double().log_softmax(-1).gather(-1, labels)[..., 0]
            with patch_gpt_model(model, LogprobConfig(fused="require")) as handle:
                stats, grads = step(model, batch)
                with handle.options(top_k=VOCAB - 1, top_p=1.0):
                    short = model(**batch["inputs"], labels=batch["labels"])
                with handle.map(lambda z: z):
                    z = model(**batch["inputs"], labels=batch["labels"])
            assert relative(stats.logprobs, logp) < 1e-6
            assert relative(short.lse, stats.lse) < 1e-6
            assert torch.equal(z, logits.to(dtype).float())
        _, expected = step(model, batch)
        assert worst(grads, expected) < 1e-5
        with pytest.raises(ValueError, match="logits_dtype: expected float32 or the output layer"):
            patch_gpt_model(model, LogprobConfig(logits_dtype=torch.bfloat16))
        with patch_gpt_model(model, LogprobConfig(fused=False, logits_dtype=torch.bfloat16)):
            step(model, batch)


@pytest.mark.own_sizes
def test_output_dtype(ranks):
    ranks(1).run(output_dtypes)


def test_other_reasons(ranks):
    ranks(1).run(other_reasons)


class VisionLanguageModel(nn.Module):
    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.vision = nn.Linear(2, 2)
        self.language_model = language_model

    def forward(self, **kwargs: Any) -> Any:
        return self.language_model(**kwargs)


def wrappers() -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    with megatron() as parallel_state:
        config = tiny_config(dtype=torch.bfloat16)
        model = mm.build_gpt_model(config, vocab_size=VOCAB)
        wrapped = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(),
            Float16Module(config, VisionLanguageModel(model)),
        )
        assert find_language_models(wrapped) == [model]
        assert find_language_models([wrapped]) == [model]
        batch = make_batch(parallel_state)
        with patch_gpt_model([wrapped]):
            stats = wrapped(**batch["inputs"], labels=batch["labels"])
            assert stats.logprobs.dtype == torch.float32  # a dataclass passes Float16Module
            assert stats.logprobs.shape == batch["labels"].shape
        with pytest.raises(ValueError, match="got Linear"):
            patch_gpt_model(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="expected a Megatron model"):
            patch_gpt_model("model")
        with pytest.raises(ValueError, match="2 language models"):
            patch_gpt_model(nn.ModuleDict({"policy": model, "teacher": VisionLanguageModel(model)}))


def test_finds_the_language_model(ranks):
    ranks(1).run(wrappers)


def hybrid_model() -> dict[str, float]:
    with megatron() as parallel_state:
        model = mm.build_hybrid_model(tiny_config(num_layers=4), vocab_size=VOCAB, pattern="*-*-")
        batch = make_batch(parallel_state)
        logits = model(**batch["inputs"])
        expected, expected_grads = step(model, batch)
        with patch_gpt_model(model, LogprobConfig(fused="require")):
            assert torch.equal(model(**batch["inputs"]), logits)
            got, grads = step(model, batch)
        return {"loss": relative(got.loss, expected), "grad": worst(grads, expected_grads)}


def test_mamba_or_hybrid_model(ranks):
    errors = ranks(1).run(hybrid_model)[0]
    assert max(errors.values()) < 1e-5
